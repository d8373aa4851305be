"""Text generation by an exported model on one device, with a key-value cache if the model supports one.

Prefill runs the prompt through the model and fills the cache. Each decoding step then feeds one token. With a
`DeviceMemory` budget, a memory plan moves weights and cache between device, DRAM and flash.
"""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from hyper_parallel.backends.torch.decode_slots import (
    FixedPasses,
    GrowingPasses,
    Passes,
    SlotSteps,
    slot_cache_refusal,
)
from hyper_parallel.backends.torch.forward_variants import loop_over_experts
from hyper_parallel.backends.torch.memory.generation import MemoryUse, PlannedSlots
from hyper_parallel.backends.torch.parallel_handle import attach_properties
from hyper_parallel.backends.torch.peft_adapters import ADAPTER_CONFIG, base_of
from hyper_parallel.backends.torch.rotary_lengths import reset_before_calls, rotate_by_document
from hyper_parallel.backends.torch.static_cache import why_no_static_cache
from hyper_parallel.backends.torch.weights.lora import merge_adapters
from hyper_parallel.backends.torch.weights.tensor_files import WeightFiles
from hyper_parallel.config import missing_run
from hyper_parallel.errors import (
    BadValue,
    Contradiction,
    DeviceUnavailable,
    HyperParallelError,
    ModelUnreadable,
    RunUnreadable,
    WeightsUnreadable,
)
from hyper_parallel.hub import fetch, parse_name
from hyper_parallel.model import ConfigFile, list_weight_files, read_config, read_generation_config
from hyper_parallel.owned_folder import unused_path
from hyper_parallel.trainer.checkpoints.adapter_files import ADAPTER_WEIGHTS, load_adapter
from hyper_parallel.trainer.checkpoints.pieces import check_dtype, dtype_name
from hyper_parallel.trainer.data import has_tokenizer, load_tokenizer
from hyper_parallel.trainer.data.prompt_media import PromptMedia
from hyper_parallel.trainer.decoding import (
    SLOTS,
    Decoder,
    DecodingSequence,
    Sampling,
    cache_length,
    make_decoder,
)
from hyper_parallel.trainer.engine.auto_model import (
    class_of_config,
    complete_outputs,
    model_from_config,
)
from hyper_parallel.trainer.engine.base_weights import check_base
from hyper_parallel.trainer.generation_memory import DeviceMemory
from hyper_parallel.trainer.model_properties import properties_of
from hyper_parallel.trainer.text_codec import (
    Generation,
    Prompt,
    PromptBatch,
    TextCodec,
    draws_of,
    stream_text,
    text_before_stop,
)

logger = logging.getLogger(__name__)

DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of the weights of a loaded model."""
TRUST: Final = {"--trust-remote-code": True}
"""Hint for a model or tokenizer whose code is not trusted."""
OTHER_TOKENIZER: Final = "fetch the tokenizer files again from where the model was published"
"""Hint for an exported model whose tokenizer cannot be used."""


def pick_device(device: str) -> torch.device:
    """Return the torch device named `device`; `auto` means the accelerator, or the CPU of a machine without one.

    Raises:
        BadValue: HP102 for a name that is not a device.
        DeviceUnavailable: HP502 when the machine does not have the device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device == "auto":
        return accelerator or torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BadValue(
            f"unknown device `{device}`",
            got=device,
            allowed=f"auto, cpu, {accelerator.type}" if accelerator else "auto, cpu",
            where="--device",
            changes={"--device": "auto"},
        ) from error
    present = accelerator is not None and accelerator.type == chosen.type
    if chosen.type != "cpu" and (not present or (chosen.index or 0) >= torch.accelerator.device_count()):
        raise DeviceUnavailable(
            f"this machine has no device `{device}`",
            got=device,
            allowed=f"auto, cpu, {accelerator.type}" if accelerator else "auto, cpu",
            changes={"--device": "auto"},
            where="--device",
        )
    return chosen


def find_export(directory: str | Path) -> Path:
    """Return the directory of an exported model or adapter: `directory/export` of a run, or `directory` itself.

    A hub id is downloaded first.

    Raises:
        RunUnreadable: HP603 when the directory contains no exported model, or no tokenizer.
        UnknownModel: HP304 when a hub id cannot be downloaded.
    """
    root = Path(directory).expanduser()
    if not root.exists() and (name := parse_name(str(directory))) is not None:
        root = fetch(name, "model", where="model to generate from")
    files = ("config.json", ADAPTER_CONFIG)
    export = next((d for d in (root / "export", root) if any((d / f).is_file() for f in files)), None)
    if export is None:
        allowed = "a directory written by `train`, with export/config.json, or a Hugging Face directory"
        command = "hyper-parallel train RECIPE.yaml checkpoint.export=true"
        raise missing_run(root, "exported model", allowed, command)
    if not has_tokenizer(export):
        raise RunUnreadable(
            "the exported model has no tokenizer",
            where=str(export),
            hint=f"cp TOKENIZER_DIR/tokenizer* {shlex.quote(str(export))}",
        )
    return export


def load(
    directory: str | Path, *, device: str = "auto", dtype: str | None = None, trusted: bool = False
) -> tuple[Any, Any]:
    """Load an exported model in evaluation mode; return model and tokenizer.

    Args:
        directory: Run directory, Hugging Face model directory or hub id.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        dtype: Dtype of the weights; None: as stored.
        trusted: Permission to run model code in the directory, for a model type unknown to transformers.

    Raises:
        RunUnreadable: HP603 when the directory has no exported model, or no tokenizer.
        UnknownModel: HP304 when a hub id cannot be downloaded.
        WeightsUnreadable: HP703 when the weight files cannot be read, or lack parameters.
        ModelUnreadable, NoData: HP305, HP602 when config files or tokenizer cannot be read.
        CheckpointMismatch: HP702 when an adapter was trained on other base weights.
        BadValue: HP102 for an unknown dtype or device.
        DeviceUnavailable: HP502 when the machine does not have the device.
    """
    from transformers.utils import logging

    export = find_export(directory)
    check_dtype(dtype, DTYPES)
    target_device = pick_device(device)
    tokenizer = load_tokenizer(export, trusted=trusted, other=OTHER_TOKENIZER, code=TRUST)
    logging.disable_progress_bar()  # it would overwrite the generated text
    base = base_of(export) if (export / ADAPTER_CONFIG).is_file() else str(export)
    model = _load_model(export, base, dtype, trusted=trusted)
    loop_over_experts(model, model.dtype)
    source = Path(base) if Path(base).is_dir() else None
    file = ConfigFile(json.loads(model.config.to_json_string(use_diff=False)), str(export), str(export), source)
    try:
        attach_properties(model, properties_of(file, trusted=trusted))
    except ModelUnreadable as error:  # only transformers can build the model
        logger.warning("the model's key-value cache is used without a test: %s", error.what)
    return model.to(target_device).eval(), tokenizer


def _load_model(export: Path, base: str, dtype: str | None, *, trusted: bool) -> Any:
    """Load the model in directory `export`; an adapter is merged into `base`, the directory or hub id of its model."""
    try:
        model, report = from_pretrained(base, getattr(torch, dtype) if dtype else "auto", trusted)
        if (export / ADAPTER_CONFIG).is_file():
            if Path(base).is_dir():
                check_base(export / ADAPTER_WEIGHTS, Path(base))
            load_adapter(model, export)
            merge_adapters(model)
        rotate_by_document(model)
        reset_before_calls(model)
    except HyperParallelError:
        raise
    except Exception as error:
        # transformers and safetensors raise many error classes here, including plain Exception.
        raise WeightsUnreadable(
            "the exported model cannot be loaded",
            where=str(export),
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            hint=TRUST if "trust_remote_code" in str(error) else _export_hint(export),
        ) from error
    if report["missing_keys"]:
        raise WeightsUnreadable(
            "the exported weights lack parameters of the model",
            where=str(export),
            got=sorted(report["missing_keys"])[:3],
            hint=_export_hint(export),
        )
    return model


def _export_hint(export: Path) -> str:
    if export.name != "export":
        return "fetch the files of the model again"
    words = ["hyper-parallel", "checkpoint", "export", str(export.parent), "--out", str(unused_path(export))]
    return shlex.join(words)


def decode_tokens(
    model: Any,
    prompt_ids: list[int],
    sampling: Sampling,
    stops: Collection[int] = (),
    passes: Passes | None = None,
) -> Iterator[int]:
    """Continue an encoded prompt; yield each new token id, except a final stop token.

    `stops` are the stop token ids. `passes` run the model; None: new `Passes` with an empty cache.
    """
    draws = draws_of(sampling, 0)
    sequence = DecodingSequence(0, [*prompt_ids], len(prompt_ids), sampling.max_new_tokens, draws)
    passes = passes or _passes_of_one(model, sequence)
    return _decode_sequence(passes, sequence, sampling, stops)


def _passes_of_one(model: Any, sequence: DecodingSequence) -> Passes:
    """Return the passes for a single sequence, with a cache of fixed shape if the model supports it.

    Otherwise, and for a prompt with media, the passes use the model's own growing cache, if it has one.
    """
    if (media := sequence.media) is not None:
        return GrowingPasses(model, media.arrays, media.per_token)
    if why_no_static_cache(model) is not None:
        return GrowingPasses(model)
    return FixedPasses(model, _fixed_steps([sequence]))


def _fixed_steps(sequences: Sequence[DecodingSequence]) -> SlotSteps:
    prompt_tokens = max(len(s.text) for s in sequences)
    return SlotSteps(len(sequences), prompt_tokens, cache_length(sequences))


def _decode_sequence(
    passes: Passes,
    sequence: DecodingSequence,
    sampling: Sampling,
    stops: Collection[int],
    ended: Callable[[DecodingSequence], bool] | None = None,
) -> Iterator[int]:
    decoder = Decoder(passes, sampling, stops, ended=ended)
    decoder.add([sequence])
    for running in decoder.run():
        if (token := running.text[-1]) not in stops:
            yield token


def decode(
    model: Any,
    sequences: Sequence[DecodingSequence],
    batch: PromptBatch,
    slots: int,
    interrupt: Callable[[], bool] | None,
) -> None:
    """Continue sequences of `batch` in place until all have ended or `interrupt` returns True.

    `slots` is the maximum number of concurrent sequences.
    """
    if reason := slot_cache_refusal(model):
        logger.warning(
            "decoding runs without a key-value cache and recomputes the prefix for every token: %s",
            reason,
        )
    decoder = make_decoder(model, sequences, batch.sampling, batch.stops, slots, ended=batch.ended, interrupt=interrupt)
    for _ in decoder.run():
        pass


class Generator:
    """Loaded model and tokenizer that continue prompts.

    `memory` is a budget of device memory; None: no limit. With a budget, weights are loaded into host memory, and a
    memory plan moves weights and cache to the device and back. On a CPU, a device with this budget is simulated. The
    other arguments are those of `load`.

    Attributes:
        memory_use: Predicted and measured memory of the last generation; None without a budget or before a generation.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        device: str = "auto",
        dtype: str | None = None,
        memory: DeviceMemory | None = None,
        trusted: bool = False,
    ) -> None:
        self.device = pick_device(device)
        place = "cpu" if memory is not None else device
        self.model, self.tokenizer = load(directory, device=place, dtype=dtype, trusted=trusted)
        self.memory = memory
        self.memory_use: MemoryUse | None = None

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Return the token ids of a prompt; see `TextCodec.encode`."""
        return self._codec.encode(prompt, chat=chat)

    @property
    def _codec(self) -> TextCodec:
        stops = self.model.generation_config.eos_token_id
        return TextCodec(self.tokenizer, self.model.config, stops)

    def stream(self, prompt: Prompt, sampling: Sampling | None = None, *, chat: bool = False) -> Iterator[str]:
        """Return an iterator over the generated text, in pieces; invalid input raises before the first piece.

        With `chat` the prompt is a user message, or a list of conversation turns, to which the model answers.

        Raises:
            BadValue: HP102 when prompt and continuation exceed the context of the model, or when turns need a chat
                template that the tokenizer lacks.
            Contradiction: HP104 for a prompt with images or audio and a budget of device memory.
            HyperParallelError: Errors of `TextCodec.begin`, and of `PlannedSlots` under a budget of device memory.
        """
        sampling = sampling or Sampling()
        _, tokens = self._start(prompt, sampling, chat)
        return text_before_stop(stream_text(self.tokenizer, tokens), sampling.stop)

    def generate(self, prompt: Prompt, sampling: Sampling | None = None, *, chat: bool = False) -> Generation:
        """Generate the continuation of a prompt; see `stream` for `chat` and the errors."""
        sampling, texts = sampling or Sampling(), self._codec
        start = time.perf_counter()
        sequence, stream = self._start(prompt, sampling, chat)
        for _ in stream:
            pass
        sequence.seconds = time.perf_counter() - start
        generation = texts.to_generation(sequence, prompt, sampling, texts.stop_token_ids(chat=chat))
        return replace(generation, memory=self.memory_use)

    def continue_tokens(self, prompt_ids: list[int], limit: int, media: PromptMedia | None = None) -> list[int]:
        """Return at most `limit` token ids of the greedy answer to an encoded chat prompt, without the stop token."""
        sampling, stops = Sampling(limit, temperature=0), self._codec.stop_token_ids(chat=True)
        sequence = DecodingSequence(0, [*prompt_ids], len(prompt_ids), limit, media=media)
        passes = _passes_of_one(self.model, sequence)
        return [*_decode_sequence(passes, sequence, sampling, stops)]

    def generate_batch(
        self,
        prompts: Sequence[str | Generation],
        sampling: Sampling | None = None,
        *,
        chat: bool = False,
        slots: int = SLOTS,
        interrupt: Callable[[], bool] | None = None,
    ) -> list[Generation]:
        """Continue many prompts with continuous batching; under a memory budget, `slots` prompts at a time.

        The random numbers of a sequence depend only on the seed and the index of its prompt. An interrupted
        `Generation` among the prompts continues as if it had not been interrupted. A `Generation` is returned unchanged
        if `Generation.has_ended`.

        Args:
            prompts: Texts, or results of an earlier call.
            sampling: Sampling parameters.
            chat: Whether each prompt is a user message to be answered.
            slots: Maximum number of concurrent sequences.
            interrupt: Function, called before each pass, that returns whether to stop and return the results so far.

        Returns:
            One `Generation` per prompt, in the order of the prompts.

        Raises:
            HyperParallelError: Errors of `PromptBatch`, and of `PlannedSlots` under a budget of device memory.
        """
        batch = PromptBatch(self._codec, prompts, sampling or Sampling(), chat=chat)
        sequences = [*batch.sequences.values()]
        if self.memory is None:
            decode(self.model, sequences, batch, slots, interrupt)
            return batch.generations()
        self.memory_use = MemoryUse(simulated=self.device.type == "cpu")
        for first in range(0, len(sequences), slots):
            if interrupt is not None and interrupt():
                break
            part = sequences[first : first + slots]
            passes = self._planned_passes(part)
            decoder = Decoder(passes, batch.sampling, batch.stops, ended=batch.ended, interrupt=interrupt)
            decoder.add(part)
            try:
                for _ in decoder.run():
                    pass
            finally:
                passes.close()
                self.memory_use.add(passes.use)
        return [replace(generation, memory=self.memory_use) for generation in batch.generations()]

    def _planned_passes(self, sequences: Sequence[DecodingSequence]) -> PlannedSlots:
        assert self.memory is not None
        limits = self.memory.limits(dtype_name(self.model.dtype))
        return PlannedSlots(self.model, _fixed_steps(sequences), limits, self.device)

    def _start(self, prompt: Prompt, sampling: Sampling, chat: bool) -> tuple[DecodingSequence, Iterator[int]]:
        texts = self._codec
        sequence = texts.begin(prompt, 0, sampling, chat=chat)
        stops, ended = texts.stop_token_ids(chat=chat), texts.ended(sampling)
        if self.memory is None:
            passes = _passes_of_one(self.model, sequence)
            return sequence, _decode_sequence(passes, sequence, sampling, stops, ended)
        if sequence.media is not None:
            raise Contradiction(
                "--device-memory does not support prompts with images or audio",
                where="--device-memory",
                got=sorted(sequence.media.arrays),
                hint="leave out --device-memory",
            )
        within_budget = self._planned_passes([sequence])
        self.memory_use = within_budget.use

        def planned() -> Iterator[int]:
            try:
                yield from _decode_sequence(within_budget, sequence, sampling, stops, ended)
            finally:
                within_budget.close()

        return sequence, planned()


def from_pretrained(base: str, dtype: torch.dtype | str, trusted: bool) -> tuple[Any, Any]:
    """Load a model from a directory or a downloaded hub repository; return the model and its `output_loading_info`.

    Weight files that are split without an index are read here, because transformers does not find them.
    """
    from transformers import GenerationConfig

    report: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    directory = Path(base)
    has_generation_config = read_generation_config(directory) is not None
    listing = list_weight_files(directory)
    if listing.index is not None or len(listing.files) < 2:
        model, info = _auto_class(base).from_pretrained(
            base, local_files_only=True, trust_remote_code=trusted, **report
        )
    else:
        empty: Any = model_from_config(read_config(base), torch.float32, trusted=trusted)
        report["config"] = empty.config
        report["state_dict"] = {n: t.slices for n, t in WeightFiles(directory).tensors.items()}
        model, info = type(empty).from_pretrained(None, **report)
        if has_generation_config:
            model.generation_config = GenerationConfig.from_pretrained(directory)
    complete_outputs(model)
    return model, info


def _auto_class(base: str) -> Any:
    from transformers import AutoModelForCausalLM

    if not (Path(base) / "config.json").is_file():  # a name of the Hub
        return AutoModelForCausalLM
    file = read_config(base)
    with suppress(HyperParallelError):  # only transformers or custom code can build the model
        return class_of_config(file)
    return AutoModelForCausalLM

"""Generation: a prompt continued by an exported model, one token a step, with a KV cache.

The prompt passes through the model once (prefill) and leaves keys and values in the cache; each further step feeds one
token. Greedy decoding gives the tokens of full recomputation. One device; with a `DeviceMemory`, in less memory.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.backends.torch.decode_slots import OneSlot, SlotSteps, why_no_slots
from hyper_parallel.backends.torch.forward_state import reset_before_calls
from hyper_parallel.backends.torch.forward_variants import loop_over_experts
from hyper_parallel.backends.torch.memory.generation import (
    MemoryUse,
    PlannedGeneration,
    PlannedSlots,
)
from hyper_parallel.backends.torch.parallel_handle import attach_properties
from hyper_parallel.backends.torch.peft_adapters import ADAPTER_CONFIG, base_of
from hyper_parallel.backends.torch.rotary_lengths import rotate_by_document
from hyper_parallel.backends.torch.static_cache import (
    GrowingSteps,
    StaticSteps,
    why_no_static_cache,
)
from hyper_parallel.backends.torch.weights.lora import merge_adapters
from hyper_parallel.config import run_hint
from hyper_parallel.errors import (
    BadValue,
    HyperParallelError,
    ModelUnreadable,
    RunUnreadable,
    WeightsUnreadable,
)
from hyper_parallel.hub import fetch, parse_name
from hyper_parallel.model import ConfigFile
from hyper_parallel.trainer._pick_device import pick_device
from hyper_parallel.trainer.checkpoints.adapter_files import ADAPTER_WEIGHTS, load_adapter
from hyper_parallel.trainer.data import has_tokenizer, load_tokenizer
from hyper_parallel.trainer.decoding import (
    SLOTS,
    Decoder,
    Running,
    Sampling,
    decoder_of,
)
from hyper_parallel.trainer.engine.base_weights import check_base
from hyper_parallel.trainer.exported_model import from_pretrained
from hyper_parallel.trainer.generation_memory import DeviceMemory
from hyper_parallel.trainer.model_properties import properties_of
from hyper_parallel.trainer.text_codec import (
    Generation,
    Prompt,
    PromptBatch,
    Texts,
    draws_of,
    stream_text,
    until,
)

logger = logging.getLogger(__name__)


def find_export(directory: str | Path) -> Path:
    """The Hugging Face directory to generate from: `RUN_DIR/export`, or the directory itself; it may hold an adapter.

    Raises:
        RunUnreadable: HP603 when there is no exported model or no tokenizer beside it.
    """
    root = Path(directory).expanduser()
    if not root.exists() and (name := parse_name(str(directory))) is not None:
        root = fetch(name, "model", where="model to generate from")
    files = ("config.json", ADAPTER_CONFIG)
    export = next(
        (d for d in (root / "export", root) if any((d / f).is_file() for f in files)), None
    )
    if export is None:
        what = "this is a file, not the directory of a run"
        if not root.is_file():
            is_there = root.is_dir()
            what = "there is no exported model" if is_there else "the run directory does not exist"
        raise RunUnreadable(
            what,
            where=str(root),
            allowed="a directory written by `train`, with export/config.json, or a Hugging Face directory",
            hint=run_hint(root) or "hyper-parallel train RECIPE.yaml checkpoint.export=true",
        )
    if not has_tokenizer(export):
        raise RunUnreadable("the exported model has no tokenizer", where=str(export))
    return export


def load(
    directory: str | Path,
    *,
    device: str = "auto",
    dtype: str | None = None,
    trusted: bool = False,
) -> tuple[Any, Any]:
    """Model in evaluation mode and tokenizer of a run or a Hugging Face directory.

    Args:
        directory: RUN_DIR or Hugging Face directory.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        dtype: Format of the weights; None: the one they are stored in.
        trusted: Run code that lies in the directory, for a model that transformers has not.

    Raises:
        RunUnreadable: HP603 when nothing was exported there.
        WeightsUnreadable: HP703 when the weight files cannot be read.
        CheckpointMismatch: HP702 when the weights beside an adapter are not those it was trained on.
        BadValue: HP102 when the dtype does not exist.
        DeviceUnavailable: HP502 when the machine lacks the device.
    """
    from transformers.utils import logging

    export = find_export(directory)
    check_dtype(dtype)
    where = pick_device(device)
    tokenizer = load_tokenizer(export, trusted=trusted)
    logging.disable_progress_bar()  # it would run through the generated text
    adapter, base = export / ADAPTER_CONFIG, str(export)
    if adapter.is_file():
        base = base_of(export)
    try:
        model, info = from_pretrained(base, getattr(torch, dtype) if dtype else "auto", trusted)
        if adapter.is_file():
            if Path(base).is_dir():
                check_base(export / ADAPTER_WEIGHTS, Path(base))
            load_adapter(model, export)
            merge_adapters(model)
        rotate_by_document(model)
        reset_before_calls(model)
    except HyperParallelError:
        raise
    except Exception as error:
        # transformers and safetensors raise many classes here, plain Exception among them.
        raise WeightsUnreadable(
            "the exported model cannot be loaded",
            where=str(export),
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
            hint="--trust-remote-code" if "trust_remote_code" in str(error) else None,
        ) from error
    if info["missing_keys"]:
        raise WeightsUnreadable(
            "the exported weights lack parameters of the model",
            where=str(export),
            got=sorted(info["missing_keys"])[:3],
        )
    loop_over_experts(model, model.dtype)
    source = Path(base) if Path(base).is_dir() else None
    file = ConfigFile(
        json.loads(model.config.to_json_string(use_diff=False)), str(export), str(export), source
    )
    try:
        attach_properties(model, properties_of(file, trusted=trusted))
    except ModelUnreadable as error:  # only transformers can make its class
        logger.warning("not measured, so decoding trusts the model's own cache: %s", error.what)
    return model.to(where).eval(), tokenizer


def check_dtype(dtype: str | None) -> None:
    """Raise when a name is not a format of weights; None is as they are stored."""
    kinds = ("float64", "float32", "bfloat16", "float16")
    if dtype is not None and dtype not in kinds:
        raise BadValue("not a format of weights", got=dtype, allowed=kinds)


def decode_tokens(
    model: Any,
    prompt_ids: list[int],
    sampling: Sampling,
    stops: Collection[int] = (),
    steps: Any = None,
) -> Iterator[int]:
    """Yield new tokens one by one, up to the limit or to one of `stops`, which is not yielded."""
    draws = draws_of(sampling, 0)
    sequence = Running(0, [*prompt_ids], len(prompt_ids), sampling.max_new_tokens, draws)
    return _decoded(model, sequence, sampling, stops, steps=steps)


def _decoded(
    model: Any,
    sequence: Running,
    sampling: Sampling,
    stops: Collection[int],
    ended: Callable[[Running], bool] | None = None,
    steps: Any = None,
) -> Iterator[int]:
    """Continue one sequence by steps of fixed shape, the same as under a device budget, where the model allows them."""
    if steps is None:
        # The last token is not fed back, so the cache needs no slot for it.
        length = sequence.start + sequence.limit - 1
        grows = why_no_static_cache(model) is not None
        steps = GrowingSteps(model) if grows else StaticSteps(model, length)
    decoder = Decoder(OneSlot(model, steps), sampling, stops, ended=ended)
    decoder.add([sequence])
    for running in decoder.run():
        if (token := running.text[-1]) not in stops:
            yield token


def decode(
    model: Any,
    sequences: Sequence[Running],
    batch: PromptBatch,
    slots: int,
    interrupt: Callable[[], bool] | None,
) -> None:
    """Continue sequences of a batch in place, to their ends or to an interrupt."""
    if why := why_no_slots(model):
        logger.warning("every token reads its whole text again: no cache in slots, %s", why)
    chosen = (batch.sampling, batch.stops, slots)
    decoder = decoder_of(model, sequences, *chosen, ended=batch.ended, interrupt=interrupt)
    for _ in decoder.run():
        pass


class Generator:
    """A loaded model that continues prompts.

    Args:
        directory: RUN_DIR or Hugging Face directory.
        device: `auto`, `cpu`, `cuda`, ...
        dtype: Format of the weights; None: as stored.
        memory: A budget of device memory; weights and cache then live where its plans put them. The model itself is
            loaded into host memory; on a CPU the device with the budget is simulated.
        trusted: As in `load`.
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
        """As `Texts.encode`."""
        return self._texts.encode(prompt, chat=chat)

    @property
    def _texts(self) -> Texts:
        stops = self.model.generation_config.eos_token_id
        return Texts(self.tokenizer, self.model.config, stops)

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, chat: bool = False
    ) -> Iterator[str]:
        """The continuation of a prompt, piece by piece; wrong input is refused before the first piece.

        With `chat` a prompt is a user's turn, or a list of turns that the answer follows.

        Raises:
            BadValue: HP102 when prompt and continuation exceed the context of the model.
        """
        sampling = sampling or Sampling()
        _, tokens = self._start(prompt, sampling, chat)
        return until(stream_text(self.tokenizer, tokens), sampling.stop)

    def generate(
        self, prompt: str, sampling: Sampling | None = None, *, chat: bool = False
    ) -> Generation:
        """Continue a prompt to its end.

        Raises:
            BadValue: HP102 when prompt and continuation exceed the context of the model.
        """
        sampling, texts = sampling or Sampling(), self._texts
        start = time.perf_counter()
        sequence, stream = self._start(prompt, sampling, chat)
        for _ in stream:
            pass
        sequence.seconds = time.perf_counter() - start
        made = texts.made(sequence, prompt, sampling, texts.stops(chat=chat))
        return replace(made, memory=self.memory_use)

    def generate_batch(
        self,
        prompts: Sequence[str | Generation],
        sampling: Sampling | None = None,
        *,
        chat: bool = False,
        slots: int = SLOTS,
        interrupt: Callable[[], bool] | None = None,
    ) -> list[Generation]:
        """Continue many prompts at once, in a cache of keys and values for `slots` sequences.

        What a sequence draws is a function of the seed and its number alone. A `Generation` among the prompts goes on
        from its tokens, under its own number, as it would have; a finished one is returned as it is.

        Args:
            prompts: Texts, numbered from 0, or generations that were interrupted.
            sampling: How tokens are chosen.
            chat: Prompts are users' turns.
            slots: Sequences at a time.
            interrupt: Asked before each pass whether to return what there is.

        Raises:
            BadValue: HP102 when a prompt and its continuation exceed the context of the model.
            HyperParallelError: As of `PlannedSlots`, with a budget of device memory. Then `slots` prompts are continued
                to their ends before the next ones begin.
        """
        batch = PromptBatch(self._texts, prompts, sampling or Sampling(), chat=chat)
        sequences = [*batch.sequences.values()]
        if self.memory is None:
            decode(self.model, sequences, batch, slots, interrupt)
            return batch.generations()
        self.memory_use = MemoryUse(simulated=self.device.type == "cpu")
        for first in range(0, len(sequences), slots):
            if interrupt is not None and interrupt():
                break
            self._continue(sequences[first : first + slots], batch, interrupt)
        return [replace(made, memory=self.memory_use) for made in batch.generations()]

    def _continue(
        self, sequences: list[Running], batch: PromptBatch, interrupt: Callable[[], bool] | None
    ) -> None:
        """Continue some sequences in place within the budget."""
        assert self.memory is not None
        assert self.memory_use is not None
        limits = self.memory.limits(str(self.model.dtype).removeprefix("torch."))
        length = max(s.start + s.limit - 1 for s in sequences)
        fixed = SlotSteps(len(sequences), max(len(s.text) for s in sequences), length)
        passes = PlannedSlots(self.model, fixed, limits, self.device)
        decoder = Decoder(
            passes, batch.sampling, batch.stops, ended=batch.ended, interrupt=interrupt
        )
        decoder.add(sequences)
        try:
            for _ in decoder.run():
                pass
        finally:
            passes.close()
            self.memory_use.add(passes.use)

    def _start(
        self, prompt: Prompt, sampling: Sampling, chat: bool
    ) -> tuple[Running, Iterator[int]]:
        texts, model = self._texts, self.model
        sequence = texts.begin(prompt, 0, sampling, chat=chat)
        stops, ended = texts.stops(chat=chat), texts.ended(sampling)
        if self.memory is None:
            return sequence, _decoded(model, sequence, sampling, stops, ended)
        length = sequence.start + sequence.limit - 1
        limits = self.memory.limits(str(model.dtype).removeprefix("torch."))
        steps = PlannedGeneration(model, sequence.start, length, limits, self.device)
        self.memory_use = steps.use

        def planned() -> Iterator[int]:
            try:
                yield from _decoded(model, sequence, sampling, stops, ended, steps)
            finally:
                steps.close()

        return sequence, planned()

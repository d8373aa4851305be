"""Generation: a prompt continued by an exported model, one token a step, with a KV cache.

The prompt passes through the model once (prefill) and leaves keys and values in the cache; each further step feeds one
token. Greedy decoding gives the tokens of full recomputation. One device; with a `DeviceMemory`, in less memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from hyper_parallel.backends.torch._forward import loop_over_experts
from hyper_parallel.backends.torch._peft import ADAPTER_CONFIG, base_of
from hyper_parallel.backends.torch._static_cache import (
    GrowingSteps,
    StaticSteps,
    why_no_static_cache,
)
from hyper_parallel.backends.torch.memory.generation import MemoryUse, PlannedGeneration
from hyper_parallel.backends.torch.weights._lora import merge_adapters
from hyper_parallel.errors import BadValue, HyperParallelError, RunUnreadable, WeightsUnreadable
from hyper_parallel.trainer._generate_memory import DeviceMemory
from hyper_parallel.trainer._pick_device import pick_device
from hyper_parallel.trainer.checkpoints._adapter import take_adapter
from hyper_parallel.trainer.data import has_tokenizer, load_tokenizer, render, stop_ids

_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: Limit of the continuation.
        temperature: 0: the most likely token; else logits are divided by it and a token is drawn.
        top_p: Draw from the smallest set of tokens whose probability reaches this (Holtzman et al. 2020).
        seed: Of the draws; the same seed gives the same text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, allowed in (
            ("max_new_tokens", self.max_new_tokens >= 1, "1 or more"),
            ("temperature", 0 <= self.temperature < math.inf, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
        ):
            if not good:
                got = getattr(self, name)
                raise BadValue(f"{name} is out of range", got=got, allowed=allowed)


@dataclass(frozen=True)
class Generation:
    """A finished continuation.

    Attributes:
        prompt: The prompt as given.
        text: The continuation.
        token_ids: Its tokens, without the one that stopped it.
        num_prompt_tokens: Tokens of the prompt.
        stopped: Whether a stop token ended it, not the limit.
        seconds: Wall time of prefill and decoding.
        memory: What was predicted and measured under a device budget; None without one.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    stopped: bool
    seconds: float
    memory: MemoryUse | None = None


def find_export(directory: str | Path) -> Path:
    """The Hugging Face directory to generate from: `RUN_DIR/export`, or the directory itself; it may hold an adapter.

    Raises:
        RunUnreadable: HP603 when there is no exported model or no tokenizer beside it.
    """
    root = Path(directory).expanduser()
    files = ("config.json", ADAPTER_CONFIG)
    export = next(
        (d for d in (root / "export", root) if any((d / f).is_file() for f in files)), None
    )
    if export is None:
        raise RunUnreadable(
            "there is no exported model" if root.is_dir() else "the run directory does not exist",
            where=str(root),
            allowed="a directory written by `train`, with export/config.json, or a Hugging Face directory",
            hint="hyper-parallel train RECIPE.yaml checkpoint.export=true",
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
        BadValue: HP102 when the dtype does not exist.
        DeviceUnavailable: HP502 when the machine lacks the device.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    export = find_export(directory)
    kinds = ("float64", "float32", "bfloat16", "float16")
    if dtype is not None and dtype not in kinds:
        raise BadValue("not a format of weights", got=dtype, allowed=kinds)
    where = pick_device(device)
    tokenizer = load_tokenizer(export, trusted=trusted)
    logging.disable_progress_bar()  # it would run through the generated text
    adapter, base = export / ADAPTER_CONFIG, str(export)
    if adapter.is_file():
        base = base_of(export)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            base,
            dtype=getattr(torch, dtype) if dtype else "auto",
            local_files_only=True,
            trust_remote_code=trusted,
            output_loading_info=True,
        )
        if adapter.is_file():
            take_adapter(model, export)
            merge_adapters(model)
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
    return model.to(where).eval(), tokenizer


class Steps(Protocol):
    """The two steps of generation, however they run."""

    def prompt(self, ids: list[int]) -> torch.Tensor:
        """Logits [V] after the prompt."""

    def next(self, token: int) -> torch.Tensor:
        """Logits [V] after one more token."""


def steps_of(model: Any, length: int) -> Steps:
    """Steps of fixed shape, the same that run under a device budget, where the model allows them.

    Args:
        model: A Hugging Face causal language model.
        length: Tokens of prompt and continuation.
    """
    return GrowingSteps(model) if why_no_static_cache(model) else StaticSteps(model, length)


def decode_tokens(
    model: Any,
    prompt_ids: list[int],
    sampling: Sampling,
    stops: Collection[int] = (),
    steps: Steps | None = None,
) -> Iterator[int]:
    """Yield new tokens one by one, up to the limit or to one of `stops`, which is not yielded.

    Args:
        model: A Hugging Face causal language model.
        prompt_ids: Tokens of the prompt, at least one.
        sampling: How tokens are chosen.
        stops: Tokens that end the text.
        steps: What computes the logits; None: the model as it is.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    # The last token is not fed back, so the cache needs no slot for it.
    steps = steps or steps_of(model, len(prompt_ids) + sampling.max_new_tokens - 1)
    logits = steps.prompt(prompt_ids)
    for count in range(1, sampling.max_new_tokens + 1):
        token = choose(logits, sampling, generator)
        if token in stops:
            return
        yield token
        if count < sampling.max_new_tokens:
            logits = steps.next(token)


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """One token of logits [V]; drawn on the CPU in float64, so that a seed means the same on every device."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits.double().cpu() / sampling.temperature, dim=-1)
    ranked, order = probabilities.sort(descending=True, stable=True)
    # A token stays when the more likely ones have not reached top_p yet; the first always stays.
    ranked[ranked.cumsum(0) - ranked >= sampling.top_p] = 0
    drawn = torch.multinomial(ranked, 1, generator=generator)
    return int(order[drawn])


def stream_text(tokenizer: Any, tokens: Iterable[int]) -> Iterator[str]:
    """Text of tokens as it becomes certain: the bytes of one character may span several tokens."""
    pending: list[int] = []
    context: list[int] = []
    for token in tokens:
        pending.append(token)
        # Decoding with the tokens before keeps the spaces that a tokenizer drops at the beginning of a text.
        before = tokenizer.decode(context)
        text = tokenizer.decode(context + pending)[len(before) :]
        if text and not text.endswith(_REPLACEMENT):
            yield text
            context, pending = pending, []
    if pending:
        yield tokenizer.decode(context + pending)[len(tokenizer.decode(context)) :]


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
        """Tokens of a prompt; with `chat`, wrapped as a user's turn. An empty prompt is a document's beginning.

        Raises:
            BadValue: HP102 when the tokenizer has no chat template.
        """
        if chat:
            if not self.tokenizer.chat_template:
                raise BadValue(
                    "the tokenizer has no chat template",
                    where=self.tokenizer.name_or_path,
                    got="--chat",
                    hint="leave out --chat",
                )
            text = render(self.tokenizer, [{"role": "user", "content": prompt}], prompt=True)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ids = list(self.tokenizer(prompt)["input_ids"])
        return ids or [self.tokenizer.eos_token_id]

    def stream(
        self, prompt: str, sampling: Sampling | None = None, *, chat: bool = False
    ) -> Iterator[str]:
        """The continuation of a prompt, piece by piece; wrong input is refused before the first piece.

        Raises:
            BadValue: HP102 when prompt and continuation exceed the context of the model.
        """
        _, tokens = self._start(prompt, sampling or Sampling(), chat)
        return stream_text(self.tokenizer, tokens)

    def generate(
        self, prompt: str, sampling: Sampling | None = None, *, chat: bool = False
    ) -> Generation:
        """Continue a prompt to its end.

        Raises:
            BadValue: HP102 when prompt and continuation exceed the context of the model.
        """
        sampling = sampling or Sampling()
        start = time.perf_counter()
        prompt_ids, stream = self._start(prompt, sampling, chat)
        tokens = tuple(stream)
        return Generation(
            prompt=prompt,
            text="".join(stream_text(self.tokenizer, tokens)),
            token_ids=tokens,
            num_prompt_tokens=len(prompt_ids),
            stopped=len(tokens) < sampling.max_new_tokens,
            seconds=time.perf_counter() - start,
            memory=self.memory_use,
        )

    def _start(
        self, prompt: str, sampling: Sampling, chat: bool
    ) -> tuple[list[int], Iterator[int]]:
        prompt_ids = self.encode(prompt, chat=chat)
        context = getattr(self.model.config, "max_position_embeddings", None)
        room = math.inf if context is None else context - len(prompt_ids)
        if sampling.max_new_tokens > room:
            raise BadValue(
                "prompt and continuation are longer than the context of the model",
                got=f"{len(prompt_ids)} + {sampling.max_new_tokens} tokens",
                allowed=f"{context} tokens in all",
                hint=f"--max-new-tokens {room}" if room > 0 else "a shorter prompt",
            )
        stops = self._stops(chat)
        if self.memory is None:
            return prompt_ids, decode_tokens(self.model, prompt_ids, sampling, stops)
        length = len(prompt_ids) + sampling.max_new_tokens - 1
        limits = self.memory.limits(str(self.model.dtype).removeprefix("torch."))
        steps = PlannedGeneration(self.model, len(prompt_ids), length, limits, self.device)
        self.memory_use = steps.use

        def planned() -> Iterator[int]:
            try:
                yield from decode_tokens(self.model, prompt_ids, sampling, stops, steps)
            finally:
                steps.close()

        return prompt_ids, planned()

    def _stops(self, chat: bool) -> set[int]:
        """Tokens that end a text: the tokenizer's, the model's own list, in a chat the template's."""
        own = self.model.generation_config.eos_token_id
        stops = {self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])}
        return (stops | stop_ids(self.tokenizer) if chat else stops) - {None}


def generate(
    model_dir: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
    dtype: str | None = None,
    chat: bool = False,
) -> str:
    """Continuation of a prompt by an exported model; `Generator` keeps the model for several prompts.

    Args:
        model_dir: RUN_DIR of `train`, or a Hugging Face directory.
        prompt: Text to continue; with `chat`, what the user says.
        max_new_tokens: Limit of the continuation.
        temperature: 0: greedy; higher: more varied.
        top_p: Share of probability that is drawn from.
        seed: Of the draws.
        device: `auto`, `cpu`, `cuda`, ...
        dtype: Format of the weights; None: as stored.
        chat: Wrap the prompt in the tokenizer's chat template.

    Raises:
        RunUnreadable: HP603 when nothing was exported there.
        BadValue: HP102 when the text would exceed the model's context.
    """
    sampling = Sampling(max_new_tokens, temperature, top_p, seed)
    model = Generator(model_dir, device=device, dtype=dtype)
    return model.generate(prompt, sampling, chat=chat).text

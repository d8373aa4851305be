"""Recording of the steps of an unmodified Hugging Face model: training, prefill, decode."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.memory._capture import StepCapture
from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._chunked_loss import chunked_loss
from hyper_parallel.backends.torch.memory._fake_values import fake_mode
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.memory.step_source import CaptureSource
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import StorageKind

Named = dict[str, tuple[torch.Tensor, StorageKind]]


def capture_training(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: Mapping[str, torch.Tensor],
    *,
    clip_norm: float | None = None,
    loss_chunks: int | None = None,
    alignment_bytes: int = 512,
) -> Captured:
    """Record one training step: forward, loss, backward, optional clipping, optimizer.

    The optimizer must have taken a step before (its state exists then) and must keep its step count in tensors
    (`fused=True`): a count held in Python would be a constant of the recorded program, and is refused by a guard.

    Args:
        model: Returns an object with `.loss`.
        optimizer: Any torch optimizer.
        inputs: Keyword arguments of the model, labels included.
        clip_norm: Clip the global gradient norm to this.
        loss_chunks: Number of chunks of tokens for head and loss, see `chunked_loss`; None: the model's own loss.
        alignment_bytes: See `MemoryProgram`.
    """

    def step(**batch: torch.Tensor) -> torch.Tensor:
        return training_step(model, optimizer, batch, clip_norm=clip_norm, loss_chunks=loss_chunks)

    named = {**model_state(model), **optimizer_state(model, optimizer)}
    name = f"{type(model).__name__} train"
    captured = record(
        step, inputs, named, name=name, training=True, alignment_bytes=alignment_bytes
    )
    captured.source = CaptureSource(model, optimizer)
    return captured


def training_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    *,
    clip_norm: float | None = None,
    loss_chunks: int | None = None,
) -> torch.Tensor:
    """Run one eager training step, the one that `capture_training` records.

    Args:
        model: See `capture_training`.
        optimizer: See there.
        batch: Keyword arguments of the model, labels included.
        clip_norm: See there.
        loss_chunks: See there.
    """
    loss = (
        chunked_loss(model, batch, loss_chunks)
        if loss_chunks
        else model(**batch, use_cache=False).loss
    )
    loss.backward()
    if clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def capture_inference(
    model: torch.nn.Module,
    inputs: Mapping[str, torch.Tensor],
    cache: Any,
    *,
    alignment_bytes: int = 512,
) -> Captured:
    """Record one forward pass with a static KV cache: a prefill, or one decode step.

    Args:
        model: In eval mode.
        inputs: Keyword arguments of the model, such as `input_ids`.
        cache: A `transformers.StaticCache` that is initialised: its tensors keep their storage.
        alignment_bytes: See `MemoryProgram`.

    Raises:
        CaptureUnsupported: HP511 for a step at a later position of a cache that counts its tokens in Python, as layers
            with a sliding window do: the program would repeat the recorded position. A prompt at position 0 is
            recorded; running it on a cache that was not reset raises HP512.
    """

    def step(**batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for layer in cache.layers:
                if hasattr(layer, "cumulative_length_int") and not is_fake(layer.cumulative_length):
                    bool(layer.cumulative_length == 0)  # read, so it becomes a guard
            return model(**batch, **{cache_argument(model.forward): cache}, use_cache=True).logits

    named = {**model_state(model), **cache_state(cache)}
    name = f"{type(model).__name__} inference"
    before = _counts(cache)
    captured = record(
        step, inputs, named, name=name, training=False, alignment_bytes=alignment_bytes
    )
    changed_counts = {key: n for key, n in _counts(cache).items() if before.get(key, 0) != n}
    late_keys = [key for key in changed_counts if before.get(key, 0)]
    if late_keys:
        raise CaptureUnsupported(
            "the cache counts its tokens in Python, so the recorded step holds for this position only",
            got=late_keys[0],
            hint="record the prompt on a cache that was reset, or generate with `PlannedGeneration`",
        )
    if changed_counts:
        captured.run_eager = None  # a second run would continue at the position that Python counts
    captured.source = CaptureSource(model)
    return captured


def model_state(model: torch.nn.Module) -> Named:
    """Return parameters (the local shard of a DTensor) and buffers; a tied parameter appears once."""
    state: Named = {}
    for name, parameter in model.named_parameters():
        state[name] = (local(parameter), "expert" if ".experts." in name else "weight")
    for name, buffer in model.named_buffers():
        state[name] = (buffer, "input")
    return state


def optimizer_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    other_params: Sequence[torch.Tensor] = (),
) -> Named:
    """Return the tensors of the optimizer's state by parameter name; `other_params` are outside of the model."""
    names: dict[Any, str] = {p: n for n, p in model.named_parameters()}
    names |= {p: f"parameter {i}" for i, p in enumerate(other_params)}
    return {
        f"{names.get(p, 'parameter')}.{key}": (local(value), "optimizer")
        for p, slots in optimizer.state.items()
        for key, value in slots.items()
        if isinstance(value, torch.Tensor)
    }


def cache_state(cache: Any) -> Named:
    """Return keys, values and lengths of a static cache, layer by layer."""
    state: Named = {}
    for index, layer in enumerate(cache.layers):
        for key, value in sorted(vars(layer).items()):
            if isinstance(value, torch.Tensor):
                state[f"cache.{index}.{key}"] = (value, "kv" if value.dim() == 4 else "input")
    return state


def _counts(cache: Any) -> dict[str, int]:
    """Return the Python integers of a cache's layers by name."""
    return {
        f"layer {index}: {type(layer).__name__}.{key}": value
        for index, layer in enumerate(cache.layers)
        for key, value in vars(layer).items()
        if type(value) is int
    }


def record(
    step: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    named: Named,
    *,
    name: str,
    training: bool,
    alignment_bytes: int = 512,
    empty: Sequence[weakref.ref[Any]] = (),
    spill: LruSpillMode | None = None,
) -> Captured:
    """Run `step(**inputs)` once and record it.

    The run is a real one: it updates parameters and state by one step (fake tensors: nothing is computed). On an
    accelerator the allocator's peak is reset at every operator, to measure the workspace of its kernel.

    Args:
        step: The step; all state that it changes must be in `named`.
        inputs: Tensors that differ from call to call.
        named: Parameters, buffers, optimizer state, KV cache.
        name: Name of the program.
        training: See `StepCapture`.
        alignment_bytes: See `MemoryProgram`.
        empty: See `StepCapture`.
        spill: Evicts storages while the step runs; None: the step fits the device.

    Raises:
        CaptureUnsupported: HP511 for a step that cannot be repeated faithfully.
    """
    _refuse_non_tensors(inputs)
    inputs = _unaliased(inputs, named)
    tensors: dict[str, tuple[torch.Tensor, StorageKind]] = {
        **{k: (t, "input") for k, t in inputs.items()},
        **named,
    }
    make_resident = (lambda _: None) if spill is None else spill.make_resident
    recorder = StepCapture(
        tensors,
        training=training,
        alignment_bytes=alignment_bytes,
        empty=empty,
        make_resident=make_resident,
    )
    with (
        _marked_gradients(recorder, named),
        recorder,
        spill or nullcontext(),
    ):  # recorded storages are resident
        result = step(**inputs)
    captured = recorder.captured(result, inputs, name)
    if not any(is_fake(t) for t, _ in tensors.values()) and fake_mode() is None:
        captured.run_eager = _with_current_autocast(step, captured.device)
    return captured


def _refuse_non_tensors(inputs: Mapping[str, Any]) -> None:
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise CaptureUnsupported(
                f"`{key}` is no tensor, but inputs that differ from step to step must be tensors",
                got=f"{key}={value!r}"[:200],
                hint=f"leave `{key}` out of the inputs, and let the model's config or a wrapped forward set it",
            )


@contextmanager
def _marked_gradients(recorder: StepCapture, named: Named) -> Iterator[None]:
    """Mark the gradients of named parameters in a recording as soon as they are accumulated."""

    def mark(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            recorder.mark(parameter.grad, "gradient")

    hooks = [
        tensor.register_post_accumulate_grad_hook(mark)
        for tensor, _ in named.values()
        if tensor.is_leaf and tensor.requires_grad
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _with_current_autocast(step: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return the step with the current autocast settings."""
    kinds = dict.fromkeys(("cpu", device.type))
    casts = [(k, torch.get_autocast_dtype(k), torch.is_autocast_enabled(k)) for k in kinds]

    def run(**inputs: torch.Tensor) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, dtype, enabled in casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
            return step(**inputs)

    return run


def _unaliased(inputs: Mapping[str, torch.Tensor], named: Named) -> dict[str, torch.Tensor]:
    """Return the inputs on distinct storages: labels may alias the token ids now, but not in the next step."""
    seen = {tensor.untyped_storage()._cdata for tensor, _ in named.values()}
    unaliased = {}
    for name, tensor in inputs.items():
        key = tensor.untyped_storage()._cdata
        repeats = any(
            n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        unaliased[name] = (
            tensor.clone(memory_format=torch.contiguous_format)
            if repeats or key in seen
            else tensor
        )
        seen.add(key)
    return unaliased

"""Recording of a step of an unmodified Hugging Face model, and the names of its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake

from hyper_parallel.backends.torch.memory._capture import StepCapture
from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._fake_values import fake_mode
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import StorageKind

Named = dict[str, tuple[torch.Tensor, StorageKind]]


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

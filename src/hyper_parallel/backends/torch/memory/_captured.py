"""Recorded steps, and conversion of tensors to views of numbered storages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from hyper_parallel.backends.torch.memory.operators import Call, Entry, View
from hyper_parallel.backends.torch.memory.step_source import CaptureSource
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import MemoryProgram, StorageKind

_CPU = torch.device("cpu")
Named = dict[str, tuple[torch.Tensor, StorageKind]]
"""Tensors that exist before a step: name to (tensor, kind of its content)."""


@dataclass
class Captured:
    """Recorded step.

    Attributes:
        program: Program of the step for the planner, without tensors.
        calls: Torch call of each operator of the program.
        state: One tensor per storage that exists before the step, by storage index.
        inputs: Views of the inputs, by name.
        outputs: Result of the step, with views in place of tensors.
        eager_peak_bytes: Peak device bytes of the recorded run, which frees a storage when Python does.
        device: Device of the step.
        on_host: Storages in host memory although `device` is an accelerator, such as scalar arguments of kernels. They
            never move; they count as device bytes.
        owners: (storage, tensor) of every named tensor, and of one tensor per other storage that existed before the
            step.
        source: Detector of changes of model and optimizer since the capture; None: changes are not detected.
        named: Views of the named state, and of other state that the step changes, by name.
        run_eager: Function that runs the same step without a plan; its keyword arguments are the inputs. None: the step
            was recorded on fake tensors.
        owned: Function that returns the tensors that FSDP empties and refills in place.
        seconds: Measured seconds of every operator, 0 where unmeasured; None: nothing was measured.
    """

    program: MemoryProgram
    calls: tuple[Call, ...]
    state: dict[int, torch.Tensor]
    inputs: dict[str, View]
    outputs: Any
    eager_peak_bytes: int = 0
    device: torch.device = _CPU
    on_host: frozenset[int] = frozenset()
    owners: tuple[tuple[int, torch.Tensor], ...] = ()
    source: CaptureSource | None = None
    named: Mapping[str, View] = field(default_factory=dict)
    run_eager: Callable[..., Any] | None = None
    owned: Callable[[], Iterable[torch.Tensor]] = tuple
    seconds: tuple[float, ...] | None = None

    @property
    def input_storages(self) -> set[int]:
        """Storages of the step's inputs, which the caller owns."""
        return {view.storage for view in self.inputs.values()}

    @property
    def written_state(self) -> set[int]:
        """Storages that exist before the step and that the step writes."""
        written = {s for operator in self.program.operators for s in operator.writes}
        return written & self.state.keys()

    @property
    def generators(self) -> list[torch.Generator]:
        """Random generators that are arguments of operators."""
        leaves = tree_flatten([(call.args, call.kwargs) for call in self.calls])[0]
        return list({id(v): v for v in leaves if isinstance(v, torch.Generator)}.values())


def as_view(tensor: torch.Tensor, storage: int) -> View:
    return View(
        storage,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def views_in(tree: Any) -> list[View]:
    return [v for v in tree_flatten(tree)[0] if isinstance(v, View)]


def storages_in(tree: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(v.storage for v in views_in(tree)))


def refuse_layouts(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise CaptureUnsupported(
            "a captured step supports only dense strided tensors, because others have no single storage",
            got=f"layout {tensor.layout}, quantised {tensor.is_quantized}",
            hint="make the tensor dense with `.to_dense()` or `.dequantize()`",
        )


def resize_error(place: str) -> CaptureUnsupported:
    """Return the error for a storage that changes its size while a step is recorded."""
    return CaptureUnsupported(
        f"the step resizes a storage at `{place}`; a static memory plan needs fixed sizes",
        hint="allocate the final size before the step",
    )


def refuse_leaks(
    entries: list[Entry],
    find: Callable[[torch.Tensor], int | None],
    named: Named,
    make_resident: Callable[[torch.Tensor], None],
) -> None:
    """Raise HP511 for a gradient that still exists after the step, or for state with a new or resized storage."""
    for name, (tensor, _) in named.items():
        index = find(tensor)
        if index is None or (entries[index].name != name and not entries[index].at_start):
            raise CaptureUnsupported(
                f"the step replaced the storage of `{name}`",
                hint="change the tensor in place, for example with `tensor.copy_(...)`",
            )
        make_resident(tensor)
        if tensor.untyped_storage().nbytes() != entries[index].num_bytes:
            raise resize_error(name)
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
            raise CaptureUnsupported(
                f"`{name}.grad` still exists after the step",
                hint="end the step with `optimizer.zero_grad(set_to_none=True)`; to accumulate "
                "gradients, run all microbatches of an update in one step",
            )


def device_and_host_storages(entries: list[Entry]) -> tuple[torch.device, frozenset[int]]:
    """Return the device of a recorded step and, if it is an accelerator, the step's storages in host memory.

    In `entries`, these storages become inputs or outputs, because a plan does not move those.

    Raises:
        CaptureUnsupported: HP511 for a step on several accelerators.
    """
    devices = {entry.device for entry in entries} - {_CPU}
    if len(devices) > 1:
        raise CaptureUnsupported(
            "the step runs on several devices, but a memory plan supports one",
            got=", ".join(sorted(map(str, devices))),
            hint="put the model on one device per rank",
        )
    if not devices:
        return _CPU, frozenset()
    on_host = frozenset(s for s, entry in enumerate(entries) if entry.device.type == "cpu")
    for s in on_host:
        entries[s].kind = "input" if entries[s].at_start else "output"
    return devices.pop(), on_host

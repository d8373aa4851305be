"""The dispatch-mode front end: record every operator of a step at storage level.

Works on real and on fake tensors, with graph breaks, autograd and the optimizer included, because it sits below all of
them. A view is recorded as an address; only operators that make or change bytes become part of the program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from hyper_parallel.backends.torch.offload._calls import (
    Call,
    View,
    count_flops,
    is_repeatable,
    split_lists,
    written_leaves,
)
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import MemoryProgram, Operator, Phase, Storage, StorageKind


@dataclass
class Captured:
    """A recorded step.

    Attributes:
        program: What planning needs; no tensor in it.
        calls: The torch operator behind each of the program's operators.
        state: Tensor that owns each storage which exists from the start, by storage index.
        inputs: Views of the named inputs.
        outputs: What the step returned, tensors replaced by views.
        eager_peak_bytes: Device peak of the recorded run itself, with the lifetimes that Python gave the storages.
    """

    program: MemoryProgram
    calls: tuple[Call, ...]
    state: dict[int, torch.Tensor]
    inputs: dict[str, View]
    outputs: Any
    eager_peak_bytes: int = 0


@dataclass
class _Entry:
    name: str
    num_bytes: int
    kind: StorageKind
    at_start: bool = False
    at_end: bool = False


@dataclass
class _Tables:
    entries: list[_Entry] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    state: dict[int, torch.Tensor] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records operators while it is active.

    Args:
        named: Tensors that exist before the step, with what they hold.
        training: Phases are forward, backward (inside autograd), optimizer (after it); else all is inference.
        alignment_bytes: Rounding of every allocation.
    """

    def __init__(
        self,
        named: Mapping[str, tuple[torch.Tensor, StorageKind]],
        *,
        training: bool,
        alignment_bytes: int,
    ) -> None:
        super().__init__()
        self.tables = _Tables()
        self._training = training
        self._alignment = alignment_bytes
        self._seen_backward = False
        self._index: dict[int, int] = {}  # id of a living torch storage -> our index
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._live = self.eager_peak = 0
        for name, (tensor, kind) in named.items():
            self.view(tensor, name, kind)

    # -- storages ------------------------------------------------------------------------------

    def view(
        self, tensor: torch.Tensor, name: str = "constant", kind: StorageKind = "input"
    ) -> View:
        """The tensor as a view; an unknown storage is taken in as state of the step."""
        known = self._find(tensor)
        if known is None:
            known = self._add(tensor, _Entry(name, 0, kind, True, True))
            # Holding the tensor keeps the bytes (and their identity) for the program's whole life.
            self.tables.state[known] = tensor.detach()
        return _as_view(tensor, known)

    def _find(self, tensor: torch.Tensor) -> int | None:
        _refuse_layouts(tensor)
        return self._index.get(tensor.untyped_storage()._cdata)

    def _add(self, tensor: torch.Tensor, entry: _Entry) -> int:
        base = tensor.untyped_storage()
        entry.num_bytes = base.nbytes()
        index = len(self.tables.entries)
        self.tables.entries.append(entry)
        key, rounded = base._cdata, -(-entry.num_bytes // self._alignment) * self._alignment

        def gone(_: Any) -> None:
            self._index.pop(key, None)
            self._watch.pop(key, None)
            self._live -= rounded

        self._index[key] = index
        self._watch[key] = weakref.ref(base, gone)
        self._live += rounded
        self.eager_peak = max(self.eager_peak, self._live)
        return index

    def mark(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        """Say what a storage made inside the step holds."""
        index = self._find(tensor)
        if index is not None:
            self.tables.entries[index].kind = kind

    # -- operators -----------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        """Part of the step that is running now."""
        if not self._training:
            return "inference"
        if torch._C._current_graph_task_id() != -1:
            self._seen_backward = True
            return "backward"
        return "optimizer" if self._seen_backward else "forward"

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        views = tree_map_only(torch.Tensor, self.view, (args, kwargs))
        written = written_leaves(func, args, kwargs)
        before = [t.untyped_storage().nbytes() for t in written]
        try:
            out = func(*args, **kwargs)
        except DataDependentOutputException as error:
            raise CaptureUnsupported(
                f"the step reads a tensor's value at `{func}`, and fake tensors have no values",
                hint="record on real tensors: the value becomes a guard of the program",
            ) from error
        if [t.untyped_storage().nbytes() for t in written] != before:
            raise CaptureUnsupported(
                f"`{func}` resizes a storage; a static memory plan needs fixed sizes",
                hint="allocate the final size before the step",
            )
        self._record(func, leaves, args, kwargs, views, written, out)
        return out

    def _record(
        self,
        func: Any,
        leaves: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        views: Any,
        written: list[torch.Tensor],
        out: Any,
    ) -> None:
        flat = tree_flatten(out)[0]
        name = str(func).removeprefix("aten.").removesuffix(".default")
        phase = self.phase
        made: list[tuple[int, int]] = []
        sizes: list[tuple[int, ...]] = []
        for position, tensor in enumerate(flat):
            if isinstance(tensor, torch.Tensor) and self._find(tensor) is None:
                kind: StorageKind = "activation"
                made.append((position, self._add(tensor, _Entry(name, 0, kind))))
                sizes.append(tuple(tensor.shape))
        guards = tuple(
            (i, v) for i, v in enumerate(flat) if isinstance(v, (bool, int, float)) and leaves
        )
        if not made and not written and not guards:
            return  # a view, or an alias: an address, not work
        flops = count_flops(func, args, kwargs, out)
        parts = split_lists(func, views[0], views[1], out) if not made else [(views[0], views[1])]
        for part_args, part_kwargs in parts:
            reads = _storages((part_args, part_kwargs))
            writes = [s for s in _storages_of(written, self) if s in reads]
            allocs = tuple(s for _, s in made)
            moved = sum(v.num_bytes for v in _views((part_args, part_kwargs)))
            moved += sum(self.tables.entries[s].num_bytes for s in allocs)
            moved += sum(
                v.num_bytes for v in _views((part_args, part_kwargs)) if v.storage in writes
            )
            self.tables.operators.append(
                Operator(
                    name,
                    reads,
                    tuple(writes),
                    allocs,
                    flops=flops / len(parts),
                    access_bytes=moved,
                    phase=phase,
                    repeatable=is_repeatable(func, bool(writes)) and not guards,
                    ordered=bool(guards) or torch.Tag.nondeterministic_seeded in func.tags,
                )
            )
            self.tables.calls.append(
                Call(func, part_args, part_kwargs, tuple(made), tuple(sizes), guards)
            )


def record(
    step: Callable[..., Any],
    inputs: Mapping[str, torch.Tensor],
    named: Mapping[str, tuple[torch.Tensor, StorageKind]],
    *,
    name: str,
    training: bool,
    alignment_bytes: int = 512,
) -> Captured:
    """Run `step(**inputs)` once and record it.

    The run is a real one: parameters and state move on by one step (fake tensors: nothing is computed).

    Args:
        step: The step; everything it changes must be in `named`.
        inputs: Tensors that differ from call to call.
        named: Parameters, buffers, optimizer state, KV cache: name to (tensor, kind).
        name: Name of the program.
        training: See `Recorder`.
        alignment_bytes: See `MemoryProgram`.

    Raises:
        CaptureUnsupported: HP511 for what cannot be repeated faithfully.
    """
    everything: dict[str, tuple[torch.Tensor, StorageKind]] = {
        **{k: (t, "input") for k, t in inputs.items()},
        **named,
    }
    recorder = Recorder(everything, training=training, alignment_bytes=alignment_bytes)
    hooks = []
    for tensor, _ in named.values():
        if tensor.is_leaf and tensor.requires_grad:
            hooks.append(
                tensor.register_post_accumulate_grad_hook(
                    lambda t: recorder.mark(t.grad, "gradient") if t.grad is not None else None
                )
            )
    try:
        with recorder:
            result = step(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    outputs = tree_map_only(torch.Tensor, recorder.view, result)
    del result
    for view in _views(outputs):
        entry = recorder.tables.entries[view.storage]
        entry.at_end = True
        if not entry.at_start:
            entry.kind = "output"
    tables = recorder.tables
    _refuse_leaks(recorder, everything)
    program = MemoryProgram(
        name,
        tuple(Storage(e.name, e.num_bytes, e.kind, e.at_start, e.at_end) for e in tables.entries),
        tuple(tables.operators),
        alignment_bytes,
    )
    views = {k: recorder.view(t) for k, t in inputs.items()}
    return Captured(program, tuple(tables.calls), tables.state, views, outputs, recorder.eager_peak)


def _refuse_leaks(
    recorder: Recorder, named: Mapping[str, tuple[torch.Tensor, StorageKind]]
) -> None:
    """A tensor that outlives the step, or state that was replaced instead of changed, would not be seen again."""
    entries = recorder.tables.entries
    for name, (tensor, _) in named.items():
        index = recorder._find(tensor)
        if index is None or (entries[index].name != name and not entries[index].at_start):
            raise CaptureUnsupported(
                f"`{name}` got a new storage during the step",
                hint="change state in place, so that it keeps its storage",
            )
        if tensor.requires_grad and tensor.is_leaf and tensor.grad is not None:
            raise CaptureUnsupported(
                f"`{name}.grad` outlives the step",
                hint="end the step with `optimizer.zero_grad(set_to_none=True)`",
            )


def _as_view(tensor: torch.Tensor, storage: int) -> View:
    return View(
        storage,
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
    )


def _views(tree: Any) -> list[View]:
    return [v for v in tree_flatten(tree)[0] if isinstance(v, View)]


def _storages(tree: Any) -> tuple[int, ...]:
    return tuple(dict.fromkeys(v.storage for v in _views(tree)))


def _storages_of(tensors: list[torch.Tensor], recorder: Recorder) -> tuple[int, ...]:
    return tuple(dict.fromkeys(recorder.view(t).storage for t in tensors))


def _refuse_layouts(tensor: torch.Tensor) -> None:
    if (
        tensor.layout is not torch.strided
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_quantized
    ):
        raise CaptureUnsupported(
            "only plain strided tensors have an address in a storage",
            got=f"layout {tensor.layout}, conjugate {tensor.is_conj()}, negative {tensor.is_neg()}",
            hint="materialise the tensor with `.contiguous()`, `.resolve_conj()` or `.resolve_neg()`",
        )

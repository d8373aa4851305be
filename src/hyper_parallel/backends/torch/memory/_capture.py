"""Capture of one step of an unmodified model as a list of replayable operator calls on storages.

Capture works on real and on fake tensors. It intercepts operators below autograd, so those of backward and of the
optimizer are recorded too. A tensor is recorded as a view of its storage (one allocation). A guard is a value that
Python code has read; planned steps must read the same value. An operator becomes part of the program if it allocates or
writes bytes, returns a guard, or sends or receives. For a DTensor, the operators on its local shard are recorded.

FSDP frees and refills the storages of gathered parameters in place. Such a resize ends the recorded storage and begins
a new one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, is_fake, unset_fake_temporarily
from torch.utils._pytree import tree_flatten, tree_map_only

from hyper_parallel.backends.torch.collectives import current_purpose, is_coalesced
from hyper_parallel.backends.torch.memory._captured import (
    Captured,
    Named,
    as_view,
    device_and_host_storages,
    refuse_layouts,
    refuse_leaks,
    resize_error,
    storages_in,
    views_in,
)
from hyper_parallel.backends.torch.memory._collectives import (
    SYNCHRONISATION_OPS,
    Message,
    coalesce,
    group_of,
    refuse_unplaced,
    sent_bytes,
)
from hyper_parallel.backends.torch.memory._fake_values import fake_mode
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._untracked_effects import UntrackedEffects
from hyper_parallel.backends.torch.memory.kernel_bytes import (
    Timed,
    kernel_seconds,
    piece_workspace,
    run_measured,
    staged_result_bytes,
)
from hyper_parallel.backends.torch.memory.operators import (
    VIEWS,
    Call,
    Entry,
    HostConstant,
    Storages,
    View,
    count_flops,
    draws,
    is_message,
    is_repeatable,
    numbers_read,
    sends_complete,
    split_lists,
    without_work,
    written_leaves,
)
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import MemoryProgram, Operator, Phase, StorageKind

ADDRESS_BYTES = 64
"""Alignment of torch's CPU allocator in bytes; at other addresses some kernels sum in another order."""
_DEVICE = torch.ops.prim.device.default


class StepCapture:
    """Context that records operators as replayable calls.

    Args:
        named: Tensors that exist before the step, with the kind of their content.
        training: True: the phases are forward, backward (inside autograd) and optimizer (after it). False: inference.
        alignment_bytes: Unit to which allocations are rounded up.
        empty: Weak references to empty storages that the step may refill; see `LruSpillMode.emptied_storages`.
        make_resident: Function that copies an evicted tensor to the device before its bytes are read.

    Attributes:
        part: Current phase of a training step, if the step sets it; None: inferred from autograd.
    """

    def __init__(
        self,
        named: Named,
        *,
        training: bool,
        alignment_bytes: int,
        empty: Sequence[weakref.ref[Any]] = (),
        make_resident: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> None:
        self._mode = OperatorMode(self._operator)
        self.storages = Storages(alignment_bytes)
        self._entries = self.storages.entries
        self._untracked, self._make_resident = UntrackedEffects(self.storages), make_resident
        self._operators: list[Operator] = []
        self._calls: list[Call] = []
        self._staging_bytes = 0  # maximum over the operators so far
        self._timed: list[Timed] = []
        self._state: dict[int, torch.Tensor] = {}
        self.part: Phase | None = None
        self._named = named
        self._empty = {base._cdata: ref for ref in empty if (base := ref()) is not None}
        # Messages issued as one batch that is not yet recorded.
        self._messages: list[Message] = []
        self._single_sends: list[View] = []  # in flight, outside of a batch
        self._training = training
        self._alignment = alignment_bytes
        self._seen_backward = False
        self._owners: dict[int, tuple[int, torch.Tensor]] = {}  # key: id of the tensor
        self._views = {name: self.view(tensor, name, kind) for name, (tensor, kind) in named.items()}
        for name, (tensor, _) in named.items():
            self._owners[id(tensor)] = self._views[name].storage, tensor

    def view(self, tensor: torch.Tensor, name: str = "constant", kind: StorageKind = "input") -> View:
        """Return the `View` that describes a tensor; record its storage first if it is unknown or was resized.

        An unknown storage gets `name` and `kind`.
        """
        self._make_resident(tensor)
        storage = self._find(tensor)
        base = tensor.untyped_storage()
        empty = self._empty.get(base._cdata)
        if (storage is not None and self._entries[storage].num_bytes != base.nbytes()) or (
            storage is None and empty is not None and empty() is base
        ):
            storage = self._record_refill(tensor, storage)
        if storage is None and self._mode.fake is not None and not isinstance(tensor, FakeTensor):
            storage = self._record_constant(tensor)
        if storage is None:
            storage = self.storages.add(tensor, Entry(name, 0, kind, True, True))
            # The reference keeps the storage alive, so that its address is not reused.
            self._state[storage] = tensor.detach()
            if self._mode.fake is None and not isinstance(tensor, FakeTensor):
                self._untracked.register_state(storage, base)
            self._owners[id(tensor)] = storage, tensor
        return as_view(tensor, storage)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        storage, base = self._find(tensor), tensor.untyped_storage()
        return storage is not None and self._entries[storage].num_bytes == base.nbytes()

    def _record_refill(self, tensor: torch.Tensor, former: int | None) -> int:
        """Record a resized storage as a new allocation, and return its new index.

        `former` is its index before the resize, if any. Raise HP511 for a storage that exists at the start of the step.
        """
        if former is not None and self._entries[former].at_start:
            raise resize_error(self._entries[former].name)
        num_bytes = tensor.untyped_storage().nbytes()
        index = self.storages.add(tensor, Entry("refilled", 0, "scratch"), watch=True)
        base = tensor.untyped_storage()
        self._empty[base._cdata] = weakref.ref(base)
        self._append(
            Operator("empty", allocs=(index,), phase=self.phase),
            Call(
                torch.ops.aten.empty.memory_format,
                ([num_bytes],),
                {"dtype": torch.uint8, "device": tensor.device},
                ((0, View(index, torch.uint8, (num_bytes,), (1,), 0)),),
            ),
        )
        return index

    def _record_constant(self, tensor: torch.Tensor) -> int:
        """Record a real tensor in a step on fake tensors as an operator without inputs; return its storage.

        Example: the index tensor of `x[..., [-1]]`.
        """
        index = self.storages.add(tensor, Entry("numbers", 0, "scratch"))
        view = View(index, torch.uint8, (tensor.untyped_storage().nbytes(),), (1,), 0)
        with unset_fake_temporarily():
            call = Call(HostConstant(view.as_tensor(tensor.untyped_storage()).clone()), (), {}, ((0, view),))
        self._append(Operator("numbers", allocs=(index,), phase=self.phase), call)
        return index

    def _find(self, tensor: torch.Tensor) -> int | None:
        refuse_layouts(tensor)
        return self.storages.find(tensor)

    def mark(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        """Set the kind of a tensor's storage; no effect for a storage that is not recorded."""
        index = self._find(tensor)
        if index is not None:
            self._entries[index].kind = kind

    @property
    def phase(self) -> Phase:
        """Phase of the step that is running now."""
        if not self._training:
            return "inference"
        if self.part is not None:
            return self.part
        if torch._C._current_graph_task_id() != -1:
            self._seen_backward = True
            return "backward"
        return "optimizer" if self._seen_backward else "forward"

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "profiler" or func._opname in SYNCHRONISATION_OPS:
            return func(*args, **kwargs)
        # A storage that its owner has emptied ends before the owner can refill it to the same size.
        self.storages.end_resized()
        if func is _DEVICE or (func in VIEWS and self._is_known(args[0])):
            self._end_messages()
            return func(*args, **kwargs)
        message = is_message(func)
        batched = message and is_coalesced()
        if not batched:
            self._end_messages()
        if self.phase == "optimizer":
            self._end_sends()
        leaves = tensors_in(args, kwargs)
        self._untracked.check_operands(leaves)
        views = tree_map_only(torch.Tensor, self.view, (args, kwargs))
        written = written_leaves(func, args, kwargs)
        if self._mode.fake is not None and not all(isinstance(t, FakeTensor) for t in written):
            raise CaptureUnsupported(
                f"`{func}` changes a tensor that the model keeps outside of its parameters and buffers",
                hint="register it with `register_buffer`",
            )
        sizes_before = [t.untyped_storage().nbytes() for t in written]
        try:
            with self._untracked.observe(func, leaves, written):
                out, workspace, events = run_measured(func, args, kwargs, leaves)
        except DataDependentOutputException as error:
            raise read_error(func) from error
        if func.namespace == "c10d" and not message:
            out = without_work(out)
        if message and not written and not batched:
            self._single_sends += views_in(views)
        if batched:
            writes = tuple(s for t in written if (s := self._find(t)) is not None)
            self._untracked.after_operator(func, (), writes, ())
            self._messages.append((func, views[0], writes))
            return out
        if [t.untyped_storage().nbytes() for t in written] != sizes_before:
            raise resize_error(str(func))
        first = len(self._operators)
        self._record(func, leaves, args, kwargs, views, written, out, workspace)
        if events is not None and len(self._operators) > first:
            self._timed.append((range(first, len(self._operators)), events))
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
        workspace: tuple[int, ...],
    ) -> None:
        flat = tree_flatten(out)[0]
        name = str(func).removeprefix("aten.").removesuffix(".default")
        phase = self.phase
        results = self._add_results(flat, name)
        guards = tuple((i, v) for i, v in numbers_read(func, flat) if leaves)
        if not results and not written and not guards and not is_message(func):
            return  # the operator only creates a view or an alias
        written_storages = tuple(dict.fromkeys(self.view(t).storage for t in written))
        self._untracked.after_operator(
            func, storages_in(views), written_storages, [view.storage for _, view in results]
        )
        refuse_unplaced(func)
        flops, group = count_flops(func, args, kwargs, out), group_of(func, args)
        random = draws(func, args, kwargs, phase, self._untracked.drew)
        parts = split_lists(func, views[0], views[1], len(results))
        for number, (part_args, part_kwargs) in enumerate(parts):
            part_results = [(0, results[number][1])] if results and len(parts) > 1 else results
            call = Call(func, part_args, part_kwargs, tuple(part_results), guards, self._staging_bytes)
            reads = storages_in((part_args, part_kwargs))
            writes = [s for s in written_storages if s in reads]
            allocs = tuple(view.storage for _, view in part_results)
            operands = views_in((part_args, part_kwargs))
            access_bytes = sum(v.num_bytes * (2 if v.storage in writes else 1) for v in operands)
            access_bytes += sum(self._entries[s].num_bytes for s in allocs)
            if group is not None:
                access_bytes = sent_bytes(func, args, group)
            self._append(
                Operator(
                    name,
                    reads,
                    tuple(writes),
                    allocs,
                    flops=flops / len(parts),
                    access_bytes=access_bytes,
                    phase=phase,
                    repeatable=is_repeatable(func, bool(writes), random) and not guards,
                    ordered=bool(guards) or random or group is not None,
                    scratch_bytes=staged_result_bytes(call, self._entries)
                    + piece_workspace(call, args, kwargs, workspace),
                    group="" if group is None else group.group_name,
                    purpose="" if group is None else current_purpose() or "",
                    message=is_message(func),
                ),
                call,
            )

    def _add_results(self, flat: Sequence[Any], name: str) -> list[tuple[int, View]]:
        results: list[tuple[int, View]] = []
        for position, tensor in enumerate(flat):
            if isinstance(tensor, torch.Tensor) and self._find(tensor) is None:
                index = self.storages.add(tensor, Entry(name, 0, "activation"))
                results.append((position, as_view(tensor, index)))
        return results

    def _append(self, operator: Operator, call: Call) -> None:
        self._operators.append(operator)
        self._calls.append(call)
        self._staging_bytes = max(self._staging_bytes, sum(operator.scratch_bytes))

    def _end_messages(self) -> None:
        messages, self._messages = self._messages, []
        if messages:
            self._append(*coalesce(messages, self.phase))

    def _end_sends(self) -> None:
        """Record one operator that reads all storages sent outside of batches, which keeps them alive until here.

        These storages are neither moved nor recomputed.
        """
        sent, self._single_sends = self._single_sends, []
        if not sent:
            return
        for view in sent:
            self._entries[view.storage].kind = "output"  # outputs are not moved
        reads = storages_in(sent)
        for index, operator in enumerate(self._operators):
            if not set(reads).isdisjoint(operator.allocs):
                self._operators[index] = replace(operator, repeatable=False)
        self._append(
            Operator("c10d.sent", reads, phase=self.phase, ordered=True, message=True), Call(sends_complete, (), {})
        )

    def __enter__(self) -> Self:
        self._untracked.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        self._untracked.__exit__(*error)

    def captured(self, result: Any, inputs: Mapping[str, torch.Tensor], name: str) -> Captured:
        """Return the recorded step; call it once, after the step.

        Args:
            result: Return value of the step.
            inputs: Tensors that differ from call to call, by name.
            name: Name of the program.

        Raises:
            CaptureUnsupported: HP511 for a step that cannot be repeated faithfully.
        """
        self._end_messages()
        self._end_sends()
        outputs = tree_map_only(torch.Tensor, self.view, result)
        del result
        for view in views_in(outputs):
            entry = self._entries[view.storage]
            entry.at_end = True
            if not entry.at_start:
                entry.kind = "output"
        device, on_host = device_and_host_storages(self._entries)
        self._untracked.refuse_state_changes(self._operators, self._state, self._make_resident)
        refuse_leaks(self._entries, self._find, self._named, self._make_resident)
        for key, (tensor, _) in self._named.items():
            if self.view(tensor) != self._views[key]:
                raise CaptureUnsupported(
                    f"the step changes the shape or the strides of `{key}` in place, so the next step would differ",
                    hint="use `transpose`, `unsqueeze` and similar operators without the underscore",
                )
        program = MemoryProgram(
            name,
            tuple(entry.storage for entry in self._entries),
            tuple(self._operators),
            self._alignment,
            ADDRESS_BYTES,
        )
        views = {k: self.view(t) for k, t in inputs.items()}
        state = {k: self.view(t) for k, (t, _) in self._named.items() if k not in inputs}
        named_storages = {view.storage for view in (*state.values(), *views.values())}
        written = {s for operator in self._operators for s in operator.writes}
        for s in self._state.keys() & written - named_storages:
            state[f"{self._entries[s].name} {s}"] = as_view(self._state[s], s)
        return Captured(
            program,
            tuple(self._calls),
            self._state,
            views,
            outputs,
            self.storages.peak_bytes,
            device,
            on_host,
            tuple(self._owners.values()),
            named=state,
            seconds=kernel_seconds(self._operators, self._timed),
        )


def read_error(func: Any) -> CaptureUnsupported:
    """Return the error for an operator that needs a value of a fake tensor."""
    return CaptureUnsupported(
        f"the step reads a tensor's value at `{func}`, and fake tensors have no values",
        hint="leave out --device-memory; a capture on real tensors allows such reads",
    )


def model_state(model: torch.nn.Module) -> Named:
    """Return a model's parameters (local shards) and buffers by name, with kinds; a tied parameter appears once."""
    state: Named = {}
    for name, parameter in model.named_parameters():
        state[name] = (local(parameter), "expert" if ".experts." in name else "weight")
    for name, buffer in model.named_buffers():
        state[name] = (buffer, "input")
    return state


def optimizer_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, other_params: Sequence[torch.Tensor] = ()
) -> Named:
    """Return an optimizer's state tensors (local shards) by name.

    A parameter in `other_params`, outside of the model, is named by its position there.
    """
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
    """Run `step(**inputs)` once, and return the recorded step.

    The run is real: it updates parameters and state by one step. With fake tensors, nothing is computed. On an
    accelerator the allocator's peak is reset at every operator, to measure the workspace of its kernel.

    Args:
        step: Function that runs the step; its keyword arguments are `inputs`.
        inputs: Tensors that differ from call to call, by name.
        named: Tensors that exist before the step, by name: parameters, buffers, optimizer state, KV cache.
        name: Name of the program.
        training: See `StepCapture`.
        alignment_bytes: See `MemoryProgram`.
        empty: See `StepCapture`.
        spill: Mode that evicts storages while the step runs; None: nothing is evicted.

    Raises:
        CaptureUnsupported: HP511 for a step that cannot be repeated faithfully.
    """
    _refuse_non_tensors(inputs)
    inputs = _unaliased(inputs, named)
    tensors: dict[str, tuple[torch.Tensor, StorageKind]] = {**{k: (t, "input") for k, t in inputs.items()}, **named}
    make_resident = (lambda _: None) if spill is None else spill.make_resident
    recorder = StepCapture(
        tensors, training=training, alignment_bytes=alignment_bytes, empty=empty, make_resident=make_resident
    )
    with (
        _marked_gradients(recorder, named),
        recorder,
        spill or nullcontext(),
    ):  # `spill` is entered last, so it makes operands resident before the recorder runs their operator
        result = step(**inputs)
    captured = recorder.captured(result, inputs, name)
    if not any(is_fake(t) for t, _ in tensors.values()) and fake_mode() is None:
        captured.run_eager = _with_current_autocast(step, captured.device)
    return captured


def _refuse_non_tensors(inputs: Mapping[str, Any]) -> None:
    for key, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise CaptureUnsupported(
                f"input `{key}` is not a tensor, but inputs that change between steps must be tensors",
                got=f"{key}={value!r}"[:200],
                hint=f"remove `{key}` from the inputs, and set it in the model's config or in a wrapper of `forward`",
            )


@contextmanager
def _marked_gradients(recorder: StepCapture, named: Named) -> Iterator[None]:
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
    """Return the inputs; clone those that are expanded or share a storage with state or an earlier input."""
    seen = {tensor.untyped_storage()._cdata for tensor, _ in named.values()}
    unaliased = {}
    for name, tensor in inputs.items():
        key = tensor.untyped_storage()._cdata
        repeats = any(n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        unaliased[name] = tensor.clone(memory_format=torch.contiguous_format) if repeats or key in seen else tensor
        seen.add(key)
    return unaliased

"""The dispatch-mode front end: record every operator of a step at storage level.

Works on real and on fake tensors, with graph breaks, autograd and the optimizer included, because it sits below all of
them. A view is recorded as an address; only operators that make or change bytes become part of the program. Of a
DTensor the operators on its local part are recorded. A storage that its owner resizes (FSDP frees and refills gathered
parameters that way) ends there and comes back as a fresh allocation.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from hyper_parallel.backends.torch._purpose import issued_together
from hyper_parallel.backends.torch.memory._captured import (
    Captured,
    Entry,
    Named,
    Tables,
    as_view,
    refuse_layouts,
    refuse_leaks,
    resizes,
    storages_in,
    views_in,
    where_it_runs,
)
from hyper_parallel.backends.torch.memory._collectives import (
    WAIT,
    Message,
    group_of,
    sent_bytes,
    together,
)
from hyper_parallel.backends.torch.memory._fake_values import fake_mode
from hyper_parallel.backends.torch.memory._kernel_bytes import beside, of_piece, run
from hyper_parallel.backends.torch.memory._operators import (
    VIEWS,
    Arrived,
    Call,
    Numbers,
    View,
    count_flops,
    draws,
    is_message,
    is_repeatable,
    numbers_read,
    split_lists,
    without_work,
    written_leaves,
)
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import MemoryProgram, Operator, Phase, Storage, StorageKind

ADDRESS_BYTES = 64
"""Where a storage begins, as torch's CPU allocator has it: some kernels add in another order elsewhere."""
_DEVICE = torch.ops.prim.device.default
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


class Recorder(TorchDispatchMode):
    """Records operators while it is active.

    Args:
        named: Tensors that exist before the step, with what they hold.
        training: Phases are forward, backward (inside autograd), optimizer (after it); else all is inference.
        alignment_bytes: Rounding of every allocation.
        empty: Storages that are empty now and that the step refills; see `ResizeWatch`.

    Attributes:
        part: Phase of what runs now, for a step that knows it; None: as autograd shows.
    """

    def __init__(
        self,
        named: Named,
        *,
        training: bool,
        alignment_bytes: int,
        empty: Sequence[weakref.ref[Any]] = (),
    ) -> None:
        super().__init__()
        self.tables = Tables()
        self.part: Phase | None = None
        self._named = named
        self._empty = {base._cdata: ref for ref in empty if (base := ref()) is not None}
        self._filled: dict[int, weakref.ref[Any]] = {}
        # Issued together, not yet recorded.
        self._messages: list[Message] = []
        self._sent: list[View] = []  # on their way, alone
        self._fake: Any = None
        self._training = training
        self._alignment = alignment_bytes
        self._seen_backward = False
        self._index: dict[int, int] = {}  # id of a living torch storage -> our index
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._live = self.eager_peak = 0
        self._owners: dict[int, tuple[int, torch.Tensor]] = {}  # by the tensor's id
        for name, (tensor, kind) in named.items():
            self._owners[id(tensor)] = self.view(tensor, name, kind).storage, tensor

    def view(
        self, tensor: torch.Tensor, name: str = "constant", kind: StorageKind = "input"
    ) -> View:
        """The tensor as a view; an unknown storage is taken in as state of the step."""
        known = self._find(tensor)
        base = tensor.untyped_storage()
        empty = self._empty.get(base._cdata)
        if (known is not None and self.tables.entries[known].num_bytes != base.nbytes()) or (
            known is None and empty is not None and empty() is base
        ):
            known = self._refilled(tensor, known)
        if known is None and self._fake is not None and not isinstance(tensor, FakeTensor):
            known = self._numbers(tensor)
        if known is None:
            known = self._add(tensor, Entry(name, 0, kind, True, True))
            # Holding the tensor keeps the bytes (and their identity) for the program's whole life.
            self.tables.state[known] = tensor.detach()
            self._owners[id(tensor)] = known, tensor
        return as_view(tensor, known)

    def _is_known(self, tensor: torch.Tensor) -> bool:
        known, base = self._find(tensor), tensor.untyped_storage()
        return known is not None and self.tables.entries[known].num_bytes == base.nbytes()

    def _end_emptied(self) -> None:
        """Forget refilled storages that their owner has emptied, before they may come back with the same size."""
        for key, ref in list(self._filled.items()):
            base, index = ref(), self._index.get(key)
            if base is None or index is None:
                del self._filled[key]
            elif base.nbytes() != self.tables.entries[index].num_bytes:
                del self._filled[key], self._index[key]
                self._live -= self._rounded(self.tables.entries[index].num_bytes)

    def _refilled(self, tensor: torch.Tensor, before: int | None) -> int:
        """A storage that its owner has resized: the old one has ended, an allocation makes the new one."""
        if before is not None and self.tables.entries[before].at_start:
            raise resizes(self.tables.entries[before].name)
        num_bytes = tensor.untyped_storage().nbytes()
        if before is not None:
            self._live -= self._rounded(self.tables.entries[before].num_bytes)
        index = self._add(tensor, Entry("refilled", 0, "scratch"))
        base = tensor.untyped_storage()
        self._empty[base._cdata] = self._filled[base._cdata] = weakref.ref(base)
        self._keep(
            Operator("empty", allocs=(index,), phase=self.phase),
            Call(
                torch.ops.aten.empty.memory_format,
                ([num_bytes],),
                {"dtype": torch.uint8, "device": tensor.device},
                ((0, View(index, torch.uint8, (num_bytes,), (1,), 0)),),
            ),
        )
        return index

    def _numbers(self, tensor: torch.Tensor) -> int:
        """A tensor with values in a step without, as `x[..., [-1]]` makes: an operator gives them every time."""
        index = self._add(tensor, Entry("numbers", 0, "scratch"))
        view = View(index, torch.uint8, (tensor.untyped_storage().nbytes(),), (1,), 0)
        with unset_fake_temporarily():
            call = Call(Numbers(view.on(tensor.untyped_storage()).clone()), (), {}, ((0, view),))
        self._keep(Operator("numbers", allocs=(index,), phase=self.phase), call)
        return index

    def _find(self, tensor: torch.Tensor) -> int | None:
        refuse_layouts(tensor)
        return self._index.get(tensor.untyped_storage()._cdata)

    def _add(self, tensor: torch.Tensor, entry: Entry) -> int:
        base = tensor.untyped_storage()
        entry.num_bytes, entry.device = base.nbytes(), tensor.device
        index = len(self.tables.entries)
        self.tables.entries.append(entry)
        key, rounded = base._cdata, self._rounded(entry.num_bytes)

        def gone(_: Any) -> None:
            self._watch.pop(key, None)
            last = self._index.pop(key, None)
            if last is not None:
                self._live -= self._rounded(self.tables.entries[last].num_bytes)

        self._index[key] = index
        if key not in self._watch:
            self._watch[key] = weakref.ref(base, gone)
        self._live += rounded
        self.eager_peak = max(self.eager_peak, self._live)
        return index

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

    def mark(self, tensor: torch.Tensor, kind: StorageKind) -> None:
        """Say what a storage made inside the step holds."""
        index = self._find(tensor)
        if index is not None:
            self.tables.entries[index].kind = kind

    @property
    def phase(self) -> Phase:
        """Part of the step that is running now."""
        if not self._training:
            return "inference"
        if self.part is not None:
            return self.part
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
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor: its local operators come here next
        kwargs = kwargs or {}
        aside = func.namespace == "profiler" or func._opname == "record_stream"
        if aside or func is WAIT or fake_mode() is not self._fake:
            return func(*args, **kwargs)  # the latter: DTensor asks for the shape of a result
        self._end_emptied()
        if func is _DEVICE or (func in VIEWS and self._is_known(args[0])):
            self._end_messages()
            return func(*args, **kwargs)
        message = is_message(func)
        batched = message and issued_together()
        if not batched:
            self._end_messages()
        if self.phase == "optimizer":
            self._end_sent()
        leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        views = tree_map_only(torch.Tensor, self.view, (args, kwargs))
        written = written_leaves(func, args, kwargs)
        if self._fake is not None and not all(isinstance(t, FakeTensor) for t in written):
            raise CaptureUnsupported(
                f"`{func}` changes a tensor that the model keeps outside of its parameters and buffers",
                hint="register it with `register_buffer`",
            )
        before = [t.untyped_storage().nbytes() for t in written]
        try:
            out, taken = run(func, args, kwargs, leaves)
        except DataDependentOutputException as error:
            raise CaptureUnsupported(
                f"the step reads a tensor's value at `{func}`, and fake tensors have no values",
                hint="record on real tensors: the value becomes a guard of the program",
            ) from error
        if func.namespace == "c10d" and not message:
            out = without_work(out)
        if message and not written and not batched:
            self._sent += views_in(views)
        if batched:
            writes = tuple(self._find(t) for t in written)
            self._messages.append((func, views[0], tuple(s for s in writes if s is not None)))
            return out
        if [t.untyped_storage().nbytes() for t in written] != before:
            raise resizes(str(func))
        self._record(func, leaves, args, kwargs, views, written, out, taken)
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
        taken: tuple[int, ...],
    ) -> None:
        flat = tree_flatten(out)[0]
        name = str(func).removeprefix("aten.").removesuffix(".default")
        phase = self.phase
        made: list[tuple[int, View]] = []
        for position, tensor in enumerate(flat):
            if isinstance(tensor, torch.Tensor) and self._find(tensor) is None:
                index = self._add(tensor, Entry(name, 0, "activation"))
                made.append((position, as_view(tensor, index)))
        guards = tuple((i, v) for i, v in numbers_read(func, flat) if leaves)
        if not made and not written and not guards and not is_message(func):
            return  # a view, or an alias: an address, not work
        flops, group = count_flops(func, args, kwargs, out), group_of(func, args, kwargs)
        random = draws(func, args, kwargs, phase)
        parts = split_lists(func, views[0], views[1], len(made))
        for number, (part_args, part_kwargs) in enumerate(parts):
            mine = [(0, made[number][1])] if made and len(parts) > 1 else made
            call = Call(func, part_args, part_kwargs, tuple(mine), guards)
            reads = storages_in((part_args, part_kwargs))
            changed = dict.fromkeys(self.view(t).storage for t in written)
            writes = [s for s in changed if s in reads]
            allocs = tuple(view.storage for _, view in mine)
            operands = views_in((part_args, part_kwargs))
            moved = sum(v.num_bytes * (2 if v.storage in writes else 1) for v in operands)
            moved += sum(self.tables.entries[s].num_bytes for s in allocs)
            if group is not None:
                made_here = [view for _, view in mine]
                moved = sent_bytes(func, (part_args, part_kwargs), made_here, group.size())
            self._keep(
                Operator(
                    name,
                    reads,
                    tuple(writes),
                    allocs,
                    flops=flops / len(parts),
                    access_bytes=moved,
                    phase=phase,
                    repeatable=is_repeatable(func, bool(writes), random) and not guards,
                    ordered=bool(guards) or random or group is not None,
                    beside=beside(call, self.tables.entries) + of_piece(call, args, kwargs, taken),
                    group="" if group is None else group.group_name,
                    message=is_message(func),
                ),
                call,
            )

    def _keep(self, operator: Operator, call: Call) -> None:
        self.tables.operators.append(operator)
        self.tables.calls.append(call)

    def _end_messages(self) -> None:
        """Messages that were issued together become one operator, done when all of them are."""
        messages, self._messages = self._messages, []
        if messages:
            self._keep(*together(messages, self.phase))

    def _end_sent(self) -> None:
        """What was sent alone stays where it is until the receivers have it: here, after all backward passes."""
        sent, self._sent = self._sent, []
        if not sent:
            return
        for view in sent:
            self.tables.entries[view.storage].kind = "output"  # never moved
        reads = storages_in(sent)
        for index, operator in enumerate(self.tables.operators):
            if not set(reads).isdisjoint(operator.allocs):  # never made again
                self.tables.operators[index] = replace(operator, repeatable=False)
        self._keep(
            Operator("c10d.sent", reads, phase=self.phase, ordered=True, message=True),
            Call(Arrived(), (), {}),
        )

    def __enter__(self) -> Recorder:
        self._fake = fake_mode()
        return super().__enter__()

    def captured(self, result: Any, inputs: Mapping[str, torch.Tensor], name: str) -> Captured:
        """What was recorded, after the step has returned `result` from `inputs`, which are among the named tensors.

        Raises:
            CaptureUnsupported: HP511 for what cannot be repeated faithfully.
        """
        self._end_messages()
        self._end_sent()
        outputs = tree_map_only(torch.Tensor, self.view, result)
        del result
        for view in views_in(outputs):
            entry = self.tables.entries[view.storage]
            entry.at_end = True
            if not entry.at_start:
                entry.kind = "output"
        tables = self.tables
        device, on_host = where_it_runs(tables.entries)
        refuse_leaks(tables.entries, self._find, self._named)
        program = MemoryProgram(
            name,
            tuple(
                Storage(e.name, e.num_bytes, e.kind, e.at_start, e.at_end) for e in tables.entries
            ),
            tuple(tables.operators),
            self._alignment,
            ADDRESS_BYTES,
        )
        views = {k: self.view(t) for k, t in inputs.items()}
        return Captured(
            program,
            tuple(tables.calls),
            tables.state,
            views,
            outputs,
            self.eager_peak,
            device,
            on_host,
            tuple(self._owners.values()),
        )

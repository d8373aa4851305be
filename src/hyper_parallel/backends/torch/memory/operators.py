"""Storages, and captured operator calls: a torch operator with tensors replaced by views of numbered storages.

A storage is one allocation, tracked by a weak reference: it is live as long as Python or autograd references it. FSDP,
the owner of gathered parameters, frees and refills their storages in place. Such a resize ends the recorded storage and
begins a new one.

A captured collective is an operator on its recorded process group. Its call only begins the collective, and the plan
decides when to wait for it. All collectives are ordered, so every rank issues them in the recorded order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import Phase, Storage, StorageKind
from hyper_parallel.units import round_up

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Entry:
    """Properties of a storage of a program that is being recorded; see also `Storage`.

    Attributes:
        name: Name of a parameter, or of the operator that allocated the storage.
        num_bytes: Bytes; 0 while the owner (FSDP) has emptied the storage.
        shape: Shape of the first tensor on the storage; () if not recorded.
        dtype: Dtype of this tensor without `torch.`; empty if not recorded.
        recomputed: True if the storage was allocated by recomputation inside backward.
        sent: True if a collective read or wrote the storage.
        resized: True if the owner empties and refills the storage in place.
    """

    name: str
    num_bytes: int
    kind: StorageKind
    at_start: bool = False
    at_end: bool = False
    device: torch.device = _CPU
    shape: tuple[int, ...] = ()
    dtype: str = ""
    recomputed: bool = False
    sent: bool = False
    resized: bool = False

    @property
    def storage(self) -> Storage:
        """Storage of the program with these properties."""
        return Storage(self.name, self.num_bytes, self.kind, self.at_start, self.at_end)


class Storages:
    """Storages that a recorded program has used, numbered in the order of their first use.

    Args:
        alignment_bytes: Unit to which allocations are rounded up: 1 counts requested bytes, 512 is the unit of the
            caching allocators of accelerators.
        ended: Function called with the number of every storage whose live range ends; None: no call.

    Attributes:
        entries: Properties of each storage, by number.
        live_bytes: Bytes that are live now.
        peak_bytes: Peak of the live bytes.
    """

    def __init__(self, alignment_bytes: int, ended: Callable[[int], None] | None = None) -> None:
        self.entries: list[Entry] = []
        self.peak_bytes = self.live_bytes = 0
        self._alignment, self._ended = alignment_bytes, ended
        self._numbers: dict[int, int] = {}  # `_cdata` of a live storage -> its number
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._watched: dict[int, tuple[weakref.ref[Any], int]] = {}  # with the last known size

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None if no number was assigned."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: Tensor, entry: Entry, *, watch: bool = False) -> int:
        """Assign the next number to a tensor's storage and return it; set bytes and device of `entry`.

        With `watch`, the owner may resize the storage, so `end_resized` compares its size.
        """
        base = tensor.untyped_storage()
        key = base._cdata
        entry.device = tensor.device
        if key in self._numbers:
            self._end(key)
        if key not in self._refs:
            self._refs[key] = weakref.ref(base, lambda _: self._on_destroyed(key))
        if watch or not base.nbytes():
            self._watched[key] = (self._refs[key], 0)
        return self.begin(key, entry)

    def begin(self, key: int, entry: Entry) -> int:
        """Assign the next number to an existing storage whose former live range has ended, and return the number.

        `key` is the `_cdata` of the storage.
        """
        base = self._refs[key]()
        entry.num_bytes = 0 if base is None else base.nbytes()
        if key in self._watched:
            self._watched[key] = (self._refs[key], entry.num_bytes)
        number = self._numbers[key] = len(self.entries)
        self.entries.append(entry)
        self.live_bytes += round_up(entry.num_bytes, self._alignment)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return number

    def _end(self, key: int) -> None:
        number = self._numbers.pop(key)
        self.live_bytes -= round_up(self.entries[number].num_bytes, self._alignment)
        if self._ended is not None:
            self._ended(number)

    def _on_destroyed(self, key: int) -> None:
        del self._refs[key]
        self._watched.pop(key, None)
        if key in self._numbers:
            self._end(key)

    def end_resized(self, *, everywhere: bool = False) -> list[tuple[int, Entry, Any]]:
        """End the live ranges of watched storages (`everywhere`: of all storages) whose size has changed.

        Returns:
            For each of them: key, properties, and the storage itself, to keep it alive until `begin` numbers it again.
        """
        ended = []
        for key in list(self._numbers) if everywhere else self._resized_keys():
            # None if the storage was destroyed in this loop
            ref, number = self._refs.get(key), self._numbers.get(key)
            base = None if ref is None else ref()
            if base is None or number is None or base.nbytes() == self.entries[number].num_bytes:
                continue
            self._end(key)
            self.entries[number].resized = True
            self._watched[key] = (self._refs[key], base.nbytes())
            ended.append((key, self.entries[number], base))
        return ended

    def renumber_resized(self, *, everywhere: bool = False) -> list[int]:
        """Call `end_resized`, assign the next numbers to the storages that it returns, and return these numbers."""
        ended = self.end_resized(everywhere=everywhere)
        return [self.begin(key, replace(entry, at_start=False)) for key, entry, _ in ended]

    def _resized_keys(self) -> list[int]:
        """Return the keys of watched storages whose size has changed; called at every operator, so it must be fast."""
        return [
            key
            for key, (ref, num_bytes) in list(self._watched.items())
            if (base := ref()) is not None and base.nbytes() != num_bytes
        ]

    @property
    def living(self) -> list[int]:
        """Numbers of the live storages, oldest first."""
        return sorted(self._numbers.values())

    def restart(self) -> None:
        """Forget ended storages, renumber the live ones as storages that exist at the start, and reset the peak."""
        renumbered = {old: new for new, old in enumerate(self.living)}
        self.entries = [replace(self.entries[old], at_start=True) for old in renumbered]
        self._numbers = {key: renumbered[old] for key, old in self._numbers.items()}
        self.peak_bytes = self.live_bytes


COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators that communicate with other ranks."""
EMPTY = torch.ops.aten.empty.memory_format
"""Operator that allocates uninitialised buffers; FSDP empties and refills only such buffers in place."""
TORCH = frozenset(("aten", "prim", "prims", "profiler", "fsdp", "symm_mem", "inductor", *COMMUNICATION))
"""Namespaces of torch itself, whose schemas and tags are trusted."""
MESSAGES = ("send", "recv_", "recv_any_source_")
"""Point-to-point operators of c10d."""
_aten = torch.ops.aten
VIEWS = frozenset(
    (
        _aten.alias.default,
        _aten.detach.default,
        _aten.expand.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.squeeze.dim,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten.view.default,
    )
)
"""The most frequent operators whose results are views of their first argument."""
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_RESIZE = ("resize_", "resize_as_", "resize_as_sparse_", "set_")
"""In-place shape operators that may change the storage of a tensor."""
_UNDECLARED_WRITES = {
    ("fsdp", "all_gather_copy_in", "all_gather_output"),
    *(("aten", norm, name) for norm in _NORMS for name in ("running_mean", "running_var")),
}
"""Arguments (namespace, operator, name) that are written although their schema does not declare it."""


@dataclass(frozen=True, slots=True)
class View:
    """Description of a tensor by its address inside a numbered storage; it references no memory.

    Lazily conjugated or negated tensors, such as the gradient of a complex product, are views as well. `stride` and
    `offset` count elements.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    def as_tensor(self, base: torch.UntypedStorage) -> torch.Tensor:
        """Return the described tensor on the storage `base`."""
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        tensor: torch.Tensor = empty.set_(base, self.offset, self.size, self.stride)  # type: ignore[call-overload]
        if self.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negative else tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's elements (an expanded dim counts once)."""
        counted = [n for n, step in zip(self.size, self.stride, strict=True) if step]
        return math.prod(counted) * self.dtype.itemsize if 0 not in self.size else 0


@dataclass(frozen=True, slots=True)
class Call:
    """Replayable operator call.

    Attributes:
        func: The operator overload.
        args: Positional arguments with `View` leaves.
        kwargs: Keyword arguments with `View` leaves.
        results: (flat output index, its view) of every output with a new storage.
        guards: (flat output index, value) of outputs that the model's Python code read as plain numbers.
        reusable_bytes: Largest staging and workspace bytes of an earlier operator, which this call may use too.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[int, View], ...] = ()
    guards: tuple[tuple[int, Any], ...] = ()
    reusable_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostConstant:
    """Operator that returns a constant tensor of the model's code from host memory."""

    values: torch.Tensor

    def __call__(self) -> torch.Tensor:
        """Return the constant."""
        return self.values


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """Operator for a batch of point-to-point messages: all are issued before the first wait."""

    funcs: tuple[Any, ...]

    def __call__(self, *calls: tuple[Any, ...]) -> list[Any]:
        """Issue the messages, with one tuple of arguments each, and return their work handles."""
        return [func(*args) for func, args in zip(self.funcs, calls, strict=True)]


def without_work(out: Any) -> Any:
    """Wait for a collective and return its outputs, with a completed handle in place of each work handle.

    Waiting for Gloo's own handle makes Gloo copy some results, and these copies would be recorded as operators.
    """
    flat = wait_finished(out)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([value for value in flat if isinstance(value, torch.Tensor)])
    completed = _create_work_from_future(future).boxed()
    return tree_map_only(torch.ScriptObject, lambda v: completed if _is_work(v) else v, out)


def _is_work(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "Work" in str(value._type())


def sends_complete() -> None:
    """Do nothing: in a program, this operator keeps the operands of earlier sends alive."""


def is_message(func: Any) -> bool:
    """Return whether an operator is a point-to-point send or receive."""
    return getattr(func, "namespace", "") == "c10d" and func._opname in MESSAGES


def wait_finished(out: Any) -> list[Any]:
    """Wait for the communication that an operator began, and return its flat outputs."""
    flat = tree_flatten(out)[0]
    for value in flat:
        if isinstance(value, dist.Work):
            value.wait()
        elif _is_work(value):
            dist.Work.unbox(value).wait()
    return flat


def written_leaves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors in the arguments that an operator writes."""
    if torch.Tag.inplace_view in func.tags and func._opname not in _RESIZE:
        return []  # the operator changes only the shape or the strides
    if func._opname in _NORMS and not _argument(func, args, kwargs, "training"):
        return []
    return tensors_in(
        *(args[position] if position < len(args) else kwargs.get(name) for position, name in _written_arguments(func))
    )


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(func._schema.arguments)
    return tuple((i, argument.name) for i, argument in arguments if _is_written(func, argument))


def _is_written(func: Any, argument: Any) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    if func.namespace == "c10d":
        # Schemas of c10d declare no writes; arguments without "input" in their name are outputs.
        return func._opname != "send" and not argument.name.startswith("input")
    return (func.namespace, func._opname, argument.name) in _UNDECLARED_WRITES


def draws(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase = "forward", drew: bool = False
) -> bool:
    """Return whether a call draws random numbers; attention without dropout does not, although torch tags it as random.

    `drew`: whether the call was observed to draw random numbers.

    Raises:
        CaptureUnsupported: HP511 for a draw in a backward pass, except by the backward of attention: recomputation
            resets the generator between two operators, which a program cannot repeat.
    """
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    drawn = drew or (seeded and _argument(func, args, kwargs, "dropout_p") != 0)
    # The backward of attention receives the random state of its forward.
    if drawn and phase == "backward" and not func._opname.endswith("_backward"):
        raise CaptureUnsupported(
            f"`{func}` draws random numbers in the backward pass, as recomputation with dropout does",
            hint="leave recomputation to the memory plan: "
            "`training.recompute=none training.recompute_layers=null`; or train without dropout",
        )
    return drawn


def is_repeatable(func: Any, writes: bool, draws: bool) -> bool:
    """Return whether a call can be recomputed: it gives equal bits on equal inputs and has no side effects.

    The answer depends on the operator, on torch's tags for it, and on whether the call writes operands or draws random
    numbers.
    """
    tags = {torch.Tag.nondeterministic_bitwise, torch.Tag.data_dependent_output}
    uninitialised = "empty" in func._opname
    communicates = func.namespace in COMMUNICATION
    # Some kernels of accelerators sum gradients of attention in any order, and no tag declares it.
    any_order = func._opname.endswith("_backward") and _has(func, "dropout_p")
    foreign = func.namespace not in TORCH
    pure = not (writes or draws or uninitialised or communicates or any_order or foreign)
    return pure and tags.isdisjoint(func.tags)


def numbers_read(func: Any, flat: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (position, value) of an operator's plain-number outputs that depend on values of tensors.

    Numbers returned together with tensors are sizes and omitted, unless torch tags the operator as data-dependent.
    Call it only for an operator with tensor arguments.
    """
    sizes = any(isinstance(value, torch.Tensor) for value in flat)
    if sizes and torch.Tag.data_dependent_output not in func.tags:
        return []
    return [(i, v) for i, v in enumerate(flat) if isinstance(v, (bool, int, float))]


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Return the FLOPs of a call by torch's formulas, or by formulas here for attention and `_grouped_mm`; else 0."""
    packet, name = func._overloadpacket, func._opname
    if name.startswith("_scaled_dot_product_") and _has(func, "is_causal"):
        causal = _argument(func, args, kwargs, "is_causal")
        if not name.endswith("_backward"):
            return _attention_flops(*args[:3], causal)
        # Five matrix products against two in forward: recomputed scores, then dV, dP, dQ, dK.
        return 2.5 * _attention_flops(*args[1:4], causal)
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    if name == "_grouped_mm":
        left, right = args[0], args[1]
        return 2.0 * left.shape[-2] * left.shape[-1] * right.shape[-1]
    return 0.0


def _has(func: Any, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """Return the value of the argument `name`: as passed, else its default; None if the operator does not have it."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value)
    return None


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Return the FLOPs of Q K^T and P V; with `causal`, without the part above the diagonal."""
    batch, heads, q_len, dim = q.shape
    k_len = k.shape[-2]
    pairs = q_len * k_len
    if causal:
        square = min(q_len, k_len)
        pairs = square * (square + 1) // 2 + (q_len - square) * k_len
    return 2.0 * batch * heads * pairs * (dim + v.shape[-1])


def split_lists(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_results: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Split an operator over lists into one call per list position; return any other operator as one call.

    The arguments may contain views in place of tensors. `_fused_adamw_` and `_foreach_*` treat every position
    independently. The calls therefore give the same bits, and each can run as soon as its own gradient exists.
    `num_results` is the number of new storages among the outputs: the operator is split if it is 0 or the length of the
    lists.
    """
    name = func._opname
    fused = name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad"))
    foreach = name.startswith("_foreach_")
    lists = [a for a in (*args, *kwargs.values()) if _is_tensor_list(a)]
    length = len(lists[0]) if lists else 0
    same = all(len(a) == length for a in lists) and num_results in (0, length)
    if not (fused or foreach) or length < 2 or not same:
        return [(args, kwargs)]

    def part(value: Any, at: int) -> Any:
        # A list of tensors, or of one plain number per position, which `_foreach_*` also takes.
        if isinstance(value, (list, tuple)) and len(value) == length:
            return [value[at]]
        return value

    return [(tuple(part(a, i) for a in args), {k: part(v, i) for k, v in kwargs.items()}) for i in range(length)]


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(t, (View, torch.Tensor)) for t in value)

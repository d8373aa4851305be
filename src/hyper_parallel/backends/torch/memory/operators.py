"""Captured operator calls: a torch operator with tensors replaced by views of numbered storages.

Collectives are operators like any other, on the group they were captured with, but their call only begins them: a plan
says where they are waited for. All of them are ordered, so every rank begins them as it did when it was captured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import Phase

COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operators that other ranks take part in."""
EMPTY = torch.ops.aten.empty.memory_format
"""Makes uninitialised buffers: no others are emptied and refilled in place by their owners."""
TORCH = frozenset(
    ("aten", "prim", "prims", "profiler", "fsdp", "symm_mem", "inductor", *COMMUNICATION)
)
"""Namespaces of torch itself, whose schemas and tags are believed."""
MESSAGES = ("send", "recv_", "recv_any_source_")
"""Operators of c10d that exchange with one other rank; neighbours in the program may depend on each other."""
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
"""The most frequent operators whose results are addresses in the storage of their first argument, and nothing else."""
_NORMS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
_RESIZE = ("resize_", "resize_as_", "resize_as_sparse_", "set_")
"""Of the operators that change a tensor's sizes in place, those that may change its storage."""
_UNMARKED = {
    ("fsdp", "all_gather_copy_in", "all_gather_output"),
    *(("aten", norm, name) for norm in _NORMS for name in ("running_mean", "running_var")),
}
"""Arguments (namespace, operator, name) that are written although their schema does not say so."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as an address inside a storage; making one costs nothing and pins nothing.

    What torch conjugates or negates when it is read, as the gradient of a complex product, is such an address as well.
    """

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    def on(self, base: torch.UntypedStorage) -> torch.Tensor:
        """The tensor on the storage's current bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=base.device)
        tensor: torch.Tensor = empty.set_(base, self.offset, self.size, self.stride)  # type: ignore[call-overload]
        if self.conjugate:
            tensor = tensor.conj()
        return torch._neg_view(tensor) if self.negative else tensor

    @property
    def num_bytes(self) -> int:
        """Bytes the tensor's elements take (an expanded dim counts once)."""
        counted = [n for n, step in zip(self.size, self.stride, strict=True) if step]
        return math.prod(counted) * self.dtype.itemsize if 0 not in self.size else 0


@dataclass(frozen=True, slots=True)
class Call:
    """One replayable operator.

    Attributes:
        func: The operator overload.
        args: Positional arguments with `View` leaves.
        kwargs: Keyword arguments with `View` leaves.
        made: (flat output index, its view) of every output that came with a fresh storage.
        guards: (flat output index, value) of outputs the model's Python code saw as plain numbers.
        room_bytes: What another operator before it makes beside the arena, where this one then may as well.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, View], ...] = ()
    guards: tuple[tuple[int, Any], ...] = ()
    room_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of the model's code, as bytes in host memory."""

    values: torch.Tensor

    def __call__(self) -> torch.Tensor:
        """Return the values."""
        return self.values


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages to and from single ranks that were issued together: all are sent before one is waited for."""

    funcs: tuple[Any, ...]

    def __call__(self, *calls: tuple[Any, ...]) -> list[Any]:
        """Issue every message with its arguments and return their works."""
        return [func(*args) for func, args in zip(self.funcs, calls, strict=True)]


def without_work(out: Any) -> Any:
    """The outputs of a collective once it has ended, with work that is done in place of its own.

    Gloo copies some results when its work is waited for; a caller's later wait would be recorded as operators.
    """
    flat = finished(out)
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result([value for value in flat if isinstance(value, torch.Tensor)])
    done = _create_work_from_future(future).boxed()
    return tree_map_only(torch.ScriptObject, lambda v: done if _is_work(v) else v, out)


def _is_work(value: Any) -> bool:
    return isinstance(value, torch.ScriptObject) and "Work" in str(value._type())


@dataclass(frozen=True, slots=True)
class Arrived:
    """The end of all messages that were sent alone."""

    def __call__(self) -> None:
        """Nothing: what it reads is free after it, and so is waited for."""


def is_message(func: Any) -> bool:
    """A message to or from one rank, which is under way until its storage is needed."""
    return getattr(func, "namespace", "") == "c10d" and func._opname in MESSAGES


def finished(out: Any) -> list[Any]:
    """The flat outputs of an operator, once the communication it began has ended."""
    flat = tree_flatten(out)[0]
    for value in flat:
        if isinstance(value, dist.Work):
            value.wait()
        elif _is_work(value):
            dist.Work.unbox(value).wait()
    return flat


def tensors_in(*values: Any) -> list[torch.Tensor]:
    """The tensors in arguments or outputs of an operator, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(*value)
        elif isinstance(value, dict):
            found += tensors_in(*value.values())
    return found


def written_leaves(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors behind arguments that the operator writes."""
    if torch.Tag.inplace_view in func.tags and func._opname not in _RESIZE:
        return []  # another address in the same bytes, as of a view
    if func._opname in _NORMS and not _argument(func, args, kwargs, "training"):
        return []
    return tensors_in(
        *(
            args[position] if position < len(args) else kwargs.get(name)
            for position, name in _written(func)
        )
    )


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """(position, name) of the arguments that an operator writes."""
    arguments = enumerate(func._schema.arguments)
    return tuple((i, argument.name) for i, argument in arguments if _is_written(func, argument))


def _is_written(func: Any, argument: Any) -> bool:
    if argument.alias_info is not None and argument.alias_info.is_write:
        return True
    if func.namespace == "c10d":
        # Schemas of c10d mark nothing; what is not called an input is filled in.
        return func._opname != "send" and not argument.name.startswith("input")
    return (func.namespace, func._opname, argument.name) in _UNMARKED


def draws(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    phase: Phase = "forward",
    drew: bool = False,
) -> bool:
    """It takes random numbers in this call: an attention without dropout takes none, whatever its tag says.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its named arguments.
        phase: Where it runs.
        drew: It was seen to take some.

    Raises:
        CaptureUnsupported: HP511 in a backward pass: who makes results again sets the generator back between two
            operators, which no program repeats.
    """
    seeded = torch.Tag.nondeterministic_seeded in func.tags
    drawn = drew or (seeded and _argument(func, args, kwargs, "dropout_p") != 0)
    # The backward of an attention is given what its forward drew.
    if drawn and phase == "backward" and not func._opname.endswith("_backward"):
        raise CaptureUnsupported(
            f"`{func}` draws random numbers in the backward pass, as recomputation with dropout does",
            hint="leave recomputation to the memory plan: `training.recompute=none`; or train without dropout",
        )
    return drawn


def is_repeatable(func: Any, writes: bool, draws: bool) -> bool:
    """Running it again on equal inputs gives equal bits and changes nothing else, as far as torch's own tags say."""
    tags = {torch.Tag.nondeterministic_bitwise, torch.Tag.data_dependent_output}
    uninitialised = "empty" in func._opname
    communicates = func.namespace in COMMUNICATION
    # Gradients of attention are added up in any order by some kernels of accelerators, and no tag says so.
    any_order = func._opname.endswith("_backward") and _has(func, "dropout_p")
    foreign = func.namespace not in TORCH
    free = not (writes or draws or uninitialised or communicates or any_order or foreign)
    return free and tags.isdisjoint(func.tags)


def numbers_read(func: Any, flat: Sequence[Any]) -> list[tuple[int, Any]]:
    """(position, value) of plain numbers among an operator's outputs that depend on what tensors hold.

    Numbers that come together with tensors are sizes, as the lengths that flash attention returns on a GPU.
    """
    sizes = any(isinstance(value, torch.Tensor) for value in flat)
    if sizes and torch.Tag.data_dependent_output not in func.tags:
        return []
    return [(i, v) for i, v in enumerate(flat) if isinstance(v, (bool, int, float))]


def count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
    """Floating-point operations: torch's own formulas, but of attention: those refuse grouped heads in torch 2.11."""
    packet, name = func._overloadpacket, func._opname
    if name.startswith("_scaled_dot_product_") and _has(func, "is_causal"):
        causal = _argument(func, args, kwargs, "is_causal")
        if not name.endswith("_backward"):
            return _attention_flops(*args[:3], causal)
        # Five matrix products against two in forward: scores again, then dV, dP, dQ, dK.
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
    """Value of a named argument of a call, however it was passed."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            if position < len(args):
                return args[position]
            return kwargs.get(name, argument.default_value)
    return None


def _attention_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> float:
    """Q K^T and P V; with a causal flag the flash kernels skip what lies above the diagonal."""
    batch, heads, q_len, dim = q.shape
    k_len = k.shape[-2]
    pairs = q_len * k_len
    if causal:
        seen = min(q_len, k_len)
        pairs = seen * (seen + 1) // 2 + (q_len - seen) * k_len
    return 2.0 * batch * heads * pairs * (dim + v.shape[-1])


def split_lists(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], num_made: int
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Cut an operator over lists into one call per list position.

    Tensors may be views already. `_fused_adamw_` and `_foreach_*` treat every position by itself, so the parts give
    the same bits, and each can run as soon as its own gradient exists.

    Args:
        func: The operator.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_made: Fresh storages among its outputs: none, or one per position.
    """
    name = func._opname
    fused = name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad"))
    foreach = name.startswith("_foreach_")
    lists = [a for a in (*args, *kwargs.values()) if _is_tensor_list(a)]
    length = len(lists[0]) if lists else 0
    same = all(len(a) == length for a in lists) and num_made in (0, length)
    if not (fused or foreach) or length < 2 or not same:
        return [(args, kwargs)]

    def part(value: Any, at: int) -> Any:
        if _is_tensor_list(value):
            return [value[at]]
        # `_foreach_*` also takes one plain number per position.
        if isinstance(value, (list, tuple)) and len(value) == length:
            return [value[at]]
        return value

    return [
        (tuple(part(a, i) for a in args), {k: part(v, i) for k, v in kwargs.items()})
        for i in range(length)
    ]


def _is_tensor_list(value: Any) -> bool:
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(t, (View, torch.Tensor)) for t in value)
    )

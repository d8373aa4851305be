"""Operators without values that keep what every storage was made from.

What depends on a parameter has a shape and no memory; the rest (ids, positions, masks) has values, so that code which
asks for them goes on. Marks are bits of a number: those of a result are those of all that it was made from. The
sequence has a prime number of tokens that divides no size of a model, so that a dim of tokens is known by its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

TOKENS = 67
"""Length of the sequence, a prime that no size of a model is a multiple of."""
IDS, POSITIONS, OWN = 1, 2, 4
"""Marks of the token ids, the given positions, and what else differs from token to token."""
FIRST = 3
"""First bit that is free for others."""
_aten = torch.ops.aten
FILLS = {
    *(_aten.zeros, _aten.ones, _aten.empty, _aten.full, _aten.rand, _aten.scalar_tensor),
    *(_aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like, _aten.empty_strided),
    *(_aten.new_zeros, _aten.new_ones, _aten.new_empty, _aten.new_full, _aten.new_empty_strided),
}
"""Operators that read the shape of their input at most, and give the same to every token."""
_REPEATS = {_aten.expand, _aten.repeat}
ALONG = {
    *(_aten.cumsum, _aten.cumprod, _aten.cummax, _aten.cummin, _aten.logcumsumexp, _aten.roll),
    *(_aten.flip, _aten.tril, _aten.triu, _aten._softmax, _aten._log_softmax),
    *(_aten.sort, _aten.topk),
}
"""Operators whose result at a place of a dim depends on other places of it, at the same shape."""


class Marks(TorchDispatchMode):
    """Runs operators, and keeps marks for every storage.

    Args:
        draw: What `torch.rand` draws; at 0 everything is dropped that chance may drop.

    Attributes:
        mixes: Operators that let a token see another one.
        guarded: Storages that nothing may write to.
        written: Whether something did.
    """

    def __init__(self, draw: float = 0.0) -> None:
        super().__init__()
        self._draw = draw
        self.mixes: dict[str, None] = {}
        self.guarded: set[int] = set()
        self.written = False
        self._marks: dict[int, int] = {}
        self._alive: list[Any] = []  # no other storage takes the address of one that is known
        self._known: dict[int, Tensor] = {}
        self._parts: dict[int, Tensor] = {}
        self._results: dict[Any, Any] = {}

    def of(self, value: Any) -> int:
        """Marks of all tensors in a value, together."""
        return self._joined(x for x in tree_leaves(value) if isinstance(x, Tensor))

    def _joined(self, tensors: Iterable[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            total |= self._marks.get(tensor.untyped_storage()._cdata, 0)
        return total

    def set(self, tensor: Tensor, marks: int) -> None:
        """Mark a tensor anew."""
        storage = tensor.untyped_storage()
        self._marks[storage._cdata] = marks
        self._alive.append(storage)

    def fresh(self, tensor: Tensor, marks: int) -> Tensor:
        """A tensor of the same shape without memory, made from nothing but `marks`."""
        return self.hollow(tensor.shape, tensor.dtype, marks)

    def hollow(self, shape: Sequence[int], dtype: torch.dtype, marks: int) -> Tensor:
        """A tensor without memory."""
        with _disable_current_modes():
            out = torch.empty(shape, dtype=dtype, device="meta")
        self.set(out, marks)
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        tensors = [*_tensors((args, kwargs))]
        marks = self._joined(tensors) | (OWN if any(id(t) in self._parts for t in tensors) else 0)
        hollow = any(t.is_meta or isinstance(t, nn.Parameter) for t in tensors)
        if self.guarded and func._schema.is_mutable and tensors:
            self.written |= tensors[0].untyped_storage()._cdata in self.guarded
        if hollow and (made := self._value(packet, tensors[0], kwargs)) is not None:
            if isinstance(made, Tensor):
                self.set(made, marks)
            return made
        if hollow:
            if not all(t.is_meta for t in tensors):
                args, kwargs = tree_map_only(Tensor, self._hollowed, (args, kwargs))
            args = self._sized(packet, args)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta" if hollow else "cpu")
        out = self._shaped(func, args, kwargs) if hollow else func(*args, **kwargs)
        if packet is _aten.rand:
            out.fill_(self._draw)
        for leaf in _tensors(out):
            more = self._watched(packet, args, tensors, leaf, marks)
            self.set(leaf, more | self._joined([leaf]))
        return out

    def _shaped(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator; layers are alike, and shapes of new tensors are worked out for one of them."""
        key = (func, _form(args), _form(kwargs))
        if (known := self._results.get(key)) is not None:
            return tree_map_only(Tensor, _like, known)
        out = func(*args, **kwargs)
        given = [*_tensors((args, kwargs))]
        if not (func._schema.is_mutable or any(self._views(x, given) for x in _tensors(out))):
            self._results[key] = out
        return out

    def _hollowed(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._known:
            self._alive.append(tensor)
            like = _like(tensor)
            self.set(like, self.of(tensor))
            self._known[id(tensor)] = like
        return self._known[id(tensor)]

    def _value(self, packet: Any, tensor: Tensor, kwargs: dict[str, Any]) -> Any:
        """What stands for a value that is asked for: zero, and as many rows as there are tokens."""
        if packet is _aten._local_scalar_dense:
            return torch.zeros((), dtype=tensor.dtype).item()
        device = kwargs.get("device")
        if packet is _aten._to_copy and device is not None and torch.device(device).type == "cpu":
            return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)
        if packet is _aten.nonzero:
            rows = TOKENS if _power(tensor) else 1
            return torch.empty(rows, tensor.dim(), dtype=torch.long, device="meta")
        return None

    def _sized(self, packet: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments whose sizes depend on values, with sizes that fit."""
        if packet is _aten.split_with_sizes:
            *sizes, _ = args[1]
            rest = args[0].shape[args[2] if len(args) > 2 else 0] - sum(sizes)
            return args[0], [*sizes, rest], *args[2:]
        if packet not in (_aten.index, _aten.index_put, _aten.index_put_):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                rows = torch.empty(TOKENS, dtype=torch.long, device="meta")
                self.set(rows, self.of(index))
                indices += [rows] * index.dim()
            else:
                indices.append(index)
        return args[0], indices, *args[2:]

    def _watched(
        self, packet: Any, args: tuple[Any, ...], given: list[Tensor], out: Tensor, marks: int
    ) -> int:
        """Marks of a result, and a note when it shows a token something of another one."""
        if packet in FILLS:
            return 0
        before = max([_power(t) for t in given], default=0)
        after = _power(out) if out.numel() else before  # an empty part leaves nothing out
        along = _along_tokens(packet, args)
        if marks & IDS:
            drops = before == 1 and after != 1 and out.numel() > 0
            wide = packet is _aten.convolution and any(
                k > 1 and n >= TOKENS
                for k, n in zip(args[1].shape[2:], args[0].shape[2:], strict=True)
            )
            if out.is_floating_point() and (drops or wide or along):
                self.mixes[packet.__name__] = None
        elif marks & POSITIONS and before > after and self._views(out, given):
            # The rest of the storage is what it was: what is made of this part is not.
            self._parts[id(out)] = out
        elif (
            along
            or (marks & POSITIONS and before > after)
            or (after and not before and packet not in _REPEATS)
        ):
            return marks | OWN
        return marks

    def _views(self, out: Tensor, given: list[Tensor]) -> bool:
        place = out.untyped_storage()._cdata
        return any(t.untyped_storage()._cdata == place for t in given)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those among the arguments or results of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _form(value: Any) -> Any:
    """What the form of a result depends on; 1, 1.0 and True differ, and so do tensors with and without values."""
    if isinstance(value, Tensor):
        return (value.device, value.dtype, *value.shape, None, *value.stride())
    if isinstance(value, dict):
        return tuple((key, _form(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    return type(value), value


def _power(tensor: Tensor) -> int:
    """How many dims of tokens a tensor has."""
    size, power = tensor.numel(), 0
    while size and size % TOKENS == 0:
        size, power = size // TOKENS, power + 1
    return power


def _along_tokens(packet: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator works along a dim of tokens."""
    if packet not in ALONG or not args[0].dim():
        return False
    if packet in (_aten.tril, _aten.triu):
        return any(n % TOKENS == 0 for n in args[0].shape[-2:])
    after = 2 if packet in (_aten.roll, _aten.topk) else 1
    dims = args[after] if len(args) > after else -1
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return any(
        isinstance(d, int) and args[0].shape[d] and args[0].shape[d] % TOKENS == 0 for d in dims
    )

"""Dispatch mode that runs a forward pass on meta tensors and records the origins of every tensor.

Origins are inputs such as token ids, and parameters or activations that the caller marks. Each storage has an integer,
its marks, with one bit per origin. The result of an operator has the marks of all inputs whose values it reads.

Tensors that depend on a parameter are meta tensors. All other tensors (ids, positions, masks) have values, so that code
that reads their values works. The sequence length is a prime number, assumed to divide no dim of the model. A dim that
is a multiple of it is therefore a token dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hyper_parallel.backends.torch.tensor_trees import tensors_in

TOKENS = 67
"""Sequence length of the trace: a prime number, assumed to divide no dim of a model."""
IDS, POSITIONS, TOKEN_DEPENDENT = 1, 2, 4
"""Marks of the token ids, of the position argument, and of other values that differ between tokens."""
FIRST_FREE_BIT = 3
"""Index of the first bit without a predefined meaning."""
_aten = torch.ops.aten
FILL_OPS = {
    *(_aten.zeros, _aten.ones, _aten.empty, _aten.full, _aten.rand, _aten.scalar_tensor),
    *(_aten.zeros_like, _aten.ones_like, _aten.empty_like, _aten.full_like, _aten.empty_strided),
    *(_aten.new_zeros, _aten.new_ones, _aten.new_empty, _aten.new_full, _aten.new_empty_strided),
}
"""Operators that read at most the shape of their input."""
_REPEATS = {_aten.expand, _aten.repeat}
ALONG_DIM_OPS = {
    *(_aten.cumsum, _aten.cumprod, _aten.cummax, _aten.cummin, _aten.logcumsumexp, _aten.roll),
    *(_aten.flip, _aten.tril, _aten.triu, _aten._softmax, _aten._log_softmax),
    *(_aten.sort, _aten.topk),
}
"""Operators along a dimension, whose result at one index of the dimension depends on other indices."""


class FlowTracer(TorchDispatchMode):
    """Dispatch mode that propagates marks from the inputs to the results of operators; see the module docstring.

    Args:
        draw: Number that `torch.rand` returns, such as 0: code that skips layers at random then skips all of them.

    Attributes:
        num_operators: Number of operators that have run.
        mixes: Names of operators whose result for one token depends on other tokens.
        guarded: Addresses of the storages whose writes are detected.
        written: Addresses of the guarded storages that were written in place.
    """

    def __init__(self, draw: float = 0.0) -> None:
        super().__init__()
        self._draw = draw
        self.num_operators = 0
        self.mixes: dict[str, None] = {}
        self.guarded: set[int] = set()
        self.written: set[int] = set()
        self._marks: dict[int, int] = {}
        self._alive: list[Any] = []  # prevents reuse of the addresses of marked storages
        self._known: dict[int, Tensor] = {}
        self._parts: dict[int, Tensor] = {}
        self._results: dict[Any, Any] = {}

    def marks_of(self, value: Any) -> int:
        """Return the union of the marks of all tensors in a value."""
        return self._union(x for x in tree_leaves(value) if isinstance(x, Tensor))

    def _union(self, tensors: Iterable[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            total |= self._marks.get(tensor.untyped_storage()._cdata, 0)
        return total

    def mark(self, tensor: Tensor, marks: int) -> None:
        """Replace the marks of a tensor's storage."""
        storage = tensor.untyped_storage()
        self._marks[storage._cdata] = marks
        self._alive.append(storage)

    def meta_tensor(self, shape: Sequence[int], dtype: torch.dtype, marks: int) -> Tensor:
        """Return a meta tensor with these marks."""
        with _disable_current_modes():
            out = torch.empty(shape, dtype=dtype, device="meta")
        self.mark(out, marks)
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs, packet = dict(kwargs or {}), func.overloadpacket
        self.num_operators += 1
        tensors = tensors_in(args, kwargs)
        marks = self._union(tensors)
        if any(id(t) in self._parts for t in tensors):
            marks |= TOKEN_DEPENDENT
        on_meta = any(t.is_meta or isinstance(t, nn.Parameter) for t in tensors)
        if self.guarded and func._schema.is_mutable and tensors:
            self.written |= self.guarded & {tensors[0].untyped_storage()._cdata}
        if on_meta:
            value = self._placeholder_value(packet, tensors[0], kwargs)
            if value is not None:
                if isinstance(value, Tensor):
                    self.mark(value, marks)
                return value
            if not all(t.is_meta for t in tensors):
                args, kwargs = tree_map_only(Tensor, self._to_meta, (args, kwargs))
            args = self._resolve_sizes(packet, args)
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta" if on_meta else "cpu")
        out = self._run_cached(func, args, kwargs) if on_meta else func(*args, **kwargs)
        if packet is _aten.rand:
            out.fill_(self._draw)
        for leaf in tensors_in(out):
            result_marks = self._result_marks(packet, args, tensors, leaf, marks)
            self.mark(leaf, result_marks | self._union([leaf]))
        return out

    def _run_cached(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator on meta tensors; later calls with equal shapes and arguments reuse the result's shape."""
        key = (func, _cache_key(args), _cache_key(kwargs))
        if (known := self._results.get(key)) is not None:
            return tree_map_only(Tensor, _like, known)
        out = func(*args, **kwargs)
        inputs = tensors_in(args, kwargs)
        if not (func._schema.is_mutable or any(self._views(x, inputs) for x in tensors_in(out))):
            self._results[key] = out
        return out

    def _to_meta(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        if id(tensor) not in self._known:
            self._alive.append(tensor)
            like = _like(tensor)
            self.mark(like, self.marks_of(tensor))
            self._known[id(tensor)] = like
        return self._known[id(tensor)]

    def _placeholder_value(self, packet: Any, tensor: Tensor, kwargs: dict[str, Any]) -> Any:
        """Return a placeholder result for an operator that needs the values of a meta tensor; None for others."""
        if packet is _aten._local_scalar_dense:
            return torch.zeros((), dtype=tensor.dtype).item()
        device = kwargs.get("device")
        if packet is _aten._to_copy and device is not None and torch.device(device).type == "cpu":
            return torch.zeros(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)
        if packet is _aten.nonzero:
            rows = TOKENS if _num_token_dims(tensor) else 1
            return torch.empty(rows, tensor.dim(), dtype=torch.long, device="meta")
        return None

    def _resolve_sizes(self, packet: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments of an operator with sizes that depend on values replaced by assumed sizes.

        A boolean mask is assumed to select `TOKENS` rows. The last part of a split gets the remaining size.
        """
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
                self.mark(rows, self.marks_of(index))
                indices += [rows] * index.dim()
            else:
                indices.append(index)
        return args[0], indices, *args[2:]

    def _result_marks(self, packet: Any, args: tuple[Any, ...], inputs: list[Tensor], out: Tensor, marks: int) -> int:
        """Return the marks of the result `out`; add an operator that mixes tokens to `mixes`."""
        if packet in FILL_OPS:
            return 0
        before = max([_num_token_dims(t) for t in inputs], default=0)
        after = _num_token_dims(out) if out.numel() else before  # an empty slice drops no tokens
        along = _along_tokens(packet, args)
        if marks & IDS:
            drops = before == 1 and after != 1 and out.numel() > 0
            wide = packet is _aten.convolution and any(
                k > 1 and n >= TOKENS for k, n in zip(args[1].shape[2:], args[0].shape[2:], strict=True)
            )  # fmt: skip
            if out.is_floating_point() and (drops or wide or along):
                self.mixes[packet.__name__] = None
        elif marks & POSITIONS and before > after and self._views(out, inputs):
            # A mark on the shared storage would mark the full tensor too. Results computed from this view are marked.
            self._parts[id(out)] = out
        elif along or (marks & POSITIONS and before > after) or (after and not before and packet not in _REPEATS):
            return marks | TOKEN_DEPENDENT
        return marks

    def _views(self, out: Tensor, inputs: list[Tensor]) -> bool:
        storage = out.untyped_storage()._cdata
        return any(t.untyped_storage()._cdata == storage for t in inputs)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _cache_key(value: Any) -> Any:
    """Return a cache key of an argument: operators on arguments with equal keys return equal shapes.

    The key distinguishes 1, 1.0 and True, and meta and CPU tensors.
    """
    if isinstance(value, Tensor):
        return (value.device, value.dtype, *value.shape, None, *value.stride())
    if isinstance(value, dict):
        return tuple((key, _cache_key(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_cache_key, value))
    return type(value), value


def _num_token_dims(tensor: Tensor) -> int:
    """Return the number of token dimensions of a tensor, also if they are flattened into other dimensions."""
    size, power = tensor.numel(), 0
    while size and size % TOKENS == 0:
        size, power = size // TOKENS, power + 1
    return power


def _along_tokens(packet: Any, args: tuple[Any, ...]) -> bool:
    if packet not in ALONG_DIM_OPS or not args[0].dim():
        return False
    if packet in (_aten.tril, _aten.triu):
        return any(n % TOKENS == 0 for n in args[0].shape[-2:])
    after = 2 if packet in (_aten.roll, _aten.topk) else 1
    dims = args[after] if len(args) > after else -1
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    return any(isinstance(d, int) and args[0].shape[d] and args[0].shape[d] % TOKENS == 0 for d in dims)

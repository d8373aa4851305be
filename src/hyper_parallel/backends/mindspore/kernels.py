"""MindSpore functions of the table `OPERATORS`.

Each function takes the arguments of the ATen operator, with tensors of MindSpore, data types of MindSpore, and tuples
in place of lists. Shapes are static, so `x.shape` is a constant while a graph is compiled.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

# --- elementwise ----------------------------------------------------------------------------------------------------


def add(x, y, alpha=1):
    return ops.add(x, y if alpha == 1 else y * alpha)


def sub(x, y, alpha=1):
    return ops.sub(x, y if alpha == 1 else y * alpha)


def rsub(x, y, alpha=1):
    return ops.sub(y, x if alpha == 1 else x * alpha)


def mul(x, y):
    return ops.mul(x, y)


def div(x, y):
    return ops.div(x, y)


def div_mode(x, y, rounding_mode=None):
    return ops.div(x, y, rounding_mode=rounding_mode)


def floor_divide(x, y):
    return ops.floor_div(x, y)


def remainder(x, y):
    return ops.floor_mod(x, y)


def fmod(x, y):
    return x - ops.trunc(x / y) * y


def neg(x):
    return ops.neg(x)


def absolute(x):
    return ops.abs(x)


def sign(x):
    return ops.sign(x)


def exp(x):
    return ops.exp(x)


def expm1(x):
    return ops.expm1(x)


def log(x):
    return ops.log(x)


def log1p(x):
    return ops.log1p(x)


def sqrt(x):
    return ops.sqrt(x)


def rsqrt(x):
    return ops.rsqrt(x)


def reciprocal(x):
    return ops.reciprocal(x)


def sin(x):
    return ops.sin(x)


def cos(x):
    return ops.cos(x)


def tanh(x):
    return ops.tanh(x)


def sigmoid(x):
    return ops.sigmoid(x)


def erf(x):
    return ops.erf(x)


def relu(x):
    return ops.relu(x)


def silu(x):
    return x * ops.sigmoid(x)


def gelu(x, approximate="none"):
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + ops.tanh(inner))
    return 0.5 * x * (1.0 + ops.erf(x * 0.7071067811865476))


def floor(x):
    return ops.floor(x)


def round_half_even(x):
    return ops.round(x)


def power(x, y):
    return ops.pow(x, y)


def maximum(x, y):
    return ops.maximum(x, y)


def minimum(x, y):
    return ops.minimum(x, y)


def clamp(x, low=None, high=None):
    return ops.clamp(x, low, high)


def where(condition, x, y):
    return ops.select(*_broadcast(condition, x, y))


def _broadcast(condition, x, y):
    shape = ops.add(condition.astype(ms.float32), ops.add(x, y).astype(ms.float32)).shape
    return (
        ops.broadcast_to(condition, shape),
        ops.broadcast_to(x, shape),
        ops.broadcast_to(y, shape),
    )


# --- comparison and logic -------------------------------------------------------------------------------------------


def equal(x, y):
    return ops.equal(x, y)


def not_equal(x, y):
    return ops.not_equal(x, y)


def less(x, y):
    return ops.less(x, y)


def less_equal(x, y):
    return ops.less_equal(x, y)


def greater(x, y):
    return ops.greater(x, y)


def greater_equal(x, y):
    return ops.greater_equal(x, y)


def both(x, y):
    return ops.logical_and(x, y)


def either(x, y):
    return ops.logical_or(x, y)


def inverse(x):
    return ops.logical_not(x)


def isnan(x):
    return ops.isnan(x)


def isinf(x):
    return ops.isinf(x)


# --- products and reductions ----------------------------------------------------------------------------------------


def mm(x, y):
    return ops.MatMul()(x, y)


def bmm(x, y):
    return ops.BatchMatMul()(x, y)


def addmm(bias, x, y, beta=1, alpha=1):
    product = ops.MatMul()(x, y)
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


def baddbmm(bias, x, y, beta=1, alpha=1):
    product = ops.BatchMatMul()(x, y)
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


def sum_over(x, dims=None, keepdim=False, dtype=None):
    value = x if dtype is None else ops.cast(x, dtype)
    if value.dtype == ms.bool_:
        value = ops.cast(value, ms.int64)
    axes = tuple(range(x.ndim)) if dims is None or len(dims) == 0 else dims
    return ops.ReduceSum(keep_dims=keepdim)(value, axes)


def sum_all(x, dtype=None):
    return sum_over(x, None, False, dtype)


def mean(x, dims=None, keepdim=False, dtype=None):
    axes = tuple(range(x.ndim)) if dims is None or len(dims) == 0 else dims
    return ops.ReduceMean(keep_dims=keepdim)(x if dtype is None else ops.cast(x, dtype), axes)


def mean_all(x, dtype=None):
    return mean(x, None, False, dtype)


def variance(x, dims=None, correction=1, keepdim=False):
    axes = tuple(range(x.ndim)) if dims is None else dims
    centred = x - ops.ReduceMean(keep_dims=True)(x, axes)
    count = 1
    for axis in axes:
        count = count * x.shape[axis]
    return ops.ReduceSum(keep_dims=keepdim)(centred * centred, axes) / (count - correction)


def amax(x, dims=(), keepdim=False):
    return ops.ReduceMax(keep_dims=keepdim)(x, dims)


def amin(x, dims=(), keepdim=False):
    return ops.ReduceMin(keep_dims=keepdim)(x, dims)


def max_over(x, dim, keepdim=False):
    index, value = ops.ArgMaxWithValue(axis=dim, keep_dims=keepdim)(x)
    return value, ops.cast(index, ms.int64)


def argmax(x, dim=None, keepdim=False):
    return ops.cast(ops.argmax(x, dim, keepdim), ms.int64)


def any_over(x, dim, keepdim=False):
    return ops.ReduceAny(keep_dims=keepdim)(ops.cast(x, ms.bool_), dim)


def cumsum(x, dim, dtype=None):
    value = x if dtype is None else ops.cast(x, dtype)
    if value.dtype == ms.bool_:
        value = ops.cast(value, ms.int64)
    return ops.CumSum()(value, dim)


def softmax(x, dim, half_to_float=False):
    return ops.Softmax(dim)(ops.cast(x, ms.float32) if half_to_float else x)


def log_softmax(x, dim, half_to_float=False):
    return ops.LogSoftmax(dim)(ops.cast(x, ms.float32) if half_to_float else x)


def native_layer_norm(x, shape, weight, bias, eps):
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean_value = ops.ReduceMean(keep_dims=True)(x, axes)
    centred = x - mean_value
    scale = ops.rsqrt(ops.ReduceMean(keep_dims=True)(centred * centred, axes) + eps)
    result = centred * scale
    if weight is not None:
        result = result * weight
    if bias is not None:
        result = result + bias
    return result, mean_value, scale


def topk(x, k, dim=-1, largest=True, sort=True):
    values, indices = ops.topk(x, k, dim, largest, sort)
    return values, ops.cast(indices, ms.int64)


def sort_values(x, dim=-1, descending=False):
    values, indices = ops.sort(x, dim, descending)
    return values, ops.cast(indices, ms.int64)


# --- shapes ---------------------------------------------------------------------------------------------------------


def view(x, shape):
    return ops.reshape(x, shape)


def permute(x, dims):
    return ops.transpose(x, _positive(dims, x.ndim))


def _positive(dims, rank):
    out = ()
    for dim in dims:
        out = (*out, dim + rank if dim < 0 else dim)
    return out


def expand(x, shape):
    added = len(shape) - x.ndim
    full = ()
    for i in range(len(shape)):
        full = (*full, x.shape[i - added] if shape[i] == -1 else shape[i])
    return ops.broadcast_to(x, full)


def unsqueeze(x, dim):
    return ops.expand_dims(x, dim)


def squeeze(x, dims):
    axes = _positive(dims if isinstance(dims, tuple) else (dims,), x.ndim)
    shape = ()
    for i in range(x.ndim):
        if i not in axes or x.shape[i] != 1:
            shape = (*shape, x.shape[i])
    return ops.reshape(x, shape)


def cat(tensors, dim=0):
    return ops.cat(tensors, dim)


def split_with_sizes(x, sizes, dim=0):
    axis = dim + x.ndim if dim < 0 else dim
    parts = ()
    begin = 0
    for size in sizes:
        parts = (*parts, _narrow(x, axis, begin, size))
        begin = begin + size
    return parts


def _narrow(x, axis, begin, size):
    begins, sizes = (), ()
    for i in range(x.ndim):
        begins = (*begins, begin if i == axis else 0)
        sizes = (*sizes, size if i == axis else x.shape[i])
    return ops.slice(x, begins, sizes)


def _limits(size, start, end):
    first = 0 if start is None else start
    last = size if end is None else end
    first = first + size if first < 0 else first
    last = last + size if last < 0 else last
    return min(first, size), min(last, size)


def slice_along(x, dim=0, start=None, end=None, step=1):
    axis = dim + x.ndim if dim < 0 else dim
    first, last = _limits(x.shape[axis], start, end)
    if step == 1:
        return _narrow(x, axis, first, last - first)
    begins, ends, steps = (), (), ()
    for i in range(x.ndim):
        begins = (*begins, first if i == axis else 0)
        ends = (*ends, last if i == axis else x.shape[i])
        steps = (*steps, step if i == axis else 1)
    return ops.strided_slice(x, begins, ends, steps)


def slice_scatter(x, source, dim=0, start=None, end=None, step=1):
    axis = dim + x.ndim if dim < 0 else dim
    size = x.shape[axis]
    first, last = _limits(size, start, end)
    if step != 1:
        index = ops.cast(ops.arange(first, last, step), ms.int32)
        return ops.index_add(x * 1, index, source - slice_along(x, dim, start, end, step), axis)
    parts = (source,)
    if first > 0:
        parts = (_narrow(x, axis, 0, first), *parts)
    if last < size:
        parts = (*parts, _narrow(x, axis, last, size - last))
    return ops.cat(parts, axis) if len(parts) > 1 else source


def select(x, dim, index):
    axis = dim + x.ndim if dim < 0 else dim
    begin = index + x.shape[axis] if index < 0 else index
    return ops.squeeze(_narrow(x, axis, begin, 1), axis)


def select_scatter(x, source, dim, index):
    begin = index + x.shape[dim] if index < 0 else index
    return slice_scatter(x, ops.expand_dims(source, dim), dim, begin, begin + 1)


def flip(x, dims):
    return ops.flip(x, dims)


def constant_pad_nd(x, pad, value=0.0):
    return ops.pad(x, pad, "constant", value)


def to_copy(x, dtype=None, **_):
    return x if dtype is None else ops.cast(x, dtype)


# --- constants ------------------------------------------------------------------------------------------------------


def full(shape, value, dtype=None):
    return ops.fill(ms.float32 if dtype is None else dtype, shape, value)


def full_like(x, value, dtype=None):
    return ops.fill(x.dtype if dtype is None else dtype, x.shape, value)


def scalar_tensor(value, dtype=None):
    return ops.fill(ms.float32 if dtype is None else dtype, (), value)


# --- indices --------------------------------------------------------------------------------------------------------


def embedding(weight, index, *_):
    return ops.gather(weight, index, 0)


def index_select(x, dim, index):
    return ops.gather(x, index, dim)


def gather(x, dim, index):
    return ops.gather_elements(x, dim, index)


def scatter(x, dim, index, source):
    return ops.tensor_scatter_elements(x, index, source, dim)


def scatter_value(x, dim, index, value):
    return ops.tensor_scatter_elements(x, index, ops.fill(x.dtype, index.shape, value), dim)


def scatter_add(x, dim, index, source):
    return ops.tensor_scatter_elements(x, index, source, dim, "add")


def _linear(x, indices):
    """Return one index for the adjacent indexed dimensions, the first of them, and their number."""
    first, count = -1, 0
    for i in range(len(indices)):
        if indices[i] is not None:
            first = i if first < 0 else first
            count = count + 1
    linear = indices[first]
    for i in range(first + 1, first + count):
        linear = linear * x.shape[i] + indices[i]
    return linear, first, count


def _flat(x, first, count):
    size = 1
    for i in range(first, first + count):
        size = size * x.shape[i]
    return ops.reshape(x, (*x.shape[:first], size, *x.shape[first + count :]))


def index(x, indices):
    linear, first, count = _linear(x, indices)
    return ops.gather(_flat(x, first, count), linear, first)


def index_put(x, indices, values, accumulate=False):
    linear, first, count = _linear(x, indices)
    flat = _flat(x, first, count)
    rest = flat.shape[first + 1 :]
    rows = ops.reshape(linear, (-1, 1))
    updates = ops.broadcast_to(values, (*flat.shape[:first], *linear.shape, *rest))
    updates = ops.reshape(updates, (*flat.shape[:first], -1, *rest))
    if first > 0:  # the indexed dimension comes first
        order = (first, *range(first), *range(first + 1, flat.ndim))
        flat, updates = ops.transpose(flat, order), ops.transpose(updates, order)
    if accumulate:
        result = ops.tensor_scatter_add(flat, rows, updates)
    else:
        result = ops.TensorScatterUpdate()(flat, rows, updates)
    if first > 0:
        result = ops.transpose(result, (*range(1, first + 1), 0, *range(first + 1, flat.ndim)))
    return ops.reshape(result, x.shape)


def dtype(name: str) -> Any:
    """Return MindSpore's data type of torch's name."""
    return ms.bool_ if name == "bool" else getattr(ms, name)


def tensor(array: Any) -> Tensor:
    """Return a tensor of a numpy array."""
    return Tensor.from_numpy(array)

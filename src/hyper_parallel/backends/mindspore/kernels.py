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


def softplus(x, beta=1.0, threshold=20.0):
    scaled = x * beta
    return where(ops.greater(scaled, threshold), x, ops.log1p(ops.exp(scaled)) / beta)


def elu(x, alpha=1.0, scale=1.0, input_scale=1.0):
    return where(ops.greater(x, 0), x * scale, ops.expm1(x * input_scale) * (alpha * scale))


def leaky_relu(x, slope=0.01):
    return where(ops.greater(x, 0), x, x * slope)


def hardtanh(x, low=-1.0, high=1.0):
    return ops.clamp(x, low, high)


def ceil(x):
    return ops.ceil(x)


def trunc(x):
    return ops.trunc(x)


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


def clamp_max(x, high):
    return ops.clamp(x, None, high)


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


def _truth(x):
    return x if x.dtype == ms.bool_ else ops.not_equal(x, 0)


def bitwise_and(x, y):
    return ops.logical_and(x, y) if x.dtype == ms.bool_ else ops.bitwise_and(x, y)


def bitwise_or(x, y):
    return ops.logical_or(x, y) if x.dtype == ms.bool_ else ops.bitwise_or(x, y)


def bitwise_not(x):
    return ops.logical_not(x) if x.dtype == ms.bool_ else -1 - x


def logical_and(x, y):
    return ops.logical_and(_truth(x), _truth(y))


def logical_or(x, y):
    return ops.logical_or(_truth(x), _truth(y))


def logical_xor(x, y):
    return ops.not_equal(_truth(x), _truth(y))


def logical_not(x):
    return ops.logical_not(_truth(x))


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


def vector_norm(x, order=2, dims=None, keepdim=False, dtype=None):
    value = x if dtype is None else ops.cast(x, dtype)
    return ops.sqrt(sum_over(value * value, dims, keepdim))


def amax(x, dims=(), keepdim=False):
    return ops.ReduceMax(keep_dims=keepdim)(x, dims)


def amin(x, dims=(), keepdim=False):
    return ops.ReduceMin(keep_dims=keepdim)(x, dims)


def max_over(x, dim, keepdim=False):
    index, value = ops.ArgMaxWithValue(axis=dim, keep_dims=keepdim)(x)
    return value, ops.cast(index, ms.int64)


def argmax(x, dim=None, keepdim=False):
    return ops.cast(ops.argmax(x, dim, keepdim), ms.int64)


def min_over(x, dim, keepdim=False):
    index, value = ops.ArgMinWithValue(axis=dim, keep_dims=keepdim)(x)
    return value, ops.cast(index, ms.int64)


def any_over(x, dim, keepdim=False):
    return ops.ReduceAny(keep_dims=keepdim)(_truth(x), dim)


def any_all(x):
    return any_over(x, tuple(range(x.ndim)))


def product_over(x, dim, keepdim=False, dtype=None):
    return ops.ReduceProd(keep_dims=keepdim)(x if dtype is None else ops.cast(x, dtype), dim)


def cumsum(x, dim, dtype=None):
    value = x if dtype is None else ops.cast(x, dtype)
    if value.dtype == ms.bool_:
        value = ops.cast(value, ms.int64)
    return ops.CumSum()(value, dim)


def softmax(x, dim, half_to_float=False):
    value = ops.cast(x, ms.float32) if half_to_float else x
    # MindSpore returns zeros for a row of -inf, and for all rows after it.
    masked = ops.equal(ops.ReduceMax(keep_dims=True)(value, dim), float("-inf"))
    result = ops.Softmax(dim)(ops.masked_fill(value, masked, 0.0))
    return ops.masked_fill(result, masked, float("nan"))


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


def sort_stable(x, stable=True, dim=-1, descending=False):
    size = x.shape[0]  # the position decides between equal integers
    keys = x * size + ops.cast(ops.arange(size), x.dtype)
    order = ops.cast(ops.sort(keys, dim, descending)[1], ms.int64)
    return ops.gather(x, order, 0), order


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


def repeat(x, repeats):
    shape = x.shape
    for _ in range(len(repeats) - x.ndim):
        shape = (1, *shape)
    return ops.tile(ops.reshape(x, shape), repeats)


def copy(x, source, *_):
    return ops.broadcast_to(ops.cast(source, x.dtype), x.shape)


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
    added, total = (), 0
    for i in range(len(pad) // 2):
        axis = x.ndim - 1 - i
        before, after = pad[2 * i], pad[2 * i + 1]
        first, last = max(-before, 0), max(-after, 0)  # negative numbers cut
        if first + last > 0:
            x = _narrow(x, axis, first, x.shape[axis] - first - last)
        added = (*added, max(before, 0), max(after, 0))
        total = total + max(before, 0) + max(after, 0)
    return ops.pad(x, added, "constant", value) if total > 0 else x


def to_copy(x, dtype=None, **_):
    return x if dtype is None else ops.cast(x, dtype)


# --- constants ------------------------------------------------------------------------------------------------------


def full(shape, value, dtype=None):
    return ops.fill(ms.float32 if dtype is None else dtype, shape, value)


def full_like(x, value, dtype=None):
    return ops.fill(x.dtype if dtype is None else dtype, x.shape, value)


def new_empty(x, shape, strides=None, dtype=None):
    return ops.fill(x.dtype if dtype is None else dtype, shape, 0)


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


def _order(x, indices):
    """Return the indexed dimensions, and the others."""
    indexed, others = (), ()
    for i in range(x.ndim):
        if i < len(indices) and indices[i] is not None:
            indexed = (*indexed, i)
        else:
            others = (*others, i)
    return indexed, others


def _rows(x, indices):
    """Return x with the indexed dimensions as one row dimension in front, and the index into the rows."""
    indexed, others = _order(x, indices)
    linear, rows = 0, 1
    for i in indexed:
        size = x.shape[i]
        linear = linear * size + ops.select(indices[i] < 0, indices[i] + size, indices[i])
        rows = rows * size
    moved = ops.transpose(x, (*indexed, *others))
    return ops.reshape(moved, (rows, *moved.shape[len(indexed) :])), linear


def _front(x, indices):
    """Return the number of dimensions in front of those of the indices, in a result of `index`."""
    indexed, _ = _order(x, indices)
    adjacent = indexed[-1] - indexed[0] == len(indexed) - 1
    return indexed[0] if adjacent else 0


def index(x, indices):
    flat, linear = _rows(x, indices)
    result = ops.gather(flat, linear, 0)
    front, count = _front(x, indices), linear.ndim
    if front == 0:
        return result
    order = (*range(count, count + front), *range(count), *range(count + front, result.ndim))
    return ops.transpose(result, order)


def index_put(x, indices, values, accumulate=False):
    flat, linear = _rows(x, indices)
    front, count = _front(x, indices), linear.ndim
    rest = flat.shape[1:]
    updates = ops.broadcast_to(values, (*rest[:front], *linear.shape, *rest[front:]))
    if front > 0:  # the dimensions of the indices come first
        order = (*range(front, front + count), *range(front), *range(front + count, updates.ndim))
        updates = ops.transpose(updates, order)
    updates = ops.reshape(updates, (-1, *rest))
    index_of_rows = ops.reshape(linear, (-1, 1))
    if accumulate:
        result = ops.tensor_scatter_add(flat, index_of_rows, updates)
    else:
        result = ops.TensorScatterUpdate()(flat, index_of_rows, updates)
    indexed, others = _order(x, indices)
    order = (*indexed, *others)
    shape, back = (), ()
    for i in range(x.ndim):
        shape = (*shape, x.shape[order[i]])
        for j in range(x.ndim):
            back = (*back, j) if order[j] == i else back
    return ops.transpose(ops.reshape(result, shape), back)


# --- convolutions over one dimension, with a stride of one ----------------------------------------------------------


def _taps(x, weight, padding, dilation):
    """Return the padded part of x under each column of the weight."""
    padded = constant_pad_nd(x, (padding[0], padding[0]))
    length = padded.shape[2] - dilation[0] * (weight.shape[2] - 1)
    parts = ()
    for k in range(weight.shape[2]):
        parts = (*parts, _narrow(padded, 2, k * dilation[0], length))
    return parts


def _column(weight, k, groups):
    """Return a column of the weight: a matrix, or one factor per channel."""
    return select(weight, 2, k) if groups == 1 else _narrow(ops.squeeze(weight, 1), 1, k, 1)


def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    total = 0
    parts = _taps(x, weight, padding, dilation)
    for k in range(len(parts)):
        column = _column(weight, k, groups)
        total = total + (ops.matmul(column, parts[k]) if groups == 1 else column * parts[k])
    return total if bias is None else total + ops.reshape(bias, (1, -1, 1))


def convolution_backward(
    grad, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask
):
    parts = _taps(x, weight, padding, dilation)
    last = dilation[0] * (weight.shape[2] - 1)
    of_x, of_weight = 0, ()
    for k in range(len(parts)):
        column = _column(weight, k, groups)
        if groups == 1:
            share = ops.matmul(ops.transpose(column, (1, 0)), grad)
            step = ops.matmul(grad, ops.transpose(parts[k], (0, 2, 1)))
            step = ops.ReduceSum()(step, 0)
        else:
            share = column * grad
            step = ops.expand_dims(ops.ReduceSum()(grad * parts[k], (0, 2)), 1)
        begin = k * dilation[0]
        of_x = of_x + constant_pad_nd(share, (begin, last - begin))
        of_weight = (*of_weight, step)
    of_x = constant_pad_nd(of_x, (-padding[0], -padding[0]))
    return of_x, ops.stack(of_weight, 2), ops.ReduceSum()(grad, (0, 2))


# --- collectives ----------------------------------------------------------------------------------------------------
# Ranks run them in the order of the program, which MindSpore changes unless each one depends on the previous one.
# A group is the name of the communicator of all ranks, the position of this rank in the group, the number of all ranks,
# and the ranks of the group. The CPU has kernels for all ranks only: all of them run the same collectives, and those of
# a smaller group select its part.


def after(x, previous):
    return ops.Depend()(x, previous)


def _of_members(x, group):
    """Return the tensors of the ranks of a group, stacked."""
    rows = ops.AllGather(group[0])(ops.reshape(x, (-1,)))
    everyone = ops.reshape(rows, (group[2], *x.shape))
    parts = ()
    for rank in group[3]:
        parts = (*parts, _narrow(everyone, 0, rank, 1))
    return ops.cat(parts, 0)


def all_reduce(x, _, group):
    if len(group[3]) < group[2]:
        return ops.ReduceSum()(_of_members(x, group), 0)
    return ops.reshape(ops.AllReduce("sum", group[0])(ops.reshape(x, (-1,))), x.shape)


def all_gather(x, _, group):
    if len(group[3]) < group[2]:
        return ops.reshape(_of_members(x, group), (len(group[3]) * x.shape[0], *x.shape[1:]))
    return ops.AllGather(group[0])(x)


def reduce_scatter(x, reduction, ranks, group):
    size = x.shape[0] // ranks  # the CPU has no kernel for it
    return _narrow(all_reduce(x, reduction, group), 0, group[1] * size, size)


def all_to_all(x, receive, send, group):
    ranks = len(send)  # equal parts; the CPU has no kernel for it
    parts = ops.reshape(all_gather(x, ranks, group), (ranks, ranks, -1, *x.shape[1:]))
    return ops.reshape(select(parts, 1, group[1]), x.shape)


def dtype(name: str) -> Any:
    """Return MindSpore's data type of torch's name."""
    return ms.bool_ if name == "bool" else getattr(ms, name)


def tensor(array: Any) -> Tensor:
    """Return a tensor of a numpy array."""
    return Tensor.from_numpy(array)

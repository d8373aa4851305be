"""MindSpore functions of the table `OPERATORS`.

Each function takes the arguments of the ATen operator, with tensors of MindSpore, data types of MindSpore, and tuples
in place of lists. Shapes are static, so `x.shape` is a constant while a graph is compiled. MindSpore compiles a
function into the graph at every call. A function decorated with `constexpr` runs during the compilation instead, and a
primitive becomes a graph node.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import ops
from mindspore.ops.auto_generate import SolveTriangular

# --- elementwise ----------------------------------------------------------------------------------------------------


neg = ops.Neg()
absolute = ops.Abs()
sign = ops.Sign()
exp = ops.Exp()
expm1 = ops.Expm1()
log = ops.Log()
log1p = ops.Log1p()
sqrt = ops.Sqrt()
rsqrt = ops.Rsqrt()
reciprocal = ops.Reciprocal()
sin = ops.Sin()
cos = ops.Cos()
tanh = ops.Tanh()
sigmoid = ops.Sigmoid()
erf = ops.Erf()
relu = ops.ReLU()
ceil = ops.Ceil()
trunc = ops.Trunc()
floor = ops.Floor()
add = ops.add
sub = ops.sub
mul = ops.mul
floor_divide = ops.floor_div
remainder = ops.floor_mod
power = ops.pow
maximum = ops.maximum
minimum = ops.minimum
div = ops.div
round_half_even = ops.round
clamp = ops.clamp


def rsub(x, y, alpha=1):
    return ops.sub(y, x if alpha == 1 else x * alpha)


def real_div(x, y):
    return ops.RealDiv()(x, y) if x.dtype == ms.float32 else ops.div(x, y)


def fmod(x, y):
    return x - ops.trunc(x / y) * y


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


def clamp_max(x, high):
    return ops.clamp(x, None, high)


def where(condition, x, y):
    return ops.select(*_broadcast(condition, x, y))


def _broadcast(condition, x, y):
    shape = _joint_shape(condition.shape, x.shape, y.shape)
    return _as_shape(condition, shape), _as_shape(x, shape), _as_shape(y, shape)


@ops.constexpr
def _joint_shape(*shapes):
    return np.broadcast_shapes(*shapes)


def _as_shape(x, shape):
    return x if x.shape == shape else ops.broadcast_to(x, shape)


# --- comparison and logic -------------------------------------------------------------------------------------------


isnan = ops.IsNan()
isinf = ops.IsInf()
equal = ops.equal
not_equal = ops.not_equal
less = ops.less
less_equal = ops.less_equal
greater = ops.greater
greater_equal = ops.greater_equal


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


# --- products and reductions ----------------------------------------------------------------------------------------


mm = ops.MatMul()
bmm = ops.BatchMatMul()


def addmm(bias, x, y, beta=1, alpha=1):
    return _add_scaled(bias, ops.MatMul()(x, y), beta, alpha)


def baddbmm(bias, x, y, beta=1, alpha=1):
    return _add_scaled(bias, ops.BatchMatMul()(x, y), beta, alpha)


def _add_scaled(bias, product, beta, alpha):
    return (bias if beta == 1 else beta * bias) + (product if alpha == 1 else alpha * product)


_solve_triangular = SolveTriangular()


def solve_triangular(a, b, upper=False, left=True, unitriangular=False):
    batch = _joint_shape(a.shape[:-2], b.shape[:-2])
    a, b = _as_shape(a, batch + a.shape[-2:]), _as_shape(b, batch + b.shape[-2:])
    return _solve_triangular(a, b, 0, not upper, unitriangular)


def sum_over(x, dims=None, keepdim=False, dtype=None):
    return ops.ReduceSum(keep_dims=keepdim)(_summands(x, dtype), _axes(x, dims))


def _summands(x, dtype):
    integers = (ms.bool_, ms.uint8, ms.int8, ms.int16, ms.int32)
    return to_copy(x, ms.int64 if dtype is None and x.dtype in integers else dtype)


def _axes(x, dims):
    return tuple(range(x.ndim)) if dims is None or len(dims) == 0 else dims


def mean(x, dims=None, keepdim=False, dtype=None):
    return ops.ReduceMean(keep_dims=keepdim)(to_copy(x, dtype), _axes(x, dims))


def variance(x, dims=None, correction=1, keepdim=False):
    axes = _axes(x, dims)
    centred = x - ops.ReduceMean(keep_dims=True)(x, axes)
    count = _count(x.shape, axes)
    return ops.ReduceSum(keep_dims=keepdim)(centred * centred, axes) / (count - correction)


@ops.constexpr
def _count(shape, axes):
    return math.prod(shape[axis] for axis in axes)


def vector_norm(x, order=2, dims=None, keepdim=False, dtype=None):
    value = to_copy(x, dtype)
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


def any_over(x, dim=(), keepdim=False):
    return ops.ReduceAny(keep_dims=keepdim)(_truth(x), dim)


def product_over(x, dim, keepdim=False, dtype=None):
    return ops.ReduceProd(keep_dims=keepdim)(to_copy(x, dtype), dim)


def cumsum(x, dim, dtype=None):
    return ops.CumSum()(_summands(x, dtype), dim)


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
    size = x.shape[0]  # the index breaks ties of equal integers
    keys = x * size + ops.cast(ops.arange(size), x.dtype)
    order = ops.cast(ops.sort(keys, dim, descending)[1], ms.int64)
    return ops.gather(x, order, 0), order


# --- shapes ---------------------------------------------------------------------------------------------------------


view = ops.Reshape()
unsqueeze = ops.ExpandDims()
cat = ops.cat
flip = ops.flip


def permute(x, dims):
    return ops.transpose(x, _positive(dims, x.ndim))


@ops.constexpr
def _positive(dims, rank):
    return tuple(dim % rank for dim in dims)


def expand(x, shape):
    return ops.broadcast_to(x, _filled(shape, x.shape))


@ops.constexpr
def _filled(shape, own):
    added = len(shape) - len(own)
    return tuple(own[i - added] if size == -1 else size for i, size in enumerate(shape))


def repeat(x, repeats):
    return ops.tile(ops.reshape(x, _prefixed(x.shape, len(repeats))), repeats)


@ops.constexpr
def _prefixed(shape, rank):
    return (1,) * (rank - len(shape)) + tuple(shape)


def copy(x, source, *_):
    return ops.broadcast_to(ops.cast(source, x.dtype), x.shape)


def squeeze(x, dims):
    return ops.reshape(x, _squeezed(x.shape, dims if isinstance(dims, tuple) else (dims,)))


@ops.constexpr
def _squeezed(shape, dims):
    axes = {dim % len(shape) for dim in dims} if shape else ()
    return tuple(size for i, size in enumerate(shape) if i not in axes or size != 1)


def split_with_sizes(x, sizes, dim=0):
    axis = dim + x.ndim if dim < 0 else dim
    parts = ()
    begin = 0
    for size in sizes:
        parts = (*parts, _narrow(x, axis, begin, size))
        begin = begin + size
    return parts


def _narrow(x, axis, begin, size):
    begins, sizes = _window(x.shape, axis, begin, size)
    return ops.slice(x, begins, sizes)


@ops.constexpr
def _window(shape, axis, begin, size):
    begins = tuple(begin if i == axis else 0 for i in range(len(shape)))
    return begins, tuple(size if i == axis else n for i, n in enumerate(shape))


@ops.constexpr
def _limits(size, start, end):
    return slice(start, end).indices(size)[:2]


def slice_along(x, dim=0, start=None, end=None, step=1):
    axis = dim + x.ndim if dim < 0 else dim
    first, last = _limits(x.shape[axis], start, end)
    if step == 1:
        return x if last - first == x.shape[axis] else _narrow(x, axis, first, last - first)
    begins, ends = _window(x.shape, axis, first, last)
    return ops.strided_slice(x, begins, ends, _steps(x.ndim, axis, step))


@ops.constexpr
def _steps(rank, axis, step):
    return tuple(step if i == axis else 1 for i in range(rank))


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


def constant_pad_nd(x, pad, value=0.0):
    begins, sizes, added = _padding(x.shape, pad)
    inner = x if sizes == x.shape else ops.slice(x, begins, sizes)
    return inner if len(added) == 0 else ops.pad(inner, added, "constant", value)


@ops.constexpr
def _padding(shape, pad):
    """Return begin and size of the slice that negative padding leaves, and the positive padding or ()."""
    begins, sizes = [0] * len(shape), list(shape)
    for i, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = len(shape) - 1 - i
        begins[axis] = max(-before, 0)
        sizes[axis] -= begins[axis] + max(-after, 0)
    added = tuple(max(n, 0) for n in pad)
    return tuple(begins), tuple(sizes), added if any(added) else ()


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


gather = ops.gather_elements


def embedding(weight, index, *_):
    return ops.gather(weight, index, 0)


def index_select(x, dim, index):
    return ops.gather(x, index, dim)


def scatter(x, dim, index, source):
    return ops.tensor_scatter_elements(x, index, source, dim)


def scatter_value(x, dim, index, value):
    return ops.tensor_scatter_elements(x, index, ops.fill(x.dtype, index.shape, value), dim)


def scatter_add(x, dim, index, source):
    return ops.tensor_scatter_elements(x, index, source, dim, "add")


def _order(x, indices):
    """Return the dimensions of `x` that have an index, and the other dimensions."""
    indexed, others = (), ()
    for i in range(x.ndim):
        if i < len(indices) and indices[i] is not None:
            indexed = (*indexed, i)
        else:
            others = (*others, i)
    return indexed, others


def _rows(x, indices):
    """Return `x` with the indexed dimensions merged into a first dimension, and the index into this dimension."""
    indexed, others = _order(x, indices)
    linear, rows = 0, 1
    for i in indexed:
        size = x.shape[i]
        linear = linear * size + ops.select(indices[i] < 0, indices[i] + size, indices[i])
        rows = rows * size
    moved = ops.transpose(x, (*indexed, *others))
    return ops.reshape(moved, (rows, *moved.shape[len(indexed) :])), linear


def _front(x, indices):
    """Return the number of leading dimensions of `index(x, indices)` that come from dimensions without an index."""
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
    """Return, for each kernel position of a convolution, the part of padded `x` that is multiplied there."""
    padded = constant_pad_nd(x, (padding[0], padding[0]))
    length = padded.shape[2] - dilation[0] * (weight.shape[2] - 1)
    parts = ()
    for k in range(weight.shape[2]):
        parts = (*parts, _narrow(padded, 2, k * dilation[0], length))
    return parts


def _is_depthwise(weight, groups):
    return weight.shape[1] == 1 and weight.shape[0] == groups


def _column(weight, k, groups):
    """Return the weight at kernel position `k`: one factor per channel, or a matrix per group."""
    if _is_depthwise(weight, groups):
        return _narrow(ops.squeeze(weight, 1), 1, k, 1)
    return ops.reshape(select(weight, 2, k), (groups, -1, weight.shape[1]))


def _by_group(x, groups):
    return ops.reshape(x, (x.shape[0], groups, -1, x.shape[2]))


def convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    total = 0
    parts = _taps(x, weight, padding, dilation)
    for k in range(len(parts)):
        column = _column(weight, k, groups)
        if _is_depthwise(weight, groups):
            total = total + column * parts[k]
        else:
            total = total + ops.matmul(column, _by_group(parts[k], groups))
    total = ops.reshape(total, (x.shape[0], weight.shape[0], -1))
    return total if bias is None else total + ops.reshape(bias, (1, -1, 1))


def convolution_backward(grad, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, mask):
    parts = _taps(x, weight, padding, dilation)
    last = dilation[0] * (weight.shape[2] - 1)
    of_x, of_weight = 0, ()
    for k in range(len(parts)):
        column = _column(weight, k, groups)
        if _is_depthwise(weight, groups):
            share = column * grad
            step = ops.ReduceSum()(grad * parts[k], (0, 2))
        else:
            grads = _by_group(grad, groups)
            share = ops.matmul(ops.transpose(column, (0, 2, 1)), grads)
            share = ops.reshape(share, parts[k].shape)
            columns = ops.transpose(_by_group(parts[k], groups), (0, 1, 3, 2))
            step = ops.ReduceSum()(ops.matmul(grads, columns), 0)
        begin = k * dilation[0]
        of_x = of_x + constant_pad_nd(share, (begin, last - begin))
        of_weight = (*of_weight, ops.reshape(step, weight.shape[:2]))
    of_x = constant_pad_nd(of_x, (-padding[0], -padding[0]))
    return of_x, ops.stack(of_weight, 2), ops.ReduceSum()(grad, (0, 2))


# --- collectives ----------------------------------------------------------------------------------------------------
# Ranks must run collectives in the order of the program. MindSpore changes the order unless each collective depends on
# the previous one. A group is a tuple: name of the communicator of all ranks, position of this rank in the group,
# number of all ranks, ranks of the group. The CPU has kernels only for collectives over all ranks. For a smaller group,
# all ranks therefore run the same collective, and each rank selects the part of its group.


def after(x, previous):
    return ops.Depend()(x, previous)


def _of_members(x, group):
    """Gather `x` from all ranks, and return the tensors of the ranks of a group, stacked."""
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
    size = x.shape[0] // ranks  # the CPU has no kernel for reduce-scatter
    return _narrow(all_reduce(x, reduction, group), 0, group[1] * size, size)


def all_to_all(x, receive, send, group):
    ranks = len(send)  # parts are equal; the CPU has no kernel for all-to-all
    parts = ops.reshape(all_gather(x, ranks, group), (ranks, ranks, -1, *x.shape[1:]))
    return ops.reshape(select(parts, 1, group[1]), x.shape)


# --- copies of memory plans -----------------------------------------------------------------------------------------
# The memory of a CPU is the host's, so copies are simulated there. The Ascend branch is untested.

SIMULATES_COPIES = ms.get_context("device_target") == "CPU"


def to_host(x):
    return x if SIMULATES_COPIES else ops.move_to(x, "CPU", False)


def to_device(x, previous):
    waiting = ops.Depend()(x, previous)
    return waiting if SIMULATES_COPIES else ops.move_to(waiting, "Ascend", False)


def dtype(name: str) -> Any:
    """Return the data type of MindSpore for torch's name of the type."""
    return ms.bool_ if name == "bool" else getattr(ms, name)

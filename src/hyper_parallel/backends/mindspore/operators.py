"""Table of the ATen operators that MindSpore executes; checks and documentation read it without MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hyper_parallel.backends.step_program import OWN, Node

OPERATORS: Final = {
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_to_all_single.default": "all_to_all",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
    "aten._log_softmax.default": "log_softmax",
    "aten._softmax.default": "softmax",
    "aten._to_copy.default": "to_copy",
    "aten._unsafe_view.default": "view",
    "aten.abs.default": "absolute",
    "aten.add.Scalar": "add",
    "aten.add.Tensor": "add",
    "aten.addmm.default": "addmm",
    "aten.amax.default": "amax",
    "aten.amin.default": "amin",
    "aten.any.default": "any_all",
    "aten.any.dim": "any_over",
    "aten.argmax.default": "argmax",
    "aten.baddbmm.default": "baddbmm",
    "aten.bitwise_and.Tensor": "bitwise_and",
    "aten.bitwise_not.default": "bitwise_not",
    "aten.bitwise_or.Tensor": "bitwise_or",
    "aten.bmm.default": "bmm",
    "aten.cat.default": "cat",
    "aten.ceil.default": "ceil",
    "aten.clamp.default": "clamp",
    "aten.clamp_max.default": "clamp_max",
    "aten.clamp_min.default": "clamp",
    "aten.constant_pad_nd.default": "constant_pad_nd",
    "aten.convolution.default": "convolution",
    "aten.convolution_backward.default": "convolution_backward",
    "aten.copy.default": "copy",
    "aten.cos.default": "cos",
    "aten.cumsum.default": "cumsum",
    "aten.div.Scalar": "div",
    "aten.div.Scalar_mode": "div",
    "aten.div.Tensor": "div",
    "aten.div.Tensor_mode": "div",
    "aten.elu.default": "elu",
    "aten.embedding.default": "embedding",
    "aten.eq.Scalar": "equal",
    "aten.eq.Tensor": "equal",
    "aten.erf.default": "erf",
    "aten.exp.default": "exp",
    "aten.expand.default": "expand",
    "aten.expm1.default": "expm1",
    "aten.flip.default": "flip",
    "aten.floor.default": "floor",
    "aten.floor_divide.default": "floor_divide",
    "aten.fmod.Scalar": "fmod",
    "aten.fmod.Tensor": "fmod",
    "aten.full.default": "full",
    "aten.full_like.default": "full_like",
    "aten.gather.default": "gather",
    "aten.ge.Scalar": "greater_equal",
    "aten.ge.Tensor": "greater_equal",
    "aten.gelu.default": "gelu",
    "aten.gt.Scalar": "greater",
    "aten.gt.Tensor": "greater",
    "aten.hardtanh.default": "hardtanh",
    "aten.index.Tensor": "index",
    "aten.index_put.default": "index_put",
    "aten.index_select.default": "index_select",
    "aten.isinf.default": "isinf",
    "aten.isnan.default": "isnan",
    "aten.le.Scalar": "less_equal",
    "aten.le.Tensor": "less_equal",
    "aten.leaky_relu.default": "leaky_relu",
    "aten.linalg_solve_triangular.default": "solve_triangular",
    "aten.linalg_vector_norm.default": "vector_norm",
    "aten.log.default": "log",
    "aten.log1p.default": "log1p",
    "aten.logical_and.default": "logical_and",
    "aten.logical_not.default": "logical_not",
    "aten.logical_or.default": "logical_or",
    "aten.logical_xor.default": "logical_xor",
    "aten.lt.Scalar": "less",
    "aten.lt.Tensor": "less",
    "aten.max.dim": "max_over",
    "aten.maximum.default": "maximum",
    "aten.mean.default": "mean_all",
    "aten.mean.dim": "mean",
    "aten.min.dim": "min_over",
    "aten.minimum.default": "minimum",
    "aten.mm.default": "mm",
    "aten.mul.Scalar": "mul",
    "aten.mul.Tensor": "mul",
    "aten.native_layer_norm.default": "native_layer_norm",
    "aten.ne.Scalar": "not_equal",
    "aten.ne.Tensor": "not_equal",
    "aten.neg.default": "neg",
    "aten.new_empty_strided.default": "new_empty",
    "aten.permute.default": "permute",
    "aten.pow.Scalar": "power",
    "aten.pow.Tensor_Scalar": "power",
    "aten.pow.Tensor_Tensor": "power",
    "aten.prod.dim_int": "product_over",
    "aten.reciprocal.default": "reciprocal",
    "aten.relu.default": "relu",
    "aten.remainder.Scalar": "remainder",
    "aten.remainder.Tensor": "remainder",
    "aten.repeat.default": "repeat",
    "aten.reshape.default": "view",
    "aten.round.default": "round_half_even",
    "aten.rsqrt.default": "rsqrt",
    "aten.rsub.Scalar": "rsub",
    "aten.rsub.Tensor": "rsub",
    "aten.scalar_tensor.default": "scalar_tensor",
    "aten.scatter.src": "scatter",
    "aten.scatter.value": "scatter_value",
    "aten.scatter_add.default": "scatter_add",
    "aten.select.int": "select",
    "aten.select_scatter.default": "select_scatter",
    "aten.sgn.default": "sign",
    "aten.sigmoid.default": "sigmoid",
    "aten.sign.default": "sign",
    "aten.silu.default": "silu",
    "aten.sin.default": "sin",
    "aten.slice.Tensor": "slice_along",
    "aten.slice_scatter.default": "slice_scatter",
    "aten.softplus.default": "softplus",
    "aten.sort.default": "sort_values",
    "aten.sort.stable": "sort_stable",
    "aten.split_with_sizes.default": "split_with_sizes",
    "aten.sqrt.default": "sqrt",
    "aten.squeeze.dim": "squeeze",
    "aten.squeeze.dims": "squeeze",
    "aten.sub.Scalar": "sub",
    "aten.sub.Tensor": "sub",
    "aten.sum.default": "sum_all",
    "aten.sum.dim_IntList": "sum_over",
    "aten.tanh.default": "tanh",
    "aten.topk.default": "topk",
    "aten.trunc.default": "trunc",
    "aten.unsqueeze.default": "unsqueeze",
    "aten.var.correction": "variance",
    "aten.view.default": "view",
    "aten.where.self": "where",
}
"""Dict from operator with overload to the name of a function of `kernels`."""


def _of_floats(node: Node) -> bool:
    return node.types[0].dtype.startswith("float")


def _has_one_dim(node: Node) -> bool:
    forward = node.op == "aten.convolution.default"
    stride, _, _, transposed = node.args[3:7] if forward else node.args[4:8]
    shape = node.types[0 if forward else 1].shape  # shape of the result or of the weight's gradient
    return len(shape) == 3 and list(stride) == [1] and not transposed


def _sorts_integers(node: Node) -> bool:
    kind, descending = node.types[0], node.kwargs.get("descending", False)
    return kind.dtype == "int64" and len(kind.shape) == 1 and not descending


_CONVOLUTION: Final = "one dimension, a stride of 1", _has_one_dim
_FLOATS: Final = "numbers of floating point", _of_floats
LIMITS: Final[dict[str, tuple[str, Callable[[Node], bool]]]] = {
    "_c10d_functional.all_to_all_single.default": (
        "equal parts",
        lambda node: len({*node.args[1], *node.args[2]}) == 1,
    ),
    "aten.convolution.default": _CONVOLUTION,
    "aten.convolution_backward.default": _CONVOLUTION,
    "aten.linalg_solve_triangular.default": (
        "matrix on the left",
        lambda node: node.kwargs.get("left", True),
    ),
    "aten.linalg_vector_norm.default": ("order 2", lambda node: node.args[1:2] in ((), (2,))),
    "aten.max.dim": _FLOATS,
    "aten.min.dim": _FLOATS,
    "aten.sort.default": _FLOATS,
    "aten.sort.stable": ("one dimension of integers, ascending", _sorts_integers),
    "aten.topk.default": _FLOATS,
}
"""Dict from operator to (description, predicate) of the supported calls; other operators have no limit."""


def is_supported(node: Node) -> bool:
    """Return whether MindSpore executes a call; calls with complex numbers are not supported."""
    if node.op in OWN:
        return True
    if node.op not in OPERATORS or any(kind.dtype.startswith("complex") for kind in node.types):
        return False
    return node.op not in LIMITS or LIMITS[node.op][1](node)

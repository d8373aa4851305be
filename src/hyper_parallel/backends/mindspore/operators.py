"""Table of the ATen operators that MindSpore executes; checks and documentation read it without MindSpore."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hyper_parallel.backends.step_program import OWN, Node

_SAME_NAME: Final = (
    "add.Scalar", "add.Tensor", "addmm.default", "amax.default", "amin.default", "argmax.default",
    "baddbmm.default", "bitwise_and.Tensor", "bitwise_not.default", "bitwise_or.Tensor", "bmm.default",
    "cat.default", "ceil.default", "clamp.default", "clamp_max.default", "constant_pad_nd.default",
    "convolution.default", "convolution_backward.default", "copy.default", "cos.default", "cumsum.default",
    "div.Scalar", "div.Scalar_mode", "div.Tensor", "div.Tensor_mode", "elu.default", "embedding.default",
    "erf.default", "exp.default", "expand.default", "expm1.default", "flip.default", "floor.default",
    "floor_divide.default", "fmod.Scalar", "fmod.Tensor", "full.default", "full_like.default", "gather.default",
    "gelu.default", "hardtanh.default", "index.Tensor", "index_put.default", "index_select.default",
    "isinf.default", "isnan.default", "leaky_relu.default", "log.default", "log1p.default", "logical_and.default",
    "logical_not.default", "logical_or.default", "logical_xor.default", "maximum.default", "mean.dim",
    "minimum.default", "mm.default", "mul.Scalar", "mul.Tensor", "native_layer_norm.default", "neg.default",
    "permute.default", "reciprocal.default", "relu.default", "remainder.Scalar", "remainder.Tensor",
    "repeat.default", "rsqrt.default", "rsub.Scalar", "rsub.Tensor", "scalar_tensor.default", "scatter.src",
    "scatter_add.default", "select.int", "select_scatter.default", "sigmoid.default", "sign.default",
    "silu.default", "sin.default", "slice_scatter.default", "softplus.default", "split_with_sizes.default",
    "sqrt.default", "squeeze.dim", "squeeze.dims", "sub.Scalar", "sub.Tensor", "tanh.default", "topk.default",
    "trunc.default", "unsqueeze.default", "view.default", "where.self",
)  # fmt: skip
"""ATen operators with overload that have a function of their own name in `kernels`."""
OPERATORS: Final = {
    **{f"aten.{operator}": operator.partition(".")[0] for operator in _SAME_NAME},
    "_c10d_functional.all_gather_into_tensor.default": "all_gather",
    "_c10d_functional.all_reduce.default": "all_reduce",
    "_c10d_functional.all_to_all_single.default": "all_to_all",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce_scatter",
    "aten._log_softmax.default": "log_softmax",
    "aten._softmax.default": "softmax",
    "aten._to_copy.default": "to_copy",
    "aten._unsafe_view.default": "view",
    "aten.abs.default": "absolute",
    "aten.any.default": "any_over",
    "aten.any.dim": "any_over",
    "aten.clamp_min.default": "clamp",
    "aten.eq.Scalar": "equal",
    "aten.eq.Tensor": "equal",
    "aten.ge.Scalar": "greater_equal",
    "aten.ge.Tensor": "greater_equal",
    "aten.gt.Scalar": "greater",
    "aten.gt.Tensor": "greater",
    "aten.le.Scalar": "less_equal",
    "aten.le.Tensor": "less_equal",
    "aten.linalg_solve_triangular.default": "solve_triangular",
    "aten.linalg_vector_norm.default": "vector_norm",
    "aten.lt.Scalar": "less",
    "aten.lt.Tensor": "less",
    "aten.max.dim": "max_over",
    "aten.mean.default": "mean",
    "aten.min.dim": "min_over",
    "aten.ne.Scalar": "not_equal",
    "aten.ne.Tensor": "not_equal",
    "aten.new_empty_strided.default": "new_empty",
    "aten.pow.Scalar": "power",
    "aten.pow.Tensor_Scalar": "power",
    "aten.pow.Tensor_Tensor": "power",
    "aten.prod.dim_int": "product_over",
    "aten.reshape.default": "view",
    "aten.round.default": "round_half_even",
    "aten.scatter.value": "scatter_value",
    "aten.sgn.default": "sign",
    "aten.slice.Tensor": "slice_along",
    "aten.sort.default": "sort_values",
    "aten.sort.stable": "sort_stable",
    "aten.sum.default": "sum_over",
    "aten.sum.dim_IntList": "sum_over",
    "aten.var.correction": "variance",
}
"""Dict from operator with overload to the name of a function of `kernels`."""


def _of_floats(node: Node) -> bool:
    return node.types[0].dtype.startswith("float")


def _sums(node: Node) -> bool:
    return str(node.args[1]) == "sum"


def _has_one_dim(node: Node) -> bool:
    forward = node.op == "aten.convolution.default"
    stride, _, _, transposed = node.args[3:7] if forward else node.args[4:8]
    shape = node.types[0 if forward else 1].shape  # shape of the result or of the weight's gradient
    return len(shape) == 3 and list(stride) == [1] and not transposed


def _sorts_integers(node: Node) -> bool:
    kind, descending = node.types[0], node.kwargs.get("descending", False)
    return kind.dtype == "int64" and len(kind.shape) == 1 and not descending


_CONVOLUTION: Final = "one dimension, a stride of 1", _has_one_dim
_FLOATS: Final = "floating-point numbers except bfloat16", _of_floats
_REALS: Final = "floating-point numbers", lambda node: "float" in node.types[0].dtype
_SUMS: Final = "the reduction sum", _sums
LIMITS: Final[dict[str, tuple[str, Callable[[Node], bool]]]] = {
    "_c10d_functional.all_reduce.default": _SUMS,
    "_c10d_functional.reduce_scatter_tensor.default": _SUMS,
    "_c10d_functional.all_to_all_single.default": (
        "equal parts",
        lambda node: len({*node.args[1], *node.args[2]}) == 1,
    ),
    "aten.convolution.default": _CONVOLUTION,
    "aten.convolution_backward.default": _CONVOLUTION,
    "aten.fmod.Scalar": _REALS,
    "aten.fmod.Tensor": _REALS,
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
"""Dict from operator to (description, predicate) of the supported calls. Complex results are refused for all."""


def is_supported(node: Node) -> bool:
    """Return whether the MindSpore back end executes a call of an operator; complex results are not supported."""
    if node.op in OWN:
        return True
    if node.op not in OPERATORS or any(kind.dtype.startswith("complex") for kind in node.types):
        return False
    return node.op not in LIMITS or LIMITS[node.op][1](node)

"""Calls that MindSpore would execute with other results than PyTorch are refused."""

import pytest

from hyper_parallel.backends.mindspore.operators import is_supported
from hyper_parallel.backends.mindspore.translate import to_source
from hyper_parallel.backends.step_program import Node, Ref, StepProgram, ValueType


def call(op: str, *args: object, dtype: str = "float32") -> Node:
    return Node(op, (Ref(0), *args), {}, (1,), (ValueType((4,), dtype),))


@pytest.mark.parametrize("reduction", ["max", "min", "avg", "product"])
def test_only_sums_are_reduced(reduction):
    for op, more in (("all_reduce", ()), ("reduce_scatter_tensor", (2,))):
        name = f"_c10d_functional.{op}.default"
        assert is_supported(call(name, "sum", *more, "0"))
        assert not is_supported(call(name, reduction, *more, "0"))


def test_remainders_of_integers_are_refused():
    assert is_supported(call("aten.fmod.Scalar", 3, dtype="bfloat16"))
    assert not is_supported(call("aten.fmod.Scalar", 3, dtype="int64"))


@pytest.mark.parametrize("op", ["sum.default", "cumsum.default", "prod.dim_int", "full.default"])
def test_results_have_the_integer_type_of_aten(op):
    for dtype in ("int64", "float32"):
        node = call(f"aten.{op}", 0, dtype=dtype)
        program = StepProgram({"x": (0, ValueType((4,), "int32"))}, {}, (node,), {"y": 1})
        assert ("dtype=t_int64" in to_source(program, {})) == (dtype == "int64")

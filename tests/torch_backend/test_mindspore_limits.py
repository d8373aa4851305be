"""Calls that MindSpore would execute with other results than PyTorch are refused."""

import pytest

from hyper_parallel.backends.mindspore.operators import is_supported
from hyper_parallel.backends.step_program import Node, Ref, ValueType


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

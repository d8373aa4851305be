"""Translation of a step program into Python source that MindSpore compiles, one line per operator."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hyper_parallel.backends.mindspore.operators import OPERATORS
from hyper_parallel.backends.step_program import COLLECTIVES, OWN, Node, Ref, StepProgram


def to_source(
    program: StepProgram,
    groups: Mapping[str, tuple[Any, ...]],
    forms: Mapping[str, str] = OPERATORS,
) -> str:
    """Return the source of a Python module whose function `step` maps inputs and constants to outputs.

    Args:
        program: Step program.
        groups: Dict from name to group of ranks, in the form described in `kernels`.
        forms: Dict from operator to the name of a function of `kernels`.
    """
    numbers = [*(i for i, _ in program.inputs.values()), *program.constants]
    parameters = ", ".join(f"v{i}" for i in numbers)
    lines, previous = [], ""
    for node in program.nodes:
        lines.append(_call(node, forms, previous))
        if node.op.startswith(COLLECTIVES):
            previous = f"v{node.results[-1]}"
    types = sorted({t for line in lines for t in re.findall(r"\bt_(\w+)", line)})
    outputs = ", ".join(f"v{i}" for i in program.outputs.values())
    return "\n".join(
        [
            "from math import inf, nan",
            "",
            "from hyper_parallel.backends.mindspore import kernels as k",
            "",
            *(f't_{t} = k.dtype("{t}")' for t in types),
            *(f"g_{axis} = {group}" for axis, group in groups.items()),
            "",
            "",
            f"def step({parameters}):",
            *(f"    {line}" for line in lines),
            f"    return ({outputs},)",
            "",
        ]
    )


def _call(node: Node, forms: Mapping[str, str], previous: str) -> str:
    """Return the source line of an operator; a collective waits for `previous`, the result of the preceding one."""
    if node.op in OWN:
        return f"v{node.results[0]} = k.{node.op.split('.')[1]}({', '.join(map(_text, node.args))})"
    kwargs = {k: v for k, v in node.kwargs.items() if k not in _IGNORED and v is not None}
    args = [*map(_text, node.args)]
    if node.op.startswith(COLLECTIVES):
        args[-1] = f"g_{node.args[-1]}"
        args[0] = f"k.after({args[0]}, {previous})" if previous else args[0]
    if node.op in _PROMOTED and "float" not in node.types[0].dtype:
        kwargs["dtype"] = node.types[0].dtype
    if node.op in _SCALED and "alpha" in kwargs:
        args[1] = f"k.mul({args[1]}, {kwargs.pop('alpha')!r})"
    words = [*args, *(f"{k}=t_{v}" if k == "dtype" else f"{k}={_text(v)}" for k, v in kwargs.items())]
    results = ", ".join(f"v{i}" for i in node.results)
    if node.op == "aten.split_with_sizes.default":  # the result is a tuple, even for one part
        results += ","
    return f"{results} = k.{forms[node.op]}({', '.join(words)})"


_PROMOTED = (
    "aten.cumsum.default", "aten.full.default", "aten.prod.dim_int", "aten.scalar_tensor.default",
    "aten.sum.default", "aten.sum.dim_IntList",
)  # fmt: skip
"""Operators whose result may be int64 or bool by default, where MindSpore keeps int32 or uses float32."""
_SCALED = ("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")
_IGNORED = ("device", "layout", "memory_format", "pin_memory", "non_blocking")


def _text(value: Any) -> str:
    if isinstance(value, Ref):
        return f"v{value.index}"
    if isinstance(value, (list, tuple)):
        return "(" + "".join(f"{_text(part)}, " for part in value) + ")"
    return repr(value)

"""Step program: one rank's training step as a list of core ATen operators, without torch.

A back end without torch, such as MindSpore, executes the program. Values are numbered in the order of creation: inputs,
constants, then one value per result of a node. All shapes are static. The last argument of a collective names its
process group: a mesh axis, or a list of ranks, see `group_name`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

COLLECTIVES: Final = "_c10d_functional."
"""Prefix of the names of collectives."""

AFTER: Final = "hyper_parallel.after.default"
"""Operator that returns its first argument once the second one is computed. It keeps a back end from merging a
recomputed operator with its first run, and from recomputing it early."""

TO_HOST: Final = "hyper_parallel.to_host.default"
"""Operator that copies its argument to host memory."""

TO_DEVICE: Final = "hyper_parallel.to_device.default"
"""Operator that copies its first argument from host memory once the second one is computed."""

OWN: Final = (AFTER, TO_HOST, TO_DEVICE)
"""Operators that are not operators of ATen; every back end that executes step programs implements them."""

_RANKS: Final = "ranks_"
_ITEM_BITS: Final = {"bool": 8, "none": 0}


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a value of the program by its number."""

    index: int


@dataclass(frozen=True, slots=True)
class ValueType:
    """Shape of a tensor, and its data type in torch's spelling, such as `float32`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Bytes of a contiguous tensor."""
        bits = _ITEM_BITS.get(self.dtype)
        if bits is None:
            bits = int(self.dtype.partition("_")[0].lstrip(ascii_lowercase))
        return prod(self.shape) * bits // 8


@dataclass(frozen=True, slots=True)
class Node:
    """Call of an operator.

    Attributes:
        op: Name with overload, such as `aten.mm.default`.
        args: Arguments in order: `Ref`, numbers, strings, None, or lists of them.
        kwargs: Arguments by name.
        results: Numbers of the values that the operator returns.
        types: Types of these values.
        module: Path of the submodule that called the operator; empty outside of submodules.
        residency: Treatment of the results between forward and backward. `keep`: they stay in device memory.
            `recompute`: a later node computes them again. `offload`: later nodes copy them to the host and back.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int, ...]
    types: tuple[ValueType, ...]
    module: str = ""
    residency: str = "keep"


@dataclass(frozen=True, slots=True)
class StepProgram:
    """Operators of one training step, with its inputs, constants and outputs.

    Attributes:
        inputs: Dict from the name of each input to its value number and type, in order.
        constants: Dict from value number to array.
        nodes: Operators in execution order.
        outputs: Dict from the name of each output to its value number.
    """

    inputs: Mapping[str, tuple[int, ValueType]]
    constants: Mapping[int, NDArray[Any]]
    nodes: tuple[Node, ...]
    outputs: Mapping[str, int]

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Return the shapes of all values by number."""
        shapes = {number: kind.shape for number, kind in self.inputs.values()}
        shapes |= {number: array.shape for number, array in self.constants.items()}
        for node in self.nodes:
            shapes |= {r: kind.shape for r, kind in zip(node.results, node.types, strict=True)}
        return shapes

    def groups(self) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each process group whose name is from `group_name`; mesh axes are left out."""
        names = {n.args[-1] for n in self.nodes if n.op.startswith(COLLECTIVES)}
        return {
            name: tuple(map(int, name.removeprefix(_RANKS).split("_")))
            for name in sorted(names)
            if name.startswith(_RANKS)
        }

    def save(self, folder: Path) -> None:
        """Write `program.json` (one operator per line) and `constants.npz` into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        head = {
            "inputs": {k: [i, list(t.shape), t.dtype] for k, (i, t) in self.inputs.items()},
            "outputs": dict(self.outputs),
        }
        lines = ",\n".join(json.dumps(_node_json(node)) for node in self.nodes)
        text = json.dumps(head)[:-1] + f', "nodes": [\n{lines}\n]}}\n'
        (folder / "program.json").write_text(text, encoding="utf-8")
        arrays: dict[str, Any] = {str(i): array for i, array in self.constants.items()}
        np.savez(folder / "constants.npz", **arrays)

    @classmethod
    def load(cls, folder: Path) -> StepProgram:
        """Read a program that `save` wrote."""
        data = json.loads((folder / "program.json").read_text(encoding="utf-8"))
        with np.load(folder / "constants.npz", allow_pickle=False) as arrays:
            constants = {int(name): arrays[name] for name in arrays.files}
        return cls(
            {k: (i, ValueType(tuple(s), t)) for k, (i, s, t) in data["inputs"].items()},
            constants,
            tuple(_node_from(n) for n in data["nodes"]),
            data["outputs"],
        )


def group_name(ranks: Iterable[int]) -> str:
    """Return the name of the process group of `ranks`; `StepProgram.groups` reads the ranks from the name."""
    return _RANKS + "_".join(map(str, ranks))


def refs(argument: Any) -> Iterator[Ref]:
    """Yield each `Ref` in an argument of a node, including those inside nested lists."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for part in argument:
            yield from refs(part)


def _encode(argument: Any) -> Any:
    if isinstance(argument, Ref):
        return {"ref": argument.index}
    if isinstance(argument, (list, tuple)):
        return [_encode(part) for part in argument]
    if isinstance(argument, float) and argument in (float("inf"), float("-inf")):
        return {"number": str(argument)}
    return argument


def _decode(argument: Any) -> Any:
    if isinstance(argument, dict):
        return Ref(argument["ref"]) if "ref" in argument else float(argument["number"])
    if isinstance(argument, list):
        return [_decode(part) for part in argument]
    return argument


def _node_json(node: Node) -> list[Any]:
    types = [[list(t.shape), t.dtype] for t in node.types]
    kwargs = {name: _encode(value) for name, value in node.kwargs.items()}
    fields = [node.op, _encode(node.args), kwargs, list(node.results), types, node.module]
    return fields if node.residency == "keep" else [*fields, node.residency]


def _node_from(data: list[Any]) -> Node:
    op, args, kwargs, results, types, module, *residency = data
    return Node(
        op,
        tuple(_decode(a) for a in args),
        {name: _decode(value) for name, value in kwargs.items()},
        tuple(results),
        tuple(ValueType(tuple(shape), dtype) for shape, dtype in types),
        module,
        *residency,
    )

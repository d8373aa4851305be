"""Graph-kernel fusion: chains of operators of a program become one generated kernel each. Imports no MindSpore.

MindSpore passes each chain to its compiler AKG, which writes three files per kernel into the folder `akg_kernel_meta`
of `MS_COMPILER_CACHE_PATH`: the chain (`.info`), the description of the kernel (`.json`) and the kernel (`.so`).
AKG divides this work among processes with the same working directory, so the ranks of a job must share the folder.
Different jobs need different folders.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from ctypes import CDLL
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from hyper_parallel.backends.program_runner import FusedKernel
from hyper_parallel.backends.step_program import Node, Ref, StepProgram, ValueType, refs

_EXPAND: Final = "aten.expand.default"

_PACKAGES: Final = {"decorator": "pip install decorator"}
"""Dict from a package that AKG imports and MindSpore does not declare to the command that installs it."""

_PROGRAMS: Final = {"g++": "apt-get install g++"}
"""Dict from the program with which AKG links kernels to the command that installs it."""

INEXACT: Final = ("Exp", "Log", "Tanh")
"""Operators of MindSpore that AKG computes inexactly on the CPU, so they are not fused: its exponential is off by up to
2.9e-4 and finite at infinity, its tanh is off by 3.6e-4, and its logarithm of infinity is 89."""

CONTEXT: Final[Mapping[str, Mapping[str, Any]]] = {
    "CPU": {
        "enable_graph_kernel": True,
        "graph_kernel_flags": f"--disable_cluster_ops={','.join(INEXACT)}",
    },
    "Ascend": {"enable_graph_kernel": True, "graph_kernel_flags": "--kernel_generator=DVM"},
}
"""Dict from device to the settings of MindSpore that enable fusion. The settings for Ascend are untested."""

JIT_LEVEL: Final[Mapping[str, str]] = {"CPU": "O0", "Ascend": "O1"}
"""Dict from device to the optimization level `jit_level`. The CPU ignores higher levels; the level for Ascend is
untested."""


FORMS: Final = {"aten.div.Scalar": "real_div", "aten.div.Tensor": "real_div"}
"""Functions of `kernels` by operator that AKG can fuse; with fusion, they replace those in `OPERATORS`."""

ELEMENTWISE: Final = tuple(
    f"aten.{name}.{overload}" for name in ("add", "sub", "mul", "div") for overload in ("Tensor", "Scalar")
)
"""Operators that broadcast their arguments, so that they need no `expand` before them."""


def without_broadcasts(program: StepProgram) -> StepProgram:
    """Return the program without `expand` operators whose consumers broadcast their arguments.

    AKG does not fuse an `expand`, so its result would be written to memory and read again. Outputs do not change.
    """
    narrow = _narrow_values(program)
    shapes = program.shapes()
    sources: dict[int, int] = {}
    nodes = []
    for node in program.nodes:
        result = node.results[0]
        if result in narrow and node.op == _EXPAND:
            source = node.args[0].index
            sources[result] = sources.get(source, source)
            continue
        args = tuple(Ref(sources.get(a.index, a.index)) if isinstance(a, Ref) else a for a in node.args)
        types = node.types
        if result in narrow:
            read = [shapes[r.index] for r in refs(args)]
            shapes[result] = np.broadcast_shapes(*read)
            types = (ValueType(shapes[result], types[0].dtype),)
        nodes.append(replace(node, args=args, types=types))
    return replace(program, nodes=tuple(nodes))


def _narrow_values(program: StepProgram) -> set[int]:
    """Return the values that need no broadcast: results of `expand`, and of elementwise operators on these results."""
    shapes, readers = program.shapes(), defaultdict[int, list[Node]](list)
    derived = set()  # values that are constant along an expanded dimension
    for node in program.nodes:
        read = {r.index for r in refs([*node.args, *node.kwargs.values()])}
        for number in read:
            readers[number].append(node)
        expands = node.op == _EXPAND and shapes[node.args[0].index] != ()
        if expands or (node.op in ELEMENTWISE and read and read <= derived):
            derived.add(node.results[0])

    narrow: set[int] = set()

    def broadcasts(node: Node) -> bool:
        result = node.results[0]
        others = (r.index for r in refs(node.args) if r.index not in derived)
        full = any(shapes[n] == shapes[result] for n in others)
        return node.op in ELEMENTWISE and (full or result in narrow)

    outputs = set(program.outputs.values())
    for node in reversed(program.nodes):
        number = node.results[0]
        if number in derived - outputs and all(broadcasts(r) for r in readers[number]):
            narrow.add(number)
    return narrow


def missing_for_fusion() -> dict[str, str]:
    """Return the missing packages and executables that fusion needs, each with the command to install it."""
    packages = {name: fix for name, fix in _PACKAGES.items() if find_spec(name) is None}
    return packages | {name: fix for name, fix in _PROGRAMS.items() if shutil.which(name) is None}


class KernelFolder:
    """Folder of the generated kernels of a job on this machine.

    The constructor sets `MS_COMPILER_CACHE_PATH` of this process.

    Args:
        folder: Existing folder, the same on all ranks.
        owned: Whether this rank deletes the folder.
    """

    def __init__(self, folder: Path, *, owned: bool) -> None:
        self._folder, self._owned = folder, owned
        os.environ["MS_COMPILER_CACHE_PATH"] = str(folder)

    @contextmanager
    def building(self, log: Path) -> Iterator[None]:
        """Return a context in which AKG builds kernels into the folder.

        The context changes the working directory, because AKG's processes share work and locks through it. Standard
        output of this process and its children is appended to `log`, because AKG prints a line per kernel. AKG's
        workers keep the standard output of the first call, so all calls of a run must pass the same `log`.
        """
        with log.open("ab") as file, chdir(self._folder), _standard_output_to(file.fileno()):
            yield

    def kernels(self) -> tuple[FusedKernel, ...]:
        """Return the built kernels that fuse several operators, those with most operators first."""
        built = (self._folder / "akg_kernel_meta").glob("*.so")
        kernels = [_read(path.with_suffix(".info")) for path in built]
        fused = (kernel for kernel in kernels if len(kernel.operators) > 1)
        return tuple(sorted(fused, key=lambda kernel: (-len(kernel.operators), kernel.name)))

    def remove(self) -> None:
        """Delete the folder on the rank that owns it."""
        if self._owned:
            shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def _standard_output_to(descriptor: int) -> Iterator[None]:
    """Redirect standard output of this process, of its libraries and of its children to a file descriptor."""
    _flush_output()
    terminal = os.dup(1)
    os.dup2(descriptor, 1)
    try:
        yield
    finally:
        _flush_output()
        os.dup2(terminal, 1)
        os.close(terminal)


def _flush_output() -> None:
    sys.stdout.flush()
    CDLL(None).fflush(None)


def _read(path: Path) -> FusedKernel:
    chain = json.loads(path.read_text(encoding="utf-8"))
    return FusedKernel(path.stem, tuple(op["name"] for op in chain["op_desc"]))

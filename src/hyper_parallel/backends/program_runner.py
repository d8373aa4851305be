"""Interface of back ends that execute step programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from numpy.typing import NDArray

from hyper_parallel.backends import BACKENDS
from hyper_parallel.backends.step_program import StepProgram

CompiledProgram = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Function from the inputs of a program to its outputs; both are dicts from names to tensors of the framework."""


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Kernel that a back end generated from several operators.

    Attributes:
        name: Name of the kernel.
        operators: Names of the fused operators in the back end, in order.
    """

    name: str
    operators: tuple[str, ...]


class ProgramRunner(Protocol):
    """Runner of step programs on one rank. Values are tensors of the framework; callers treat them as opaque."""

    def compile(self, program: StepProgram, source: Path) -> CompiledProgram:
        """Compile a program; generated code is written to `source`, a path that ends in `.py`."""
        ...

    def value(self, array: NDArray[Any]) -> Any:
        """Return a copy of the array as a value of the framework."""
        ...

    def array(self, value: Any) -> NDArray[Any]:
        """Return a value of the framework as a numpy array."""
        ...

    def close(self, *, failed: bool) -> None:
        """Release the processes and files of this rank; with `failed`, also processes that other ranks still use."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return name and version of the framework, which are recorded with the run.

        With operator fusion, the key `fused_kernels` lists the kernels built so far, with the attributes of
        `FusedKernel`.
        """
        ...


def unsupported_operators(backend: str, program: StepProgram) -> dict[str, str]:
    """Return the unsupported operators of a program, each with the path of the first module that calls it.

    A partly supported operator is included if a call is an unsupported case, such as a data type. The path is empty for
    calls outside of submodules.
    """
    is_supported = _module(backend, "operators").is_supported
    missing: dict[str, str] = {}
    for node in program.nodes:
        if not is_supported(node):
            missing.setdefault(node.op, node.module)
    return missing


def missing_for_fusion(backend: str) -> dict[str, str]:
    """Return the missing packages and executables that operator fusion needs, each with the command to install it."""
    missing: dict[str, str] = _module(backend, "fusion").missing_for_fusion()
    return missing


def join_ranks(
    backend: str,
    rank: int,
    ranks: int,
    agree: Callable[[str | None], str],
    groups: Mapping[str, Sequence[int]],
    *,
    fuse: bool = False,
) -> ProgramRunner:
    """Import a framework, connect this rank with the other ranks, and return its runner.

    Args:
        backend: Name in `BACKENDS` of a back end that executes step programs.
        rank: Rank of this process.
        ranks: Number of processes.
        agree: Function that broadcasts a text from rank 0. Rank 0 passes the text and the other ranks None; the
            function returns the text on every rank.
        groups: Ranks of this rank's process groups, by the name in collectives: a mesh axis, or a list of ranks.
        fuse: Whether to fuse operators into generated kernels.
    """
    join = _module(backend, "runner").join
    runner: ProgramRunner = join(rank, ranks, agree, groups, fuse=fuse)
    return runner


def _module(backend: str, name: str) -> ModuleType:
    return import_module(f"{BACKENDS[backend].programs}.{name}")

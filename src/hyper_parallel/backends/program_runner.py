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
"""Compiled program: values of the back end by name in, values by name out."""


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Kernel that a back end generated from several operators.

    Attributes:
        name: Name of the kernel.
        operators: Its operators in the names of the back end, in order.
    """

    name: str
    operators: tuple[str, ...]


class ProgramRunner(Protocol):
    """Framework of one rank; its values are opaque to callers."""

    def compile(self, program: StepProgram, source: Path) -> CompiledProgram:
        """Compile a program; `source` is the file for generated code, which ends in `.py`."""
        ...

    def value(self, array: NDArray[Any]) -> Any:
        """Return a copy of the array as a value of the framework."""
        ...

    def array(self, value: Any) -> NDArray[Any]:
        """Return a value of the framework as an array."""
        ...

    def close(self, *, failed: bool) -> None:
        """End the services of this rank; at once if the run has failed, else when all ranks have ended."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return name and version of the framework for the record of the run, and `fused_kernels` with fusion.

        `fused_kernels` lists the kernels built so far, each as an object with the attributes of `FusedKernel`.
        """
        ...


def unsupported_operators(backend: str, program: StepProgram) -> dict[str, str]:
    """Return the operators that a back end lacks, each with the path of the first module that needs it.

    A partly supported operator is included if the program needs an unsupported case, such as a data type.
    """
    is_supported = _module(backend, "operators").is_supported
    missing: dict[str, str] = {}
    for node in program.nodes:
        if not is_supported(node):
            missing.setdefault(node.op, node.module)
    return missing


def missing_for_fusion(backend: str) -> dict[str, str]:
    """Return the packages and programs that a back end lacks to fuse operators, with the commands to install them."""
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
    """Return the runner of this rank; imports its framework.

    Args:
        backend: Name in `BACKENDS` of a back end that executes step programs.
        rank: Rank of this process.
        ranks: Number of processes.
        agree: Function that returns the text of rank 0 on every rank; other ranks pass None.
        groups: Dict from an axis that collectives of the programs name to the ranks of this rank's group.
        fuse: Whether to fuse operators into generated kernels.
    """
    join = _module(backend, "runner").join
    runner: ProgramRunner = join(rank, ranks, agree, groups, fuse=fuse)
    return runner


def _module(backend: str, name: str) -> ModuleType:
    """Return a module of the package that executes step programs."""
    return import_module(f"{BACKENDS[backend].programs}.{name}")

"""Graph-kernel fusion: chains of operators of a program become one generated kernel each. Imports no MindSpore.

MindSpore hands each chain to its compiler AKG, which writes three files per kernel into the folder `akg_kernel_meta` of
`MS_COMPILER_CACHE_PATH`: the chain (`.info`), the description of the kernel (`.json`) and the kernel (`.so`).
Processes with one working directory share the work, so they must share this folder; other jobs must have another.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from ctypes import CDLL
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from hyper_parallel.backends.program_runner import FusedKernel

_PACKAGES: Final = {"decorator": "pip install decorator"}
"""Package that AKG imports and MindSpore does not declare, to the command that installs it."""

_PROGRAMS: Final = {"g++": "apt-get install g++"}
"""Program with which AKG links kernels, to the command that installs it."""

CONTEXT: Final[Mapping[str, Mapping[str, Any]]] = {
    "CPU": {"enable_graph_kernel": True},
    "Ascend": {"enable_graph_kernel": True, "graph_kernel_flags": "--kernel_generator=DVM"},
}
"""Device to the settings of MindSpore that switch fusion on. The row of Ascend was not run."""

JIT_LEVEL: Final[Mapping[str, str]] = {"CPU": "O0", "Ascend": "O1"}
"""Device to the optimization level of graphs, `jit_level`. The CPU ignores higher ones; Ascend's row was not run."""


def missing_for_fusion() -> dict[str, str]:
    """Return the packages and programs that fusion needs and that are not installed, with the commands to install."""
    packages = {name: fix for name, fix in _PACKAGES.items() if find_spec(name) is None}
    return packages | {name: fix for name, fix in _PROGRAMS.items() if shutil.which(name) is None}


class KernelFolder:
    """Folder of the generated kernels of a job on this machine.

    The constructor sets `MS_COMPILER_CACHE_PATH` of this process.

    Args:
        folder: An existing folder, the same one on all ranks.
        owned: Whether this rank deletes it.
    """

    def __init__(self, folder: Path, *, owned: bool) -> None:
        self._folder, self._owned = folder, owned
        os.environ["MS_COMPILER_CACHE_PATH"] = str(folder)

    @contextmanager
    def building(self, log: Path) -> Iterator[None]:
        """Build kernels into the folder; AKG shares its work and its locks through the working directory.

        AKG writes a line per kernel to standard output: these lines are appended to the file `log`. Workers of AKG
        write all their lines to the file of the first call, so the programs of a run share one.
        """
        with log.open("ab") as file, chdir(self._folder), _standard_output_to(file.fileno()):
            yield

    def kernels(self) -> tuple[FusedKernel, ...]:
        """Return the kernels of several operators that were built, those with most operators first."""
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
    """Flush standard output of Python and of C libraries."""
    sys.stdout.flush()
    CDLL(None).fflush(None)


def _read(path: Path) -> FusedKernel:
    """Return the kernel of a chain that MindSpore wrote."""
    chain = json.loads(path.read_text(encoding="utf-8"))
    return FusedKernel(path.stem, tuple(op["name"] for op in chain["op_desc"]))

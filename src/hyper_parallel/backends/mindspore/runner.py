"""Runner of step programs on MindSpore: one compiled graph per program, with MindSpore's own collectives."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from itertools import count
from pathlib import Path
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor
from numpy.typing import NDArray

from hyper_parallel.backends.mindspore.fusion import CONTEXT, FORMS, JIT_LEVEL, KernelFolder, without_broadcasts
from hyper_parallel.backends.mindspore.operators import OPERATORS
from hyper_parallel.backends.mindspore.translate import to_source
from hyper_parallel.backends.program_runner import CompiledProgram
from hyper_parallel.backends.step_program import StepProgram

_DEVICE: Final = "CPU"
"""Device of the ranks; other devices are untested."""

_SCHEDULER: Final = "import mindspore as ms; ms.set_device('CPU'); ms.communication.init('mccl')"
"""Python program of MindSpore's scheduler process, with which ranks register; the process ends after all ranks."""


class MindSporeRunner:
    """Runner of step programs with MindSpore on the CPU of this rank.

    Args:
        groups: Dict from name to group of ranks, in the form described in `kernels`.
        scheduler: MindSpore's scheduler process if this rank has started it, else None.
        kernels: Folder of generated kernels; None: no fusion.
    """

    def __init__(
        self,
        groups: Mapping[str, tuple[Any, ...]],
        scheduler: subprocess.Popen[bytes] | None = None,
        kernels: KernelFolder | None = None,
    ) -> None:
        self._groups = groups
        self._scheduler = scheduler
        self._kernels = kernels

    def compile(self, program: StepProgram, source: Path) -> CompiledProgram:
        """Compile a program as one graph, from Python code written to `source`."""
        forms = OPERATORS
        if self._kernels is not None:
            program, forms = without_broadcasts(program), OPERATORS | FORMS
        source.write_text(to_source(program, self._groups, forms), encoding="utf-8")
        level = {} if self._kernels is None else {"jit_level": JIT_LEVEL[_DEVICE]}
        function = ms.jit(_function(source.resolve()), **level)
        if self._kernels is not None:
            log = source.with_name("kernels.log").resolve()
            function = _build_in(self._kernels, log, function)
        constants = [Tensor.from_numpy(array) for array in program.constants.values()]

        def run(values: Mapping[str, Any]) -> dict[str, Any]:
            arguments = [values[name] for name in program.inputs]
            return dict(zip(program.outputs, function(*arguments, *constants), strict=True))

        return run

    def value(self, array: NDArray[Any]) -> Any:
        """Return a tensor with a copy of the array."""
        return Tensor(array)

    def array(self, value: Any) -> NDArray[Any]:
        """Return a tensor as a numpy array."""
        array: NDArray[Any] = value.asnumpy()
        return array

    def close(self, *, failed: bool) -> None:
        """Release the scheduler process and the files of this rank.

        After a failure, the scheduler is killed. Otherwise the scheduler continues to run, because other ranks need
        it; it ends after the last rank. Rank 0 deletes the folder of generated kernels; loaded kernels keep working.
        """
        if self._kernels is not None:
            self._kernels.remove()
        if self._scheduler is None:
            return
        atexit.unregister(self._scheduler.kill)
        if failed:
            self._scheduler.kill()
            self._scheduler.wait()

    def facts(self) -> dict[str, Any]:
        """Return the version of MindSpore and, with operator fusion, the kernels built so far that fuse operators."""
        facts: dict[str, Any] = {"mindspore": ms.__version__}
        if self._kernels is not None:
            facts["fused_kernels"] = [asdict(kernel) for kernel in self._kernels.kernels()]
        return facts


def join(
    rank: int,
    ranks: int,
    agree: Callable[[str | None], str],
    groups: Mapping[str, Sequence[int]],
    *,
    fuse: bool = False,
) -> MindSporeRunner:
    """Return the runner of this rank; see `program_runner.join_ranks`.

    With several ranks, the function sets the environment variables from which MindSpore reads ranks and addresses, like
    the launcher `msrun`, and rank 0 starts MindSpore's scheduler process.
    """
    process = None
    if ranks > 1:
        port = agree(str(_free_port()) if rank == 0 else None)
        common = {
            "MS_WORKER_NUM": str(ranks), "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": port, "GLOG_v": "3",
        }  # fmt: skip
        if rank == 0:
            environ = {**os.environ, **common, "MS_ROLE": "MS_SCHED"}
            process = subprocess.Popen(
                [sys.executable, "-c", _SCHEDULER], env=environ,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            atexit.register(process.kill)  # also if an error ends this rank
        os.environ |= {**common, "MS_ROLE": "MS_WORKER", "MS_NODE_ID": str(rank)}
    kernels = _kernel_folder(rank, ranks, agree) if fuse else None
    ms.set_device(_DEVICE)
    if ranks > 1:
        ms.communication.init("mccl")
    world = ms.communication.GlobalComm.WORLD_COMM_GROUP
    named = {name: (world, members.index(rank), ranks, tuple(members)) for name, members in groups.items()}
    return MindSporeRunner(named, process, kernels)


def _kernel_folder(rank: int, ranks: int, agree: Callable[[str | None], str]) -> KernelFolder:
    """Return the folder of generated kernels that the ranks of this job share; rank 0 deletes it at the end."""
    own = tempfile.mkdtemp(prefix="hyper_parallel_kernels_") if rank == 0 else None
    shared = agree(own) if ranks > 1 else str(own)
    folder = KernelFolder(Path(shared), owned=rank == 0)
    atexit.register(folder.remove)  # also if an error ends this rank
    return folder


def _build_in(folder: KernelFolder, log: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that its first call, which compiles it, builds kernels into a folder and appends to `log`."""
    calls = count()

    def call(*args: Any) -> Any:
        if next(calls):
            return function(*args)
        with folder.building(log):
            ms.set_context(**CONTEXT[_DEVICE])
            try:
                return function(*args)
            finally:
                ms.set_context(enable_graph_kernel=False)

    return call


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _function(path: Path) -> Callable[..., Any]:
    """Return the function of a generated module; MindSpore reads its source from the file."""
    name = f"step_program_{path.stem}"
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[..., Any] = module.step
    return function

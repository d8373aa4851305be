"""File operations on several ranks: a failure of one rank is raised on all ranks, so that no rank hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from hyper_parallel.errors import HyperParallelError, OutputNotWritable

T = TypeVar("T")

_log = logging.getLogger(__name__)


class RankGroup:
    """Ranks of a process group, or a single process without one.

    Args:
        work: Output of the ranks, for errors: `checkpoint`.
        place: Path of the output.
        own_group: Create a separate process group, so that a thread may use it during training: collectives of one
            group need a single order.
    """

    def __init__(self, work: str, place: Path, *, own_group: bool = False) -> None:
        self._work, self._place = work, place
        self.several = dist.is_initialized()
        self.rank = dist.get_rank() if self.several else 0
        self.size = dist.get_world_size() if self.several else 1
        self.group = dist.new_group(backend="gloo") if self.several and own_group else None

    def close(self) -> None:
        """Release the separate group, if any."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank and return the results of all ranks, or raise the first failure on all ranks."""
        try:
            outcome: tuple[Any, Exception | None] = action(), None
        except Exception as error:
            _log.debug("failed on rank %d", self.rank, exc_info=True)
            outcome = None, self._coded(error)
        gathered = [outcome]
        if self.several:
            gathered *= self.size
            dist.all_gather_object(gathered, outcome, group=self.group)
        for _, failure in gathered:
            if failure is not None:
                raise failure
        return [result for result, _ in gathered]

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0 and return its result, or raise its failure, on all ranks."""
        return self.everywhere(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _coded(self, error: Exception) -> Exception:
        """Return an error that all ranks can raise: it can be pickled, and I/O errors get their code."""
        if isinstance(error, HyperParallelError):
            return error
        if isinstance(error, (OSError, SafetensorError)):
            reason = getattr(error, "strerror", None) or f"{error!s:.200}"
            return OutputNotWritable(
                f"the {self._work} cannot be written: {reason}",
                where=str(getattr(error, "filename", None) or self._place),
                hint=f"df -h {self._place}",
            )
        return RuntimeError(f"{type(error).__name__}: {error}")

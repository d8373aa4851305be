"""Actions on several ranks whose failure on one rank is raised on all ranks, so that no rank hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError

from hyper_parallel.errors import HyperParallelError, not_writable

T = TypeVar("T")

_log = logging.getLogger(__name__)


class RankGroup:
    """Ranks of a process group, or a single process without one.

    Args:
        place: Path of the output, for error messages.
        own_group: Whether to create a separate process group, which a background thread needs for its collectives.
            Construction is then collective over all ranks.
    """

    def __init__(self, place: Path, *, own_group: bool = False) -> None:
        self._place = place
        several = dist.is_initialized()
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1
        self.group = dist.new_group(backend="gloo") if several and own_group else None

    def close(self) -> None:
        """Destroy the separate process group, if any."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank; return the results in rank order, or raise the error of the lowest failed rank.

        Results and errors are equal on all ranks.
        """
        try:
            outcome: tuple[Any, Exception | None] = action(), None
        except Exception as error:
            _log.debug("failed on rank %d", self.rank, exc_info=True)
            outcome = None, self._coded(error)
        gathered = [outcome] * self.size
        if self.size > 1:
            dist.all_gather_object(gathered, outcome, group=self.group)
        for _, failure in gathered:
            if failure is not None:
                raise failure
        return [result for result, _ in gathered]

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0; on all ranks, return its result or raise its error."""
        return self.everywhere(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _coded(self, error: Exception) -> Exception:
        """Return a picklable exception: a HyperParallelError unchanged, HP105 for an I/O error, else a RuntimeError."""
        if isinstance(error, HyperParallelError):
            return error
        if isinstance(error, SafetensorError):  # for example a full disk
            error = OSError(f"{error!s:.200}")
        if isinstance(error, OSError):
            return not_writable(error, self._place)
        return RuntimeError(f"{type(error).__name__}: {error}")

"""Work that several ranks do together on files: a failure of one is raised on all, so that none waits for it."""

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
    """The ranks of a process group; a single one where there is none.

    Args:
        work: What they write, for errors: `checkpoint`.
        place: Where they write it.
        own_group: With a process group of their own, so that a thread may call them beside training: collectives of
            one group need one order.
    """

    def __init__(self, work: str, place: Path, *, own_group: bool = False) -> None:
        self._work, self._place = work, place
        self.several = dist.is_initialized()
        self.rank = dist.get_rank() if self.several else 0
        self.size = dist.get_world_size() if self.several else 1
        self.group = dist.new_group(backend="gloo") if self.several and own_group else None

    def close(self) -> None:
        """Give back the group of its own; it does nothing afterwards."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None

    def everywhere(self, action: Callable[[], T]) -> list[T]:
        """Call `action` on every rank; the results of all ranks, or the first failure on all ranks."""
        try:
            mine: tuple[Any, Exception | None] = action(), None
        except Exception as error:
            _log.debug("failed on rank %d", self.rank, exc_info=True)
            mine = None, self._coded(error)
        everyone = [mine]
        if self.several:
            everyone *= self.size
            dist.all_gather_object(everyone, mine, group=self.group)
        for _, failure in everyone:
            if failure is not None:
                raise failure
        return [result for result, _ in everyone]

    def on_rank_0(self, action: Callable[[], T]) -> T:
        """Call `action` on rank 0; its result, or its failure, on all ranks."""
        return self.everywhere(lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _coded(self, error: Exception) -> Exception:
        """An error that all ranks can raise: it pickles, and disk trouble gets its code."""
        if isinstance(error, HyperParallelError):
            return error
        if isinstance(error, (OSError, SafetensorError)):
            why = getattr(error, "strerror", None) or f"{error!s:.200}"
            return OutputNotWritable(
                f"the {self._work} cannot be written: {why}",
                where=str(getattr(error, "filename", None) or self._place),
                hint=f"df -h {self._place}",
            )
        return RuntimeError(f"{type(error).__name__}: {error}")

"""Machines of a world, and detection of the lost one when a collective fails because connections are closed."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any, Final

from hyper_parallel.errors import HostLost

_ANSWER_S: Final = 5.0
"""Seconds within which a live machine reports; connections of all ranks fail within one or two seconds. Not measured on
a large cluster."""
_POLL_S: Final = 0.1  # short compared with `_ANSWER_S`


class Hosts:
    """Liveness records of the machines, in the store of the process group.

    Args:
        store: The store.
        rank: Rank of this process.
        local_rank: Local rank of this process.
        world_size: Ranks of all machines.
        ranks_each: Ranks of one machine.
    """

    def __init__(
        self, store: Any, rank: int, local_rank: int, world_size: int, ranks_each: int
    ) -> None:
        self._store, self._rank, self._ranks_each = store, rank, ranks_each
        self._alive = [f"hyper_parallel/alive/{r}" for r in range(0, world_size, ranks_each)]
        self._names = [f"hyper_parallel/name/{r}" for r in range(0, world_size, ranks_each)]
        if local_rank == 0:
            store.set(self._names[rank // ranks_each], socket.gethostname())

    def alive(self) -> None:
        """Report that this machine is alive, after any failure."""
        self._store.set(self._alive[self._rank // self._ranks_each], "")

    def lost(self) -> HostLost | None:
        """Return an error that names the machines that do not report in time; None when all do."""
        missing, names = list(range(len(self._alive))), list[str]()
        answered = threading.Event()

        def poll() -> None:
            with suppress(Exception):  # the exception type for a lost store depends on its library
                self.alive()
                deadline = time.monotonic() + _ANSWER_S
                while missing and time.monotonic() < deadline:
                    missing[:] = [m for m in missing if not self._store.check([self._alive[m]])]
                    time.sleep(_POLL_S)
                names.extend(self._store.get(self._names[m]).decode() for m in missing)
                answered.set()

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        thread.join(2 * _ANSWER_S)
        if answered.is_set() and not names:
            return None
        ranks_each = self._ranks_each
        lost = [
            f"{n} (ranks {m * ranks_each} to {m * ranks_each + ranks_each - 1})"
            for n, m in zip(names, missing, strict=False)
        ]
        where = f"{os.environ.get('MASTER_ADDR')}, where the ranks have met,"
        return HostLost(
            f"the connection to {', '.join(lost) or where} is lost",
            where=f"rank {self._rank} on {socket.gethostname()}",
            hint="checkpoint.resume=must continues from the newest checkpoint",
        )

"""Signals that end a run: after the first signal the current step is finished and saved; a second one stops at once."""

from __future__ import annotations

import mmap
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run: SIGINT (Ctrl-C), SIGTERM (`kill`, cluster schedulers), SIGHUP (closed terminal)."""

_ONE_S: Final = 1.0
"""Seconds in which repeated signals count as one, because launchers forward signals that the terminal already sent."""
_PROMISE: Final = "the run ends; a step that has begun is finished and saved"


class Interrupted(KeyboardInterrupt):
    """Exception that ends a run after a signal.

    Attributes:
        signum: Number of the signal.
        step: Step of the checkpoint saved on request; None: the run was stopped at once.
    """

    def __init__(self, signum: int, step: int | None = None) -> None:
        super().__init__()
        self.signum, self.step = signum, step

    @property
    def status(self) -> int:
        """Exit status by the convention of shells, 128 + signal number."""
        return 128 + self.signum


class StopRequest:
    """Request to end the run after the current step, in memory shared with ranks that are forked later.

    The first signal sets `signum`, and prints `promise`, the consequence of the request, on standard error of rank 0.
    """

    def __init__(self, promise: str = _PROMISE) -> None:
        self._promise = promise
        # Anonymous memory shared across forks: request flag, final step.
        self._shared = mmap.mmap(-1, 16)
        self._owner, self._asked, self._first_s = os.getpid(), False, 0.0
        self.signum: int | None = None
        self._received: int | None = None

    def received(self) -> bool:
        """Return whether a signal has arrived, also if the main thread is blocked and has not handled it yet."""
        if self.is_requested or self._received is None:
            return self.is_requested
        return bool(select.select([self._received], [], [], 0)[0])

    @property
    def is_requested(self) -> bool:
        """True if this process or its parent has received a signal."""
        return self._asked or self._shared[0] == 1

    @property
    def step(self) -> int | None:
        """Step after which the run ended on request; None if the run has not ended on request."""
        return int.from_bytes(self._shared[8:], "little") or None

    def record_stop(self, step: int) -> None:
        """Record that the run ends on request after step `step`."""
        self._shared[8:] = step.to_bytes(8, "little")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Treat signals inside the context as requests; a second signal more than a second later raises Interrupted.

        Signals that are ignored, as under nohup, stay ignored. No effect outside the main thread.
        """
        with handled(self._on_signal), _signal_pipe() as self._received:
            try:
                yield
            finally:
                self._received = None

    def _on_signal(self, signum: int, _: Any) -> None:
        self._asked = True
        if os.getpid() != self._owner:  # in a forked rank, whose parent counts the signals
            return
        if self.signum is None:
            self.signum, self._first_s, self._shared[0] = signum, time.monotonic(), 1
            if os.environ.get("RANK", "0") == "0":
                name = signal.Signals(signum).name
                line = f"{name}: {self._promise}; a second signal ends it at once\n"
                with suppress(OSError):
                    os.write(2, line.encode())
        elif time.monotonic() - self._first_s > _ONE_S:
            raise Interrupted(signum)


@contextmanager
def _signal_pipe() -> Iterator[int | None]:
    """Yield a file descriptor from which the numbers of handled signals can be read; None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield None
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def interrupt(signum: int, _: Any) -> None:
    """Raise `Interrupted`, as a signal handler; cleanup then runs as for KeyboardInterrupt."""
    raise Interrupted(signum)


@contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Install `handler` inside the context for all signals in `ENDING` that are not ignored; main thread only."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for signum in ENDING:
                if signal.getsignal(signum) != signal.SIG_IGN:
                    # The result is None for a handler that Python did not install and cannot restore.
                    before = signal.signal(signum, handler) or signal.SIG_DFL
                    stack.callback(signal.signal, signum, before)
                    signal.siginterrupt(signum, False)  # restart interrupted system calls
        yield

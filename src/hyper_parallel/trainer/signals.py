"""Signals that end a run: the present step is finished and saved; a second signal stops at once."""

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
"""Ctrl-C, what schedulers and `kill` send, and a terminal that is closed."""

_ONE_S: Final = 1.0
"""Seconds within which signals are one: a launcher passes on what the terminal has sent to everybody."""
_PROMISE: Final = "ends after this step, with a checkpoint; before the first step at once"


class Interrupted(KeyboardInterrupt):
    """A signal has ended the run.

    Attributes:
        signum: The signal.
        step: Step whose checkpoint was saved for it; None: the run was stopped at once.
    """

    def __init__(self, signum: int, step: int | None = None) -> None:
        super().__init__()
        self.signum, self.step = signum, step

    @property
    def status(self) -> int:
        """Exit status, as shells have it."""
        return 128 + self.signum


class StopRequest:
    """A wish to end the run after the present step, and what became of it; seen by the ranks forked later."""

    def __init__(self, promise: str = _PROMISE) -> None:
        self._promise = promise
        self._shared = mmap.mmap(-1, 16)  # anonymous memory outlives a fork: wish, step of the end
        self._owner, self._asked, self._first_s = os.getpid(), False, 0.0
        self.signum: int | None = None
        self._received: int | None = None

    def received(self) -> bool:
        """Return whether a signal came, also while the main thread waits in a library and handles none."""
        if self.asked or self._received is None:
            return self.asked
        return bool(select.select([self._received], [], [], 0)[0])

    @property
    def asked(self) -> bool:
        """Whether this process, or the one that started it, was sent a signal."""
        return self._asked or self._shared[0] == 1

    @property
    def step(self) -> int | None:
        """The step after which the run has ended on request; None: it has not."""
        return int.from_bytes(self._shared[8:], "little") or None

    def obeyed(self, step: int) -> None:
        """Note that the run ends after this step, because it was asked to."""
        self._shared[8:] = step.to_bytes(8, "little")

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take signals as wishes inside; what was ignored stays ignored (nohup). Only a main thread gets signals."""
        with handled(self._on_signal), _noted_signals() as self._received:
            try:
                yield
            finally:
                self._received = None

    def _on_signal(self, signum: int, _: Any) -> None:
        self._asked = True
        if os.getpid() != self._owner:  # a forked rank: the process that started it counts
            return
        if self.signum is None:
            self.signum, self._first_s, self._shared[0] = signum, time.monotonic(), 1
            if os.environ.get("RANK", "0") == "0":
                name = signal.Signals(signum).name
                with suppress(OSError):
                    os.write(2, f"{name}: {self._promise}; once more: at once\n".encode())
        elif time.monotonic() - self._first_s > _ONE_S:
            raise Interrupted(signum)


@contextmanager
def _noted_signals() -> Iterator[int | None]:
    """Yield a file that has the number of every handled signal as soon as it comes; None on another thread."""
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
    """Handler that ends what runs as an interrupt does, so that everything is cleaned up on the way out."""
    raise Interrupted(signum)


@contextmanager
def handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle the signals that end a run; the handlers from before come back."""
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for one in ENDING:
                if signal.getsignal(one) != signal.SIG_IGN:
                    # None: a handler that was not set from Python, and cannot be set from it.
                    before = signal.signal(one, handler) or signal.SIG_DFL
                    stack.callback(signal.signal, one, before)
                    signal.siginterrupt(one, False)  # system calls of libraries go on
        yield

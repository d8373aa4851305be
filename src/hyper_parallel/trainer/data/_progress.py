"""Progress bars on stderr for the steps that take seconds: tokenizer training, tokenising."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class ByteBar:
    """One bar; without a display, advancing it does nothing."""

    display: object | None = None
    handle: int = 0

    def advance(self, num_bytes: int) -> None:
        """Move the bar on by text that was read."""
        if self.display is not None:
            self.display.advance(self.handle, num_bytes)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Progress:
    """Shows bars, or nothing when `enabled` is false."""

    enabled: bool = True

    @contextmanager
    def task(self, name: str, total_bytes: int) -> Iterator[ByteBar]:
        """A bar over `total_bytes`, an estimate; it ends full whatever was read."""
        if not self.enabled:
            yield ByteBar()
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Display

        columns = (TextColumn("{task.description:<16}"), BarColumn(), DownloadColumn())
        with Display(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as display:
            handle = display.add_task(name, total=total_bytes)
            yield ByteBar(display, handle)
            done = display.tasks[0].completed
            display.update(handle, total=done, completed=done)

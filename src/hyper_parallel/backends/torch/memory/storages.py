"""Storages from birth to death: which live, what they hold, and how many bytes they take together.

The unit is the storage (one allocation), followed with a weak reference: it is live exactly as long as Python and
autograd keep it. A storage that its owner resizes (FSDP frees and refills gathered parameters that way) ends there and
comes back as a fresh one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.ir import Storage, StorageKind

_CPU = torch.device("cpu")


@dataclass(slots=True)
class Entry:
    """What is known of a storage while a program is recorded.

    Attributes:
        name: Name of a parameter, or the operator that made it.
        num_bytes: Bytes, 0 while its owner has emptied it.
        kind: What it holds.
        at_start: See `Storage`.
        at_end: See there.
        device: Where it lies.
        shape: Shape of the first tensor on it.
        dtype: Number format of that tensor.
        recomputed: Recomputed inside backward.
        sent: A collective read or wrote it.
        resized: Its owner empties and refills it in place.
    """

    name: str
    num_bytes: int
    kind: StorageKind
    at_start: bool = False
    at_end: bool = False
    device: torch.device = _CPU
    shape: tuple[int, ...] = ()
    dtype: str = ""
    recomputed: bool = False
    sent: bool = False
    resized: bool = False

    @property
    def storage(self) -> Storage:
        """The same as part of a program."""
        return Storage(self.name, self.num_bytes, self.kind, self.at_start, self.at_end)


class Storages:
    """All storages that a recorded program has touched, numbered in the order of their birth.

    Args:
        alignment_bytes: Every allocation is rounded up to a multiple of it: 1 counts requested bytes, 512 counts as the
            caching allocators of accelerators do.
        ended: Called with the number of every storage that ends.

    Attributes:
        entries: What is known of each.
        peak_bytes: Most bytes that were live at the same time.
    """

    def __init__(self, alignment_bytes: int, ended: Callable[[int], None] | None = None) -> None:
        self.entries: list[Entry] = []
        self.peak_bytes = self._live = 0
        self._alignment, self._ended = alignment_bytes, ended
        self._numbers: dict[int, int] = {}  # identity of a living storage -> its number
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._watched: dict[int, None] = {}

    @property
    def live_bytes(self) -> int:
        """Bytes that are live now."""
        return self._live

    def find(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage; None: it is not known."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: Tensor, entry: Entry, *, watch: bool = False) -> int:
        """Number a tensor's storage.

        Args:
            tensor: A tensor on it.
            entry: What is known of it; its bytes and its device are filled in.
            watch: Its owner may resize it: `resized` looks at it.
        """
        base = tensor.untyped_storage()
        key = base._cdata
        entry.device = tensor.device
        if key in self._numbers:
            self._end(key)
        if key not in self._refs:
            self._refs[key] = weakref.ref(base, lambda _: self._gone(key))
        if watch or not base.nbytes():
            self._watched[key] = None
        return self.begin(key, entry)

    def begin(self, key: int, entry: Entry) -> int:
        """Number a storage that exists and has ended, with the bytes that it has now."""
        base = self._refs[key]()
        entry.num_bytes = 0 if base is None else base.nbytes()
        number = self._numbers[key] = len(self.entries)
        self.entries.append(entry)
        self._live += self._rounded(entry.num_bytes)
        self.peak_bytes = max(self.peak_bytes, self._live)
        return number

    def _end(self, key: int) -> None:
        number = self._numbers.pop(key)
        self._live -= self._rounded(self.entries[number].num_bytes)
        if self._ended is not None:
            self._ended(number)

    def _gone(self, key: int) -> None:
        del self._refs[key]
        self._watched.pop(key, None)
        if key in self._numbers:
            self._end(key)

    def end_resized(self, *, everywhere: bool = False) -> list[tuple[int, Entry, Any]]:
        """Let storages end whose owner has changed their size.

        Args:
            everywhere: Look at all living storages, not only at the watched ones.

        Returns:
            Identity of each, what is known of it, and the storage itself, which may not end before it is taken up.
        """
        ended = []
        for key in list(self._numbers if everywhere else self._watched):
            ref, number = self._refs.get(key), self._numbers.get(key)  # others end meanwhile
            base = None if ref is None else ref()
            if base is None or number is None or base.nbytes() == self.entries[number].num_bytes:
                continue
            self._end(key)
            self.entries[number].resized, self._watched[key] = True, None
            ended.append((key, self.entries[number], base))
        return ended

    @property
    def living(self) -> list[int]:
        """Numbers of the storages that live now, oldest first."""
        return sorted(self._numbers.values())

    def restart(self) -> None:
        """Forget what has ended; what lives was there at the start."""
        renumbered = {old: new for new, old in enumerate(self.living)}
        self.entries = [replace(self.entries[old], at_start=True) for old in renumbered]
        self._numbers = {key: renumbered[old] for key, old in self._numbers.items()}
        self.peak_bytes = self._live

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

"""Live ranges, content and total bytes of storages.

The unit is the storage (one allocation), tracked by a weak reference: it is live exactly as long as Python and autograd
reference it. When its owner resizes a storage (FSDP frees and refills gathered parameters that way), it ends and a
fresh one begins.
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
    """Properties of a storage of a program that is being recorded.

    Attributes:
        name: Name of a parameter, or the operator that allocated it.
        num_bytes: Bytes, 0 while its owner has emptied it.
        kind: Kind of its content.
        at_start: See `Storage`.
        at_end: See `Storage`.
        device: Device of the storage.
        shape: Shape of the first tensor on it.
        dtype: Number format of that tensor.
        recomputed: True if it was recomputed inside backward.
        sent: True if a collective read or wrote it.
        resized: True if its owner empties and refills it in place.
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
        """Storage of the program with these properties."""
        return Storage(self.name, self.num_bytes, self.kind, self.at_start, self.at_end)


class Storages:
    """Storages that a recorded program has used, numbered in the order of their first use.

    Args:
        alignment_bytes: Every allocation is rounded up to a multiple of it: 1 counts requested bytes, 512 counts as the
            caching allocators of accelerators do.
        ended: Called with the number of every storage that ends.

    Attributes:
        entries: Properties of each storage, by number.
        peak_bytes: Highest live bytes.
    """

    def __init__(self, alignment_bytes: int, ended: Callable[[int], None] | None = None) -> None:
        self.entries: list[Entry] = []
        self.peak_bytes = self._live = 0
        self._alignment, self._ended = alignment_bytes, ended
        self._numbers: dict[int, int] = {}  # identity of a living storage -> its number
        self._refs: dict[int, weakref.ref[Any]] = {}
        self._watched: dict[int, tuple[weakref.ref[Any], int]] = {}  # with the size last seen

    @property
    def live_bytes(self) -> int:
        """Bytes that are live now."""
        return self._live

    def find(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage; None: unknown."""
        return self._numbers.get(tensor.untyped_storage()._cdata)

    def add(self, tensor: Tensor, entry: Entry, *, watch: bool = False) -> int:
        """Assign the next number to a tensor's storage and return it.

        Args:
            tensor: A tensor on the storage.
            entry: Properties of the storage; this method sets bytes and device.
            watch: The owner may resize the storage, so `end_resized` compares its size.
        """
        base = tensor.untyped_storage()
        key = base._cdata
        entry.device = tensor.device
        if key in self._numbers:
            self._end(key)
        if key not in self._refs:
            self._refs[key] = weakref.ref(base, lambda _: self._on_destroyed(key))
        if watch or not base.nbytes():
            self._watched[key] = (self._refs[key], 0)
        return self.begin(key, entry)

    def begin(self, key: int, entry: Entry) -> int:
        """Assign the next number to an existing storage whose former live range has ended, and return it."""
        base = self._refs[key]()
        entry.num_bytes = 0 if base is None else base.nbytes()
        if key in self._watched:
            self._watched[key] = (self._refs[key], entry.num_bytes)
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

    def _on_destroyed(self, key: int) -> None:
        del self._refs[key]
        self._watched.pop(key, None)
        if key in self._numbers:
            self._end(key)

    def end_resized(self, *, everywhere: bool = False) -> list[tuple[int, Entry, Any]]:
        """End the storages whose owner has changed their size.

        Args:
            everywhere: Compare all live storages, not only the watched ones.

        Returns:
            Key and properties of each, and a reference that keeps the storage alive until it is numbered again.
        """
        ended = []
        for key in list(self._numbers) if everywhere else self._resized():
            ref, number = (
                self._refs.get(key),
                self._numbers.get(key),
            )  # None if it ended in this loop
            base = None if ref is None else ref()
            if base is None or number is None or base.nbytes() == self.entries[number].num_bytes:
                continue
            self._end(key)
            self.entries[number].resized = True
            self._watched[key] = (self._refs[key], base.nbytes())
            ended.append((key, self.entries[number], base))
        return ended

    def _resized(self) -> list[int]:
        """Return the keys of watched storages of another size: a short loop, as it runs before every operator."""
        return [
            key
            for key, (ref, num_bytes) in list(self._watched.items())
            if (base := ref()) is not None and base.nbytes() != num_bytes
        ]

    @property
    def living(self) -> list[int]:
        """Numbers of the live storages, oldest first."""
        return sorted(self._numbers.values())

    def restart(self) -> None:
        """Drop the ended storages; live ones exist from the start."""
        renumbered = {old: new for new, old in enumerate(self.living)}
        self.entries = [replace(self.entries[old], at_start=True) for old in renumbered]
        self._numbers = {key: renumbered[old] for key, old in self._numbers.items()}
        self.peak_bytes = self._live

    def _rounded(self, num_bytes: int) -> int:
        return -(-num_bytes // self._alignment) * self._alignment

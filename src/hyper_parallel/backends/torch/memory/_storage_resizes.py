"""Announces that an owner is about to resize a storage in place, as FSDP does with gathered parameters.

No operator shows such a resize. To compare the sizes of all storages with what they were, at every operator, takes
time that grows with their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch


class StorageResizes:
    """Context in which every `UntypedStorage.resize_` is announced before it happens.

    Args:
        announce: Called with the storage and its next number of bytes.
    """

    def __init__(self, announce: Callable[[torch.UntypedStorage, int], None]) -> None:
        self._announce = announce
        self._own: Any = None  # a method of the class itself, beside the one it inherits

    def __enter__(self) -> Self:
        kind: Any = torch.UntypedStorage
        self._own, resize, announce = vars(kind).get("resize_"), kind.resize_, self._announce

        def resize_(base: torch.UntypedStorage, size: int) -> Any:
            announce(base, int(size))
            return resize(base, size)

        kind.resize_ = resize_
        return self

    def __exit__(self, *error: Any) -> None:
        kind: Any = torch.UntypedStorage
        if self._own is None:
            del kind.resize_
        else:
            kind.resize_ = self._own

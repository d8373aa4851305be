"""Interception of in-place storage resizes, as FSDP does with gathered parameters.

Such a resize is no operator. Comparing the sizes of all storages at every operator would take time that grows with
their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch


class StorageResizes:
    """Context that calls a function before every `UntypedStorage.resize_`.

    Args:
        announce: Called with the storage and its next number of bytes.
    """

    def __init__(self, announce: Callable[[torch.UntypedStorage, int], None]) -> None:
        self._announce = announce
        self._own: Any = None  # the method that the class itself defines, if any

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

"""Rank and world size of this process, with the method names that LlamaFactory's trainer calls."""

from __future__ import annotations

import os
import sys


class Platform:
    """Rank and world size of torch's process group or, before it exists, of the launcher's environment variables."""

    def get_rank(self) -> int:
        """Return the rank of this process, 0 without a launcher."""
        return self._ask("get_rank", "RANK", 0)

    def get_world_size(self) -> int:
        """Return the number of ranks, 1 without a launcher."""
        return self._ask("get_world_size", "WORLD_SIZE", 1)

    @staticmethod
    def _ask(name: str, variable: str, alone: int) -> int:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            return int(getattr(distributed, name)())
        return int(os.environ.get(variable, alone))


def get_platform() -> Platform:
    """Return an object with the rank and world size of this process."""
    return Platform()

"""The name LlamaFactory's trainer has for this process among all: `get_platform().get_rank()`."""

from __future__ import annotations

import os
import sys


class Platform:
    """Rank and number of ranks, of torch's process group, or as the launcher says before there is one."""

    def get_rank(self) -> int:
        """Rank of this process, 0 without others."""
        return self._ask("get_rank", "RANK", 0)

    def get_world_size(self) -> int:
        """Number of ranks, 1 without others."""
        return self._ask("get_world_size", "WORLD_SIZE", 1)

    @staticmethod
    def _ask(name: str, variable: str, alone: int) -> int:
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_initialized():
            return int(getattr(distributed, name)())
        return int(os.environ.get(variable, alone))


def get_platform() -> Platform:
    """This process among all ranks."""
    return Platform()

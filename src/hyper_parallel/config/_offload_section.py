"""Offload section: planned device memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hyper_parallel.config._sections import Section
from hyper_parallel.config._values import directory, rate, size, size_or_auto

Bytes = Annotated[int, BeforeValidator(size)]
"""Number of bytes; text such as `12GiB` is accepted."""


class Offload(Section):
    """Planned device memory: idle state and activations are offloaded to host memory or files, or recomputed.

    Enabled when one goal is given: `budget` or `max_slowdown`.
    """

    budget: Annotated[int | Literal["auto"] | None, BeforeValidator(size_or_auto)] = None
    """Device memory per rank in bytes (`12GiB`); the fastest plan within it is used. auto: the free memory of the
    device."""
    max_slowdown: float | None = Field(default=None, ge=0)
    """Alternative goal: smallest device memory whose step time grows by at most this fraction (0.02: 2 %)."""
    dram: Bytes | None = None
    """Maximum host memory per rank in bytes. None: the rank's share of the topology's host memory; unlimited if the
    topology states none."""
    flash_dir: Annotated[str | None, BeforeValidator(directory)] = None
    """Directory for storages that do not fit in host memory either. None: no files are used."""
    flash: Bytes | None = None
    """Maximum bytes of files per rank in `flash_dir`. None: unlimited."""
    bandwidth: Annotated[int | None, BeforeValidator(rate)] = None
    """Copy bandwidth between device and host memory per direction (`50GB/s`) that the plan assumes. None: the
    topology's."""
    reorder: bool = True
    """Allow the plan to reorder operators. Results are unchanged."""
    recompute: bool = True
    """Allow the plan to drop intermediate results and recompute them."""
    update_on_host: bool = False
    """Allow optimizer updates on the CPU for state in host memory. Off by default, because CPU rounding may differ."""

    @property
    def on(self) -> bool:
        """True if a goal is given."""
        return self.budget is not None or self.max_slowdown is not None

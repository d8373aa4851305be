"""The section of a recipe for what leaves the device memory."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hyper_parallel.config._sections import Section
from hyper_parallel.config._values import directory, rate, size, size_or_auto

Bytes = Annotated[int, BeforeValidator(size)]
"""A number of bytes; text such as `12GiB` is accepted."""


class Offload(Section):
    """Device memory by plan: state and activations live in host memory or files while nothing needs them.

    On as soon as one goal is given, `budget` or `max_slowdown`.
    """

    budget: Annotated[int | Literal["auto"] | None, BeforeValidator(size_or_auto)] = None
    """Device bytes of a rank (`12GiB`); the fastest plan under it runs. auto: what the device has left."""
    max_slowdown: float | None = Field(default=None, ge=0)
    """The other goal: the least device memory for at most this share of more time (0.02: 2 %)."""
    dram: Bytes | None = None
    """Host memory one rank may use. None: its share of the topology's, else unlimited."""
    flash_dir: Annotated[str | None, BeforeValidator(directory)] = None
    """Directory for what leaves the host memory too. None: nothing goes to files."""
    flash: Bytes | None = None
    """Bytes of files one rank may write there. None: unlimited."""
    bandwidth: Annotated[int | None, BeforeValidator(rate)] = None
    """Bytes/s between device and host memory per direction that the plan assumes (`50GB/s`). None: the topology's."""
    reorder: bool = True
    """Operators may change their order, never what they compute."""
    recompute: bool = True
    """Results may be dropped and computed again."""
    update_on_host: bool = False
    """Optimizer updates may run on the CPU, on state that stays in host memory. It may round differently there."""

    @property
    def on(self) -> bool:
        """A goal is given."""
        return self.budget is not None or self.max_slowdown is not None

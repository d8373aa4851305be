"""Back ends: framework-specific code. Each folder imports its own framework and no other back end.

This module is the table of their names. It imports none of them, so recipes and `doctor` read it without a framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class BackEnd:
    """Framework that computes steps.

    Attributes:
        framework: Package of the framework.
        programs: Package with modules `operators`, `fusion` and `runner`, which execute step programs; None: the
            framework runs the model itself.
        setup: Command that installs the framework.
        packages: Optional distributions, the framework included, each with the feature that it provides.
        commands: Optional programs of the machine, each with the feature that it provides.
    """

    framework: str
    programs: str | None
    setup: str
    packages: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)


BACKENDS: Final[Mapping[str, BackEnd]] = {
    "torch": BackEnd(
        framework="torch",
        programs=None,
        setup="make setup",
        commands={"g++": "torch.compile"},
    ),
    "mindspore": BackEnd(
        framework="mindspore",
        programs="hyper_parallel.backends.mindspore",
        setup="make setup-mindspore",
        packages={
            "mindspore": "MindSpore back end, in an environment of its own",
            "decorator": "needed by MindSpore's graph kernels",
        },
        commands={"g++": "graph kernels of MindSpore"},
    ),
}
"""Value of `backend` in a recipe to the framework."""

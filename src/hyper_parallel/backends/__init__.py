"""Back ends: framework-specific code. Each folder imports its own framework and no other back end.

This module lists the back ends without importing them. Recipe checks and the command `doctor` therefore need no
framework.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True, slots=True)
class BackEnd:
    """Framework that computes training steps.

    Attributes:
        framework: Python package of the framework.
        programs: Package with the modules `operators`, `fusion` and `runner`, which execute step programs (see
            `step_program`). None: the framework runs the model's own code.
        setup: Command that installs the framework.
        packages: Python distributions that only this back end needs, each with the feature that it provides.
        commands: Optional executables, each with the feature that it provides.
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
"""Back ends by value of the recipe key `backend`."""

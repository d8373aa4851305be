"""Options of `hyper-parallel train`: type and help text of each parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

RecipePath = Annotated[Path, Argument(help="Recipe (YAML or JSON) or LlamaFactory YAML file.", dir_okay=False)]
Overrides = Annotated[list[str] | None, Argument(help="Values that replace the recipe's, as a.b=c.")]
DryRun = Annotated[bool, Option("--dry-run", help="Check, plan and print; start no ranks, write no run.")]
Trace = Annotated[bool, Option("--trace", help="With --dry-run: trace a step; print exact memory and traffic.")]
Topology = Annotated[
    str | None,
    Option("--topology", "-t", help="With --dry-run: trace for this topology (see `plan -t`) instead."),
]
Ranks = Annotated[int | None, Option(min=1, help="With --trace: ranks of the run. Default: the recipe's.")]
Rank = Annotated[
    int | None,
    Option(min=0, help="With --trace: rank to trace. Default: one rank per distinct program."),
]
NoCalibrate = Annotated[bool, Option("--no-calibrate", help="Do not measure this machine before its first run.")]
AsJson = Annotated[bool, Option("--json", help="With --trace: print the result as JSON.")]
Launcher = Annotated[
    str | None,
    Option(help="Launcher: local, torchrun, slurm, ray or kubernetes. Sets launch.launcher."),
]
Plan = Annotated[
    Path | None,
    Option("--plan", help="Use this saved plan, as written by `plan -o`.", dir_okay=False),
]

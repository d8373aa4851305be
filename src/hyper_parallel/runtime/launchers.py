"""Launchers of ranks on several machines: torchrun command, Slurm script, and ranks started by `srun`.

All of them start `hyper-parallel train`. The process is a rank if RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT are in its environment.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hyper_parallel.config import Recipe
from hyper_parallel.errors import BadValue, DegreesMismatch, LauncherIncomplete, abbreviated

_STORE_PORTS: Final = 20000  # below Linux's range of client ports, ip_local_port_range


def ranks_per_node(recipe: Recipe, ranks: int) -> int:
    """Return the number of ranks per machine.

    Raises:
        DegreesMismatch: HP301 when the machines that the recipe names do not hold exactly these ranks.
    """
    launch = recipe.launch
    ranks_each = launch.nproc_per_node or max(1, ranks // launch.nnodes)
    if ranks_each * launch.nnodes != ranks:
        nodes = max(n for n in range(1, launch.nnodes + 1) if ranks % n == 0)
        raise DegreesMismatch(
            f"the plan has {ranks} ranks, but the launcher starts {ranks_each} on each of {launch.nnodes} nodes",
            where="launch.nnodes, launch.nproc_per_node",
            changes={"launch.nnodes": nodes, "launch.nproc_per_node": ranks // nodes},
        )
    return ranks_each


def torchrun_words(recipe: Recipe, ranks: int, words: Sequence[str]) -> list[str]:
    """Return the arguments of `torchrun` that start this machine's ranks.

    Args:
        recipe: The run.
        ranks: Ranks on all machines.
        words: Arguments of `hyper-parallel` on every rank.
    """
    launch, ranks_each = recipe.launch, ranks_per_node(recipe, ranks)
    options = ["--standalone"]
    if (endpoint := launch.rdzv_endpoint) is not None:
        options = [
            f"--nnodes={launch.nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
        ]
    options.append(f"--nproc-per-node={ranks_each}")
    if restarts := recipe.training.max_restarts:
        options.append(f"--max-restarts={restarts}")
    return [*options, "-m", "hyper_parallel", *words]


def sbatch_script(recipe: Recipe, ranks: int, words: Sequence[str], output_dir: Path) -> str:
    """Return a Slurm script: torchrun on every machine, rendezvous on the first; arguments as of `torchrun_words`."""
    launch_section = recipe.launch
    if not all(map(str.isprintable, (str(output_dir), *launch_section.sbatch))):
        raise BadValue(
            "a line of the job script would end early: its option has a control character",
            where="output_dir, launch.sbatch",
            got=abbreviated([str(output_dir), *launch_section.sbatch]),
            allowed="printable characters",
        )
    options = {
        "--job-name": output_dir.name,
        "--nodes": launch_section.nnodes,
        "--ntasks-per-node": 1,
        "--partition": launch_section.partition,
        "--time": launch_section.time,
        "--output": output_dir.absolute() / "logs" / "slurm-%j.log",
    }
    endpoint = f"$first:$(({_STORE_PORTS} + SLURM_JOB_ID % 10000))"
    with_endpoint = launch_section.model_copy(
        update={"rdzv_endpoint": launch_section.rdzv_endpoint or "ENDPOINT"}
    )
    torchrun = torchrun_words(recipe.model_copy(update={"launch": with_endpoint}), ranks, words)
    command = shlex.join([sys.executable, "-m", "torch.distributed.run", *torchrun])
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {k}={shlex.quote(str(v))}" for k, v in options.items() if v is not None),
            *(f"#SBATCH {option}" for option in launch_section.sbatch),
            "set -euo pipefail",
            'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "srun " + command.replace("=ENDPOINT", f'="{endpoint}" --rdzv-id="$SLURM_JOB_ID"', 1),
            "",
        ]
    )


def join_srun() -> None:
    """Set the variables of a rank if `srun` has started this process as one of several.

    Raises:
        LauncherIncomplete: HP315 when a variable of Slurm is missing or cannot be read.
    """
    env = os.environ
    if "RANK" in env or "SLURM_STEP_ID" not in env or env.get("SLURM_NTASKS", "1") == "1":
        return
    try:
        per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env["SLURM_TASKS_PER_NODE"]
        port = _STORE_PORTS + 10000 + (int(env["SLURM_JOB_ID"]) + int(env["SLURM_STEP_ID"])) % 2000
        variables = {
            "RANK": env["SLURM_PROCID"],
            "WORLD_SIZE": env["SLURM_NTASKS"],
            "LOCAL_RANK": env["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(_tasks(per_node)[int(env["SLURM_NODEID"])]),
            "MASTER_ADDR": first_host(env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]),
            "MASTER_PORT": str(port),
        }
    except (KeyError, ValueError, IndexError) as error:
        raise LauncherIncomplete(
            "`srun` has started several processes, and one cannot tell which of them it is",
            where="environment of this process",
            got=f"{type(error).__name__}: {error}",
            allowed="SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID, SLURM_JOB_ID, SLURM_JOB_NODELIST and "
            "SLURM_TASKS_PER_NODE, as srun sets them",
            hint="unset SLURM_STEP_ID",
        ) from error
    env.update({name: value for name, value in variables.items() if name not in env})


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: for `gpu[03-05,9],login` gpu03."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def _tasks(text: str) -> list[int]:
    """Return the number of processes per machine from Slurm's notation: for `4(x2),3` 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [int(count)] * int(times or 1)
    return counts

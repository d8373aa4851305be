"""Stand-ins of `sbatch`, `srun` and `scontrol` that do here what Slurm does on a cluster, for `PATH`.

Every machine of the job is a process that starts its tasks with the variables of Slurm; all of them are this one.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

JOB = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "127.0.0.[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def install(directory: Path) -> str:
    """Write the commands; the PATH with them."""
    directory.mkdir()
    for name in ("sbatch", "srun", "scontrol"):
        file = directory / name
        file.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {name} "$@"\n')
        file.chmod(0o755)
    return os.pathsep.join([str(directory), os.environ["PATH"]])


def sbatch(script: str) -> int:
    """Run the script on the first machine, at once, with the output that it asks for."""
    text = Path(script).read_text()
    options = dict(re.findall(r"^#SBATCH (--[\w-]+)=(.*)$", text, re.MULTILINE))
    assert options["--nodes"] == JOB["SLURM_JOB_NUM_NODES"]
    log = Path(shlex.split(options["--output"])[0].replace("%j", JOB["SLURM_JOB_ID"]))
    with log.open("w") as file:
        done = subprocess.run(["bash", script], env=os.environ | JOB, stdout=file, stderr=file)
    sys.stdout.write(f"Submitted batch job {JOB['SLURM_JOB_ID']}\n")
    return done.returncode


def srun(*words: str, tasks_per_node: int = 1) -> int:
    """Start the command on both machines."""
    if words[0].startswith("--ntasks-per-node="):
        tasks_per_node, words = int(words[0].partition("=")[2]), words[1:]
    machines = []
    for node in range(2):
        if pid := os.fork():
            machines.append(pid)
            continue
        tasks = []
        for local in range(tasks_per_node):
            own = {
                "SLURM_STEP_ID": "0",
                "SLURM_NODEID": str(node),
                "SLURM_LOCALID": str(local),
                "SLURM_PROCID": str(node * tasks_per_node + local),
                "SLURM_NTASKS": str(2 * tasks_per_node),
                "SLURM_TASKS_PER_NODE": f"{tasks_per_node}(x2)",
            }
            tasks.append(subprocess.Popen(words, env=os.environ | JOB | own))
        os._exit(max(task.wait() for task in tasks))
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in machines)


def scontrol(*words: str) -> int:
    """`show hostnames LIST`."""
    assert words == ("show", "hostnames", JOB["SLURM_JOB_NODELIST"])
    sys.stdout.write("127.0.0.1\n127.0.0.2\n")
    return 0


if __name__ == "__main__":
    sys.exit(globals()[sys.argv[1]](*sys.argv[2:]))

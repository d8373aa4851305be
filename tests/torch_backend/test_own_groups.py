"""A loop that has begun the default process group itself, and ends it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN_GROUPS = """
import atexit, sys
from pathlib import Path

def threads():
    names = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("pt_gloo_runloop")

atexit.register(lambda: print(threads()))  # runs after what was registered later
import torch
import torch.distributed as dist
import hyper_parallel.runtime  # torch.distributed.nn would keep a default group that is there when it is imported
import hyper_parallel as hp

def train():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    hp.parallelize(model, hp.plan_of(model, hp.Strategy(dp_shard=2)))
    model(torch.ones(2, 4)).sum().backward()

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2)
train()
print(threads())
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.dist
def test_no_thread_of_a_process_group_outlives_python(tmp_path: Path) -> None:
    """The groups of meshes end even where the caller's loop has begun the default group and ended it."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", OWN_GROUPS, f"file://{tmp_path}/meet", str(rank)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, _ = rank.communicate(timeout=100)
        assert rank.returncode == 0
        alive, at_exit = map(int, out.split())
        assert alive > 0 == at_exit

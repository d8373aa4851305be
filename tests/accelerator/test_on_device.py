"""Memory plans, training and generation on the emulated accelerator; the cases are in `on_*.py` beside this file."""

import json
import os
import subprocess
import sys

import pytest

from tests.accelerator.cases import names_in
from tests.accelerator.device import HERE, why_not

# The first test compiles the device and runs all cases, maybe on a busy machine.
pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]
FILES = ("on_streams", "on_models", "on_product")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every case gave; a case that is missing has ended the process."""
    root = HERE.parents[1]
    environ = {
        **os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip
    lines, log = [], ""
    for files in (
        FILES[:2],
        FILES[2:],
    ):  # the product forks its rank, from a process that has used no device
        done = subprocess.run(
            [sys.executable, "-m", "tests.accelerator.cases", *files],
            cwd=root, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        lines += [json.loads(x) for x in done.stdout.splitlines() if x.startswith('{"case"')]
        log += f"exit {done.returncode}\n{done.stderr[-4000:]}"
    return {line["case"]: line for line in lines}, log


@pytest.mark.parametrize("case", [name for file in FILES for name in names_in(file)])
def test_on_device(found, case):
    results, log = found
    assert case in results, log
    if results[case]["error"]:
        pytest.fail(results[case]["error"], pytrace=False)

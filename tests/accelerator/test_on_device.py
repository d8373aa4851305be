"""Memory plans, training and generation on the emulated accelerator; the cases are in `on_*.py` beside this file."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

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
PROCESSES = (("on_larger",), ("on_product",), ("on_streams", "on_models"))
"""Files of a process, the longest first: the product forks its ranks, from a process that has used no device."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every case gave; a case that is missing has ended the process."""
    root = HERE.parents[1]
    environ = {
        **os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")),
    }  # fmt: skip

    def run(files):
        return subprocess.run(
            [sys.executable, "-m", "tests.accelerator.cases", *files],
            cwd=root, env=environ, capture_output=True, text=True, check=False,
        )  # fmt: skip

    lines, log = [], ""
    with ThreadPoolExecutor(2) as two_at_a_time:
        for done in two_at_a_time.map(run, PROCESSES):
            lines += [json.loads(x) for x in done.stdout.splitlines() if x.startswith('{"case"')]
            log += f"exit {done.returncode}\n{done.stderr[-4000:]}"
    return {line["case"]: line for line in lines}, log


@pytest.mark.parametrize("case", [name for file in chain(*PROCESSES) for name in names_in(file)])
def test_on_device(found, case):
    results, log = found
    assert case in results, log
    if results[case]["error"]:
        pytest.fail(results[case]["error"], pytrace=False)

"""One change each between a checkpoint and the run that continues from it: the cases of tools/resume_changes.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import tests.e2e.runs  # noqa: F401  imports what every run would import by itself
from hyper_parallel import reports

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.append(str(TOOLS))

import resume_cases  # noqa: E402
import resume_changes  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A language model and a reward model."""
    write_report = reports.write_report
    resume_changes.prepare()  # replaces `reports.write_report`
    root, run = tmp_path_factory.mktemp("shared"), resume_changes.command
    yield resume_cases.base_model(root, run), resume_cases.reward_model(root, run)
    reports.write_report = write_report


@pytest.mark.parametrize("case", resume_cases.CASES, ids=lambda case: case.name)
def test_a_change_gives_the_same_curve_or_is_refused_or_named(case, shared, tmp_path):
    found, said = resume_changes.outcome(case, tmp_path, *shared)
    assert found in case.allowed, said

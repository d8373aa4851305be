"""What ranks ask for together when some of them find no memory plan."""

import pickle

import pytest

from hyper_parallel.errors import BudgetImpossible, CaptureUnsupported, TierFull
from hyper_parallel.memory import merge_errors, with_capacity_hint

pytestmark = pytest.mark.torch


def full(**enough):
    """As it comes from another rank."""
    return pickle.loads(pickle.dumps(with_capacity_hint(TierFull("full", got="dram 1 bytes"), enough)))


def test_what_one_rank_asks_for_is_enough_for_all():
    ranks = [full(dram=300, flash=20, device=900), full(dram=200, flash=50, device=1000)]
    error = merge_errors(ranks)
    assert error.hint == "set `offload.dram=300`, or `offload.flash=50`, or `offload.budget=1000`"
    assert error.got == "dram 1 bytes"
    assert merge_errors([full(dram=300, flash=20), full(dram=400)]).hint == "set `offload.dram=400`"


def test_a_rank_that_no_dram_helps_leaves_the_budget():
    other = BudgetImpossible("no plan")
    other.least_bytes = 700
    assert merge_errors([full(dram=10**9, device=600), other]) is other
    assert merge_errors([full(dram=10, device=800), other]).hint == "set `offload.budget=800`"
    assert merge_errors([]) is None


def test_numbers_in_a_hint_are_no_bytes():
    """A limit on files, a line number: only the bytes that an error carries as data rank it."""
    other = CaptureUnsupported("a sparse tensor", hint="see line 4000000000000 of the trace")
    small = BudgetImpossible("no plan", hint="set `offload.budget=900`")
    small.least_bytes = 900
    assert merge_errors([other, small]) is small
    assert merge_errors([full(dram=10, device=800), other]).hint == "set `offload.budget=800`"

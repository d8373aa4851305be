"""The hint for answers behind the sequence length doubles it, so that it still divides the tokens of a step."""

import pytest

from hyper_parallel.config import Data
from hyper_parallel.trainer.data.counts import BEHIND_SEQ_LEN, DataCounts
from hyper_parallel.trainer.data.packing import no_target


@pytest.mark.parametrize(("needed", "seq_len"), [(513, 1024), (1024, 1024), (1301, 2048), (2049, 4096)])
def test_the_longer_sequence_is_a_power_of_two_times_the_old_one(needed, seq_len):
    counts = DataCounts()
    counts.dropped[BEHIND_SEQ_LEN] += 1
    error = no_target("no target", counts, Data(source="a.jsonl", seq_len=512), needed)
    assert error.hint == f"data.seq_len={seq_len}"

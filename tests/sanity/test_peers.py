import json

import pytest
from integration_tests.peers.page import PAGE, page
from integration_tests.peers.rows import ROWS, TRAINERS
from tools.peers import RECORDS

pytestmark = pytest.mark.sanity


def test_the_page_about_trl_is_written_from_its_records() -> None:
    records = json.loads(RECORDS.read_text(encoding="utf-8"))
    assert [row.name for row in ROWS] == list(records["rows"]), "run `make peers`"
    assert PAGE.read_text(encoding="utf-8") == page(records), "run `tools/peers.py --page`"


def test_rows_of_the_comparison_with_trl_have_names_of_their_own_and_whole_microbatches() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        unit = 1 if row.packed_rows else TRAINERS[row.trainer].rows_per_record
        assert row.sequences % (row.accumulation * row.ranks * unit) == 0, row.name
        assert row.samples % row.accumulation == 0, row.name

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.errors import ScheduleError
from hyper_parallel.ir import Action, Schedule, grid
from hyper_parallel.mpmd import lower, make_schedule, unit_starts
from hyper_parallel.serde import decode, encode

pytestmark = pytest.mark.unit

_with_microbatch = st.builds(
    Action,
    st.integers(0, 999),
    st.sampled_from(["F", "I", "W", "B", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]),
    st.integers(0, 9999),
)
_per_stage = st.builds(Action, st.integers(0, 999), st.sampled_from(["UNSHARD", "RESHARD", "REDUCE_GRAD"]))
_overlap = st.lists(_with_microbatch.filter(lambda a: a.kind in "FIWB"), min_size=1, max_size=3).map(
    lambda parts: Action(-1, "OVERLAP_F_B", None, tuple(parts))
)
_action = _with_microbatch | _per_stage | _overlap


@settings(deadline=None)
@given(_action)
def test_text_and_json_round_trip(action):
    assert Action.parse(str(action)) == action
    assert decode(Action, encode(action)) == action


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, "F", 0)),
        (" 1RECV_B3 ", Action(1, "RECV_B", 3)),
        ("0UNSHARD", Action(0, "UNSHARD")),
        (
            "(0F1;3B0)OVERLAP_F_B",
            Action(-1, "OVERLAP_F_B", None, (Action(0, "F", 1), Action(3, "B", 0))),
        ),
    ],
)
def test_known_texts(text, action):
    assert Action.parse(text) == action


@pytest.mark.parametrize(
    "text", ["F0", "2F", "2X1", "0UNSHARD3", "2F0x", "0F1000000", "1000000F0", "(0SEND_F1;1B0)OVERLAP_F_B"]
)
def test_bad_text_is_refused(text):
    with pytest.raises(ScheduleError, match="is not a schedule action"):
        Action.parse(text)


def test_csv_round_trip_in_both_forms():
    schedule = make_schedule("dualpipev", 3, 7)
    for each in (schedule, lower(schedule, unshard=True)):
        assert Schedule.from_csv(each.to_csv(), "dualpipev") == each
    assert lower(schedule).compute_only() == schedule


def test_csv_says_where_a_cell_is_wrong():
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv("0F0,,0B0\n1F0,1G0\n", "mine.csv")
    assert caught.value.where == "mine.csv: row 2, column 2"
    with pytest.raises(ScheduleError, match="no actions"):
        Schedule.from_csv(",,\n")
    with pytest.raises(ScheduleError, match="`0OFFLOAD0` is not a schedule action"):
        Schedule.from_csv("0F0,0OFFLOAD0,0RELOAD0,0B0\n")
    with pytest.raises(ScheduleError, match="not in CSV format"):
        Schedule.from_csv("0" * 140_000)
    assert Schedule.from_csv("0F0,0B0\r1F0,1B0\r").stages == 2


def test_grid_shows_bubbles_and_marks():
    schedule = make_schedule("1f1b", 2, 2)
    assert grid(schedule, rows="ranks", starts=unit_starts(schedule)).splitlines() == [
        "rank 0   1   2   3   4   5   6   7   8",
        "0    0F0 0F1         0B0 ..      0B1 ..",
        "1        1F0 1B0 ..  1F1 1B1 ..",
    ]
    marked = grid(schedule, mark=(1, 2), around=1).splitlines()
    assert [line.split() for line in marked] == [
        ["slot", "rank", "0", "rank", "1"],
        ["1", "0F1", "1B0"],
        ["2", "0B0", ">1F1<"],
        ["3", "0B1", "1B1"],
    ]

"""`hyper-parallel doctor DUMPS`: where ranks have parted, by dumps of torch's flight recorder."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import pytest

from hyper_parallel.errors import DumpUnreadable
from tests.e2e.runs import command


def entry(number, name="all_reduce", sizes=(4,), dtype="Float", group="dp", **more):
    ran = {"state": "completed", "retired": True, "is_p2p": False, "time_created_ns": 100 * number}
    return {
        "process_group": ({"dp": "1", "tp": "2"}.get(group, "3"), group),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "input_sizes": [list(sizes)],
        "output_sizes": [list(sizes)],
        "input_dtypes": [dtype],
        "output_dtypes": [dtype],
        "frames": [{"name": "step", "filename": "loop.py", "line": number}],
    } | ran | more  # fmt: skip


def diagnose(directory: Path, *by_rank, ranks="[0, 1, 2]"):
    """Return the findings of doctor for the entries of each rank, written as pickles, and as JSON for the last rank."""
    for rank, entries in enumerate(by_rank):
        config = {"1": {"desc": "dp", "ranks": ranks}, "2": {"desc": "tp", "ranks": "[0, 1]"}}
        dump = {"version": "2.10", "pg_config": config, "entries": entries}
        path = directory / f"nccl_trace_rank_{rank}"
        last = rank == len(by_rank) - 1
        path.write_bytes(json.dumps(dump).encode() if last else pickle.dumps(dump, protocol=2))
    found = json.loads(command("doctor", str(directory), "--json").stdout)
    assert found["ranks"] == list(range(len(by_rank)))
    return found["divergences"], command("doctor", str(directory)).stdout


def test_the_rank_that_misses_a_collective_is_named_and_what_it_did_last(tmp_path: Path) -> None:
    both = [entry(1), entry(2)]
    late = entry(3, state="started", retired=False)
    (one,), text = diagnose(tmp_path, [*both, late], [*both, late], [*both, entry(7, group="own", time_created_ns=9)])
    assert (one["group"], one["number"], one["kind"]) == ("dp", 3, "missing")
    assert (one["ranks"], one["culprits"]) == ([0, 1, 2], [2])
    assert "rank 2 has not called collective 3 of group dp" in text
    assert "rank 0: all_reduce [4] Float (started), at loop.py:3" in text
    assert "rank 2: no call; its last is 7 of own, all_reduce [4] Float" in text


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        ({"name": "all_gather"}, "operation"),
        ({"sizes": (5,)}, "shape"),
        ({"dtype": "BFloat16"}, "dtype"),
        ({"state": "started", "retired": False}, "state"),
    ],
)
def test_the_rank_that_differs_is_named(tmp_path: Path, other, kind) -> None:
    found, _ = diagnose(tmp_path, [entry(1), entry(2)], [entry(1), entry(2, **other)], [entry(1), entry(2)])
    assert [(d["kind"], d["number"], d["culprits"]) for d in found] == [(kind, 2, [1])]


def test_the_earliest_group_comes_first_and_full_recorders_begin_late(tmp_path: Path) -> None:
    tp = entry(1, group="tp", time_created_ns=50)
    first = [entry(n) for n in (1, 2, 3)]
    # Rank 1 has forgotten collective 1, rank 2 knows an earlier group; rows may have any size.
    rows = [entry(4, "all_to_all", sizes=(rank,), time_created_ns=400) for rank in range(3)]
    found, _ = diagnose(
        tmp_path,
        [tp, *first, rows[0], entry(5)],
        [*first[1:], rows[1]],
        [entry(9, "barrier"), *first, rows[2], entry(5)],
    )
    assert [(d["group"], d["number"], d["culprits"]) for d in found] == [
        ("tp", 1, [1]),
        ("dp", 5, [1]),
    ]


def test_ranks_that_agree_and_a_rank_without_a_dump(tmp_path: Path) -> None:
    found, text = diagnose(tmp_path, [entry(1)], [entry(1)])
    assert not found
    assert "all ranks have called the same collectives" in text
    found, text = diagnose(tmp_path, [entry(1)], [entry(1, state="started", retired=False)])
    assert found[0]["culprits"] == [1]
    assert "rank 2: has left no dump" in text


def test_dumps_of_real_ranks(tmp_path: Path) -> None:
    import torch

    from hyper_parallel.runtime import World, launch

    def body(rank: int) -> None:
        from torch._C import _distributed_c10d as c10d

        with World.join("cpu"):
            torch.distributed.all_reduce(torch.ones(3))
            if rank == 0:
                work = torch.distributed.all_reduce(torch.ones(5), async_op=True)
                (tmp_path / "rank_0").write_bytes(c10d._dump_fr_trace())
                work.wait()
            else:
                while not (tmp_path / "rank_0").exists():
                    time.sleep(0.01)
                (tmp_path / "rank_1.json").write_bytes(c10d._dump_fr_trace_json())
                torch.distributed.all_reduce(torch.ones(5))

    launch(body, 2, timeout_s=60)
    text = command("doctor", str(tmp_path / "rank_0"), str(tmp_path / "rank_1.json")).stdout
    assert "rank 1 has not called collective 2 of group default_pg" in text
    assert "rank 0: all_reduce [5] Float (scheduled)" in text
    assert "rank 1: no call; its last is 1 of default_pg, all_reduce [3] Float" in text


class _Code:
    def __reduce__(self):
        return os.system, ("touch /tmp/hyper_parallel_code_ran",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rank_0", pickle.dumps({"entries": [_Code()]}), "wants to load `posix.system`"),
        ("rank_0", b"{", "Expecting property name"),
        ("rank_0", pickle.dumps({"entries": [{"state": "started"}]}), "no `entries` with"),
        ("rank_0", pickle.dumps([1]), "no `entries` with"),
        ("notes.txt", b"", "no file whose name ends in the number of a rank"),
    ],
)
def test_what_is_no_dump_is_refused_and_no_code_of_it_runs(tmp_path, name, content, says) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpUnreadable) as found:
        command("doctor", str(tmp_path))
    assert says in str(found.value.got)
    assert not Path("/tmp/hyper_parallel_code_ran").exists()
    with pytest.raises(DumpUnreadable):
        command("doctor", str(tmp_path / "missing_1"))
    with pytest.raises(DumpUnreadable, match="it does not exist"):
        command("doctor", str(tmp_path / "missing"))

"""A lost machine is named by its host and ranks, also if machines run different numbers of ranks."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from hyper_parallel.runtime import supervision

pytestmark = pytest.mark.torch


def test_a_lost_machine_is_named_with_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_ANSWER_S", 0.3)
    store, hosts = dist.HashStore(), []
    for name, ranks in (("a", range(3)), ("b", range(3, 4)), ("c", range(4, 6))):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        hosts += [supervision.Hosts(store, rank, 6, rank - ranks.start, len(ranks)) for rank in ranks]
    hosts[5].report_alive()
    assert str(hosts[0].find_lost().what) == "the connection to b (ranks 3 to 3) is lost"
    hosts[3].report_alive()
    assert hosts[0].find_lost() is None

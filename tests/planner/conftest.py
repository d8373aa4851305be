"""What tests of the planner share."""

from __future__ import annotations

import pytest

from hyper_parallel.planner.strategy_space import Space


@pytest.fixture
def few_orders(monkeypatch):
    """Only orders with tensor parallelism innermost: all of them are many for brute force."""
    every = Space.orders

    def orders(space, degrees, tiers, inner):
        return every(space, degrees, tiers, inner) if inner else []

    monkeypatch.setattr(Space, "orders", orders)

"""Cells of a matrix that `make test-slow` runs and `make test` leaves out."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def cells(every: Iterable[Any], *, slow: Container[Any]) -> list[Any]:
    """Parameters of a test, the slow ones marked."""
    return [pytest.param(cell, marks=pytest.mark.slow) if cell in slow else cell for cell in every]

"""What every received input is held to: read, or one coded refusal, within bounds on time and memory."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hyper_parallel.errors import HyperParallelError

MOST_S = 5.0
MOST_MIB = 1024


@contextmanager
def within_bounds(most_mib: float = MOST_MIB) -> Iterator[None]:
    """Fail when what is inside takes more processor time or memory than an input may."""
    begin, before = time.process_time(), _peak_mib()
    yield
    assert time.process_time() - begin < MOST_S
    assert _peak_mib() - before < most_mib


def refusal(read: Callable[[], Any], code: str, *words: str) -> HyperParallelError:
    """The coded refusal of an input, whose text is short, printable and holds some words."""
    try:
        with within_bounds(), pytest.raises(HyperParallelError) as caught:
            read()
    except AssertionError:
        # A pause of a process that has run thousands of tests does not come back; a cost of the input does.
        with within_bounds(), pytest.raises(HyperParallelError) as caught:
            read()
    text = caught.value.render()
    assert caught.value.code == code, text
    assert all(character.isprintable() or character in "\n\t" for character in text)
    assert len(text) < 5000
    for word in words:
        assert word in text
    return caught.value


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

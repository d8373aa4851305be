"""What a rank says of itself while it works."""

import gc
import time
import weakref

from hyper_parallel.runtime.supervision import HeartbeatBoard, HeartbeatWriter


class Buffer:
    """Memory that a function uses."""


def test_a_look_at_a_rank_keeps_nothing_that_its_functions_used(tmp_path):
    """Or activations and DRAM buffers of a slow phase would exist until the next garbage collection."""
    board = HeartbeatBoard(tmp_path / "board", 1)
    pulse = HeartbeatWriter(board, 0)

    def slow_phase():
        buffer, deadline = Buffer(), time.monotonic() + 30
        while not board.read()[0].note and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "slow_phase" in board.read()[0].note
        return weakref.ref(buffer)

    gc.disable()
    try:
        with pulse.watched(lambda: None):
            pulse.begin_step(1)
            buffer = slow_phase()
            assert buffer() is None
    finally:
        gc.enable()

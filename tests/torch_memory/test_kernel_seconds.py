"""What operators take, from events around their kernels: where a device waits for the host, the host's time is none."""

import pytest

from hyper_parallel.backends.torch.memory.kernel_bytes import Events, kernel_seconds
from hyper_parallel.ir import Operator


class At:
    """An event of a device whose times are known."""

    def __init__(self, at_ms):
        self.at_ms = at_ms

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms


def seconds(*timed):
    """Of operators with (milliseconds between events, seconds of the host, the device waited)."""
    operators = [Operator(str(n), (), (), (n,), access_bytes=n + 1) for n in range(len(timed))]
    events = [Events(At(5.0), At(5.0 + ms), host, waited) for ms, host, waited in timed]
    return kernel_seconds(operators, [(range(at, at + 1), event) for at, event in enumerate(events)])


def test_the_host_counts_where_the_device_waited_for_it():
    found = seconds((3.0, 1e-3, True), (3.0, 1e-3, False), (20.5, 20e-3, True), (3.0, 1e-3, False))
    assert found == pytest.approx((2e-3, 3e-3, 0.5e-3, 3e-3))


def test_a_step_of_short_kernels_takes_what_the_host_takes():
    found = seconds((1.1, 1e-3, True), (1.2, 1e-3, True), (1.5, 1e-3, False))
    assert found == pytest.approx((1e-3, 1e-3, 1.5e-3))


def test_parts_of_an_operator_share_its_time_by_bytes():
    operators = [Operator(str(n), (), (), (n,), access_bytes=n + 1) for n in range(2)]
    found = kernel_seconds(operators, [(range(2), Events(At(0.0), At(3.0), 1e-3, False))])
    assert found == pytest.approx((1e-3, 2e-3))


def test_nothing_is_said_where_nothing_was_timed():
    assert kernel_seconds([], []) is None

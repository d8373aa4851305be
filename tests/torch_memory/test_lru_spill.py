"""Storages within a budget without a plan: work per operator, owners that resize, budgets that cannot suffice."""

import gc
import sys
import weakref

import pytest
import torch

from hyper_parallel.backends.torch.memory import LruSpillMode

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
KiB = 1024


def calls_of(function):
    """Number of Python and C functions that a call runs."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection would call finalizers of other tests
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned by their address", "movable"])
def test_work_per_operator_does_not_grow_with_the_number_of_storages(pinned):
    def calls(number):
        others = [torch.ones(256) for _ in range(number)]
        # Room for these and four more: four of all are away, and each that comes back evicts another.
        with LruSpillMode((number + 4) * KiB, CPU) as spill:
            for tensor in others:
                tensor.add_(1)
                if pinned:
                    tensor.data_ptr()
            more = [torch.ones(256) for _ in range(8)]
            used = more if pinned else others

            def work(tensors):
                for tensor in tensors:
                    tensor.mul_(2)

            work(used[:4])  # shapes are known from here on
            moved, count = spill.moved_bytes, calls_of(lambda: work(used[4:8]))
            assert spill.moved_bytes == moved + 4 * KiB
        return count

    assert calls(400) == calls(20)


def test_storages_leave_before_an_owner_enlarges_its_own():
    owned = torch.ones(1024)
    owned.untyped_storage().resize_(0)
    with LruSpillMode(6 * KiB, CPU) as spill:
        others = [torch.full((256,), float(i)) for i in range(6)]
        owned.untyped_storage().resize_(4 * KiB)
        owned.fill_(1)
        assert spill.peak_bytes <= 6 * KiB
        owned.untyped_storage().resize_(0)
        moved = spill.moved_bytes
        for tensor in others:  # there is room for all of them again
            tensor.add_(0)
        assert spill.moved_bytes == moved
    assert [float(tensor[0]) for tensor in others] == [0, 1, 2, 3, 4, 5]


def test_a_budget_below_the_least_bytes_moves_nothing_more():
    with LruSpillMode(6 * KiB, CPU) as spill:
        a, b = torch.ones(512), torch.ones(512)
        assert spill.least_bytes <= 6 * KiB
        torch.cat((a, b))
        assert spill.least_bytes == 8 * KiB
        moved = spill.moved_bytes
        for _ in range(4):
            a, b = a + 1, b + 1
        assert spill.moved_bytes == moved
    assert float(a.sum()) == float(b.sum()) == 5 * 512


def test_nothing_is_left_of_the_context_on_the_class_of_storages():
    before = vars(torch.UntypedStorage).get("resize_")
    with LruSpillMode(KiB, CPU):
        assert vars(torch.UntypedStorage).get("resize_") is not before
    assert vars(torch.UntypedStorage).get("resize_") is before


@pytest.fixture
def no_collections():
    """No reference cycle is found while the test runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
def test_host_memory_is_released_when_a_storage_is_forgotten():
    """Or a pool of DRAM buffers would lack them until the next garbage collection."""
    spill, owned = LruSpillMode(1 * KiB, CPU, keep_offloaded=True), torch.ones(256)
    base, content = owned.untyped_storage(), torch.UntypedStorage(KiB)
    released = weakref.ref(content)
    base.resize_(0)
    spill.track_offloaded(base, KiB, content)
    assert spill.pop_content(base) is content
    del content
    assert released() is None
    content = torch.UntypedStorage(KiB)
    released = weakref.ref(content)
    spill.track_offloaded(base, KiB, content)
    del content
    spill.restore_all()
    assert base.nbytes() == KiB
    assert released() is None


@pytest.mark.usefixtures("no_collections")
def test_a_destroyed_storage_is_not_counted():
    with LruSpillMode(8 * KiB, CPU) as spill:
        for _ in range(100):
            torch.ones(256).add_(1)
        assert spill.peak_bytes <= 2 * KiB

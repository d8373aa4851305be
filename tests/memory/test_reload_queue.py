"""The queue of reloads without room: order, alarms, room and copies that others wait for."""

from hyper_parallel.memory._issue import Gap
from hyper_parallel.memory._reload_queue import ReloadQueue


def four_reloads() -> ReloadQueue:
    """Four reloads whose time comes at positions 2, 2, 3 and 3; each must be back before position 9."""
    return ReloadQueue(
        [(at, Gap(s, 0, 9, "dram"), "prefetch") for s, at in enumerate((2, 2, 3, 3))]
    )


def tried(queue: ReloadQueue, position: int, free_bytes: int = 0) -> list[int]:
    return [number for number, _, _ in queue.at(position, lambda: free_bytes)]


def test_each_is_tried_once_in_order_when_its_time_has_come():
    queue = four_reloads()
    assert [tried(queue, position) for position in (1, 2, 3, 4)] == [[], [0, 1], [2, 3], []]


def test_one_that_sleeps_keeps_its_place_in_the_queue():
    queue = four_reloads()
    for number, _, _ in queue.at(2, lambda: 0):
        queue.until(number, 5 - number)  # 0 sleeps until 5, 1 until 4
    assert [tried(queue, position) for position in (3, 4, 5, 6)] == [[2, 3], [1], [0], []]


def test_nobody_sleeps_longer_than_until_it_must_be_back():
    queue = four_reloads()
    for number, _, _ in queue.at(2, lambda: 0):
        queue.until(number, 100)
    assert [tried(queue, position) for position in (8, 9)] == [[2, 3], [0, 1]]


def test_room_wakes_the_first_that_fits_and_others_only_while_it_lasts():
    queue = four_reloads()
    for number, _, _ in queue.at(2, lambda: 0):
        queue.for_bytes(number, 10)
    assert tried(queue, 3, 9) == [2, 3]
    free, found = [15], []
    for number, _, _ in queue.at(4, lambda: free[0]):
        found.append(number)
        free[0] -= 10
    assert found == [0]
    assert tried(queue, 9) == [1]  # it must be back, room or not


def test_the_end_of_a_copy_wakes_those_behind_it_at_once_and_those_before_at_the_next_position():
    queue, found = four_reloads(), []
    for number, _, _ in queue.at(2, lambda: 0):
        queue.for_copy(number, 7)
    for number, _, _ in queue.at(3, lambda: 0):
        found.append(number)
    assert found == [2, 3]
    queue.ended(7, 3)
    assert tried(queue, 4) == [0, 1]

"""The queue of reloads without room: order, alarms, room and copies that others wait for."""

from hyper_parallel.memory.copy_issue import Gap, ReloadQueue


def four_reloads() -> ReloadQueue:
    """Four reloads whose time comes at positions 2, 2, 3 and 3; each must be back before position 9."""
    return ReloadQueue([(due, Gap(s, 0, 9, "dram"), "prefetch") for s, due in enumerate((2, 2, 3, 3))])


def tried(queue: ReloadQueue, position: int, free_bytes: int = 0) -> list[int]:
    return [number for number, _, _ in due(queue, position, free_bytes)]


def due(queue: ReloadQueue, position: int, free_bytes: int = 0, dram_fits: bool = False):
    return queue.due(position, lambda: free_bytes, lambda num_bytes: dram_fits)


def test_each_is_tried_once_in_order_when_its_time_has_come():
    queue = four_reloads()
    assert [tried(queue, position) for position in (1, 2, 3, 4)] == [[], [0, 1], [2, 3], []]


def test_one_that_sleeps_keeps_its_place_in_the_queue():
    queue = four_reloads()
    for number, _, _ in due(queue, 2):
        queue.retry_at(number, 5 - number)  # 0 sleeps until 5, 1 until 4
    assert [tried(queue, position) for position in (3, 4, 5, 6)] == [[2, 3], [1], [0], []]


def test_no_reload_sleeps_beyond_its_deadline():
    queue = four_reloads()
    for number, _, _ in due(queue, 2):
        queue.retry_at(number, 100)
    assert [tried(queue, position) for position in (8, 9)] == [[2, 3], [0, 1]]


def test_room_wakes_the_first_that_fits_and_others_only_while_it_lasts():
    queue = four_reloads()
    for number, _, _ in due(queue, 2):
        queue.wait_for_bytes(number, 10)
    assert tried(queue, 3, 9) == [2, 3]
    free, numbers = [15], []
    for number, _, _ in queue.due(4, lambda: free[0], lambda _: False):
        numbers.append(number)
        free[0] -= 10
    assert numbers == [0]
    assert tried(queue, 9) == [1]  # it must be back, room or not


def test_the_end_of_a_copy_wakes_those_behind_it_at_once_and_those_before_at_the_next_position():
    queue, numbers = four_reloads(), []
    for number, _, _ in due(queue, 2):
        queue.wait_for_copy(number, 7)
    for number, _, _ in due(queue, 3):
        numbers.append(number)
    assert numbers == [2, 3]
    queue.copy_ended(7, 3)
    assert tried(queue, 4) == [0, 1]


def test_the_queue_for_dram_advances_as_buffers_are_freed():
    queue = four_reloads()
    for number, _, _ in due(queue, 2):
        queue.wait_for_dram(number, 10 if number == 0 else 20)
    for number, _, _ in due(queue, 3):
        queue.wait_for_dram(number, 20)
    free, numbers = {10: 0, 20: 2}, []
    for number, _, _ in queue.due(4, lambda: 0, lambda size: free[size] > 0):
        numbers.append(number)
        free[10 if number == 0 else 20] -= 1
    assert numbers == [1, 2]
    free[10] = 1
    assert [n for n, _, _ in queue.due(5, lambda: 0, lambda size: free[size] > 0)] == [0]
    assert tried(queue, 9) == [3]  # it must be back, room or not


def test_a_long_queue_for_dram_costs_one_question_per_size():
    """Retrying the whole queue at every position took minutes for large models."""
    events = [(0, Gap(s, 0, 1000, "flash"), "copy_in") for s in range(500)]
    queue, asked = ReloadQueue(events), list[int]()
    for number, _, _ in due(queue, 0):
        queue.wait_for_dram(number, number % 2)

    def full(num_bytes: int) -> bool:
        asked.append(num_bytes)
        return False

    assert not list(queue.due(1, lambda: 0, full))
    assert sorted(asked) == [0, 1]

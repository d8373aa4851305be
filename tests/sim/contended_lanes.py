"""Reference for two lanes that share one resource, in exact arithmetic."""

from fractions import Fraction


def contended_end(tasks, demand):
    """Return the end of the last task; while both lanes are busy, each runs at the rate 1 / (1 + demand).

    Args:
        tasks: (lane 0 or 1, indices of the tasks that must end first, duration); a lane runs its tasks in this order.
        demand: Fraction of the resource that a task on lane 1 uses alone; a task on lane 0 uses all of it.
    """
    queues = [[n for n, task in enumerate(tasks) if task[0] == lane] for lane in (0, 1)]
    left = [Fraction(duration) for _, _, duration in tasks]
    done, now = set(), Fraction(0)
    while len(done) < len(tasks):
        running = [queue[0] for queue in queues if queue and done.issuperset(tasks[queue[0]][1])]
        rate = 1 / (1 + Fraction(demand)) if len(running) == 2 else Fraction(1)
        work = min(left[n] for n in running)
        now += work / rate
        for n in running:
            left[n] -= work
            if not left[n]:
                done.add(n)
                queues[tasks[n][0]].pop(0)
    return now

"""Streams, events and threads that keep vector clocks: whether two accesses to the same bytes are ordered, whatever
the timing.

`Order` has the names of torch's device modules. Every stream and every thread is an agent with a clock; an event
carries the clock of its stream; waiting joins clocks. An access to bytes must come after every earlier access to them
by another agent, unless both read. Giving bytes back counts as a write by the compute stream, because that is where
they are handed out again, at the point that it has come to: operators and waits move it on. Bytes that were
`allocated` may be any that were given back before, wherever they lie here; of others only the addresses count, as in
the arena.
"""

import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.memory.operators import written_leaves
from hyper_parallel.backends.torch.memory.streams import DeviceApi


class Order:
    """A device module that logs.

    Args:
        drop: (agent, number) of one wait that is left out; None: none.
    """

    def __init__(self, drop=None):
        self.violations = []
        self.waits = {}
        self._drop, self._accesses, self._watch = drop, [], {}
        self._last_back, self._after = 0, {}
        self._lock, self._here = threading.RLock(), threading.local()
        self._names = iter(("prefetch", "store"))  # in the order in which lanes make them
        self.compute = _Stream(self, "compute")
        order = self

        class Event(_Event):
            def __init__(self, enable_timing=False):
                super().__init__(order)

        self.Event = Event

    def Stream(self, device):
        return _Stream(self, next(self._names))

    def current_stream(self, device):
        return getattr(self._here, "stream", None) or self.compute

    @contextmanager
    def stream(self, stream):
        self._here.stream = stream
        yield
        self._here.stream = None

    def synchronize(self, device):
        pass

    def api(self):
        return DeviceApi(self, torch.device("cpu"), self.Event)

    # -- clocks ---------------------------------------------------------------------------------

    def host(self):
        """Clock of this thread."""
        if not hasattr(self._here, "clock"):
            self._here.clock = {}
        return self._here.clock

    def leave_out(self, agent):
        """Whether this wait of an agent is the one to be dropped."""
        with self._lock:
            number = self.waits[agent] = self.waits.get(agent, -1) + 1
        return (agent, number) == self._drop

    def allocated(self, base):
        """A new buffer: it is used after everything that was given back until now."""
        self._after[base._cdata] = self._last_back
        return base

    def given_back(self, base):
        """Its bytes are free from here on, although its range of the arena still exists."""
        self._back(base.data_ptr(), base.nbytes())

    def access(self, base, write, label):
        """The agent at work here touches a storage."""
        stream = getattr(self._here, "stream", None)
        if stream is None and threading.current_thread() is threading.main_thread():
            stream = self.compute
        with self._lock:
            if stream is not None:
                agent, clock = stream.name, stream.clock
                _join(clock, self.host())
            else:
                agent, clock = threading.current_thread().name, self.host()
            clock[agent] = clock.get(agent, 0) + 1
            if clock.get("compute", 0) < self._after.get(base._cdata, 0):
                self.violations.append(("given back", "compute", label, agent))
            self._check(agent, clock, base.data_ptr(), base.nbytes(), write, label)
            if base._cdata not in self._watch:
                start, size, key = base.data_ptr(), base.nbytes(), base._cdata
                self._watch[key] = weakref.ref(base, lambda _: self._gone(key, start, size))

    def _gone(self, key, start, size):
        with self._lock:
            self._watch.pop(key, None)
            self._after.pop(key, None)
            self._back(start, size)

    def _back(self, start, size):
        with self._lock:
            clock = self.compute.clock
            _join(clock, self.host())
            self._last_back = clock.setdefault("compute", 1)
            self._check("compute", clock, start, size, True, "given back")

    def _check(self, agent, clock, start, size, write, label):
        for other, tick, s, n, wrote, what in self._accesses:
            apart = s + n <= start or start + size <= s
            if other != agent and not apart and (write or wrote) and clock.get(other, 0) < tick:
                self.violations.append((what, other, label, agent))
        if size:
            self._accesses.append((agent, clock[agent], start, size, write, label))


class _Stream:
    def __init__(self, order, name):
        self.order, self.name, self.clock = order, name, {}

    def wait_event(self, event):
        if not self.order.leave_out(self.name):
            _join(self.clock, event.clock)
            self.clock[self.name] = self.clock.get(self.name, 0) + 1


class _Event:
    def __init__(self, order):
        self.order, self.clock = order, {}

    def record(self, stream):
        _join(stream.clock, self.order.host())
        self.clock = dict(stream.clock)

    def synchronize(self):
        if not self.order.leave_out(threading.current_thread().name.rpartition("_")[0]):
            _join(self.order.host(), self.clock)

    def elapsed_time(self, end):
        return 0.0


def _join(clock, other):
    for agent, tick in other.items():
        clock[agent] = max(clock.get(agent, 0), tick)


def executor_of(order):
    """A thread pool whose submissions and results order its threads, and whose operators are seen."""

    class Known(Future):
        def result(self, timeout=None):
            value = super().result(timeout)
            _join(order.host(), self.clock)
            return value

    class Executor(ThreadPoolExecutor):
        def submit(self, call):
            before, known = dict(order.host()), Known()

            def run():
                _join(order.host(), before)
                try:
                    with Watch(order):
                        value = call()
                except BaseException as error:
                    known.clock = dict(order.host())
                    known.set_exception(error)
                else:
                    known.clock = dict(order.host())
                    known.set_result(value)

            super().submit(run)
            return known

    return Executor


class Watch(TorchDispatchMode):
    """Tells an `Order` which storages the operators of this thread touch."""

    def __init__(self, order):
        super().__init__()
        self.order = order

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._opname in ("set_", "empty"):
            return out
        written = {t.untyped_storage()._cdata for t in written_leaves(func, args, kwargs)}
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage()._cdata for t in read}
        fresh = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known]
        if fresh or written or not isinstance(out, torch.Tensor):  # else a view
            for tensor in read:
                base = tensor.untyped_storage()
                self.order.access(base, base._cdata in written, str(func))
            for tensor in fresh:
                self.order.access(tensor.untyped_storage(), True, str(func))
        return out

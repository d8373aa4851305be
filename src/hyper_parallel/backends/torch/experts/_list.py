"""Expert parallelism for experts in a list of modules, which their block calls one by one.

A rank keeps a run of the modules, the others are placeholders. The code of the block stays as it is, so it runs twice:

    first run     the block calls its experts; each call is written down and returns zeros
    exchange      the rows of all calls go to the ranks of their experts in one all-to-all, the experts work, and the
                  results come back in another
    second run    the calls return the results; what the block returns now is its output

Gradients are exact: those of the results flow through the second run, those of the rows an expert was called with
through the first, whose output nobody uses. Router and shared experts run once: a module beside the list that is called
again with the same tensors returns what it returned before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._resolve import PlaceholderModule, SlotList
from hyper_parallel.backends.torch.experts._dispatch import Dispatch, place, touch
from hyper_parallel.backends.torch.experts._routing import LayerRouting, counts_now
from hyper_parallel.errors import UnsupportedSharding


class _Calls:
    """Calls of experts in one run of their block: written down, or answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.experts: list[int] = []
        self.rows: list[Tensor] = []
        self.results: list[Tensor] | None = None
        self._next = 0

    def __call__(self, expert: int, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise self.refusal("is called with something else than one tensor of rows")
        (rows,) = args
        if self.results is None:
            self.experts.append(expert)
            self.rows.append(rows)
            return torch.zeros_like(rows)
        at, self._next = self._next, self._next + 1
        if at >= len(self.rows) or (expert, rows.shape) != (self.experts[at], self.rows[at].shape):
            raise self.refusal("is called with other rows when its block runs again")
        return self.results[at]

    def refusal(self, what: str) -> UnsupportedSharding:
        return UnsupportedSharding(
            f"an expert in a list of modules {what}, so ep cannot send its rows to another rank",
            where=self.name,
            allowed="experts[i](rows), with rows and result [..., hidden], the same in every run of the block",
            hint="parallel.ep=1",
        )


class _ExpertSlot:
    """One expert as its block sees it, wherever it is."""

    def __init__(self, calls: _Calls, expert: int) -> None:
        self._calls, self._expert = calls, expert

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._calls(self._expert, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise self._calls.refusal(f"is read inside, at `{name}`")


class ExpertList(SlotList):
    """A list of experts of which this rank holds a run; while their block runs, it sees all of them."""

    held: range
    calls: _Calls | None

    @classmethod
    def of(cls, whole: nn.ModuleList, rank: int, ranks: int) -> ExpertList:
        """The list of one expert-parallel rank; the experts of the others are replaced by `PlaceholderModule`."""
        count = len(whole) // ranks
        held = range(rank * count, (rank + 1) * count)
        own = cls(e if i in held else PlaceholderModule(e) for i, e in enumerate(whole))
        own.held, own.calls = held, None
        return own

    def slots(self) -> list[_ExpertSlot] | None:
        """One per expert of all ranks, while the block runs."""
        calls = self.calls
        return None if calls is None else [_ExpertSlot(calls, i) for i in range(len(self._modules))]

    def forward(self, rows: Tensor, local_expert: Tensor) -> Tensor:
        """Results [R, D] of rows [R, D], each by the expert [R] of this rank, counted from the first it holds."""
        order = torch.argsort(local_expert, stable=True)
        sizes = torch.bincount(local_expert, minlength=len(self.held)).tolist()
        experts = [self._modules[str(i)] for i in self.held]
        given = list(zip(experts, rows[order].split(sizes), strict=True))
        done = [expert(part) for expert, part in given if len(part)]
        # Reductions over ranks need gradients of all experts. Only of those without rows are they made here: one node
        # that leads to every weight would make one piece of the second half of a split backward.
        idle = [p for e, part in given if not len(part) for p in e.parameters() if p.requires_grad]
        out = touch(torch.cat(done) if done else rows, idle)
        return place(out, order, len(rows))


def is_list(module: nn.Module | None) -> TypeGuard[nn.ModuleList]:
    """Whether a module is a list without a forward of its own, whose members somebody else calls."""
    return isinstance(module, nn.ModuleList) and type(module).forward is nn.Module.forward


def divide_lists(model: nn.Module, names: Iterable[str], mesh: DeviceMesh | None) -> None:
    """Keep this rank's modules of every list of experts among `names`; parameter names stay."""
    if mesh is None:
        return
    group, modules = mesh["ep"].get_group(), dict(model.named_modules())
    for name in names:
        whole = modules.get(name)
        if is_list(whole):
            owner, _, key = name.rpartition(".")
            modules[owner]._modules[key] = ExpertList.of(whole, group.rank(), group.size())


class ListBlock:
    """The forward of a block whose experts are an `ExpertList`, called `name`; `routing` counts what is exchanged."""

    def __init__(
        self,
        block: nn.Module,
        experts: ExpertList,
        name: str,
        group: dist.ProcessGroup,
        routing: LayerRouting,
    ) -> None:
        self.inner, self.experts, self.name = block.forward, experts, name
        self.group, self.routing = group, routing
        self.beside = [m for m in block.children() if m is not experts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        calls = _Calls(self.name)
        source = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        before = _version(source), _random_states(source)
        with _remembered(self.beside):
            self._run(calls, args, kwargs)
            after = _version(source), _random_states(source)
            if before[0] != after[0] or not all(map(torch.equal, before[1], after[1])):
                raise calls.refusal(
                    "belongs to a block that draws random numbers or changes its input"
                )
            back, calls.results = self._exchange(calls, source)
            out = self._run(calls, args, kwargs)
        # Other ranks wait for this one's part of the exchange in backward, though it sent nothing.
        return out if calls.rows else touch(out, [back])

    def _run(self, calls: _Calls, args: Any, kwargs: Any) -> Any:
        self.experts.calls = calls
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.experts.calls = None

    def _exchange(self, calls: _Calls, source: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Results of all calls, together and one by one."""
        width = source.shape[-1]
        rows = [r.reshape(-1, width) for r in calls.rows]
        # The empty part of the block's input joins a rank without calls to the backward of the others.
        hidden = torch.cat([source.reshape(-1, width)[:0].to(rows[0] if rows else source), *rows])
        sizes = [len(r) for r in rows]
        # On the host, where the sizes are known; then one copy.
        index = torch.tensor(calls.experts, dtype=torch.long)
        index = index.repeat_interleave(torch.tensor(sizes, dtype=torch.long)).to(hidden.device)
        plan = Dispatch.plan(index.unsqueeze(1), len(self.experts), self.group)
        if counts_now():
            self.routing.add(plan.counts, plan.kept, *plan.exchanged)
        received = plan.scatter(hidden)
        done = self.experts(received, plan.local_expert)
        if done.shape != received.shape:
            raise calls.refusal(f"returns rows of another shape, {tuple(done.shape)}")
        back = plan.gather(done)
        parts = back.split(sizes) if sizes else ()
        return back, [p.view_as(r) for p, r in zip(parts, calls.rows, strict=True)]


def _random_states(like: Tensor) -> list[Tensor]:
    """States of the random numbers that a block on this device may draw."""
    states = [torch.get_rng_state()]
    if like.device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(like.device).get_rng_state(like.device))
    return states


@contextmanager
def _remembered(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let every module return what it returned before when it is called again with the same tensors."""
    kept = [(m, m.__dict__.get("forward")) for m in modules]
    for module in modules:
        module.forward = _Remembered(module.forward)
    try:
        yield
    finally:
        for module, forward in kept:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


class _Remembered:
    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.seen: list[tuple[dict[Any, tuple[Any, int]], Any]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = {k: (v, _version(v)) for k, v in (*enumerate(args), *kwargs.items())}
        for before, out in self.seen:
            if before.keys() == given.keys() and all(_same(before[k], given[k]) for k in given):
                return out
        out = self.inner(*args, **kwargs)
        self.seen.append((given, out))
        return out


def _version(value: Any) -> int:
    """How often a tensor was changed in place."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _same(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    """Whether two arguments are one: for tensors, views of the same elements, kept alive and not changed since."""
    (a, _), (b, _) = before, now
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return a is b
    return (
        a.data_ptr() == b.data_ptr()
        and (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and (a.requires_grad, before[1]) == (b.requires_grad, now[1])
    )

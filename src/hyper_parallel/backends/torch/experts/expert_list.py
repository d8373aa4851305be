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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.experts._dispatch import dispatch, place, touch
from hyper_parallel.backends.torch.experts.routing import ExpertState
from hyper_parallel.backends.torch.model_structure import PlaceholderModule, SlotList
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
        idle = [p for expert, part in given if not len(part) for p in expert.parameters()]
        out = touch(torch.cat(done) if done else rows, idle)
        return place(out, order, len(rows))


def is_list(module: nn.Module | None) -> TypeGuard[nn.ModuleList]:
    """Whether a module is a list without a forward of its own, whose members somebody else calls."""
    return isinstance(module, nn.ModuleList) and type(module).forward is nn.Module.forward


def divide_lists(model: nn.Module, state: ExpertState | None) -> None:
    """Keep this rank's modules of every list of experts; parameter names stay."""
    if state is None or state.group is None:
        return
    modules = dict(model.named_modules())
    for name in state.num_experts:
        if is_list(whole := modules.get(name)):
            own = ExpertList.of(whole, state.group.rank(), state.group.size())
            model.set_submodule(name, own)


class ListBlock:
    """The forward of a block whose experts are an `ExpertList`, called `name`."""

    def __init__(
        self, block: nn.Module, experts: ExpertList, name: str, state: ExpertState
    ) -> None:
        self.inner, self.experts, self.name, self.state = block.forward, experts, name, state
        self.beside = [m for m in block.children() if m is not experts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on the tokens of all ranks and return its output; raise if the routing changes its input."""
        calls = _Calls(self.name)
        source = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        before = _states(source)
        with _remembered(self.beside):
            self._run(calls, args, kwargs)
            if not all(map(torch.equal, before, _states(source))):
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

        def work(rows: Tensor, expert: Tensor) -> Tensor:
            done = self.experts(rows, expert)
            if done.shape != rows.shape:
                raise calls.refusal(f"returns rows of another shape, {tuple(done.shape)}")
            return done

        layer, count = self.state.layers[self.name], len(self.experts)
        back = dispatch(hidden, index.unsqueeze(1), count, self.state.group, None, layer, work)
        parts = back.split(sizes) if sizes else ()
        return back, [p.view_as(r) for p, r in zip(parts, calls.rows, strict=True)]


def _states(source: Tensor) -> list[Tensor]:
    """What a block must leave as it is: its input, and the random numbers that it could draw."""
    states = [torch.tensor(_version(source)), torch.get_rng_state()]
    if source.device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(source.device).get_rng_state(source.device))
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
        self.seen: dict[frozenset[Any], tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = (*enumerate(args), *kwargs.items())
        key = frozenset((name, _identity(value)) for name, value in given)
        if key not in self.seen:
            # Arguments stay alive, so that no other one takes their place in memory.
            self.seen[key] = given, self.inner(*args, **kwargs)
        return self.seen[key][1]


def _identity(value: Any) -> Any:
    """What tells an argument from others: of a tensor the elements that it shows, and how often they were changed."""
    if not isinstance(value, Tensor):
        return id(value)
    shown = value.data_ptr(), value.shape, value.stride(), value.dtype
    return *shown, value.requires_grad, _version(value)


def _version(value: Tensor) -> int:
    """How often a tensor was changed in place."""
    return 0 if value.is_inference() else value._version

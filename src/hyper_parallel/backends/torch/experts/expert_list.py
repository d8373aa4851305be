"""Expert parallelism for experts in a module list, called one by one by their block.

A rank keeps a contiguous range of the modules; the others are placeholders. The block's code is unchanged and runs
twice:

    first run     the block calls its experts; each call is recorded and returns zeros
    exchange      one all-to-all sends the rows of all calls to the ranks of their experts, the experts run, and a
                  second all-to-all returns the results
    second run    the calls return the results; this run's output is the output of the block

Gradients are exact: gradients of the results flow through the second run, gradients of the experts' inputs through the
first, whose output is unused. Router and shared experts run once: calls of other child modules are memoized by their
arguments. The second half-batch may begin while the first one is suspended, so each call of a block keeps its own
state, in a context variable.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.experts._dispatch import (
    ExpertWork,
    attach_zero_gradients,
    dispatch,
    scatter_rows,
)
from hyper_parallel.backends.torch.experts.routing import ExpertState
from hyper_parallel.backends.torch.model_structure import PlaceholderModule, SlotList
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.errors import UnsupportedSharding


class _Calls:
    """Expert calls in one pass through a block: recorded in the first run, answered in the second.

    Attributes:
        child_results: Arguments and result of the calls of other child modules, by module and arguments.
    """

    def __init__(self, experts: ExpertList, name: str) -> None:
        self.experts, self.name = experts, name
        self.called: list[int] = []
        self.rows: list[Tensor] = []
        self.results: list[Tensor] | None = None
        self.child_results: dict[Any, tuple[Any, Any]] = {}
        self._next = 0

    def __call__(self, expert: int, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise self.refusal("is not called with exactly one tensor")
        (rows,) = args
        if self.results is None:
            self.called.append(expert)
            self.rows.append(rows)
            return torch.zeros_like(rows)
        call, self._next = self._next, self._next + 1
        first_run = (self.called[call], self.rows[call].shape) if call < len(self.rows) else None
        if first_run != (expert, rows.shape):
            raise self.refusal("is called with other shapes or in another order when its block is run again")
        return self.results[call]

    def refusal(self, reason: str) -> UnsupportedSharding:
        return UnsupportedSharding(
            f"an expert in a list of modules {reason}, so ep cannot send its tokens to another rank",
            where="parallel.ep",
            got=self.name,
            allowed="calls experts[i](x), with x and result of shape [..., hidden], in the same order in every run",
            changes={"parallel.ep": 1},
        )


_running: ContextVar[_Calls | None] = ContextVar("expert_calls", default=None)
"""Calls of the running block; None outside of a run."""


class _ExpertSlot:
    def __init__(self, calls: _Calls, expert: int) -> None:
        self._calls, self._expert = calls, expert

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._calls(self._expert, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise self._calls.refusal(f"is used other than by a call: its block reads the attribute `{name}`")


class ExpertList(SlotList):
    """Module list with this rank's contiguous range of experts, and placeholders for the others.

    During the forward of its block, iteration yields a stub for every expert instead.
    """

    local_experts: range

    @classmethod
    def from_modules(cls, modules: nn.ModuleList, rank: int, ranks: int) -> ExpertList:
        """Return the list of one expert-parallel rank, with a `PlaceholderModule` for each expert of other ranks."""
        count = len(modules) // ranks
        local = range(rank * count, (rank + 1) * count)
        experts = cls(e if i in local else PlaceholderModule(e) for i, e in enumerate(modules))
        experts.local_experts = local
        return experts

    def slots(self) -> list[_ExpertSlot] | None:
        """Return one stub per expert of all ranks during the block's forward; None otherwise."""
        calls = _running.get()
        if calls is None or calls.experts is not self:
            return None
        return [_ExpertSlot(calls, i) for i in range(len(self._modules))]

    def forward(self, rows: Tensor, local_expert: Tensor) -> Tensor:
        """Return the results [R, D] of rows [R, D] by their experts [R], counted from this rank's first one."""
        order = torch.argsort(local_expert, stable=True)
        sizes = torch.bincount(local_expert, minlength=len(self.local_experts)).tolist()
        experts = [self._modules[str(i)] for i in self.local_experts]
        inputs = list(zip(experts, rows[order].split(sizes), strict=True))
        results = [expert(part) for expert, part in inputs if len(part)]
        # Reductions over ranks need gradients of all experts. Zero gradients are attached for experts without rows
        # only: a single autograd node for all weights would merge the weight gradients of a split backward.
        idle = [p for expert, part in inputs if not len(part) for p in expert.parameters()]
        out = attach_zero_gradients(torch.cat(results) if results else rows, idle)
        return scatter_rows(out, order, len(rows))


def is_list(module: nn.Module | None) -> TypeGuard[nn.ModuleList]:
    """Return whether a module is a `ModuleList` without a forward of its own, so that its parent calls the members."""
    return isinstance(module, nn.ModuleList) and type(module).forward is nn.Module.forward


def shard_expert_lists(model: nn.Module, state: ExpertState | None) -> None:
    """Replace every list of experts by an `ExpertList` with this rank's experts if ep > 1; keep parameter names."""
    if state is None or state.group is None:
        return
    modules = dict(model.named_modules())
    for name in state.num_experts:
        if is_list(experts := modules.get(name)):
            shard = ExpertList.from_modules(experts, state.group.rank(), state.group.size())
            model.set_submodule(name, shard)


class ListBlock:
    """Replacement forward of a block whose experts are an `ExpertList`."""

    def __init__(self, block: nn.Module, experts: ExpertList, name: str, state: ExpertState) -> None:
        self.inner, self.experts, self.name, self.state = block.forward, experts, name, state
        self._unwrapped = [m for m in block.children() if m is not experts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block twice, with the exchange in between; raise HP205 if it draws random numbers or writes input."""
        # Wrap children at the first call, outside of all other wrappers, so that collectives in these run once too.
        while self._unwrapped:
            child = self._unwrapped.pop()
            wrap(child, partial(_call_once, child))
        calls = _Calls(self.experts, self.name)
        source = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        state_before = _side_effect_state(source)
        self._run(calls, args, kwargs)
        if not all(map(torch.equal, state_before, _side_effect_state(source))):
            raise calls.refusal("belongs to a block that draws random numbers or changes its input")
        results, calls.results = self._exchange(calls, source)
        out = self._run(calls, args, kwargs)
        # A rank without calls must still take part in the exchange of backward.
        return out if calls.rows else attach_zero_gradients(out, [results])

    def _run(self, calls: _Calls, args: Any, kwargs: Any) -> Any:
        token = _running.set(calls)
        try:
            return self.inner(*args, **kwargs)
        finally:
            _running.reset(token)

    def _exchange(self, calls: _Calls, source: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the expert calls on the ranks of their experts; return the results concatenated, and one per call."""
        width = source.shape[-1]
        rows = [r.reshape(-1, width) for r in calls.rows]
        # The empty slice of the block's input connects a rank without calls to the backward of the exchange.
        hidden = torch.cat([source.reshape(-1, width)[:0].to(rows[0] if rows else source), *rows])
        sizes = [len(r) for r in rows]
        # The index is built on the host, where the sizes are known, then copied once.
        index = torch.tensor(calls.called, dtype=torch.long)
        index = index.repeat_interleave(torch.tensor(sizes, dtype=torch.long)).to(hidden.device)

        def work(rows: Tensor, expert: Tensor) -> Tensor:
            out = self.experts(rows, expert)
            if out.shape != rows.shape:
                raise calls.refusal(f"returns shape {tuple(out.shape)} for {tuple(rows.shape)}")
            return out

        state, expert_work = self.state, ExpertWork(work, self.experts.parameters)
        layout = len(self.experts), state.group, None, state.layers[self.name], expert_work
        results = dispatch(hidden, index.unsqueeze(1), *layout, chunks=state.chunks)
        parts = results.split(sizes) if sizes else ()
        return results, [p.view_as(r) for p, r in zip(parts, calls.rows, strict=True)]


def _side_effect_state(source: Tensor) -> list[Tensor]:
    """Return the state that a block must not change: the version of its input, and the random states."""
    states = [torch.tensor(_version(source)), torch.get_rng_state()]
    if source.device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(source.device).get_rng_state(source.device))
    return states


def _call_once(module: nn.Module, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module's forward, or return its earlier result for these arguments in this pass through a block."""
    calls = _running.get()
    if calls is None:
        return inner(*args, **kwargs)
    arguments = (*enumerate(args), *kwargs.items())
    key = module, frozenset((name, _identity(value)) for name, value in arguments)
    if key not in calls.child_results:
        # Arguments are kept alive, so that their addresses are not reused.
        calls.child_results[key] = arguments, inner(*args, **kwargs)
    return calls.child_results[key][1]


def _identity(value: Any) -> Any:
    """Return a key of an argument, equal only for the same object or, for tensors, the same memory and version."""
    if not isinstance(value, Tensor):
        return id(value)
    view = value.data_ptr(), value.shape, value.stride(), value.dtype
    return *view, value.requires_grad, _version(value)


def _version(value: Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if value.is_inference() else value._version

"""Expert parallelism for experts in a module list, called one by one by their block.

A rank keeps a contiguous range of the modules; the others are placeholders. The block's code is unchanged and runs
twice:

    first run     the block calls its experts; each call is recorded and returns zeros
    exchange      one all-to-all sends the rows of all calls to the ranks of their experts, the experts run, and a
                  second all-to-all returns the results
    second run    the calls return the results; this run's output is the output of the block

Gradients are exact: gradients of the results flow through the second run, gradients of the experts' inputs through the
first, whose output is unused. Router and shared experts run once: calls of other child modules are memoized by their
arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from hyper_parallel.errors import UnsupportedSharding


class _Calls:
    """Expert calls of one block: recorded in the first run, answered in the second."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.experts: list[int] = []
        self.rows: list[Tensor] = []
        self.results: list[Tensor] | None = None
        self._next = 0

    def __call__(self, expert: int, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise self.refusal("is not called with exactly one tensor")
        (rows,) = args
        if self.results is None:
            self.experts.append(expert)
            self.rows.append(rows)
            return torch.zeros_like(rows)
        call, self._next = self._next, self._next + 1
        first_run = (self.experts[call], self.rows[call].shape) if call < len(self.rows) else None
        if first_run != (expert, rows.shape):
            raise self.refusal(
                "is called with other shapes or in another order when its block is run again"
            )
        return self.results[call]

    def refusal(self, reason: str) -> UnsupportedSharding:
        return UnsupportedSharding(
            f"an expert in a list of modules {reason}, so ep cannot send its tokens to another rank",
            where=self.name,
            allowed="calls experts[i](x), with x and result of shape [..., hidden], in the same order in every run",
            hint="parallel.ep=1",
        )


class _ExpertSlot:
    """Stub of one expert, called by the block."""

    def __init__(self, calls: _Calls, expert: int) -> None:
        self._calls, self._expert = calls, expert

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._calls(self._expert, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise self._calls.refusal(
            f"is used other than by a call: its block reads the attribute `{name}`"
        )


class ExpertList(SlotList):
    """Module list with this rank's contiguous range of experts.

    During the forward of its block, it yields a stub for every expert of all ranks instead.
    """

    local_experts: range
    calls: _Calls | None

    @classmethod
    def from_modules(cls, modules: nn.ModuleList, rank: int, ranks: int) -> ExpertList:
        """Return the list of one expert-parallel rank, with a `PlaceholderModule` for each expert of other ranks."""
        count = len(modules) // ranks
        local = range(rank * count, (rank + 1) * count)
        experts = cls(e if i in local else PlaceholderModule(e) for i, e in enumerate(modules))
        experts.local_experts, experts.calls = local, None
        return experts

    def slots(self) -> list[_ExpertSlot] | None:
        """Return one stub per expert of all ranks during the block's forward; None otherwise."""
        calls = self.calls
        return None if calls is None else [_ExpertSlot(calls, i) for i in range(len(self._modules))]

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
    """Replace every list of experts by an `ExpertList` with this rank's experts; parameter names are unchanged."""
    if state is None or state.group is None:
        return
    modules = dict(model.named_modules())
    for name in state.num_experts:
        if is_list(experts := modules.get(name)):
            shard = ExpertList.from_modules(experts, state.group.rank(), state.group.size())
            model.set_submodule(name, shard)


class ListBlock:
    """Replacement forward of a block whose experts are an `ExpertList`."""

    def __init__(
        self, block: nn.Module, experts: ExpertList, name: str, state: ExpertState
    ) -> None:
        self.inner, self.experts, self.name, self.state = block.forward, experts, name, state
        self.other_children = [m for m in block.children() if m is not experts]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block twice, with the exchange in between; raise HP205 if the first run has side effects."""
        calls = _Calls(self.name)
        source = next(a for a in (*args, *kwargs.values()) if isinstance(a, Tensor))
        state_before = _side_effect_state(source)
        with _memoize_forwards(self.other_children):
            self._run(calls, args, kwargs)
            if not all(map(torch.equal, state_before, _side_effect_state(source))):
                raise calls.refusal(
                    "belongs to a block that draws random numbers or changes its input"
                )
            results, calls.results = self._exchange(calls, source)
            out = self._run(calls, args, kwargs)
        # A rank without calls must still take part in the exchange of backward.
        return out if calls.rows else attach_zero_gradients(out, [results])

    def _run(self, calls: _Calls, args: Any, kwargs: Any) -> Any:
        self.experts.calls = calls
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.experts.calls = None

    def _exchange(self, calls: _Calls, source: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Compute the expert calls on the ranks of their experts; return the results concatenated, and one per call."""
        width = source.shape[-1]
        rows = [r.reshape(-1, width) for r in calls.rows]
        # The empty slice of the block's input connects a rank without calls to the backward of the exchange.
        hidden = torch.cat([source.reshape(-1, width)[:0].to(rows[0] if rows else source), *rows])
        sizes = [len(r) for r in rows]
        # Built on the host, where the sizes are known, then copied once.
        index = torch.tensor(calls.experts, dtype=torch.long)
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


@contextmanager
def _memoize_forwards(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Make modules in this context return the earlier result for arguments that they have already seen."""
    originals = [(m, m.__dict__.get("forward")) for m in modules]
    for module in modules:
        module.forward = _MemoizedForward(module.forward)
    try:
        yield
    finally:
        for module, forward in originals:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


class _MemoizedForward:
    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner
        self.seen: dict[frozenset[Any], tuple[Any, Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = (*enumerate(args), *kwargs.items())
        key = frozenset((name, _identity(value)) for name, value in arguments)
        if key not in self.seen:
            # Arguments are kept alive, so that their addresses are not reused.
            self.seen[key] = arguments, self.inner(*args, **kwargs)
        return self.seen[key][1]


def _identity(value: Any) -> Any:
    """Return a key of an argument, equal only for the same object or, for tensors, the same memory and version."""
    if not isinstance(value, Tensor):
        return id(value)
    view = value.data_ptr(), value.shape, value.stride(), value.dtype
    return *view, value.requires_grad, _version(value)


def _version(value: Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for an inference tensor, which does not count them."""
    return 0 if value.is_inference() else value._version

"""Experts of a model on many ranks: the model's own expert code, given the tokens of all ranks for its local experts.

A module of routed experts is called as `experts(hidden [N, D], index [N, k], weights [N, k])`. Its forward is put
around on the instance: tokens are dispatched, the unmodified forward runs on the received rows with the experts this
rank holds (`num_experts` is their number during the call, weights are one), and the sender combines the results with
its weights. So biases, clamps, activations and the grouped GEMM stay those of the model.

With ep = 1 a rank has every expert and runs the unmodified forward on its own tokens. Under tensor parallelism these
are the rank's piece of the sequence: routing works position by position, so nothing is gathered, and the gradients of
router and experts are summed over the ranks like those of norms.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch.context._state import ContextState
from hyper_parallel.backends.torch.experts._dispatch import Dispatch, place, touch
from hyper_parallel.backends.torch.experts._list import ExpertList, ListBlock, is_list
from hyper_parallel.backends.torch.experts._routing import (
    ExpertState,
    LayerRouting,
    Routing,
    Tokens,
    counts_now,
    watch_routers,
)
from hyper_parallel.backends.torch.tensor._gradients import show_local
from hyper_parallel.backends.torch.tensor._state import TpState
from hyper_parallel.errors import UnsupportedSharding


def count_experts(model: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """Number of experts of every module that holds some, by name; of the whole model, before it is cut."""

    def number(module: nn.Module) -> int:
        if is_list(module):
            return len(module)
        known = getattr(module, "num_experts", None)
        return known if isinstance(known, int) else next(iter(module.parameters())).shape[0]

    modules = dict(model.named_modules())
    names = [n for n, style in styles.items() if style == "experts" and n in modules]
    return {n: number(modules[n]) for n in names}


def expert_state(
    model: nn.Module,
    num_experts: dict[str, int],
    routing: Routing,
    mesh: DeviceMesh | None,
    world_group: dist.ProcessGroup | None,
    staged: bool,
    device: torch.device,
) -> ExpertState | None:
    """The experts of a model, `staged` when it is cut into pipeline stages; None when it has none."""
    if not num_experts:
        return None
    here = {name for name, _ in model.named_modules()}  # not those of other pipeline stages
    names = tuple(name for name in num_experts if name in here)
    group = None if mesh is None else mesh["ep"].get_group()
    return ExpertState(names, num_experts, routing, group, world_group, staged, device)


def apply_to_experts(
    model: nn.Module,
    state: ExpertState,
    tp: TpState | None,
    context: ContextState | None,
    in_decoder: bool,
) -> None:
    """Put dispatch around every module of experts, and routing statistics around every router.

    Refused are experts that are not called with tokens, indices and weights, or that lie in a module whose activations
    every tensor-parallel rank holds (not `in_decoder`, a Hugging Face model with a list of decoder layers).
    """
    group, capacity = state.group, state.options.capacity_factor
    plain = group is None and tp is None and capacity is None
    tokens = Tokens(tp, context)
    for name in state.modules:
        module = model.get_submodule(name)
        listed = isinstance(module, ExpertList) or is_list(module)
        signature = inspect.signature(type(module).forward)
        if not listed and (len(signature.parameters) != 4 or not hasattr(module, "num_experts")):
            if plain:
                continue
            raise UnsupportedSharding(
                "these experts are not called as experts(hidden_states, index, weights)",
                where=name,
                got=f"{type(module).__name__}{signature}",
                hint="parallel.ep=1 parallel.tp=1",
            )
        if listed and capacity is not None:
            raise UnsupportedSharding(
                "a capacity needs experts called as experts(hidden_states, index, weights), not a list of modules",
                where=name,
                got=f"capacity_factor={capacity}",
                hint="moe.capacity_factor=null",
            )
        if tp is not None and not in_decoder and not is_list(module):
            raise UnsupportedSharding(
                "experts under tensor parallelism need a Hugging Face model with a list of decoder layers",
                where=name,
                hint="parallel.tp=1",
            )
        block = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(module, ExpertList) and (group is not None or tp is not None):
            for part in module.modules():
                if part._parameters:
                    show_local(part, None if tp is None else tp.gradients)
        if isinstance(module, ExpertList):
            assert group is not None
            state.layers[name] = LayerRouting()
            block.forward = ListBlock(block, module, name, group, state.layers[name])
        elif listed:
            _touch_all(block, module)
        else:
            state.layers[name] = LayerRouting()
            module.forward = _Forward(module, name, state, tokens)
    watch_routers(model, state, tokens)


def _touch_all(block: nn.Module, experts: nn.Module) -> None:
    """All experts of a list are on this rank: one without tokens still has a gradient."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        params = [p for p in experts.parameters() if p.requires_grad]
        return touch(inner(*args, **kwargs), params)

    block.forward = forward


class _Forward:
    """The forward of one module of experts."""

    def __init__(self, module: nn.Module, name: str, state: ExpertState, tokens: Tokens) -> None:
        self.module, self.inner, self.name = module, module.forward, name
        self.state, self.tokens = state, tokens
        self.is_list = any(True for child in module.children() for _ in child.parameters())

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[N, D] of hidden [N, D], index [N, k] and weights [N, k]."""
        rows = hidden.shape[0]
        kept = self.tokens.among(rows, hidden.device)
        if kept is not None:
            hidden, index, weights = hidden[kept], index[kept], weights[kept]
        if self.state.group is None and self.state.options.capacity_factor is None:
            out = self._here(hidden, index, weights)
        else:
            out = self._dispatched(hidden, index, weights)
        return out if kept is None else place(out, kept, rows)

    def _here(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if counts_now():
            flat = index.reshape(-1)
            self.state.layers[self.name].add(
                torch.bincount(flat, minlength=self.module.num_experts), flat.numel()
            )
        if not len(hidden):
            return self._touched(hidden, weights)  # the router, too, needs a gradient on every rank
        out = self.inner(hidden, index, weights)
        return self._touched(out) if self.is_list else out

    def _dispatched(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module, group = self.module, self.state.group
        num_experts: int = module.num_experts
        factor = self.state.options.capacity_factor
        limit = None if factor is None else math.ceil(factor * index.numel() / num_experts)
        plan = Dispatch.plan(index, num_experts, group, limit)
        if counts_now():
            self.state.layers[self.name].add(plan.counts, plan.kept, *plan.exchanged)
        received = plan.scatter(hidden)
        if len(received):
            ones = weights.new_ones(len(received), 1)
            with _holding(module, num_experts // (group.size() if group is not None else 1)):
                results = self.inner(received, plan.local_expert.unsqueeze(1), ones)
            results = self._touched(results) if self.is_list else results
        else:
            results = self._touched(received)
        back = plan.gather(results).view(*index.shape, hidden.shape[1])
        return (back * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _touched(self, out: Tensor, *others: Tensor) -> Tensor:
        return touch(out, [p for p in (*self.module.parameters(), *others) if p.requires_grad])


@contextmanager
def _holding(module: nn.Module, num_experts: int) -> Iterator[None]:
    """Tell a module the number of experts it holds here."""
    kept = module.num_experts
    module.num_experts = num_experts
    try:
        yield
    finally:
        module.num_experts = kept

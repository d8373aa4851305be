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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch.experts._dispatch import Capacity, dispatch, place, touch
from hyper_parallel.backends.torch.experts.expert_list import ExpertList, ListBlock, is_list
from hyper_parallel.backends.torch.experts.routing import (
    ExpertState,
    LayerRouting,
    Routing,
    count_rows,
    counts_now,
)
from hyper_parallel.backends.torch.tensor.gradients import use_local_parameters
from hyper_parallel.backends.torch.token_rows import Tokens
from hyper_parallel.errors import UnsupportedSharding


def expert_state(
    model: nn.Module,
    styles: dict[str, str],
    routing: Routing,
    group: dist.ProcessGroup | None,
    world_group: dist.ProcessGroup | None,
    staged: bool,
    device: torch.device,
) -> ExpertState | None:
    """The experts of a whole model, before it is cut, `staged` when into pipeline stages; None when it has none."""

    def number(module: nn.Module) -> int:
        if is_list(module):
            return len(module)
        known = getattr(module, "num_experts", None)
        return known if isinstance(known, int) else next(iter(module.parameters())).shape[0]

    modules = dict(model.named_modules())
    names = [n for n, style in styles.items() if style == "experts" and n in modules]
    counts = {n: number(modules[n]) for n in names}
    return ExpertState(counts, routing, group, world_group, staged, device) if counts else None


def apply_to_experts(
    model: nn.Module,
    state: ExpertState,
    tokens: Tokens,
    in_decoder: bool,
) -> None:
    """Put dispatch around every module of experts on this rank.

    Refused are experts that are not called with tokens, indices and weights, or that lie in a module whose activations
    every tensor-parallel rank holds (not `in_decoder`, a Hugging Face model with a list of decoder layers).
    """
    group, capacity, tp = state.group, state.options.capacity_factor, tokens.tp
    plain = group is None and tp is None and capacity is None
    modules = dict(model.named_modules())
    state.modules = tuple(name for name in state.num_experts if name in modules)
    state.tokens = tokens
    for name in state.modules:
        module, block = modules[name], modules[name.rpartition(".")[0]]
        divided = isinstance(module, ExpertList)
        listed = divided or is_list(module)
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
        if not divided and (group is not None or tp is not None):
            for part in module.modules():
                if part._parameters:
                    use_local_parameters(part, None if tp is None else tp.gradients)
        if listed and not divided:
            _touch_all(block, module)
            continue
        state.layers[name] = LayerRouting()
        if divided:
            block.forward = ListBlock(block, module, name, state)
        else:
            module.forward = _Forward(module, name, state)


def _touch_all(block: nn.Module, experts: nn.Module) -> None:
    """All experts of a list are on this rank: one without tokens still has a gradient."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return touch(inner(*args, **kwargs), experts.parameters())

    block.forward = forward


class _Forward:
    """The forward of one module of experts."""

    def __init__(self, module: nn.Module, name: str, state: ExpertState) -> None:
        self.module, self.inner, self.name, self.state = module, module.forward, name, state
        self.in_batch = False
        self.in_parts = any(True for child in module.children() for _ in child.parameters())

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """[N, D] of hidden [N, D], index [N, k] and weights [N, k]; some have [B, S, D] for [N, D]."""
        shape, rows = hidden.shape, index.shape[0]
        self.in_batch = hidden.dim() == 3
        if self.in_batch:
            hidden = hidden.reshape(-1, shape[-1])
        tokens = self.state.tokens
        kept = tokens.among(rows, hidden.device)
        real = tokens.real(kept, rows)
        if kept is not None:
            hidden, index, weights = hidden[kept], index[kept], weights[kept]
        if self.state.group is None and self.state.options.capacity_factor is None:
            if counts_now():
                load = count_rows(index, self.module.num_experts, real)
                self.state.layers[self.name].add(load, load.sum())
            out = self._work(hidden, index, weights)
        else:
            out = self._dispatched(hidden, index, weights, real)
        out = out if kept is None else place(out, kept, rows)
        return out.reshape(shape) if self.in_batch else out

    def _dispatched(
        self, hidden: Tensor, index: Tensor, weights: Tensor, real: Tensor | None
    ) -> Tensor:
        group, factor = self.state.group, self.state.options.capacity_factor
        num_experts: int = self.module.num_experts
        capacity = None if factor is None else Capacity.of(factor, index, num_experts, real)
        padding = self.state.tokens.padding
        # Padding takes no place of a capacity, and is left out where nobody reads its results.
        computed = real if capacity is not None or (padding and padding.unread) else None
        load = count_rows(index, num_experts, real) if real is not None and counts_now() else None

        def work(rows: Tensor, local_expert: Tensor) -> Tensor:
            ones = weights.new_ones(len(rows), 1)
            # While its code runs, the module knows of the experts that are here.
            self.module.num_experts = num_experts // (1 if group is None else group.size())
            try:
                return self._work(rows, local_expert.unsqueeze(1), ones)
            finally:
                self.module.num_experts = num_experts

        layer = self.state.layers[self.name]
        back = dispatch(hidden, index, num_experts, group, capacity, layer, work, computed, load)
        back = back.view(*index.shape, hidden.shape[1])
        return (back * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _work(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The model's own code; every parameter has a gradient on every rank, and so has the router."""
        if not len(hidden):
            return touch(hidden, (*self.module.parameters(), weights))
        if self.in_batch:
            out = self.inner(hidden.unsqueeze(0), index, weights).squeeze(0)
        else:
            out = self.inner(hidden, index, weights)
        return touch(out, self.module.parameters()) if self.in_parts else out

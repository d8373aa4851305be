"""Expert parallelism with the expert code of the model, applied to the tokens of all ranks for the local experts.

A module of routed experts is called as `experts(hidden [N, D], index [N, k], weights [N, k])`. Its forward is wrapped
on the instance: tokens are dispatched, and the unmodified forward runs on the received rows with this rank's experts.
In this call, `num_experts` is the number of local experts and all weights are one. The sender combines the results with
its weights. Biases, clamps, activations and the grouped GEMM come from the model's code.

With ep = 1 and no capacity, a rank has all experts and runs the unmodified forward on its own tokens. Under tensor
parallelism, its own tokens are its part of the sequence. Routing works per position, so nothing is gathered. The
gradients of router and experts are summed over the ranks, like those of norms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hyper_parallel.backends.torch.experts._dispatch import (
    Capacity,
    ExpertWork,
    attach_zero_gradients,
    dispatch,
    scatter_rows,
)
from hyper_parallel.backends.torch.experts.expert_list import ExpertList, ListBlock, is_list
from hyper_parallel.backends.torch.experts.routing import (
    ExpertState,
    LayerRouting,
    count_rows,
    is_first_forward,
)
from hyper_parallel.backends.torch.tensor.gradients import to_local, use_local_parameters
from hyper_parallel.backends.torch.token_rows import Tokens
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.errors import UnsupportedSharding


def count_experts(model: nn.Module, styles: dict[str, str]) -> dict[str, int]:
    """Return the number of experts by name of each module of experts, for a model that is not sharded yet.

    `styles` maps names of modules to sharding styles.
    """
    modules, counts = dict(model.named_modules()), dict[str, int]()
    for name, style in styles.items():
        if style == "experts" and (module := modules.get(name)) is not None:
            count = len(module) if is_list(module) else getattr(module, "num_experts", None)
            rows = next(iter(module.parameters())).shape[0]
            counts[name] = count if isinstance(count, int) else rows
    return counts


def apply_to_experts(model: nn.Module, state: ExpertState, tokens: Tokens, in_decoder: bool) -> None:
    """Wrap the modules of experts on this rank: dispatch tokens and combine results if needed, and count rows.

    A list of experts with ep = 1 gets zero gradients for unused experts, but no routing counter. On one rank without a
    capacity, modules that cannot be wrapped do not change.

    `tokens` selects this rank's tokens among the rows of a layer. It is stored in `state`, with the modules' names and
    their routing counters. `in_decoder` tells whether the experts belong to a Hugging Face model with decoder layers.

    Raises:
        UnsupportedSharding: HP205 for experts on several ranks, or with a capacity, that lack `num_experts` or are not
            called with tokens, indices and weights. HP205 for experts in a list with a capacity. HP205 for experts
            outside of a decoder under tensor parallelism, except a list of experts with ep = 1.
    """
    group, tp = state.group, tokens.tp
    modules = dict(model.named_modules())
    state.modules = tuple(name for name in state.num_experts if name in modules)
    state.tokens = tokens
    for name in state.modules:
        module, block = modules[name], modules[name.rpartition(".")[0]]
        if not _is_supported(module, name, state, tokens, in_decoder):
            continue
        is_sharded_list = isinstance(module, ExpertList)
        if not is_sharded_list and (group is not None or tp is not None):
            for part in module.modules():
                if part._parameters:
                    use_local_parameters(part, None if tp is None else tp.gradients)
        if is_list(module) and not is_sharded_list:
            _attach_gradients_to_block(block, module)
            continue
        state.layers[name] = LayerRouting()
        if is_sharded_list:
            block.forward = ListBlock(block, module, name, state)
        else:
            module.forward = _Forward(module, name, state)


def _is_supported(module: nn.Module, name: str, state: ExpertState, tokens: Tokens, in_decoder: bool) -> bool:
    """Return whether to wrap a module of experts; False: it runs unchanged. Raise HP205 if it cannot be wrapped."""
    group, capacity, tp = state.group, state.options.capacity_factor, tokens.tp
    in_list = isinstance(module, ExpertList) or is_list(module)
    signature = inspect.signature(type(module).forward)
    if not in_list and (len(signature.parameters) != 4 or not hasattr(module, "num_experts")):
        alone = group is None and tp is None
        if alone and capacity is None:
            return False
        changes: dict[str, object] = {} if group is None else {"parallel.ep": 1}
        changes |= {} if tp is None else {"parallel.tp_x": 1, "parallel.tp_y": 1}
        changes |= {} if capacity is None else {"moe.capacity_factor": None}
        needed = "must be called as experts(hidden_states, index, weights)"
        if len(signature.parameters) == 4:
            needed = "need an attribute `num_experts`"
        raise UnsupportedSharding(
            f"experts on several ranks, or with a capacity, {needed}",
            where=next(iter(changes)),
            got=f"{name}: {type(module).__name__}{signature}",
            changes=changes,
        )
    if in_list and capacity is not None:
        raise UnsupportedSharding(
            "`moe.capacity_factor` needs experts called as experts(hidden_states, index, "
            "weights), not a list of modules",
            where="moe.capacity_factor",
            got=f"capacity_factor={capacity}, {name}: {type(module).__name__}",
            changes={"moe.capacity_factor": None},
        )
    if tp is not None and not in_decoder and not is_list(module):
        raise UnsupportedSharding(
            "experts under tensor parallelism need a Hugging Face model with a list of decoder layers",
            where="parallel.tp_x",
            got=name,
            changes={"parallel.tp_x": 1, "parallel.tp_y": 1},
        )
    return True


def _attach_gradients_to_block(block: nn.Module, experts: nn.Module) -> None:
    """Attach zero gradients of all experts to the output of their block, because some experts may get no tokens."""

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return attach_zero_gradients(inner(*args, **kwargs), experts.parameters())

    wrap(block, forward)


class _Forward:
    """Replacement forward of one module of experts; with ep > 1 or a capacity, it dispatches the tokens."""

    def __init__(self, module: nn.Module, name: str, state: ExpertState) -> None:
        self.module, self.inner, self.name, self.state = module, module.forward, name, state
        self.has_batch_dim = False
        self.has_child_parameters = any(True for child in module.children() for _ in child.parameters())

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of the expert results, in the shape of `hidden`; rows not computed here are zero.

        `hidden` has shape [N, D], or [B, S, D] in some models; `index` and `weights` have shape [N, k].
        """
        shape, rows = hidden.shape, index.shape[0]
        self.has_batch_dim = hidden.dim() == 3
        if self.has_batch_dim:
            hidden = hidden.reshape(-1, shape[-1])
        tokens = self.state.tokens
        selected = tokens.token_rows(rows, hidden.device)
        real = tokens.select_real(selected, rows)
        if selected is not None:
            hidden, index, weights = hidden[selected], index[selected], weights[selected]
        if self.state.group is None and self.state.options.capacity_factor is None:
            if is_first_forward():
                load = count_rows(index, self.module.num_experts, real)
                self.state.layers[self.name].add(load, load.sum())
            out = self._work(hidden, index, weights)
        else:
            out = self._dispatch_and_combine(hidden, index, weights, real)
        out = out if selected is None else scatter_rows(out, selected, rows)
        return out.reshape(shape) if self.has_batch_dim else out

    def _dispatch_and_combine(self, hidden: Tensor, index: Tensor, weights: Tensor, real: Tensor | None) -> Tensor:
        group, factor = self.state.group, self.state.options.capacity_factor
        num_experts: int = self.module.num_experts
        capacity = None if factor is None else Capacity.from_factor(factor, index, num_experts, real)
        padding = self.state.tokens.running.context.padding
        # Padding uses no slots of a capacity, and is not computed if its results are unused.
        computed = real if capacity is not None or (padding and padding.unread) else None
        is_counted = real is not None and is_first_forward()
        load = count_rows(index, num_experts, real) if is_counted else None

        def work(rows: Tensor, local_expert: Tensor) -> Tensor:
            ones = weights.new_ones(len(rows), 1)
            # During its forward, the module sees the number of local experts.
            self.module.num_experts = num_experts // (1 if group is None else group.size())
            try:
                return self._work(rows, local_expert.unsqueeze(1), ones)
            finally:
                self.module.num_experts = num_experts

        def local_weights() -> list[Tensor]:
            tp = self.state.tokens.tp
            return [to_local(p, tp and tp.gradients) for p in self.module.parameters()]

        layer, expert_work = self.state.layers[self.name], ExpertWork(work, local_weights)
        chunks = 1 if capacity is not None else self.state.chunks
        shared = num_experts, group, capacity, layer, expert_work, computed, load, chunks
        results = dispatch(hidden, index, *shared)
        results = results.view(*index.shape, hidden.shape[1])
        return (results * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)

    def _work(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run the model's expert code on rows of this rank's experts.

        Backward gives gradients to all of these experts and to the router, even without rows.
        """
        if not len(hidden):
            return attach_zero_gradients(hidden, (*self.module.parameters(), weights))
        if self.has_batch_dim:
            out = self.inner(hidden.unsqueeze(0), index, weights).squeeze(0)
        else:
            out = self.inner(hidden, index, weights)
        if self.has_child_parameters:
            out = attach_zero_gradients(out, self.module.parameters())
        return out

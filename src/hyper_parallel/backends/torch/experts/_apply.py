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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from hyper_parallel.backends.torch._handle import Handle
from hyper_parallel.backends.torch.data._gradients import TpGradients, to_local
from hyper_parallel.backends.torch.experts._capacity import CapacityDispatch
from hyper_parallel.backends.torch.experts._dispatch import Dispatch, touch
from hyper_parallel.backends.torch.experts._list import ExpertList, ListBlock, is_list
from hyper_parallel.backends.torch.experts._routing import (
    ExpertState,
    LayerRouting,
    Routing,
    counts_now,
    watch_routers,
)
from hyper_parallel.backends.torch.experts._rows import place
from hyper_parallel.backends.torch.experts._tokens import Tokens
from hyper_parallel.errors import UnsupportedSharding

Forward = Callable[..., Any]


def apply_to_experts(
    model: nn.Module,
    found: Handle,
    mesh: DeviceMesh | None,
    routing: Routing | None,
    decoder: tuple[nn.Module, nn.ModuleList] | None,
) -> None:
    """Put dispatch around every module of experts, and routing statistics around every router.

    Args:
        model: Its parameters already laid out.
        found: Its handle; the state of experts is added when the model has any.
        mesh: Mesh of experts; None when ep is 1.
        routing: Choices about routing.
        decoder: The decoder of a Hugging Face model, or None.

    Raises:
        UnsupportedSharding: HP205 for experts that are not called with tokens, indices and weights, or in a module
            whose activations every tensor-parallel rank holds.
    """
    every = tuple(name for name, style in found.styles.items() if style == "experts")
    if not every:
        return
    here = {name for name, _ in model.named_modules()}  # not those of other pipeline stages
    names = tuple(name for name in every if name in here)
    group = mesh["ep"].get_group() if mesh is not None else None
    state = ExpertState(names, every, routing or Routing(), group)
    plain = state.group is None and found.tp is None and state.options.capacity_factor is None
    tokens = Tokens(found.tp, found.context)
    for name in names:
        module = model.get_submodule(name)
        if isinstance(module, ExpertList) or is_list(module):
            _apply_to_list(model, name, found, state, decoder is not None)
            continue
        signature = inspect.signature(type(module).forward)
        if len(signature.parameters) != 4 or not hasattr(module, "num_experts"):
            if plain:
                continue
            raise UnsupportedSharding(
                "these experts are not called as experts(hidden_states, index, weights)",
                where=name,
                got=f"{type(module).__name__}{signature}",
                hint="parallel.ep=1 parallel.tp=1",
            )
        if found.tp is not None and decoder is None:
            raise _needs_decoder(name)
        for part in module.modules():
            if part._parameters and (state.group is not None or found.tp is not None):
                _show_local(part, found.gradients if state.group is None else None)
        state.layers[name] = LayerRouting()
        module.forward = _Forward(module, name, state, tokens)
    found.experts = state
    watch_routers(model, state, tokens)


def shard_experts(
    model: nn.Module, found: Handle, mesh: DeviceMesh, policy: MixedPrecisionPolicy
) -> None:
    """FSDP around every module of experts, over the ranks that hold the same ones.

    Args:
        model: The model.
        found: Its handle; the modules are added to those that FSDP manages.
        mesh: Mesh of experts.
        policy: Number formats. Inputs keep theirs: a router may weigh in a wider format than the experts work in.
    """
    assert found.experts is not None
    strategy = found.plan.strategy
    over = mesh[("dp_replicate", "edp") if strategy.dp_replicate > 1 else ("edp",)]
    for name in found.experts.modules:
        module = model.get_submodule(name)
        cut = {
            id(p): next((d for d, axes in enumerate(found.layouts[n].axes) if "edp" in axes), 0)
            for n, p in model.named_parameters()
            if n.startswith(f"{name}.")
        }
        fully_shard(
            module,
            mesh=over,
            mp_policy=replace(policy, cast_forward_inputs=False),
            reshard_after_forward=strategy.frees_gathered,
            shard_placement_fn=lambda param, cut=cut: Shard(cut[id(param)]),
        )
        found.fsdp.append(module)


def _apply_to_list(
    model: nn.Module, name: str, found: Handle, state: ExpertState, in_decoder: bool
) -> None:
    """Experts as separate modules that their block calls one by one."""
    if state.options.capacity_factor is not None:
        raise UnsupportedSharding(
            "a capacity needs experts that are called as experts(hidden_states, index, weights), not a list of modules",
            where=name,
            got=f"capacity_factor={state.options.capacity_factor}",
            hint="moe.capacity_factor=null",
        )
    experts = model.get_submodule(name)
    if not isinstance(experts, ExpertList):
        _wrap_list(model, name, found)
        return
    if found.tp is not None and not in_decoder:
        raise _needs_decoder(name)
    assert state.group is not None
    block = model.get_submodule(name.rpartition(".")[0])
    state.layers[name] = LayerRouting()
    block.forward = ListBlock(block, experts, name, state.group, state.layers[name])


def _wrap_list(model: nn.Module, name: str, found: Handle) -> None:
    """All experts are on this rank: one without tokens still has a gradient."""
    experts = model.get_submodule(name)
    for part in experts.modules():
        if part._parameters and found.tp is not None:
            _show_local(part, found.gradients)
    block = model.get_submodule(name.rpartition(".")[0])
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        params = [p for p in experts.parameters() if p.requires_grad]
        if isinstance(out, tuple):
            return touch(out[0], params), *out[1:]
        return touch(out, params)

    block.forward = forward


def _needs_decoder(name: str) -> UnsupportedSharding:
    return UnsupportedSharding(
        "experts under tensor parallelism need a Hugging Face model with a list of decoder layers",
        where=name,
        hint="parallel.tp=1",
    )


class _Forward:
    """The forward of one module of experts."""

    def __init__(self, module: nn.Module, name: str, state: ExpertState, tokens: Tokens) -> None:
        self.module = module
        self.inner = module.forward
        self.state = state
        self.tokens = tokens
        self.name = name
        self.is_list = any(True for child in module.children() for _ in child.parameters())

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
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
        capacity = self._capacity(index, num_experts)
        plan: Dispatch | CapacityDispatch
        if capacity is None:
            plan = Dispatch.plan(index, num_experts, group)
        else:
            plan = CapacityDispatch.plan(index, num_experts, group, capacity)
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

    def _capacity(self, index: Tensor, num_experts: int) -> int | None:
        factor = self.state.options.capacity_factor
        return None if factor is None else math.ceil(factor * index.numel() / num_experts)

    def _touched(self, out: Tensor, *others: Tensor) -> Tensor:
        return touch(out, [p for p in (*self.module.parameters(), *others) if p.requires_grad])


def _show_local(module: nn.Module, owner: TpGradients | None) -> None:
    """Let the forward of a module see local tensors in place of its own parameters."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with local_parameters(module, owner):
            return inner(*args, **kwargs)

    module.forward = forward


@contextmanager
def local_parameters(module: nn.Module, owner: TpGradients | None) -> Iterator[None]:
    """Show a module local tensors in place of its own parameters."""
    kept = module._parameters
    shown = {n: p if p is None else to_local(p, owner) for n, p in kept.items()}
    module.__dict__["_parameters"] = shown
    try:
        yield
    finally:
        module.__dict__["_parameters"] = kept


@contextmanager
def _holding(module: nn.Module, num_experts: int) -> Iterator[None]:
    """Tell a module the number of experts it holds here."""
    kept = module.num_experts
    module.num_experts = num_experts
    try:
        yield
    finally:
        module.num_experts = kept

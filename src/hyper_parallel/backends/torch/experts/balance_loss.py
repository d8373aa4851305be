"""The auxiliary load-balancing loss of experts, over all ranks and all pipeline stages.

The auxiliary loss is the one Hugging Face models compute on one device (Switch Transformer, Fedus et al. 2021,
equations 4 to 6, over all layers at once):

    aux = E * sum_e f_e P_e
    f_e   number of tokens routed to expert e, over the tokens of all layers without padding, divided by n
    P_e   sum of the probabilities of expert e over the same tokens, divided by n
    n     number of (layer, token) pairs

This loss is not a sum over tokens, so f, P and n are summed over all ranks before backward. f has no gradient. The
gradient of P is a sum over tokens, so each rank's share of it is exact and needs no communication in backward.

The weight of a microbatch is its weight in the cross entropy: valid targets over the divisor of the loss, summed over
ranks. The weights of the microbatches of a step add up to 1.

A pipeline stage has some of the layers, so the routing counts are sent along with the activations: 2 E + 1 numbers per
microbatch, to which every stage adds. The last stage sums the counts over its ranks. It computes the loss and its E
derivatives by the probabilities of the experts, and sends these derivatives back along with the gradients. Backward of
a stage has two roots: its output, and the sums of its probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.experts.router_loss import (
    FLAG,
    RouterLoss,
    expert_logits,
    load_balance,
    router_loss_facts,
)
from hyper_parallel.backends.torch.experts.routing import (
    Routing,
    count_rows,
    is_first_forward,
)
from hyper_parallel.backends.torch.token_rows import Tokens
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose, Strategy


class BalanceLoss:
    """Auxiliary loss of this rank's layers; `groups` together span the ranks of one pipeline stage."""

    def __init__(
        self,
        facts: RouterLoss,
        coefficient: float,
        strategy: Strategy,
        groups: list[dist.ProcessGroup],
        world_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._facts, self._groups, self._world, self._device = facts, groups, world_group, device
        self._weight = coefficient * facts.scale
        self._staged, self._tp_degree = strategy.pp > 1, strategy.tp
        # Number of ranks whose losses are summed into the loss of the step.
        self._data_ranks = strategy.dp * strategy.cp
        self._tokens = Tokens()
        # Running pass: router logits per layer, and the weight of this rank's share of the step's cross entropy.
        self._logits: list[Tensor] = []
        self._share: Tensor | float = 0.0
        # Completed microbatches of the step, over all ranks: weighted sum of losses, and sum of weights.
        self._sums: Tensor | None = None

    @classmethod
    def from_facts(
        cls,
        facts: RouterLoss,
        routing: Routing,
        strategy: Strategy,
        mesh: DeviceMesh | None,
        world_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> BalanceLoss:
        """Return the auxiliary loss of a model on this rank, from the result of `checked_loss`."""
        configured = routing.aux_loss_coef
        coefficient = facts.coefficient if configured is None else configured
        groups = [] if world_group is None else [world_group]
        if strategy.pp > 1 and mesh is not None:
            names = [n for n in mesh.mesh_dim_names or () if n != "pp" and mesh[n].size() > 1]
            groups = [mesh.get_group(n) for n in names]
        return cls(facts, coefficient, strategy, groups, world_group, device)

    def watch(self, model: nn.Module, tokens: Tokens) -> None:
        """Record this rank's router logits in every forward pass with gradients; `tokens` selects the counted rows."""
        self._tokens = tokens
        modules = dict(model.named_modules())
        for name, output in self._facts.routers:
            if name in modules:
                self._record(modules[name], output)
        model.register_forward_pre_hook(self._begin)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._logits.clear()
        self._share = 0.0

    def _record(self, router: nn.Module, output: int) -> None:
        def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if is_first_forward():
                self._logits.append(result[output] if isinstance(result, tuple) else result)
            return result

        wrap(router, forward)

    def messages(self) -> tuple[Tensor, Tensor]:
        """Return two uninitialised buffers to receive from other stages: routing counts [2 E + 1], and derivatives [E].

        Counts are sent along with activations, derivatives along with gradients.
        """
        width = self._facts.num_experts
        new = torch.empty(2 * width + 1, dtype=torch.float64, device=self._device)
        return new, new.new_empty(width)

    def add(self, previous: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Add the routing counts of this stage's layers in the running pass to those of the previous stages.

        Args:
            previous: Counts [2 E + 1] of the previous stages; None for the first stage.

        Returns:
            Sums [E] of the probabilities of this stage, on which backward is called; None without routed tokens. The
            second result is the counts [2 E + 1] of all stages so far.
        """
        if not self._logits:
            return None, self.messages()[0].zero_() if previous is None else previous
        local, total = self._count_routed()
        return local, total if previous is None else previous + total

    def close(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's share of the weighted loss, and the loss's derivatives [E] by the summed probabilities.

        `total` has the counts [2 E + 1] of all stages. In a pipeline, only the last stage calls this method.
        """
        share = total.new_zeros(1) + self._share / self._tp_degree
        sums = torch.cat((total, share))
        for group in self._groups:
            all_reduce(sums, group, Purpose.BALANCE_LOSS)
        num_experts = self._facts.num_experts
        load, probability, number, weight = sums.split((num_experts, num_experts, 1, 1))
        number, weight = number.clamp(min=1), weight.squeeze(0)
        value = load_balance(load, probability, number).squeeze(0)
        sums = torch.stack((weight * value * self._facts.scale, weight))
        self._sums = sums if self._sums is None else self._sums + sums
        slope = num_experts * load / number.square()
        if self._tokens.tp is None:
            # Each tensor-parallel rank has counted all tokens and computes the complete gradient.
            slope = slope * self._tp_degree
        weight = self._weight * weight
        return weight * value / self._data_ranks, weight * slope

    def record_share(self, loss: Tensor, share: Tensor | float) -> Tensor:
        """Record this rank's share of the step's cross entropy for `close`; return `loss` unchanged."""
        self._share = share
        return loss

    def add_to_loss(self, loss: Tensor, share: Tensor | float) -> Tensor:
        """Return `loss` plus this rank's part of the auxiliary loss; its gradient covers this rank's tokens.

        Args:
            loss: Loss of a microbatch on this rank.
            share: This rank's share of the step's cross entropy: valid targets over the divisor of the loss.
        """
        self._share = share
        local, total = self.add(None)
        if local is None:
            return loss
        value, slope = self.close(total)
        part = (slope.to(local.dtype) * local).sum()
        part = part + (value - part.double()).to(part.dtype).detach()
        return loss + part.to(loss.dtype)

    @property
    def loss_hook(self) -> Any:
        """Function to call with a microbatch's loss and share: `record_share` in a pipeline, else `add_to_loss`."""
        return self.record_share if self._staged else self.add_to_loss

    def _count_routed(self) -> tuple[Tensor, Tensor]:
        """Count the routed rows of this rank's layers in the running pass, and release their logits.

        Returns:
            Sums of probabilities [E] with their autograd graph. The second result is the counts [2 E + 1] in float64,
            without a graph: rows of each expert, the same sums, and the number of (layer, token) pairs.
        """
        all_logits, num_experts = self._logits.copy(), self._facts.num_experts
        self._logits.clear()
        like = all_logits[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        counts = like.new_zeros(num_experts, dtype=torch.float64)
        local, number = like.new_zeros(num_experts, dtype=wide), counts.new_zeros(1)
        for logits in all_logits:
            layer = expert_logits(logits, self._facts.product_keys)
            selected, real = self._tokens.own_tokens(len(layer), layer.device)
            layer = layer if selected is None else layer[selected]
            probabilities = torch.softmax(layer, dim=-1)
            chosen = torch.topk(probabilities, self._facts.top_k, dim=-1).indices
            counts += count_rows(chosen, num_experts, real)
            probabilities = probabilities.to(wide)
            if real is not None:
                probabilities = probabilities * real.unsqueeze(-1)
            local = local + probabilities.sum(0)
            number = number + (len(layer) if real is None else real.sum())
        return local, torch.cat((counts, local.detach().double(), number))

    def mean(self) -> Tensor | None:
        """Return the auxiliary loss of the step without its coefficient, and reset it.

        It is the mean over microbatches, by their weight in the cross entropy. If nothing was routed, the result is
        None, or NaN with pipeline stages.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            if not self._staged:
                return None
            sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._staged and self._world is not None:  # nonzero on the last stage only
            all_reduce(sums, self._world, Purpose.BALANCE_LOSS)
        return sums[0] / sums[1]


def disable_model_router_loss(model: nn.Module, routing: Routing, alone: bool, replaced: bool) -> None:
    """Disable the model's own router loss, which covers the tokens of one rank only.

    A call that requests router logits then raises HP205, whose message depends on `replaced`: whether a `BalanceLoss`
    replaces the loss. On one rank (`alone`), an unknown loss stays enabled if `routing` sets no coefficient.
    """
    facts = router_loss_facts(model)
    is_unknown = facts is not None and not facts.known and routing.aux_loss_coef is None
    if facts is None or (is_unknown and alone):
        return

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get(FLAG):
            raise UnsupportedSharding(
                "router logits are not returned, because a rank has only those of its own tokens"
                + ("; `loss` already includes the auxiliary loss of all ranks" if replaced else ""),
                where=type(module).__name__,
                hint=f"call the model without `{FLAG}`",
            )
        return args, {**kwargs, FLAG: False}

    model.register_forward_pre_hook(before, with_kwargs=True)

"""The auxiliary load-balancing loss of experts, over all ranks and all pipeline stages.

The auxiliary loss is the one Hugging Face models compute on one device (Switch Transformer, Fedus et al. 2021,
equations 4 to 6, over all layers at once): with f_e the rows of expert e and P_e the sum of its probabilities, both
over the real tokens of all layers, divided by the number n of (layer, token) pairs,

    aux = E * sum_e f_e P_e

It is not a sum over tokens, so f and n are added up over all ranks before backward. f has no gradient; the gradient of
P is a sum over tokens, hence each rank's own share of it is exact and needs no communication in backward.

A microbatch weighs as much as in the cross entropy: valid targets over the divisor of the loss, added up over ranks.
The microbatches of a step, however many and however long, then have the weight 1 together.

A pipeline stage has some of the layers. So what was routed travels with the activations, 2 E + 1 numbers per
microbatch, and every stage adds its own. The last stage adds them up over the data-parallel ranks, which gives the
loss and its derivative by the probabilities of each expert; these E numbers travel back with the gradients. Backward of
a stage then has two roots: its output, and the sums of its probabilities.
"""

from __future__ import annotations

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
    balanced_loss,
    count_rows,
    counts_now,
)
from hyper_parallel.backends.torch.token_rows import Tokens
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose, Strategy


class BalanceLoss:
    """The auxiliary loss of this rank's layers.

    Args:
        facts: The loss of the model on one device.
        coefficient: Its weight.
        strategy: Degrees of the layout.
        groups: Groups whose ranks, one group after another, are all ranks of one pipeline stage.
        world_group: All ranks; None on one.
        device: Where the ranks compute.
    """

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
        self._staged, self._copies = strategy.pp > 1, strategy.tp
        # Ranks whose losses are added up for the loss of the step.
        self._reporting = strategy.dp * strategy.cp
        self._tokens = Tokens()
        # Of the running pass: router logits per layer; this rank's share of the step's cross entropy, as a weight.
        self._logits: list[Tensor] = []
        self._share: Tensor | float = 0.0
        # Of the microbatches of the step so far, over all ranks: weighted sum of their losses, and sum of weights.
        self._sums: Tensor | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        routing: Routing,
        strategy: Strategy,
        mesh: DeviceMesh | None,
        world_group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> BalanceLoss | None:
        """Return the loss of a whole model, before it is cut; None when a step adds none.

        Raises:
            UnsupportedSharding: HP205 for a loss that the model adds and that is not known.
        """
        facts = balanced_loss(model, routing, strategy.world_size == 1)
        if facts is None:
            return None
        wanted = routing.aux_loss_coef
        coefficient = facts.coefficient if wanted is None else wanted
        groups = [] if world_group is None else [world_group]
        if strategy.pp > 1 and mesh is not None:
            names = [n for n in mesh.mesh_dim_names or () if n != "pp" and mesh[n].size() > 1]
            groups = [mesh.get_group(n) for n in names]
        return cls(facts, coefficient, strategy, groups, world_group, device)

    def watch(self, model: nn.Module, tokens: Tokens) -> None:
        """Record the router logits of the modules that are on this rank."""
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
        inner = router.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if counts_now():
                self._logits.append(result[output] if isinstance(result, tuple) else result)
            return result

        router.forward = forward

    def messages(self) -> tuple[Tensor, Tensor]:
        """Memory for what comes with activations, [2 E + 1], and for what comes with gradients, [E]."""
        width = self._facts.num_experts
        new = torch.empty(2 * width + 1, dtype=torch.float64, device=self._device)
        return new, new.new_empty(width)

    def add(self, before: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Add the layers that just ran to [2 E + 1] of the stages before; None: there are none.

        Returns the sums of their probabilities, a root of backward (None: they routed nothing), and [2 E + 1].
        """
        if not self._logits:
            return None, self.messages()[0].zero_() if before is None else before
        own, total = self._routed()
        return own, total if before is None else before + total

    def close(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Behind the last layer: this rank's share of the weighted loss, and [E] its derivative for all stages."""
        share = total.new_zeros(1) + self._share / self._copies
        sums = torch.cat((total, share))
        for group in self._groups:
            all_reduce(sums, group, Purpose.BALANCE_LOSS)
        num_experts = self._facts.num_experts
        load, probability, number, weight = sums.split((num_experts, num_experts, 1, 1))
        number = number.clamp(min=1)
        value = load_balance(load, probability, number)
        weight = weight.squeeze(0)
        value = value.squeeze(0)
        sums = torch.stack((weight * value * self._facts.scale, weight))
        self._sums = sums if self._sums is None else self._sums + sums
        slope = num_experts * load / number.square()
        if self._tokens.tp is None:
            # Each tensor-parallel rank has counted all tokens, and has the whole gradient.
            slope = slope * self._copies
        weight = self._weight * weight
        return weight * value / self._reporting, weight * slope

    def take_share(self, loss: Tensor, share: Tensor | float) -> Tensor:
        """Return `loss`, whose microbatch has this share of the step on this rank; a stage adds its own in `close`."""
        self._share = share
        return loss

    def add_to(self, loss: Tensor, share: Tensor | float) -> Tensor:
        """Return `loss` of a whole model and this rank's part; its gradient is that of the tokens of this rank.

        Args:
            loss: Loss of a microbatch on this rank.
            share: This rank's share of the step's cross entropy: valid targets over the divisor of the loss.
        """
        self._share = share
        own, total = self.add(None)
        if own is None:
            return loss
        value, slope = self.close(total)
        part = (slope.to(own.dtype) * own).sum()
        part = part + (value - part.double()).to(part.dtype).detach()
        return loss + part.to(loss.dtype)

    @property
    def adds(self) -> Any:
        """What the loss function does with the loss of a microbatch and its share."""
        return self.take_share if self._staged else self.add_to

    def _routed(self) -> tuple[Tensor, Tensor]:
        """Return what the layers of the running pass routed on this rank; their logits are let go.

        Returns:
            [E] sums of probabilities, with their graph, and [2 E + 1] float64 without: rows of each expert, the same
            sums, and how many (layer, token) pairs there were.
        """
        every, num_experts = self._logits.copy(), self._facts.num_experts
        self._logits.clear()
        like = every[0]
        wide = torch.promote_types(like.dtype, torch.float32)
        counts = like.new_zeros(num_experts, dtype=torch.float64)
        own, number = like.new_zeros(num_experts, dtype=wide), counts.new_zeros(1)
        for logits in every:
            layer = expert_logits(logits, self._facts.product_keys)
            kept, real = self._tokens.own(len(layer), layer.device)
            layer = layer if kept is None else layer[kept]
            probabilities = torch.softmax(layer, dim=-1)
            chosen = torch.topk(probabilities, self._facts.top_k, dim=-1).indices
            counts += count_rows(chosen, num_experts, real)
            probabilities = probabilities.to(wide)
            if real is not None:
                probabilities = probabilities * real.unsqueeze(-1)
            own = own + probabilities.sum(0)
            number = number + (len(layer) if real is None else real.sum())
        return own, torch.cat((counts, own.detach().double(), number))

    def mean(self) -> Tensor | None:
        """Return the loss before weighting, mean over the microbatches of the step, which ends; None: none had one."""
        sums, self._sums = self._sums, None
        if sums is None:
            if not self._staged:
                return None
            sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        if self._staged and self._world is not None:  # only the last stage knows it
            all_reduce(sums, self._world, Purpose.BALANCE_LOSS)
        return sums[0] / sums[1]


def forbid_own_loss(model: nn.Module, routing: Routing, strategy: Strategy) -> None:
    """Keep a model from adding its own router loss, which is that of one rank's tokens, whether or not ours is added.

    Its router logits are not returned either. A loss that is not known stays on one rank.
    """
    facts = router_loss_facts(model)
    own = facts is not None and not facts.known and routing.aux_loss_coef is None
    if facts is None or (own and strategy.world_size == 1):
        return

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get(FLAG):
            raise UnsupportedSharding(
                "router logits are not returned; `loss` already has the auxiliary loss of all ranks",
                where=type(module).__name__,
                hint="moe.aux_loss_coef=0.001",
            )
        return args, {**kwargs, FLAG: False}

    model.register_forward_pre_hook(before, with_kwargs=True)

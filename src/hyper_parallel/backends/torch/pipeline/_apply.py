"""Run the stages of one pipeline rank in the order of a schedule.

The schedule is made and verified by `mpmd`, so this file only does what it says: a forward, a backward or one half of
it, a send, a receive. Shapes of messages follow from the batch: [B, S, D] activations, under tensor parallelism this
rank's part of them. Microbatches add up their gradients without communication; what data and tensor
parallelism add over ranks is added once, after the last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hyper_parallel.backends.torch._handle import Handle, local
from hyper_parallel.backends.torch._purpose import exchange
from hyper_parallel.backends.torch._resolve import decoder_of
from hyper_parallel.backends.torch.experts._balance_loss import StageBalance
from hyper_parallel.backends.torch.pipeline._run import LossOf, Microbatch, PipelineRun, Span
from hyper_parallel.backends.torch.pipeline._stages import Stages, cut_stages
from hyper_parallel.cost import check_stage_layers, stage_layers
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Purpose, Schedule
from hyper_parallel.model import spec_from_config
from hyper_parallel.mpmd import check_pipeline, forward_schedule, one_by_one, step_schedule


def cut_model(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> Stages:
    """Cut a model at the layers that the plan says, or by cost, and check that the plan's steps can run.

    Raises:
        UnsupportedSharding: HP205, NotDivisible: HP203, BatchMismatch: HP308 as in `mpmd.check_pipeline`.
    """
    strategy, workload = plan.strategy, plan.workload
    decoder = decoder_of(model)
    count = len(decoder[1]) if decoder else strategy.stages
    check_pipeline(strategy, count, workload.accumulation_steps or 1)
    check_stage_layers(strategy, count)
    layers = strategy.stage_layers
    if decoder and not layers:
        spec = spec_from_config(decoder[0].config.to_dict(), name=type(model).__name__)
        layers = stage_layers(spec, strategy, workload.seq_len)
    dtype = getattr(torch, workload.compute_dtype)
    return cut_stages(model, strategy, layers, mesh.get_local_rank("pp"), dtype)


class Pipeline:
    """The pipeline rank of one model.

    Args:
        stages: What this rank holds.
        found: What `parallelize` knows of the model.
        group: Ranks of this pipeline, one per pipeline rank.
        balance: The auxiliary loss of experts; None without.
    """

    def __init__(
        self,
        stages: Stages,
        found: Handle,
        group: dist.ProcessGroup,
        balance: StageBalance | None = None,
    ) -> None:
        strategy = found.plan.strategy
        self.stages = stages
        self.group = group
        self.balance = balance
        self.rank = group.rank()
        self.last = strategy.stages - 1
        self.rank_of = {s: r for r in range(strategy.pp) for s in strategy.stages_of(r)}
        self._found = found
        self._schedules: dict[tuple[bool, int], Schedule] = {}
        self._shared_summed = False
        self._root = 0

    def holders(self, name: str) -> int:
        """Pipeline ranks that hold a parameter."""
        return len(self.stages.holders[name])

    def guard(self, model: nn.Module) -> None:
        """Refuse a call of the model from outside: one rank cannot run it alone."""
        passing = self.stages.passing
        self._root = id(model)

        def before(module: nn.Module, args: Any) -> None:
            if passing.stage < 0:
                raise UnsupportedSharding(
                    "a model cut into pipeline stages cannot be called on its own",
                    where=type(module).__name__,
                    allowed="forward_backward(model, microbatches, num_tokens), forward_loss",
                )

        model.register_forward_pre_hook(before)

    def step(
        self, model: nn.Module, microbatches: Sequence[Microbatch], loss_of: LossOf, span: Span
    ) -> Tensor:
        """Forward and backward of all microbatches; the loss on the rank of the last stage, 0 elsewhere."""
        gradients = self._found.gradients
        if gradients is not None:
            gradients.hold()
        if self._shared_summed:
            # What is left of an earlier step is already the sum of both ranks: each goes on with half of it.
            for grad in self._shared_gradients(model):
                grad.div_(2.0)
        total = self._run(model, microbatches, loss_of, span, train=True)
        with span("gradient reduction", "communication"):
            self._finish_fsdp()
            if gradients is not None:
                gradients.release()
            self._sum_shared(model)
        return total

    @torch.no_grad()
    def loss(self, model: nn.Module, microbatches: Sequence[Microbatch], loss_of: LossOf) -> Tensor:
        """Loss of all microbatches without gradients; 0 on ranks without the last stage."""
        return self._run(model, microbatches, loss_of, lambda *_: nullcontext(), train=False)

    def schedule(self, microbatches: int, train: bool = True) -> Schedule:
        """What all ranks do for a number of microbatches."""
        key = (train, microbatches)
        if key not in self._schedules:
            make = step_schedule if train else forward_schedule
            self._schedules[key] = one_by_one(make(self._found.plan.strategy, microbatches))
        return self._schedules[key]

    def _run(
        self,
        model: nn.Module,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        span: Span,
        train: bool,
    ) -> Tensor:
        run = PipelineRun(self, model, microbatches, loss_of, span)
        for action in self.schedule(len(microbatches), train).ranks[self.rank]:
            for leaf in action.leaves:
                run.do(leaf)
        return run.finish()

    def message(self, batch: Microbatch) -> Tensor:
        """Room for the activations of a microbatch, or their gradient."""
        stages, tp, tokens = self.stages, self._found.tp, self._tokens(batch)
        shape = (*tokens, stages.width) if tp is None else tp.part(tokens, stages.width)
        return torch.empty(shape, dtype=stages.dtype, device=self._found.device)

    def enter(self, batch: Microbatch) -> Callable[[], None]:
        """What to do where a later stage begins: what the first layer of the model does for tensor parallelism."""

        def tell() -> None:
            if self._found.tp is not None:
                self._found.tp.batch = self._tokens(batch)

        return tell

    def _tokens(self, batch: Microbatch) -> tuple[int, int]:
        """Sequences and tokens of each that this rank's layers see."""
        sequences, length = batch["input_ids"].shape
        context = self._found.context
        return sequences, length if context is None else context.cut(length).local

    def splits(self, model: nn.Module) -> bool:
        """Whether a backward runs in halves.

        What backward makes or gathers again would be made twice, and a compiled layer makes both kinds of gradients
        in one go. The first half then makes both, and nothing is left for the second.
        """
        s = self._found.plan.strategy
        again = s.recompute == "full" or (s.tp > 1 and s.gathered_inputs == "re-gather")
        again |= s.tp_y > 1 and "weight" in (s.attention_shape, s.mlp_shape)
        return not again and not any(m._compiled_call_impl is not None for m in model.modules())

    def hold_fsdp(self) -> None:
        """Let FSDP keep gradients until the end of the step, and parameters gathered as long as the plan says."""
        reshard = self._found.plan.strategy.frees_gathered
        before: dict[int, nn.Module] = {}
        for layers in self.stages.layers.values():
            before |= {id(layer): layers[i - 1] for i, layer in enumerate(layers) if i}
        for module in self._found.fsdp:
            assert isinstance(module, FSDPModule)
            module.set_requires_gradient_sync(False, recurse=False)
            if id(module) == self._root or not reshard:
                module.set_reshard_after_backward(False, recurse=False)
            # FSDP expects the reverse of its last forward; with several microbatches under way that is not what comes.
            module.set_modules_to_backward_prefetch([before.get(id(module), module)])

    def reduce(self, stage: int) -> None:
        """Add the gradients of a stage's layers over the data-parallel ranks."""
        for layer in reversed(self.stages.layers[stage]):
            for module in layer.modules():
                if isinstance(module, FSDPModule):
                    _reduce(module)

    def _finish_fsdp(self) -> None:
        """Reduce what the schedule did not, and the ends of the model; then let FSDP end its backward pass."""
        modules = [m for m in reversed(self._found.fsdp) if isinstance(m, FSDPModule)]
        for module in modules:
            _reduce(module)
        for module in modules:
            state = fully_shard.state(module)
            if state._is_root:
                state._root_post_backward_final_callback()
        self.hold_fsdp()

    def _shared_gradients(self, model: nn.Module) -> list[Tensor]:
        """Local gradients of the weights that two stages share."""
        params = [model.get_parameter(name) for name in self.stages.shared]
        return [local(p.grad) for p in params if p.grad is not None]

    def _sum_shared(self, model: nn.Module) -> None:
        """Add the gradients of weights that two stages share; a + b is b + a, so both ranks have the same sum."""
        grads = self._shared_gradients(model)
        if not grads:
            return
        (peer,) = {r for n in self.stages.shared for r in self.stages.holders[n]} - {self.rank}
        mine = torch.cat([g.reshape(-1) for g in grads])
        other = torch.empty_like(mine)
        if mine.numel():
            pair = [
                dist.P2POp(dist.isend, mine, group=self.group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self.group, group_peer=peer),
            ]
            for work in exchange(pair, Purpose.SHARED_WEIGHT):
                work.wait()
        for grad, part in zip(grads, other.split([g.numel() for g in grads]), strict=True):
            grad.add_(part.view_as(grad))
        self._shared_summed = True


def _reduce(module: FSDPModule) -> None:
    """FSDP's own reduction, now instead of in a backward pass; frees the gathered parameters."""
    module.set_requires_gradient_sync(True, recurse=False)
    module.set_reshard_after_backward(True, recurse=False)
    state = fully_shard.state(module)
    # torch 2.11 has at most one group in a module
    groups = (
        state._fsdp_param_groups
        if hasattr(state, "_fsdp_param_groups")
        else filter(None, [state._fsdp_param_group])
    )
    for group in groups:
        group.post_backward()

"""parallelize: a plan onto a model, in one call."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Sequence

from torch import nn

from hyper_parallel.backends.torch import Ranks, Routing, apply_plan
from hyper_parallel.ir import Plan
from hyper_parallel.runtime._save_method import attach_save_pretrained
from hyper_parallel.runtime._world import World


def parallelize(
    model: nn.Module,
    plan: Plan,
    world: World | None = None,
    ranks: Sequence[int] | None = None,
    *,
    routing: Routing | None = None,
    average: bool = False,
    one_order: bool = True,
) -> nn.Module:
    """Apply a plan to an unmodified model, in place.

    Args:
        model: Any `nn.Module`; Hugging Face models bring their own sharding rules. Parameters are real and equal on
            every rank, or on the meta device.
        plan: The plan.
        world: Ranks to use; None: joins the one the environment describes, until the process ends.
        ranks: Ranks of the world this model lives on; None: all.
        routing: Choices about the routing of experts; None: what the model does by itself.
        average: Gradients of a plain `loss.backward()` are averaged over the shares of the data (`data_share`), as
            `DistributedDataParallel` does, for loops whose loss is a mean over a rank's own data. False: they are added
            up. `forward_backward` gives the same either way.
        one_order: Ranks may leave out submodules in a step, but run them in the order and as often as in the first
            steps. False: order and number of calls may differ between ranks in any step, which costs an exchange
            between hosts for every module that FSDP gathers.

    Returns:
        The same model, same class and parameter names, with its parameters laid out. Its `save_pretrained` writes what
        `hp.save_pretrained` writes.

    Raises:
        DegreesMismatch: HP301 when the plan is for another number of ranks.
        PlanMismatch: HP307 when the plan is for another model.
        NotDivisible: HP203, RuleError: HP204, UnsupportedSharding: HP205 for what cannot be split exactly.
    """
    if world is None:
        world = World.join()
        atexit.register(_end, world)
    strategy = plan.strategy
    mixed = plan.workload.compute_dtype != plan.workload.param_dtype
    placed = Ranks(None, 0, world.device)
    if strategy.world_size > 1 or world.world_size > 1 or mixed:
        mesh = world.mesh(strategy, ranks)
        expert_mesh = world.expert_mesh(strategy, ranks)
        position = mesh.mesh.flatten().tolist().index(world.rank)
        placed = Ranks(mesh, position, world.device, world.group(mesh), expert_mesh)
    apply_plan(model, plan, placed, routing, average=average, one_order=one_order)
    attach_save_pretrained(model)
    return model


def _end(world: World) -> None:
    """Leave the world while Python still runs, and let go of models that nobody holds any more, with their groups.

    A process group ends with the last reference to it, whoever has destroyed it. One that outlives Python may have a
    thread that drops a tensor of its last collective too late: that is the end of the process by SIGABRT.
    """
    world.leave()
    gc.collect()

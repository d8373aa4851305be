"""parallelize: apply a plan to a model in one call."""

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
    sync_replicas: bool = True,
) -> nn.Module:
    """Apply a plan to an unmodified model, in place.

    Args:
        model: Any `nn.Module`; Hugging Face models provide sharding rules. Parameters have equal values on every rank,
            or are on the meta device.
        plan: The plan.
        world: Ranks to use; None: join the world of the environment until the process ends.
        ranks: Ranks of the world that share this model; None: all.
        routing: Options of expert routing; None: the model's own behavior.
        average: Average the gradients of a plain `loss.backward()` over the data shares (`data_share`), as
            `DistributedDataParallel` does, for loops whose loss is a mean over a rank's own data. False: sum them.
            `forward_backward` gives the same result either way.
        one_order: Ranks may skip submodules in a step, but run them in the order and as often as in the first steps.
            False: order and number of calls may differ between ranks in any step, at the cost of one exchange between
            hosts per module that FSDP gathers.
        sync_replicas: False, for replicas that are not sharded: no collectives run, and the caller sums gradients.

    Returns:
        The same model, with the same class and parameter names, its parameters sharded. Its `save_pretrained` writes
        the output of `hp.save_pretrained`.

    Raises:
        DegreesMismatch: HP301 when the plan is for another number of ranks.
        PlanMismatch: HP307 when the plan is for another model.
        NotDivisible: HP203, RuleError: HP204, UnsupportedSharding: HP205 for parameters that cannot be split exactly.
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
    options = {"average": average, "one_order": one_order, "sync_replicas": sync_replicas}
    apply_plan(model, plan, placed, routing, **options)
    attach_save_pretrained(model)
    return model


def _end(world: World) -> None:
    """Leave the world before the interpreter exits, and collect unreachable models with their process groups.

    A process group is freed with the last reference to it, even after it is destroyed. A group that survives the
    interpreter may have a thread that frees a tensor of its last collective too late, which ends the process by
    SIGABRT.
    """
    world.leave()
    gc.collect()

"""Runtime: launch or join ranks, parallelize a model by a plan, and run training steps with offload."""

from hyper_parallel.backends.torch import (
    Routing,
    RoutingStatistics,
    accumulate,
    audit,
    clip_grad_norm_,
    data_share,
    end_step,
    forward_backward,
    forward_loss,
    handle,
    load_pretrained,
    materialize,
    microbatch_sources,
    token_logprobs,
)
from hyper_parallel.backends.torch.memory import CommCounter
from hyper_parallel.runtime._parallelize import StrategyText, parallelize, plan_of
from hyper_parallel.runtime._submodels import (
    parallelize_submodels,
    submodel_strategies,
)
from hyper_parallel.runtime._world import World, launched_rank
from hyper_parallel.runtime.launchers import (
    check_local_start,
    check_rank_count,
    join_srun,
    launch_on_ray,
    launch_words,
    local_capacity,
    ranks_per_node,
    sbatch_script,
    start_capacity,
    torchrun_words,
)
from hyper_parallel.runtime.local_launch import launch
from hyper_parallel.runtime.offloaded_step import (
    agree_on_plan,
    gather_objects,
    host_machine,
    offload,
)
from hyper_parallel.runtime.scratch_folders import scratch_folder
from hyper_parallel.runtime.supervision import Deadlines, HeartbeatWriter, with_restarts

__all__ = [
    "CommCounter",
    "Deadlines",
    "HeartbeatWriter",
    "Routing",
    "RoutingStatistics",
    "StrategyText",
    "World",
    "accumulate",
    "agree_on_plan",
    "audit",
    "check_local_start",
    "check_rank_count",
    "clip_grad_norm_",
    "data_share",
    "end_step",
    "forward_backward",
    "forward_loss",
    "gather_objects",
    "handle",
    "host_machine",
    "join_srun",
    "launch",
    "launch_on_ray",
    "launch_words",
    "launched_rank",
    "load_pretrained",
    "local_capacity",
    "materialize",
    "microbatch_sources",
    "offload",
    "parallelize",
    "parallelize_submodels",
    "plan_of",
    "ranks_per_node",
    "sbatch_script",
    "scratch_folder",
    "start_capacity",
    "submodel_strategies",
    "token_logprobs",
    "torchrun_words",
    "with_restarts",
]

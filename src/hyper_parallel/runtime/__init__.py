"""Runtime: join a world of ranks, start local ranks, apply a Plan to a model."""

from hyper_parallel.backends.torch import (
    CommCounter,
    Handle,
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
    token_logprobs,
)
from hyper_parallel.runtime._heartbeat import Pulse
from hyper_parallel.runtime._launch import launch
from hyper_parallel.runtime._parallelize import parallelize
from hyper_parallel.runtime._plan_of import plan_of
from hyper_parallel.runtime._supervise import Deadlines, with_restarts
from hyper_parallel.runtime._world import World, launched_rank

__all__ = [
    "CommCounter",
    "Deadlines",
    "Handle",
    "Pulse",
    "Routing",
    "RoutingStatistics",
    "World",
    "accumulate",
    "audit",
    "clip_grad_norm_",
    "data_share",
    "end_step",
    "forward_backward",
    "forward_loss",
    "handle",
    "launch",
    "launched_rank",
    "load_pretrained",
    "materialize",
    "parallelize",
    "plan_of",
    "token_logprobs",
    "with_restarts",
]

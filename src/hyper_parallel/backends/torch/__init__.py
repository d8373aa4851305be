"""PyTorch back end: it applies a plan to a model, and runs forward, backward and reductions over ranks.

    _parallelize   applies a plan to a model and attaches a `Handle`, the state of the model on this rank
    _step          runs the forward and backward passes of one optimizer step

    tensor         tensor and sequence parallelism on one or two axes      context    context parallelism
    experts        token dispatch, routing, load balancing                 pipeline   stages and their schedule
    data           FSDP                                                    weights    initial values and files
    memory         recorded and planned steps within a memory budget
    submodels      encoders of multimodal models on separate ranks

A subpackage imports only earlier ones in the order weights, tensor, context, experts, data, pipeline, submodels.
`memory` imports only `weights`. No subpackage imports `Handle`.
"""

from hyper_parallel.backends.torch._flow_checks import check_flow, unsplit_axes
from hyper_parallel.backends.torch._parallelize import apply_plan, audit
from hyper_parallel.backends.torch._step import (
    accumulate,
    clip_grad_norm_,
    count_routing,
    data_share,
    end_step,
    forward_backward,
    forward_loss,
    microbatch_sources,
    token_logprobs,
)
from hyper_parallel.backends.torch.collectives import flights_to, purpose
from hyper_parallel.backends.torch.data.fsdp import FLAT
from hyper_parallel.backends.torch.experts.router_loss import router_loss_facts
from hyper_parallel.backends.torch.experts.routing import (
    Routing,
    RoutingStatistics,
    check_routing,
    routing_statistics,
)
from hyper_parallel.backends.torch.half_batch import check_half_batches
from hyper_parallel.backends.torch.kept_activations import (
    FusedAttention,
    measure_kept,
    measure_rates,
)
from hyper_parallel.backends.torch.model_layouts import read_model, resolve_layouts
from hyper_parallel.backends.torch.parallel_handle import (
    Ranks,
    attach,
    handle,
    overlap_counts,
)
from hyper_parallel.backends.torch.tensor.block_executors import check_token_overlap
from hyper_parallel.backends.torch.weights.initialization import allocate, materialize
from hyper_parallel.backends.torch.weights.pretrained import check_pretrained, load_pretrained
from hyper_parallel.backends.torch.weights.shard_ranges import local

__all__ = [
    "FLAT",
    "FusedAttention",
    "Ranks",
    "Routing",
    "RoutingStatistics",
    "accumulate",
    "allocate",
    "apply_plan",
    "attach",
    "audit",
    "check_flow",
    "check_half_batches",
    "check_pretrained",
    "check_routing",
    "check_token_overlap",
    "clip_grad_norm_",
    "count_routing",
    "data_share",
    "end_step",
    "flights_to",
    "forward_backward",
    "forward_loss",
    "handle",
    "load_pretrained",
    "local",
    "materialize",
    "measure_kept",
    "measure_rates",
    "microbatch_sources",
    "overlap_counts",
    "purpose",
    "read_model",
    "resolve_layouts",
    "router_loss_facts",
    "routing_statistics",
    "token_logprobs",
    "unsplit_axes",
]

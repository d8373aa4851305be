"""The PyTorch back end: plans applied to modules, collectives on local tensors, exact global reductions."""

from hyper_parallel.backends.torch._audit import audit
from hyper_parallel.backends.torch._counter import CommCounter
from hyper_parallel.backends.torch._gradients import accumulate, clip_grad_norm_
from hyper_parallel.backends.torch._loss import cross_entropy_sum, shifted
from hyper_parallel.backends.torch._parallelize import apply_plan
from hyper_parallel.backends.torch._pretrained import load_pretrained
from hyper_parallel.backends.torch._state import Handle, handle
from hyper_parallel.backends.torch._weights import materialize

__all__ = [
    "CommCounter",
    "Handle",
    "accumulate",
    "apply_plan",
    "audit",
    "clip_grad_norm_",
    "cross_entropy_sum",
    "handle",
    "load_pretrained",
    "materialize",
    "shifted",
]

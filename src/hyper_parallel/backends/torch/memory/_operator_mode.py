"""Dispatch mode that passes every operator on plain local tensors to a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel.backends.torch.memory._fake_values import fake_mode

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Function that runs an operator: overload, arguments, keyword arguments."""
_PLAIN = frozenset((Tensor, torch.nn.Parameter, FakeTensor))


class OperatorMode(TorchDispatchMode):
    """Context below autograd that intercepts the operators of forward, backward, FSDP, clipping and the optimizer.

    For a DTensor, it intercepts the operators on the local shard. Views and operators without tensors are included.

    Args:
        handler: Function that runs an operator; operators that it calls are not intercepted again.

    Attributes:
        fake: The `FakeTensorMode` around this context, or None.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self._handler = handler
        self.fake: Any = None

    def __enter__(self) -> Self:
        self.fake = fake_mode()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            if self.fake is not None:
                # A DTensor propagates the shape of its result on fake global tensors, once per shape in a process.
                # That happens here, outside of the handler: a real run allocates nothing for it.
                func(*args, **kwargs)
            return NotImplemented  # next, this method gets the operators on the local shards
        if fake_mode() is not self.fake:  # shape propagation of a DTensor in a step on real tensors
            return func(*args, **kwargs)
        return self._handler(func, args, kwargs)

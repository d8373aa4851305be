"""Changes of a model's forward: recompute activations, compute in float64 throughout, run experts one by one."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hyper_parallel.backends.torch.host_saved_activations import (
    HOST_SAVED,
    host_contexts,
    inputs_on_host,
)
from hyper_parallel.backends.torch.pass_context import RunningPass
from hyper_parallel.backends.torch.recomputed_halves import RecomputedHalves
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.ir import Strategy

_FLOAT32: Final = torch.float32


class KeepFloat64(TorchFunctionMode):
    """Mode that turns conversions of float64 and integer tensors to float32 into conversions to float64.

    Model code converts tensors to float32 to compute norms, rotary angles and softmax in at least float32. In a float64
    model this loses precision, and two layouts may round to different float32 values. Zeros created in float32, and
    masks without a dtype, but with a fill value beyond the range of float32, become float64 too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and not args[0].is_floating_point():
            return args[0].double()
        if func is torch.zeros and kwargs.get("dtype") is _FLOAT32:
            # The result is usually a buffer to which float64 rows are written.
            return func(*args, **{**kwargs, "dtype": torch.float64})
        if func is torch.full:
            value = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
            if torch.finfo(torch.float32).max < abs(value) < math.inf:
                # The result is a mask with the lowest float64 value.
                return func(*args, **{"dtype": torch.float64, **kwargs})
        converts_integers = func is Tensor.to and not args[0].is_floating_point()
        if converts_integers or (args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64):
            if func is Tensor.float:
                return args[0]
            # Compare by identity: `in` would compare float32 with tensors, which raises inside torch.
            for value in (*args, kwargs.get("dtype")):  # not any(): it runs for every operation
                if value is _FLOAT32:
                    args = tuple(torch.float64 if a is _FLOAT32 else a for a in args)
                    kwargs = {k: torch.float64 if v is _FLOAT32 else v for k, v in kwargs.items()}
                    break
        return func(*args, **kwargs)


def keep_float64(model: nn.Module) -> None:
    """Make the forward of a model compute in float64 throughout; its signature does not change."""

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with KeepFloat64():
            return inner(*args, **kwargs)

    wrap(model, forward)


def ungrouped_experts(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Return the reason why grouped matrix products in `dtype` cannot compute the experts of a model.

    The result is None if they can, or if no layer of the model has all its experts in one parameter [E, ...].
    """
    experts = (p for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3)
    sizes = {size for p in experts for size in p.shape[1:]}
    if sizes and dtype == torch.float64:
        return "grouped products have no float64"
    odd = [size for size in sizes if size * dtype.itemsize % 16]
    if not odd:
        return None
    return f"rows of {min(odd)} in {str(dtype).removeprefix('torch.')} are no multiple of 16 bytes"


def loop_over_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a model compute its experts one by one if grouped matrix products do not support them."""
    if ungrouped_experts(model, dtype) and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def recompute_layers(
    stages: Sequence[Sequence[nn.Module]],
    strategy: Strategy,
    tp: TpState | None,
    exact: bool,
    running: RunningPass,
) -> dict[nn.Module, Callable[[], RecomputedHalves]]:
    """Enable recomputation for the layers of each stage of this rank that the strategy selects.

    Recomputation runs in the pass context that forward had; if `exact`, in float64 throughout, see `keep_float64`.

    Returns:
        Dict from each recomputed layer to a function that creates the `RecomputedHalves` of one pass through the layer,
        for execution in half-batches.
    """
    halves = dict[nn.Module, Callable[[], RecomputedHalves]]()
    for layer in recomputed_layers(stages, strategy):
        halves[layer] = partial(RecomputedHalves, layer.forward, running, _precision(exact))
        recompute(layer, tp, exact, running)
    return halves


def recomputed_layers(stages: Sequence[Sequence[nn.Module]], strategy: Strategy) -> list[nn.Module]:
    """Return the layers of each stage of this rank for which the strategy selects recomputation."""
    layers = [layer for stage in stages for layer in stage]
    indices = iter(range(len(layers)))
    selected = strategy.recomputed([[next(indices) for _ in stage] for stage in stages])
    return [layers[i] for i in sorted(selected)]


def recompute(layer: nn.Module, tp: TpState | None, exact: bool, running: RunningPass) -> None:
    """Enable recomputation for one layer; see `recompute_layers`."""
    precision = _precision(exact)

    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = running.recomputed()

        def run(*args: Any, **kwargs: Any) -> Any:
            now, running.context = running.context, context  # another batch may have run in between
            try:
                with precision:
                    return inner(*args, **kwargs)
            finally:
                running.context = now
                if tp is not None and tp.streams is not None:
                    tp.streams.join()  # recomputation may end between two projections

        offloads_inputs: bool | None = getattr(layer, HOST_SAVED, None)
        if offloads_inputs is None or not torch.is_grad_enabled():
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        with inputs_on_host(offloads_inputs):
            return checkpoint(run, *args, use_reentrant=False, context_fn=host_contexts, **kwargs)

    wrap(layer, forward)


def _precision(exact: bool) -> AbstractContextManager[Any]:
    return KeepFloat64() if exact else nullcontext()


def cache_argument(call: Callable[..., Any]) -> str:
    """Return the name of the KV cache argument of a transformers function, which transformers 5.24 renamed."""
    return "cache" if "cache" in inspect.signature(call).parameters else "past_key_values"

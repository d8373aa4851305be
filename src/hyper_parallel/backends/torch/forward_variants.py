"""Changes to a forward pass that keep its values: recomputed activations, and float64 that stays float64."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from hyper_parallel.backends.torch.context.state import ContextState
from hyper_parallel.backends.torch.host_saved_activations import HOST_SAVED, HostSavedActivations
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.token_rows import Tokens
from hyper_parallel.ir import Strategy


class _KeepFloat64(TorchFunctionMode):
    """No operation narrows a float64 tensor to float32, and integers become float64.

    Model code computes norms, rotary angles and softmax "in float32 at least" by converting to float32. For float64
    that is a loss, and whether two layouts round to the same float32 is chance. Positions that became float32 could
    not be multiplied with frequencies that stayed float64.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.float and not args[0].is_floating_point():
            return args[0].double()
        if func is torch.full and torch.finfo(torch.float32).max < abs(args[1]) < math.inf:
            return func(
                *args, **{"dtype": torch.float64, **kwargs}
            )  # the lowest float64, of a mask
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            # Identity: `in` would compare float32 with every tensor, and each comparison raises inside torch.
            if kwargs.get("dtype") is torch.float32 or any(a is torch.float32 for a in args):
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def float64_kept() -> TorchFunctionMode:
    """Return a context in which no operation narrows float64."""
    return _KeepFloat64()


def keep_float64(model: nn.Module) -> None:
    """Let the model compute in float64 throughout; its outputs and signature stay as they are."""
    inner = model.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with _KeepFloat64():
            return inner(*args, **kwargs)

    model.forward = forward


def ungrouped_experts(model: nn.Module, dtype: torch.dtype) -> str | None:
    """Why grouped matrix products do not take the experts of a model; None: they do, or it has none.

    Args:
        model: With all experts of a layer in one parameter [E, ...]; its own number format does not matter.
        dtype: Number format of the products.
    """
    sizes = {
        size
        for name, p in model.named_parameters()
        if ".experts." in name and p.dim() == 3
        for size in p.shape[1:]
    }
    if sizes and dtype == torch.float64:
        return "grouped products have no float64"
    odd = sorted(size for size in sizes if size * dtype.itemsize % 16)
    return (
        f"rows of {odd[0]} in {str(dtype).removeprefix('torch.')} are not whole 16 bytes"
        if odd
        else None
    )


def loop_over_experts(model: nn.Module, dtype: torch.dtype) -> None:
    """Let experts use the model's own loop where grouped matrix products do not take them."""
    if ungrouped_experts(model, dtype) and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")


def recompute_layers(
    stages: Sequence[Sequence[nn.Module]],
    strategy: Strategy,
    tp: TpState | None,
    context: ContextState | None,
    exact: bool,
    tokens: Tokens,
) -> None:
    """Drop the activations of the layers that a strategy names, of each stage's, and recompute them in backward.

    `exact`: float64 is kept, also in backward.
    """
    layers = [layer for stage in stages for layer in stage]
    places = iter(range(len(layers)))
    for i in strategy.recomputed([[next(places) for _ in stage] for stage in stages]):
        recompute(layers[i], tp, exact, context, tokens)


def recompute(
    layer: nn.Module,
    tp: TpState | None,
    exact: bool,
    context: ContextState | None = None,
    tokens: Tokens | None = None,
) -> None:
    """`recompute_layers` for one layer."""
    inner = layer.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        batch = tp.batch if tp is not None else ()
        view = context.view if context is not None else None
        padding = tokens.padding if tokens is not None else None

        def run(*args: Any, **kwargs: Any) -> Any:
            if context is not None:
                context.view = view
            if tokens is not None:
                tokens.padding = padding
            if tp is not None:
                tp.batch = batch  # another batch may have passed before backward runs this again
                tp.recomputed = True
            try:
                with _KeepFloat64() if exact else nullcontext():
                    return inner(*args, **kwargs)
            finally:
                if tp is not None:
                    tp.recomputed = False
                    if tp.streams is not None:  # recomputation may end between two projections
                        tp.streams.join()

        saved: HostSavedActivations | None = getattr(layer, HOST_SAVED, None)
        if saved is None or not torch.is_grad_enabled():
            return checkpoint(run, *args, use_reentrant=False, **kwargs)
        with saved.around() if saved.inputs else nullcontext():
            return checkpoint(run, *args, use_reentrant=False, context_fn=saved.contexts, **kwargs)

    layer.forward = forward


def cache_argument(call: Callable[..., Any]) -> str:
    """What a function of transformers calls a cache of keys and values: 5.24 has another name for it."""
    return "cache" if "cache" in inspect.signature(call).parameters else "past_key_values"

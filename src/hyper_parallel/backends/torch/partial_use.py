"""Check that tensor-, context- and pipeline-parallel ranks with the same data run the same modules.

Data-parallel ranks may run different modules: `data.unit_order` keeps their collectives in one order. Ranks with the
same data may not, because modules contain the collectives of the other axes. Every rank needs a backward pass, see
`extend_backward`.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn

from hyper_parallel.backends.torch.flow_tracer import FlowTracer
from hyper_parallel.backends.torch.layer_flow import flow_error, preserve_module_state, run_on_meta
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.backends.torch.wrappers import replace_attributes
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Strategy
from hyper_parallel.shard import module_of, without_axes

_TOKEN_INPUTS: Final = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels", "shift_labels")
)
"""Inputs of a language model with values for each token, of any dtype."""


def encoder_inputs(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the items of a batch that an encoder outside the decoder reads, such as images and audio.

    These are floating-point tensors with at least one dim, and integer tensors with three or more dims that are not
    masks. Inputs with values for each token, such as `inputs_embeds`, are excluded.
    """
    return {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and name not in _TOKEN_INPUTS
        # Scalars such as `num_items_in_batch` are inputs of the loss.
        if value.dim() > (0 if value.is_floating_point() else 2)
        if value.is_floating_point() or "mask" not in name
    }


def refuse_other_inputs(model: nn.Module, axes: Sequence[str], batch: Mapping[str, Any]) -> None:
    """Raise HP205 for images, audio or other inputs of an encoder that the parallel axes do not support.

    `axes` contains "pp" and "cp" if their degree is above 1. With cp, every encoder input is refused. With pp, an
    encoder input that is a required argument of the forward is refused, because later stages run without it.
    """
    media = encoder_inputs(batch) if axes else {}
    if media and "cp" in axes:
        raise UnsupportedSharding(
            f"context parallelism does not support `{min(media)}`, an input of a module outside the decoder",
            where="parallel.cp",
            got=type(model).__name__,
            allowed="cp=1",
            changes={"parallel.cp": 1},
        )
    parameters = inspect.signature(model.forward).parameters if media else {}
    for name in sorted(media.keys() & parameters.keys()):
        if parameters[name].default is inspect.Parameter.empty:
            raise flow_error(model, f"its forward cannot run without `{name}`", "pp")


@contextmanager
def extend_backward(model: nn.Module, strategy: Strategy) -> Iterator[None]:
    """Extend backward passes to the token embeddings in this context, if the decoder is frozen.

    If only an encoder is trained, the loss of a text-only microbatch has no gradient. The rank would skip collectives
    that other data-parallel ranks run in the backward of an image or recording. The context has no effect without data
    parallelism, on a decoder with trained parameters, or on a model without a Hugging Face decoder.
    """
    base = view_of(model).base if strategy.dp > 1 else None
    if base is None:
        yield
        return
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    decoder = [part for part in (embedding, base, head_of(model)) if part is not None]
    if any(p.requires_grad for part in decoder for p in part.parameters()):
        yield
        return

    def require_gradient(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        # Pipeline stages after the first one have a placeholder, which may return token ids.
        leaf = output.new_zeros(()).requires_grad_(output.is_floating_point())
        return output + leaf

    hook = embedding.register_forward_hook(require_gradient)
    try:
        yield
    finally:
        hook.remove()


def refuse_random_modules(model: nn.Module, strategy: Strategy) -> None:
    """Raise HP205 for a model that skips modules at random, if tp, cp or pp is above 1.

    Ranks of these axes have the same data, but would skip different modules. The function runs the model twice on meta
    tensors, with all random numbers 0 and with all random numbers 1, and compares which modules run.
    """
    axes = [axis for axis in ("pp", "cp", "tp_x", "tp_y") if getattr(strategy, axis) > 1]
    if not axes or not any(map(_has_probability, model.modules())):
        return
    lowest, highest = (_modules_run(model, draw) for draw in (0.0, 1.0))
    chosen = lowest ^ highest
    if differing := sorted(n for n in chosen if module_of(n) not in chosen):
        names = {k for m in model.modules() for k in vars(m) if "layerdrop" in k}
        raise UnsupportedSharding(
            "modules are skipped at random in training, and ranks with the same data would skip different ones",
            where=", ".join(differing[:2]),
            got=", ".join(sorted(names)) or type(model).__name__,
            allowed="dp_replicate, dp_shard" + (", or `layerdrop` of 0 in the model's config" if names else ""),
            changes=without_axes(strategy, *dict.fromkeys(axis.partition("_")[0] for axis in axes)),
        )


def _has_probability(module: nn.Module) -> bool:
    return any("drop" in name and isinstance(value, float) and 0 < value < 1 for name, value in vars(module).items())


def _modules_run(model: nn.Module, draw: float) -> set[str]:
    """Return the names of the modules that a training pass on meta tensors runs if all random numbers are `draw`."""
    run: set[str] = set()
    numbers = {"random": lambda: draw, "uniform": lambda a, b: a + (b - a) * draw}
    with preserve_module_state(model), replace_attributes(random, **numbers):
        model.train()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: run.add(name))
        try:
            run_on_meta(model, FlowTracer(draw), "pp")
        except UnsupportedSharding:  # the trial of an affected axis reports the reason
            run.clear()
    return run

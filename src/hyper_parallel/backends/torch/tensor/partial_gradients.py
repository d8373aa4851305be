"""Find replicated parameters with partial gradients, by one forward on meta tensors without other ranks.

With replicated activations, the gradient of a replicated parameter is complete on each rank, unless the parameter acts
on a sharded activation: the heads or features of one rank. Then each rank computes a partial gradient. A trial forward
traces which values are sharded, similar to the tracking of values that vary over an axis in JAX's `shard_map`:

    result of a column-parallel projection                         sharded
    result of a row-parallel projection, an embedding or a head    replicated
    result of any operator                                         sharded if one of its arguments is

A parameter has a partial gradient if it, or a value computed from it, is combined with a sharded value.

The trial also decides whether the logits may stay sharded over the vocabulary. This requires that every operator on the
logits outside of `loss_function` treats all columns alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.flow_tracer import (
    ALONG_DIM_OPS,
    FILL_OPS,
    FIRST_FREE_BIT,
    FlowTracer,
)
from hyper_parallel.backends.torch.layer_flow import preserve_module_state, run_on_meta
from hyper_parallel.backends.torch.tensor._replicated_activations import tied_heads
from hyper_parallel.backends.torch.vocab_parallel_loss import has_causal_loss
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Strategy
from hyper_parallel.shard import COLUMN_STYLES, module_of

_WHOLE_RESULT_STYLES: Final = ("rowwise", "vocab", "head")
"""Styles of modules with a replicated result."""
SPLIT_STYLES: Final = (*COLUMN_STYLES, *_WHOLE_RESULT_STYLES, "norm_heads")
"""Styles of modules with sharded parameters."""
_PART: Final = 1 << FIRST_FREE_BIT
"""Mark of sharded values."""
_LOGITS: Final = 1 << FIRST_FREE_BIT + 1
"""Mark of logits."""
_BITS: Final = FIRST_FREE_BIT + 2
"""First bit of the parameters."""


@dataclass(frozen=True, slots=True)
class TensorTrial:
    """Result of a trial forward of a model for tensor parallelism with replicated activations.

    Attributes:
        summands: Names of the replicated parameters with partial gradients.
        splits_logits: True if the logits may stay sharded over the vocabulary until the loss.
    """

    summands: frozenset[str]
    splits_logits: bool = False


def try_forward(
    model: nn.Module, layouts: Mapping[str, Layout], styles: Mapping[str, str], strategy: Strategy
) -> TensorTrial:
    """Find the replicated parameters with partial gradients if activations are replicated.

    The model runs once on meta tensors. If it has no `config`, or if the run fails and the strategy has no user rules,
    the result follows from the styles alone.

    Args:
        model: Model before it is wrapped, on any device.
        layouts: Layout of each parameter, by name.
        styles: Sharding style of each module, by name.
        strategy: The strategy of the plan.

    Raises:
        UnsupportedSharding: HP205 for a parameter that acts on both replicated and sharded activations, and for a
            forward that fails on meta tensors if the strategy has rules of the user.
    """
    axes = {"tp_x", "tp_y"}
    replicated = [n for n, layout in layouts.items() if axes.isdisjoint(layout.sharding_axes)]
    # Modules that act on sharded activations: their parameters are sharded, or replicated inside of a sharded block.
    owners = {module_of(n) for n in layouts.keys() - {*replicated}}
    owners |= {n for n, style in styles.items() if style in ("inner", "kv_replicate")}
    known = {n for n in replicated if module_of(n) in owners}
    # The bias of a row-wise projection is excluded, because it is added after the sum over ranks.
    known -= {n for n in known if n.endswith(".bias") and styles.get(module_of(n)) == "rowwise"}
    unknown = [n for n in replicated if module_of(n) not in owners]
    if not hasattr(model, "config"):
        return TensorTrial(frozenset(known))
    try:
        result = _SummandTrial(model, styles, unknown).run()
    except UnsupportedSharding as error:
        if error.__cause__ is None or strategy.rules:
            raise
        # The forward fails on meta tensors; `derived_rules` names all modules between sharded projections.
        return TensorTrial(frozenset(known))
    return replace(result, summands=result.summands | known)


class _Parts(FlowTracer):
    """Tracer whose marks tell which values are sharded, and from which parameters replicated values were computed.

    Attributes:
        summands: Bits of the parameters with partial gradients, because they were combined with a sharded value.
        complete: Bits of the parameters with complete gradients: the loss, the logits, or an input whose gradient is
            summed over ranks was computed from them.
        vocabulary: Number of columns of the logits.
        tells_columns: True if an operator treats some columns of the logits differently from others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.summands = 0
        self.complete = 0
        self.vocabulary = 0
        self.tells_columns = False

    def _result_marks(self, packet: Any, args: tuple[Any, ...], inputs: list[Tensor], out: Tensor, marks: int) -> int:
        if packet in FILL_OPS:
            return 0
        if marks & _LOGITS and not self._is_same_for_columns(packet, inputs, out):
            self.tells_columns = True
        if not marks & _PART:  # integers and booleans have no gradient
            return marks if out.is_floating_point() else 0
        if out.is_floating_point():
            for tensor in inputs:
                bits = self.marks_of(tensor)
                self.summands |= 0 if bits & _PART else bits >> _BITS
        return _PART

    def _is_same_for_columns(self, packet: Any, inputs: list[Tensor], out: Tensor) -> bool:
        """Return whether an operator on logits treats all columns alike, independent of their index."""
        name, size = packet.__name__, self.vocabulary
        if not out.dim() or out.shape[-1] != size or packet in ALONG_DIM_OPS:
            return False
        if any(word in name for word in ("index", "scatter", "gather", "masked", "layer_norm")):
            return False
        return not any(size in t.shape for t in inputs if not self.marks_of(t) & _LOGITS)


class _SummandTrial:
    """Trial forward of a model on meta tensors; `names` are the replicated parameters to trace."""

    def __init__(self, model: nn.Module, styles: Mapping[str, str], names: Sequence[str]) -> None:
        split = {n: style for n, style in styles.items() if style in SPLIT_STYLES}
        tied = tied_heads(dict(model.named_modules()), split)
        self.model, self.styles, self.names = model, split | dict.fromkeys(tied, "head"), names
        self.tracer = _Parts()
        self.loss_taken = False

    def run(self) -> TensorTrial:
        model, tracer = self.model, self.tracer
        for i, name in enumerate(self.names):
            tracer.mark(model.get_parameter(name), 1 << _BITS + i)
        modules = dict(model.named_modules())
        with preserve_module_state(model):
            for name, style in self.styles.items():
                if name in modules and style in (*COLUMN_STYLES, *_WHOLE_RESULT_STYLES):
                    modules[name].register_forward_hook(self._hook(style), with_kwargs=True)
            if has_causal_loss(model):
                model.loss_function = self._loss
            output = run_on_meta(model, tracer, "tp")
        results = [getattr(output, n, None) for n in ("loss", "logits")]
        tracer.complete |= tracer.marks_of(results) >> _BITS
        if both := tracer.summands & tracer.complete:
            name = self.names[both.bit_length() - 1]
            raise UnsupportedSharding(
                f"tensor parallelism cannot shard around `{name}`, which acts on replicated and on sharded activations",
                where="parallel.tp_x",
                got=type(model).__name__,
                changes={"parallel.tp_x": 1, "parallel.tp_y": 1},
            )
        summands = frozenset(n for i, n in enumerate(self.names) if tracer.summands >> i & 1)
        return TensorTrial(summands, self.loss_taken and not tracer.tells_columns)

    def _loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        complete = logits.shape[-1] == self.tracer.vocabulary
        self.loss_taken = complete and bool(self.tracer.marks_of(logits) & _LOGITS)
        self.tracer.complete |= self.tracer.marks_of(logits) >> _BITS
        return logits.new_zeros(())

    def _hook(self, style: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            tracer = self.tracer
            inputs = tracer.marks_of((args, kwargs))
            if style in COLUMN_STYLES or style == "head":
                tracer.complete |= 0 if inputs & _PART else inputs >> _BITS
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    if style == "head":
                        tracer.vocabulary = leaf.shape[-1]
                    tracer.mark(leaf, _PART if style in COLUMN_STYLES else _LOGITS * (style == "head"))

        return after

"""Which whole parameters act on one rank's part: a trial without values, before any rank starts.

Where every tensor-parallel rank holds the activations of all tokens, a whole parameter has its complete gradient on
each rank, unless it acts on what a split projection gives: heads or features of one rank. Its gradient is a summand
then. The trial runs the model's forward once and follows both kinds of values, as the type system of `shard_map` in JAX
follows values that vary over an axis of the mesh:

    result of a projection into a split width      a part
    result of the projection back, of an embedding or a head    whole
    result of any operator                         a part if one of its arguments is

A parameter, or a value made from it, that meets a part in an operator has a summand.

The same run tells whether logits may stay split over the vocabulary: whether all that happens to them before and beside
`loss_function` is the same for every column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.flow_tracer import ALONG, FILLS, FIRST, Marks
from hyper_parallel.backends.torch.layer_flow import as_it_was, run_hollow
from hyper_parallel.backends.torch.tensor._whole_stream import tied_heads
from hyper_parallel.backends.torch.vocab_parallel_loss import has_causal_loss
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Strategy

INTO: Final = ("colwise", "kv_replicate", "qkv", "gate_up")
"""Styles of projections into a split width; the modules that own one are regions."""
_BACK: Final = ("rowwise", "vocab", "head")
"""Styles of modules whose result is whole."""
SPLIT: Final = (*INTO, *_BACK, "norm_heads")
"""Styles of modules that work on a part of a weight."""
_PART: Final = 1 << FIRST
"""Mark of values that are one rank's part."""
_LOGITS: Final = 1 << FIRST + 1
"""Mark of logits."""
_BITS: Final = FIRST + 2
"""First bit of a parameter."""


@dataclass(frozen=True, slots=True)
class TensorTrial:
    """Result of the trial.

    Attributes:
        summands: Whole parameters of which each tensor-parallel rank computes one summand of the gradient.
        splits_logits: The loss of the model takes the logits of a part of the vocabulary.
    """

    summands: frozenset[str]
    splits_logits: bool = False


def summand_owners(
    layouts: Mapping[str, Layout], styles: Mapping[str, str], axes: Sequence[str]
) -> frozenset[str]:
    """Return the modules that are known to act on a part: those that are cut themselves, or whose style says so.

    Args:
        layouts: Parameter name to its layout.
        styles: Module name to its style.
        axes: Axes of tensor parallelism.
    """
    cut = {
        n.rpartition(".")[0]
        for n, layout in layouts.items()
        if not set(axes).isdisjoint(layout.sharding_axes)
    }
    return frozenset(cut | {n for n, style in styles.items() if style in ("inner", "kv_replicate")})


def try_forward(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    styles: Mapping[str, str],
    strategy: Strategy,
) -> TensorTrial:
    """Run a model once, as it is, and follow the parts that tensor parallelism would make.

    Activations between split modules are whole on every rank. The modules of the model are not wrapped yet.

    Args:
        model: Parameters are real or on the meta device; it stays as it is.
        layouts: Parameter name to its layout.
        styles: Module name to its style.
        strategy: The strategy of the plan.

    Raises:
        UnsupportedSharding: HP205 for a parameter that acts on whole activations and on a part of them too, and for
            rules of the strategy where the trial cannot run.
    """
    axes = ("tp_x", "tp_y")
    whole = [n for n, at in layouts.items() if set(axes).isdisjoint(at.sharding_axes)]
    owners = summand_owners(layouts, styles, axes)
    known = {n for n in whole if n.rpartition(".")[0] in owners}
    # The bias of a row-wise projection is added after the sum over ranks.
    known -= {n for n in known if n.endswith(".bias") and styles.get(_module(n)) == "rowwise"}
    others = [n for n in whole if _module(n) not in owners]
    if not hasattr(model, "config"):
        return TensorTrial(frozenset(known))
    try:
        found = _SummandTrial(model, styles, others).run()
    except UnsupportedSharding as error:
        if error.__cause__ is None or strategy.rules:
            raise
        # The forward does not run without values; `derived_rules` names all modules between split projections.
        return TensorTrial(frozenset(known))
    return replace(found, summands=found.summands | known)


class _Parts(Marks):
    """Marks of parts, and of the parameters that whole values are made from.

    Attributes:
        summands: Bits of parameters that met a part.
        complete: Bits of parameters that a split module, which sums the gradients of its input, was given.
        vocabulary: Columns of the logits.
        tells_columns: An operator told columns of the logits apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.summands = 0
        self.complete = 0
        self.vocabulary = 0
        self.tells_columns = False

    def _watched(
        self, packet: Any, args: tuple[Any, ...], given: list[Tensor], out: Tensor, marks: int
    ) -> int:
        if packet in FILLS:
            return 0
        if marks & _LOGITS and not self._is_same_for_columns(packet, given, out):
            self.tells_columns = True
        if not marks & _PART:  # integers and booleans have no gradient
            return marks if out.is_floating_point() else 0
        if out.is_floating_point():
            for tensor in given:
                own = self.of(tensor)
                self.summands |= 0 if own & _PART else own >> _BITS
        return _PART

    def _is_same_for_columns(self, packet: Any, given: list[Tensor], out: Tensor) -> bool:
        """Return whether an operator on logits does the same with every column, whatever its number."""
        name, size = packet.__name__, self.vocabulary
        if not out.dim() or out.shape[-1] != size or packet in ALONG:
            return False
        if any(word in name for word in ("index", "scatter", "gather", "masked", "layer_norm")):
            return False
        return not any(size in t.shape for t in given if not self.of(t) & _LOGITS)


class _SummandTrial:
    """One run of a model's forward."""

    def __init__(self, model: nn.Module, styles: Mapping[str, str], names: Sequence[str]) -> None:
        split = {n: style for n, style in styles.items() if style in SPLIT}
        tied = tied_heads(dict(model.named_modules()), split)
        self.model, self.styles, self.names = model, split | dict.fromkeys(tied, "head"), names
        self.marks = _Parts()
        self.loss_taken = False

    def run(self) -> TensorTrial:
        """Run the model once."""
        model, marks = self.model, self.marks
        for i, name in enumerate(self.names):
            marks.set(model.get_parameter(name), 1 << _BITS + i)
        modules = dict(model.named_modules())
        hooks = [
            modules[name].register_forward_hook(self._hook(style), with_kwargs=True)
            for name, style in self.styles.items()
            if name in modules and style in (*INTO, *_BACK)
        ]
        try:
            with as_it_was(model):
                if has_causal_loss(model):
                    model.loss_function = self._loss
                output = run_hollow(model, marks, "tp")
        finally:
            for hook in hooks:
                hook.remove()
        results = [getattr(output, n, None) for n in ("loss", "logits")]
        marks.complete |= marks.of(results) >> _BITS
        if both := marks.summands & marks.complete:
            name = self.names[both.bit_length() - 1]
            raise UnsupportedSharding(
                f"`{name}` acts on whole activations and on one rank's part of them",
                where=type(model).__name__,
                got="tensor parallelism beside modules that stay whole",
                hint="parallel.tp=1",
            )
        met = frozenset(n for i, n in enumerate(self.names) if marks.summands >> i & 1)
        return TensorTrial(met, self.loss_taken and not marks.tells_columns)

    def _loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        whole = logits.shape[-1] == self.marks.vocabulary
        self.loss_taken = whole and bool(self.marks.of(logits) & _LOGITS)
        self.marks.complete |= self.marks.of(logits) >> _BITS
        return logits.new_zeros(())

    def _hook(self, style: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            marks = self.marks
            given = marks.of((args, kwargs))
            if style in INTO or style == "head":
                marks.complete |= 0 if given & _PART else given >> _BITS
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor):
                    if style == "head":
                        marks.vocabulary = leaf.shape[-1]
                    marks.set(leaf, _PART if style in INTO else _LOGITS * (style == "head"))

        return after


def _module(name: str) -> str:
    return name.rpartition(".")[0]

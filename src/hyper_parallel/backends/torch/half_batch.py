"""Half-batches: decoder layers run on two halves of the sequences of a microbatch, which take turns.

While one half waits for a collective, the other one computes, in forward and, by the order of autograd, in backward.
The layer's code is not changed: its forward is called once per half. The halves meet again at the end of the layer, so
data parallelism, recomputation and the rest of the model see one call.

A pass whose sequences cannot be halved runs whole, which `HalfBatch.whole_layers` counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.dropout import has_dropout
from hyper_parallel.backends.torch.in_flight import interleave
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.token_rows import Padding, Tokens
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Strategy

_PACKED_ARGUMENTS: Final = ("cu_seq", "max_length", "seq_idx")
"""Prefixes of arguments that describe packed documents over all sequences, in the names of transformers 5."""


def check_half_batches(model: nn.Module, strategy: Strategy, has_balance_loss: bool) -> None:
    """Refuse a model whose result on two half-batches is not that on the whole batch.

    Args:
        model: The model.
        strategy: The strategy.
        has_balance_loss: True if training adds a loss of the load of experts over all tokens.

    Raises:
        UnsupportedSharding: HP205 naming the reason.
    """
    if not strategy.overlap.half_batch:
        return
    reasons = {
        "dropout, which would draw other numbers": has_dropout(model),
        "a load-balancing loss over all tokens": has_balance_loss,
    }
    for reason, applies in reasons.items():
        if applies:
            ep = strategy.ep > 1
            raise UnsupportedSharding(
                f"half-batches do not work with {reason}",
                where="overlap",
                got=type(model).__name__,
                changes={"overlap.ep": "chunks", "overlap.tp": "none"}
                if ep
                else {"overlap": "none"},
            )


class HalfBatch:
    """Runs layers on two half-batches.

    Attributes:
        halved_layers: Layers run on half-batches since the last `take_counts`.
        whole_layers: Layers run on whole batches.
    """

    def __init__(self, overlap: Overlap, tp: TpState | None, tokens: Tokens) -> None:
        self._overlap = overlap
        self._tp = None if tp is None or tp.replicated_activations else tp
        self._state, self._tokens = tp, tokens
        if tp is not None:
            tp.parts_of_pass = self.parts
        self.halved_layers = self.whole_layers = 0

    def install(self, layers: Sequence[nn.Module]) -> None:
        """Wrap the forward of decoder layers."""
        for layer in layers:
            layer.forward = functools.wraps(layer.forward)(partial(self._forward, layer.forward))

    def parts(self, batch: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the number of parts of a pass over (B, S) tokens, given the arguments of its first layer."""
        parts = self._overlap.parts(*batch) if len(batch) == 2 else 1
        return 1 if _halves(*_without_hidden(args, kwargs), batch[0]) is None else parts

    def take_counts(self) -> dict[str, int]:
        """Return the layers run on half-batches and on whole batches since the last call, recomputation included."""
        counts = {"halved_layers": self.halved_layers, "whole_layers": self.whole_layers}
        self.halved_layers = self.whole_layers = 0
        return counts

    def _forward(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        by_keyword = "hidden_states" in kwargs
        hidden = kwargs["hidden_states"] if by_keyword else args[0]
        batch = self._batch(hidden)
        halves = None if batch is None else _halves(*_without_hidden(args, kwargs), batch)
        if halves is None and batch is not None and self._tp is not None:
            raise UnsupportedSharding(
                "this layer has arguments that the first layer does not have, and they cannot be halved",
                where=type(getattr(inner, "__self__", inner)).__name__,
                got=", ".join(kwargs),
                hint="overlap=none",
            )
        if halves is None:
            self.whole_layers += 1
            return inner(*args, **kwargs)
        self.halved_layers += 1
        dim = 0 if self._tp is None else 1

        def call(index: int) -> Any:
            own_args, own_kwargs = halves[index]
            own = hidden.chunk(2, dim)[index]
            if by_keyword:
                return inner(*own_args, **own_kwargs, hidden_states=own)
            return inner(own, *own_args[1:], **own_kwargs)

        outputs = self._take_turns([partial(call, index) for index in range(2)])
        return _joined(outputs, dim, type(inner).__name__)

    def _batch(self, hidden: Tensor) -> int | None:
        """Return the number of sequences; None: they cannot be halved."""
        if self._tp is not None:
            return 2 * self._tp.batch[0] if self._tp.shape.parts == 2 else None
        sequences, length = hidden.shape[:2]
        return sequences if self._overlap.parts(sequences, length) == 2 else None

    def _take_turns(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return the results of two calls, with the state of each half while it computes."""
        state, tokens = self._state, self._tokens
        whole = tokens.padding
        paddings = [whole, whole]
        if whole is not None:
            paddings = [Padding(real, whole.unread) for real in whole.real.chunk(2)]

        def on_turn(index: int) -> None:
            tokens.padding = paddings[index]
            if state is not None:
                state.half = index

        try:
            return interleave(calls, on_turn)
        finally:
            tokens.padding = whole
            if state is not None:
                state.half = 0


def _without_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer with None for its hidden states."""
    if "hidden_states" in kwargs:
        return args, {k: v for k, v in kwargs.items() if k != "hidden_states"}
    return (None, *args[1:]), kwargs


def _halves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] | None:
    """Return the arguments of each half; None: the sequences of an argument cannot be told."""
    if any(v is not None and n.startswith(_PACKED_ARGUMENTS) for n, v in kwargs.items()):
        return None
    positional = [_halved(value, batch) for value in args]
    named = {name: _halved(value, batch) for name, value in kwargs.items()}
    if any(pair is None for pair in (*positional, *named.values())):
        return None
    return tuple(
        (
            tuple(pair[i] for pair in positional if pair is not None),
            {name: pair[i] for name, pair in named.items() if pair is not None},
        )
        for i in range(2)
    )


def _halved(value: Any, batch: int) -> tuple[Any, Any] | None:
    """Return an argument of each half; None: it cannot be told.

    A tensor whose first dim counts the sequences is halved. One that is broadcast over them, with a first dim of 1 or
    no dim of that size, is shared. Lists, dicts and other objects may pass values from layer to layer.
    """
    if isinstance(value, Tensor):
        if batch not in value.shape or value.shape[0] == 1:
            return value, value
        if value.shape[0] != batch:
            return None
        first, second = value.chunk(2)
        return first, second
    if isinstance(value, tuple):
        pairs = [_halved(item, batch) for item in value]
        if any(pair is None for pair in pairs):
            return None
        first, second = (tuple(pair[i] for pair in pairs if pair is not None) for i in range(2))
        return first, second
    if value is None or isinstance(value, bool | int | float | str):
        return value, value
    return None


def _joined(outputs: Sequence[Any], dim: int, name: str) -> Any:
    """Return the output of a layer for both halves."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(list(outputs), dim)
    if isinstance(first, tuple):
        parts = [
            _joined(part, dim if i == 0 else 0, name)
            for i, part in enumerate(zip(*outputs, strict=True))
        ]
        return tuple(parts)
    if first is None:
        return None
    raise UnsupportedSharding(
        "a decoder layer returns a value that cannot be joined from two half-batches",
        where=name,
        got=type(first).__name__,
        hint="overlap=none",
    )

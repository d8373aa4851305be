"""Rotary embeddings whose frequencies depend on the sequence length: `rope_type` dynamic and longrope.

transformers derives the frequencies of all tokens from the largest position in the batch. Rows, packed documents and
padding would then change each other's frequencies, and training would depend on the microbatches of a layout. Here
every token gets the frequencies of its own document.

Rotary embeddings of `rope_type: dynamic` also store the length of the longest earlier sequence, and frequencies for
this length, which no checkpoint contains. Therefore every call starts from the state before the module's first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.wrappers import wrap

Lengths = Callable[[Tensor], Tensor]
"""Function from positions [B, S] to the length of each token's document, [B, S], in the full sequence."""

_DYNAMIC, _LONGROPE = "dynamic", "longrope"

Values = dict[tuple[str, str], Any]
"""State of a module: values by kind (`buffer` or `attribute`) and name."""

BUFFER, _ATTRIBUTE = "buffer", "attribute"
_MARKER: Final = "max_seq_len_cached"
"""Suffix of the attribute in which rotary embeddings store the length of the longest sequence."""


def document_lengths(positions: Tensor) -> Tensor:
    """Return the length of each token's document, [B, S]. A document is a run of consecutive positions from 0."""
    number = positions.shape[1]
    index = torch.arange(number, device=positions.device).expand_as(positions)
    is_last = positions.diff(dim=1, append=positions[:, -1:]) != 1
    last = torch.where(is_last, index, number - 1).flip(1).cummin(1).values.flip(1)
    return positions.gather(1, last) + 1


def rotate_by_document(model: nn.Module, lengths: Lengths = document_lengths) -> None:
    """Make length-dependent rotary embeddings compute the frequencies of each token from its document length."""
    for module in model.modules():
        if _types(module) & {_DYNAMIC, _LONGROPE}:
            wrap(module, partial(_rotate, module, lengths))


def _types(module: nn.Module) -> set[str]:
    """Return the rope types of a rotary embedding, which has one type or one type per kind of layer."""
    rope_type = vars(module).get("rope_type")
    kinds = rope_type.values() if isinstance(rope_type, Mapping) else (rope_type,)
    return {kind for kind in kinds if isinstance(kind, str)}


def _rotate(
    module: Any,
    lengths: Lengths,
    inner: Callable[..., Any],
    x: Tensor,
    position_ids: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward `inner` of a rotary embedding once per group of tokens with equal frequencies; merge results."""
    if position_ids.dim() != 2:  # positions of images in several dims
        return inner(x, position_ids, *args, **kwargs)
    layer_type = kwargs.get("layer_type", args[0] if args else None)
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
    if kind not in (_DYNAMIC, _LONGROPE):
        return inner(x, position_ids, *args, **kwargs)
    merged: list[Tensor] = []
    for in_group, length in _groups(module, kind, layer_type, lengths(position_ids)):
        # The module derives the length from the largest position: append it.
        largest = torch.full_like(position_ids[:, :1], length - 1)
        positions = torch.cat((torch.where(in_group, position_ids, 0), largest), dim=1)
        tables = [table[:, :-1] for table in inner(x, positions, *args, **kwargs)]
        if merged:
            pairs = zip(tables, merged, strict=True)
            tables = [torch.where(in_group.unsqueeze(-1), new, old) for new, old in pairs]
        merged = tables
    return tuple(merged)


def _groups(module: Any, kind: str, layer_type: str | None, lengths: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield (mask [B, S], length): tokens with equal frequencies, and a document length with these frequencies."""
    if kind == _LONGROPE:  # this case reads no tensor values, so that the pass can be traced
        rope = module.config.rope_parameters
        rope = rope if layer_type is None else rope[layer_type]
        longest = int(rope["original_max_position_embeddings"])
        yield lengths <= longest, longest
        yield lengths > longest, longest + 1
        return
    clamped = lengths.clamp(min=int(module.original_max_seq_len))
    for length in clamped.unique().tolist():  # sorted
        yield clamped == length, length


def reset_before_calls(model: nn.Module) -> None:
    """Make every rotary embedding with state start each call from the state before its first call."""
    for module in model.modules():
        if any(name.endswith(_MARKER) for name in vars(module)):
            _ResetState(module)


class _ResetState:
    """State of a module before its first call, which is restored before every later call.

    If other code changes the state between two calls, for example by a move to another device, the changed state is
    restored from then on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: Values = {}
        self._after: Values | None = None
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, _: Any) -> None:
        now = state_of(module)
        if self._after is None or not _same(now, self._after):
            self._before = now
            return
        for kind, name in now:
            if (kind, name) not in self._before:
                del (module._buffers if kind == BUFFER else vars(module))[name]
        for (kind, name), value in self._before.items():
            (module._buffers if kind == BUFFER else vars(module))[name] = value

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        self._after = state_of(module)


def state_of(module: nn.Module) -> Values:
    """Return a module's buffers and its attributes that are numbers, strings, tensors or None, except `training`."""
    state: Values = {(BUFFER, name): buffer for name, buffer in module._buffers.items()}
    for name, value in vars(module).items():
        if name == "training":  # set by the caller, not by forward
            continue
        if value is None or isinstance(value, (bool, int, float, str, Tensor)):
            state[_ATTRIBUTE, name] = value
    return state


def _same(first: Values, second: Values) -> bool:
    """Return whether two states have the same names and the very same objects, without comparing values."""
    return first.keys() == second.keys() and all(second[k] is v for k, v in first.items())

"""Length-dependent rotary frequencies per document: `rope_type` dynamic and longrope.

transformers derives the frequencies of all tokens from the largest position in the batch. Rows, packed documents and
padding would then change each other's frequencies, and training would depend on the microbatches of a layout. Here
every token gets the frequencies of its own document: the rotary embedding runs once per document length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

Lengths = Callable[[Tensor], Tensor]
"""Function from positions [B, S] to the length of each token's document, [B, S], in the full sequence."""

_DYNAMIC, _LONGROPE = "dynamic", "longrope"
_TEXT_DIMS: Final = 2


def document_lengths(positions: Tensor) -> Tensor:
    """Return the length of each token's document, [B, S]; a document is a run of consecutive positions."""
    number = positions.shape[1]
    index = torch.arange(number, device=positions.device).expand_as(positions)
    is_last = positions.diff(dim=1, append=positions[:, -1:]) != 1
    last = torch.where(is_last, index, number - 1).flip(1).cummin(1).values.flip(1)
    return positions.gather(1, last) + 1


def rotate_by_document(model: nn.Module, lengths: Lengths = document_lengths) -> None:
    """Make length-dependent rotary embeddings compute the frequencies of each token from its document length."""
    for module in model.modules():
        if _types(module) & {_DYNAMIC, _LONGROPE}:
            module.forward = _by_document(module, module.forward, lengths)


def _types(module: nn.Module) -> set[str]:
    """Return the rope types of a rotary embedding, which has one type or one type per kind of layer."""
    rope_type = vars(module).get("rope_type")
    kinds = rope_type.values() if isinstance(rope_type, Mapping) else (rope_type,)
    return {kind for kind in kinds if isinstance(kind, str)}


def _by_document(module: Any, inner: Callable[..., Any], lengths: Lengths) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() != _TEXT_DIMS:
            return inner(x, position_ids, *args, **kwargs)
        layer_type = kwargs.get("layer_type", args[0] if args else None)
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if kind not in (_DYNAMIC, _LONGROPE):
            return inner(x, position_ids, *args, **kwargs)
        merged: tuple[Tensor, ...] | None = None
        for in_group, length in _groups(module, kind, layer_type, lengths(position_ids)):
            # The module derives the length from the largest position: append it.
            largest = torch.full_like(position_ids[:, :1], length - 1)
            positions = torch.cat((torch.where(in_group, position_ids, 0), largest), dim=1)
            tables = [table[:, :-1] for table in inner(x, positions, *args, **kwargs)]
            if merged is None:
                merged = tuple(tables)
            else:
                pairs = zip(tables, merged, strict=True)
                merged = tuple(torch.where(in_group.unsqueeze(-1), new, old) for new, old in pairs)
        return merged

    return forward


def _groups(
    module: Any, kind: str, layer_type: str | None, lengths: Tensor
) -> Iterator[tuple[Tensor, int]]:
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

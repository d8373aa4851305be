"""Rotary frequencies that depend on the length of a text, by document: `rope_type` dynamic and longrope.

transformers takes the largest position of a batch for the length of all its texts. Rows, packed documents and padding
would then change the frequencies of each other, and a layout that forms other microbatches would train otherwise. Here
every token has the frequencies of its own document, as if that were alone: the module runs once per length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

Lengths = Callable[[Tensor], Tensor]
"""Length of the document of every token, [B, S], by positions [B, S]."""

_DYNAMIC, _LONGROPE = "dynamic", "longrope"
_TEXT_DIMS: Final = 2


def document_lengths(positions: Tensor) -> Tensor:
    """Return for every token of [B, S] the length of its document: positions that follow on one another."""
    number = positions.shape[1]
    at = torch.arange(number, device=positions.device).expand_as(positions)
    is_last = positions.diff(dim=1, append=positions[:, -1:]) != 1
    last = torch.where(is_last, at, number - 1).flip(1).cummin(1).values.flip(1)
    return positions.gather(1, last) + 1


def rotate_by_document(model: nn.Module, lengths: Lengths = document_lengths) -> None:
    """Let the rotary embeddings of a model whose frequencies depend on lengths take those of documents.

    Args:
        model: Changed in place.
        lengths: Where a rank has a part of the tokens, its lengths come from the whole sequences.
    """
    for module in model.modules():
        if _types(module) & {_DYNAMIC, _LONGROPE}:
            module.forward = _by_document(module, module.forward, lengths)


def _types(module: nn.Module) -> set[str]:
    """Return the kinds of a rotary embedding, of all layers or by kind of layer."""
    found = vars(module).get("rope_type")
    kinds = found.values() if isinstance(found, Mapping) else (found,)
    return {kind for kind in kinds if isinstance(kind, str)}


def _by_document(module: Any, inner: Callable[..., Any], lengths: Lengths) -> Callable[..., Any]:
    def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        if position_ids.dim() != _TEXT_DIMS:
            return inner(x, position_ids, *args, **kwargs)
        layer_type = kwargs.get("layer_type", args[0] if args else None)
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if kind not in (_DYNAMIC, _LONGROPE):
            return inner(x, position_ids, *args, **kwargs)
        found: tuple[Tensor, ...] | None = None
        for mine, length in _groups(module, kind, layer_type, lengths(position_ids)):
            # One more position, which tells the module the length.
            more = torch.full_like(position_ids[:, :1], length - 1)
            shown = torch.cat((torch.where(mine, position_ids, 0), more), dim=1)
            tables = [table[:, :-1] for table in inner(x, shown, *args, **kwargs)]
            if found is None:
                found = tuple(tables)
            else:
                pairs = zip(tables, found, strict=True)
                found = tuple(torch.where(mine.unsqueeze(-1), new, old) for new, old in pairs)
        return found

    return forward


def _groups(
    module: Any, kind: str, layer_type: str | None, lengths: Tensor
) -> Iterator[tuple[Tensor, int]]:
    """Yield the tokens [B, S] of documents with the same frequencies, and a length for these; short ones first."""
    if kind == _LONGROPE:  # no number is read, so that the pass can be traced
        rope = module.config.rope_parameters
        rope = rope if layer_type is None else rope[layer_type]
        longest = int(rope["original_max_position_embeddings"])
        yield lengths <= longest, longest
        yield lengths > longest, longest + 1
        return
    clamped = lengths.clamp(min=int(module.original_max_seq_len))
    for length in clamped.unique().tolist():  # sorted
        yield clamped == length, length

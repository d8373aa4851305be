"""State of context parallelism: this rank's tokens, and the mask data of the running forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.backends.torch.pass_context import RunningPass, SequenceView
from hyper_parallel.backends.torch.rotary_lengths import document_lengths
from hyper_parallel.backends.torch.vocab_parallel_loss import IGNORED, shifted
from hyper_parallel.ir import SequenceCut

TOKENS = ("input_ids", "inputs_embeds")


@dataclass(slots=True)
class ContextState:
    """Context-parallel state of one model.

    Attributes:
        group: Context-parallel process group.
        gather_keys: True if keys and values are all-gathered; False: they are exchanged in a ring.
        ulysses: Ulysses degree: number of ranks that exchange tokens for heads by an all-to-all.
        running: The running forward pass; `view` of its context has the document lengths and boundaries.
        calls: Number of attention calls in the running pass so far.
    """

    group: dist.ProcessGroup
    gather_keys: bool
    ulysses: int
    running: RunningPass = field(default_factory=RunningPass)
    calls: int = 0
    _cuts: dict[int, SequenceCut] = field(default_factory=dict)
    _positions: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    @property
    def ring_size(self) -> int:
        """Number of ring positions, each with `ulysses` ranks."""
        return self.group.size() // self.ulysses

    @property
    def ring_position(self) -> int:
        """Position of this rank in the ring."""
        return self.group.rank() // self.ulysses

    @property
    def view(self) -> SequenceView:
        """Document lengths and boundaries of the sequences in the running pass."""
        view = self.running.context.view
        assert view is not None, "outside of a forward pass of the model"
        return view

    def cut(self, seq_len: int) -> SequenceCut:
        """Return the sharding of sequences of `seq_len` tokens over the ranks."""
        return self._cuts.setdefault(seq_len, SequenceCut(seq_len, self.ring_size, self.ulysses))

    def local_tokens(self, whole: Tensor, fill: int) -> Tensor:
        """Return this rank's tokens of `whole`, [B, S] or [B, S, D]; padding is filled with `fill`.

        S must be the sequence length of a batch that `shard_inputs` has sharded.
        """
        cut = self.cut(whole.shape[1])
        return _select_tokens(whole, self._positions[whole.shape[1], whole.device], cut, fill)

    def local_lengths(self, _: Tensor) -> Tensor:
        """Return the document length of each of this rank's tokens in the running pass, for `rotate_by_document`."""
        return self.view.lengths

    def position_ids(self) -> Tensor:
        """Return the positions of this rank's tokens in their sequences; padding has the last position, S - 1."""
        view = self.view
        length, device = view.cut.seq_len, view.lengths.device
        return self._positions[length, device].clamp(max=length - 1)

    def shard_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a microbatch with this rank's tokens, [B, padded length / cp], and set `view` for its forward pass.

        The result always has `position_ids`. If the batch has targets, `labels` and `shift_labels` of the result are
        both shifted, and `num_items_in_batch` is counted if it is missing. Every pipeline stage calls this method for a
        microbatch, because all stages need positions and `view`.

        Args:
            batch: Arguments of the model's forward; `position_ids` restart at each document.
        """
        inputs = dict(batch)
        tokens = next(t for n in TOKENS if (t := inputs.get(n)) is not None)
        length, device = tokens.shape[1], tokens.device
        cut = self.cut(length)
        if (length, device) not in self._positions:
            rank_positions = cut.positions(self.group.rank())
            self._positions[length, device] = torch.tensor(rank_positions, device=device)
        index = self._positions[length, device]
        positions = inputs.get("position_ids")
        if positions is None:
            inputs["position_ids"] = index.unsqueeze(0)
            view = SequenceView(cut, torch.full_like(inputs["position_ids"], length))
        else:
            lengths = _select_tokens(document_lengths(positions), index, cut, 1)
            tail = positions[:, -1:] + torch.arange(1, cut.padded - length + 1, device=device)
            positions = torch.cat((positions, tail), dim=1)
            view = sequence_view(cut, positions.expand(tokens.shape[0], -1), lengths)
            inputs["position_ids"] = positions.index_select(1, index)
        labels, targets = inputs.get("labels"), inputs.get("shift_labels")
        if targets is None and labels is not None:
            targets = shifted(labels)
        if targets is not None:
            if inputs.get("num_items_in_batch") is None:
                inputs["num_items_in_batch"] = (targets != IGNORED).sum().clamp(min=1)
            inputs["shift_labels"] = _select_tokens(targets, index, cut, IGNORED)
            inputs["labels"] = inputs["shift_labels"]
        for name in TOKENS:
            if inputs.get(name) is not None:
                inputs[name] = _select_tokens(inputs[name], index, cut, 0)
        self.running.update(view=view)
        self.calls = 0
        return inputs


def _select_tokens(whole: Tensor, index: Tensor, cut: SequenceCut, fill: int) -> Tensor:
    """Pad [B, S] or [B, S, D] with `fill` to the padded length, and select the tokens `index`."""
    missing = cut.padded - cut.seq_len
    if missing:
        whole = F.pad(whole, (0, 0) * (whole.dim() - 2) + (0, missing), value=fill)
    return whole.index_select(1, index)


def sequence_view(cut: SequenceCut, positions: Tensor, lengths: Tensor) -> SequenceView:
    """Return the document lengths and boundaries of the sequences with these positions, [B, padded length].

    As in transformers, a document starts where a position is not the previous position plus one. `lengths` are the
    document lengths of this rank's tokens.
    """
    steps = positions.diff(dim=1, prepend=positions[:, :1] - 1)
    documents = (steps != 1).cumsum(dim=1)
    spans = [span for rank_spans in cut.spans for span in rank_spans]
    ends = torch.tensor([p for a, b in spans for p in (a, b - 1)], device=positions.device)
    by_span = documents.index_select(1, ends).unflatten(1, (-1, 2)).transpose(0, 1).tolist()
    if not any(last for rows in by_span for _, last in rows):
        return SequenceView(cut, lengths)
    bounds = {s: tuple((a, b) for a, b in rows) for s, rows in zip(spans, by_span, strict=True)}
    return SequenceView(cut, lengths, documents, bounds)

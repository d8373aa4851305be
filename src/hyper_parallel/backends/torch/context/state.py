"""State of context parallelism: which tokens this rank holds, and what attention must know of the running pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hyper_parallel.backends.torch.rotary_lengths import document_lengths
from hyper_parallel.backends.torch.vocab_parallel_loss import shifted
from hyper_parallel.ir import Interval, SequenceCut, Strategy

TOKENS = ("input_ids", "inputs_embeds")
_IGNORED = -100  # `ignore_index` of torch's cross entropy, which Hugging Face labels use too


@dataclass(frozen=True, slots=True)
class SequenceView:
    """What attention must know of the sequences of one forward pass."""

    cut: SequenceCut
    lengths: Tensor
    """[B, padded length / cp] length of the document of each of this rank's tokens, of the whole sequences."""
    documents: Tensor | None = None
    """[B, padded length] number of the document of every position; None: each row is one."""
    bounds: Mapping[Interval, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    """Per span of positions and row the first and last document; empty without documents."""


@dataclass(slots=True)
class ContextState:
    """Context-parallel state of one model.

    Attributes:
        gathers: Keys and values are gathered at once instead of being exchanged in rounds.
        ulysses: Ranks that exchange heads for tokens, inside the group.
        view: The forward pass that runs; None outside of one.
        calls: Attention calls of this pass.
    """

    group: dist.ProcessGroup
    gathers: bool
    ulysses: int
    view: SequenceView | None = None
    calls: int = 0
    _cuts: dict[int, SequenceCut] = field(default_factory=dict)
    _positions: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Strategy, group: dist.ProcessGroup) -> ContextState:
        """The state of a strategy with cp above one."""
        return cls(group, strategy.cp_kind == "all_gather", strategy.ulysses)

    @property
    def ring(self) -> int:
        """Places of the ring, each of `ulysses` ranks."""
        return self.group.size() // self.ulysses

    @property
    def place(self) -> int:
        """This rank's place."""
        return self.group.rank() // self.ulysses

    def cut(self, seq_len: int) -> SequenceCut:
        """How sequences of a length are cut."""
        return self._cuts.setdefault(seq_len, SequenceCut(seq_len, self.ring, self.ulysses))

    def own(self, whole: Tensor, fill: int) -> Tensor:
        """This rank's tokens of [B, S] or [B, S, D], of sequences as long as those of the running pass."""
        cut = self.cut(whole.shape[1])
        return _cut(whole, self._positions[whole.shape[1], whole.device], cut, fill)

    def own_lengths(self, _: Tensor) -> Tensor:
        """Lengths of the documents of this rank's tokens of the running pass."""
        assert self.view is not None
        return self.view.lengths

    def places(self) -> Tensor:
        """Places of this rank's tokens in the sequences of the running pass; those of padding are the last one's."""
        assert self.view is not None
        length, device = self.view.cut.seq_len, self.view.lengths.device
        return self._positions[length, device].clamp(max=length - 1)

    def shard_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's tokens of a microbatch, [B, padded length / cp], and the state of its forward pass.

        `batch` are arguments of the model's forward; `position_ids` begin again where a document does. The result has
        `shift_labels` for `labels`, and `position_ids` in any case. Every pipeline stage runs this on the same
        microbatch: the first uses the ids, the last the labels, all of them the positions and the state.
        """
        given = dict(batch)
        tokens = next(t for n in TOKENS if (t := given.get(n)) is not None)
        length, device = tokens.shape[1], tokens.device
        cut = self.cut(length)
        if (length, device) not in self._positions:
            held = cut.positions(self.group.rank())
            self._positions[length, device] = torch.tensor(held, device=device)
        mine = self._positions[length, device]
        positions = given.get("position_ids")
        if positions is None:
            given["position_ids"] = mine.unsqueeze(0)
            self.view = SequenceView(cut, torch.full_like(given["position_ids"], length))
        else:
            lengths = _cut(document_lengths(positions), mine, cut, 1)
            tail = positions[:, -1:] + torch.arange(1, cut.padded - length + 1, device=device)
            positions = torch.cat((positions, tail), dim=1)
            self.view = view_of(cut, positions.expand(tokens.shape[0], -1), lengths)
            given["position_ids"] = positions.index_select(1, mine)
        labels, targets = given.get("labels"), given.get("shift_labels")
        if targets is None and labels is not None:
            targets = shifted(labels, _IGNORED)
        if targets is not None:
            if given.get("num_items_in_batch") is None:
                given["num_items_in_batch"] = (targets != _IGNORED).sum().clamp(min=1)
            given["shift_labels"] = _cut(targets, mine, cut, _IGNORED)
            given["labels"] = given["shift_labels"]
        for name in TOKENS:
            if given.get(name) is not None:
                given[name] = _cut(given[name], mine, cut, 0)
        self.calls = 0
        return given


def _cut(whole: Tensor, mine: Tensor, cut: SequenceCut, fill: int) -> Tensor:
    """The tokens `mine` of [B, S] or [B, S, D]."""
    missing = cut.padded - cut.seq_len
    if missing:
        whole = F.pad(whole, (0, 0) * (whole.dim() - 2) + (0, missing), value=fill)
    return whole.index_select(1, mine)


def view_of(cut: SequenceCut, positions: Tensor, lengths: Tensor) -> SequenceView:
    """Documents from positions that do not follow on the one before, as transformers reads them."""
    steps = positions.diff(dim=1, prepend=positions[:, :1] - 1)
    documents = (steps != 1).cumsum(dim=1)
    spans = [span for held in cut.spans for span in held]
    ends = torch.tensor([p for a, b in spans for p in (a, b - 1)], device=positions.device)
    at = documents.index_select(1, ends).unflatten(1, (-1, 2)).transpose(0, 1).tolist()
    if not any(last for rows in at for _, last in rows):
        return SequenceView(cut, lengths)
    bounds = {s: tuple((a, b) for a, b in rows) for s, rows in zip(spans, at, strict=True)}
    return SequenceView(cut, lengths, documents, bounds)

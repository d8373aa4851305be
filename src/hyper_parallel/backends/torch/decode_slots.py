"""Passes of a model over many sequences at once, each in a slot of a KV cache of fixed size.

    slot      keys and values [H, N, K] of one sequence per layer, from column 0 on: its column is a token's position
    pass      the next tokens of some slots, [B, S], the shorter ones padded in front; logits after each one's last

A column beyond a row's position is never seen, so what an earlier sequence left in a slot needs no clearing, and a
row's numbers do not depend on the other rows (a matrix product of another height may round differently). The extra
column N takes what padding writes. Runs on a plain model and on one that passed through `parallelize`: under tensor
parallelism the cache has this rank's heads, in a pipeline every rank the layers of its stages.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Cache, StaticCache

from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.parallel_handle import attached, known_properties
from hyper_parallel.backends.torch.pipeline.inference import run_stages
from hyper_parallel.backends.torch.static_cache import (
    FixedLayer,
    mask_argument,
    masks,
    why_no_own_cache,
)
from hyper_parallel.errors import BadValue
from hyper_parallel.ir import PROMPT_CHUNK


@dataclass(slots=True)
class _Write:
    """Where a pass reads and writes: slots, as a span where they are one, and columns [B, S] of its tokens."""

    rows: Tensor
    span: slice | None
    columns: Tensor
    width: int


class _SlotLayer(FixedLayer):
    """Keys and values of one layer, [slots, H, N + 1, K] each."""

    write: _Write

    def __init__(self, slots: int, length: int) -> None:
        super().__init__(length + 1)
        self._slots = slots

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            one = (like[:1].expand(self._slots, -1, -1, -1) for like in (key_states, value_states))
            self.lazy_initialization(*one)
        write, read = self.write, []
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept[write.rows[:, None], :, write.columns] = new.transpose(1, 2)
            # Rows that follow each other are read in place, others are copied.
            rows = write.rows if write.span is None else write.span
            read.append(kept[rows, :, : write.width])
        return read[0], read[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.write.width, 0


class Passes:
    """What decoding asks of a model.

    Attributes:
        slots: Sequences at a time.
        chunk: Most tokens of one that a pass reads.
    """

    def __init__(self, model: Any, slots: int, chunk: int = sys.maxsize) -> None:
        self.slots, self.chunk = slots, chunk
        self._model, self._handle = model, attached(model)
        self._device: torch.device = model.device if self._handle is None else self._handle.device

    def feed(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor | None:
        """Logits [B, V] after the tokens that rows read next, from their position `starts` on.

        None on a rank that has none: of a pipeline, all but the last stage's.
        """
        raise NotImplementedError

    def move(self, source: int, target: int) -> None:
        """Let the sequence of one slot go on in another."""

    def idle(self) -> None:
        """A pass for nobody, into a free slot: other ranks meet this one in the collectives of theirs."""
        self.feed([0], [[0]], [0])

    def anywhere(self, busy: bool, halted: bool) -> tuple[bool, bool]:
        """Whether any of the ranks that must pass together has work, and whether any is interrupted.

        Replicas of whole parameters do not need each other.
        """
        strategy = None if self._handle is None else self._handle.plan.strategy
        if strategy is None or strategy.world_size == strategy.dp_replicate:
            return busy, halted
        flags = torch.tensor([float(busy), float(halted)], device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._handle.ranks.world_group)
        busy, halted = flags.bool().tolist()
        return busy, halted

    def share(self, chosen: Tensor | None, rows: int) -> Tensor:
        """Numbers [2, B] that the ranks with logits chose, on every rank."""
        pipeline = None if self._handle is None else self._handle.pipeline
        if pipeline is None:
            assert chosen is not None
            return chosen
        if chosen is None:
            chosen = torch.empty(2, rows, dtype=torch.float64, device=self._device)
        source = pipeline.stages.rank_of[pipeline.last]
        dist.broadcast(chosen, group=pipeline.group, group_src=source)
        return chosen

    def _logits(self, **inputs: Any) -> Tensor | None:
        """Logits [B, S, V] of the model; None on pipeline ranks without them."""
        with torch.no_grad():
            if self._handle is not None and self._handle.pipeline is not None:
                return run_stages(self._handle.pipeline, self._model, inputs)
            logits: Tensor = self._model(**inputs).logits
            return logits


class OneSlot(Passes):
    """Passes of one sequence by the prompt step and the decode step of a model, however they run."""

    def __init__(self, model: Any, steps: Any) -> None:
        super().__init__(model, 1)
        self._steps = steps

    def feed(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor:
        """As in `Passes`."""
        (part,), (start,) = tokens, starts
        logits: Tensor = self._steps.next(part[0]) if start else self._steps.prompt([*part])
        return logits[None]


class SlotPasses(Passes):
    """Cached passes of a model.

    Args:
        model: A causal language model for which `why_no_slots` gives None.
        slots: Sequences at a time.
        length: Most tokens of one that are read.
        chunk: Most tokens of one in a pass.
    """

    def __init__(self, model: Any, slots: int, length: int, chunk: int = PROMPT_CHUNK) -> None:
        super().__init__(model, slots, chunk)
        self._length, handle = length, self._handle
        self._dtype: torch.dtype = model.dtype
        if handle is not None:
            self._dtype = getattr(torch, handle.plan.workload.compute_dtype)
        layers = StaticCache(config=model.config, max_cache_len=length).layers
        self._layers = [_SlotLayer(slots, length) for _ in layers]
        self._more: dict[str, Any] = {cache_argument(model.forward): Cache(layers=self._layers)}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._more["logits_to_keep"] = 1  # [B, 1, V] and not [B, S, V]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values on this rank; 0 before the first pass."""
        made = [layer for layer in self._layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in made)

    def feed(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor | None:
        """As in `Passes`."""
        size, device = max(map(len, tokens)), self._device
        ids = torch.tensor([[0] * (size - len(part)) + [*part] for part in tokens])
        ends = torch.tensor([start + len(part) for start, part in zip(starts, tokens, strict=True)])
        columns = ends[:, None] - size + torch.arange(size)
        padding = columns < torch.tensor(starts)[:, None]
        span = slice(rows[0], rows[0] + len(rows))
        write = _Write(
            torch.tensor(rows, device=device),
            span if [*rows] == [*range(span.start, span.stop)] else None,
            columns.masked_fill(padding, self._length).to(device),
            int(ends.max()),
        )
        for layer in self._layers:
            layer.write = write
        positions = columns.masked_fill(padding, 0).to(device)
        seen = masks(self._model, positions, write.width, self._dtype)
        logits = self._logits(
            input_ids=ids.to(device),
            position_ids=positions,
            attention_mask=mask_argument(self._model, seen),
            use_cache=True,
            **self._more,
        )
        return None if logits is None else logits[:, -1]

    def move(self, source: int, target: int) -> None:
        """As in `Passes`."""
        for layer in self._layers:
            if layer.is_initialized:
                layer.keys[target] = layer.keys[source]
                layer.values[target] = layer.values[source]


class WholePasses(Passes):
    """The same by the forward pass of training: each reads all texts of a microbatch at its full width.

    Args:
        model: As of `SlotPasses`; need not keep keys and values.
        ids: [B, S] texts so far with what stands behind them, which attention that is causal never sees.
        rows: Row of the sequence in each slot.
    """

    def __init__(self, model: Any, ids: Tensor, rows: Sequence[int]) -> None:
        super().__init__(model, len(rows))
        self._ids, self._at = ids.clone(), [*rows]

    def feed(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor | None:
        """As in `Passes`."""
        at = [self._at[row] for row in rows]
        ends = [start + len(part) for start, part in zip(starts, tokens, strict=True)]
        for row, part, start, end in zip(at, tokens, starts, ends, strict=True):
            self._ids[row, start:end] = torch.tensor(part)
        logits = self._logits(input_ids=self._ids, use_cache=False)
        last = torch.tensor(ends, device=self._device) - 1
        return None if logits is None else logits[torch.tensor(at, device=self._device), last]

    def move(self, source: int, target: int) -> None:
        """As in `Passes`: a sequence stays in its row."""
        self._at[source], self._at[target] = self._at[target], self._at[source]

    def idle(self) -> None:
        """As in `Passes`."""
        self._logits(input_ids=self._ids, use_cache=False)


@dataclass(frozen=True)
class SlotSteps:
    """A step that reads prompts and one that reads a token of each slot, of fixed shapes: all slots are in every step.

    Attributes:
        slots: Sequences.
        prompt_tokens: Most tokens of one in the first step.
        length: Most tokens of one that are read.
    """

    slots: int
    prompt_tokens: int
    length: int

    def new_cache(self, model: Any) -> Cache:
        """A cache for all slots; its tensors appear with the first step."""
        layers = StaticCache(config=model.config, max_cache_len=self.length).layers
        return Cache(layers=[_SlotLayer(self.slots, self.length) for _ in layers])

    def example(self, model: Any, *, prompt: bool) -> dict[str, Tensor]:
        """Inputs of a step in its shape."""
        return self.inputs(model, [], [], [], prompt=prompt)

    def inputs(
        self,
        model: Any,
        rows: Sequence[int],
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        prompt: bool,
    ) -> dict[str, Tensor]:
        """What slots read from their position `starts` on; the other slots read padding."""
        size = self.prompt_tokens if prompt else 1
        ids = torch.zeros(self.slots, size, dtype=torch.long)
        columns = torch.full_like(ids, self.length)
        for row, part, start in zip(rows, tokens, starts, strict=True):
            ids[row, size - len(part) :] = torch.tensor(part)
            columns[row, size - len(part) :] = torch.arange(start, start + len(part))
        positions = columns.masked_fill(columns == self.length, 0)
        return {
            "input_ids": ids,
            "position_ids": positions,
            "rows": torch.arange(self.slots),
            "columns": columns,
            **masks(model, positions, self.length, model.dtype),
        }

    def run(self, model: Any, cache: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Logits [slots, V] after the last token of every slot."""
        write = _Write(inputs["rows"], slice(0, self.slots), inputs["columns"], self.length)
        for layer in cache.layers:
            layer.write = write
        with torch.no_grad():
            out = model(
                input_ids=inputs["input_ids"],
                position_ids=inputs["position_ids"],
                attention_mask=mask_argument(model, inputs),
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(model.forward): cache},
            )
        logits: Tensor = out.logits[:, -1]
        return logits


class RecomputePasses(Passes):
    """The same for a model whose keys and values are not kept: every pass reads the whole text again."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        self._texts: list[list[int]] = [[] for _ in range(slots)]

    def feed(
        self, rows: Sequence[int], tokens: Sequence[Sequence[int]], starts: Sequence[int]
    ) -> Tensor | None:
        """As in `Passes`; texts are padded behind, which attention that is causal never sees."""
        for row, part, start in zip(rows, tokens, starts, strict=True):
            self._texts[row][start:] = part
        texts = [self._texts[row] for row in rows]
        width = max(map(len, texts))
        ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
        logits = self._logits(input_ids=ids.to(self._device), use_cache=False)
        if logits is None:
            return None
        last = torch.tensor([len(text) - 1 for text in texts], device=self._device)
        return logits[torch.arange(len(rows), device=self._device), last]

    def move(self, source: int, target: int) -> None:
        """As in `Passes`."""
        self._texts[target], self._texts[source] = self._texts[source], []


def why_no_slots(model: Any) -> str | None:
    """Why a model cannot keep keys and values of several sequences in slots; None: it can."""
    if why := why_no_own_cache(model):
        return why
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "alibi", False):
        return "its attention counts distances from a mask of two dims"
    handle = attached(model)
    if handle is not None and handle.tp is not None and handle.tp.shard_sequences_over_y:
        return "attention cuts sequences over tp_y"
    properties = known_properties(model)
    if properties is not None and not properties.slot_cache.agrees:
        return "decoding with it was measured to differ from reading the whole text"
    return None


def passes_of(model: Any, slots: int, length: int) -> Passes:
    """Passes with a cache of keys and values where the model allows one.

    Raises:
        BadValue: HP102 when all of a batch would get other rotary frequencies because one text is long (longrope).
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    most = rope.get("original_max_position_embeddings") or length
    if rope.get("rope_type") == "longrope" and length > most:
        raise BadValue(
            "beyond the length it was first trained for, texts of this model depend on the longest in their batch",
            got=f"{length} tokens",
            allowed=f"at most {most} tokens of prompt and continuation",
            hint="fewer new tokens, or one prompt at a time",
        )
    if why_no_slots(model):
        properties = known_properties(model)
        batched = properties is None or (
            properties.padding_inert.agrees and properties.rows_independent.agrees
        )
        return RecomputePasses(model, slots if batched else 1)
    return SlotPasses(model, slots, length)

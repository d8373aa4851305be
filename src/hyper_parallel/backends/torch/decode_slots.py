"""Forward passes for decoding a batch of sequences, with a KV cache or on full sequences.

    slot      place of one sequence; in a KV cache, its keys and values [H, N, K] per layer, at most N tokens
    pass      forward pass over the next tokens of some slots; returns the last logits of each slot

In a KV cache of several slots, a token at position p is stored in column p of its slot. Attention masks all columns
beyond the query's position, so a slot needs no clearing for a new sequence. The tokens of a pass are left-padded to
[B, S], and padding is stored in the extra column N. The model may have passed through `parallelize`: the cache then has
the heads and layers of this rank.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Cache, StaticCache

from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.parallel_handle import attached, known_properties
from hyper_parallel.backends.torch.static_cache import (
    FixedLayer,
    mask_argument,
    masks,
    why_no_own_cache,
)
from hyper_parallel.errors import BadValue, NoLoss
from hyper_parallel.ir import PROMPT_CHUNK

Ints = Sequence[int]


@dataclass(slots=True)
class _Write:
    """Indices into the KV cache for one pass.

    Attributes:
        rows: Slot of each sequence in the pass, [B].
        span: The same slots as a slice if they are consecutive, else None.
        columns: Column of each token of the pass, [B, S].
        width: Number of columns that attention reads.
    """

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

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            one = (like[:1].expand(self._slots, -1, -1, -1) for like in (key_states, value_states))
            self.lazy_initialization(*one)
        write, read = self.write, []
        for cached, new in ((self.keys, key_states), (self.values, value_states)):
            cached[write.rows[:, None], :, write.columns] = new.transpose(1, 2)
            # Contiguous rows are read in place; other rows are copied.
            rows = write.rows if write.span is None else write.span
            read.append(cached[rows, :, : write.width])
        return read[0], read[1]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.write.width, 0


class Passes:
    """Executor of a model's forward passes for decoding.

    Attributes:
        slots: Maximum number of concurrent sequences.
        chunk: Maximum number of tokens per sequence and pass.
    """

    def __init__(self, model: Any, slots: int, chunk: int = sys.maxsize) -> None:
        self.slots, self.chunk = slots, chunk
        self._model, self._handle = model, attached(model)
        self._device: torch.device = model.device if self._handle is None else self._handle.device

    def read_tokens(self, rows: Ints, tokens: Sequence[Ints], starts: Ints) -> Tensor | None:
        """Run the model on the next tokens of B slots, and return the logits [B, V] after the last token of each slot.

        Return None on pipeline ranks without the last stage.

        Args:
            rows: The B slots.
            tokens: Next token ids of each slot.
            starts: For each slot, the position in the sequence of the first of its `tokens`.
        """
        raise NotImplementedError

    def move_sequence(self, source: int, target: int) -> None:
        """Move the sequence of slot `source` to the free slot `target`."""

    def run_idle(self) -> None:
        """Run a pass on a placeholder token, so that the collectives of ranks with work complete."""
        self.read_tokens([0], [[0]], [0])

    def combine_flags(self, busy: bool, halted: bool) -> tuple[bool, bool]:
        """Return whether any rank is `busy` (has sequences to decode), and whether any rank is `halted` (interrupted).

        Replicas with full parameters share no collectives in a pass: there the flags of this rank are returned.
        """
        strategy = None if self._handle is None else self._handle.plan.strategy
        if strategy is None or strategy.world_size == strategy.dp_replicate:
            return busy, halted
        flags = torch.tensor([float(busy), float(halted)], device=self._device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._handle.ranks.world_group)
        busy, halted = flags.bool().tolist()
        return busy, halted

    def broadcast_choices(self, chosen: Tensor | None, rows: int) -> Tensor:
        """Return sampled token ids and their log-probabilities, [2, B] float64, broadcast from the last pipeline stage.

        `chosen` are these values, or None on pipeline ranks without the last stage; `rows` is B.
        """
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
        """Return the logits [B, S, V] of the model; None on pipeline ranks without the last stage."""
        with torch.no_grad():
            pipeline = None if self._handle is None else self._handle.pipeline
            if pipeline is not None:
                return pipeline.forward(self._model, inputs, lambda: self._model(**inputs).logits)
            logits: Tensor = self._model(**inputs).logits
            return logits


class SlotPasses(Passes):
    """Executor of passes with a KV cache; the model must be one for which `slot_cache_refusal` returns None.

    `length` is the maximum number of tokens per sequence that the model reads. It never reads the last generated token.
    """

    def __init__(self, model: Any, slots: int, length: int) -> None:
        super().__init__(model, slots, PROMPT_CHUNK)
        self._length, handle = length, self._handle
        self._dtype: torch.dtype = model.dtype
        if handle is not None:
            self._dtype = getattr(torch, handle.plan.workload.compute_dtype)
        layers = StaticCache(config=model.config, max_cache_len=length).layers
        self._layers = [_SlotLayer(slots, length) for _ in layers]
        self._kwargs: dict[str, Any] = {cache_argument(model.forward): Cache(layers=self._layers)}
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._kwargs["logits_to_keep"] = 1  # [B, 1, V] instead of [B, S, V]

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values on this rank; 0 before the first pass."""
        allocated = [layer for layer in self._layers if layer.is_initialized]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in allocated)

    def read_tokens(self, rows: Ints, tokens: Sequence[Ints], starts: Ints) -> Tensor | None:
        """Run a pass with the KV cache; see `Passes`."""
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
        attention_masks = masks(self._model, positions, write.width, self._dtype)
        logits = self._logits(
            input_ids=ids.to(device),
            position_ids=positions,
            attention_mask=mask_argument(self._model, attention_masks),
            use_cache=True,
            **self._kwargs,
        )
        return None if logits is None else logits[:, -1]

    def move_sequence(self, source: int, target: int) -> None:
        """Copy the keys and values of one slot to another; see `Passes`."""
        for layer in self._layers:
            if layer.is_initialized:
                layer.keys[target] = layer.keys[source]
                layer.values[target] = layer.values[source]


class WholePasses(Passes):
    """Executor of passes without a cache, in the shapes of training.

    Each pass runs the model on all B sequences at their padded length S. Causal attention does not read the padding.

    Args:
        model: A causal language model.
        ids: Right-padded sequences so far, [B, S].
        rows: Row of `ids` with the sequence of each slot.
    """

    def __init__(self, model: Any, ids: Tensor, rows: Ints) -> None:
        super().__init__(model, len(rows))
        self._ids, self._rows = ids.clone(), [*rows]

    def read_tokens(self, rows: Ints, tokens: Sequence[Ints], starts: Ints) -> Tensor | None:
        """Run a pass over all sequences; see `Passes`."""
        id_rows = [self._rows[row] for row in rows]
        ends = [start + len(part) for start, part in zip(starts, tokens, strict=True)]
        for row, part, start, end in zip(id_rows, tokens, starts, ends, strict=True):
            self._ids[row, start:end] = torch.tensor(part)
        logits = self._logits(input_ids=self._ids, use_cache=False)
        last = torch.tensor(ends, device=self._device) - 1
        return None if logits is None else logits[torch.tensor(id_rows, device=self._device), last]

    def move_sequence(self, source: int, target: int) -> None:
        """Exchange the rows of two slots; see `Passes`. Nothing is copied."""
        rows = self._rows
        rows[source], rows[target] = rows[target], rows[source]

    def run_idle(self) -> None:
        """Run a pass over the unchanged sequences; see `Passes`."""
        self._logits(input_ids=self._ids, use_cache=False)


@dataclass(frozen=True)
class SlotSteps:
    """Two passes of fixed shapes: the prompt step on several tokens per slot, and the decode step on one.

    Both run all slots; slots without tokens read padding. A single slot has no padding, and its prompt step no mask.

    Attributes:
        slots: Number of slots.
        prompt_tokens: Maximum number of tokens per slot in the prompt step; with a single slot, the exact number.
        length: Maximum number of tokens per sequence that the model reads.
    """

    slots: int
    prompt_tokens: int
    length: int

    def new_cache(self, model: Any) -> Cache:
        """Return a cache for all slots; the first step allocates its tensors."""
        layers = StaticCache(config=model.config, max_cache_len=self.length).layers
        if self.slots == 1:
            return Cache(layers=[FixedLayer(self.length) for _ in layers])
        return Cache(layers=[_SlotLayer(self.slots, self.length) for _ in layers])

    def example(self, model: Any, *, prompt: bool) -> dict[str, Tensor]:
        """Return inputs with placeholder values of the prompt step, or of the decode step if not `prompt`."""
        if self.slots == 1:
            part = [0] * (self.prompt_tokens if prompt else 1)
            return self.inputs(model, [0], [part], [0], prompt=prompt)
        return self.inputs(model, [], [], [], prompt=prompt)

    def inputs(
        self, model: Any, rows: Ints, tokens: Sequence[Ints], starts: Ints, *, prompt: bool
    ) -> dict[str, Tensor]:
        """Return the inputs of a step; arguments as in `Passes.read_tokens`. Slots not in `rows` read padding."""
        device = model.device
        if self.slots == 1:
            (part,), (start,) = tokens, starts
            positions = torch.arange(start, start + len(part), device=device)[None]
            return {
                "input_ids": torch.tensor([[*part]], device=device),
                "position_ids": positions,
                **({} if prompt else masks(model, positions, self.length, model.dtype)),
            }
        size = self.prompt_tokens if prompt else 1
        ids = torch.zeros(self.slots, size, dtype=torch.long)
        columns = torch.full_like(ids, self.length)
        for row, part, start in zip(rows, tokens, starts, strict=True):
            ids[row, size - len(part) :] = torch.tensor(part)
            columns[row, size - len(part) :] = torch.arange(start, start + len(part))
        columns = columns.to(device)
        positions = columns.masked_fill(columns == self.length, 0)
        return {
            "input_ids": ids.to(device),
            "position_ids": positions,
            "rows": torch.arange(self.slots, device=device),
            "columns": columns,
            **masks(model, positions, self.length, model.dtype),
        }

    def run(self, model: Any, cache: Any, inputs: dict[str, Tensor]) -> Tensor:
        """Run the model on the inputs of a step; return the logits [slots, V] after the last token of every slot."""
        mask = mask_argument(model, inputs)
        for layer in cache.layers:
            if self.slots == 1:
                layer.position = None if mask is None else inputs["position_ids"][0]
            else:
                every = slice(0, self.slots)
                layer.write = _Write(inputs["rows"], every, inputs["columns"], self.length)
        with torch.no_grad():
            out = model(
                input_ids=inputs["input_ids"],
                position_ids=inputs["position_ids"],
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(model.forward): cache},
            )
        logits: Tensor = out.logits[:, -1]
        return logits


class FixedPasses(Passes):
    """Executor of passes in fixed shapes: each pass runs the prompt step or the decode step of `SlotSteps`.

    The model must be one for which `why_no_own_cache` returns None.
    """

    def __init__(self, model: Any, fixed: SlotSteps) -> None:
        super().__init__(model, fixed.slots)
        self._fixed, self._slots, self._has_run = fixed, [*range(fixed.slots)], False
        self.cache = fixed.new_cache(model)

    def read_tokens(self, rows: Ints, tokens: Sequence[Ints], starts: Ints) -> Tensor:
        """Run a prompt step in the first pass or if a slot has several tokens, else a decode step; see `Passes`."""
        prompt = not self._has_run or max(map(len, tokens)) > 1
        self._has_run = True
        slots = [self._slots[row] for row in rows]
        inputs = self._fixed.inputs(self._model, slots, tokens, starts, prompt=prompt)
        logits = self._run_step(inputs, prompt=prompt)
        return logits if self.slots == 1 else logits[slots]

    def _run_step(self, inputs: dict[str, Tensor], *, prompt: bool) -> Tensor:
        return self._fixed.run(self._model, self.cache, inputs)

    def move_sequence(self, source: int, target: int) -> None:
        """Exchange the cache entries of two slots without a copy; see `Passes`."""
        slots = self._slots
        slots[source], slots[target] = slots[target], slots[source]


class GrowingPasses(Passes):
    """Executor of passes over a single sequence, with the model's own cache.

    The model returns the state for its next pass (keys and values, or a recurrent state) under the name of the forward
    argument that receives it. A pass runs on the full sequence if the model returns no state, or if cached decoding was
    measured to differ from a pass over the full sequence.

    Args:
        model: Language model, also with images or audio as inputs.
        media: Numpy arrays of the prompt's images and audio by argument name of the forward; with media, the model
            computes positions itself.
        per_token: Names of those arrays that have one number for each token of the prompt.
    """

    def __init__(self, model: Any, media: Mapping[str, Any] | None = None, per_token: Collection[str] = ()) -> None:
        super().__init__(model, 1)
        self._per_token = per_token
        self._media = {name: _on_device(array, model) for name, array in (media or {}).items()}
        properties = known_properties(model)
        self._caches = properties is None or properties.growing_cache.agrees
        self._parameters = inspect.signature(model.forward).parameters
        self._text: list[int] = []
        self._memory: dict[str, Any] = {}

    def read_tokens(self, rows: Ints, tokens: Sequence[Ints], starts: Ints) -> Tensor:
        """Run the model on the next tokens; position 0 begins a new sequence. Raise HP514 without logits per token."""
        (ids,), (start,) = tokens, starts
        if start == 0:
            self._text, self._memory = [], {}
        self._text += ids
        read = [*ids] if self._memory else self._text
        kwargs: dict[str, Any] = {"logits_to_keep": 1}
        if self._media:
            kwargs |= {} if self._memory else self._padded_media()
        elif self._caches:
            # Without positions, a model derives them from the cache of its first layer, which has no length if the
            # layer is recurrent.
            positions = torch.arange(len(self._text) - len(read), len(self._text))
            kwargs["position_ids"] = positions.to(self._device).unsqueeze(0)
        with torch.no_grad():
            out = self._model(
                input_ids=torch.tensor([read], device=self._device),
                use_cache=self._caches,
                **{name: value for name, value in kwargs.items() if name in self._parameters},
                **self._memory,
            )
        if self._caches:
            self._memory = {name: out[name] for name in out if name in self._parameters}
            if self._media:  # this mask has the length of the prompt
                self._memory.pop("attention_mask", None)
        if out.logits.shape[1] not in (1, len(read)):  # as for block diffusion models
            raise NoLoss(
                "the model's logits do not match its tokens: one position per token is needed",
                where=type(self._model).__name__,
                got=f"{out.logits.shape[1]} positions for {len(read)} tokens",
                allowed="causal language models, which predict a next token at every position",
            )
        logits: Tensor = out.logits[:, -1]
        return logits

    def _padded_media(self) -> dict[str, Tensor]:
        """Return the media and an attention mask by name; arrays in `per_token` are padded to the sequence length."""
        size = len(self._text)
        # Some models derive the positions of a prompt only with a mask.
        arrays = {"attention_mask": torch.ones(1, size, dtype=torch.long, device=self._device)}
        for name, array in self._media.items():
            missing = size - array.shape[-1] if name in self._per_token else 0
            arrays[name] = torch.nn.functional.pad(array, (0, missing)) if missing else array
        return arrays


def _on_device(array: Any, model: Any) -> Tensor:
    tensor = torch.from_numpy(array).to(model.device)
    return tensor.to(model.dtype) if tensor.is_floating_point() else tensor


class RecomputePasses(Passes):
    """Executor of passes without a cache: every pass runs on full sequences."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        self._texts: list[list[int]] = [[] for _ in range(slots)]

    def read_tokens(self, rows: Ints, tokens: Sequence[Ints], starts: Ints) -> Tensor | None:
        """Run a pass over the full sequences of these slots, right-padded; see `Passes`."""
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

    def move_sequence(self, source: int, target: int) -> None:
        """Move the token ids of one slot to another; see `Passes`."""
        self._texts[target], self._texts[source] = self._texts[source], []


def slot_cache_refusal(model: Any) -> str | None:
    """Return the reason why the model cannot decode several sequences in one KV cache; None if it can."""
    if why := why_no_own_cache(model):
        return why
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "alibi", False):
        return "its attention derives distances from a 2-D mask"
    handle = attached(model)
    if handle is not None and handle.tp is not None and handle.tp.shard_sequences_over_y:
        return "attention shards sequences over tp_y"
    properties = known_properties(model)
    if properties is not None and not properties.slot_cache.agrees:
        return "in a measurement, decoding with a cache differed from a pass over the full text"
    return None


def passes_of(model: Any, slots: int, length: int) -> Passes:
    """Return an executor of passes: with a KV cache if the model supports one, else on full sequences.

    `slots` and `length` are those of `SlotPasses`. Without a KV cache, the executor has one slot if other rows or
    padding were measured to change the results of a sequence.

    Raises:
        BadValue: HP102 when `length` exceeds the original length of a longrope model, beyond which one long sequence
            changes the rotary frequencies of the whole batch.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    max_length = rope.get("original_max_position_embeddings") or length
    if rope.get("rope_type") == "longrope" and length > max_length:
        raise BadValue(
            "beyond the original training length, this model's results depend on the longest sequence of the batch",
            got=f"{length} tokens",
            allowed=f"at most {max_length} tokens of prompt and continuation",
            hint="use fewer new tokens, or one prompt at a time",
        )
    if slot_cache_refusal(model):
        properties = known_properties(model)
        batched = properties is None or (properties.padding_inert.agrees and properties.rows_independent.agrees)
        return RecomputePasses(model, slots if batched else 1)
    return SlotPasses(model, slots, length)

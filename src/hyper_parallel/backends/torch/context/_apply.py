"""Context parallelism: every rank of a cp group gets whole sequences, keeps its tokens, and attention sees all of them.

    root            ids, labels and positions are padded and cut (`Context.shard_inputs`); logits are joined again
    decoder layers  run on [B, S / cp, D]; only attention knows that there are other tokens (`_context_attention`)
    loss            the sum over this rank's tokens; the ranks' sums add up to the loss of the sequences

Attention is reached through the attention interface of transformers: the model's config names one function, which finds
the `Context` of its model on the attention module. Model code and masks are not touched: the masks a model would build
(causal, packed documents, sliding window) are applied where blocks of keys meet blocks of queries.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch._collectives import join_sequence
from hyper_parallel.backends.torch._loss import shifted
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Interval, SequenceCut, Strategy, ulysses_degree

INTERFACE = "hyper_parallel"
"""Name of our function in the attention interface of transformers."""
ATTRIBUTE = "_hyper_parallel_context"
_LAYER_KINDS = ("full_attention", "sliding_attention")
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class View:
    """What attention must know of the sequences of one forward pass.

    Attributes:
        cut: Which tokens which rank holds.
        documents: [B, padded length] number of the document of every position, or None when each row is one.
        bounds: (spans, B) to the first and last document of a span of positions; empty without documents.
        last: Largest position of the pass, padding left out, a scalar.
    """

    cut: SequenceCut
    documents: Tensor | None
    bounds: Mapping[Interval, tuple[tuple[int, int], ...]]
    last: Tensor


@dataclass(slots=True)
class Context:
    """Context-parallel state of one model.

    Attributes:
        group: Ranks of this rank's context-parallel group.
        gathers: Keys and values are gathered at once instead of being exchanged in rounds.
        ulysses: Ranks that exchange heads for tokens, inside the group.
        view: The forward pass that runs; None outside of one.
        calls: Attention calls of this pass.
    """

    group: dist.ProcessGroup
    gathers: bool
    ulysses: int
    view: View | None = None
    calls: int = 0
    _cuts: dict[int, SequenceCut] = field(default_factory=dict)
    _positions: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, strategy: Strategy, group: dist.ProcessGroup) -> Context:
        """The state of a strategy with cp above one."""
        ulysses = ulysses_degree(strategy.cp, strategy.cp_kind, strategy.cp_ulysses)
        return cls(group, strategy.cp_kind == "all_gather", ulysses)

    @property
    def ring(self) -> int:
        """Places of the ring, each of `ulysses` ranks."""
        return self.group.size() // self.ulysses

    def cut(self, seq_len: int) -> SequenceCut:
        """How sequences of a length are cut."""
        return self._cuts.setdefault(seq_len, SequenceCut(seq_len, self.ring, self.ulysses))

    def shard_inputs(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's tokens of a microbatch, and the state of its forward pass.

        Every pipeline stage runs it on the same microbatch: the first uses the ids, the last the labels, all of them
        the positions and the state.

        Args:
            batch: Arguments of the model's forward with whole sequences: `input_ids` or `inputs_embeds`, and
                optionally `labels`, `shift_labels` and `position_ids` (which begin again where a document does).

        Returns:
            The same arguments with this rank's tokens, [B, padded length / cp], `shift_labels` for `labels`, and
            `position_ids` in any case.
        """
        found = dict(batch)
        tokens = next(t for n in _TOKENS if (t := found.get(n)) is not None)
        length, device = tokens.shape[1], tokens.device
        cut = self.cut(length)
        if (length, device) not in self._positions:
            held = cut.positions(self.group.rank())
            self._positions[length, device] = torch.tensor(held, device=device)
        mine = self._positions[length, device]
        positions = found.get("position_ids")
        if positions is None:
            self.view = View(cut, None, {}, torch.tensor(length - 1, device=device))
            found["position_ids"] = mine.unsqueeze(0)
        else:
            last = positions.max()
            tail = positions[:, -1:] + torch.arange(1, cut.padded - length + 1, device=device)
            positions = torch.cat((positions, tail), dim=1)
            self.view = _view(cut, positions.expand(tokens.shape[0], -1), last)
            found["position_ids"] = positions.index_select(1, mine)
        labels, targets = found.get("labels"), found.get("shift_labels")
        if targets is None and labels is not None:
            targets = shifted(labels, _IGNORED)
        if targets is not None:
            if found.get("num_items_in_batch") is None:
                found["num_items_in_batch"] = (targets != _IGNORED).sum().clamp(min=1)
            found["shift_labels"] = _cut(targets, mine, cut, _IGNORED)
            found["labels"] = found["shift_labels"]
        for name in _TOKENS:
            if found.get(name) is not None:
                found[name] = _cut(found[name], mine, cut, 0)
        self.calls = 0
        return found

    def attach(self, model: nn.Module, base: nn.Module, layers: nn.ModuleList) -> None:
        """Let the attention of a Hugging Face model find this state.

        Args:
            model: The model.
            base: Its decoder without the head.
            layers: Its decoder layers.

        Raises:
            UnsupportedSharding: HP205 for attention that context parallelism does not repeat exactly.
        """
        config = base.config
        _refuse(config)
        own = copy.deepcopy(config)  # another model may have been made from the same config
        own._attn_implementation = INTERFACE
        for module in model.modules():
            if module.__dict__.get("config") is config:
                module.config = own
        for module in layers.modules():
            object.__setattr__(module, ATTRIBUTE, self)
        if _rope_types(config) & {"dynamic", "longrope"}:
            self._wrap_rotary(base.rotary_emb)

    def wrap_root(
        self, model: nn.Module, num_layers: Callable[[], int], joins: bool = True
    ) -> None:
        """Cut the inputs of a model where its forward begins, and join its outputs where it ends.

        Args:
            model: The model that is called with whole sequences.
            num_layers: Layers that must call attention in the forward pass that ends.
            joins: Return whole outputs where there are no labels; stages of a pipeline have none to return.
        """
        names = list(inspect.signature(model.forward).parameters)

        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            batch = {**dict(zip(names, args, strict=False)), **kwargs}
            _refuse_call(module, batch)
            return (), {**self.shard_inputs(batch), "use_cache": False}

        def after(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
            view = self.view
            assert view is not None
            expected = num_layers()
            if self.calls != expected:
                raise UnsupportedSharding(
                    "context parallelism needs every decoder layer to call the attention interface once",
                    where=type(module).__name__,
                    got=f"{self.calls} calls in {expected} layers",
                    hint="parallel.cp=1",
                )
            if not joins:
                return output
            if isinstance(output, tuple):
                raise UnsupportedSharding(
                    "tuple outputs are not assembled under context parallelism",
                    where=type(module).__name__,
                    hint="return_dict=True",
                )
            for name in ("logits", "last_hidden_state"):
                if getattr(output, name, None) is not None:
                    whole = None if kwargs.get("labels") is not None else self._join(output[name])
                    output[name] = whole
            return output

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, with_kwargs=True)

    def _wrap_rotary(self, rotary: nn.Module) -> None:
        """Show rotary embeddings whose frequencies follow the largest position that of the whole sequence."""
        inner = rotary.forward

        def forward(x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            assert self.view is not None
            last = self.view.last.to(position_ids).expand(position_ids.shape[0], 1)
            found = inner(x, torch.cat((position_ids, last), dim=1), *args, **kwargs)
            return tuple(table[:, :-1] for table in found)

        rotary.forward = forward

    def _join(self, local: Tensor) -> Tensor:
        """Whole sequences [B, S, ...] from every rank's tokens."""
        assert self.view is not None
        cut = self.view.cut
        order = [p for rank in range(self.group.size()) for p in cut.positions(rank)]
        back = torch.tensor(order, device=local.device).argsort()
        return join_sequence(local, back[: cut.seq_len], self.group)


_TOKENS = ("input_ids", "inputs_embeds")


def _cut(whole: Tensor, mine: Tensor, cut: SequenceCut, fill: int) -> Tensor:
    """The tokens `mine` of [B, S] or [B, S, D]."""
    missing = cut.padded - cut.seq_len
    if missing:
        whole = F.pad(whole, (0, 0) * (whole.dim() - 2) + (0, missing), value=fill)
    return whole.index_select(1, mine)


def _view(cut: SequenceCut, positions: Tensor, last: Tensor) -> View:
    """Documents from positions that do not follow on the one before, as transformers reads them."""
    steps = positions.diff(dim=1, prepend=positions[:, :1] - 1)
    documents = (steps != 1).cumsum(dim=1)
    spans = [span for held in cut.spans for span in held]
    ends = torch.tensor([p for a, b in spans for p in (a, b - 1)], device=positions.device)
    at = documents.index_select(1, ends).unflatten(1, (-1, 2)).transpose(0, 1).tolist()
    if not any(last for rows in at for _, last in rows):
        return View(cut, None, {}, last)
    bounds = {s: tuple((a, b) for a, b in rows) for s, rows in zip(spans, at, strict=True)}
    return View(cut, documents, bounds, last)


def _rope_types(config: Any) -> set[str | None]:
    """Kinds of rotary embedding of all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    return {t.get("rope_type") for t in (rope, *rope.values()) if isinstance(t, dict)}


def _refuse(config: Any) -> None:
    """Refuse configs whose attention is more than causal with windows and documents."""
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_KINDS)
    for found, what in (
        (kinds, f"layers of kind {', '.join(sorted(kinds))}"),
        (not getattr(config, "is_causal", True), "attention that is not causal"),
        (getattr(config, "use_bidirectional_attention", None), "bidirectional attention"),
        (getattr(config, "attention_chunk_size", None), "chunked attention"),
        (getattr(config, "attention_dropout", 0.0), "attention dropout"),
    ):
        if found:
            raise UnsupportedSharding(
                f"context parallelism does not know {what}",
                where=config.model_type,
                allowed="causal attention, full or with a sliding window, without dropout",
                hint="parallel.cp=1",
            )


def _refuse_call(module: nn.Module, batch: Mapping[str, Any]) -> None:
    """Refuse arguments whose meaning would change when every rank sees a part of the tokens."""
    config = module.config
    for name, why in (
        ("attention_mask", "give documents by `position_ids` that begin again, padding by labels"),
        ("past_key_values", "keys and values are not kept under context parallelism"),
        ("use_cache", "keys and values are not kept under context parallelism"),
        ("output_hidden_states", "a rank has hidden states of its tokens only"),
        ("output_attentions", "attention weights are never whole"),
    ):
        given = batch.get(name)
        if name.startswith("output_") and given is None:
            given = getattr(config, name, False)
        if given is not None and given is not False:
            raise UnsupportedSharding(
                f"`{name}` has no meaning under context parallelism: {why}",
                where=type(module).__name__,
                hint=f"{name}={'False' if isinstance(given, bool) else 'None'}",
            )

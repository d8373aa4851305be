"""Measurement of model properties, such as causality: run a small copy in float64, change an input, compare outputs.

The outputs are equal if the model has the property. A difference above `TOLERANCE`, relative to the largest output,
means that the model does not have it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyper_parallel.backends.torch.decode_slots import (
    FixedPasses,
    GrowingPasses,
    Passes,
    SlotPasses,
    SlotSteps,
    slot_cache_refusal,
)
from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.backends.torch.half_batch import HalfBatch
from hyper_parallel.backends.torch.layer_flow import preserve_module_state
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.static_cache import why_no_own_cache
from hyper_parallel.ir import Overlap
from hyper_parallel.model import ModelProperties, Property

TOLERANCE: Final = 1e-6
"""Maximum relative difference of equal outputs. Rounding errors are typically below 1e-12 in float64, and below 1e-6 in
models that keep some state in float32. A changed token typically changes outputs by more than 1e-3."""

SHORTEST: Final = 16
"""Number of tokens that the small copy of a model must be able to read."""

_DOCUMENT: Final = 11
"""Tokens of the compared document; odd, so that the document ends within a block of any even size."""
_BEFORE: Final = 7
"""Tokens of the document that precedes the compared one in a packed row."""
_PADDING: Final = 3
_PROMPT: Final = 6
"""Tokens of a prompt; the rest of the document is decoded token by token."""
_NOISE: Final = 0.05
"""Standard deviation of the noise added to every parameter, so that parameters initialized to zero have an effect."""


class StableTopK(TorchFunctionMode):
    """Mode in which `topk` selects the first among equal values.

    The choice of `torch.topk` among equal values depends on the length of the row. Small models often have equal router
    scores, because a ReLU returns exact zeros, and the choice would then look like an effect of padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **kwargs)
        bound = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | kwargs
        x, k, dim = bound["input"], int(bound["k"]), bound.get("dim", -1)
        ranked = torch.sort(x, dim=dim, descending=bound.get("largest", True), stable=True)
        values, indices = ranked.values.narrow(dim, 0, k), ranked.indices.narrow(dim, 0, k)
        return torch.return_types.topk((values, indices))


def prepare_model(model: nn.Module) -> None:
    """Prepare a small float64 model for measurements, in place.

    Set evaluation mode, add noise to the parameters, mask attention between packed documents, and keep values float64
    where the forward would convert them.
    """
    from hyper_parallel.backends.torch.context.apply import mask_documents

    model.eval()
    _perturb_parameters(model)
    if (base := view_of(model).base) is not None:
        mask_documents(base, torch.float64)
    keep_float64(model)


def measure_properties(model: nn.Module, positions: int) -> ModelProperties:
    """Return the measured properties of a model after `prepare_model`.

    A property that cannot be measured has `holds` None and a reason: an unsupported case, an exception, or outputs that
    are not finite. `history_independent` is measured with sequences beyond `positions`, the maximum length in the
    model's config, if the model can read them. `idle_modules` is empty if its measurement raises.
    """
    with torch.no_grad(), StableTopK():
        texts = _Texts(model)
        answers = {
            "causal": _answer(texts.causal),
            "padding_inert": _answer(texts.padding),
            "rows_independent": _answer(texts.rows),
            "half_batches": _answer(texts.half_batches),
            "documents_independent": _answer(texts.documents),
            "growing_cache": _answer(texts.growing_cache),
            "fixed_cache": _answer(texts.fixed_cache),
            "slot_cache": _answer(texts.slot_cache),
            "history_independent": _answer(lambda: texts.history(positions)),
        }
        idle: tuple[str, ...] = ()
        with suppress(Exception):  # code of any model may raise anything
            idle = texts.idle_modules()
    return ModelProperties(type(model).__name__, **answers, idle_modules=idle)


class _Unmeasured(Exception):
    """Signal that a property cannot be measured for the model; the message is the reason."""


def _answer(measure: Callable[[], float]) -> Property:
    try:
        difference = measure()
    except _Unmeasured as why:
        return Property(reason=str(why))
    except Exception as error:  # code of any model may raise anything
        line = (str(error).strip().splitlines() or [""])[0][:160]
        return Property(reason=f"{type(error).__name__}: {line}", error=True)
    if difference != difference:
        return Property(reason="outputs are not finite", error=True)
    return Property(difference <= TOLERANCE, difference)


def _perturb_parameters(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(noise.to(parameter.dtype), alpha=_NOISE)


class _Texts:
    """Measurements of one model on random sequences; those of properties return a `_difference` of outputs."""

    def __init__(self, model: Any) -> None:
        self._model = model
        vocabulary = len(model.get_input_embeddings().weight)
        generator = torch.Generator().manual_seed(1)
        # In many configs low ids are special tokens, and high ids are placeholders for images and other media.
        high = max(4, min(vocabulary - 20, 250))
        drawn = torch.randint(min(3, high - 1), high, (4, 256), generator=generator)
        self._drawn = drawn
        self.document = drawn[0, :_DOCUMENT]
        self.other = drawn[1, :_DOCUMENT]

    def run(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits [B, S, V] for token ids [B, S] from a pass without a KV cache."""
        kwargs = {} if positions is None else {"position_ids": positions}
        logits: Tensor = self._model(input_ids=ids, use_cache=False, **kwargs).logits
        if logits.shape[:2] != ids.shape:
            raise ValueError(f"logits of {logits.shape[1]} positions for {ids.shape[1]} tokens")
        return logits

    @functools.cached_property
    def alone(self) -> Tensor:
        """Logits [S, V] of the compared document, computed as a batch of one sequence."""
        return self.run(self.document[None])[0]

    def causal(self) -> float:
        """Replace the last tokens; return the change of the logits before them."""
        changed = self.document.clone()
        changed[-_PADDING:] = self.other[-_PADDING:]
        unchanged = _DOCUMENT - _PADDING
        return _difference(self.run(changed[None])[0, :unchanged], self.alone[:unchanged])

    def padding(self) -> float:
        """Append padding to the document; return the change of the document's logits."""
        padded = torch.cat((self.document, self.document.new_zeros(_PADDING)))
        return _difference(self.run(padded[None])[0, :_DOCUMENT], self.alone)

    def rows(self) -> float:
        """Add a second sequence to the batch; return the change of the first sequence's logits."""
        both = self.run(torch.stack((self.document, self.other)))
        return _difference(both[0], self.alone)

    def half_batches(self) -> float:
        """Run the layers on half-batches; return the change of the logits."""
        layers = [*view_of(self._model).layers]
        if not layers:
            raise _Unmeasured("the model has no list of decoder layers")
        batch = self._drawn[:, :_DOCUMENT]
        whole = self.run(batch)
        halves = HalfBatch(Overlap(half_batch=True), None, joins_layers=False)
        with preserve_module_state(self._model):
            halves.install(layers, {})
            difference = _difference(self.run(batch), whole)
        if halves.whole_layers or not halves.halved_layers:
            raise _Unmeasured("some arguments of the layers cannot be halved")
        return difference

    def documents(self) -> float:
        """Pack two documents into one row; return the largest change of their logits.

        Compare with each document alone and, for the second document, with another document before it.
        """
        positions = torch.cat((torch.arange(_BEFORE), torch.arange(_DOCUMENT)))[None]
        packed = [
            self.run(torch.cat((before, self.document))[None], positions)[0] for before in self._drawn[2:4, :_BEFORE]
        ]
        alone = self.run(self.document[None], positions[:, _BEFORE:])[0]
        first = self.run(self._drawn[2:3, :_BEFORE], positions[:, :_BEFORE])[0]
        return max(
            _difference(packed[0][_BEFORE:], packed[1][_BEFORE:]),
            _difference(packed[0][_BEFORE:], alone),
            _difference(packed[0][:_BEFORE], first),
        )

    def history(self, positions: int) -> float:
        """Run two sequences, then a longer one, then the two again; return the change of the logits of the two.

        The second of the two sequences is longer than `positions`, if the model can read such sequences.
        """
        middle, longest = positions + positions // 4, positions + positions // 2
        try:
            return self._history((_DOCUMENT, middle), longest)
        except (IndexError, RuntimeError):  # the text is longer than the model's table of positions
            return self._history((_DOCUMENT, 2 * _DOCUMENT), 3 * _DOCUMENT)

    def _history(self, lengths: tuple[int, int], longest: int) -> float:
        texts = [self._drawn[:1, :length] for length in lengths]
        before = [self.run(text) for text in texts]
        self.run(self._drawn[1:2, :longest])
        after = [self.run(text) for text in reversed(texts)][::-1]
        return max(_difference(a, b) for a, b in zip(after, before, strict=True))

    def growing_cache(self) -> float:
        """Decode with the model's own cache; return the largest difference from a pass over the full sequence.

        A second prompt has a single token, which a model with state in its modules would mistake for a decode step.
        """
        return max(self._decode(GrowingPasses(self._model), prompt) for prompt in (_PROMPT, 1))

    def fixed_cache(self) -> float:
        """Decode with a cache of fixed length; return the largest difference from a pass over the full sequence."""
        if why := why_no_own_cache(self._model):
            raise _Unmeasured(why)
        return max(
            self._decode(FixedPasses(self._model, SlotSteps(1, prompt, _DOCUMENT)), prompt) for prompt in (_PROMPT, 1)
        )

    def _decode(self, passes: Passes, prompt: int) -> float:
        ids = self.document.tolist()
        parts = pairwise((0, *range(prompt, len(ids) + 1)))
        logits = [passes.read_tokens([0], [ids[start:end]], [start]) for start, end in parts]
        return _difference(torch.cat(logits), self.alone[prompt - 1 :])

    def slot_cache(self) -> float:
        """Decode two sequences, one prefilled in two chunks; return the largest difference from full passes."""
        if why := slot_cache_refusal(self._model):
            raise _Unmeasured(why)
        passes = SlotPasses(self._model, 3, _DOCUMENT)
        short, long = _PROMPT - 2, _PROMPT
        texts = [self.document.tolist(), self.other.tolist()]
        read, decoded = [0, 0], [[], []]  # type: tuple[list[int], list[list[Tensor]]]
        rows = (2, 0)

        def feed(parts: Sequence[int]) -> None:
            tokens = [t[r : r + n] for t, r, n in zip(texts, read, parts, strict=True)]
            logits = passes.read_tokens(rows, tokens, read)
            assert logits is not None
            for i, n in enumerate(parts):
                read[i] += n
                decoded[i].append(logits[i])

        feed([long - 3, short])
        feed([3, 1])
        while max(read) < _DOCUMENT:
            feed([1, 1])
        whole = (self.alone, self.run(self.other[None])[0])
        ends = ([long - 4, *range(long - 1, _DOCUMENT)], [*range(short - 1, _DOCUMENT)])
        return max(_difference(torch.stack(d), w[e[: len(d)]]) for d, w, e in zip(decoded, whole, ends, strict=True))

    def idle_modules(self) -> tuple[str, ...]:
        """Return the names of the outermost modules whose parameters get no gradient from a batch of text."""
        with torch.enable_grad():
            weights = [p for p in self._model.parameters() if p.requires_grad]
            logits = self.run(self._drawn[:1, :32])
            grads = torch.autograd.grad(logits.square().sum(), weights, allow_unused=True)
        used = {id(p) for p, grad in zip(weights, grads, strict=True) if grad is not None}
        idle: list[str] = []
        for name, module in self._model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in idle)
            own = list(module.parameters())
            if name and own and not inside and not any(id(p) in used for p in own):
                idle.append(name)
        return tuple(idle)


def _difference(a: Tensor, b: Tensor) -> float:
    """Return max |a - b| / max |b|."""
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))

"""Whether the tokens of a model can be cut over ranks: a trial without values, before any rank starts.

Tokens may see each other in the attention interface of transformers only, there in causal order, with a window that
the interface is told of; and what differs from token to token comes from the ids and positions that are given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyper_parallel.backends.torch.context.attention import ATTRIBUTE, INTERFACE, TRIAL, register
from hyper_parallel.backends.torch.flow_tracer import OWN, POSITIONS, TOKENS, Marks
from hyper_parallel.backends.torch.layer_flow import as_it_was, refused, run_hollow
from hyper_parallel.backends.torch.token_scores import scores_tokens
from hyper_parallel.backends.torch.vocab_parallel_loss import has_causal_loss, loss_of_logits
from hyper_parallel.errors import UnsupportedSharding

_WINDOW = 5  # tokens; shorter than the sequence, so that a mask shows it


def attention_calls(model: nn.Module, base: nn.Module, layers: nn.ModuleList) -> tuple[int, ...]:
    """How often each layer calls the attention interface in a forward pass.

    Raises:
        UnsupportedSharding: HP205 with what does not work on a part of the tokens.
    """
    register()
    _Probe(model, base, layers, TRIAL).run()
    return tuple(_Probe(model, base, layers, INTERFACE).run())


def count_places(base: nn.Module, places: Callable[[], Tensor]) -> list[RemovableHandle]:
    """Give position tables that are told places [S] counted in the local tokens, as BART's are, those of `places`."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = kwargs.get("position_ids")
        if given is None or given.dim() > 1:
            return None
        return args, {**kwargs, "position_ids": places()}

    return [
        m.register_forward_pre_hook(before, with_kwargs=True)
        for m in base.modules()
        if isinstance(m, nn.Embedding) and "position_ids" in signature(m.forward).parameters
    ]


class _Probe:
    """Stands for the state of context parallelism during the trial."""

    def __init__(
        self, model: nn.Module, base: nn.Module, layers: nn.ModuleList, interface: str
    ) -> None:
        self.model, self.base, self.interface = model, base, interface
        self.config: Any = base.config
        self.marks = Marks()
        self.calls = [0] * len(layers)
        self.losses: list[int] = []
        self._layer = {id(m): i for i, layer in enumerate(layers) for m in layer.modules()}

    def run(self) -> list[int]:
        """Run the model once, and refuse what it showed."""
        model, marks = self.model, self.marks
        own = copy.deepcopy(self.config)
        own._attn_implementation = self.interface
        if self.interface == TRIAL and getattr(own, "sliding_window", None):
            own.sliding_window = _WINDOW
        positions = torch.arange(TOKENS)[None]
        marks.set(positions, POSITIONS)
        with as_it_was(model):
            for module in model.modules():
                if module.__dict__.get("config") is self.config:
                    module.config = own
                object.__setattr__(module, ATTRIBUTE, self)
            if has_causal_loss(model) or scores_tokens(model):
                model.loss_function = self._loss
                loss_of_logits(model)
            hooks = count_places(self.base, lambda: positions[0])
            try:
                run_hollow(model, marks, "cp", position_ids=positions)
            finally:
                for hook in hooks:
                    hook.remove()
        if not self.losses:
            raise self._refusal("it computes its loss without `loss_function`")
        if marks.mixes:
            raise self._refusal(f"tokens see each other in {', '.join(marks.mixes)}")
        if not any(self.calls):
            raise self._refusal("its attention does not go through the attention interface")
        if any(m & OWN for m in self.losses):
            raise self._refusal("it counts positions by itself")
        return self.calls

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        window: int | None,
        causal: bool,
    ) -> Tensor:
        """Zeros of the shape of attention's output; refuses what ranks could not compute."""
        given = (query, key, value)
        if any(x.shape[2] != TOKENS for x in given):
            raise self._refusal("attention has other keys than those of the tokens")
        if self.marks.of(given) & OWN:
            raise self._refusal("it counts positions by itself")
        if id(module) not in self._layer:
            raise self._refusal("attention is called outside of the layers")
        self.calls[self._layer[id(module)]] += 1
        if not self._is_known(mask, window, causal):
            raise self._refusal("attention has a mask that is not causal order with a window")
        shape = (1, TOKENS, query.shape[1], value.shape[3])
        return self.marks.hollow(shape, query.dtype, self.marks.of(given))

    def _is_known(self, mask: Tensor | None, window: int | None, causal: bool) -> bool:
        """Whether a mask [1, 1, S, S], true where a query sees a key, is what the interface is told."""
        if mask is None:
            return window is None or (causal and self.interface == INTERFACE)
        if self.interface == INTERFACE or mask.is_meta or mask.dtype != torch.bool:
            return False
        if not causal:
            return window is None and bool(mask.all())
        before = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        allowed = [before] if window is None or window >= TOKENS else []
        allowed += [] if window is None else [before.triu(1 - _WINDOW), before.triu(1 - window)]
        return any(bool((mask == one).all()) for one in allowed)

    def _loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.losses.append(self.marks.of(logits))
        return torch.zeros(())

    def _refusal(self, why: str) -> UnsupportedSharding:
        return refused(self.model, why, "cp")

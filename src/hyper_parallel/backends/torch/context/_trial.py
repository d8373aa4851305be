"""Check by a forward on meta tensors, without other ranks, that the sequences of a model can be sharded over ranks.

Tokens may interact only in functions of transformers' attention interface, where all tokens are visible, or the mask is
causal with an optional sliding window. All other code must compute each token from its own id and position.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.context.attention import ATTRIBUTE, INTERFACE, TRIAL
from hyper_parallel.backends.torch.flow_tracer import POSITIONS, TOKEN_DEPENDENT, TOKENS, FlowTracer
from hyper_parallel.backends.torch.layer_flow import flow_error, preserve_module_state, run_on_meta
from hyper_parallel.backends.torch.model_structure import ModelView
from hyper_parallel.backends.torch.token_scores import scores_tokens
from hyper_parallel.backends.torch.vocab_parallel_loss import has_causal_loss, use_loss_function
from hyper_parallel.errors import UnsupportedSharding

_WINDOW = 5  # tokens; shorter than the trial sequence, so that the mask depends on it


def override_position_ids(base: nn.Module, position_ids: Callable[[], Tensor]) -> None:
    """Replace one-dimensional `position_ids` of embeddings, which count local tokens (BART), by `position_ids()`."""

    def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        local = kwargs.get("position_ids")
        if local is None or local.dim() > 1:
            return None
        return args, {**kwargs, "position_ids": position_ids()}

    for module in base.modules():
        is_table = isinstance(module, nn.Embedding)
        if is_table and "position_ids" in signature(module.forward).parameters:
            module.register_forward_pre_hook(before, with_kwargs=True)


class AttentionTrial:
    """Trial forward of a model; `context_attention` calls this object in place of a `ContextState`."""

    def __init__(self, model: nn.Module, view: ModelView, interface: str) -> None:
        self.model, self.base, self.interface = model, view.base, interface
        self.config: Any = view.base.config
        self.tracer = FlowTracer()
        self.calls = [0] * len(view.layers)
        self.losses: list[int] = []
        self._layer = {id(m): i for i, layer in enumerate(view.layers) for m in layer.modules()}

    def run(self) -> list[int]:
        """Run the model once and return how often each layer calls the attention function.

        Raises:
            UnsupportedSharding: HP205 with the reason why the sequences cannot be sharded.
        """
        model, tracer = self.model, self.tracer
        config = copy.deepcopy(self.config)
        config._attn_implementation = self.interface
        if self.interface == TRIAL and getattr(config, "sliding_window", None):
            config.sliding_window = _WINDOW
        positions = torch.arange(TOKENS)[None]
        tracer.mark(positions, POSITIONS)
        with preserve_module_state(model):
            for module in model.modules():
                if module.__dict__.get("config") is self.config:
                    module.config = config
                object.__setattr__(module, ATTRIBUTE, self)
            if has_causal_loss(model) or scores_tokens(model):
                model.loss_function = self._loss
                use_loss_function(model)
            override_position_ids(self.base, lambda: positions[0])
            run_on_meta(model, tracer, "cp", position_ids=positions)
        if not self.losses:
            raise self._refusal("it computes its loss without `loss_function`")
        if tracer.mixes:
            raise self._refusal(f"tokens interact outside of the attention interface, in {', '.join(tracer.mixes)}")
        if not any(self.calls):
            raise self._refusal("its attention does not go through the attention interface")
        if any(m & TOKEN_DEPENDENT for m in self.losses):
            raise self._refusal("it computes positions itself")
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
        """Return a meta tensor of the shape of attention's output; raise for an unsupported kind of attention."""
        inputs = (query, key, value)
        if any(x.shape[2] != TOKENS for x in inputs):
            raise self._refusal("attention reads keys that do not belong to the tokens")
        if self.tracer.marks_of(inputs) & TOKEN_DEPENDENT:
            raise self._refusal("it computes positions itself")
        if id(module) not in self._layer:
            raise self._refusal("attention is called outside of the layers")
        self.calls[self._layer[id(module)]] += 1
        if not self._is_known(mask, window, causal):
            raise self._refusal("its attention mask is neither full nor causal with an optional sliding window")
        shape = (1, TOKENS, query.shape[1], value.shape[3])
        return self.tracer.meta_tensor(shape, query.dtype, self.tracer.marks_of(inputs))

    def _is_known(self, mask: Tensor | None, window: int | None, causal: bool) -> bool:
        """Return whether a mask [1, 1, S, S], True for visible keys, is the one that `window` and `causal` describe."""
        if mask is None:
            return window is None or (causal and self.interface == INTERFACE)
        if self.interface == INTERFACE or mask.is_meta or mask.dtype != torch.bool:
            return False
        if not causal:
            return window is None and bool(mask.all())
        lower = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        allowed = [lower] if window is None or window >= TOKENS else []
        allowed += [] if window is None else [lower.triu(1 - _WINDOW), lower.triu(1 - window)]
        return any(bool((mask == other).all()) for other in allowed)

    def _loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.losses.append(self.tracer.marks_of(logits))
        return torch.zeros(())

    def _refusal(self, why: str) -> UnsupportedSharding:
        return flow_error(self.model, why, "cp")

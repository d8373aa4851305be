"""Reward model: a sequence classifier with one label that scores every token.

The classifiers of transformers return one score per sequence, the score of its last token that is not padding. A
context-parallel rank may not have this token. Here the model returns the score of every token, and the objective
selects one. The weights are those of the classifier.
"""

from __future__ import annotations

from contextlib import suppress
from types import MethodType
from typing import Any, Final

from torch import Tensor, nn

from hyper_parallel.backends.torch.flow_tracer import FlowTracer
from hyper_parallel.backends.torch.layer_flow import preserve_module_state, run_on_meta
from hyper_parallel.backends.torch.model_structure import PlaceholderModule
from hyper_parallel.errors import ModelUnreadable, UnsupportedSharding

SCORE: Final = "score"
"""Name of the head in sequence classifiers of transformers."""
_SCORES: Final = "_scores_every_token"


def scores_tokens(model: nn.Module) -> bool:
    """Return whether `score_every_token` was applied to a model."""
    return bool(model.__dict__.get(_SCORES, False))


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the module that computes next-token logits or token scores; None if this rank has no such head."""
    if scores_tokens(model):
        return model.get_submodule(SCORE)
    try:
        head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    except AttributeError:
        if not any(isinstance(module, PlaceholderModule) for module in model.modules()):
            raise
        return None  # the module with the head is on another pipeline rank
    return head


def score_every_token(model: nn.Module) -> None:
    """Make a sequence classifier with one label return the scores of all tokens, [B, S, 1], as logits; in place.

    Raises:
        ModelUnreadable: HP305 for a class whose score is not a linear map of the last hidden state.
    """
    head, base = getattr(model, SCORE, None), getattr(model, model.base_model_prefix, None)
    linear = isinstance(head, nn.Linear) and head.out_features == 1 and head.bias is None
    if not (linear and base is not None and _reads_last_hidden_state(model, base, head)):
        raise ModelUnreadable(
            f"{type(model).__name__} has no head `{SCORE}` that is a linear map of the last hidden state to one number",
            where="stage=rm",
            got=getattr(model.config, "model_type", None),
            changes={"stage": "dpo"},
        )
    model.__dict__[_SCORES] = True
    model.loss_function = lambda logits, *_, **__: logits.sum()  # replaced by `apply_plan`
    model.forward = MethodType(_forward, model)


def _reads_last_hidden_state(model: nn.Module, base: nn.Module, head: nn.Module) -> bool:
    """Return whether the input of the head is the tensor that the base returns, in a pass on meta tensors."""
    results: list[Any] = []
    read: list[Any] = []
    # The classification loss that follows may fail on meta tensors.
    with preserve_module_state(model), suppress(UnsupportedSharding):
        base.register_forward_hook(lambda _, __, output: results.append(output[0]))
        head.register_forward_pre_hook(lambda _, args: read.append(args[0] if args else None))
        run_on_meta(model, FlowTracer(), "tp")
    return len(results) == len(read) == 1 and results[0] is read[0]


def _forward(
    self: nn.Module,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    inputs_embeds: Tensor | None = None,
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    named = {
        "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
        "inputs_embeds": inputs_embeds,
    }  # fmt: skip
    inputs = {name: value for name, value in named.items() if value is not None}
    base = self.get_submodule(self.base_model_prefix)
    logits = self.get_submodule(SCORE)(base(**inputs, **kwargs)[0])
    loss = None
    if shift_labels is not None:
        loss = self.loss_function(logits, labels, shift_labels=shift_labels)  # type: ignore[operator]
    return SequenceClassifierOutput(loss=loss, logits=logits)

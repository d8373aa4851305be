"""A sequence classifier of one label that scores every token: a reward model.

Such a model of transformers reads one score of a sequence, at its last token that does not pad, and cuts nothing it
could be read from: a rank that has a part of the sequence may not have that token. Here it gives the score of every
token, of which an objective takes those it wants; the weights are the same.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any, Final

from torch import Tensor, nn

from hyper_parallel.errors import ModelUnreadable

SCORE: Final = "score"
"""Name of the head in the models of transformers."""
_SCORES: Final = "_scores_every_token"


def scores_tokens(model: nn.Module) -> bool:
    """Whether `score_every_token` was applied."""
    return bool(model.__dict__.get(_SCORES, False))


def head_of(model: nn.Module) -> nn.Module | None:
    """What gives the logits of next tokens, or the scores; None for a module without either."""
    if scores_tokens(model):
        return model.get_submodule(SCORE)
    head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    return head


def score_every_token(model: nn.Module) -> None:
    """Let a sequence classifier of one label return [B, S, 1] scores as its logits, in place.

    Raises:
        ModelUnreadable: HP305 for a class that reads its score otherwise than by a linear map of the last hidden state.
    """
    head, base = getattr(model, SCORE, None), getattr(model, model.base_model_prefix, None)
    linear = isinstance(head, nn.Linear) and head.out_features == 1 and head.bias is None
    source = inspect.getsource(inspect.unwrap(type(model).forward))
    if not (linear and base is not None and f"self.{SCORE}(hidden_states)" in source):
        raise ModelUnreadable(
            f"{type(model).__name__} has no head `{SCORE}` that maps the last hidden state to one number",
            where="stage=rm",
            got=getattr(model.config, "model_type", None),
            hint="stage=dpo",
        )
    model.__dict__[_SCORES] = True
    model.loss_function = lambda logits, *_, **__: logits.sum()  # until a layout puts its own there
    model.forward = MethodType(_forward, model)


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
    """As the forward of a causal language model, whose place in a pass it has."""
    from transformers.modeling_outputs import SequenceClassifierOutput

    named = {
        "input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids,
        "inputs_embeds": inputs_embeds,
    }  # fmt: skip
    given = {name: value for name, value in named.items() if value is not None}
    base = self.get_submodule(self.base_model_prefix)
    logits = self.get_submodule(SCORE)(base(**given, **kwargs)[0])
    loss = None
    if shift_labels is not None:
        loss = self.loss_function(logits, labels, shift_labels=shift_labels)  # type: ignore[operator]
    return SequenceClassifierOutput(loss=loss, logits=logits)

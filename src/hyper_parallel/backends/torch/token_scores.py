"""A sequence classifier of one label that scores every token: a reward model.

Such a model of transformers reads one score of a sequence, at its last token that does not pad, and cuts nothing it
could be read from: a rank that has a part of the sequence may not have that token. Here it gives the score of every
token, of which an objective takes those it wants; the weights are the same.
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
"""Name of the head in the models of transformers."""
_SCORES: Final = "_scores_every_token"


def scores_tokens(model: nn.Module) -> bool:
    """Whether `score_every_token` was applied."""
    return bool(model.__dict__.get(_SCORES, False))


def head_of(model: nn.Module) -> nn.Module | None:
    """What gives the logits of next tokens, or the scores; None for a module without either."""
    if scores_tokens(model):
        return model.get_submodule(SCORE)
    try:
        head: nn.Module | None = getattr(model, "get_output_embeddings", lambda: None)()
    except AttributeError:
        if not any(isinstance(module, PlaceholderModule) for module in model.modules()):
            raise
        return None  # another pipeline rank holds the module that the head is in
    return head


def score_every_token(model: nn.Module) -> None:
    """Let a sequence classifier of one label return [B, S, 1] scores as its logits, in place.

    Raises:
        ModelUnreadable: HP305 for a class that reads its score otherwise than by a linear map of the last hidden state.
    """
    head, base = getattr(model, SCORE, None), getattr(model, model.base_model_prefix, None)
    linear = isinstance(head, nn.Linear) and head.out_features == 1 and head.bias is None
    if not (linear and base is not None and _reads_last_hidden_state(model, base, head)):
        raise ModelUnreadable(
            f"{type(model).__name__} has no head `{SCORE}` that maps the last hidden state to one number",
            where="stage=rm",
            got=getattr(model.config, "model_type", None),
            hint="stage=dpo",
        )
    model.__dict__[_SCORES] = True
    model.loss_function = lambda logits, *_, **__: logits.sum()  # until a layout puts its own there
    model.forward = MethodType(_forward, model)


def _reads_last_hidden_state(model: nn.Module, base: nn.Module, head: nn.Module) -> bool:
    """Return whether a forward pass gives its head the very tensor that the base returns, in a run without values."""
    results: list[Any] = []
    read: list[Any] = []
    hooks = (
        base.register_forward_hook(lambda _, __, output: results.append(output[0])),
        head.register_forward_pre_hook(lambda _, args: read.append(args[0] if args else None)),
    )
    try:
        # The loss of a class, which follows, is none of next tokens and may not run.
        with preserve_module_state(model), suppress(UnsupportedSharding):
            run_on_meta(model, FlowTracer(), "tp")
    finally:
        for hook in hooks:
            hook.remove()
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

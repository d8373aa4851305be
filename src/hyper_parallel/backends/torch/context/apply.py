"""Context parallelism: every rank of a cp group gets whole sequences, keeps its tokens, and attention sees all of them.

    root            ids, labels and positions are padded and cut (`ContextState.shard_inputs`); logits are joined again
    decoder layers  run on [B, S / cp, D]; only attention knows that there are other tokens (`_attention`)
    loss            the sum over this rank's tokens; the ranks' sums add up to the loss of the sequences

Attention is reached through the attention interface of transformers: the model's config names one function, which finds
the `ContextState` of its model on the attention module. Model code and masks are not touched: the masks that a model
would build (causal, packed documents, sliding window) are applied where blocks of keys meet blocks of queries.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch.context._trial import attention_calls, count_places
from hyper_parallel.backends.torch.context.attention import ATTRIBUTE, INTERFACE
from hyper_parallel.backends.torch.context.state import TOKENS, ContextState
from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.layer_flow import refused
from hyper_parallel.backends.torch.model_structure import decoder_of
from hyper_parallel.backends.torch.partial_use import refuse_other_inputs
from hyper_parallel.backends.torch.tensor.collectives import join
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Strategy

FORGETFUL = ("gpt_oss",)
"""Families whose masks ignore `position_ids`."""
_LAYER_KINDS = ("full_attention", "sliding_attention")
_COUNTS = "create_position_ids_from_input_ids"
"""Method of transformers' modules that count positions from ids."""


def apply_context_parallel(
    model: nn.Module,
    decoder: tuple[nn.Module, nn.ModuleList] | None,
    strategy: Strategy,
    mesh: DeviceMesh | None,
    stage_layers: Callable[[], range] | None,
    calls: Sequence[int],
) -> ContextState | None:
    """Cut the sequences of a model, and let its attention see all of them; None when cp is 1.

    `stage_layers` gives those of the running pipeline stage; `calls` is what `follow_attention` returned.
    """
    if mesh is None or strategy.cp == 1:
        return None
    assert decoder is not None, "follow_attention refuses it"
    base, layers = decoder
    config, every = base.config, range(len(layers))
    context = ContextState.of(strategy, mesh["cp"].get_group())
    own = copy.deepcopy(config)  # another model may have been made from the same config
    own._attn_implementation = INTERFACE
    for module in model.modules():
        if module.__dict__.get("config") is config:
            module.config = own
    for module in layers.modules():
        object.__setattr__(module, ATTRIBUTE, context)
    count_places(base, context.places)
    # Stages of a pipeline have no whole outputs to return.
    running = stage_layers or (lambda: every)
    _wrap_root(
        context,
        model,
        lambda: sum(calls[i] for i in running()),
        joins=stage_layers is None,
        tables=[m for m in base.modules() if hasattr(m, _COUNTS)],
    )
    return context


def follow_attention(model: nn.Module, strategy: Strategy) -> tuple[int, ...]:
    """How often each layer calls the attention interface; refuses, without any rank, attention that cp cannot repeat.

    Raises:
        UnsupportedSharding: HP205 with what is more than causal attention, with a window, through the interface.
    """
    if strategy.cp == 1:
        return ()
    if (decoder := decoder_of(model)) is None:
        raise refused(model, "it has no list of layers", "cp")
    _refuse(decoder[0].config)
    return attention_calls(model, *decoder)


def _wrap_root(
    context: ContextState,
    model: nn.Module,
    num_calls: Callable[[], int],
    joins: bool,
    tables: Sequence[Any],
) -> None:
    """Cut the inputs of a model where its forward begins, and join its outputs where it ends.

    `tables` count the positions of whole sequences of ids by themselves, where none are given.
    """
    names = list(inspect.signature(model.forward).parameters)

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = {**dict(zip(names, args, strict=False)), **kwargs}
        _refuse_call(module, batch)
        refuse_other_inputs(module, ("cp",), batch)
        given = {**context.shard_inputs(batch), "use_cache": False}
        if tables and batch.get("position_ids") is None:
            # RoBERTa's positions begin behind that of padding.
            fill, ids = tables[0].padding_idx, batch["input_ids"]
            given["position_ids"] = context.own(getattr(tables[0], _COUNTS)(ids, fill), fill)
        return (), given

    def after(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        expected = num_calls()
        if context.calls != expected:
            raise UnsupportedSharding(
                "layers call the attention interface more or less often than in their trial",
                where=type(module).__name__,
                got=f"{context.calls} calls instead of {expected}",
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
                whole = (
                    None
                    if kwargs.get("labels") is not None
                    else join_sequences(context, output[name])
                )
                output[name] = whole
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)


def join_sequences(context: ContextState, local: Tensor) -> Tensor:
    """Whole sequences [B, S, ...] from every rank's tokens; the ranks then all do the same with them."""
    assert context.view is not None
    cut, group = context.view.cut, context.group
    held = [p for rank in range(group.size()) for p in cut.positions(rank)]
    # For every position the place of its token among the tokens of all ranks, laid end to end.
    order = torch.tensor(held, device=local.device).argsort()[: cut.seq_len]
    return join(local, 1, group).index_select(1, order)


def _refuse(config: Any) -> None:
    """Refuse configs whose attention is more than causal with windows and documents."""
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_KINDS)
    for wrong, what in (
        (kinds, f"layers of kind {', '.join(sorted(kinds))}"),
        (not getattr(config, "is_causal", True), "attention that is not causal"),
        (getattr(config, "use_bidirectional_attention", None), "bidirectional attention"),
        (getattr(config, "attention_chunk_size", None), "chunked attention"),
        (getattr(config, "attention_dropout", 0.0), "attention dropout"),
    ):
        if wrong:
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
        ("cache", "keys and values are not kept under context parallelism"),
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


def mask_documents(base: nn.Module, dtype: torch.dtype) -> None:
    """Let a decoder whose family would let packed documents see each other mask them; without context parallelism.

    Models of transformers tell documents by `position_ids` that begin again, where they build their masks. GPT-OSS
    builds its masks without positions, but takes masks that were built before: here, by the same public functions.

    Args:
        base: Decoder without its head.
        dtype: Format of activations, for masks that are added to scores.
    """
    if base.config.model_type not in FORGETFUL:
        return
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positions = kwargs.get("position_ids")
        given = any(
            kwargs.get(n) is not None for n in ("attention_mask", "past_key_values", "cache")
        )
        if positions is None or given:
            return None
        tokens = next(t for n in TOKENS if (t := kwargs.get(n)) is not None)
        # Only its shape, format and device are read.
        like = torch.empty(*tokens.shape[:2], 0, dtype=dtype, device=tokens.device)
        makers = (create_causal_mask, create_sliding_window_causal_mask)
        masks = (
            make(
                config=module.config,
                inputs_embeds=like,
                attention_mask=None,
                position_ids=positions,
                **{cache_argument(make): None},
            )
            for make in makers
        )
        return args, {**kwargs, "attention_mask": dict(zip(_LAYER_KINDS, masks, strict=True))}

    base.register_forward_pre_hook(before, with_kwargs=True)

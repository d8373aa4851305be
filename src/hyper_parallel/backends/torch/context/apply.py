"""Context parallelism: cp ranks receive complete sequences, shard them, and compute attention over all tokens.

    root module     pads and shards ids, labels and positions (see `ContextState`); gathers logits if there is no loss
    decoder layers  run on [B, S / cp, D]; only attention uses the tokens of other ranks (see `attention`)
    loss            the sum over this rank's tokens; the sums of all ranks add up to the loss of the sequences

Attention is replaced through the attention interface of transformers: the model's config names a function, which reads
the `ContextState` from the attention module. Model code is unchanged. The masks of the model (causal, packed documents,
sliding window) are applied per block of queries and keys.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch.context._trial import AttentionTrial, override_position_ids
from hyper_parallel.backends.torch.context.attention import (
    ATTRIBUTE,
    INTERFACE,
    TRIAL,
    refuse_first,
    register,
)
from hyper_parallel.backends.torch.context.state import TOKENS, ContextState
from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.layer_flow import flow_error
from hyper_parallel.backends.torch.model_structure import ModelView, view_of
from hyper_parallel.backends.torch.partial_use import refuse_other_inputs
from hyper_parallel.backends.torch.pass_context import RunningPass
from hyper_parallel.backends.torch.tensor.collectives import join
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Strategy
from hyper_parallel.shard import completed_changes, without_axes

MASKS_IGNORE_POSITION_IDS = ("gpt_oss",)
"""Model types whose masks ignore `position_ids`."""
_LAYER_KINDS = ("full_attention", "sliding_attention")
_COUNTS = "create_position_ids_from_input_ids"
"""Method by which modules of transformers derive positions from ids."""


def apply_context_parallel(
    model: nn.Module,
    view: ModelView,
    strategy: Strategy,
    mesh: DeviceMesh | None,
    stage_layers: Callable[[], range] | None,
    calls: Sequence[int],
    running: RunningPass,
) -> ContextState | None:
    """Shard a model's sequences and make attention cover all tokens; return the state of context parallelism.

    `stage_layers` returns the layers of the running stage; None without pipeline parallelism. `calls` is the result of
    `count_attention_calls`. Without a mesh, or with cp = 1, nothing changes and the result is None.
    """
    if mesh is None or strategy.cp == 1:
        return None
    base, layers = view.base, view.layers
    config, all_layers = base.config, range(len(layers))
    group, gather_keys = mesh["cp"].get_group(), strategy.cp_kind == "all_gather"
    context = ContextState(group, gather_keys, strategy.ulysses, running)
    _use_interface(model, config)
    for module in layers.modules():
        object.__setattr__(module, ATTRIBUTE, context)
    override_position_ids(base, context.position_ids)
    layers_running = stage_layers or (lambda: all_layers)
    _wrap_root(
        context,
        model,
        strategy,
        lambda: sum(calls[i] for i in layers_running()),
        gathers_outputs=stage_layers is None,  # pipeline stages return local outputs
        tables=[m for m in base.modules() if hasattr(m, _COUNTS)],
    )
    return context


def _use_interface(model: nn.Module, config: Any) -> None:
    """Set `INTERFACE` as the attention implementation in a copy of `config`, because other models may share `config`.

    Configs that contain `config`, such as that of a multimodal model, are copied too, so that they contain the copy.
    """
    named = copy.deepcopy(config)
    named._attn_implementation = INTERFACE
    copies = {id(config): named}

    def replaced(own: Any) -> Any:
        if id(own) not in copies:
            inner = {k: v for k, v in vars(own).items() if hasattr(v, "get_text_config")}
            parts = {k: new for k, v in inner.items() if (new := replaced(v)) is not v}
            copies[id(own)] = copy.copy(own) if parts else own
            vars(copies[id(own)]).update(parts)
        return copies[id(own)]

    for module in model.modules():
        if hasattr(own := module.__dict__.get("config"), "get_text_config"):
            module.config = replaced(own)


def count_attention_calls(model: nn.Module, strategy: Strategy) -> tuple[int, ...]:
    """Return how often each layer calls the attention interface, by two forwards on meta tensors; () if cp is 1.

    Raises:
        UnsupportedSharding: HP205 for a model whose sequences or attention cannot be sharded, with the reason.
    """
    if strategy.cp == 1:
        return ()
    view = view_of(model)
    if view.base is None:
        raise flow_error(model, "it has no list of decoder layers", "cp")
    _refuse(view.base.config)
    register()
    AttentionTrial(model, view, TRIAL).run()
    return tuple(AttentionTrial(model, view, INTERFACE).run())


def _wrap_root(
    context: ContextState,
    model: nn.Module,
    strategy: Strategy,
    num_calls: Callable[[], int],
    gathers_outputs: bool,
    tables: Sequence[Any],
) -> None:
    """Add hooks to a model that shard its inputs before each forward and check the number of attention calls after it.

    With `gathers_outputs`, logits and hidden states are gathered, or dropped if the call has labels. `num_calls`
    returns the expected number of attention calls. `tables` are modules that derive positions from ids.
    """
    names = list(inspect.signature(model.forward).parameters)

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch = {**dict(zip(names, args, strict=False)), **kwargs}
        _refuse_call(module, batch)
        with completed_changes(strategy):
            refuse_other_inputs(module, ("cp",), batch)
        shards = {**context.shard_inputs(batch), "use_cache": False}
        if tables and batch.get("position_ids") is None:
            # RoBERTa's positions start after the position of padding.
            fill, ids = tables[0].padding_idx, batch["input_ids"]
            positions = getattr(tables[0], _COUNTS)(ids, fill)
            shards["position_ids"] = context.local_tokens(positions, fill)
        return (), shards

    def after(module: nn.Module, _: Any, kwargs: dict[str, Any], output: Any) -> Any:
        expected = num_calls()
        if context.calls != expected:
            raise UnsupportedSharding(
                "layers call attention a different number of times than in the trial forward pass",
                where="parallel.cp",
                got=f"{type(module).__name__}: {context.calls} calls instead of {expected}",
                changes=without_axes(strategy, "cp"),
            )
        if not gathers_outputs:
            return output
        if isinstance(output, tuple):
            raise UnsupportedSharding(
                "the model returns a tuple, but context parallelism needs named outputs",
                where=type(module).__name__,
                hint="return_dict=True",
            )
        for name in ("logits", "last_hidden_state"):
            if getattr(output, name, None) is not None:
                has_loss = kwargs.get("labels") is not None
                output[name] = None if has_loss else join_sequences(context, output[name])
        return output

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True)


def join_sequences(context: ContextState, local: Tensor) -> Tensor:
    """Gather complete sequences [B, S, ...] over cp ranks; all ranks must compute the same values from the result."""
    cut, group = context.view.cut, context.group
    positions = [p for rank in range(group.size()) for p in cut.positions(rank)]
    # Index of each position in the concatenated tokens of all ranks.
    order = torch.tensor(positions, device=local.device).argsort()[: cut.seq_len]
    return join(local, 1, group).index_select(1, order)


def _refuse(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - set(_LAYER_KINDS)
    refuse_first(
        config.model_type,
        (f"layers of kind {', '.join(sorted(kinds))}", kinds),
        ("attention that is not causal", not getattr(config, "is_causal", True)),
        ("bidirectional attention", getattr(config, "use_bidirectional_attention", None)),
        ("chunked attention", getattr(config, "attention_chunk_size", None)),
        ("attention dropout", getattr(config, "attention_dropout", 0.0)),
    )


def _refuse_call(module: nn.Module, batch: Mapping[str, Any]) -> None:
    config = module.config
    for name, why in (
        ("attention_mask", "mark documents by `position_ids` that restart, padding by labels"),
        ("past_key_values", "keys and values are not cached under context parallelism"),
        ("cache", "keys and values are not cached under context parallelism"),
        ("use_cache", "keys and values are not cached under context parallelism"),
        ("output_hidden_states", "a rank has hidden states of its tokens only"),
        ("output_attentions", "attention weights of whole sequences are never computed"),
    ):
        value = batch.get(name)
        of_config = name.startswith("output_") and value is None
        value = getattr(config, name, False) if of_config else value
        if value is not None and value is not False:
            hint = f"{name}={'False' if isinstance(value, bool) else 'None'}"
            raise UnsupportedSharding(
                f"`{name}` does not work with context parallelism: {why}",
                where=type(module).__name__,
                hint=f"set `{name}` to false in the config of the model" if of_config else hint,
            )


def mask_documents(base: nn.Module, dtype: torch.dtype) -> None:
    """Make attention masks separate packed documents in models of `MASKS_IGNORE_POSITION_IDS`.

    Other models of transformers recognise documents by jumps in `position_ids` when they build masks. GPT-OSS accepts
    masks as arguments, which a hook on its decoder `base` builds; `dtype` is that of additive masks. Context
    parallelism does not need the hook, because it builds its own masks.
    """
    if base.config.model_type not in MASKS_IGNORE_POSITION_IDS:
        return
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    causal_masks = create_causal_mask, create_sliding_window_causal_mask
    makers = dict(zip(_LAYER_KINDS, causal_masks, strict=True))

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positions = kwargs.get("position_ids")
        excluded = ("attention_mask", "past_key_values", "cache")
        if positions is None or any(kwargs.get(n) is not None for n in excluded):
            return None
        tokens = next(t for n in TOKENS if (t := kwargs.get(n)) is not None)
        # Only its shape, dtype and device are read.
        like = torch.empty(*tokens.shape[:2], 0, dtype=dtype, device=tokens.device)
        options = {"config": module.config, "inputs_embeds": like, "attention_mask": None}
        masks = {
            kind: make(**options, position_ids=positions, **{cache_argument(make): None})
            for kind, make in makers.items()
        }
        return args, {**kwargs, "attention_mask": masks}

    base.register_forward_pre_hook(before, with_kwargs=True)

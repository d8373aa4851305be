"""Tensor and sequence parallelism on one or two mesh axes, by wrapping unmodified modules.

    embedding (rows sharded)    partial sums of [B, S, D], all-reduced here or reduce-scattered by the first layer
    first decoder layer         this rank's part of the residual stream, see `TokenGrid`
      attention or MLP          gather tokens -> projections (see `_projections`) -> scatter tokens
    final norm                  on this rank's part, then gather tokens: the base model's output is unchanged
    head (rows sharded)         logits of all tokens for this rank's part of the vocabulary, as the loss expects

Models whose layers the sharding rules do not cover keep replicated activations, see `_replicated_activations`.
Wrapping replaces forwards and a few attributes of module instances, such as head counts, but no classes or parameter
names. Modules compute with local tensors; parameters stay DTensors for FSDP, optimizers and checkpoints. An attention
or MLP module with these collectives is called a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch.dropout import has_dropout
from hyper_parallel.backends.torch.in_flight import sum_both, sum_forward
from hyper_parallel.backends.torch.model_structure import ModelView, PlaceholderModule
from hyper_parallel.backends.torch.pass_context import PassShape, RunningPass
from hyper_parallel.backends.torch.tensor._projections import (
    Region,
    colwise,
    exchange_packed,
    rowwise,
    set_local_head_counts,
)
from hyper_parallel.backends.torch.tensor._replicated_activations import (
    call_with_summed_input_grad,
    gather_embedding_when_read,
    share_random_numbers,
    tied_heads,
    use_local_replicated_parameters,
)
from hyper_parallel.backends.torch.tensor._span_attention import SpanAttention
from hyper_parallel.backends.torch.tensor.collectives import join
from hyper_parallel.backends.torch.tensor.gradients import PartialParameter, use_local_parameters
from hyper_parallel.backends.torch.tensor.partial_gradients import SPLIT_STYLES, TensorTrial
from hyper_parallel.backends.torch.tensor.sharded_norm import ShardedNorm
from hyper_parallel.backends.torch.tensor.state import (
    TP,
    RandomStreams,
    TokenExecutor,
    TpState,
    X,
    Y,
)
from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.cost import LINEAR_ENTRY
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Purpose, Strategy
from hyper_parallel.shard import COLUMN_STYLES, PACKED, block_program, module_of

Forward = Callable[..., Any]


def tensor_mesh(mesh: DeviceMesh | None, strategy: Strategy) -> DeviceMesh | None:
    """Return the submesh of the tensor-parallel axes; None without a mesh or without tensor parallelism."""
    if mesh is None or strategy.tp == 1:
        return None
    return mesh["tp_x"] if strategy.tp_y == 1 else mesh[TP]


def tensor_state(
    tp_mesh: DeviceMesh | None,
    strategy: Strategy,
    shard_hidden_over_y: bool,
    replicated_activations: bool,
    running: RunningPass,
    executor: TokenExecutor | None,
) -> TpState | None:
    """Return the state of tensor parallelism on `tp_mesh`, a result of `tensor_mesh`; None if `tp_mesh` is None."""
    if tp_mesh is None:
        return None
    groups = {X: tp_mesh["tp_x"].get_group()}
    groups[TP] = groups[X]
    shard_sequences_over_y = strategy.tp_y > 1 and strategy.attention_shape == "weight"
    if strategy.tp_y > 1:
        groups[Y] = tp_mesh["tp_y"].get_group()
        groups[TP] = tp_mesh._flatten("_".join(TP)).get_group()
    regather = strategy.gathered_inputs == "re-gather"
    return TpState(
        groups,
        shard_hidden_over_y,
        shard_sequences_over_y,
        replicated_activations,
        regather,
        running=running,
        executor=executor,
    )


def apply_tensor_parallel(
    model: nn.Module,
    view: ModelView,
    styles: dict[str, str],
    state: TpState,
    strategy: Strategy,
    trial: TensorTrial | None,
) -> None:
    """Wrap the modules of a model for tensor parallelism, after its parameters have become DTensors.

    Args:
        model: The model; changed in place.
        view: Parts of the model.
        styles: Sharding style, such as colwise, by name of a module or parameter.
        state: State of tensor parallelism.
        strategy: The strategy of the plan.
        trial: Result of `try_forward` if activations are replicated, else None.

    Raises:
        UnsupportedSharding: HP205 for two mesh axes with replicated activations, and for a module that a wrapper does
            not support.
    """
    parallel = TensorParallel(model, styles, state, strategy)
    if view.base is not None and not state.replicated_activations:
        parallel.apply_to_decoder(view)
    elif strategy.tp_y == 1:
        parallel.apply_to_modules(trial is not None and trial.splits_logits)
    else:
        raise UnsupportedSharding(
            "two-dimensional tensor parallelism needs a Hugging Face model with a list of decoder layers",
            where="parallel.tp_y",
            got=type(model).__name__,
            changes={"parallel.tp_x": strategy.tp, "parallel.tp_y": 1},
        )


def watch_gradients(model: nn.Module, layouts: dict[str, Layout], state: TpState, trial: TensorTrial | None) -> None:
    """Register the parameters whose gradients are partial and must be summed over tensor-parallel ranks.

    Call this function after FSDP has wrapped the model.

    Args:
        model: Model wrapped by `apply_tensor_parallel`.
        layouts: Layout of each parameter, by name.
        state: State of tensor parallelism.
        trial: Result of `try_forward`; None: all parameters replicated over an axis, except experts, are registered.
    """
    axes = TP if Y in state.groups else X

    def partial_parameters() -> Iterator[PartialParameter]:
        for name, param in model.named_parameters():
            sharding = layouts[name].sharding_axes
            missing = tuple(a for a in axes if a not in sharding)
            # Gradients of experts are reduced over the ranks with the same experts.
            if missing and "ep" not in sharding and (trial is None or name in trial.summands):
                yield param, state.groups[missing]

    state.gradients.watch(partial_parameters)
    # This hook follows FSDP's own, so that FSDP's callback at the end of backward runs first.
    model.register_forward_hook(lambda _, __, output: state.gradients.end_forward(output))


class TensorParallel:
    """Installer of tensor-parallel wrappers on the modules of one model; arguments as in `apply_tensor_parallel`."""

    def __init__(self, model: nn.Module, styles: dict[str, str], state: TpState, strategy: Strategy) -> None:
        self.model, self.state, self.strategy = model, state, strategy
        self.modules = dict(model.named_modules())
        # Modules of other pipeline ranks have no parameters here.
        present = {n for n, m in self.modules.items() if any(True for _ in m.parameters())}
        self.styles = {name: style for name, style in styles.items() if name in present}
        # A rule may name a parameter of a module, such as the sinks of attention.
        owners = {n: module_of(n) for n in styles if n not in self.modules}
        self.own_parameters = {n: styles[n] for n, owner in owners.items() if owner in present}
        config = getattr(model, "config", None)
        self.config = None if config is None else config.get_text_config()
        self.regions: dict[str, Region] = {}
        if self.config is not None and not state.replicated_activations:
            inside = [module_of(n) for n, s in self.styles.items() if s in COLUMN_STYLES]
            self.regions = {n: self._make_region(n) for n in dict.fromkeys(inside)}

    def _make_region(self, name: str) -> Region:
        s, last, module = self.strategy, name.rpartition(".")[2], self.modules[name]
        attention = "attn" in last or "attention" in last
        heads = self.config.num_attention_heads
        kv_heads = getattr(self.config, "num_key_value_heads", heads) if attention else 0
        shard_hidden_over_y = self.state.shard_hidden_over_y
        program, keys = (block_program(s, kv_heads, shard_hidden_over_y, keys=k) for k in (False, True))
        region = Region(self.state, name, program, keys, kv_heads)
        ranks = s.tp
        if Purpose.KEY_VALUE_GATHER in program:
            region.spans = SpanAttention.attach(module, self.state, name)
            ranks = s.tp_x
        # Ranks that share a key and value head each see it as their only one.
        if kv_heads % ranks and hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads // ranks
        return region

    def _region_of(self, name: str) -> Region:
        return self.regions.setdefault(module_of(name), Region(self.state))

    def _used_rows(self, module: nn.Module, style: str) -> slice | None:
        """Return the weight rows of the key or value head that this rank's queries use; None: all local rows."""
        if style != "kv_replicate":
            return None
        heads = self.config.num_key_value_heads
        width = module.weight.shape[0] // heads
        row = self.state.rank // (self.state.degree // heads) * width
        return slice(row, row + width)

    def apply_to_decoder(self, view: ModelView) -> None:
        """Wrap embedding, regions, layers, final norm and head of a Hugging Face model."""
        embedding, head = view.base.get_input_embeddings(), head_of(self.model)
        names = {m: n for n, m in self.modules.items()}
        for name, style in self.styles.items():
            module = self.modules[name]
            is_linear = isinstance(module, nn.Linear)
            if style == "norm_heads" or (style == "kv_replicate" and not is_linear):
                self._norm_over_heads(module, name, style)
            elif style in COLUMN_STYLES:
                self._column_projection(module, name, style)
            elif style == "rowwise":
                rowwise(module, self._region_of(name))
            elif style == "vocab":
                defer_reduce = self.model.config.model_type in LINEAR_ENTRY
                self._embedding(module, None if defer_reduce else sum_both)
            elif style != "experts" and module not in (embedding, head):
                self._replicated(module, name)
        for name in dict.fromkeys(module_of(n) for n in self.own_parameters):
            self._replicated(self.modules[name], name)
        for name, region in self.regions.items():
            wrap(self.modules[name], region.forward)
        self._link_regions(view.layers)
        if self.styles.get(names[embedding], "replicate") == "replicate":
            self._replicated(embedding, names[embedding])
        if head is not None and not isinstance(head, PlaceholderModule):
            self._head(head)
        wrap(view.layers[0], self._enter)
        wrap(view.final_norm(), self._leave)
        self._add_root_hooks()

    def _link_regions(self, layers: nn.ModuleList) -> None:
        """Set `Region.following` of the attention block in every layer with one attention and one MLP block."""
        for layer in layers:
            modules = set(layer.modules())
            inside = [r for n, r in self.regions.items() if self.modules[n] in modules]
            if [bool(region.kv_heads) for region in inside] == [True, False]:
                inside[0].following = inside[1]

    def apply_to_modules(self, splits_logits: bool) -> None:
        """Wrap the sharded modules of a model with replicated activations; `splits_logits` keeps logits sharded."""
        state, config = self.state, self.config
        split = {n: s for n, s in self.styles.items() if s in SPLIT_STYLES}
        split |= dict.fromkeys(tied_heads(self.modules, split), "head")
        for name in dict.fromkeys(module_of(n) for n, s in split.items() if s in COLUMN_STYLES):
            owner = self.modules[name]
            if config is not None and (hasattr(owner, "q_proj") or hasattr(owner, "query")):
                set_local_head_counts(owner, config, state.degree)
        # Adapters draw one mask for the columns of all ranks and need no streams per rank.
        if has_dropout(self.model, adapters=False) and "rowwise" in split.values():
            state.streams = RandomStreams(state.rank)
        for name, style in split.items():
            module = self.modules[name]
            if style == "rowwise":
                rowwise(module, self._region_of(name))
                if state.streams is not None:
                    wrap(module, state.streams.run_row_projection)
            elif style == "norm_heads":
                self._norm_over_heads(module, name, style)
            elif style == "vocab":
                self._embedding(module, sum_forward)
                gather_embedding_when_read(self.model, module, state.gradients, state.group)
            else:
                self._column_module(module, name, style, splits_logits)
        use_local_replicated_parameters(self.model, split, state.gradients)
        if config is not None:
            self._add_root_hooks()

    def _column_module(self, module: nn.Module, name: str, style: str, splits_logits: bool) -> None:
        state = self.state
        self._column_projection(module, name, style)
        shared = None if style == "head" else self._region_of(name)
        wrap(module, partial(call_with_summed_input_grad, state.group, shared))
        if state.streams is not None and style != "head":
            wrap(module, partial(state.streams.run_column_projection, module))
        if style == "head" and splits_logits:
            wrap(module, self._shard_logits)
        elif style == "head":
            wrap(module, lambda inner, x: join(inner(x), -1, state.group))

    def _column_projection(self, module: nn.Module, name: str, style: str) -> None:
        colwise(module, name, self._region_of(name), self._used_rows(module, style))
        if style in PACKED:
            owner = self.modules[module_of(name)]
            exchange_packed(module, owner, style, self.config, self.state)

    def _norm_over_heads(self, module: nn.Module, name: str, style: str) -> None:
        rows = self._used_rows(module, style)
        inside = partial(ShardedNorm, self.state.group, name, Purpose.NORMS_OVER_HEADS)
        use_local_parameters(module, self.state.gradients, inside, rows)

    def _shard_logits(self, inner: Forward, x: Tensor) -> Tensor:
        self.state.running.update(head="vocabulary")
        return cast("Tensor", inner(x))

    def _embedding(self, module: nn.Module, reduce: Callable[..., Tensor] | None) -> None:
        """Make an embedding look up the tokens in this rank's rows, with zeros for other tokens.

        `reduce` then sums the result over ranks; None: the first layer sums it.
        """
        state = self.state
        rows = module.num_embeddings // state.degree
        first = state.rank * rows
        scaled = getattr(module, "embed_scale", None) is not None
        options = ("max_norm", "sparse", "scale_grad_by_freq")
        unsupported = [name for name in options if getattr(module, name)]
        if type(module).forward is not nn.Embedding.forward and not scaled:
            unsupported.append("a custom forward")
        if unsupported:
            raise UnsupportedSharding(
                f"tensor parallelism cannot shard an embedding with {unsupported[0]}",
                where="parallel.tp_x",
                got=type(module).__name__,
                changes={"parallel.tp_x": 1, "parallel.tp_y": 1},
            )
        pad = module.padding_idx
        pad = pad - first if pad is not None and first <= pad < first + rows else None

        def forward(ids: Tensor) -> Tensor:
            outside = (ids < first) | (ids >= first + rows)
            index = (ids - first).masked_fill_(outside, 0)
            # Read this rank's shard: `module.weight` may all-gather it.
            weight = dict.__getitem__(module._parameters, "weight")
            out = F.embedding(index, state.local(weight), pad)
            out = out.masked_fill(outside.unsqueeze(-1), 0)
            if scaled:  # read at run time: buffers of a meta model are materialized later
                scale = module.embed_scale
                out = out * (scale.to(out.dtype) if isinstance(scale, Tensor) else scale)
            if reduce is None:
                state.running.update(partial_embedding=True)
                return out
            return reduce(out, state.group, Purpose.EMBEDDING)

        module.forward = forward

    def _head(self, module: nn.Module) -> None:
        """Make the head compute the logits of all tokens for the local part of the vocabulary.

        If the head's weight is not sharded, it computes the logits of this rank's tokens for the full vocabulary.
        """
        state = self.state
        # Decide by the weight, because a head tied to the embedding has no parameter name and no style.
        split = any(p.is_shard() for p in module.weight.placements)

        def forward(x: Tensor) -> Tensor:
            batch = tuple(x.shape[:-1])
            state.running.update(head="vocabulary" if split else "tokens", head_batch=batch)
            if not split:
                x = state.local_part(state.list_of(batch).parts(x))
            return F.linear(x, state.local(module.weight), state.local(module.bias))

        module.forward = forward

    def _replicated(self, module: nn.Module, name: str) -> None:
        """Make a replicated module, such as a norm, run with the local tensors of its parameters.

        If features are sharded over y, a norm computes its statistics over all features.
        """
        params = list(module.parameters(recurse=False))
        styles = {s for n, s in self.own_parameters.items() if module_of(n) == name}
        if len(styles) > 1:
            raise UnsupportedSharding(
                "the sharding rules give different styles to the parameters of one module",
                where="parallel.rules",
                got=f"{name}: {', '.join(sorted(styles))}",
                hint=f"give all parameters of `{name}` the same style in `parallel.rules`",
            )
        if not params:
            return
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext
        sharded = not styles and any(p.is_shard() for w in params for p in w.placements)
        if sharded and Y in self.state.groups:
            inside = partial(ShardedNorm, self.state.groups[Y], name)
        use_local_parameters(module, self.state.gradients, inside)

    def _enter(self, inner: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Set the shape of the pass, and run the first layer on this rank's part of the residual stream."""
        state = self.state
        batch, parts = tuple(hidden_states.shape[:-1]), 1
        if state.halves is not None:
            parts = state.halves.parts(batch, (hidden_states, *args), kwargs)
        state.running.update(shape=PassShape((batch[0] // parts, *batch[1:]), parts))
        return inner(state.enter(hidden_states), *args, **kwargs)

    def _leave(self, inner: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.state.leave(lambda part: inner(part, *args, **kwargs), hidden_states)

    def _add_root_hooks(self) -> None:
        """Add hooks to the root module: reset the state of a pass, refuse sharded outputs, gather unused logits."""
        state = self.state
        sharded_outputs = ["output_attentions"]
        if not state.replicated_activations:
            sharded_outputs.append("output_hidden_states")

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            for option in sharded_outputs:
                if kwargs.get(option, getattr(module.config, option, False)):
                    raise UnsupportedSharding(
                        f"under tensor parallelism, `{option}` would return only one rank's shard",
                        where=type(module).__name__,
                        hint=f"{option}=False as an argument or in the config of the model",
                    )
            if state.streams is not None:
                state.streams.forget()
            if state.replicated_activations and module.training and not state.same_random:
                share_random_numbers(state.group, next(module.parameters()).device)
                state.same_random = True
            state.running.update(loss_consumed=False, partial_embedding=False, head="whole")
            state.gradients.begin_forward()

        def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            logits, context = getattr(output, "logits", None), state.running.context
            if logits is None and isinstance(output, tuple) and context.head != "whole":
                raise UnsupportedSharding(
                    "the model returns a tuple, but tensor parallelism needs named outputs",
                    where=type(module).__name__,
                    hint="return_dict=True",
                )
            if logits is None or context.head == "whole":
                return
            if context.loss_consumed:
                output.logits = None
            elif context.head == "vocabulary":
                output.logits = join(logits, -1, state.group)
            else:
                whole = state.list_of(context.head_batch).whole
                output.logits = whole(join(logits, 1, state.group))

        self.model.register_forward_pre_hook(before, with_kwargs=True)
        self.model.register_forward_hook(after, with_kwargs=True)

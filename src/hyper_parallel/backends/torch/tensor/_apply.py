"""Tensor and sequence parallelism of a model on one or two mesh axes, put around unmodified modules.

    embedding (rows split)  ->  summands of [B, S, D]
    first decoder layer     reduce-scatter to this rank's part of the stream; norms and residuals stay there
      region (attention, MLP)   gather tokens -> projections (see `_projections`) -> scatter tokens
    final norm              on this rank's part, then gather tokens, so the base model returns what it always returned
    head (rows split)       logits of this rank's vocabulary for all tokens; the loss takes them as they are

A module is changed by an instance attribute `forward` only: classes, parameter names and the model's source stay as
they are. All arithmetic runs on local tensors; parameters stay DTensors so that FSDP, optimizers and checkpoints
understand them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._collectives import sum_backward, sum_both, sum_forward
from hyper_parallel.backends.torch._regather import instead_of
from hyper_parallel.backends.torch._resolve import final_norm
from hyper_parallel.backends.torch.tensor._collectives import (
    join_columns,
    join_tokens,
    slice_tokens,
)
from hyper_parallel.backends.torch.tensor._gradients import Summed, show_local, to_local
from hyper_parallel.backends.torch.tensor._packed_heads import exchange_packed, norm_heads
from hyper_parallel.backends.torch.tensor._projections import Projections, Region, require_linear
from hyper_parallel.backends.torch.tensor._span_attention import SpanAttention
from hyper_parallel.backends.torch.tensor._spread_norm import SpreadNorm
from hyper_parallel.backends.torch.tensor._state import TpState
from hyper_parallel.backends.torch.tensor._stream import TokenGrid, TokenList
from hyper_parallel.cost import LINEAR_ENTRY
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Layout, Purpose, Strategy
from hyper_parallel.shard import ShardPlan

Forward = Callable[..., Any]
TP_AXES = ("tp_x", "tp_y")
_INTO = ("colwise", "kv_replicate", "qkv", "gate_up")
"""Styles of projections into a split width; the modules that own one are regions."""


def tensor_mesh(mesh: DeviceMesh | None, strategy: Strategy) -> DeviceMesh | None:
    """The mesh parameters are cut on by tensor parallelism: one axis, or both; None without."""
    if mesh is None or strategy.tp == 1:
        return None
    return mesh[TP_AXES[0]] if strategy.tp_y == 1 else mesh[TP_AXES]


def tensor_state(tp_mesh: DeviceMesh | None, strategy: Strategy) -> TpState | None:
    """The state of a strategy with tensor parallelism; None without."""
    if tp_mesh is None:
        return None
    return TpState(_group(tp_mesh, TP_AXES), strategy.gathered_inputs == "re-gather")


def _group(tp_mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """This rank's group over some tensor-parallel axes; axes the mesh lacks have one rank."""
    names = tuple(a for a in axes if a in (tp_mesh.mesh_dim_names or ()))
    if len(names) == 1:
        return tp_mesh.get_group(names[0])
    return tp_mesh[names]._flatten("_".join(names)).get_group()


def apply_tensor_parallel(
    model: nn.Module,
    decoder: tuple[nn.Module, nn.ModuleList] | None,
    shard_plan: ShardPlan,
    state: TpState,
    tp_mesh: DeviceMesh,
    strategy: Strategy,
) -> None:
    """Put tensor parallelism around the modules of a model, its parameters already DTensors on `tp_mesh`."""
    stream: TokenList | TokenGrid = TokenList(state)
    if strategy.tp_y > 1:
        if decoder is None:
            raise UnsupportedSharding(
                "two-dimensional tensor parallelism needs a Hugging Face model with a list of decoder layers",
                where=type(model).__name__,
                hint=f"parallel.tp_x={strategy.tp} parallel.tp_y=1",
            )
        x, y = (_group(tp_mesh, (axis,)) for axis in TP_AXES)
        by_sequence = strategy.attention_shape == "weight"
        stream = TokenGrid(state, x, y, shard_plan.hidden_cut, by_sequence)
        state.order = stream.order if stream.by_sequence else None
        state.shape = stream.part_shape
    parallel = TensorParallel(model, shard_plan.styles, state, stream, strategy)
    if decoder is None:
        parallel.apply_to_modules()
    else:
        parallel.apply_to_decoder(*decoder)


def watch_gradients(
    model: nn.Module, layouts: dict[str, Layout], state: TpState, tp_mesh: DeviceMesh
) -> None:
    """Sum the gradients of parameters that some tensor-parallel axis does not cut; called after FSDP was put around."""

    def find() -> Iterator[Summed]:
        for name, param in model.named_parameters():
            cuts = layouts[name].sharding_axes
            missing = [a for a in tp_mesh.mesh_dim_names or () if a not in cuts]
            # Experts are reduced over the ranks that hold the same ones.
            if missing and "ep" not in cuts:
                yield param, _group(tp_mesh, missing)

    state.gradients.watch(find)
    # After FSDP's own hook, so that its callback at the end of backward comes first.
    model.register_forward_hook(lambda _, __, output: state.gradients.forward_ends(output))


class TensorParallel:
    """Puts tensor parallelism around the modules of one model; arguments as of `apply_tensor_parallel`."""

    def __init__(
        self,
        model: nn.Module,
        styles: dict[str, str],
        state: TpState,
        stream: TokenList | TokenGrid,
        strategy: Strategy,
    ) -> None:
        self.model, self.state, self.stream = model, state, stream
        self.modules = dict(model.named_modules())
        # What another pipeline rank holds has no parameters here.
        present = {n for n, m in self.modules.items() if any(True for _ in m.parameters())}
        self.styles = {name: style for name, style in styles.items() if name in present}
        # A rule may name a parameter of a module, such as the sinks of attention.
        owners = {n: n.rpartition(".")[0] for n in styles if n not in self.modules}
        self.own_parameters = {n: styles[n] for n, owner in owners.items() if owner in present}
        config = getattr(model, "config", None)
        self.config = None if config is None else config.get_text_config()
        self.regions = {}
        if self.config is not None:
            inside = [n.rpartition(".")[0] for n, s in self.styles.items() if s in _INTO]
            self.regions = {n: self._region_of(n, strategy) for n in dict.fromkeys(inside)}
        self.projections = Projections(state, stream, self.regions, self.config)

    def _region_of(self, name: str, strategy: Strategy) -> Region:
        last, module = name.rpartition(".")[2], self.modules[name]
        attention = "attn" in last or "attention" in last
        region, ranks = Region("1d", attention), strategy.tp
        if isinstance(self.stream, TokenGrid):
            region.shape = strategy.attention_shape if attention else strategy.mlp_shape
            on_tokens = region.shape == "2d" and strategy.attention_scatter == "token"
            if attention and (region.shape == "weight" or on_tokens):
                region.spans = SpanAttention.attach(module, self.stream, name)
                ranks = strategy.tp_x
        heads = self.config.num_attention_heads
        # Several ranks work on one key and value head: each has it alone.
        shared = getattr(self.config, "num_key_value_heads", heads) % ranks
        if attention and shared and hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads // ranks
        return region

    def apply_to_decoder(self, base: nn.Module, layers: nn.ModuleList) -> None:
        """Wrap embedding, regions, layers, final norm and head of a Hugging Face model."""
        embedding, head = base.get_input_embeddings(), self.model.get_output_embeddings()
        projections, names = self.projections, {m: n for n, m in self.modules.items()}
        for name, style in self.styles.items():
            module = self.modules[name]
            if style == "colwise":
                projections.colwise(module, name)
            elif style == "kv_replicate" and isinstance(module, nn.Linear):
                projections.colwise(module, name, projections.key_value_rows(module))
            elif style in ("norm_heads", "kv_replicate"):
                split = style == "norm_heads"
                rows = None if split else projections.key_value_rows(module)
                norm_heads(module, name, rows, self.state)
            elif style in ("qkv", "gate_up"):
                projections.colwise(module, name)
                owner = self.modules[name.rpartition(".")[0]]
                exchange_packed(module, owner, style, self.config, self.state)
            elif style == "rowwise":
                projections.rowwise(module, name)
            elif style == "vocab":
                linear_entry = self.model.config.model_type in LINEAR_ENTRY
                self._embedding(module, None if linear_entry else sum_both)
            elif style != "experts" and module not in (embedding, head):
                self._whole(module, name)
        for name in dict.fromkeys(n.rpartition(".")[0] for n in self.own_parameters):
            self._whole(self.modules[name], name)
        for name, region in self.regions.items():
            self._gather_tokens(self.modules[name], name, region)
        if self.styles.get(names[embedding], "replicate") == "replicate":
            self._whole(embedding, names[embedding])
        if head is not None and hasattr(head, "weight"):  # else on another pipeline rank
            self._head(head, names[head])
        self._enter(layers[0])
        _wrap(final_norm(base), lambda inner, *a, **k: self.stream.leave(inner(*a, **k)))
        self._guard()

    def apply_to_modules(self) -> None:
        """Wrap the named modules of any other model: activations between them are whole on every rank."""
        group = self.state.group

        def whole_input(inner: Forward, x: Tensor) -> Any:
            return inner(sum_backward(x, group, Purpose.ACTIVATIONS))

        for name, style in self.styles.items():
            module = self.modules[name]
            if style in ("colwise", "head", "gate_up"):
                self.projections.colwise(module, name)
                if style == "gate_up":
                    exchange_packed(module, module, style, None, self.state)
                _wrap(module, whole_input)
                if style == "head":
                    _wrap(module, lambda inner, x: join_columns(inner(x), group))
            elif style == "rowwise":
                self.projections.rowwise(module, name, tokens=False)
            elif style == "vocab":
                self._embedding(module, sum_forward)
            else:
                self._whole(module, name)

    def _embedding(self, module: nn.Module, reduce: Callable[..., Tensor] | None) -> None:
        """Look up the rows this rank holds, zero for other tokens, and sum; None: the first layer does that."""
        state = self.state
        rows = module.num_embeddings // state.degree
        first = state.rank * rows
        scale = getattr(module, "embed_scale", None)
        own_forward = type(module).forward is not nn.Embedding.forward and scale is None
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq or own_forward:
            raise UnsupportedSharding(
                "an embedding with a forward of its own, max_norm, sparse or scale_grad_by_freq cannot be split",
                where=type(module).__name__,
            )
        pad = module.padding_idx
        pad = pad - first if pad is not None and first <= pad < first + rows else None

        def forward(ids: Tensor) -> Tensor:
            outside = (ids < first) | (ids >= first + rows)
            index = (ids - first).masked_fill_(outside, 0)
            out = F.embedding(index, to_local(module.weight, state.gradients), pad)
            out = out.masked_fill(outside.unsqueeze(-1), 0)
            if scale is not None:
                out = out * scale.to(out.dtype)
            if reduce is None:
                state.partial_embedding = True
                return out
            return reduce(out, state.group, Purpose.EMBEDDING)

        module.forward = forward

    def _head(self, module: nn.Module, name: str) -> None:
        """Logits of the local vocabulary for all tokens, or of all the vocabulary for this rank's tokens."""
        state = self.state
        # Asked of the weight, because a head tied to the embedding has no parameter, hence no style, of its own.
        split = any(p.is_shard() for p in module.weight.placements)
        require_linear(module, name)

        def forward(x: Tensor) -> Tensor:
            state.head = "vocabulary" if split else "tokens"
            if not split:
                state.head_batch = tuple(x.shape[:-1])
                x = slice_tokens(x, state.group)
            bias = None if module.bias is None else to_local(module.bias, state.gradients)
            return F.linear(x, to_local(module.weight, state.gradients), bias)

        module.forward = forward

    def _whole(self, module: nn.Module, name: str) -> None:
        """A module without a collective: its parameters are local tensors while its forward runs.

        A norm on a stream that is cut over y computes its statistics over all features.
        """
        params = list(module.parameters(recurse=False))
        styles = {s for n, s in self.own_parameters.items() if n.rpartition(".")[0] == name}
        if len(styles) > 1:
            raise UnsupportedSharding(
                "the parameters of one module have several styles", where=name, got=sorted(styles)
            )
        if not params:
            return
        inside: Callable[[], AbstractContextManager[Any]] = nullcontext
        cut = not styles and any(p.is_shard() for w in params for p in w.placements)
        if cut and isinstance(self.stream, TokenGrid):
            inside = partial(SpreadNorm, self.stream.y, name)
        show_local(module, self.state.gradients, inside)

    def _gather_tokens(self, module: nn.Module, name: str, region: Region) -> None:
        """Gather the tokens where a region begins; its rowwise module scatters them again."""
        state, stream = self.state, self.stream

        def gather(part: Tensor) -> Tensor:
            return stream.gather(part, region.shape, region.attention)

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            named = "hidden_states" in kwargs
            if not named and not (args and isinstance(args[0], Tensor)):
                raise UnsupportedSharding(
                    "the module takes its activations neither first nor as `hidden_states`",
                    where=name,
                    got=f"arguments {', '.join(kwargs) or 'none'}",
                )
            part = stream.align(kwargs["hidden_states"] if named else args[0], region.shape)
            tokens, kept = gather(part), part.detach()
            shown = region.shown(tokens, stream)
            if named:
                kwargs["hidden_states"] = shown
            else:
                args = (shown, *args[1:])
            if region.spans is not None:
                kwargs = region.spans.cut(kwargs, tokens.device)
            with region.watch(state):
                scope = region.scope if state.regathers else None
                with instead_of(scope, tokens, state.later(lambda: gather(kept))):
                    out = inner(*args, **kwargs)
            region.tokens = region.scope = None
            return out

        _wrap(module, forward)

    def _enter(self, layer: nn.Module) -> None:
        """Cut the stream where the first layer begins."""
        state = self.state

        def forward(inner: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            state.batch = tuple(hidden_states.shape[:-1])
            part = self.stream.enter(hidden_states, state.partial_embedding)
            state.partial_embedding = False
            return inner(part, *args, **kwargs)

        _wrap(layer, forward)

    def _guard(self) -> None:
        """At the root: refuse outputs that would be pieces, and never return a piece of the logits."""
        state = self.state

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            for wanted in ("output_hidden_states", "output_attentions"):
                if kwargs.get(wanted, getattr(module.config, wanted, False)):
                    raise UnsupportedSharding(
                        f"`{wanted}` would return one rank's piece under tensor parallelism",
                        where=type(module).__name__,
                        hint=f"{wanted}=False",
                    )
            state.loss_taken = False
            state.partial_embedding = False
            state.head = "whole"
            state.gradients.forward_begins()

        def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            logits = getattr(output, "logits", None)
            if logits is None and isinstance(output, tuple) and state.head != "whole":
                raise UnsupportedSharding(
                    "tuple outputs are not assembled under tensor parallelism",
                    where=type(module).__name__,
                    hint="return_dict=True",
                )
            if logits is None or state.head == "whole":
                return
            if state.loss_taken:
                output.logits = None
            elif state.head == "vocabulary":
                output.logits = join_columns(logits, state.group)
            else:
                output.logits = join_tokens(logits, state.head_batch, state.group)

        self.model.register_forward_pre_hook(before, with_kwargs=True)
        self.model.register_forward_hook(after, with_kwargs=True)


def _wrap(module: nn.Module, outer: Callable[..., Any]) -> None:
    """Put `outer(inner, *args)` around the module's forward, on this instance only."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return outer(inner, *args, **kwargs)

    module.forward = forward

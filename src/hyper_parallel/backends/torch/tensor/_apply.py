"""Tensor and sequence parallelism of a Hugging Face decoder, put around unmodified modules.

    embedding (rows split)  ->  summands of [B, S, D]
    first decoder layer     reduce-scatter to this rank's tokens [1, piece, D]; norms and residuals stay there
      region (attention, MLP)   gather tokens -> colwise -> heads or width split -> rowwise -> reduce-scatter tokens
    final norm              on this rank's tokens, then gather tokens, so the base model returns what it always returned
    head (rows split)       logits of this rank's vocabulary for all tokens; the loss takes them as they are

A module is changed by an instance attribute `forward` only: classes, parameter names and the model's source stay as
they are. All arithmetic runs on local tensors; parameters stay DTensors so that FSDP, optimizers and checkpoints
understand them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch import _collectives
from hyper_parallel.backends.torch._handle import TpState
from hyper_parallel.backends.torch._regather import RegatherScope
from hyper_parallel.backends.torch.data._gradients import TpGradients, to_local
from hyper_parallel.backends.torch.experts._apply import local_parameters
from hyper_parallel.backends.torch.pipeline._stages import final_norm
from hyper_parallel.backends.torch.tensor._projections import norm_heads, packed
from hyper_parallel.cost import LINEAR_ENTRY
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Purpose

Forward = Callable[..., Any]


class TensorParallel:
    """Puts tensor parallelism around the modules of one model.

    Args:
        model: The model, its parameters already DTensors on the tensor-parallel mesh.
        styles: Module name to style, as `shard.plan_layouts` gives them.
        state: State shared by the modules.
        gradients: Sums the gradients of whole parameters.
    """

    def __init__(
        self, model: nn.Module, styles: dict[str, str], state: TpState, gradients: TpGradients
    ) -> None:
        self.model = model
        self.state = state
        self.gradients = gradients
        self.modules = dict(model.named_modules())
        # What another pipeline rank holds has no parameters here.
        present = {n for n, m in self.modules.items() if any(True for _ in m.parameters())}
        self.styles = {name: style for name, style in styles.items() if name in present}
        # A rule may name a parameter of a module, such as the sinks of attention.
        owners = {n: n.rpartition(".")[0] for n in styles if n not in self.modules}
        self.own_parameters = {n: styles[n] for n, owner in owners.items() if owner in present}

    def apply_to_decoder(self, base: nn.Module, layers: nn.ModuleList) -> None:
        """Wrap embedding, regions, layers, final norm and head of a Hugging Face model.

        Args:
            base: The decoder without its head.
            layers: Its decoder layers.
        """
        embedding = base.get_input_embeddings()
        head = self.model.get_output_embeddings()
        norm = final_norm(base)
        config = self.model.config.get_text_config()
        linear_entry = self.model.config.model_type in LINEAR_ENTRY
        special = {id(embedding), id(head)}
        for name, style in self.styles.items():
            module = self.modules[name]
            if style == "colwise":
                self._linear(module, name)
            elif style == "kv_replicate" and isinstance(module, nn.Linear):
                self._key_value(module, name)
            elif style in ("norm_heads", "kv_replicate"):
                rows = self._kv_rows(module) if style == "kv_replicate" else None
                norm_heads(module, name, rows, self.state, self.gradients)
            elif style in ("qkv", "gate_up"):
                self._linear(module, name)
                packed(module, self.modules[name.rpartition(".")[0]], style, config, self.state)
            elif style == "rowwise":
                self._rowwise(module, name)
            elif style == "vocab":
                self._embedding(module, None if linear_entry else _collectives.sum_both)
            elif style != "experts" and id(module) not in special:
                self._whole(module)
        for name in dict.fromkeys(n.rpartition(".")[0] for n in self.own_parameters):
            self._local(self.modules[name], name)
        for name in self._regions():
            self._region(self.modules[name], name)
        if self.styles.get(self._name(embedding), "replicate") == "replicate":
            self._whole(embedding)
        if head is not None and hasattr(head, "weight"):  # else on another pipeline rank
            self._head(head)
        self._enter(layers[0])
        self._leave(norm)
        self._guard()

    def apply_to_modules(self) -> None:
        """Wrap the named modules of any other model: activations between them are whole on every rank."""
        group = self.state.group
        for name, style in self.styles.items():
            module = self.modules[name]
            if style == "colwise":
                self._linear(module, name)
                _wrap(module, lambda inner, x: inner(_collectives.sum_backward(x, group)))
            elif style == "rowwise":
                self._rowwise(module, name, tokens=False)
            elif style == "vocab":
                self._embedding(module, _collectives.sum_forward)
            elif style == "head":
                self._linear(module, name)
                _wrap(
                    module,
                    lambda inner, x: _collectives.join_columns(
                        inner(_collectives.sum_backward(x, group)), group
                    ),
                )
            elif style == "gate_up":
                self._linear(module, name)
                packed(module, module, style, None, self.state)
                _wrap(module, lambda inner, x: inner(_collectives.sum_backward(x, group)))
            else:
                self._whole(module, summed=False)

    def _name(self, module: nn.Module) -> str:
        return next(name for name, m in self.modules.items() if m is module)

    def _regions(self) -> list[str]:
        """Modules that own a projection into a split width, in model order."""
        into = ("colwise", "kv_replicate", "qkv", "gate_up")
        inside = [n for n, s in self.styles.items() if s in into]
        return list(dict.fromkeys(n.rpartition(".")[0] for n in inside))

    def _linear(self, module: nn.Module, name: str) -> None:
        _require_linear(module, name)

        def forward(x: Tensor) -> Tensor:
            bias = None if module.bias is None else to_local(module.bias, None)
            return F.linear(x, to_local(module.weight, None), bias)

        module.forward = forward

    def _key_value(self, module: nn.Module, name: str) -> None:
        """A key or value projection kept whole: compute the rows of the heads that this rank's queries use."""
        _require_linear(module, name)
        attention = self.modules[name.rpartition(".")[0]]
        config = self.model.config.get_text_config()
        degree = self.state.degree
        rows = self._kv_rows(module)
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = config.num_attention_heads // degree
        owner = self.gradients

        def forward(x: Tensor) -> Tensor:
            weight = to_local(module.weight, owner)[rows]
            bias = None if module.bias is None else to_local(module.bias, owner)[rows]
            return F.linear(x, weight, bias)

        module.forward = forward

    def _kv_rows(self, module: nn.Module) -> slice:
        """Rows of the key and value head that this rank's queries use, of several ranks' common one."""
        heads = self.model.config.get_text_config().num_key_value_heads
        width = module.weight.shape[0] // heads
        row = self.state.rank // (self.state.degree // heads) * width
        return slice(row, row + width)

    def _rowwise(self, module: nn.Module, name: str, tokens: bool = True) -> None:
        """Sum the ranks' products, then add the bias once."""
        _require_linear(module, name)
        group = self.state.group
        owner = self.gradients if tokens else None
        reduce = _collectives.scatter_tokens if tokens else _collectives.sum_forward

        def forward(x: Tensor) -> Tensor:
            out = reduce(F.linear(x, to_local(module.weight, None)), group)
            return out if module.bias is None else out + to_local(module.bias, owner)

        module.forward = forward

    def _embedding(self, module: nn.Module, reduce: Callable[..., Tensor] | None) -> None:
        """Look up the rows this rank holds, zero for other tokens, and sum; None: the first layer does that."""
        state = self.state
        rows = module.num_embeddings // state.degree
        first = state.rank * rows
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise UnsupportedSharding(
                "an embedding with max_norm, sparse or scale_grad_by_freq cannot be split over ranks",
                where=type(module).__name__,
            )
        pad = module.padding_idx
        pad = pad - first if pad is not None and first <= pad < first + rows else None
        scale = getattr(module, "embed_scale", None)
        if type(module).forward is not nn.Embedding.forward and scale is None:
            raise UnsupportedSharding(
                "an embedding with a forward of its own cannot be split over ranks",
                where=type(module).__name__,
            )

        def forward(ids: Tensor) -> Tensor:
            outside = (ids < first) | (ids >= first + rows)
            index = (ids - first).masked_fill_(outside, 0)
            out = F.embedding(index, to_local(module.weight, None), pad)
            out = out.masked_fill(outside.unsqueeze(-1), 0)
            if scale is not None:
                out = out * scale.to(out.dtype)
            if reduce is None:
                state.partial_embedding = True
                return out
            return reduce(out, state.group, Purpose.EMBEDDING)

        module.forward = forward

    def _head(self, module: nn.Module) -> None:
        """Logits of the local vocabulary for all tokens, or of all the vocabulary for this rank's tokens."""
        state, owner = self.state, self.gradients
        # Asked of the weight, because a head tied to the embedding has no parameter, hence no style, of its own.
        split = any(p.is_shard() for p in module.weight.placements)
        _require_linear(module, self._name(module))

        def forward(x: Tensor) -> Tensor:
            bias = module.bias
            if split:
                state.head = "vocabulary"
                weight = to_local(module.weight, None)
                return F.linear(x, weight, None if bias is None else to_local(bias, None))
            state.head = "tokens"
            state.head_batch = tuple(x.shape[:-1])
            x = _collectives.slice_tokens(x, state.group)
            weight = to_local(module.weight, owner)
            return F.linear(x, weight, None if bias is None else to_local(bias, owner))

        module.forward = forward

    def _whole(self, module: nn.Module, summed: bool = True) -> None:
        """A module with whole parameters: they are local tensors while its forward runs."""
        owner = self.gradients if summed else None
        if not any(True for _ in module.parameters(recurse=False)):
            return

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            with local_parameters(module, owner):
                return inner(*args, **kwargs)

        _wrap(module, forward)

    def _local(self, module: nn.Module, name: str) -> None:
        """A module with parameters of its own that a rule names: local tensors while its forward runs."""
        styles = {s for n, s in self.own_parameters.items() if n.rpartition(".")[0] == name}
        if len(styles) > 1:
            raise UnsupportedSharding(
                "the parameters of one module have several styles", where=name, got=sorted(styles)
            )
        owner = self.gradients if styles == {"replicate"} else None

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            with local_parameters(module, owner):
                return inner(*args, **kwargs)

        _wrap(module, forward)

    def _region(self, module: nn.Module, name: str) -> None:
        """Gather the tokens where a region begins; its rowwise module scatters them again."""
        state = self.state

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            named = "hidden_states" in kwargs
            if not named and not (args and isinstance(args[0], Tensor)):
                raise UnsupportedSharding(
                    "the module takes its activations neither first nor as `hidden_states`",
                    where=name,
                    got=f"arguments {', '.join(kwargs) or 'none'}",
                )
            piece = kwargs["hidden_states"] if named else args[0]
            batch = state.batch
            tokens = _collectives.gather_tokens(piece, batch, state.group)
            if named:
                kwargs["hidden_states"] = tokens
            else:
                args = (tokens, *args[1:])
            if not state.regathers:
                return inner(*args, **kwargs)
            kept, scope = piece.detach(), RegatherScope()
            again = scope.instead_of(
                tokens, lambda: _collectives.gather_tokens(kept, batch, state.group)
            )
            with scope.open(), again:
                return inner(*args, **kwargs)

        _wrap(module, forward)

    def _enter(self, layer: nn.Module) -> None:
        """Cut the tokens where the first layer begins."""
        state = self.state

        def forward(inner: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            state.batch = tuple(hidden_states.shape[:-1])
            if state.partial_embedding:
                state.partial_embedding = False
                piece = _collectives.scatter_tokens(hidden_states, state.group)
            else:
                piece = _collectives.slice_tokens(hidden_states, state.group)
            return inner(piece, *args, **kwargs)

        _wrap(layer, forward)

    def _leave(self, norm: nn.Module) -> None:
        """Gather the tokens behind the final norm."""
        state = self.state
        _wrap(
            norm,
            lambda inner, *a, **k: _collectives.gather_tokens(
                inner(*a, **k), state.batch, state.group
            ),
        )

    def _guard(self) -> None:
        """At the root: refuse outputs that would be pieces, and never return a piece of the logits."""
        state, gradients = self.state, self.gradients

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
            gradients.forward_begins()

        def after(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
            logits = getattr(output, "logits", None)
            if logits is None and isinstance(output, tuple) and state.head != "whole":
                raise UnsupportedSharding(
                    "tuple outputs are not assembled under tensor parallelism",
                    where=type(module).__name__,
                    hint="return_dict=True",
                )
            if logits is None or state.head == "whole":
                return output
            if state.loss_taken:
                output.logits = None
            elif state.head == "vocabulary":
                output.logits = _collectives.join_columns(logits, state.group)
            else:
                output.logits = _collectives.join_tokens(logits, state.head_batch, state.group)
            return output

        self.model.register_forward_pre_hook(before, with_kwargs=True)
        self.model.register_forward_hook(after, with_kwargs=True)


def _wrap(module: nn.Module, outer: Callable[..., Any]) -> None:
    """Put `outer(inner, *args)` around the module's forward, on this instance only."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return outer(inner, *args, **kwargs)

    module.forward = forward


def _require_linear(module: nn.Module, name: str) -> None:
    if type(module).forward is not nn.Linear.forward:
        raise UnsupportedSharding(
            "only nn.Linear can be split over ranks",
            where=name,
            got=type(module).__name__,
            hint=f"'parallel.rules={{{name}: replicate}}'",
        )

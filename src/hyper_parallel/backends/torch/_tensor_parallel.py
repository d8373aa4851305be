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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch import _comm
from hyper_parallel.backends.torch._gradients import TpGradients, to_local
from hyper_parallel.backends.torch._state import TpState
from hyper_parallel.cost import LINEAR_ENTRY
from hyper_parallel.errors import UnsupportedSharding

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
        self.styles = {name: style for name, style in styles.items() if name in self.modules}

    def apply_to_decoder(self, base: nn.Module, layers: nn.ModuleList) -> None:
        """Wrap embedding, regions, layers, final norm and head of a Hugging Face model.

        Args:
            base: The decoder without its head.
            layers: Its decoder layers.
        """
        state = self.state
        embedding = base.get_input_embeddings()
        head = self.model.get_output_embeddings()
        norm = _final_norm(base, layers)
        linear_entry = self.model.config.model_type in LINEAR_ENTRY
        special = {id(embedding), id(head)}
        for name, style in self.styles.items():
            module = self.modules[name]
            if style == "colwise":
                self._linear(module, name)
            elif style == "kv_replicate":
                self._key_value(module, name)
            elif style == "rowwise":
                self._rowwise(module, name)
            elif style == "vocab":
                self._embedding(module, None if linear_entry else _comm.sum_both)
            elif id(module) not in special:
                self._whole(module)
        for name in self._regions():
            self._region(self.modules[name], name)
        if self.styles.get(self._name(embedding), "replicate") == "replicate":
            self._whole(embedding)
        if head is not None:
            self._head(head)
        self._enter(layers[0])
        _wrap(
            norm,
            lambda inner, *a, **k: _comm.gather_tokens(inner(*a, **k), state.batch, state.group),
        )
        self._guard()

    def apply_to_modules(self) -> None:
        """Wrap the named modules of any other model: activations between them are whole on every rank."""
        group = self.state.group
        for name, style in self.styles.items():
            module = self.modules[name]
            if style == "colwise":
                self._linear(module, name)
                _wrap(module, lambda inner, x: inner(_comm.sum_backward(x, group)))
            elif style == "rowwise":
                self._rowwise(module, name, tokens=False)
            elif style == "vocab":
                self._embedding(module, _comm.sum_forward)
            elif style == "head":
                self._linear(module, name)
                _wrap(
                    module,
                    lambda inner, x: _comm.join_columns(inner(_comm.sum_backward(x, group)), group),
                )
            elif style == "kv_replicate":
                raise UnsupportedSharding(
                    "key and value heads fewer than tp are known for Hugging Face decoders only",
                    where=name,
                )
            else:
                self._whole(module, summed=False)

    def _name(self, module: nn.Module) -> str:
        return next(name for name, m in self.modules.items() if m is module)

    def _regions(self) -> list[str]:
        """Modules that own a projection into a split width, in model order."""
        inside = [n for n, s in self.styles.items() if s in ("colwise", "kv_replicate")]
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
        config = self.model.config
        degree, rank = self.state.degree, self.state.rank
        heads = config.num_key_value_heads
        width = module.out_features // heads
        row = rank // (degree // heads) * width
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = config.num_attention_heads // degree
        owner = self.gradients

        def forward(x: Tensor) -> Tensor:
            weight = to_local(module.weight, owner)[row : row + width]
            bias = None if module.bias is None else to_local(module.bias, owner)[row : row + width]
            return F.linear(x, weight, bias)

        module.forward = forward

    def _rowwise(self, module: nn.Module, name: str, tokens: bool = True) -> None:
        """Sum the ranks' products, then add the bias once."""
        _require_linear(module, name)
        group = self.state.group
        owner = self.gradients if tokens else None
        reduce = _comm.scatter_tokens if tokens else _comm.sum_forward

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
            return reduce(out, state.group)

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
            x = _comm.slice_tokens(x, state.group)
            weight = to_local(module.weight, owner)
            return F.linear(x, weight, None if bias is None else to_local(bias, owner))

        module.forward = forward

    def _whole(self, module: nn.Module, summed: bool = True) -> None:
        """A module with whole parameters: they are local tensors while its forward runs."""
        owner = self.gradients if summed else None
        if not any(True for _ in module.parameters(recurse=False)):
            return

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            with _local_parameters(module, owner):
                return inner(*args, **kwargs)

        _wrap(module, forward)

    def _region(self, module: nn.Module, name: str) -> None:
        """Gather the tokens where a region begins; its rowwise module scatters them again."""
        state = self.state

        def forward(inner: Forward, *args: Any, **kwargs: Any) -> Any:
            if "hidden_states" in kwargs:
                piece = kwargs["hidden_states"]
                kwargs["hidden_states"] = _comm.gather_tokens(piece, state.batch, state.group)
            elif args and isinstance(args[0], Tensor):
                args = (_comm.gather_tokens(args[0], state.batch, state.group), *args[1:])
            else:
                raise UnsupportedSharding(
                    "the module takes its activations neither first nor as `hidden_states`",
                    where=name,
                    got=f"arguments {', '.join(kwargs) or 'none'}",
                )
            return inner(*args, **kwargs)

        _wrap(module, forward)

    def _enter(self, layer: nn.Module) -> None:
        """Cut the tokens where the first layer begins."""
        state = self.state

        def forward(inner: Forward, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            state.batch = tuple(hidden_states.shape[:-1])
            if state.partial_embedding:
                state.partial_embedding = False
                piece = _comm.scatter_tokens(hidden_states, state.group)
            else:
                piece = _comm.slice_tokens(hidden_states, state.group)
            return inner(piece, *args, **kwargs)

        _wrap(layer, forward)

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
                output.logits = _comm.join_columns(logits, state.group)
            else:
                output.logits = _comm.join_tokens(logits, state.head_batch, state.group)
            return output

        self.model.register_forward_pre_hook(before, with_kwargs=True)
        self.model.register_forward_hook(after, with_kwargs=True)


def _wrap(module: nn.Module, outer: Callable[..., Any]) -> None:
    """Put `outer(inner, *args)` around the module's forward, on this instance only."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return outer(inner, *args, **kwargs)

    module.forward = forward


@contextmanager
def _local_parameters(module: nn.Module, owner: TpGradients | None) -> Iterator[None]:
    """Show a module local tensors in place of its own parameters."""
    kept = module._parameters
    shown = {n: p if p is None else to_local(p, owner) for n, p in kept.items()}
    module.__dict__["_parameters"] = shown
    try:
        yield
    finally:
        module.__dict__["_parameters"] = kept


def _require_linear(module: nn.Module, name: str) -> None:
    if type(module).forward is not nn.Linear.forward:
        raise UnsupportedSharding(
            "only nn.Linear can be split over ranks",
            where=name,
            got=type(module).__name__,
            hint=f"'parallel.rules={{{name}: replicate}}'",
        )


def _final_norm(base: nn.Module, layers: nn.ModuleList) -> nn.Module:
    """The module that follows the layers: by name, the only norm beside them."""
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
        if isinstance(found := getattr(base, name, None), nn.Module):
            return found
    raise UnsupportedSharding(
        "no final norm was found after the decoder layers",
        where=type(base).__name__,
        got=", ".join(name for name, _ in base.named_children()),
        allowed="norm, final_layernorm, final_layer_norm, ln_f",
    )

"""Half-batches: decoder layers run on two halves of the sequences of a microbatch, to hide collectives.

While one half-batch waits for a collective, the other one computes, in forward and in backward. The code of a layer is
not changed: its forward is called once per half-batch.

    layer k      half-batch 0 | half-batch 1
    layer k + 1                 half-batch 0 | half-batch 1

Layer k returns when half-batch 0 is done; its half-batch 1 is completed during layer k + 1. The return value is a
placeholder, `HalvedTensor`: if code other than the next layer reads its values, half-batch 1 is completed first. If
hooks may read the output of a layer, both half-batches are completed before the layer returns. The model also completes
both. FSDP gathers the parameters of a layer once for both, see `UnitPass`. Recomputation runs both, see
`RecomputedHalves`. A microbatch that cannot be split into two halves runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.data.halved_units import UnitPass, remove_hooks
from hyper_parallel.backends.torch.dropout import has_dropout
from hyper_parallel.backends.torch.in_flight import Turns
from hyper_parallel.backends.torch.recomputed_halves import RecomputedHalves
from hyper_parallel.backends.torch.stand_in import StandIn, complete
from hyper_parallel.backends.torch.tensor.state import TpState
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Overlap, Purpose, Strategy


class HalvedTensor(StandIn):
    """Placeholder for the joined output of two half-batches; the second half may be incomplete."""

    _first: Tensor
    _second: Callable[[], Tensor | None]
    _finish: Callable[[], None]
    _dim: int
    _whole: Tensor | None

    @staticmethod
    def stand_in(first: Tensor, second: Callable[[], Tensor], dim: int, finish: Callable[[], None]) -> HalvedTensor:
        """Return a placeholder for the outputs `first` and `second()` of both half-batches, joined along `dim`.

        `finish` completes the second half-batch, after which `second` returns its output.
        """
        shape = list(first.shape)
        shape[dim] *= 2
        x = HalvedTensor.like(first, tuple(shape))
        x._first, x._second, x._dim, x._finish, x._whole = first, second, dim, finish, None
        return x

    def take_half(self, index: int) -> Tensor:
        """Return the output of half-batch 0 or 1, which must be complete."""
        if self._whole is not None:
            return self._whole.chunk(2, self._dim)[index]
        return self._second() if index else self._first

    def whole(self) -> Tensor:
        """Complete both half-batches; return the joined output, cached, or raise RuntimeError after a failed pass."""
        if self._whole is None:
            self._finish()
            if (second := self._second()) is None:
                raise RuntimeError("the pass of this tensor ended with an error")
            with torch.set_grad_enabled(self._first.requires_grad):
                self._whole = torch.cat((self._first, second), self._dim)
        return self._whole


_PACKED_ARGUMENTS: Final = ("cu_seq", "max_length", "seq_idx")
"""Prefixes of argument names of transformers 5 that describe packed documents; such arguments cannot be halved."""


def check_half_batches(model: nn.Module, strategy: Strategy, has_balance_loss: bool) -> None:
    """Raise HP205 if the strategy runs half-batches and the model has a feature that they do not support."""
    if not strategy.overlap.half_batch:
        return
    skipping = {k: v for m in model.modules() for k, v in vars(m).items() if "layerdrop" in k and v}
    name = type(model).__name__
    reasons = {
        "layers that are skipped at random": (
            skipping and ", ".join(f"{key}={value}" for key, value in skipping.items())
        ),
        "dropout, which would draw different random numbers": has_dropout(model) and name,
        "a load-balancing loss over all tokens": has_balance_loss and name,
    }
    for reason, got in reasons.items():
        if got:
            chunks = {"overlap.ep": "chunks", "overlap.tp": "none"}
            raise UnsupportedSharding(
                f"half-batches do not work with {reason}",
                where="overlap",
                got=got,
                changes=chunks if strategy.ep > 1 else {"overlap": "none"},
            )


class HalfBatch:
    """Executor of decoder layers on two half-batches.

    Attributes:
        halved_layers: Number of layer calls run on half-batches since the last `take_counts`.
        whole_layers: Number of layer calls run on whole batches since the last `take_counts`.
    """

    def __init__(
        self,
        overlap: Overlap,
        tp: TpState | None,
        joins_layers: bool,
        experts_group: ProcessGroup | None = None,
    ) -> None:
        """Create an executor; with `joins_layers`, both half-batches are completed at the end of every layer.

        The batches of the expert-parallel ranks `experts_group` may differ, but the ranks must run the same number of
        exchanges. A pass is halved only if all of them can halve it.
        """
        self._overlap, self._joins_layers = overlap, joins_layers
        self._experts_group, self._parts = experts_group, 1
        self._tp = None if tp is None or tp.replicated_activations else tp
        if self._tp is not None:
            self._tp.halves = self
        self._turns = Turns()
        self._layers: list[nn.Module] = []
        self._units: set[nn.Module] = set()
        self._recomputed: dict[nn.Module, Callable[[], RecomputedHalves]] = {}
        self._unit_pass: UnitPass | None = None
        self.halved_layers = self.whole_layers = 0

    def install(
        self,
        layers: Sequence[nn.Module],
        recomputed: Mapping[nn.Module, Callable[[], RecomputedHalves]],
    ) -> None:
        """Wrap the forwards of decoder layers, so that they run on half-batches.

        `recomputed` maps each layer that backward recomputes to a function that creates its `RecomputedHalves`.
        """
        self._layers += layers
        self._recomputed.update(recomputed)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            wrap(layer, partial(self._forward, layer, following))

    def replace_unit_hooks(self, modules: Sequence[nn.Module]) -> None:
        """Remove FSDP's hooks from the layers among `modules`; a `UnitPass` gathers their parameters instead.

        FSDP's hooks stay if every layer completes both half-batches before it returns.
        """
        if not self._joins_layers:
            self._units = {*self._layers} & {*modules}
            for layer in self._units:
                remove_hooks(layer)

    def watch(self, model: nn.Module) -> None:
        """Add hooks to a model that complete both half-batches at the end of each forward pass.

        The hooks raise HP205 in a pass that returns attention weights, and if a layer is compiled.
        """

        def before(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._unit_pass = None
            option = "output_attentions"
            default = getattr(getattr(module, "config", None), option, False)
            if kwargs.get(option, default):
                raise UnsupportedSharding(
                    f"`{option}` would return two values per layer, one per half-batch",
                    where=type(module).__name__,
                    hint=f"{option}=False as an argument or in the config of the model",
                )
            if any(layer._compiled_call_impl is not None for layer in self._layers):
                raise UnsupportedSharding(
                    "a compiled layer cannot be suspended while the collectives of a half-batch are in flight",
                    where=type(module).__name__,
                    hint="overlap=none",
                )

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if output is None:  # an error in the model abandons the second half
                self._turns.close()
            self._turns.finish()
            self._unit_pass = None

        model.register_forward_pre_hook(before, with_kwargs=True)
        model.register_forward_hook(after, always_call=True)

    def parts(self, batch: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return 2 if a pass over (B, S) tokens with these arguments of its first layer is halved, else 1.

        All ranks call this method once per pass, because expert-parallel ranks exchange their results.
        """
        parts = self._overlap.parts(*batch) if len(batch) == 2 else 1
        if _halves(*_without_hidden(args, kwargs), batch[0]) is None:
            parts = 1
        group = self._experts_group
        if group is None:
            return parts
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        total = torch.tensor(parts, device=hidden.device)
        return 2 if int(all_reduce(total, group, Purpose.HALF_BATCHES)) == 2 * group.size() else 1

    def take_counts(self) -> dict[str, int]:
        """Return `halved_layers` and `whole_layers` by name and reset them."""
        counts = {"halved_layers": self.halved_layers, "whole_layers": self.whole_layers}
        self.halved_layers = self.whole_layers = 0
        return counts

    def begin(self, calls: Sequence[Callable[[], Any]], dim: int) -> Any:
        """Begin a forward pass by running one call per half-batch; return the outputs joined along `dim`.

        The result is a `HalvedTensor` unless layers complete both half-batches.
        """
        self._turns.close()
        return self._run(calls, dim, joins=self._joins_layers)

    def end(self, call: Callable[[Tensor], Any], x: Tensor, dims: tuple[int, int]) -> Any:
        """End a forward pass: apply `call` to each half of `x` and return the joined outputs.

        `dims` are the dim along which `x` is split and the dim along which the outputs are joined.
        """
        half = _half_of(x, dims[0])
        calls = [lambda index=index: call(half(index)) for index in range(2)]
        return self._run(calls, dims[1], joins=True)

    def _forward(
        self,
        layer: nn.Module,
        following: nn.Module | None,
        inner: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        by_keyword = "hidden_states" in kwargs
        hidden = kwargs["hidden_states"] if by_keyword else args[0]
        if self._tp is None and layer is self._layers[0]:
            self._parts = self.parts(tuple(hidden.shape[:-1]), args, kwargs)
        batch = self._batch(hidden)
        halves = None if batch is None else _halves(*_without_hidden(args, kwargs), batch)
        if halves is None and batch is not None and self._tp is not None:
            raise UnsupportedSharding(
                "an argument of this layer cannot be split into half-batches, although those of the first layer can",
                where=type(layer).__name__,
                got=", ".join(kwargs),
                hint="overlap=none",
            )
        run = self._in_unit(layer, parts=1 if halves is None else 2)
        if halves is None:
            self.whole_layers += 1
            args, kwargs = complete((args, kwargs))
            return run(inner, *args, **kwargs)
        self.halved_layers += 1
        dim = 0 if self._tp is None else 1
        half, forwards = _half_of(hidden, dim), self._forwards(layer, inner)

        def call(index: int) -> Any:
            own_args, own_kwargs = halves[index]
            forward = forwards[index]
            if by_keyword:
                return run(forward, *own_args, **own_kwargs, hidden_states=half(index))
            return run(forward, half(index), *own_args[1:], **own_kwargs)

        joins = self._joins_layers or self._is_watched(layer, following)
        return self._run([partial(call, index) for index in range(2)], dim, joins)

    def _forwards(self, layer: nn.Module, inner: Callable[..., Any]) -> list[Callable[..., Any]]:
        if layer not in self._recomputed or not torch.is_grad_enabled():
            return [inner, inner]
        halves = self._recomputed[layer]()
        return [partial(halves.run, index) for index in range(2)]

    def _in_unit(self, layer: nn.Module, parts: int) -> Callable[..., Any]:
        """Gather the parameters of a layer if FSDP shards it; return the function that calls the layer's forward."""
        if layer not in self._units:
            return lambda forward, *args, **kwargs: forward(*args, **kwargs)
        self._unit_pass = UnitPass(layer, parts, self._unit_pass)
        return self._unit_pass.run

    def _is_watched(self, layer: nn.Module, following: nn.Module | None) -> bool:
        """Return whether code other than the next layer, such as a hook, may read the output of a layer."""
        if layer._forward_hooks or getattr(layer, "gradient_checkpointing", False):
            return True
        return self._tp is None if following is None else bool(following._forward_pre_hooks)

    def _run(self, calls: Sequence[Callable[[], Any]], dim: int, joins: bool) -> Any:
        """Run one call per half-batch and return the joined output; without `joins`, a `HalvedTensor`."""
        results = self._turns.add(calls)
        if joins:
            self._turns.finish()

        def joined(second: Callable[[], Tensor], first: Tensor, dim: int) -> Tensor:
            if joins:
                return torch.cat((first, second()), dim)
            return HalvedTensor.stand_in(first, second, dim, self._turns.finish)

        return _join_outputs(results[0], lambda: results[1], dim, joined)

    def _batch(self, hidden: Tensor) -> int | None:
        """Return the number of sequences in the hidden states of a layer; None if the pass runs on a whole batch."""
        if self._tp is not None:
            return 2 * self._tp.batch[0] if self._tp.shape.parts == 2 else None
        return hidden.shape[0] if self._parts == 2 else None


def _half_of(x: Tensor, dim: int) -> Callable[[int], Tensor]:
    return x.take_half if isinstance(x, HalvedTensor) else x.chunk(2, dim).__getitem__


def _without_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a layer without its hidden states, which become None if they are positional."""
    if "hidden_states" in kwargs:
        return args, {k: v for k, v in kwargs.items() if k != "hidden_states"}
    return (None, *args[1:]), kwargs


def _halves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], batch: int
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], ...] | None:
    """Return (args, kwargs) for each half-batch; None if an argument cannot be halved or describes packed documents."""
    if any(v is not None and n.startswith(_PACKED_ARGUMENTS) for n, v in kwargs.items()):
        return None
    halves = _split_argument((args, tuple(kwargs.values())), batch)
    if halves is None:
        return None
    return tuple((own, dict(zip(kwargs, values, strict=True))) for own, values in halves)


def _split_argument(value: Any, batch: int) -> tuple[Any, Any] | None:
    """Return the values of an argument for both half-batches; None if it cannot be halved.

    A tensor is halved if its first dim has size `batch`. Both half-batches get the same tensor if its first dim is 1 or
    if it has no dim of size `batch`. Other tensors cannot be halved. Tuples are halved item by item; numbers, strings
    and None are shared. Lists, dicts and other objects cannot be halved, because layers may use them to pass values to
    later layers.
    """
    if isinstance(value, Tensor):
        if batch not in value.shape or value.shape[0] == 1:
            return value, value
        if value.shape[0] != batch:
            return None
        first, second = value.chunk(2)
        return first, second
    if isinstance(value, tuple):
        pairs = [_split_argument(item, batch) for item in value]
        if any(pair is None for pair in pairs):
            return None
        first, second = (tuple(pair[i] for pair in pairs if pair is not None) for i in range(2))
        return first, second
    if value is None or isinstance(value, bool | int | float | str):
        return value, value
    return None


def _join_outputs(
    first: Any,
    second: Callable[[], Any],
    dim: int,
    joined: Callable[[Callable[[], Tensor], Tensor, int], Tensor],
) -> Any:
    """Join a layer's outputs `first` and `second()` of both half-batches.

    The first tensor of a tuple is joined along `dim`, others along dim 0. `joined(second, first, dim)` joins tensors.
    """
    if isinstance(first, Tensor):
        return joined(second, first, dim)
    if isinstance(first, tuple):
        parts = [
            _join_outputs(part, lambda i=i: second()[i], dim if i == 0 else 0, joined) for i, part in enumerate(first)
        ]
        return tuple(parts)
    if first is None:
        return None
    raise UnsupportedSharding(
        f"a decoder layer returns a {type(first).__name__}, which cannot be joined from two half-batches",
        where="overlap",
        got=type(first).__name__,
        allowed="a tensor, None, or a tuple of them",
        hint="overlap=none",
    )

"""What flows where in a forward pass: a trial without values, before any rank starts.

The model's own forward runs once under `Marks`. It tells which layers need what a module outside of the list of layers
gives, what a layer returns, and whether anything but one tensor passes from a layer to the next. With the attention
interface it also tells whether tokens see each other anywhere else, and where their positions come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.backends.torch.flow_tracer import FIRST, IDS, TOKENS, Marks
from hyper_parallel.backends.torch.model_structure import (
    PlaceholderModule,
    SlotList,
    decoder_of,
    text_config,
)
from hyper_parallel.errors import UnsupportedSharding


@dataclass(slots=True)
class PassFlow:
    """What the trial saw; after all layers counts as a layer of its own.

    Attributes:
        path: Name of the list of layers.
        layers: Its length.
        tail: Size of the dims of activations after [B, S].
        outputs: Of every layer the form of what it returns, and which leaf is the activations.
        owners: Modules outside of the list that own parameters, by name, and the layers that need their result.
        results: Sizes of the result after the dims that it shares with the argument, where that can be stood in for.
        params: Parameter outside of the list to the layers that need it in any way.
        mixes: Operators that let tokens see each other; empty for attention through the interface.
    """

    path: str
    layers: int
    tail: tuple[int, ...] = ()
    outputs: list[tuple[TreeSpec, int]] = field(default_factory=list)
    owners: dict[str, set[int]] = field(default_factory=dict)
    results: dict[str, tuple[int, tuple[int, ...]] | None] = field(default_factory=dict)
    params: dict[str, set[int]] = field(default_factory=dict)

    def rebuilt(self, layer: int, hidden: Tensor) -> Any:
        """What a layer returns, with these activations and nothing beside them."""
        spec, at = self.outputs[layer]
        return tree_unflatten([hidden if i == at else None for i in range(spec.num_leaves)], spec)


def follow(model: nn.Module) -> PassFlow:
    """The flow of a model whose layers pass one tensor on.

    Raises:
        UnsupportedSharding: HP205 with what does not fit stages.
    """
    decoder = decoder_of(model)
    if decoder is None:
        raise refused(model, "it has no list of layers", "pp")
    return _Trial(model, decoder[1]).run()


def refused(model: nn.Module, why: str, axis: str) -> UnsupportedSharding:
    """The refusal of an axis."""
    what = {
        "pp": "cannot be cut into pipeline stages",
        "cp": "cannot cut its sequences over ranks",
        "tp": "cannot be split over tensor-parallel ranks",
    }
    return UnsupportedSharding(
        f"{type(model).__name__} {what[axis]}: {why}",
        where=f"parallel.{axis}",
        got=getattr(getattr(model, "config", None), "model_type", type(model).__name__),
        allowed=f"{axis}=1",
        hint=f"parallel.{axis}=1",
    )


def run_hollow(model: nn.Module, marks: Marks, axis: str, **more: Tensor) -> Any:
    """The output of a model's forward under `marks`, as a step of training calls it.

    Raises:
        UnsupportedSharding: HP205 when the forward cannot run without values; what the trial of `axis` raises.
    """
    ids = torch.arange(TOKENS)[None] % 3 + 3
    marks.set(ids, IDS)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    given = {"input_ids": ids, "labels": ids.clone(), "shift_labels": ids.clone(), **more}
    # The loss that balances experts is added by `BalanceLoss`, over all ranks.
    balanced = getattr(text_config(model), "output_router_logits", None)
    routed = {} if balanced is None else {"output_router_logits": False}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), driver_untouched(), marks:
            return model(**given, num_items_in_batch=TOKENS, use_cache=False, **routed)
    except UnsupportedSharding:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        raise refused(model, f"its forward does not run without values ({why})", axis) from error


def count_norm_calls(model: nn.Module, layers: nn.ModuleList, norm: nn.Module) -> int:
    """Return how often a forward pass of the model calls a norm outside of its layers.

    The first layer runs, and its result stands for those of the others. A forward that does not run without values
    counts the calls before it ends.
    """
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    path = next(name for name, module in model.named_modules() if module is layers)
    hook = norm.register_forward_pre_hook(count)
    try:
        with as_it_was(model), suppress(UnsupportedSharding):
            model.set_submodule(path, _FirstLayerOnly(layers))
            run_hollow(model, Marks(), "tp")
    finally:
        model.set_submodule(path, layers)
        hook.remove()
    return calls[0]


class _FirstLayerOnly(SlotList):
    """A list whose first layer runs, and gives its result in place of the others."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__(layers)
        self._slots = [_ResultOfFirst(layer, i, self) for i, layer in enumerate(layers)]
        self.result: Any = None

    def slots(self) -> list[Any]:
        return self._slots


class _ResultOfFirst:
    """A layer in the list."""

    def __init__(self, layer: nn.Module, index: int, owner: _FirstLayerOnly) -> None:
        self._layer, self._index, self._owner = layer, index, owner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._index == 0:
            self._owner.result = self._layer(*args, **kwargs)
        return self._owner.result


class _Trial(SlotList):
    """The list of layers during the trial."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__(layers)
        names = {id(module): name for name, module in model.named_modules()}
        self.flow = PassFlow(names[id(layers)], len(layers))
        self.marks = Marks()
        self.called: list[int] = []
        self._bits: dict[int, tuple[str, int]] = {}
        self._slots = [_Slot(layer, i, self) for i, layer in enumerate(layers)]
        object.__setattr__(self, "model", model)
        object.__setattr__(self, "whole", layers)

    def slots(self) -> list[Any]:
        return self._slots

    def run(self) -> PassFlow:
        """Run the model once."""
        model, flow, marks = self.model, self.flow, self.marks
        inside: dict[int, set[int]] = {}
        for i, layer in enumerate(self._modules.values()):
            for p in layer.parameters():
                inside.setdefault(id(p), set()).add(i)
                marks.set(p, self._private(i))
        if any(len(layers) > 1 for layers in inside.values()):
            raise refused(model, "layers share weights with each other", "pp")
        bit = FIRST + 2 * flow.layers
        hooks = []
        for name, module in model.named_modules():
            own = {n: p for n, p in module._parameters.items() if p is not None}
            if not own or all(id(p) in inside for p in own.values()):
                continue
            if any(name.startswith(f"{owner}.") for owner in flow.owners):
                continue
            flow.owners[name] = set()
            self._bits[bit] = ("owners", name)
            hooks.append(module.register_forward_hook(self._hook(name, bit), with_kwargs=True))
            bit += 1
        for name, p in model.named_parameters():
            if id(p) not in inside:
                flow.params[name] = set()
                self._bits[bit] = ("params", name)
                marks.set(p, 1 << bit)
                bit += 1
        try:
            with as_it_was(model):
                model.set_submodule(flow.path, self)
                loss = run_hollow(model, marks, "pp").loss
        finally:
            model.set_submodule(flow.path, self.whole)
            for hook in hooks:
                hook.remove()
        self.note(marks.of(loss), flow.layers)
        if marks.written:
            raise refused(model, "activations are changed in place between layers", "pp")
        if self.called != [*range(flow.layers)]:
            raise refused(
                model, "it does not call every layer of its list once, in their order", "pp"
            )
        return flow

    def note(self, marks: int, layer: int) -> None:
        """Write down what a layer, or what follows all of them, was given."""
        for i in range(self.flow.layers):
            if (marks & self._output(i) and i != layer - 1) or (
                marks & self._private(i) and i != layer
            ):
                to = "what follows them" if layer == self.flow.layers else f"layer {layer}"
                why = f"layer {i} gives {to} more than the activations that go from layer to layer"
                raise refused(self.model, why, "pp")
        for bit, (kind, name) in self._bits.items():
            if marks >> bit & 1:
                getattr(self.flow, kind)[name].add(layer)

    def left(self, layer: int, out: Any) -> Any:
        """What a layer returned, as if it came from nowhere else."""
        leaves, spec = tree_flatten(out)
        at = next(
            (
                i
                for i, x in enumerate(leaves)
                if isinstance(x, Tensor) and x.is_meta and x.is_floating_point()
            ),
            None,
        )
        tail = tuple(leaves[at].shape[2:]) if at is not None else ()
        if at is None or leaves[at].shape[:2] != (1, TOKENS) or (layer and tail != self.flow.tail):
            raise refused(self.model, f"layer {layer} returns no activations [B, S, ...]", "pp")
        self.flow.tail = tail
        self.flow.outputs.append((spec, at))
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor) and x.is_meta:
                marks = self._output(layer) if i == at else self._private(layer)
                leaves[i] = self.marks.fresh(x, marks)
        self.marks.guarded.add(leaves[at].untyped_storage()._cdata)
        return tree_unflatten(leaves, spec)

    def _output(self, layer: int) -> int:
        return 1 << FIRST + layer

    def _private(self, layer: int) -> int:
        return 1 << FIRST + self.flow.layers + layer

    def _hook(self, name: str, bit: int) -> Any:
        results = self.flow.results

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            form = None
            if isinstance(out, Tensor) and first is not None:
                same = 0
                for a, b in zip(first.shape, out.shape, strict=False):
                    if a != b:
                        break
                    same += 1
                rest = tuple(out.shape[same:])
                if same and TOKENS not in rest:
                    form = (first.dim() - same, rest)
            results[name] = form if results.get(name, form) == form else None
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, Tensor):
                    self.marks.set(leaf, self.marks.of(leaf) | 1 << bit)

        return after


class _Slot:
    """A layer during the trial."""

    def __init__(self, layer: Any, index: int, trial: _Trial) -> None:
        self._layer, self._index, self._trial = layer, index, trial
        self._elsewhere = PlaceholderModule(layer)

    def __getattr__(self, name: str) -> Any:
        # What is read of a layer must be there where the layer is not.
        return getattr(self._elsewhere, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trial, marks, i = self._trial, self._trial.marks, self._index
        trial.called.append(i)
        trial.note(marks.of((args, kwargs)), i)
        marks.guarded.clear()
        out = self._layer(*args, **kwargs)
        trial.note(marks.of(out), i)
        return trial.left(i, out)


@contextmanager
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Leave attributes and buffers of all modules as they were before."""
    kept = [(m, dict(m.__dict__), dict(m._buffers)) for m in model.modules()]
    experts = _experts_implementation(model)
    try:
        yield
    finally:
        for module, attributes, buffers in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        if experts is not None:
            model.set_experts_implementation(experts)


def _experts_implementation(model: nn.Module) -> dict[str, Any] | None:
    """How a model of transformers computes experts, by sub-config; early 5.x can only set it."""
    if not hasattr(model, "set_experts_implementation"):
        return None
    config: Any = model.config
    parts = {"": config, **{key: getattr(config, key, None) for key in config.sub_configs}}
    return {key: part._experts_implementation for key, part in parts.items() if part is not None}

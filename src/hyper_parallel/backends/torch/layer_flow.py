"""Trace of the data flow between layers: one forward pass on meta tensors, before any rank starts.

The trace records the structure of every layer's return value, and for each module outside the layer list the layers
that use its results. It raises if layers exchange more than one activation tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.backends.torch.flow_tracer import FIRST_FREE_BIT, IDS, TOKENS, FlowTracer
from hyper_parallel.backends.torch.model_structure import (
    ModelView,
    PlaceholderModule,
    SlotList,
    text_config,
    view_of,
)
from hyper_parallel.errors import UnsupportedSharding


@dataclass(slots=True)
class LayerFlow:
    """Data flow of a model between its layers.

    In `owners` and `params`, the code after the last layer has the index `layers`.

    Attributes:
        path: Name of the layer list.
        layers: Number of layers.
        tail: Sizes of the dims of activations after [B, S].
        outputs: Per layer, the tree spec of its return value and the index of the activations among the leaves.
        owners: For each module outside the list with parameters, by name: indices of the layers that use its results.
        results: For each of these modules, (n, sizes): the result has the shape of the first argument, with its last n
            dims replaced by `sizes`. None if the shape follows no such rule.
        params: For each parameter outside the list, by name: indices of the layers that use it, also through a module.
        writes_logits: Whether forward changes the output of the head in place.
    """

    path: str
    layers: int
    tail: tuple[int, ...] = ()
    outputs: list[tuple[TreeSpec, int]] = field(default_factory=list)
    owners: dict[str, set[int]] = field(default_factory=dict)
    results: dict[str, tuple[int, tuple[int, ...]] | None] = field(default_factory=dict)
    params: dict[str, set[int]] = field(default_factory=dict)
    writes_logits: bool = False

    @property
    def unused(self) -> set[str]:
        """Names of parameters outside the layers that a text batch does not use, such as those of an image encoder."""
        return {name for name, layers in self.params.items() if not layers}

    def rebuild_output(self, layer: int, hidden: Tensor) -> Any:
        """Return a value with the structure of the layer's return value: `hidden` as activations, else None."""
        spec, position = self.outputs[layer]
        leaves = [hidden if i == position else None for i in range(spec.num_leaves)]
        return tree_unflatten(leaves, spec)


def trace_layer_flow(model: nn.Module) -> LayerFlow:
    """Trace a model on meta tensors; return the data flow between its layers, or raise HP205 if pp cannot split it."""
    view = view_of(model)
    if view.base is None:
        raise flow_error(model, "it has no list of decoder layers", "pp")
    return _LayerTrace(model, view).run()


def flow_error(model: nn.Module, why: str, axis: str) -> UnsupportedSharding:
    """Return the error for a model that cannot be sharded over `axis` (pp, cp or tp); `why` is the reason."""
    limits = {
        "pp": "cannot be split into pipeline stages",
        "cp": "cannot shard its sequences over ranks",
        "tp": "cannot be split over tensor-parallel ranks",
    }
    return UnsupportedSharding(
        f"{type(model).__name__} {limits[axis]}: {why}",
        where=f"parallel.{axis}",
        got=getattr(getattr(model, "config", None), "model_type", type(model).__name__),
        allowed=f"{axis}=1",
        changes={"parallel.tp_x": 1, "parallel.tp_y": 1} if axis == "tp" else {f"parallel.{axis}": 1},
    )


def run_on_meta(model: nn.Module, tracer: FlowTracer, axis: str, **extra_inputs: Tensor) -> Any:
    """Return the output of a model's forward under `tracer`, with the arguments of a training step and `extra_inputs`.

    Raise HP205 for `axis` if the forward cannot run on meta tensors.
    """
    inputs = trial_inputs(model, TOKENS)
    ids = inputs["input_ids"]
    tracer.mark(ids, IDS)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    inputs |= {"labels": ids.clone(), "shift_labels": ids.clone(), **extra_inputs}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), driver_untouched(), tracer:
            return model(**inputs, num_items_in_batch=TOKENS)
    except UnsupportedSharding:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        raise flow_error(model, f"its forward does not run on meta tensors ({why})", axis) from error


def trial_inputs(model: nn.Module, length: int) -> dict[str, Any]:
    """Return arguments for a forward pass of a model on one sequence of `length` token ids."""
    inputs: dict[str, Any] = {"input_ids": torch.arange(length)[None] % 3 + 3, "use_cache": False}
    # The model's own load-balancing loss is disabled: `BalanceLoss` adds it over all ranks.
    if getattr(text_config(model), "output_router_logits", None) is not None:
        inputs["output_router_logits"] = False
    return inputs


def count_norm_calls(model: nn.Module, layers: Sequence[nn.Module], norm: nn.Module) -> int:
    """Return how often a forward pass of the model on meta tensors calls `norm`, a module outside of the layers.

    Only the first layer runs; the other layers return its result. If the forward fails, the calls before the failure
    are counted.
    """
    calls, results = list[Any](), list[Any]()
    first, run = layers[0], layers[0].forward

    def run_first(*args: Any, **kwargs: Any) -> Any:
        results[:] = [run(*args, **kwargs)]
        return results[0]

    with preserve_module_state(model), suppress(UnsupportedSharding):
        norm.register_forward_pre_hook(lambda *args: calls.append(args))
        for layer in layers:
            layer.forward = run_first if layer is first else lambda *_, **__: results[0]
        run_on_meta(model, FlowTracer(), "tp")
    return len(calls)


class _LayerTrace(SlotList):
    def __init__(self, model: nn.Module, view: ModelView) -> None:
        super().__init__(view.layers)
        self.flow = LayerFlow(view.path, len(view.layers))
        self.tracer = FlowTracer()
        self.called: list[int] = []
        self._bits: dict[int, tuple[str, int]] = {}
        self._logits: set[int] = set()
        self._slots = [_Slot(layer, i, self) for i, layer in enumerate(view.layers)]
        object.__setattr__(self, "model", model)

    def slots(self) -> list[Any]:
        return self._slots

    def run(self) -> LayerFlow:
        model, flow, tracer = self.model, self.flow, self.tracer
        with preserve_module_state(model):
            self._mark_parameters()
            model.set_submodule(flow.path, self)
            loss = run_on_meta(model, tracer, "pp").loss
        self.record_uses(tracer.marks_of(loss), flow.layers)
        flow.writes_logits = bool(tracer.written & self._logits)
        if tracer.written - self._logits:
            raise flow_error(model, "activations are modified in place between layers", "pp")
        if self.called != [*range(flow.layers)]:
            raise flow_error(model, "it does not call every layer of its list exactly once and in order", "pp")
        return flow

    def _mark_parameters(self) -> None:
        """Mark all parameters, and results of modules outside the list; raise HP205 for weights shared by layers."""
        model, flow, tracer = self.model, self.flow, self.tracer
        inside: dict[int, set[int]] = {}
        for i, layer in enumerate(self._modules.values()):
            for p in layer.parameters():
                inside.setdefault(id(p), set()).add(i)
                tracer.mark(p, self._private(i))
        if any(len(layers) > 1 for layers in inside.values()):
            raise flow_error(model, "layers share weights with each other", "pp")
        bit = FIRST_FREE_BIT + 2 * flow.layers
        for name, module in model.named_modules():
            own = {n: p for n, p in module._parameters.items() if p is not None}
            if not own or all(id(p) in inside for p in own.values()):
                continue
            if any(name.startswith(f"{owner}.") for owner in flow.owners):
                continue
            flow.owners[name] = set()
            self._bits[bit] = ("owners", name)
            module.register_forward_hook(self._hook(name, bit), with_kwargs=True)
            bit += 1
        for name, p in model.named_parameters():
            if id(p) not in inside:
                flow.params[name] = set()
                self._bits[bit] = ("params", name)
                tracer.mark(p, 1 << bit)
                bit += 1

    def record_uses(self, marks: int, layer: int) -> None:
        """Record the modules and parameters that a layer uses, from the marks of its inputs or outputs.

        Raise HP205 if the layer uses results of earlier layers other than the activations of the preceding layer.
        """
        for i in range(self.flow.layers):
            skips = marks & self._output(i) and i != layer - 1
            if skips or (marks & self._private(i) and i != layer):
                is_after = layer == self.flow.layers
                target = "the code after the layers" if is_after else f"layer {layer}"
                why = f"layer {i} passes more than the activations between layers to {target}"
                raise flow_error(self.model, why, "pp")
        for bit, (kind, name) in self._bits.items():
            if marks >> bit & 1:
                getattr(self.flow, kind)[name].add(layer)

    def detach_origins(self, layer: int, out: Any) -> Any:
        """Record the structure of a layer's output or raise HP205; return meta tensors with the layer as origin."""
        leaves, spec = tree_flatten(out)
        on_meta = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_meta]
        position = next((i for i in on_meta if leaves[i].is_floating_point()), None)
        shape = () if position is None else tuple(leaves[position].shape)
        tail = shape[2:]
        if position is None or shape[:2] != (1, TOKENS) or (layer and tail != self.flow.tail):
            raise flow_error(self.model, f"layer {layer} returns no activations [B, S, ...]", "pp")
        self.flow.tail = tail
        self.flow.outputs.append((spec, position))
        for i in on_meta:
            marks = self._output(layer) if i == position else self._private(layer)
            leaves[i] = self.tracer.meta_tensor(leaves[i].shape, leaves[i].dtype, marks)
        self.tracer.guarded.add(leaves[position].untyped_storage()._cdata)
        return tree_unflatten(leaves, spec)

    def _output(self, layer: int) -> int:
        return 1 << FIRST_FREE_BIT + layer

    def _private(self, layer: int) -> int:
        return 1 << FIRST_FREE_BIT + self.flow.layers + layer

    def _hook(self, name: str, bit: int) -> Any:
        results, head = self.flow.results, self.model.get_output_embeddings()

        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
            form = None
            if isinstance(out, Tensor) and first is not None:
                sizes = zip(first.shape, out.shape, strict=False)
                same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], sizes))
                rest = tuple(out.shape[same:])
                if same and TOKENS not in rest:
                    form = (first.dim() - same, rest)
            results[name] = form if results.get(name, form) == form else None
            if module is head:
                self._logits.add(out.untyped_storage()._cdata)
                self.tracer.guarded |= self._logits
            for leaf in tree_flatten(out)[0]:
                if isinstance(leaf, Tensor):
                    self.tracer.mark(leaf, self.tracer.marks_of(leaf) | 1 << bit)

        return after


class _Slot:
    """Wrapper of a layer during the trace, which records the inputs and outputs of its call."""

    def __init__(self, layer: Any, index: int, trace: _LayerTrace) -> None:
        self._layer, self._index, self._trace = layer, index, trace
        self._placeholder = PlaceholderModule(layer)

    def __getattr__(self, name: str) -> Any:
        # Attributes that other code reads must exist on ranks that have only a placeholder of the layer.
        return getattr(self._placeholder, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trace, tracer, i = self._trace, self._trace.tracer, self._index
        trace.called.append(i)
        trace.record_uses(tracer.marks_of((args, kwargs)), i)
        tracer.guarded.clear()
        out = self._layer(*args, **kwargs)
        trace.record_uses(tracer.marks_of(out), i)
        return trace.detach_origins(i, out)


_TABLES: Final = (
    *("_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
"""Attributes of a module that are dictionaries, which a trial changes in place."""


@contextmanager
def preserve_module_state(model: nn.Module) -> Iterator[None]:
    """Restore attributes, buffers, children, hooks and experts implementation of a model when the context ends."""
    tables = [t for m in model.modules() for t in (vars(m), *(vars(m)[name] for name in _TABLES))]
    saved = [(table, dict(table)) for table in tables]
    experts = _experts_implementation(model)
    try:
        yield
    finally:
        for table, entries in saved:
            table.clear()
            table.update(entries)
        if experts is not None:
            model.set_experts_implementation(experts)


def _experts_implementation(model: nn.Module) -> dict[str, Any] | None:
    """Return the experts implementation per sub-config of a transformers model; None for a model without a setter."""
    if not hasattr(model, "set_experts_implementation"):
        return None
    config: Any = model.config
    parts = {"": config, **{key: getattr(config, key, None) for key in config.sub_configs}}
    return {key: part._experts_implementation for key, part in parts.items() if part is not None}

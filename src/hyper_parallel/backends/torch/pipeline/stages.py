"""Split a Hugging Face model into pipeline stages, in place and without changes to its code.

A rank keeps the modules of its stages under their names; a `PlaceholderModule` without parameters replaces the others.
Every stage runs the model's own forward on the same batch. Masks, positions, rotary angles and values that depend on
the layer index come from the model. Only values at stage boundaries are replaced:

    layers          layers before the running stage return the received activations; layers after the running stage
                    return its output
    media           images and recordings are inputs of the first stage, and of some others (see below)
    other modules   outside of the layer list, modules with parameters run on the stages where `LayerFlow` records a use
                    of their result: an embedding on the first stage, norm and head on the last, some on several; on
                    other stages they return zeros of the shape of their result, which are unused, or their input

A weight used by several stages is on all of them.

With images and recordings (media), the first stage runs the encoders and merges features into the embeddings. Some
models also add features at later decoder layers (`layers_with_media`). The stages of these layers run the encoders
again, on a copy of their weights. Other stages run the forward without the media. Integer inputs with at most two dims,
such as grids and token types, stay, because positions and masks follow from them. A trace of the first pass with media
refuses models in which features enter other layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.flow_tracer import FILL_OPS
from hyper_parallel.backends.torch.layer_flow import LayerFlow, flow_error, trace_layer_flow
from hyper_parallel.backends.torch.model_layouts import read_model
from hyper_parallel.backends.torch.model_structure import PlaceholderModule, SlotList
from hyper_parallel.backends.torch.partial_use import encoder_inputs
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.backends.torch.wrappers import wrap
from hyper_parallel.cost import check_stage_layers, stage_layers
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Strategy
from hyper_parallel.mpmd import check_pipeline


class MediaTrace(TorchDispatchMode):
    """Dispatch mode that tracks tensors computed from media, and records layers outside of `allowed` that read them."""

    def __init__(self, media: Mapping[str, Tensor], allowed: Set[int]) -> None:
        super().__init__()
        self._allowed = allowed
        # The values keep the storages alive, so that their addresses are not reused.
        self._dependent: dict[int, Any] = {}
        self._layers: list[int] = []
        self.mark([*media.values()])

    def record_arguments(self, layer: int, arguments: Any) -> None:
        """Record a layer if its arguments depend on media and it is not in `allowed`."""
        if layer not in self._allowed and self._depends(arguments):
            self._layers.append(layer)

    def check(self, model: nn.Module) -> None:
        """Raise HP205 if `record_arguments` has recorded a layer."""
        if self._layers:
            why = f"features of media enter layer {self._layers[0]}, after the first stage"
            raise flow_error(model, why, "pp")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in FILL_OPS and self._depends((args, kwargs)):
            written = args[:1] if func._schema.is_mutable else ()
            self.mark((out, written))
        return out

    def _depends(self, value: Any) -> bool:
        return any(key in self._dependent for key in map(_storage_key, _tensors(value)))

    def mark(self, value: Any) -> None:
        """Mark the tensors in a value as dependent on media."""
        for tensor in _tensors(value):
            self._dependent[_storage_key(tensor)] = tensor


def layers_with_media(model: nn.Module) -> set[int]:
    """Return the indices of decoder layers that, by the model's config, add media features to their activations."""
    config: Any = getattr(model, "config", None)
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    layers: set[int] = set()
    for part in parts:
        # The value lists encoder layers. Features of the i-th of them, from 0 on, are added after decoder layer i.
        layers |= {*range(1, 1 + len(getattr(part, "deepstack_visual_indexes", None) or ()))}
        # The value lists pairs of an encoder layer and the decoder layer before which its features are added.
        layers |= {layer for _, layer in getattr(part, "deepstack_layer_map", None) or ()}
        # The value lists, for each group of patches, the decoder layer before which its features are added.
        layers |= {*(getattr(part, "spatial_target_layers", None) or ())}
    return layers


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage_key(tensor: Tensor) -> int:
    return local(tensor).untyped_storage()._cdata  # a DTensor has no storage of its own


_OuterModule = tuple[str, frozenset[int], Callable[..., Tensor]]
"""Name of a module outside of the layers, the stages that run it, and its replacement on other stages."""


class StageLayers(SlotList):
    """Decoder layers by index; while a stage runs, iteration yields its layers and pass-through slots for others.

    Attributes:
        ranges: Indices of the layers of every stage.
        flow: Data flow between the layers.
        stage: The running stage; -1 outside of a stage.
        received: Input of the stage's first layer; None on the first stage.
        output: Output of the stage's last layer.
        media_stages: Stages that run the encoders of images and recordings.
        trace: Trace of the running pass; None unless it is the first one with a kind of media.
        traced: Names of the media that were traced in earlier passes.
        features: Features that other parts of the model sent to the running stage, which returns their gradients.
    """

    ranges: tuple[range, ...]
    flow: LayerFlow
    stage: int = -1
    received: Tensor | None = None
    output: Tensor | None = None
    media_stages: frozenset[int] = frozenset({0})
    trace: MediaTrace | None = None
    traced: frozenset[str] = frozenset()
    features: Sequence[Tensor] = ()

    def slots(self) -> list[_LayerSlot] | None:
        """Return one slot per layer for the running stage; None outside of a stage."""
        if self.stage < 0:
            return None
        return [_LayerSlot(layer, i, self) for i, layer in enumerate(self._modules.values())]

    @contextmanager
    def run(self, stage: int, received: Tensor | None) -> Iterator[None]:
        """Make forward passes in this context run only one stage, on received activations."""
        self.stage, self.received, self.output, self.features = stage, received, None, ()
        try:
            yield
        finally:
            self.stage, self.received, self.output = -1, None, None

    @contextmanager
    def trace_media(self, model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
        """Trace media through the pass in this context, if it is the first stage's first pass with this kind of media.

        Raises:
            UnsupportedSharding: HP205 if media enter layers of stages that do not run the encoders.
        """
        media = {} if self.stage else encoder_inputs(inputs)
        if media.keys() <= self.traced:
            yield
            return
        allowed = {i for stage in self.media_stages for i in self.ranges[stage]}
        self.trace = MediaTrace(media, allowed)
        try:
            with self.trace:
                yield
            self.trace.check(model)
            self.traced |= media.keys()
        finally:
            self.trace = None


class _LayerSlot:
    """Proxy of a layer for the running stage: the layer itself, or a pass-through of another stage's layer."""

    def __init__(self, layer: Any, index: int, stages: StageLayers) -> None:
        self._layer, self._index, self._stages = layer, index, stages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages = self._stages
        layers = stages.ranges[stages.stage]
        flow = stages.flow
        if self._index not in layers:
            hidden = stages.received if self._index < layers[0] else stages.output
            if stages.trace is not None:
                stages.trace.record_arguments(self._index, (args, kwargs))
                hidden = torch.zeros_like(hidden)  # activations between layers may depend on media
            return flow.rebuild_output(self._index, hidden)
        out = self._layer(*args, **kwargs)
        if self._index == layers[-1]:
            stages.output = tree_leaves(out)[flow.outputs[self._index][1]]
            if stages.trace is not None:
                out = flow.rebuild_output(self._index, torch.zeros_like(stages.output))
        return out


@dataclass(slots=True)
class StageModules:
    """Stages of one rank.

    Attributes:
        running: Decoder layers, with the state of the running stage.
        rank_of: Dict from stage to its pipeline rank.
        holders: Dict from each name in the complete model's state dict to the pipeline ranks with this entry.
        shared: Names of this rank's parameters that are on other ranks too.
        layers: This rank's decoder layers by stage, in model order.
        tail: Sizes of the dims of activations after [B, S].
        dtype: Dtype of activations.
        device: Device of activations.
        group: Process group of the pipeline ranks.
    """

    running: StageLayers
    rank_of: dict[int, int]
    holders: dict[str, tuple[int, ...]]
    shared: tuple[str, ...]
    layers: dict[int, list[nn.Module]]
    tail: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    group: dist.ProcessGroup
    _outer_modules: list[_OuterModule]

    def layers_running(self) -> range:
        """Return the indices of the running stage's layers."""
        return self.running.ranges[self.running.stage]

    def install(self, model: nn.Module) -> None:
        """Restrict modules outside of the layers to their stages, after tensor parallelism has wrapped them.

        Afterwards, calls of the model outside of a stage raise HP205, and stages without encoders ignore media.
        """
        for name, stages, replacement in self._outer_modules:
            _run_on_stages(model.get_submodule(name), stages, self.running, replacement)

        def before(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            if self.running.stage < 0:
                raise UnsupportedSharding(
                    "a model split into pipeline stages cannot be called directly",
                    where=type(module).__name__,
                    allowed="forward_backward(model, microbatches, num_tokens), forward_loss",
                    hint="hp.forward_backward(model, microbatches, num_tokens)",
                )
            if self.running.stage in self.running.media_stages:
                return args, kwargs
            media = encoder_inputs(kwargs)
            return args, {name: value for name, value in kwargs.items() if name not in media}

        model.register_forward_pre_hook(before, with_kwargs=True)


def split_model(
    model: nn.Module,
    plan: Plan,
    flow: LayerFlow | None,
    mesh: DeviceMesh | None,
    device: torch.device,
) -> StageModules | None:
    """Split a model in place into pipeline stages and return those of this rank; None for a plan without pipeline.

    `flow` is the result of `trace_stages`. If the plan does not state the layers of each stage, the stages get about
    equal costs.
    """
    strategy, workload = plan.strategy, plan.workload
    if mesh is None or flow is None:
        return None
    counts = strategy.stage_layers or tuple(stage.layers for stage in plan.stages)
    if not counts:
        spec = read_model(model, type(model).__name__)
        counts = stage_layers(spec, strategy, workload.seq_len)
    dtype = getattr(torch, workload.compute_dtype)
    return _split(model, flow, strategy, counts, dtype, device, mesh["pp"].get_group())


def trace_stages(model: nn.Module, plan: Plan) -> LayerFlow:
    """Return the data flow between the layers of a model for a plan with a pipeline; process groups are not needed.

    Raises:
        UnsupportedSharding: HP205 for a model without a list of layers, with layers that pass more than one tensor, or
            with activations that tp cannot shard. `mpmd.check_pipeline` and `check_stage_layers` raise further errors.
    """
    strategy, flow = plan.strategy, trace_layer_flow(model)
    check_pipeline(strategy, flow.layers, plan.workload.accumulation_steps or 1)
    check_stage_layers(strategy, flow.layers)
    if strategy.tp > 1 and len(flow.tail) != 1:
        shape = ", ".join(("B", "S", *map(str, flow.tail)))
        raise flow_error(model, f"activations have the shape [{shape}], which tp cannot shard", "pp")
    return flow


def _split(
    model: nn.Module,
    flow: LayerFlow,
    strategy: Strategy,
    counts: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
) -> StageModules:
    """Replace the modules of other pipeline ranks by placeholders; `counts` are the numbers of layers per stage."""
    pp_rank = group.rank()
    ranges = tuple(range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts)))
    last = strategy.stages - 1
    rank_of = {s: r for r in range(strategy.pp) for s in strategy.stages_of(r)}
    stage_of = {i: stage for stage, indices in enumerate(ranges) for i in indices}
    media_stages = frozenset({0} | {stage_of[i] for i in layers_with_media(model) if i in stage_of})
    stage_of[flow.layers] = last
    if len(media_stages) > 1:
        for layers_of_owner in flow.owners.values():
            if not layers_of_owner:  # the text that was traced needs no encoder
                layers_of_owner |= {ranges[stage][0] for stage in media_stages}
    ends, ranks_of = _outer_modules(model, flow, stage_of, rank_of, dtype)
    layers = model.get_submodule(flow.path)
    for stage, indices in enumerate(ranges):
        ranks_of |= {f"{flow.path}.{index}": (rank_of[stage],) for index in indices}
    holders = _holders(model, ranks_of, strategy.pp)
    running = StageLayers(layers)
    running.ranges, running.flow, running.media_stages = ranges, flow, media_stages
    shared = tuple(name for name, _ in model.named_parameters() if {pp_rank} < {*holders[name]})
    model.set_submodule(flow.path, running)
    for name, ranks in ranks_of.items():
        if pp_rank not in ranks:
            placeholder = PlaceholderModule(module := model.get_submodule(name))
            if name in flow.owners:
                # Model code outside of the layers may read device and dtype of a weight.
                for key, p in module._parameters.items():
                    empty = None if p is None else torch.empty(0, dtype=p.dtype, device=device)
                    placeholder.__dict__[key] = empty
            model.set_submodule(name, placeholder)
    keep_properties(model)
    by_stage = {stage: [running._modules[str(i)] for i in ranges[stage]] for stage in strategy.stages_of(pp_rank)}
    activations = (flow.tail, dtype, device)
    return StageModules(running, rank_of, holders, shared, by_stage, *activations, group, ends)


def keep_properties(model: nn.Module) -> None:
    """Make modules without parameters on this rank report device and dtype of the model's first parameter.

    The properties `device` and `dtype` of transformers models read a parameter, and model code reads these properties.
    """

    def first_parameter(recurse: bool = True) -> Iterator[nn.Parameter]:
        return islice(model.parameters(), 1)

    for module in model.modules():
        if hasattr(type(module), "dtype") and next(module.parameters(), None) is None:
            module.__dict__["parameters"] = first_parameter


def _outer_modules(
    model: nn.Module,
    flow: LayerFlow,
    stage_of: dict[int, int],
    rank_of: dict[int, int],
    dtype: torch.dtype,
) -> tuple[list[_OuterModule], dict[str, tuple[int, ...]]]:
    """Return the modules outside of the layers that only some stages run, and a dict from name to pipeline ranks."""
    first = {id(p): name for name, p in model.named_parameters()}
    named = {first[id(p)]: set[int]() for p in model.parameters()}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                named[first[id(p)]] |= flow.owners.get(name, set())
    # Weights that are read outside of a call of their module are on all ranks.
    read = {name for name, layers in flow.params.items() if not layers <= named[name]}
    head = model.get_output_embeddings()
    ends: list[_OuterModule] = []
    ranks_of: dict[str, tuple[int, ...]] = {}
    shared: set[int] = set()
    for owner, layers in flow.owners.items():
        module = model.get_submodule(owner)
        params = [n for n in flow.params if n.startswith(f"{owner}.")]
        result = flow.results.get(owner)
        if read & {*params} or (layers and result is None):
            continue
        users = set().union(layers, *(flow.params[n] for n in params)) or {0}
        ranks = {rank_of[stage_of[i]] for i in users}
        shared |= ranks if len(ranks) > 1 else set()
        ranks_of[owner] = tuple(sorted(ranks))
        if result is not None:
            trailing, sizes = result
            if module is head and not flow.writes_logits:
                sizes = (1,)
            stages = frozenset(stage_of[i] for i in layers)
            ends.append((owner, stages, _placeholder_result(trailing, sizes, dtype)))
    # One pair of ranks exchanges a shared gradient; more ranks, or several pairs, all-reduce it over all ranks.
    if len({*rank_of.values()}) > 2 and (len(shared) > 2 or len(ranks_of) < len(flow.owners)):
        ranks_of = {n: ranks for n, ranks in ranks_of.items() if len(ranks) == 1}
        ends = [end for end in ends if end[0] in ranks_of]
    return ends, ranks_of


def _placeholder_result(trailing: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Tensor]:
    """Return a replacement of a module's forward that returns zeros of the shape of its result.

    In the result, `sizes` replace the last `trailing` dims of the input; if both are empty, it is the input itself.
    `dtype` is used for integer inputs.
    """

    def replacement(*args: Any, **kwargs: Any) -> Tensor:
        x = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not trailing and not sizes:
            return x
        leading = x.shape[: x.dim() - trailing]
        # A new allocation, because the model may change it in place.
        return x.new_zeros(*leading, *sizes, dtype=x.dtype if x.is_floating_point() else dtype)

    return replacement


def _holders(model: nn.Module, ranks_of: dict[str, tuple[int, ...]], pp: int) -> dict[str, tuple[int, ...]]:
    """Return the pipeline ranks of every state dict entry; entries outside of `ranks_of` are on all ranks."""
    by_tensor: dict[int, set[int]] = {}
    entries = {**model.state_dict(keep_vars=True), **dict(model.named_parameters())}
    ranks: dict[str, set[int]] = {}
    for name, value in entries.items():
        part = next((p for p in ranks_of if name.startswith(f"{p}.")), None)
        ranks[name] = {*(range(pp) if part is None else ranks_of[part])}
        by_tensor.setdefault(id(value), set()).update(ranks[name])
    return {name: tuple(sorted(by_tensor[id(value)])) for name, value in entries.items()}


def _run_on_stages(
    module: nn.Module, stages: frozenset[int], running: StageLayers, replacement: Callable[..., Any]
) -> None:
    def forward(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (inner if running.stage in stages else replacement)(*args, **kwargs)

    wrap(module, forward)

"""Cut a Hugging Face model into pipeline stages, in place and without touching its code.

A rank keeps the modules of its stages under their names; the others become a `PlaceholderModule` without parameters.
Every stage runs the model's own forward on the same batch, so masks, positions, rotary angles and whatever depends on
the layer's index come from the model. Only what crosses a boundary is put in its place:

    layers        those of the running stage; those before return the received activations, the last one's output is
                  the stage's, and those after return it again
    the rest      modules beside the list with parameters are where `PassFlow` says that layers or what follows need
                  their result: an embedding on the first stage, norm and head on the last, others on several;
                  elsewhere zeros of the shape of their result, which nothing reads, or their input

A weight that several stages need stays on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.layer_flow import PassFlow, follow, refused
from hyper_parallel.backends.torch.model_structure import PlaceholderModule, SlotList
from hyper_parallel.backends.torch.module_spec import read_model
from hyper_parallel.cost import check_stage_layers, stage_layers
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Strategy
from hyper_parallel.mpmd import check_pipeline

_End = tuple[str, frozenset[int], Callable[..., Tensor]]
"""Name of a module beside the layers, the stages that run it, and what stands for its result on the others."""


class StageLayers(SlotList):
    """The decoder layers by their index; while a stage runs, iteration shows its layers and lets the others pass.

    Attributes:
        ranges: Layers of every stage.
        flow: What layers return.
        stage: The stage that runs; -1: none does, the model is called from outside.
        received: What comes to its first layer, on a later stage.
        output: What its last layer gave.
    """

    ranges: tuple[range, ...]
    flow: PassFlow
    stage: int = -1
    received: Tensor | None = None
    output: Tensor | None = None

    def slots(self) -> list[_LayerSlot] | None:
        """All layers as the running stage sees them."""
        if self.stage < 0:
            return None
        return [_LayerSlot(layer, i, self) for i, layer in enumerate(self._modules.values())]

    @contextmanager
    def run(self, stage: int, received: Tensor | None) -> Iterator[None]:
        """Inside, the model is one stage, which continues with what was received."""
        self.stage, self.received, self.output = stage, received, None
        try:
            yield
        finally:
            self.stage, self.received, self.output = -1, None, None


class _LayerSlot:
    """One layer as the running stage sees it."""

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
            return flow.rebuilt(self._index, hidden)
        out = self._layer(*args, **kwargs)
        if self._index == layers[-1]:
            stages.output = tree_leaves(out)[flow.outputs[self._index][1]]
        return out


@dataclass(slots=True)
class StageModules:
    """The stages of one rank, cut out of a model.

    Attributes:
        running: All decoder layers, as the running stage sees them.
        rank_of: Stage to the pipeline rank that holds it.
        holders: Name in the whole model's state dict to the pipeline ranks that hold it.
        shared: Names of the parameters that this rank and another one both hold.
        layers: This rank's decoder layers, by stage, in order of the model.
        tail: Sizes of the dims of activations after [B, S].
        dtype: Their number format.
    """

    running: StageLayers
    rank_of: dict[int, int]
    holders: dict[str, tuple[int, ...]]
    shared: tuple[str, ...]
    layers: dict[int, list[nn.Module]]
    tail: tuple[int, ...]
    dtype: torch.dtype
    _ends: list[_End]

    def layers_running(self) -> range:
        """Layers of the running stage, by their place in the model."""
        return self.running.ranges[self.running.stage]

    def install(self, model: nn.Module) -> None:
        """Let embedding, final norm and head run on their stages only; after tensor parallelism was put around them.

        A call of the model from outside is refused from now on: one rank cannot run it alone.
        """
        for name, stages, otherwise in self._ends:
            _gate(model.get_submodule(name), stages, self.running, otherwise)

        def before(module: nn.Module, args: Any) -> None:
            if self.running.stage < 0:
                raise UnsupportedSharding(
                    "a model cut into pipeline stages cannot be called on its own",
                    where=type(module).__name__,
                    allowed="forward_backward(model, microbatches, num_tokens), forward_loss",
                )

        model.register_forward_pre_hook(before)


def cut_model(model: nn.Module, plan: Plan, mesh: DeviceMesh | None) -> StageModules | None:
    """Cut a model at the layers that the plan says, or by cost; None when the plan has no pipeline.

    Raises:
        UnsupportedSharding: HP205 for a model that has no list of layers, or whose layers pass on more than one tensor;
            and what `mpmd.check_pipeline` raises.
    """
    strategy, workload = plan.strategy, plan.workload
    if mesh is None or strategy.pp == 1:
        return None
    flow = follow_stages(model, plan)
    counts = strategy.stage_layers or tuple(stage.layers for stage in plan.stages)
    if not counts:
        spec = read_model(model, type(model).__name__)
        counts = stage_layers(spec, strategy, workload.seq_len)
    dtype = getattr(torch, workload.compute_dtype)
    return _cut(model, flow, strategy, counts, mesh.get_local_rank("pp"), dtype)


def follow_stages(model: nn.Module, plan: Plan) -> PassFlow:
    """What flows between the stages of a plan with a pipeline; refuses, as `cut_model` does, without any rank."""
    strategy, flow = plan.strategy, follow(model)
    check_pipeline(strategy, flow.layers, plan.workload.accumulation_steps or 1)
    check_stage_layers(strategy, flow.layers)
    if strategy.tp > 1 and len(flow.tail) != 1:
        raise refused(model, f"activations are [B, S, {flow.tail}], which tp does not cut", "pp")
    return flow


def _cut(
    model: nn.Module,
    flow: PassFlow,
    strategy: Strategy,
    counts: Sequence[int],
    pp_rank: int,
    dtype: torch.dtype,
) -> StageModules:
    """Remove from a model, with so many decoder layers in each stage, what other pipeline ranks hold."""
    ranges = tuple(range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts)))
    last = strategy.stages - 1
    rank_of = {s: r for r in range(strategy.pp) for s in strategy.stages_of(r)}
    stage_of = {i: stage for stage, indices in enumerate(ranges) for i in indices}
    stage_of[flow.layers] = last
    ends, ranks_of = _ends(model, flow, stage_of, rank_of, dtype)
    layers = model.get_submodule(flow.path)
    for stage, indices in enumerate(ranges):
        ranks_of |= {f"{flow.path}.{index}": (rank_of[stage],) for index in indices}
    holders = _holders(model, ranks_of, strategy.pp)
    running = StageLayers(layers)
    running.ranges, running.flow = ranges, flow
    shared = tuple(name for name, _ in model.named_parameters() if {pp_rank} < {*holders[name]})
    model.set_submodule(flow.path, running)
    for name, ranks in ranks_of.items():
        if pp_rank not in ranks:
            elsewhere = PlaceholderModule(module := model.get_submodule(name))
            if strategy.tp == 1 and name in flow.owners:
                # Code beside the layers may ask for the number format of a weight.
                for key, p in module._parameters.items():
                    elsewhere.__dict__[key] = None if p is None else torch.empty(0, dtype=p.dtype)
            model.set_submodule(name, elsewhere)
    by_stage = {
        stage: [running._modules[str(i)] for i in ranges[stage]]
        for stage in strategy.stages_of(pp_rank)
    }
    return StageModules(running, rank_of, holders, shared, by_stage, flow.tail, dtype, ends)


def _ends(
    model: nn.Module,
    flow: PassFlow,
    stage_of: dict[int, int],
    rank_of: dict[int, int],
    dtype: torch.dtype,
) -> tuple[list[_End], dict[str, tuple[int, ...]]]:
    """Modules beside the layers that some stages do without, and the ranks that hold them."""
    first = {id(p): name for name, p in model.named_parameters()}
    named = {first[id(p)]: set[int]() for p in model.parameters()}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                named[first[id(p)]] |= flow.owners.get(name, set())
    # Weights that are read from outside of a call of their module are on all ranks.
    read = {name for name, layers in flow.params.items() if not layers <= named[name]}
    head = model.get_output_embeddings()
    ends: list[_End] = []
    ranks_of: dict[str, tuple[int, ...]] = {}
    shared: set[int] = set()
    for owner, layers in flow.owners.items():
        module = model.get_submodule(owner)
        own = [n for n in flow.params if n.startswith(f"{owner}.")]
        form = flow.results.get(owner)
        if read & {*own} or (layers and form is None):
            continue
        held = set().union(layers, *(flow.params[n] for n in own)) or {0}
        ranks = {rank_of[stage_of[i]] for i in held}
        shared |= ranks if len(ranks) > 1 else set()
        ranks_of[owner] = tuple(sorted(ranks))
        if form is not None:
            trailing, rest = form
            rest = (1,) if module is head else rest
            stages = frozenset(stage_of[i] for i in layers)
            ends.append((owner, stages, _stand_in(trailing, rest, dtype)))
    # Two ranks exchange a shared gradient; more of them, or several pairs, add it over all ranks.
    if len({*rank_of.values()}) > 2 and (len(shared) > 2 or len(ranks_of) < len(flow.owners)):
        ranks_of = {n: ranks for n, ranks in ranks_of.items() if len(ranks) == 1}
        ends = [end for end in ends if end[0] in ranks_of]
    return ends, ranks_of


def _stand_in(trailing: int, rest: tuple[int, ...], dtype: torch.dtype) -> Callable[..., Tensor]:
    """What stands for the result of a module: its input, where that has the shape of the result, or zeros."""

    def otherwise(*args: Any, **kwargs: Any) -> Tensor:
        given = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        if not trailing and not rest:
            return given
        kept = given.shape[: given.dim() - trailing]
        # Memory of its own, because the model may change it in place.
        wanted = given.dtype if given.is_floating_point() else dtype
        return given.new_zeros(*kept, *rest, dtype=wanted)

    return otherwise


def _holders(
    model: nn.Module, ranks_of: dict[str, tuple[int, ...]], pp: int
) -> dict[str, tuple[int, ...]]:
    """Pipeline ranks of every entry of the state dict; what lies in no part that is cut is on all of them."""
    held: dict[int, set[int]] = {}
    entries = {**model.state_dict(keep_vars=True), **dict(model.named_parameters())}
    ranks: dict[str, set[int]] = {}
    for name, value in entries.items():
        part = next((p for p in ranks_of if name.startswith(f"{p}.")), None)
        ranks[name] = {*(range(pp) if part is None else ranks_of[part])}
        held.setdefault(id(value), set()).update(ranks[name])
    return {name: tuple(sorted(held[id(value)])) for name, value in entries.items()}


def _gate(
    module: nn.Module,
    stages: frozenset[int],
    running: StageLayers,
    otherwise: Callable[..., Any],
) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (inner if running.stage in stages else otherwise)(*args, **kwargs)

    module.forward = forward

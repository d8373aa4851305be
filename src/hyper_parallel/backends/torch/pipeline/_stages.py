"""Cut a Hugging Face decoder into pipeline stages, in place and without touching its code.

A rank keeps the modules of its stages under their names; the others become a `PlaceholderModule` without parameters.
Every stage runs the model's own forward on the same batch, so masks, positions, rotary angles and whatever depends on
the layer's index come from the model. Only what crosses a boundary is put in its place:

    embedding     on the first stage; elsewhere zeros of its shape, which nothing reads
    layers        those of the running stage; the first of them takes the received activations, the last one's output
                  is the stage's; the others return their input
    final norm    on the last stage; elsewhere its input
    head          on the last stage; elsewhere one zero per token

A weight that embedding and head share stays on both stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hyper_parallel.backends.torch._read_model import read_model
from hyper_parallel.backends.torch._resolve import (
    PlaceholderModule,
    SlotList,
    decoder_of,
    final_norm,
)
from hyper_parallel.cost import check_stage_layers, stage_layers
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Plan, Strategy
from hyper_parallel.mpmd import check_pipeline

_End = tuple[str, int, Callable[[Tensor], Tensor]]
"""Name of an end of the model, the stage that runs it, and what stands for it on the others."""


class StageLayers(SlotList):
    """The decoder layers by their index; while a stage runs, iteration shows its layers and lets the others pass.

    Attributes:
        ranges: Layers of every stage.
        stage: The stage that runs; -1: none does, the model is called from outside.
        received: What comes to its first layer, on a later stage.
        output: What its last layer gave.
    """

    ranges: tuple[range, ...]
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
        if self._index not in layers:
            return args[0] if args else kwargs["hidden_states"]
        if self._index == layers[0] and stages.stage > 0:
            if args:
                args = (stages.received, *args[1:])
            else:
                kwargs["hidden_states"] = stages.received
        out = self._layer(*args, **kwargs)
        if not isinstance(out, Tensor):
            raise UnsupportedSharding(
                "a decoder layer returns something else than its activations, which no stage can send",
                where=type(self._layer).__name__,
                got=type(out).__name__,
                hint="parallel.pp=1",
            )
        if self._index == layers[-1]:
            stages.output = out
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
        width: Width of the activations.
        dtype: Their number format.
    """

    running: StageLayers
    rank_of: dict[int, int]
    holders: dict[str, tuple[int, ...]]
    shared: tuple[str, ...]
    layers: dict[int, list[nn.Module]]
    width: int
    dtype: torch.dtype
    _ends: list[_End]

    def num_running(self) -> int:
        """Layers of the running stage."""
        return len(self.layers[self.running.stage])

    def install(self, model: nn.Module) -> None:
        """Let embedding, final norm and head run on their stages only; after tensor parallelism was put around them.

        A call of the model from outside is refused from now on: one rank cannot run it alone.
        """
        for name, stage, otherwise in self._ends:
            _gate(model.get_submodule(name), stage, self.running, otherwise)

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
        UnsupportedSharding: HP205 for other modules than Hugging Face decoders whose layers take and return [B, S, D],
            and for parameters that no stage is known to need; and what `mpmd.check_pipeline` raises.
    """
    strategy, workload = plan.strategy, plan.workload
    if mesh is None or strategy.pp == 1:
        return None
    decoder = decoder_of(model)
    if decoder is None:
        raise UnsupportedSharding(
            "pipeline stages are cut from Hugging Face models with a list of decoder layers",
            where=type(model).__name__,
            got=f"pp={strategy.pp}",
            allowed="pp=1",
            hint=f"parallel.pp=1 parallel.dp_shard={strategy.dp_shard * strategy.pp}",
        )
    base, layers = decoder
    check_pipeline(strategy, len(layers), workload.accumulation_steps or 1)
    check_stage_layers(strategy, len(layers))
    counts = strategy.stage_layers or tuple(stage.layers for stage in plan.stages)
    if not counts:
        spec = read_model(model, type(model).__name__)
        counts = stage_layers(spec, strategy, workload.seq_len)
    dtype = getattr(torch, workload.compute_dtype)
    return _cut(model, base, layers, strategy, counts, mesh.get_local_rank("pp"), dtype)


def _cut(
    model: nn.Module,
    base: nn.Module,
    layers: nn.ModuleList,
    strategy: Strategy,
    counts: Sequence[int],
    pp_rank: int,
    dtype: torch.dtype,
) -> StageModules:
    """Remove from a model, with so many decoder layers in each stage, what other pipeline ranks hold."""
    names = {id(module): name for name, module in model.named_modules()}
    ranges = tuple(range(sum(counts[:i]), sum(counts[: i + 1])) for i in range(len(counts)))
    last = strategy.stages - 1
    embedding, head = base.get_input_embeddings(), model.get_output_embeddings()
    width = embedding.weight.shape[1]

    def embedded(ids: Tensor) -> Tensor:
        return torch.zeros((), dtype=dtype, device=ids.device).expand(*ids.shape, width)

    ends: list[_End] = [(names[id(embedding)], 0, embedded)]
    ends.append((names[id(final_norm(base))], last, lambda hidden: hidden))
    if head is not None:
        ends.append((names[id(head)], last, lambda x: x.new_zeros(*x.shape[:-1], 1)))
    rank_of = {s: r for r in range(strategy.pp) for s in strategy.stages_of(r)}
    ranks_of = {name: (rank_of[stage],) for name, stage, _ in ends}
    for stage, indices in enumerate(ranges):
        ranks_of |= {f"{names[id(layers)]}.{index}": (rank_of[stage],) for index in indices}
    if head is not None and head.weight is embedding.weight:
        # The head needs the embedding's weight, which keeps its name.
        ranks_of[names[id(embedding)]] = tuple(sorted({rank_of[0], rank_of[last]}))
    holders = _holders(model, ranks_of, strategy.pp)
    running = StageLayers(layers)
    running.ranges = ranges
    shared = tuple(name for name, _ in model.named_parameters() if {pp_rank} < {*holders[name]})
    model.set_submodule(names[id(layers)], running)
    for name, ranks in ranks_of.items():
        if pp_rank not in ranks:
            model.set_submodule(name, PlaceholderModule(model.get_submodule(name)))
    by_stage = {
        stage: [running._modules[str(i)] for i in ranges[stage]]
        for stage in strategy.stages_of(pp_rank)
    }
    return StageModules(running, rank_of, holders, shared, by_stage, width, dtype, ends)


def _holders(
    model: nn.Module, ranks_of: dict[str, tuple[int, ...]], pp: int
) -> dict[str, tuple[int, ...]]:
    """Pipeline ranks of every entry of the state dict; refuses a parameter outside the known parts."""
    holders = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name in {**model.state_dict(), **params}:
        part = next((p for p in ranks_of if name.startswith(f"{p}.")), None)
        if part is None and name in params:
            raise UnsupportedSharding(
                "a parameter lies outside embedding, layers, final norm and head: no stage is known to need it",
                where=name,
                hint="parallel.pp=1",
            )
        holders[name] = tuple(range(pp)) if part is None else ranks_of[part]
    return holders


def _gate(
    module: nn.Module, stage: int, running: StageLayers, otherwise: Callable[..., Any]
) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return (inner if running.stage == stage else otherwise)(*args, **kwargs)

    module.forward = forward

"""Resolved inputs of one call of the planner: model, machine, workload and allowed choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from hyper_parallel.cost import Machine, ModelNumbers
from hyper_parallel.errors import BadValue, HyperParallelError
from hyper_parallel.ir import AXES, ModelRef, Overlap, Rule, Strategy, Workload
from hyper_parallel.model import ModelSpec, load_model
from hyper_parallel.shard import ShardPlan, family_rules, plan_layouts
from hyper_parallel.topology import Supernode, detect_local, load_topology
from hyper_parallel.units import format_bytes

LOCAL = "local"
TOKENS_PER_DEVICE = 8192
TOKENS_PER_CPU_RANK = 1024
MAX_TOKENS_PER_STEP = 2**24
HEADROOM = 0.05
"""Default fraction of an accelerator's memory that a search leaves free, because predicted peaks have errors."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Limits of offload: host memory, bandwidth and recomputation. Bytes are per device."""

    num_bytes: float | None = None  # host memory per device; None: that of the topology
    bytes_s: float | None = None  # bandwidth of copies per direction; None: that of the topology
    may_recompute: bool = True  # whether activations may also be dropped and recomputed


@dataclass(frozen=True)
class PlanRequest:
    """Resolved inputs of a call of the planner: model, machine, workload, and the allowed choices."""

    model: ModelSpec
    supernode: Supernode
    workload: Workload  # sequence length, number formats, and the batch numbers that are set
    num_devices: int  # product of the degrees
    notes: tuple[str, ...] = ()  # assumptions, as sentences
    # whether hints are overrides of a recipe, not options of the plan command
    from_recipe: bool = False
    offload: HostMemory | None = None  # limits of offload to host memory; None: no offload
    capacity_bytes: float | None = None  # usable memory of a device; None: all except `headroom`
    headroom: float = 0.0  # fraction of the device's memory that a search leaves free
    # fixed choices, see `check_pins`; `tp` is the product of tp_x and tp_y
    pins: Mapping[str, int] = field(default_factory=dict)
    # whether the search is limited to strategies that this version can run
    executable: bool = False
    # strategy with the fields that no search chooses, such as rules and layers per stage
    base: Strategy = field(default_factory=Strategy)
    half_batches: bool = True  # whether layers of the model may run on half-batches
    # whether attention and MLP may gather and scatter their tokens in chunks
    token_chunks: bool = True
    # consecutive sequences that must be on one data-parallel rank, such as a GRPO group
    group_sequences: int = 1

    def allows(self, name: str, value: float) -> bool:
        """Return whether the pins allow a value of the choice `name`."""
        return self.pins.get(name, value) == value

    def may_overlap(self, overlap: Overlap) -> bool:
        """Return whether a search may choose an overlap for this model and recipe."""
        half_batches = self.half_batches or not overlap.half_batch
        return half_batches and (self.token_chunks or overlap.tp_chunks == 1)

    @cached_property
    def numbers(self) -> ModelNumbers:
        """Sizes of the model for the cost formulas."""
        return ModelNumbers.of(self.model)

    @cached_property
    def layer_kinds(self) -> tuple[tuple[tuple[int, ...], ModelNumbers], ...]:
        """Tuple of (layer indices, sizes of a model with only these layers), one per block of decoder layers."""
        other_blocks = tuple(b for b in self.model.blocks if not b.layers)
        return tuple(
            (tuple(b.layers), ModelNumbers.of(replace(self.model, blocks=(*other_blocks, b))))
            for b in self.model.blocks
            if b.layers
        )

    def change(self, option: str, key: str, value: object) -> dict[str, object]:
        """Return a hint as a dict: from the recipe key `key` if `from_recipe`, else from `option`, to the new value.

        The text `--pin NAME` for `option` pins the choice NAME.
        """
        name, _, pin = option.partition(" ")
        return {key: value} if self.from_recipe else {name: {pin: value} if pin else value}

    @cached_property
    def machine(self) -> Machine:
        """Rates and memory of the machine for the cost formulas, after headroom and the limits of offload."""
        machine = Machine.of(self.supernode, self.workload.compute_dtype)
        usable = machine.memory_bytes * (1.0 - self.headroom)
        machine = replace(machine, memory_bytes=int(self.capacity_bytes or usable))
        host = self.offload
        if host is None:
            return machine
        return replace(
            machine,
            host_bytes=machine.host_bytes if host.num_bytes is None else host.num_bytes,
            host_bytes_s=machine.host_bytes_s if host.bytes_s is None else host.bytes_s,
            may_recompute=host.may_recompute,
        )

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory, headroom included, or `capacity_bytes` if set."""
        return int(self.capacity_bytes or self.supernode.device.memory_bytes.value)

    def with_headroom(self, share: float | None = None) -> PlanRequest:
        """Return the request with the fraction `share` of device memory left free, with a note if it is above 0.

        None means `HEADROOM`, or 0 on a CPU. If `capacity_bytes` is set, no further memory is left free.
        Raises BadValue (HP102) for a fraction below 0 or from 1.
        """
        if not 0.0 <= (share or 0.0) < 1.0:
            raise BadValue(
                "the memory headroom must be a fraction of device memory",
                where="memory_headroom",
                got=share,
                allowed="from 0 to below 1",
                hint="memory_headroom=0.05",
            )
        if share is None:
            share = 0.0 if self.supernode.device.kind == "cpu" else HEADROOM
        if not share or self.capacity_bytes is not None:
            return replace(self, headroom=0.0)
        note = f"{share:.3%}".replace(".000", "") + f" of {format_bytes(self.device_bytes)} per device are left free"
        return replace(self, headroom=share, notes=(*self.notes, note))

    def sharing_cores_with(self, ranks: int) -> PlanRequest:
        """Return the request for this machine with `ranks` ranks in total, which share its cores and memory.

        A request for a topology other than `local` is returned unchanged. Errors are those of `detect_local`.
        """
        if self.supernode.name != LOCAL or self.supernode.num_devices == ranks:
            return self
        return replace(self, supernode=detect_local(ranks))

    def model_ref(self) -> ModelRef:
        """Return the identity of the model, to be stored in a plan."""
        return ModelRef(
            name=self.model.name,
            family=self.model.family,
            num_params=self.model.num_params,
            num_active_params=self.model.num_active_params,
            flops_per_token=float(self.model.flops_per_token(self.workload.seq_len)),
            fingerprint=self.model.fingerprint,
        )

    def shard(self, strategy: Strategy, where: str | None = None, staged: bool = False) -> ShardPlan:
        """Return layouts of the model under a strategy; other arguments and errors as for `shard.plan_layouts`."""
        params = {p.name: p for b in self.model.blocks for p in b.params}
        attention = next((b.attention for b in self.model.blocks if b.attention), None)
        return plan_layouts(
            [(p.name, p.shape, p.dims) for p in params.values()],
            rules_of(self.model),
            strategy,
            num_heads=self.model.num_heads,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=attention.qk_head_dim if attention else 1,
            vocab_size=self.model.vocab_size,
            tied={p.name: p.tied_to for p in params.values() if p.tied_to},
            where=where,
            staged=staged,
        )

    def refusal(self, strategy: Strategy) -> str | None:
        """Return the text of the error that `shard` raises for a strategy; None without an error."""
        try:
            self.shard(strategy)
        except HyperParallelError as error:
            return error.what
        return None


def rules_of(model: ModelSpec) -> tuple[Rule, ...]:
    """Return the sharding rules in a model's spec; if the spec has none, the rules of the model's family."""
    if model.rules is None:
        return family_rules(model.family)
    return tuple(Rule(pattern, style) for pattern, style in model.rules)


def resolve(
    model: str | Path | ModelSpec,
    topology: str | Supernode,
    workload: Workload | None,
    num_devices: int | None,
) -> PlanRequest:
    """Return the request for a model, a machine and a workload; arguments as for `hyper_parallel.plan`.

    If `workload` is None, a default is assumed. If all its batch numbers are None, tokens per step are assumed. A note
    of the request states the assumption.

    Raises:
        BadValue: HP102 when `num_devices` is below one.
        HyperParallelError: Errors of `load_model` and `load_topology`.
    """
    if num_devices is not None and num_devices < 1:
        raise BadValue("the number of devices is below one", where="num_devices", got=num_devices, hint="num_devices=1")
    spec = model if isinstance(model, ModelSpec) else load_model(model)
    supernode = topology
    if not isinstance(supernode, Supernode):
        supernode = load_topology(supernode, num_devices)
    devices = num_devices or supernode.num_devices
    notes = list(spec.notes)
    if workload is None:
        workload = default_workload(spec, supernode, devices)
        notes.append(
            f"workload assumed: sequences of {workload.seq_len} tokens, {workload.tokens_per_step} tokens per step"
        )
    elif (workload.tokens_per_step, workload.microbatch, workload.accumulation_steps) == (None,) * 3:
        tokens = default_tokens(supernode, devices, workload.seq_len)
        workload = replace(workload, tokens_per_step=tokens)
        notes.append(f"workload assumed: {tokens} tokens per step")
    return PlanRequest(spec, supernode, workload, devices, tuple(notes))


def default_workload(
    model: ModelSpec,
    supernode: Supernode,
    num_devices: int | None = None,
    *,
    seq_len: int | None = None,
    tokens_per_step: int | None = None,
) -> Workload:
    """Return a default training step: bfloat16 compute with float32 parameters.

    Args:
        model: The model.
        supernode: The machine.
        num_devices: Number of devices to use; None: all of the machine.
        seq_len: Tokens per sequence; None: the context length of the model, at most 8192 (512 on a CPU). If the model
            does not state it, 8192 (512 on a CPU).
        tokens_per_step: Tokens per step; None: `default_tokens`.
    """
    longest = 512 if supernode.device.kind == "cpu" else 8192
    seq_len = seq_len or min(longest, model.max_position_embeddings or longest)
    tokens = tokens_per_step or default_tokens(supernode, num_devices or supernode.num_devices, seq_len)
    return Workload(seq_len, tokens_per_step=tokens)


def default_tokens(supernode: Supernode, num_devices: int, seq_len: int) -> int:
    """Return the default tokens per step: 8192 per device (1024 on a CPU), rounded up to whole sequences.

    While the result exceeds 2**24 tokens and the number of sequences is even, it is halved.
    """
    per_device = TOKENS_PER_CPU_RANK if supernode.device.kind == "cpu" else TOKENS_PER_DEVICE
    sequences = num_devices * max(1, math.ceil(per_device / seq_len))
    while sequences * seq_len > MAX_TOKENS_PER_STEP and sequences % 2 == 0:
        sequences //= 2
    return sequences * seq_len


def unimplemented(strategy: Strategy) -> list[str]:
    """Return the names of choices in a strategy that this version can price but not run.

    Choices that `shard.plan_layouts` refuses are not included.
    """
    s = strategy
    choices = []
    if s.order != AXES:
        choices.append(f"order of the axes {'>'.join(s.order)}")
    if s.dp_shard * s.cp > 1 and (s.zero == 0 or (s.zero == 1 and s.pp > 1)):
        choices.append(f"zero={s.zero}" + (" with pipeline stages" if s.zero else ""))
    if s.etp is not None:
        choices.append(f"etp={s.etp}")
    if s.recompute == "selective":
        choices.append("selective recomputation")
    return choices

"""Strategy and workloads: how a step is divided over devices, and the batch sizes of training and generation.

A `SequenceCut` defines the tokens of each context-parallel rank. The ranks form a ring of n places with u Ulysses ranks
each; rank r is at place r // u and is Ulysses rank r % u. With n > 1 the sequence is split into 2 n chunks, and place j
has chunks j and 2 n - 1 - j ("zigzag"). Every place then has equal work under a causal mask. The u ranks of a place
have equal slices of its concatenated chunks:

    n=2, u=1   rank 0: chunks 0 3    rank 1: chunks 1 2
    n=1, u=2   rank 0: first half    rank 1: second half
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Annotated, Final, Literal, NoReturn

from pydantic import Field

from hyper_parallel.errors import BadValue, BatchMismatch
from hyper_parallel.ir.layout import AXES, Layout, Mesh
from hyper_parallel.units import divisors, round_up

BlockShape = Literal["1d", "2d", "weight"]
BLOCK_SHAPES: Final[tuple[BlockShape, ...]] = ("1d", "2d", "weight")
"""How a block uses the axes tp_x and tp_y. `1d`: as one axis of tp_x * tp_y ranks, as in Megatron with sequence
parallelism. `2d`: collectives over tp_y carry activations. `weight`: weights are gathered over tp_y."""
_SORTED_AXES: Final = sorted(AXES)
MOST_RANKS: Final = 1 << 20
Degree = Annotated[int, Field(ge=1, le=MOST_RANKS)]
"""Degree of a mesh axis; the bounds of annotated numbers are checked when a plan file is read."""
_Chunks = Annotated[int, Field(ge=1, le=64)]
_Count = Annotated[int, Field(ge=1, le=1 << 48)]
CpKind = Literal["ring", "ulysses", "hybrid", "all_gather"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]
V_SHAPED: Final = ("zbv", "dualpipev")
"""Schedules whose rank r of p has two stages, r and 2p - 1 - r."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Sharding rule: assigns a style to modules whose name matches a glob.

    Attributes:
        pattern: Glob of module names, in which `*` matches one part of the name: `model.layers.*.mlp.up_proj`.
        style: Key of `hyper_parallel.shard.STYLES`, such as `colwise` or `replicate`.
    """

    pattern: str
    style: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """Overlap of the communication inside a layer with computation on the same rank.

    Attributes:
        half_batch: Whether decoder layers alternate between two halves of a microbatch. One half computes while the
            collectives of the other half are in flight.
        ep_chunks: Number of token chunks of an expert layer. Experts compute a chunk while another chunk is dispatched
            or combined; 1: no overlap.
        tp_chunks: Number of token chunks of attention and MLP blocks. A block computes a chunk while another chunk is
            gathered or scattered over the tensor-parallel ranks; 1: no overlap.
        tp_symmetric: Whether attention and MLP blocks fuse the gather and the scatter of their tokens into the matmuls,
            over symmetric memory of the tensor-parallel ranks.
    """

    half_batch: bool = False
    ep_chunks: _Chunks = 1
    tp_chunks: _Chunks = 1
    tp_symmetric: bool = False

    @property
    def block_executor(self) -> Literal["serial", "chunks", "symmetric"]:
        """Executor of the collectives and matmuls of attention and MLP blocks under tensor parallelism."""
        if self.tp_symmetric:
            return "symmetric"
        return "chunks" if self.tp_chunks > 1 else "serial"

    def parts(self, sequences: int, length: int) -> int:
        """Return the number of parts, 1 or 2, into which layers split a microbatch of [sequences, length] tokens.

        The result is 2 with `half_batch` and an even number of sequences. With sequences = length it is 1, because the
        two dims of a tensor could not be distinguished by size.
        """
        return 2 if self.half_batch and sequences % 2 == 0 and sequences != length else 1

    def __str__(self) -> str:
        shown = {
            "half-batch": self.half_batch,
            f"chunks:{self.ep_chunks}": self.ep_chunks > 1,
            f"tp-chunks:{self.tp_chunks}": self.tp_chunks > 1,
            "tp-symmetric": self.tp_symmetric,
        }
        return ",".join(text for text, is_on in shown.items() if is_on) or "none"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Parallel degrees of the mesh axes, and other choices of how a model is parallelized.

    Some choices can be priced, but not run: `etp`, `recompute="selective"`, another `order`, and some values of `zero`.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Data-parallel replicas, the outer axis of HSDP.
        dp_shard: Data-parallel ranks over which FSDP shards; see `zero`.
        cp: Context-parallel ranks.
        tp_x: Tensor-parallel ranks on x; with tp_y = 1, this is 1-D tensor parallelism with sequence parallelism.
        tp_y: Tensor-parallel ranks on y, the second direction of 2-D tensor parallelism.
        ep: Expert-parallel ranks, folded over dp_shard x cp x tp; does not multiply the world size.
        attention_shape: Shape of attention blocks on two tensor-parallel axes; no effect when tp_y is 1.
        mlp_shape: Shape of MLP blocks on two tensor-parallel axes; no effect when tp_y is 1.
        attention_scatter: Dim that 2-D attention shards over tp_y: heads, or tokens as in context parallelism.
        gathered_inputs: Whether gathered inputs of matmuls are kept for backward, or gathered again in backward.
        cp_kind: Form of context-parallel attention: zigzag ring, Ulysses, both, or gathered keys and values.
        cp_ulysses: Ulysses ranks inside cp if `cp_kind` is `hybrid`; the ring then has cp / cp_ulysses places.
        schedule: Pipeline schedule; a `schedule_file` replaces its order of actions, but not its placement of stages.
        schedule_file: CSV file with the actions of every pipeline rank, instead of a generated schedule; "": none.
        virtual_stages: Pipeline stages per rank.
        stage_layers: Decoder layers of each (virtual) stage, in model order; (): balanced by cost.
        rules: Overrides of the model's own sharding plan; the first match wins.
        recompute: Activations that backward recomputes; `full`: all of a decoder layer except its input.
        reshard_after_forward: Whether gathered parameters are freed between forward and backward (ZeRO-3) or kept
            (ZeRO-2).
        etp: Tensor-parallel ranks of one expert; None: tp without expert parallelism, else 1.
        zero: 0: nothing is sharded over dp_shard x cp; 1: optimizer states only; None: FSDP, see
            `reshard_after_forward`.
        recompute_layers: Number of layers per rank that `recompute` applies to, see `recomputed`; None: all.
        offload: Whether a memory plan offloads bytes that exceed device memory to host memory.
        overlap: Overlap of communication and computation inside of layers.
        order: Mesh axes, outer to inner.

    Raises:
        ValueError: When `order` does not have each axis of `AXES` once.
    """

    pp: Degree = 1
    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    cp: Degree = 1
    tp_x: Degree = 1
    tp_y: Degree = 1
    ep: Degree = 1
    attention_shape: BlockShape = "2d"
    mlp_shape: BlockShape = "2d"
    attention_scatter: Literal["head", "token"] = "head"
    gathered_inputs: Literal["keep", "re-gather"] = "keep"
    cp_kind: CpKind = "ring"
    cp_ulysses: Degree = 1
    schedule: ScheduleKind = "1f1b"
    schedule_file: str = ""
    virtual_stages: Degree = 1
    stage_layers: tuple[Annotated[int, Field(ge=0)], ...] = ()
    rules: tuple[Rule, ...] = ()
    recompute: Literal["none", "selective", "full"] = "none"
    reshard_after_forward: bool = True
    etp: Degree | None = None
    zero: Literal[0, 1] | None = None
    recompute_layers: int | None = None
    offload: bool = False
    overlap: Overlap = Overlap()
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if self.order is not AXES and sorted(self.order) != _SORTED_AXES:
            raise ValueError(f"`order` must have each axis of {AXES} once, not {self.order}")

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks, tp_x * tp_y."""
        return self.tp_x * self.tp_y

    @property
    def dp(self) -> int:
        """Data-parallel ranks, dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Number of ranks: pp * dp_replicate * dp_shard * cp * tp_x * tp_y; `ep` folds over some of these axes."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks, virtual stages included."""
        return self.pp * self.virtual_stages

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank; see `rank_stages`."""
        return rank_stages(self.schedule, pp_rank, self.pp, self.virtual_stages)

    def mesh(self) -> Mesh:
        """Return the mesh with every axis, degree 1 included, in the order of the strategy."""
        return Mesh(tuple((name, int(getattr(self, name))) for name in self.order))

    def recomputed(self, stages: Sequence[Sequence[int]]) -> frozenset[int]:
        """Return the decoder layers that a pipeline rank recomputes in full; empty unless `recompute` is `full`.

        With `recompute_layers`, the stages of the rank contribute in turn, each its first layers. Backward reaches
        these layers last, when activations of later layers are already freed.

        Args:
            stages: Layers of every stage of the rank, in model order.
        """
        if self.recompute != "full":
            return frozenset()
        if self.recompute_layers is None:
            return frozenset(layer for stage in stages for layer in stage)
        rounds = zip_longest(*stages)
        in_turn = [layer for layers in rounds for layer in layers if layer is not None]
        return frozenset(in_turn[: self.recompute_layers])

    @property
    def zero_stage(self) -> int:
        """ZeRO stage over dp_shard x cp: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters."""
        return self.zero if self.zero is not None else 3 if self.reshard_after_forward else 2

    @property
    def frees_gathered(self) -> bool:
        """True if parameters gathered over dp_shard x cp are freed between forward and backward."""
        return self.zero_stage == 3

    @property
    def reduces_once(self) -> bool:
        """True if FSDP reduces gradients once per step, not once per microbatch."""
        return self.pp > 1 or self.zero_stage == 1

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of one expert: `etp`; if it is None, `tp` without expert parallelism, else 1."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def ulysses(self) -> int:
        """Number of Ulysses ranks inside cp, which exchange attention heads for tokens by all-to-all; 1: no Ulysses."""
        return ulysses_degree(self.cp, self.cp_kind, self.cp_ulysses)

    @property
    def fsdp_axes(self) -> tuple[str, ...]:
        """Axes over which FSDP shards: dp_shard and cp, without those of degree 1."""
        return tuple(a for a in ("dp_shard", "cp") if getattr(self, a) > 1)

    def expert_mesh(self) -> Mesh:
        """Return the mesh of experts, with axes pp, dp_replicate, edp and ep; edp x ep = dp_shard x cp x tp_x x tp_y.

        The rank with index f inside dp_shard x cp x tp, in the default order, has coordinate f % ep on `ep`, and f //
        ep on `edp`. Ranks along `edp` have the same experts.
        """
        inner = self.dp_shard * self.cp * self.tp
        return Mesh(
            (
                ("pp", self.pp),
                ("dp_replicate", self.dp_replicate),
                ("edp", inner // self.ep),
                ("ep", self.ep),
            )
        )

    def mesh_of(self, layout: Layout) -> Mesh:
        """Return the mesh of a layout's axes: the expert mesh for `ep` and `edp`, else the main mesh."""
        return self.expert_mesh() if {"ep", "edp"} & {*layout.sharding_axes} else self.mesh()

    def spanning_axes(self, expert_axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of the main mesh that span the same ranks as `expert_axes`; without any, `expert_axes`.

        For example, with dp_shard=2 and ep=2, the axis `ep` spans the ranks of `dp_shard`.
        """
        wanted = set(self.expert_mesh().group(0, expert_axes))
        mesh = self.mesh()
        names = [name for name, degree in mesh.axes if degree > 1]
        for mask in range(1, 1 << len(names)):
            axes = tuple(name for i, name in enumerate(names) if mask >> i & 1)
            if mesh.degree(axes) == len(wanted) and set(mesh.group(0, axes)) == wanted:
                return axes
        return expert_axes

    def degrees(self) -> dict[str, int]:
        """Return a dict from recipe key to degree, for all mesh axes and `ep`."""
        return {**{name: int(getattr(self, name)) for name in AXES}, "ep": self.ep}

    def __str__(self) -> str:
        split = f":{self.cp_ulysses}" if self.cp_kind == "hybrid" else ""
        virtual = f"x{self.virtual_stages}" if self.virtual_stages > 1 else ""
        some = "" if self.recompute_layers is None else f":{self.recompute_layers}"
        wide = [a for a in AXES if getattr(self, a) > 1]
        order = [a for a in self.order if a in wide]
        token = self.attention_shape == "2d" and self.attention_scatter == "token"
        shown = {
            **{f"{k}={v}": v > 1 for k, v in self.degrees().items()},
            f"shapes={self.attention_shape}/{self.mlp_shape}": self.tp_y > 1,
            "attention_scatter=token": self.tp_y > 1 and token,
            "gathered_inputs=re-gather": self.tp > 1 and self.gathered_inputs == "re-gather",
            f"cp_kind={self.cp_kind}{split}": self.cp > 1,
            f"schedule={self.schedule}{virtual}": self.pp > 1,
            f"etp={self.etp}": self.etp is not None and self.ep > 1,
            f"zero={self.zero_stage}": self.dp_shard * self.cp > 1 and self.zero_stage != 3,
            f"recompute={self.recompute}{some}": self.recompute != "none",
            "offload": self.offload,
            f"overlap={self.overlap}": self.overlap != Overlap(),
            f"order={'>'.join(order)}": order != wide,
        }
        return " ".join(text for text, says in shown.items() if says) or "one device"


def rank_stages(schedule: str, rank: int, ranks: int, per_rank: int) -> tuple[int, ...]:
    """Return the stages of rank r of p pipeline ranks: r and 2p - 1 - r for `V_SHAPED` schedules, else r, r + p, ..."""
    if schedule in V_SHAPED:
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * per_rank, ranks))


def ulysses_degree(cp: int, kind: CpKind, cp_ulysses: int) -> int:
    """Return the number of Ulysses ranks inside cp: `cp` for Ulysses, `cp_ulysses` for the hybrid, else 1."""
    return 1 if cp == 1 else {"ulysses": cp, "hybrid": cp_ulysses}.get(kind, 1)


Interval = tuple[int, int]
"""Half-open range of positions in a sequence."""


@dataclass(frozen=True)
class SequenceCut:
    """Sharding of sequences of one length over the ranks of context parallelism.

    Attributes:
        seq_len: Tokens of a sequence.
        ring: Number of places of the ring, n; see the module docstring.
        ulysses: Number of Ulysses ranks at each place, u.
    """

    seq_len: int
    ring: int
    ulysses: int = 1

    @classmethod
    def of(cls, seq_len: int, cp: int, kind: CpKind, cp_ulysses: int = 1) -> SequenceCut:
        """Return the sharding for a strategy's `cp`, `cp_kind` and `cp_ulysses`."""
        ulysses = ulysses_degree(cp, kind, cp_ulysses)
        return cls(seq_len, cp // ulysses, ulysses)

    @property
    def unit(self) -> int:
        """Divisor of every padded length, for ring chunks and Ulysses slices of equal size."""
        return self.ulysses if self.ring == 1 else math.lcm(2 * self.ring, self.ring * self.ulysses)

    @property
    def padded(self) -> int:
        """Tokens of a sequence, padding included."""
        return round_up(self.seq_len, self.unit)

    @property
    def local(self) -> int:
        """Tokens of a sequence on one rank, padding included."""
        return self.padded // (self.ring * self.ulysses)

    @cached_property
    def spans(self) -> tuple[tuple[Interval, ...], ...]:
        """Sequence positions of the tokens at each place of the ring, as half-open ranges in storage order."""
        if self.ring == 1:
            return (((0, self.padded),),)
        chunk, last = self.padded // (2 * self.ring), 2 * self.ring - 1
        return tuple(
            ((j * chunk, (j + 1) * chunk), ((last - j) * chunk, (last - j + 1) * chunk)) for j in range(self.ring)
        )

    def positions(self, rank: int) -> list[int]:
        """Return the sequence positions of the tokens on a rank, in storage order; `seq_len` and above are padding."""
        place, slice_ = divmod(rank, self.ulysses)
        positions = [p for start, stop in self.spans[place] for p in range(start, stop)]
        return positions[slice_ * self.local : (slice_ + 1) * self.local]

    def distances(self, window: int | None) -> tuple[int, ...]:
        """Return the ring distances d, ascending, at which queries of any place j attend to keys of place j - d.

        Places are counted modulo n. Without a window, all d from 1 to n - 1 are returned.
        """
        return tuple(
            d
            for d in range(1, self.ring)
            if any(
                sees_some(q, k, window)
                for j in range(self.ring)
                for q in self.spans[j]
                for k in self.spans[(j - d) % self.ring]
            )
        )


def sees_some(queries: Interval, keys: Interval, window: int | None) -> bool:
    """Return whether any query at positions `queries` attends to any key at positions `keys`.

    The mask is causal; with a `window`, a query attends to the last `window` positions only.
    """
    return keys[0] < queries[1] and (window is None or queries[0] - (keys[1] - 1) < window)


def sees_all(queries: Interval, keys: Interval, window: int | None) -> bool:
    """Return whether every query at positions `queries` attends to every key at positions `keys`; see `sees_some`."""
    return keys[1] - 1 <= queries[0] and (window is None or queries[1] - 1 - keys[0] < window)


PROMPT_CHUNK: Final = 512
"""Maximum number of tokens of each prompt per prefill pass. The limit bounds the bytes of activations."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Batch sizes and number formats of one optimizer step.

    `resolve` derives the batch numbers that are None (of `tokens_per_step`, `microbatch` and `accumulation_steps`) from
    the set numbers and the data-parallel degree. If these do not suffice, `microbatch`, then `accumulation_steps` is 1.

    Attributes:
        seq_len: Tokens per sequence.
        tokens_per_step: Tokens of one optimizer step over all ranks; None: derived.
        microbatch: Sequences per microbatch on one data-parallel rank; None: derived.
        accumulation_steps: Microbatches per step; None: derived.
        compute_dtype: Format of matmuls and activations.
        param_dtype: Format of the parameters the optimizer owns.
        reduce_dtype: Format of gradient reductions.
        optimizer: Name of the optimizer; predicted memory and time are those of AdamW, with two states per parameter.
        trained: Number of trained parameters, adapters included, divided by the number of parameters of the model.
    """

    seq_len: _Count
    tokens_per_step: _Count | None = None
    microbatch: _Count | None = None
    accumulation_steps: _Count | None = None
    compute_dtype: str = "bfloat16"
    param_dtype: str = "float32"
    reduce_dtype: str = "float32"
    optimizer: str = "adamw"
    trained: float = 1.0

    def resolve(self, dp: int) -> Workload:
        """Return the workload with all three batch numbers set, for a data-parallel degree.

        Raises:
            BatchMismatch: HP308 if `tokens_per_step` is no multiple of `seq_len` * `dp`, or if the batch numbers
                contradict each other.
        """
        tokens, micro, steps = self.tokens_per_step, self.microbatch, self.accumulation_steps
        if tokens is None:
            micro, steps = micro or 1, steps or 1
            tokens = micro * steps * dp * self.seq_len
        unit = self.seq_len * dp
        if tokens < 1 or tokens % unit:
            near = max(1, round(tokens / unit)) * unit
            changes: dict[str, object] = {"training.tokens_per_step": near}
            try:
                replace(self, tokens_per_step=near).resolve(dp)
            except BatchMismatch as error:
                changes |= error.changes
            raise BatchMismatch(
                "tokens_per_step is not a multiple of seq_len x data-parallel ranks",
                got=f"tokens_per_step={tokens}, seq_len={self.seq_len}, data-parallel ranks={dp}",
                changes=changes,
            )
        per_rank = tokens // unit
        if micro is None:
            micro = per_rank // steps if steps else 1
        if steps is None:
            steps = per_rank // micro if micro else 0
        if micro < 1 or steps < 1 or micro * steps != per_rank:
            self._refuse_batch(tokens, dp, per_rank)
        return replace(self, tokens_per_step=tokens, microbatch=micro, accumulation_steps=steps)

    def _refuse_batch(self, tokens: int, dp: int, per_rank: int) -> NoReturn:
        sequences = f"{per_rank} sequences per step of a data-parallel rank"
        got = f"tokens_per_step={tokens}, seq_len={self.seq_len}, data-parallel ranks={dp}"
        if self.microbatch is not None and self.accumulation_steps is not None:
            product = self.microbatch * self.accumulation_steps
            raise BatchMismatch(
                f"microbatch * accumulation_steps = {product} differs from the {sequences}",
                got=f"{got}, microbatch={self.microbatch}, accumulation_steps={self.accumulation_steps}",
                changes={"training.tokens_per_step": product * dp * self.seq_len},
            )
        name = "accumulation_steps" if self.microbatch is None else "microbatch"
        requested = getattr(self, name)
        fitting = divisors(per_rank)
        raise BatchMismatch(
            f"{name}={requested} does not divide the {sequences}",
            got=got,
            allowed=[f"{name}={number}" for number in fitting],
            changes={f"training.{name}": min(fitting, key=lambda d: abs(d - requested))},
        )


@dataclass(frozen=True, slots=True)
class GenerateWorkload:
    """Generation workload: prompts of one length, each continued by the same number of tokens.

    Attributes:
        prompts: Number of prompts on all devices together.
        prompt_len: Tokens per prompt.
        new_tokens: Generated tokens per prompt.
        dtype: Format of weights, activations and KV cache; None: the format of the checkpoint.

    Raises:
        BadValue: HP102 for a number below 1.
    """

    prompts: int = 32
    prompt_len: int = 512
    new_tokens: int = 128
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_len", "new_tokens"):
            if (value := getattr(self, name)) < 1:
                raise BadValue(f"`{name}` of a workload is out of range", got=value, allowed="1 or more")

    @property
    def columns(self) -> int:
        """Positions per sequence in the KV cache; the last one is padding, because the last token is never an input."""
        return self.prompt_len + self.new_tokens

    @property
    def prompt_passes(self) -> int:
        """Number of prefill passes per prompt."""
        return -(-self.prompt_len // PROMPT_CHUNK)

"""Strategy: degrees of the mesh axes and related choices, the value of a recipe's `parallel:` section."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

from hyper_parallel.ir.layout import Layout
from hyper_parallel.ir.mesh import AXES, Mesh

BlockShape = Literal["1d", "2d", "weight"]
BLOCK_SHAPES: Final[tuple[BlockShape, ...]] = ("1d", "2d", "weight")
"""How a block uses two tensor-parallel axes: tp_x * tp_y as one axis (Megatron with sequence parallelism), activations
moved on y, or weights moved on y."""
_SORTED_AXES: Final = sorted(AXES)
CpKind = Literal["ring", "ulysses", "hybrid", "all_gather"]
ScheduleKind = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"]
V_SHAPED: Final = ("zbv", "dualpipev")
"""Schedules whose ranks hold two stages each, on the way down and on the way back."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Sharding rule: assigns a style to modules whose name matches a glob.

    Attributes:
        pattern: Glob over module names, one `*` per name part: `model.layers.*.mlp.up_proj`.
        style: colwise, rowwise, vocab, head, kv_replicate, replicate (see `hyper_parallel.shard.STYLES`).
    """

    pattern: str
    style: str


@dataclass(frozen=True, slots=True)
class Overlap:
    """Communication inside of a layer that runs while the same rank computes.

    Attributes:
        half_batch: Decoder layers run on two halves of the sequences of a microbatch, which take turns: one computes
            while the collectives of the other are in flight.
        ep_chunks: Chunks of tokens of the experts: one is computed while the rows of another are exchanged.
        tp_chunks: Chunks of tokens of attention and MLP blocks: one is multiplied while another is gathered or
            scattered over the tensor-parallel ranks.
    """

    half_batch: bool = False
    ep_chunks: int = 1
    tp_chunks: int = 1

    def parts(self, sequences: int, length: int) -> int:
        """Return the number of parts that layers run a microbatch of [sequences, length] tokens in.

        A batch with as many sequences as tokens per sequence stays whole: sizes do not tell which dim is which.
        """
        return 2 if self.half_batch and sequences % 2 == 0 and sequences != length else 1

    def __str__(self) -> str:
        shown = {
            "half-batch": self.half_batch,
            f"chunks:{self.ep_chunks}": self.ep_chunks > 1,
            f"tp-chunks:{self.tp_chunks}": self.tp_chunks > 1,
        }
        return ",".join(text for text, is_on in shown.items() if is_on) or "none"


@dataclass(frozen=True, slots=True)
class Strategy:
    """Degrees of the mesh axes, outer to inner, and related choices.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Data-parallel replicas with full parameters (the outer axis of HSDP).
        dp_shard: FSDP ranks.
        cp: Context-parallel ranks.
        tp_x: Tensor-parallel ranks on x; alone it is 1-D tensor parallelism with sequence parallelism.
        tp_y: Tensor-parallel ranks on y, the second direction of 2-D tensor parallelism.
        ep: Expert-parallel ranks, folded over dp_shard x cp x tp; does not multiply the world size.
        attention_shape: Shape of attention blocks on two tensor-parallel axes; no effect when tp_y is 1.
        mlp_shape: Shape of MLP blocks, likewise.
        attention_scatter: 2-D attention shards heads (no traffic along y) or tokens (y joins context parallelism).
        gathered_inputs: Keep gathered inputs of a matmul for backward, or gather them again in backward.
        cp_kind: Form of context-parallel attention: zigzag ring, Ulysses, both, or gathered keys and values.
        cp_ulysses: Ulysses ranks inside cp for the hybrid; the ring has cp / cp_ulysses.
        schedule: Order of pipeline actions; also the placement of stages for a `schedule_file`.
        schedule_file: CSV file with the actions of every pipeline rank, instead of a generated schedule; "": none.
        virtual_stages: Pipeline stages per rank.
        stage_layers: Decoder layers of each (virtual) stage, in model order; (): balanced by cost.
        rules: Overrides of the model's own sharding plan; the first match wins.
        recompute: Activations that backward recomputes.
        reshard_after_forward: Free gathered parameters between forward and backward (ZeRO-3); else ZeRO-2.
        etp: Tensor-parallel ranks of one expert; None: tp without expert parallelism, else 1.
        zero: 0: nothing is sharded over dp_shard x cp; 1: optimizer states only; None: FSDP, see
            `reshard_after_forward`.
        recompute_layers: Number of layers per rank that `recompute` applies to, from the first of each stage; None:
            all.
        offload: Let a memory plan offload to host memory the storages that exceed device memory.
        overlap: Communication that runs during computation.
        order: Mesh axes, outer to inner.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp_x: int = 1
    tp_y: int = 1
    ep: int = 1
    attention_shape: BlockShape = "2d"
    mlp_shape: BlockShape = "2d"
    attention_scatter: Literal["head", "token"] = "head"
    gathered_inputs: Literal["keep", "re-gather"] = "keep"
    cp_kind: CpKind = "ring"
    cp_ulysses: int = 1
    schedule: ScheduleKind = "1f1b"
    schedule_file: str = ""
    virtual_stages: int = 1
    stage_layers: tuple[int, ...] = ()
    rules: tuple[Rule, ...] = ()
    recompute: Literal["none", "selective", "full"] = "none"
    reshard_after_forward: bool = True
    etp: int | None = None
    zero: Literal[0, 1] | None = None
    recompute_layers: int | None = None
    offload: bool = False
    overlap: Overlap = Overlap()
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        if self.order is not AXES and sorted(self.order) != _SORTED_AXES:
            raise ValueError(f"the order {self.order} is not one of all the axes {AXES}")

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks, tp_x * tp_y."""
        return self.tp_x * self.tp_y

    @property
    def dp(self) -> int:
        """Ranks that see different sequences, dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Product of the degrees; `ep` folds over others and does not count."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks, virtual ones included."""
        return self.pp * self.virtual_stages

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank; see `rank_stages`."""
        return rank_stages(self.schedule, pp_rank, self.pp, self.virtual_stages)

    def mesh(self) -> Mesh:
        """Return the mesh with every axis, degree 1 included, in the order of the strategy."""
        return Mesh(tuple((name, int(getattr(self, name))) for name in self.order))

    def recomputed(self, stages: Sequence[Sequence[int]]) -> frozenset[int]:
        """Return the decoder layers of a rank that are recomputed: the first ones of every stage, evenly.

        Backward reaches the first layers last, when the activations of the others are already freed.

        Args:
            stages: Layers of each of the rank's stages, in model order.
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
        """State sharded over dp_shard x cp: 0 none, 1 optimizer states, 2 also gradients, 3 also parameters."""
        return self.zero if self.zero is not None else 3 if self.reshard_after_forward else 2

    @property
    def frees_gathered(self) -> bool:
        """True if parameters gathered over dp_shard x cp are freed between forward and backward."""
        return self.zero_stage == 3

    @property
    def reduces_once(self) -> bool:
        """True if FSDP reduces gradients, and gathers resident parameters, once per step instead of per microbatch."""
        return self.pp > 1 or self.zero_stage == 1

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks of one expert."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def ulysses(self) -> int:
        """Ranks inside cp that exchange heads for sequence."""
        return ulysses_degree(self.cp, self.cp_kind, self.cp_ulysses)

    @property
    def fsdp_axes(self) -> tuple[str, ...]:
        """Axes that FSDP cuts parameters over: context-parallel ranks hold the same parameters, so they join."""
        return tuple(a for a in ("dp_shard", "cp") if getattr(self, a) > 1)

    def expert_mesh(self) -> Mesh:
        """Return the expert mesh: `ep` folds over the innermost of dp_shard x cp x tp_x x tp_y.

        Inner rank f has coordinate f % ep on `ep`, and f // ep on `edp`. Ranks along `edp` hold the same experts and
        shard their parameters as FSDP does.
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
        """Return axes of the main mesh that span the same ranks as axes of the expert mesh, else these axes.

        A group of ranks has one name in both meshes: with dp_shard=2 and ep=2, `ep` is `dp_shard`.
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
        """Return all degrees by recipe key, `ep` included."""
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
    """Return the stages of a pipeline rank: in a loop (r, r + p, ...), for `V_SHAPED` in a V (r, 2p - 1 - r)."""
    if schedule in V_SHAPED:
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * per_rank, ranks))


def ulysses_degree(cp: int, kind: CpKind, cp_ulysses: int) -> int:
    """Return the number of Ulysses ranks inside cp: all of them, some, or one."""
    return 1 if cp == 1 else {"ulysses": cp, "hybrid": cp_ulysses}.get(kind, 1)

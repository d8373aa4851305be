"""Strategy: the degrees of the axes and the choices around them; what a recipe's `parallel:` section says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hyper_parallel.ir.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Rule:
    """One sharding rule: modules whose name matches a glob get a style.

    Attributes:
        pattern: Glob over module names, one `*` per name part: `model.layers.*.mlp.up_proj`.
        style: colwise, rowwise, vocab, head, kv_replicate, replicate (see `hyper_parallel.shard.STYLES`).
    """

    pattern: str
    style: str


@dataclass(frozen=True, slots=True)
class Strategy:
    """Degrees of the mesh axes, outer to inner, and the choices that go with them.

    Attributes:
        pp: Pipeline stages.
        dp_replicate: Data-parallel replicas that hold whole parameters (the outer axis of HSDP).
        dp_shard: FSDP ranks.
        cp: Context-parallel ranks.
        tp_x: Tensor-parallel ranks on x; alone it is 1-D tensor parallelism with sequence parallelism.
        tp_y: Tensor-parallel ranks on y, the second direction of 2-D tensor parallelism.
        ep: Expert-parallel ranks, folded over dp_shard x cp x tp; does not multiply the world size.
        rules: Overrides of the model's own sharding plan, the first match wins.
        recompute: Activations redone in backward.
        reshard_after_forward: Free gathered parameters between forward and backward (ZeRO-3); else ZeRO-2.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp_x: int = 1
    tp_y: int = 1
    ep: int = 1
    rules: tuple[Rule, ...] = ()
    recompute: Literal["none", "full"] = "none"
    reshard_after_forward: bool = True

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

    def mesh(self) -> Mesh:
        """The mesh with every axis, degree 1 included, in the fixed order."""
        return Mesh(
            (
                ("pp", self.pp),
                ("dp_replicate", self.dp_replicate),
                ("dp_shard", self.dp_shard),
                ("cp", self.cp),
                ("tp_x", self.tp_x),
                ("tp_y", self.tp_y),
            )
        )

    def degrees(self) -> dict[str, int]:
        """All degrees by recipe key, `ep` included."""
        return {**dict(self.mesh().axes), "ep": self.ep}

    def __str__(self) -> str:
        shown = [f"{k}={v}" for k, v in self.degrees().items() if v > 1]
        if self.recompute != "none":
            shown.append(f"recompute={self.recompute}")
        return " ".join(shown) or "one device"

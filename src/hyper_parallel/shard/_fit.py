"""Modules whose result stays exact under tensor parallelism.

Everything here works on parameters that have found their rule, and either changes a style (with a note), keeps it,
or raises. A combination that would give another result than one device is refused, never approximated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hyper_parallel.errors import UnsupportedSharding, overrides
from hyper_parallel.ir import Strategy
from hyper_parallel.shard._rules import REFUSED


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter with the rule it found."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    owner: str
    style: str | None
    parts: int = 1  # stacked projections that are cut apart
    role: str | None = None  # cut by heads, kv_heads or width

    @property
    def module(self) -> str:
        return module_of(self.name)

    @property
    def parent(self) -> str:
        return module_of(self.module)

    @property
    def cut_size(self) -> int:
        """Size of the dim that tensor parallelism cuts."""
        return self.shape[-1 if self.style == "rowwise" else 0]

    @property
    def leaf(self) -> str:
        """Last part of the module's name."""
        return self.module.rpartition(".")[2]

    @property
    def pattern(self) -> str:
        return _starred(self.module)

    @property
    def in_attention(self) -> bool:
        """Whether the module is a direct part of an attention module."""
        # A rule that names a parameter holds for one of the attention module itself.
        holder = self.module if self.owner == self.name else self.parent
        name = holder.rpartition(".")[2]
        return "attn" in name or "attention" in name


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the checks need to know of the model and the strategy."""

    strategy: Strategy
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def tp(self) -> int:
        return self.strategy.tp

    @property
    def without_tp(self) -> dict[str, object]:
        """Recipe keys that use the same ranks for FSDP."""
        return {"parallel.tp": 1, "parallel.dp_shard": self.strategy.dp_shard * self.tp}


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _starred(name: str) -> str:
    """The name with `*` for every layer index."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def rule_hint(rules: Mapping[str, str]) -> str:
    return f"'parallel.rules={{{', '.join(f'{p}: {s}' for p, s in rules.items())}}}'"


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def refuse_inexact(found: list[Param], sizes: Sizes) -> None:
    """Refuse what has no exact form under tensor parallelism, named styles first."""
    for param in found:
        if param.style is not None and param.style in REFUSED:
            raise UnsupportedSharding(
                f"`{param.pattern}` cannot be split by tensor parallelism: {REFUSED[param.style]}",
                got=f"tp={sizes.tp}, style {param.style}",
                allowed="dp_replicate, dp_shard",
                changes=sizes.without_tp,
            )
    for param in found:
        if param.style is None and not _is_norm(param):
            raise UnsupportedSharding(
                f"no rule covers `{_starred(param.name)}`: tensor parallelism is not known to be exact",
                got=f"shape {param.shape}, tp={sizes.tp}",
                changes=sizes.without_tp,
                hint=overrides(sizes.without_tp) + _or_replicate(param),
            )
        if param.style not in (None, "replicate", "experts") and not 1 <= len(param.shape) <= 2:
            raise UnsupportedSharding(
                f"style `{param.style}` needs a matrix or a vector, `{param.name}` is neither",
                got=f"shape {param.shape}",
                changes=sizes.without_tp,
            )


def _is_norm(param: Param) -> bool:
    """A vector named weight or bias works position by position; anything else may mix positions or heads."""
    return len(param.shape) == 1 and param.name.rpartition(".")[2] in ("weight", "bias")


def _or_replicate(param: Param) -> str:
    if "attn" in param.name or "attention" in param.name:
        return ""  # attention mixes positions
    rule = rule_hint({param.pattern: "replicate"})
    return f"   (or, if it works position by position, {rule})"


def fit_vocabulary(found: list[Param], sizes: Sizes, notes: list[str]) -> list[Param]:
    """Keep embedding and head whole when the vocabulary does not divide; both, so that tied ones stay one."""
    rows = {p.shape[0] for p in found if p.style in ("vocab", "head")}
    if not rows or all(size % sizes.tp == 0 for size in rows | {sizes.vocab_size}):
        return found
    uneven = sorted(size for size in rows | {sizes.vocab_size} if size % sizes.tp)
    notes.append(
        f"embedding and head are kept whole: the vocabulary of {uneven[0]} does not divide by tp={sizes.tp}; "
        "the head works on the sequence shard of each rank"
    )
    return [replace(p, style="replicate") if p.style in ("vocab", "head") else p for p in found]


def check_pairs(found: list[Param], sizes: Sizes) -> None:
    """Refuse a module whose parts do not fit together.

    What is cut going in is cut coming out: colwise and rowwise projections come together and no projection between
    them is whole. Attention mixes positions, so it cannot stay whole on a sequence shard, and a norm over all heads
    cannot work on a few of them.
    """
    parents: dict[str, list[Param]] = {}
    for param in found:
        parents.setdefault(param.parent, []).append(param)
    for parent, members in parents.items():
        matrices = [p for p in members if len(p.shape) == 2]
        into = [p for p in matrices if p.style in ("colwise", "kv_replicate", "qkv", "gate_up")]
        out = [p for p in matrices if p.style == "rowwise"]
        odd = [p for p in matrices if p.style == "replicate" and _between(p, into)]
        odd += [p for p in members if p.style in (None, "replicate") and _norm_over_heads(p, sizes)]
        if bool(into) != bool(out):
            odd += into or out
        if odd:
            raise UnsupportedSharding(
                f"the parts of `{_starred(parent)}` do not fit together: "
                f"`{odd[0].pattern}` is {odd[0].style or 'whole'}",
                got=", ".join(f"{p.leaf}={p.style}" for p in matrices),
                allowed="colwise projections in and rowwise projections out",
                changes=sizes.without_tp if odd[0].in_attention else None,
                hint=None if odd[0].in_attention else rule_hint({_starred(parent): "replicate"}),
            )


def _between(param: Param, into: list[Param]) -> bool:
    return param.in_attention or param.shape in {p.shape for p in into}


def _norm_over_heads(param: Param, sizes: Sizes) -> bool:
    if not param.in_attention or len(param.shape) != 1 or sizes.num_heads == 1:
        return False
    return param.shape[0] in {
        n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads) if n > 1
    }

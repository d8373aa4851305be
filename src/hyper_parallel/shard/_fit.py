"""Checks that tensor parallelism computes the same result as one device, given the sharding style of each parameter.

A style is a key of `STYLES`. A check accepts a style, replaces it and adds a note for the user, or raises. Inexact
combinations are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Rule, Strategy
from hyper_parallel.shard._rules import COLUMN_STYLES, REFUSED, WHOLE


@dataclass(frozen=True, slots=True)
class Param:
    """Parameter with its sharding style.

    Attributes:
        name: Full name of the parameter.
        shape: Logical shape.
        dims: Logical dims, or ().
        owner: Name of the module of the parameter; name of the parameter itself if a rule names it.
        style: Key of `STYLES` or `REFUSED`; None if no rule matches.
        parts: Number of stacked projections that are sharded separately; 1 for any other parameter.
        role: Quantity that the degree must divide: heads, kv_heads or width; None if it is not known or not sharded.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    owner: str
    style: str | None
    parts: int = 1
    role: str | None = None

    @property
    def module(self) -> str:
        return module_of(self.name)

    @property
    def parent(self) -> str:
        return module_of(self.module)

    @property
    def cut_size(self) -> int:
        """Size of the dim that tensor parallelism shards."""
        return self.shape[-1 if self.style == "rowwise" else 0]

    @property
    def leaf(self) -> str:
        """Last part of the module's name."""
        return self.module.rpartition(".")[2]

    @property
    def pattern(self) -> str:
        return starred(self.module)

    @property
    def in_attention(self) -> bool:
        """True if the parameter belongs to a child of an attention module, or a rule names it in the module itself."""
        # A rule that names a parameter names a direct parameter of the attention module.
        holder = self.module if self.owner == self.name else self.parent
        # Encoders of the BERT kind have `attention.self.query` and `attention.output.dense`.
        parts = holder.split(".")[-2 if holder.endswith((".self", ".output")) else -1 :]
        return any("attn" in part or "attention" in part for part in parts)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Strategy and model sizes that the checks need."""

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
        """Dict from recipe key to value, to use FSDP instead of tensor parallelism on the same ranks."""
        return {"parallel.tp": 1, "parallel.dp_shard": self.strategy.dp_shard * self.tp}


def module_of(name: str) -> str:
    """Return the name of the parent module of a parameter or module."""
    return name.rpartition(".")[0]


def starred(name: str) -> str:
    """Return the name with `*` in place of numbers, such as layer indices; a leading number is kept."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def with_rules(rules: Mapping[str, str], user_rules: Iterable[Rule] = ()) -> dict[str, object]:
    """Return the recipe change that adds `rules`, a dict from pattern to style, in front of `user_rules`."""
    return {"parallel.rules": {**rules, **{r.pattern: r.style for r in user_rules if r.pattern not in rules}}}


def is_covered(params: list[Param]) -> bool:
    """Return whether the residual stream can be sharded: all parameters except norms have a supported style."""
    return all(_is_norm(param) if param.style is None else param.style not in (*REFUSED, WHOLE) for param in params)


def keep_whole(params: list[Param], sizes: Sizes, notes: list[str], staged: bool = False) -> list[Param]:
    """Return the parameters, with style `whole` where no implemented rule exists, and add a note with their names.

    Raises:
        UnsupportedSharding: HP205 if a parameter without a rule lies between sharded projections, if no parameter would
            be sharded, or for a strategy with tp_y, ep, latent attention or (unless `staged`) pp.
    """
    result = [replace(p, style=WHOLE) if p.style in (None, *REFUSED) else p for p in params]
    into = {p.parent for p in result if len(p.shape) == 2 and p.style in COLUMN_STYLES}
    for param in result:
        is_layer = param.leaf == "*" or param.leaf.isdecimal()
        if param.style == WHOLE and param.pattern in into and not is_layer:
            raise UnsupportedSharding(
                f"no rule covers `{starred(param.name)}`, which lies between sharded projections",
                got=f"shape {param.shape}, tp={sizes.tp}",
                changes=sizes.without_tp,
            )
    kept = [p for p in result if p.style == WHOLE]
    matrices = [p for p in kept if len(p.shape) > 1]
    shown = ", ".join(f"`{name}`" for name in dict.fromkeys(p.pattern for p in matrices or kept))
    if all(p.style in (WHOLE, "replicate", "experts") for p in result):
        raise UnsupportedSharding(
            "tensor parallelism can shard no module of this model exactly",
            got=f"tp={sizes.tp}; replicated: {shown}",
            allowed="dp_replicate, dp_shard, or `parallel.rules` that name input and output projections",
            changes=sizes.without_tp,
        )
    s = sizes.strategy
    latent = next((p.pattern for p in result if p.style == "latent"), None)
    needs_sharding = latent or s.ep > 1 or (s.pp > 1 and not staged)
    if s.tp_y > 1 or needs_sharding:
        raise UnsupportedSharding(
            f"with {shown} replicated, tensor parallelism supports one axis only, without ep, pp and latent attention",
            got=f"tp_x={s.tp_x}, tp_y={s.tp_y}, ep={s.ep}, pp={s.pp}" + (f", {latent}" if latent else ""),
            changes=sizes.without_tp if needs_sharding else {"parallel.tp_x": s.tp, "parallel.tp_y": 1},
        )
    notes.append(f"every tensor-parallel rank holds all tokens between blocks; replicated: {shown}")
    if s.pp > 1:
        notes.append("with pp, time and memory are predicted as if each rank held a part of the tokens")
    return result


def refuse_shapes(params: list[Param], sizes: Sizes) -> None:
    """Raise UnsupportedSharding (HP205) for a parameter of a sharding style that is neither a matrix nor a vector."""
    for param in params:
        whole = ("replicate", "experts", WHOLE, "inner")
        if param.style not in (None, *whole) and not 1 <= len(param.shape) <= 2:
            raise UnsupportedSharding(
                f"style `{param.style}` needs a matrix or a vector, but `{param.name}` is neither",
                got=f"shape {param.shape}",
                changes=sizes.without_tp,
            )


def _is_norm(param: Param) -> bool:
    """Return whether the parameter is a vector named `weight` or `bias`, as in norms, which act on each token alone."""
    return len(param.shape) == 1 and param.name.rpartition(".")[2] in ("weight", "bias")


def fit_vocabulary(params: list[Param], sizes: Sizes, notes: list[str]) -> list[Param]:
    """Return the parameters; replicate embedding and head, with a note, if tp does not divide their vocabulary."""
    rows = {p.shape[0] for p in params if p.style in ("vocab", "head")}
    if not rows or all(size % sizes.tp == 0 for size in rows | {sizes.vocab_size}):
        return params
    uneven = sorted(size for size in rows | {sizes.vocab_size} if size % sizes.tp)
    notes.append(
        f"embedding and head are kept whole: the vocabulary of {uneven[0]} is not divisible by tp={sizes.tp}; "
        "the head works on the sequence shard of each rank"
    )
    return [replace(p, style="replicate") if p.style in ("vocab", "head") else p for p in params]


def check_pairs(params: list[Param], sizes: Sizes) -> None:
    """Raise UnsupportedSharding (HP205) for a module whose parameters have styles that do not fit together.

    Refused are: column-parallel projections without a rowwise one, and the reverse; a replicated matrix of attention; a
    replicated matrix of the shape of a column-parallel one of the same module; and a replicated norm over the features
    of all heads, because each rank has only some heads.
    """
    parents: dict[str, list[Param]] = {}
    for param in params:
        parents.setdefault(param.parent, []).append(param)
    for parent, members in parents.items():
        matrices = [p for p in members if len(p.shape) == 2]
        into = [p for p in matrices if p.style in COLUMN_STYLES]
        out = [p for p in matrices if p.style == "rowwise"]
        between = {p.shape for p in into}
        odd = [p for p in matrices if p.style == "replicate" and (p.in_attention or p.shape in between)]
        odd += [p for p in members if p.style in (None, "replicate") and _norm_over_heads(p, sizes)]
        if bool(into) != bool(out):
            odd += into or out
        if odd:
            raise UnsupportedSharding(
                f"the styles of `{starred(parent)}` are inconsistent: `{odd[0].pattern}` is {odd[0].style or 'whole'}",
                got=", ".join(f"{p.leaf}={p.style}" for p in matrices),
                allowed="colwise input projections and rowwise output projections",
                changes=sizes.without_tp
                if odd[0].in_attention
                else with_rules({starred(parent): "replicate"}, sizes.strategy.rules),
            )


def check_widths(params: list[Param], sizes: Sizes) -> None:
    """Raise UnsupportedSharding (HP205) if a layer has a colwise projection without a rowwise one of equal width.

    The reverse is refused too. Key and value projections, and layers with a `qkv` projection, are not checked.
    """
    layers: dict[str, list[Param]] = {}
    for param in params:
        if len(param.shape) == 2 and param.role != "kv_heads":
            inside = re.match(r".*?\.(\d+|\*)\.", param.name)
            layers.setdefault(inside[0] if inside else "", []).append(param)
    for members in layers.values():
        widths: dict[bool, dict[int, Param]] = {True: {}, False: {}}
        for p in members:
            if p.style in ("colwise", "gate_up", "rowwise"):
                widths[p.style == "rowwise"][p.cut_size // (2 if p.style == "gate_up" else 1)] = p
        odd = set(widths[True]) ^ set(widths[False])
        if odd and not any(p.style == "qkv" for p in members):
            param = next(side[min(odd)] for side in widths.values() if min(odd) in side)
            other = "colwise" if param.style == "rowwise" else "rowwise"
            raise UnsupportedSharding(
                f"`{param.pattern}` is {param.style} but no {other} projection of its layer has the same width",
                got=f"width {min(odd)}",
                allowed="colwise input projections and rowwise output projections",
                changes=with_rules({param.pattern: "replicate"}, sizes.strategy.rules),
            )


def _norm_over_heads(param: Param, sizes: Sizes) -> bool:
    if not param.in_attention or len(param.shape) != 1 or sizes.num_heads == 1:
        return False
    return param.shape[0] in {n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads) if n > 1}

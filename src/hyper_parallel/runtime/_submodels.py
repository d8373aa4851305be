"""parallelize_submodels: the tower and the language part of a multimodal model on ranks of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch.distributed as dist
from torch import nn

from hyper_parallel.backends.torch import Routing, attach, handle
from hyper_parallel.backends.torch.submodels.channel import Channel
from hyper_parallel.backends.torch.submodels.exchange import Border, Reader, Tower
from hyper_parallel.backends.torch.submodels.parts import (
    LANGUAGE,
    Division,
    TowerModel,
    divide,
    keep_language,
)
from hyper_parallel.errors import BadValue, DegreesMismatch, UnsupportedSharding
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.planner import parse_strategy
from hyper_parallel.runtime._parallelize import parallelize
from hyper_parallel.runtime._plan_of import plan_of
from hyper_parallel.runtime._world import World

_TOWER_AXES: Final = ("dp_replicate", "dp_shard")
_LANGUAGE_AXES: Final = (*_TOWER_AXES, "tp_x", "tp_y")
_AXES: Final = (*_LANGUAGE_AXES, "pp", "cp", "ep")


def parallelize_submodels(
    model: nn.Module,
    layouts: Mapping[str, str | Strategy],
    world: World,
    workload: Workload | None = None,
    *,
    routing: Routing | None = None,
) -> nn.Module:
    """Apply one layout to the tower of a multimodal model and one to its language part, on disjoint ranks.

    The ranks of the tower compute the results of the model's own `get_image_features`, `get_video_features` or
    `get_audio_features` and send them to the ranks of the language part, which send the gradients back unless the tower
    is frozen. Every rank then calls `forward_backward`, `forward_loss` and `clip_grad_norm_`, with the microbatches of
    `microbatch_sources`.

    Args:
        model: Hugging Face model of text and images, videos or audio, unmodified, with equal values on every rank or on
            the meta device. It loses the parameters of the other part.
        layouts: `plan_of` strategies of the tower, `vision` or `audio`, and of `language`. The first one has the first
            ranks. The ranks of both add up to all ranks.
        world: Ranks to use.
        workload: Workload of the plans of both parts; None: see `plan_of`.
        routing: Options of expert routing in the language part; None: the model's own behavior.

    Returns:
        The part of this rank. Its parameters have the names of the model.

    Raises:
        BadValue: HP102 for other names of sub-models.
        DegreesMismatch: HP301 when the degrees do not add up to the number of ranks.
        UnsupportedSharding: HP205 for a model without a tower of its own, and for axes that a sub-model does not
            support.
    """
    division = divide(model)
    strategies = _checked(division, layouts, world.world_size)
    members = _members(strategies)
    for name, ranks in members.items():  # every rank creates the groups of both
        world.mesh(strategies[name], ranks)
    name = next(name for name, ranks in members.items() if world.rank in ranks)
    side = _side(strategies, members, division, world)
    part = (
        TowerModel(model, division)
        if isinstance(side, Tower)
        else keep_language(model, division, side)
    )
    plan = plan_of(part, strategies[name])
    if workload is not None:  # the tower's ranks need not divide its batch
        plan = replace(plan, workload=workload)
    routing = routing if name == LANGUAGE else None
    parallelize(part, plan, world, members[name], routing=routing)
    attached = handle(part)
    attach(part, replace(attached, submodel=side))
    if isinstance(side, Reader):
        tp = attached.tp
        # Every rank reads its part of a sharded stream, and all tokens of a replicated one.
        side.watch(part, None if tp is None or tp.replicated_activations else tp.group)
    return part


def _members(strategies: Mapping[str, Strategy]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of the world of each sub-model."""
    members: dict[str, tuple[int, ...]] = {}
    for name, strategy in strategies.items():
        start = sum(map(len, members.values()))
        members[name] = tuple(range(start, start + strategy.world_size))
    return members


def _side(
    strategies: Mapping[str, Strategy],
    members: Mapping[str, tuple[int, ...]],
    division: Division,
    world: World,
) -> Tower | Reader:
    """Return this rank's side of the exchange; collective over all ranks."""
    # One process group per direction: messages of both directions may wait for each other.
    everyone = list(range(world.world_size))
    features, gradients = (Channel(dist.new_group(everyone), world.device) for _ in range(2))
    language = strategies[LANGUAGE]
    readers: list[list[int]] = [[] for _ in range(language.dp)]
    for position, rank in enumerate(members[LANGUAGE]):
        coordinate = language.mesh().coordinate(position)
        share = coordinate["dp_replicate"] * language.dp_shard + coordinate["dp_shard"]
        readers[share].append(rank)
    border, group = Border(members[division.kind], tuple(map(tuple, readers))), dist.group.WORLD
    assert group is not None
    if world.rank in members[LANGUAGE]:
        return Reader(border, group, world.rank, features, gradients)
    return Tower(border, group, border.tower.index(world.rank), features, gradients)


def submodel_strategies(
    model: nn.Module, layouts: Mapping[str, str | Strategy], world_size: int
) -> dict[str, Strategy]:
    """Return the strategy of each sub-model of a model, in the order of `layouts`; needs no other ranks.

    Raises:
        BadValue: HP102, DegreesMismatch: HP301, UnsupportedSharding: HP205; see `parallelize_submodels`.
    """
    return _checked(divide(model), layouts, world_size)


def _checked(
    division: Division, layouts: Mapping[str, str | Strategy], world_size: int
) -> dict[str, Strategy]:
    """Return the strategies by name; arguments and errors as for `submodel_strategies`."""
    names = {division.kind, LANGUAGE}
    unknown, missing = sorted(layouts.keys() - names), sorted(names - layouts.keys())
    if unknown or missing:
        key, changes = "parallel.submodels", [f"{name}=null" for name in unknown]
        changes += [f"{name}.dp_shard=1" for name in missing]
        raise BadValue(
            f"`{unknown[0]}` is no part of the model" if unknown else f"`{missing[0]}` is missing",
            where=key,
            got=", ".join(layouts) or "no sub-models",
            allowed=" and ".join(sorted(names)),
            hint=" ".join(f"{key}.{change}" for change in changes),
        )
    strategies = {
        name: parse_strategy(layout) if isinstance(layout, str) else layout
        for name, layout in layouts.items()
    }
    for name, strategy in strategies.items():
        allowed = _LANGUAGE_AXES if name == LANGUAGE else _TOWER_AXES
        for axis in _AXES:
            if getattr(strategy, axis) > 1 and axis not in allowed:
                raise UnsupportedSharding(
                    f"the sub-model `{name}` does not support {axis}",
                    where=f"parallel.submodels.{name}.{axis}",
                    got=f"{axis}={getattr(strategy, axis)}",
                    allowed=", ".join(allowed),
                    hint=f"leave out `{axis}` of `{name}`",
                )
    needed = sum(strategy.world_size for strategy in strategies.values())
    if needed != world_size:
        raise DegreesMismatch(
            "the degrees of the sub-models do not add up to the number of ranks",
            where="parallel.submodels",
            got=f"{' + '.join(str(s.world_size) for s in strategies.values())} on {world_size} ranks",
            allowed=f"{needed} ranks",
            hint=f"start {needed} ranks",
        )
    return strategies

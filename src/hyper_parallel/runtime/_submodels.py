"""`parallelize_submodels` parallelizes the encoders (towers) and the language part of a multimodal model separately.

Each sub-model has its own layout and ranks; sub-models may share ranks. Tower ranks send features to the ranks of the
language part, which send gradients back. A joint schedule orders the actions of tower and pipeline stages. Without a
joint schedule, all towers encode the microbatches of a step in synchronous rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.backends.torch import Routing, attach, handle
from hyper_parallel.backends.torch.submodels.channel import Channel
from hyper_parallel.backends.torch.submodels.exchange import Border, JointSteps, Reader, Role, Submodels, Tower
from hyper_parallel.backends.torch.submodels.parts import (
    LANGUAGE,
    Division,
    TowerModel,
    divide,
    join_parts,
    keep_language,
    twin_of,
)
from hyper_parallel.errors import (
    BadValue,
    Caller,
    DegreesMismatch,
    ScheduleError,
    UnsupportedSharding,
    reported_by,
    value_text,
)
from hyper_parallel.ir import Schedule, Strategy, Workload
from hyper_parallel.mpmd import JointLayout, check_submodel_schedule
from hyper_parallel.planner import parse_strategy
from hyper_parallel.planner.submodels import feature_stages, joint_layout, places_of_ranks
from hyper_parallel.runtime._parallelize import attach_save_pretrained, parallelize, plan_of
from hyper_parallel.runtime._world import World

_KEY: Final = "parallel.submodels"
_ALL: Final = 2**31
"""Limit of microbatches in flight for schedules that may run all forward passes first."""
_TOWER_AXES: Final = ("dp_replicate", "dp_shard")
_JOINT: Final = "one tower; pp with schedule=1f1b; the tower on the same stages of each data-parallel rank of language"
"""Layouts that permit a joint schedule, as stated in errors."""
_LANGUAGE_AXES: Final = (*_TOWER_AXES, "tp_x", "tp_y", "pp")
_AXES: Final = (*_LANGUAGE_AXES, "cp", "ep")


def parallelize_submodels(
    model: nn.Module,
    layouts: Mapping[str, str | Strategy],
    world: World,
    workload: Workload | None = None,
    *,
    ranks: Mapping[str, Sequence[int]] | None = None,
    routing: Routing | None = None,
    schedule: Schedule | None = None,
) -> nn.Module:
    """Parallelize the towers (encoders) and the language part of a multimodal model, each with its layout and ranks.

    Tower ranks run the model's `get_image_features`, `get_video_features` or `get_audio_features`, and send the results
    to the ranks of the language part. The language ranks send gradients back unless the tower is frozen. To train, all
    ranks call `forward_backward`, `forward_loss` and `clip_grad_norm_` on the microbatches of `microbatch_sources`.

    Args:
        model: Hugging Face model of text with images, videos or audio, unmodified, with equal values on every rank or
            on the meta device. Parameters of sub-models on other ranks are removed.
        layouts: Strategy, as in `plan_of`, of each sub-model: `language`, and `vision`, `audio` or both.
        world: World whose ranks run the model.
        workload: Workload of the language part; None: see `plan_of`.
        ranks: Ranks of each sub-model, used in ascending order; sub-models may share ranks. None: consecutive ranks in
            the order of `layouts`, without sharing.
        routing: Options of expert routing in the language part; None: as implemented by the model.
        schedule: Joint schedule of steps with its number of microbatches; see `mpmd.submodel_schedule`. It requires one
            tower and a language part with 1F1B pipeline stages. Stage 0 is the tower, and rank k of the schedule runs
            stage k + 1. Other steps run a joint schedule that assumes equal costs, if the layouts permit one.

    Returns:
        The sub-model of this rank, or a module that joins several sub-models. Parameter names are those of `model`.

    Raises:
        BadValue: HP102 for unknown or missing names of sub-models, and for ranks that contradict the degrees.
        DegreesMismatch: HP301 when the degrees do not add up to the number of ranks, or `ranks` are not all ranks.
        UnsupportedSharding: HP205 for a model without a separable tower, for axes or virtual stages that a sub-model
            does not support, and for pipeline stages that cannot share ranks with a tower.
        ScheduleError: HP320 for an invalid `schedule`, or for a `schedule` with layouts that permit no joint schedule.
        HyperParallelError: Errors of `plan_of` and `parallelize` for a sub-model.
    """
    with reported_by(_SubmodelLayouts()):
        strategies = _validated_strategies(division := divide(model), layouts, world.world_size, ranks)
    members = _members(strategies, ranks)
    strategies[LANGUAGE] = _with_stage_layers(model, strategies[LANGUAGE], division)
    layout = joint_layout(strategies, members, division.layers_with_features)
    frozen = not any(model.get_parameter(name).requires_grad for name in division.parameters)
    _check_schedule(schedule, strategies, layout, frozen)
    sides = _exchange_sides(strategies, members, division, world)
    roles = []
    for (name, side), part in zip(sides.items(), _parts(model, division, sides), strict=True):
        is_tower = isinstance(side, Tower)
        plan = plan_of(part, strategies[name])
        # The workload is set without checks: the tower's ranks need not divide the language part's batch.
        plan = replace(plan, workload=workload or plan.workload)
        options = _options(is_tower, layout is not None, plan.strategy, routing)
        parallelize(part, plan, world, members[name], **options)
        roles.append(_role(part, side, world))
    places = places_of_ranks(strategies[LANGUAGE], members[LANGUAGE])
    joint = layout and _joint_steps(layout, roles, places, world, frozen, schedule)
    return _rank_module(roles, joint)


class _SubmodelLayouts(Caller):
    """Call of `parallelize_submodels`: keys of `parallel.submodels` are keys of its arguments."""

    def where(self, text: str) -> str:
        """Return a key in `parallel.submodels` as `parallelize_submodels: PART`, and other texts unchanged."""
        is_own = text.startswith(_KEY)
        return f"parallelize_submodels{text.removeprefix(_KEY).replace('.', ': ', 1)}" if is_own else text

    def hint(self, changes: Mapping[str, object]) -> str | None:
        if not all(key.startswith("parallel.") for key in changes):
            return None
        texts = []
        for key, value in changes.items():
            name = key.removeprefix("parallel.").removeprefix("submodels.")
            part, _, option = name.rpartition(".")
            text = f"`{option}={value_text(value)}` in the layout of `{part or LANGUAGE}`"
            if value is None:
                text = f"leave out `{name}`"
            elif option == "ranks":
                text = f"ranks={{'{part}': {value_text(value)}}}"
            texts.append(text)
        return ", ".join(texts)


def _parts(model: nn.Module, division: Division, sides: Mapping[str, Tower | Reader]) -> list[nn.Module]:
    """Split `model` into the sub-models of this rank, in the order of `sides`; the last sub-model reuses `model`."""
    towers = {tower.kind: tower for tower in division.towers}
    models = [*(twin_of(model) for _ in range(len(sides) - 1)), model]
    return [
        TowerModel(own, division, towers[name]) if isinstance(side, Tower) else keep_language(own, division, side)
        for (name, side), own in zip(sides.items(), models, strict=True)
    ]


def _with_stage_layers(model: nn.Module, language: Strategy, division: Division) -> Strategy:
    """Return the language strategy; add the planned `stage_layers` if layers after the first may read features."""
    if language.pp == 1 or language.stage_layers or not division.layers_with_features:
        return language
    return replace(language, stage_layers=plan_of(model, language).strategy.stage_layers)


def _options(is_tower: bool, joint: bool, strategy: Strategy, routing: Routing | None) -> dict[str, Any]:
    """Return the keyword arguments of `parallelize` for a sub-model.

    A tower runs only for microbatches with media, so the number of calls differs between steps and ranks. Under a joint
    schedule, the replicas of a tower reduce their gradients at the end of a step.
    """
    if not is_tower:
        return {"routing": routing}
    copied = joint and strategy.dp_shard == 1 and strategy.dp > 1
    return {"sync_replicas": not copied, "one_order": False}


def _check_schedule(
    schedule: Schedule | None,
    strategies: Mapping[str, Strategy],
    layout: JointLayout | None,
    frozen: bool,
) -> None:
    if schedule is None:
        return
    if layout is None:
        raise ScheduleError(
            "encoder and language part have no joint schedule in this layout",
            got=", ".join(f"{name}: {strategy}" for name, strategy in strategies.items()),
            allowed=_JOINT,
            hint="schedule=None",
        )
    check_submodel_schedule(schedule, layout.lanes, frozen)


def _role(part: nn.Module, side: Tower | Reader, world: World) -> Role:
    """Return the role of a parallelized sub-model; in the language part, install the receipt of tower features."""
    if isinstance(side, Reader):
        tp, pipeline = handle(part).tp, handle(part).pipeline
        # A rank receives features of its shard of the tokens, or of all tokens if activations are replicated.
        group = None if tp is None or tp.replicated_activations else tp.group
        side.watch(part, group, None if pipeline is None else pipeline.stages.running)
    first_rank = side.border.tower[0] if isinstance(side, Tower) else side.borders[0].readers[0][0][0]
    return Role(part, side, world.rank == first_rank)


def _rank_module(roles: Sequence[Role], joint: JointSteps | None) -> nn.Module:
    """Return the module of this rank: its single sub-model, or a module that joins the sub-models of `roles`."""
    group = dist.group.WORLD
    assert group is not None
    attached, whole = handle(roles[0].part), roles[0].part
    for role in roles[1:]:
        assert isinstance(role.part, TowerModel)
        tower, whole = handle(role.part), join_parts(whole, role.part)
        attach_save_pretrained(whole)
        layouts, shapes = attached.layouts | tower.layouts, attached.shapes | tower.shapes
        attached = replace(attached, layouts=layouts, shapes=shapes)
    attach(whole, replace(attached, submodels=Submodels(group, tuple(roles), joint)))
    return whole


def _members(
    strategies: Mapping[str, Strategy], ranks: Mapping[str, Sequence[int]] | None
) -> dict[str, tuple[int, ...]]:
    """Return the ascending ranks of each sub-model, by name; consecutive ranks if `ranks` is None."""
    if ranks is not None:
        return {name: tuple(sorted(ranks[name])) for name in strategies}
    members: dict[str, tuple[int, ...]] = {}
    for name, strategy in strategies.items():
        start = sum(map(len, members.values()))
        members[name] = tuple(range(start, start + strategy.world_size))
    return members


def _joint_steps(
    layout: JointLayout,
    roles: Sequence[Role],
    places: Mapping[int, tuple[int, int]],
    world: World,
    frozen: bool,
    schedule: Schedule | None,
) -> JointSteps:
    """Return the runner of this rank's joint steps; `places`: (data-parallel rank, stage) of each language rank."""
    side = roles[-1].side
    tower = (side.border if isinstance(side, Tower) else side.borders[0]).tower
    attached = handle(roles[-1].part)
    own = isinstance(side, Tower)
    copied = own and attached.plan.strategy.dp_shard == 1
    return JointSteps(
        layout,
        tower,
        attached.ranks.world_group if copied else None,
        getattr(torch, attached.plan.workload.reduce_dtype),
        places.get(world.rank) or layout.place(tower.index(world.rank)),
        tower.index(world.rank) if own else None,
        frozen,
        schedule,
    )


def _exchange_sides(
    strategies: Mapping[str, Strategy],
    members: Mapping[str, tuple[int, ...]],
    division: Division,
    world: World,
) -> dict[str, Tower | Reader]:
    """Return this rank's ends of the exchange of features and gradients, by sub-model, the language part first.

    All ranks must call this function, because it creates process groups.
    """
    for name, strategy in strategies.items():  # all ranks create the groups of all sub-models
        world.mesh(strategy, members[name])
    # One process group per direction, because messages in a common group could block each other.
    everyone = list(range(world.world_size))
    features, gradients = (Channel(dist.new_group(everyone), world.device) for _ in range(2))
    language = strategies[LANGUAGE]
    places = places_of_ranks(language, members[LANGUAGE])
    stages = feature_stages(language, division.layers_with_features)
    readers = tuple(
        tuple(tuple(r for r, place in places.items() if place == (share, s)) for s in stages)
        for share in range(language.dp)
    )
    known = language.schedule == "1f1b" and not language.schedule_file
    ahead = language.pp if known else _ALL
    borders = [
        Border(members[kind], readers, ahead, (number, len(division.towers)))
        for number, kind in enumerate(division.kinds)
    ]
    sides: dict[str, Tower | Reader] = {}
    if world.rank in places:
        sides[LANGUAGE] = Reader(borders, places[world.rank][0], world.rank, features, gradients)
    for kind, border in zip(division.kinds, borders, strict=True):
        if world.rank in border.tower:
            tower_rank = border.tower.index(world.rank)
            sides[kind] = Tower(border, tower_rank, features, gradients)
    return sides


def submodel_strategies(
    model: nn.Module,
    layouts: Mapping[str, str | Strategy],
    world_size: int,
    ranks: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Strategy]:
    """Return the checked strategy of each sub-model, in the order of `layouts`, without communication.

    Arguments as in `parallelize_submodels`; the model is not changed.

    Raises:
        UnknownKey: HP101 for an unknown key of a layout.
        BadValue: HP102 for an invalid value of a layout, unknown or missing names of sub-models, and ranks that
            contradict the degrees.
        DegreesMismatch, UnsupportedSharding: As for `parallelize_submodels`.
    """
    return _validated_strategies(divide(model), layouts, world_size, ranks)


def _validated_strategies(
    division: Division,
    layouts: Mapping[str, str | Strategy],
    world_size: int,
    ranks: Mapping[str, Sequence[int]] | None,
) -> dict[str, Strategy]:
    names = {*division.kinds, LANGUAGE}
    unknown, missing = sorted(layouts.keys() - names), sorted(names - layouts.keys())
    if unknown or missing:
        raise BadValue(
            f"the model has no sub-model `{unknown[0]}`" if unknown else f"the sub-model `{missing[0]}` has no layout",
            where=_KEY,
            got=", ".join(layouts) or "no sub-models",
            allowed=" and ".join(sorted(names)),
            changes={f"{_KEY}.{name}": None for name in unknown} | {f"{_KEY}.{name}.dp_shard": 1 for name in missing},
        )
    strategies = {
        name: parse_strategy(layout) if isinstance(layout, str) else layout for name, layout in layouts.items()
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
    _check_stages(strategies[LANGUAGE])
    if ranks is not None:
        _check_ranks(strategies, ranks, world_size)
        return strategies
    needed = sum(strategy.world_size for strategy in strategies.values())
    if needed != world_size:
        raise DegreesMismatch(
            f"the sub-models need {needed} ranks in total, but the run has {world_size}",
            where="parallel.submodels",
            got=f"{' + '.join(str(s.world_size) for s in strategies.values())} on {world_size} ranks",
            allowed=f"{needed} ranks",
            hint=f"start {needed} ranks",
        )
    return strategies


def _check_stages(language: Strategy) -> None:
    if language.pp > 1 and language.virtual_stages > 1:
        raise UnsupportedSharding(
            "a rank must not have several pipeline stages of the language part",
            where="parallel.submodels.language.pp",
            got=f"pp={language.pp}, virtual_stages={language.virtual_stages}",
            allowed="pp=1, or one stage per rank",
            changes={"parallel.schedule": "1f1b", "parallel.virtual_stages": 1} | _unset_stages(language),
        )


def _unset_stages(language: Strategy) -> dict[str, object]:
    idle: dict[str, object] = {"stage_layers": [], "schedule_file": ""}
    return {f"parallel.{name}": value for name, value in idle.items() if getattr(language, name)}


def _check_ranks(strategies: Mapping[str, Strategy], ranks: Mapping[str, Sequence[int]], world_size: int) -> None:
    if unknown := [name for name in ranks if name not in strategies]:
        raise BadValue(
            "`ranks` names sub-models without a strategy",
            where="ranks",
            got=unknown,
            allowed=[*strategies],
            hint=f"ranks without {', '.join(map(repr, unknown))}",
        )
    for name, strategy in strategies.items():
        own = [*ranks.get(name, ())]
        if not len(own) == len({*own}) == strategy.world_size:
            used = {rank for other in strategies if other != name for rank in ranks.get(other, ())}
            first = sorted(range(max(world_size, strategy.world_size)), key=lambda rank: rank in used)
            proposed = sorted(first[: strategy.world_size])
            raise BadValue(
                f"the number of ranks of `{name}` differs from the product of its degrees",
                where=f"parallel.submodels.{name}.ranks",
                got=f"{own} for {strategy.world_size} ranks",
                allowed=f"{strategy.world_size} different ranks",
                changes={f"{_KEY}.{name}.ranks": proposed},
            )
    used = {rank for name in strategies for rank in ranks[name]}
    towers = {rank for name in strategies if name != LANGUAGE for rank in ranks[name]}
    shared, language = not towers.isdisjoint(ranks[LANGUAGE]), strategies[LANGUAGE]
    if language.pp > 1 and shared and joint_layout(strategies, ranks) is None:
        texts = (f"{name} {s} on ranks {[*ranks[name]]}" for name, s in strategies.items())
        part = "the encoder in this layout" if len(strategies) == 2 else "one of several encoders"
        changes = {f"{_KEY}.language.pp": 1, f"{_KEY}.language.dp_shard": language.dp_shard * language.pp}
        raise UnsupportedSharding(
            f"a language part with pipeline stages cannot share ranks with {part}",
            where="parallel.submodels.language.pp",
            got="; ".join(texts),
            allowed=_JOINT,
            changes=changes | _unset_stages(language),
        )
    if used != {*range(world_size)}:
        raise DegreesMismatch(
            "the sub-models do not use exactly the ranks of the run",
            where="parallel.submodels",
            got=f"ranks {sorted(used)} of {world_size}",
            allowed=f"ranks from 0 to {world_size - 1}, each with at least one sub-model",
            hint=f"start {max(used) + 1} ranks" if used == {*range(len(used))} else None,
        )

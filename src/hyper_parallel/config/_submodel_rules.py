"""Contradictions between `parallel.submodels` and other settings, such as settings that need a single layout."""

from __future__ import annotations

from typing import Any, Final

from hyper_parallel.config._recipe import Recipe
from hyper_parallel.config._rules import Rule, Rules, offload_off
from hyper_parallel.config._sections import Submodels

_AXES: Final = ("dp_replicate", "dp_shard", "tp_x", "tp_y", "pp", "cp", "ep")


def _submodels(recipe: Recipe) -> Submodels:
    assert recipe.parallel.submodels is not None
    return recipe.parallel.submodels


def _wrong_number_of_ranks(recipe: Recipe) -> dict[str, Any] | None:
    parts = _submodels(recipe)
    for name, part in {"language": parts.language, **parts.towers}.items():
        if part.ranks is not None and len({*part.ranks}) != part.num_ranks:
            return {"name": name, "count": part.num_ranks, "ranks": [*part.ranks]}
    return None


def _used_ranks(recipe: Recipe) -> set[int]:
    """Return the ranks that run a part of the model; the empty set if a part has a wrong number of ranks."""
    if _wrong_number_of_ranks(recipe) is not None:
        return set()
    return {rank for ranks in _submodels(recipe).members.values() for rank in ranks}


def _stages_beside_several_towers(recipe: Recipe) -> dict[str, Any] | None:
    parts, used = _submodels(recipe), _used_ranks(recipe)
    towers = {rank for name in parts.towers for rank in parts.members[name]}
    shared = used and not towers.isdisjoint(parts.members["language"])
    if parts.language.pp == 1 or not shared or len(parts.towers) == 1:
        return None
    names = {"language": parts.language, **parts.towers}
    changes = ["parallel.submodels.language.pp=1"]
    changes += ["parallel.pp=1"] if "pp" in recipe.parallel.model_fields_set else []
    changes += [f"parallel.submodels.{name}.ranks=null" for name, part in names.items() if part.ranks is not None]
    return {"pp": parts.language.pp, "members": parts.members, "changes": " ".join(changes)}


def _idle_ranks(recipe: Recipe) -> dict[str, Any] | None:
    used = _used_ranks(recipe)
    missing = sorted({*range(max(used, default=-1) + 1)} - used)
    if not missing:
        return None
    names = _submodels(recipe).members
    changes = " ".join(f"parallel.submodels.{name}.ranks=null" for name in names)
    return {"first": missing[0], "count": max(used) + 1, "changes": changes}


def _other_degrees(recipe: Recipe) -> list[dict[str, Any]]:
    language = _submodels(recipe).language
    degrees = {axis: getattr(language, axis, 1) for axis in _AXES}
    return [
        {"axis": axis, "own": own, "degree": degree}
        for axis, degree in degrees.items()
        if (own := getattr(recipe.parallel, axis)) != degree
    ]


def _excluded_settings(recipe: Recipe) -> list[dict[str, str]]:
    p, training, overlap, data = recipe.parallel, recipe.training, recipe.overlap, recipe.data
    sft = "stage=sft" + " data.format=auto" * (data.format in ("text", "jsonl", "parquet", "csv"))
    sft += " data.source=FILE" * (data.source == "python-stdlib")
    section = getattr(recipe, recipe.stage, None)
    changed = {} if section is None else section.model_dump(exclude_defaults=True)
    sft += "".join(f" {recipe.stage}.{name}=null" for name in changed)
    one = "parallel.submodels=null"
    one += " parallel.auto=true" * (_submodels(recipe).auto and p.world_size is not None)
    excluded = {
        "parallel.auto=false": p.auto,
        "parallel.world_size=null": not _submodels(recipe).auto and p.world_size is not None,
        sft: recipe.stage != "sft",
        "backend=torch": recipe.backend != "torch",
        "overlap=none": overlap.tp != "none" or overlap.ep != "none",
        offload_off(recipe): recipe.offload.on,
        "training.compile=false": training.compile,
        "training.elastic=false": training.elastic,
        "training.check_ranks_every=0": training.check_ranks_every > 0,
        "training.neftune_noise_alpha=null": training.neftune_noise_alpha is not None,
        "checkpoint.snapshot_every=0": recipe.checkpoint.snapshot_every > 0,
    }
    return [{"name": h.partition("=")[0], "hint": h, "one": one} for h, applies in excluded.items() if applies]


SUBMODEL_RULES: Final[Rules] = (
    Rule("parallel.submodels", lambda r: not (_submodels(r).auto or _submodels(r).towers),
         "`parallel.submodels` must name the language part and an encoder", "language",
         "set `parallel.submodels.vision.dp_shard=1`, or `parallel.submodels=null`",
         "language with vision, audio or both"),
    Rule("parallel.submodels.{name}.ranks", _wrong_number_of_ranks,
         "the degrees of `{name}` do not multiply to its number of ranks",
         "{count} ranks, {name}.ranks={ranks}",
         "set `parallel.submodels.{name}.ranks=null`", "{count} different ranks"),
    Rule("parallel.submodels.language.pp", _stages_beside_several_towers,
         "pipeline stages can share ranks with one encoder only, but the model has several",
         "pp={pp}, {members}", "set `{changes}`", "one encoder, or ranks that are not shared"),
    Rule("parallel.submodels", _idle_ranks,
         "a rank has no part of the model", "rank {first} of {count}", "set `{changes}`",
         "ranks from 0, each with at least one part"),
    Rule("parallel.{axis}", _other_degrees,
         "`parallel.{axis}` differs from the degree in `parallel.submodels.language`",
         "parallel.{axis}={own}, parallel.submodels.language: {axis}={degree}",
         "set `parallel.{axis}={degree}`"),
    Rule("{name}", _excluded_settings,
         "this value of `{name}` needs one layout for the whole model", "parallel.submodels",
         "set `{hint}`, or `{one}`"),
)  # fmt: skip

"""Download of the models and data sets that a recipe names on the Hugging Face Hub."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import yaml

from hyper_parallel.config import LoadedRecipe, Recipe, read_mapping
from hyper_parallel.errors import Contradiction, RecipeUnreadable, UnknownModel, reported_by
from hyper_parallel.hub import (
    HubName,
    Part,
    cached_snapshot,
    download_command,
    downloads_allowed,
    fetch,
    fetch_dataset,
    is_name,
    parse_dataset,
    parse_name,
)
from hyper_parallel.model import find_preset
from hyper_parallel.near_paths import export_hint, nearest_path
from hyper_parallel.trainer.checkpoints.manifest import steps
from hyper_parallel.trainer.data.source_errors import SourceKey
from hyper_parallel.trainer.data.sources import refuse_missing


def with_hub_models(loaded: LoadedRecipe, *, weights: bool = True) -> LoadedRecipe:
    """Download the hub repositories of a recipe; return the recipe with local folders in place of hub ids.

    Folders replace hub ids in `model.path`, `data.tokenizer` and `grpo.reward_funcs`. Data sets are downloaded too,
    unless `data.streaming` reads them during training. A resumed run uses the commits recorded in its config.yaml,
    unless the recipe names a revision. Without `weights`, or for a model with random weights, only config and tokenizer
    of `model.path` are downloaded.

    Raises:
        UnknownModel: HP304 when files cannot be downloaded, or the path of the model does not exist.
        NoData: HP602 when a data set cannot be downloaded, or a path of data does not exist.
        Contradiction: HP104 for a hub id with `model.trust_remote_code`, because code is not downloaded.
    """
    recipe = loaded.recipe
    model, data, grpo = recipe.model, recipe.data, recipe.grpo
    recorded = _recorded(recipe)
    part: Part = "model" if weights and model.init != "random" else "tokenizer"
    path = _folder(loaded, model.path, part, "model.path", recorded)
    _fetch_data(loaded)
    if path != model.path and model.trust_remote_code:
        name = parse_name(model.path)
        assert name is not None
        raise Contradiction(
            "model.path is a hub id with trust_remote_code=true, but Python code is not downloaded automatically",
            where=loaded.where("model.trust_remote_code"),
            got=f"trust_remote_code=true, model.path={model.path}",
            hint=f"{download_command(name, local=True)}, then model.path={name.folder}",
        )
    tokenizer = data.tokenizer
    if tokenizer is not None:
        tokenizer = _folder(loaded, tokenizer, "tokenizer", "data.tokenizer", recorded)
    rewards = tuple(
        _folder(loaded, reward, "model", "grpo.reward_funcs", recorded) if "/" in reward else reward
        for reward in grpo.reward_funcs
    )
    if (path, tokenizer, rewards) == (model.path, data.tokenizer, grpo.reward_funcs):
        return loaded
    update = {
        "model": model.model_copy(update={"path": path}),
        "data": data.model_copy(update={"tokenizer": tokenizer}),
        "grpo": grpo.model_copy(update={"reward_funcs": rewards}),
    }
    return replace(loaded, recipe=recipe.model_copy(update=update))


def _fetch_data(loaded: LoadedRecipe) -> None:
    """Download the data sets of a recipe and check that data paths exist; do nothing with `data.streaming`."""
    data = loaded.recipe.data
    if data.streaming:
        return
    named = [("data.source", str(part.source), part.name, part.split) for part, _ in data.parts()]
    if data.validation is not None:
        named.append(("data.validation", data.validation, data.name, data.validation_split))
    one_of_several = not isinstance(data.source, str)
    for number, (key, source, config, split) in enumerate(named):
        repository = parse_dataset(source)
        if repository is not None:
            with reported_by(SourceKey(f"{key}[{number}]" if one_of_several and key == "data.source" else key)):
                fetch_dataset(repository, config, split, loaded.where(key))
            continue
        one = data.model_copy(update={"source": source, "name": config, "split": split})
        key = "" if one_of_several and key == "data.source" else key
        refuse_missing(one, loaded.recipe.stage, key, [loaded.path.parent])


def _folder(loaded: LoadedRecipe, text: str, part: Part, key: str, recorded: dict[str, HubName]) -> str:
    """Download the files `part` of a hub id and return their folder; return `text` if no download is needed.

    Raise UnknownModel (HP304) if `model.path` is a missing path. `recorded` is the result of `_recorded`.
    """
    name = parse_name(text)
    if name is None:
        if key != "model.path" or not _is_missing(text):
            return text
        near = nearest_path(text, [loaded.path.parent])
        raise UnknownModel(
            "the model directory does not exist",
            where=loaded.where(key),
            got=text,
            allowed="a Hugging Face directory, a config.json, a preset, or a name on the hub as org/name",
            hint=_path_hint(text, key, near),
        )
    if name.revision is None:
        name = recorded.get(name.repository, name)
    if key == "model.path" and find_preset(text) is not None:
        # With random weights, the preset's config suffices.
        absent = not downloads_allowed() and cached_snapshot(name, part) is None
        if part == "tokenizer" or absent:
            return text
    if part == "tokenizer" and key == "model.path" and not downloads_allowed():
        # Without a tokenizer of the model, training data is used to train a tokenizer.
        part = part if cached_snapshot(name, part) is not None else "config"
    return str(fetch(name, part, where=loaded.where(key), key=key))


def _path_hint(text: str, key: str, near: str | None) -> str | dict[str, str]:
    if (hint := export_hint(text)) is not None:
        return hint
    if near is not None:
        return {key: near}
    return f"hf download {text} --local-dir {text}" if is_name(text) else "check the path"


def _is_missing(text: str) -> bool:
    """Return whether `text` looks like a path (contains a slash), but is neither an existing path nor a preset."""
    # os.path, because pathlib raises for text that cannot be a path.
    path = os.path.expanduser(text)  # noqa: PTH111
    return "/" in text and not os.path.lexists(path) and find_preset(text) is None


def _recorded(recipe: Recipe) -> dict[str, HubName]:
    """Return a dict from repository to the hub id with the commit that config.yaml of the resumed run records."""
    place = Path(recipe.checkpoint.from_dir or recipe.output_dir)
    if recipe.checkpoint.resume == "never" or not steps(place / "checkpoints"):
        return {}
    try:
        values = read_mapping(place / "config.yaml", RecipeUnreadable, "recipe of the run")
    except (RecipeUnreadable, yaml.YAMLError):
        return {}
    model, data, grpo = (values.get(key) or {} for key in ("model", "data", "grpo"))
    texts = [model.get("path"), data.get("tokenizer"), *(grpo.get("reward_funcs") or ())]
    names = [parse_name(text) for text in texts if isinstance(text, str)]
    return {name.repository: name for name in names if name is not None and name.is_pinned}

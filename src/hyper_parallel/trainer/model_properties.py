"""Properties of a model (causal, packed documents independent, ...), measured on a small copy in a child process.

The measurements are cached by config, attention implementation, model code and package versions.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch import measure_properties as measuring
from hyper_parallel.backends.torch.driver import driver_untouched
from hyper_parallel.config import LoadedRecipe, Recipe
from hyper_parallel.errors import Contradiction, ForkUnsafe, HyperParallelError, RankFailed
from hyper_parallel.ir import Plan
from hyper_parallel.model import ConfigFile, ModelProperties, read_config
from hyper_parallel.runtime import launch
from hyper_parallel.trainer.engine.auto_model import model_from_config
from hyper_parallel.trainer.engine.measured_cache import cache_file, cached
from hyper_parallel.trainer.small_configs import MAX_POSITIONS, small_configs

logger = logging.getLogger(__name__)

_MAX_LAYERS: Final = 40
_TIMEOUT_S: Final = 60.0
_NOTHING: Final = "nothing"
"""Value of `measured_on` if no copy of the model was measured."""


def properties_of(
    file: ConfigFile, attention: str | None = None, *, trusted: bool = False, scores: bool = False
) -> ModelProperties:
    """Return the properties of a config's model, measured on a small copy or read from the cache.

    If no small copy of the model runs, or the measurement crashes, all properties are marked as unmeasured, with the
    reason. All attention implementations except `eager` are measured with the default of transformers. With `scores`,
    the model is measured as a classifier that scores every token. `trusted` permits model code of the config's folder.

    Raises:
        ModelUnreadable: HP305 when transformers cannot build the model.
    """
    attention = "eager" if attention == "eager" else None
    path = cache_file("properties", file, (measuring,), attention, scores)

    def measure(_: int = 0) -> ModelProperties:
        return measure_config(file, attention, trusted=trusted, scores=scores)

    def measure_in_child() -> ModelProperties:
        try:  # model code may crash, hang or print
            return launch(measure, 1, timeout_s=_TIMEOUT_S)[0]
        except ForkUnsafe:  # a rank that has joined a process group
            return measure()

    try:
        return cached(path, ModelProperties, measure_in_child)
    except RankFailed as error:  # not cached, because the cause may be a busy machine
        logger.warning("the properties of the model could not be measured: %s", error.what)
        return _unmeasured(str(file.values.get("model_type")), error.what)


def recipe_properties(recipe: Recipe) -> ModelProperties:
    """Return the measured properties of a recipe's model; see `properties_of`."""
    return properties_of(
        read_config(recipe.model.path),
        recipe.model.attn_implementation,
        trusted=recipe.model.trust_remote_code,
        scores=recipe.stage == "rm",
    )


def check_properties(loaded: LoadedRecipe, plan: Plan) -> ModelProperties:
    """Return the measured properties of a recipe's model, after checking that the recipe trains it correctly.

    Raises:
        Contradiction: HP104 when packed documents may attend to each other, when a token attends to its own label,
            when layers may differ on half-batches of `overlap`, or when flash attention would not mask documents.
        ModelUnreadable: HP305 when transformers cannot build the model.
    """
    recipe = loaded.recipe
    trusted, scores = recipe.model.trust_remote_code, recipe.stage == "rm"
    file = read_config(recipe.model.path)
    properties = recipe_properties(recipe)
    if properties.causal.holds is False and not scores:
        setting = _causal_setting(file, trusted)
        raise Contradiction(
            "the model is not causal: a token attends to later tokens, and so to its own label",
            where=loaded.where("model.path"),
            got=f"{properties.model_class}, stage={recipe.stage}",
            allowed="a causal language model",
            hint=None if setting is None else f"set {setting} in {file.where}",
        )
    if recipe.data.masks(recipe.stage) and not properties.documents_independent.holds:
        measured = properties.documents_independent
        may = "" if measured.holds is False else "may "
        raise Contradiction(
            f"documents that are packed into the same sequence {may}attend to each other in this model",
            where=loaded.where("data.mask_documents"),
            got=f"{properties.model_class}, data.packing=true, independent: {measured}",
            allowed="data.packing=false, or data.mask_documents=false to accept attention across documents",
            changes={"data.packing": False, "data.mask_documents": None},
        )
    if plan.strategy.overlap.half_batch and not properties.half_batches.holds:
        may = "" if properties.half_batches.holds is False else "may "
        raise Contradiction(
            f"layers of this model {may}compute different results on half-batches",
            where=loaded.where("overlap"),
            got=f"{properties.model_class}, equal: {properties.half_batches}",
            hint="overlap=none",
        )
    attention, rows = recipe.model.attn_implementation, plan.workload.microbatch or 1
    flash = attention is not None and "flash" in attention and plan.strategy.cp == 1
    if recipe.data.masks(recipe.stage) and flash and rows > 1:
        # transformers 5.24, modeling_flash_attention_utils.py: positions are used only if the batch size is 1.
        from hyper_parallel.trainer.loop.preference_rows import with_microbatch

        sequences = (plan.workload.tokens_per_step or 0) // plan.workload.seq_len
        raise Contradiction(
            "flash attention masks packed documents only in microbatches of a single sequence",
            where=loaded.where("model.attn_implementation"),
            got=f"model.attn_implementation={attention}, {rows} sequences in a microbatch",
            allowed="training.microbatch=1, model.attn_implementation=sdpa, data.packing=false",
            changes=with_microbatch(recipe, 1, sequences),
        )
    return properties


_CAUSAL_SETTINGS: Final = (
    ("is_decoder", True),
    ("causal", True),
    ("is_causal", True),
    ("use_bidirectional_attention", False),
)
"""Config keys, with the values that make a model causal."""


def _causal_setting(file: ConfigFile, trusted: bool) -> str | None:
    """Return a config entry that makes the model causal, such as `"is_decoder": true`; None if no entry does."""
    for key, value in _CAUSAL_SETTINGS:
        if file.values.get(key) in (None, value) and key != "is_decoder":
            continue
        changed = replace(file, values={**file.values, key: value})
        with suppress(HyperParallelError):
            if properties_of(changed, trusted=trusted).causal.holds:
                return f'"{key}": {json.dumps(value)}'
    return None


def _unmeasured(model_class: str, why: str) -> ModelProperties:
    empty = ModelProperties(model_class, measured_on=_NOTHING)
    return replace(empty, **{n: replace(p, reason=why) for n, p in empty.by_name().items()})


@driver_untouched()
def measure_config(
    file: ConfigFile, attention: str | None = None, *, trusted: bool = False, scores: bool = False
) -> ModelProperties:
    """Measure the properties of a small copy of the model, in this process; see `properties_of`.

    The copy is the first of `small_configs` that is small enough and runs.

    Raises:
        ModelUnreadable: HP305 when transformers cannot build the full model.
    """
    from transformers import AutoConfig

    warnings.simplefilter("ignore")
    choices: dict[str, Any] = {"attention": attention, "trusted": trusted, "scores": scores}
    full: Any = model_from_config(file, torch.float32, **choices)
    # The config may omit sizes, for which its class has defaults.
    config = full.config
    if config.model_type != file.values.get("model_type"):
        # `full` is the text part of a larger model.
        config = AutoConfig.for_model(**file.values)
    complete = json.loads(config.to_json_string(use_diff=False))
    reason = "no small copy of the model was found"
    for reduction, max_parameters, values in small_configs({**complete, **file.values}):
        try:
            small = replace(file, values=_without_defaults(values, complete, file.values))
            meta = model_from_config(small, torch.float64, **choices)
            size, layers = sum(p.numel() for p in meta.parameters()), _num_layers(meta)
            if size > max_parameters or layers > _MAX_LAYERS:
                continue
            model = _random_model(small, choices)
            measuring.prepare_model(model)
            ids = torch.arange(3, 3 + measuring.SHORTEST)[None]
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)
        except (HyperParallelError, Exception) as error:  # model code may raise any exception
            line = (str(error).strip().splitlines() or [""])[0][:160]
            reason = error.got if isinstance(error, HyperParallelError) else line
            continue
        measured = measuring.measure_properties(model, MAX_POSITIONS)
        note = f"{reduction}, {size:,} parameters, {layers} layers, transformers {version('transformers')}"
        return replace(measured, measured_on=note)
    return _unmeasured(type(full).__name__, str(reason))


def _without_defaults(
    small: Mapping[str, Any], complete: Mapping[str, Any], original: Mapping[str, Any]
) -> dict[str, Any]:
    """Return `small` without the values that are class defaults and not set in `original`; keep `model_type`.

    `complete` is the config with all class defaults. Defaults are removed because some do not survive a JSON round
    trip. Nested configs (keys ending in `_config`) are filtered recursively. Other mappings, such as rotary embedding
    parameters, are kept.
    """
    result: dict[str, Any] = {}
    for key, value in small.items():
        default, own = complete.get(key), original.get(key)
        if key.endswith("_config") and isinstance(value, Mapping) and isinstance(default, Mapping):
            inner = _without_defaults(value, default, own if isinstance(own, Mapping) else {})
            if inner or key in original:
                result[key] = inner
        elif key in original or value != default or key == "model_type":
            result[key] = value
    return result


def _num_layers(model: nn.Module) -> int:
    config: Any = model.config
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    return depth if isinstance(depth, int) else 0


def _random_model(file: ConfigFile, choices: Mapping[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_from_config(file, torch.float64, device="cpu", **choices)
    for parameter in model.parameters():  # some model types create float32 parameters
        parameter.data = parameter.data.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products do not support float64
    return model

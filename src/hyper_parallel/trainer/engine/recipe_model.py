"""Construction of a recipe's Hugging Face model on the meta device, and checks of the model against plan and data."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import json
import logging
import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from hyper_parallel.backends.torch import (
    Routing,
    flow_tracer,
    kept_activations,
    read_model,
    resolve_layouts,
    unsplit_axes,
)
from hyper_parallel.backends.torch.dropout import disable_dropout, original_config
from hyper_parallel.backends.torch.partial_use import refuse_other_inputs
from hyper_parallel.backends.torch.peft_adapters import add_adapters, import_peft
from hyper_parallel.backends.torch.token_scores import SCORE, scores_tokens
from hyper_parallel.backends.torch.weights.initialization import base_parameters
from hyper_parallel.backends.torch.weights.lora import adapted_modules
from hyper_parallel.backends.torch.weights.pretrained import CARRIED_FILE, carried_weights
from hyper_parallel.config import LoadedRecipe, Recipe
from hyper_parallel.errors import (
    BadValue,
    Contradiction,
    DoesNotFit,
    ModelUnreadable,
    PlanMismatch,
    WeightsUnreadable,
)
from hyper_parallel.ir import Plan, Schedule, Strategy
from hyper_parallel.model import (
    FAMILIES_READ,
    GENERATION,
    UNMEASURED_ACTIVATIONS,
    KeptActivations,
    ModelSpec,
    is_read,
    load_model,
    read_config,
    read_generation_config,
)
from hyper_parallel.shard import completed_changes
from hyper_parallel.topology import topology_hint
from hyper_parallel.trainer.data import has_tokenizer, load_tokenizer, media_inputs, media_rows
from hyper_parallel.trainer.engine.auto_model import model_from_config
from hyper_parallel.trainer.engine.measured_cache import cache_file, cached
from hyper_parallel.units import format_bytes

logger = logging.getLogger(__name__)

_is_position_table: Final = re.compile(r"\bwpe\b|pos").search
_FAR_TOO_LARGE: Final = 16
"""Multiple of a rank's memory above which a plan is rejected even with offload."""

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
"""Glob patterns of readable weight files."""
_WEIGHT_HINTS = ("*.index.json", "*.gguf", "consolidated*.pth")
"""Glob patterns of files which indicate that a model was published with weights."""


def build_model(recipe: Recipe) -> nn.Module:
    """Build the recipe's model on the meta device, in training mode.

    `lora` adds adapters, `training.freeze` freezes parameters, and `training.disable_dropout` disables dropout.

    Raises:
        ModelUnreadable: HP305 when transformers cannot build the model from its config.
        HyperParallelError: Errors of `add_adapters` and `freeze`.
    """
    model = model_from_config(
        read_config(recipe.model.path),
        # 16-bit computation uses float32 parameters.
        torch.float64 if recipe.training.dtype == "float64" else torch.float32,
        recipe.model.attn_implementation,
        trusted=recipe.model.trust_remote_code,
        scores=recipe.stage == "rm",
    ).train()
    if recipe.lora is not None:
        add_adapters(model, lora_config(recipe))
    if recipe.disables_dropout:
        disable_dropout(model)
    freeze(model, recipe.training.freeze)
    return model


_KEPT: Any = KeptActivations | None
"""Type of the cached measurement; None: the model's forward cannot be measured."""
_NOT_MEASURED: Final = "the activations that the model keeps could not be measured: formulas estimate them"


def read_recipe_spec(loaded: LoadedRecipe) -> ModelSpec:
    """Return the `ModelSpec` of a recipe's model; see `read_spec` for the errors."""
    recipe = loaded.recipe
    return read_spec(
        recipe.model.path,
        loaded.where("model.path"),
        trusted=recipe.model.trust_remote_code,
        tried=recipe.parallel.auto,
        scores=recipe.stage == "rm",
    )


def refuse_submodels(loaded: LoadedRecipe, problem: str, *words: str) -> None:
    """Raise Contradiction (HP104) with the sentence `problem` if the recipe sets `parallel.submodels`.

    `words` are the options that do not support sub-models.
    """
    if loaded.recipe.parallel.submodels is not None:
        raise Contradiction(
            problem,
            where=loaded.where("parallel.submodels"),
            got=", ".join(("parallel.submodels", *words)),
            changes={"parallel.submodels": None},
        )


def read_spec(
    path: str,
    where: str | None = None,
    *,
    trusted: bool = False,
    tried: bool = False,
    scores: bool = False,
) -> ModelSpec:
    """Return the `ModelSpec` of a model.

    The spec comes from the config if this package knows the model family, else from the transformers model. The sizes
    of activations saved for backward are measured on the transformers model, or estimated if this fails. A config
    without `model_type` is read by `load_model` only.

    Args:
        path: Model directory, config file, preset or hub id; see `load_model`.
        where: Origin of `path`, for errors.
        trusted: `model.trust_remote_code` of the recipe.
        tried: Whether to also set `ModelSpec.unsplit` for a spec from the transformers model: the axes, pp or cp, that
            the forward does not support according to a test.
        scores: Whether to read the model as a sequence classifier with one label.

    Raises:
        ModelUnreadable: HP305 when transformers cannot build a language model from the config.
        HyperParallelError: Errors of `load_model`.
    """
    file = read_config(path, where=where)
    # The config readers cover only the language part of a multimodal model, but training uses the full model.
    known = is_read(file.values) and "text_config" not in file.values
    if not scores and "model_type" not in file.values:
        return load_model(path, where=where)
    entry = cache_file("kept_activations", file, (kept_activations, flow_tracer), scores)
    build = partial(model_from_config, file, torch.float32, trusted=trusted, scores=scores)
    if known and not scores:
        spec, measured = load_model(path, where=where), None
        with suppress(ModelUnreadable):
            measured = cached(entry, _KEPT, lambda: kept_activations.measure_kept(build()))
        return _with_kept(spec, measured)
    model = build()
    measured = cached(entry, _KEPT, lambda: kept_activations.measure_kept(model))
    spec = _with_kept(read_model(model, file.name), measured)
    return replace(spec, unsplit=unsplit_axes(model)) if tried else spec


def _with_kept(spec: ModelSpec, measured: KeptActivations | None) -> ModelSpec:
    formulas = UNMEASURED_ACTIVATIONS.format(family=spec.family)
    notes = tuple(note for note in spec.notes if note != formulas)
    if measured is None:
        notes = (*notes, _NOT_MEASURED)
    return replace(spec, kept=measured, notes=notes)


def check_parameters(model: nn.Module, plan: Plan, where: str, remedy: str | None = None) -> None:
    """Check that the model's parameters match the plan's `ModelSpec` and can be sharded by the plan's layouts.

    `remedy` is the hint for a model that is much too large; None: the hint for a recipe.

    Raises:
        ModelUnreadable: HP305 naming the model family and the first differing parameter.
        NotDivisible: HP203 for a dimension that a layout does not divide.
        RuleError: HP204 for invalid sharding rules.
        UnsupportedSharding: HP205 for an unsupported layout.
        DoesNotFit: HP401 for a plan on this machine that needs more than 16 times the device memory of a rank.
    """
    most = _FAR_TOO_LARGE * plan.memory_capacity_bytes
    if plan.topology == "local" and 0 < most < plan.memory_bytes:
        raise DoesNotFit(
            f"the plan needs more than {_FAR_TOO_LARGE} times the device memory of a rank",
            where=where,
            got=f"{format_bytes(plan.memory_bytes)} on a rank, {plan.model.num_params:,} parameters",
            allowed=f"up to {format_bytes(most)}",
            hint=remedy or f"a smaller model, or {topology_hint()}",
        )
    try:
        resolve_layouts(model, plan)
    except PlanMismatch as error:
        family = plan.model.family
        known = family in FAMILIES_READ
        raise ModelUnreadable(
            f"this model of the family `{family}` cannot be sharded: {error.what}",
            where=where,
            got=f"{type(model).__name__}, {error.got}, {error.allowed}",
            allowed=None if known else FAMILIES_READ,
            hint=None if known else "use a model of a supported family",
        ) from error


def check_positions(model: nn.Module, recipe: Recipe, plan: Plan, where: str) -> None:
    """Check that the model has enough positions for `data.seq_len`; with rotary embeddings, only log a warning.

    Raises:
        BadValue: HP102 for sequences longer than a learned table of position embeddings.
    """
    most, seq_len = getattr(model.config, "max_position_embeddings", None), recipe.data.seq_len
    if not isinstance(most, int) or seq_len <= most:
        return
    parts = [*model.named_parameters(), *model.named_buffers()]
    # Some tables have up to two additional rows.
    tables = [n for n, t in parts if t.dim() == 2 and t.shape[0] - most in range(3) and _is_position_table(n)]
    if tables:
        raise BadValue(
            f"sequences of {seq_len} tokens exceed the model's table of position embeddings",
            where=where,
            got=f"data.seq_len={seq_len}, {tables[0]} has {most} positions",
            allowed=f"at most {most}",
            changes={"data.seq_len": most} | _shorter_step(recipe, plan, most),
        )
    logger.warning(
        "data.seq_len=%d exceeds the model's max_position_embeddings=%d: pretraining used shorter sequences",
        seq_len,
        most,
    )


def _shorter_step(recipe: Recipe, plan: Plan, seq_len: int) -> dict[str, int]:
    """Return the change of `training.tokens_per_step` that sequences of `seq_len` tokens need; {} if none."""
    training = recipe.training
    if training.tokens_per_step is None:
        return {}
    unit = seq_len * plan.strategy.dp * (training.microbatch or 1)
    if training.accumulation_steps is None and training.tokens_per_step % unit == 0:
        return {}
    return {"training.tokens_per_step": training.tokens_per_step // recipe.data.seq_len * seq_len}


def routing_of(recipe: Recipe) -> Routing:
    """Convert section `moe` of the recipe to the `Routing` that `parallelize` takes."""
    choice = recipe.moe
    return Routing(choice.aux_loss_coef, choice.bias_update_rate, choice.capacity_factor)


def torch_hint(recipe: Recipe) -> str:
    """Return overrides that select the back end torch, which has no `training.compile=graph-kernel`."""
    return "backend=torch" + (" training.compile=true" if recipe.training.compile == "graph-kernel" else "")


def submodel_layouts(recipe: Recipe, plan: Plan) -> dict[str, Strategy]:
    """Return the strategy of each sub-model by name: `language` first, then the encoders of `parallel.submodels`.

    The strategy of `plan` is that of the language model.
    """
    assert recipe.parallel.submodels is not None
    towers = {
        name: Strategy(**degrees.model_dump(exclude={"ranks"}), recompute=plan.strategy.recompute)
        for name, degrees in recipe.parallel.submodels.towers.items()
    }
    return {"language": plan.strategy, **towers}


def joint_schedule(plan: Plan) -> Schedule | None:
    """Return the plan's joint schedule of the actions of encoder and pipeline stages; None if the plan has none."""
    if plan.submodels is None or not plan.submodels.schedule:
        return None
    return Schedule.from_csv(plan.submodels.schedule, name="plan")


def weights_directory(recipe: Recipe, where: str | None = None) -> Path | None:
    """Return the directory of the pretrained weights; None for random weights.

    With `model.init: auto`, a preset or a config file gets random weights. A hub id, or a directory with a tokenizer,
    an index of weight files or weights in another format, means a pretrained model, whose weight files must exist.

    Raises:
        WeightsUnreadable: HP703 when weight files are missing for a pretrained model or `model.init: pretrained`.
    """
    path, init = recipe.model.path, recipe.model.init
    directory = read_config(path).directory
    if init == "random":
        return None
    if directory is not None and any(f for glob in _WEIGHTS for f in directory.glob(glob)):
        return directory
    if directory is None:
        is_hub_id = "/" in path and not Path(path).expanduser().exists()
        published = f"`{path}` is a hub id, so the model is pretrained" if is_hub_id else None
    else:
        indications = [f.name for glob in _WEIGHT_HINTS for f in sorted(directory.glob(glob))]
        indications += ["a tokenizer"] * has_tokenizer(directory)
        published = (
            f"the model directory contains {indications[0]}, so the model is pretrained" if indications else None
        )
    if init == "auto" and published is None:
        return None
    reason = "the recipe requires pretrained weights" if init == "pretrained" else published
    remedies = ["model.init=random"] if recipe.lora is None else []
    if directory is not None:
        remedies.append("restore the weight files")
    elif published:
        remedies.append(f"download the weights: HF_HUB_OFFLINE=0 hf download {shlex.quote(path)}")
    raise WeightsUnreadable(
        f"{reason}, but no readable weight files were found",
        where=where or f"model.path={path}",
        got=path,
        allowed="a directory with model.safetensors or pytorch_model.bin, in one file or as shards with an index",
        hint=", or ".join(remedies) or "set `model.path` to a directory with weights",
    )


def set_token_ids(model: nn.Module, tokenizer_dir: str | Path, *, pretrained: bool) -> None:
    """Copy the ids of special tokens from the tokenizer into the configs of a model.

    A model that is not `pretrained` gets `bos_token_id` and `eos_token_id`. A classifier gets `pad_token_id`, because
    transformers takes its score from the last token that is not padding. Without a pad token, this is the EOS token.
    """
    scores = scores_tokens(model)
    if pretrained and not scores:
        return
    tokenizer = load_tokenizer(tokenizer_dir)
    if not pretrained:
        for config in filter(None, (model.config, getattr(model, "generation_config", None))):
            config.bos_token_id = tokenizer.bos_token_id
            config.eos_token_id = tokenizer.eos_token_id
    if scores:
        pad = tokenizer.pad_token_id
        for config in (model.config, model.config.get_text_config()):
            config.pad_token_id = tokenizer.eos_token_id if pad is None else pad


def model_files(model: nn.Module, tokenizer_dir: str | Path, weights: Path | None) -> dict[str, str]:
    """Return the config files of a run's model, as a dict from file name to text.

    These are `config.json`, the generation config, and a list of the tensors in the weight files that the model does
    not use; the last two may be absent. Exports copy these tensors. Architectures, and possibly special tokens, in the
    config of `model` are changed. `weights` is the directory of the pretrained weights; None: random weights.
    """
    set_token_ids(model, tokenizer_dir, pretrained=weights is not None)
    model.config.architectures = [type(model).__name__]
    files = {"config.json": original_config(model).to_json_string()}
    carried = carried_weights(model)
    if carried is not None and carried.names:
        files[CARRIED_FILE] = carried.to_json()
    if weights is not None and read_generation_config(weights) is not None:
        files[GENERATION] = (weights / GENERATION).read_text(encoding="utf-8")
    elif (generation := getattr(model, "generation_config", None)) is not None:
        files[GENERATION] = generation.to_json_string()
    return files


def compile_layers(model: nn.Module) -> None:
    """Compile each module whose class is in `_no_split_modules`, such as a decoder layer, in place."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            module.compile()


def lora_config(recipe: Recipe) -> Any:
    """Return the recipe's `lora` section as a `peft.LoraConfig`."""
    assert recipe.lora is not None
    values, path = recipe.lora.model_dump(mode="json"), Path(recipe.model.path).expanduser()
    scores = recipe.stage == "rm"
    whole = [*values["modules_to_save"], *([SCORE] if scores else [])]
    return import_peft().LoraConfig(
        **values | {"modules_to_save": whole or None},
        base_model_name_or_path=str(path.resolve()) if path.exists() else recipe.model.path,
        task_type="SEQ_CLS" if scores else "CAUSAL_LM",
    )


def trained_of(model: nn.Module) -> tuple[float, str]:
    """Return the number of trained elements divided by the elements of the model without adapters, and a description.

    The result is (1.0, "") if all parameters are trained and the model has no adapters.
    """
    sizes = {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    base = sum(p.numel() for _, p in base_parameters(model))
    adapters, elements = sum(1 for _ in adapted_modules(model)), sum(sizes.values())
    if elements == base and not adapters:
        return 1.0, ""
    text = f"{elements:,} of {base:,} parameters ({elements / base:.3%})"
    return elements / base, f"{adapters} adapters, {text}" if adapters else text


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match any of the glob patterns.

    Raises:
        BadValue: HP102 for a pattern that matches no parameter, and when no parameter is left to train.
    """
    where = "training.freeze"
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        matches = fnmatch.filter(names, pattern)
        if not matches:
            near = difflib.get_close_matches(pattern, names, n=1, cutoff=0.0)
            rest = [other for other in patterns if other != pattern]
            raise BadValue(
                f"`training.freeze` pattern `{pattern}` matches no parameter name",
                where=where,
                got=pattern,
                allowed="globs such as model.embed_tokens.* over the names of parameters",
                hint=f"'training.freeze={json.dumps([near[0], *rest])}'",
            )
        for name in matches:
            model.get_parameter(name).requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise BadValue(
            "`training.freeze` freezes all parameters, so nothing is left to train",
            where=where,
            got=list(patterns),
            hint="training.freeze=[]",
        )


def check_media_inputs(model: nn.Module, plan: Plan, sequences: Any, recipe: Recipe) -> None:
    """Check that model, layout and back end support the images or audio of the training sequences.

    Raises:
        UnsupportedSharding: HP205 for cp, and for pp if the forward cannot run without the media.
        Contradiction: HP104 for offload and for back ends other than torch, which need fixed shapes.
        ModelUnreadable: HP305 when the model's forward has no arguments for the media.
    """
    rows = media_rows(sequences)[:1]
    arrays = media_inputs(sequences, rows) if len(rows) else {}
    arrays.pop("input_ids", None)
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    axes = [axis for axis in ("pp", "cp") if getattr(plan.strategy, axis) > 1]
    with completed_changes(plan.strategy):
        refuse_other_inputs(model, axes, tensors)
    hints = {
        "offload": (recipe.offload.on, "offload=null"),
        "backend": (recipe.backend != "torch", torch_hint(recipe)),
    }
    for key, (applies, hint) in hints.items():
        if applies:
            raise Contradiction(
                f"{key if key == 'offload' else f'the back end {recipe.backend}'} needs fixed shapes, but images and "
                "audio recordings differ in size",
                where=key,
                got=sorted(tensors),
                hint=hint,
            )
    known = inspect.signature(model.forward).parameters
    unread = [n for n, t in tensors.items() if t.is_floating_point() and n not in known]
    if unread:
        raise ModelUnreadable(
            f"the forward of {type(model).__name__} has no argument `{unread[0]}`, so the media would have no effect",
            where="model.path",
            got=sorted(tensors),
            allowed="a model whose forward takes these inputs",
        )

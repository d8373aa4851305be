"""Sweep: multimodal models train on media on one and two ranks, compared with plain transformers."""

from __future__ import annotations

import copy
from itertools import count
from pathlib import Path
from typing import Any

from sweeps.interface import one_line, refusal_or_failure

TITLE = "Training on images and audio"
TEXT = """
All types that transformers maps to models of images, audio and text (`AutoModelForMultimodalLM`), shrunk, in float64.
Two sequences, each with its own random image or recording, are made by the type's own processor in the sizes of the
config, or from the config and the arguments of the forward; their layout is found by trial.
Loss and all gradients of one step of `forward_backward` equal
those of plain transformers to 1e-10 (of the largest gradient). Column `plain`: plain transformers trains the type,
that is, a step gives finite gradients and other media give another loss; else the first reason for which it does not.
Column `one rank` and the columns of layouts on two ranks cover every kind of media that plain transformers trains.
"""
COLUMNS = ("plain", "one rank", "dp_shard 2", "tp 2", "pp 2")
SECONDS = 300
NEEDS = ("torchvision", "timm")
"""Packages without which transformers lacks some processors and encoders, so that their types would be skipped."""
LAUNCHES = ({"dp_shard 2": "dp_shard=2", "tp 2": "tp=2"}, {"pp 2": "pp=2"})
"""Layouts on two ranks by column, one mapping per launch. Pipeline stages have a separate launch, because one stage may
refuse a pass for which the other waits."""
LIMIT = 1e-10
MOST_PARAMETERS = 24_000_000


def model_types() -> list[str]:
    """Return the multimodal types; child processes inherit the modules imported here."""
    import transformers  # noqa: F401
    from transformers.models.auto import modeling_auto as auto

    import hyper_parallel.backends.torch.pipeline.apply
    import hyper_parallel.runtime
    import hyper_parallel.trainer.engine.auto_model  # noqa: F401

    names = {*auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted(names | {*auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    from media_forms import kinds, media_batches

    from hyper_parallel.backends.torch.forward_variants import keep_float64

    try:
        model = _plain_model(model_type)
        plain = copy.deepcopy(model)
        keep_float64(plain)
        found = {kind: media_batches(plain, kind) for kind in kinds(plain)}
    except Exception as error:
        return {"plain": f"skipped: {one_line(error)}"}
    batches = {kind: batches for kind, (batches, _) in found.items() if batches}
    reasons = [f"{kind}: {why}" for kind, (batches, why) in found.items() if not batches]
    if not batches:
        return {"plain": "skipped: " + "; ".join(reasons)}
    note = "; ".join([" and ".join(batches), *(f"no {reason}" for reason in reasons)])
    cells = {"plain": f"ok: {note}" if reasons or len(batches) > 1 else "ok"}
    try:
        _check_class(model, model_type)
        steps = list(batches.values())
        wanted = [_plain_step(plain, part) for part in steps]
    except Exception as error:
        return cells | dict.fromkeys(COLUMNS[1:], refusal_or_failure(error))
    cells["one rank"] = _one_rank(model, steps, wanted)
    for layouts in LAUNCHES:
        cells |= _two_ranks(model, steps, wanted, layouts)
    return cells


def _plain_model(model_type: str) -> Any:
    """Return the shrunk model of a type, in float64 and train mode, with random weights."""
    import torch
    from census_models import shrunk, tiny
    from media_forms import kinds, name_placeholders
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForMultimodalLM

    from hyper_parallel.trainer.engine.auto_model import complete_outputs

    values = tiny(model_type)
    for key, part in type(AutoConfig.for_model(**values)).sub_configs.items():
        cls = getattr(part, "config_class", part)
        if values.get(key) is None and cls is not AutoConfig:  # a tower that the type may lack
            values[key] = shrunk(cls, {}, count(310)).to_dict()
    config = AutoConfig.for_model(**values)
    name_placeholders(config)
    fits = type(config) in AutoModelForMultimodalLM._model_mapping
    auto = AutoModelForMultimodalLM if fits else AutoModelForImageTextToText
    with torch.device("meta"):
        structure = auto.from_config(config)
    if not kinds(structure):
        raise ValueError("its forward reads no media")
    size = sum(p.numel() for p in structure.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"not shrunk: {size} parameters")
    torch.manual_seed(3)
    model = auto.from_config(config, dtype=torch.float64).train()
    for parameter in model.parameters():
        # Some types keep parameters in float32, and some begin with projections of 0.
        parameter.data = parameter.data.double() + 0.02 * torch.randn_like(parameter).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    complete_outputs(model)
    return model


def _check_class(model: Any, model_type: str) -> None:
    """Raise an error if a recipe's run would build another class from this config."""
    from census_models import tiny

    from hyper_parallel.model import ConfigFile
    from hyper_parallel.trainer.engine.auto_model import class_of_config

    values = {**tiny(model_type), "architectures": [type(model).__name__]}
    auto = class_of_config(ConfigFile(values, model_type, model_type))
    built = auto if not hasattr(auto, "_model_mapping") else auto._model_mapping[type(model.config)]
    if built is not type(model):
        raise TypeError(f"a recipe builds {built.__name__} instead of {type(model).__name__}")


def _plain_step(model: Any, batches: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """Return mean cross entropy and gradients over batches with equal numbers of targets, in plain transformers.

    The model's own loss is used if logits and tokens have different positions.
    """
    from torch.nn.functional import cross_entropy

    model.zero_grad()
    total = 0.0
    for batch in batches:
        out, labels = model(**batch, use_cache=False), batch["labels"]
        if out.logits.shape[1] == labels.shape[1]:
            loss = cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        else:
            loss = out.loss
        loss = loss / len(batches)
        loss.backward()
        total += float(loss.detach())
    return total, _gradients(model)


def _shifted(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with shifted targets, as in a recipe's run."""
    from torch.nn.functional import pad

    rest = {name: value for name, value in batch.items() if name != "labels"}
    return {**rest, "shift_labels": pad(batch["labels"][:, 1:], (0, 1), value=-100)}


def _gradients(model: Any) -> dict[str, Any]:
    return {
        n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def _steps(network: Any, steps: list[Any], rank: int, size: int) -> list[tuple[float, Any]]:
    """Return loss and gradients of one step per kind of media on this rank."""
    import hyper_parallel as hp

    results = []
    for batches in steps:
        network.zero_grad()
        loss = hp.forward_backward(network, [_shifted(b) for b in batches[rank::size]])
        results.append((float(loss), _gradients(network)))
    return results


def _one_rank(model: Any, steps: list[Any], wanted: list[Any]) -> str:
    import hyper_parallel as hp

    try:
        alone = hp.parallelize(copy.deepcopy(model), hp.plan_of(model, ""), hp.World.join("cpu"))
        return _compare(_steps(alone, steps, 0, 1), wanted, whole=True)
    except Exception as error:
        return refusal_or_failure(error)


def _two_ranks(model: Any, steps: list[Any], wanted: list[Any], layouts: dict[str, str]) -> dict[str, str]:
    """Return the result texts of layouts on two ranks, from one launch, or from one launch per layout if that fails."""
    import hyper_parallel as hp
    from hyper_parallel.errors import HyperParallelError

    def rank(number: int) -> dict[str, tuple[str, list[set[str]]]]:
        results = {}
        with hp.World.join("cpu") as world:
            for column, strategy in layouts.items():
                network = copy.deepcopy(model)
                try:
                    hp.parallelize(network, hp.plan_of(network, strategy), world)
                    found = _steps(network, steps, *hp.data_share(network))
                except HyperParallelError as error:
                    if len(layouts) == 1:
                        raise
                    results[column] = refusal_or_failure(error), []
                else:
                    names = [{*gradients} for _, gradients in found]
                    results[column] = _compare(found, wanted, whole=column != "pp 2"), names
        return results

    try:
        ranks = hp.launch(rank, 2, timeout_s=60 * len(layouts))
    except Exception as error:
        if len(layouts) == 1:
            return dict.fromkeys(layouts, refusal_or_failure(error))
        cells = [_two_ranks(model, steps, wanted, {c: s}) for c, s in layouts.items()]
        return {column: cell for part in cells for column, cell in part.items()}
    return {column: _joined(*(found[column] for found in ranks), wanted) for column in layouts}


def _joined(first: tuple[str, list[set[str]]], second: tuple[str, list[set[str]]], wanted: list[Any]) -> str:
    """Return the result text of a layout from those of its two ranks, which together must have all gradients."""
    if (cell := first[0] if first[0] != "ok" else second[0]) != "ok":
        return cell
    for names, others, (_, right) in zip(first[1], second[1], wanted, strict=True):
        if lacks := sorted(right.keys() - names - others):
            return f"wrong: no gradient of {lacks[:2]}"
    return "ok"


def _compare(found: list[Any], wanted: list[Any], *, whole: bool) -> str:
    for (loss, gradients), (right_loss, right) in zip(found, wanted, strict=True):
        if abs(loss - right_loss) > LIMIT * abs(right_loss):
            return f"wrong: loss {loss:.8g} for {right_loss:.8g}"
        if whole and (odd := sorted(gradients.keys() ^ right.keys())):
            return f"wrong: gradients of {odd[:2]}"
        largest = max(float(g.abs().max()) for g in right.values())
        for name, gradient in gradients.items():
            # Shared weights that a kind of media does not use have gradients of 0
            expected = right.get(name, 0)
            error = float((gradient - expected).abs().max())
            if not error <= LIMIT * largest:
                return f"wrong: gradient of {name} off by {error:.3g}"
    return "ok"

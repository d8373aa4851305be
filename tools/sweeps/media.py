"""Sweep: models of images, audio and text train on media on one rank and on two, against plain transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from sweeps.interface import one_line, refusal_or_failure

TITLE = "Training on images and audio"
TEXT = """
All types that transformers maps to models of images, audio and text (`AutoModelForMultimodalLM`), shrunk, in float64.
Two sequences, each with its own random image or recording, are made from the config and the arguments of the forward,
without a processor; their layout is found by trial. Loss and all gradients of one step of `forward_backward` equal
those of plain transformers to 1e-10 (of the largest gradient). Column `plain`: plain transformers trains the type,
that is, a step gives finite gradients and other media give another loss; else the first reason for which it does not.
Column `one rank` and the columns of layouts on two ranks cover every kind of media that plain transformers trains.
"""
COLUMNS = ("plain", "one rank", "dp_shard 2", "tp 2", "pp 2")
SECONDS = 300
LAYOUTS = {"dp_shard 2": "dp_shard=2", "tp 2": "tp=2", "pp 2": "pp=2"}
LIMIT = 1e-10
MOST_PARAMETERS = 8_000_000


def model_types() -> list[str]:
    """Return the types of models of images, audio and text; children inherit what is imported here."""
    import transformers  # noqa: F401
    from transformers.models.auto import modeling_auto as auto

    import hyper_parallel.backends.torch.pipeline.apply
    import hyper_parallel.runtime
    import hyper_parallel.trainer.engine.auto_model  # noqa: F401

    names = {*auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    return sorted(names | {*auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES})


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Return the cells of one model type."""
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
        return {"plain": "skipped: " + ("; ".join(reasons) or "its forward reads no media")}
    note = "; ".join([" and ".join(batches), *(f"no {reason}" for reason in reasons)])
    cells = {"plain": f"ok: {note}" if reasons or len(batches) > 1 else "ok"}
    try:
        _check_class(model, model_type)
        steps = list(batches.values())
        wanted = [_plain_step(plain, part) for part in steps]
    except Exception as error:
        return cells | dict.fromkeys(COLUMNS[1:], refusal_or_failure(error))
    cells["one rank"] = _one_rank(model, steps, wanted)
    return cells | {column: _two_ranks(model, steps, wanted, s) for column, s in LAYOUTS.items()}


def _plain_model(model_type: str) -> Any:
    """Return the shrunk model of a type, in float64 with random weights and train mode."""
    import torch
    from census_models import tiny
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoModelForMultimodalLM

    from hyper_parallel.trainer.engine.auto_model import complete_outputs

    config = AutoConfig.for_model(**tiny(model_type))
    fits = type(config) in AutoModelForMultimodalLM._model_mapping
    auto = AutoModelForMultimodalLM if fits else AutoModelForImageTextToText
    with torch.device("meta"):
        size = sum(p.numel() for p in auto.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"not shrunk: {size} parameters")
    torch.manual_seed(3)
    model = auto.from_config(config, dtype=torch.float64).train().double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    complete_outputs(model)
    return model


def _check_class(model: Any, model_type: str) -> None:
    """Raise unless a run of a recipe builds the same class of this config."""
    from census_models import tiny

    from hyper_parallel.model import ConfigFile
    from hyper_parallel.trainer.engine.auto_model import class_of_config

    values = {**tiny(model_type), "architectures": [type(model).__name__]}
    auto = class_of_config(ConfigFile(where=model_type, values=values))
    built = auto if not hasattr(auto, "_model_mapping") else auto._model_mapping[type(model.config)]
    if built is not type(model):
        raise TypeError(f"a recipe builds {built.__name__} instead of {type(model).__name__}")


def _plain_step(model: Any, batches: list[dict[str, Any]]) -> tuple[float, dict[str, Any]]:
    """Return the mean loss of batches with equal numbers of targets, and its gradients, by transformers alone."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model(**batch, use_cache=False).loss / len(batches)
        loss.backward()
        total += float(loss.detach())
    return total, _gradients(model)


def _gradients(model: Any) -> dict[str, Any]:
    return {
        n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for n, p in model.named_parameters()
        if p.grad is not None
    }


def _steps(network: Any, steps: list[Any], rank: int, size: int) -> list[tuple[float, Any]]:
    """Return loss and gradients of one step for each kind of media."""
    import hyper_parallel as hp

    results = []
    for batches in steps:
        network.zero_grad()
        loss = hp.forward_backward(network, batches[rank::size])
        results.append((float(loss), _gradients(network)))
    return results


def _one_rank(model: Any, steps: list[Any], wanted: list[Any]) -> str:
    import hyper_parallel as hp

    try:
        alone = hp.parallelize(copy.deepcopy(model), hp.plan_of(model, ""), hp.World.join("cpu"))
        return _compare(_steps(alone, steps, 0, 1), wanted, whole=True)
    except Exception as error:
        return refusal_or_failure(error)


def _two_ranks(model: Any, steps: list[Any], wanted: list[Any], strategy: str) -> str:
    import hyper_parallel as hp
    from hyper_parallel.errors import HyperParallelError

    def rank(number: int) -> tuple[str, list[set[str]]]:
        with hp.World.join("cpu") as world:
            network = copy.deepcopy(model)
            try:
                hp.parallelize(network, hp.plan_of(network, strategy), world)
                found = _steps(network, steps, *hp.data_share(network))
            except HyperParallelError as error:
                return refusal_or_failure(error), []
            names = [{*gradients} for _, gradients in found]
            return _compare(found, wanted, whole="pp" not in strategy), names

    try:
        hp.plan_of(model, strategy)
        (first, names), (second, others) = hp.launch(rank, 2, timeout_s=90)
    except Exception as error:
        return refusal_or_failure(error)
    if (cell := first if first != "ok" else second) != "ok":
        return cell
    whole = [a | b for a, b in zip(names, others, strict=True)]
    lacks = [right.keys() - found for found, (_, right) in zip(whole, wanted, strict=True)]
    return f"wrong: no gradient of {sorted(lacks[0])[:2]}" if any(lacks) else "ok"


def _compare(found: list[Any], wanted: list[Any], *, whole: bool) -> str:
    for (loss, gradients), (right_loss, right) in zip(found, wanted, strict=True):
        if abs(loss - right_loss) > LIMIT * abs(right_loss):
            return f"wrong: loss {loss:.8g} for {right_loss:.8g}"
        if whole and (odd := sorted(gradients.keys() ^ right.keys())):
            return f"wrong: gradients of {odd[:2]}"
        largest = max(float(g.abs().max()) for g in right.values())
        for name, gradient in gradients.items():
            expected = right.get(
                name, 0
            )  # shared weights that a kind of media does not use have gradients of 0
            error = float((gradient - expected).abs().max())
            if not error <= LIMIT * largest:
                return f"wrong: gradient of {name} off by {error:.3g}"
    return "ok"

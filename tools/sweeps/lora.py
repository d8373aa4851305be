"""Sweep: LoRA on all linear modules, compared with peft on one rank, and with tensor parallelism on two."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sweeps.interface import (
    causal_types,
    image_text_types,
    one_line,
    plain_model,
    refusal_or_failure,
)

TITLE = "LoRA on all linear modules"
TEXT = """Two sequences of random tokens in float64. Column `peft`: loss and gradients of all adapters (`all-linear`,
both factors random) on one rank against peft around plain transformers. Column `plan`: the share of trained elements
that planning estimates from the specification alone; runs count those of the module. Column `lora tp`: loss and all
gradients of adapters on two tensor-parallel ranks against one rank. Column `full tp`: the same for all parameters
without adapters. Equal means a relative difference of each gradient below 1e-10 of its largest element."""
COLUMNS = ("peft", "plan", "lora tp", "full tp")
SECONDS = 240
LIMIT = 1e-10
BATCH, SEQ_LEN = 2, 32

Step = tuple[float, dict[str, Tensor]]
"""Loss and gradients by name of parameter."""


def model_types() -> list[str]:
    """Return all causal and image-text types."""
    return [*causal_types(), *image_text_types()]


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    from hyper_parallel.backends.torch.forward_variants import keep_float64

    try:
        model = plain_model(model_type)
        _switch_off_router_loss(model)
        full = _plain_step(copy.deepcopy(model))
        ids, _ = _batch()
        # Some classes take labels with images only.
        keep_float64(labelled := copy.deepcopy(model))
        labelled(input_ids=ids, labels=ids, use_cache=False)
    except Exception as error:
        return {"peft": f"skipped: {one_line(error)}"}
    cells = {}
    adapted: nn.Module | None = None
    expected: Step | None = None
    try:
        adapted = _adapted(copy.deepcopy(model))
        expected = _own_step(copy.deepcopy(adapted), "")
        cells["peft"] = _compare(_peft_step(copy.deepcopy(model), adapted), expected)
    except Exception as error:
        cells["peft"] = refusal_or_failure(error)
    if adapted is not None:
        cells["plan"] = _cell(lambda: _planned_share(adapted, folder))
    if adapted is not None and expected is not None:
        cells["lora tp"] = _cell(lambda: _on_two_ranks(adapted, expected))
    cells["full tp"] = _cell(lambda: _on_two_ranks(model, full))
    return cells


def _cell(check: Any) -> str:
    try:
        return str(check())
    except Exception as error:
        cell = refusal_or_failure(error)
        # An error of a rank, or a parameter with another layout than planned, is not a refusal.
        return f"fails: {one_line(error)}" if cell.startswith(("HP601", "HP206")) else cell


def _switch_off_router_loss(model: Any) -> None:
    """Disable the auxiliary loss of routers in a model."""
    for config in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
        if getattr(config, "output_router_logits", False):
            config.output_router_logits = False


def _batch() -> tuple[Tensor, Tensor]:
    """Return token ids, and the target token of each position."""
    draws = torch.Generator().manual_seed(7)
    ids = torch.randint(3, 250, (BATCH, SEQ_LEN), generator=draws)
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    return ids, targets


def _plain_step(model: Any) -> Step:
    """Return loss and gradients of a step in plain transformers."""
    from hyper_parallel.backends.torch.forward_variants import keep_float64

    keep_float64(model)
    ids, targets = _batch()
    logits = model(input_ids=ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return float(loss), grads


def _own_step(model: nn.Module, strategy: str) -> Step:
    """Return loss and gradients of a step under a strategy, on this rank."""
    import hyper_parallel as hp

    workload = hp.Workload(
        SEQ_LEN, microbatch=BATCH, compute_dtype="float64", param_dtype="float64",
        reduce_dtype="float64",
    )  # fmt: skip
    ids, targets = _batch()
    with hp.World.join("cpu") as world:
        hp.parallelize(model, hp.plan_of(model, strategy, workload), world)
        loss = hp.forward_backward(model, [{"input_ids": ids, "shift_labels": targets}])
        grads = {n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return float(loss), grads


def _whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _adapted(model: nn.Module) -> nn.Module:
    """Return the model with an adapter on every linear module, with both factors random."""
    from peft import LoraConfig

    from hyper_parallel.backends.torch.peft_adapters import add_adapters

    add_adapters(model, LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith((".lora_A", ".lora_B")):
                draws = torch.Generator().manual_seed(sum(map(ord, name)))
                p.data = torch.randn(p.shape, dtype=torch.float64, generator=draws) * 0.1
    return model


def _peft_step(model: nn.Module, adapted: nn.Module) -> Step:
    """Return loss and gradients of a step with the same adapters, by peft and plain transformers."""
    from peft import LoraConfig, get_peft_model

    values = {n: p for n, p in adapted.named_parameters() if n.endswith((".lora_A", ".lora_B"))}
    modules = sorted({name.rpartition(".")[0] for name in values})
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=modules))
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if ".lora_" in name:
                p.data = values[_own_name(name)].data.clone()
    loss, grads = _plain_step(wrapped)
    return loss, {_own_name(name): grad for name, grad in grads.items()}


def _own_name(name: str) -> str:
    return name.removeprefix("base_model.model.").removesuffix(".default.weight")


def _on_two_ranks(model: nn.Module, expected: Step) -> str:
    """Return the result text of two tensor-parallel ranks, compared with `expected`."""
    from hyper_parallel.runtime import launch

    def rank(number: int) -> Step | None:
        found = _own_step(copy.deepcopy(model), "tp=2")
        return found if number == 0 else None

    return _compare(expected, launch(rank, 2, timeout_s=SECONDS)[0])


def _compare(expected: Step, found: Step) -> str:
    """Return `ok`, or a text about the largest difference."""
    (loss, grads), (other_loss, other_grads) = expected, found
    if not abs(loss - other_loss) <= LIMIT * abs(loss):
        return f"wrong: loss {other_loss:.10f} for {loss:.10f}"
    zero = [n for n, g in other_grads.items() if n not in grads and bool(g.abs().max() > 0)]
    missing = [n for n, g in grads.items() if n not in other_grads and bool(g.abs().max() > 0)]
    if zero or missing:
        return f"wrong: gradients of {', '.join([*zero, *missing][:3])} on one side only"
    norm = max((float(g.abs().max()) for g in grads.values()), default=0.0)
    worst, name = 0.0, ""
    for n in grads.keys() & other_grads.keys():
        scale = max(float(grads[n].abs().max()), 1e-6 * norm, 1e-300)
        error = float((grads[n] - other_grads[n]).abs().max()) / scale
        if not error <= worst:
            worst, name = error, n
    return "ok" if worst <= LIMIT else f"wrong: gradient of {name} differs by {worst:.1e}"


def _planned_share(adapted: Any, folder: Path) -> str:
    """Return the cell that compares the planner's fraction of trained parameters with the model's."""
    from hyper_parallel.config import Recipe
    from hyper_parallel.planner.trained_share import trained_share
    from hyper_parallel.trainer.engine.recipe_model import read_spec

    adapted.config.save_pretrained(folder)
    recipe = Recipe.model_validate({"model": {"path": str(folder)}, "data": {"source": "x"}, "lora": {"r": 4}})
    predicted = trained_share(read_spec(str(folder)), recipe)
    base = sum(p.numel() for n, p in adapted.named_parameters() if ".lora_" not in n)
    real = sum(p.numel() for p in adapted.parameters() if p.requires_grad) / base
    return "ok" if abs(predicted - real) <= 1e-9 else f"ok: {predicted:.4f} for {real:.4f}"

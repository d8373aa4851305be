"""A row through TRL's trainer: its data pipeline, collator and loss, and the loop of transformers."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from integration_tests.peers import rewards
from integration_tests.peers.inputs import MODELS
from integration_tests.peers.keep_completions import FOLDER
from integration_tests.peers.last_tokens import leave_out_last_tokens
from integration_tests.peers.rows import EPSILON, LEARNING_RATE, STEPS, TRAINERS, Row
from torch import Tensor

NO_CLIPPING = 1e30
"""Gradient norms are recorded only where they are clipped."""


def load_model(folder: Path, *, scores: bool) -> Any:
    """Load a model of a Hugging Face directory in float64."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float64)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return copies of all parameters by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _import(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _config(row: Row, place: Path) -> Any:
    trainer = TRAINERS[row.trainer]
    common = {
        "output_dir": str(place / "trl"),
        "per_device_train_batch_size": row.samples // row.accumulation,
        "gradient_accumulation_steps": row.accumulation,
        "max_steps": STEPS,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "adam_beta2": 0.999,
        "adam_epsilon": EPSILON,
        "weight_decay": 0.0,
        "max_grad_norm": NO_CLIPPING,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    kind = _import(trainer.trainer.removesuffix("Trainer") + "Config")
    return kind(**{**common, **trainer.config, **row.config})


class Replay:
    """Gives TRL's trainer the completions of our run, a rollout at a time.

    Args:
        place: Folder of the row.
        row: Names how many steps learn from a rollout.
    """

    def __init__(self, place: Path, row: Row) -> None:
        self._files = sorted((place / "own" / FOLDER).glob("step_*.safetensors"))
        self._count = 0
        wanted = STEPS // row.recipe.get("grpo.num_iterations", 1)
        assert len(self._files) == wanted, f"{len(self._files)} rollouts kept of {wanted}"

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return tokens of prompts and completions, in the form of TRL's `rollout_func`."""
        from safetensors.torch import load_file

        made = load_file(self._files[self._count])
        self._count += 1
        prompt_ids, completion_ids = [], []
        for tokens, versions, end in zip(made["tokens"], made["versions"], made["ends"], strict=True):
            start = int((versions != -1).int().argmax())
            prompt_ids.append(tokens[:start].tolist())
            completion_ids.append(tokens[start:end].tolist())
        asked = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        assert asked == prompt_ids, "the prompts of both sides are apart"
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": None}


def _targets(trainer: Any) -> int | None:
    """Return the tokens that a step learns from, of the first batches of TRL's own loader; None for rollouts."""
    batches = iter(trainer.get_train_dataloader())
    count = 0
    for _ in range(trainer.args.gradient_accumulation_steps):
        batch = next(batches)
        if "completion_mask" in batch:
            count += int(batch["completion_mask"][:, 1:].sum())
        elif "labels" in batch:
            count += int((batch["labels"][:, 1:] != -100).sum())
        elif "chosen_labels" in batch:
            count += sum(int((batch[k][:, 1:] != -100).sum()) for k in ("chosen_labels", "rejected_labels"))
        else:
            return None
    return count


def run_trl(row: Row, place: Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """Train a row by TRL and return its curves, and the weights before the first step and after the last one."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    data = load_dataset(
        "json",
        data_files=str(place / "records.jsonl"),
        split="train",
        cache_dir=str(place / "datasets"),
    )
    model = load_model(place / "model", scores=row.trainer == "rm")
    before = weights_of(model)
    more: dict[str, Any] = {}
    if row.trainer == "grpo":
        more = {"reward_funcs": rewards.many_kinds, "rollout_func": Replay(place, row)}
    elif row.trainer in ("dpo", "kto") and "num_experts_per_tok" in MODELS[row.model][1]:
        # TRL would load it with grouped matrix products.
        more = {"ref_model": load_model(place / "model", scores=False)}
    trainer = _import(TRAINERS[row.trainer].trainer)(
        model=model,
        args=_config(row, place),
        train_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(place / "model"),
        **more,
    )
    if row.without_last_tokens:
        leave_out_last_tokens(trainer.model)
    targets = None if row.trainer in ("grpo", "rm") else _targets(trainer)
    trainer.train()
    steps = [line for line in trainer.state.log_history if "grad_norm" in line]
    curves = {key: [float(step[key]) for step in steps] for key in ("loss", "grad_norm")}
    return {**curves, "targets": targets}, before, weights_of(model)

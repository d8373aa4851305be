"""Functions shared by the integrations of LlamaFactory's trainers: parallelize a model, and export it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.host_saved_activations import save_activations_on_host
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.errors import Contradiction, UnsupportedSharding, reported_by
from hyper_parallel.integration.llamafactory.arguments import HyperParallelArguments, OptionNames
from hyper_parallel.ir import Strategy
from hyper_parallel.owned_folder import MARKER, remove_files

FORMATS: Final = {"bf16": "bfloat16", "fp16": "float16"}
"""Dtypes by names of Accelerate's `mixed_precision`."""


def shard_model(
    model: nn.Module,
    strategy: Strategy,
    hp_args: HyperParallelArguments,
    mixed: str | None,
    average: bool = False,
) -> None:
    """Parallelize a model in place, and offload its activations with `activation_mode: swap`.

    `mixed` is the compute dtype unless `hp_args` sets one; None: the dtype of the trained parameters. With `average`,
    gradients are averaged over data-parallel ranks instead of summed.

    Raises:
        Contradiction: HP104 when `device_type` is not the device that the ranks use. Other errors are those of
            `plan_of` and `parallelize`.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device_type = "cpu" if accelerator is None else accelerator.type
    if hp_args.device_type not in ("auto", device_type):
        raise Contradiction(
            "`device_type` is not the device that the ranks use",
            where="hyper_parallel_args: device_type",
            got=hp_args.device_type,
            allowed=f"auto, {device_type}",
            hint='{"device_type": "auto"}',
        )
    trained = (p for p in model.parameters() if p.requires_grad)
    trained_param = next(trained, None)  # None for a reference model
    plain = str((next(model.parameters()) if trained_param is None else trained_param).dtype).removeprefix("torch.")
    with reported_by(OptionNames(hp_args)):
        plan = hp.plan_of(model, strategy)
        workload = replace(
            plan.workload,
            compute_dtype=hp_args.param_dtype or mixed or plain,
            param_dtype=plain,
            reduce_dtype=hp_args.reduce_dtype or ("float64" if plain == "float64" else "float32"),
        )
        hp.parallelize(model, hp.plan_of(model, strategy, workload), average=average)
    if hp_args.activation_mode == "swap":
        save_activations_on_host([*view_of(model).layers], hp_args.activation_swap_inputs)


def adopt_checkpointing(
    model: nn.Module, hp_args: HyperParallelArguments, requested: bool = False
) -> HyperParallelArguments:
    """Disable a model's own gradient checkpointing, and return arguments that recompute activations instead.

    The arguments are unchanged if checkpointing is neither enabled nor requested, or if `activation_mode` is set.

    Args:
        model: Model of transformers, before it is parallelized.
        hp_args: Layout and dtypes.
        requested: Whether the trainer's arguments enable checkpointing, even if the model does not checkpoint yet.
    """
    is_enabled = bool(getattr(model, "is_gradient_checkpointing", False))
    if is_enabled:
        model.gradient_checkpointing_disable()
        # Reentrant checkpointing needs inputs that require gradients; recompute here does not.
        model.disable_input_require_grads()
    if (is_enabled or requested) and hp_args.activation_mode == "none":
        return hp_args.model_copy(update={"activation_mode": "recompute"})
    return hp_args


def without_padding_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without their attention mask, which context parallelism does not support.

    Padding at the end needs no mask, because attention is causal and padding has no labels. Raise UnsupportedSharding
    (HP205) for a mask that masks other tokens.
    """
    mask: Tensor | None = inputs.get("attention_mask")
    if mask is None:
        return inputs
    if mask.dim() != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        is_packed = mask.dim() != 2 or int(mask.max()) > 1
        raise UnsupportedSharding(
            "cp_size needs sequences with padding at the end",
            where="attention_mask of a batch",
            got=f"an attention mask of shape {tuple(mask.shape)}",
            hint="neat_packing: false" if is_packed else 'tokenizer.padding_side = "right"',
        )
    return {name: value for name, value in inputs.items() if name != "attention_mask"}


def export(model: nn.Module, target: Path, processing_class: Any) -> None:
    """Write a model or adapter into the folder `target`, and keep its other files; all ranks must call this.

    `processing_class` is a tokenizer or processor to write; None: none.
    """
    scratch = target / ".export"
    hp.save_pretrained(model, scratch)
    if not dist.is_initialized() or dist.get_rank() == 0:
        for file in scratch.iterdir():
            if file.name != MARKER:
                file.replace(target / file.name)
        remove_files(scratch, MARKER.__eq__)
        if processing_class is not None:
            processing_class.save_pretrained(target)
    wait()


def wait() -> None:
    """Wait for all ranks; do nothing without a process group."""
    if dist.is_initialized():
        dist.barrier()

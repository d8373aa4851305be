"""Functions that the trainer of LlamaFactory's main branch (since June 2026) calls: model, gradients, checkpoints.

That trainer expects gradients averaged over data-parallel ranks. `hsdp_sync_stream` and
`wrap_optimizer_with_skip_dtensor_dispatch` do nothing, because gradients are already reduced when backward returns, and
torch's optimizers accept DTensors. Checkpoints are written by `hyper_parallel.save` and can be read on any layout and
number of ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as HSDPModule

import hyper_parallel as hp
from hyper_parallel.errors import BadValue, Contradiction
from hyper_parallel.integration.llamafactory.arguments import HyperParallelArguments
from hyper_parallel.integration.llamafactory.parallel_model import (
    FORMATS,
    adopt_checkpointing,
    export,
    shard_model,
    wait,
)
from hyper_parallel.units import plural

_MODEL: Final = "_hyper_parallel_model"
"""Attribute of a parameter with a reference to its model, for callers that pass only parameters."""
_FOLDER: Final = "hsdp_model_0"
_SCHEDULER: Final = "scheduler.pt"


def fsdp2_prepare_model(accelerator: Any, model: nn.Module, hp_args: HyperParallelArguments) -> nn.Module:
    """Parallelize a model in place, unless it is parallelized already; return it.

    Args:
        accelerator: Accelerate's `Accelerator` with an FSDP plugin of version 2.
        model: Model of transformers with the same values on every rank; with `cpu_ram_efficient_loading`, the values of
            rank 0 are used. With mixed precision, trained parameters are converted to float32.
        hp_args: Layout and dtypes; an unset `reshard_after_forward` or `param_dtype` is taken from Accelerate.

    Raises:
        Contradiction: HP104 without FSDP2, with its offload to the CPU, with `tp_size` above 1, or, if values of rank 0
            are used, with parameters or buffers on the meta device.
        DegreesMismatch: HP301 when the degrees do not divide the ranks. Also the errors of `shard_model`.
    """
    if isinstance(_plain(model), HSDPModule):
        return model
    plugin: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 2:
        raise Contradiction(
            "with use_hyper_parallel, LlamaFactory's trainer needs FSDP of version 2 in Accelerate",
            where="the FSDP settings of Accelerate",
            got="no FSDP" if plugin is None else f"fsdp_version: {plugin.fsdp_version}",
            hint="accelerate launch --use_fsdp --fsdp_version 2",
        )
    if hp_args.tp_size > 1:
        raise Contradiction(
            "LlamaFactory's trainer of the main branch does not support `tp_size`",
            where="hyper_parallel_args: tp_size",
            got=hp_args.tp_size,
            allowed=1,
            hint='{"tp_size": 1}',
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        raise Contradiction(
            "use_hyper_parallel cannot be combined with Accelerate's offload to the CPU",
            where="the FSDP settings of Accelerate",
            got="fsdp_offload_params: true",
            hint="fsdp_offload_params: false",
        )
    plugin.set_auto_wrap_policy(model)
    if plugin.cpu_ram_efficient_loading:
        _broadcast_from_first(model, accelerator.device)
    if accelerator.mixed_precision != "no":
        for param in model.parameters():
            if param.requires_grad:
                param.data = param.data.float()
    arguments = adopt_checkpointing(model, hp_args)
    if hp_args.reshard_after_forward is None:
        arguments = arguments.model_copy(update={"reshard_after_forward": bool(plugin.reshard_after_forward)})
    strategy = arguments.strategy(accelerator.num_processes)
    shard_model(model, strategy, arguments, FORMATS.get(accelerator.mixed_precision), average=True)
    for param in model.parameters():
        setattr(param, _MODEL, weakref.ref(model))
    return model


def _broadcast_from_first(model: nn.Module, device: torch.device) -> None:
    """Copy parameters and buffers of rank 0 to all ranks; raise HP104 on all ranks if one is on the meta device."""
    tensors = (*model.parameters(), *model.buffers())
    # All ranks decide together: a rank that raised alone would leave the others waiting in a broadcast.
    num_meta = torch.tensor(sum(tensor.is_meta for tensor in tensors), device=device)
    dist.all_reduce(num_meta)
    if num_meta.item():
        raise Contradiction(
            "a rank has parameters or buffers on the meta device, which cannot receive the values of rank 0",
            where="the FSDP settings of Accelerate",
            got="fsdp_cpu_ram_efficient_loading: true",
            hint="fsdp_cpu_ram_efficient_loading: false",
        )
    for tensor in tensors:
        moved = tensor.detach().to(device)
        dist.broadcast(moved, 0)
        tensor.data.copy_(moved)


def model_of(parameters: Iterable[Tensor]) -> nn.Module:
    """Return the prepared model that has all the parameters; raise BadValue (HP102) if no model has them all."""
    models = {getattr(p, _MODEL, lambda: None)() for p in parameters}
    prepared = models - {None}
    if len(models) != 1 or not prepared:
        suffix = ", and other parameters" if None in models else ""
        raise BadValue(
            "the parameters do not all belong to one model returned by fsdp2_prepare_model",
            got=f"parameters of {plural(len(prepared), 'such model')}{suffix}",
            hint="call once per model, with the parameters of one model only"
            if len(prepared) > 1
            else "model = fsdp2_prepare_model(accelerator, model, hp_args)",
        )
    return prepared.pop()


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
    """Scale the gradients of a model so that their global L2 norm is at most `max_norm`.

    Returns:
        Global norm before scaling; on any mesh, each gradient element counts once.

    Raises:
        BadValue: HP102 for another norm, or parameters that do not belong to a prepared model.
    """
    if float(norm_type) != 2.0:
        raise BadValue(
            "gradient clipping supports only the L2 norm",
            got=f"norm_type={norm_type}",
            allowed="2",
            hint="norm_type=2.0",
        )
    return hp.clip_grad_norm_(model_of(parameters), max_norm)


def hsdp_sync_stream() -> None:
    """Do nothing: gradients are already reduced when backward returns."""


def wrap_optimizer_with_skip_dtensor_dispatch(
    optimizer: torch.optim.Optimizer,
) -> torch.optim.Optimizer:
    """Return the optimizer unchanged: torch's optimizers accept DTensors."""
    return optimizer


def save_hsdp_checkpoint(
    model: nn.Module,
    optimizer: Any,
    lr_scheduler: Any,
    output_dir: str | Path,
    should_save_scheduler: bool = True,
) -> None:
    """Save weights and optimizer state in the folder `hsdp_model_0`; all ranks must call this.

    With `should_save_scheduler`, rank 0 saves the state of `lr_scheduler`, unless it is None, in `scheduler.pt`.

    Raises:
        OutputNotWritable: HP105 when the folder cannot be written.
    """
    target = Path(output_dir)
    hp.save(_plain(model), getattr(optimizer, "optimizer", optimizer), target / _FOLDER)
    if should_save_scheduler and lr_scheduler is not None and dist.get_rank() == 0:
        torch.save(lr_scheduler.state_dict(), target / _SCHEDULER)
    wait()


def load_hsdp_model(model: nn.Module, checkpoint_dir: str | Path) -> bool:
    """Load the weights of a checkpoint; return False if `checkpoint_dir` contains none, else True.

    Raises:
        CheckpointCorrupt: HP701 for damaged files.
        CheckpointMismatch: HP702 naming the first tensor that differs between checkpoint and model.
    """
    folder = Path(checkpoint_dir, _FOLDER)
    if not folder.is_dir():
        return False
    hp.load(_plain(model), None, folder)
    return True


def load_hsdp_optimizer_and_scheduler(optimizer: Any, lr_scheduler: Any, checkpoint_dir: str | Path) -> None:
    """Load weights and optimizer state of a checkpoint; do nothing if there is no checkpoint.

    The state of the scheduler is loaded if it was saved and `lr_scheduler` is not None.

    Raises:
        CheckpointCorrupt: HP701 for damaged files.
        CheckpointMismatch: HP702 naming the first tensor that differs between checkpoint and model.
        BadValue: HP102 for an optimizer whose parameters do not belong to one prepared model.
    """
    folder = Path(checkpoint_dir, _FOLDER)
    if not folder.is_dir():
        return
    plain = getattr(optimizer, "optimizer", optimizer)
    hp.load(model_of(p for group in plain.param_groups for p in group["params"]), plain, folder)
    saved = Path(checkpoint_dir, _SCHEDULER)
    if lr_scheduler is not None and saved.is_file():
        lr_scheduler.load_state_dict(torch.load(saved, weights_only=True))


def export_to_hf_format(model: nn.Module, tokenizer: Any, save_dir: str | Path) -> None:
    """Write model and tokenizer (None: no tokenizer), or a peft adapter; all ranks must call this."""
    Path(save_dir).mkdir(parents=True, exist_ok=True)
    export(_plain(model), Path(save_dir), tokenizer)


def _plain(model: nn.Module) -> nn.Module:
    """Return the original module of a module compiled by `torch.compile`; any other module unchanged."""
    return getattr(model, "_orig_mod", model)

"""Adapter files in the format of peft: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hyper_parallel.backends.torch.peft_adapters import (
    ADAPTER_CONFIG,
    add_adapters,
    read_adapter_config,
)
from hyper_parallel.backends.torch.weights.huggingface import model_of_part
from hyper_parallel.backends.torch.weights.initialization import is_adapter
from hyper_parallel.backends.torch.weights.lora import CONFIGURATION
from hyper_parallel.backends.torch.weights.tensor_files import open_tensors
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.trainer.checkpoints._finite import check_finite
from hyper_parallel.trainer.checkpoints._named_state import model_tensors
from hyper_parallel.trainer.checkpoints.index import MODEL
from hyper_parallel.trainer.checkpoints.model_export import (
    ExportShards,
    exported_folder,
    write_export,
)
from hyper_parallel.trainer.checkpoints.pieces import Resident
from hyper_parallel.trainer.checkpoints.rank_group import RankGroup
from hyper_parallel.trainer.data import copy_tokenizer

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLED = "adapter_model.bin"
_FACTOR_DIMS = 2


def export_adapter(
    model: nn.Module,
    tokenizer_dir: str | Path | None,
    out_dir: str | Path,
    *,
    resident: Resident = Tensor.detach,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the adapters and other trained parameters of a model as a peft directory; collective over all ranks.

    `metadata` is added to the metadata of the weight file. The other arguments, and the errors except ModelUnreadable,
    are those of `export_hf`.

    Returns:
        `out_dir`, which `peft.PeftModel.from_pretrained` loads.
    """
    out = Path(out_dir)
    folder, ranks = exported_folder(out, "adapter"), RankGroup(out)
    state = {name.removeprefix(MODEL): t for name, t in model_tensors(model).items()}
    shards, tensors = ExportShards.of(ranks, model, state, resident), dict[str, Tensor]()

    def add(name: str, full: Tensor) -> None:
        tensors[_key(name)] = full.cpu().clone(memory_format=torch.contiguous_format)

    def finish() -> None:
        for name in sorted(shards.trained):
            check_finite(name, tensors[_key(name)], str(out))
        save_file(tensors, folder.partial / ADAPTER_WEIGHTS, metadata={"format": "pt", **metadata})
        config = copy.copy(model_of_part(model).__dict__[CONFIGURATION])
        config.inference_mode = True
        config.save_pretrained(folder.partial)
        if tokenizer_dir is not None:
            copy_tokenizer(tokenizer_dir, folder.partial)

    write_export(ranks, shards, sorted(shards.owners), folder, add, finish)
    return out


def load_adapter(model: nn.Module, directory: Path) -> dict[str, Any]:
    """Add the adapters of a peft directory to a model, and load their values.

    Adapters and other trained parameters on the meta device move to the CPU; other parameters keep their device.

    Returns:
        Dict from the recipe keys `lora.r`, `lora.lora_alpha`, `lora.use_rslora`, `lora.rank_pattern` and
        `lora.alpha_pattern` to their values.

    Raises:
        WeightsUnreadable: HP703 when the files cannot be read, the tensors do not match the configuration, or a value
            is not finite.
        BadValue: HP102 when the configuration does not fit the model, for example by the name of a module.
        UnsupportedSharding: HP205 for adapters other than LoRA of linear modules.
    """
    config = read_adapter_config(directory)
    stored = open_tensors(_weights_file(directory))
    ranks = {min(t.shape) for t in stored.values() if len(t.shape) == _FACTOR_DIMS}
    if config.r > max(ranks, default=0) and not config.rank_pattern:
        raise _tensor_mismatch(directory, [f"no factor of rank {config.r}"])
    add_adapters(model, config, str(directory / ADAPTER_CONFIG))
    trained = {_key(name): p for name, p in model.named_parameters() if p.requires_grad}
    different = sorted(trained.keys() ^ stored.keys())
    different += [k for k in trained if not different and tuple(trained[k].shape) != tuple(stored[k].shape)]
    if different:
        raise _tensor_mismatch(directory, different)
    allocate_trained(model)
    trained = {_key(name): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for key, parameter in trained.items():
            value = stored[key].read(())
            if not value.is_floating_point() or not value.isfinite().all():
                raise WeightsUnreadable(
                    "a tensor of the adapter does not consist of finite floating-point numbers",
                    where=f"{directory}: {key}",
                    got="NaN or infinity" if value.is_floating_point() else str(value.dtype),
                    hint="download or export the adapter again",
                )
            parameter.copy_(value)
    patterns = {k: dict(getattr(config, k) or {}) for k in ("rank_pattern", "alpha_pattern")}
    values = {k: getattr(config, k) for k in ("r", "lora_alpha", "use_rslora")} | patterns
    return {f"lora.{key}": value for key, value in values.items()}


def _weights_file(directory: Path) -> Path:
    """Return the path of an adapter's weights: the PyTorch file if only that file exists, else the safetensors file."""
    plain, pickled = directory / ADAPTER_WEIGHTS, directory / _PICKLED
    return pickled if pickled.is_file() and not plain.is_file() else plain


def _tensor_mismatch(directory: Path, different: list[str]) -> WeightsUnreadable:
    return WeightsUnreadable(
        "the tensors of the adapter do not match its configuration",
        where=str(directory),
        got=[f"{name:.120}" for name in different[:3]],
        hint="use adapter_config.json and adapter_model.safetensors of the same adapter",
    )


def _key(name: str) -> str:
    """Return the name of an adapter factor or another trained parameter in peft's files."""
    return f"base_model.model.{name}{'.weight' if is_adapter(name) else ''}"


def allocate_trained(model: nn.Module) -> None:
    """Move adapters and other trained parameters from the meta device to uninitialized CPU memory."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta and (p.requires_grad or is_adapter(name)):
                module._parameters[name] = nn.Parameter(torch.empty_like(p, device="cpu"))

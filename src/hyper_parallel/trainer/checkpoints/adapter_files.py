"""Adapters in the format of peft: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hyper_parallel.backends.torch.adapter_config import read_adapter_config
from hyper_parallel.backends.torch.peft_adapters import ADAPTER_CONFIG, CONFIGURATION, add_adapters
from hyper_parallel.backends.torch.weights.initialization import is_adapter
from hyper_parallel.backends.torch.weights.tensor_files import open_tensors
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.trainer.checkpoints._finite import check_finite
from hyper_parallel.trainer.checkpoints._named_state import model_tensors
from hyper_parallel.trainer.checkpoints.index import MODEL
from hyper_parallel.trainer.checkpoints.model_export import Held, exported_folder
from hyper_parallel.trainer.checkpoints.pieces import AtHome
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
    at_home: AtHome = Tensor.detach,
    metadata: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write the adapters of a model, and what else of it was trained; collective over all ranks.

    Args:
        model: With adapters, of plain tensors or DTensors.
        tokenizer_dir: Directory whose tokenizer files are copied; None: no tokenizer.
        out_dir: Created. An earlier adapter or export there is replaced if nothing in it has changed since; any other
            directory that is not empty is refused.
        at_home: Gives a local tensor on its bytes, where a memory plan has them elsewhere.
        metadata: Further metadata of the weight file.

    Returns:
        `out_dir`, which `peft.PeftModel.from_pretrained` reads.

    Raises:
        OutputNotWritable: HP105 when the directory cannot be written.
    """
    out = Path(out_dir)
    folder, ranks = exported_folder(out, "adapter"), RankGroup("export", out)
    ranks.on_rank_0(folder.open)
    state = {name.removeprefix(MODEL): t for name, t in model_tensors(model).items()}
    held, files = Held.of(ranks, model, state, at_home), dict[str, Tensor]()
    for name in sorted(held.owners):
        full = held.whole(name)
        if ranks.rank == 0:
            files[_key(name)] = full.cpu().clone(memory_format=torch.contiguous_format)

    def close() -> None:
        with folder.discarded_on_error():
            finish()

    def finish() -> None:
        for name in sorted(held.trained):
            check_finite(name, files[_key(name)], str(out))
        save_file(files, folder.partial / ADAPTER_WEIGHTS, metadata={"format": "pt", **metadata})
        config = copy.copy(model.__dict__[CONFIGURATION])
        config.inference_mode = True
        config.save_pretrained(folder.partial)
        if tokenizer_dir is not None:
            copy_tokenizer(tokenizer_dir, folder.partial)
        folder.publish()

    ranks.on_rank_0(close)
    return out


def take_adapter(model: nn.Module, directory: Path) -> dict[str, Any]:
    """Give a model, on the meta device or not, the adapters of a directory that peft wrote.

    Returns:
        The values of a recipe by dotted key that decide the scale of the adapters.

    Raises:
        WeightsUnreadable: HP703 when the tensors are not those that the directory's configuration asks for.
        UnsupportedSharding: HP205 for adapters that are more than LoRA of linear modules.
    """
    config = read_adapter_config(directory)
    stored = open_tensors(_weights_file(directory))
    ranks = {min(t.shape) for t in stored.values() if len(t.shape) == _FACTOR_DIMS}
    if config.r > max(ranks, default=0) and not config.rank_pattern:
        raise _other_tensors(directory, [f"no factor of rank {config.r}"])
    add_adapters(model, config, str(directory / ADAPTER_CONFIG))
    mine = {_key(name): p for name, p in model.named_parameters() if p.requires_grad}
    different = sorted(mine.keys() ^ stored.keys())
    different += [
        k for k in mine if not different and tuple(mine[k].shape) != tuple(stored[k].shape)
    ]
    if different:
        raise _other_tensors(directory, different)
    allocate_trained(model)
    mine = {_key(name): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for key, parameter in mine.items():
            value = stored[key].read(())
            if not value.is_floating_point() or not value.isfinite().all():
                raise WeightsUnreadable(
                    "a tensor of the adapter holds something else than finite numbers",
                    where=f"{directory}: {key}",
                    got="NaN or infinity" if value.is_floating_point() else str(value.dtype),
                )
            parameter.copy_(value)
    patterns = {k: dict(getattr(config, k) or {}) for k in ("rank_pattern", "alpha_pattern")}
    values = {k: getattr(config, k) for k in ("r", "lora_alpha", "use_rslora")} | patterns
    return {f"lora.{key}": value for key, value in values.items()}


def _weights_file(directory: Path) -> Path:
    """Return the file of an adapter's tensors: of safetensors, or of PyTorch where there is no other."""
    plain, pickled = directory / ADAPTER_WEIGHTS, directory / _PICKLED
    return pickled if pickled.is_file() and not plain.is_file() else plain


def _other_tensors(directory: Path, different: list[str]) -> WeightsUnreadable:
    return WeightsUnreadable(
        "the tensors of the adapter are not those that its configuration asks for",
        where=str(directory),
        got=[f"{name:.120}" for name in different[:3]],
    )


def _key(name: str) -> str:
    """Name of a parameter in peft's files."""
    return f"base_model.model.{name}{'.weight' if is_adapter(name) else ''}"


def allocate_trained(model: nn.Module) -> None:
    """Storage for what is trained alone."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta and (p.requires_grad or is_adapter(name)):
                module._parameters[name] = nn.Parameter(torch.empty_like(p, device="cpu"))

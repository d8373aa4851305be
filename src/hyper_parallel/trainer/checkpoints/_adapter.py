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

from hyper_parallel.backends.torch._peft import (
    ADAPTER_CONFIG,
    CONFIGURATION,
    add_adapters,
    import_peft,
)
from hyper_parallel.backends.torch.weights._initialise import is_adapter
from hyper_parallel.errors import UnsupportedSharding, WeightsUnreadable
from hyper_parallel.trainer._files import copy_files, replace_directory
from hyper_parallel.trainer.checkpoints._export import Held, open_hidden
from hyper_parallel.trainer.checkpoints._named_state import MODEL, model_tensors
from hyper_parallel.trainer.checkpoints._pieces import AtHome
from hyper_parallel.trainer.checkpoints._rank_group import RankGroup
from hyper_parallel.trainer.data import TOKENIZER_FILES

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_READ = (
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "target_modules",
    "modules_to_save", "exclude_modules", "layers_to_transform", "layers_pattern", "fan_in_fan_out",
    "init_lora_weights", "task_type", "peft_type", "auto_mapping", "base_model_name_or_path", "revision",
    "inference_mode", "peft_version", "runtime_config",
)  # fmt: skip
"""Values of a `peft.LoraConfig` that peft applies when it chooses modules and factors, or that change nothing."""
_CHANGE_WEIGHTS = ("pissa", "olora", "corda", "loftq")
"""Ways to initialise an adapter that also change the weights beside it."""


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
        out_dir: Created. An earlier adapter or export there is replaced; anything else is refused.
        at_home: Gives a local tensor on its bytes, where a memory plan has them elsewhere.
        metadata: Further metadata of the weight file.

    Returns:
        `out_dir`, which `peft.PeftModel.from_pretrained` reads.

    Raises:
        OutputNotWritable: HP105 when the directory cannot be written.
    """
    out = Path(out_dir)
    temporary = out.parent / f".{out.name}.tmp"
    ranks = RankGroup("export", out)
    ranks.on_rank_0(lambda: open_hidden(out, temporary))
    state = {name.removeprefix(MODEL): t for name, t in model_tensors(model).items()}
    held, files = Held.of(ranks, model, state, at_home), dict[str, Tensor]()
    for name in sorted(held.owners):
        full = held.whole(name)
        if ranks.rank == 0:
            files[_key(name)] = full.cpu().clone(memory_format=torch.contiguous_format)

    def close() -> None:
        save_file(files, temporary / ADAPTER_WEIGHTS, metadata={"format": "pt", **metadata})
        config = copy.copy(model.__dict__[CONFIGURATION])
        config.inference_mode = True
        config.save_pretrained(temporary)
        if tokenizer_dir is not None:
            copy_files(Path(tokenizer_dir), temporary, TOKENIZER_FILES)
        replace_directory(temporary, out)

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
    peft = import_peft()
    config = _read_config(peft, directory)
    config.inference_mode = False
    add_adapters(model, config, str(directory / ADAPTER_CONFIG))
    allocate_trained(model)
    stored = peft.load_peft_weights(str(directory), device="cpu")
    mine = {_key(name): p for name, p in model.named_parameters() if p.requires_grad}
    different = sorted(mine.keys() ^ stored.keys())
    different += [k for k in mine if not different and mine[k].shape != stored[k].shape]
    if different:
        raise WeightsUnreadable(
            "the tensors of the adapter are not those that its configuration asks for",
            where=str(directory),
            got=different[:3],
        )
    with torch.no_grad():
        for key, parameter in mine.items():
            parameter.copy_(stored[key])
    patterns = {k: dict(getattr(config, k) or {}) for k in ("rank_pattern", "alpha_pattern")}
    values = {k: getattr(config, k) for k in ("r", "lora_alpha", "use_rslora")} | patterns
    return {f"lora.{key}": value for key, value in values.items()}


def _read_config(peft: Any, directory: Path) -> Any:
    """Return the `peft.LoraConfig` of a directory; refuse values that change more than what is trained here."""
    file = directory / ADAPTER_CONFIG
    try:
        config = peft.PeftConfig.from_pretrained(directory)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise WeightsUnreadable(
            "the configuration of the adapter cannot be read",
            where=str(file),
            got=str(error).partition("\n")[0][:200],
        ) from error
    kind, plain = type(config), peft.LoraConfig()
    given = vars(config)
    more = [k for k, v in given.items() if k not in _READ and v and v != getattr(plain, k, None)]
    if str(given.get("init_lora_weights")).partition("_")[0] in _CHANGE_WEIGHTS:
        more.append("init_lora_weights")
    if kind is not peft.LoraConfig or more:
        raise UnsupportedSharding(
            "only plain LoRA adapters of linear modules are read",
            where=str(file),
            got=", ".join(f"{k}={given[k]!r}" for k in more) or kind.__name__,
            allowed="keys of the section `lora`",
            hint="merge it with peft (`merge_and_unload`), and train on from the merged model",
        )
    return config


def _key(name: str) -> str:
    """Name of a parameter in peft's files."""
    return f"base_model.model.{name}{'.weight' if is_adapter(name) else ''}"


def allocate_trained(model: nn.Module) -> None:
    """Storage for what is trained alone."""
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta and (p.requires_grad or is_adapter(name)):
                module._parameters[name] = nn.Parameter(torch.empty_like(p, device="cpu"))

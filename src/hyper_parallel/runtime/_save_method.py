"""`model.save_pretrained` of a parallelized model, which writes the output of `hp.save_pretrained`."""

from __future__ import annotations

import os
from types import MethodType
from typing import Any, Final

from torch import nn

import hyper_parallel
from hyper_parallel.errors import BadValue

_DEFAULTS: Final = {
    "state_dict": None,
    "push_to_hub": False,
    "variant": None,
    "save_original_format": True,
    "distributed_checkpoint": False,
    "safe_serialization": True,
}
"""Arguments of transformers for which only the default value is supported."""


def attach_save_pretrained(model: nn.Module) -> None:
    """Replace the `save_pretrained` of a Hugging Face model, which cannot write sharded parameters."""
    if callable(getattr(model, "save_pretrained", None)):
        object.__setattr__(model, "save_pretrained", MethodType(_save_pretrained, model))


def _save_pretrained(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    **kwargs: Any,
) -> None:
    """Write the model as a directory that `from_pretrained` reads; every rank calls this.

    Args:
        model: The model.
        save_directory: The directory.
        is_main_process: Has no effect: rank 0 writes.
        max_shard_size: Size at which a file is closed, in bytes or as a text such as `5GB`; None: 5 GiB.
        kwargs: Other arguments of transformers, which must have their default values.

    Raises:
        BadValue: HP102 for an unsupported argument.
        HyperParallelError: As `hp.save_pretrained`.
    """
    from huggingface_hub.serialization._base import parse_size_to_int

    for name, allowed in _DEFAULTS.items():
        if kwargs.get(name, allowed) != allowed:
            raise BadValue(
                f"`save_pretrained` of a parallelized model does not take `{name}`",
                got=f"{name}={type(kwargs[name]).__name__}"
                if name == "state_dict"
                else f"{name}={kwargs[name]!r}",
                allowed=f"{name}={allowed!r}",
                hint=f"model.save_pretrained({os.fspath(save_directory)!r})",
            )
    text = isinstance(max_shard_size, str)
    size = parse_size_to_int(max_shard_size) if text else max_shard_size
    hyper_parallel.save_pretrained(model, save_directory, max_file_bytes=size)

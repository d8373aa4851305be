"""Loading of an exported model by transformers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hyper_parallel.backends.torch.weights.tensor_files import WeightFiles
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.model import list_weight_files, read_config
from hyper_parallel.trainer.engine.auto_model import (
    class_of_config,
    complete_outputs,
    model_from_config,
)
from hyper_parallel.trainer.engine.recipe_model import GENERATION


def from_pretrained(base: str, dtype: torch.dtype | str, trusted: bool) -> tuple[Any, Any]:
    """Return the model that transformers loads from a directory or hub id, and its report.

    Shards without an index are read here, as transformers does not find them.
    """
    from transformers import GenerationConfig

    report: dict[str, Any] = {"dtype": dtype, "output_loading_info": True}
    directory = Path(base)
    listing = list_weight_files(directory)
    if listing.index is not None or len(listing.files) < 2:
        loaded: tuple[Any, Any] = _auto_class(base).from_pretrained(
            base, local_files_only=True, trust_remote_code=trusted, **report
        )
        complete_outputs(loaded[0])
        return loaded
    empty: Any = model_from_config(read_config(base), torch.float32, trusted=trusted)
    state = {name: t.slices for name, t in WeightFiles(directory).tensors.items()}
    model, info = type(empty).from_pretrained(None, config=empty.config, state_dict=state, **report)
    complete_outputs(model)
    if (directory / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model, info


def _auto_class(base: str) -> Any:
    """Return the transformers class for a directory, or a name on the Hub."""
    from transformers import AutoModelForCausalLM

    if not (Path(base) / "config.json").is_file():  # a name of the Hub
        return AutoModelForCausalLM
    file = read_config(base)
    with suppress(HyperParallelError):  # a type left to transformers or custom code
        return class_of_config(file)
    return AutoModelForCausalLM

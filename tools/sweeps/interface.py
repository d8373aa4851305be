"""Interface of a sweep module for `tools/sweep.py`, and helpers that several sweeps share.

A sweep is a module with these names:

    TITLE      one line, the heading of its table
    TEXT       a paragraph for the docs: what is compared with what, precision, tolerance
    COLUMNS    names of its cells, in order
    SECONDS    time limit of one model type
    CPU_SECONDS  optional: limit of its processor time, which does not depend on other load
    NEEDS      optional: packages without which it does not run; the docs give their versions
    TYPES_PER_PROCESS  optional: model types that a child process checks, by default one
    PRELOADED  optional: modules that all types need, imported once before the child processes start
    model_types() -> list[str]
    run(model_type, folder) -> {column: cell}     called in a child process with an empty scratch folder

A cell is `ok`, `ok: note`, a coded refusal (`HP104: message`), `skipped: reason` (plain transformers cannot do it
either), `wrong: what differs` or `fails: uncoded error`. A sweep passes when no cell is `wrong` or `fails`.
"""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path
from typing import Any, Protocol


class Sweep(Protocol):
    """Interface of a sweep: a module that checks all model types of transformers."""

    TITLE: str
    TEXT: str
    COLUMNS: tuple[str, ...]
    SECONDS: int

    def model_types(self) -> list[str]:
        """Return the model types of transformers that the sweep covers."""

    def run(self, model_type: str, folder: Path) -> dict[str, str]:
        """Run the sweep on one model type, and return its result texts (cells) by column."""


def kind(cell: str) -> str:
    """Return the kind of a result text (cell): `ok`, `refused`, `skipped`, `wrong` or `fails`."""
    head = cell.partition(":")[0]
    return "refused" if re.fullmatch(r"HP\d+", head) else head


def causal_types() -> list[str]:
    """Return the model types that transformers maps to causal language models, sorted."""
    from transformers.models.auto import modeling_auto as auto

    return sorted(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def image_text_types() -> list[str]:
    """Return the sorted model types with an image-text model but without a causal language model."""
    from transformers.models.auto import modeling_auto as auto

    return sorted({*auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES} - {*causal_types()})


def one_line(error: BaseException) -> str:
    """Return class and first line of an exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[0][:160]}"


def refusal_or_failure(error: BaseException) -> str:
    """Return the result text for an exception: a coded refusal, or `fails` for any other error, also of a rank."""
    from hyper_parallel.errors import HyperParallelError, RankFailed

    if isinstance(error, RankFailed):
        return f"fails: {str(error.what).strip().splitlines()[-1][:160]}"
    if isinstance(error, HyperParallelError):
        return f"{error.code}: {error.what}"
    return f"fails: {one_line(error)}"


def plain_model(model_type: str, config: dict[str, Any] | None = None, seed: int = 3) -> Any:
    """Return the shrunk transformers model of a type, in float64 and train mode, with random weights."""
    import torch
    from census import auto_class
    from census_models import tiny
    from transformers import AutoConfig

    warnings.simplefilter("ignore")
    values = tiny(model_type) if config is None else config
    torch.manual_seed(seed)
    made = AutoConfig.for_model(**values)
    model = auto_class(model_type).from_config(made, dtype=torch.float64).train()
    for p in model.parameters():  # some types keep parameters in float32
        p.data = p.data.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matrix products have no float64
    return model


def names_of(function: Any) -> set[str]:
    """Return the names of a function's parameters, without *args and **kwargs."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def number_of(config: Any, names: tuple[str, ...], default: int) -> int:
    """Return the first integer in a config under one of the names, or the first item of a list; else `default`."""
    for name in names:
        value = getattr(config, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int):
            return value
    return default

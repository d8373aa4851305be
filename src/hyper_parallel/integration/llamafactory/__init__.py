"""LlamaFactory with `use_hyper_parallel: true`: the names it imports, each loaded when it is first used.

Unmodified LlamaFactory 0.9.5 asks for `HyperParallelArguments` and `HyperParallelTrainer` (stage sft). Without
LlamaFactory `load_llamafactory` reads its YAML files as recipes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "HyperParallelArguments": "_arguments",
    "HyperParallelTrainer": "_sft",
    "load_llamafactory": "_yaml",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

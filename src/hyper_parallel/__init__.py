"""HyperParallel: a supernode as one computer.

Importing this package is cheap and imports no framework: each name is loaded at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0.dev0"

_OF_RUNTIME = (
    "World", "accumulate", "clip_grad_norm_", "data_share", "forward_backward", "forward_loss", "launch",
    "load_pretrained", "materialize", "microbatch_sources", "offload", "parallelize", "parallelize_submodels",
    "plan_of", "token_logprobs",
)  # fmt: skip
_EXPORTS = {
    "Layout": "hyper_parallel.ir",
    "Mesh": "hyper_parallel.ir",
    "Plan": "hyper_parallel.ir",
    "Strategy": "hyper_parallel.ir",
    "Workload": "hyper_parallel.ir",
    "GenerateWorkload": "hyper_parallel.ir",
    "ModelSpec": "hyper_parallel.model",
    "load_model": "hyper_parallel.model",
    "Supernode": "hyper_parallel.topology",
    "plan": "hyper_parallel.planner",
    "plan_generation": "hyper_parallel.planner.generation",
    "TrainingRun": "hyper_parallel.run",
    "generate": "hyper_parallel.run",
    "train": "hyper_parallel.run",
    "load": "hyper_parallel.trainer",
    "Controller": "hyper_parallel.runtime.controller",
    "save": "hyper_parallel.trainer",
    "save_pretrained": "hyper_parallel.trainer",
    **dict.fromkeys(_OF_RUNTIME, "hyper_parallel.runtime"),
}

__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

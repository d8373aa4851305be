"""Names that LlamaFactory imports for `use_hyper_parallel: true`; each is loaded at its first use.

Unmodified LlamaFactory 0.9.5 imports `HyperParallelArguments` and `HyperParallelTrainer` (stage sft). Its main branch
from June to September 2026 has a separate trainer, which imports the arguments, the names in `_OF_MAIN_BRANCH`, and the
modules `context_parallel` and `expert_parallel`. `load_llamafactory` reads LlamaFactory's YAML files as recipes and
does not need LlamaFactory.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from hyper_parallel.errors import NotServed

_OF_MAIN_BRANCH = (
    "HSDPModule", "clip_grad_norm_", "export_to_hf_format", "fsdp2_prepare_model", "hsdp_sync_stream",
    "load_hsdp_model", "load_hsdp_optimizer_and_scheduler", "save_hsdp_checkpoint",
    "wrap_optimizer_with_skip_dtensor_dispatch",
)  # fmt: skip
_EXPORTS = {
    "HyperParallelArguments": "arguments",
    "HyperParallelTrainer": "_sft",
    "load_llamafactory": "_yaml",
    **dict.fromkeys(_OF_MAIN_BRANCH, "_fsdp2"),
}

_LATER = ("parallelize_model",)
"""Names that LlamaFactory's main branch imports since autumn 2026."""

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if name in _LATER:
        raise NotServed(
            f"this version of LlamaFactory is not supported: it imports `{name}`, which this package lacks",
            where=__name__,
            allowed=list(_EXPORTS),
            hint="pip install llamafactory==0.9.5, or hyper-parallel train FILE.yaml without LlamaFactory",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

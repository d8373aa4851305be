"""What a checkpoint remembers of its run, and what may be another in the run that goes on with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.config import with_absolute_paths
from hyper_parallel.errors import CheckpointMismatch

if TYPE_CHECKING:
    from hyper_parallel.trainer._job import Job

_CONFIG: Final = "model.config"
LORA_SCALE: Final = tuple(
    f"lora.{key}" for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
)
"""Keys that decide the factor of an adapter's product: with another one the same values are another model."""
_FIXED: Final = (
    *LORA_SCALE, _CONFIG, "moe", "stage", "data.mask_documents", "training.dtype", "training.optimizer",
    "training.seed",
)  # fmt: skip
"""Keys, and sections, that decide what is learned; the data has a fingerprint of its own."""
_PATTERNS: Final = ("lora.rank_pattern.", "lora.alpha_pattern.")
_UNSAID: Final = ("output_dir", "data.cache_dir", "checkpoint.resume", "checkpoint.from_dir")
"""Keys that say where files are and nothing of the run."""
_UNREAD: Final = (
    "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Keys of a model's config that training does not read, or that the recipe decides."""

Changes = dict[str, tuple[Any, Any]]
"""Dotted key to the checkpoint's value and this run's."""


def run_facts(job: Job) -> dict[str, Any]:
    """Every value of the recipe and of the model's config by its dotted key, as JSON; the layout as one."""
    recipe, plan = with_absolute_paths(job.recipe), job.plan
    facts = dict(_leaves(recipe.model_dump(mode="json", exclude={"parallel": True})))
    config = _leaves(json.loads(job.model_files["config.json"]), _CONFIG)
    facts |= {k: v for k, v in config if k.rpartition(".")[2] not in _UNREAD}
    if recipe.lora is not None:  # patterns are values, not sections
        facts = {k: v for k, v in facts.items() if not k.startswith(_PATTERNS)}
        facts |= {
            "lora.rank_pattern": recipe.lora.rank_pattern,
            "lora.alpha_pattern": recipe.lora.alpha_pattern,
        }
    facts["parallel"] = str(plan.strategy)
    facts["training.tokens_per_step"] = plan.workload.tokens_per_step
    facts["data.mask_documents"] = recipe.data.masks(recipe.stage)
    return facts


def check_resume(saved: dict[str, Any] | None, job: Job, run: Path) -> Changes:
    """What this run does differently than the one that wrote a checkpoint; None: it has not said how it was made.

    Args:
        saved: The facts in the checkpoint.
        job: The run that goes on with it.
        run: Directory of the run that wrote it.

    Raises:
        CheckpointMismatch: HP702 naming what must not be another.
    """
    mine = run_facts(job)
    # Versions of this package and of transformers add keys: only what both have can have changed.
    changed = {k: (saved[k], mine[k]) for k in mine if saved and k in saved and saved[k] != mine[k]}
    refused = [k for k in changed if any(k == f or k.startswith(f"{f}.") for f in _FIXED)]
    if refused:
        key, *more = refused
        mend = [_override(k, changed[k][0]) for k in refused if not k.startswith(_CONFIG)]
        if any(k.startswith(_CONFIG) for k in refused):
            mend += [f"model.path={run / 'model'}", "model.init=random"]
        raise CheckpointMismatch(
            f"the checkpoint was saved by a run with another `{key}`",
            where=str(run / "checkpoints"),
            got=_text(changed[key][1]),
            allowed=_text(changed[key][0]),
            hint=" ".join(mend),
            others=[f"`{k}`: {_text(changed[k][1])}, not {_text(changed[k][0])}" for k in more],
        )
    return {k: v for k, v in changed.items() if k not in _UNSAID}


def changes_line(changed: Changes) -> str:
    """The changes in words."""
    return ", ".join(f"{k} {_text(old)} -> {_text(new)}" for k, (old, new) in changed.items())


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def _override(key: str, value: Any) -> str:
    """Return the word of a command line that sets a key."""
    word = f"{key}={_text(value)}"
    return f"'{word}'" if isinstance(value, dict | list) else word


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

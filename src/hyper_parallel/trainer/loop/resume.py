"""Comparison of the facts in a checkpoint with the facts of the run that resumes from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args

from hyper_parallel.config import Recipe, Section
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.trainer.loop.run_facts import CODE, CONTENT, ENVIRONMENT, MODEL_CONFIG, PLAN

_ADAPTER_SCALE: Final = tuple(
    f"lora.{key}" for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
)
"""Keys of the scale of an adapter's product: with a different scale the same adapter weights are a different model."""
_FIXED: Final = (
    *_ADAPTER_SCALE, MODEL_CONFIG, "moe", "stage", "data.mask_documents", "training.dtype", "training.optimizer",
    "training.seed",
)  # fmt: skip
"""Keys and sections that determine the trained weights; the data has a separate fingerprint."""
_FIXED_IN_STAGES: Final = {f"{CONTENT}.validation": ("dpo", "kto")}
"""Keys fixed in some stages, because the checkpoint has a reference score of each held-out answer."""
_IGNORED_IN_CONFIG: Final = (
    "architectures", "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Keys of a model's config that training ignores, or that recipe and tokenizer override."""
_PATHS: Final = ("output_dir", "data.cache_dir", "checkpoint.resume", "checkpoint.from_dir")
"""Keys that only name file locations."""
_STATED_BY_ALL: Final = (CODE, CONTENT, ENVIRONMENT, PLAN)
"""Groups whose keys may be absent from checkpoints of other versions of this package."""
_CONTENT_WORDS: Final = {
    f"{CONTENT}.{name}": words
    for name, words in {
        "tokenizer": "the tokenizer files have changed",
        "validation": "the content of data.validation has changed",
        "records": "the record columns that rewards read have changed",
        "data_files": "the files of data.source have other names, sizes or times: the part read so far is the same,"
        " the rest may differ",
        "generation_config": "generation_config.json of the model has changed",
        "topology": "the content of the topology file has changed",
        "schedule_file": "the content of parallel.schedule_file has changed",
        "model_code": "the Python files in the model directory have changed",
    }.items()
}
_VERSION: Final = f"{ENVIRONMENT}.transformers"

Changes = dict[str, tuple[Any, Any]]
"""Dotted key to the checkpoint's value and this run's."""


def check_resume(saved: object, facts: Mapping[str, Any], run: Path) -> Changes:
    """Return the changes since a checkpoint was written; {} if the checkpoint states no facts.

    Args:
        saved: Facts in the checkpoint.
        facts: Facts of the resumed run, as returned by `run_facts`.
        run: Directory of the run that wrote the checkpoint.

    Raises:
        CheckpointMismatch: HP702 naming the keys that must not change.
    """
    if not isinstance(saved, dict) or not saved:
        return {}
    changed = _differences(saved, facts)
    refused = [key for key in changed if _is_fixed(key, saved, facts)]
    if refused:
        raise _refusal(changed, refused, facts, run)
    return {k: v for k, v in changed.items() if k not in _PATHS}


def changes_line(changed: Changes) -> str:
    """Return the changes in words."""
    parts = []
    for key, (old, new) in changed.items():
        group, _, name = key.partition(".")
        if key in _CONTENT_WORDS or group == CODE:
            parts.append(_CONTENT_WORDS.get(key, f"the source file of {name} has changed"))
        else:
            parts.append(f"{key} {_text(old)} -> {_text(new)}")
    return ", ".join(parts)


def _differences(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> Changes:
    """Compare the keys of both sides, including keys present on one side only.

    A value on one side may be a section on the other, as `lora: null` and `lora.r: 8`; that is one change. A key
    unknown to the checkpoint's version of this package counts as its default.
    """
    changed: Changes = {}
    for key in dict.fromkeys([*facts, *saved]):
        if key in saved and key in facts:
            pair = saved[key], facts[key]
        elif _has_parent(key, saved if key in facts else facts):
            continue  # the parent's change includes this one
        else:
            sections = _section(saved, key), _section(facts, key)
            pair = saved.get(key, sections[0]), facts.get(key, sections[1])
            if sections == (None, None) and _is_unstated(key, saved, facts):
                continue
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def _is_unstated(key: str, saved: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether a key is absent from one side only because that version of this package did not record it."""
    if key.partition(".")[0] in _STATED_BY_ALL:
        return True
    if key.startswith(f"{MODEL_CONFIG}."):
        # Configs omit class defaults, which differ between versions of transformers.
        return _VERSION not in saved
    # An imported adapter states only its own keys.
    return key in facts and ("stage" not in saved or facts[key] == _default(key))


def _has_parent(key: str, facts: Mapping[str, Any]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) in facts for end in range(1, len(parts)))


def _section(facts: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return the facts below a key, without the key in their names; None if there are none."""
    section = {k.removeprefix(f"{key}."): v for k, v in facts.items() if k.startswith(f"{key}.")}
    return section or None


def _default(key: str) -> Any:
    """Return the JSON value of a recipe key's default; the class `Recipe` if the key has no default."""
    owner: Any = Recipe
    *parents, name = key.split(".")
    for parent in parents:
        field = owner.model_fields.get(parent)
        kinds = () if field is None else (field.annotation, *get_args(field.annotation))
        owner = next((k for k in kinds if isinstance(k, type) and issubclass(k, Section)), None)
        if owner is None:
            return Recipe
    field = owner.model_fields.get(name)
    if field is None or field.is_required():
        return Recipe
    return json.loads(json.dumps(field.get_default(call_default_factory=True)))


def _is_fixed(key: str, saved: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether a changed key determines the trained weights, or is a section with such a key."""
    if key.startswith(f"{MODEL_CONFIG}."):
        both = key in saved and key in facts
        same_classes = saved.get(_VERSION) == facts.get(_VERSION)
        return (both or same_classes) and key.rpartition(".")[2] not in _IGNORED_IN_CONFIG
    if key == f"{CONTENT}.weights":
        return _has_adapters(facts)  # a checkpoint without adapters has all weights
    if facts["stage"] in _FIXED_IN_STAGES.get(key, ()):
        return True
    return any(key == f or key.startswith(f"{f}.") or f.startswith(f"{key}.") for f in _FIXED)


def _has_adapters(facts: Mapping[str, Any]) -> bool:
    return _section(facts, "lora") is not None


def _refusal(
    changed: Changes, refused: list[str], facts: Mapping[str, Any], run: Path
) -> CheckpointMismatch:
    key, *remaining = refused
    stated = [k for k in refused if k.partition(".")[0] not in _STATED_BY_ALL]
    overrides = [_override(k, changed[k][0]) for k in stated if not k.startswith(MODEL_CONFIG)]
    if any(k.startswith(MODEL_CONFIG) for k in refused) and not _has_adapters(facts):
        overrides += [f"model.path={run / 'model'}", "model.init=random"]
    return CheckpointMismatch(
        f"the checkpoint was saved by a run with another `{key}`",
        where=str(run / "checkpoints"),
        got=_text(changed[key][1]),
        allowed=_text(changed[key][0]),
        hint=" ".join(overrides) or "checkpoint.resume=never",
        others=[f"`{k}`: {_text(changed[k][1])}, not {_text(changed[k][0])}" for k in remaining],
    )


def _override(key: str, value: Any) -> str:
    """Return the word of a command line that sets a key."""
    word = f"{key}={_text(value)}"
    return f"'{word}'" if isinstance(value, dict | list) else word


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

"""Compare the facts in a checkpoint with those of the run that continues from it."""

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
"""Keys that decide the factor of an adapter's product: with another one the same values are another model."""
_FIXED: Final = (
    *_ADAPTER_SCALE, MODEL_CONFIG, "moe", "stage", "data.mask_documents", "training.dtype", "training.optimizer",
    "training.seed",
)  # fmt: skip
"""Keys, and sections, that decide what is learned; the data has a fingerprint of its own."""
_FIXED_IN_STAGES: Final = {f"{CONTENT}.validation": ("dpo", "kto")}
"""Keys that are fixed in some stages: there the checkpointed run has a reference of each held-out answer."""
_SAID_IN_CONFIG: Final = (
    "architectures", "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Keys of a model's config that training does not read, or that recipe and tokenizer decide."""
_PATHS: Final = ("output_dir", "data.cache_dir", "checkpoint.resume", "checkpoint.from_dir")
"""Keys that state where files are and nothing about the run."""
_STATED_BY_ALL: Final = (CODE, CONTENT, ENVIRONMENT, PLAN)
"""Groups of which a key on one side only means that another version of this package wrote the checkpoint."""
_CONTENT_WORDS: Final = {
    f"{CONTENT}.{name}": words
    for name, words in {
        "tokenizer": "the files of the tokenizer are others",
        "validation": "the content of data.validation is another",
        "records": "the columns of records that rewards read are others",
        "data_files": "the files of data.source have other names, sizes or times: what was read is the same, the rest"
        " may differ",
        "generation_config": "generation_config.json of the model is another",
        "topology": "the content of the topology file is another",
        "schedule_file": "the content of parallel.schedule_file is another",
        "model_code": "the Python files beside the model are others",
    }.items()
}
_VERSION: Final = f"{ENVIRONMENT}.transformers"

Changes = dict[str, tuple[Any, Any]]
"""Dotted key to the checkpoint's value and this run's."""


def check_resume(saved: object, facts: Mapping[str, Any], run: Path) -> Changes:
    """Return the changes since a checkpoint was written; none where it states no facts.

    Args:
        saved: The facts in the checkpoint.
        facts: Those of the run that continues, as of `run_facts`.
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
            parts.append(_CONTENT_WORDS.get(key, f"the source file of {name} is another"))
        else:
            parts.append(f"{key} {_text(old)} -> {_text(new)}")
    return ", ".join(parts)


def _differences(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> Changes:
    """Compare all keys of both sides, also those that only one has.

    A value on one side may be a section on the other, as `lora: null` and `lora.r: 8`; that is one change. A key that
    the checkpoint's version of this package did not have counts as its default.
    """
    changed: Changes = {}
    for key in dict.fromkeys([*mine, *saved]):
        if key in saved and key in mine:
            pair = saved[key], mine[key]
        elif _has_parent(key, saved if key in mine else mine):
            continue  # the parent's change includes this one
        else:
            sections = _section(saved, key), _section(mine, key)
            pair = saved.get(key, sections[0]), mine.get(key, sections[1])
            if sections == (None, None) and _is_unstated(key, saved, mine):
                continue
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def _is_unstated(key: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Whether a key of one side only says nothing: the other version of this package did not state it."""
    if key.partition(".")[0] in _STATED_BY_ALL:
        return True
    if key.startswith(f"{MODEL_CONFIG}."):
        # Configs leave out defaults of their class, which versions of transformers change.
        return _VERSION not in saved
    # An imported adapter states its own keys alone.
    return key in mine and ("stage" not in saved or mine[key] == _default(key))


def _has_parent(key: str, facts: Mapping[str, Any]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) in facts for end in range(1, len(parts)))


def _section(facts: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return the facts below a key, without it in their names; None: there are none."""
    found = {k.removeprefix(f"{key}."): v for k, v in facts.items() if k.startswith(f"{key}.")}
    return found or None


def _default(key: str) -> Any:
    """Return the default of a recipe's key as JSON gives it back; the class itself where the key has none."""
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


def _is_fixed(key: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> bool:
    """Whether a changed key decides what is learned, or is a section that holds such a key."""
    if key.startswith(f"{MODEL_CONFIG}."):
        both = key in saved and key in mine
        same_classes = saved.get(_VERSION) == mine.get(_VERSION)
        return (both or same_classes) and key.rpartition(".")[2] not in _SAID_IN_CONFIG
    if key == f"{CONTENT}.weights":
        return _has_adapters(mine)  # any other checkpoint holds all weights
    if mine["stage"] in _FIXED_IN_STAGES.get(key, ()):
        return True
    return any(key == f or key.startswith(f"{f}.") or f.startswith(f"{key}.") for f in _FIXED)


def _has_adapters(facts: Mapping[str, Any]) -> bool:
    return _section(facts, "lora") is not None


def _refusal(
    changed: Changes, refused: list[str], mine: Mapping[str, Any], run: Path
) -> CheckpointMismatch:
    key, *more = refused
    stated = [k for k in refused if k.partition(".")[0] not in _STATED_BY_ALL]
    mend = [_override(k, changed[k][0]) for k in stated if not k.startswith(MODEL_CONFIG)]
    if any(k.startswith(MODEL_CONFIG) for k in refused) and not _has_adapters(mine):
        mend += [f"model.path={run / 'model'}", "model.init=random"]
    return CheckpointMismatch(
        f"the checkpoint was saved by a run with another `{key}`",
        where=str(run / "checkpoints"),
        got=_text(changed[key][1]),
        allowed=_text(changed[key][0]),
        hint=" ".join(mend) or "checkpoint.resume=never",
        others=[f"`{k}`: {_text(changed[k][1])}, not {_text(changed[k][0])}" for k in more],
    )


def _override(key: str, value: Any) -> str:
    """Return the word of a command line that sets a key."""
    word = f"{key}={_text(value)}"
    return f"'{word}'" if isinstance(value, dict | list) else word


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

"""Facts that determine the result of a run, by dotted key: recipe, model config, files, code and environment.

Checkpoints store the facts. A resumed run compares its facts with those in the checkpoint, logs changes, and refuses
changes of facts that must stay equal.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

from hyper_parallel.config import Recipe, Section, with_absolute_paths
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.serde import flatten
from hyper_parallel.trainer.checkpoints.manifest import START_OVER
from hyper_parallel.trainer.files import FileEntry

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job

MODEL_CONFIG: Final = "model.config"
ENVIRONMENT: Final = "environment"
CODE: Final = "code"
CONTENT: Final = "content"
PLAN: Final = "plan"
"""Groups of facts that are not recipe keys."""

_PACKAGES: Final = ("hyper-parallel", "torch", "transformers", "tokenizers", "peft", "numpy")
_VARIABLES: Final = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "ATEN_CPU_CAPABILITY", "MKL_CBWR", "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_PROTO", "PYTHONHASHSEED",
)  # fmt: skip
"""Environment variables that change results of kernels, reductions or user code."""
_ABSENT_IN_CONFIG: Final = ("_name_or_path", "transformers_version")
"""Config keys left out of the facts, because they do not affect computation or are recorded under `environment`."""


def run_facts(job: Job) -> dict[str, Any]:
    """Return all facts of a run as a dict from dotted key to JSON value, including nulls and empty dicts."""
    recipe, work = with_absolute_paths(job.recipe), job.plan.workload
    dumped = recipe.model_dump(mode="json", exclude={"parallel": True})
    facts = dict(_section_leaves(recipe, dumped))
    config = flatten(json.loads(job.model_files["config.json"]), f"{MODEL_CONFIG}.")
    facts |= {k: v for k, v in config if k.rpartition(".")[2] not in _ABSENT_IN_CONFIG}
    facts |= {
        "parallel": str(job.plan.strategy),
        "training.tokens_per_step": work.tokens_per_step,
        f"{PLAN}.microbatch": work.microbatch,
        f"{PLAN}.accumulation_steps": work.accumulation_steps,
        "data.mask_documents": recipe.data.masks(recipe.stage),
        f"{CONTENT}.weights": "random" if job.weights is None else "pretrained",
    }
    facts |= {f"{CONTENT}.{name}": checksum for name, checksum in _contents(job).items()}
    facts |= {f"{CODE}.{path}": _source_checksum(path) for path in _code_paths(job)}
    facts |= {f"{ENVIRONMENT}.{name}": value for name, value in _environment().items()}
    values: dict[str, Any] = json.loads(json.dumps(facts))
    return values


def _section_leaves(section: Section, dumped: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of each value in a recipe section; a dict-valued key is a single value."""
    for name, value in dumped.items():
        inner = getattr(section, name)
        if isinstance(inner, Section):
            yield from _section_leaves(inner, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _contents(job: Job) -> dict[str, str | None]:
    """Return checksums by name: of prepared data, and of small files to which the recipe refers."""
    recipe, packed = job.recipe, job.packed
    topology, schedule = Path(recipe.topology).expanduser(), recipe.parallel.schedule_file
    return {
        "tokenizer": packed.tokenizer_fingerprint,
        "validation": packed.validation_fingerprint,
        "records": packed.records_fingerprint,
        "data_files": packed.files_fingerprint,
        "generation_config": _text_checksum(job.model_files.get("generation_config.json")),
        "topology": _files_checksum([topology] if topology.is_file() else []),
        "schedule_file": _files_checksum([Path(schedule)] if schedule else []),
        "model_code": _model_code(job),
    }


def _model_code(job: Job) -> str | None:
    directory = Path(job.recipe.model.path).expanduser()
    if not (job.recipe.model.trust_remote_code and directory.is_dir()):
        return None
    return _files_checksum(sorted(directory.glob("*.py")))


def _code_paths(job: Job) -> list[str]:
    """Return the dotted paths of user classes and functions that the recipe names; reward functions only for GRPO."""
    training, grpo = job.recipe.training, job.recipe.grpo
    named = [training.optimizer, *training.callbacks, grpo.environment]
    named += [*grpo.reward_funcs] if job.recipe.stage == "grpo" else []
    return [name for name in named if name and "." in name and not Path(name).expanduser().exists()]


def _source_checksum(path: str) -> str | None:
    """Return the checksum of the module file of a class or function; None if its import or reading fails."""
    module = path.rpartition(".")[0]
    try:
        imported = sys.modules.get(module) or importlib.import_module(module)
    except Exception:  # imports run user code; a bad path is reported at its use
        return None
    source = getattr(imported, "__file__", None)
    return _files_checksum([Path(source)] if source else [])


def _files_checksum(paths: list[Path]) -> str | None:
    digests = []
    for path in paths:
        with suppress(OSError):
            digests.append(FileEntry.of(path).sha256)
    return _text_checksum(" ".join(digests) or None)


def _text_checksum(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


def _environment() -> dict[str, str | None]:
    values = {name: os.environ.get(name) for name in _VARIABLES} | dict.fromkeys(_PACKAGES)
    values["python"] = platform.python_version()
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            values[package] = metadata.version(package)
    return values


_ADAPTER_SCALE: Final = tuple(
    f"lora.{key}" for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
)
"""Keys that scale the output of an adapter; with another scale the same adapter weights are a different model."""
_FIXED: Final = (
    *_ADAPTER_SCALE, MODEL_CONFIG, "moe", "stage", "data.mask_documents", "training.dtype", "training.optimizer",
    "training.seed",
)  # fmt: skip
"""Keys and sections that must not change on resume; the data has a separate fingerprint."""
_FIXED_IN_STAGES: Final = {f"{CONTENT}.validation": ("dpo", "kto")}
"""Keys that must not change in the listed stages, whose runs store reference log-probabilities of held-out answers."""
_IGNORED_IN_CONFIG: Final = (
    "architectures", "dtype", "torch_dtype", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""Keys of a model's config that training ignores, or that recipe and tokenizer override."""
_PATHS: Final = ("output_dir", "data.cache_dir", "checkpoint.resume", "checkpoint.from_dir")
"""Keys of file locations and of resuming, whose changes are not logged."""
_STATED_BY_ALL: Final = (CODE, CONTENT, ENVIRONMENT, PLAN)
"""Groups of facts whose keys differ between versions of this package: a key that one side lacks is no change."""
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
"""Dict from dotted key to (value in the checkpoint, value of this run)."""


def check_resume(saved: object, facts: Mapping[str, Any], run: Path) -> Changes:
    """Return the changes between the facts `saved` in a checkpoint and those of the resumed run; {} if none are saved.

    Changes of keys in `_PATHS` are left out. `run` is the directory of the run that wrote the checkpoint.

    Raises:
        CheckpointMismatch: HP702 naming the changed keys that must not change.
    """
    if not isinstance(saved, dict) or not saved:
        return {}
    changed = _differences(saved, facts)
    refused = [key for key in changed if _is_fixed(key, saved, facts)]
    if refused:
        raise _refusal(changed, refused, facts, run)
    return {k: v for k, v in changed.items() if k not in _PATHS}


def changes_line(changed: Changes) -> str:
    """Return the changes as a line of text, for example `training.lr 0.0003 -> 0.0001`."""
    parts = []
    for key, (old, new) in changed.items():
        group, _, name = key.partition(".")
        if key in _CONTENT_WORDS or group == CODE:
            parts.append(_CONTENT_WORDS.get(key, f"the source file of {name} has changed"))
        else:
            parts.append(f"{key} {_text(old)} -> {_text(new)}")
    return ", ".join(parts)


def _differences(saved: Mapping[str, Any], facts: Mapping[str, Any]) -> Changes:
    """Return the changed keys with their (saved, current) values.

    A change between a value and a section, such as from `lora: null` to `lora.r: 8`, is a single change of the shorter
    key. A key that only one of the two package versions records is no change.
    """
    changed: Changes = {}
    for key in dict.fromkeys([*facts, *saved]):
        if key in saved and key in facts:
            pair = saved[key], facts[key]
        elif _has_parent(key, saved if key in facts else facts):
            continue  # included in the change of the parent key
        else:
            sections = _section(saved, key), _section(facts, key)
            pair = saved.get(key, sections[0]), facts.get(key, sections[1])
            if sections == (None, None) and _is_unstated(key, saved, facts):
                continue
        if pair[0] != pair[1]:
            changed[key] = pair
    return changed


def _is_unstated(key: str, saved: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether a key is absent from `saved` or `facts` although the run has not changed."""
    if key.partition(".")[0] in _STATED_BY_ALL:
        return True
    if key.startswith(f"{MODEL_CONFIG}."):
        # Configs omit class defaults, and these differ between versions of transformers.
        return _VERSION not in saved
    # The facts of an imported adapter contain only the keys of its config.
    return key in facts and ("stage" not in saved or facts[key] == _default(key))


def _has_parent(key: str, facts: Mapping[str, Any]) -> bool:
    parts = key.split(".")
    return any(".".join(parts[:end]) in facts for end in range(1, len(parts)))


def _section(facts: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    """Return the facts whose keys begin with `key.`, with this prefix removed; None if no key begins with it."""
    section = {k.removeprefix(f"{key}."): v for k, v in facts.items() if k.startswith(f"{key}.")}
    return section or None


def _default(key: str) -> Any:
    """Return the default of a recipe key as a JSON value; the class `Recipe` if the key is unknown or required."""
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


def _refusal(changed: Changes, refused: list[str], facts: Mapping[str, Any], run: Path) -> CheckpointMismatch:
    key, *remaining = refused
    stated = [k for k in refused if k.partition(".")[0] not in _STATED_BY_ALL]
    overrides = [_override(k, changed[k][0]) for k in stated if not k.startswith(MODEL_CONFIG)]
    other_config = any(k.startswith(MODEL_CONFIG) for k in refused)
    if other_config and not _has_adapters(facts):
        overrides += [shlex.quote(f"model.path={run / 'model'}"), "model.init=random"]
    if f"{CONTENT}.weights" in refused:
        overrides.append(f"model.init={changed[f'{CONTENT}.weights'][0]}")
    # No override restores the content of a file, or the base model of adapters.
    is_lost = any(k in refused for k in _FIXED_IN_STAGES) or (other_config and _has_adapters(facts))
    return CheckpointMismatch(
        _CONTENT_WORDS.get(key) or f"`{key}` differs from the value with which the checkpoint was saved",
        where=str(run / "checkpoints"),
        got=_text(changed[key][1]),
        allowed=_text(changed[key][0]),
        hint=START_OVER if is_lost or not overrides else " ".join(overrides),
        others=[f"`{k}`: {_text(changed[k][1])}, not {_text(changed[k][0])}" for k in remaining],
    )


def _override(key: str, value: Any) -> str:
    """Return the command-line override that sets `key`; masks of packed documents also need packing."""
    packing = "data.packing=true " if key == "data.mask_documents" and value else ""
    return packing + shlex.quote(f"{key}={_text(value)}")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

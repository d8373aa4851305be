"""Facts that determine the computation of a run, by dotted key: recipe, model config, files, code and environment."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hyper_parallel.config import Section, with_absolute_paths

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
"""Keys of a model's config that do not affect computation, or that `environment` records."""


def run_facts(job: Job) -> dict[str, Any]:
    """Return all facts of a run as JSON values, including nulls, empty dicts and the parallel layout."""
    recipe, work = with_absolute_paths(job.recipe), job.plan.workload
    dumped = recipe.model_dump(mode="json", exclude={"parallel": True})
    facts = dict(_section_leaves(recipe, dumped))
    config = flat(json.loads(job.model_files["config.json"]), MODEL_CONFIG)
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


def flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts by dotted key; an empty dict is a leaf."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}")
    else:
        yield key, value


def _section_leaves(
    section: Section, dumped: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the values of a section by dotted key; a dict that is not a section is one value."""
    for name, value in dumped.items():
        inner = getattr(section, name)
        if isinstance(inner, Section):
            yield from _section_leaves(inner, value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _contents(job: Job) -> dict[str, str | None]:
    """Return checksums of small files and of prepared data that the recipe names by path only."""
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
    """Return the checksum of the Python files in the model directory; None if the recipe does not execute them."""
    directory = Path(job.recipe.model.path).expanduser()
    if not (job.recipe.model.trust_remote_code and directory.is_dir()):
        return None
    return _files_checksum(sorted(directory.glob("*.py")))


def _code_paths(job: Job) -> list[str]:
    """Return the dotted paths of user-defined classes and functions."""
    training, grpo = job.recipe.training, job.recipe.grpo
    named = [training.optimizer, *training.callbacks, grpo.environment]
    named += [*grpo.reward_funcs] if job.recipe.stage == "grpo" else []
    return [name for name in named if name and "." in name and not Path(name).expanduser().exists()]


def _source_checksum(path: str) -> str | None:
    """Return the checksum of the file that defines a class or function; None if there is no such file."""
    module = path.rpartition(".")[0]
    try:
        imported = sys.modules.get(module) or importlib.import_module(module)
    except Exception:  # imports run user code; a bad path is reported at its use
        return None
    source = getattr(imported, "__file__", None)
    return _files_checksum([Path(source)] if source else [])


def _files_checksum(paths: list[Path]) -> str | None:
    """Return one checksum of the contents of files in order; None if no file is readable."""
    digests = []
    for path in paths:
        try:
            with path.open("rb") as file:
                digests.append(hashlib.file_digest(file, "sha256").hexdigest())
        except OSError:
            continue
    return _text_checksum(" ".join(digests) or None)


def _text_checksum(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:3]))}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _environment() -> dict[str, str | None]:
    return {**_versions(), **{name: os.environ.get(name) for name in _VARIABLES}}

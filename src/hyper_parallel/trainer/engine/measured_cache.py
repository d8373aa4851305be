"""Cache of measurements that depend on the config of a model, its code and the installed packages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from hyper_parallel.model import ConfigFile
from hyper_parallel.received import Limits
from hyper_parallel.serde import DecodeError, encode, read, write_text
from hyper_parallel.topology import cache_dir
from hyper_parallel.units import MiB

T = TypeVar("T")

_UNRELATED: Final = (
    "bos_token_id", "dtype", "eos_token_id", "id2label", "label2id", "name_or_path", "pad_token_id",
    "tokenizer_class", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
)  # fmt: skip
"""Config keys on which measurements do not depend."""


def cache_file(folder: str, file: ConfigFile, measuring: Sequence[ModuleType], *choices: object) -> Path:
    """Return the path of a measurement's cache file, named by a hash of its inputs, code and package versions.

    The inputs are the config `file` and `choices`. Editing the modules `measuring`, which contain the measurement's
    code, invalidates the cache. `folder` is a subfolder of this package's cache directory.
    """
    packages = {}
    for name in ("torch", "transformers"):
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    code = [*(Path(str(module.__file__)) for module in measuring), *_own_code(file)]
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in code]
    parts = [_related(file.values), *choices, packages, digests]
    text = json.dumps(parts, sort_keys=True, default=str)
    return cache_dir() / folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def cached(path: Path, cls: type[T], measure: Callable[[], T]) -> T:
    """Return the value of type `cls` in a cache file; if it is absent or damaged, measure the value and save it.

    Write failures are ignored. Errors of `measure` are raised.
    """
    with suppress(OSError, ValueError, DecodeError):
        return read(cls, path, Limits(MiB))
    value = measure()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(encode(value), indent=1) + "\n")
    return value


def _own_code(file: ConfigFile) -> list[Path]:
    if file.directory is None or "auto_map" not in file.values:
        return []
    return sorted(file.directory.glob("*.py"))


def _related(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _related(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _UNRELATED
    }

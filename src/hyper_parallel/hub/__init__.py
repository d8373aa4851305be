"""Models and tokenizers by their name on the Hugging Face hub: `org/name`, or `org/name@revision`.

A name is looked up in the cache of `huggingface_hub`, whose folders this module reads without importing the library.
Missing files are downloaded by `hyper_parallel.hub.download` in a separate process. `stay_offline` keeps the libraries
of this process from downloading kernels, code or configurations. A revision is resolved to a commit, which is also the
name of the snapshot folder.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

from hyper_parallel.errors import NoData, UnknownModel
from hyper_parallel.received import Limits, read_json, read_text

_log = logging.getLogger(__name__)

Part = Literal["config", "tokenizer", "model"]
"""Requested files: the config; a tokenizer, with the config if there is one; or all files for training."""

VOCABULARIES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
"""Vocabulary files; a tokenizer has at least one."""
_ALLOWED: Final = "HYPER_PARALLEL_DOWNLOADS"
"""Environment variable that is set in this process and its children if the user permits downloads."""
_OFFLINE: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE: Final = ("1", "ON", "YES", "TRUE")
_NAME: Final = re.compile(r"\w[\w.-]*/\w[\w.-]*(?:@[\w.][\w./-]*)?")
_FILE: Final = re.compile(r".*\.(json|jsonl|ya?ml|txt|csv|parquet|gz|zst|bin|pt|pth|safetensors|gguf|py)")
_FOLDERS: Final = (
    "model", "models", "data", "dataset", "datasets", "runs", "run", "output", "outputs", "checkpoint", "checkpoints",
    "export", "exports", "weights", "recipes", "tmp",
)  # fmt: skip
"""First components of common paths in recipes; a text that begins with one is not a repository name."""
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT: Final = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")
_INDEX: Final = Limits(num_bytes=256 * 1024**2, num_elements=5_000_000)


@dataclass(frozen=True, slots=True)
class HubName:
    """Repository on the hub; `revision` is a branch, tag or commit, None for the newest commit of the branch `main`."""

    repository: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @property
    def folder(self) -> str:
        """Name of the repository without its owner."""
        return self.repository.rpartition("/")[2]

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit, which never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None


def parse_name(text: str) -> HubName | None:
    """Parse `org/name` or `org/name@revision`; return None for a text that is a path or has another form.

    A text is a path if its first component exists in the working directory or is a usual folder name (`_FOLDERS`), or
    if it has the extension of a file.
    """
    if not is_name(text) or _FILE.fullmatch(text) or os.path.lexists(text.partition("/")[0]):
        return None
    repository, _, revision = text.partition("@")
    return HubName(repository, revision or None)


def parse_dataset(text: str) -> str | None:
    """Return the name of a dataset on the hub; None for a text with a revision, a path or a text of another form."""
    name = parse_name(text)
    return None if name is None or name.revision is not None else name.repository


def is_name(text: str) -> bool:
    """Return whether a text has the form of a repository name, independently of the working directory."""
    return _NAME.fullmatch(text) is not None and text.partition("/")[0].lower() not in _FOLDERS


def name_of_snapshot(directory: str | os.PathLike[str]) -> HubName | None:
    """Return repository and commit of a model's snapshot directory in the cache; None for any other directory."""
    path = Path(directory)
    match = _SNAPSHOT.fullmatch(path.parent.parent.name)
    if match is None or path.parent.name != "snapshots" or not _COMMIT.fullmatch(path.name):
        return None
    if path.parent.parent.parent.absolute() != cache_folder().absolute():
        return None
    return HubName(f"{match['org']}/{match['name']}", path.name)


def stay_offline() -> None:
    """Set `HF_HUB_OFFLINE` in this process and its children; `fetch` still downloads.

    The environment stays unchanged if the user has set `HF_HUB_OFFLINE` or does not permit downloads. Call this before
    a library of Hugging Face is imported, because these read the variable on import.
    """
    if downloads_allowed() and not os.environ.get("HF_HUB_OFFLINE"):
        os.environ[_ALLOWED] = os.environ["HF_HUB_OFFLINE"] = "1"


def permit_stream(is_stream: bool, source: str) -> None:
    """Undo `stay_offline` if a dataset on the hub is streamed: a library then reads from the hub in this process."""
    if is_stream and parse_dataset(source) is not None and _ALLOWED in os.environ:
        os.environ["HF_HUB_OFFLINE"] = "0"


def downloads_allowed() -> bool:
    """Return whether the user's environment variables permit downloads from the hub."""
    values = (os.environ.get(name, "").upper() for name in _OFFLINE)
    return _ALLOWED in os.environ or not any(value in _TRUE for value in values)


def cache_folder() -> Path:
    """Return the cache folder of `huggingface_hub`, from the library's environment variables."""
    env = os.environ
    if named := env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE"):
        return Path(named).expanduser()
    return _home() / "hub"


def _home() -> Path:
    named = os.environ.get("HF_HOME")
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return Path(named or default).expanduser()


def cached_snapshot(name: HubName, part: Part) -> Path | None:
    """Return the snapshot folder in the cache that has the requested files; None if it is absent or incomplete."""
    folder = cache_folder() / f"models--{name.repository.replace('/', '--')}"
    commit = name.revision or "main"
    if not name.is_pinned:
        try:
            commit = read_text(folder / "refs" / commit, Limits(num_bytes=100)).strip()
        except (OSError, ValueError):
            return None
    directory = folder / "snapshots" / commit
    return directory if _COMMIT.fullmatch(commit) and _is_complete(directory, part) else None


def _is_complete(directory: Path, part: Part) -> bool:
    if part != "tokenizer" and not (directory / "config.json").is_file():
        return False
    if part != "config" and not any((directory / file).is_file() for file in VOCABULARIES):
        return False
    if part != "model":
        return True
    try:
        index = read_json(directory / "model.safetensors.index.json", _INDEX)
        return all((directory / file).is_file() for file in {*index["weight_map"].values()})
    except OSError:
        return next(directory.glob("*.safetensors"), None) is not None
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def fetch(name: HubName, part: Part, *, where: str | None = None, key: str = "") -> Path:
    """Return the folder with the requested files of a repository, downloading files that the cache lacks.

    A name without a commit is looked up on the hub, so that a newer version is found. If the hub does not answer or
    downloads are not permitted, the version in the cache is used.

    Args:
        name: Repository and revision.
        part: Requested files.
        where: Origin of the name, for errors.
        key: Recipe key of the name, for hints; empty: the name is not the value of a key.

    Raises:
        UnknownModel: HP304 for files that the cache lacks, if downloads are not permitted or the download fails.
    """
    cached = cached_snapshot(name, part)
    if cached is not None and (name.is_pinned or not downloads_allowed()):
        return cached
    if not downloads_allowed():
        variable = next((v for v in _OFFLINE if os.environ.get(v, "").upper() in _TRUE), "")
        raise UnknownModel(
            f"`{name}` is not on this machine, and {variable} forbids downloading it",
            where=where,
            got=str(name),
            allowed=f"a directory that exists, or a repository in {cache_folder()}",
            hint=f"{variable}=0 {download_command(name, part)}",
        )
    words = (name.repository, part, name.revision or "main", "")
    answer = _run_download(*words, folder=cache_folder(), is_shown=_is_shown())
    if (directory := answer.get("directory")) is not None:
        return Path(directory)
    if cached is not None and answer.get("kind") == "network":
        _warn_once(f"the hub does not answer; {name} is read from the cache: {cached}")
        return cached
    raise _refusal(name, part, answer, where, key)


def fetch_dataset(repository: str, config: str | None, split: str | None, where: str) -> None:
    """Download a dataset into the cache of `datasets`; do nothing if it is cached or downloads are not permitted.

    `config` and `split` are `data.name` and `data.split`. `where` is the location of the dataset's name, for errors.

    Raises:
        NoData: HP602 when the download fails.
    """
    named = os.environ.get("HF_DATASETS_CACHE")
    folder = Path(named).expanduser() if named else _home() / "datasets"
    cached = folder / repository.replace("/", "___") / (config or "")
    if cached.is_dir() or not downloads_allowed():
        return
    words = (repository, "dataset", config or "", split or "")
    answer = _run_download(*words, folder=cache_folder(), is_shown=_is_shown())
    if "directory" in answer:
        return
    hints: dict[str, str | dict[str, str]] = {
        "absent": "`hf auth login` if it is private; otherwise correct the name",
        "gated": f"request access on https://huggingface.co/datasets/{repository}, then: hf auth login",
        "config": {"data.name": (answer.get("allowed") or [""])[0]},
        "split": "use one of the splits that the message names",
    }
    raise NoData(
        f"the dataset `{repository}` cannot be downloaded",
        where=where,
        got=answer.get("text"),
        allowed=answer.get("allowed"),
        hint=hints.get(str(answer.get("kind")), f"hf download --repo-type dataset {repository}"),
    )


@cache
def _warn_once(text: str) -> None:
    _log.warning(text)


@cache
def _run_download(
    repository: str, part: str, revision: str, split: str, *, folder: Path, is_shown: bool
) -> dict[str, Any]:
    """Run `hub.download` in a separate process with network access; return its JSON object, or `kind` and `text`."""
    import subprocess

    words = [sys.executable, "-m", "hyper_parallel.hub.download", repository, part, revision, split]
    words += [] if is_shown else ["--quiet"]
    env = {key: value for key, value in os.environ.items() if key not in _OFFLINE}
    env["HF_HUB_CACHE"] = str(folder)
    # Import path of the package as used by this process.
    package = str(Path(__file__).parents[2])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [package, env.get("PYTHONPATH")]))
    sys.stderr.flush()
    done = subprocess.run(words, env=env, stdout=subprocess.PIPE, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else {}
    except ValueError:
        answer = {}
    return answer or {"kind": "failed", "text": f"the download ended with status {done.returncode}"}


def _is_shown() -> bool:
    return logging.getLogger("hyper_parallel").level <= logging.INFO


def _refusal(name: HubName, part: Part, answer: dict[str, Any], where: str | None, key: str) -> UnknownModel:
    kind, text = answer.get("kind"), str(answer.get("text", ""))
    local, full_command = name.folder, download_command(name, local=True)
    is_single = key not in ("", "grpo.reward_funcs")  # the key has one value
    known: dict[Any, tuple[str, str]] = {
        "absent": (
            f"the hub has no model `{name.repository}`, or it is private",
            "`hf auth login` if it is private; otherwise correct the name",
        ),
        "gated": (
            f"`{name.repository}` is gated: its owner must admit your account",
            f"request access on https://huggingface.co/{name.repository}, then: hf auth login",
        ),
        "revision": (
            f"`{name.repository}` has no revision `{name.revision}`",
            f"{key}={name.repository}" if is_single else f"did you mean `{name.repository}`?",
        ),
        "no weights": (
            f"`{name.repository}` has no safetensors, and weights in other formats are not downloaded",
            f"{full_command}, then " + (f"{key}={local}" if is_single else f"name the folder {local} instead"),
        ),
        "no files": (
            f"`{name.repository}` has no files that make up a {part}",
            f"name another repository, or a folder with the files of a {part}",
        ),
        "network": ("the hub does not answer", download_command(name, part)),
    }  # fmt: skip
    description, hint = known.get(kind, (f"`{name}` cannot be downloaded", download_command(name, part)))
    return UnknownModel(description, where=where, got=text or str(name), hint=hint)


def download_command(name: HubName, part: Part = "model", *, local: bool = False) -> str:
    """Return the command that downloads the config, or all files for another `part`, into the cache.

    With `local`, the files are stored in the folder `name.folder` of the working directory.
    """
    words = ["hf", "download", name.repository]
    if part == "config":
        words.append("config.json")
    if local:
        words += ["--local-dir", name.folder]
    if name.revision is not None:
        words += ["--revision", name.revision]
    return " ".join(words)

"""Download files of a repository, or a dataset, into the cache; `python -m hyper_parallel.hub.download`.

Of a model repository, only configurations, tokenizers and safetensors are downloaded: no pickled weights and no code.
The last line of standard output is a JSON object with `directory`, or with `kind` and `text` of the failure.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import printable
from hyper_parallel.units import format_bytes

_TOKENIZER: Final = re.compile(
    r"config\.json|tokenizer.*\.(json|model)|tekken\.json|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json|"
    r"added_tokens\.json|spiece\.model|sentencepiece.*\.model|chat_template\.(jinja|json)"
)
_REST: Final = re.compile(
    r"generation_config\.json|(pre|video_pre)?processor_config\.json|adapter_config\.json|.*\.safetensors\.index\.json"
)
_WEIGHTS: Final = re.compile(r"(?!consolidated).*\.safetensors")
_STANDARD: Final = re.compile(r"(model|adapter_model)(-\d+-of-\d+)?\.safetensors")


def choose_files(names: Iterable[str], part: str) -> list[str]:
    """Return the files at the top level of a repository to download for `part`, from the names of all its files.

    `part` is a value of `hub.Part`. For `model`, safetensors files with other names than the standard ones are returned
    only if the repository has none with standard names.
    """
    names = sorted(name for name in names if "/" not in name)
    if part == "config":
        return [name for name in names if name == "config.json"]
    chosen = [name for name in names if _TOKENIZER.fullmatch(name)]
    if part == "tokenizer":
        return chosen
    weights = [name for name in names if _WEIGHTS.fullmatch(name)]
    standard = [name for name in weights if _STANDARD.fullmatch(name)]
    return [*chosen, *(name for name in names if _REST.fullmatch(name)), *(standard or weights)]


def download(repository: str, part: str, revision: str, quiet: bool) -> dict[str, Any]:
    """Download the files of `part`; return a dict with `directory`, or with `kind` and `text` of a failure.

    Unless `quiet`, number and size of the missing files are written to stderr.
    """
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub import errors as hub

    try:
        info = HfApi().model_info(repository, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        chosen = choose_files(sizes, part)
        if part == "model" and not any(name.endswith(".safetensors") for name in chosen):
            return {"kind": "no weights", "text": _formats(sizes)}
        if not chosen:
            return {"kind": "no files", "text": _formats(sizes)}
        place = {"repo_id": repository, "revision": str(info.sha)}
        missing = [n for n in chosen if not isinstance(try_to_load_from_cache(filename=n, **place), str)]
        if missing and not quiet:
            size = format_bytes(sum(sizes[name] for name in missing))
            line = f"fetching {repository}@{str(info.sha)[:12]}: {len(missing)} files, {size}"
            sys.stderr.write(printable(line) + "\n")
            sys.stderr.flush()
        # fnmatch patterns: wildcards and brackets are escaped.
        patterns = [re.sub(r"([*?\[])", r"[\1]", name) for name in chosen]
        directory = snapshot_download(repository, revision=revision, allow_patterns=patterns)
    except hub.GatedRepoError as error:
        return {"kind": "gated", "text": _line(error)}
    except hub.RevisionNotFoundError as error:
        return {"kind": "revision", "text": _line(error)}
    except hub.RepositoryNotFoundError as error:
        return {"kind": "absent", "text": repository, "detail": _line(error)}
    except hub.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", 0)
        return {"kind": "failed" if 400 <= status < 500 else "network", "text": _line(error)}
    except OSError as error:
        kind = "failed" if error.errno and error.filename else "network"
        return {"kind": kind, "text": _line(error)}
    except Exception as error:  # the HTTP library has separate exception classes
        return {"kind": "network", "text": _line(error)}
    return {"directory": str(Path(directory))}


def download_dataset(repository: str, config: str, split: str, quiet: bool) -> dict[str, Any]:
    """Download a dataset into the cache of `datasets`; return `directory`, or `kind` and `text` of a failure.

    After `kind: config`, `allowed` lists the configurations of the dataset.
    """
    import datasets

    if quiet or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    if not quiet:
        sys.stderr.write(printable(f"fetching the dataset {repository}") + "\n")
        sys.stderr.flush()
    try:
        datasets.load_dataset(repository, config or None, split=split or None)
    except datasets.exceptions.DatasetNotFoundError as error:
        kind = "gated" if "gated" in str(error) else "absent"
        return {"kind": kind, "text": _line(error)}
    except Exception as error:  # datasets, Arrow and the HTTP library raise many classes
        names = _configs(repository) if "Config name is missing" in str(error) else []
        kind = "split" if "Unknown split" in str(error) else "failed"
        return {
            "kind": "config" if names else kind,
            "text": _line(error),
            "allowed": names or None,
        }
    return {"directory": str(datasets.config.HF_DATASETS_CACHE)}


def _configs(repository: str) -> list[str]:
    import datasets

    try:
        return sorted(datasets.get_dataset_config_names(repository))
    except Exception:  # any of the classes above; the names only serve a hint
        return []


def _formats(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def main() -> None:
    """Run the download that the command-line arguments describe, and print the result as JSON.

    Arguments: repository, part, revision (for the part `dataset`: its configuration), split, and optionally any word
    that turns progress bars off.
    """
    repository, part, revision, split, *options = sys.argv[1:]
    if options or not sys.stderr.isatty():
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if part == "dataset":
        answer = download_dataset(repository, revision, split, bool(options))
    else:
        answer = download(repository, part, revision, bool(options))
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()

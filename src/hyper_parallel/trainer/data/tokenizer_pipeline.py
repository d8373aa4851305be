"""Pipeline of a tokenizer without its vocabulary: class, normalizer, pre-tokenizer, options and added tokens.

Two tokenizers loaded from the same files produce the same tokens if their pipelines are equal. Files without the
vocabulary load in milliseconds, files with 150,000 entries in seconds.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import BadValue, NoData, abbreviated
from hyper_parallel.received import Limits, read_text
from hyper_parallel.trainer.data.tokenizer_limits import check_parts, tokenizing
from hyper_parallel.units import MiB

BACKEND: Final = "tokenizer.json"
_PARTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_MODEL: Final = (
    "unk_token", "byte_fallback", "ignore_merges", "fuse_unk", "dropout", "continuing_subword_prefix",
    "end_of_word_suffix", "max_input_chars_per_word",
)  # fmt: skip
"""Options of models in the library `tokenizers`."""
_ENTRIES: Final = 512
"""Number of vocabulary entries that remain in a shortened file."""


def without_vocabulary(directory: Path) -> str | None:
    """Return tokenizer.json of a directory with few entries and no merges; None if its model is not BPE.

    Raises:
        NoData: HP602 when the file cannot be read.
    """
    path = directory / BACKEND
    if not path.is_file():
        return None
    status = path.stat()
    return _shortened(str(path.resolve()), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _shortened(path: str, _size: int, _changed_ns: int) -> str | None:
    """Return the text of a file without its vocabulary; cached, because large files take a second."""
    try:
        values = json.loads(read_text(Path(path), Limits(num_bytes=64 * MiB)))
        model = values["model"]
        if model.get("type", "BPE") != "BPE":
            return None
        model["vocab"] = {text: i for text, i in model["vocab"].items() if i < _ENTRIES}
        model["merges"] = []
        return json.dumps(values)
    except (KeyError, TypeError, AttributeError):  # not the format of `tokenizers`
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise NoData(
            "a file of the tokenizer cannot be read", where=path, got=str(error)[:120]
        ) from error


def pipeline(hf: Any) -> tuple[Any, ...] | None:
    """Return everything except the vocabulary that decides the tokens of a text; None if it is not known."""
    if not hf.is_fast:
        return None
    added = sorted(map(repr, hf.added_tokens_decoder.values()))
    special = {name: str(value) for name, value in hf.special_tokens_map.items()}
    return (type(hf), _states(hf.backend_tokenizer, _PARTS), added, special, hf.chat_template)


def _states(backend: Any, parts: Sequence[str]) -> list[Any]:
    """Return the serialized parts of a tokenizer of the library, and the options of its model."""
    states: list[Any] = []
    for name in parts:
        part = getattr(backend, name)
        states.append(None if part is None else json.loads(part.__getstate__()))
    options = {name: getattr(backend.model, name, None) for name in _MODEL}
    return [*states, type(backend.model).__name__, options]


def reading_note(hf: Any, directory: Path, texts: Sequence[str]) -> str | None:
    """Return a warning if the class of a tokenizer ignores parts of tokenizer.json, so that tokens differ; else None.

    Training and exports agree. Programs that read tokenizer.json with the library `tokenizers` get other tokens.

    Args:
        hf: The tokenizer as loaded from the directory.
        directory: Directory of its files.
        texts: Texts on which the two are compared.
    """
    from tokenizers import Tokenizer as Backend

    small = without_vocabulary(directory)
    if small is None or not hf.is_fast:
        return None
    parts = ("normalizer", "pre_tokenizer")
    where = f"tokenizer: {directory}"
    try:
        with tokenizing(where):
            plain = Backend.from_str(small)
            if _states(plain, parts) == _states(hf.backend_tokenizer, parts):
                return None
        check_parts(plain, where)
        with tokenizing(where):
            plain = Backend.from_file(str(directory / BACKEND))
            for text in texts:
                encoding = plain.encode(text, add_special_tokens=False)
                ids = hf(text, add_special_tokens=False, verbose=False)["input_ids"]
                if ids != encoding.ids:
                    return _sentence(hf, directory / BACKEND, text, ids, encoding)
    except BadValue as error:
        name = type(hf).__name__
        return f"{name} ignores parts of {directory / BACKEND}, which fail in other programs: {error.got}"
    return None


def _sentence(hf: Any, file: Path, text: str, ids: Sequence[int], plain: Any) -> str:
    """Return the warning with the first token that differs."""
    pairs = enumerate(zip(ids, plain.ids, strict=False))
    i = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(plain.ids)))
    tokens = hf.convert_ids_to_tokens(ids[i : i + 1]), plain.tokens[i : i + 1]
    first, second = (json.dumps(token[0]) if token else "no token" for token in tokens)
    return (
        f"the class {type(hf).__name__} ignores parts of {file}: in {abbreviated(text, 40)}, token {i + 1} is {first} "
        f"in training and exports, and {second} in programs that read this file without transformers"
    )

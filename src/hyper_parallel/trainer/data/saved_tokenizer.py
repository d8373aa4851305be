"""Tokenizers as later programs read them: with and without the config of the model beside their files.

transformers chooses the class of a tokenizer from `tokenizer_class`, from `model_type` of a config.json in the same
folder, and from the form of tokenizer.json. Classes that rebuild the tokenizer from its vocabulary (Qwen2Tokenizer,
GPTNeoXTokenizer, ...) ignore the normalizer and the pre-tokenizer of tokenizer.json, so the same files give other
tokens. An export has a config.json, a folder of adapters has none, and both have to give the tokens of training. This
is measured by reading the files, not derived from the rules of one version of transformers: first without their
vocabulary, where equal pipelines are equal tokens, and only where pipelines differ in full, on probe texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hyper_parallel.errors import BadValue, HyperParallelError, NoData, abbreviated
from hyper_parallel.received import Limits, read_json, read_text
from hyper_parallel.trainer.data.tokenizer_limits import check_files, check_parts, tokenizing
from hyper_parallel.trainer.data.tokenizer_pipeline import (
    BACKEND,
    pipeline,
    reading_note,
    without_vocabulary,
)
from hyper_parallel.trainer.files import copy_files
from hyper_parallel.units import MiB

VOCABULARIES: Final = (BACKEND, "tokenizer.model", "vocab.json", "tekken.json")
"""Files of which a directory with a tokenizer has one."""
CONFIG: Final = "tokenizer_config.json"
_MODEL_CONFIG: Final = "config.json"
_GENERIC: Final = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast")
_GENERIC_NAME: Final = "PreTrainedTokenizerFast"
"""Name of the generic class that every version of transformers reads."""
_DECIDING: Final = ("model_type", "tokenizer_class", "model_name")
"""Keys of a config.json that choose the class of a tokenizer."""
_TEMPLATES: Final = "additional_chat_templates"
_FILES: Final = (
    *VOCABULARIES,
    "vocab.txt",
    "merges.txt",
    CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_PROBES: Final = (
    "Hello world", " Hello", "  two  spaces ", "\n", "\n\n\n", "a\n\n  b\n", "\t\tx", "a\r\nb", "   ", " \n \n",
    "0", "7", "42", "123", "2024", "1234567890", "3.14159", "1,000,000", "v1.2.3", "x1y22z333",
    "I'm you're WE'LL it's", "camelCaseWord snake_case", "don't -- stop... (now)!?", "a/b\\c:d;e", "user@example.org",
    "ol\u00e9 na\u00efve \u00fcber", "ole\u0301 u\u0308ber", "\ufb01ne \u2460 \u00bd \uff21", "\u0130stanbul \u00df",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002", "\u65e5\u672c\u8a9e\u306e\u6587",
    "\ud55c\uad6d\uc5b4",
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440", "\u0645\u0631\u062d\u0628\u0627",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\u00a0\u2003\u3000", "\u200b\ufeff", "a\u2581b",
    "<s> x </s>", "<unk> <pad> <mask>", "def f(x):\n    return x + 1\n", '{"k": [1, 2.5, null]}', "UPPER lower Title",
)  # fmt: skip
"""Texts in which normalizers and pre-tokenizers differ."""
_MOST_ENTRIES: Final = 2000
"""Entries of a vocabulary whose texts are probes."""
_MOST_SAMPLES: Final = 64
_SAMPLE_CHARACTERS: Final = 4000
_SPECIAL: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_files(directory: Path) -> list[str]:
    """Return the names of the files that make up the tokenizer of a Hugging Face directory."""
    names = [name for name in _FILES if (directory / name).is_file()]
    further = sorted((directory / _TEMPLATES).glob("*.jinja"))
    return names + [f"{_TEMPLATES}/{path.name}" for path in further if path.is_file()]


def has_tokenizer(directory: str | Path | None) -> bool:
    """Whether a directory holds tokenizer files."""
    return directory is not None and any((Path(directory) / n).is_file() for n in VOCABULARIES)


def load_tokenizer(directory: str | Path, *, trusted: bool = False) -> Any:
    """Load a tokenizer directory; local files only, and their code only when it is `trusted`."""
    from transformers import AutoTokenizer

    from hyper_parallel.model import read_config_values

    directory = Path(directory).expanduser()
    if not has_tokenizer(directory):
        raise NoData(
            "the tokenizer directory holds no tokenizer",
            where=f"data.tokenizer: {directory}",
            allowed=f"a directory with one of {', '.join(VOCABULARIES)}",
        )
    where = f"data.tokenizer: {directory}"
    check_files(directory, tokenizer_files(directory))
    if (directory / _MODEL_CONFIG).is_file():  # transformers makes a config of it
        read_config_values(directory / _MODEL_CONFIG)
    try:
        with tokenizing(where):
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), local_files_only=True, trust_remote_code=trusted
            )
    except BadValue as error:
        # transformers and tokenizers raise plain Exception for damaged files.
        raise NoData("the tokenizer cannot be loaded", where=where, got=error.got) from error
    if tokenizer.is_fast:
        check_parts(tokenizer.backend_tokenizer, where)
    return tokenizer


def samples_of(texts: Iterable[str]) -> list[str]:
    """Return the beginnings of the first texts of the data, as further probes."""
    found: list[str] = []
    for text in texts:
        found.append(text[:_SAMPLE_CHARACTERS])
        if len(found) == _MOST_SAMPLES:
            break
    return found


def first_difference(one: Any, other: Any, samples: Sequence[str] = ()) -> str | None:
    """Return where two tokenizers of one directory differ, in words; None where they give the same tokens.

    Args:
        one: Tokenizer of transformers.
        other: Tokenizer of transformers.
        samples: Texts of the data.
    """
    if one.get_vocab() != other.get_vocab():
        return f"the vocabularies, of {len(one.get_vocab())} and {len(other.get_vocab())} entries"
    texts = [*_PROBES, *_own_probes(one), *samples]
    for added in (False, True):
        for text, mine, theirs in zip(
            texts, _ids(one, texts, added), _ids(other, texts, added), strict=True
        ):
            if mine != theirs:
                return _shown(one, text, mine, theirs)
    for name in _SPECIAL:
        ids = getattr(one, name), getattr(other, name)
        if ids[0] != ids[1]:
            return f"{name}: {ids[0]} and {ids[1]}"
    if one.chat_template != other.chat_template:
        return "the chat templates"
    return None


def _own_probes(hf: Any) -> list[str]:
    """Return texts with the added tokens of a tokenizer, and with entries of its vocabulary."""
    added = [str(token) for _, token in sorted(hf.added_tokens_decoder.items())][:_MOST_ENTRIES]
    size = len(hf)
    entries = range(0, size, max(1, size // _MOST_ENTRIES))
    words = hf.batch_decode([[i] for i in entries], clean_up_tokenization_spaces=False)
    return [f"a {token} b{token}c" for token in added] + [f"{word}a {word}" for word in words]


def _ids(hf: Any, texts: Sequence[str], added: bool) -> list[list[int] | None]:
    """Return the tokens of texts; None for a text on which the tokenizer fails."""
    try:
        with tokenizing("probes of the tokenizer"):
            found = hf(list(texts), add_special_tokens=added, verbose=False)["input_ids"]
    except BadValue:
        if len(texts) == 1:
            return [None]
        half = len(texts) // 2
        return _ids(hf, texts[:half], added) + _ids(hf, texts[half:], added)
    return list(found)


def _shown(hf: Any, text: str, mine: list[int] | None, theirs: list[int] | None) -> str:
    """Return the first tokens that differ."""
    mine, theirs = mine or [], theirs or []
    at = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
    tokens = (hf.convert_ids_to_tokens(ids[at : at + 4]) for ids in (mine, theirs))
    return f"{abbreviated(text, 40)}: " + " and ".join(json.dumps(t) for t in tokens)


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copy the tokenizer of a directory so that the copy gives the same tokens where it lies.

    The class that reads the source is written into the copy where the copy would be read by a class with other tokens.
    A config.json has to be there already, if the target is to have one.

    Raises:
        BadValue: HP102 where no class reads the copy as the source is read.
    """
    source = Path(source)
    copy_files(source, target, tokenizer_files(source))
    if not has_tokenizer(source) or _same_pipelines(source, target):
        return
    try:
        original = load_tokenizer(source)
    except (
        NoData
    ):  # files that no class reads are copied as they are: nothing was trained with them
        return
    difference = _difference(original, target)
    if difference is None and not _has_code(target):
        return
    set_class(target, class_name(original))
    if (difference := _difference(original, target)) is not None:
        raise _refused(original, source, target, difference)


def _same_pipelines(source: Path, target: Path) -> bool:
    """Return whether a copy is read by the class of its source; names the class in the copy where that is needed."""
    with _folder(source, _deciding(source), None, small=source) as folder:
        original = _read(folder)
    if original is None:
        return False
    for name in [None] * (not _has_code(target)) + [class_name(original)]:
        with _folder(target, _deciding(target), name, small=source) as folder:
            if not _is_pipeline(original, _read(folder)):
                continue
        if name is not None:
            set_class(target, name)
        return True
    return False


def _deciding(directory: Path) -> dict[str, Any] | None:
    """Return the values of the config.json of a directory; None without one."""
    path = directory / _MODEL_CONFIG
    return read_json(path, Limits()) if path.is_file() else None


def _read(folder: Path) -> Any:
    """Return the tokenizer of a folder; None where it cannot be read."""
    try:
        return load_tokenizer(folder)
    except HyperParallelError:
        return None


def _is_pipeline(one: Any, other: Any) -> bool:
    """Return whether two readings of the same files certainly give the same tokens."""
    return other is not None and pipeline(one) == pipeline(other) is not None


def note_on_reading(hf: Any, directory: Path, samples: Sequence[str]) -> str | None:
    """Return a sentence where programs that read tokenizer.json without transformers get other tokens; else None."""
    return reading_note(hf, directory, [*_PROBES, *samples])


def settled(
    hf: Any,
    directory: Path,
    config: Mapping[str, Any] | None,
    samples: Sequence[str],
    *,
    is_own: bool = False,
) -> str | None:
    """Return the class that has to be named in a tokenizer's files so that each later reader gives the same tokens.

    Args:
        hf: The tokenizer as it is read from the directory.
        directory: Its directory.
        config: Values of the config of the model that is trained; None: no model is known.
        samples: Texts of the data.
        is_own: The tokenizer was trained for this model, so that it may be read as the model's config demands.

    Returns:
        None where the files are good as they are.

    Raises:
        BadValue: HP102 where readers beside the model's config use another class, with other tokens.
    """
    names = [None] * (not _has_code(directory)) + [class_name(hf)]
    # A class that reads the files without their vocabulary as `hf` was read needs no probes.
    with _folder(directory, _deciding(directory), None, small=directory) as folder:
        small = _read(folder)
    if small is not None and type(small) is type(hf):
        for name in names:
            if all(_small_readings(small, directory, config, name)):
                return name
    for name in names:
        if not any(_readings(hf, directory, config, samples, name)):
            return name
    with _folder(directory, config, None) as folder:
        beside = load_tokenizer(folder)
        name = class_name(beside)
        # The class that the model's config demands, or the generic one.
        for wanted in (name, _GENERIC_NAME):
            set_class(folder, wanted)
            other = load_tokenizer(folder)
            if any(_readings(other, directory, config, samples, wanted)):
                continue
            if is_own:
                return wanted
            raise _refused(hf, directory, folder, first_difference(hf, beside, samples), wanted)
    raise _refused(hf, directory, None, first_difference(hf, beside, samples))


def _small_readings(
    small: Any, directory: Path, config: Mapping[str, Any] | None, name: str | None
) -> Iterator[bool]:
    """Yield whether a tokenizer without vocabulary is the same beside the model's config, and without one."""
    for values in (config, None) if config is not None else (None,):
        with _folder(directory, values, name, small=directory) as folder:
            yield _is_pipeline(small, _read(folder))


def _readings(
    hf: Any,
    directory: Path,
    config: Mapping[str, Any] | None,
    samples: Sequence[str],
    name: str | None,
) -> Iterator[str | None]:
    """Yield how the tokenizer of a directory differs where it is read beside the model's config, and without one."""
    for values in (config, None) if config is not None else (None,):
        with _folder(directory, values, name) as folder:
            yield _difference(hf, folder, samples)


def _difference(hf: Any, folder: Path, samples: Sequence[str] = ()) -> str | None:
    try:
        read = load_tokenizer(folder)
    except NoData as error:
        return f"it cannot be read: {abbreviated(str(error.got), 80)}"
    return first_difference(hf, read, samples)


@contextmanager
def _folder(
    directory: Path,
    config: Mapping[str, Any] | None,
    name: str | None,
    *,
    small: Path | None = None,
) -> Iterator[Path]:
    """Give a folder with the files of a tokenizer, the name of a class in them, and a config of a model.

    Args:
        directory: Directory of the tokenizer.
        config: Values of the config; None: the folder has none.
        name: Name of the class; None: it stays.
        small: Directory of which tokenizer.json is taken, without its vocabulary where that is one of merges.
    """
    with TemporaryDirectory(prefix="tokenizer-") as made:
        folder = Path(made)
        for file in tokenizer_files(directory):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).symlink_to((directory / file).resolve())
        if small is not None and (text := without_vocabulary(small)) is not None:
            (folder / BACKEND).unlink()
            (folder / BACKEND).write_text(text, encoding="utf-8")
        if name is not None:
            set_class(folder, name)
        if config is not None:
            values = {key: config[key] for key in _DECIDING if isinstance(config.get(key), str)}
            (folder / _MODEL_CONFIG).write_text(json.dumps(values), encoding="utf-8")
        yield folder


def class_name(hf: Any) -> str:
    """Return the name by which transformers finds the class of a tokenizer."""
    name = type(hf).__name__
    return _GENERIC_NAME if name in _GENERIC else name


def _values(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    if not path.is_file():
        return {}
    try:
        values = json.loads(read_text(path, Limits(num_bytes=64 * MiB)))
    except (OSError, ValueError, RecursionError) as error:
        raise NoData(
            "a file of the tokenizer cannot be read", where=str(path), got=str(error)[:120]
        ) from error
    return values if isinstance(values, dict) else {}


def _has_code(directory: Path) -> bool:
    """Return whether a tokenizer names code of its own, which is never run: no copy has it."""
    return "auto_map" in _values(directory)


def set_class(directory: Path, name: str) -> None:
    """Name the class in the files of a tokenizer."""
    values = _values(directory) | {"tokenizer_class": name}
    values.pop("auto_map", None)
    path = directory / CONFIG
    path.unlink(missing_ok=True)  # may be a link
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refused(
    hf: Any, directory: Path, target: Path | None, difference: str | None, wanted: str | None = None
) -> BadValue:
    read, model_type = "", ""
    if target is not None and (target / _MODEL_CONFIG).is_file():
        values = read_json(target / _MODEL_CONFIG, Limits())
        model_type = f" (model_type {values.get('model_type')})"
    if target is not None:
        try:
            read = f", {type(load_tokenizer(target)).__name__} reads the exported one"
        except NoData:
            read = ", and no class reads the exported one"
    hint = None if wanted is None else f'set "tokenizer_class": "{wanted}" in {directory / CONFIG}'
    return BadValue(
        "the exported tokenizer would give other tokens than training: transformers reads its files with another "
        f"class beside the model's config.json{model_type}",
        where=f"tokenizer: {directory}",
        got=f"{type(hf).__name__} reads the tokenizer of training{read}; they differ in {difference}",
        allowed="a tokenizer that is read with the same tokens beside the model's config.json and without one",
        hint=hint or "data.tokenizer=THE_MODEL'S_OWN_DIRECTORY",
    )

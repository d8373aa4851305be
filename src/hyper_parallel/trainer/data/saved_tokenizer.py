"""Saving of tokenizers, and a check that they produce the same tokens with and without the model's config.json.

transformers chooses the class of a tokenizer from `tokenizer_class`, from `model_type` of a config.json in the same
folder, and from the contents of tokenizer.json. Some classes (Qwen2Tokenizer, GPTNeoXTokenizer, ...) rebuild the
tokenizer from its vocabulary and ignore the normalizer and pre-tokenizer in tokenizer.json. The same files may then
produce different tokens. An exported model has a config.json and an exported adapter has none; both must produce the
tokens of training.

The check loads the files with the installed version of transformers. It compares vocabularies and pipelines (class,
normalizer, pre-tokenizer and all other settings). Only if pipelines differ, it compares the tokens of probe texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from hyper_parallel.errors import (
    BadValue,
    HyperParallelError,
    NoData,
    TokenizerMissing,
    abbreviated,
)
from hyper_parallel.hub import VOCABULARIES
from hyper_parallel.received import Limits, read_json, read_text
from hyper_parallel.trainer.data.media_kinds import AUDIO, IMAGE, KINDS
from hyper_parallel.trainer.data.tokenizer_limits import PARTS, check_files, check_parts, tokenizing
from hyper_parallel.trainer.files import copy_files
from hyper_parallel.units import MiB

BACKEND: Final = "tokenizer.json"
CONFIG: Final = "tokenizer_config.json"
_MODEL_CONFIG: Final = "config.json"
_GENERIC: Final = ("TokenizersBackend", "PythonBackend", "PreTrainedTokenizerFast")
_GENERIC_NAME: Final = "PreTrainedTokenizerFast"
"""Name of the generic tokenizer class, which all versions of transformers know."""
CLASS_KEYS: Final = ("model_type", "tokenizer_class", "model_name")
"""Keys of a config.json from which transformers chooses the class of a tokenizer."""
_TEMPLATES: Final = "additional_chat_templates"
PROCESSOR_FILES: Final = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
"""Names of files of a processor of images or audio, in the directory of the tokenizer."""
_FILES: Final = (
    *VOCABULARIES, *PROCESSOR_FILES, CONFIG, "vocab.txt", "merges.txt", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
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
"""Probe texts for comparing tokenizers: white space, numbers, scripts, Unicode normalization, tags and code."""
_MOST_ENTRIES: Final = 2000
"""Maximum number of added tokens that become probe texts, and about the number of vocabulary entries that do."""
_SPECIAL: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def tokenizer_files(directory: Path) -> list[str]:
    """Return the relative paths of the tokenizer and processor files in a Hugging Face directory."""
    names = [name for name in _FILES if (directory / name).is_file()]
    further = sorted((directory / _TEMPLATES).glob("*.jinja"))
    return names + [f"{_TEMPLATES}/{path.name}" for path in further if path.is_file()]


def has_tokenizer(directory: str | Path | None) -> bool:
    """Return whether a directory has the vocabulary file of a tokenizer; False for None."""
    return directory is not None and any((Path(directory) / n).is_file() for n in VOCABULARIES)


def require_tokenizer(weights: Path, tokenizer: str | None, where: str | None) -> None:
    """Raise if neither the directory of pretrained weights nor the recipe has a tokenizer.

    Args:
        weights: Directory of the pretrained weights.
        tokenizer: `data.tokenizer` of the recipe; None: not set.
        where: Location of `model.path` in the recipe, for the error message.

    Raises:
        TokenizerMissing: HP706 naming the directory.
    """
    if not (tokenizer or has_tokenizer(weights)):
        raise TokenizerMissing(
            "the directory of the pretrained weights has no tokenizer",
            where=where,
            got=str(weights),
            allowed=f"a directory with one of {', '.join(VOCABULARIES)}",
            hint="data.tokenizer=TOKENIZER_DIR, or without the weights: model.init=random",
        )


def media_of_processor(directory: str | Path | None) -> tuple[str, ...]:
    """Return the media kinds (`image`, `audio`) that the processor in a tokenizer's directory reads.

    `processor_config.json` names the components of the processor. Older directories only have
    `preprocessor_config.json`, which merges the settings of all components; their keys tell the media kinds. The result
    is () without a tokenizer or processor.

    Raises:
        NoData: HP602 when one of these files cannot be read.
    """
    if not has_tokenizer(directory):
        return ()
    merged, parts = (_json_values(Path(str(directory)) / name) for name in PROCESSOR_FILES[:2])
    has_rate = "sampling_rate" in merged
    is_in_merged = {
        IMAGE.name: bool(merged) and (not has_rate or any(k.startswith("image_") for k in merged)),
        AUDIO.name: has_rate,
    }
    return tuple(
        kind.name
        for kind in KINDS.values()
        if is_in_merged[kind.name] or any(part in parts for part in kind.processors)
    )


def load_tokenizer(
    directory: str | Path, *, trusted: bool = False, other: str | None = None, code: Mapping[str, object] | None = None
) -> Any:
    """Load a transformers tokenizer from a local directory; Python code in it runs only if `trusted`.

    Args:
        directory: Directory of the tokenizer's files.
        trusted: Permission to run Python code in the directory.
        other: Hint of the error for a component that is refused; None: no hint.
        code: Hint of the error for a tokenizer that needs Python code, as recipe changes; None: a sentence.

    Raises:
        NoData: HP602 when the directory has no tokenizer, or one that cannot be loaded or exceeds the limits.
        BadValue: HP102 when a component may take unbounded time or memory.
        ModelUnreadable: HP305 when a config.json in the directory cannot be read.
    """
    from transformers import AutoTokenizer

    from hyper_parallel.model import read_config_values

    directory = Path(directory).expanduser()
    if not has_tokenizer(directory):
        raise NoData(
            "the tokenizer directory holds no tokenizer",
            where=f"tokenizer: {directory}",
            allowed=f"a directory with one of {', '.join(VOCABULARIES)}",
            hint="copy the tokenizer files of the model into this directory"
            if directory.is_dir()
            else "correct the path: this directory does not exist",
        )
    where = f"tokenizer: {directory}"
    check_files(directory, tokenizer_files(directory))
    if (directory / _MODEL_CONFIG).is_file():  # check the file before transformers reads it
        read_config_values(directory / _MODEL_CONFIG)
    try:
        with tokenizing(where):
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trusted)
    except BadValue as error:
        # transformers and tokenizers raise many exception classes for damaged files.
        hint: str | Mapping[str, object] = "fetch the tokenizer files again from where the model was published"
        cause = error.__cause__
        if isinstance(cause, ImportError):
            hint = "install the package that the message names"
        elif not trusted and "trust_remote_code" in str(cause):
            hint = code or "use a tokenizer that needs no Python code of its own, because this code is not run"
        raise NoData("the tokenizer cannot be loaded", where=where, got=error.got, hint=hint) from error
    if tokenizer.is_fast:
        check_parts(tokenizer.backend_tokenizer, where, other)
    return tokenizer


def first_difference(one: Any, other: Any, samples: Sequence[str] = ()) -> str | None:
    """Describe the first difference between two tokenizers: vocabulary, tokens of texts, special tokens or template.

    Tokenizers with equal vocabularies and pipelines are not compared further.

    Args:
        one: Tokenizer of transformers.
        other: Tokenizer of transformers.
        samples: Texts of the data to compare in addition to the built-in probe texts.

    Returns:
        Phrase for an error message; None if the tokenizers do not differ.
    """
    if one.get_vocab() != other.get_vocab():
        return f"the vocabularies, of {len(one.get_vocab())} and {len(other.get_vocab())} entries"
    if (own := _pipeline(one)) is not None and own == _pipeline(other):
        return None
    texts = [*_PROBES, *_own_probes(one), *samples]
    for added in (False, True):
        for text, left, right in zip(texts, _ids(one, texts, added), _ids(other, texts, added), strict=True):
            if left != right:
                return _describe(one, text, left, right)
    for name in _SPECIAL:
        ids = getattr(one, name), getattr(other, name)
        if ids[0] != ids[1]:
            return f"{name}: {ids[0]} and {ids[1]}"
    if one.chat_template != other.chat_template:
        return "the chat templates"
    return None


def _own_probes(hf: Any) -> list[str]:
    added = [str(token) for _, token in sorted(hf.added_tokens_decoder.items())][:_MOST_ENTRIES]
    size = len(hf)
    entries = range(0, size, max(1, size // _MOST_ENTRIES))
    words = hf.batch_decode([[i] for i in entries], clean_up_tokenization_spaces=False)
    return [f"a {token} b{token}c" for token in added] + [f"{word}a {word}" for word in words]


def _ids(hf: Any, texts: Sequence[str], added: bool) -> list[list[int] | None]:
    """Return the token ids of each text, with special tokens if `added`; None for a text on which `hf` fails."""
    try:
        with tokenizing("probes of the tokenizer"):
            ids = hf(list(texts), add_special_tokens=added, verbose=False)["input_ids"]
    except BadValue:
        if len(texts) == 1:
            return [None]
        half = len(texts) // 2
        return _ids(hf, texts[:half], added) + _ids(hf, texts[half:], added)
    return list(ids)


def _describe(hf: Any, text: str, left: list[int] | None, right: list[int] | None) -> str:
    left, right = left or [], right or []
    first = _equal_tokens(left, right)
    tokens = (hf.convert_ids_to_tokens(ids[first : first + 4]) for ids in (left, right))
    return f"{abbreviated(text, 40)}: " + " and ".join(json.dumps(t) for t in tokens)


def _equal_tokens(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def copy_tokenizer(source: str | Path, target: Path) -> None:
    """Copy tokenizer files to the directory `target`, in which they must produce the same tokens.

    If transformers would load the copy with a different class and different tokens, `tokenizer_class` is set in the
    copy. A config.json that `target` is to contain must already exist.

    Raises:
        BadValue: HP102 when no class produces the tokens of the source from the copy.
        NoData: HP602 for a file that `check_files` refuses.
        HyperParallelError: Errors of `load_tokenizer` except NoData.
    """
    source = Path(source)
    check_files(source, tokenizer_files(source))
    copy_files(source, target, tokenizer_files(source))
    if not has_tokenizer(source):
        return
    try:
        original = load_tokenizer(source)
    except NoData:  # no class can load the files, so no model was trained with them
        return
    path = target / _MODEL_CONFIG
    config = read_json(path, Limits()) if path.is_file() else None
    if (name := required_class(original, source, [config], ())) is not None:
        set_class(target, name)


def _load(folder: Path) -> Any:
    try:
        return load_tokenizer(folder)
    except HyperParallelError:
        return None


def required_class(
    hf: Any,
    directory: Path,
    configs: Sequence[Mapping[str, Any] | None],
    samples: Sequence[str],
    *,
    is_own: bool = False,
) -> str | None:
    """Return the `tokenizer_class` that makes exported tokenizer files produce the tokens of training.

    Args:
        hf: Tokenizer used in training, as loaded from the directory.
        directory: Directory of the tokenizer's files.
        configs: For each config.json that may be stored with the files, its values; None: no config.json.
        samples: Texts of the data to compare in addition to the built-in probe texts.
        is_own: Whether this run trains the tokenizer. The class that the first config demands, or the generic class,
            may then replace its class, even if the tokens differ.

    Returns:
        Class name to set in the files; None if they need no change.

    Raises:
        BadValue: HP102 if transformers gets different tokens from the files next to one of the configs.
        NoData: HP602 if a file of the tokenizer cannot be read.
    """
    has_code = "auto_map" in _json_values(directory / CONFIG)
    names = [class_name(hf)] if has_code else [None, class_name(hf)]
    for name in names:
        if (difference := _difference(hf, directory, configs, name, samples)) is None:
            return name
    with _temporary_tokenizer(directory, configs[0], None) as folder:
        exported = _load(folder)
        # Try the class that the first config demands, then the generic class.
        for wanted in () if exported is None else (class_name(exported), _GENERIC_NAME):
            set_class(folder, wanted)
            other = load_tokenizer(folder)
            if _difference(other, directory, configs, wanted, samples) is not None:
                continue
            if is_own:
                return wanted
            raise _refused(hf, directory, exported, difference, wanted)
    raise _refused(hf, directory, exported, difference, None)


def _difference(
    hf: Any,
    directory: Path,
    configs: Sequence[Mapping[str, Any] | None],
    name: str | None,
    samples: Sequence[str],
) -> str | None:
    """Return how a directory's tokenizer, with the class `name`, differs from `hf` next to a config; None if equal."""
    for config in configs:
        with _temporary_tokenizer(directory, config, name) as folder:
            try:
                other = load_tokenizer(folder)
            except NoData as error:
                return f"it cannot be read: {abbreviated(str(error.got), 80)}"
        if (difference := first_difference(hf, other, samples)) is not None:
            return difference
    return None


@contextmanager
def _temporary_tokenizer(
    directory: Path,
    config: Mapping[str, Any] | None,
    class_name: str | None,
) -> Iterator[Path]:
    """Yield a temporary directory of symbolic links to a tokenizer's files.

    The keys of `config` that select a tokenizer class become its config.json; None: no config.json. `class_name`, if
    set, becomes `tokenizer_class`.
    """
    with TemporaryDirectory(prefix="tokenizer-") as temporary:
        folder = Path(temporary)
        for file in tokenizer_files(directory):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).symlink_to((directory / file).resolve())
        if class_name is not None:
            set_class(folder, class_name)
        if config is not None:
            values = {key: config[key] for key in CLASS_KEYS if isinstance(config.get(key), str)}
            (folder / _MODEL_CONFIG).write_text(json.dumps(values), encoding="utf-8")
        yield folder


def class_name(hf: Any) -> str:
    """Return the name of a tokenizer's class, as in `tokenizer_class` of tokenizer_config.json."""
    name = type(hf).__name__
    return _GENERIC_NAME if name in _GENERIC else name


def _json_values(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is none. Raise NoData (HP602) if the file cannot be read."""
    if not path.is_file():
        return {}
    try:
        values = json.loads(read_text(path, Limits(num_bytes=64 * MiB)))
    except (OSError, ValueError, RecursionError) as error:
        raise NoData(
            "a file of the tokenizer cannot be read",
            where=str(path),
            got=str(error)[:120],
            hint="fetch this file again from where the model was published",
        ) from error
    return values if isinstance(values, dict) else {}


def set_class(directory: Path, name: str) -> None:
    """Set `tokenizer_class` in the tokenizer_config.json of a directory (created if absent); remove `auto_map`."""
    path = directory / CONFIG
    values = _json_values(path) | {"tokenizer_class": name}
    values.pop("auto_map", None)
    path.unlink(missing_ok=True)  # do not write through a symbolic link
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _refused(
    hf: Any,
    directory: Path,
    exported: Any,
    difference: str,
    wanted: str | None,
) -> BadValue:
    reader = "no class" if exported is None else type(exported).__name__
    hint = None if wanted is None else f'set "tokenizer_class": "{wanted}" in {directory / CONFIG}'
    return BadValue(
        "the exported tokenizer would produce different tokens than in training, because the files next to it select "
        "how transformers loads it",
        where=f"tokenizer: {directory}",
        got=f"{type(hf).__name__} reads the tokenizer of training, {reader} reads the exported one; "
        f"difference: {difference}",
        allowed="a tokenizer with the same tokens with and without the model's config.json",
        hint=hint or "train with the tokenizer files that were published with the model",
    )


_MODEL: Final = (
    "unk_token", "byte_fallback", "ignore_merges", "fuse_unk", "dropout", "continuing_subword_prefix",
    "end_of_word_suffix", "max_input_chars_per_word",
)  # fmt: skip
"""Names of options of a model (such as BPE) in the library `tokenizers`."""


def _pipeline(hf: Any) -> tuple[Any, ...] | None:
    """Return class, components and settings of a fast tokenizer, all except its vocabulary; None for a slow one."""
    if not hf.is_fast:
        return None
    added = sorted(map(repr, hf.added_tokens_decoder.values()))
    special = {name: str(value) for name, value in hf.special_tokens_map.items()}
    return (type(hf), _states(hf.backend_tokenizer, PARTS), added, special, hf.chat_template)


def _states(backend: Any, parts: Sequence[str]) -> list[Any]:
    """Return the JSON states of the components `parts` of a fast tokenizer, then class and options of its model."""
    states: list[Any] = []
    for name in parts:
        part = getattr(backend, name)
        states.append(None if part is None else json.loads(part.__getstate__()))
    options = {name: getattr(backend.model, name, None) for name in _MODEL}
    return [*states, type(backend.model).__name__, options]


def reading_note(hf: Any, directory: Path, samples: Sequence[str]) -> str | None:
    """Return a warning if a tokenizer's class ignores parts of tokenizer.json that affect tokens; otherwise None.

    Training and exported models are then consistent, but programs that read tokenizer.json with the library
    `tokenizers` get different tokens. Only fast tokenizers with a BPE model are checked.

    Args:
        hf: Tokenizer as loaded from the directory.
        directory: Directory of the tokenizer's files.
        samples: Texts of the data to compare in addition to the built-in probe texts.
    """
    from tokenizers import Tokenizer as Backend

    path = directory / BACKEND
    if not path.is_file() or not hf.is_fast:
        return None
    parts = ("normalizer", "pre_tokenizer")
    where = f"tokenizer: {directory}"
    try:
        with tokenizing(where):
            plain = Backend.from_file(str(path))
            is_equal = _states(plain, parts) == _states(hf.backend_tokenizer, parts)
            if is_equal or type(plain.model).__name__ != "BPE":
                return None
        check_parts(plain, where)
        with tokenizing(where):
            for text in (*_PROBES, *samples):
                encoding = plain.encode(text, add_special_tokens=False)
                ids = hf(text, add_special_tokens=False, verbose=False)["input_ids"]
                if ids != encoding.ids:
                    return _sentence(hf, path, text, ids, encoding)
    except BadValue as error:
        name = type(hf).__name__
        return f"{name} ignores parts of {path}, which fail in other programs: {error.got}"
    return None


def _sentence(hf: Any, file: Path, text: str, ids: Sequence[int], plain: Any) -> str:
    i = _equal_tokens(ids, plain.ids)
    tokens = hf.convert_ids_to_tokens(ids[i : i + 1]), plain.tokens[i : i + 1]
    first, second = (json.dumps(token[0]) if token else "no token" for token in tokens)
    return (
        f"the class {type(hf).__name__} ignores parts of {file}: in {abbreviated(text, 40)}, token {i + 1} is {first} "
        f"in training and exports, and {second} in programs that read this file without transformers"
    )

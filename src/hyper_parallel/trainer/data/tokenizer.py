"""Tokenizer of a recipe: `data.tokenizer`, the tokenizer of the model, or a byte-level BPE trained on the data.

Every tokenizer is stored as a Hugging Face tokenizer directory, whose files the run's export contains. A trained
tokenizer has four special tokens (end of text, padding, two for chat turns). Its alphabet is the 256 bytes, so it can
encode any text. Sources: Sennrich et al. 2016 (BPE), Radford et al. 2019 (byte-level BPE).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from hyper_parallel.config import LEAST_TRAINED_VOCABULARY, Data
from hyper_parallel.errors import BadValue, NoData
from hyper_parallel.received import Limits, read_json, read_text
from hyper_parallel.trainer.data._cache import byte_bar, cache_root, digest, entry
from hyper_parallel.trainer.data._template import compiled
from hyper_parallel.trainer.data.chat import CHATML, PLAIN, RAW
from hyper_parallel.trainer.data.saved_tokenizer import (
    CLASS_KEYS,
    PROCESSOR_FILES,
    has_tokenizer,
    load_tokenizer,
    media_of_processor,
    reading_note,
    required_class,
    set_class,
    tokenizer_files,
)
from hyper_parallel.trainer.data.source_errors import MAIN
from hyper_parallel.trainer.data.sources import PlainText, Source, resolve
from hyper_parallel.trainer.data.template_properties import generation_stops
from hyper_parallel.trainer.files import FileEntry, copy_files
from hyper_parallel.units import MiB

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")

_TRAIN_BYTES = 64 * MiB  # more text hardly changes the merges of a small vocabulary
_TEMPLATE_BYTES: Final = 512 * 1024
"""Maximum bytes of a chat template file: four times the maximum number of characters."""
_VERSION = 1
_SETTLED: Final = "class that reads the tokenizer, 2"
_SAMPLES: Final = 32
"""Maximum number of documents of each source on which tokenizers are compared."""
_MOST_SAMPLES: Final = 64
"""Maximum number of documents of all sources on which tokenizers are compared."""
_SAMPLE_CHARACTERS: Final = 4000
"""Maximum characters of each document on which tokenizers are compared."""
_ENTRIES: Final = 4096
"""Default vocabulary size of a trained tokenizer, unless the model's vocabulary is smaller."""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer of transformers and its directory.

    Attributes:
        hf: Tokenizer of transformers.
        directory: Directory of the tokenizer's files.
        notes: Sentences about the tokenizer for the user.
    """

    hf: Any
    directory: Path
    notes: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return max(self.hf.get_vocab().values()) + 1

    @property
    def pad_id(self) -> int:
        """Id of the padding token, or of the end-of-text token if there is no padding token."""
        pad = self.hf.pad_token_id
        return int(self.hf.eos_token_id if pad is None else pad)

    @property
    def stops(self) -> list[int]:
        """Stop token ids (`eos_token_id`) of the generation config in the tokenizer's directory."""
        return generation_stops(self.hf)

    @property
    def media(self) -> tuple[str, ...]:
        """Media kinds (`image`, `audio`) that a processor in the tokenizer's directory reads."""
        return media_of_processor(self.directory)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the tokenizer's files."""
        names = tokenizer_files(self.directory)
        return digest({name: FileEntry.of(self.directory / name).sha256 for name in names})


def unknown_token(hf: Any) -> int | None:
    """Return the id of the unknown token; None if there is none or it is also the end, beginning or padding token."""
    unknown: int | None = hf.unk_token_id
    return None if unknown in (hf.eos_token_id, hf.bos_token_id, hf.pad_token_id) else unknown


def open_sources(
    data: Data,
    *,
    stage: str,
    model_path: str | None,
    progress: bool,
    vocab_limit: int | None,
    model_config: Mapping[str, Any] | None = None,
) -> tuple[Tokenizer, list[Source]]:
    """Return the tokenizer of a recipe, and its sources; arguments and errors are those of `prepare`."""
    media = media_of_processor(Path(data.tokenizer or model_path or "").expanduser())
    keys = [MAIN if isinstance(data.source, str) else f"{MAIN}[{i}]" for i in range(len(data.parts()))]
    parts = zip(data.parts(), keys, strict=True)
    sources = [resolve(section, stage, media=media, key=key) for (section, _), key in parts]
    cache = cache_root(data.cache_dir)
    tokenizer = _obtain(data, sources, model_path, cache, progress, vocab_limit, model_config)
    if vocab_limit is not None and tokenizer.vocab_size > vocab_limit:
        raise _too_large(tokenizer, data, model_path, vocab_limit)
    return tokenizer, [bind_tokenizer(source, tokenizer) for source in sources]


def _too_large(tokenizer: Tokenizer, data: Data, model_path: str | None, vocab_limit: int) -> BadValue:
    own = has_tokenizer(model_path)
    where, hint = f"data.vocab_size: {data.vocab_size}", f"data.vocab_size={vocab_limit}"
    if data.tokenizer:
        where, hint = f"data.tokenizer: {data.tokenizer}", "data.tokenizer=null"
        if not own and _has_weights(model_path):  # a model with weights needs a tokenizer
            hint = f"set `data.tokenizer` to the tokenizer of the model, of at most {vocab_limit} tokens"
    elif own:
        where = f"model.path: {model_path}"
        hint = f"model.resize_token_embeddings({tokenizer.vocab_size}) of transformers adds the rows"
    elif vocab_limit < LEAST_TRAINED_VOCABULARY:
        where = f"model.path: {model_path}"
        hint = f'set "vocab_size" in the model\'s config.json to at least {LEAST_TRAINED_VOCABULARY}'
    beyond = sorted(word for word, i in tokenizer.hf.get_vocab().items() if i >= vocab_limit)
    names = ", ".join(beyond[:3]) + (", ..." if len(beyond) > 3 else "")
    return BadValue(
        "the tokenizer has more tokens than the model's vocabulary",
        where=where,
        got=f"tokenizer={tokenizer.vocab_size}, model={vocab_limit}; not in the model: {names}",
        allowed=f"a tokenizer of at most {vocab_limit} tokens",
        hint=hint,
    )


def _has_weights(model_path: str | None) -> bool:
    files = Path(model_path or "").glob("*") if model_path and Path(model_path).is_dir() else ()
    return any(file.suffix in (".safetensors", ".bin") for file in files)


def bind_tokenizer(source: Source, tokenizer: Tokenizer) -> Source:
    """Return the source with `special` and `plain` set for a tokenizer; set the id of unknown tokens in its counts."""
    source.counts.unknown_id = unknown_token(tokenizer.hf)
    names = [str(one) for one in tokenizer.hf.added_tokens_decoder.values() if one.special and str(one)]
    special = re.compile("|".join(map(re.escape, sorted(names, key=len)))) if names else None
    template = source.data.chat_template
    plain: PlainText = "all" if template == "none" else "never"
    if template == "auto" and tokenizer.hf.chat_template == PLAIN:
        plain = "pairs"
    plain = plain if source.is_conversations else "never"
    return replace(source, special=special, plain=plain)


def _obtain(
    data: Data,
    sources: Sequence[Source],
    model_path: str | None,
    cache: Path,
    show: bool,
    vocab_limit: int | None,
    config: Mapping[str, Any] | None,
) -> Tokenizer:
    """Return the tokenizer of a recipe: `data.tokenizer`, else the model's, else one trained on the data.

    The result is a copy if its chat template or class must be changed. Arguments and errors are those of `prepare`.
    """
    existing = data.tokenizer or (model_path if has_tokenizer(model_path) else None)
    if existing:
        directory = Path(existing).expanduser().absolute()
    else:
        texts = [s.identity() for s in sources]
        size = data.vocab_size or min(_ENTRIES, vocab_limit or _ENTRIES)
        key = digest([_VERSION, texts if len(texts) > 1 else texts[0], size, _TRAIN_BYTES])
        directory, _ = entry(cache / "tokenizers", key, lambda target: _train(target, size, sources, show))
    tokenizer = original = Tokenizer(load_tokenizer(directory, other="data.tokenizer=TOKENIZER_DIR"), directory)
    if tokenizer.hf.eos_token_id is None:
        raise BadValue(
            "the tokenizer has no end-of-text token, which marks the end of every document and answer",
            where=f"tokenizer: {directory}",
            hint="add `eos_token` to its tokenizer_config.json",
        )
    template = _template(data, tokenizer.hf, any(s.is_conversations for s in sources))
    if template is not None and template != tokenizer.hf.chat_template:
        tokenizer = _with_template(tokenizer, template, cache)
    return _with_class(tokenizer, original if existing else None, sources, config, cache)


def _with_class(
    tokenizer: Tokenizer,
    original: Tokenizer | None,
    sources: Sequence[Source],
    config: Mapping[str, Any] | None,
    cache: Path,
) -> Tokenizer:
    """Return the tokenizer, or a copy with `tokenizer_class` set if exports need it to produce the same tokens.

    `original` is the tokenizer before its template was set; None: the tokenizer was trained on the sources.
    """
    import transformers

    deciding = None if config is None else [config.get(key) for key in CLASS_KEYS]
    inputs = [_SETTLED, tokenizer.fingerprint, type(tokenizer.hf).__name__, deciding]
    inputs += [None if original is None else [original.fingerprint, str(original.directory)]]
    inputs += [transformers.__version__, [source.identity() for source in sources]]

    def build(target: Path) -> dict[str, Any]:
        samples = _samples(sources)
        is_own = original is None
        configs = [None] if config is None else [config, None]  # next to an exported model, an adapter
        name = required_class(tokenizer.hf, tokenizer.directory, configs, samples, is_own=is_own)
        if name is not None:
            copy_files(tokenizer.directory, target, tokenizer_files(tokenizer.directory))
            copy_files(tokenizer.directory, target, ("generation_config.json",))
            set_class(target, name)
        note = None
        if original is not None:
            note = reading_note(original.hf, original.directory, samples)
        return {"class": name, "note": note}

    directory, meta = entry(cache / "tokenizers", digest(inputs), build)
    notes = () if meta["note"] is None else (meta["note"],)
    if meta["class"] is None:
        return replace(tokenizer, notes=notes)
    return Tokenizer(load_tokenizer(directory), directory, notes)


def _samples(sources: Sequence[Source]) -> list[str]:
    documents = itertools.chain.from_iterable(
        itertools.islice(source.with_own_counts().documents(), _SAMPLES) for source in sources
    )
    return [d.plain[:_SAMPLE_CHARACTERS] for d in itertools.islice(documents, _MOST_SAMPLES)]


def _template(data: Data, hf: Any, has_conversations: bool) -> str | None:
    """Return the chat template to set in the tokenizer; None if the tokenizer stays as it is."""
    if data.chat_template == "none":
        return RAW
    if data.chat_template != "auto":
        return _read_template(Path(data.chat_template).expanduser())
    if not has_conversations or hf.chat_template:
        return None
    # Older processors have their template in this file, which tokenizers do not read.
    older = Path(hf.name_or_path) / "chat_template.json"
    if not older.is_file():
        return PLAIN
    try:
        return str(read_json(older, Limits(num_bytes=_TEMPLATE_BYTES))["chat_template"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = "the chat template of the processor cannot be read"
        raise NoData(
            problem,
            where=str(older),
            got=f"no key {error}" if isinstance(error, KeyError) else str(error)[:120],
            hint="fetch this file again from where the model was published, or set `data.chat_template=FILE`",
        ) from error


def _read_template(path: Path) -> str:
    try:
        text = read_text(path, Limits(num_bytes=_TEMPLATE_BYTES))
        compiled(text)
    except Exception as error:  # compiling a damaged template may raise any exception
        line = getattr(error, "lineno", None)
        raise BadValue(
            "the chat template cannot be read or compiled",
            where=f"data.chat_template: {path}" + (f", line {line}" if line else ""),
            got=str(error)[:200] or type(error).__name__,
            allowed="auto, none, or a file with a Jinja template",
            changes={"data.chat_template": "auto"},
        ) from error
    return text


def _with_template(tokenizer: Tokenizer, template: str, cache: Path) -> Tokenizer:
    stops = generation_stops(tokenizer.hf)
    key = digest([_VERSION, tokenizer.fingerprint, template, *([stops] if stops else [])])
    tokenizer.hf.chat_template = template

    def save(target: Path) -> None:
        tokenizer.hf.save_pretrained(str(target))
        copy_files(tokenizer.directory, target, PROCESSOR_FILES)
        if stops:
            text = json.dumps({"eos_token_id": stops})
            (target / "generation_config.json").write_text(text, encoding="utf-8")

    directory, _ = entry(cache / "tokenizers", key, save)
    return Tokenizer(load_tokenizer(directory), directory)


def _train(target: Path, vocab_size: int, sources: Sequence[Source], show: bool) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def texts() -> Iterator[str]:
        seen = 0
        for document in itertools.chain.from_iterable(s.documents() for s in sources):
            if seen >= _TRAIN_BYTES:
                return
            seen += document.num_bytes
            advance(document.num_bytes)
            yield document.plain

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD, *TURN_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    total = sum(s.num_bytes for s in sources)
    with byte_bar("train tokenizer", min(total, _TRAIN_BYTES), show) as advance:
        backend.train_from_iterator(texts(), trainer)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=list(TURN_TOKENS),
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = CHATML
    hf.save_pretrained(str(target))

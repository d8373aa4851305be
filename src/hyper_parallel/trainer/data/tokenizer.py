"""Tokenizers: the recipe's, the model's, or a byte-level BPE trained on the source.

Whatever is used lies in a Hugging Face tokenizer directory, so that the run's export carries it and any tool loads
it. A trained tokenizer has four special tokens (end of text, padding, two for chat turns) and the 256 bytes as its
alphabet: no text is unknown to it. Source of the method: Sennrich et al. 2016 (BPE), Radford et al. 2019 (on bytes).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue
from hyper_parallel.received import Limits, read_text
from hyper_parallel.trainer.data._cache import byte_bar, digest, entry
from hyper_parallel.trainer.data._template import compiled
from hyper_parallel.trainer.data.chat import CHATML, PLAIN, RAW
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.saved_tokenizer import (
    has_tokenizer,
    load_tokenizer,
    note_on_reading,
    samples_of,
    set_class,
    settled,
    tokenizer_files,
)
from hyper_parallel.trainer.data.sources import Source
from hyper_parallel.trainer.data.template_properties import generation_stops
from hyper_parallel.trainer.files import FileEntry, copy_files
from hyper_parallel.units import MiB

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
TURN_TOKENS = ("<|im_start|>", "<|im_end|>")

_TRAIN_BYTES = 64 * MiB  # more text hardly changes the merges of a small vocabulary
_TEMPLATE_BYTES: Final = 512 * 1024
"""Size of a file with a chat template; one character may have four bytes."""
_VERSION = 1
_SETTLED: Final = "class that reads the tokenizer, 2"
_SAMPLES: Final = 32
"""Documents of each source that are probes of the tokenizer."""
_ENTRIES: Final = 4096
"""Entries of a tokenizer that is trained here, where the recipe names no number and the model has as many."""


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer, and the directory where it lies.

    Attributes:
        hf: The tokenizer.
        directory: The directory.
        notes: Sentences for the person who trains.
    """

    hf: Any
    directory: Path
    notes: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return max(self.hf.get_vocab().values()) + 1

    @property
    def fingerprint(self) -> str:
        """Hash of its files."""
        names = tokenizer_files(self.directory)
        return digest({name: FileEntry.of(self.directory / name).sha256 for name in names})


def unknown_token(hf: Any) -> int | None:
    """Return the token that stands for all words and characters that a tokenizer does not know; None without one.

    Tokenizers on bytes name the end-of-text token, which no text is made into.
    """
    unknown: int | None = hf.unk_token_id
    return None if unknown in (hf.eos_token_id, hf.bos_token_id, hf.pad_token_id) else unknown


def obtain(
    data: Data,
    sources: Sequence[Source],
    model_path: str | None,
    cache: Path,
    show: bool,
    vocab_limit: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> Tokenizer:
    """Return the tokenizer of a recipe: `data.tokenizer`, else the model's, else trained on the source.

    Where `data.chat_template` names another template than the tokenizer's own, a copy of the tokenizer has it. Where
    transformers would read its files with another class in an export or beside adapters, a copy names the class.

    Args:
        data: Section `data` of the recipe.
        sources: Its sources.
        model_path: `model.path` of the recipe.
        cache: Root of the cache.
        show: Show bars on stderr.
        vocab_limit: Size of the model's vocabulary; None: not known.
        config: Values of the config of the model; None: not known.

    Raises:
        BadValue: HP102 when an export of the run would give other tokens than training.
    """
    given = data.tokenizer or (model_path if has_tokenizer(model_path) else None)
    if given:
        directory = Path(given).expanduser().absolute()
    else:
        texts = [s.identity() for s in sources]
        size = data.vocab_size or min(_ENTRIES, vocab_limit or _ENTRIES)
        matters = [_VERSION, texts if len(texts) > 1 else texts[0], size, _TRAIN_BYTES]
        directory = _saved(cache, matters, lambda: _train(size, sources, show))
    tokenizer = original = Tokenizer(load_tokenizer(directory), directory)
    if tokenizer.hf.eos_token_id is None:
        raise BadValue(
            "the tokenizer has no end-of-text token, so documents cannot be joined",
            where=f"data.tokenizer: {directory}",
            hint="add `eos_token` to its tokenizer_config.json",
        )
    template = _template(data, tokenizer.hf, any(s.is_conversations for s in sources))
    if template is not None and template != tokenizer.hf.chat_template:
        tokenizer = _with_template(tokenizer, template, cache)
    return _settled(tokenizer, original if given else None, sources, config, cache)


def _settled(
    tokenizer: Tokenizer,
    given: Tokenizer | None,
    sources: Sequence[Source],
    config: Mapping[str, Any] | None,
    cache: Path,
) -> Tokenizer:
    """Return the tokenizer, or a copy that names its class, so that every later reader gives the same tokens.

    Args:
        tokenizer: The tokenizer of training.
        given: The tokenizer that it was made of; None: it is trained here.
        sources: Sources of the recipe.
        config: Values of the config of the model; None: not known.
        cache: Root of the cache.
    """
    import transformers

    keys = ("model_type", "tokenizer_class", "model_name")
    deciding = None if config is None else [config.get(key) for key in keys]
    matters = [_SETTLED, tokenizer.fingerprint, type(tokenizer.hf).__name__, deciding]
    matters += [None if given is None else [given.fingerprint, str(given.directory)]]
    matters += [transformers.__version__, [source.identity() for source in sources]]

    def texts() -> Iterator[str]:
        for source in sources:
            first = replace(source, rules=replace(source.rules, counts=DataCounts()))
            yield from (d.plain for d in itertools.islice(first.documents(), _SAMPLES))

    def build(target: Path) -> dict[str, Any]:
        samples = samples_of(texts())
        is_own = given is None
        name = settled(tokenizer.hf, tokenizer.directory, config, samples, is_own=is_own)
        if name is not None:
            copy_files(tokenizer.directory, target, tokenizer_files(tokenizer.directory))
            copy_files(tokenizer.directory, target, ("generation_config.json",))
            set_class(target, name)
        note = None if given is None else note_on_reading(given.hf, given.directory, samples)
        return {"class": name, "note": note}

    directory, meta = entry(cache / "tokenizers", digest(matters), build)
    notes = () if meta["note"] is None else (meta["note"],)
    if meta["class"] is None:
        return replace(tokenizer, notes=notes)
    return Tokenizer(load_tokenizer(directory), directory, notes)


def _template(data: Data, hf: Any, has_conversations: bool) -> str | None:
    """Return the chat template that takes the place of the tokenizer's own; None: it keeps its own."""
    if data.chat_template == "none":
        return RAW
    if data.chat_template != "auto":
        return _read_template(Path(data.chat_template).expanduser())
    return PLAIN if has_conversations and not hf.chat_template else None


def _read_template(path: Path) -> str:
    """Return the template of a file.

    Raises:
        BadValue: HP102 when the file cannot be read or is no template.
    """
    try:
        text = read_text(path, Limits(num_bytes=_TEMPLATE_BYTES))
        compiled(text)
    except (
        Exception
    ) as error:  # jinja raises errors of its own, and what a damaged template leads to
        line = getattr(error, "lineno", None)
        raise BadValue(
            "the chat template cannot be read",
            where=f"data.chat_template: {path}" + (f", line {line}" if line else ""),
            got=str(error)[:200] or type(error).__name__,
            allowed="auto, none, or a file with a jinja template",
            hint="data.chat_template=auto",
        ) from error
    return text


def _with_template(tokenizer: Tokenizer, template: str, cache: Path) -> Tokenizer:
    """Return a copy of a tokenizer with another chat template, so that exports and `generate --chat` have it."""
    stops = generation_stops(tokenizer.hf)
    matters = [_VERSION, tokenizer.fingerprint, template, *([stops] if stops else [])]
    tokenizer.hf.chat_template = template

    def build(target: Path) -> dict[str, Any]:
        tokenizer.hf.save_pretrained(str(target))
        if stops:
            text = json.dumps({"eos_token_id": stops})
            (target / "generation_config.json").write_text(text, encoding="utf-8")
        return {}

    directory = entry(cache / "tokenizers", digest(matters), build)[0]
    return Tokenizer(load_tokenizer(directory), directory)


def _saved(cache: Path, matters: list[Any], make: Callable[[], Any]) -> Path:
    """Directory of the cached tokenizer that `matters` decides; what `make` gives is saved there when it is absent."""

    def build(target: Path) -> dict[str, Any]:
        make().save_pretrained(str(target))
        return {}

    return entry(cache / "tokenizers", digest(matters), build)[0]


def _train(vocab_size: int, sources: Sequence[Source], show: bool) -> Any:
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
    return hf

"""Tokenizers: the recipe's, the model's, or a byte-level BPE trained on the source.

Whatever is used lies in a Hugging Face tokenizer directory, so that the run's export carries it and any tool loads
it. A trained tokenizer has four special tokens (end of text, padding, two for chat turns) and the 256 bytes as its
alphabet: no text is unknown to it. Source of the method: Sennrich et al. 2016 (BPE), Radford et al. 2019 (on bytes).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue, NoData
from hyper_parallel.trainer._files import FileEntry
from hyper_parallel.trainer.data._cache import byte_bar, digest, entry
from hyper_parallel.trainer.data._chat import CHATML, PLAIN
from hyper_parallel.trainer.data._sources import Source
from hyper_parallel.units import MiB

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, PAD, "<|im_start|>", "<|im_end|>")

_TRAIN_BYTES = 64 * MiB  # more text hardly changes the merges of a small vocabulary
_VERSION = 1
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Tokenizer:
    """A transformers tokenizer, the directory where it lies, and the hash of its files."""

    hf: Any
    directory: Path
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one."""
        return max(self.hf.get_vocab().values()) + 1


def has_tokenizer(directory: str | Path | None) -> bool:
    """Whether a directory holds tokenizer files."""
    return directory is not None and any((Path(directory) / name).is_file() for name in _FILES)


def load_tokenizer(directory: str | Path) -> Any:
    """Load a tokenizer directory; local files only."""
    from transformers import AutoTokenizer

    directory = Path(directory).expanduser()
    if not has_tokenizer(directory):
        raise NoData(
            "the tokenizer directory holds no tokenizer",
            where=f"data.tokenizer: {directory}",
            allowed=f"a directory with one of {', '.join(_FILES)}",
        )
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:
        # transformers and tokenizers raise plain Exception for damaged files.
        raise NoData(
            "the tokenizer cannot be loaded",
            where=f"data.tokenizer: {directory}",
            got=(str(error).splitlines() or [type(error).__name__])[0][:200],
        ) from error


def obtain(
    data: Data, source: Source, model_path: str | None, cache: Path, show: bool
) -> Tokenizer:
    """The tokenizer of a recipe: `data.tokenizer`, else the model directory's, else trained on the source."""
    given = data.tokenizer or (model_path if has_tokenizer(model_path) else None)
    if given:
        directory = Path(given).expanduser().absolute()
    else:
        key = digest([_VERSION, source.identity(), data.vocab_size, _TRAIN_BYTES])
        directory, _ = entry(
            cache / "tokenizers", key, lambda target: _train(data, source, target, show)
        )
    hf = load_tokenizer(directory)
    if hf.eos_token_id is None:
        raise BadValue(
            "the tokenizer has no end-of-text token, so documents cannot be joined",
            where=f"data.tokenizer: {directory}",
            hint="add `eos_token` to its tokenizer_config.json",
        )
    if source.is_conversations and not hf.chat_template:
        # A copy with the plain template, so that `generate --chat` knows it.
        hf.chat_template = PLAIN
        key = digest([_VERSION, _fingerprint(directory), PLAIN])
        directory, _ = entry(cache / "tokenizers", key, lambda target: _save(hf, target))
        hf = load_tokenizer(directory)
    return Tokenizer(hf, directory, _fingerprint(directory))


def _save(hf: Any, target: Path) -> dict[str, Any]:
    hf.save_pretrained(str(target))
    return {}


def _fingerprint(directory: Path) -> str:
    names = (*_FILES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json")
    files = [directory / n for n in (*names, "added_tokens.json", "chat_template.jinja")]
    return digest({f.name: FileEntry.of(f).sha256 for f in files if f.is_file()})


def _train(data: Data, source: Source, target: Path, show: bool) -> dict[str, Any]:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def texts() -> Iterator[str]:
        seen = 0
        for document in source.documents():
            if seen >= _TRAIN_BYTES:
                return
            seen += document.num_bytes
            advance(document.num_bytes)
            yield document.plain

    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=data.vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with byte_bar("train tokenizer", min(source.num_bytes, _TRAIN_BYTES), show) as advance:
        backend.train_from_iterator(texts(), trainer)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        additional_special_tokens=list(SPECIAL_TOKENS[2:]),
        clean_up_tokenization_spaces=False,
    )
    hf.chat_template = CHATML
    return _save(hf, target)


def model_vocab_size(model_path: str | None) -> int | None:
    """`vocab_size` of a model directory or config.json; None when the path is neither (a preset name)."""
    if model_path is None:
        return None
    path = Path(model_path).expanduser()
    config = path / "config.json" if path.is_dir() else path
    if config.suffix != ".json" or not config.is_file():
        return None
    try:
        values = json.loads(config.read_text())
    except ValueError:
        return None  # the model room reports an unreadable config with its own code
    size = values.get("vocab_size", values.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None

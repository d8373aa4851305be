"""Small tokenizers, whole and with one part exchanged."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

Edit = Callable[[dict[str, Any]], object]


@cache
def small() -> Any:
    """A tokenizer whose tokens are the 256 bytes and the end of a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|end|>"]
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def with_template(template: object) -> Any:
    """The small tokenizer with a chat template."""
    tokenizer = small()
    tokenizer.chat_template = template
    return tokenizer


def write(directory: Path, edit: Edit = lambda _: None) -> Path:
    """Write the small tokenizer with a part of tokenizer.json exchanged."""
    with_template(None).save_pretrained(directory)
    path = directory / "tokenizer.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))
    return directory

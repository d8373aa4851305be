"""Prompts with images and audio for generation: tokens and model inputs, computed by the model's processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from hyper_parallel.errors import BadValue, HyperParallelError, MissingDependency
from hyper_parallel.trainer.data.answer_spans import render
from hyper_parallel.trainer.data.media_arrays import per_token_names
from hyper_parallel.trainer.data.media_kinds import KINDS
from hyper_parallel.trainer.data.media_records import take_media
from hyper_parallel.trainer.data.media_tokens import (
    TEXT_ARRAYS,
    decoded_media,
    process,
    processor_of,
)
from hyper_parallel.trainer.data.record_keys import RecordRules
from hyper_parallel.trainer.data.saved_tokenizer import media_of_processor
from hyper_parallel.trainer.data.turns import conversation_of, read_turns

_WHERE = "prompt"


@dataclass(frozen=True)
class PromptMedia:
    """Processed images and recordings of a prompt.

    Attributes:
        arrays: Model inputs, by argument name of the model's forward.
        per_token: Names of the processor's arrays that have one number per token.
    """

    arrays: Mapping[str, NDArray[Any]]
    per_token: frozenset[str]


def has_parts(turns: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the content of any turn is a list of content parts, such as texts and images."""
    return any(isinstance(turn.get("content"), list | tuple) for turn in turns)


def encode_parts(tokenizer: Any, turns: Sequence[Mapping[str, Any]]) -> tuple[list[int], PromptMedia]:
    """Return the token ids of a prompt and its processed media.

    Args:
        tokenizer: Tokenizer whose directory has the processor's files.
        turns: Turns whose contents are texts or lists of parts: `{"type": "image", "image": PATH}`, `{"type": "audio",
            "audio": PATH}`, `{"type": "text", "text": ...}`. Paths are relative to the working directory.

    Raises:
        BadValue: HP102 when the model, its template or its processor do not support the media.
        NoData: HP602 for turns or files that cannot be read, or an unusable processor.
        MissingDependency: HP501 when a package that the media need is not installed.
    """
    kinds = media_of_processor(tokenizer.name_or_path)
    if not kinds:
        raise BadValue(
            "the model has no processor for images or audio, so prompts must be texts",
            where=tokenizer.name_or_path,
            allowed="a directory with preprocessor_config.json or processor_config.json",
        )
    try:
        return _encoded(tokenizer, turns, kinds)
    except HyperParallelError as error:
        if not isinstance(error, MissingDependency):
            error.hint, error.changes = None, {}  # most hints are recipe overrides, for training
        raise


def _encoded(tokenizer: Any, turns: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> tuple[list[int], PromptMedia]:
    rules = RecordRules(media_kinds=tuple(KINDS[name] for name in kinds))
    messages, files = take_media(read_turns(turns, rules, _WHERE), {}, rules, _WHERE)
    conversation = conversation_of(messages, None, (), {}, files)
    text = render(tokenizer, conversation, prompt=True, where=_WHERE)
    items = decoded_media(tokenizer, conversation, _WHERE)
    processor = processor_of(tokenizer)
    arrays = process(processor, [text], [items], _WHERE)
    media = {name: array for name, array in arrays.items() if name not in TEXT_ARRAYS}
    return arrays["input_ids"][0].tolist(), PromptMedia(media, per_token_names(processor))

"""Tokens of conversations with images or audio (media items), expanded by the model's processor, with exact targets.

The chat template writes one placeholder token for an item, and the processor expands it to the tokens that the model
reads. Answers are located in the text before the expansion. The tokens outside of the expansions must be equal before
and after, so targets are exact whatever the processor writes for an item.

    template    user  <image>                    Which digit?  assistant  [seven <end>]
    processor   user  <image><image><image>...   Which digit?  assistant  [seven <end>]
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Final

from numpy.typing import NDArray

from hyper_parallel.errors import BadValue, MissingDependency, NoData
from hyper_parallel.trainer.data.document import Conversation, MediaFile
from hyper_parallel.trainer.data.media_kinds import AUDIO, IMAGE, KINDS
from hyper_parallel.trainer.data.media_records import checksum, content_of, decoded
from hyper_parallel.trainer.data.template_properties import properties_of

TEXT_ARRAYS: Final = ("input_ids", "attention_mask")
"""Arrays of a processor that are not passed to the model, which gets tokens and padding from the prepared data."""


def expand(
    tokenizer: Any,
    conversation: Conversation,
    text: str,
    tokens: tuple[Sequence[int], Sequence[bool]],
    where: str,
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation after expansion of its media, and for each whether it is a target.

    Args:
        tokenizer: Tokenizer whose directory has the processor's files.
        conversation: Conversation with media.
        text: Conversation as rendered by the chat template.
        tokens: Token ids of the text, and for each whether it is a target.
        where: Location of the record, for error messages.

    Raises:
        BadValue: HP102 when template or processor do not support the media.
        NoData: HP602 when an image, a recording or the processor cannot be read.
        MissingDependency: HP501 when a package that the media need is not installed.
    """
    items = decoded_media(tokenizer, conversation, where)
    arrays = process(processor_of(tokenizer), [text], [items], where)
    return aligned(*tokens, arrays["input_ids"][0].tolist(), where)


def decoded_media(tokenizer: Any, conversation: Conversation, where: str) -> list[tuple[str, Any]]:
    """Return (kind, decoded value) of each image or recording of a conversation; errors are those of `expand`."""
    for kind in (item.kind for item in conversation.media):
        if kind not in properties_of(tokenizer).written_media:
            raise BadValue(
                f"the chat template writes nothing for {KINDS[kind].one}",
                where=where,
                allowed=f"a template that reads parts of type {kind}",
                changes={"data.chat_template": "FILE"},
            )
    rate = rate_of(processor_of(tokenizer))
    return [(item.kind, decoded(item, where, rate)) for item in conversation.media]


def processor_of(tokenizer: Any) -> Any:
    """Return the processor in the tokenizer's directory; errors are those of `load_processor`."""
    return load_processor(Path(tokenizer.name_or_path))


def reference_line(conversation: Conversation, text: str, where: str, blob: IO[bytes]) -> bytes:
    """Return the text of a conversation and references to its media as a JSON line.

    A reference is a file name, or the position in `blob` of bytes from the record, which are appended to `blob`. Errors
    are those of `content_of`.
    """
    media = [_stored(item, where, blob) for item in conversation.media]
    where = Path(where).name  # omit the folder, so prepared data does not depend on it
    return json.dumps({"where": where, "text": text, "media": media}).encode() + b"\n"


def _stored(item: MediaFile, where: str, blob: IO[bytes]) -> dict[str, Any]:
    content = content_of(item, where)
    stored = {"kind": item.kind, "sha256": checksum(content)}
    if item.content is None:
        return {"name": item.name, **stored}
    start = blob.tell()
    blob.write(content)
    return {"start": start, "size": len(content), **stored}


@lru_cache(maxsize=2)
def load_processor(directory: Path) -> Any:
    """Load a transformers processor from the files of a directory, without running code in them.

    Raises:
        MissingDependency: HP501 when a package of the processor is not installed.
        NoData: HP602 when the processor cannot be loaded, or reads neither images nor audio.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(str(directory), local_files_only=True)
    except ImportError as error:
        raise MissingDependency(
            "the processor of the model needs a package that is not installed",
            where=str(directory),
            got=" ".join(str(error).split())[:160],
            hint="pip install 'hyper-parallel[images,audio]'",
        ) from error
    except Exception as error:  # transformers raises many exception classes for damaged files
        raise NoData(
            "the processor of the model cannot be loaded",
            where=str(directory),
            got=" ".join(str(error).split())[:200] or type(error).__name__,
            hint="fetch the processor files of the model again",
        ) from error
    parts = [name for kind in KINDS.values() for name in kind.processors]
    if not hasattr(processor, "tokenizer") or not any(hasattr(processor, name) for name in parts):
        raise NoData(
            "the model's processor reads neither images nor audio",
            where=str(directory),
            got=type(processor).__name__,
            allowed=f"a processor with a tokenizer and one of {', '.join(parts)}",
        )
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def rate_of(processor: Any) -> int:
    """Return the sampling rate in Hz that a processor expects; 0 if it reads no audio."""
    parts = (getattr(processor, name, None) for name in AUDIO.processors)
    return next((int(part.sampling_rate) for part in parts if hasattr(part, "sampling_rate")), 0)


def process(
    processor: Any, texts: Sequence[str], media: Sequence[Sequence[tuple[str, Any]]], where: str
) -> dict[str, NDArray[Any]]:
    """Run a processor on texts with media; return its arrays by name, padded on the right.

    Args:
        processor: Processor of the model.
        texts: Text of each row.
        media: For each row, (kind, decoded value) of each image or recording.
        where: Location of a record, for error messages.

    Raises:
        BadValue: HP102 when the processor raises, or ignores a kind of media.
    """
    rows = {name: [[v for kind, v in row if kind == name] for row in media] for name in KINDS}
    used = {name: items for name, items in rows.items() if any(items)}
    arguments: dict[str, Any] = {}
    if IMAGE.name in used:
        arguments["images"] = used[IMAGE.name]
    if AUDIO.name in used:
        arguments["audio"] = [samples for row in used[AUDIO.name] for samples in row]
        arguments["audio_kwargs"] = {"sampling_rate": rate_of(processor)}
    try:
        tensors = processor(
            text=list(texts),
            text_kwargs={"add_special_tokens": False, "padding": True, "padding_side": "right"},
            return_tensors="pt",
            **arguments,
        )
    except Exception as error:  # a processor may raise any exception
        raise BadValue(
            "the processor of the model rejects a conversation",
            where=where,
            got=" ".join(str(error).split())[:300] or type(error).__name__,
            hint="correct or remove the record; its texts must not contain image or audio tokens of the model",
        ) from error
    if sum(tensor.is_floating_point() for tensor in tensors.values()) < len(used):
        raise BadValue(
            f"the processor of the model ignores the {' or the '.join(used)} of a conversation",
            where=where,
            got=f"{type(processor).__name__} returns {', '.join(tensors)}",
            allowed="a processor whose call takes text, images and audio",
        )
    # numpy has no bfloat16.
    return {n: (t.float() if t.is_floating_point() else t).numpy() for n, t in tensors.items()}


def aligned(
    ids: Sequence[int], targets: Sequence[bool], expanded: Sequence[int], where: str
) -> tuple[list[int], list[bool]]:
    """Return `expanded` as a list, and for each token whether it is a target, by aligning it with `ids`.

    Tokens whose count differs between `ids` and `expanded` may belong to images or recordings. All other tokens must be
    equal and in the same order. Tokens of images and recordings are not targets.

    Args:
        ids: Token ids before the expansion of media.
        targets: For each of `ids`, whether it is a target.
        expanded: Token ids after the expansion.
        where: Location of the record, for error messages.

    Raises:
        BadValue: HP102 when other tokens differ.
    """
    before, after = Counter(ids), Counter(expanded)
    added, removed = after - before, before - after
    marked, place = [False] * len(expanded), 0
    for position, token in enumerate(expanded):
        while place < len(ids) and ids[place] != token and removed[ids[place]] and not targets[place]:
            removed[ids[place]] -= 1
            place += 1
        if place < len(ids) and ids[place] == token:
            marked[position], place = targets[place], place + 1
        elif added[token] and not all(targets[max(place - 1, 0) : place + 1]):
            added[token] -= 1
        else:
            break
    else:
        if place == len(ids):
            return list(expanded), marked
    raise BadValue(
        "the processor of the model changes tokens outside of images and audio, so targets cannot be identified",
        where=where,
        got=f"token {place + 1} of {len(ids)} in the text before processing",
    )

"""Tokens of conversations with images: expansion by the model's own processor, with exact labels.

The chat template writes a short mark for an image, and the processor replaces it by as many tokens as the image needs.
Answers are located in the text with marks. Its tokens and those of the processor must be equal outside of the
expansions, so every target keeps its token and its predecessor among the targets, whatever the processor writes for an
image.

    template    user  <image>                    Which digit?  assistant  [seven <end>]
    processor   user  <image><image><image>...   Which digit?  assistant  [seven <end>]
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final
from weakref import WeakKeyDictionary

from hyper_parallel.errors import BadValue, MissingDependency, NoData
from hyper_parallel.trainer.data.document import Conversation, ImageFile
from hyper_parallel.trainer.data.media_records import checksum, content_of, decoded
from hyper_parallel.trainer.data.template_properties import properties_of

TEXT_ARRAYS: Final = ("input_ids", "attention_mask")
"""Arrays of a processor that are not passed to the model: tokens are stored, and rows are padded on the right."""


def expand(
    tokenizer: Any,
    conversation: Conversation,
    text: str,
    tokens: tuple[Sequence[int], Sequence[bool]],
    where: str,
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation with expanded images and, for each, whether it is a target.

    Args:
        tokenizer: Tokenizer whose directory holds the processor.
        conversation: Conversation with images.
        text: Its text by the chat template.
        tokens: Tokens of the text, and whether each is a target.
        where: Location of the record, for errors.

    Raises:
        BadValue: HP102 when template or processor do not support the images.
        NoData: HP602 when an image cannot be read.
    """
    if not properties_of(tokenizer).writes_images:
        raise BadValue(
            "the chat template writes nothing for an image",
            where=where,
            allowed="a template that reads parts of type image",
            hint="data.chat_template=FILE",
        )
    files = conversation.images
    images = [decoded(content_of(file, where), file.name, where) for file in files]
    arrays = process(_processor_of(tokenizer), [text], [images], where)
    return aligned(*tokens, arrays["input_ids"][0].tolist(), where)


_PROCESSORS: Final[WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


def _processor_of(tokenizer: Any) -> Any:
    """Return the processor in the directory of a tokenizer."""
    if tokenizer not in _PROCESSORS:
        _PROCESSORS[tokenizer] = load_processor(Path(tokenizer.name_or_path))
    return _PROCESSORS[tokenizer]


def reference_line(conversation: Conversation, text: str, where: str, blob: IO[bytes]) -> bytes:
    """Return the text of a conversation and references to its images as a line of JSON.

    Images that the record holds as bytes are appended to `blob`.
    """
    images = [_stored(image, where, blob) for image in conversation.images]
    where = Path(where).name  # equal wherever the same data is prepared
    return json.dumps({"where": where, "text": text, "images": images}).encode() + b"\n"


def _stored(image: ImageFile, where: str, blob: IO[bytes]) -> dict[str, Any]:
    content = content_of(image, where)
    if image.content is None:
        return {"name": image.name, "sha256": checksum(content)}
    start = blob.tell()
    blob.write(content)
    return {"start": start, "size": len(content), "sha256": checksum(content)}


def load_processor(directory: Path) -> Any:
    """Load the processor of a directory: local files only, and no code in them.

    Raises:
        MissingDependency: HP501 when a package of the processor is not installed.
        NoData: HP602 when it cannot be loaded.
    """
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(str(directory), local_files_only=True)
    except ImportError as error:
        raise MissingDependency(
            "the image processor of the model needs a package that is not installed",
            where=str(directory),
            got=" ".join(str(error).split())[:160],
            hint="pip install 'hyper-parallel[images]'",
        ) from error
    except Exception as error:  # transformers raises many classes for damaged files
        raise NoData(
            "the image processor of the model cannot be loaded",
            where=str(directory),
            got=" ".join(str(error).split())[:200] or type(error).__name__,
        ) from error
    if not (hasattr(processor, "tokenizer") and hasattr(processor, "image_processor")):
        raise NoData(
            "the model's processor does not read images",
            where=str(directory),
            got=type(processor).__name__,
            allowed="a processor with a tokenizer and an image processor",
        )
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return processor


def process(
    processor: Any, texts: Sequence[str], images: Sequence[Sequence[Any]], where: str
) -> Mapping[str, Any]:
    """Return the tensors of a processor for texts with images, padded on the right.

    Raises:
        BadValue: HP102 when the processor raises.
    """
    try:
        arrays: Mapping[str, Any] = processor(
            images=[list(one) for one in images],
            text=list(texts),
            add_special_tokens=False,
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        return arrays
    except Exception as error:  # a processor raises any class
        raise BadValue(
            "the image processor of the model refuses a conversation",
            where=where,
            got=f"{' '.join(str(error).split())[:300] or type(error).__name__}",
            allowed="texts without image tokens of the model other than those of the record's images",
        ) from error


def aligned(
    ids: Sequence[int], targets: Sequence[bool], expanded: Sequence[int], where: str
) -> tuple[list[int], list[bool]]:
    """Return expanded tokens and whether each is a target, given the tokens and targets before the expansion.

    Tokens that occur more often after the expansion, or less often, may belong to images. All others must be equal and
    in the same order. Targets never belong to images, and no image lies between two adjacent targets.

    Raises:
        BadValue: HP102 when the tokens differ outside of the images.
    """
    before, after = Counter(ids), Counter(expanded)
    added, removed = after - before, before - after
    marked, place = [False] * len(expanded), 0
    for position, token in enumerate(expanded):
        while (
            place < len(ids) and ids[place] != token and removed[ids[place]] and not targets[place]
        ):
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
        "the image processor of the model changes tokens outside of the images, so targets cannot be identified",
        where=where,
        got=f"token {place + 1} of {len(ids)} without images",
    )

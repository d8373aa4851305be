"""Preview of a data source: decoded examples with marked targets (tokens with loss), and a histogram of lengths.

    records -> tokens and targets, encoded as for training -> text segments, each of only targets or of no targets

The command `data`, the start panel and the report show these examples. Texts are decoded from token ids, so they
include special tokens.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hyper_parallel.trainer.data.counts import DataCounts, Encoded
from hyper_parallel.trainer.data.document import Document
from hyper_parallel.trainer.data.media_kinds import IMAGE
from hyper_parallel.trainer.data.media_records import decoded, thumbnail
from hyper_parallel.trainer.data.packing import encode
from hyper_parallel.trainer.data.sources import Source

_SEARCHED: Final = 64
"""Maximum number of records that are searched for examples."""
_EXAMPLES: Final = 3
_CONTEXT: Final = 8
"""Number of tokens before a segment that are decoded with it: some tokenizers drop a space at the start of a text."""
_MOST_CHARACTERS: Final = 1200
"""Approximate maximum of characters of a segment in data.json; the middle of a longer segment is omitted."""
_MOST_SEGMENTS: Final = 40
_IMAGES: Final = 4
"""Maximum number of images of an example, which fit into one row of a report."""
_MOST_BUCKETS: Final = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """Text of consecutive tokens, which are all targets if `trained`, else no targets."""

    text: str
    trained: bool


@dataclass(frozen=True, slots=True)
class ExampleText:
    """Text of an example, decoded from its tokens.

    Attributes:
        name: `text`, `conversation`, `chosen`, `rejected`, `good answer`, `bad answer`, `prompt` or `answer`.
        segments: Segments of the first tokens: `data.seq_len` with `stage: rm`, all with `stage: grpo`, else
            `data.seq_len` + 1.
        num_tokens: Number of tokens of the whole text.
        num_cut: Number of tokens that training truncates; 0 with `stage: pt` and `stage: grpo`.
    """

    name: str
    segments: tuple[Segment, ...]
    num_tokens: int
    num_cut: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """Example record: location, texts (two for a pair, or prompt and answer), thumbnails of images as base64 PNG."""

    where: str
    texts: tuple[ExampleText, ...]
    images: tuple[str, ...] = ()


@dataclass(slots=True)
class LengthHistogram:
    """Histogram of document lengths in tokens, with four buckets per power of two from 4 tokens on."""

    counts: Counter[int] = field(default_factory=Counter)

    def add(self, num_tokens: int) -> None:
        """Count a document of `num_tokens` tokens."""
        shift = max(num_tokens.bit_length() - 3, 0)
        self.counts[4 * shift + (num_tokens >> shift)] += 1

    def buckets(self) -> list[dict[str, int]]:
        """Return at most 16 buckets as dicts with `from` and `to` (tokens, inclusive) and `documents` (count)."""
        if not self.counts:
            return []
        first, last = min(self.counts), max(self.counts)
        step = -(-(last + 1 - first) // _MOST_BUCKETS)
        return [
            {
                "from": _least(bucket),
                "to": _least(bucket + step) - 1,
                "documents": sum(self.counts.get(k, 0) for k in range(bucket, bucket + step)),
            }
            for bucket in range(first, last + 1, step)
        ]


def _least(bucket: int) -> int:
    shift = max(bucket // 4 - 1, 0)
    return (bucket - 4 * shift) << shift


@dataclass(frozen=True, slots=True)
class SourcePreview:
    """Examples of a data source, and histogram of the lengths of its documents."""

    examples: tuple[Example, ...] = ()
    lengths: LengthHistogram = field(default_factory=LengthHistogram)

    def as_dict(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        from hyper_parallel.serde import encode as plain

        return {
            "examples": plain(self.examples),
            "lengths": {str(k): n for k, n in sorted(self.lengths.counts.items())},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SourcePreview:
        """Return a preview from the result of `as_dict`."""
        from hyper_parallel.serde import decode

        lengths = Counter({int(k): n for k, n in values["lengths"].items()})
        examples = decode(tuple[Example, ...], values["examples"])
        return cls(examples, LengthHistogram(lengths))


def example_of(
    hf: Any,
    source: Source,
    documents: Sequence[Document],
    encoded: Sequence[Encoded],
) -> Example:
    """Return the example of a record, with texts decoded from its tokens by tokenizer `hf` and without thumbnails.

    `documents` is the document of the record, or both documents of a pair; `encoded` has their tokens and targets.
    """
    where, stage = documents[0].where, source.stage
    if stage == "grpo":
        return Example(where, _prompt_and_answer(hf, *encoded[0]))
    names: Sequence[str] = ("chosen", "rejected") if len(documents) == 2 else ("conversation",)
    if stage == "kto":
        names = ("good answer" if documents[0].good else "bad answer",)
    elif stage == "pt":
        names = ("text",)
    texts = [_example_text(hf, source, name, ids, learn) for name, (ids, learn) in zip(names, encoded, strict=True)]
    return Example(where, tuple(texts))


def _example_text(hf: Any, source: Source, name: str, ids: Sequence[int], learn: Sequence[bool]) -> ExampleText:
    stage = source.stage
    # A reward model scores the last of `seq_len` tokens; other stages also predict the token after them.
    shown = list(ids[: source.data.seq_len + (stage != "rm")])
    if stage == "rm":
        targets = [False] * (len(shown) - 1) + [True] * bool(shown)
    elif stage == "pt":
        targets = [index > 0 or not source.counts.by_document for index in range(len(shown))]
    else:
        targets = [index > 0 and one for index, one in enumerate(learn[: len(shown)])]
    num_cut = 0 if stage == "pt" else len(ids) - len(shown)
    return ExampleText(name, tuple(segments_of(hf, shown, targets)), len(ids), num_cut)


def _prompt_and_answer(hf: Any, ids: Sequence[int], learn: Sequence[bool]) -> tuple[ExampleText, ...]:
    prompt = [one for one, marked in zip(ids, learn, strict=True) if not marked]
    answer = [one for one, marked in zip(ids, learn, strict=True) if marked][:-1]
    parts = {"prompt": prompt} | ({"answer": answer} if answer else {})
    return tuple(
        ExampleText(name, tuple(segments_of(hf, part, [False] * len(part))), len(part)) for name, part in parts.items()
    )


def segments_of(hf: Any, ids: Sequence[int], targets: Sequence[bool]) -> Iterator[Segment]:
    """Yield the decoded text of tokens in segments, each of only targets or of no targets."""
    start = 0
    for trained, run in itertools.groupby(targets):
        end = start + sum(1 for _ in run)
        before = ids[max(start - _CONTEXT, 0) : start]
        yield Segment(_decoded(hf, before, ids[start:end]), trained)
        start = end


def _decoded(hf: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    context: str = hf.decode(list(before), **options) if before else ""
    whole: str = hf.decode([*before, *ids], **options)
    return whole[len(context) :] if whole.startswith(context) else hf.decode(list(ids), **options)


def is_used(source: Source, encoded: Sequence[Encoded]) -> bool:
    """Return whether the source's stage trains on a record with these tokens and targets."""
    own = DataCounts(seq_len=source.data.seq_len, by_document=source.counts.by_document)
    own.add([Document("")] * len(encoded), encoded, source.stage)
    return own.used > 0


def documents_of_records(source: Source) -> Iterator[list[Document]]:
    """Yield the documents of each record: one, or two for a pair."""
    size = 2 if source.shape == "preference" else 1
    documents = source.documents()
    while record := list(itertools.islice(documents, size)):
        yield record


def preview_examples(source: Source, hf: Any) -> tuple[Example, ...]:
    """Return up to three examples: the first records of a source that are trained on, with long texts shortened.

    This reads at most the first 64 records of the source again, without changing its counts.
    """
    first = source.with_own_counts()
    if source.shape == "text":  # a file is one document, so read only its beginning
        first = first.head(source.data.seq_len * 16)
    examples: list[Example] = []
    for documents in itertools.islice(documents_of_records(first), _SEARCHED):
        encoded = list(encode(documents, hf, source.stage))
        if is_used(source, encoded):
            example = shortened(example_of(hf, source, documents, encoded))
            examples.append(replace(example, images=_small_images(documents[0])))
        if len(examples) == _EXAMPLES:
            break
    return tuple(examples)


def _small_images(document: Document) -> tuple[str, ...]:
    media = () if document.conversation is None else document.conversation.media
    images = [item for item in media if item.kind == IMAGE.name][:_IMAGES]
    return tuple(thumbnail(decoded(item, document.where)) for item in images)


def shortened(example: Example) -> Example:
    """Return an example without the middle of long segments; a note replaces the segments after the first 40."""
    texts = []
    for text in example.texts:
        shown = text.segments[:_MOST_SEGMENTS]
        segments = [replace(s, text=without_middle(s.text, _MOST_CHARACTERS)) for s in shown]
        if left := len(text.segments) - len(shown):
            segments.append(Segment(f" [... {left} segments ...]", trained=False))
        texts.append(replace(text, segments=tuple(segments)))
    return replace(example, texts=tuple(texts))


def without_middle(text: str, most: int) -> str:
    """Return a text; if it is much longer than `most` characters, replace its middle by the number of omitted ones."""
    if len(text) <= most + 40:
        return text
    return f"{text[: most // 2]} [... {len(text) - most:,} characters ...] {text[-(most // 2) :]}"

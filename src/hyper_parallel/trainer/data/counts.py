"""Counts of the records of a data source: read, used, truncated, and dropped by reason.

Reading a source counts records that are read or dropped, and ignored keys. Packing or streaming counts records that are
used, truncated or without target. A target is a token with loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hyper_parallel.trainer.data.document import Document, has_content

NO_ANSWER: Final = "no turn of the assistant"
PROMPT_ONLY: Final = "no turn of the assistant after the prompt"
ALL_UNTRAINED: Final = "every answer is excluded from training by the record"
EMPTY_ANSWERS: Final = "every answer is empty"
NO_TARGET: Final = "the chat template writes no token of an answer"
BEHIND_SEQ_LEN: Final = "no answer begins within data.seq_len tokens"
BAD_MEDIA: Final = "an image or a recording cannot be read, or has no placeholder in the text"
LONG_MEDIA: Final = "a conversation with images or audio is longer than data.seq_len tokens"
EMPTY_RECORD: Final = "the record is empty"
NO_PROMPT: Final = "no turn before the answer"
UNKNOWN: Final = "its token for unknown words is trained in their place"
ALLOWED: Final = {
    NO_ANSWER: "conversations with a turn of the assistant",
    PROMPT_ONLY: "conversations with a turn of the assistant after the prompt",
    ALL_UNTRAINED: "conversations with an answer whose flag (`weight`, `train`, ...) is not 0 or false",
    EMPTY_ANSWERS: "answers that are not empty",
    NO_TARGET: "a chat template that writes the content of answers",
    BEHIND_SEQ_LEN: "conversations with an answer that begins within data.seq_len tokens",
    BAD_MEDIA: "conversations whose images and recordings can be read and have a placeholder in the text",
    LONG_MEDIA: "conversations with images or audio of at most data.seq_len tokens, which are never cut",
    EMPTY_RECORD: "records that are not empty",
    NO_PROMPT: "conversations with a turn of the user before the last answer",
}
"""For each reason to drop a record, a description of acceptable records for error messages."""

Encoded = tuple[Sequence[int], Sequence[bool]]
"""Token ids of a document, and for each whether it is a target; the second list is empty if all tokens are targets."""
_NUMBERS: Final = ("read", "used", "cut", "tokens", "target_tokens")
_COUNTERS: Final = ("dropped", "ignored_keys", "remarks")


@dataclass
class DataCounts:
    """Counts of the records of one source.

    Attributes:
        source: `data.source`.
        format: Format of the records: `text` (each file is a document), `records` (texts under a key), or a
            conversation format (`sharegpt`, `alpaca`, `prompt_completion`, `preference`).
        seq_len: `data.seq_len`.
        read: Number of records read; a pair is one record, and so is a text file or a piece of a long one.
        used: Number of records with targets, including truncated and held-out ones.
        cut: Number of used records that are truncated to `data.seq_len` positions.
        tokens: Number of tokens of the used records after truncation; only of prompts with `stage: grpo`.
        target_tokens: Number of targets in these records: two per pair with `stage: rm`, 0 with `stage: grpo`.
        dropped: Number of dropped records by reason.
        ignored_keys: For each ignored key, the number of records, turns and tool calls that have it.
        remarks: Number of records or files with other changes or defects, by description.
        by_document: Whether the texts of `stage: pt` are not concatenated. The first token of each is then no target.
        unknown_id: Id of the tokenizer's unknown token; None: it has none.
    """

    source: str = ""
    format: str = ""
    seq_len: int = 0
    read: int = 0
    used: int = 0
    cut: int = 0
    tokens: int = 0
    target_tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    ignored_keys: Counter[str] = field(default_factory=Counter)
    remarks: Counter[str] = field(default_factory=Counter)
    by_document: bool = False
    unknown_id: int | None = None

    def clear(self) -> None:
        """Set all counts to zero."""
        for name in _NUMBERS:
            setattr(self, name, 0)
        for name in _COUNTERS:
            getattr(self, name).clear()

    def restart(self, num_read: int) -> None:
        """Reset the counts, except ignored keys and remarks, when a resumed stream reaches its position.

        `read` becomes `num_read`, the number of records after this position that are already read.
        """
        for name in _NUMBERS:
            setattr(self, name, 0)
        self.dropped.clear()
        self.read = num_read

    def add(self, documents: Sequence[Document], encoded: Sequence[Encoded], stage: str) -> None:
        """Count a record as used, or as dropped with the reason.

        `documents` is the document of the record, or both documents of a pair; `encoded` has their tokens and targets.
        """
        if stage == "pt":
            num_tokens = sum(len(ids) for ids, _ in encoded)
            if self.by_document and num_tokens < 2:
                self.dropped[EMPTY_RECORD] += 1
                return
            self.add_used(num_tokens, num_tokens - self.by_document)
            self.add_unknown(any(self.unknown_id in ids for ids, _ in encoded), stage)
            return
        first = 0 if stage == "rm" else 1  # no position predicts the first token
        most = self.seq_len + first
        for document, (_, learn) in zip(documents, encoded, strict=True):
            if not any(learn[first:most]):
                is_cut_off = any(learn[first:])
                reason = BEHIND_SEQ_LEN if is_cut_off else missing_target(document, stage)
                self.dropped[reason] += 1
                return
        lengths = [len(ids) for ids, _ in encoded]
        marked = [sum(learn[first:most]) for _, learn in encoded]
        num_tokens = sum(min(n, most) for n in lengths)
        self.add_marked(num_tokens, marked, stage, is_cut=max(lengths) > most)
        unknown = self.unknown_id
        with_unknown = [(ids[:most], learn) for ids, learn in encoded if unknown in ids]
        pairs = (pair for ids, learn in with_unknown for pair in zip(ids, learn, strict=False))
        self.add_unknown(any(i == unknown and is_target for i, is_target in pairs), stage)

    def add_unknown(self, has_unknown: bool, stage: str) -> None:
        """Add a remark for a record whose targets contain the tokenizer's unknown token, if `has_unknown`."""
        if has_unknown and self.unknown_id is not None and stage != "grpo":
            kind = "texts" if stage == "pt" else "conversations whose answers"
            self.remarks[f"{kind} have words that the tokenizer does not know: {UNKNOWN}"] += 1

    def add_marked(self, num_tokens: int, marked: Sequence[int], stage: str, *, is_cut: bool) -> None:
        """Count a record of one or two conversations as used, and as truncated if `is_cut`.

        `num_tokens` counts all its tokens after truncation; `marked` has the number of answer tokens in each document.
        """
        if stage == "grpo":  # the reference answer is only for reward functions
            self.add_used(num_tokens - sum(marked), 0, is_cut)
            return
        self.add_used(num_tokens, len(marked) if stage == "rm" else sum(marked), is_cut)

    def add_used(self, num_tokens: int, num_targets: int, is_cut: bool = False) -> None:
        """Count a record with these numbers of tokens and targets as used."""
        self.used += 1
        self.cut += is_cut
        self.tokens += num_tokens
        self.target_tokens += num_targets

    @property
    def notes(self) -> list[str]:
        """Sentences on truncated, dropped or changed text, and on ignored keys."""
        return [*self.losses, *self.passed_over]

    @property
    def passed_over(self) -> list[str]:
        """Sentence on ignored keys, as a list; [] if no key was ignored."""
        if not self.ignored_keys:
            return []
        keys = ", ".join(f"{key} ({n:,})" for key, n in sorted(self.ignored_keys.items()))
        return [f"ignored keys: {keys}"]

    @property
    def losses(self) -> list[str]:
        """Sentences on text that is truncated, dropped or changed."""
        kind = "documents" if self.format in ("text", "records") else "conversations"
        lines = [f"{self.cut} {kind} cut to seq_len={self.seq_len}"] if self.cut else []
        lines += [f"{n} {kind} left out: {why}" for why, n in sorted(self.dropped.items()) if n]
        lines += [f"{n} {remark}" for remark, n in sorted(self.remarks.items()) if n]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as a dict of JSON values."""
        values = {name: getattr(self, name) for name in ("source", "format", "seq_len", *_NUMBERS)}
        return values | {name: dict(sorted(getattr(self, name).items())) for name in _COUNTERS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataCounts:
        """Return the counts from the result of `as_dict`."""
        counters = {name: Counter(values[name]) for name in _COUNTERS}
        return cls(**{**values, **counters})


def missing_target(document: Document, stage: str) -> str:
    """Return the reason why a document has no target, a key of `DataCounts.dropped`."""
    one = document.conversation
    if one is None:
        return EMPTY_RECORD
    if stage == "grpo":
        return NO_PROMPT
    answers = [i for i, turn in enumerate(one.messages) if turn["role"] == "assistant"]
    later = [i for i in answers if i >= document.num_context]
    if not later:
        return PROMPT_ONLY if answers else NO_ANSWER
    if all(i in one.untrained for i in later):
        return ALL_UNTRAINED
    trained = (one.messages[i] for i in later if i not in one.untrained)
    return NO_TARGET if any(map(has_content, trained)) else EMPTY_ANSWERS

"""Counts of the records of a source: read, used, cut, and left out by reason.

One object for prepared data, for streams and for commands that show data. The reader of records counts records and the
keys that it passes over; the packer or the stream counts what becomes of each record.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hyper_parallel.trainer.data.document import Document, has_content

NO_ANSWER: Final = "no turn of the assistant"
PROMPT_ONLY: Final = "no turn of the assistant behind the prompt"
ALL_UNTRAINED: Final = "every answer is excluded from training by the record"
EMPTY_ANSWERS: Final = "every answer is empty"
NO_TARGET: Final = "the chat template writes no token of an answer"
BEHIND_SEQ_LEN: Final = "no answer begins within data.seq_len tokens"
EMPTY_RECORD: Final = "the record is empty"
NO_PROMPT: Final = "no turn before the answer"
UNKNOWN: Final = "its token for unknown words is trained in their place"
ALLOWED: Final = {
    NO_ANSWER: "conversations with a turn of the assistant",
    PROMPT_ONLY: "conversations with a turn of the assistant behind the prompt",
    ALL_UNTRAINED: "conversations with an answer whose flag (`weight`, `train`, ...) is not 0 or false",
    EMPTY_ANSWERS: "answers with words",
    NO_TARGET: "a chat template that writes the words of answers",
    BEHIND_SEQ_LEN: "conversations with an answer that begins within data.seq_len tokens",
    EMPTY_RECORD: "records with words",
    NO_PROMPT: "conversations with a turn of the user before the last answer",
}
"""Records that are used, by the reason for which others are left out."""

Encoded = tuple[Sequence[int], Sequence[bool]]
"""Tokens of a document, and for each whether it is a target; none of the latter where all are."""
_NUMBERS: Final = ("read", "used", "cut", "tokens", "target_tokens")
_COUNTERS: Final = ("dropped", "ignored_keys", "remarks")


@dataclass
class DataCounts:
    """Counts of the records of one source.

    Attributes:
        source: `data.source`.
        format: Recognised format: `text` (a file is a document), `records` (a text under a key), or that of
            conversations (`sharegpt`, `alpaca`, `prompt_completion`, `preference`).
        seq_len: `data.seq_len`.
        read: Records that were read; a pair, and a file of text, is one.
        used: Records that are trained on, cut ones included.
        cut: Records that are longer than `data.seq_len` and lose their end.
        tokens: Tokens of the records that are used.
        target_tokens: Tokens of them that carry loss: of a pair that is scored its two last ones; none of prompts for
            which completions are sampled.
        dropped: Records that are left out, by reason.
        ignored_keys: Keys of records that have no influence on the text, with the number of records that have them.
        remarks: Other things that the reader does to records, with their number.
        by_document: Texts of `stage: pt` do not follow one another, so the first token of each is no target.
        unknown_id: Token that stands for everything that the tokenizer does not know.
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
        """Count from here on: records before it were passed over, and `num_read` behind it are read already."""
        for name in _NUMBERS:
            setattr(self, name, 0)
        self.dropped.clear()
        self.read = num_read

    def add(self, documents: Sequence[Document], encoded: Sequence[Encoded], stage: str) -> None:
        """Count one record: its document, or the two of a pair.

        Args:
            documents: Documents of the record.
            encoded: Tokens of each, and which are targets.
            stage: Stage of the recipe.
        """
        if stage == "pt":
            num_tokens = sum(len(ids) for ids, _ in encoded)
            if self.by_document and num_tokens < 2:
                self.dropped[EMPTY_RECORD] += 1
                return
            self.add_used(num_tokens, num_tokens - self.by_document)
            self.add_unknown(any(self.unknown_id in ids for ids, _ in encoded), stage)
            return
        first = 0 if stage == "rm" else 1  # the first token is predicted by none
        most = self.seq_len + first
        for document, (_, learn) in zip(documents, encoded, strict=True):
            if not any(learn[first:most]):
                behind = any(learn[first:])
                self.dropped[BEHIND_SEQ_LEN if behind else missing_target(document, stage)] += 1
                return
        lengths = [len(ids) for ids, _ in encoded]
        marked = [sum(learn[first:most]) for _, learn in encoded]
        num_tokens = sum(min(n, most) for n in lengths)
        self.add_marked(num_tokens, marked, stage, is_cut=max(lengths) > most)
        if self.unknown_id is not None:
            answers = (zip(ids[:most], learn[:most], strict=True) for ids, learn in encoded)
            said = itertools.chain.from_iterable(answers)
            self.add_unknown(any(i == self.unknown_id and t for i, t in said), stage)

    def add_unknown(self, has_unknown: bool, stage: str) -> None:
        """Count a record whose targets hold the token for everything unknown."""
        if has_unknown and self.unknown_id is not None and stage != "grpo":
            kind = "texts" if stage == "pt" else "conversations whose answers"
            self.remarks[f"{kind} have words that the tokenizer does not know: {UNKNOWN}"] += 1

    def add_marked(
        self, num_tokens: int, marked: Sequence[int], stage: str, *, is_cut: bool
    ) -> None:
        """Count a record of conversations that is used.

        Args:
            num_tokens: Tokens of all its documents, cut to `data.seq_len`.
            marked: Tokens of answers in each of its documents.
            stage: Stage of the recipe.
            is_cut: Whether a document is longer than `data.seq_len`.
        """
        if stage == "grpo":  # the answer is read by rewards alone
            self.add_used(num_tokens - sum(marked), 0, is_cut)
            return
        self.add_used(num_tokens, len(marked) if stage == "rm" else sum(marked), is_cut)

    def add_used(self, num_tokens: int, num_targets: int, is_cut: bool = False) -> None:
        """Count one record that is trained on."""
        self.used += 1
        self.cut += is_cut
        self.tokens += num_tokens
        self.target_tokens += num_targets

    @property
    def notes(self) -> list[str]:
        """Sentences on everything that is cut, left out or passed over."""
        return [*self.losses, *self.passed_over]

    @property
    def passed_over(self) -> list[str]:
        """One sentence on the keys of records that are not read; none where all are."""
        if not self.ignored_keys:
            return []
        keys = ", ".join(f"{key} ({n:,})" for key, n in sorted(self.ignored_keys.items()))
        return [f"keys passed over: {keys}"]

    @property
    def losses(self) -> list[str]:
        """Sentences on text that is cut, left out or changed."""
        kind = "documents" if self.format in ("text", "records") else "conversations"
        lines = [f"{self.cut} {kind} cut to seq_len={self.seq_len}"] if self.cut else []
        lines += [f"{n} {kind} left out: {why}" for why, n in sorted(self.dropped.items()) if n]
        lines += [f"{n} {what}" for what, n in sorted(self.remarks.items()) if n]
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return the counts as values of JSON."""
        values = {name: getattr(self, name) for name in ("source", "format", "seq_len", *_NUMBERS)}
        return values | {name: dict(sorted(getattr(self, name).items())) for name in _COUNTERS}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataCounts:
        """Return the counts that `as_dict` has written."""
        counters = {name: Counter(values[name]) for name in _COUNTERS}
        return cls(**{**values, **counters})


def missing_target(document: Document, stage: str) -> str:
    """Return why no token of a conversation is a target, as a key of `DataCounts.dropped`."""
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

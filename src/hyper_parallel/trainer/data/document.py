"""Document: one text or one conversation of a source, with the facts that stages read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.trainer.data.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Document:
    """One text or one conversation, with the place it came from.

    Attributes:
        where: Place of the record.
        text: The text; empty for a conversation.
        conversation: The conversation; None for a text.
        num_context: Leading turns that are no targets.
        good: Whether the last answer is a good one, with `stage: kto`.
        margin: Wanted difference of the two scores of a pair, with `stage: rm`; None: the record has none.
        columns: Keys of the record that rewards may read, with `stage: grpo`.
        templated: The conversation is written through the chat template; else its contents are joined as they are.
    """

    where: str
    text: str = ""
    conversation: Conversation | None = None
    num_context: int = 0
    good: bool = False
    margin: float | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    templated: bool = True

    @property
    def content(self) -> bytes:
        """All of the document but its place, as bytes for a checksum."""
        one = self.conversation or Conversation(())
        beside: tuple[Any, ...] = (
            one.messages,
            self.num_context,
            self.good,
            self.margin,
            self.columns,
        )
        further = one.tools, one.template_values, one.untrained
        # Places in streams of earlier versions have checksums without the further fields.
        beside += further if any(further) else ()
        beside += () if self.templated else ("plain text",)
        text = self.text.encode("utf-8", "surrogatepass")
        return b"%d %b %b" % (len(text), text, repr(beside).encode("utf-8", "surrogatepass"))

    @property
    def plain(self) -> str:
        """The words alone, without any template: what a tokenizer is trained on."""
        turns = self.conversation.messages if self.conversation else ()
        return self.text or "\n".join(turn["content"] for turn in turns)

    @property
    def is_empty(self) -> bool:
        """Whether the document has neither words nor calls of tools."""
        turns = self.conversation.messages if self.conversation else ()
        said = ("content", "tool_calls", "reasoning_content")
        return not self.text and not any(turn.get(key) for turn in turns for key in said)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the words."""
        return len(self.plain.encode("utf-8", "surrogatepass"))

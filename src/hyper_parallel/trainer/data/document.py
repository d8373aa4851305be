"""Documents and conversations: records of a source in the form that is tokenized.

Modules `conversations` and `turns` read a record into a `Conversation`; module `chat` renders and tokenizes it. Turns
have the OpenAI chat format, which chat templates read. A `Document` is a text or conversation with additional values
for the stages `kto`, `rm` and `grpo`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import NoData

Message = dict[str, Any]
"""One turn: `role` (system, developer, user, assistant or tool) and `content`, a text.

Optional keys: `tool_calls` (list of `{"type": "function", "function": {"name", "arguments"}}`, arguments as an object),
`reasoning_content` (text), and, with the role `tool`, `name` and `tool_call_id`.
"""

MEDIA_BLOB: Final = "media.bin"
"""File of prepared data with the images and recordings whose bytes are in the records."""


class BadMedia(NoData, code="HP602"):
    """Error for images or recordings that cannot be read, or whose placeholders in the record do not match them."""


@dataclass(frozen=True, slots=True)
class MediaFile:
    """Encoded image or recording.

    Attributes:
        kind: Name of its `MediaKind`: `image` or `audio`.
        name: File name relative to `folder`, absolute for a prompt; "" if `content` has the bytes.
        folder: Media folder that contains the file; the working directory for a prompt or if `content` has the bytes.
        content: Bytes from the record; None: they are in the file.
    """

    kind: str
    name: str
    folder: Path
    content: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one conversation.

    Attributes:
        messages: All turns.
        num_prompt: Number of leading turns that are the prompt; None: the record has no key for the prompt.
        tools: Functions that the assistant may call, as JSON schemas in the OpenAI format.
        template_values: Additional variables for the chat template (`chat_template_kwargs` of the record).
        untrained: Indices of assistant turns that are not trained on: excluded by the record (`weight: 0`), or empty.
        trained: Indices of assistant turns that the record marks as trained on (`weight: 1`, `train: true`).
        media: Images and recordings, in the order of their placeholders in the contents.
    """

    messages: tuple[Message, ...]
    num_prompt: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_values: Mapping[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()
    trained: frozenset[int] = field(default=frozenset(), compare=False)
    media: tuple[MediaFile, ...] = ()

    def answer_turns(self, num_context: int) -> list[int]:
        """Return the indices of assistant turns to train on: after the first `num_context`, not in `untrained`."""
        turns = enumerate(self.messages[num_context:], start=num_context)
        return [i for i, turn in turns if turn["role"] == "assistant" and i not in self.untrained]


def has_content(turn: Message) -> bool:
    """Return whether a turn has text, reasoning or tool calls."""
    return bool(
        (turn.get("content") or "").strip() or turn.get("tool_calls") or (turn.get("reasoning_content") or "").strip()
    )


@dataclass(frozen=True, slots=True)
class Document:
    """Text or conversation from a record, with the values of the record that stages need.

    Attributes:
        where: Location of the record, for error messages.
        text: Text; "" for a conversation.
        conversation: Conversation; None for a text.
        num_context: Number of leading turns that are not trained on.
        good: With `stage: kto`: whether the last answer is labelled desirable.
        margin: With `stage: rm`: target margin between the scores of a pair; None: the record has none.
        columns: With `stage: grpo`: values of the record that reward functions may read, by canonical key.
        templated: Whether the chat template renders the conversation; False: its contents are concatenated.
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
        """Serialized text, turns and labels, for the checksum of a stream."""
        one = self.conversation or Conversation(())
        values: tuple[Any, ...] = (one.messages, self.num_context, self.good, self.margin, self.columns)
        optional = one.tools, one.template_values, one.untrained
        # Omit unset fields, so that checksums in stream positions of earlier versions stay valid.
        values += optional if any(optional) else ()
        values += () if self.templated else ("plain text",)
        text = self.text.encode("utf-8", "surrogatepass")
        return b"%d %b %b" % (len(text), text, repr(values).encode("utf-8", "surrogatepass"))

    @property
    def contents(self) -> list[str]:
        """Contents of the turns; empty for a text."""
        return [turn["content"] for turn in self.conversation.messages] if self.conversation else []

    @property
    def plain(self) -> str:
        """Text of the document, or the contents of its turns, one per line."""
        return self.text or "\n".join(self.contents)

    @property
    def is_empty(self) -> bool:
        """True if the document has no text, reasoning or tool calls."""
        turns = self.conversation.messages if self.conversation else ()
        return not self.text and not any(map(has_content, turns))

    @property
    def num_bytes(self) -> int:
        """Size of `plain` in UTF-8 bytes."""
        return len(self.plain.encode("utf-8", "surrogatepass"))

"""Conversation: the turns of one record, the tools it names, and the turns that are not trained on.

Readers of records (`_conversations`) produce it, `_chat` renders and tokenises it. It has the fields of the OpenAI
chat format, which the chat templates of transformers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
"""One turn: `role` (system, developer, user, assistant or tool) and `content`, a text.

Where the record has them also `tool_calls` (list of `{"type": "function", "function": {"name", "arguments"}}`,
arguments as an object), `reasoning_content` (text), and for role `tool` `name` and `tool_call_id`.
"""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of one conversation.

    Attributes:
        messages: All turns, the system's first.
        num_prompt: Leading turns that the record names as the prompt; None: the record names no prompt.
        tools: Functions that the assistant may call, as JSON schemas in OpenAI's form.
        template_values: Further variables for the chat template (`chat_template_kwargs` of the record).
        untrained: Indices of assistant turns that the record excludes from training (`weight: 0`, `train: false`).
        trained: Indices of those that the record names as trained on (`weight: 1`, `train: true`).
    """

    messages: tuple[Message, ...]
    num_prompt: int | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    template_values: Mapping[str, Any] = field(default_factory=dict)
    untrained: frozenset[int] = frozenset()
    trained: frozenset[int] = field(default=frozenset(), compare=False)


def says_something(turn: Message) -> bool:
    """Return whether a turn has words, reasoning or calls of tools."""
    return bool(
        (turn.get("content") or "").strip()
        or turn.get("tool_calls")
        or (turn.get("reasoning_content") or "").strip()
    )

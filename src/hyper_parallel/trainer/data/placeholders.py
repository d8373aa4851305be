"""Placeholders for the words of turns (content, reasoning, tool calls), to locate them in a rendered conversation.

White space around the words is not replaced, because templates may strip it. Placeholders consist of letters and
digits, which need no escapes in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hyper_parallel.trainer.data.document import Message
from hyper_parallel.trainer.data.media_kinds import KINDS, MEDIA_MARK

PLACEHOLDER: Final = re.compile(r"Qz(\d+)zQ")


@dataclass(frozen=True, slots=True)
class Words:
    """Text in a turn that a placeholder replaces.

    Attributes:
        turn: Index of the turn.
        kind: Part of the turn: `content`, `reasoning`, `name` (of a called function) or `argument`.
        text: The replaced text.
    """

    turn: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class WordsPlace:
    """Position [start, end), in characters, of the `Words` with index `number` in a rendered conversation."""

    number: int
    start: int
    end: int


@dataclass
class Placeholders:
    """Replacement of the words of turns by placeholders.

    Args:
        tags: Pattern of texts, such as `</think>`, that stay because the template may test for them; None: none stay.
        all_turns: Whether to replace words in all turns; False: only in assistant turns.
        names: Whether to replace the names of called functions.
        words: Replaced texts, filled by `replace_words`; the placeholder of item i contains the number i.
    """

    tags: re.Pattern[str] | None
    all_turns: bool = True
    names: bool = True
    words: list[Words] = field(default_factory=list)
    _names: dict[str, str] = field(default_factory=dict)
    _ids: dict[str, str] = field(default_factory=dict)

    def replace_words(self, messages: Sequence[Message]) -> list[Message]:
        """Return the turns with placeholders instead of their words, and append the words to `words`."""
        return [self._turn(i, message) for i, message in enumerate(messages)]

    def _turn(self, i: int, message: Message) -> Message:
        if message["role"] != "assistant":
            if not self.all_turns:
                return message
            shaped = {**message, "content": self._text(i, message.get("content") or "")}
            if (name := message.get("name")) in self._names:
                shaped["name"] = self._names[str(name)]
            if message.get("tool_call_id") in self._ids:
                shaped["tool_call_id"] = self._ids[message["tool_call_id"]]
            return shaped
        shaped = dict(message)
        if message.get("reasoning_content"):
            shaped["reasoning_content"] = self._text(i, message["reasoning_content"], "reasoning")
        shaped["content"] = self._text(i, message.get("content") or "")
        if message.get("tool_calls"):
            shaped["tool_calls"] = [self._call(i, call) for call in message["tool_calls"]]
        return shaped

    def _text(self, i: int, text: str, kind: str = "content") -> str:
        pieces = MEDIA_MARK.split(text)  # every second piece is the name of a kind
        pieces[::2] = [self._between_marks(i, piece, kind) for piece in pieces[::2]]
        pieces[1::2] = [KINDS[name].mark for name in pieces[1::2]]
        return "".join(pieces)

    def _between_marks(self, i: int, text: str, kind: str) -> str:
        parts = self.tags.split(text) if self.tags else [text]
        last = len(parts) - 1
        for part in range(0, len(parts), 2):  # every second part is a tag
            closed = part < last and parts[part + 1].startswith(("</", "[/"))
            parts[part] = self._one(i, parts[part], "reasoning" if closed else kind)
        return "".join(parts)

    def _one(self, i: int, text: str, kind: str) -> str:
        """Replace a text of turn `i` by a placeholder, except white space at both ends."""
        core = text.strip()
        if not core:
            return text
        self.words.append(Words(i, kind, core))
        start = text.index(core)
        return f"{text[:start]}Qz{len(self.words) - 1}zQ{text[start + len(core) :]}"

    def _call(self, i: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        name = function["name"]
        if self.names and name:
            function["name"] = self._names[name] = self._one(i, name, "name")
        function["arguments"] = self._argument(i, function.get("arguments"))
        shaped = {**call, "function": function}
        if isinstance(key := call.get("id"), str) and self.names and name and name in key:
            # Some templates write the id of a call instead of its name.
            shaped["id"] = self._ids[key] = key.replace(name, self._names[name])
        return shaped

    def _argument(self, i: int, value: Any) -> Any:
        if isinstance(value, str):
            return self._one(i, value, "argument")
        if isinstance(value, Mapping):
            return {key: self._argument(i, item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._argument(i, item) for item in value]
        return value


def pieces_of(message: Message) -> list[str]:
    """Return the nonempty texts between the media marks of a turn's content, without surrounding white space."""
    pieces = MEDIA_MARK.split(message.get("content") or "")[::2]  # every second piece is a kind
    return [core for piece in pieces if (core := piece.strip())]


def forms_of(words: str) -> Iterator[str]:
    """Yield the forms in which a template may write `words`: unchanged, with JSON escapes, or with Python escapes."""
    yield words
    for escaped in (json.dumps(words, ensure_ascii=False), json.dumps(words), repr(words)):
        if escaped[1:-1] != words:
            yield escaped[1:-1]


def places_of(shaped: str, text: str, words: Sequence[Words]) -> list[WordsPlace] | None:
    """Return the positions of the replaced words in `text`; `shaped` is the same conversation with placeholders.

    Return None if replacing the placeholders in `shaped` by their words does not result in `text`.
    """
    parts = PLACEHOLDER.split(shaped)
    places: list[WordsPlace] = []
    position = len(parts[0])
    if not text.startswith(parts[0]):
        return None
    for i in range(1, len(parts), 2):
        number, gap = int(parts[i]), parts[i + 1]
        form = next((f for f in forms_of(words[number].text) if text.startswith(f + gap, position)), None)
        if form is None:
            return None
        places.append(WordsPlace(number, position, position + len(form)))
        position += len(form) + len(gap)
    return places if position == len(text) else None

"""Properties of a chat template, most of them measured by rendering probes: short conversations of unique words.

No property is derived from the name of a model. A probe is rendered when a conversation first needs the property, and
the result is cached per tokenizer and template:

    probe -> text with the words of the probe -> text before, between and after the words

The properties tell how the template reads turns: types of contents and of tool-call arguments, key of the reasoning,
role of developer turns. They also tell the end marker: the text after an answer at which generation stops. Added tokens
are the special and other tokens added to the vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from hyper_parallel.errors import BadValue
from hyper_parallel.model import read_generation_config
from hyper_parallel.trainer.data._template import rendered, variables_of
from hyper_parallel.trainer.data._template_work import TemplateBudget
from hyper_parallel.trainer.data.document import Message
from hyper_parallel.trainer.data.media_kinds import KINDS, MEDIA_MARK
from hyper_parallel.trainer.data.tokenizer_limits import tokenizing

_QUESTION, _ANSWER, _FOLLOW_UP, _NAME, _VALUE, _RESULT = (f"Qzp{i}zQ" for i in range(6))
"""Unique words of the probes."""
_KEY: Final = "city"
_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "Look up.",
            "parameters": {
                "type": "object",
                "properties": {_KEY: {"type": "string", "description": "Name."}},
                "required": [_KEY],
            },
        },
    },
)
_CALL_ID: Final = "abcdefgh1"
"""Id of a tool call in probes; some templates require nine letters and digits."""
_REASONING_KEYS: Final = ("reasoning_content", "reasoning", "thinking", "thought")
"""Keys under which templates read the reasoning of a turn."""
_TAG: Final = re.compile(
    r"</?[A-Za-z][\w-]*>|<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>\s]{1,40}\uff5c>|\[/?[A-Z_]{2,30}\]|\[\|[^|\[\]\s]{1,40}\|\]"
    r"|/(?:no_)?think\b"
)
"""Pattern of tags such as `</think>` in a template's source; the template may test for them in contents of turns."""
_ANY_TAG: Final = re.compile(r"<[^<>\s]{1,60}>|\[/?[A-Z_]{2,30}\]|\[\|[^|\[\]\s]{1,40}\|\]")


@dataclass(frozen=True, slots=True)
class EndMarker:
    """Text after an answer at which generation stops.

    Attributes:
        text: Text from the end of the answer's content to the end of the marker, or only the marker for tool calls.
            None: there is no end marker.
        is_written: Whether the template writes the marker after the last turn. False: the marker is the start of the
            next turn.
    """

    text: str | None
    is_written: bool = True


class TemplateProperties:
    """Properties of a chat template; measuring one raises BadValue (HP102) if the template exceeds a limit.

    Args:
        tokenizer: Fast or slow tokenizer of transformers.
        source: Source of the template.

    Attributes:
        added: Ids of the tokenizer's added tokens, by text.
        added_names: Pattern of the texts of added tokens; None: there are none.
        shaped_texts: Cache of `answer_spans`: texts of conversations with placeholders, by their turns.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        self.source = source
        self._special = dict(tokenizer.special_tokens_map)
        self.added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items()}
        stops = {tokenizer.eos_token_id, *generation_stops(tokenizer)}
        self._stop_names = {name for name, i in self.added.items() if i in stops}
        names = sorted((name for name in self.added if name), key=len, reverse=True)
        self.added_names = re.compile("|".join(map(re.escape, names))) if names else None
        self._parts: dict[str, bool] = {}
        self.shaped_texts: dict[tuple[str, ...], str] = {}

    def render(
        self,
        messages: Sequence[Message],
        *,
        prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        values: Mapping[str, Any] | None = None,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render turns converted by `form`; return text and spans of `{% generation %}` blocks ([] unless `marks`)."""
        variables = {**self._special, **(values or {}), "add_generation_prompt": prompt}
        return rendered(self.source, messages, variables, tools=tools, marks=marks)

    def _probe(self, *turns: Message, tools: Sequence[Mapping[str, Any]] = (), prompt: bool = False) -> str:
        """Return the text of a probe; "" if the template raises. Raise BadValue (HP102) if it exceeds its limits."""
        try:
            return self.render(turns, tools=tools, prompt=prompt)[0]
        except TemplateBudget as error:  # further probes would exhaust their budgets too
            raise BadValue(
                "the chat template of the tokenizer exceeds a limit for a short conversation",
                where="chat template",
                got=str(error),
            ) from error
        except Exception:  # a template may raise any exception
            return ""

    @cached_property
    def variables(self) -> frozenset[str]:
        """Names of the variables that the template reads."""
        return variables_of(self.source)

    @cached_property
    def tags(self) -> re.Pattern[str] | None:
        """Pattern of the tags in the template's source; None if there are none."""
        tags = sorted(set(_TAG.findall(self.source)), key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, tags))})") if tags else None

    @cached_property
    def has_marks(self) -> bool:
        """True if the template has `{% generation %}` blocks, which mark the assistant's text."""
        return re.search(r"\{%-?\+?\s*generation\b", self.source) is not None

    # Form of turns

    def form(self, message: Message) -> Message:
        """Convert a turn to the keys and types that the template reads."""
        role = message["role"]
        if role == "developer":
            role = self._developer
        calls = message.get("tool_calls")
        content = message.get("content") or ""
        has_media = MEDIA_MARK.search(content) is not None
        if not calls and len(message) == 2 and not has_media and not self._takes_parts(role):
            return message if role == message["role"] else {**message, "role": role}
        shaped = {
            k: v for k, v in message.items() if k not in ("reasoning_content", "tool_calls") and v is not None
        }  # fmt: skip
        shaped |= {"role": role, "content": content}
        if has_media or self._takes_parts(role):
            shaped["content"] = _parts_of(content)
        if message.get("reasoning_content"):
            shaped |= self._reasoning(message["reasoning_content"], shaped["content"])
        if calls:
            shaped["tool_calls"] = [self._call(call, self._calls[0]) for call in calls]
            if not content:
                shaped["content"] = self._calls[1]
        return shaped

    @cached_property
    def _question(self) -> Message:
        return self.form({"role": "user", "content": _QUESTION})

    @cached_property
    def _answer(self) -> Message:
        return self.form({"role": "assistant", "content": _ANSWER})

    @cached_property
    def written_media(self) -> frozenset[str]:
        """Names of the media kinds for whose content parts the template writes text."""
        text = {"type": "text", "text": _QUESTION}
        without = self._probe({"role": "user", "content": [text]})
        texts = {n: self._probe({"role": "user", "content": [{"type": n}, text]}) for n in KINDS}
        return frozenset(n for n, t in texts.items() if t and t != without and "'type':" not in t)

    def _takes_parts(self, role: str) -> bool:
        """Return whether the template requires a list of parts, not a text, as content of turns with this role."""
        if role not in self._parts:
            parts = [{"type": "text", "text": _ANSWER}]
            before = [] if role in ("system", "user", "developer") else [self._question]
            after: list[Message] = []
            if role in ("system", "developer"):
                after = [{"role": "user", "content": _FOLLOW_UP}]
            as_text = self._probe(*before, {"role": role, "content": _ANSWER}, *after)
            is_text = _ANSWER in as_text and "'text':" not in as_text
            as_parts = self._probe(*before, {"role": role, "content": parts}, *after)
            self._parts[role] = not is_text and _ANSWER in as_parts and "'text':" not in as_parts
        return self._parts[role]

    @cached_property
    def _developer(self) -> str:
        """Role for developer turns: `developer` if the template writes turns of this role, else `system`."""
        turn = {"role": "developer", "content": _ANSWER}
        if _ANSWER in self._probe(turn, self._question):
            return "developer"
        return "system"

    def _reasoning(self, reasoning: str, content: Any, key: str | None = None) -> Message:
        """Return the keys that add reasoning to a turn; with `key` "", `content` with the reasoning as a part."""
        key = self._reasoning_key if key is None else key
        if key:
            return {key: reasoning}
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return {"content": [{"type": "thinking", "thinking": reasoning}, *parts]}

    @cached_property
    def _reasoning_key(self) -> str:
        """Key of the reasoning in turns; "" if it is a part of the content; the first known key if none is read."""
        answer = self._answer
        for key in (*_REASONING_KEYS, ""):
            text = self._probe(self._question, {**answer, **self._reasoning(_FOLLOW_UP, answer["content"], key)})
            is_read = 0 <= text.find(_FOLLOW_UP) < text.rfind(_ANSWER) and "'text':" not in text
            if is_read:
                return key
        return _REASONING_KEYS[0]

    @staticmethod
    def _call(call: Mapping[str, Any], as_text: bool) -> dict[str, Any]:
        """Return a tool call with its arguments, if they are an object, as a copy or as JSON text if `as_text`."""
        function = dict(call["function"])
        arguments = function.get("arguments")
        if isinstance(arguments, Mapping):
            text = json.dumps(arguments, ensure_ascii=False)
            function["arguments"] = text if as_text else dict(arguments)
        return {**call, "function": function}

    @cached_property
    def _calls(self) -> tuple[bool, Any]:
        """Pair: whether tool-call arguments must be a text, and the content to set in a turn with only tool calls."""
        empty = [{"type": "text", "text": ""}]
        forms = [(text, content) for content in ("", None, empty) for text in (False, True)]
        for as_text, content in forms:
            turn = self._call_turn(as_text, content)
            for after in ((), (self._tool_turn,)):
                text = self._probe(self._question, turn, *after, tools=_TOOLS)
                answer = text.partition(_QUESTION)[2]
                shown = _NAME in answer and _VALUE in answer and "None" not in answer
                if shown and f"'{_KEY}':" not in answer and f'\\"{_KEY}\\"' not in answer:
                    return as_text, content
        return forms[0]

    @staticmethod
    def _call_turn(as_text: bool, content: Any) -> Message:
        function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
        call = {"type": "function", "id": _CALL_ID, "function": function}
        return {
            "role": "assistant",
            "content": content,
            "tool_calls": [TemplateProperties._call(call, as_text)],
        }

    @cached_property
    def writes_call_ids(self) -> bool:
        """True if the template writes the id of a tool call instead of its function name."""
        as_text, content = self._calls
        text = self._probe(self._question, self._call_turn(as_text, content), tools=_TOOLS)
        answer = text.partition(_QUESTION)[2]
        return _CALL_ID in answer and _NAME not in answer

    @property
    def _tool_turn(self) -> Message:
        turn = {"role": "tool", "content": _RESULT, "name": _NAME, "tool_call_id": _CALL_ID}
        return self.form(turn)

    @cached_property
    def keeps_space(self) -> bool:
        """True if the template keeps white space before the words of an answer."""
        plain = self._probe(self._question, self._answer)
        answer = self.form({"role": "assistant", "content": f" {_ANSWER}"})
        spaced = self._probe(self._question, answer)
        return spaced == plain.replace(_ANSWER, f" {_ANSWER}")

    # Markers that end an answer

    def _added_ends(self, text: str) -> list[tuple[int, int]]:
        pattern = self.added_names
        return [match.span() for match in pattern.finditer(text)] if pattern else []

    @cached_property
    def _text_after_words(self) -> tuple[str, str]:
        """Pair: text after an answer that is the last turn, and text between an answer and the next user turn."""
        follow_up = self.form({"role": "user", "content": _FOLLOW_UP})
        last = self._probe(self._question, self._answer).rpartition(_ANSWER)[2]
        later = self._probe(self._question, self._answer, follow_up).partition(_ANSWER)[2]
        return last, later.partition(_FOLLOW_UP)[0]

    @cached_property
    def ends(self) -> tuple[EndMarker, EndMarker]:
        """Pair: end marker of an answer that is the last turn, and of an answer before a user turn."""
        return self._ends(*self._text_after_words)

    def _ends(self, last: str, later: str) -> tuple[EndMarker, EndMarker]:
        shared = common_prefix(last, later)
        text = self._first_stop(shared) or self._last_tag(self._before_opener(shared))
        if text is not None:
            end = EndMarker(_only_tags(self, text))
            return end, end
        # The texts have no common marker. Each has its own, or the start of the next turn ends an answer.
        own, following = (self._first_stop(t) or self._first_added(t) for t in (last, later))
        following = _only_tags(self, following)
        if own is None and not last.strip():
            return EndMarker(following, is_written=False), EndMarker(following)
        return EndMarker(_only_tags(self, own)), EndMarker(following)

    def _first_added(self, text: str) -> str | None:
        ends = self._added_ends(text)
        return text[: ends[0][1]] if ends else None

    def _first_stop(self, text: str) -> str | None:
        """Return `text` up to and including its first stop token; None if it has none."""
        ends = [end for start, end in self._added_ends(text) if text[start:end] in self._stop_names]
        return text[: ends[0]] if ends else None

    def _last_tag(self, text: str) -> str | None:
        """Return `text` up to and including its last added token or, without added tokens, its last tag; else None."""
        ends = self._added_ends(text) or [match.span() for match in _ANY_TAG.finditer(text)]
        return text[: ends[-1][1]] if ends else None

    def _before_opener(self, text: str) -> str:
        """Return `text` before the token that begins a turn; all of `text` if this token is absent or first."""
        opening = self._probe(self._question).partition(_QUESTION)[0]
        names = [opening[slice(*span)] for span in self._added_ends(opening)]
        names = [name for name in names if name != self._special.get("bos_token")]
        end = text.find(names[0]) if names else -1
        return text[:end] if end > 0 else text

    @cached_property
    def call_end(self) -> EndMarker:
        """End marker of an answer that ends with a tool call, without the text that closes the call itself."""
        as_text, content = self._calls
        turn = self._call_turn(as_text, content)
        last = self._probe(self._question, turn, tools=_TOOLS).rpartition(_VALUE)[2]
        text = self._probe(self._question, turn, self._tool_turn, tools=_TOOLS)
        later = text.partition(_QUESTION)[2].partition(_VALUE)[2].partition(_RESULT)[0] or last
        token = self.end_token(self.ends[0]) if self.ends[0].is_written else None
        if token is not None and token in later:
            return EndMarker(token)
        shared = common_prefix(last, later)
        stop = self._first_stop(later)
        if stop is None and not self.ends[0].is_written:
            # The start of the next turn ends an answer.
            added = self._first_added(later[len(shared) :])
            stop = None if added is None else shared + added
        if stop is not None:
            name = stop[slice(*self._added_ends(stop)[-1])]
            return EndMarker(name, is_written=stop in last)
        tags = [match.group() for match in _ANY_TAG.finditer(self._before_opener(shared))]
        return EndMarker(tags[-1] if tags else None)

    def end_token(self, end: EndMarker) -> str | None:
        """Return the last added token in the text of an end marker, else the stripped text; None without a marker."""
        if end.text is None:
            return None
        ends = self._added_ends(end.text)
        return end.text[slice(*ends[-1])] if ends else end.text.strip()

    @property
    def stops(self) -> set[int]:
        """Ids of the added tokens at which generation of an answer stops."""
        last, later = self.ends
        markers = [last if last.text is not None else later]
        if later.text is not None and not self._before_opener(f" {later.text.lstrip()}").strip():
            markers.append(later)
        if "tools" in self.variables or "tool_calls" in self.source:
            markers.append(self.call_end)
        tokens = (self.end_token(end) for end in markers)
        return {self.added[token] for token in tokens if token in self.added}


def _only_tags(template: TemplateProperties, text: str | None) -> str | None:
    """Return `text` if it has no letter or digit outside of tags and added tokens; otherwise None."""
    if text is None:
        return None
    pattern = template.added_names
    rest = _ANY_TAG.sub("", pattern.sub("", text) if pattern else text)
    return None if any(map(str.isalnum, rest)) else text


def _parts_of(content: str) -> list[dict[str, str]]:
    first, *rest = MEDIA_MARK.split(content)
    parts = [{"type": "text", "text": first}] if first or not rest else []
    for kind, text in zip(rest[::2], rest[1::2], strict=True):
        parts.append({"type": kind})
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def common_prefix(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))]


def generation_stops(tokenizer: Any) -> list[int]:
    """Return the `eos_token_id` values of the generation config in a tokenizer's directory; [] without such values.

    Raises:
        ModelUnreadable: HP305 when the generation config cannot be read.
    """
    values = read_generation_config(Path(str(tokenizer.name_or_path))) or {}
    stops = values.get("eos_token_id")
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


_KNOWN: Final[WeakKeyDictionary[Any, dict[str, TemplateProperties]]] = WeakKeyDictionary()


def properties_of(tokenizer: Any, *, tools: bool = False) -> TemplateProperties:
    """Return the measured properties of the tokenizer's chat template, or of its template for tools if `tools`.

    Raises:
        ValueError: The tokenizer has no chat template, or several without a default.
        BadValue, ModelUnreadable: HP102, HP305 for an unusable tokenizer or generation config.
    """
    template = tokenizer.chat_template
    source = template if isinstance(template, str) else tokenizer.get_chat_template(tools=[{}] if tools else None)
    known = _KNOWN.setdefault(tokenizer, {})
    if source not in known:
        with tokenizing("chat template"):
            known[source] = TemplateProperties(tokenizer, source)
    return known[source]

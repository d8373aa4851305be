r"""Character spans of the assistant's answers in a rendered conversation.

The words of a turn are its content, reasoning and tool calls. A conversation is rendered unchanged, and with unique
placeholders instead of the words. The placeholders show where the words are. Replacing each placeholder by its
words must reproduce the first text. This proves that the text around the words does not depend on them.

    <|im_start|>assistant\n<think>\n\n</think>\n\nQz7zQ<|im_end|>\n
                         ^ end of the generation prompt  ^ end marker

An answer begins where the generation prompt after the earlier turns ends. If the template writes the beginning of a
finished turn differently, for example without the reasoning block that the generation prompt opens, the answer begins
with its words. An answer ends with its end marker, the text at which generation stops.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NoReturn

from hyper_parallel.errors import BadValue, HyperParallelError, abbreviated
from hyper_parallel.trainer.data.document import Conversation, Message
from hyper_parallel.trainer.data.media_kinds import MEDIA_MARK
from hyper_parallel.trainer.data.placeholders import (
    PLACEHOLDER,
    Placeholders,
    Words,
    WordsPlace,
    forms_of,
    pieces_of,
    places_of,
)
from hyper_parallel.trainer.data.template_properties import (
    EndMarker,
    TemplateProperties,
    common_prefix,
    properties_of,
)

_MAX_CACHED_TEXTS: Final = 256
"""Maximum number of cached texts with placeholders; conversations with equal roles usually share one."""
_MAX_CACHED_CHARACTERS: Final = 2048
"""Texts of conversations with at least this many characters are not cached."""
_UNFINISHED_TAG: Final = re.compile(r"[<\[][^<>\[\]]*$")
_OTHER_FILE: Final = "data.chat_template=FILE"


class _Renderer:
    """Renderer of one conversation; errors of the template become BadValue (HP102) with the cause."""

    def __init__(self, tokenizer: Any, conversation: Conversation, where: str) -> None:
        self._conversation, self._where = conversation, where or "chat template"
        self.has_media = bool(conversation.media)
        try:
            self.template = properties_of(tokenizer, tools=bool(conversation.tools))
            self._turns = self._forms(conversation.messages)
        except Exception as error:  # for example, a tokenizer without a template
            if isinstance(error, HyperParallelError) and not isinstance(error, BadValue):
                raise  # of another file, such as generation_config.json
            raise self._template_error(error) from error

    def _forms(self, messages: Sequence[Message]) -> list[Message]:
        return [self.template.form(message) for message in messages]

    def render(self, *, prompt: bool = False, marks: bool = False) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of all turns and, if `marks`, the [start, end) characters of `{% generation %}` blocks.

        The text ends with the generation prompt if `prompt`. Raise if the template does not read a variable of the
        record, or does not write a tool.
        """
        text, spans = self._render(self._turns, prompt=prompt, marks=marks)
        self._check_values()  # after rendering, which names the cause if the template cannot be parsed
        self._check_tools(text)
        return text, spans

    def shaped(self, shape: Placeholders) -> str:
        """Return the text of all turns with placeholders instead of words; texts of short conversations are cached."""
        messages = shape.replace_words(self._conversation.messages)
        key, known = self._shape_key(messages), self.template.shaped_texts
        text = known.get(key)
        if text is None:
            text = self._render(self._forms(messages))[0]
            if key and len(known) < _MAX_CACHED_TEXTS:
                known[key] = text
        return text

    def _shape_key(self, messages: Sequence[Message]) -> tuple[str, ...]:
        """Return roles and contents of the turns as cache key; () if the text is long or depends on other values."""
        one = self._conversation
        is_plain = not one.tools and not one.template_values and all(len(m) == 2 for m in messages)
        if not is_plain or "strftime_now" in self.template.source:
            return ()
        key = tuple(text for m in messages for text in (m["role"], m["content"]))
        return key if sum(map(len, key)) < _MAX_CACHED_CHARACTERS else ()

    def prompt_before(self, count: int, shape: Placeholders | None = None) -> str | None:
        """Return the text of the first `count` turns with the generation prompt; None if the template raises.

        With `shape`, placeholders replace the words.
        """
        turns = self._turns[:count]
        try:
            if shape is not None:
                turns = self._forms(shape.replace_words(self._conversation.messages[:count]))
            return self._render(turns, prompt=True)[0]
        except BadValue:
            return None

    def _render(
        self, turns: Sequence[Message], *, prompt: bool = False, marks: bool = False, tools: bool = True
    ) -> tuple[str, list[tuple[int, int]]]:  # fmt: skip
        conversation = self._conversation
        try:
            return self.template.render(
                turns,
                prompt=prompt,
                tools=conversation.tools if tools else (),
                values=conversation.template_values,
                marks=marks,
            )
        except Exception as error:  # a template is a program and may raise any error
            raise self._template_error(error) from error

    def _template_error(self, error: BaseException) -> BadValue:
        roles = [message["role"] for message in self._conversation.messages]
        return BadValue(
            "the chat template of the tokenizer rejects a conversation",
            where=self._where,
            got=f"{str(error)[:500] or type(error).__name__}; roles: {', '.join(roles[:20])}",
        )

    def error(self, problem: str, turn: int | None = None, **details: Any) -> BadValue:
        """Return an error about the turn of index `turn`; None: about the whole conversation."""
        where = self._where
        if turn is not None:
            where += f", turn {turn + 1} ({self._conversation.messages[turn]['role']})"
        details.setdefault("hint", _OTHER_FILE)
        return BadValue(problem, where=where, **details)

    def _check_values(self) -> None:
        names = self._conversation.template_values
        if not names:
            return
        try:
            readable = self.template.variables - {"messages", "tools", "add_generation_prompt"}
        except Exception as error:  # a damaged template may raise any error
            raise self._template_error(error) from error
        for name in names:
            if name not in readable:
                raise self.error(
                    f"the chat template does not read the variable `{name}` of the record",
                    got=name,
                    allowed=", ".join(sorted(readable)) or "no variables",
                )

    def _check_tools(self, text: str) -> None:
        if not self._conversation.tools:
            return
        names = [tool["function"]["name"] for tool in self._conversation.tools]
        without = self._render(self._turns, tools=False)[0]
        missing = [name for name in names if text.count(name) <= without.count(name)]
        if missing or text == without:
            raise self.error(
                "the chat template does not write the tools of the conversation",
                got=", ".join(missing or names)[:200],
            )


def render(
    tokenizer: Any,
    conversation: Conversation | Sequence[Message],
    *,
    prompt: bool = False,
    where: str = "",
) -> str:
    """Return the text of a conversation, with the generation prompt if `prompt`.

    Raises:
        BadValue: HP102 for any error that the template raises, and for tools or variables that it does not read.
        ModelUnreadable: HP305 for an unreadable generation config next to the tokenizer.
    """
    if not isinstance(conversation, Conversation):
        conversation = Conversation(tuple(conversation))
    return _Renderer(tokenizer, conversation, where).render(prompt=prompt)[0]


def locate_answers(
    tokenizer: Any, conversation: Conversation, trained: Sequence[int], where: str = ""
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation and locate the answers to train on.

    Args:
        tokenizer: Tokenizer with a chat template.
        conversation: Conversation with all turns.
        trained: Indices of the assistant turns to locate.
        where: Location of the record, for error messages.

    Returns:
        Text of the conversation, and the [start, end) characters of each answer in `trained` with its end marker. The
        text includes the end marker of the last answer even if the template writes it only before a following turn.

    Raises:
        BadValue: HP102 with turn and cause, when the template raises, drops or changes words, ignores tools or
            variables, or writes no end marker.
        ModelUnreadable: HP305 for an unreadable generation config next to the tokenizer.
    """
    renderer = _Renderer(tokenizer, conversation, where)
    has_marks = renderer.template.has_marks
    text, marks = renderer.render(marks=has_marks)
    search = _Search(renderer, conversation.messages, text)
    search.check_words(set(trained))
    spans = [search.span(i) for i in trained]
    if has_marks:
        spans = [search.narrowed(i, span, marks) for i, span in zip(trained, spans, strict=True)]
    return text + search.appended, spans


_DROPPED: Final = {
    "content": "words of a turn do not appear in the text that the chat template writes",
    "reasoning": "the chat template drops the reasoning of a turn that is trained on",
    "name": "the chat template does not write a tool call",
    "argument": "the chat template does not write an argument of a tool call",
}
"""For each kind of words, the error if the template does not write them."""
_OF_CALLS: Final = frozenset(("name", "argument"))
"""Kinds of words of tool calls."""


class _Search:
    """Search for the answers of a conversation in its rendered text; see the module docstring for "words"."""

    def __init__(self, renderer: _Renderer, messages: Sequence[Message], text: str) -> None:
        self._renderer, self._messages, self._text = renderer, messages, text
        self._template: TemplateProperties = renderer.template
        self._shape, self._places = self._find_words()
        self._of_turn: defaultdict[int, list[WordsPlace]] = defaultdict(list)
        """For each turn, the positions of its words; of a name that is written several times, only the first."""
        for place in self._places:
            own, words = self._of_turn[self._words(place).turn], self._words(place)
            if words.kind != "name" or all(earlier.number != place.number for earlier in own):
                own.append(place)
        self.appended = ""
        """End marker of the last answer, if only a following turn would write it."""

    def _words(self, place: WordsPlace) -> Words:
        return self._shape.words[place.number]

    def _find_words(self) -> tuple[Placeholders, list[WordsPlace]]:
        """Return placeholders that reproduce the text, and the places of all words; raise HP102 if none do."""
        collision = PLACEHOLDER.search(self._text)
        if not self._renderer.has_media:
            contents = "".join(message.get("content") or "" for message in self._messages)
            collision = collision or MEDIA_MARK.search(contents)
        if collision:
            raise self._renderer.error(
                "a conversation contains a text that is reserved as a placeholder",
                got=ascii(collision.group()),
                hint=None,
            )
        tags, options = self._template.tags, ((True, True), (False, True), (False, False))
        shapes = [Placeholders(None), *(Placeholders(tags, *option) for option in options)]
        first: BadValue | None = None
        for shape in shapes:
            try:
                shaped = self._renderer.shaped(shape)
            except BadValue as error:
                first = first or error
                continue
            places = places_of(shaped, self._text, shape.words)
            if places is not None:
                return shape, places
        if first is not None:
            raise first
        self._raise_changed()

    def _raise_changed(self) -> NoReturn:
        self._check_contents(answers=True)
        raise self._renderer.error(
            "the text that the chat template writes around the turns depends on their contents, so the assistant's "
            "tokens cannot be identified",
            got=abbreviated(self._text[-80:]),
            allowed="a template that writes the same text around turns of any content",
        )

    def _check_contents(self, *, answers: bool) -> None:
        """Raise if the text lacks the content of a turn; turns of the assistant count only if `answers`."""
        for i, message in enumerate(self._messages):
            for words in pieces_of(message) if answers or message["role"] != "assistant" else ():
                if not _is_written(words, self._text):
                    raise self._renderer.error(_DROPPED["content"], i, got=abbreviated(words))

    def check_words(self, trained: AbstractSet[int]) -> None:
        """Raise if the template drops words of the conversation, or repeats or reorders words of answers.

        The reasoning of turns that are not in `trained` may be dropped. Names of called functions may be repeated.
        """
        shape, places = self._shape, self._places
        counts = Counter(place.number for place in places)
        for number, words in enumerate(shape.words):
            count, i = counts[number], words.turn
            is_answer = self._messages[i]["role"] == "assistant"
            if not count and (words.kind != "reasoning" or i in trained):
                if words.kind == "name" and self._template.writes_call_ids:
                    raise self._renderer.error(
                        "the chat template writes the `id` of a tool call instead of its name, but the `id` of the "
                        "call does not contain the name",
                        i,
                        got=abbreviated(words.text),
                        allowed=f'calls with an id such as "functions.{words.text[:60]}:0", and the same '
                        "`tool_call_id` in the turn of the tool",
                        hint=None,
                    )
                raise self._renderer.error(_DROPPED[words.kind], i, got=abbreviated(words.text))
            if count > 1 and is_answer and words.kind != "name":
                raise self._renderer.error(
                    "the chat template writes the words of an answer more than once",
                    i,
                    got=abbreviated(words.text),
                )
        if not shape.all_turns:
            self._check_contents(answers=False)
        written = [self._words(place) for place in places]
        turns = [words.turn for words in written if words.turn in trained and words.kind != "name"]
        if turns != sorted(turns):
            raise self._renderer.error("the chat template writes the answers in another order than the conversation")

    def span(self, i: int) -> tuple[int, int]:
        """Return the [start, end) characters of the answer in turn `i`; raise BadValue (HP102) if a check fails."""
        start = self._start(i)
        end = self._end(i, start)
        self._check_tags(i, start, end)
        self._check_alone(i, start, end)
        return start, end

    def _check_alone(self, i: int, start: int, end: int) -> None:
        inside = [p for p in self._places if start <= p.start < end]
        foreign = {self._words(p).turn for p in inside} - {i}
        if not self._shape.all_turns:
            borders = [start, *(edge for p in inside for edge in (p.start, p.end)), end]
            gaps = [self._text[a:b] for a, b in zip(borders[::2], borders[1::2], strict=True)]
            for turn, message in enumerate(self._messages):
                cores = pieces_of(message) if message["role"] != "assistant" else ()
                if any(core in gap for core in cores for gap in gaps):
                    foreign.add(turn)
        if foreign:
            turn = min(foreign)
            raise self._renderer.error(
                "the chat template writes words of another turn within an answer",
                i,
                got=f"turn {turn + 1} ({self._messages[turn]['role']})",
            )

    def _check_tags(self, i: int, start: int, end: int) -> None:
        """Raise if a tag in the content of turn `i` is neither in the answer nor at the end of the prompt before it."""
        if self._shape.tags is None:
            return
        content = self._messages[i].get("content") or ""
        for tag in set(self._shape.tags.findall(content)):
            written = self._text[max(0, start - 2 * len(tag)) : end]
            if written.count(tag) - written.endswith(tag) < content.count(tag):
                raise self._renderer.error(_DROPPED["content"], i, got=tag)

    def _start(self, i: int) -> int:
        own = self._of_turn[i]
        before = self._renderer.prompt_before(i)
        # The words of an answer may begin with the reasoning block that the generation prompt opens.
        limit = own[0].end if own else len(self._text)
        if before is not None and len(before) <= limit and self._text.startswith(before):
            return len(before)
        self._check_context(i, before)
        if own and self._words(own[0]).kind == "content":
            return self._with_space(i, own[0])
        return self._start_of_wrapper(i)

    def _check_context(self, i: int, prompt: str | None) -> None:
        """Raise if `prompt`, from which turn `i` is generated, does not begin with the text of the turns before it."""
        before = [p.end for p in self._places if self._words(p).turn < i]
        end = max(before, default=0)
        if prompt is not None and not prompt.startswith(self._text[:end]):
            raise self._renderer.error(
                "the chat template writes the turns before an answer differently when more turns follow, so training "
                "and generation would have different prompts",
                i,
                got=abbreviated(self._text[:end][-80:]),
                allowed="a text whose beginning stays the same when turns are added",
            )

    def _with_space(self, i: int, place: WordsPlace) -> int:
        """Return the start of the words at `place` in turn `i`, with preceding space and tags if these are written."""
        content = self._messages[i].get("content") or ""
        lead = content[: content.index(self._words(place).text)]
        start = place.start - len(lead)
        is_kept = lead and (self._template.keeps_space or lead.strip())
        return start if is_kept and self._text[start : place.start] == lead else place.start

    def _start_of_wrapper(self, i: int) -> int:
        """Return the end of the text that turn `i` shares with the generation prompt; raise HP102 if there is none."""
        own = self._of_turn[i]
        before = [p for p in self._places if self._words(p).turn < i]
        previous = max((p.end for p in before), default=0)
        later = [p.start for p in self._places if p.start >= previous]
        shape = Placeholders(self._shape.tags, self._shape.all_turns, self._shape.names)
        header = PLACEHOLDER.split(self._renderer.prompt_before(i, shape) or "")[-1]
        gap = self._text[previous : min(later, default=len(self._text))]
        shared = common_prefix(header, gap)
        shared = header if shared == header else _UNFINISHED_TAG.sub("", shared)
        is_header = own or not header[len(shared) :][:1].isalnum()
        if not shared or not is_header:
            raise self._renderer.error("the chat template writes a turn differently from the prompt of generation", i)
        return previous + len(shared)

    def _end(self, i: int, start: int) -> int:
        """Return the end of the end marker of turn `i`, whose answer begins at `start`; raise HP102 without one."""
        own = self._of_turn[i]
        words_end = own[-1].end if own else start
        later = [p for p in self._places if p.start >= words_end and self._words(p).turn > i]
        rest = self._text[words_end : later[0].start if later else len(self._text)]
        content = (self._messages[i].get("content") or "").strip()
        if content and not own and content not in rest:  # a content of tags only
            raise self._renderer.error(_DROPPED["content"], i, got=abbreviated(content))
        is_last = i == len(self._messages) - 1
        kinds = [self._words(p).kind for p in own]
        if self._messages[i].get("tool_calls") and not _OF_CALLS.intersection(kinds):
            raise self._renderer.error(_DROPPED["name"], i)
        if kinds and kinds[-1] in _OF_CALLS:
            self._check_arguments(i, own)
            length = self._call_end(rest, is_last)
        else:
            length = self._words_end(rest, is_last, has_words=kinds[-1:] == ["content"])
        if length is None:
            raise self._renderer.error(
                "the chat template does not end an answer with a marker at which generation stops",
                i,
                got=abbreviated(rest),
                allowed="a special token, such as the end-of-text token, after every answer",
            )
        return words_end + length

    def _check_arguments(self, i: int, own: Sequence[WordsPlace]) -> None:
        text = self._text[own[0].start :]
        for call in self._messages[i]["tool_calls"]:
            for key, value in _leaves(call["function"].get("arguments")):
                is_shown = isinstance(value, str) or str(value) in text or json.dumps(value) in text
                if not is_shown or not _is_written(key, text):
                    raise self._renderer.error(_DROPPED["argument"], i, got=f"{key}: {value!r:.60}")  # fmt: skip

    def _words_end(self, rest: str, is_last: bool, has_words: bool) -> int | None:
        """Return the length of `rest`, the text after an answer, up to the end of its end marker; None without one."""
        end = self._template.ends[0 if is_last else 1]
        if is_last and not end.is_written:
            return self._append(rest, end)
        if end.text is None:
            return None
        wanted = end.text.lstrip()
        if has_words:
            space = len(rest) - len(rest.lstrip())
            return space + len(wanted) if rest.startswith(wanted, space) else None
        start = rest.find(wanted)
        return start + len(wanted) if start >= 0 else None

    def _call_end(self, rest: str, is_last: bool) -> int | None:
        end = self._template.call_end
        if end.text is None:
            return None
        start = rest.find(end.text)
        if start >= 0:
            return start + len(end.text)
        return self._append(rest, end) if is_last and not end.is_written else None

    def _append(self, rest: str, end: EndMarker) -> int | None:
        """Set `appended` to the end marker; return the length of `rest` with it, None without a marker."""
        if end.text is None:
            return None
        self.appended = end.text.lstrip() if rest != rest.rstrip() else end.text
        return len(rest) + len(self.appended)

    def narrowed(self, i: int, span: tuple[int, int], marks: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return `span` of turn `i` without text before the first `{% generation %}` block in it.

        Raise if the blocks, whose spans are `marks`, omit words of the turn.
        """
        inside = [(max(a, span[0]), min(b, span[1])) for a, b in marks if a < span[1] and b > span[0]]
        own = self._of_turn[i]
        if not inside or (own and (inside[0][0] > own[0].start or inside[-1][1] < own[-1].end)):
            raise self._renderer.error("a `{% generation %}` block of the chat template omits words of an answer", i)
        # Some templates write the end marker outside the block; the span includes it in any case.
        return inside[0][0], span[1]


def _is_written(words: str, text: str) -> bool:
    return any(form in text for form in forms_of(words))


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each leaf in nested objects and lists; the items of a list have the key of the list."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, str(name))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, key)
    else:
        yield key, value

"""Chat templates, and which tokens of a conversation the assistant wrote.

The tokenizer's own template is used when it has one. A tokenizer trained here carries `CHATML`; a foreign tokenizer
without a template gets `PLAIN`, which needs no special token but the end-of-text one.

A template that marks the assistant's words itself, between `{% generation %}` and `{% endgeneration %}`, decides the
loss mask. For any other it is found from text alone: the assistant's turn i begins where the rendering of the
turns before it, with the generation prompt, ends. The template must therefore render a conversation's beginning the
same way whether or not more turns follow it; a template that does not is refused by name. In both, turns of the prompt
are no targets, and a token is a target when it holds a character of the assistant's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data._tokenizer_limits import tokenizing
from hyper_parallel.trainer.data.conversation import Conversation, Message

_WORDS: Final = "XYZ"
"""Words of an answer that shows what a template writes around it."""
_MARKS: Final = re.compile(r"\{%-?\+?\s*generation\b")

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template of tokenizers trained here: turns between `<|im_start|>` and `<|im_end|>`."""

PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
"""Template of foreign tokenizers that bring none: headed turns, the assistant's closed by end-of-text."""


def render(
    tokenizer: Any, messages: Sequence[Message], *, prompt: bool = False, where: str = ""
) -> str:
    """Text of a conversation; with `prompt`, followed by the header of the assistant's next turn."""
    return _render(tokenizer, messages, prompt, where, marks=False)[0]


def _render(
    tokenizer: Any, messages: Sequence[Message], prompt: bool, where: str, marks: bool
) -> tuple[str, list[tuple[int, int]]]:
    """Text of a conversation, and with `marks` the characters that the template marks as the assistant's.

    Raises:
        BadValue: HP102 whatever the template raises.
    """
    from hyper_parallel.trainer.data._template import rendered

    values = {**tokenizer.special_tokens_map, "add_generation_prompt": prompt}
    try:
        return rendered(tokenizer.get_chat_template(), messages, values, marks=marks)
    except Exception as error:  # a template is a program, and raises anything
        roles = [message["role"] for message in messages]
        raise BadValue(
            "the chat template of the tokenizer refuses a conversation",
            where=where or "chat template",
            got=f"{str(error)[:500] or type(error).__name__}; roles: {', '.join(roles[:20])}",
        ) from error


def assistant_spans(
    tokenizer: Any, messages: Sequence[Message], where: str = "", num_context: int = 0
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation and the [start, end) characters of the assistant's turns with end markers.

    Args:
        tokenizer: With a chat template.
        messages: All turns.
        where: Place of the record, for errors.
        num_context: Leading turns that have no span.
    """
    full = render(tokenizer, messages, where=where)
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < num_context:
            continue
        opens = all(turn["role"] == "system" for turn in messages[:i])
        find = _turn_by_header if opens else _later_turn
        span = find(tokenizer, messages, i, full, where)
        if span is None:
            raise _unstable(f"{where}, turn {i + 1}", full)
        start, end = span
        # White space behind the end marker belongs to the template; generation stops at the marker.
        spans.append((start, start + len(full[start:end].rstrip())))
    return full, spans


def _unstable(where: str, full: str) -> BadValue:
    return BadValue(
        "the chat template writes a conversation differently once more turns follow, so the assistant's "
        "tokens cannot be told from the others",
        where=where,
        got=repr(full[-80:]),
        allowed="a text whose beginning stays the same when turns are added",
    )


def _later_turn(
    tokenizer: Any, messages: Sequence[Message], i: int, full: str, where: str
) -> tuple[int, int] | None:
    """Return where turn `i`, which answers a user, begins and ends in the `full` text; None when it cannot be told."""
    before = render(tokenizer, messages[:i], prompt=True, where=where)
    upto = render(tokenizer, messages[: i + 1], where=where)
    if not full.startswith(
        before
    ):  # a generation prompt may begin a reasoning block that earlier turns lack
        return _turn_by_header(tokenizer, messages, i, full, where)
    if full.startswith(upto):
        return len(before), len(upto)
    # Some templates add a reasoning block to the last turn only (Qwen3): the words and the marker must follow.
    turn, said = (
        full[len(before) :].lstrip(),
        messages[i]["content"].strip() + _end_marker(tokenizer),
    )
    return (len(before), len(full) - len(turn) + len(said)) if turn.startswith(said) else None


def _turn_by_header(
    tokenizer: Any, messages: Sequence[Message], i: int, full: str, where: str
) -> tuple[int, int] | None:
    """Return as `_later_turn` by the text that the template writes before other words in the same place."""
    shown = [
        *messages[:i],
        {"role": "assistant", "content": _WORDS},
        {"role": "user", "content": "a"},
    ]
    header, found, _ = render(tokenizer, shown, where=where).partition(_WORDS)
    if not found:  # some templates leave a turn before any of the user out
        left_out = all(turn["role"] != "user" for turn in messages[:i])
        return (len(full), len(full)) if left_out else None
    if not full.startswith(header):
        return None
    marker = _end_marker(tokenizer)
    for words in (messages[i]["content"], messages[i]["content"].strip()):
        at = full.find(words + marker, len(header))
        is_last = i == len(messages) - 1  # which alone may have a reasoning block before its words
        if at >= 0 and (is_last or not full[len(header) : at].strip()):
            return len(header), at + len(words + marker)
    return None


def _behind_answer(tokenizer: Any, *turns: Message) -> str:
    """Return the text that a template writes behind the words of an answer, before `turns`."""
    answered: list[Message] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": _WORDS},
    ]
    return render(tokenizer, [*answered, *turns]).rpartition(_WORDS)[2]


def _end_marker(tokenizer: Any) -> str:
    """Return the text that a template writes behind an answer wherever it stands, without white space at its end."""
    last = _behind_answer(tokenizer)
    later = _behind_answer(tokenizer, {"role": "user", "content": "a"})
    if later.startswith(last):
        return last.rstrip()
    # Some templates close the whole conversation (Phi-3): whole tokens that are there in both cases are the marker.
    shared = _num_shared_characters(last, later)
    encoded = _encoded(tokenizer, later, "chat template", offsets=True)
    ends = [end for _, end in encoded["offset_mapping"] if end <= shared]
    return later[: max(ends, default=0)].rstrip()


def _num_shared_characters(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def encode_conversation(
    tokenizer: Any, conversation: Conversation, where: str = "", num_context: int = 0
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation and, for each, whether it is a target.

    Targets are the assistant's tokens in all turns but the first `num_context`.
    """
    if not tokenizer.is_fast:
        raise BadValue(
            "stage sft needs a tokenizer that reports character offsets",
            where="data.tokenizer",
            got=type(tokenizer).__name__,
            allowed="a tokenizer with a tokenizer.json",
        )
    messages = conversation.messages
    if _MARKS.search(str(tokenizer.chat_template)):
        return _encode_marked(tokenizer, messages, where, num_context)
    text, spans = assistant_spans(tokenizer, messages, where, num_context)
    encoded = _encoded(tokenizer, text, where, offsets=True)
    offsets = encoded["offset_mapping"]
    mask = [any(a <= first < b or first < a < last for a, b in spans) for first, last in offsets]
    return list(encoded["input_ids"]), mask


def _encode_marked(
    tokenizer: Any, messages: Sequence[Message], where: str, num_context: int
) -> tuple[list[int], list[bool]]:
    """Return as `encode_conversation` for a template that marks the assistant's words."""
    full, spans = _render(tokenizer, messages, False, where, marks=True)
    encoded = _encoded(tokenizer, full, where, offsets=True)
    later = [
        i for i, turn in enumerate(messages) if turn["role"] == "assistant" and i >= num_context
    ]
    start = 0 if later else len(full)
    if later and any(turn["role"] == "assistant" for turn in messages[: later[0]]):
        context = render(tokenizer, messages[: later[0]], where=where)
        if not full.startswith(context.rstrip()):
            raise _unstable(f"{where}, turn {later[0] + 1}", full)
        # A generation prompt may hold text that the conversation does not, such as an empty reasoning block.
        before = render(tokenizer, messages[: later[0]], prompt=True, where=where)
        start = _num_shared_characters(before, full)
    marks = _overlapping(encoded["offset_mapping"], spans)
    ends = (last for _, last in encoded["offset_mapping"])
    learn = [one and last > start for one, last in zip(marks, ends, strict=True)]
    return list(encoded["input_ids"]), learn


def _encoded(tokenizer: Any, text: str, where: str, *, offsets: bool = False) -> Any:
    """Return what a tokenizer makes of a text, with characters of each token where these are asked for."""
    with tokenizing(where):
        return tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=offsets, verbose=False
        )


def _overlapping(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]
) -> list[bool]:
    """Return whether each token overlaps a span; both are in order."""
    found, at = [False] * len(offsets), 0
    for index, (first, last) in enumerate(offsets):
        while at < len(spans) and first >= spans[at][1]:
            at += 1
        found[index] = at < len(spans) and last > spans[at][0]
    return found


def encode_prompt(
    tokenizer: Any, conversation: Conversation, where: str = "", num_context: int = 0
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a prompt up to where the model speaks, then those of its answer, which are marked.

    The prompt is the first `num_context` turns with the generation prompt. End-of-text closes the answer, so that one
    without words is marked too.
    """
    if not num_context:
        return [], []
    messages = conversation.messages
    prompt = render(tokenizer, messages[:num_context], prompt=True, where=where)
    texts = (prompt, answer_of(messages, num_context))
    asked, said = (
        list(_encoded(tokenizer, text, where)["input_ids"]) if text else [] for text in texts
    )
    said.append(tokenizer.eos_token_id)
    return [*asked, *said], [False] * len(asked) + [True] * len(said)


def answer_of(messages: Sequence[Message], num_context: int) -> str:
    """Return the words of the turns behind a prompt."""
    return "\n".join(turn["content"] for turn in messages[num_context:])


def stop_ids(
    tokenizer: Any, eos: int | Sequence[int] | None = None, *, chat: bool = True
) -> set[int]:
    """Return the tokens that end a text; generation, rollouts and samples of a run all ask here.

    Args:
        tokenizer: Of the model; its end-of-text token is one.
        eos: `eos_token_id` of the model's generation config: one token, or several.
        chat: The text is an answer: the special token that the chat template writes behind an answer ends it too.
    """
    own = [eos] if eos is None or isinstance(eos, int) else eos
    stops = {tokenizer.eos_token_id, *own} - {None}
    if chat and tokenizer.chat_template:
        first = _encoded(tokenizer, _behind_answer(tokenizer), "chat template")["input_ids"][:1]
        stops |= {i for i in first if i in tokenizer.added_tokens_decoder}
    return stops

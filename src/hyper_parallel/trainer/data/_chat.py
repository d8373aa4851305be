"""Chat templates, and which tokens of a conversation the assistant wrote.

The tokenizer's own template is used when it has one. A tokenizer trained here carries `CHATML`; a foreign tokenizer
without a template gets `PLAIN`, which needs no special token but the end-of-text one.

A template that marks the assistant's words itself, between `{% generation %}` and `{% endgeneration %}`, decides the
loss mask. For any other it is found from text alone: the assistant's turn i begins where the rendering of the
turns before it, with the generation prompt, ends. The template must therefore render a conversation's beginning the
same way whether or not more turns follow it; a template that does not is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data._records import Message

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
    import jinja2

    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=prompt
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        raise BadValue(
            "the chat template of the tokenizer refuses a conversation",
            where=where or "chat template",
            got=f"{error}; roles: {', '.join(m['role'] for m in messages)}",
        ) from error
    return str(text)


def assistant_spans(
    tokenizer: Any, messages: Sequence[Message], where: str = ""
) -> tuple[str, list[tuple[int, int]]]:
    """Text of a conversation and the [start, end) characters the assistant wrote, its end marker included."""
    full = render(tokenizer, messages, where=where)
    spans = []
    for i, message in enumerate(messages):
        # A conversation that the assistant opens has no prompt to answer there: that turn is context, not a target.
        if message["role"] != "assistant" or i == 0 or not message["content"].strip():
            continue
        before = render(tokenizer, messages[:i], prompt=True, where=where)
        upto = render(tokenizer, messages[: i + 1], where=where)
        end = _turn_end(full, before, upto, message["content"].strip())
        if end is None:
            raise BadValue(
                "the chat template writes a conversation differently once more turns follow, so the assistant's "
                "tokens cannot be told from the others",
                where=f"{where}, turn {i + 1}",
                got=repr(full[max(0, len(before) - 40) : len(before) + 40]),
                allowed=f"a text that begins with {upto[-80:]!r}",
            )
        # White space behind the end marker belongs to the template; generation stops at the marker.
        spans.append((len(before), len(before) + len(full[len(before) : end].rstrip())))
    return full, spans


def _turn_end(full: str, before: str, upto: str, words: str) -> int | None:
    """Where the assistant's turn ends in the `full` text; None when it cannot be told.

    `before` is what comes before it, with the generation prompt; `upto` the text up to its end; `words` what it says.
    """
    if not full.startswith(before):
        return None
    if full.startswith(upto):
        return len(upto)
    # Some templates add a reasoning block to the last turn only (Qwen3): the words and the marker must follow.
    at = upto.rfind(words)
    turn = full[len(before) :]
    if at < 0 or not turn.lstrip().startswith(words + upto[at + len(words) :]):
        return None
    return len(full) - len(turn.lstrip()) + len(upto) - at


def encode_conversation(
    tokenizer: Any, messages: Sequence[Message], where: str = ""
) -> tuple[list[int], list[bool]]:
    """Tokens of a conversation and, for each, whether the assistant wrote it."""
    if not tokenizer.is_fast:
        raise BadValue(
            "stage sft needs a tokenizer that reports character offsets",
            where="data.tokenizer",
            got=type(tokenizer).__name__,
            allowed="a tokenizer with a tokenizer.json",
        )
    if _MARKS.search(tokenizer.chat_template):
        render(tokenizer, messages, where=where)  # refuses what the template refuses
        given = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(given["input_ids"]), [bool(one) for one in given["assistant_masks"]]
    text, spans = assistant_spans(tokenizer, messages, where)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    mask = [any(start <= first < end for start, end in spans) for first, _ in offsets]
    return list(encoded["input_ids"]), mask


def stop_ids(tokenizer: Any) -> set[int]:
    """Tokens that end an answer: end-of-text, and the special token the template writes behind an answer."""
    stops = {tokenizer.eos_token_id} - {None}
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "XYZ"}]
        behind = render(tokenizer, messages).rpartition("XYZ")[2]
        first = tokenizer(behind, add_special_tokens=False)["input_ids"][:1]
        stops |= {i for i in first if i in tokenizer.added_tokens_decoder}
    return stops

"""Chat templates, and which tokens of a conversation the assistant wrote.

The tokenizer's own template is used when it has one. A tokenizer trained here carries `CHATML`; a foreign tokenizer
without a template gets `PLAIN`, which needs no special token but the end-of-text one.

`answer_spans` renders a conversation and finds the answers in its text, `span_tokens` tokenises it so that the tokens
before an answer are those of generation. Targets are the words of the assistant, the marker that ends a turn, and what
the template has the model write between the generation prompt and the words, such as an empty reasoning block. A
template that marks the assistant's words itself, between `{% generation %}` and `{% endgeneration %}`, may leave out
text before the words. The marker that ends a turn is a target whether or not the marks hold it, because a model that
never learns it does not stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data.answer_spans import locate_answers, render_text
from hyper_parallel.trainer.data.document import Conversation, Message
from hyper_parallel.trainer.data.span_tokens import ids_of, tokens_of_spans
from hyper_parallel.trainer.data.template_properties import properties_of

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

RAW = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Template of `data.chat_template: none`: words alone, the assistant's closed by end-of-text."""


def render(
    tokenizer: Any,
    conversation: Conversation | Sequence[Message],
    *,
    prompt: bool = False,
    where: str = "",
) -> str:
    """Return the text of a conversation; with `prompt`, followed by the header of the assistant's next turn.

    Raises:
        BadValue: HP102 whatever the template raises, and for a variable that it does not read.
    """
    return render_text(tokenizer, _as_conversation(conversation), prompt=prompt, where=where)


def _as_conversation(turns: Conversation | Sequence[Message]) -> Conversation:
    return turns if isinstance(turns, Conversation) else Conversation(tuple(turns))


def complete_text(tokenizer: Any, conversation: Conversation, where: str = "") -> str:
    """Return the text of a conversation that has the words of all turns.

    Raises:
        BadValue: HP102 as `encode_conversation`, without regard to end markers.
    """
    return locate_answers(tokenizer, conversation, (), where).text


def assistant_spans(
    tokenizer: Any,
    conversation: Conversation | Sequence[Message],
    where: str = "",
    num_context: int = 0,
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation and the [start, end) characters of the assistant's turns with end markers.

    Args:
        tokenizer: With a chat template.
        conversation: All turns.
        where: Place of the record, for errors.
        num_context: Leading turns that have no span.
    """
    one = _as_conversation(conversation)
    found = locate_answers(tokenizer, one, _trained_turns(one, num_context), where)
    return found.text, list(found.spans)


def _trained_turns(conversation: Conversation, num_context: int) -> list[int]:
    """Return the turns whose words are targets."""
    return [
        i
        for i, turn in enumerate(conversation.messages)
        if turn["role"] == "assistant" and i >= num_context and i not in conversation.untrained
    ]


def encode_conversation(
    tokenizer: Any, conversation: Conversation, where: str = "", num_context: int = 0
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation and, for each, whether it is a target.

    Targets are the assistant's tokens in all turns but the first `num_context` and those that the conversation leaves
    out. The tokens before the first target are those of generation for the same turns.

    Raises:
        BadValue: HP102 when the template or the tokenizer cannot write the conversation exactly, naming the turn.
    """
    if not tokenizer.is_fast:
        raise BadValue(
            "stage sft needs a tokenizer that reports character offsets",
            where="data.tokenizer",
            got=type(tokenizer).__name__,
            allowed="a tokenizer with a tokenizer.json",
        )
    text, spans = assistant_spans(tokenizer, conversation, where, num_context)
    return tokens_of_spans(tokenizer, text, spans, where)


def encode_pair(
    tokenizer: Any, prompt: str, answer: str, where: str = ""
) -> tuple[list[int], list[bool]]:
    """Return the tokens of two texts joined as plain text and closed by end-of-text; the answer's are targets.

    The tokens of the prompt are those of generation, and the answer gains no space.
    """
    text = prompt + answer
    ids, mask = tokens_of_spans(tokenizer, text, [(len(prompt), len(text))], where)
    return [*ids, tokenizer.eos_token_id], [*mask, True]


def encode_prompt(
    tokenizer: Any, conversation: Conversation, where: str = "", num_context: int = 0
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a prompt up to where the model speaks, then those of its answer, which are marked.

    The prompt is the first `num_context` turns with the generation prompt. End-of-text closes the answer, so that one
    without words is marked too.
    """
    if not num_context:
        return [], []
    prompt = replace(conversation, messages=conversation.messages[:num_context])
    complete_text(tokenizer, prompt, where)
    text = render(tokenizer, prompt, prompt=True, where=where)
    asked = ids_of(tokenizer, text, where)
    answer = answer_of(conversation.messages, num_context)
    said = [*(ids_of(tokenizer, answer, where) if answer else ()), tokenizer.eos_token_id]
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
        chat: The text is an answer: the special tokens that the chat template writes behind an answer or a tool call
            end it too.
    """
    own = [eos] if eos is None or isinstance(eos, int) else eos
    stops = {tokenizer.eos_token_id, *own} - {None}
    if chat and tokenizer.chat_template:
        stops |= properties_of(tokenizer).stops
    return stops

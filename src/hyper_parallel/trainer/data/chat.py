"""Chat templates, and tokens of conversations with the assistant's tokens as targets (tokens with loss).

Without `data.chat_template`, the template of the tokenizer or of its processor is used if there is one. A tokenizer
trained by `prepare` has `CHATML`. Others get `PLAIN`, whose only special token is end-of-text.

`answer_spans` renders a conversation and locates the answers in its text. `span_tokens` tokenizes the text so that the
tokens before an answer equal the prompt tokens of generation. Targets are the assistant's content, reasoning and tool
calls, and the end marker after them. Text between the generation prompt and the content, such as an empty reasoning
block, is a target too, unless the template has `{% generation %}` blocks that exclude it. The end marker is always a
target, because a model that never learns it does not stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data.answer_spans import locate_answers, render
from hyper_parallel.trainer.data.document import Conversation, Message
from hyper_parallel.trainer.data.media_tokens import expand, reference_line
from hyper_parallel.trainer.data.span_tokens import ids_of, tokens_of_spans
from hyper_parallel.trainer.data.template_properties import properties_of

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template of tokenizers that `prepare` trains: turns between `<|im_start|>` and `<|im_end|>`."""

PLAIN = (
    "{% for message in messages %}### {{ message['role'] }}:\n{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n"
    "{% endfor %}{% if add_generation_prompt %}### assistant:\n{% endif %}"
)
"""Template of other tokenizers without a template: turns with headings; end-of-text after assistant turns."""

RAW = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Template of `data.chat_template: none`: contents only; end-of-text after assistant turns."""


def complete_text(tokenizer: Any, conversation: Conversation, where: str = "") -> str:
    """Return the text of a conversation; raise if the template drops or changes content of a turn.

    Raises:
        BadValue: HP102 with turn and cause, when the template does not reproduce the conversation.
    """
    return locate_answers(tokenizer, conversation, (), where)[0]


def encode_conversation(
    tokenizer: Any, conversation: Conversation, where: str = "", num_context: int = 0
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a conversation, and for each whether it is a target.

    Targets are the assistant's tokens after the first `num_context` turns, except in turns that the record excludes
    from training. The tokens before the first target equal the prompt tokens of generation.

    Raises:
        BadValue: HP102 when the tokenizer is slow, or template or tokenizer do not reproduce the conversation.
        NoData: HP602 when an image or recording cannot be read.
        MissingDependency: HP501 when a package that the media need is not installed.
    """
    if not tokenizer.is_fast:
        raise BadValue(
            "conversations need a fast tokenizer, which reports character offsets",
            where="data.tokenizer",
            got=type(tokenizer).__name__,
            allowed="a directory with a tokenizer.json",
            changes={"data.tokenizer": "TOKENIZER_DIR"},
        )
    trained = conversation.answer_turns(num_context)
    text, spans = locate_answers(tokenizer, conversation, trained, where)
    tokens = tokens_of_spans(tokenizer, text, spans, where)
    if not conversation.media:
        return tokens
    return expand(tokenizer, conversation, text, tokens, where)


def media_line(
    tokenizer: Any, conversation: Conversation, where: str, num_context: int, blob: IO[bytes]
) -> tuple[bytes, int]:
    """Return the `reference_line` of a conversation, and its number of tokens without placeholders of media.

    Errors are those of `encode_conversation`.
    """
    trained = conversation.answer_turns(num_context)
    text = locate_answers(tokenizer, conversation, trained, where)[0]
    num_tokens = len(tokens_of_spans(tokenizer, text, (), where)[0])
    return reference_line(conversation, text, where, blob), num_tokens - len(conversation.media)


def encode_pair(tokenizer: Any, prompt: str, answer: str, where: str = "") -> tuple[list[int], list[bool]]:
    """Return the token ids of a prompt followed by its answer without a template, and for each whether it is a target.

    Targets are the tokens of the answer and the end-of-text token after it. The tokens of the prompt equal the
    prompt tokens of generation. No space is added before the answer.

    Raises:
        BadValue: HP102 when the tokenizer fails, or joins prompt and answer in one token.
    """
    text = prompt + answer
    ids, mask = tokens_of_spans(tokenizer, text, [(len(prompt), len(text))], where)
    return [*ids, tokenizer.eos_token_id], [*mask, True]


def encode_prompt(
    tokenizer: Any, conversation: Conversation, where: str = "", num_context: int = 0
) -> tuple[list[int], list[bool]]:
    """Return the token ids of a prompt and its reference answer, and for each whether it belongs to the answer.

    The prompt is the first `num_context` turns with the generation prompt. The answer ends with end-of-text, so it has
    at least one token. Both lists are empty if `num_context` is 0.

    Raises:
        BadValue: HP102 when template or tokenizer fail on the prompt, or the template drops words of it.
    """
    if not num_context:
        return [], []
    prompt = replace(conversation, messages=conversation.messages[:num_context])
    complete_text(tokenizer, prompt, where)
    text = render(tokenizer, prompt, prompt=True, where=where)
    prompt_ids = ids_of(tokenizer, text, where)
    answer = answer_of(conversation.messages, num_context)
    answer_ids = [*(ids_of(tokenizer, answer, where) if answer else ()), tokenizer.eos_token_id]
    return [*prompt_ids, *answer_ids], [False] * len(prompt_ids) + [True] * len(answer_ids)


def answer_of(messages: Sequence[Message], num_context: int) -> str:
    """Return the contents of the turns after the first `num_context`, joined by line ends."""
    return "\n".join(turn["content"] for turn in messages[num_context:])


def stop_ids(tokenizer: Any, eos: int | Sequence[int] | None = None, *, chat: bool = True) -> set[int]:
    """Return the token ids at which generation stops.

    Args:
        tokenizer: Tokenizer of the model, whose end-of-text token is always included.
        eos: `eos_token_id` of the model's generation config: one token, or several; None: not set.
        chat: Whether to include the added tokens with which the chat template ends an answer or a tool call.
    """
    own = [eos] if eos is None or isinstance(eos, int) else eos
    stops = {tokenizer.eos_token_id, *own} - {None}
    if chat and tokenizer.chat_template:
        stops |= properties_of(tokenizer).stops
    return stops

"""The mask of the assistant's tokens, under templates of different kinds."""

import pytest

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data import CHATML, PLAIN, load_tokenizer, stop_ids
from hyper_parallel.trainer.data._chat import assistant_spans, encode_conversation

pytestmark = pytest.mark.torch

# Adds an empty reasoning block to the last answer only, as some published templates do.
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Says how many turns there are before the first one: no beginning is stable.
UNSTABLE = "{{ messages | length }} turns\n{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": " 4 \u00fcber"},
    {"role": "user", "content": "4?"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def tokenizer(corpus, make):
    return load_tokenizer(make(corpus).tokenizer_dir)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, [" 4 \u00fcber<|im_end|>", "4<|im_end|>"]),
        (PLAIN, [" 4 \u00fcber<|endoftext|>", "4<|endoftext|>"]),
        (REASONING, [" 4 \u00fcber<|im_end|>", "<think>\n\n</think>\n\n4<|im_end|>"]),
    ],
    ids=["chatml", "plain", "reasoning"],
)
def test_the_mask_covers_the_answers_and_their_end_markers(tokenizer, template, expected):
    tokenizer.chat_template = template
    text, spans = assistant_spans(tokenizer, MESSAGES)
    assert [text[a:b] for a, b in spans] == expected
    ids, mask = encode_conversation(tokenizer, MESSAGES)
    learnt = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(learnt) == "".join(expected)


def test_a_template_that_marks_the_assistants_words_decides_the_mask(tokenizer):
    tokenizer.chat_template = CHATML.replace(
        "{{ message['content'] }}<|im_end|>",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
        "{%- endgeneration %}{% else %}{{ message['content'] }}{% endif %}<|im_end|>",
    )
    ids, mask = encode_conversation(tokenizer, MESSAGES)
    learnt = [i for i, m in zip(ids, mask, strict=True) if m]
    # Without the end marker, which this template leaves outside of its mark.
    assert tokenizer.decode(learnt) == " 4 \u00fcber4"
    assert tokenizer.decode(ids) == assistant_spans(tokenizer, MESSAGES)[0]


def test_a_template_that_drops_words_of_earlier_answers_is_refused(tokenizer):
    tokenizer.chat_template = CHATML.replace(
        "message['content'] }}", "message['content'] if loop.last else 'gone' }}"
    )
    with pytest.raises(BadValue, match="differently once more turns follow"):
        assistant_spans(tokenizer, MESSAGES, "chat.jsonl:7")


def test_a_template_without_stable_beginnings_is_refused(tokenizer):
    tokenizer.chat_template = UNSTABLE
    with pytest.raises(BadValue, match="differently once more turns follow"):
        assistant_spans(tokenizer, MESSAGES, "chat.jsonl:7")


def test_a_template_that_refuses_a_conversation_names_the_record(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadValue, match="refuses a conversation") as caught:
        encode_conversation(tokenizer, MESSAGES, "chat.jsonl:7")
    assert caught.value.where == "chat.jsonl:7"
    assert "roles must alternate" in caught.value.got


def test_an_opening_turn_of_the_assistant_is_context(tokenizer):
    greeting = [{"role": "assistant", "content": "Hello."}, *MESSAGES[1:3]]
    text, spans = assistant_spans(tokenizer, greeting)
    assert [text[a:b] for a, b in spans] == [" 4 \u00fcber<|im_end|>"]


def test_answers_end_at_the_marker_of_the_template(tokenizer):
    names = {tokenizer.convert_ids_to_tokens(i) for i in stop_ids(tokenizer)}
    assert names == {"<|endoftext|>", "<|im_end|>"}
    tokenizer.chat_template = PLAIN
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id}


def test_a_foreign_tokenizer_without_a_template_gets_the_plain_one(
    tokenizer, conversations, make, tmp_path
):
    tokenizer.chat_template = None
    foreign = tmp_path / "foreign"
    tokenizer.save_pretrained(str(foreign))
    packed = make(conversations, stage="sft", seq_len=256, tokenizer=str(foreign))
    assert packed.tokenizer_dir != str(foreign)
    assert load_tokenizer(packed.tokenizer_dir).chat_template == PLAIN

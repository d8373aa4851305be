"""The mask of the assistant's tokens, under templates of different kinds."""

import pytest

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data import CHATML, PLAIN, load_tokenizer, stop_ids
from hyper_parallel.trainer.data.answer_spans import locate_answers
from hyper_parallel.trainer.data.chat import encode_conversation
from hyper_parallel.trainer.data.document import Conversation

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


def assistant_spans(tokenizer, turns, where=""):
    """The text of a conversation, and the span of each of its answers."""
    one = Conversation(tuple(turns))
    return locate_answers(tokenizer, one, one.answer_turns(0), where)


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
    ids, mask = encode_conversation(tokenizer, Conversation(tuple(MESSAGES)))
    learnt = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(learnt) == "".join(expected)


def test_a_template_that_marks_the_assistants_words_decides_the_mask(tokenizer):
    tokenizer.chat_template = CHATML.replace(
        "{{ message['content'] }}<|im_end|>",
        "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
        "{%- endgeneration %}{% else %}{{ message['content'] }}{% endif %}<|im_end|>",
    )
    ids, mask = encode_conversation(tokenizer, Conversation(tuple(MESSAGES)))
    learnt = [i for i, m in zip(ids, mask, strict=True) if m]
    # With the end marker, which this template leaves outside of its mark: without it a model does not stop.
    assert tokenizer.decode(learnt) == " 4 \u00fcber<|im_end|>4<|im_end|>"
    assert tokenizer.decode(ids) == assistant_spans(tokenizer, MESSAGES)[0]


def test_a_template_that_drops_words_of_earlier_answers_is_refused(tokenizer):
    tokenizer.chat_template = CHATML.replace(
        "message['content'] }}", "message['content'] if loop.index0 in (0, 1, 3, 4) else 'gone' }}"
    )
    with pytest.raises(BadValue, match="words of a turn do not appear") as caught:
        assistant_spans(tokenizer, MESSAGES, "chat.jsonl:7")
    assert caught.value.where == "chat.jsonl:7, turn 3 (assistant)"


def test_a_template_without_stable_beginnings_is_refused(tokenizer):
    tokenizer.chat_template = UNSTABLE
    with pytest.raises(BadValue, match="differently when more turns follow"):
        assistant_spans(tokenizer, MESSAGES, "chat.jsonl:7")


def test_a_template_that_refuses_a_conversation_names_the_record(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadValue, match="rejects a conversation") as caught:
        encode_conversation(tokenizer, Conversation(tuple(MESSAGES)), "chat.jsonl:7")
    assert caught.value.where == "chat.jsonl:7"
    assert "roles must alternate" in caught.value.got


def marked(template):
    """The template with the words of the assistant and the marker behind them marked."""
    words = "{{ message['content'] }}<|im_end|>"
    mark = "{% generation %}" + words + "{% endgeneration %}"
    choice = "{% if message['role'] == 'assistant' %}" + mark + "{% else %}" + words + "{% endif %}"
    return template.replace(f"{words}\n", choice + "{{ '\n' }}")  # a line end behind a block is cut


SYSTEM, ASKED = MESSAGES[:2]
FORMS = {
    "opening": [{"role": "assistant", "content": "Hello."}, *MESSAGES[1:3]],
    "opening behind system": [SYSTEM, {"role": "assistant", "content": "Hello. "}, *MESSAGES[1:3]],
    "opening alone": [{"role": "assistant", "content": "Hello."}],
    "empty": [ASKED, {"role": "assistant", "content": ""}, *MESSAGES[3:]],
    "empty at the end": [*MESSAGES[:4], {"role": "assistant", "content": ""}],
    "empty opening": [{"role": "assistant", "content": ""}, *MESSAGES[1:3]],
    "white space": [ASKED, {"role": "assistant", "content": " \n"}, *MESSAGES[3:]],
    "in a row": [*MESSAGES[:3], {"role": "assistant", "content": "and more"}],
    "no answer": [*MESSAGES[:4]],
    "several": MESSAGES,
}


@pytest.mark.parametrize("form", FORMS)
def test_templates_with_and_without_marks_have_the_same_targets(tokenizer, form):
    messages = FORMS[form]
    for context in range(len(messages) + 1):
        tokenizer.chat_template = CHATML
        ids, mask = encode_conversation(tokenizer, Conversation(tuple(messages)), num_context=context)
        tokenizer.chat_template = marked(CHATML)
        assert encode_conversation(tokenizer, Conversation(tuple(messages)), num_context=context) == (ids, mask)
        answers = [m["content"] for m in messages[context:] if m["role"] == "assistant"]
        learnt = [i for i, one in zip(ids, mask, strict=True) if one]
        assert tokenizer.decode(learnt) == "".join(f"{words}<|im_end|>" for words in answers)


def test_the_first_turn_is_found_where_the_template_adds_to_the_last_one_or_drops_it(tokenizer):
    greeting = FORMS["opening"]
    tokenizer.chat_template = REASONING
    for messages, wanted in (
        (greeting, ["Hello.<|im_end|>", "<think>\n\n</think>\n\n 4 \u00fcber<|im_end|>"]),
        (greeting[:1], ["<think>\n\n</think>\n\nHello.<|im_end|>"]),
        (FORMS["empty"][:3], ["<|im_end|>"]),
    ):
        text, spans = assistant_spans(tokenizer, messages)
        assert [text[a:b] for a, b in spans] == wanted
    tokenizer.chat_template = CHATML.replace(
        "for message in messages",
        "for message in messages[(messages[0].role == 'assistant') | int:]",
    )
    with pytest.raises(BadValue, match="words of a turn do not appear"):
        assistant_spans(tokenizer, greeting)


def test_a_generation_prompt_may_begin_a_reasoning_block_that_earlier_turns_lack(tokenizer):
    tokenizer.chat_template = REASONING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    for form in ("several", "empty"):
        text, spans = assistant_spans(tokenizer, FORMS[form])
        *earlier, last = [m["content"] for m in FORMS[form] if m["role"] == "assistant"]
        wanted = [*(f"{words}<|im_end|>" for words in earlier), f"\n</think>\n\n{last}<|im_end|>"]
        assert [text[a:b] for a, b in spans] == wanted


def test_what_closes_the_whole_conversation_is_no_end_marker(tokenizer):
    tokenizer.chat_template = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    for form in ("opening", "empty", "several", "white space"):
        text, spans = assistant_spans(tokenizer, FORMS[form])
        answers = [m["content"] for m in FORMS[form] if m["role"] == "assistant"]
        assert [text[a:b] for a, b in spans] == [f"{words}<|im_end|>" for words in answers]
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_ids(tokenizer)


def test_a_marked_template_that_changes_the_prompt_afterwards_is_refused(tokenizer):
    # Earlier answers lose their words once a later answer is there, so the prompt of a pair is not what was sampled.
    tokenizer.chat_template = marked(CHATML).replace(
        "{% generation %}",
        "{% generation %}{% if loop.index < 3 and messages|length > 4 %}gone{% endif %}",
    )
    with pytest.raises(BadValue, match="differently when more turns follow"):
        encode_conversation(tokenizer, Conversation(tuple(MESSAGES[1:] + MESSAGES[3:])), "chat.jsonl:7", 3)


def test_answers_end_at_the_marker_of_the_template(tokenizer):
    names = {tokenizer.convert_ids_to_tokens(i) for i in stop_ids(tokenizer)}
    assert names == {"<|endoftext|>", "<|im_end|>"}
    tokenizer.chat_template = PLAIN
    assert stop_ids(tokenizer) == {tokenizer.eos_token_id}


def test_a_foreign_tokenizer_without_a_template_gets_the_plain_one(tokenizer, conversations, make, tmp_path):
    tokenizer.chat_template = None
    foreign = tmp_path / "foreign"
    tokenizer.save_pretrained(str(foreign))
    packed = make(conversations, stage="sft", seq_len=256, tokenizer=str(foreign))
    assert packed.tokenizer_dir != str(foreign)
    assert load_tokenizer(packed.tokenizer_dir).chat_template == PLAIN

"""Targets under chat templates of many kinds: the words of the assistant and the end marker, and nothing else.

Each template is a small one that behaves as a family of published templates does. Expected texts are written by hand.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, UnigramTrainer
from transformers import PreTrainedTokenizerFast

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer.data import CHATML, load_tokenizer, render, stop_ids
from hyper_parallel.trainer.data.chat import RAW, encode_conversation, encode_pair, encode_prompt
from hyper_parallel.trainer.data.document import Conversation
from hyper_parallel.trainer.data.template_properties import TemplateProperties
from hyper_parallel.trainer.text_codec import TextCodec

pytestmark = pytest.mark.torch

SPECIAL = (
    "<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|call|>",
    "<|open|>", "<|shut|>",
)  # fmt: skip
ADDED = ("<think>", "</think>", "<call>", "</call>")
TEXTS = ["def f(x):\n    return x\n\n return words: query about Reply one two USER: ASSISTANT: "] * 4


def finished(backend, *, strip=False):
    """A tokenizer of transformers with the markers that the templates write."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.add_tokens([AddedToken(t, special=True, normalized=False, rstrip=strip) for t in SPECIAL])  # fmt: skip
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    return tokenizer


def byte_level(prefix=False):
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return finished(backend)


def sentencepiece(strip=False):
    """Tokenizer like that of Llama 2: a space before every text, bytes for unknown characters."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    space = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), space])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?=\u2581)"), "isolated")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = BpeTrainer(vocab_size=420, special_tokens=tokens, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.pre_tokenizer = None
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return finished(backend, strip=strip)


def unigram():
    """Tokenizer like that of T5: a space before every word, one for any white space."""
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )  # fmt: skip
    backend.train_from_iterator(TEXTS, trainer)
    return finished(backend)


TOKENIZERS = {
    "bytes": byte_level,
    "bytes, space first": lambda: byte_level(prefix=True),
    "sentencepiece": sentencepiece,
    "sentencepiece, markers with white space": lambda: sentencepiece(strip=True),
    "unigram": unigram,
}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level()


def turns(*texts):
    """Turns of user and assistant, in turn."""
    roles = ("user", "assistant")
    return tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))


def targets(tokenizer, conversation, num_context=0):
    """Texts of the runs of targets."""
    ids, mask = encode_conversation(tokenizer, conversation, "chat.jsonl:7", num_context)
    found, run = [], []
    for token, one in zip([*ids, 0], [*mask, False], strict=True):
        if one:
            run.append(token)
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    return found


def loop(assistant, other="<|{{ m.role }}|>\n{{ m.content }}<|end|>\n", header="<|assistant|>\n"):
    """A template that writes the turns of the assistant and of others."""
    return (
        "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant + "{% else %}" + other
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}" + header + "{% endif %}"
    )  # fmt: skip


HISTORY_WITHOUT_REASONING = loop(
    "<|assistant|>\n{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% elif loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content.split('</think>')[-1] }}<|end|>\n",
    header="<|assistant|>\n<think>\n",
)
ROLE_STOPS = (
    "<s>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHANNELS = loop(
    "<|open|>assistant<|shut|>{% if loop.last %}{{ m.content }}</s>{% else %}{{ m.content }}<|end|>{% endif %}",
    header="<|open|>assistant",
)
PARTS = loop(
    "<|assistant|>{% for p in m.content %}{{ p['text'] }}{% endfor %}<|end|>",
    "<|{{ m.role }}|>{% for p in m.content %}{{ p['text'] }}{% endfor %}<|end|>",
    "<|assistant|>",
)
RESPONSE = loop("<|assistant|><|open|>{{ m.content }}<|shut|><|end|>", header="<|assistant|>")
CLOSED = CHATML + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
STRADDLING = loop("ASSISTANT: {{ m.content }}{{ eos_token }}", "USER: {{ m.content }} ", "ASSISTANT: ")  # fmt: skip
THREE = turns("query one", "Reply one", "query two", "Reply two", "query three", "return Reply three")
PLAIN_CASES = {
    "headed turns": (CHATML, ["Reply one<|im_end|>", "Reply two<|im_end|>", "return Reply three<|im_end|>"]),
    "reasoning block in the last turn": (
        HISTORY_WITHOUT_REASONING,
        ["Reply one<|end|>", "Reply two<|end|>", "\n</think>\n\nreturn Reply three<|end|>"],
    ),
    "the next role ends an answer": (
        ROLE_STOPS,
        ["\nReply one<|user|>", "\nReply two<|user|>", "\nreturn Reply three<|user|>"],
    ),
    "channel behind the prompt": (
        CHANNELS,
        ["<|shut|>Reply one<|end|>", "<|shut|>Reply two<|end|>", "<|shut|>return Reply three</s>"],
    ),
    "parts": (PARTS, ["Reply one<|end|>", "Reply two<|end|>", "return Reply three<|end|>"]),
    "two tokens behind an answer": (
        RESPONSE,
        [f"<|open|>{words}<|shut|><|end|>" for words in ("Reply one", "Reply two", "return Reply three")],
    ),
    "end of the conversation": (CLOSED, ["Reply one<|im_end|>", "Reply two<|im_end|>", "return Reply three<|im_end|>"]),
    "prompt ends within a token": (STRADDLING, ["Reply one</s>", "Reply two</s>", "return Reply three</s>"]),
    "marks": (
        loop("<|assistant|>{% generation %}{{ m.content }}<|end|>\n{% endgeneration %}", header="<|assistant|>"),
        ["Reply one<|end|>", "Reply two<|end|>", "return Reply three<|end|>"],
    ),
    "marks with the header": (
        loop("{% generation %}<|assistant|>{{ m.content }}<|end|>\n{% endgeneration %}", header="<|assistant|>"),
        ["Reply one<|end|>", "Reply two<|end|>", "return Reply three<|end|>"],
    ),
    "header of a next turn at the end": (
        CHATML[: CHATML.index("{% if add_generation_prompt")] + "<|im_start|>",
        [f"assistant\n{words}<|im_end|>" for words in ("Reply one", "Reply two", "return Reply three")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN_CASES)
def test_targets_are_the_words_and_the_end_marker_of_every_turn(tokenizer, kind):
    tokenizer.chat_template, expected = PLAIN_CASES[kind]
    assert targets(tokenizer, Conversation(THREE)) == expected
    assert targets(tokenizer, Conversation(THREE), num_context=4) == expected[2:]
    assert targets(tokenizer, Conversation(THREE, untrained=frozenset({1, 5}))) == expected[1:2]
    if "the next role" not in kind and "channel" not in kind:
        assert targets(tokenizer, Conversation(THREE[-2:])) == expected[2:]
    stops = {tokenizer.convert_ids_to_tokens(i) for i in stop_ids(tokenizer)}
    assert any(expected[2].endswith(stop) for stop in stops)


@pytest.mark.parametrize("words", ["return Reply", "\n\nReply", " 5 apples", "<|end|>", "</think>", ""])
@pytest.mark.parametrize("kind", [*PLAIN_CASES])
def test_the_tokens_before_an_answer_are_those_of_generation(tokenizer, kind, words):
    tokenizer.chat_template = PLAIN_CASES[kind][0]
    conversation = Conversation(turns("query one", words))
    try:
        ids, mask = encode_conversation(tokenizer, conversation)
    except BadValue:
        assert words in ("</think>", "<|end|>")  # which some templates read, and drop
        return
    prompt = TextCodec(tokenizer, _Config(), None).encode("query one", chat=True)
    if kind != "header of a next turn at the end":
        assert mask.index(True) == len(prompt)
        assert ids[: len(prompt)] == prompt
    assert encode_prompt(tokenizer, conversation, num_context=1)[0][: len(prompt)] == prompt


class _Config:
    vocab_size = 1000

    def get_text_config(self, decoder):
        return self


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("words", ["return words", "\n\nReply", " Reply"])
@pytest.mark.parametrize(
    "template",
    [CHATML, STRADDLING, loop("[A] {{ m.content }} {{ eos_token }}", "<s>[U] {{ m.content }} ", "[A]")],
    ids=["line end", "space", "bracket"],
)  # fmt: skip
def test_no_tokenizer_gains_a_space_where_an_answer_begins(kind, words, template):
    tokenizer = TOKENIZERS[kind]()
    tokenizer.chat_template = template
    conversation = Conversation(turns("query", words, "query", words))
    ids, mask = encode_conversation(tokenizer, conversation)
    text = render(tokenizer, conversation)
    whole = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(ids) == whole
    prompt = tokenizer(render(tokenizer, conversation.messages[:1], prompt=True), add_special_tokens=False)  # fmt: skip
    assert ids[: mask.index(True)] == prompt["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == text.count("<s>")


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["query: ", "query:", "query:\n"])
def test_a_pair_of_texts_is_joined_without_a_space(kind, prompt):
    tokenizer = TOKENIZERS[kind]()
    ids, mask = encode_pair(tokenizer, prompt, "return words")
    whole = tokenizer(f"{prompt}return words", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[:-1]) == tokenizer.decode(whole)
    assert ids[: mask.index(True)] == tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert ids[-1] == tokenizer.eos_token_id
    assert mask[-1]


REASONED = {"role": "assistant", "content": "Reply one", "reasoning_content": "Let me see."}


def test_conversations_of_one_shape_share_one_text_of_placeholders(tokenizer, monkeypatch):
    rendered, render = [], TemplateProperties.render
    monkeypatch.setattr(
        TemplateProperties, "render", lambda own, turns, **how: rendered.append(turns) or render(own, turns, **how)
    )  # fmt: skip

    def count(template, words):
        tokenizer.chat_template = template
        targets(tokenizer, Conversation(turns("query", "Reply")))
        rendered.clear()
        assert targets(tokenizer, Conversation(turns("about", words))) == [f"{words}<|im_end|>"]
        return len(rendered)

    assert count(CHATML, "one two") == 2, "the conversation, and its generation prompt"
    assert count(CHATML, "one two\n") == 3, "other white space is another shape"
    dated = "{% if strftime_now %}{{ strftime_now('%H:%M:%S.%f') | length }}{% endif %}" + CHATML
    assert count(dated, "one two") == 3, "a text may change with the time"


def test_reasoning_is_trained_where_the_template_writes_it(tokenizer):
    tokenizer.chat_template = HISTORY_WITHOUT_REASONING
    one = Conversation((*turns("query one"), REASONED))
    assert targets(tokenizer, one) == ["Let me see.\n</think>\n\nReply one<|end|>"]
    inline = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nReply one"}
    tokenizer.chat_template = CHATML
    assert targets(tokenizer, Conversation((*turns("a"), inline))) == [f"{inline['content']}<|im_end|>"]  # fmt: skip
    for key in ("reasoning", "thinking"):
        tokenizer.chat_template = HISTORY_WITHOUT_REASONING.replace("reasoning_content", key)
        assert targets(tokenizer, one) == ["Let me see.\n</think>\n\nReply one<|end|>"]


def test_a_block_that_the_generation_prompt_opens_is_no_target_within_the_words(tokenizer):
    tokenizer.chat_template = loop("<|assistant|>\n{{ m.content }}<|end|>", header="<|assistant|>\n<think>\n")
    inline = {"role": "assistant", "content": "<think>\nLet me see.\n</think>\n\nReply one"}
    one = Conversation((*turns("a"), inline))
    assert targets(tokenizer, one) == ["Let me see.\n</think>\n\nReply one<|end|>"]
    # A turn without the block does not begin as the generation prompt does.
    assert targets(tokenizer, Conversation(turns("a", "Reply two"))) == ["Reply two<|end|>"]


def test_reasoning_that_the_template_drops_is_refused_where_it_is_trained(tokenizer):
    tokenizer.chat_template = HISTORY_WITHOUT_REASONING
    two = Conversation((*turns("query one"), REASONED, *turns("query two", "Reply two")))
    with pytest.raises(BadValue, match="drops the reasoning") as caught:
        encode_conversation(tokenizer, two, "chat.jsonl:7")
    assert caught.value.where == "chat.jsonl:7, turn 2 (assistant)"
    expected = ["\n</think>\n\nReply two<|end|>"]
    assert targets(tokenizer, two, num_context=3) == expected
    tokenizer.chat_template = CHATML
    with pytest.raises(BadValue, match="drops the reasoning"):
        encode_conversation(tokenizer, Conversation((*turns("a"), REASONED)))


TOOLS = ({"type": "function", "function": {"name": "find", "description": "Find.", "parameters": {}}},)  # fmt: skip
ARGUMENTS = {"place": 'A "b"\nc', "days": 3, "deep": {"on": True, "list": ["x", None]}}
CALL = {"type": "function", "id": "callid001", "function": {"name": "find", "arguments": ARGUMENTS}}
CALLS = Conversation(
    (
        *turns("query one"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "Found it", "name": "find", "tool_call_id": "callid001"},
        {"role": "assistant", "content": "Reply one"},
    ),
    tools=TOOLS,
)
WRITTEN = 'find{"place": "A \\"b\\"\\nc", "days": 3, "deep": {"on": true, "list": ["x", null]}}'
LISTED = "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
HERMES = LISTED + loop(
    "<|assistant|>\n{{ m.content }}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}</call>{% endfor %}<|end|>\n",
    "<|{{ m.role }}|>{{ m.content }}<|end|>",
)


def test_tool_calls_are_trained_and_tool_results_are_not(tokenizer):
    tokenizer.chat_template = HERMES
    assert targets(tokenizer, CALLS) == [f"<call>{WRITTEN}</call><|end|>", "Reply one<|end|>"]
    # Arguments as a text, no content beside a call, and another marker behind a call.
    tokenizer.chat_template = LISTED + loop(
        "<|assistant|>\n{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name + "
        "c.function.arguments }}{% endfor %}<|call|>{% else %}{{ m.content }}<|end|>{% endif %}"
    )
    assert targets(tokenizer, CALLS) == [f"{WRITTEN}<|call|>", "Reply one<|end|>"]
    stops = {tokenizer.convert_ids_to_tokens(i) for i in stop_ids(tokenizer)}
    assert stops == {"</s>", "<|call|>", "<|end|>"}


def test_the_role_of_a_tool_ends_a_call_where_roles_end_answers(tokenizer):
    tokenizer.chat_template = LISTED + ROLE_STOPS
    expected = [f"\n<call>{WRITTEN}</call><|tool|>", "\nReply one<|user|>"]
    assert targets(tokenizer, CALLS) == expected
    assert targets(tokenizer, Conversation(CALLS.messages[:2], tools=TOOLS)) == expected[:1]


CALLS_WITH_WORDS = replace(
    CALLS,
    messages=(CALLS.messages[0], {**CALLS.messages[1], "content": "Then"}, *CALLS.messages[2:]),
)
PAIR = Conversation(turns("a", "Reply"))
SYSTEM = Conversation(({"role": "system", "content": "Be brief."}, *turns("a", "b")))
ONE_OF_USER = "<|user|>{{ m.content if m.role == 'user' }}<|end|>"
NO_SYSTEM = "{{ raise_exception('no system') if m.role == 'system' }}"
REFUSED = [
    (HERMES.replace("{{ m.content }}{% for", "{% for"), CALLS, "words of a turn", 4),
    (HERMES.replace("{{ c.function.name }}", ""), CALLS, "does not write a tool call", 2),
    (HERMES.replace("arguments | tojson", "arguments.days"), CALLS, "an argument of a tool", 2),
    (HERMES.replace("arguments | tojson", "arguments.place"), CALLS, "an argument of a tool", 2),
    (HERMES.removeprefix(LISTED), CALLS, "does not write the tools", 0),
    (loop("<|assistant|>{{ m.content }}<|end|>", ONE_OF_USER), SYSTEM, "words of a turn", 1),
    (loop("<|assistant|>{{ m.content }}<|end|>", NO_SYSTEM), SYSTEM, "rejects a conversation", 0),
    (CHATML, replace(PAIR, template_values={"enable_thinking": False}), "`enable_thinking`", 0),
    (CHATML, Conversation(turns("Qz0zQ", "b")), "reserved as a placeholder", 0),
    (CHATML, Conversation(turns("a\0image\0", "b")), "reserved as a placeholder", 0),
    (loop("A: {{ m.content }}\n", "U: {{ m.content }}\n", "A: "), PAIR, "with a marker", 2),
    (loop("<|assistant|>{{ m.content | upper }}<|end|>"), PAIR, "words of a turn", 2),
    (loop("<|assistant|>{{ m.content * 2 }}<|end|>"), PAIR, "more than once", 2),
    (
        LISTED
        + loop(
            "<|assistant|>{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
            "{% endfor %}{{ messages[2].content if loop.index0 == 1 }}{{ m.content }}<|end|>",
            "{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endif %}",
            "<|assistant|>",
        ),
        CALLS_WITH_WORDS,
        "words of another turn",
        2,
    ),
    ("{{ messages | length }}" + CHATML, PAIR, "differently when more turns follow", 2),
    (
        loop("<|assistant|>{% generation %}{{ m.content[:2] }}{% endgeneration %}{{ m.content[2:] }}<|end|>"),
        PAIR,
        "omits words",
        2,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("template", "conversation", "cause", "turn"), REFUSED)
def test_a_conversation_that_is_not_written_exactly_is_refused_with_its_cause(
    tokenizer, template, conversation, cause, turn
):
    tokenizer.chat_template = template
    with pytest.raises(BadValue, match=cause) as caught:
        encode_conversation(tokenizer, conversation, "chat.jsonl:7")
    named = f", turn {turn} ({conversation.messages[turn - 1]['role']})" if turn else ""
    assert caught.value.where == f"chat.jsonl:7{named}"


def test_variables_of_a_record_reach_the_template(tokenizer):
    tokenizer.chat_template = HISTORY_WITHOUT_REASONING.replace(
        "<think>\n{% endif %}", "<think>\n{% if not think %}\n</think>\n\n{% endif %}{% endif %}"
    )
    values = {"think": False}
    assert targets(tokenizer, Conversation(turns("a", "b"), template_values=values)) == ["b<|end|>"]
    values = {"think": True}
    expected = ["\n</think>\n\nb<|end|>"]
    assert targets(tokenizer, Conversation(turns("a", "b"), template_values=values)) == expected


def test_a_developer_is_a_system_where_the_template_knows_no_developer(tokenizer):
    one = Conversation(({"role": "developer", "content": "Be brief."}, *turns("a", "b")))
    tokenizer.chat_template = CHATML
    assert render(tokenizer, one).startswith("<|im_start|>developer\nBe brief.")
    check = "{{ raise_exception('role') if messages[0].role == 'developer' }}"
    tokenizer.chat_template = check + CHATML
    assert render(tokenizer, one).startswith("<|im_start|>system\nBe brief.")
    assert targets(tokenizer, one) == ["b<|im_end|>"]


def test_the_generation_config_decides_between_tokens_behind_a_call(tokenizer, tmp_path):
    template = LISTED + loop(
        "<|assistant|>\n{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}"
        "</call><|call|><|open|>{% endfor %}{{ m.content }}{% if not m.tool_calls %}<|end|>{% endif %}"
    )
    tokenizer.chat_template = template
    assert targets(tokenizer, CALLS)[0] == f"<call>{WRITTEN}</call><|call|><|open|>"
    tokenizer.save_pretrained(str(tmp_path))
    number = tokenizer.convert_tokens_to_ids("<|call|>")
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{number}]}}')
    again = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert targets(again, CALLS)[0] == f"<call>{WRITTEN}</call><|call|>"


def test_the_recipe_names_the_template_that_is_trained_and_exported(conversations, make, tmp_path):
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    pairs = tmp_path / "pairs.jsonl"
    words = ({"prompt": f"What is {i}? ", "completion": f"It is {i}."} for i in range(40))
    pairs.write_text("".join(json.dumps(one) + "\n" for one in words))
    found = {}
    for name in ("auto", "none", str(own)):
        source = pairs if name == "none" else conversations
        packed = make(source, stage="sft", seq_len=256, chat_template=name)
        exported = load_tokenizer(packed.tokenizer_dir)
        found[name] = (exported.chat_template, packed.fingerprint, packed.tokenizer_fingerprint)
        question = exported.decode(packed.train.read(np.arange(1))[0][0])
        assert ("[user] What is" in question) == (name == str(own))
        assert ("<|im_start|>user" in question) == (name == "auto")
    assert found["none"][0] == RAW
    assert found[str(own)][0] == own.read_text()
    assert len({one[1] for one in found.values()}) == len({one[2] for one in found.values()}) == 3
    own.write_text(own.read_text().replace("[", "<").replace("]", ">"))
    changed = make(conversations, stage="sft", seq_len=256, chat_template=str(own))
    assert changed.fingerprint != found[str(own)][1]


@pytest.mark.parametrize(
    ("content", "got", "line"),
    [
        ("{% for m in\nmessages %}", "Unexpected end", ", line 2"),
        (None, "No such file", ""),
        ("x" * 200_000, "131,072", ""),
    ],
)
def test_a_template_file_that_is_no_template_is_refused(conversations, make, tmp_path, content, got, line):
    path = tmp_path / "own.jinja"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadValue, match="chat template cannot be read") as caught:
        make(conversations, stage="sft", chat_template=str(path))
    assert caught.value.where == f"data.chat_template: {path}{line}"
    assert got in caught.value.got

"""From a file of records to the tokens that are targets: flags, tools and reasoning reach the loss mask."""

import json

import numpy as np
import pytest

from hyper_parallel.trainer.data import IGNORE_INDEX, load_tokenizer

pytestmark = pytest.mark.unit

TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ask(text):
    return {"role": "user", "content": text}


def answer(text, **keys):
    return {"role": "assistant", "content": text, **keys}


@pytest.fixture
def targets(make, tmp_path):
    """Texts of all runs of targets in the packed rows of one record."""

    def run(record, **data):
        source, template = tmp_path / "one.jsonl", tmp_path / "template.jinja"
        template.write_text(TEMPLATE)
        source.write_text("".join(json.dumps(record) + "\n" for _ in range(4)))
        values = {"seq_len": 512, "holdout": 0.0, "packing": False, "chat_template": str(template)}
        packed = make(source, stage="sft", **values | data)
        tokenizer = load_tokenizer(packed.tokenizer_dir)
        labels = packed.train.read(np.arange(1))[1][0].tolist()
        found, current = [], []
        for label in [*labels, IGNORE_INDEX]:
            if label == IGNORE_INDEX:
                found += [tokenizer.decode(current)] if current else []
                current = []
            else:
                current.append(label)
        return found

    return run


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss": False}])
def test_a_turn_that_the_record_excludes_has_no_target(targets, flag):
    record = {"messages": [ask("a"), answer("first", **flag), ask("b"), answer("second")]}
    assert targets(record) == ["second<|im_end|>"]


def test_calls_and_reasoning_are_targets_and_tools_are_context(targets):
    call = {"type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    schema = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    record = {
        "tools": [schema],
        "messages": [
            ask("a"),
            answer(None, reasoning_content="hm", tool_calls=[call]),
            {"role": "tool", "name": "add", "content": "2"},
            answer("two"),
        ],
    }
    first, second = targets(record)
    assert first.startswith("<think>hm</think><call>")
    assert '"name": "add"' in first
    assert first.endswith("</call><|im_end|>")
    assert second == "two<|im_end|>"


def test_columns_of_other_names_are_trained_like_their_own(targets):
    record = {"question": "a", "reply": "second", "row": 7}
    found = targets(record, columns={"prompt": "question", "completion": "reply"}, ignore_keys=["row"])
    assert found == ["second<|im_end|>"]

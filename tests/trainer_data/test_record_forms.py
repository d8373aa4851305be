"""Forms of records that people have: turns, tools, flags and prompts of each, or a refusal that names the key."""

import json

import pytest

from hyper_parallel.config import Data
from hyper_parallel.errors import NoData
from hyper_parallel.trainer.data.sources import resolve

pytestmark = pytest.mark.unit

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}
HUMAN, GPT = {"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}
SCHEMA = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": SCHEMA}
CALL = {"name": "f", "arguments": {"x": 1}}
CALLED = {"type": "function", "function": CALL}
TOLD = {"role": "tool", "content": "2"}


def calling(**keys):
    return {"role": "assistant", "content": "", **keys}


def form(record, *messages, prompt=None, tools=(), untrained=(), values=None, **data):
    """A record, its messages, and the section `data`."""
    return record, messages or (U, A), prompt, tools, set(untrained), values or {}, data


FORMS = {
    "messages": form({"messages": [U, A]}),
    "conversations": form({"conversations": [HUMAN, GPT]}),
    "both alike": form({"conversations": [HUMAN, GPT], "messages": [U, A]}),
    "prompt_completion": form({"prompt": "q", "completion": "r"}, prompt=1),
    "prompt, response": form({"prompt": "q", "response": "r"}, prompt=1),
    "question, answer": form({"question": "q", "answer": "r"}, prompt=1),
    "query, response": form({"query": "q", "response": "r"}, prompt=1),
    "problem, solution": form({"problem": "q", "solution": "r"}, prompt=1),
    "input, output": form({"input": "q", "output": "r"}, prompt=1),
    "instruction, response": form({"instruction": "q", "response": "r"}),
    "instruction, context, response": form(
        {"instruction": "q", "context": "c", "response": "r", "category": "x"},
        {"role": "user", "content": "q\nc"}, A),
    "alpaca and its rendering": form({"instruction": "q", "input": "", "output": "r", "text": "### q\n\n### r"}),
    "system_prompt": form({"question": "q", "answer": "r", "system_prompt": "s"},
                          {"role": "system", "content": "s"}, U, A, prompt=2),
    "system twice": form({"messages": [{"role": "system", "content": "s"}, U, A], "system": "s"},
                         {"role": "system", "content": "s"}, U, A),
    "prompt beside its messages": form({"prompt": "q", "prompt_id": "7", "messages": [U, A]}),
    "ids and scores": form({"messages": [U, {**A, "id": 3}], "id": 1, "source": "x", "score": 0.5, "meta": {"a": []}}),
    "nothing in further keys": form({"messages": [{**U, "tool_calls": None}, A], "images": [], "odd": None, "x": ""}),
    "columns": form({"frage": "q", "antwort": "r"}, prompt=1, columns={"prompt": "frage", "completion": "antwort"}),
    "columns of alpaca": form({"ask": "q", "more": "c", "say": "r"}, {"role": "user", "content": "q\nc"}, A,
                              columns={"instruction": "ask", "input": "more", "output": "say"}),
    "columns of turns, and roles": form(
        {"dialog": [{"speaker": "customer", "text": "q"}, {"speaker": "agent", "text": "r"}]},
        columns={"messages": "dialog", "role": "speaker", "content": "text"},
        roles={"user": "customer", "assistant": "agent"}),
    "ignored keys": form({"messages": [U, {**A, "mood": "x"}], "strange": 1, "system": "no"},
                         ignore_keys=["strange", "mood", "system"]),
    "parts": form({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]},
                                {"role": "assistant", "content": [{"type": "text", "text": "r"}, "s"]}]},
                  U, {"role": "assistant", "content": "rs"}),
    "history beside a question": form({"query": "q", "response": "r", "history": [["a", "b"]]},
                                      {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, U, A),
    "roles in capitals": form({"messages": [{**U, "role": "User"}, {**A, "role": "ASSISTANT"}]}, U, A),
    "developer": form({"messages": [{"role": "developer", "content": "d"}, U, A]},
                      {"role": "developer", "content": "d"}, U, A),
    "weight": form({"messages": [U, {**A, "weight": 0}, U, {**A, "weight": 1.0}]}, U, A, U, A, untrained=[1]),
    "train": form({"messages": [{**U, "train": False}, {**A, "train": False}, U, A]}, U, A, U, A, untrained=[1]),
    "loss, behind a system key": form({"messages": [U, {**A, "loss": 0}], "system": "s"},
                                      {"role": "system", "content": "s"}, U, A, untrained=[2]),
    "masked": form({"conversations": [HUMAN, {**GPT, "masked": True}]}, untrained=[1]),
    "flags in a completion": form({"prompt": [U], "completion": [{**A, "trainable": False}, U, A]},
                                  U, A, U, A, prompt=1, untrained=[1]),
    "reasoning": form({"messages": [U, {**A, "reasoning": "t"}]}, U, {**A, "reasoning_content": "t"}),
    "thinking": form({"messages": [U, {**A, "thinking": "t", "reasoning_content": "t"}]},
                     U, {**A, "reasoning_content": "t"}),
    "thinking part": form({"messages": [U, {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "t"}, {"type": "text", "text": "r"}]}]}, U, {**A, "reasoning_content": "t"}),
    "template variables": form({"messages": [U, A], "chat_template_kwargs": {"enable_thinking": False}},
                               values={"enable_thinking": False}),
    "tools and calls": form(
        {"messages": [U, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
            {**TOLD, "tool_call_id": "1"}, A], "tools": [TOOL]},
        U, calling(tool_calls=[{"id": "1", **CALLED}]), {**TOLD, "tool_call_id": "1"}, A, tools=[TOOL]),
    "tools as text, calls as objects": form(
        {"messages": [U, {**A, "tool_calls": [CALL]}, TOLD, A], "tools": json.dumps([SCHEMA])},
        U, {**A, "tool_calls": [CALLED]}, TOLD, A, tools=[TOOL]),
    "function_call of sharegpt": form(
        {"conversations": [HUMAN, {"from": "function_call", "value": json.dumps(CALL)},
                           {"from": "observation", "value": "2"}, GPT], "tools": json.dumps([SCHEMA])},
        U, calling(tool_calls=[CALLED]), TOLD, A, tools=[TOOL]),
    "several calls of sharegpt": form(
        {"conversations": [HUMAN, {"from": "function_call", "value": json.dumps([CALL, CALL])}], "tools": "[]"},
        U, calling(tool_calls=[CALLED, CALLED])),
    "functions": form(
        {"messages": [U, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                      {"role": "function", "name": "f", "content": "2"}, A], "functions": [SCHEMA]},
        U, calling(tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {}}}]),
        {**TOLD, "name": "f"}, A, tools=[TOOL]),
}  # fmt: skip


def read(tmp_path, *records, stage="sft", **data):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    source = resolve(Data(source=str(path), **data), stage)
    return list(source.documents()), source


@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_records_gives_its_conversation(tmp_path, name):
    record, messages, prompt, tools, untrained, values, data = FORMS[name]
    (document,), _ = read(tmp_path, record, **data)
    one = document.conversation
    assert list(one.messages) == list(messages)
    assert (one.num_prompt, list(one.tools)) == (prompt, list(tools))
    assert (one.untrained, dict(one.template_values)) == (untrained, values)


REFUSED = {
    "variable of turns": ({"messages": [U, A], "chat_template_kwargs": {"messages": []}}, "set from the conv", None),
    "unknown key": ({"messages": [U, A], "mood": 1}, "`mood` has no known meaning", "data.ignore_keys=[mood]"),
    "unknown keys": ({"messages": [U, A], "mood": 1, "tone": 2}, "`mood`", "data.ignore_keys=[mood,tone]"),
    "key that turns have too": (
        {"messages": [U, A], "content": "c"}, "`content` has no known meaning",
        "remove or rename this key, because `data.ignore_keys` would also ignore it elsewhere in a record"),
    "key of a turn": ({"messages": [U, {**A, "mood": 1}]}, "in a turn", "data.ignore_keys=[mood]"),
    "label of a turn": (
        {"messages": [U, {**A, "label": True}]}, "`label` has no known meaning in a turn", "data.ignore_keys=[label]"),
    "key of a call": ({"messages": [U, {**A, "tool_calls": [{**CALL, "mood": 1}]}]}, "call", "data.ignore_keys=[mood]"),
    "images": ({"messages": [U, A], "images": ["x.png"]}, "`images`.*not supported", "data.ignore_keys=[images]"),
    "part of a picture": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, A]}, "`image_url`", None),
    "two conversations": ({"messages": [U, A], "conversations": [GPT]}, "not part of the turns",
                          "data.ignore_keys=[messages]"),
    "two systems": ({"messages": [{"role": "system", "content": "s"}, U, A], "system": "t"}, "`system`.*differs",
                    "data.ignore_keys=[system]"),
    "two answers": ({"question": "q", "answer": "r", "solution": "long"}, "`answer` and `solution`",
                    "data.ignore_keys=[solution]"),
    "an input beside a question": ({"question": "q", "input": "i", "answer": "r"}, "`input`",
                                   "data.ignore_keys=[input]"),
    "two reasonings": ({"messages": [U, {**A, "reasoning": "t", "thinking": "u"}]}, "`reasoning` and `thinking`",
                       "data.ignore_keys=[thinking]"),
    "half a weight": ({"messages": [U, {**A, "weight": 0.5}]}, "`weight`.*not 0 or 1", None),
    "a question that is trained": ({"messages": [{**U, "train": True}, A]}, "role user as trained on", None),
    "flags that differ": ({"messages": [U, {**A, "train": True, "weight": 0}]}, "`train` and `weight`", None),
    "arguments that are no JSON": ({"messages": [U, {**A, "tool_calls": [{"name": "f", "arguments": "{x"}]}]},
                                   "`arguments`.*not JSON", None),
    "a label": ({"prompt": "q", "completion": "r", "label": False}, "only by stage kto", "data.ignore_keys=[label]"),
    "a list of another name": ({"dialog": [U, A]}, "which key of a record", "data.columns.messages=dialog"),
    "two texts": ({"frage": "q", "antwort": "r"}, "which key of a record",
                  "data.columns.prompt=frage data.columns.completion=antwort"),
    "texts by name": ({"kind": "x", "input": "q", "target": "r"}, "which key of a record",
                      "data.columns.completion=target"),
    "texts between others": ({"title": "x", "question_text": "q", "answer_text": "r"}, "which key of a record",
                             "data.columns.prompt=question_text data.columns.completion=answer_text"),
    "several answers by name": ({"problem": "q", "their_solution": "r", "true_solution": "s"}, "which key of a record",
                                None),
    "a system key in capitals": ({"System": "s", "User": "q", "Assistant": "r"}, "which key of a record",
                                 "data.columns.prompt=User data.columns.completion=Assistant "
                                 "data.columns.system=System"),
    "no question beside a system key": ({"system": "s", "chat": "USER: q ASSISTANT: r"}, "which key of a record", None),
    "a column with a space": ({"prompt": "q", " completion": "r"}, "which key of a record",
                              "'data.columns.completion=\" completion\"'"),
    "a column of digits": ({"1": "q", "2": "r"}, "which key of a record",
                           "'data.columns.prompt=\"1\"' 'data.columns.completion=\"2\"'"),
    "turns without a role": ({"messages": [{"speaker": "human", "text": "q"}, {"speaker": "gpt", "text": "r"}]},
                             "turn has no role", "data.columns.role=speaker data.columns.content=text"),
    "turns of another form": ({"messages": [{"input": "q", "output": "r"}]}, "turn has no role", None),
    "a role of the assistant": ({"messages": [U, {**A, "role": "Chatbot"}]}, "no known role",
                                "data.roles.assistant=Chatbot"),
    "a role of a tool": ({"messages": [U, {"role": "environment", "content": "s"}, A]}, "no known role",
                         "data.roles.tool=environment"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_record_that_says_more_than_is_read_is_refused_with_its_place(tmp_path, name):
    record, match, hint = REFUSED[name]
    with pytest.raises(NoData, match=match) as caught:
        read(tmp_path, record)
    assert caught.value.where.startswith(f"{tmp_path / 'a.jsonl'}:1")
    assert caught.value.hint == hint


REFUSED_PAIRS = {
    "a worse answer beside another form": (
        {"query": "q", "response": "r", "rejected_response": "n"}, "better and a worse answer",
        "data.columns.chosen=response data.columns.rejected=rejected_response"),
    "a worse answer under its own name": (
        {"prompt": "q", "response": "r", "rejected": "n"}, "better and a worse answer", "data.columns.chosen=response"),
    "names that say nothing": ({"prompt": "q", "response_a": "r", "response_b": "n"}, "which keys of a record", None),
    "a number that says which is better": (
        {"prompt": "q", "first": "r", "second": "n", "better_response_id": 1}, "which keys of a record", None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_PAIRS)
def test_a_pair_under_other_names_is_refused_with_the_names_that_say_which_is_better(tmp_path, name):
    record, match, hint = REFUSED_PAIRS[name]
    with pytest.raises(NoData, match=match) as caught:
        read(tmp_path, record, stage="dpo")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("data.source", "data.columns.prompt=frage data.columns.completion=antwort"),
        ("data.source[1]", "set in the entry `data.source[1]`: columns: {prompt: frage, completion: antwort}"),
        ("data.validation", "give the records of `data.validation` the keys and the format of the training data"),
    ],
)
def test_the_hint_is_for_the_key_that_names_the_source(tmp_path, key, hint):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"frage": "q", "antwort": "r"}) + "\n")
    with pytest.raises(NoData) as caught:
        resolve(Data(source=str(path)), "sft", key=key)
    assert caught.value.hint == hint


def test_a_second_word_for_a_role_gets_no_hint_that_replaces_the_first(tmp_path):
    record = {"messages": [{**U, "role": "customer"}, A, {**U, "role": "client"}, A]}
    with pytest.raises(NoData, match="no known role") as caught:
        read(tmp_path, record, roles={"user": "customer"})
    assert (caught.value.got, caught.value.hint) == ("client", None)


def test_the_hint_names_every_key_and_keeps_those_that_are_ignored_already(tmp_path):
    record = {"messages": [U, {**A, "c": 1}], "a": 1, "b": 2}
    with pytest.raises(NoData) as caught:
        read(tmp_path, record, ignore_keys=["c"])
    assert caught.value.hint == "data.ignore_keys=[a,b,c]"
    (document,), source = read(tmp_path, record, record, ignore_keys=["a", "b", "c"], max_records=1)
    assert document.conversation.messages == (U, A)
    assert source.counts.ignored_keys == {"a": 1, "b": 1, "c": 1}


def test_keys_without_influence_are_counted_and_placeholders_are_never_letters(tmp_path):
    _, source = read(tmp_path, {"messages": [U, A], "id": 1}, {"messages": [U, A], "id": 2, "score": 1})
    assert source.counts.notes == ["ignored keys: id (2), score (1)"]
    assert source.counts.losses == []
    record = {"messages": [{"role": "user", "content": "<image>q"}, A], "images": ["x.png"]}
    with pytest.raises(NoData, match="the placeholder `<image>` refers to") as caught:
        read(tmp_path, record, ignore_keys=["images"])
    assert caught.value.hint is None
    assert len(read(tmp_path, {**record, "images": []})[0]) == 1


def test_rewards_read_every_other_column(tmp_path):
    record = {"question": "q", "answer": 42, "ground_truth": [1], "anything": {"a": 1}}
    (document,), _ = read(tmp_path, record, stage="grpo")
    assert [m["content"] for m in document.conversation.messages] == ["q", "42"]
    assert document.num_context == 1
    assert document.columns == record
    with pytest.raises(NoData, match="`images`"):
        read(tmp_path, {**record, "images": ["x"]}, stage="grpo")


def test_pairs_of_a_known_data_set_are_read(tmp_path):
    record = {"prompt": "q", "prompt_id": "1", "messages": [U, A], "score_chosen": 1.0,
              "chosen": [U, A], "rejected": [U, {"role": "assistant", "content": "n"}]}  # fmt: skip
    documents, _ = read(tmp_path, record, stage="dpo")
    assert [d.conversation.messages[-1]["content"] for d in documents] == ["r", "n"]
    assert {d.num_context for d in documents} == {1}
    record = {"system": "s", "question": "q", "chosen": "r", "rejected": "n", "margin": 1}
    documents, _ = read(tmp_path, record, stage="dpo")
    assert [m["content"] for m in documents[0].conversation.messages] == ["s", "q", "r"]


def test_a_column_that_no_record_has_is_named(tmp_path):
    with pytest.raises(NoData, match="no key `questions`") as caught:
        read(tmp_path, {"question": "q", "answer": "r"}, columns={"prompt": "questions"})
    assert caught.value.hint == "data.columns.prompt=question"


@pytest.mark.parametrize(
    ("record", "stage", "says"),
    [
        ({"messages": [{"role": "user", "name": "bo", "content": "q"}, A]}, "sft", "`name`"),
        ({"messages": [{"role": "user", "from": "alice", "content": "q"}, A]}, "sft", "role"),
        ({"role": "user", "content": "q"}, "sft", "single turn"),
        ({"from": "human", "value": "q"}, "sft", "single turn"),
        (
            {"chosen": [U, A], "rejected": [{"role": "user", "content": "z"}, A]},
            "dpo",
            "do not begin with the same prompt",
        ),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path, record, stage, says):
    with pytest.raises(NoData) as caught:
        read(tmp_path, record, stage=stage)
    assert says in caught.value.render()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n',
            "`content` occurs twice",
        ),
        (
            '{"system": "s", "data": [{"prompt": "q", "completion": "r"}]}',
            "list of records has unknown keys",
        ),
        (
            '{"data": [{"prompt": "q", "completion": "r"}], "weight": 0}',
            "list of records has unknown keys",
        ),
        ('{\n"messages": [\n{"role": "user", "content": "q"}\n]\n}', "single turn"),
    ],
)
def test_a_file_that_loses_words_is_refused(tmp_path, text, says):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(NoData) as caught:
        list(resolve(Data(source=str(path)), "sft").documents())
    assert says in caught.value.render()

"""Record and file formats for `targets.py`, with the training rows that each must give."""

# ruff: noqa: E501 - an input is a line or two of a table

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

Message = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Expected training row, given by the turns of a conversation or by text segments.

    Attributes:
        messages: Turns; None: `segments` define the row.
        tools: Tools of the conversation.
        untrained: Indices of the assistant's turns without targets.
        values: Variables of the chat template.
        segments: Pairs of text and whether it is trained.
        is_prompt: Whether the row ends with the generation prompt.
        is_last_token: Whether only the last token is a target, as for reward models.
    """

    messages: tuple[Message, ...] | None = None
    tools: tuple[Any, ...] = ()
    untrained: tuple[int, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    segments: tuple[tuple[str, bool], ...] = ()
    is_prompt: bool = False
    is_last_token: bool = False

    @property
    def text(self) -> str:
        """Concatenated text of the segments."""
        return "".join(text for text, _ in self.segments)

    def trains(self, index: int) -> bool:
        """Return whether the turn at an index is trained."""
        return index not in self.untrained


@dataclass(frozen=True)
class Input:
    """Data files and recipe, with the expected rows or refusal.

    Attributes:
        rows: Expected rows.
        files: Content of files by name; the first is `data.source`.
        stage: Stage of the recipe.
        data: Further keys of the section `data`.
        refused: Pattern that the error must match; None: the input must be accepted.
        family: Name of the chat template's family.
        recipe: Text that replaces the usual recipe; `PLACE` stands for its folder.
    """

    rows: tuple[Row, ...]
    files: Mapping[str, str | bytes]
    stage: str = "sft"
    data: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    family: str = "ChatML"
    recipe: Mapping[str, Any] | None = None


def _turn(role: str, content: str, **keys: Any) -> Message:
    return {"role": role, "content": content, **keys}


def _call(name: str, **arguments: Any) -> Message:
    function = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return _turn("assistant", "", tool_calls=[function])


def _lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def _row(*messages: Message, **facts: Any) -> Row:
    return Row(messages, **facts)


def _of(record: Any, *rows: Row, name: str = "a.jsonl", **facts: Any) -> Input:
    """Return an input whose only file has one record."""
    return Input(rows, {name: _lines(record)}, **facts)


def _refused(record: Any, cause: str, **facts: Any) -> Input:
    return _of(record, refused=cause, **facts)


def _shared(*turns: tuple[str, str], **keys: Any) -> dict[str, Any]:
    """Return a record in ShareGPT's format."""
    return {"conversations": [{"from": who, "value": text} for who, text in turns], **keys}


_S = _turn("system", "Be brief.")
_U, _A = _turn("user", "Which way?"), _turn("assistant", "To the left.")
_V, _B = _turn("user", "And then?"), _turn("assistant", "Go on, friend.")
_WORSE = _turn("assistant", "No idea.")
_TALK = _row(_U, _A, _V, _B)
_ONE = _row(_U, _A)
_SCHEMA = {"name": "find", "description": "Find a place.", "parameters": {"type": "object"}}
_TOOL = {"type": "function", "function": _SCHEMA}
_FOUND = _turn("tool", "It is near.")
_USED = Row((_U, _call("find", place="Long street"), _FOUND, _A), tools=(_TOOL,))
_CALLED = {"name": "find", "arguments": {"place": "Long street"}}
_OPENAI_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "find", "arguments": '{"place": "Long street"}'},
}
_PAIR = {"prompt": "Which way?", "chosen": "To the left.", "rejected": "No idea."}
_PAIR_ROWS = (_ONE, _row(_U, _WORSE))
_SCORED = tuple(Row(row.messages, is_last_token=True) for row in _PAIR_ROWS)
_ASKED = Row((_U,), is_prompt=True)
_JOINED = Row(segments=(("Which way? ", False), ("To the left.<|im_end|>", True)))
_TEXT = Row(segments=(("Z", False), ("ebra way<|im_end|>", True)))
_WHOLE = Row(segments=(
    ("<|im_start|>", False),
    ("user\nWhich way?<|im_end|>\n<|im_start|>assistant\nTo the left.<|im_end|>\n<|im_end|>", True),
))  # fmt: skip
_UNCOMMON = {"frage": "Which way?", "antwort": "To the left.", "nummer": 7}
_EMPTY = _turn("assistant", "")
_LLAMAFACTORY = {
    "model_name_or_path": "PLACE/model", "stage": "sft", "do_train": True, "finetuning_type": "full",
    "dataset": "own", "dataset_dir": "PLACE", "cutoff_len": 1024, "max_steps": 1, "output_dir": "PLACE/out",
    "per_device_train_batch_size": 1, "train_from_scratch": True, "disable_shuffling": True,
}  # fmt: skip


def _information(**description: Any) -> str:
    return json.dumps({"own": {"file_name": "a.json", **description}})


RECORDS: Final[dict[str, Input]] = {
    "messages": _of({"messages": [_S, _U, _A, _V, _B]}, _row(_S, _U, _A, _V, _B)),
    "messages, tools": _of(
        {"messages": [_U, {"role": "assistant", "content": None, "tool_calls": [_OPENAI_CALL]},
                      {**_FOUND, "tool_call_id": "call_1"}, _A], "tools": [_TOOL]},
        _USED, family="Qwen 2.5"),
    "messages, tools as text": _of(
        {"messages": [_U, {"role": "assistant", "tool_calls": json.dumps([_OPENAI_CALL])}, _FOUND, _A],
         "tools": json.dumps([_SCHEMA])}, _USED, family="Qwen 2.5"),
    "messages, function_call": _of(
        {"messages": [_U, {"role": "assistant", "content": "", "function_call": _CALLED},
                      {**_FOUND, "role": "function", "name": "find"}, _A], "functions": [_SCHEMA]},
        _USED, family="Qwen 2.5"),
    "messages, developer": _of({"messages": [{**_S, "role": "developer"}, _U, _A]}, _row(_S, _U, _A)),
    "messages, parts": _of(
        {"messages": [_U, _turn("assistant", [{"type": "text", "text": "To the "}, {"type": "text", "text": "left."}])]},
        _ONE),
    "messages, reasoning_content": _of(
        {"messages": [_U, {**_A, "reasoning_content": "Let me see."}]},
        _row(_U, {**_A, "reasoning_content": "Let me see."}), family="Qwen 3"),
    "messages, thinking part": _of(
        {"messages": [_U, _turn("assistant", [{"type": "thinking", "thinking": "Let me see."},
                                              {"type": "text", "text": "To the left."}])]},
        _row(_U, {**_A, "reasoning_content": "Let me see."}), family="Qwen 3"),
    "messages, weight 0": _of({"messages": [_U, {**_A, "weight": 0}, _V, _B]}, _row(_U, _A, _V, _B, untrained=(1,))),
    "messages, weight 1": _of({"messages": [_U, {**_A, "weight": 1}, _V, {**_B, "weight": 0}]},
                              _row(_U, _A, _V, _B, untrained=(3,))),
    "messages, train": _of({"messages": [{**_U, "train": False}, {**_A, "train": False}, _V, {**_B, "train": True}]},
                           _row(_U, _A, _V, _B, untrained=(1,))),
    "messages, loss": _of({"messages": [_U, {**_A, "loss": False}, _V, _B]}, _row(_U, _A, _V, _B, untrained=(1,))),
    "messages, masked": _of({"messages": [_U, {**_A, "masked": True}, _V, _B]}, _row(_U, _A, _V, _B, untrained=(1,))),
    "messages, half a weight": _refused({"messages": [_U, {**_A, "weight": 0.5}]}, "`weight`.*not 0 or 1"),
    "messages, all excluded": _refused({"messages": [_U, {**_A, "weight": 0}]}, "excluded from training"),
    "messages, an empty answer": _of({"messages": [_U, _EMPTY, _V, _B]}, _row(_U, _EMPTY, _V, _B, untrained=(1,))),
    "messages, template variables": _of(
        {"messages": [_U, _A], "chat_template_kwargs": {"enable_thinking": False}},
        Row((_U, _A), values={"enable_thinking": False}), family="Qwen 3 without reasoning"),
    "messages as text": _of({"messages": json.dumps([_U, _A])}, _ONE),
    "messages, roles in capitals": _of(
        {"messages": [{**_S, "role": "System"}, {**_U, "role": "USER"}, {**_A, "role": "Assistant"}]}, _row(_S, _U, _A)),
    "messages, unknown role": _refused({"messages": [_U, {**_A, "role": "narrator"}]}, "role.*narrator|narrator"),
    "messages, unknown key": _refused({"messages": [_U, _A], "mood": "good"}, "`mood` has no known meaning"),
    "messages, image": _refused({"messages": [_U, _A], "images": ["a.png"]}, "`images`.*not supported"),
    "ShareGPT": _of(_shared(("human", "Which way?"), ("gpt", "To the left."), system="Be brief."), _row(_S, _U, _A)),
    "ShareGPT, functions": _of(
        _shared(("human", "Which way?"), ("function_call", json.dumps(_CALLED)), ("observation", "It is near."),
                ("gpt", "To the left."), tools=json.dumps([_SCHEMA])), _USED, family="Qwen 2.5"),
    "ShareGPT, calls alone": _refused(
        _shared(("human", "Which way?"), ("function_call", "find it"), ("gpt", "To the left.")), "not JSON|tool call"),
    "Alpaca": _of(
        {"instruction": "Which way?", "input": "At the gate.", "output": "To the left.", "system": "Be brief."},
        _row(_S, _turn("user", "Which way?\nAt the gate."), _A)),
    "Alpaca, history": _of(
        {"instruction": "And then?", "input": "", "output": "Go on, friend.", "history": [["Which way?", "To the left."]]},
        _TALK),
    "Alpaca, no template": _refused(
        {"instruction": "Which way?", "output": "To the left."}, "joins pairs of texts.*instruction",
        data={"chat_template": "none"}),
    "prompt, completion": _of({"prompt": "Which way?", "completion": "To the left."}, _ONE),
    "prompt, completion, no template": _of(
        {"prompt": "Which way? ", "completion": "To the left."}, _JOINED, data={"chat_template": "none"}),
    "prompt, completion of turns": _of({"prompt": [_S, _U], "completion": [_A]}, _row(_S, _U, _A)),
    "prompt of turns, several answers": _of({"prompt": [_U, _A, _V], "completion": [_B]}, _row(_U, _A, _V, _B, untrained=(1,))),
    "a turn of the user in a completion": _of({"prompt": [_U], "completion": [_A, _V, _B]}, _TALK),
    "weight 1 in a prompt": _refused({"prompt": [_U, {**_A, "weight": 1}, _V], "completion": [_B]}, "turn of the prompt"),
    "question, answer": _of({"question": "Which way?", "answer": "To the left."}, _ONE),
    "columns": _of(_UNCOMMON, _ONE,
                   data={"columns": {"prompt": "frage", "completion": "antwort"}, "ignore_keys": ["nummer"]}),
    "query, response, history": _of(
        {"query": "And then?", "response": "Go on, friend.", "history": [["Which way?", "To the left."]]}, _TALK),
    "name in capitals": _of({"messages": [_U, _A]}, _ONE, name="A.JSONL"),
    "pt, name in capitals": _of({"text": "Zebra way"}, _TEXT, name="A.JSONL", stage="pt"),
    "pt, records in a text file": _refused({"text": "Zebra way"}, "first line is a JSON record", name="a.txt", stage="pt"),
    "archive": Input((), {"a.zip": "PK"}, refused="format that is not supported"),
    "columns of a data frame": Input(
        (), {"a.json": json.dumps({"prompt": {"0": "Which way?"}, "completion": {"0": "To the left."}})},
        refused="columns instead of records"),
    "columns not named": _refused(_UNCOMMON, "which key of a record contains"),
    "two answers": _refused({"question": "Which way?", "answer": "Left.", "solution": "Long."}, "`answer` and `solution`"),
    "text": _of({"text": "Zebra way"}, _TEXT, stage="pt"),
    "text file": Input((_TEXT,), {"a.txt": "Zebra way"}, stage="pt"),
    "text, stage sft": _refused({"text": "Which way is it"}, "conversation|text|answer"),
    "conversations, stage pt": _of({"messages": [_U, _A]}, _WHOLE, stage="pt"),
    "gzip": Input((_ONE,), {"a.jsonl.gz": gzip.compress(_lines({"messages": [_U, _A]}).encode())}),
    "list in a file": Input((_ONE, _TALK), {"a.json": json.dumps([{"messages": [_U, _A]}, {"messages": [_U, _A, _V, _B]}])}),
    "list over lines": Input((_ONE,), {"a.json": json.dumps([{"messages": [_U, _A]}], indent=2)}),
    "object around a list": Input((_ONE,), {"a.json": json.dumps({"version": 1, "data": [{"messages": [_U, _A]}]})}),
    "object of several lists": Input((), {"a.json": json.dumps({"train": [{"messages": [_U, _A]}],
                                                               "test": [{"messages": [_U, _A]}]})}, refused="several lists"),
    "record over lines": Input((), {"a.jsonl": json.dumps({"messages": [_U, _A]}, indent=1)}, refused="over several lines|single turn|ends within"),
    "table": Input((_ONE, _row(_V, _B)), {"a.csv": "question,answer\nWhich way?,To the left.\nAnd then?,\"Go on, friend.\"\n"}),
    "stream": _of({"messages": [_U, _A, _V, _B]}, _TALK, data={"streaming": True}),
    "stream, weight": _of({"messages": [_U, {**_A, "weight": 0}, _V, _B]}, _row(_U, _A, _V, _B, untrained=(1,)),
                          data={"streaming": True}),
    "dataset_info.json, sharegpt": Input(
        (_row(_S, _U, _A),),
        {"a.json": json.dumps([_shared(("human", "Which way?"), ("gpt", "To the left."), system="Be brief.")]),
         "dataset_info.json": _information(formatting="sharegpt", columns={"messages": "conversations", "system": "system"})},
        recipe=_LLAMAFACTORY),
    "dataset_info.json, columns": Input(
        (_ONE,), {"a.json": json.dumps([_UNCOMMON]),
                  "dataset_info.json": _information(columns={"prompt": "frage", "response": "antwort"})},
        recipe=_LLAMAFACTORY),
    "dpo": _of(_PAIR, *_PAIR_ROWS, stage="dpo"),
    "dpo, turns": _of({"prompt": [_U], "chosen": [_A], "rejected": [_WORSE]}, *_PAIR_ROWS, stage="dpo"),
    "dpo, shared turns": _of(
        {"chosen": [_U, _A, _V, _B], "rejected": [_U, _A, _V, _WORSE]}, _row(_U, _A, _V, _B, untrained=(1,)),
        _row(_U, _A, _V, _WORSE, untrained=(1,)), stage="dpo"),
    "dpo, ShareGPT": _of(
        {"conversations": [{"from": "human", "value": "Which way?"}], "chosen": {"from": "gpt", "value": "To the left."},
         "rejected": {"from": "gpt", "value": "No idea."}}, *_PAIR_ROWS, stage="dpo"),
    "dpo, no pair": _refused({"messages": [_U, _A]}, "pairs of answers", stage="dpo"),
    "orpo": _of(_PAIR, *_PAIR_ROWS, stage="orpo"),
    "rm": _of(_PAIR, *_SCORED, stage="rm"),
    "rm, a margin": _of({**_PAIR, "margin": 0.5}, *_SCORED, stage="rm"),
    "kto": Input(_PAIR_ROWS, {"a.jsonl": _lines(
        {"prompt": "Which way?", "completion": "To the left.", "label": True},
        {"prompt": "Which way?", "completion": "No idea.", "label": False})}, stage="kto"),
    "kto, no label": _refused({"prompt": "Which way?", "completion": "To the left."}, "whether its answer is desirable", stage="kto"),
    "grpo": _of({"prompt": "Which way?", "answer": "To the left."}, _ASKED, stage="grpo"),
    "grpo, turns": _of({"prompt": [_S, _U], "solution": "left"}, Row((_S, _U), is_prompt=True), stage="grpo"),
    "dpo, a worse answer beside another form": _refused(
        {"query": "Which way?", "response": "To the left.", "rejected_response": "No idea."},
        "a better and a worse answer, but not under", stage="dpo"),
    "pair, stage sft": _refused(_PAIR, "dpo|preference|chosen"),
}  # fmt: skip
"""Inputs by name."""

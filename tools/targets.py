"""Compare the trained tokens of many inputs with those of an independent decoder: `make targets`.

    python tools/targets.py [--json] [--only WORDS]

An input is a file of records in a folder with model, tokenizer and recipe. Its expected targets follow from facts
written by hand: the turns of each row, which of them are trained, and the markers by which the family begins and ends
an answer. transformers renders the turns, and the decoder searches the text for the markers. The text after the first
marker and the second marker itself are trained. Both the output of `hyper-parallel data --json` and the labels of
training batches must give these characters.

    exact            exactly the expected characters are trained
    refused rightly  a coded error that names the cause
    refused wrongly  an error for an acceptable input, or one that names another cause
    silent           other characters are trained, shown or counted, without an error

The status is 1 unless every input is exact or refused rightly.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import numpy as np
from target_records import RECORDS, Input, Row
from target_templates import FAMILIES, VARIANTS, Family

from hyper_parallel.cli import application
from hyper_parallel.cli.train_command import load_any_recipe
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.trainer.data import (
    IGNORE_INDEX,
    PackedSequences,
    Stream,
    StreamBatches,
    prepare,
)

_CONFIG: Final = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 700, "hidden_size": 16,
    "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}  # fmt: skip
_SAMPLE: Final = "Which way is it to the answer? Reply with one word, say user or assistant: yes.\n\n" * 4
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
Segment = tuple[str, bool]
"""Text, and whether its characters are trained."""


class Difference(Exception):
    """Error for trained, shown or counted tokens that differ from the expected ones."""


# Expectation: turns, markers and transformers; nothing of the product


def rendered(tokenizer: Any, family: Family, row: Row) -> str:
    """Return the text of a row as transformers renders it."""
    if row.messages is None:
        return row.text
    text: str = tokenizer.apply_chat_template(
        [_shaped(message, family.shape) for message in row.messages],
        tools=row.tools or None,
        tokenize=False,
        add_generation_prompt=row.is_prompt,
        **row.values,
    )
    is_ended = re.search(f"(?:{family.end})\\s*$", text) is not None
    trained_last = row.messages[-1]["role"] == "assistant" and row.trains(len(row.messages) - 1)
    return text if is_ended or not trained_last else text + family.appended.removeprefix("\n")


def _shaped(message: dict[str, Any], shape: str) -> dict[str, Any]:
    """Return a turn in the form that the family reads; `shape` is that of `Family`."""
    reasoning = message.get("reasoning_content")
    if not reasoning or not shape:
        return message
    rest = {key: value for key, value in message.items() if key != "reasoning_content"}
    if shape == "thinking":
        return {**rest, "thinking": reasoning}
    parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": rest["content"]}]
    return {**rest, "content": parts}


def expected(text: str, family: Family, row: Row) -> list[Segment]:
    """Return the segments of a text; answers with their end markers are trained.

    Raises:
        ValueError: The text does not contain the turns, a defect of this tool or its tables.
    """
    if row.messages is None:
        return merged(row.segments)
    trained = np.zeros(len(text), np.bool_)
    position = 0
    for i, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        begin = re.compile(family.start).search(text, position)
        if begin is None:
            raise ValueError(f"no beginning of turn {i + 1} in {text[position:]!r}")
        end = re.compile(family.end).search(text, begin.end())
        if end is None:
            raise ValueError(f"no end of turn {i + 1} in {text[position:]!r}")
        _check_words(text[begin.end() : end.start()], message)
        trained[begin.end() : end.end()] = row.trains(i)
        # A marker of the next turn that ends this one may also begin it.
        position = end.start() if re.match(family.start, end.group()) else end.end()
    return merged(zip(text, trained.tolist(), strict=True))


def _check_words(region: str, message: dict[str, Any]) -> None:
    """Raise ValueError if the region of an answer does not contain its content."""
    words = [message.get("reasoning_content"), message.get("content")]
    for call in message.get("tool_calls", ()):
        words += [call["function"]["name"], *map(str, call["function"]["arguments"].values())]
    for text in words:
        for part in re.split("</?think>", text or ""):
            if part.strip() not in region:
                raise ValueError(f"{part!r} is not in {region!r}")


def merged(pieces: Any) -> list[Segment]:
    """Return the segments without empty ones, with adjacent segments of the same kind joined."""
    pieces = [(text, bool(one)) for text, one in pieces if text]
    groups = groupby(pieces, key=lambda piece: piece[1])
    return [("".join(text for text, _ in group), one) for one, group in groups]


# The product: public interfaces


def shown(place: Path) -> dict[str, Any]:
    """Return the output of `hyper-parallel data --json`."""
    from typer.testing import CliRunner

    words = ("data", str(place / "recipe.yaml"), "--json", "-n", "9")
    result = CliRunner().invoke(application("data"), words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def batch_rows(place: Path) -> tuple[list[tuple[list[int], list[bool]]], Any]:
    """Return the rows of training batches as (tokens, is target), and the directory of the tokenizer."""
    loaded = load_any_recipe(place / "recipe.yaml", [], True, "data")
    recipe = loaded.recipe
    packed = prepare(recipe.data, stage=recipe.stage, model_path=recipe.model.path, seed=0, progress=False)
    if isinstance(packed.train, Stream):
        batches = StreamBatches(packed.train, 1, packed.fingerprint)
        first = batches.microbatches(0, 0, 1, 1, 1)[0]
        arrays = [(first.input_ids, first.shift_labels, first.num_real)]
    else:
        sequences: PackedSequences = packed.train
        indices = np.arange(len(sequences))
        arrays = [(*sequences.read(indices), sequences.num_real(indices))]
    rows = []
    for inputs, labels, real in arrays:
        for i in range(len(inputs)):
            size = inputs.shape[1] if real is None else int(real[i])
            rows.append(_row(inputs[i].tolist(), labels[i].tolist(), size, recipe.stage))
    return rows, packed.tokenizer_dir


def _row(inputs: Sequence[int], labels: Sequence[int], size: int, stage: str) -> tuple[list[int], list[bool]]:
    """Return the tokens of a padded row without padding, and for each token whether it is a target."""
    if stage == "rm":  # the label is at the token whose score is read
        return list(inputs[:size]), [label != IGNORE_INDEX for label in labels[:size]]
    if stage == "grpo":  # labels mark the answer that rewards read; completions are sampled
        prompt = next((i + 1 for i, label in enumerate(labels) if label != IGNORE_INDEX), size)
        return list(inputs[:prompt]), [False] * prompt
    last = labels[size - 1]  # the token behind the inputs; unknown if it is no target
    tokens = [*inputs[:size], *([last] if last != IGNORE_INDEX else [])]
    targets = [False, *(label != IGNORE_INDEX for label in labels[: len(tokens) - 1])]
    for token, label, one in zip(tokens[1:], labels, targets[1:], strict=False):
        if one and token != label:
            raise Difference(f"label {label} stands before token {token}")
    return tokens, targets


def decoded(tokenizer: Any, tokens: Sequence[int], targets: Sequence[bool]) -> list[Segment]:
    """Decode tokens to segments of trained and untrained text."""
    runs = groupby(zip(tokens, targets, strict=True), key=lambda pair: pair[1])
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    return merged((tokenizer.decode([t for t, _ in run], **options), one) for one, run in runs)


# Comparison


@dataclass(frozen=True)
class Verdict:
    """Verdict on an input."""

    name: str
    outcome: str
    detail: str = ""


def judged(name: str, family: Family, one: Input, place: Path) -> Verdict:
    """Write an input into a folder, process it, and return the verdict."""
    refusal: HyperParallelError | None = None
    try:
        compare(family, one, place)
    except HyperParallelError as error:
        refusal = error
    except Difference as error:
        return Verdict(name, "silent", str(error))
    if refusal is None:
        detail = f"expected a refusal: {one.refused}" if one.refused else ""
        return Verdict(name, "silent" if one.refused else "exact", detail)
    told = f"{refusal.code}: {refusal.what}; {refusal.where}; {refusal.got}"
    is_right = one.refused is not None and re.search(one.refused, told) is not None
    return Verdict(name, f"refused {'rightly' if is_right else 'wrongly'}", told[:300])


def compare(family: Family, one: Input, place: Path) -> None:
    """Raise `Difference` if the rows of an input differ from the expected ones."""
    tokenizer = tokenizer_of(family)
    rows, directory = batch_rows(place)
    output = shown(place)
    reader = tokenizer_at(directory)
    wanted = []
    if one.refused is None:
        for row in one.rows:
            text = rendered(tokenizer, family, row)
            wanted.append([(text, False)] if row.is_last_token else expected(text, family, row))
    found = [decoded(reader, *row) for row in rows]
    if one.refused is not None:
        raise Difference(f"expected {one.refused!r}, trained {found}")
    counted = sum(sum(targets) for _, targets in rows[:: 2 if one.stage == "kto" else 1])
    if one.stage == "kto":  # every second row is a reference without loss
        found = found[::2]
    for number, (row, got, want) in enumerate(zip(one.rows, found, wanted, strict=False), start=1):
        tail = tokenizer.encode(want[-1][0], add_special_tokens=False)[-1:]
        if not want[-1][1] and not row.is_last_token and not row.is_prompt:
            got = merged([*got, (tokenizer.decode(tail), False)])
        _compare_row(row, got, want, f"row {number}")
    if len(found) != len(wanted):
        raise Difference(f"{len(found)} rows instead of {len(wanted)}: {found}")
    total = sum(source["target_tokens"] for source in output["sources"])
    if total != (0 if one.stage == "grpo" else counted):
        raise Difference(f"`data` counts {total} targets, the batches have {counted}")
    _compare_shown(one, output, wanted)


def _compare_row(row: Row, got: list[Segment], want: list[Segment], place: str) -> None:
    if not row.is_last_token:
        if got != want:
            raise Difference(f"{place}: {got} instead of {want}")
        return
    text = "".join(part for part, _ in got)
    trained = [part for part, one in got if one]
    if text != want[0][0].rstrip() and text != want[0][0]:
        raise Difference(f"{place}: {text!r} instead of {want[0][0]!r}")
    if len(trained) != 1 or not got[-1][1]:
        raise Difference(f"{place}: scored at {trained}")


def _compare_shown(one: Input, output: dict[str, Any], wanted: list[list[Segment]]) -> None:
    """Raise `Difference` if the examples shown by `hyper-parallel data` differ from the expected rows."""
    texts = [
        text
        for source in output["sources"]
        for example in source["examples"]
        for text in example["texts"]
        if text["name"] != "answer"  # of grpo: read by rewards, in no row
    ]
    for row, text, want in zip(one.rows, texts, wanted, strict=False):
        got = merged((part["text"], part["trained"]) for part in text["segments"])
        _compare_row(row, got, want, "shown by `data`")
    if len(texts) != len(wanted) and one.stage != "pt":
        raise Difference(f"`data` shows {len(texts)} texts of {len(wanted)}")


# Inputs


@cache
def tokenizer_at(directory: str) -> Any:
    """Return the tokenizer in a directory, loaded by transformers."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


_TOKENIZERS: Final[dict[int, Any]] = {}


def tokenizer_of(family: Family) -> Any:
    """Return a tokenizer of bytes and a few words, with the markers of a family as special tokens."""
    if id(family) in _TOKENIZERS:
        return _TOKENIZERS[id(family)]
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=360, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([_SAMPLE], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=family.bos, eos_token=family.eos, pad_token="<pad>"
    )
    for name in family.tokens:
        is_special = name not in ("<think>", "</think>", "<tool_call>")
        tokenizer.add_tokens([AddedToken(name, special=is_special, normalized=False)])
    tokenizer.chat_template = family.template
    return _TOKENIZERS.setdefault(id(family), tokenizer)


def write(place: Path, family: Family, one: Input) -> None:
    """Write the model, the data and the recipe of an input."""
    model = place / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(_CONFIG))
    tokenizer = tokenizer_of(family)
    tokenizer.save_pretrained(str(model))
    for name, content in one.files.items():
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    recipe: dict[str, Any] = one.recipe or {
        "model": {"path": "model", "init": "random"},
        "stage": one.stage,
        "data": {
            "source": next(iter(one.files)), "seq_len": 1024, "packing": False, "holdout": 0, "shuffle": False,
            "cache_dir": "cache", **one.data,
        },
        "training": {"steps": 1, "tokens_per_step": 4096, "lr": 1e-3, "dtype": "float32"},
    }  # fmt: skip
    text = json.dumps(recipe).replace("PLACE", str(place))
    (place / "recipe.yaml").write_text(text)


def _said(role: str, content: str, **keys: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **keys}


def talks() -> dict[str, Row]:
    """Return the conversations that are tested with every family, by name."""
    ask, reply, system = "Which way?", "To the left.", _said("system", "Be brief.")
    one = (_said("user", ask), _said("assistant", reply))
    two = (*one, _said("user", "And then?"), _said("assistant", "Go on, friend."))
    three = (*two, _said("user", "How far?"), _said("assistant", "Three miles."))
    call = {
        "id": "callid001",
        "type": "function",
        "function": {"name": "find", "arguments": {"place": "Long street", "number": 7}},
    }
    used = (
        one[0],
        _said("assistant", "", tool_calls=[call]),
        _said("tool", "It is near.", name="find", tool_call_id="callid001"),
        _said("assistant", "It is near you."),
    )
    thought = _said("assistant", reply, reasoning_content="Let me see.")
    inline = _said("assistant", f"<think>\nLet me see.\n</think>\n\n{reply}")
    spaced = _said("assistant", "  To the\n\n left. \n")
    return {
        "one answer": Row(one),
        "turns": Row(three),
        "system": Row((system, *one)),
        "system, turns": Row((system, *three)),
        "white space": Row((one[0], spaced)),
        "tools": Row(used, tools=(_TOOL,)),
        "reasoning": Row((one[0], thought)),
        "reasoning twice": Row((one[0], thought, *two[2:3], {**thought, "content": "Go on."})),
        "inline reasoning": Row((one[0], inline)),
        "weight": Row(three, untrained=(1, 3)),
    }


def record_of(row: Row) -> dict[str, Any]:
    """Return a row as a record in OpenAI's format."""
    messages = [dict(message) for message in row.messages or ()]
    for i in row.untrained:
        messages[i]["weight"] = 0
    return {"messages": messages} | ({"tools": list(row.tools)} if row.tools else {})


def inputs() -> Iterator[tuple[str, Family, Input]]:
    """Yield name, family and input, first for all record formats, then for all families."""
    for name, one in RECORDS.items():
        yield f"records: {name}", (FAMILIES | VARIANTS)[one.family], one
    for name, family in FAMILIES.items():
        for kind, row in talks().items():
            content = json.dumps(record_of(row)) + "\n"
            refused = family.refused.get(kind)
            yield f"{name}: {kind}", family, Input((row,), {"a.jsonl": content}, refused=refused)


def main() -> int:
    """Judge all inputs, print a table or JSON, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print every result as JSON")
    parser.add_argument("--only", default="", help="inputs whose name contains these words")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    verdicts = []
    with tempfile.TemporaryDirectory() as root:
        for number, (name, family, one) in enumerate(inputs()):
            if options.only in name:
                place = Path(root) / str(number)
                write(place, family, one)
                verdicts.append(judged(name, family, one, place))
    counts = Counter(verdict.outcome for verdict in verdicts)
    outcomes = ("exact", "refused rightly", "refused wrongly", "silent")
    if options.json:
        results = {verdict.name: [verdict.outcome, verdict.detail] for verdict in verdicts}
        totals = {outcome: counts[outcome] for outcome in outcomes}
        print(json.dumps({"inputs": len(verdicts), "counts": totals, "results": results}, indent=1))
    else:
        _print_table(verdicts)
        print("; ".join(f"{outcome} {counts[outcome]}" for outcome in outcomes))
    return 1 if counts["silent"] or counts["refused wrongly"] else 0


def _print_table(verdicts: Sequence[Verdict]) -> None:
    for verdict in verdicts:
        detail = "" if verdict.outcome == "exact" else f"  {verdict.detail}"
        print(f"{verdict.name:<44} {verdict.outcome:<16}{detail}"[:400])


if __name__ == "__main__":
    sys.exit(main())

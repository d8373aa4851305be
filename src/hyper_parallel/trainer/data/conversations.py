"""Conversations in records: which keys hold turns, which turns are the prompt, and the labels beside them.

A record is `sharegpt`, `alpaca`, `prompt_completion` or `preference`. Each is read into `Conversation`: turns, and how
many of them the record names as the prompt. A stage decides from these which turns are targets, see `num_context`.
Keys of the same meaning are rows of tables in `record_keys`; a key without a meaning is refused there.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final

from pydantic import Field, StrictBool, TypeAdapter, ValidationError

from hyper_parallel.config import PAIRED_STAGES
from hyper_parallel.errors import NoData, abbreviated
from hyper_parallel.trainer.data.document import Conversation, Message
from hyper_parallel.trainer.data.record_keys import (
    ANSWERS,
    LABELS,
    PROMPTS,
    SYSTEMS,
    TOOLS,
    TURNS,
    Record,
    RecordRules,
    is_empty,
)
from hyper_parallel.trainer.data.records import over_lines_hint, several_lists, text_of
from hyper_parallel.trainer.data.turns import (
    conversation_of,
    flag_names,
    read_json_text,
    read_template_values,
    read_tools,
    read_turns,
)

Values = dict[str, Any]
"""Values of a record by our names."""
Part = tuple[list[Message], int | None]
"""Turns of a conversation, and how many of them are its prompt; None: the record names no prompt."""

_QUESTIONS: Final = tuple(key for key in PROMPTS if key not in ("instruction", "input"))
_INPUTS: Final = ("input", "context")
_SHARED: Final = frozenset((*SYSTEMS, *TOOLS, "chat_template_kwargs"))
_SAID: Final = frozenset((*PROMPTS, *ANSWERS, *TURNS, *SYSTEMS, "context", "text", "history"))
"""Keys of words: beside the keys that a record is read from they have to repeat its turns."""
_TURNS_ALONE: Final = {key: frozenset((key,)) for key in TURNS}
_STAGE_KEYS: Final = {"kto": LABELS, "rm": ("margin",), "dpo": ("margin",), "orpo": ("margin",)}
"""Keys that a stage reads, or, of margins, passes over and counts."""


def _sharegpt(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read `conversations` (from, value) or `messages` (role, content)."""
    key = _turns_key(values)
    yield read_turns(values[key], rules, where, key), None


def _turns_key(values: Values) -> str:
    for key in TURNS:
        if isinstance(values.get(key), (list, tuple)):
            return key
    return next(key for key in TURNS if key in values)


def _alpaca(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read history pairs, then the instruction with its input, and the output."""
    answer = _text(rules.one_of(values, ANSWERS, where), "output", where)
    last = _message("user", _instruction(values, rules, where)), _message("assistant", answer)
    yield [*_history(values, where), *last], None


def _completion(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read a prompt and its completion, each a text or turns."""
    prompt = _side(rules.one_of(values, _asked(values), where), "user", rules, where, "prompt")
    answer = rules.one_of(values, ANSWERS, where)
    yield _joined(prompt, _side(answer, "assistant", rules, where, "completion"))


def _prompt(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read a prompt for which completions are sampled; its answer is the completion, or a column of another name."""
    prompt = _side(values[_asked(values)[0]], "user", rules, where, "prompt")
    answer = values.get("completion", [])
    if is_empty(answer):
        named = (values.get(key) for key in ("answer", "response", "output"))
        answer = next((str(a) for a in named if isinstance(a, str | int | float)), "")
    completion = [] if answer == "" else _side(answer, "assistant", rules, where, "completion")
    yield _joined(prompt, completion)


def _preference(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read the conversation with the chosen answer, and the one with the rejected answer.

    An answer continues the prompt. Where both answers repeat the prompt, or none is named, the prompt is the turns that
    both have in common.
    """
    given = [values[key] for key in ("chosen", "rejected")]
    answers = [_side(a, "assistant", rules, where, "chosen or rejected") for a in given]
    prompt, text = _prompt_of_pair(values, rules, where)
    _check_pair(given, answers, prompt, text, where)
    if all(_repeats(prompt, answer) or _quotes(answer, text) for answer in answers):
        system, _ = _split_system(prompt)
        whole = [a if a and a[0]["role"] == "system" else [*system, *a] for a in answers]
        named = [_joined(prompt, a)[1] or 0 for a in answers if _repeats(prompt, a)]
        shared = max(_num_shared(whole), min(named, default=0))
        opened = [next((t["role"] for t in a if t["role"] != "system"), "") for a in whole]
        asked = any(turn["role"] == "user" for turn in whole[0][:shared])
        if "user" in opened and not asked:
            raise NoData(
                "the two answers of a pair have no prompt in common",
                where=where,
                got=[turn["content"][:40] for one in whole for turn in one[:1]],
                allowed="chosen and rejected that begin with the same turns, or a prompt beside them",
            )
        yield from ((turns, shared) for turns in whole)
        return
    yield from (_joined(prompt, answer) for answer in answers)


def _prompt_of_pair(
    values: Values, rules: RecordRules, where: str
) -> tuple[list[Message], Message | None]:
    """Return the turns that a pair names as the prompt, and the turn of a prompt that is a text.

    There are no turns where the answers hold the whole conversation.
    """
    prompt = rules.one_of(values, _QUESTIONS, where)
    if isinstance(prompt, str) and (prompt or isinstance(values["chosen"], str)):
        turn = _message("user", prompt)
        return ([turn] if prompt else []), turn
    if not is_empty(prompt):
        return _side(prompt, "user", rules, where, "prompt"), None
    for key in TURNS:
        if not is_empty(values.get(key)):
            return read_turns(values[key], rules, where, key), None
    if all(is_empty(values.get(key)) for key in ("instruction", "history", *_INPUTS)):
        return [], None
    turn = _message("user", _instruction(values, rules, where))
    return [*_history(values, where), turn], turn


def _check_pair(
    given: list[Any],
    answers: list[list[Message]],
    prompt: list[Message],
    text: Message | None,
    where: str,
) -> None:
    """Refuse a pair whose prompt cannot be told.

    Raises:
        NoData: HP602.
    """
    what = None
    if not prompt and any(isinstance(answer, str) for answer in given):
        what = "an answer that is a text needs a prompt beside it"
    for answer in answers if text else ():
        opens = next((turn["role"] for turn in answer if turn["role"] != "system"), None)
        if opens == "user" and not _quotes(answer, text):
            what = "an answer begins with a turn of the user that is not the prompt"
    if what is not None:
        allowed = _FORMATS["preference"][1]
        raise NoData(f"a record is not preference: {what}", where=where, allowed=allowed)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _side(given: Any, role: str, rules: RecordRules, where: str, key: str) -> list[Message]:
    """Return the turns of a key that holds a text of `role`, a turn or a list of turns."""
    if isinstance(given, str):
        return [_message(role, given)]
    if not isinstance(given, list | tuple | dict):
        _text(given, key, where)
    return read_turns(given, rules, where, key)


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        got, what = f"{key}: {abbreviated(value, 60)}", f"`{key}` of a record is no text"
        raise NoData(what, where=where, got=got, allowed="a text")
    return value


def _instruction(values: Values, rules: RecordRules, where: str) -> str:
    """Return the instruction of an alpaca record with its input."""
    texts = values.get("instruction", ""), rules.one_of(values, _INPUTS, where) or ""
    return "\n".join(text for text in (_text(t, "instruction", where) for t in texts) if text)


def _history(values: Values, where: str) -> list[Message]:
    """Return the turns of questions with their answers."""
    turns, pairs = [], values.get("history") or []
    for pair in pairs if isinstance(pairs, list | tuple) else [pairs]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            got = f"history: {abbreviated(pair, 60)}"
            what, allowed = "a record has no pairs under `history`", "a list of [question, answer]"
            raise NoData(what, where=where, got=got, allowed=allowed)
        turns += [
            _message(role, _text(text, "history", where))
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return turns


def _split_system(turns: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Leading turns of the system, and the others."""
    count = next((i for i, t in enumerate(turns) if t["role"] != "system"), len(turns))
    return list(turns[:count]), list(turns[count:])


def _same(one: Message, other: Message) -> bool:
    """Whether two turns are equal, white space around their words aside."""
    return one["role"] == other["role"] and one["content"].strip() == other["content"].strip()


def _quotes(answer: Sequence[Message], prompt: Message | None) -> bool:
    """Whether a prompt that is a text is a turn of an answer that is opened by the user: a whole conversation."""
    _, turns = _split_system(answer)
    opened = prompt is not None and turns[:1] and turns[0]["role"] == "user"
    return bool(opened) and any(_same(turn, prompt) for turn in turns if prompt)


def _repeats(prompt: Sequence[Message], answer: Sequence[Message]) -> bool:
    """Whether an answer begins with the turns of the prompt and goes on; a system turn may be in one of them alone."""
    (system, asked), (own, turns) = _split_system(prompt), _split_system(answer)
    if system and own and not _begins(own, system):
        return False
    return len(turns) > len(asked) and _begins(turns, asked)


def _begins(turns: Sequence[Message], beginning: Sequence[Message]) -> bool:
    return len(turns) >= len(beginning) and all(map(_same, turns, beginning))


def _num_shared(whole: Sequence[Sequence[Message]]) -> int:
    """Leading turns that all conversations have in common, at most all but the last of the shortest one."""
    most = min(len(turns) for turns in whole) - 1
    differ = (i for i in range(most) if any(turns[i] != whole[0][i] for turns in whole))
    return next(differ, max(most, 0))


def _joined(prompt: Sequence[Message], answer: Sequence[Message]) -> Part:
    """Return the turns of a prompt and of the answer to it; an answer that repeats the prompt is all of them."""
    (system, asked), (own, turns) = _split_system(prompt), _split_system(answer)
    repeats = bool(prompt) and _repeats(prompt, answer)
    if system and own and not repeats:
        return [*prompt, *answer], len(prompt)
    first = own or system
    behind = turns[len(asked) :] if repeats else turns
    return [*first, *asked, *behind], len(first) + len(asked)


_Reader = Callable[[Values, RecordRules, str], Iterator[Part]]
_FORMATS: Final[dict[str, tuple[_Reader, str]]] = {
    "sharegpt": (
        _sharegpt,
        "`conversations` with from and value, or `messages` with role and content",
    ),
    "alpaca": (_alpaca, "instruction, output; optional: input, system, history"),
    "prompt_completion": (
        _completion,
        "prompt, completion (or question, answer, and the like): texts or lists of turns",
    ),
    "preference": (
        _preference,
        "chosen, rejected: texts, turns or lists of turns; prompt, instruction or conversations; "
        "lists may begin with the prompt",
    ),
}
"""Readers of conversations, and the keys that they read in words."""
CONVERSATIONS: Final = frozenset(_FORMATS)
"""Formats of records that are conversations."""
_DEFAULT: Final = RecordRules()


def shape_of(
    record: Record, text_key: str, where: str, stage: str = "pt", rules: RecordRules = _DEFAULT
) -> str:
    """Return the format of a record: that of a conversation, or `records` (text under `text_key`).

    Raises:
        NoData: HP602 for a record that is neither.
    """
    values = _named(record, rules, where, stage)
    shape = _conversation(values, stage)
    text = isinstance(record.get(text_key), str)
    if shape == "prompt_completion" and text and stage != "grpo":
        shape = None
    if shape is None:
        _hint_at_columns(values, text, stage, where)
        text_of(record, text_key, where)
    return shape or "records"


def _named(record: Record, rules: RecordRules, where: str, stage: str) -> Values:
    """Return the values of a record by our names; turns that are a text of JSON are read, an absent answer is empty."""
    values = rules.named(record, rules.columns, where)
    for key in TURNS:
        text = values.get(key)
        if isinstance(text, str) and text.lstrip().startswith(("[", "{")):
            values[key] = read_json_text(text, key, where)
    absent = {rules.columns.get(key, key) for key, value in record.items() if value is None}
    if absent and stage not in ("pt", "grpo") and values.keys().isdisjoint(TURNS):
        pair = absent & {"chosen", "rejected"}
        answers = absent & {*ANSWERS} if values.keys().isdisjoint(ANSWERS) else set()
        values |= dict.fromkeys(pair or sorted(answers)[:1], "")
    return values


_BETTER: Final = ("chosen", "win", "good", "better", "prefer", "accept", "positive", "best")
_WORSE: Final = ("reject", "lose", "loser", "bad", "worse", "dispref", "negative", "worst")


def _pair_columns(values: Values) -> dict[str, str]:
    """Return which keys of a record may hold a pair and its prompt, by their values and names; empty: none."""
    turns = [key for key, value in values.items() if isinstance(value, list | tuple | dict)]
    texts = [key for key, value in values.items() if isinstance(value, str)]
    for keys in (turns, texts):
        worse = next((k for k in keys if any(w in k.lower() for w in _WORSE)), None)
        better = [k for k in keys if any(w in k.lower() for w in _BETTER) and k != worse]
        if worse is None or not better:
            continue
        found = {"chosen": better[0], "rejected": worse}
        known = not values.keys().isdisjoint(PROMPTS) or keys is turns
        asked = [key for key in keys if key not in found.values()]
        return found | ({} if known or not asked else {"prompt": asked[0]})
    if len(turns) == 2:
        return dict(zip(("chosen", "rejected"), turns, strict=True))
    if len(texts) == 3:
        asked = next((key for key in texts if key in _QUESTIONS), texts[0])
        answers = [key for key in texts if key != asked]
        named = {} if asked in _QUESTIONS else {"prompt": asked}
        return named | dict(zip(("chosen", "rejected"), answers, strict=True))
    return {}


def _hint_at_columns(values: Values, text: bool, stage: str, where: str) -> None:
    """Refuse a record that may be a conversation under other names, with the override that says so."""
    columns = {}
    if {"role", "content"} <= values.keys() or {"from", "value"} <= values.keys():
        raise NoData(
            "a record is one turn; a record is a whole conversation, in one line of a file of lines",
            where=where,
            got=sorted(values),
            allowed=[words for _, words in _FORMATS.values()],
            hint=over_lines_hint(where.partition(": record ")[0]) if ": record " in where else None,
        )
    lists = [
        key
        for key, value in values.items()
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict)
        if key not in TOOLS
    ]
    if len(lists) > 1 and all(_is_records(values[key]) for key in lists):
        _refuse_lists(lists, where)
    texts = [key for key, value in values.items() if isinstance(value, str)]
    if stage in ("dpo", "orpo", "rm"):
        columns = {} if text and len(texts) == 1 else _pair_columns(values)
    elif lists:
        columns["messages"] = lists[0]
    elif stage != "pt" and not text and len(texts) >= 2:
        asked = next((key for key in texts if key in _QUESTIONS), texts[0])
        said = next((key for key in texts if key in ANSWERS and key != asked), None)
        said = said or next(key for key in texts if key != asked)
        columns = {"prompt": asked, "completion": said}
        columns = {name: key for name, key in columns.items() if key not in _FOUND[name]}
    if columns or (stage != "pt" and not text):
        raise NoData(
            "the keys of a record do not say which of them holds the conversation",
            where=where,
            got=sorted(values),
            allowed=[words for _, words in _FORMATS.values()],
            hint=" ".join(
                shlex.quote(f"data.columns.{name}={key}") for name, key in columns.items()
            )
            or None,
        )


_FOUND: Final = {"prompt": PROMPTS, "completion": ANSWERS}


_RECORD_KEYS: Final = frozenset((*TURNS, *PROMPTS, *ANSWERS, "chosen", "rejected"))


def _is_records(value: Sequence[Any]) -> bool:
    """Return whether a list holds records, and not turns or tools."""
    return all(
        isinstance(one, dict) and not _RECORD_KEYS.isdisjoint(one) and "role" not in one
        for one in value
    )


def _refuse_lists(keys: Sequence[str], where: str) -> None:
    path = where.rpartition(":")[0]
    raise several_lists(keys, path)


def _conversation(values: Record, stage: str) -> str | None:
    if "chosen" in values and "rejected" in values:
        return "preference"
    if any(isinstance(values.get(key), list | tuple) for key in TURNS):
        return "sharegpt"
    answered = any(key in values for key in ANSWERS)
    if "instruction" in values and answered:
        return "alpaca"
    asked = any(key in values for key in (PROMPTS if answered else _QUESTIONS))
    return "prompt_completion" if asked and (answered or stage == "grpo") else None


def _asked(values: Values) -> tuple[str, ...]:
    """Return the keys of the prompt: `input` is one where there is no other."""
    present = tuple(key for key in _QUESTIONS if key in values)
    return present or tuple(key for key in PROMPTS if key in values)


def conversations_of(
    record: Record,
    shape: str,
    where: str,
    stage: str = "sft",
    rules: RecordRules = _DEFAULT,
) -> list[Conversation]:
    """Return the conversation of a record; of a preference two, that with the chosen answer first.

    Raises:
        NoData: HP602 naming the key or the turn that is wrong.
    """
    values = _named(record, rules, where, stage)
    reader, allowed = _FORMATS[shape]
    if shape == "prompt_completion" and stage == "grpo":
        reader = _prompt
    if not _has_keys(values, shape, stage):
        actual = _conversation(values, stage)
        raise NoData(
            f"a record is not {shape}",
            where=where,
            got=sorted(map(str, record)),
            allowed=allowed,
            hint=f"data.format={actual}" if actual else None,
        )
    parts = list(reader(values, rules, where))
    read_keys = _read_keys(values, shape)
    tools, variables = (), {}
    if not values.keys() <= read_keys:
        system = rules.one_of(values, SYSTEMS, where)
        if not is_empty(system):
            system = _text(system, "system", where)
            parts = [_with_system(turns, count, system, rules, where) for turns, count in parts]
        tools = read_tools(values, rules, where)
        variables = read_template_values(values.get("chat_template_kwargs"), rules, where)
    if rules.media or not values.keys() == record.keys() <= read_keys:
        texts = (turn["content"] for turns, _ in parts for turn in turns)
        rules.refuse_media(record, texts, where)
        _check_others(values, read_keys, shape, stage, parts, rules, where)
    return [conversation_of(turns, count, tools, variables) for turns, count in parts]


def _has_keys(values: Values, shape: str, stage: str) -> bool:
    """Return whether a record has the keys that its format needs."""
    if shape == "sharegpt":
        return not values.keys().isdisjoint(TURNS)
    if shape == "preference":
        return "chosen" in values and "rejected" in values
    answered = any(key in values for key in ANSWERS)
    if shape == "alpaca":
        return "instruction" in values and answered
    return bool(_asked(values)) and (answered or stage == "grpo")


def _with_system(
    turns: list[Message], count: int | None, system: str | None, rules: RecordRules, where: str
) -> Part:
    """Return a conversation with the record's own system text first, unless it has that turn already.

    Raises:
        NoData: HP602 for a turn of the system that says something else.
    """
    if not system:
        return turns, count
    first = _message("system", system)
    own = [turn for turn in turns if turn["role"] in ("system", "developer")]
    if any(_same(turn, first) for turn in own):
        return turns, count
    if own:
        raise NoData(
            "`system` of a record and its turn of the system say different things",
            where=where,
            got=f"system: {abbreviated(system, 60)}; turn: {abbreviated(own[0]['content'], 60)}",
            allowed="one of them, or equal texts",
            hint=rules.ignore_hint(["system"]),
        )
    return [first, *turns], None if count is None else count + 1


def _read_keys(values: Values, shape: str) -> frozenset[str]:
    """Return the keys whose words are the turns of a record."""
    if shape == "sharegpt":
        return _TURNS_ALONE[_turns_key(values)]
    if shape == "prompt_completion":
        return frozenset((*_asked(values), *ANSWERS))
    if shape == "alpaca":
        return frozenset(("instruction", "history", *_INPUTS, *ANSWERS))
    asked = [key for key in _QUESTIONS if not is_empty(values.get(key))]
    turns = [key for key in TURNS if not is_empty(values.get(key))][:1]
    return frozenset(
        ("chosen", "rejected", *(asked or turns or ("instruction", "history", *_INPUTS)))
    )


def _check_others(
    values: Values,
    read_keys: frozenset[str],
    shape: str,
    stage: str,
    read: list[Part],
    rules: RecordRules,
    where: str,
) -> None:
    """Refuse keys beside those that a record is read from, unless they repeat its turns or have no influence.

    Raises:
        NoData: HP602 naming the key.
    """
    if stage == "grpo":  # rewards may read all of them
        return
    known = {*read_keys, *_SHARED, *_STAGE_KEYS.get(stage, ())}
    if stage in ("dpo", "orpo") and not is_empty(values.get("margin")):
        rules.counts.ignored_keys["margin"] += 1
    for key in _SAID & values.keys() - known:
        value = values[key]
        if is_empty(value) or any(_holds(turns, value, rules, where) for turns, _ in read):
            known.add(key)
            rules.counts.ignored_keys[key] += not is_empty(value)
            continue
        raise NoData(
            f"`{key}` of a record says something else than the turns that are read from the others",
            where=where,
            got=f"{key}: {abbreviated(value, 60)}",
            allowed=f"{_FORMATS[shape][1]}; further keys may repeat a turn",
            hint=rules.ignore_hint([key]),
        )
    rules.refuse_unknown(values, known, f"a record of the format {shape}", where)


def _holds(turns: list[Message], value: Any, rules: RecordRules, where: str) -> bool:
    """Return whether a text is a turn or all turns of a conversation, or turns are its first ones."""
    if isinstance(value, str):
        contents = [turn["content"].strip() for turn in turns]
        return value.strip() in contents or all(content in value for content in contents)
    if not isinstance(value, list | tuple) or not all(isinstance(turn, dict) for turn in value):
        return False
    (_, said), (_, given) = _split_system(turns), _split_system(read_turns(value, rules, where))
    return _begins(said, given)


def num_context(one: Conversation, stage: str) -> int:
    """Leading turns that are no targets of a stage, whoever wrote them.

    A prompt that the record names is context. Else `stage: sft` learns from every answer, and stages that compare
    answers learn from the last one. With `stage: grpo` the answer is what the assistant says at the end.
    """
    written = [turn["role"] == "assistant" for turn in one.messages]
    if stage == "grpo":
        return next((i for i in range(len(written), 0, -1) if not written[i - 1]), 0)
    if one.num_prompt is not None:
        return one.num_prompt
    if stage not in PAIRED_STAGES:
        return 0
    return next((i for i in range(len(written) - 1, -1, -1) if written[i]), 0)


def check_flags(
    one: Conversation, num_context: int, record: Record, where: str, rules: RecordRules
) -> None:
    """Refuse a turn of the prompt that the record names as trained on.

    Raises:
        NoData: HP602 naming the turn.
    """
    for i in sorted(one.trained):
        if i < num_context:
            names = flag_names(record)
            # Without its flags a record would train on turns that it excludes.
            hint = rules.ignore_hint(names) if names and not one.untrained else None
            raise NoData(
                "a turn of the prompt is to be trained on by its flag, and only what follows the prompt is",
                where=f"{where}, turn {i + 1}",
                got=abbreviated(one.messages[i]["content"], 60),
                allowed="flags (`weight`, `train`, ...) that are 1 or true in answers behind the prompt alone",
                hint=hint,
            )


_LABEL: Final = TypeAdapter(bool)
_MARGIN: Final[TypeAdapter[float | bool]] = TypeAdapter(
    StrictBool | Annotated[float, Field(allow_inf_nan=False)]
)


_ROLLED_OUT: Final = ("prompt", "completion", "completion_ids")


def label_of(record: Record, where: str) -> bool:
    """Whether a record's answer is a good one, by its key `label` (TRL) or `kto_tag` (LlamaFactory); HP602 without."""
    found = [record[key] for key in LABELS if record.get(key) is not None]
    try:
        return _LABEL.validate_python(found[0] if found else None)
    except ValidationError as error:
        raise NoData(
            "a record does not say whether its answer is good",
            where=where,
            got=f"{found[0]!r:.60}" if found else sorted(record),
            allowed=f"true or false under {' or '.join(LABELS)}",
        ) from error


def margin_of(record: Record, where: str) -> float | None:
    """By how much a reward model is to tell the answers of a pair apart, the key `margin` (TRL); None without.

    NoData (HP602) when it is no finite number.
    """
    value = record.get("margin")
    if value is None:
        return None
    try:
        margin = _MARGIN.validate_python(value)
    except ValidationError:
        margin = True
    if isinstance(margin, bool):
        raise NoData(
            "the margin of a pair is no finite number",
            where=where,
            got=f"margin: {value!r:.60}",
            allowed="a finite number under `margin` in every record, or in none",
        )
    return margin


def columns_of(record: Record, rules: RecordRules = _DEFAULT) -> dict[str, Any]:
    """Return the keys of a record that rewards may read: all but those whose place rollouts take, as in TRL."""
    named = ((rules.columns.get(key, key), value) for key, value in record.items())
    return {str(k): v for k, v in named if k not in _ROLLED_OUT and k not in rules.ignored}


def is_text_pair(record: Record, shape: str, rules: RecordRules, *, any_name: bool) -> bool:
    """Return whether a record is a prompt and what continues it, as texts alone.

    Args:
        record: The record.
        shape: Its format.
        rules: How its keys are read.
        any_name: Questions and answers under other names than `prompt` and `completion` are such texts, too.
    """
    if shape not in ("prompt_completion", "preference"):
        return False
    values = {rules.columns.get(key, key): value for key, value in record.items()}
    said = ("prompt", *(("chosen", "rejected") if shape == "preference" else ("completion",)))
    if any_name:
        said = tuple(key for key in (*PROMPTS, *ANSWERS, "chosen", "rejected") if key in values)
    others = (*SYSTEMS, *TOOLS, "chat_template_kwargs")
    alone = all(is_empty(values.get(key)) or key in rules.ignored for key in others)

    def is_text(key: str) -> bool:
        value = values.get(key)
        # An answer that is absent is an empty one.
        return isinstance(value, str) or (value is None and key in values and key not in PROMPTS)

    return alone and all(map(is_text, said))

"""Conversations in records: format detection, and readers of turns and prompts.

A record of a conversation has the format `sharegpt`, `alpaca`, `prompt_completion` or `preference`. It becomes a
`Conversation`: turns, and the number of leading turns that are the prompt, if the record has a key for the prompt. The
stage determines which turns are trained on; see `num_context`. Module `record_keys` defines synonymous keys and raises
errors for unknown keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel.config import PAIRED_STAGES
from hyper_parallel.errors import NoData, abbreviated
from hyper_parallel.trainer.data.column_guesses import (
    QUESTIONS,
    column_changes,
    guess_named_pair,
    guess_pair,
    guess_texts,
    guess_turn_columns,
    own_columns,
)
from hyper_parallel.trainer.data.document import Conversation, MediaFile, Message
from hyper_parallel.trainer.data.media_records import decoded, take_media
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
from hyper_parallel.trainer.data.records import several_lists, text_of, turns_hint
from hyper_parallel.trainer.data.turns import (
    conversation_of,
    flag_names,
    parsed,
    read_template_values,
    read_tools,
    read_turns,
)

Values = dict[str, Any]
"""Values of a record by canonical key (see `RecordRules`), without null values and ignored keys."""
Part = tuple[list[Message], int | None]
"""Turns of a conversation, and the number of leading turns that are the prompt; None: the record has no prompt key."""

_INPUTS: Final = ("input", "context")
_SHARED: Final = frozenset((*SYSTEMS, *TOOLS, "chat_template_kwargs"))
_TEXT_KEYS: Final = frozenset((*PROMPTS, *ANSWERS, *TURNS, *SYSTEMS, "context", "text", "history"))
"""Keys of text. If the format of a record does not read such a key, its value must repeat a turn that is read."""
_OF_PAIRS: Final = ("dpo", "orpo", "rm")
_TURNS_ALONE: Final = {key: frozenset((key,)) for key in TURNS}
_STAGE_KEYS: Final = {"kto": LABELS, "rm": ("margin",), "dpo": ("margin",), "orpo": ("margin",)}
"""Further keys that a stage accepts; `dpo` and `orpo` ignore and count `margin`."""


def _sharegpt(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    key = _turns_key(values)
    yield read_turns(values[key], rules, where, key), None


def _turns_key(values: Values) -> str:
    for key in TURNS:
        if isinstance(values.get(key), (list, tuple)):
            return key
    return next(key for key in TURNS if key in values)


def _alpaca(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read an alpaca record: `history` turns, a user turn (`instruction` and `input`), and an answer (`output`)."""
    answer = _text(rules.one_of(values, ANSWERS, where), _key_of(values, ANSWERS, rules), where)
    last = _message("user", _instruction(values, rules, where)), _message("assistant", answer)
    yield [*_history(values, where), *last], None


def _completion(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read a prompt and its completion, which are texts or lists of turns; texts may have a `history` before them."""
    prompt = rules.one_of(values, _prompt_keys(values), where)
    turns = _turns_of(prompt, "user", rules, where, _key_of(values, _prompt_keys(values), rules))
    answer, key = rules.one_of(values, ANSWERS, where), _key_of(values, ANSWERS, rules)
    if "history" in _read_keys(values, "prompt_completion"):
        last = _message("assistant", _text(answer, key, where, "a text, because the record has a `history`"))
        yield [*_history(values, where), *turns, last], None
        return
    yield _joined(turns, _turns_of(answer, "assistant", rules, where, key))


def _prompt(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    key = _prompt_keys(values)[0]
    prompt = _turns_of(values[key], "user", rules, where, rules.own_name(key))
    answer = values.get("completion", [])
    if is_empty(answer):
        named = (values.get(key) for key in ("answer", "response", "output"))
        answer = next((str(a) for a in named if isinstance(a, str | int | float)), "")
    completion = [] if answer == "" else _turns_of(answer, "assistant", rules, where, "completion")
    yield _joined(prompt, completion)


def _preference(values: Values, rules: RecordRules, where: str) -> Iterator[Part]:
    """Read the conversation with the chosen answer, then the conversation with the rejected answer.

    An answer continues the prompt of the record. If both answers contain whole conversations instead, the leading turns
    that they have in common are the prompt. Raise NoData (HP602) if these include no question.
    """
    pair = ("chosen", "rejected")
    raw = [values[key] for key in pair]
    answers = [_turns_of(values[key], "assistant", rules, where, rules.own_name(key)) for key in pair]
    prompt, text = _prompt_of_pair(values, rules, where)
    _check_pair(raw, answers, prompt, text, where)
    if all(_repeats(prompt, answer) or _quotes(answer, text) for answer in answers):
        system, _ = _split_system(prompt)
        whole = [a if a and a[0]["role"] == "system" else [*system, *a] for a in answers]
        named = [_joined(prompt, a)[1] or 0 for a in answers if _repeats(prompt, a)]
        shared = max(_num_shared(whole), min(named, default=0))
        first_roles = [next((t["role"] for t in a if t["role"] != "system"), "") for a in whole]
        has_question = any(turn["role"] == "user" for turn in whole[0][:shared])
        if "user" in first_roles and not has_question:
            raise NoData(
                "the two answers of a pair do not begin with the same prompt",
                where=where,
                got=[turn["content"][:40] for one in whole for turn in one[:1]],
                allowed="`chosen` and `rejected` that begin with the same turns, or a key `prompt`",
            )
        yield from ((turns, shared) for turns in whole)
        return
    yield from (_joined(prompt, answer) for answer in answers)


def _prompt_of_pair(values: Values, rules: RecordRules, where: str) -> tuple[list[Message], Message | None]:
    """Return the turns of a pair's prompt ([] if it is empty), and its user turn if it is a text (else None)."""
    prompt = rules.one_of(values, QUESTIONS, where)
    if isinstance(prompt, str) and (prompt or isinstance(values["chosen"], str)):
        turn = _message("user", prompt)
        return ([turn] if prompt else []), turn
    if not is_empty(prompt):
        return _turns_of(prompt, "user", rules, where, _key_of(values, QUESTIONS, rules)), None
    for key in TURNS:
        if not is_empty(values.get(key)):
            return read_turns(values[key], rules, where, key), None
    if all(is_empty(values.get(key)) for key in ("instruction", "history", *_INPUTS)):
        return [], None
    turn = _message("user", _instruction(values, rules, where))
    return [*_history(values, where), turn], turn


def _check_pair(
    raw: list[Any],
    answers: list[list[Message]],
    prompt: list[Message],
    text: Message | None,
    where: str,
) -> None:
    problem = got = None
    if not prompt and any(isinstance(answer, str) for answer in raw):
        problem = "an answer that is a text needs the prompt under a key of its own"
        got = "no prompt"
    for answer in answers if text else ():
        first = next((turn for turn in answer if turn["role"] != "system"), None)
        if text and first and first["role"] == "user" and not _quotes(answer, text):
            problem = "an answer begins with a user turn that differs from the prompt"
            own = abbreviated(first["content"], 60)
            got = f"prompt: {abbreviated(text['content'], 60)}; turn: {own}"
    if problem is not None:
        raise NoData(
            f"a record does not have the preference format: {problem}",
            where=where,
            got=got,
            allowed=_FORMATS["preference"][1],
        )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _turns_of(value: Any, role: str, rules: RecordRules, where: str, key: str) -> list[Message]:
    """Return a list of turns from a list of turns, a turn, or a text (a turn of `role`); raise HP602 for others."""
    if isinstance(value, str):
        return [_message(role, value)]
    if not isinstance(value, list | tuple | dict):
        got, problem = f"{key}: {abbreviated(value, 60)}", f"`{key}` of a record is neither a text nor turns"
        raise NoData(problem, where=where, got=got, allowed="a text, a turn, or a list of turns")
    return read_turns(value, rules, where, key)


def _key_of(values: Values, keys: Sequence[str], rules: RecordRules) -> str:
    """Return the name in the record of the key whose value `RecordRules.one_of` returns."""
    present = [key for key in keys if key in values]
    nonempty = [key for key in present if not is_empty(values[key])]
    return rules.own_name((nonempty or present or list(keys))[0])


def _text(value: Any, key: str, where: str, allowed: str = "a text") -> str:
    if not isinstance(value, str):
        got, problem = f"{key}: {abbreviated(value, 60)}", f"`{key}` of a record is not a text"
        raise NoData(problem, where=where, got=got, allowed=allowed)
    return value


def _instruction(values: Values, rules: RecordRules, where: str) -> str:
    texts = {
        rules.own_name("instruction"): values.get("instruction", ""),
        _key_of(values, _INPUTS, rules): rules.one_of(values, _INPUTS, where) or "",
    }
    return "\n".join(text for text in (_text(value, key, where) for key, value in texts.items()) if text)


def _history(values: Values, where: str) -> list[Message]:
    turns, pairs = [], values.get("history") or []
    for pair in pairs if isinstance(pairs, list | tuple) else [pairs]:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise NoData(
                "an item of `history` is not a pair of a question and an answer",
                where=where,
                got=f"history: {abbreviated(pair, 60)}",
                allowed="a list of [question, answer]",
            )
        if not all(isinstance(text, str) for text in pair):
            raise NoData(
                "a question or an answer in `history` is not a text",
                where=where,
                got=f"history: {abbreviated(pair, 60)}",
                allowed="a list of [question, answer], both texts",
            )
        turns += [_message(role, text) for role, text in zip(("user", "assistant"), pair, strict=True)]
    return turns


def _split_system(turns: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    count = next((i for i, t in enumerate(turns) if t["role"] != "system"), len(turns))
    return list(turns[:count]), list(turns[count:])


def _same(one: Message, other: Message) -> bool:
    return one["role"] == other["role"] and one["content"].strip() == other["content"].strip()


def _quotes(answer: Sequence[Message], prompt: Message | None) -> bool:
    """Return whether an answer is a whole conversation: it begins with a user turn and contains the prompt."""
    _, turns = _split_system(answer)
    is_conversation = prompt is not None and turns[:1] and turns[0]["role"] == "user"
    return bool(is_conversation) and any(_same(turn, prompt) for turn in turns if prompt)


def _repeats(prompt: Sequence[Message], answer: Sequence[Message]) -> bool:
    """Return whether an answer begins with the prompt's turns and has more; either may lack system turns."""
    (system, question), (own, turns) = _split_system(prompt), _split_system(answer)
    if system and own and not _begins(own, system):
        return False
    return len(turns) > len(question) and _begins(turns, question)


def _begins(turns: Sequence[Message], beginning: Sequence[Message]) -> bool:
    return len(turns) >= len(beginning) and all(map(_same, turns, beginning))


def _num_shared(whole: Sequence[Sequence[Message]]) -> int:
    """Return the number of leading turns that all conversations share; the last turn of the shortest never counts."""
    most = min(len(turns) for turns in whole) - 1
    differ = (i for i in range(most) if any(turns[i] != whole[0][i] for turns in whole))
    return next(differ, max(most, 0))


def _joined(prompt: Sequence[Message], answer: Sequence[Message]) -> Part:
    """Join a prompt and its answer, which may repeat the prompt; return all turns and the number of prompt turns."""
    (system, question), (own, turns) = _split_system(prompt), _split_system(answer)
    repeats = bool(prompt) and _repeats(prompt, answer)
    if system and own and not repeats:
        return [*prompt, *answer], len(prompt)
    first = own or system
    reply = turns[len(question) :] if repeats else turns
    return [*first, *question, *reply], len(first) + len(question)


_Reader = Callable[[Values, RecordRules, str], Iterator[Part]]
_FORMATS: Final[dict[str, tuple[_Reader, str]]] = {
    "sharegpt": (
        _sharegpt,
        "`conversations`, a list of turns with from and value, or `messages`, with role and content",
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
"""For each conversation format, the function that reads a record, and a description of the keys for errors."""
CONVERSATIONS: Final = frozenset(_FORMATS)
"""Names of the conversation formats."""
_DEFAULT: Final = RecordRules()


def shape_of(record: Record, text_key: str, where: str, stage: str = "pt", rules: RecordRules = _DEFAULT) -> str:
    """Return the format of a record: one of `CONVERSATIONS`, or `records` if it has a text under `text_key`.

    Except with `stage: grpo`, that text has precedence over a prompt with its completion.

    Raises:
        NoData: HP602 if the record has no known format or, in stages that need pairs, seems to be a pair whose answers
            have other keys than `chosen` and `rejected`.
    """
    values = _named(record, rules, where, stage)
    shape = _format_of(values, stage)
    text = isinstance(record.get(text_key), str)
    if shape == "prompt_completion" and text and stage != "grpo":
        shape = None
    if shape != "preference" and stage in _OF_PAIRS:
        columns = guess_named_pair(values, with_answers=shape == "prompt_completion")
        if columns and shape is not None:
            raise NoData(
                "a record has a better and a worse answer, but not under `chosen` and `rejected`, so it is not read as "
                "a pair",
                where=where,
                got=sorted(map(str, record)),
                allowed=_FORMATS["preference"][1],
                changes=column_changes(own_columns(columns, rules.columns)),
            )
    if shape is None:
        _check_names(values, text, stage, where, rules)
        text_of(record, text_key, where)
    return shape or "records"


def _named(record: Record, rules: RecordRules, where: str, stage: str) -> Values:
    """Return the values of a record by canonical key; turns given as JSON text are parsed.

    A null answer of a record without a list of turns becomes "", except with `stage: pt` and `stage: grpo`.
    """
    values = rules.canonical_values(record, rules.columns, where)
    for key in TURNS:
        text = values.get(key)
        if isinstance(text, str) and text.lstrip().startswith(("[", "{")):
            values[key] = parsed(text, key, where)
    absent = {rules.columns.get(key, key) for key, value in record.items() if value is None}
    if absent and stage not in ("pt", "grpo") and values.keys().isdisjoint(TURNS):
        pair = absent & {"chosen", "rejected"}
        answers = absent & {*ANSWERS} if values.keys().isdisjoint(ANSWERS) else set()
        values |= dict.fromkeys(pair or sorted(answers)[:1], "")
    return values


def _allowed_formats(stage: str) -> str:
    formats = [words for name, (_, words) in _FORMATS.items() if (name == "preference") == (stage in _OF_PAIRS)]
    return "; or: ".join(formats)


def _turn_columns(key: str, turn: Record, rules: RecordRules) -> dict[str, str]:
    if not {"role", "from", *rules.turn_columns}.isdisjoint(turn):
        return {"messages": key}
    guessed = guess_turn_columns(turn)
    return {"messages": key, **guessed} if guessed else {}


def _check_names(values: Values, text: bool, stage: str, where: str, rules: RecordRules) -> None:
    """Raise NoData (HP602) if a record of unknown format seems to be a conversation, or the stage needs one."""
    names = sorted(map(rules.own_name, values))
    if {"role", "content"} <= values.keys() or {"from", "value"} <= values.keys():
        raise NoData(
            "a record is a single turn, but a record must be a whole conversation (one line in a JSON lines file)",
            where=where,
            got=names,
            allowed=_allowed_formats(stage),
            hint=turns_hint(Path(where.partition(": record ")[0])) if ": record " in where else None,
        )
    lists = [
        key
        for key, value in values.items()
        if isinstance(value, list | tuple) and value and isinstance(value[0], dict)
        if key not in TOOLS
    ]
    if len(lists) > 1 and all(_is_records(values[key]) for key in lists):
        raise several_lists([*map(rules.own_name, lists)], where.rpartition(":")[0])
    texts = [key for key, value in values.items() if isinstance(value, str)]
    columns: dict[str, str] = {}
    has_list = bool(lists) and stage not in _OF_PAIRS
    if stage in _OF_PAIRS:
        columns = {} if text and len(texts) == 1 else guess_pair(values)
    elif has_list:
        columns = _turn_columns(lists[0], values[lists[0]][0], rules)
    elif stage != "pt" and not text and len(texts) >= 2:
        columns = guess_texts(values)
    if not columns and not has_list and (stage == "pt" or text):
        return
    for key in () if columns or has_list else TURNS:
        if key in values:
            raise NoData(
                f"`{rules.own_name(key)}` of a record is not a list of turns",
                where=where,
                got=f"{rules.own_name(key)}: {abbreviated(values[key], 60)}",
                allowed=_FORMATS["sharegpt"][1],
            )
    raise NoData(
        "it is not clear which keys of a record contain a prompt and its two answers"
        if stage in _OF_PAIRS
        else "it is not clear which key of a record contains the conversation",
        where=where,
        got=names,
        allowed=_allowed_formats(stage),
        changes=column_changes(own_columns(columns, rules.columns)),
    )


_RECORD_KEYS: Final = frozenset((*TURNS, *PROMPTS, *ANSWERS, "chosen", "rejected", "text"))


def _is_records(value: Sequence[Any]) -> bool:
    """Return whether all items of a list are whole records, not turns, tools or parts of a content."""
    turn_keys = {"role", "type"}
    return all(isinstance(i, dict) and not _RECORD_KEYS.isdisjoint(i) and turn_keys.isdisjoint(i) for i in value)


def _format_of(values: Record, stage: str) -> str | None:
    if "chosen" in values and "rejected" in values:
        return "preference"
    if any(isinstance(values.get(key), list | tuple) for key in TURNS):
        return "sharegpt"
    has_answer = any(key in values for key in ANSWERS)
    if "instruction" in values and has_answer:
        return "alpaca"
    has_question = any(key in values for key in (PROMPTS if has_answer else QUESTIONS))
    return "prompt_completion" if has_question and (has_answer or stage == "grpo") else None


def _prompt_keys(values: Values) -> tuple[str, ...]:
    present = tuple(key for key in QUESTIONS if key in values)
    return present or tuple(key for key in PROMPTS if key in values)


def conversations_of(
    record: Record,
    shape: str,
    where: str,
    stage: str = "sft",
    rules: RecordRules = _DEFAULT,
    *,
    detected: bool = False,
) -> list[Conversation]:
    """Return a list with the conversation in a record of the format `shape`; for `preference`, chosen and rejected.

    `detected` tells whether `shape` is the format of the first record; otherwise, `data.format` sets it.

    Raises:
        NoData: HP602 naming the faulty key or turn; BadMedia for images or recordings that `data.bad_media` may skip.
        MissingDependency: HP501 if `rules.skips_media`, and the package that decodes the media is not installed.
    """
    values = _named(record, rules, where, stage)
    reader, allowed = _FORMATS[shape]
    if shape == "prompt_completion" and stage == "grpo":
        reader = _prompt
    if not _has_keys(values, shape, stage):
        actual = _format_of(values, stage)
        fits = actual is not None and (actual == "preference") == (stage in _OF_PAIRS)
        raise NoData(
            f"a record does not have the format {shape}{' of the first record' if detected else ''}",
            where=where,
            got=sorted(map(str, record)),
            allowed=allowed,
            changes={"data.format": actual} if fits and not detected else None,
        )
    parts = list(reader(values, rules, where))
    read_keys = _read_keys(values, shape)
    tools, variables = (), {}
    if not values.keys() <= read_keys:
        system = rules.one_of(values, SYSTEMS, where)
        if not is_empty(system):
            system = _text(system, _key_of(values, SYSTEMS, rules), where)
            parts = [_with_system(part, system, values, rules, where) for part in parts]
        tools = read_tools(values, rules, where)
        variables = read_template_values(values.get("chat_template_kwargs"), rules, where)
    media: tuple[MediaFile, ...] = ()
    if rules.media_kinds:
        turns, media = take_media(parts[0][0], values, rules, where)
        for item in media if rules.skips_media else ():
            decoded(item, where)  # raise now, so that the record is dropped; else encoding it raises
        parts = [(turns, parts[0][1])]
    if rules.media or not values.keys() == record.keys() <= read_keys:
        texts = (turn["content"] for turns, _ in parts for turn in turns)
        rules.refuse_media(record, texts, where)
        _check_unread(values, read_keys, shape, stage, parts, rules, where)
    return [conversation_of(turns, count, tools, variables, media) for turns, count in parts]


def _has_keys(values: Values, shape: str, stage: str) -> bool:
    if shape == "sharegpt":
        return not values.keys().isdisjoint(TURNS)
    if shape == "preference":
        return "chosen" in values and "rejected" in values
    has_answer = any(key in values for key in ANSWERS)
    if shape == "alpaca":
        return "instruction" in values and has_answer
    return bool(_prompt_keys(values)) and (has_answer or stage == "grpo")


def _with_system(part: Part, system: str, values: Values, rules: RecordRules, where: str) -> Part:
    turns, count = part
    first = _message("system", system)
    own = [turn for turn in turns if turn["role"] in ("system", "developer")]
    if any(_same(turn, first) for turn in own):
        return turns, count
    if own:
        key = _key_of(values, SYSTEMS, rules)
        raise NoData(
            f"`{key}` of a record differs from its system turn",
            where=where,
            got=f"{key}: {abbreviated(system, 60)}; turn: {abbreviated(own[0]['content'], 60)}",
            allowed="one of them, or equal texts",
            changes=rules.ignoring(rules.own_name(key) for key in SYSTEMS if key in values),
        )
    return [first, *turns], None if count is None else count + 1


def _read_keys(values: Values, shape: str) -> frozenset[str]:
    if shape == "sharegpt":
        return _TURNS_ALONE[_turns_key(values)]
    if shape == "prompt_completion":
        prompts = _prompt_keys(values)
        is_pair = all(isinstance(values.get(key), str) for key in prompts)
        return frozenset((*prompts, *ANSWERS, *(["history"] if is_pair and values.get("history") else [])))
    if shape == "alpaca":
        return frozenset(("instruction", "history", *_INPUTS, *ANSWERS))
    questions = [key for key in QUESTIONS if not is_empty(values.get(key))]
    turns = [key for key in TURNS if not is_empty(values.get(key))][:1]
    return frozenset(("chosen", "rejected", *(questions or turns or ("instruction", "history", *_INPUTS))))


def _check_unread(
    values: Values,
    read_keys: frozenset[str],
    shape: str,
    stage: str,
    parts: list[Part],
    rules: RecordRules,
    where: str,
) -> None:
    """Except for GRPO, raise NoData (HP602) for an unread key, unless it is empty, ignored or repeats a turn."""
    if stage == "grpo":  # reward functions may read all keys
        return
    known = {*read_keys, *_SHARED, *_STAGE_KEYS.get(stage, ())}
    known |= rules.media_columns
    if stage in ("dpo", "orpo") and not is_empty(values.get("margin")):
        rules.counts.ignored_keys["margin"] += 1
    foreign: dict[str, Any] = {}
    for key in sorted(_TEXT_KEYS & values.keys() - known):
        value = values[key]
        if is_empty(value) or any(_contains(turns, value, rules, where) for turns, _ in parts):
            known.add(key)
            rules.counts.ignored_keys[key] += not is_empty(value)
        else:
            foreign[rules.own_name(key)] = value
    for own, value in foreign.items():
        raise NoData(
            f"`{own}` of a record is not part of the turns that are read from its other keys",
            where=where,
            got=f"{own}: {abbreviated(value, 60)}",
            allowed=f"{_FORMATS[shape][1]}; further keys may repeat a turn",
            changes=rules.ignoring(foreign),
        )
    rules.refuse_unknown(values, known, f"a record of the format {shape}", where)


def _contains(turns: list[Message], value: Any, rules: RecordRules, where: str) -> bool:
    """Return whether a value only repeats turns of a conversation.

    A text must equal the content of a turn or contain the contents of all turns. A list must equal the first turns,
    apart from system turns.
    """
    if isinstance(value, str):
        contents = [turn["content"].strip() for turn in turns]
        return value.strip() in contents or all(content in value for content in contents)
    if not isinstance(value, list | tuple) or not all(isinstance(turn, dict) for turn in value):
        return False
    (_, own), (_, listed) = _split_system(turns), _split_system(read_turns(value, rules, where))
    return _begins(own, listed)


def num_context(one: Conversation, stage: str) -> int:
    """Return the number of leading turns of a conversation that a stage does not train on.

    These are the turns of the prompt, if the record has a key for it. Otherwise `stage: sft` trains on every answer,
    and stages that compare answers train only on the last one. With `stage: grpo`, the prompt ends with the last turn
    that is not the assistant's; later turns are the reference answer.
    """
    is_answer = [turn["role"] == "assistant" for turn in one.messages]
    if stage == "grpo":
        return next((i for i in range(len(is_answer), 0, -1) if not is_answer[i - 1]), 0)
    if one.num_prompt is not None:
        return one.num_prompt
    if stage not in PAIRED_STAGES:
        return 0
    return next((i for i in range(len(is_answer) - 1, -1, -1) if is_answer[i]), 0)


def check_flags(one: Conversation, num_context: int, record: Record, where: str, rules: RecordRules) -> None:
    """Raise NoData (HP602) if a flag of the record, such as `weight: 1`, marks a turn of the prompt as trained on."""
    for i in sorted(one.trained):
        if i < num_context:
            names = flag_names(record)
            # No hint to ignore the flags if they also exclude turns, which would then be trained on.
            raise NoData(
                "a flag marks a turn of the prompt as trained on, but only turns after the prompt are trained on",
                where=f"{where}, turn {i + 1}",
                got=abbreviated(one.messages[i]["content"], 60),
                allowed="flags (`weight`, `train`, ...) that are 1 or true only in answers after the prompt",
                changes=rules.ignoring(names) if names and not one.untrained else None,
            )


def is_text_pair(record: Record, shape: str, rules: RecordRules, *, any_name: bool) -> bool:
    """Return whether a record is a prompt with a completion or two answers, all texts, without system text or tools.

    With `any_name`, synonyms of `prompt` and `completion` count too.
    """
    if shape not in ("prompt_completion", "preference"):
        return False
    values = {rules.columns.get(key, key): value for key, value in record.items()}
    keys = ("prompt", *(("chosen", "rejected") if shape == "preference" else ("completion",)))
    if any_name:
        keys = tuple(key for key in (*PROMPTS, *ANSWERS, "chosen", "rejected") if key in values)
    has_only_texts = all(is_empty(values.get(key)) or key in rules.ignored for key in _SHARED)

    def is_text(key: str) -> bool:
        value = values.get(key)
        # A null answer counts as an empty answer.
        return isinstance(value, str) or (value is None and key in values and key not in PROMPTS)

    return has_only_texts and all(map(is_text, keys))

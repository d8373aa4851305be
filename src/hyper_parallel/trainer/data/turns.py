"""Reader of conversation turns: roles, contents, reasoning, tool calls, and flags that exclude turns from training.

Turns in the formats of OpenAI (`role`, `content`), sharegpt (`from`, `value`) and LlamaFactory (`function_call`,
`observation`) become messages in the OpenAI format, which chat templates read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from hyper_parallel.errors import NoData, abbreviated
from hyper_parallel.received import LimitExceeded, Limits, parse_json
from hyper_parallel.trainer.data.column_guesses import (
    column_changes,
    guess_role,
    guess_turn_columns,
    own_columns,
)
from hyper_parallel.trainer.data.document import Conversation, MediaFile, Message
from hyper_parallel.trainer.data.media_kinds import kind_of_part
from hyper_parallel.trainer.data.record_keys import ROLES, TOOLS, RecordRules, is_empty

_ROLE: Final = ("role", "from")
_CONTENT: Final = ("content", "value")
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_FLAGS: Final = {
    **dict.fromkeys(("weight", "train", "training", "trainable", "loss", "train_on_turn"), True),
    "masked": False,
}
"""Value that marks a turn as trained on, by flag."""
_CALLS: Final = ("tool_calls", "function_call", "tool_call_id", "name")
_KEYS: Final = frozenset((*_ROLE, *_CONTENT, *_REASONING, *_FLAGS, *_CALLS))
_KEYS_OF_CALLS: Final = frozenset(("id", "type", "index", "function", "name", "arguments"))
_KEYS_OF_TOOLS: Final = ("type", "function")
_TEXT_PARTS: Final = ("text", "input_text", "output_text")
REFERENCES: Final = "\0references"
"""Temporary key of messages, with (kind, reference) of each media part in the content. The reference is a file name or
an object; None refers to the next item of the record's media column."""
_JSON_LIMITS: Final = Limits(depth=100)
"""Limits of JSON texts in records, such as tools and arguments."""
_UNTRAINED: Final = "\0untrained"
_TRAINED: Final = "\0trained"
"""Temporary keys that mark messages with a training flag; `conversation_of` removes them."""


def read_turns(values: Any, rules: RecordRules, where: str, key: str = "messages") -> list[Message]:
    """Convert a list of turns, or one turn, to messages in the OpenAI format; `key` names the list in error messages.

    Training flags and references to media become temporary keys, removed by `conversation_of` and `take_media`.

    Raises:
        NoData: HP602 naming the unreadable turn.
    """
    if isinstance(values, Mapping):
        values = [values]
    if not isinstance(values, (list, tuple)):
        raise _unreadable(f"`{key}` is not a list of turns", where, values, "a list of turns")
    messages, roles, simple = [], rules.roles, not (rules.turn_columns or rules.ignored)
    for number, turn in enumerate(values, start=1):
        if simple and type(turn) is dict and len(turn) == 2:
            # Fast path for the usual turn.
            if "role" in turn:
                word, content = turn["role"], turn.get("content")
            else:
                word, content = turn.get("from"), turn.get("value")
            role = roles.get(word) if type(word) is str else None
            if type(content) is str and role is not None and role != "function_call":
                messages.append({"role": role, "content": content})
                continue
        messages.append(_message(turn, rules, f"{where}, turn {number}"))
    return messages


def conversation_of(
    messages: Sequence[Message],
    num_prompt: int | None,
    tools: tuple[Mapping[str, Any], ...],
    template_values: Mapping[str, Any],
    media: tuple[MediaFile, ...] = (),
) -> Conversation:
    """Return the `Conversation` of messages from `read_turns`; other arguments set attributes of the same name."""
    untrained = frozenset(i for i, message in enumerate(messages) if _UNTRAINED in message)
    trained = frozenset(i for i, message in enumerate(messages) if _TRAINED in message)
    if untrained or trained:
        flags = (_UNTRAINED, _TRAINED)
        messages = [{k: v for k, v in m.items() if k not in flags} for m in messages]
    flags = untrained, trained
    return Conversation(tuple(messages), num_prompt, tools, template_values, *flags, media)


def read_tools(values: Mapping[str, Any], rules: RecordRules, where: str) -> tuple[Any, ...]:
    """Return the tools of a record, given as one or several JSON schemas or as JSON text; () if there are none.

    Raises:
        NoData: HP602 for any other value.
    """
    tools = rules.one_of(values, TOOLS, where)
    if is_empty(tools):
        return ()
    tools = parsed(tools, "tools", where)
    if isinstance(tools, Mapping):
        tools = [tools]
    allowed = 'a list of {"type": "function", "function": {"name": ..., "parameters": ...}}'
    if not isinstance(tools, list | tuple):
        raise _unreadable("`tools` is not a list", where, tools, allowed)
    return tuple(_tool(parsed(tool, "tools", where), rules, where, allowed) for tool in tools)


def _tool(tool: Any, rules: RecordRules, where: str, allowed: str) -> dict[str, Any]:
    if rules.is_table:
        tool = _without_absent(tool)
    if isinstance(tool, dict) and isinstance(tool.get("function"), dict):
        rules.refuse_unknown(tool, _KEYS_OF_TOOLS, "a tool", where)
        kind, function = tool.get("type", "function"), tool["function"]
    else:
        kind, function = "function", tool
    if kind != "function" or not isinstance(function, dict):
        raise _unreadable("a tool is not a function", where, tool, allowed)
    if not isinstance(function.get("name"), str):
        raise _unreadable("a tool has no name", where, function, allowed)
    return {"type": "function", "function": function}


def read_template_values(value: Any, rules: RecordRules, where: str) -> dict[str, Any]:
    """Return the template variables that a record sets under `chat_template_kwargs`.

    Raises:
        NoData: HP602 for a value that is not an object, or that sets a reserved variable such as `messages`.
    """
    if is_empty(value):
        return {}
    value = parsed(value, "chat_template_kwargs", where)
    if not isinstance(value, dict):
        problem = "`chat_template_kwargs` of a record is not an object"
        raise _unreadable(problem, where, value, "an object such as {enable_thinking: false}")
    reserved = {"messages", "tools", "add_generation_prompt", "chat_template"} & value.keys()
    if reserved:
        problem = "`chat_template_kwargs` of a record sets variables that are set from the conversation"
        raise _unreadable(problem, where, sorted(reserved), "other variables of the template")
    return dict(_without_absent(value)) if rules.is_table else value


def _message(turn: Any, rules: RecordRules, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise _unreadable("a turn is not an object with keys", where, turn, "role and content")
    values = rules.canonical_values(turn, rules.turn_columns, where)
    if values.keys().isdisjoint(_ROLE):
        raise NoData(
            "a turn has no role",
            where=where,
            got=sorted(map(str, turn)),
            allowed="a role under role or from, and a text under content or value",
            changes=column_changes(own_columns(guess_turn_columns(values), rules.turn_columns)),
        )
    rules.refuse_unknown(values, _KEYS, "a turn", where)
    word = _role_of(values, rules, where)
    content = rules.one_of(values, _CONTENT, where)
    role = "assistant" if word == "function_call" else word
    message: Message = {"role": role, "content": ""}
    calls = []
    for key in ("tool_calls", "function_call"):
        if not is_empty(values.get(key)):
            calls += _read_calls(values[key], key, rules, where)
    if word == "function_call":
        calls += _read_calls(content, "function_call", rules, where)
    else:
        message["content"] = _content(content, message, rules, where)
    _add_reasoning(message, rules.one_of(values, _REASONING, where), where)
    if calls:
        message["tool_calls"] = calls
    if content is None and len(message) == 2:
        problem = "a turn has no text"
        raise _unreadable(problem, where, sorted(values), "a text under content or value")
    if role != "assistant" and len(message) > 2:
        problem = f"a turn of the role {role} has {' and '.join([*message][2:])}"
        raise _unreadable(problem, where, sorted(values), "these keys in turns of the assistant")
    for key in ("name", "tool_call_id"):
        if not is_empty(values.get(key)):
            if role != "tool":
                rules.refuse_unknown({key: values[key]}, (), f"a turn of the role {role}", where)
                continue
            message[key] = values[key]
    trained = _is_trained(values, role, where)
    if trained is not None and role == "assistant":
        message[_TRAINED if trained else _UNTRAINED] = True
    if isinstance(content, list | tuple) and (references := _references(content, rules)):
        message[REFERENCES] = references
    return message


def _references(parts: Sequence[Any], rules: RecordRules) -> list[tuple[str, Any]]:
    references = []
    for part in parts:
        if (kind := kind_of_part(part, rules.media_kinds)) is not None:
            named = (part[key] for key in kind.parts[part["type"]] if not is_empty(part.get(key)))
            references.append((kind.name, next(named, None)))
    return references


def _role_of(values: Mapping[str, Any], rules: RecordRules, where: str) -> str:
    """Return the canonical role of a turn; raise NoData (HP602) for an empty or unknown role, or two different ones."""
    named = {k: values[k] for k in _ROLE if not is_empty(values.get(k))}
    roles = {key: _role(word, rules) for key, word in named.items()}
    unknown = [named[key] for key, role in roles.items() if role is None]
    role: str | None = None if unknown else rules.one_of(roles, _ROLE, where)
    if role is not None:
        return role
    got = unknown[0] if unknown else sorted(values)
    role = guess_role(got) if isinstance(got, str) else None
    has_word = any(role == other and ROLES.get(w) != other for w, other in rules.roles.items())
    changes = None if role is None or has_word else column_changes({role: got}, "roles")
    problem = "a turn has no known role"
    raise NoData(problem, where=where, got=got, allowed=sorted(rules.roles), changes=changes)


def _role(word: Any, rules: RecordRules) -> str | None:
    if not isinstance(word, str):
        return None
    return rules.roles.get(word) or ROLES.get(word.lower())


def _content(value: Any, message: Message, rules: RecordRules, where: str) -> str:
    """Return the content of a turn as text, with internal marks for media; add its reasoning parts to `message`."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    kinds = ", ".join(("text", *(kind.name for kind in rules.media_kinds)))
    allowed = f"a text, or a list of parts of type {kinds}"
    if not isinstance(value, list | tuple):
        raise _unreadable("the content of a turn is not a text", where, value, allowed)
    texts = []
    for part in value:
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "thinking" and isinstance(part.get("thinking"), str):
            _add_reasoning(message, part["thinking"], where)
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            rules.refuse_unknown(part, ("type", "text"), "a part of a content", where)
            texts.append(part["text"])
        elif medium := kind_of_part(part, rules.media_kinds):
            known = ("type", *medium.parts[part["type"]], "text")
            rules.refuse_unknown(part, known, "a part of a content", where)
            texts.append(medium.mark)
        else:
            actual = f"`{kind}`, not text" if kind else "not a text"
            raise _unreadable(f"a part of a content is {actual}", where, part, allowed)
    return "".join(texts)


def _add_reasoning(message: Message, value: Any, where: str) -> None:
    if is_empty(value):
        return
    if not isinstance(value, str):
        raise _unreadable("the reasoning of a turn is not a text", where, value, "a text")
    message["reasoning_content"] = message.get("reasoning_content", "") + value


def _read_calls(value: Any, key: str, rules: RecordRules, where: str) -> list[dict[str, Any]]:
    """Return the tool calls under `key`, a call, a list of calls, or JSON text of them, in the OpenAI format."""
    value = parsed(value, key, where)
    allowed = 'calls such as {"name": "f", "arguments": {"x": 1}}'
    listed = [value] if isinstance(value, Mapping) else value
    if not isinstance(listed, list | tuple) or not listed:
        raise _unreadable("a tool call is not an object", where, value, allowed)
    calls = []
    for call in listed:
        call = parsed(call, "tool_calls", where)
        if not isinstance(call, Mapping):
            raise _unreadable("a tool call is not an object", where, call, allowed)
        call = rules.canonical_values(call, {}, where)
        rules.refuse_unknown(call, _KEYS_OF_CALLS, "a tool call", where)
        function = call["function"] if isinstance(call.get("function"), Mapping) else call
        if function is not call:
            rules.refuse_unknown(function, ("name", "arguments"), "a tool call", where)
        name, arguments = function.get("name"), function.get("arguments")
        arguments = {} if is_empty(arguments) else parsed(arguments, "arguments", where)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            problem = "a tool call lacks a name or valid arguments"
            raise _unreadable(problem, where, function, allowed)
        if call.get("type", "function") != "function":
            raise _unreadable("a tool call is not a function call", where, call["type"], allowed)
        if rules.is_table:
            arguments = _without_absent(arguments)
        read = {"type": "function", "function": {"name": name, "arguments": arguments}}
        calls.append(read if is_empty(call.get("id")) else {"id": call["id"], **read})
    return calls


def _is_trained(values: Mapping[str, Any], role: str, where: str) -> bool | None:
    """Return whether the flags of a turn (`weight`, `train`, ...) mark it as trained on; None without flags.

    Raise NoData (HP602) for flags that are not 0 or 1, contradict each other, or mark a turn of another role.
    """
    flags = {}
    for key in values.keys() & _FLAGS.keys():
        value = values[key]
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise _unreadable(
                f"`{key}` of a turn is not 0 or 1",
                where,
                value,
                "0, 1, false or true, as a turn is either trained on or not",
            )
        flags[key] = bool(value) == _FLAGS[key]
    if not flags:
        return None
    if len(set(flags.values())) > 1:
        problem = f"`{'` and `'.join(sorted(flags))}` of a turn contradict each other"
        raise _unreadable(problem, where, {key: values[key] for key in sorted(flags)}, "one of them")
    trained = next(iter(flags.values()))
    if role != "assistant" and trained:
        problem = f"a flag marks a turn of the role {role} as trained on, but only answers are"
        raise _unreadable(problem, where, sorted(flags), "flags of other turns that are 0 or false")
    return trained


def flag_names(value: Any) -> set[str]:
    """Return the names of all training flags in a record, at any depth."""
    if isinstance(value, Mapping):
        inner = (flag_names(item) for item in value.values())
        return {key for key in value if key in _FLAGS}.union(*inner)
    if isinstance(value, list | tuple):
        return set[str]().union(*map(flag_names, value))
    return set()


def parsed(value: Any, key: str, where: str) -> Any:
    """Return `value` or, if it is a text, the JSON value in it; `key` names the value in error messages.

    Raises:
        NoData: HP602 for a text that is not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value, _JSON_LIMITS)
    except (LimitExceeded, ValueError) as error:
        problem = f"`{key}` is a text that is not JSON: {str(error)[:80]}"
        raise _unreadable(problem, where, value, "JSON") from error


def _without_absent(value: Any) -> Any:
    """Return a value without keys whose value is null, at any depth; rows of a table have null for every absent key."""
    if isinstance(value, Mapping):
        return {k: _without_absent(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_without_absent(item) for item in value]
    return value


def _unreadable(problem: str, where: str, got: Any, allowed: str) -> NoData:
    return NoData(problem, where=where, got=abbreviated(got, 60), allowed=allowed)

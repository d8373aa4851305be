"""Guesses, for hints in error messages, of the keys of a record that hold a prompt, an answer, a pair or a turn.

Users paste hints, so a wrong guess would train on the wrong text. A key is guessed only if its name states its meaning,
or if no key of the record has such a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from hyper_parallel.trainer.data.record_keys import (
    ANSWERS,
    PROMPTS,
    ROLES,
    SYSTEMS,
    TOOLS,
    WITHOUT_INFLUENCE,
    Record,
    as_value,
)

QUESTIONS: Final = tuple(key for key in PROMPTS if key not in ("instruction", "input"))
"""Keys that hold a complete question, in order of preference."""
_QUESTION_WORDS: Final = (
    "question", "prompt", "query", "instruct", "problem", "request", "user", "human", "input",
)  # fmt: skip
"""Substrings in names of keys that hold a question."""
_ANSWER_WORDS: Final = (
    "answer", "response", "completion", "output", "solution", "target", "reply", "assistant", "summary",
)  # fmt: skip
"""Substrings in names of keys that hold an answer."""
_BETTER: Final = re.compile("chosen|win$|winner$|winning$|good|better|prefer|accept|positive|best")
_WORSE: Final = re.compile("reject|lose|bad$|worse|dispref|negative|worst")
"""Patterns of words in names of keys that hold the better or the worse answer of a pair."""
_CHOICES: Final = ("better", "prefer", "winner", "choice", "label", "safer", "rank")
"""Substrings in names of keys whose value selects the better of two answers."""
_ROLE_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "function_call": ("function_call", "tool_call", "action"),
    "tool": ("tool", "function", "observation", "environment", "result"),
    "system": ("system", "instruction"),
    "assistant": ("assistant", "bot", "agent", "model", "gpt", "llm", "answer", "response", "claude"),
}  # fmt: skip
"""For each role, substrings of unknown role names that probably mean this role."""


def column_changes(columns: Mapping[str, str], section: str = "columns") -> dict[str, object]:
    """Return recipe changes for `columns`, such as `{"data.columns.prompt": "question"}`.

    `columns` is a dict from canonical key or role to its name in the records; `section` is `columns` or `roles`.
    """
    return {f"data.{section}.{name}": as_value(key) for name, key in columns.items()}


def own_columns(columns: Mapping[str, str], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return guessed columns with the names in the record in place of canonical keys.

    Entries without effect are omitted. The result is {} if the recipe already renames one of the keys otherwise.

    Args:
        columns: Dict from canonical key to a key in the result of `RecordRules.canonical_values`.
        renamed: Dict from renamed key in the records to canonical key, as in `RecordRules`.
    """
    names = {name: own for own, name in renamed.items()}
    own_names = {name: names.get(key, key) for name, key in columns.items()}
    if any(renamed.get(own, name) != name for name, own in own_names.items()):
        return {}
    return {name: own for name, own in own_names.items() if own != name and own not in renamed}


def guess_role(word: str) -> str:
    """Return the role that an unknown role name probably means; `user` if nothing else matches."""
    lower = word.lower()
    named = (r for r, parts in _ROLE_WORDS.items() if any(part in lower for part in parts))
    return next(named, "user")


def guess_turn_columns(turn: Record) -> dict[str, str]:
    """Return a dict from `role` and `content` to the keys of a turn that probably hold them; {} if ambiguous."""
    texts = [key for key, value in turn.items() if isinstance(value, str)]
    roles = [key for key in texts if turn[key].lower() in ROLES]
    contents = [key for key in texts if key not in roles and key not in WITHOUT_INFLUENCE]
    if len(roles) != 1 or len(contents) != 1:
        return {}
    return {"role": roles[0], "content": contents[0]}


def guess_texts(values: Record) -> dict[str, str]:
    """Return the keys of a record that probably hold prompt, completion and system text.

    The result is a dict from `prompt`, `completion` and `system` to keys, without keys that the reader knows as
    synonyms. It is empty if the keys are ambiguous.
    """
    systems = [key for key in values if key.lower() in SYSTEMS]
    texts = [k for k, v in values.items() if isinstance(v, str) and k not in (*systems, *TOOLS)]
    words = [key for key in texts if key.lower() not in WITHOUT_INFLUENCE]
    texts = words if len(words) > 1 else texts
    answers = _named(texts, ANSWERS, _ANSWER_WORDS)
    rest = [key for key in texts if not any(word in key.lower() for word in _ANSWER_WORDS)]
    questions = _named(rest, PROMPTS, _QUESTION_WORDS)
    if not answers and not questions:
        pair = texts[:2]
    else:
        others = [key for key in texts if key not in (*answers, *questions)]
        pair = [*(questions or others), *(answers or others)]
    if len(pair) != 2 or pair[0] == pair[1]:
        return {}
    columns = dict(zip(("prompt", "completion"), pair, strict=True))
    columns |= {"system": systems[0]} if systems else {}
    synonyms = {"prompt": PROMPTS, "completion": ANSWERS, "system": SYSTEMS}
    return {name: key for name, key in columns.items() if key not in synonyms[name]}


def _named(texts: list[str], names: tuple[str, ...], words: tuple[str, ...]) -> list[str]:
    """Return a list of the first of `names` in `texts`; if none is, all `texts` that contain one of `words`."""
    exact = [name for name in names if name in texts]
    return exact[:1] or [key for key in texts if any(word in key.lower() for word in words)]


def guess_pair(values: Record) -> dict[str, str]:
    """Return the keys of a record that probably hold a pair of answers and their prompt.

    The result is a dict from `chosen`, `rejected` and `prompt` to keys; it is empty if the keys are ambiguous. If no
    name of a key tells which answer is better, the first one is taken as chosen.
    """
    turns = [key for key, value in values.items() if isinstance(value, list | tuple | dict)]
    texts = [key for key, value in values.items() if isinstance(value, str)]
    if named := guess_named_pair(values):
        return named
    others = (key.lower() for key in values if key not in (*turns, *texts))
    if any(word in key for key in others for word in _CHOICES):
        return {}
    if len(turns) == 2:
        return dict(zip(("chosen", "rejected"), turns, strict=True))
    if len(texts) == 3:
        question = next((key for key in texts if key in QUESTIONS), texts[0])
        answers = [key for key in texts if key != question]
        if len({answer[:-1] for answer in answers}) == 1:  # response_a, response_b
            return {}
        prompt = {} if question in QUESTIONS else {"prompt": question}
        return prompt | dict(zip(("chosen", "rejected"), answers, strict=True))
    return {}


def _has_word(key: str, pattern: re.Pattern[str]) -> bool:
    """Return whether a word in a key matches: `bad$` matches in `bad_reply` and `badReply` but not in `badge`."""
    words = re.split(r"[\W_\d]+|(?<=[a-z])(?=[A-Z])", key)
    return any(pattern.match(word.lower()) for word in words)


def guess_named_pair(values: Record, *, with_answers: bool = False) -> dict[str, str]:
    """Return a dict like `guess_pair`; {} unless names of keys, such as `bad_reply`, mark the better and worse answer.

    With `with_answers`, the better answer may have a general name, such as `response`.
    """
    kinds: tuple[Any, ...] = (list | tuple | dict, str)
    for kind in kinds:
        keys = [key for key, value in values.items() if isinstance(value, kind)]
        worse = next((key for key in keys if _has_word(key, _WORSE)), None)
        better = [key for key in keys if _has_word(key, _BETTER) and key != worse]
        if with_answers:
            better += [key for key in ANSWERS if key in keys and key != worse]
        if worse is None or not better:
            continue
        columns = {"chosen": better[0], "rejected": worse}
        known = not values.keys().isdisjoint(PROMPTS) or kind is not str
        rest = [key for key in keys if key not in columns.values()]
        return columns | ({} if known or not rest else {"prompt": rest[0]})
    return {}

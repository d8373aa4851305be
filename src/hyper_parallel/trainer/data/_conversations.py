"""Conversations in records: which keys hold turns, which turns are the prompt, and the labels beside them.

A record is `sharegpt`, `alpaca`, `prompt_completion` or `preference`. Each is read into `Conversation`: turns, and how
many of them the record names as the prompt. A stage decides from these which turns are targets, see `num_context`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AliasChoices,
    BaseModel,
    Field,
    StrictBool,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from hyper_parallel.config import PAIRED
from hyper_parallel.errors import NoData
from hyper_parallel.trainer.data._records import Record, text_of
from hyper_parallel.trainer.data.conversation import Conversation, Message

_SAME_ROLE: Final = {"human": "user", "gpt": "assistant"}
_TURNS: Final = ("conversations", "messages")


class _Turn(BaseModel):
    role: Literal["system", "user", "human", "assistant", "gpt"] = Field(
        validation_alias=AliasChoices("from", "role")
    )
    content: str = Field(validation_alias=AliasChoices("value", "content"))

    @property
    def message(self) -> Message:
        return _message(_SAME_ROLE.get(self.role, self.role), self.content)


class _Sharegpt(BaseModel):
    """A sharegpt (`conversations`: from, value) or OpenAI (`messages`: role, content) record."""

    system: str | None = None
    turns: list[_Turn] = Field(validation_alias=AliasChoices(*_TURNS))

    def conversations(self) -> Iterator[Conversation]:
        """The one conversation of the record."""
        yield Conversation(tuple(turn.message for turn in self.turns))


class _Alpaca(BaseModel):
    """An alpaca record: history pairs, then the instruction with its input, and the output."""

    system: str | None = None
    history: list[tuple[str, str]] = []
    instruction: str
    input: str = ""
    output: str

    def conversations(self) -> Iterator[Conversation]:
        """The one conversation of the record."""
        question = "\n".join(text for text in (self.instruction, self.input) if text)
        last = (_message("user", question), _message("assistant", self.output))
        yield Conversation((*_history(self.history), *last))


class _Completion(BaseModel):
    """A prompt and its completion, each a text or turns."""

    system: str | None = None
    prompt: str | list[_Turn]
    completion: str | list[_Turn]

    def conversations(self) -> Iterator[Conversation]:
        """The one conversation of the record."""
        prompt, completion = _turns(self.prompt, "user"), _turns(self.completion, "assistant")
        yield _joined(prompt, completion)


class _Prompt(_Completion):
    """A prompt for which completions are sampled; its own completion, if it has one, is the answer."""

    completion: str | list[_Turn] = []
    answer: Any = None

    def conversations(self) -> Iterator[Conversation]:
        """The one conversation of the record; without a completion its answer is the column `answer`."""
        prompt, completion = _turns(self.prompt, "user"), _turns(self.completion, "assistant")
        if not completion and isinstance(self.answer, str | int | float):
            completion = [_message("assistant", str(self.answer))]
        yield _joined(prompt, completion)


class _Preference(BaseModel):
    """Two answers to one prompt: of TRL (`prompt`), alpaca (`instruction`, `input`) or sharegpt (`conversations`)."""

    system: str | None = None
    prompt: str | list[_Turn] | None = None
    turns: list[_Turn] = Field(default=[], validation_alias=AliasChoices(*_TURNS))
    history: list[tuple[str, str]] = []
    instruction: str = ""
    input: str = ""
    chosen: str | list[_Turn] | _Turn
    rejected: str | list[_Turn] | _Turn

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        prompt, text = self._prompt, self._text_prompt
        if not prompt and (isinstance(self.chosen, str) or isinstance(self.rejected, str)):
            raise ValueError("an answer that is a text needs a prompt beside it")
        for answer in self._answers if text else ():
            opens = next((turn["role"] for turn in answer if turn["role"] != "system"), None)
            if opens == "user" and not _quotes(answer, text):
                raise ValueError("an answer begins with a turn of the user that is not the prompt")
        return self

    @property
    def _text_prompt(self) -> Message | None:
        """The turn of a prompt that is a text, not a list of turns."""
        if self.prompt or (self.prompt is not None and isinstance(self.chosen, str)):
            return _message("user", self.prompt) if isinstance(self.prompt, str) else None
        if self.turns or not (self.instruction or self.input or self.history):
            return None
        return _message("user", "\n".join(text for text in (self.instruction, self.input) if text))

    @property
    def _prompt(self) -> list[Message]:
        """Turns that the record names as the prompt; none where the answers hold the whole conversation."""
        text = self._text_prompt
        if text is None:
            return _turns(self.prompt or self.turns, "user")
        return [text] if self.prompt else [*_history(self.history), text]

    @property
    def _answers(self) -> list[list[Message]]:
        given = (self.chosen, self.rejected)
        return [_turns([a] if isinstance(a, _Turn) else a, "assistant") for a in given]

    def conversations(self) -> Iterator[Conversation]:
        """The conversation with the chosen answer, and the one with the rejected answer.

        An answer continues the prompt. Where both answers repeat the prompt, or none is named, the prompt is the
        turns that both have in common.
        """
        prompt, text, answers = self._prompt, self._text_prompt, self._answers
        if all(_repeats(prompt, answer) or _quotes(answer, text) for answer in answers):
            system, _ = _split_system(prompt)
            whole = [a if a[0]["role"] == "system" else [*system, *a] for a in answers]
            named = [_joined(prompt, a).num_prompt or 0 for a in answers if _repeats(prompt, a)]
            shared = max(_num_shared(whole), min(named, default=0))
            yield from (Conversation(tuple(turns), shared) for turns in whole)
            return
        yield from (_joined(prompt, answer) for answer in answers)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _turns(given: str | Sequence[_Turn] | None, role: str) -> list[Message]:
    """Turns of a key that holds a text of `role` or a list of turns."""
    if isinstance(given, str):
        return [_message(role, given)]
    return [turn.message for turn in given or ()]


def _history(pairs: Sequence[tuple[str, str]]) -> list[Message]:
    """Turns of questions with their answers."""
    roles = ("user", "assistant")
    return [_message(r, text) for pair in pairs for r, text in zip(roles, pair, strict=True)]


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


def _joined(prompt: Sequence[Message], answer: Sequence[Message]) -> Conversation:
    """The conversation of a prompt and what continues it; an answer that repeats the prompt is all of it."""
    (system, asked), (own, turns) = _split_system(prompt), _split_system(answer)
    repeats = bool(prompt) and _repeats(prompt, answer)
    if system and own and not repeats:
        return Conversation((*prompt, *answer), len(prompt))
    first = own or system
    behind = turns[len(asked) :] if repeats else turns
    return Conversation((*first, *asked, *behind), len(first) + len(asked))


_Model = type[_Sharegpt | _Alpaca | _Completion | _Preference]
_CONVERSATIONS: Final[dict[str, tuple[_Model, str]]] = {
    "sharegpt": (
        _Sharegpt,
        "`conversations` with from and value, or `messages` with role and content",
    ),
    "alpaca": (_Alpaca, "instruction, output; optional: input, system, history"),
    "prompt_completion": (_Completion, "prompt, completion: texts or lists of turns"),
    "preference": (
        _Preference,
        "chosen, rejected: texts, turns or lists of turns; prompt, instruction or conversations; "
        "lists may begin with the prompt",
    ),
}
"""How a conversation is read, and what its record holds in words."""
CONVERSATIONS: Final = frozenset(_CONVERSATIONS)
"""Shapes of records that are conversations."""


def shape_of(record: Record, text_key: str, where: str, stage: str = "pt") -> str:
    """Which shape a record has: that of a conversation, or `records` (text under `text_key`)."""
    shape = _conversation(record, stage)
    text = isinstance(record.get(text_key), str)
    if shape == "prompt_completion" and text and stage != "grpo":
        shape = None
    if shape is None:
        text_of(record, text_key, where)
    return shape or "records"


def _conversation(record: Record, stage: str) -> str | None:
    if "chosen" in record and "rejected" in record:
        return "preference"
    if any(isinstance(record.get(key), list) for key in _TURNS):
        return "sharegpt"
    if "instruction" in record and "output" in record:
        return "alpaca"
    completed = stage == "grpo" or "completion" in record
    return "prompt_completion" if "prompt" in record and completed else None


def conversations_of(
    record: Record, shape: str, where: str, stage: str = "sft"
) -> list[Conversation]:
    """The conversation of a record; of a preference two, that with the chosen answer first.

    NoData (HP602) names the turn that is wrong.
    """
    model, allowed = _CONVERSATIONS[shape]
    if shape == "prompt_completion" and stage == "grpo":
        model, allowed = _Prompt, "prompt, and optionally completion: texts or lists of turns"
    try:
        read = model.model_validate({k: v for k, v in record.items() if v is not None})
    except ValidationError as error:
        raise _unreadable(error, record, shape, where, allowed, stage) from error
    except RecursionError as error:
        raise NoData("values are nested too deep", where=where) from error
    return [_with_system(one, read.system) for one in read.conversations()]


def _unreadable(
    error: ValidationError, record: Record, shape: str, where: str, allowed: str, stage: str
) -> NoData:
    problem, other = error.errors(include_url=False)[0], _conversation(record, stage)
    turn = next((f", turn {part + 1}" for part in problem["loc"] if isinstance(part, int)), "")
    key, found = ".".join(map(str, problem["loc"])), problem["input"]
    return NoData(
        f"a record is not {shape}: " + (f"`{key}`, " if key else "") + problem["msg"],
        where=where + turn,
        got=sorted(found) if isinstance(found, dict) else f"{found!r:.60}",
        allowed=allowed,
        hint=f"data.format={other}" if other not in (None, shape) else None,
    )


def _with_system(one: Conversation, system: str | None) -> Conversation:
    """The conversation with the record's own system text first, unless it begins with that already."""
    first = _message("system", system or "")
    if not system or one.messages[:1] == (first,):
        return one
    count = None if one.num_prompt is None else one.num_prompt + 1
    return replace(one, messages=(first, *one.messages), num_prompt=count)


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
    if stage not in PAIRED:
        return 0
    return next((i for i in range(len(written) - 1, -1, -1) if written[i]), 0)


_LABELS: Final = ("label", "kto_tag")
_LABEL: Final = TypeAdapter(bool)
_MARGIN: Final[TypeAdapter[float | bool]] = TypeAdapter(
    StrictBool | Annotated[float, Field(allow_inf_nan=False)]
)


_ROLLED_OUT: Final = ("prompt", "completion", "completion_ids")


def label_of(record: Record, where: str) -> bool:
    """Whether a record's answer is a good one, by its key `label` (TRL) or `kto_tag` (LlamaFactory); HP602 without."""
    found = [record[key] for key in _LABELS if record.get(key) is not None]
    try:
        return _LABEL.validate_python(found[0] if found else None)
    except ValidationError as error:
        raise NoData(
            "a record does not say whether its answer is good",
            where=where,
            got=f"{found[0]!r:.60}" if found else sorted(record),
            allowed=f"true or false under {' or '.join(_LABELS)}",
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


def columns_of(record: Record) -> dict[str, Any]:
    """Keys of a record that rewards may read: all but those whose place rollouts take, as in TRL."""
    return {str(k): v for k, v in record.items() if k not in _ROLLED_OUT}

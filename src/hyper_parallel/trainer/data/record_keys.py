"""Keys of records: names of the same thing, keys without influence on the text, and the refusal of all others.

Every key of a record, of a turn and of a tool call has a meaning, is passed over and counted, or is refused. A key that
a recipe names in `data.ignore_keys` is passed over at every depth.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from hyper_parallel.config import Data
from hyper_parallel.errors import NoData, abbreviated
from hyper_parallel.trainer.data.counts import DataCounts

Record = Mapping[str, Any]

PROMPTS: Final = ("prompt", "question", "query", "problem", "instruction", "input")
"""Keys of a question, the first that is there comes first."""
ANSWERS: Final = ("completion", "response", "answer", "output", "solution")
"""Keys of the answer to it."""
TURNS: Final = ("conversations", "messages")
SYSTEMS: Final = ("system", "system_prompt", "system_message")
TOOLS: Final = ("tools", "functions")
LABELS: Final = ("label", "kto_tag")
_OF_STAGES: Final = {"label": "kto", "kto_tag": "kto", "margin": "rm"}

_NAMES: Final = """
    __index_level_0__ _id id ids idx index uid uuid guid hash row row_id record_id sample_id example_id item_id doc_id
    prompt_id question_id conversation_id conversation_hash conv_id dialog_id dialogue_id message_id turn_id parent_id
    thread_id session_id user_id request_id
    source sources dataset dataset_name data_source subset split origin url urls link license author authors annotator
    annotators contributor generator model model_name model_id chosen_model rejected_model engine version revision
    category categories subcategory topic topics domain subject task task_type task_name task_id type tag tags keywords
    difficulty score scores score_chosen score_rejected chosen_score rejected_score chosen_rating rejected_rating
    rating ratings quality reward rank votes upvotes likes toxic toxicity redacted
    language languages lang locale country state
    created created_at created_time updated_at date datetime time timestamp create_time update_time
    num_turns num_tokens n_tokens token_count tokens_count length len
    meta metadata annotations
    """
WITHOUT_INFLUENCE: Final = frozenset(_NAMES.split())
"""Keys of records and turns that data sets have for their own sake: they are passed over, and counted."""
_MEDIA: Final = frozenset(
    (
        "image", "images", "image_url", "image_urls", "image_path", "image_paths", "audio", "audios", "audio_path",
        "video", "videos", "video_path", "pixel_values",
    )
)  # fmt: skip
_PLACEHOLDERS: Final = (
    "<image>", "<img>", "<video>", "<audio>", "<|image|>", "<|video|>", "<|audio|>", "<|image_pad|>",
    "<|vision_start|>", "<start_of_image>", "<image_soft_token>", "<|image_1|>", "[IMG]",
)  # fmt: skip
ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(
        ("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"
    ),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""Roles by the words that data sets use for them."""
_OF_TURNS: Final = ("role", "content")


@dataclass(frozen=True, slots=True)
class RecordRules:
    """How the keys of a recipe's records are read.

    Attributes:
        columns: Our name of a key of records, by the name in the records.
        turn_columns: The same for keys of turns.
        roles: Roles by the words for them.
        ignored: Keys that are passed over.
        media: Columns with images and the like that the reader of the table has left out.
        text_key: `data.text_key`.
        is_table: Records are rows of a table, where a key that is absent is None.
        counts: Counts of what is passed over.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    turn_columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=lambda: ROLES)
    ignored: frozenset[str] = frozenset()
    media: tuple[str, ...] = ()
    text_key: str = "text"
    is_table: bool = False
    counts: DataCounts = field(default_factory=DataCounts)

    @classmethod
    def of(
        cls, data: Data, counts: DataCounts, media: tuple[str, ...] = (), is_table: bool = False
    ) -> RecordRules:
        """Return the rules of section `data` of a recipe."""
        columns = {own: name for name, own in data.columns.items()}
        turns = {own: name for own, name in columns.items() if name in _OF_TURNS}
        columns = {own: name for own, name in columns.items() if name not in _OF_TURNS}
        roles = {**ROLES, **{word: role for role, word in data.roles.items()}}
        ignored = frozenset(data.ignore_keys)
        return cls(columns, turns, roles, ignored, media, data.text_key, is_table, counts)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything about the rules that decides the text of a record and differs from the usual."""
        roles = {word: role for word, role in self.roles.items() if ROLES.get(word) != role}
        values = {
            "columns": {**self.columns, **self.turn_columns},
            "roles": roles,
            "ignored": sorted(self.ignored),
        }
        return {key: value for key, value in values.items() if value}

    def named(self, record: Record, columns: Mapping[str, str], where: str) -> dict[str, Any]:
        """Return the values of a record or a turn by our names, without absent ones and those that are passed over.

        Raises:
            NoData: HP602 for two keys that are given the same name.
        """
        if not columns and not self.ignored:
            return {key: value for key, value in record.items() if value is not None}
        values: dict[str, Any] = {}
        for key, value in record.items():
            if key in self.ignored:
                self.counts.ignored_keys[key] += value is not None
                continue
            name = columns.get(key, key)
            if value is None:
                continue
            if name in values and values[name] != value:
                raise self.contradiction([key, name], where)
            values[name] = value
        return values

    def one_of(self, values: Mapping[str, Any], keys: Iterable[str], where: str) -> Any:
        """Return the value under keys that mean the same, None without one.

        Raises:
            NoData: HP602 for values that differ.
        """
        present = [key for key in keys if not is_empty(values.get(key))]
        if len(present) > 1 and any(values[key] != values[present[0]] for key in present):
            raise self.contradiction(present, where)
        if present:
            return values[present[0]]
        return next((values[key] for key in keys if key in values), None)

    def contradiction(self, keys: Collection[str], where: str) -> NoData:
        """Return the refusal of keys that mean the same and have different values."""
        first, *others = keys
        return NoData(
            f"`{first}` and `{'`, `'.join(others)}` of a record say the same thing differently",
            where=where,
            got=sorted(keys),
            allowed="one of these keys, or equal values",
            hint=self.ignore_hint(others),
        )

    def ignore_hint(self, keys: Iterable[str]) -> str:
        """Return the override that passes over further keys."""
        return ignore_hint({*self.ignored, *keys})

    def refuse_unknown(self, values: Record, known: Collection[str], what: str, where: str) -> None:
        """Refuse keys that are not known, unless they are empty or have no influence on the text.

        Raises:
            NoData: HP602 with the first such key; the hint names all of the record.
        """
        unknown = []
        for key, value in values.items():
            if key in known or is_empty(value):
                continue
            if key in _MEDIA:
                raise self._unsupported_media(key, where)
            if key in _OF_STAGES:
                raise self._of_another_stage(key, value, where)
            if key in WITHOUT_INFLUENCE:
                self.counts.ignored_keys[key] += 1
            else:
                unknown.append(key)
        if unknown:
            raise NoData(
                f"the key `{unknown[0]}` has no known meaning in {what}",
                where=where,
                got=f"{unknown[0]}: {abbreviated(values[unknown[0]])}",
                allowed=sorted(known),
                hint=self.ignore_hint(unknown),
            )

    def _of_another_stage(self, key: str, value: Any, where: str) -> NoData:
        return NoData(
            f"`{key}` of a record is read with `stage: {_OF_STAGES[key]}`, and means something else otherwise",
            where=where,
            got=f"{key}: {abbreviated(value)}",
            allowed=f"stage={_OF_STAGES[key]}, or records without this key",
            hint=self.ignore_hint([key]),
        )

    def refuse_media(self, record: Record, texts: Iterable[str], where: str) -> None:
        """Refuse placeholders of images and the like in texts, which would be trained on as letters.

        Raises:
            NoData: HP602 where the record, or the table, has a column for them.
        """
        media = [key for key in (*self.media, *record) if key in _MEDIA or key in self.media]
        media = [key for key in media if key in self.media or not is_empty(record.get(key))]
        if not media:
            return
        for text in texts:
            if (mark := next((mark for mark in _PLACEHOLDERS if mark in text), None)) is not None:
                raise NoData(
                    f"`{mark}` stands for a value of `{media[0]}`, and images, sounds and videos are not supported",
                    where=where,
                    got=abbreviated(text),
                    allowed="conversations of texts",
                )
        if media[0] not in self.ignored:
            raise self._unsupported_media(media[0], where)

    def _unsupported_media(self, key: str, where: str) -> NoData:
        return NoData(
            f"`{key}` of a record is not supported: conversations are texts, without images, sounds and videos",
            where=where,
            got=key,
            allowed="texts",
            hint=self.ignore_hint([key]),
        )


def is_empty(value: Any) -> bool:
    """Return whether a value says nothing: absent, or a text, list or object without members."""
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


def ignore_hint(keys: Iterable[str]) -> str:
    """Return the override that passes over keys."""
    quoted = (key if key.isidentifier() else f"'{key}'" for key in sorted(keys))
    override = f"data.ignore_keys=[{','.join(quoted)}]"
    return override if all(key.isidentifier() for key in keys) else shlex.quote(override)

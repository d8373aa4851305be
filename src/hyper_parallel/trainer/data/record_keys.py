"""Keys of records: synonyms, ignored keys, errors for unknown keys, and readers of labels, margins and columns.

A key of a record, turn or tool call either has a meaning, or is ignored and counted, or raises an error. Empty values
are ignored. Keys in `data.ignore_keys` are ignored in records, turns and tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, TypeAdapter, ValidationError

from hyper_parallel.config import Data
from hyper_parallel.errors import NoData, abbreviated
from hyper_parallel.trainer.data.counts import DataCounts
from hyper_parallel.trainer.data.media_kinds import KINDS, MediaKind

Record = Mapping[str, Any]

PROMPTS: Final = ("prompt", "question", "query", "problem", "instruction", "input")
"""Keys of a question, in order of preference."""
ANSWERS: Final = ("completion", "response", "answer", "output", "solution")
"""Keys of the answer to a question."""
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
"""Metadata keys of records and turns: they do not affect the text, so they are ignored and counted."""
_MEDIA: Final = frozenset(
    (
        "image", "images", "image_url", "image_urls", "image_path", "image_paths", "audio", "audios", "audio_path",
        "audio_paths", "video", "videos", "video_path", "pixel_values",
    )
)  # fmt: skip
_SUPPORTED: Final = (
    "texts; images and audio if stage=sft, data.streaming=false and the directory of the tokenizer has their "
    "preprocessor_config.json or processor_config.json"
)
_PLACEHOLDERS: Final = (
    "<image>", "<img>", "<video>", "<audio>", "<|image|>", "<|video|>", "<|audio|>", "<|image_pad|>",
    "<|vision_start|>", "<start_of_image>", "<image_soft_token>", "<|image_1|>", "[IMG]",
)  # fmt: skip
ROLES: Final[Mapping[str, str]] = {
    "system": "system",
    "developer": "developer",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
"""Dict from role name in datasets to canonical role."""
_OF_TURNS: Final = ("role", "content")
_INNER_KEYS: Final = (
    "role", "from", "content", "value", "name", "function", "arguments", "tool_calls", "function_call",
)  # fmt: skip
"""Keys that turns and tool calls need; a record must not ignore them."""
_OUTER_KEYS: Final = (*PROMPTS, *ANSWERS, *TURNS, *SYSTEMS, *TOOLS, "chosen", "rejected")
"""Keys that records need; turns and tool calls must not ignore them."""


@dataclass(frozen=True, slots=True)
class RecordRules:
    """Settings of a recipe for reading the keys of records.

    A canonical key is the name that this package uses, such as `prompt`; `data.columns` maps it to a dataset's name.

    Attributes:
        columns: Dict from renamed key in the records to canonical key.
        turn_columns: Dict from renamed key in the turns to canonical key.
        roles: Dict from role name in the records to canonical role.
        ignored: Keys of records, turns and tool calls that are ignored.
        media: Names of columns that the table reader has removed, because they hold images, audio or files.
        is_table: Whether records are rows of a table, which has None for absent keys.
        media_root: Folder of the files of images and recordings. None: records must not have media, and references in
            prompts for generation may name any file.
        media_kinds: Kinds of media that the model's processor reads.
        skips_media: Whether records with unreadable media are dropped; False: they raise an error.
        counts: Counts of the source; reading adds ignored keys to them.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    turn_columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=lambda: ROLES)
    ignored: frozenset[str] = frozenset()
    media: tuple[str, ...] = ()
    is_table: bool = False
    counts: DataCounts = field(default_factory=DataCounts)
    media_root: Path | None = None
    media_kinds: tuple[MediaKind, ...] = ()
    skips_media: bool = False

    @classmethod
    def of_section(
        cls,
        data: Data,
        counts: DataCounts,
        is_table: bool = False,
        media_root: Path | None = None,
        media_kinds: tuple[str, ...] = (),
    ) -> RecordRules:
        """Return the rules of section `data` of a recipe, with an empty `media`.

        The other arguments set the attributes of the same names. Without `media_root`, `media_kinds` is ignored.
        """
        columns = {own: name for name, own in data.columns.items()}
        turns = {own: name for own, name in columns.items() if name in _OF_TURNS}
        columns = {own: name for own, name in columns.items() if name not in _OF_TURNS}
        roles = {**ROLES, **{word: role for role, word in data.roles.items()}}
        ignored = frozenset(data.ignore_keys)
        kinds = tuple(KINDS[name] for name in media_kinds if media_root is not None)
        read = media_root, kinds, bool(kinds) and data.bad_media == "skip"
        return cls(columns, turns, roles, ignored, (), is_table, counts, *read)

    @property
    def media_columns(self) -> frozenset[str]:
        """Names of the record columns that refer to media of supported kinds."""
        return frozenset(column for kind in self.media_kinds for column in kind.columns)

    @property
    def identity(self) -> dict[str, Any]:
        """Non-default settings that affect the text of a record, for cache keys."""
        roles = {word: role for word, role in self.roles.items() if ROLES.get(word) != role}
        values = {
            "columns": {**self.columns, **self.turn_columns},
            "roles": roles,
            "ignored": sorted(self.ignored),
            "media_root": str(self.media_root or ""),
            "skips_media": self.skips_media,
        }
        return {key: value for key, value in values.items() if value}

    def canonical_values(self, record: Record, columns: Mapping[str, str], where: str) -> dict[str, Any]:
        """Return the values of a record or turn by canonical key, without null values and ignored keys.

        `columns` maps renamed keys to canonical keys. Ignored keys whose value is not null are counted.

        Raises:
            NoData: HP602 for different values of two keys with the same canonical key.
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
                earlier = (k for k in record if k != key and k not in self.ignored and record[k] is not None)
                other = next(k for k in earlier if columns.get(k, k) == name)
                keys = [key, other] if other == name else [other, key]  # ignore the key that is not renamed
                raise self._contradiction(keys, where)
            values[name] = value
        return values

    def one_of(self, values: Mapping[str, Any], keys: Iterable[str], where: str) -> Any:
        """Return the first nonempty value under the synonymous `keys`, else an empty one; None without any of the keys.

        Raises:
            NoData: HP602 for synonymous keys with different values.
        """
        present = [key for key in keys if not is_empty(values.get(key))]
        if len(present) > 1 and any(values[key] != values[present[0]] for key in present):
            turns = {name: own for own, name in self.turn_columns.items()}  # keys of turns only
            raise self._contradiction([turns.get(key, self.own_name(key)) for key in present], where)
        if present:
            return values[present[0]]
        return next((values[key] for key in keys if key in values), None)

    def _contradiction(self, keys: Collection[str], where: str) -> NoData:
        first, *rest = keys
        return NoData(
            f"the keys `{first}` and `{'`, `'.join(rest)}` mean the same but have different values",
            where=where,
            got=sorted(keys),
            allowed="one of these keys, or equal values",
            changes=self.ignoring(rest),
        )

    def own_name(self, key: str) -> str:
        """Return the name of a canonical key in the records."""
        return next((own for own, name in self.columns.items() if name == key), key)

    def ignoring(self, keys: Iterable[str]) -> dict[str, object]:
        """Return the recipe change that ignores `keys` of the records, in addition to the ignored keys."""
        return {"data.ignore_keys": f"[{','.join(map(as_value, sorted({*self.ignored, *keys})))}]"}

    def refuse_unknown(self, values: Record, known: Collection[str], item: str, where: str) -> None:
        """Raise if `values` has a nonempty value under a key that is neither known, ignored nor metadata.

        `item` is the kind of object, such as "a turn". Ignored and metadata keys are counted as ignored.

        Raises:
            NoData: HP602 naming an unknown key, a media key, or a key of another stage.
        """
        unknown = []
        for key, value in values.items():
            if key in known or is_empty(value):
                continue
            if key in self.ignored:
                self.counts.ignored_keys[key] += 1
                continue
            if key in _MEDIA:
                raise self._unsupported_media(key, item, where)
            if key in _OF_STAGES and item.startswith("a record"):
                own = self.own_name(key)
                raise NoData(
                    f"the key `{own}` is used only by stage {_OF_STAGES[key]}",
                    where=where,
                    got=f"{own}: {abbreviated(value)}",
                    allowed=f"stage={_OF_STAGES[key]}, or records without this key",
                    changes=self.ignoring([own]),
                )
            if key in WITHOUT_INFLUENCE:
                self.counts.ignored_keys[key] += 1
            else:
                unknown.append(key)
        if unknown:
            own = self.own_name(unknown[0])
            raise NoData(
                f"the key `{own}` has no known meaning in {item}",
                where=where,
                got=f"{own}: {abbreviated(values[unknown[0]])}",
                allowed=sorted(known),
                hint="remove or rename this key, because `data.ignore_keys` would also ignore it elsewhere in a record"
                if any(key in (_INNER_KEYS if item.startswith("a record") else _OUTER_KEYS) for key in unknown)
                else self.ignoring(map(self.own_name, unknown)),
            )

    def refuse_media(self, record: Record, texts: Iterable[str], where: str) -> None:
        """Raise for a record with a column of media of an unsupported kind.

        A column in `data.ignore_keys` is accepted if no text has a placeholder, such as `<video>`, because placeholders
        would be trained on as plain text.

        Raises:
            NoData: HP602 naming the placeholder or the column.
        """
        media = [key for key in (*self.media, *record) if key in _MEDIA or key in self.media]
        media = [key for key in media if key not in self.media_columns]
        media = [key for key in media if key in self.media or not is_empty(record.get(key))]
        if not media:
            return
        for text in texts:
            if (mark := next((mark for mark in _PLACEHOLDERS if mark in text), None)) is not None:
                raise NoData(
                    f"the placeholder `{mark}` refers to the media column `{media[0]}`, which is not supported",
                    where=where,
                    got=abbreviated(text),
                    allowed=_SUPPORTED,
                )
        if (key := next((key for key in media if key not in self.ignored), None)) is not None:
            raise self._unsupported_media(key, "a record", where)

    def _unsupported_media(self, key: str, item: str, where: str) -> NoData:
        return NoData(
            f"the media key `{key}` of {item} is not supported",
            where=where,
            got=key,
            allowed=_SUPPORTED,
            changes=self.ignoring([key]),
        )


def as_value(text: str) -> str:
    """Return a text as a YAML scalar, quoted if YAML would not read the plain text as a string."""
    is_plain = re.fullmatch(r"[^\W\d][\w.-]*", text) is not None
    is_word = text.lower() not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
    return text if is_plain and is_word else json.dumps(text, ensure_ascii=False)


def is_empty(value: Any) -> bool:
    """Return whether a value is None, or an empty text, list or object."""
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


_LABEL: Final = TypeAdapter(bool)
_MARGIN: Final = TypeAdapter(Annotated[float, Field(allow_inf_nan=False)])
_ROLLED_OUT: Final = ("prompt", "completion", "completion_ids")


def label_of(record: Record, where: str) -> bool:
    """Return the label under the key `label` (TRL) or `kto_tag` (LlamaFactory): True for a desirable answer.

    Raises:
        NoData: HP602 when there is no Boolean label.
    """
    labels = [record[key] for key in LABELS if record.get(key) is not None]
    flags = [key for key, value in record.items() if isinstance(value, bool)]
    try:
        return _LABEL.validate_python(labels[0] if labels else None)
    except ValidationError as error:
        raise NoData(
            "the label of a record is neither true nor false"
            if labels
            else "a record has no label that says whether its answer is desirable",
            where=where,
            got=f"{labels[0]!r:.60}" if labels else sorted(record),
            allowed=f"true or false under {' or '.join(LABELS)}",
            hint=None
            if labels
            else {"data.columns.label": as_value(str(flags[0]))}
            if len(flags) == 1
            else "name the key of the label: data.columns.label=KEY",
        ) from error


def margin_of(record: Record, where: str) -> float | None:
    """Return the target margin between the scores of a pair, under the key `margin` as in TRL; None without margin.

    Raises:
        NoData: HP602 when the value is not a finite number.
    """
    value = record.get("margin")
    if value is None:
        return None
    if not isinstance(value, bool):
        with suppress(ValidationError):
            return _MARGIN.validate_python(value)
    raise NoData(
        "the margin of a pair is not a finite number",
        where=where,
        got=f"margin: {value!r:.60}",
        allowed="a finite number under `margin` in every record, or in none",
    )


def columns_of(record: Record, rules: RecordRules) -> dict[str, Any]:
    """Return the values that reward functions may read, by canonical key.

    Excluded are ignored keys, and `prompt`, `completion` and `completion_ids`, which the rollout provides.
    """
    named = ((rules.columns.get(key, key), value) for key, value in record.items())
    return {str(k): v for k, v in named if k not in _ROLLED_OUT and k not in rules.ignored}

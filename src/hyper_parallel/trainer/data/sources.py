"""Data sources of a recipe: their files, their format, and their documents in a fixed order.

A document is a text or a conversation. Files are read in the order of their relative paths, records in file order, so
the same files produce the same tokens on every machine.
"""

from __future__ import annotations

import codecs
import difflib
import itertools
import re
import shlex
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from hyper_parallel.config import PREFERENCE_STAGES, Data
from hyper_parallel.errors import Contradiction, HyperParallelError, NoData, reported_by
from hyper_parallel.near_paths import nearest_path
from hyper_parallel.trainer.data._tables import (
    Table,
    is_table,
    open_table,
    records_too_long,
    refuse_outside,
)
from hyper_parallel.trainer.data.conversations import (
    CONVERSATIONS,
    check_flags,
    conversations_of,
    is_text_pair,
    num_context,
    shape_of,
)
from hyper_parallel.trainer.data.counts import BAD_MEDIA, EMPTY_ANSWERS, EMPTY_RECORD, DataCounts
from hyper_parallel.trainer.data.data_files import (
    KINDS,
    describes,
    json_record,
    kind_of,
    open_bytes,
    refuse_other_target,
    refuse_splits,
    refuse_unread,
    several_paths,
)
from hyper_parallel.trainer.data.document import BadMedia, Conversation, Document, has_content
from hyper_parallel.trainer.data.record_keys import (
    Record,
    RecordRules,
    as_value,
    columns_of,
    label_of,
    margin_of,
)
from hyper_parallel.trainer.data.records import read_records, text_of, unreadable_file
from hyper_parallel.trainer.data.source_errors import MAIN, SourceKey
from hyper_parallel.trainer.data.source_errors import VALIDATION as VALIDATION

STDLIB = "python-stdlib"
PlainText = Literal["never", "pairs", "all"]
"""Conversations that are concatenated without a chat template.

`never`: none. `pairs`: records that have only texts under `prompt` and `completion`, or under `prompt`, `chosen` and
`rejected`. `all`: pairs of texts under any known keys; other conversations are refused.
"""
_TEMPLATED: Final = "pairs of texts written through the chat template (data.chat_template=none: as plain text)"
_SPECIAL: Final = "conversations whose texts contain special tokens of the tokenizer, which become these tokens"
_WORDLESS: Final = "conversations with empty answers, which are not trained on"
_JOINED: Final = "pairs of texts joined as plain text, without a chat template"
_CUTS: Final = "cuts in text files longer than data.max_record_bytes"
_REPLACED: Final = "files with bytes that are not UTF-8 (replaced by U+FFFD)"
_STDLIB_SKIP = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__"})
_OPTIONAL_COLUMNS: Final = (
    "system", "history", "tools", "input", "label", "margin", "answer", "images", "audio",
)  # fmt: skip
_MOST_FOLDERS: Final = 32
"""Maximum number of folders in the working directory that are searched for a missing source."""
_RECORDS: Final = ("csv", "jsonl", "parquet")
_FORMATS: Final = {
    "text": {"text", *KINDS.values()},
    "jsonl": {"json"},
    "parquet": {"parquet"},
    "csv": {"csv"},
    **{shape: set(KINDS.values()) for shape in CONVERSATIONS},
}
"""Kinds of files that each `data.format` reads."""


@dataclass(frozen=True, slots=True)
class Source:
    """Data source of a recipe.

    Attributes:
        data: Section `data` of the recipe, with one source.
        stage: Stage of the recipe.
        shape: Format: `text` (a file is a document), `records` (text under a key), or one of `CONVERSATIONS`.
        files: Files in reading order; empty for a table.
        rules: Rules for reading keys.
        table: Table to read; None: the source has files.
        plain: Conversations that are concatenated without a chat template.
        special: Pattern of the tokenizer's special tokens; None: no special tokens.
        key: Recipe key that names the source, for errors.
    """

    data: Data
    stage: str
    shape: str
    files: tuple[Path, ...]
    rules: RecordRules
    table: Table | None = None
    plain: PlainText = "never"
    special: re.Pattern[str] | None = None
    key: SourceKey = field(default_factory=SourceKey)

    @property
    def counts(self) -> DataCounts:
        """Counts of the records that `documents` reads."""
        return self.rules.counts

    def with_own_counts(self) -> Source:
        """Return a copy whose `documents` do not change the counts of this source."""
        return replace(self, rules=replace(self.rules, counts=DataCounts()))

    def head(self, num_bytes: int) -> Source:
        """Return a copy that reads at most `num_bytes` bytes of text."""
        most = min(self.data.max_bytes or num_bytes, num_bytes)
        return replace(self, data=self.data.model_copy(update={"max_bytes": most}))

    @property
    def is_conversations(self) -> bool:
        """True if the records are conversations."""
        return self.shape in CONVERSATIONS

    @property
    def num_bytes(self) -> int:
        """Estimated bytes of text: the size of the files or the table, at most `data.max_bytes`."""
        total = sum(f.stat().st_size for f in self.files) or (self.table.num_bytes if self.table else 0)
        return total if self.data.max_bytes is None else min(total, self.data.max_bytes)

    def identity(self) -> dict[str, object]:
        """Return JSON values that determine the text of the source, for cache keys.

        Files are identified by path, size, mtime and ctime, because `cp -p` and `touch -r` preserve size and mtime.
        """
        data, folder = self.data, Path(self.data.source).expanduser()
        # The fingerprint of a table written by `datasets` does not change when its files are replaced.
        files = _sorted_files(folder) if self.table and folder.is_dir() else self.files
        stats = [(str(f), f.stat()) for f in files]
        in_pieces = self.shape == "text" and any(s.st_size > data.max_record_bytes for _, s in stats)
        return {
            "shape": self.shape,
            "text_key": data.text_key if self.shape == "records" else "",
            "max_bytes": data.max_bytes,
            **({"max_records": data.max_records} if data.max_records else {}),
            **self.rules.identity,
            **({"record_bytes": data.max_record_bytes} if in_pieces else {}),
            "files": [[n, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for n, s in stats],
            **({"table": [self.table.name, self.table.fingerprint]} if self.table else {}),
        }

    def documents(self) -> Iterator[Document]:
        """Yield documents in order, up to `data.max_records` records (not text files) and `data.max_bytes` bytes.

        The last text may be truncated, conversations are not. Empty records are dropped, and so are records with only
        empty answers (except in stages `pt` and `grpo`), and with `data.bad_media: skip` records with unreadable media.
        The counts of the source restart from zero.

        Raises:
            NoData: HP602 naming a file that is unreadable, or a record that is invalid or too long.
            MissingDependency: HP501 when a package that reads the records is not installed.
        """
        with reported_by(self.key):
            yield from self._documents()

    def _documents(self) -> Iterator[Document]:
        self.counts.clear()
        left, most = self.data.max_bytes, self.data.max_record_bytes
        unread = _descriptions(Path(self.data.source).expanduser(), self.files)
        if unread:
            names = ", ".join(sorted({path.name for path in unread}))
            self.counts.remarks[f"files that describe the data are skipped ({names})"] = len(unread)
        for documents in self._all_documents():
            self.counts.read += 1
            sizes = [document.num_bytes for document in documents]
            if max(sizes) > most:
                raise records_too_long(documents[0].where, f"{max(sizes):,} bytes", most, max(sizes))
            # Drop both documents of a pair if one is empty.
            if 0 in sizes and any(document.is_empty for document in documents):
                self.counts.dropped[EMPTY_RECORD] += self.shape != "text"
                continue
            if self.stage not in ("pt", "grpo") and any(map(_has_empty_answers, documents)):
                self.counts.dropped[EMPTY_ANSWERS] += 1
                continue
            if left is not None and sum(sizes) > left:
                if documents[0].text and left:
                    cut = documents[0].text.encode("utf-8", "surrogatepass")[:left]
                    yield Document(documents[0].where, cut.decode("utf-8", "ignore"))
                return
            yield from documents
            left = None if left is None else left - sum(sizes)

    def _all_documents(self) -> Iterator[list[Document]]:
        if self.shape == "text":
            for path in self.files:
                yield from ([document] for document in self._text_documents(path))
            return
        records = _records(self.files, self.table, self.data.max_record_bytes)
        for number, (where, record) in enumerate(itertools.islice(records, self.data.max_records)):
            if self.shape == "records":
                yield [Document(where, text_of(record, self.data.text_key, where, later=number > 0))]
                continue
            try:
                documents = self._conversations(where, record)
            except BadMedia:
                if not self.rules.skips_media:
                    raise
                self.counts.read += 1
                self.counts.dropped[BAD_MEDIA] += 1
                continue
            yield documents

    def _conversations(self, where: str, record: Record) -> list[Document]:
        stage = self.stage
        templated = self._is_templated(where, record)
        detected = self.data.format == "auto"
        named = {self.rules.columns.get(key, key): value for key, value in record.items()}
        # Before unknown keys are refused: one of them may hold the label.
        good = stage == "kto" and label_of(named, where)
        conversations = conversations_of(record, self.shape, where, stage, self.rules, detected=detected)
        if stage != "pt":
            conversations = [self._without_empty(one, record, where) for one in conversations]
        turns = (turn for one in conversations for turn in one.messages)
        if self.special and any(self.special.search(turn.get("content") or "") for turn in turns):
            self.counts.remarks[_SPECIAL] += 1
        return [
            Document(
                where,
                conversation=one,
                num_context=num_context(one, stage),
                good=good,
                margin=margin_of(named, where) if stage == "rm" else None,
                columns=columns_of(record, self.rules) if stage == "grpo" else {},
                templated=templated,
            )
            for one in conversations
        ]

    def _without_empty(self, one: Conversation, record: Record, where: str) -> Conversation:
        """Exclude empty answers from training, unless all are empty: they would teach the model to stop immediately."""
        count = num_context(one, self.stage)
        check_flags(one, count, record, where, self.rules)
        answers = one.answer_turns(count)
        empty = [i for i in answers if not has_content(one.messages[i])]
        if self.stage == "grpo" or not 0 < len(empty) < len(answers):
            return one
        self.counts.remarks[_WORDLESS] += 1
        return replace(one, untrained=one.untrained | {*empty})

    def _is_templated(self, where: str, record: Record) -> bool:
        """Return whether the chat template renders a record, or its texts are joined; raise HP602 if they cannot be."""
        if self.plain == "never" and self.shape in ("sharegpt", "alpaca"):
            return True
        pair = is_text_pair(record, self.shape, self.rules, any_name=self.plain == "all")
        if self.plain == "never" or (self.plain == "pairs" and not pair):
            self.counts.remarks[_TEMPLATED] += pair
            return True
        if not pair:
            other = "an instruction" if self.shape == "alpaca" else "turns, tools or a system text"
            raise NoData(
                f"`data.chat_template: none` joins pairs of texts, but a record has {other}",
                where=where,
                got=sorted(map(str, record)),
                allowed="a prompt and a completion, both texts",
                changes={"data.chat_template": "auto"},
            )
        self.counts.remarks[_JOINED] += 1
        return False

    def _text_documents(self, path: Path) -> Iterator[Document]:
        """Yield the text of a file as one document, or in pieces of at most `data.max_record_bytes` bytes.

        Skip a binary file, or raise NoData (HP602) if it is the only file.
        """
        has_replaced = False
        try:
            for number, raw in enumerate(_pieces(path, self.data.max_record_bytes)):
                if number == 0 and b"\0" in raw[:8192]:
                    if len(self.files) == 1:
                        raise NoData(
                            "the data file contains NUL bytes, so it is binary and not text in UTF-8",
                            where=str(path),
                            allowed=f"text, {', '.join(KINDS)}",
                            hint="name another file, or convert UTF-16 text: iconv -f utf-16 -t utf-8 FILE > NEW_FILE",
                        )
                    self.counts.remarks["binary files left out"] += 1
                    return
                text = raw.decode("utf-8", "replace")
                self.counts.remarks[_CUTS] += number > 0
                if not has_replaced and "\ufffd" in text and "\ufffd".encode() not in raw:
                    self.counts.remarks[_REPLACED] += 1
                    has_replaced = True
                yield Document(str(path), text)
        except OSError as error:
            raise unreadable_file(path, error) from error


def _pieces(path: Path, most: int) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces of at most `most` bytes that end at a line end or a character boundary."""
    with open_bytes(path) as file:
        rest = b""
        while True:
            piece = rest + file.read(most - len(rest))
            if len(piece) < most:
                yield piece
                return
            end = piece.rfind(b"\n") + 1
            if not end:  # exclude an incomplete character at the end of the piece
                end = codecs.utf_8_decode(piece, "replace", False)[1] or len(piece)
            rest = piece[end:]
            yield piece[:end]


def resolve(data: Data, stage: str, *, media: tuple[str, ...] = (), key: str = MAIN) -> Source:
    """Return the data source of section `data`: find its files or table, and their format.

    Args:
        data: Section `data` with one source.
        stage: Stage of the recipe.
        media: Media kinds (`image`, `audio`) of the model's processor; only `stage: sft` without streaming reads them.
        key: Recipe key that names the source, for errors.

    Raises:
        NoData: HP602 when there are no files to read, or their format is not recognized.
        Contradiction: HP104 when source, format and stage contradict each other.
        MissingDependency: HP501 when a package that reads the source is not installed.
    """
    with reported_by(SourceKey(key)):
        return replace(_resolve(data, stage, media), key=SourceKey(key))


def _resolve(data: Data, stage: str, media: tuple[str, ...]) -> Source:
    if data.source == STDLIB and data.format not in ("auto", "text"):
        raise Contradiction(
            f"`data.source: {STDLIB}` is text",
            where="data.format",
            got=f"data.format={data.format}",
            changes={"data.format": "text"},
        )
    path = Path(data.source).expanduser()
    table = open_table(data, path) if data.source != STDLIB and is_table(data, path) else None
    for key, value in (("name", data.name), ("split", data.split)):
        if value is not None and table is None:
            raise Contradiction(
                f"`data.{key}` selects a part of a dataset, but the source is not a dataset",
                where=f"data.source: {data.source}",
                got=f"data.{key}={value}",
                allowed="a folder with a dataset, or a name on the Hugging Face hub",
                changes={f"data.{k}": None for k in ("name", "split") if getattr(data, k) is not None},
            )
    files = _files(data, stage) if table is None else []
    by_document = stage == "pt" and (data.masks(stage) or not data.packing)
    counts = DataCounts(data.source, seq_len=data.seq_len, by_document=by_document)
    has_rows = table is not None or kind_of(files[0]) == "parquet"
    read = media if stage == "sft" and not data.streaming else ()
    root = _media_root(data, path) if read else None
    rules = RecordRules.of_section(data, counts, has_rows, root, read)
    if table is not None:
        table = replace(table, media_columns=rules.media_columns)
        rules = replace(rules, media=table.opened)
    counts.format = shape = _shape(files, table, data, stage, rules)
    counts.clear()
    source = Source(data, stage, shape, tuple(files), rules, table)
    _check_stage(source)
    return source


def _media_root(data: Data, path: Path) -> Path:
    if data.media_dir is None:
        return (path if path.is_dir() else path.parent).absolute()
    folder = Path(data.media_dir).expanduser().absolute()
    if not folder.is_dir():
        problem = "the folder of the media does not exist, or is a file"
        raise NoData(problem, where="data.media_dir", got=str(folder), changes={"data.media_dir": None})
    return folder


def _check_stage(source: Source) -> None:
    stage, pairs = source.stage, source.shape == "preference"
    wants_pairs, wants_turns = stage in ("dpo", "orpo", "rm"), stage in ("sft", "kto", "grpo")
    if wants_pairs != pairs or (wants_turns and not source.is_conversations):
        allowed = "preference" if wants_pairs else "any format except preference"
        wanted = {"sft": "the assistant's turns", **PREFERENCE_STAGES}.get(stage, "single texts")
        kind = "pairs" if pairs else "conversations" if source.is_conversations else "plain text"
        raise Contradiction(
            f"`stage: {stage}` trains on {wanted}, but the source holds {kind}",
            where=f"data.source: {source.data.source}",
            got=f"stage={stage}, records={source.shape}",
            allowed="sharegpt, alpaca, prompt_completion" if wants_turns else allowed,
            changes={"stage": "dpo" if pairs else "sft" if source.is_conversations else "pt"},
        )


def _has_empty_answers(document: Document) -> bool:
    one = document.conversation or Conversation(())
    answers = one.answer_turns(document.num_context)
    return bool(answers) and not any(has_content(one.messages[i]) for i in answers)


def with_mismatched(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield each conversation, followed by its prompt with the answer of the previous conversation (for KTO).

    For the first conversation, this second document comes at the very end, with the answer of the last conversation.

    Raises:
        NoData: HP602 when there is only one conversation, or a conversation does not end with an answer.
    """
    first = before = None
    for document in documents:
        if document.conversation is None or document.conversation.messages[-1]["role"] != "assistant":
            raise NoData(
                "a conversation with a label must end with an answer",
                where=document.where,
                hint="end the conversation with a turn of the assistant",
            )
        yield document
        if before is not None:
            yield _with_answer_of(document, before)
        first, before = first or document, document
    if first is not None and before is not None:
        if first is before:
            raise NoData(
                "`stage: kto` compares answers of different records, but there is only one record",
                where=first.where,
                hint="use at least two records",
            )
        yield _with_answer_of(first, before)


def _with_answer_of(one: Document, other: Document) -> Document:
    if one.conversation is None or other.conversation is None:
        raise TypeError("a text has no answer")
    prompt = one.conversation.messages[: one.num_context]
    answer = other.conversation.messages[other.num_context :]
    shift = len(prompt) - other.num_context
    untrained = {i for i in one.conversation.untrained if i < len(prompt)}
    untrained |= {i + shift for i in other.conversation.untrained if i >= other.num_context}
    messages = (*prompt, *answer)
    mixed = replace(one.conversation, messages=messages, untrained=frozenset(untrained))
    return replace(one, conversation=mixed)


def _descriptions(folder: Path, files: Sequence[Path]) -> list[Path]:
    """Return the README-like files of a folder with records; [] for a folder of texts."""
    if not files or kind_of(files[0]) == "text" or not folder.is_dir():
        return []
    return [path for path in _sorted_files(folder) if describes(path)]


def _records(files: Sequence[Path], table: Table | None, most: int) -> Iterator[tuple[str, Record]]:
    if table is not None:
        return table.records(most)
    return itertools.chain.from_iterable(read_records(file, most) for file in files)


def refuse_missing(data: Data, stage: str, key: str, folders: Sequence[Path] = ()) -> None:
    """Raise if the path of a source does not exist; the hint names a similar path, preferably one that can be read.

    Args:
        data: Section `data` with one source.
        stage: Stage of the recipe.
        key: Recipe key of the source, for location and hint; "" for one source of several.
        folders: Additional folders to search, such as that of the recipe.

    Raises:
        NoData: HP602 naming the path.
    """
    path = Path(data.source).expanduser()
    if data.source == STDLIB or path.exists():
        return

    def fits(other: Path) -> bool:
        if not other.exists():  # a broken link
            return False
        try:
            resolve(data.model_copy(update={"source": str(other)}), stage)
        except HyperParallelError:
            return False
        return True

    several = several_paths(data.source)
    below = sorted(p for p in Path().iterdir() if p.is_dir() and not p.name.startswith("."))
    near = None
    if not several:
        near = nearest_path(data.source, [*below[:_MOST_FOLDERS], *folders], fits)
        near = near or nearest_path(data.source, fits=Path.exists)
    hint: str | dict[str, object] | None = f"ls {shlex.quote(str(path.parent))}" if path.parent.is_dir() else None
    if several and key == "data.source":  # `data.validation` is one source
        hint = {key: several}
    if near is not None:
        hint = {key: near} if key else f"write `{near}`"
    raise NoData(
        "the data source does not exist",
        where=f"{key or 'data.source'}: {data.source}",
        got=str(path.absolute()),
        allowed=f"{STDLIB}, a file, a directory, or a name on the Hugging Face hub (user/name)",
        hint=hint,
    )


def _files(data: Data, stage: str) -> list[Path]:
    """Return the files of a source in reading order; raise NoData (HP602) if no file has data that can be read."""
    where = f"data.source: {data.source}"
    if data.source == STDLIB:
        path = Path(sysconfig.get_path("stdlib"))
        below = _sorted_files(path, "*.py")
        files = [f for f in below if not _STDLIB_SKIP & set(f.relative_to(path).parts)]
    else:
        path = Path(data.source).expanduser()
        refuse_missing(data, stage, "data.source")
        path = path.absolute()
        files = [path] if path.is_file() else _sorted_files(path)
    if not files:
        raise NoData(
            "the data directory holds no files",
            where=where,
            got=str(path),
            hint="correct `data.source`, or put data files into the directory",
        )
    if path.is_dir():
        files = _of_one_kind(path, _without_descriptions(files, data.format), data.format, stage)
        refuse_splits(path, files)
    for file in files:
        if file.is_symlink():
            refuse_other_target(file, is_source=path.is_file())
        if kind_of(file) == "text":
            refuse_unread(file)
    if all(f.stat().st_size == 0 for f in files):
        raise NoData(
            "the data source is empty",
            where=where,
            got="0 bytes",
            hint="correct `data.source`, or add records to it",
        )
    return files


def _sorted_files(root: Path, pattern: str = "*") -> list[Path]:
    """Return the visible files below `root` by relative path; raise NoData (HP602) if `refuse_outside` refuses one."""
    paths = {p.relative_to(root): p for p in root.rglob(pattern) if not p.is_dir()}
    visible = (name for name in paths if not any(part.startswith(".") for part in name.parts))
    files = [paths[name] for name in sorted(visible, key=Path.as_posix)]
    for file in files:
        refuse_outside(file, root)
    return files


def _without_descriptions(files: list[Path], format_: str) -> list[Path]:
    """Return `files` without README-like files, or all `files` if the format is `text` or no file has records."""
    if format_ == "text":
        return files
    records = [f for f in files if kind_of(f) != "text" and not describes(f)]
    return [f for f in files if not describes(f)] if records else files


def _of_one_kind(root: Path, files: list[Path], format_: str, stage: str) -> list[Path]:
    """Return the files of the recipe's format; raise NoData (HP602) without one or, with `auto`, for several types."""
    kinds = _FORMATS.get(format_) or {kind_of(f) for f in files}
    suffixes = ", ".join(sorted({"".join(f.suffixes[-2:]) or f.name for f in files}))
    if format_ == "auto" and len(kinds) > 1:
        raise NoData(
            "the data directory contains several file types",
            where=f"data.source: {root}",
            got=suffixes,
            allowed="one of text, JSON, parquet, CSV"
            + ("; or set data.format to select one (text: all files)" if stage == "pt" else ""),
            hint={"data.format": next(f for f in _RECORDS[::-1] if _FORMATS[f] & kinds)}
            if stage == "pt"
            else "name one file in `data.source`, or move the files of other types to another directory",
        )
    chosen = [f for f in files if kind_of(f) in kinds]
    if not chosen:
        raise NoData(
            f"the data directory holds no file of the format {format_}",
            where=f"data.source: {root}",
            got=suffixes,
            allowed=sorted(suffix for suffix, kind in KINDS.items() if kind in kinds),
            changes={"data.format": "auto"},
        )
    return chosen


def _shape(files: Sequence[Path], table: Table | None, data: Data, stage: str, rules: RecordRules) -> str:
    """Return the shape set by `data.format` or, with `auto`, of the first record; raise NoData (HP602) without one."""
    if table is None and kind_of(files[0]) == "text" and data.format in ("auto", "text"):
        if data.format == "auto":
            _refuse_json(files[0], data, stage, rules)
        return "text"
    for where, record in _records(files[:1], table, data.max_record_bytes):
        _check_columns(record, data, where, table is not None or kind_of(files[0]) != "json")
        if data.format != "auto" and not (table and data.format == "text"):
            return "records" if data.format in _RECORDS else data.format
        return shape_of(record, data.text_key, where, stage, rules)
    if table is not None:
        hint = "correct `data.source` or `data.split`"
        raise NoData("the dataset holds no row", where=table.name, hint=hint)
    hint = "correct `data.source`, or write records into the file"
    raise NoData("the first data file holds no record", where=str(files[0]), hint=hint)


def _refuse_json(file: Path, data: Data, stage: str, rules: RecordRules) -> None:
    record = json_record(file)
    if record is None:
        return
    shape = "records"
    with suppress(NoData):
        shape = shape_of(record, data.text_key, str(file), stage, rules)
    fits = stage == "pt" if shape == "records" else (shape == "preference") == (stage in ("dpo", "orpo", "rm"))
    is_file = not Path(data.source).expanduser().is_dir()
    raise NoData(
        "the file name says plain text, but the first line is a JSON record",
        where=str(file),
        got=sorted(record),
        allowed="a name that ends in .jsonl"
        + (", or data.format: text, which trains on the JSON as text" if stage == "pt" else ""),
        hint={"data.format": "jsonl" if shape == "records" else shape}
        if is_file and fits
        else "give the files names that end in .jsonl",
    )


def _check_columns(record: Record, data: Data, where: str, all_alike: bool) -> None:
    """Raise NoData (HP602) if the first record lacks a key in `data.columns`; optional keys only if `all_alike`."""
    for name, own in data.columns.items():
        optional = name in _OPTIONAL_COLUMNS and not all_alike
        if own in record or optional or name in ("role", "content"):
            continue
        near = difflib.get_close_matches(own, map(str, record), n=1)
        raise NoData(
            f"a record has no key `{own}`, which `data.columns` names",
            where=where,
            got=sorted(map(str, record)),
            allowed="a key of the records",
            changes={f"data.columns.{name}": as_value(near[0])} if near else None,
        )

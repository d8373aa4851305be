"""Analysis of dumps of torch's flight recorder: the first collective at which ranks diverge, and the ranks at fault.

A dump, a pickle or JSON file, contains the last collectives of one rank (`entries`) and its groups (`pg_config`).
Collectives of a group have the same numbers on all ranks. Ranks diverge at the first number that a rank lacks, or at
which calls differ; if no calls differ, at the first collective that a rank has not completed. Messages between two
ranks are not compared.
Source: the format in torch/distributed/flight_recorder/components and its `Collective` (version 2.10).
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NotRequired

from pydantic import Field, Json, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hyper_parallel.errors import DumpUnreadable

_RANK: Final = re.compile(r"(\d+)(?:\.\w+)?$")
_SHAPES_DIFFER: Final = ("all_to_all", "gather", "scatter", "all_gather_v", "reduce_scatter_v")
"""Prefixes of the names of collectives whose shapes may differ between ranks."""


class _Frame(TypedDict):
    filename: str
    line: int


class _Recorded(TypedDict):
    """Fields of a recorded collective that this module uses; torch writes more."""

    profiling_name: str
    collective_seq_id: int
    process_group: tuple[str, str] | Annotated[list[str], Field(min_length=2, max_length=2)]
    input_sizes: list[Any] | tuple[Any, ...]
    output_sizes: NotRequired[list[Any] | tuple[Any, ...] | None]
    input_dtypes: NotRequired[list[str] | None]
    output_dtypes: NotRequired[list[str] | None]
    state: NotRequired[str | None]
    time_created_ns: NotRequired[int | None]
    frames: NotRequired[list[_Frame] | None]


_WANTED: Final = ", ".join(sorted(_Recorded.__required_keys__))


class _Group(TypedDict):
    ranks: NotRequired[Json[list[int]] | Literal[""] | None]


class _Dump(TypedDict):
    entries: list[_Recorded]
    pg_config: NotRequired[dict[str, _Group] | None]


@dataclass(frozen=True, slots=True)
class Divergence:
    """First collective at which the ranks of a group diverge.

    Attributes:
        group: Description of the group in the dump, such as `default_pg`; without one, its name.
        ranks: Ranks of the group.
        number: Number of the collective in the group.
        kind: missing, operation, shape, dtype, or state (called on all ranks, but not completed on all).
        culprits: Ranks that lack the collective, differ from the most common call (all ranks if no call is the most
            common), or have not completed it.
        calls: Description of each rank's call at this number; for a rank that lacks it, of the rank's last call.
        time_ns: Time of the first call at this number, in ns since the epoch; 0 if it was not recorded.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    kind: str
    culprits: tuple[int, ...]
    calls: dict[int, str]
    time_ns: int

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.culprits))
        verb = {
            "missing": "has not called",
            "operation": "differs from other ranks in the operation of",
            "shape": "differs from other ranks in the shapes of",
            "dtype": "differs from other ranks in the dtypes of",
            "state": "has not completed",
        }[self.kind]
        head = f"rank {ranks} {verb} collective {self.number} of group {self.group}"
        return "\n".join([head, *(f"  rank {rank}: {call}" for rank, call in self.calls.items())])


def read_dumps(paths: Iterable[Path]) -> dict[int, dict[str, Any]]:
    """Return the content of dump files by rank, in the order of ranks.

    The rank is the number at the end of a file name, before any extension. In a directory, other files are ignored.

    Raises:
        DumpUnreadable: HP623 when a file cannot be read or is no dump, a rank has two dumps, or there is no dump.
    """
    dumps: dict[int, dict[str, Any]] = {}
    sources = list(paths)
    for source in sources:
        try:
            files = sorted(p for p in source.iterdir() if p.is_file()) if source.is_dir() else [source]
        except OSError as error:
            raise _unreadable(source, error.strerror or str(error), "a directory of dumps cannot be read") from error
        for path in files:
            if match := _RANK.search(path.name):
                rank = int(match[1])
                if rank in dumps:
                    raise DumpUnreadable(
                        f"there are several dumps of rank {rank}",
                        where=str(path),
                        hint="hyper-parallel doctor DUMP_OF_RANK_0 DUMP_OF_RANK_1",
                    )
                dumps[rank] = _read(path)
            elif path == source:
                why = "a name without the number of its rank at the end" if path.exists() else "it does not exist"
                raise _unreadable(path, why)
    if not dumps:
        raise _unreadable(
            ", ".join(map(str, sources)), "no file whose name ends in the number of a rank", "there is no dump to read"
        )
    return dict(sorted(dumps.items()))


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler for containers, texts and numbers; it refuses every class and function, so no code runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it wants to load `{module}.{name}`, but a dump contains only plain values")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        text = content[:1] == b"{"
        dump = json.loads(content) if text else _PlainUnpickler(io.BytesIO(content)).load()
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error), "a dump cannot be read") from error
    except Exception as error:  # a damaged pickle may raise any exception
        raise _unreadable(path, str(error) or type(error).__name__) from error
    try:
        TypeAdapter(_Dump).validate_python(dump, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        location = ".".join(map(str, first["loc"])) or "dump"
        raise _unreadable(path, f"no `entries` with {_WANTED}: {location}, {first['msg']}") from error
    return dict(dump)


def _unreadable(
    path: Path | str, why: str, problem: str = "the file is not a dump of torch's flight recorder"
) -> DumpUnreadable:
    return DumpUnreadable(
        problem,
        where=str(path),
        got=why,
        hint="to record dumps, `export TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_BUFFER_SIZE=2000 "
        "TORCH_FR_DUMP_TEMP_FILE=/a/directory/rank_` before the job starts",
    )


def divergences(dumps: Mapping[int, Mapping[str, Any]]) -> list[Divergence]:
    """Return the first divergence of each process group whose ranks diverge, in order of time."""
    groups: dict[tuple[str, str], dict[int, dict[int, Mapping[str, Any]]]] = defaultdict(dict)
    members: dict[tuple[str, str], set[int]] = defaultdict(set)
    for rank, dump in dumps.items():
        configured = dump.get("pg_config") or {}
        for entry in dump["entries"]:
            name, description = entry["process_group"]
            ranks = json.loads((configured.get(name) or {}).get("ranks") or "[]")
            # Groups with different ranks may share a name, and gloo does not write the ranks.
            key = (description or name, str(ranks) if ranks else f"name {name}")
            members[key] |= {*ranks, rank, *(dumps if description == "default_pg" else ())}
            numbers = groups[key].setdefault(rank, {})
            if not entry.get("is_p2p"):
                number = entry["collective_seq_id"]
                # Numbering restarts, so this entry belongs to a later group with the same name.
                if numbers and number < max(numbers):
                    numbers.clear()
                numbers[number] = entry
    parts = [part for key, by_rank in groups.items() if (part := _first(key[0], sorted(members[key]), by_rank, dumps))]
    return sorted(parts, key=lambda part: part.time_ns)


def _first(
    group: str,
    members: Sequence[int],
    by_rank: Mapping[int, Mapping[int, Mapping[str, Any]]],
    dumps: Mapping[int, Mapping[str, Any]],
) -> Divergence | None:
    present = [rank for rank in members if rank in dumps]
    called = {rank: by_rank.get(rank, {}) for rank in present}
    # A recorder keeps the newest calls: numbers before the first recorded one of any rank cannot be compared.
    begin = max((min(numbers) for numbers in called.values() if numbers), default=0)
    numbers_to_compare = sorted({n for numbers in called.values() for n in numbers if n >= begin})
    # Completion is recorded late, so it is compared only after all differing calls.
    for difference, number in [
        *((_difference, n) for n in numbers_to_compare),
        *((_undone, n) for n in numbers_to_compare),
    ]:
        entries = {rank: numbers.get(number) for rank, numbers in called.items()}
        kind, culprits = difference(entries)
        if kind:
            times = [e.get("time_created_ns") or 0 for e in entries.values() if e]
            calls = {rank: _call(entry) if entry else _last(dumps[rank]) for rank, entry in entries.items()}
            for rank in sorted({*members} - {*present}):
                calls[rank] = "has left no dump"
            return Divergence(group, tuple(members), number, kind, tuple(culprits), calls, min(times, default=0))
    return None


def _difference(entries: Mapping[int, Mapping[str, Any] | None]) -> tuple[str, list[int]]:
    """Return `Divergence.kind` and `Divergence.culprits` for the calls of one collective; ("", []) if all agree."""
    missing = [rank for rank, entry in entries.items() if entry is None]
    if missing:
        return "missing", missing
    there = {rank: entry for rank, entry in entries.items() if entry is not None}
    aspects = {"operation": _operation, "shape": _shapes, "dtype": _dtypes}
    for kind, aspect in aspects.items():
        if odd := _unlike_most({rank: aspect(entry) for rank, entry in there.items()}):
            return kind, odd
    return "", []


def _undone(entries: Mapping[int, Mapping[str, Any] | None]) -> tuple[str, list[int]]:
    """Return "state" and the ranks that have not completed a collective; ("", []) if all ranks have completed it."""
    undone = [
        rank
        for rank, entry in entries.items()
        if entry and not (entry.get("retired") or entry.get("state") == "completed")
    ]
    return ("state", undone) if undone else ("", [])


def _unlike_most(values: Mapping[int, str]) -> list[int]:
    """Return the ranks whose value is not the most common one; all ranks if several values are equally common."""
    ordered = Counter(values.values()).most_common()
    if len(ordered) == 1:
        return []
    if ordered[0][1] == ordered[1][1]:
        return list(values)
    return [rank for rank, value in values.items() if value != ordered[0][0]]


def _operation(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"])


def _shapes(entry: Mapping[str, Any]) -> str:
    if _operation(entry).startswith(_SHAPES_DIFFER):
        return ""
    return f"{entry['input_sizes']} -> {entry.get('output_sizes')}"


def _dtypes(entry: Mapping[str, Any]) -> str:
    return f"{entry.get('input_dtypes')} -> {entry.get('output_dtypes')}"


def _call(entry: Mapping[str, Any]) -> str:
    dtypes = ", ".join(map(str, entry.get("input_dtypes") or []))
    shapes = ", ".join(map(str, entry["input_sizes"]))
    state = entry.get("state") or "unknown"
    frames = entry.get("frames") or []
    user_frames = [f for f in frames if "/torch/" not in f["filename"]] or frames
    location = f", at {user_frames[0]['filename']}:{user_frames[0]['line']}" if user_frames else ""
    return f"{_operation(entry)} {shapes} {dtypes} ({state}){location}"


def _last(dump: Mapping[str, Any]) -> str:
    entries = dump["entries"]
    if not entries:
        return "nothing"
    entry = entries[-1]
    group = entry["process_group"][1] or entry["process_group"][0]
    return f"no call; its last is {entry['collective_seq_id']} of {group}, {_call(entry)}"

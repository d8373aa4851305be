"""Section *Data* of a report, from `data.json` of the run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, NotRequired

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from hyper_parallel.errors import printable
from hyper_parallel.received import Limits, read_json
from hyper_parallel.reports._run_parts import unreadable
from hyper_parallel.units import MiB

_Base64 = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/=]*$")]
_Count = Annotated[int, Field(ge=0, lt=1 << 53)]


class _Segment(TypedDict):
    text: str
    trained: bool


class _Text(TypedDict):
    name: str
    segments: list[_Segment]
    num_tokens: _Count
    num_cut: NotRequired[_Count]


class _Example(TypedDict):
    where: str
    texts: list[_Text]
    images: NotRequired[list[_Base64]]


_Bucket = TypedDict("_Bucket", {"from": _Count, "to": _Count, "documents": _Count})


class _DataSource(TypedDict):
    source: str
    used: _Count
    lengths: list[_Bucket]
    examples: list[_Example]


class _DataFacts(TypedDict):
    """Fields of data.json that a report uses."""

    stage: str
    records: str
    rows: dict[str, str]
    notes: list[str]
    epochs: Annotated[float, Field(allow_inf_nan=False)] | None
    sources: list[_DataSource]


class _Answer(TypedDict):
    """Held-out conversation in answers.json, with the expected answer and the model's answer."""

    prompt: str
    images: list[_Base64]
    expected: str
    answer: str


_FACTS: Final[TypeAdapter[_DataFacts]] = TypeAdapter(_DataFacts)
_ANSWERS: Final[TypeAdapter[list[_Answer]]] = TypeAdapter(list[_Answer])
_LIMITS: Final = Limits(16 * MiB)


def read_data_facts(path: Path) -> dict[str, Any] | None:
    """Return the content of data.json; None without the file. Errors are those of `read_record`."""
    facts: dict[str, Any] | None = read_record(path, _FACTS, "facts on the data")
    return facts


def read_answers(path: Path) -> list[_Answer]:
    """Return the content of answers.json; empty without the file. Errors are those of `read_record`."""
    answers: list[_Answer] | None = read_record(path, _ANSWERS, "held-out answers")
    return answers or []


def read_record(path: Path, schema: TypeAdapter[Any], name: str, limits: Limits = _LIMITS) -> Any:
    """Return the content of a JSON file of a run, validated against `schema`; None without the file.

    Raises:
        RunUnreadable: HP603 when the file is damaged; `name` describes its content.
    """
    if not path.is_file():
        return None
    problem = f"the {name} of the run cannot be read"
    try:
        value = read_json(path, limits)
        schema.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        got = f"{'.'.join(map(str, first['loc']))}: {first['msg']:.200}"
        raise unreadable(path, got, problem) from error
    except (OSError, ValueError) as error:
        raise unreadable(path, error, problem) from error
    return value


def data_section(facts: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the values of the section's template, such as rows, histograms and examples; None without facts."""
    if facts is None:
        return None
    sources = []
    for source in facts["sources"]:
        max_documents = max((bucket["documents"] for bucket in source["lengths"]), default=0) or 1
        bars = [(b["from"], b["to"], b["documents"], 100 * b["documents"] / max_documents) for b in source["lengths"]]
        sources.append({"source": source["source"], "bars": bars, "examples": source["examples"]})
    texts = [text for source in sources for example in source["examples"] for text in example["texts"]]
    is_marked = any(segment["trained"] for text in texts for segment in text["segments"])
    scored = "Marked: the token at which an answer is scored."
    marks = scored if facts["stage"] == "rm" else "Marked: tokens with loss."
    return {
        "rows": [(printable(name), printable(text)) for name, text in facts["rows"].items()],
        "notes": facts["notes"],
        "sources": sources,
        "marks": marks if is_marked else "",
    }

"""JSON Lines files of prompts and their generated continuations."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, NonNegativeInt

from hyper_parallel.errors import BadValue, OutputNotWritable, printable, written
from hyper_parallel.owned_folder import check_output_file, unused_path
from hyper_parallel.received import Limits, read_text
from hyper_parallel.trainer.files import check_writable, write_text
from hyper_parallel.trainer.text_codec import Generation

_LIMITS: Final = Limits(num_bytes=256 * 1024**2)
_CONTINUATION_KEYS: Final = ("number", "text", "token_ids", "logprobs", "finish", "seconds")
"""Keys that generation adds to the record of a prompt."""


class _Line(BaseModel, extra="allow", allow_inf_nan=False):
    """Line of a prompt file: a prompt, optionally with its continuation so far, and other keys, which are preserved."""

    prompt: str
    number: int = 0
    text: str = ""
    token_ids: tuple[NonNegativeInt, ...] | None = None
    logprobs: tuple[float, ...] = ()
    finish: Literal["stop", "length"] | None = None
    seconds: float = 0.0

    def to_prompt(self) -> str | Generation:
        if self.token_ids is None:
            return self.prompt
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError("the numbers of log-probabilities and tokens differ")
        values = self.model_dump(include=set(_CONTINUATION_KEYS))
        return Generation(self.prompt, num_prompt_tokens=0, stopped=self.finish == "stop", **values)


def read_prompts(path: Path, output: Path | None = None) -> tuple[list[dict[str, Any]], list[str | Generation]]:
    """Read a prompt file, and check that the output file can be written; None as `output`: standard output.

    Returns:
        Records without the keys of continuations, and for each record its prompt or a `Generation` to resume.

    Raises:
        BadValue: HP102 for an unreadable or empty file, a line without `prompt`, or a malformed continuation.
        OutputNotWritable: HP105 when the output cannot be written, or is not a file of continuations.
    """
    if output is not None:
        _check_folder(output)
        check_output_file(output, _is_continued, "a file of continuations", "--output")
    records: list[dict[str, Any]] = []
    prompts: list[str | Generation] = []
    try:
        # Not splitlines(), because texts may contain other line separators.
        lines = read_text(path, _LIMITS).split("\n")
    except (OSError, ValueError) as error:
        raise BadValue(
            "the prompt file cannot be read",
            where=str(path),
            got=str(error),
            hint="check the path and its permissions"
            if isinstance(error, OSError)
            else "write the file as UTF-8 text of at most 256 MiB",
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = _Line.model_validate_json(line)
            prompts.append(record.to_prompt())
        except ValueError as error:
            raise BadValue(
                "a line of the prompt file is no JSON object with a string `prompt`, or has a malformed continuation",
                where=f"{path}:{number}",
                got=line[:100],
                hint='{"prompt": "Once upon a time"}',
            ) from error
        records.append({"prompt": record.prompt, **(record.model_extra or {})})
    if not records:
        raise BadValue("the prompt file has no prompts", where=str(path), hint='{"prompt": "Once"}')
    return records, prompts


def _check_folder(output: Path) -> None:
    try:
        check_writable(output.parent, "--output")
    except OutputNotWritable as error:
        other = unused_path(Path(tempfile.gettempdir(), output.name))
        error.where, error.hint = f"--output {output}", shlex.join(["--output", str(other)])
        raise


def _is_continued(text: str) -> bool:
    first = json.loads(text.partition("\n")[0]) if "\n" in text else {}
    return "prompt" in first and all(key in first for key in _CONTINUATION_KEYS)


def write_generations(records: Sequence[dict[str, Any]], generations: Sequence[Generation], path: Path | None) -> None:
    """Write each record with its continuation as a JSON line to `path`; None: standard output."""
    lines = [
        json.dumps({**record, **{key: getattr(g, key) for key in _CONTINUATION_KEYS}}, ensure_ascii=False)
        for record, g in zip(records, generations, strict=True)
    ]
    text = "".join(f"{line}\n" for line in lines)
    if path is None:
        sys.stdout.write(printable(text))
        return
    with written(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)

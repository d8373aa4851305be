"""Files of prompts and of their continuations: one JSON object in a line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import BadValue
from hyper_parallel.trainer._files import check_writable, write_text
from hyper_parallel.trainer._texts import Generation

_MADE: Final = ("number", "text", "token_ids", "logprobs", "finish", "seconds")
"""Keys that a continuation adds to the record of its prompt."""


def read_prompts(
    path: Path, output: Path | None = None
) -> tuple[list[dict[str, Any]], list[str | Generation]]:
    """Records of a file, and what is continued of each: a prompt, or what an earlier run wrote of it.

    Args:
        path: The file.
        output: What will be written.

    Raises:
        BadValue: HP102 naming the line that has no `prompt`, or no whole continuation.
        OutputNotWritable: HP105.
    """
    if output is not None:
        check_writable(output.parent, "--output")
    records: list[dict[str, Any]] = []
    given: list[str | Generation] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue("the prompts cannot be read", where=str(path), got=str(error)) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            prompt = record["prompt"]
            if not isinstance(prompt, str):
                raise TypeError(f"prompt is no text: {prompt!r}")
            given.append(_before(record, prompt) if "token_ids" in record else prompt)
        except (ValueError, KeyError, TypeError) as error:
            raise BadValue(
                "a line of the prompts is no JSON object with a text `prompt`",
                where=f"{path}:{number}",
                got=line[:100],
                hint='{"prompt": "Once upon a time"}',
            ) from error
        records.append(record)
    if not records:
        raise BadValue("there are no prompts", where=str(path), hint='{"prompt": "Once"}')
    return records, given


def _before(record: dict[str, Any], prompt: str) -> Generation:
    finish, logprobs = record["finish"], record["logprobs"]
    if len(logprobs) != len(record["token_ids"]):
        raise ValueError("as many log-probabilities as tokens")
    return Generation(
        prompt=prompt,
        text=record["text"],
        token_ids=tuple(map(int, record["token_ids"])),
        num_prompt_tokens=0,
        stopped=finish == "stop",
        seconds=float(record["seconds"]),
        logprobs=tuple(map(float, logprobs)),
        number=int(record["number"]),
        finish=finish,
    )


def write_generations(
    records: Sequence[dict[str, Any]], made: Sequence[Generation], path: Path | None
) -> None:
    """Write every record with its continuation; to standard output without a path."""
    lines = [
        json.dumps({**record, **{key: getattr(g, key) for key in _MADE}}, ensure_ascii=False)
        for record, g in zip(records, made, strict=True)
    ]
    text = "".join(f"{line}\n" for line in lines)
    if path is None:
        sys.stdout.write(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)

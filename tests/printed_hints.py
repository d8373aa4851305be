"""Hints in the output of commands that tests start as processes, and in the logs of ranks.

process.communicate() -> words of its command, its output -> printed errors -> `Pasting`
<tmp_path>/**/logs/rank_*.log                              -> printed errors -> `problems_of`
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import HyperParallelError, all_codes

_ERROR: Final = re.compile(r"^(error\[(HP\d{3})\]: (?:.+\n)+)\nhint: (.*)$", re.MULTILINE)
"""An error as `HyperParallelError.render` writes it, if it has a hint: its lines before the hint have no gap."""
_FACTS: Final = re.compile(r"^(?:  --> (?P<where>.*)|  got: (?P<got>.*?)(?: {6}allowed: .*)?)$", re.M)
_LOG: Final = "logs/rank_*.log"
_PROGRAMS: Final = ("hyper_parallel", "hyper-parallel")

Receiver = Callable[[list[str], HyperParallelError, str], None]
"""Function of the words of a command, an error that it printed, and the text of the error before its hint."""


def printed_errors(text: str) -> Iterator[tuple[HyperParallelError, str]]:
    """Yield the errors with a hint in an output, and the text of each before its hint."""
    for head, code, hint in _ERROR.findall(text) if "error[HP" in text else ():
        what = head.partition(": ")[2].partition("\n  ")[0]
        facts = {k: v for m in _FACTS.finditer(head) for k, v in m.groupdict().items() if v}
        yield all_codes()[code](what, **facts, hint=hint), head.rstrip("\n")


def hints_of_ranks(folder: Path) -> Iterator[str]:
    """Yield the hints in the logs of the ranks of all runs in a folder."""
    # Tests plant links and folders with this name.
    for log in filter(Path.is_file, folder.rglob(_LOG)):
        for error, _ in printed_errors(log.read_text(errors="replace")):
            yield str(error.hint)


def words_of(command: Any) -> list[str]:
    """Return the words after the name of our program; empty for another program."""
    if isinstance(command, str | os.PathLike) or not isinstance(command, Sequence):
        return []
    words = [os.fsdecode(word) for word in command]
    place = next((i for i, word in enumerate(words) if Path(word).name in _PROGRAMS), None)
    return [] if place is None else words[place + 1 :]


def watch_processes(receive: Receiver) -> None:
    """Report the errors that processes print from now on, while their working directory is the current one."""
    start, communicate = subprocess.Popen.__init__, subprocess.Popen.communicate

    def started(process: Any, *args: Any, **options: Any) -> None:
        process.started_in = options.get("cwd")
        start(process, *args, **options)

    def communicated(process: Any, *args: Any, **options: Any) -> Any:
        outputs = communicate(process, *args, **options)
        for output in outputs:
            text = output.decode(errors="replace") if isinstance(output, bytes) else output or ""
            for error, head in printed_errors(text):
                with contextlib.chdir(process.started_in or "."):
                    receive(words_of(process.args), error, head)
        return outputs

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
    subprocess.Popen.communicate = communicated  # type: ignore[method-assign]

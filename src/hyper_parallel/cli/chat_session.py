"""A conversation in a terminal: `hyper-parallel generate MODEL --chat` without a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from hyper_parallel.cli.app import say
from hyper_parallel.errors import BadValue

if TYPE_CHECKING:
    from hyper_parallel.trainer.generation import Generator, Sampling

_HELP: Final = "/system TEXT sets the system prompt, /clear starts anew, /exit or Ctrl-D ends"


def converse(model: Generator, sampling: Sampling) -> None:
    """Answer the lines of standard input, each with all turns before it, until the input or a command ends it.

    Answers go to standard output, the rest to standard error. Ctrl-C ends an answer, which stays in the conversation as
    far as it came; while nothing is answered it ends the conversation.
    """
    turns: list[dict[str, str]] = []
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        say(_HELP, err=True)
    while True:
        try:
            if is_terminal:
                say("> ", err=True, nl=False)
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            say(err=True)
            return
        text = line.strip()
        if not line or text == "/exit":
            return
        if text == "/clear":
            turns = []
        elif text.startswith("/system "):
            others = [turn for turn in turns if turn["role"] != "system"]
            turns = [{"role": "system", "content": text.removeprefix("/system ")}, *others]
        elif text.startswith("/"):
            say(_HELP, err=True)
        elif text:
            turns = _answered(model, sampling, [*turns, {"role": "user", "content": text}])


def _answered(
    model: Generator, sampling: Sampling, turns: list[dict[str, str]]
) -> list[dict[str, str]]:
    """Print the answer to the last turn, and return the turns with it; without the last turn where it is refused."""
    pieces: list[str] = []
    try:
        for piece in model.stream(turns, sampling, chat=True):
            pieces.append(piece)
            say(piece, nl=False)
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass
    except BadValue as error:
        if pieces or len(turns) <= 1:
            raise
        say(f"{error.what} ({error.got}, {error.allowed}); /clear starts anew", err=True)
        return turns[:-1]
    say()
    return [*turns, {"role": "assistant", "content": "".join(pieces)}]

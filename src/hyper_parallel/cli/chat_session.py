"""Interactive chat: `hyper-parallel generate MODEL --chat` without a prompt."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from hyper_parallel.cli.app import say
from hyper_parallel.errors import BadValue

if TYPE_CHECKING:
    from hyper_parallel.trainer.generation import Generator, Sampling

_HELP: Final = "/system TEXT sets the system prompt, /clear starts a new chat, /exit or Ctrl-D ends"


def converse(model: Generator, sampling: Sampling) -> None:
    """Answer each line of standard input as the next user turn, until end of input or /exit.

    Lines that begin with `/` are commands. Answers are printed on standard output, everything else on standard error.
    Ctrl-C during an answer ends the answer and keeps its text; at other times it ends the conversation. A turn that the
    model rejects, for example as too long, is reported and dropped.

    Raises:
        BadValue: HP102 when the model rejects the only turn.
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
            dialogue = [turn for turn in turns if turn["role"] != "system"]
            turns = [{"role": "system", "content": text.removeprefix("/system ")}, *dialogue]
        elif text.startswith("/"):
            say(_HELP, err=True)
        elif text:
            turns = _answer(model, sampling, [*turns, {"role": "user", "content": text}])


def _answer(model: Generator, sampling: Sampling, turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """Print the answer to the last turn; return the turns with the answer, or without the last turn if rejected."""
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
        say(f"{error.what} ({error.got}, {error.allowed}); /clear starts a new chat", err=True)
        return turns[:-1]
    say()
    return [*turns, {"role": "assistant", "content": "".join(pieces)}]

"""`generate --chat` keeps a conversation: every answer follows all turns before it."""

import io

import pytest
from typer.testing import CliRunner

from hyper_parallel.cli import application
from hyper_parallel.cli.chat_session import converse
from hyper_parallel.errors import BadValue, printable
from hyper_parallel.trainer.generation import Generator, Sampling

pytestmark = pytest.mark.torch


def answers(generator, turns, sampling):
    """Answers of a conversation, each by one call with all turns."""
    told, given = [], []
    for text in turns:
        given.append({"role": "user", "content": text})
        told.append("".join(generator.stream(given, sampling, chat=True)))
        given.append({"role": "assistant", "content": told[-1]})
    return told


def test_a_conversation_keeps_its_turns(run_dir, monkeypatch, capsys):
    generator, sampling = Generator(run_dir, device="cpu"), Sampling(6, temperature=0.0)
    first, second = answers(generator, ["return 1", "and"], sampling)
    alone = answers(generator, ["and"], sampling)[0]
    assert second != alone
    monkeypatch.setattr("sys.stdin", io.StringIO("return 1\n\nand\n/clear\nand\n/exit\nnever read\n"))
    converse(generator, sampling)
    assert capsys.readouterr().out == printable(f"{first}\n{second}\n{alone}\n")


def test_the_command_reads_turns_from_standard_input(run_dir):
    words = ["generate", str(run_dir), "--chat", "--max-new-tokens", "4", "--temperature", "0"]
    done = CliRunner().invoke(application(), words, input="return 1\n/system be brief\nand\n")
    assert done.exit_code == 0, done.output
    generator, sampling = Generator(run_dir, device="cpu"), Sampling(4, temperature=0.0)
    assert done.stdout.startswith(printable(answers(generator, ["return 1"], sampling)[0]))


def test_a_turn_that_is_too_long_leaves_the_conversation_as_it_was(run_dir, monkeypatch, capsys):
    generator, sampling = Generator(run_dir, device="cpu"), Sampling(4, temperature=0.0)
    turns = f"return 1\n{'return ' * 200}\nand\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(turns))
    converse(generator, sampling)
    told = capsys.readouterr()
    assert "/clear starts a new chat" in told.err
    last = answers(generator, ["return 1", "and"], sampling)[1]
    assert told.out.endswith(printable(f"{last}\n"))
    monkeypatch.setattr("sys.stdin", io.StringIO("return " * 200 + "\n"))
    with pytest.raises(BadValue, match="longer than the context"):
        converse(generator, sampling)

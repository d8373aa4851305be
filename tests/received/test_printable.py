"""Words of files reach a terminal without their control characters."""

import io
import logging

import pytest

from hyper_parallel.errors import BadValue, PrintableFormatter, console, printable

pytestmark = pytest.mark.unit

HOSTILE = "a\x1b[2Jb\x07c\rd\x08e\x7ff\x9b31mg\u202eh\u2066i\u2028j\ud800k\x00l"


def test_control_characters_are_escaped_and_others_stay() -> None:
    text = printable(HOSTILE)
    assert text.isprintable()
    assert text.encode()
    assert text.startswith("a\\u001b[2Jb\\u0007c\\u000dd\\u0008e\\u007ff\\u009b31mg\\u202eh\\u2066i")
    kept = "line\nline\ttab \u00e9 \u4e2d \U0001f600 \u05d0 \u200d \u0301"
    assert printable(kept) == kept


@pytest.mark.parametrize("part", ["what", "where", "got", "allowed", "hint", "others"])
def test_no_part_of_an_error_has_a_control_character(part: str) -> None:
    values = {"what": "x", part: [HOSTILE] if part in ("others", "allowed") else HOSTILE}
    text = BadValue(values.pop("what"), **values).render()
    assert "a\\u001b[2Jb" in text
    assert all(character.isprintable() or character == "\n" for character in text)


def test_lines_tables_and_panels_of_a_console_are_printable_and_no_markup() -> None:
    from rich.panel import Panel
    from rich.table import Table

    file = io.StringIO()
    out = console(file=file, width=200)
    table = Table("head")
    table.add_row(HOSTILE + "[bold]:smile:")
    out.print(HOSTILE, "[red]x[/red]", Panel(HOSTILE), table)
    shown = file.getvalue()
    assert shown.count("a\\u001b[2Jb\\u0007c") == 3
    assert "[red]x[/red]" in shown
    assert "[bold]:smile:" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_lines_of_the_log_are_printable() -> None:
    record = logging.LogRecord("a", logging.WARNING, "", 0, "source %s", (HOSTILE,), None)
    assert PrintableFormatter("%(message)s").format(record) == f"source {printable(HOSTILE)}"


def test_config_show_prints_no_control_character(tmp_path, capsys) -> None:
    from hyper_parallel.cli import application

    path = tmp_path / "recipe.yaml"
    path.write_text('model: {path: "a\\x1b[2Jb\\u202e"}\nparallel: {rules: {"x\\x1b": colwise}}\n')
    for options in ([], ["--yaml"], ["--json"]):
        application("config")(["config", "show", str(path), *options], standalone_mode=False)
        out = capsys.readouterr().out
        assert "\\u001b" in out or "\\e" in out
        assert all(character.isprintable() or character in "\n\t" for character in out)

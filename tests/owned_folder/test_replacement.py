"""A folder is replaced only as it was written; what anybody else has put into or beside it survives."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyper_parallel.errors import OutputNotWritable, RunInUse
from hyper_parallel.owned_folder import (
    MARKER,
    Marker,
    Replacement,
    check_output_file,
    check_replaceable,
    read_marker,
    remove_files,
    write_marker,
)


def listing(root: Path) -> dict[str, str]:
    """Every path below a folder, with the target of a link, or the checksum of a file."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"  # noqa: PTH115
        elif path.is_file():
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[name] = "a folder"
    return found


def write(target: Path, text: str = "{}", kind: str = "export") -> None:
    folder = Replacement(target, kind, "the export directory", ("export", "adapter"))
    hidden = folder.open()
    (hidden / "config.json").write_text(text)
    (hidden / "model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    folder.publish()


def test_a_folder_as_it_was_written_is_replaced_and_nothing_stays_beside_it(tmp_path):
    write(tmp_path / "export", "1")
    write(tmp_path / "export", "2", "adapter")
    assert (tmp_path / "export" / "config.json").read_text() == "2"
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
    assert read_marker(tmp_path / "export").kind == "adapter"


def edit_weights(folder: Path) -> None:
    """Another value in the middle of a large file, of the same size."""
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"\1" * 500_000)


CHANGES = {
    "another file": lambda f: (f / "thesis.txt").write_text("years of work"),
    "a file in a folder": lambda f: ((f / "a").mkdir(), (f / "a" / "b.txt").write_text("b")),
    "an empty folder": lambda f: (f / "a").mkdir(),
    "a link": lambda f: (f / "link").symlink_to("/etc/passwd"),
    "a link in place of a file": lambda f: (
        (f / "config.json").unlink(),
        (f / "config.json").symlink_to("/etc/hosts"),
    ),
    "another text": lambda f: (f / "config.json").write_text("[]"),
    "other weights": edit_weights,
    "no marker": lambda f: (f / MARKER).unlink(),
    "an empty marker": lambda f: (f / MARKER).write_text(""),
    "a marker of another kind": lambda f: write_marker(f, Marker("run")),
    "a marker that is a link": lambda f: (
        (f / MARKER).rename(f.parent / "marker"),
        (f / MARKER).symlink_to(f.parent / "marker"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_that_was_changed_is_refused(tmp_path, name):
    write(tmp_path / "export")
    CHANGES[name](tmp_path / "export")
    before = listing(tmp_path)
    with pytest.raises(OutputNotWritable, match="HP105"):
        write(tmp_path / "export", "2")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("name", [".export.tmp", ".export.old", "export"])
@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_name_in_use_by_somebody_else_is_refused(tmp_path, name, kind):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    if kind == "folder":
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    elif kind == "file":
        (tmp_path / name).write_text("text")
    else:
        (tmp_path / name).symlink_to("mine")
    before = listing(tmp_path)
    with pytest.raises(OutputNotWritable, match="HP105"):
        write(tmp_path / "export")
    assert listing(tmp_path) == before


def test_a_file_that_appears_while_the_folder_is_written_survives(tmp_path):
    write(tmp_path / "export")
    folder = Replacement(tmp_path / "export", "export", "the export directory")
    folder.open()
    (tmp_path / "export" / "thesis.txt").write_text("years of work")
    with pytest.raises(OutputNotWritable, match="thesis"):
        folder.publish()
    assert (tmp_path / "export" / "thesis.txt").read_text() == "years of work"


_KILLED = """
import os, sys
from pathlib import Path
from hyper_parallel.owned_folder import Replacement
folder = Replacement(Path(sys.argv[1]), "export", "the export directory")
hidden = folder.open()
(hidden / "model-00001-of-00002.safetensors").write_bytes(b"half")
if sys.argv[2] == "waits":
    print("open", flush=True)
    sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_writer_left_is_removed_and_a_living_one_is_not_disturbed(tmp_path):
    words = [sys.executable, "-c", _KILLED, str(tmp_path / "export")]
    subprocess.run([*words, "ends"], check=False)
    assert (tmp_path / ".export.tmp").is_dir()
    write(tmp_path / "export")
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
    with subprocess.Popen([*words, "waits"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as living:
        assert living.stdout.readline() == b"open\n"
        before = listing(tmp_path)
        with pytest.raises(RunInUse, match="HP720"):
            write(tmp_path / "export")
        assert listing(tmp_path) == before


def test_an_empty_folder_of_somebody_else_in_an_unfinished_folder_is_named_every_time(tmp_path):
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "export"), "ends"], check=False)
    (tmp_path / ".export.tmp" / "mine").mkdir()
    for _ in range(2):
        with pytest.raises(OutputNotWritable, match="cannot be deleted") as caught:
            write(tmp_path / "export")
        assert caught.value.got == ["mine"]


def test_a_folder_that_was_just_being_replaced_is_put_back(tmp_path):
    write(tmp_path / "export", "1")
    (tmp_path / "export").rename(tmp_path / ".export.old")
    folder = Replacement(tmp_path / "export", "export", "the export directory")
    folder.open()
    with pytest.raises(ZeroDivisionError), folder.discarded_on_error():
        1 / 0  # noqa: B018
    assert [p.name for p in tmp_path.iterdir()] == ["export"]
    assert (tmp_path / "export" / "config.json").read_text() == "1"


def test_an_empty_hidden_folder_of_a_writer_killed_before_its_mark_is_used(tmp_path):
    (tmp_path / ".export.tmp").mkdir()
    (tmp_path / ".export.tmp" / f".{MARKER}.17.part").write_text('{"prod')
    write(tmp_path / "export")
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_a_link_to_a_large_disk_is_written_through(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "export").symlink_to(tmp_path / "disk")
    for text in ("1", "2"):
        write(tmp_path / "export", text)
    assert (tmp_path / "export").is_symlink()
    assert (tmp_path / "disk" / "config.json").read_text() == "2"


def test_removing_follows_no_link(tmp_path):
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "a.json").write_text("{}")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "inside").symlink_to(tmp_path / "victim")
    (folder / "a.json").symlink_to(tmp_path / "victim" / "a.json")
    (folder / "b.json").write_text("{}")
    (folder / "empty").mkdir()
    assert sorted(remove_files(folder, lambda name: True)) == ["a.json", "inside"]
    assert (folder / "empty").is_dir()
    assert (tmp_path / "victim" / "a.json").read_text() == "{}"
    assert not (folder / "b.json").exists()


def test_an_output_file_of_another_content_is_refused(tmp_path):
    own = tmp_path / "own.txt"
    for content in (b"mine: 1", b"\xff\xfe", b"{"):
        own.write_bytes(content)
        with pytest.raises(OutputNotWritable, match="HP105"):
            check_output_file(own, lambda text: text.startswith("plan"), "a plan", "--output")
    for content in (b"", b"plan 1"):
        own.write_bytes(content)
        check_output_file(own, lambda text: text.startswith("plan"), "a plan", "--output")
    check_output_file(Path("/dev/stdout"), lambda text: False, "a plan", "--output")


@pytest.mark.parametrize(("inside", "hint"), [(".", "--out export-2"), ("work", "--out export")])
def test_the_hint_never_moves_the_current_directory(tmp_path, monkeypatch, inside, hint):
    folder = tmp_path / "project"
    (folder / "export").mkdir(parents=True)
    (folder / "work").mkdir()
    (folder / "thesis.tex").write_text("x")
    monkeypatch.chdir(folder / inside)
    with pytest.raises(OutputNotWritable) as caught:
        check_replaceable(folder, ["export"], "the export directory", "--out")
    assert caught.value.hint == hint
    with pytest.raises(OutputNotWritable) as caught:
        check_replaceable(folder, ["export"], "the export directory")
    assert caught.value.hint == f"change to a directory outside of {folder}, then move {folder} away"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputNotWritable) as caught:
        check_replaceable(folder, ["export"], "the export directory")
    assert caught.value.hint == f"mv {folder} {folder}.moved"
    (tmp_path / f"{folder.name}.moved").mkdir()
    with pytest.raises(OutputNotWritable) as caught:
        check_replaceable(folder, ["export"], "the export directory")
    assert caught.value.hint == f"mv {folder} {folder}.moved-2"

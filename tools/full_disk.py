"""Simulation of a full disk for one folder, by failing writes below the C library; see `full_disk.c`.

    python tools/full_disk.py

As a program, it runs every command that writes (export, import, plan, predict, report, generate, init) on small models,
and fails each of its writes in turn. Every command must end with a coded error and leave no other files than its
output. The last line is JSON; the exit status is 0 when all do. `chaos.py` covers training runs.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_suffix(".c")
_NUMBERS: Final = struct.Struct("<5q")
_FOLDER_BYTES: Final = 4096


class FullDisk:
    """Control of write faults in this process and its children, which must run with the library preloaded."""

    def __init__(self) -> None:
        with Path(os.environ["FULL_DISK_CONTROL"]).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBERS.size + _FOLDER_BYTES)

    def arm(self, folder: Path, first: int = 0, count: int = 1 << 60) -> None:
        """Start to count writes below a folder; `count` writes fail, beginning with number `first` (0: none)."""
        self.disarm()
        name = (os.fsencode(folder.resolve()) + b"/")[: _FOLDER_BYTES - 1]
        self._memory[_NUMBERS.size :] = name + bytes(_FOLDER_BYTES - len(name))
        _NUMBERS.pack_into(self._memory, 0, 1, 0, first, count, 0)

    def disarm(self) -> None:
        """Stop counting and failing writes."""
        self._memory[: _NUMBERS.size] = bytes(_NUMBERS.size)

    @property
    def writes(self) -> int:
        """Number of writes since `arm`."""
        return int(_NUMBERS.unpack_from(self._memory)[1])

    @property
    def failed(self) -> int:
        """Number of failed writes since `arm`."""
        return int(_NUMBERS.unpack_from(self._memory)[4])


def preload() -> bool:
    """Restart this program with the library preloaded, unless it already is; return False without a C compiler."""
    if "FULL_DISK_CONTROL" in os.environ:
        return True
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return False
    place = Path(tempfile.mkdtemp(prefix="full_disk_"))
    library, control = place / "full_disk.so", place / "control"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    control.write_bytes(bytes(_NUMBERS.size + _FOLDER_BYTES))
    os.environ |= {"FULL_DISK_CONTROL": str(control), "LD_PRELOAD": str(library)}
    os.execv(sys.executable, [sys.executable, *sys.argv])
    return True


def _outcome(words: tuple[object, ...]) -> str:
    """Run a command, and return `done`, the code of its error, or the name of an exception without a code."""
    from attack import cli

    from hyper_parallel.errors import HyperParallelError

    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            cli(*words)
    except HyperParallelError as error:
        return error.code
    except Exception as error:
        return repr(error)[:200]
    return "done"


def _sweep(words: tuple[object, ...], out: Path) -> Counter[str]:
    """Run a command once per write, with this and all later writes failing, and return counts of outcomes."""
    faults, found, first = FullDisk(), Counter[str](), 0
    while not found["done"]:
        shutil.rmtree(out) if out.is_dir() else out.unlink(missing_ok=True)
        before = {path.name for path in out.parent.iterdir()}
        first += 1
        faults.arm(out.parent, first)
        found[_outcome(words)] += 1
        faults.disarm()
        left = {path.name for path in out.parent.iterdir()} - before - {out.name}
        found.update(f"left behind: {name}" for name in left)
    del found["done"]
    return found


def main() -> int:
    """Test every command, and return 0 if each ends with a code and leaves no other files."""
    from attack import make_good

    with tempfile.TemporaryDirectory(prefix="full_disk_") as name:
        os.environ["XDG_CACHE_HOME"] = name
        root, out = Path(name) / "root", Path(name) / "out"
        root.mkdir()
        out.mkdir()
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            make_good(root)
        (root / "prompts.jsonl").write_text('{"prompt": "def"}\n')
        os.chdir(out)
        run, config = root / "run", root / "model" / "config.json"
        planned = ("plan", config, "--topology", "local-cpu", "--devices", 2)
        said = ("generate", run, "--max-new-tokens", 2, "--prompts", root / "prompts.jsonl")
        commands: dict[tuple[object, ...], Path] = {
            ("checkpoint", "export", run, "--out", out / "export"): out / "export",
            ("checkpoint", "import", root / "adapter", out / "run"): out / "run",
            (*planned, "-o", out / "plan.json"): out / "plan.json",
            ("predict", root / "runs.csv", "-o", out / "runs.csv"): out / "runs.csv",
            ("report", run): run / "report.html",
            (*said, "-o", out / "said.jsonl"): out / "said.jsonl",
            ("init", "quickstart"): out / "recipes",
        }
        found = {f"{words[0]} {words[1]}"[:40]: dict(_sweep(words, o)) for words, o in commands.items()}
    print(json.dumps(found))
    return int(any(set(outcomes) - {"HP105"} for outcomes in found.values()))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if not preload():
        sys.exit("full_disk.py needs a C compiler")
    sys.exit(main())

"""A full disk for one folder, injected below the C library: see `full_disk.c`.

    python tools/full_disk.py

As a program it fails each write of each command that writes (export, import, plan, predict, report, generate, init),
one after the other, on small models: every command has to end with a code, and to leave nothing beside its output. The
last line is JSON; the status is 0 when each has. Runs of training are in `chaos.py`.
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
    """Control of the faults of this process and those that it starts, which must run under `preloaded`."""

    def __init__(self) -> None:
        with Path(os.environ["FULL_DISK_CONTROL"]).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBERS.size + _FOLDER_BYTES)

    def arm(self, folder: Path, first: int = 0, count: int = 1 << 60) -> None:
        """Count writes below a folder from now on; from number `first` on (0: never) `count` of them fail."""
        self.disarm()
        name = (os.fsencode(folder.resolve()) + b"/")[: _FOLDER_BYTES - 1]
        self._memory[_NUMBERS.size :] = name + bytes(_FOLDER_BYTES - len(name))
        _NUMBERS.pack_into(self._memory, 0, 1, 0, first, count, 0)

    def disarm(self) -> None:
        """End the faults."""
        self._memory[: _NUMBERS.size] = bytes(_NUMBERS.size)

    @property
    def writes(self) -> int:
        """Writes since it was armed."""
        return int(_NUMBERS.unpack_from(self._memory)[1])

    @property
    def failed(self) -> int:
        """Writes that have failed since it was armed."""
        return int(_NUMBERS.unpack_from(self._memory)[4])


def preload() -> bool:
    """Start this program again with the library preloaded, unless it is; False where there is no C compiler."""
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
    """`done`, the code of the error that a command ends with, or another exception."""
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
    """Fail each write of a command once, and all after it; what came of it, and what was left behind."""
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
    """Fail every write of every command; 0 when each ends with a code and leaves nothing."""
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
        found = {
            f"{words[0]} {words[1]}"[:40]: dict(_sweep(words, o)) for words, o in commands.items()
        }
    print(json.dumps(found))
    return int(any(set(outcomes) - {"HP105"} for outcomes in found.values()))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if not preload():
        sys.exit("full_disk.py needs a C compiler")
    sys.exit(main())

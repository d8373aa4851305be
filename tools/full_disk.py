"""A full disk for one folder, injected below the C library: see `full_disk.c`."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
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

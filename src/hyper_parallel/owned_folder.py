"""Folders that this package may replace or clear, without removing files that it has not written.

Such a folder contains a marker file, `.hyper_parallel.json`, with the kind of the folder. For a folder that is replaced
as a whole, the marker also lists name, size and checksum of every file. The folder is replaced only if the marker has
an allowed kind and every file is listed and unchanged. Otherwise HP105 is raised before anything changes. Removal
unlinks listed files one by one, then empty folders, so a file that appears meanwhile survives. Symbolic links below the
folder are not followed.

A temporary folder is removed by its process or, after a kill, when the next one is created in the same parent. Next to
the folder is a lock file, `NAME.lock`. The process locks it with `flock`. The kernel releases the lock when this
process and its forks have ended. The lock file and the marker contain the name of the folder. The next process removes
the folder only if these names agree, lock file and folder belong to this user, and the system has not rebooted since.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hyper_parallel.errors import OutputNotWritable, RunInUse
from hyper_parallel.received import Limits, read_json
from hyper_parallel.serde import sync_directory, write_text

_log = logging.getLogger(__name__)

MARKER: Final = ".hyper_parallel.json"
FORMAT: Final = 1
_WHOLE_BYTES: Final = 1 << 20  # files up to this size are hashed as a whole
_SAMPLES: Final = 256  # number of blocks hashed of a larger file, evenly spaced
_BLOCK_BYTES: Final = 4096
_NAMED: Final = 3  # maximum number of paths that an error names

_MODEL_TEXTS: Final = r"[\w.-]+\.(json|jinja|txt|model|py)"
PATTERNS: Final[Mapping[str, str]] = {
    "export": rf"(additional_chat_templates/)?({_MODEL_TEXTS}|model[\w.-]*\.safetensors)",
    "adapter": rf"(additional_chat_templates/)?({_MODEL_TEXTS}|adapter_model\.safetensors)",
    "model": rf"(additional_chat_templates/)?{_MODEL_TEXTS}",
    "part": r"(config\.yaml|(plan|part)\.json)",
    "cache": r"(additional_chat_templates/)?[\w.-]+\.(npy|jsonl?|txt|model|jinja|bin)",
    "scratch": r"rank\d+/|(rank\d+/)?[\w-]+\.(bin|part)|"
    r"\.?step_\d+(\.tmp|\.old)?/((manifest|index|extra)\.json|rank_\d+\.safetensors)",
    "launch": r".*",
}  # fmt: skip
"""Kind of folder to the pattern of files that a killed process may have left in an unfinished folder."""

_MARKER_PART: Final = re.compile(rf"{re.escape('.' + MARKER)}\.\d+\.part")


@dataclass(frozen=True, slots=True)
class Marker:
    """Content of the marker file by which this package recognizes a folder that it wrote.

    Attributes:
        kind: Kind of the folder: run, export, adapter, model, part, cache, scratch, launch.
        files: Size and checksum of every file by relative path; for a run, of its recipe only. None: the folder is
            unfinished.
        identity: Name of a temporary folder; empty for other kinds.
    """

    kind: str
    files: Mapping[str, tuple[int, str]] | None = None
    identity: str = ""


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of a folder; None when it has no marker of this format."""
    path = folder / MARKER
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        value = read_json(path, Limits())
        if value["format"] != FORMAT or value["product"] != "hyper_parallel":
            return None
        listed = value["files"]
        files = None if listed is None else {str(k): (int(v[0]), str(v[1])) for k, v in listed.items()}
        return Marker(str(value["kind"]), files, str(value.get("identity", "")))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return None


def write_marker(folder: Path, marker: Marker) -> None:
    """Write the marker of a folder atomically."""
    value: dict[str, Any] = {"product": "hyper_parallel", "format": FORMAT, "kind": marker.kind}
    value |= {"identity": marker.identity, "files": marker.files}
    write_text(folder / MARKER, json.dumps(value, indent=1) + "\n")


def seal(folder: Path, kind: str) -> None:
    """Write the marker of a finished folder, which lists all its files; the folder must contain no empty folders."""
    files = {name: file_facts(path) for name, path in _entries(folder) if name != MARKER}
    write_marker(folder, Marker(kind, files))


def foreign_files(folder: Path, kinds: Collection[str]) -> Iterator[str]:
    """Yield, in any order, the relative paths of links, changed files, and files and empty folders not in the marker.

    If the marker is missing, unfinished or of a kind not in `kinds`, yield all paths except partly written markers.
    """
    marker = read_marker(folder)
    files = marker.files if marker is not None and marker.kind in kinds else None
    for name, path in _entries(folder):
        if files is None:
            if not _MARKER_PART.fullmatch(name):
                yield name
        elif name == MARKER:
            continue
        elif name not in files or path.is_symlink() or not path.is_file():
            yield name
        elif path.stat().st_size != files[name][0] or file_facts(path) != files[name]:
            yield f"{name} (changed since it was written)"


def check_replaceable(folder: Path, kinds: Collection[str], label: str, option: str | None = None) -> None:
    """Raise an error unless a folder is missing, empty, or an unchanged finished folder of these kinds.

    Args:
        folder: The folder; a symbolic link or file is refused.
        kinds: Kinds that may be replaced.
        label: Description of the folder in errors, such as `the export directory`.
        option: Command-line option that names the folder, for the hint; None: no such option.

    Raises:
        OutputNotWritable: HP105 with the first three paths that were added or changed.
    """
    problem = "contains files that were added or changed by others"
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        problem = "is not a directory"
        got = ["a symbolic link" if folder.is_symlink() else "a file"]
    else:
        foreign = foreign_files(folder, kinds) if folder.exists() else iter(())
        got = list(itertools.islice(foreign, _NAMED))
    if got:
        raise OutputNotWritable(
            f"{label} would be replaced, but {problem}",
            where=str(folder),
            got=got,
            allowed="an empty or missing directory, or one that is unchanged since it was written",
            hint=_replacement_hint(folder, option),
        )


def _replacement_hint(folder: Path, option: str | None) -> str:
    if not Path.cwd().is_relative_to(os.path.realpath(folder)):
        return move_away(folder)
    if option is None:
        return f"change to a directory outside of {folder}, then move {folder} away"
    return f"{option} {unused_path(Path('export'))}"


def remove_files(
    folder: Path,
    owned: Callable[[str], bool],
    owned_folder: Callable[[str], bool] = lambda _: False,
) -> list[str]:
    """Unlink the owned files of a folder, then the folders that became empty.

    Args:
        folder: The folder.
        owned: Predicate on the relative path of a file.
        owned_folder: Predicate on the relative path of an empty folder.

    Returns:
        Relative paths that remain, `.` for the folder; empty when the folder is removed or was missing.
    """
    remaining, emptied = [], {folder}
    if not folder.is_dir() or folder.is_symlink():
        return ["."] if os.path.lexists(folder) else []
    for name, path in list(_entries(folder)):
        if owned(name) and not path.is_symlink() and path.is_file():
            try:
                path.unlink(missing_ok=True)
                emptied.update(folder / parent for parent in Path(name).parents)
            except OSError:
                remaining.append(name)
        elif not path.is_dir() or path.is_symlink():
            remaining.append(name)
        elif owned_folder(name):
            emptied.add(path)
    for place in sorted(emptied, key=lambda place: -len(place.parts)):
        with suppress(OSError):  # not empty
            place.rmdir()
    return remaining or (["."] if folder.exists() else [])


def remove_finished(folder: Path) -> list[str]:
    """Remove the files that the marker of a folder lists, then the folder if empty; return paths as `remove_files`."""
    marker = read_marker(folder)
    files = {} if marker is None or marker.files is None else marker.files
    remaining = remove_files(folder, files.__contains__)
    if remaining == [MARKER]:
        remaining = remove_files(folder, MARKER.__eq__)
    return remaining


def remove_unfinished(folder: Path, kind: str) -> list[str]:
    """Remove the files that an unfinished write, of this or a killed process, has left in a folder of kind `kind`.

    The folder is removed as well, if it contains nothing else; otherwise its marker stays. Without a marker of this
    kind, only partly written markers are removed.

    Returns:
        Paths of the remaining files or, if there are none, of the remaining empty folders.
    """
    marker = read_marker(folder)
    if marker is not None and marker.kind == kind:
        pattern, listed = re.compile(PATTERNS[kind]), marker.files or {}
        remaining = remove_files(
            folder,
            lambda n: n != MARKER and (n in listed or bool(pattern.fullmatch(n))),
            lambda n: bool(pattern.fullmatch(f"{n}/")),
        )
        if not all(map(_is_marker, remaining)):
            return remaining
        folders = [name for name, _ in _entries(folder) if not _is_marker(name)]
        return folders or remove_files(folder, _is_marker)
    return remove_files(folder, lambda name: bool(_MARKER_PART.fullmatch(name)))


def _is_marker(name: str) -> bool:
    return name == MARKER or bool(_MARKER_PART.fullmatch(name))


class Replacement:
    """Folder that is written under a hidden name next to its target, and published by a rename.

    Args:
        target: Final path of the folder; a symbolic link is resolved first.
        kind: Kind of the folder.
        label: Description of the folder in errors.
        replaces: Kinds of folders that may be replaced; (): only `kind`.
        parents: Whether to create missing parent folders.
        option: Command-line option that names the folder, for hints; None: no such option.
    """

    def __init__(
        self,
        target: Path,
        kind: str,
        label: str,
        replaces: Collection[str] = (),
        *,
        parents: bool = False,
        option: str | None = None,
    ) -> None:
        self.target = Path(os.path.realpath(target))
        self.partial = self.target.with_name(f".{self.target.name}.tmp")
        self._old = self.target.with_name(f".{self.target.name}.old")
        self._kind, self._label = kind, label
        self._replaces = tuple(replaces) or (kind,)
        self._parents, self._option, self._lock = parents, option, -1

    def check(self) -> None:
        """Raise OutputNotWritable (HP105) if publishing would delete files that this package has not written."""
        self._check_targets()
        if not os.path.lexists(self.partial):
            return
        marker = read_marker(self.partial)
        unmarked = marker is None or marker.kind not in (self._kind, *self._replaces)
        if (
            self.partial.is_symlink()
            or not self.partial.is_dir()
            or (unmarked and any(foreign_files(self.partial, ())))
        ):
            raise OutputNotWritable(
                f"the temporary directory of {self._label} already exists and was not created by this command",
                where=str(self.partial),
                hint=move_away(self.partial),
            )

    def _check_targets(self) -> None:
        check_replaceable(self.target, self._replaces, self._label, self._option)
        check_replaceable(self._old, self._replaces, f"the backup of {self._label}")

    def open(self) -> Path:
        """Create the hidden folder and return it; replace a hidden folder that a killed process has left.

        Raises:
            OutputNotWritable: HP105 as `check`, or for files in the hidden folder that cannot be deleted.
            RunInUse: HP720 when another process is writing the folder.
            OSError: The folder cannot be created; without `parents`, also if its parent is missing.
        """
        self.check()
        self._restore()
        if self.partial.is_dir():
            marker = read_marker(self.partial)
            self._hold()
            remaining = remove_unfinished(self.partial, marker.kind if marker else self._kind)
            self._release()
            if remaining:
                raise OutputNotWritable(
                    f"the temporary directory of {self._label} contains entries that cannot be deleted, or that were "
                    "not created by this command",
                    where=str(self.partial),
                    got=sorted(remaining)[:_NAMED],
                    hint=move_away(self.partial),
                )
        self.partial.mkdir(parents=self._parents)
        write_marker(self.partial, Marker(self._kind))
        self._hold()
        return self.partial

    def publish(self) -> None:
        """Replace the target by the written folder, and sync the renames to disk; errors as for `check_replaceable`."""
        self._check_targets()
        seal(self.partial, self._kind)
        remove_finished(self._old)
        if self.target.exists():
            self.target.rename(self._old)
        try:
            self.partial.rename(self.target)
        except OSError:
            self._restore()
            raise
        sync_directory(self.target.parent)
        self._release()
        remove_finished(self._old)

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Remove the hidden folder when the body of the context raises."""
        try:
            yield
        except BaseException:
            with suppress(OSError):
                remove_unfinished(self.partial, self._kind)
            self._release()
            raise

    def _restore(self) -> None:
        """Rename the earlier folder back to the target, if a process has ended between the two renames of `publish`."""
        if self._old.is_dir() and not self.target.exists():
            self._old.rename(self.target)

    def _hold(self) -> None:
        """Lock the marker of the hidden folder; raise RunInUse (HP720) if another process holds the lock."""
        try:
            self._lock = os.open(self.partial / MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._release()
            raise RunInUse(
                f"another process is writing {self._label}",
                where=str(self.target),
                hint="wait for it, or choose another directory",
            ) from None
        except OSError:  # no marker yet, or a file system without locks
            return

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


_TEMPORARY: Final = ("scratch", "launch")
"""Kinds of temporary folders."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def temporary_folder(parent: Path, name: str, kind: str = "scratch") -> Iterator[Path]:
    """Yield a new folder, removed with its files at the end of the context.

    Temporary folders in `parent` whose processes were killed since the boot of this host are removed first.

    Args:
        parent: Parent folder; created when it is missing.
        name: Prefix of the folder's name.
        kind: Kind of the folder, which determines the files that are removed; other files stay, with a warning.

    Raises:
        OSError: The folder cannot be created.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_dead(parent)
    folder = parent / f"{name}-{secrets.token_hex(8)}"
    mark = parent / f"{folder.name}.lock"
    lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # On a file system without locks, the folder of a killed process stays.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, _lock_text(folder))
        folder.mkdir(mode=0o700)
        write_marker(folder, Marker(kind, identity=folder.name))
        yield folder
    finally:
        _remove_temporary(folder, kind)
        mark.unlink(missing_ok=True)
        os.close(lock)


def _remove_dead(parent: Path) -> None:
    """Remove the temporary folders that ended processes of this user have left in `parent`."""
    for mark in parent.glob("*.lock"):
        with suppress(OSError):
            lock = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                _remove_if_dead(mark, lock)
            finally:
                os.close(lock)


def _remove_if_dead(mark: Path, lock: int) -> None:
    """Remove the lock file and the folder of an ended process; raise OSError while another process holds the lock.

    `mark` is the path of the lock file, `lock` its open file descriptor. Lock files of other users, and lock files
    written before the last boot, are ignored.
    """
    folder, status = mark.with_suffix(""), os.fstat(lock)
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and status.st_nlink == 1
    expected = _lock_text(folder)
    # A lock does not survive a reboot. Files with another boot id, or without content yet, stay.
    if not is_own or not expected or os.read(lock, len(expected) + 1) != expected:
        return
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while another process holds the lock
    if os.path.lexists(folder):
        status, marker = folder.lstat(), read_marker(folder)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return
        named = marker and marker.kind in _TEMPORARY and marker.identity == folder.name
        if not (named or (marker is None and not any(folder.iterdir()))):
            return
        _remove_temporary(folder, marker.kind if marker else "")
    # The lock file is removed last: after a kill at this point the next run removes it.
    if not os.path.lexists(folder):
        mark.unlink()
        _log.info("removed %s, which a killed run had left", folder)


def _remove_temporary(folder: Path, kind: str) -> None:
    if remaining := remove_unfinished(folder, kind):
        _log.warning("%s is not removed: it holds %s", folder, ", ".join(sorted(remaining)[:3]))


def _lock_text(folder: Path) -> bytes:
    """Return the content of a folder's lock file: the boot id of the kernel, and the folder's name."""
    try:
        return b"hyper-parallel " + _BOOT.read_bytes() + os.fsencode(folder.name) + b"\n"
    except OSError:  # not Linux
        return b""


def check_output_file(path: Path, is_own: Callable[[str], bool], label: str, option: str | None = None) -> None:
    """Raise an error if an output file exists and was not written by the same command.

    Empty files, devices, pipes and unreadable files are accepted.

    Args:
        path: The file.
        is_own: Function that returns whether a text, the first 2**20 characters of the file, is output of the same
            command. Any exception counts as False.
        label: Description of the command's output, such as `a plan`.
        option: Option by which the user has named the file; None: the command has chosen its name.

    Raises:
        OutputNotWritable: HP105 for a file of another origin.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
            return
        with path.open(encoding="utf-8", errors="strict") as file:
            is_same_kind = is_own(file.read(_WHOLE_BYTES))
    except UnicodeDecodeError:
        is_same_kind = False
    except OSError:  # missing or unreadable: the later write fails, or the user wants it
        return
    except Exception:  # any exception of a format reader
        is_same_kind = False
    if not is_same_kind:
        other = unused_path(path.with_name(f"{path.stem}-new"), path.suffix)
        raise OutputNotWritable(
            f"the file exists and is not {label}, so it is not replaced",
            where=f"{option} {path}" if option else str(path),
            hint=shlex.join([option, str(other)]) if option else move_away(path),
        )


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield relative path and path of every file, link and empty folder below a folder, without following links."""
    stack = [("", folder)]
    while stack:
        prefix, place = stack.pop()
        with os.scandir(place) as entries:
            empty = True
            for entry in entries:
                empty = False
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    stack.append((f"{name}/", Path(entry.path)))
                else:
                    yield name, Path(entry.path)
        if empty and prefix:
            yield prefix[:-1], place


def file_facts(path: Path) -> tuple[int, str]:
    """Return size in bytes and SHA-256 of a file; above 1 MiB, the hash covers only 256 evenly spaced blocks."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            return size, hashlib.file_digest(file, "sha256").hexdigest()
        sampled = hashlib.sha256()
        for number in range(_SAMPLES):
            file.seek((size - _BLOCK_BYTES) * number // (_SAMPLES - 1))
            sampled.update(file.read(_BLOCK_BYTES))
        return size, sampled.hexdigest()


def unused_path(path: Path, suffix: str = "") -> Path:
    """Return `path` with the suffix or, if that exists, with the first free number from 2: `path-2` with the suffix."""
    numbered = (Path(f"{path}-{number}{suffix}") for number in itertools.count(2))
    names = itertools.chain([Path(f"{path}{suffix}")], numbered)
    return next(name for name in names if not os.path.lexists(name))


def move_away(path: Path) -> str:
    """Return the shell command that renames a file or folder to an unused name, for a hint."""
    return shlex.join(["mv", str(path), str(unused_path(Path(f"{path}.moved")))])

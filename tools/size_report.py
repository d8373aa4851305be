"""Line counts of every folder in source and tests, and a list of overlong files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = 400


def main() -> None:
    """Print a table of folders, and the files above the limit."""
    source, files, long = count(ROOT / "src" / "hyper_parallel")
    tests, _, long_tests = count(ROOT / "tests")
    print(f"{'room':24} {'files':>5} {'source':>7} {'tests':>7}")
    for room in sorted(source | tests):
        print(f"{room:24} {files[room] or '':>5} {source[room] or '':>7} {tests[room] or '':>7}")
    print(f"{'all':24} {files.total():>5} {source.total():>7} {tests.total():>7}")
    if long or long_tests:
        print(f"files over {MOST_LINES} lines:", *long, *long_tests, sep="\n  ")


def count(folder: Path) -> tuple[Counter[str], Counter[str], list[str]]:
    """Return lines and files per subfolder of a folder, and its overlong files.

    Folders of back ends are counted separately.
    """
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    long = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts[:-1]
        room = "/".join(parts[:3] if parts[:1] == ("backends",) else parts[:1]) or "."
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        lines[room] += num_lines
        files[room] += 1
        if num_lines > MOST_LINES:
            long.append(f"{num_lines}  {path.relative_to(ROOT)}")
    return lines, files, long


if __name__ == "__main__":
    main()

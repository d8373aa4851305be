"""Print how large the package is, room by room, and which files ask to be split. Information, not a gate."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

LIMIT = 400


def main() -> None:
    """Print lines per room and the files above the limit."""
    root = Path(__file__).resolve().parent.parent
    package = root / "src" / "hyper_parallel"
    rooms: dict[str, list[int]] = defaultdict(list)
    long = []
    for path in sorted(package.rglob("*.py")):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        relative = path.relative_to(package)
        rooms[relative.parts[0] if len(relative.parts) > 1 else "."].append(lines)
        if lines > LIMIT:
            long.append(f"  {lines}  {relative}")
    for room, sizes in sorted(rooms.items()):
        print(f"{room:12} {len(sizes):3} files {sum(sizes):6} lines")
    print(
        f"{'package':12} {sum(map(len, rooms.values())):3} files {sum(map(sum, rooms.values())):6} lines"
    )
    tests = sum(
        len(p.read_text(encoding="utf-8").splitlines()) for p in (root / "tests").rglob("*.py")
    )
    print(f"{'tests':12} {'':9} {tests:6} lines")
    if long:
        print(f"files over {LIMIT} lines:", *long, sep="\n")


if __name__ == "__main__":
    main()

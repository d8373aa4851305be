"""Find a topology by preset name, alias, path, or `local`."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from hyper_parallel.config import problems, raise_all, read_mapping
from hyper_parallel.errors import TopologyUnreadable, UnknownTopology
from hyper_parallel.topology._file import TopologyFile
from hyper_parallel.topology._types import Supernode

_PRESETS: Final = Path(__file__).with_name("presets")


def preset_names() -> tuple[str, ...]:
    """Names of the shipped topologies, without aliases."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def load_topology(name_or_path: str | Path) -> Supernode:
    """The machine behind a name.

    Args:
        name_or_path: A preset name or alias, the path of a topology file, or `local` for this machine.

    Raises:
        UnknownTopology: HP303 when it is none of these; the nearest names are listed.
        TopologyUnreadable: HP309 when the file is not readable YAML.
        UnknownKey: HP101, BadValue: HP102 when a key of the file is unknown or its value is not allowed.
        UnknownDevice: HP312 when `local` meets an accelerator that no preset describes.
    """
    text = str(name_or_path)
    if text == "local":
        from hyper_parallel.topology._detect import detect_local

        return detect_local()
    path = Path(text)
    if path.suffix.lower() in {".yaml", ".yml", ".json"} or "/" in text:
        return read_topology(path)
    names = preset_names()
    if text in names:
        return read_topology(_PRESETS / f"{text}.yaml")
    aliases = _aliases()
    if text in aliases:
        return read_topology(_PRESETS / f"{aliases[text]}.yaml")
    near = difflib.get_close_matches(text, [*names, *aliases, "local"], n=3)
    raise UnknownTopology(
        f"there is no topology `{text}`",
        got=text,
        allowed=["local", *names, "or the path of a YAML file"],
        hint=f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else None,
    )


def read_topology(path: Path) -> Supernode:
    """The machine a topology file describes; see `load_topology` for the errors."""
    data = read_mapping(path, TopologyUnreadable, "topology file")
    try:
        return TopologyFile.model_validate(data).resolve()
    except ValidationError as error:
        raise_all(
            problems(
                error,
                TopologyFile,
                where=lambda key: f"{path}: {key}" if key else str(path),
                pasteable=lambda key, value: f"{key.rpartition('.')[2]}: {value}",
            )
        )
        raise


@cache
def _aliases() -> dict[str, str]:
    """Alias to preset name, read from the preset files."""
    found = {}
    for name in preset_names():
        data = read_mapping(_PRESETS / f"{name}.yaml", TopologyUnreadable, "topology file")
        found.update(dict.fromkeys(data.get("aliases", ()), name))
    return found

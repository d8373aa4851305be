"""Loading of a topology by name: a preset, an alias, a topology file, or `local`.

`local` is detected without a framework: by the vendor's tools for accelerators, else by the operating system.
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Final, Literal

from hyper_parallel.config import read_mapping, read_section
from hyper_parallel.errors import BadValue, DeviceUnavailable, TopologyUnreadable, UnknownDevice, UnknownTopology
from hyper_parallel.topology._file import TopologyFile
from hyper_parallel.topology._supernode import Quantity, Supernode
from hyper_parallel.topology.cpu_machine import DEFAULT_CPU_RANKS, cpu_supernode
from hyper_parallel.units import MiB

_PRESETS: Final = Path(__file__).with_name("presets")
_TOOL_TIMEOUT_S: Final = 20
MOST_CPU_RANKS: Final = 4096
"""Maximum number of CPU ranks on one machine."""


def preset_names() -> tuple[str, ...]:
    """Return the names of the shipped topologies, without aliases."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.yaml")))


def topology_hint(option: str = "topology=") -> str:
    """Return a hint that selects another machine: `option` with a preset's name, and the names of all presets."""
    return f"{option}dgx-h100 (machines: {', '.join(preset_names())}, or a YAML file)"


def load_topology(name_or_path: str | Path, num_devices: int | None = None) -> Supernode:
    """Return the topology of a preset, in a file, or of this machine.

    Args:
        name_or_path: A preset name or alias, the path of a topology file, or `local` for this machine.
        num_devices: For `local`, the number of devices to use; see `detect_local`. Other topologies ignore it.

    Raises:
        UnknownTopology: HP303 for any other text; the hint has the nearest names.
        TopologyUnreadable: HP309 when the file is missing or is no YAML or JSON mapping.
        UnknownKey: HP101, BadValue: HP102 when a key of the file is unknown or its value is not allowed.
        HyperParallelError: Errors of `detect_local`, for `local`.
    """
    text = str(name_or_path)
    if text == "local":
        return detect_local(num_devices)
    path = Path(text)
    if path.suffix.lower() in {".yaml", ".yml", ".json"} or "/" in text:
        return read_topology(path)
    names = preset_names()
    preset = text if text in names else _aliases().get(text)
    if preset is not None:
        return read_topology(_PRESETS / f"{preset}.yaml")
    near = difflib.get_close_matches(text, [*names, *_aliases(), "local"], n=3)
    raise UnknownTopology(
        f"unknown topology `{text}`",
        got=text,
        allowed=["local", *names, "or the path of a YAML file"],
        hint=f"did you mean {' or '.join(f'`{n}`' for n in near)}?" if near else None,
    )


def read_topology(path: Path) -> Supernode:
    """Return the topology in a file; raise HP309, HP101 or HP102 as `load_topology`."""
    return read_section(path, TopologyFile, TopologyUnreadable, "topology file").resolve()


@cache
def _aliases() -> dict[str, str]:
    aliases = {}
    for name in preset_names():
        data = read_mapping(_PRESETS / f"{name}.yaml", TopologyUnreadable, "topology file")
        aliases.update(dict.fromkeys(data.get("aliases", ()), name))
    return aliases


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Accelerator of this machine, as the vendor's tool reports it."""

    kind: Literal["cuda", "npu"]
    name: str
    memory_bytes: int  # 0 when the tool does not say


def parse_nvidia_smi(text: str) -> list[Accelerator]:
    """Return the devices in the output of `_NVIDIA_SMI`; devices with unified memory have `memory_bytes` 0."""
    pattern = re.compile(r"\s*([^\s\[].*?)\s*,\s*(?:(\d+)\s*MiB|\[N/A\])\s*")
    rows = map(pattern.fullmatch, text.splitlines()[1:])
    return [Accelerator("cuda", row[1], int(row[2] or 0) * MiB) for row in rows if row]


def parse_npu_smi(text: str) -> list[Accelerator]:
    """Return the devices in the output of `npu-smi info -m`.

    Rows have NPU id, chip id, logic id and chip name. A row without a logic id is a controller, not a device.
    """
    pattern = re.compile(r"\s*\d+\s+\d+\s+\d+\s+(.*?\d.*?)\s*")
    rows = map(pattern.fullmatch, text.splitlines())
    return [Accelerator("npu", row[1], 0) for row in rows if row]


_NVIDIA_SMI: Final = "nvidia-smi --query-gpu=name,memory.total --format=csv"
_TOOLS: Final = (
    (_NVIDIA_SMI, parse_nvidia_smi, "CUDA_VISIBLE_DEVICES"),
    ("npu-smi info -m", parse_npu_smi, "ASCEND_RT_VISIBLE_DEVICES"),
)
"""(command that lists the devices, parser of its output, variable that restricts the devices) per vendor."""


def find_accelerators() -> list[Accelerator]:
    """Return the accelerators that this process may use: NVIDIA's, else Ascend's; empty without accelerators.

    CUDA_VISIBLE_DEVICES or ASCEND_RT_VISIBLE_DEVICES selects and orders devices by index. If it contains a name, such
    as a UUID, only the number of entries is used.
    """
    for command, parse, variable in _TOOLS:
        try:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue  # no tool, or one without its driver: no usable device of this vendor
        devices = parse(done.stdout) if done.returncode == 0 else []
        if visible := _visible(devices, os.environ.get(variable)):
            return visible
    return []


def _visible(devices: list[Accelerator], selection: str | None) -> list[Accelerator]:
    """Return the devices that `selection`, a list of indices such as `0,1`, makes visible; None: all devices.

    As in the vendors' drivers, the first invalid index and all later ones are ignored. For UUIDs or other names, return
    as many devices as there are names.
    """
    if selection is None:
        return devices
    parts = [part.strip() for part in selection.split(",")]
    if not all(part.lstrip("-").isdigit() for part in parts if part):
        return devices[: len(parts)]  # all devices of a machine are equal
    valid = takewhile(lambda part: part and 0 <= int(part) < len(devices), parts)
    return [devices[int(part)] for part in valid]


def match_preset(accelerator: Accelerator) -> Supernode | None:
    """Return the first preset, by name, whose device has the accelerator's kind and name; None if there is none."""
    for name in preset_names():
        supernode = load_topology(name)
        if supernode.device.kind == accelerator.kind and _is_reported_as(accelerator, supernode):
            return supernode
    return None


def _is_reported_as(accelerator: Accelerator, supernode: Supernode) -> bool:
    globs = supernode.device.reported_as
    return any(fnmatch.fnmatchcase(accelerator.name, glob) for glob in globs)


def detect_local(num_devices: int | None = None, *, accelerators: Sequence[Accelerator] | None = None) -> Supernode:
    """Return the topology of this machine.

    Args:
        num_devices: Number of devices to use. None: every accelerator, or 4 ranks on a machine without accelerators.
        accelerators: Known accelerators. None: detect them.

    Returns:
        The preset of the first accelerator, with the number of devices to use and, if all devices report their memory,
        the smallest one. Without accelerators, a CPU machine whose cores and memory are divided among the ranks; its
        rates are measured and cached.

    Raises:
        BadValue: HP102 when `num_devices` is below one.
        DeviceUnavailable: HP502 for more accelerators than this machine has, or more than 4096 ranks on its CPU.
        UnknownDevice: HP312 when no preset describes the accelerator, or the rates of the CPU cannot be measured.
    """
    if num_devices is not None and num_devices < 1:
        raise BadValue("the number of devices is below one", got=num_devices, hint="use one device or more")
    if accelerators is None:
        accelerators = find_accelerators()
    if not accelerators and (num_devices or 1) > MOST_CPU_RANKS:
        raise DeviceUnavailable(
            "more ranks are requested than may run on the processors of one machine",
            got=f"{num_devices} ranks",
            allowed=f"at most {MOST_CPU_RANKS} ranks on the processors of one machine",
            hint=f"use fewer ranks, or {topology_hint('another topology, such as ')}",
        )
    if not accelerators:
        return cpu_supernode(num_devices or DEFAULT_CPU_RANKS)
    preset = match_preset(accelerators[0])
    if preset is None:
        raise UnknownDevice(
            f"no preset describes the accelerator `{accelerators[0].name}` of this machine",
            got=f"{len(accelerators)} x {accelerators[0].name}",
            allowed=[glob for n in preset_names() for glob in load_topology(n).device.reported_as],
            hint="write a topology file for it, and give its path as the topology in place of `local`",
        )
    if num_devices is not None and num_devices > len(accelerators):
        raise DeviceUnavailable(
            "more devices are requested than this machine has",
            got=num_devices,
            allowed=f"1..{len(accelerators)}",
            hint=f"use {len(accelerators)} devices or fewer, or plan for the topology {preset.name}",
        )
    device = preset.device
    if smallest := min(a.memory_bytes for a in accelerators):
        memory = Quantity(float(smallest), "reported by nvidia-smi", "measured")
        device = replace(device, memory_bytes=memory)
    count = num_devices or len(accelerators)
    return replace(
        preset,
        name="local",
        description=f"this machine: {count} x {device.name}, links as in {preset.name}",
        num_devices=count,
        device=device,
    )


def is_this_machine(topology: str) -> bool:
    """Return whether a topology has the same device as this machine; argument and errors as for `load_topology`.

    Device names are compared. Without an accelerator, or without device names in the topology, only kinds are compared.
    """
    if topology == "local":
        return True
    supernode, accelerators = load_topology(topology), find_accelerators()
    if not accelerators or not supernode.device.reported_as:
        return supernode.device.kind == (accelerators[0].kind if accelerators else "cpu")
    return _is_reported_as(accelerators[0], supernode)

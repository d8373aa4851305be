"""The machine at hand, found without any framework: vendor tools for accelerators, else the operating system."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from hyper_parallel.errors import BadValue, DeviceUnavailable, UnknownDevice
from hyper_parallel.topology._cpu import DEFAULT_CPU_RANKS, cpu_supernode
from hyper_parallel.topology._load import load_topology, preset_names
from hyper_parallel.topology._types import Quantity, Supernode
from hyper_parallel.units import MiB

_TOOL_TIMEOUT_S: Final = 20


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator as the vendor's tool reports it.

    Attributes:
        kind: cuda or npu.
        name: Reported name.
        memory_bytes: Reported memory; 0 when the tool does not say.
    """

    kind: Literal["cuda", "npu"]
    name: str
    memory_bytes: int


def parse_nvidia_smi(text: str) -> list[Accelerator]:
    """Devices in the output of `nvidia-smi --query-gpu=name,memory.total --format=csv`."""
    found = []
    for line in text.splitlines()[1:]:
        name, _, memory = line.rpartition(",")
        match = re.fullmatch(r"\s*(\d+)\s*MiB\s*", memory)
        if name.strip() and match:
            found.append(Accelerator("cuda", name.strip(), int(match[1]) * MiB))
    return found


def parse_npu_smi(text: str) -> list[Accelerator]:
    """Devices in the output of `npu-smi info -m`: rows of NPU id, chip id, logic id and chip name.

    Rows without a logic id are controllers, not devices.
    """
    rows = (re.fullmatch(r"\s*\d+\s+\d+\s+\d+\s+(.*?\d.*?)\s*", line) for line in text.splitlines())
    return [Accelerator("npu", row[1], 0) for row in rows if row]


def find_accelerators(environ: Mapping[str, str] = os.environ) -> list[Accelerator]:
    """Accelerators this process may use, in the order of their ids; empty on a machine without any.

    Respects CUDA_VISIBLE_DEVICES and ASCEND_RT_VISIBLE_DEVICES as far as they list plain ids.
    """
    tools: tuple[tuple[list[str], Callable[[str], list[Accelerator]], str], ...] = (
        (
            ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv"],
            parse_nvidia_smi,
            "CUDA_VISIBLE_DEVICES",
        ),
        (["npu-smi", "info", "-m"], parse_npu_smi, "ASCEND_RT_VISIBLE_DEVICES"),
    )
    for command, parse, variable in tools:
        if shutil.which(command[0]) is None:
            continue
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            continue  # a tool without its driver: no usable device of this vendor
        found = _visible(parse(done.stdout), environ.get(variable)) if done.returncode == 0 else []
        if found:
            return found
    return []


def _visible(found: list[Accelerator], selection: str | None) -> list[Accelerator]:
    """Apply a list of visible ids as the vendors do: ids after the first invalid one are ignored."""
    if selection is None:
        return found
    parts = [part.strip() for part in selection.split(",")]
    if parts and any(not part.lstrip("-").isdigit() for part in parts if part):
        return found[: len(parts)]  # ids by UUID: all devices of a machine are alike
    chosen = []
    for part in parts:
        if not part or not 0 <= int(part) < len(found):
            break
        chosen.append(found[int(part)])
    return chosen


def match_preset(accelerator: Accelerator) -> Supernode | None:
    """The preset whose device card reports this name."""
    for name in preset_names():
        supernode = load_topology(name)
        if supernode.device.kind == accelerator.kind and any(
            fnmatch.fnmatchcase(accelerator.name, glob) for glob in supernode.device.reported_as
        ):
            return supernode
    return None


def detect_local(
    num_devices: int | None = None, *, found: Sequence[Accelerator] | None = None
) -> Supernode:
    """This machine as planning sees it. Imports no framework.

    Args:
        num_devices: Devices to use. None: every accelerator, or 4 ranks on a machine without one.
        found: The accelerators, when they are already known. None: look for them.

    Returns:
        The preset of the accelerator found, with the number of devices and the memory that is reported; without an
        accelerator a CPU machine whose cores and memory are divided among the ranks, its rates measured once and
        cached.

    Raises:
        BadValue: HP102 when `num_devices` is below one.
        DeviceUnavailable: HP502 when more devices are wanted than there are accelerators.
        UnknownDevice: HP312 when no preset describes the accelerator.
    """
    if num_devices is not None and num_devices < 1:
        raise BadValue("the number of devices is below one", got=num_devices, allowed=">= 1")
    if found is None:
        found = find_accelerators()
    if not found:
        return cpu_supernode(num_devices or DEFAULT_CPU_RANKS)
    preset = match_preset(found[0])
    if preset is None:
        raise UnknownDevice(
            f"no preset describes the accelerator `{found[0].name}` of this machine",
            got=f"{len(found)} x {found[0].name}",
            allowed=[glob for n in preset_names() for glob in load_topology(n).device.reported_as],
            hint="write a topology file for it and set `topology=machine.yaml`",
        )
    if num_devices is not None and num_devices > len(found):
        raise DeviceUnavailable(
            "more devices are asked for than this machine has",
            got=num_devices,
            allowed=f"1..{len(found)}",
            hint=f"use {len(found)} devices, or plan for a preset such as `--topology {preset.name}`",
        )
    device = preset.device
    if found[0].memory_bytes:
        smallest = min(a.memory_bytes for a in found)
        memory = Quantity(float(smallest), "reported by nvidia-smi", "measured")
        device = replace(device, memory_bytes=memory)
    count = num_devices or len(found)
    return replace(
        preset,
        name="local",
        description=f"this machine: {count} x {device.name}, links as in {preset.name}",
        num_devices=count,
        device=device,
    )

"""Processor and memory of this machine: ranks that it can run, and its supernode if it has no accelerators.

In this supernode, each rank is a device with a share of the cores and of the memory.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hyper_parallel.errors import UnknownDevice
from hyper_parallel.received import Limits, read_json
from hyper_parallel.serde import write_text
from hyper_parallel.topology._supernode import Device, Quantity, Supernode, Tier
from hyper_parallel.units import GiB, format_bytes

_LIMITS: Final = Limits(65536, num_elements=1000)

_LOG = logging.getLogger(__name__)

DEFAULT_CPU_RANKS: Final = 4
"""Default number of ranks on a machine without an accelerator."""

CPU_RANK_BYTES: Final = int(0.4 * GiB)
"""Bytes of memory that a CPU rank needs without its model."""

_CPU_RANKS: Final = 16
_CPU_RANKS_PER_CORE: Final = 4
"""A machine with enough memory may start `_CPU_RANKS` ranks, or `_CPU_RANKS_PER_CORE` per core if that is more."""

_BFLOAT16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
_CACHE_VERSION: Final = 1
_CACHED: Final = re.compile(r"cpu-[0-9a-f]{12}\.json")
_PACKAGE: Final = "hyper-parallel"
_MEASURE_TIMEOUT_S: Final = 60
_LOOPBACK_BYTES_S: Final = 1.1e9
_LOOPBACK_STEP_S: Final = 0.4e-3
"""Bytes/s per core, and seconds per ring step, of gloo over loopback, measured on two busy cores."""


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor and memory of this machine, within the CPU affinity and the cgroup v2 memory limit of this process.

    CPU quotas are not considered.
    """

    model: str
    cores: int
    memory_bytes: int
    has_bfloat16: bool  # whether the instruction set multiplies bfloat16


@dataclass(frozen=True, slots=True)
class RankCapacity:
    """Largest number of local ranks that this machine can run.

    Attributes:
        num_ranks: Number of ranks, at least one.
        limit: Resource that limits the number, as text for errors.
        is_cpu: True if ranks share the CPU, False if each rank needs an accelerator.
    """

    num_ranks: int
    limit: str
    is_cpu: bool


def cache_dir() -> Path:
    """Return the user's cache directory of this package; `XDG_CACHE_HOME` overrides it on every system."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / _PACKAGE
    from platformdirs import user_cache_path

    return user_cache_path(_PACKAGE, appauthor=False)


def read_cpu() -> Cpu:
    """Return processor and memory, within the CPU affinity of this process and the memory limit of its container."""
    facts = _facts("/proc/cpuinfo")
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    memory = int(_facts("/proc/meminfo").get("MemTotal", "0").split()[0]) * 1024
    memory = memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    return Cpu(
        model=facts.get("model name") or platform.processor() or platform.machine(),
        cores=cores,
        memory_bytes=min(memory, int(limit)) if limit.isdigit() else memory,
        has_bfloat16=bool(flags & _BFLOAT16_FLAGS),
    )


def free_memory_bytes() -> int:
    """Return the bytes that new processes can use without swapping, within the limit of a container.

    On systems other than Linux, return all memory of the machine.
    """
    available = int(_facts("/proc/meminfo").get("MemAvailable", "0").split()[0]) * 1024
    available = available or read_cpu().memory_bytes  # not Linux
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if not (limit.isdigit() and used.isdigit()):
        return available
    stat = dict(line.split() for line in _read("/sys/fs/cgroup/memory.stat").splitlines())
    cached = int(stat.get("inactive_file", "0"))  # file cache that the kernel can reclaim
    return max(0, min(available, int(limit) - int(used) + cached))


def rank_capacity(num_accelerators: int) -> RankCapacity:
    """Return the number of ranks that this machine can run: one per accelerator, or as CPU and memory allow.

    Args:
        num_accelerators: Accelerators that ranks may use; 0: ranks compute on the CPU.
    """
    if num_accelerators:
        return RankCapacity(num_accelerators, f"accelerators: {num_accelerators}", is_cpu=False)
    cores, free = read_cpu().cores, free_memory_bytes()
    by_cores = max(_CPU_RANKS, _CPU_RANKS_PER_CORE * cores)
    by_memory = max(1, free // CPU_RANK_BYTES)
    if by_memory < by_cores:
        each = format_bytes(CPU_RANK_BYTES)
        return RankCapacity(by_memory, f"{format_bytes(free)} of free memory, {each} per rank", is_cpu=True)
    return RankCapacity(by_cores, f"{cores} cores", is_cpu=True)


def rank_threads(num_ranks: int) -> int:
    """Return the CPU threads of each local rank: OMP_NUM_THREADS, else an equal share of the cores, at least 1.

    If OMP_NUM_THREADS is a list such as `4,2`, its first number is used. Invalid values and 0 are ignored.
    """
    outer = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return (int(outer) if outer.isdecimal() else 0) or max(1, read_cpu().cores // num_ranks)


def _facts(path: str) -> dict[str, str]:
    """Return the `name: value` lines of a file as a dict with the first value of each name; {} if it is unreadable."""
    lines = (line.partition(":") for line in reversed(_read(path).splitlines()))
    return {name.strip(): value.strip() for name, _, value in lines}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_rates(cpu: Cpu) -> dict[str, float]:
    """Return the measured rates of this machine, from the cache if it has this processor and number of cores.

    Returns:
        `float32` and `float64` in FLOP/s, `memory` in bytes/s (read plus written), of all cores together.

    Raises:
        UnknownDevice: HP312 if the measurement fails, or takes more than a minute.
    """
    key = f"{cpu.model}|{cpu.cores}|{_CACHE_VERSION}"
    path = cache_dir() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    cached = _from_cache(path, key)
    if cached is not None:
        return cached
    script = Path(__file__).with_name("_measure.py")
    command = [sys.executable, str(script), str(cpu.cores)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MEASURE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        lines = error.stderr.splitlines() if isinstance(error, subprocess.CalledProcessError) else []
        raise UnknownDevice(
            "the rates of the processor of this machine cannot be measured",
            got=lines[-1] if lines else str(error),
            hint="run again when the machine is idle, or write a topology file and give its path as the topology",
        ) from error
    rates: dict[str, float] = json.loads(done.stdout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"key": key, "rates": rates}, indent=2))
    except OSError as error:
        _LOG.warning("the measured processor rates are not cached: %s", error)
    return rates


def forget_measurements() -> None:
    """Remove the cached processor rates, so that the next detection measures again."""
    for path in cache_dir().glob("cpu-*.json"):
        if _CACHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def _from_cache(path: Path, key: str) -> dict[str, float] | None:
    try:
        data = read_json(path, _LIMITS)
        rates = {name: float(data["rates"][name]) for name in ("float32", "float64", "memory")}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent or damaged: measured again
    return rates if data.get("key") == key and min(rates.values()) > 0 else None


def cpu_supernode(num_ranks: int) -> Supernode:
    """Return this machine with its cores and memory divided evenly among `num_ranks` ranks; raise HP312 as `cpu_rates`.

    The rates of a rank are those of its `rank_threads` threads, so some cores may be idle.
    """
    cpu = read_cpu()
    rates = cpu_rates(cpu)
    used = min(cpu.cores, num_ranks * rank_threads(num_ranks))
    of = f" of {cpu.cores}" if used < cpu.cores else ""
    share = f"{used}{of} cores / {num_ranks} ranks"
    measured = f"numpy on this machine, {share}"
    part = used / cpu.cores / num_ranks

    def rate(name: str) -> Quantity:
        return Quantity(rates[name] * part, measured, "measured")

    factor, why = (2.0, "has") if cpu.has_bfloat16 else (0.5, "lacks")
    bfloat16 = f"{factor:g} x float32: the processor {why} bfloat16 instructions"
    memory = float(cpu.memory_bytes // num_ranks)
    device = Device(
        name=f"{cpu.model} ({share})",
        kind="cpu",
        peak_flops={
            "float32": rate("float32"),
            "float64": rate("float64"),
            "bfloat16": Quantity(rates["float32"] * factor * part, bfloat16, "inferred"),
        },
        memory_bytes=Quantity(memory, f"memory of the machine / {num_ranks}", "measured"),
        memory_bytes_s=rate("memory"),
        ranks_per_core=max(1.0, num_ranks / cpu.cores),
    )
    host = Tier(
        name="host",
        size=0,
        bytes_s=Quantity(
            _LOOPBACK_BYTES_S * min(1.0, cpu.cores / num_ranks),
            f"gloo over loopback, 1.1 GB/s per core in use measured on two cores, {share}",
            "derived",
        ),
        latency_s=Quantity(
            _LOOPBACK_STEP_S * max(1.0, num_ranks / cpu.cores),
            f"gloo over loopback, 0.4 ms per ring step measured on two cores, {share}",
            "derived",
        ),
        kind="host",
    )
    return Supernode(
        name="local",
        description=f"this machine: {num_ranks} ranks on {cpu.cores} cores of {cpu.model}",
        num_devices=num_ranks,
        device=device,
        tiers=(host,),
    )

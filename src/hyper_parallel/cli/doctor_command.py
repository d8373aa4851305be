"""`hyper-parallel doctor`: what works on this machine, what does not, and the command that enables it.

With dumps of torch's flight recorder it says instead where the ranks of a run that hung have parted. Versions come
from package metadata, so nothing is imported to be looked at.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hyper_parallel import __version__
from hyper_parallel.cli.app import say
from hyper_parallel.cli.requirements import EXTRA, REQUIREMENTS, Need, Requirement


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: ok, missing, old, or warning.
        detail: What was found.
        need: How much depends on it.
        gives: What it is for.
        fix: Command that enables it; None when nothing is to be done.
    """

    name: str
    status: Literal["ok", "missing", "old", "warning"]
    detail: str
    need: Need
    gives: str
    fix: str | None = None


def doctor(
    dumps: Annotated[
        list[Path] | None,
        typer.Argument(help="Dumps of torch's flight recorder, or a directory of them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the processor again, ignoring the cache.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", help="Measure properties of this model: a directory or config.json."
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that lies beside the config.")
    ] = False,
) -> None:
    """Say what works on this machine, and how to enable the rest; or where ranks that hung have parted.

    With --model: measured properties of a model, such as whether packed documents see each other. Exits with 0 when
    planning works, which needs neither an accelerator nor torch; with dumps, when they can be read.
    """
    if model is not None:
        _print_properties(model, as_json, trust_remote_code)
        return
    if dumps:
        _print_dumps(dumps, as_json)
        return
    packages = [check_package(requirement) for requirement in REQUIREMENTS]
    machine, machine_json = _machine(measure)
    findings = [_python(), *packages, *machine, *_storage()]
    usable = {need: _usable(findings, need) for need in ("core", "training")}
    if as_json:
        report = {
            "version": __version__,
            "planning": usable["core"],
            "training": usable["core"] and usable["training"],
            "findings": [asdict(finding) for finding in findings],
            "topology": machine_json,
        }
        say(json.dumps(report, indent=2))
    else:
        _print(findings, usable["core"], usable["core"] and usable["training"])
    if not usable["core"]:
        raise typer.Exit(1)


def _print_properties(model: str, as_json: bool, trusted: bool) -> None:
    """Print the measured properties of a model on standard output."""
    from hyper_parallel.model import QUESTIONS, read_config
    from hyper_parallel.trainer.model_properties import properties_of

    properties = properties_of(read_config(model), trusted=trusted)
    if as_json:
        say(json.dumps(asdict(properties), indent=2))
        return
    say(f"{properties.model_class}, measured on: {properties.measured_on}")
    answers = properties.questions()
    width = max(map(len, answers))
    for name, answer in answers.items():
        mark = {True: "ok", False: "no", None: "--"}[answer.holds]
        say(f"{mark:<4}{name:<{width}}  {QUESTIONS[name]}: {answer}")
    idle = ", ".join(properties.idle_modules) or "none"
    say(f"    {'idle_modules':<{width}}  modules that a text does not use: {idle}")


def _print_dumps(paths: list[Path], as_json: bool) -> None:
    """Where the ranks of every group part, the earliest first, on standard output."""
    from hyper_parallel.reports.flight_recorder import divergences, read_dumps

    dumps = read_dumps(paths)
    found = divergences(dumps)
    if as_json:
        report = {"ranks": list(dumps), "divergences": [asdict(one) for one in found]}
        say(json.dumps(report, indent=2))
        return
    calls = sum(len(dump["entries"]) for dump in dumps.values())
    say(f"{len(dumps)} dumps, {calls} calls")
    for one in found:
        say(f"\n{one}")
    if not found:
        say("all ranks have called the same collectives, and all are done")


def check_package(requirement: Requirement) -> Finding:
    """Look up one package by its metadata."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    r = requirement
    try:
        version = installed(r.name)
    except PackageNotFoundError:
        wanted = EXTRA if r.need == "training" else r.wanted
        return Finding(r.name, "missing", "not installed", r.need, r.gives, _install(wanted))
    if r.minimum and release(version) < release(r.minimum):
        detail = f"{version}, at least {r.minimum} is needed"
        return Finding(r.name, "old", detail, r.need, r.gives, _install(r.wanted))
    if r.below and release(version) >= release(r.below):
        detail = f"{version}, below {r.below} is wanted"
        return Finding(r.name, "warning", detail, r.need, r.gives, _install(r.wanted))
    return Finding(r.name, "ok", version, r.need, r.gives)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without pre-release and build parts: `2.13.0+cpu` is (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match[0].split(".")) if match else ()


def _install(wanted: str) -> str:
    quoted = f"'{wanted}'" if {">", "["} & {*wanted} else wanted
    return f"{Path(sys.executable).name} -m pip install {quoted}"


def _usable(findings: list[Finding], need: str) -> bool:
    return all(f.status not in ("missing", "old") for f in findings if f.need == need)


def _python() -> Finding:
    detail = (
        f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    )
    return Finding("python", "ok", detail, "core", "everything")


def _machine(measure: bool) -> tuple[list[Finding], dict[str, Any] | None]:
    """Accelerators and the topology that planning for `local` would use."""
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.serde import encode
    from hyper_parallel.topology import detect_local, find_accelerators, forget_measurements
    from hyper_parallel.units import format_bytes, format_seconds

    if measure:
        forget_measurements()
    found = find_accelerators()
    shown = f"{len(found)} x {found[0].name}" if found else "none, 4 ranks share the processor"
    findings = [Finding("accelerators", "ok", shown, "optional", "training at speed")]
    if found and found[0].kind == "cuda" and _is_cpu_build("torch"):
        findings.append(
            Finding(
                "torch build", "warning", "torch is a CPU build and cannot use the accelerator",
                "optional", "training at speed", _install("torch>=2.11") + " --force-reinstall",
            )
        )  # fmt: skip
    try:
        machine = detect_local(accelerators=found)
    except HyperParallelError as error:
        detail = f"[{error.code}] {error.what}"
        findings.append(
            Finding("topology", "warning", detail, "optional", "topology: local", error.hint)
        )
        return findings, None
    device, tier = machine.device, machine.tiers[0]
    peaks = ", ".join(f"{d} {q.value / 1e12:.3g}" for d, q in device.peak_flops.items())
    detail = (
        f"{machine.description}; per device {peaks} TFLOP/s, {format_bytes(device.memory_bytes.value)}; "
        f"{tier.name} {tier.bytes_s.value / 1e9:.3g} GB/s, {format_seconds(tier.latency_s.value)}"
    )
    findings.append(Finding("topology", "ok", detail, "optional", "topology: local"))
    return findings, encode(machine)


def _is_cpu_build(name: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name).endswith("+cpu")
    except PackageNotFoundError:
        return False


def _storage() -> list[Finding]:
    from hyper_parallel.topology import cache_dir
    from hyper_parallel.units import GB, format_bytes

    cache = cache_dir()
    findings = []
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
        findings.append(
            Finding("cache", "ok", str(cache), "optional", "tokenised data, measurements")
        )
    except OSError as error:
        findings.append(
            Finding(
                "cache", "warning", f"{cache}: {error.strerror}", "optional",
                "tokenised data, measurements", "export XDG_CACHE_HOME=/a/writable/directory",
            )
        )  # fmt: skip
    free = shutil.disk_usage(Path.cwd()).free
    status: Literal["ok", "warning"] = "ok" if free > 5 * GB else "warning"
    detail = f"{format_bytes(free)} free in the working directory"
    fix = None if status == "ok" else "free some space, or set `output_dir` to another disk"
    return [*findings, Finding("disk", status, detail, "optional", "runs and checkpoints", fix)]


def _print(findings: list[Finding], planning: bool, training: bool) -> None:
    width = max(len(f.name) for f in findings)
    marks = {
        "ok": ("ok", "green"),
        "missing": ("--", "yellow"),
        "old": ("old", "red"),
        "warning": ("!!", "yellow"),
    }
    for f in findings:
        mark, color = marks[f.status]
        typer.secho(f"{mark:<4}", fg=None if os.environ.get("NO_COLOR") else color, nl=False)
        say(f"{f.name:<{width}}  {f.detail}" + ("" if f.status == "ok" else f": {f.gives}"))
        if f.fix is not None:
            say(f"{'':{width + 6}}hint: {f.fix}")
    verdicts = (("planning", planning), ("training and generation", training))
    say()
    for what, usable in verdicts:
        say(f"{what}: {'works' if usable else 'disabled, see the hints above'}")
    if not training:
        say(f"\nhint: {_install(EXTRA)}")
        say("      from a checkout `make setup` does the same")

"""`hyper-parallel doctor`: report which features work on this machine, and how to enable the others.

Given dumps of torch's flight recorder, it reports where the ranks of a hung run diverged. Versions are read from
package metadata, without importing the packages.
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
from hyper_parallel.backends import BACKENDS
from hyper_parallel.cli.app import TrustRemoteCode, say
from hyper_parallel.cli.requirements import EXTRA, REQUIREMENTS, Need, Requirement


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check, a line of the report.

    Attributes:
        name: Checked item.
        status: ok, missing, old, or warning.
        detail: Result of the check, such as a version.
        need: Group of features that need the item: `core`, `training` or `optional`.
        gives: Feature that the item provides.
        fix: Command or advice that enables the item. None: no action needed.
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
        typer.Argument(help="Dump files of torch's flight recorder, or a directory of them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the CPU again, ignoring cached results.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Model directory or config.json whose properties to measure."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Report which features work on this machine and how to enable the others, or where hung ranks diverged.

    With --model: measure properties of a model, such as whether packed documents attend to each other. Exit status 0 if
    planning works, which needs neither an accelerator nor torch; with dumps, if they can be read.
    """
    if model is not None:
        _print_properties(model, as_json, trust_remote_code)
        return
    if dumps:
        _print_dumps(dumps, as_json)
        return
    packages = [check_package(requirement) for requirement in REQUIREMENTS]
    machine, machine_json = _machine(measure)
    findings = [_python(), *packages, _compiler(), *machine, *_storage()]
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
    from hyper_parallel.model import QUESTIONS, read_config
    from hyper_parallel.trainer.model_properties import properties_of

    properties = properties_of(read_config(model), trusted=trusted)
    if as_json:
        say(json.dumps(asdict(properties), indent=2))
        return
    say(f"{properties.model_class}, measured on: {properties.measured_on}")
    answers = properties.by_name()
    width = max(map(len, answers))
    for name, answer in answers.items():
        mark = {True: "ok", False: "no", None: "--"}[answer.holds]
        say(f"{mark:<4}{name:<{width}}  {QUESTIONS[name]}: {answer}")
    idle = ", ".join(properties.idle_modules) or "none"
    say(f"    {'idle_modules':<{width}}  modules unused for text input: {idle}")


def _print_dumps(paths: list[Path], as_json: bool) -> None:
    """Print the first collective at which ranks diverge, for each process group whose ranks diverge."""
    from hyper_parallel.reports.flight_recorder import divergences, read_dumps

    dumps = read_dumps(paths)
    diverged = divergences(dumps)
    if as_json:
        report = {"ranks": list(dumps), "divergences": [asdict(d) for d in diverged]}
        say(json.dumps(report, indent=2))
        return
    calls = sum(len(dump["entries"]) for dump in dumps.values())
    say(f"{len(dumps)} dumps, {calls} calls")
    for divergence in diverged:
        say(f"\n{divergence}")
    if not diverged:
        say("all ranks have called the same collectives, and all of them completed")


def check_package(requirement: Requirement) -> Finding:
    """Return the finding on a package, from its metadata."""
    r = requirement
    version = _installed_version(r.name)
    if version is None:
        specifier = EXTRA if r.need == "training" else r.wanted
        return Finding(r.name, "missing", "not installed", r.need, r.gives, _install(specifier))
    if r.minimum and release(version) < release(r.minimum):
        detail = f"{version}, but {r.minimum} or later is needed"
        return Finding(r.name, "old", detail, r.need, r.gives, _install(r.wanted))
    return Finding(r.name, "ok", version, r.need, r.gives)


def _installed_version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version: (2, 13, 0) for `2.13.0+cpu`; () if it begins with no number."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(n) for n in match[0].split(".")) if match else ()


def _install(specifier: str) -> str:
    quoted = f"'{specifier}'" if {">", "["} & {*specifier} else specifier
    return f"{Path(sys.executable).name} -m pip install {quoted}"


def _usable(findings: list[Finding], need: str) -> bool:
    return all(f.status not in ("missing", "old") for f in findings if f.need == need)


def _optional(name: str, detail: str, gives: str, fix: str | None = None) -> Finding:
    """Return a finding on an item that only some features need: a warning if it has a fix."""
    return Finding(name, "ok" if fix is None else "warning", detail, "optional", gives, fix)


def _python() -> Finding:
    detail = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    return Finding("python", "ok", detail, "core", "everything")


def _compiler() -> Finding:
    path = shutil.which("g++")
    gives = " and ".join(b.commands["g++"] for b in BACKENDS.values() if "g++" in b.commands)
    if path is None:
        return Finding("g++", "missing", "not installed", "optional", gives, "apt-get install g++")
    return Finding("g++", "ok", path, "optional", gives)


def _machine(measure: bool) -> tuple[list[Finding], dict[str, Any] | None]:
    """Return findings on accelerators and topology, and the topology as JSON values; None if detection fails."""
    from hyper_parallel.errors import HyperParallelError
    from hyper_parallel.serde import encode
    from hyper_parallel.topology import detect_local, find_accelerators, forget_measurements
    from hyper_parallel.units import format_bytes, format_seconds

    if measure:
        forget_measurements()
    devices = find_accelerators()
    names = f"{len(devices)} x {devices[0].name}" if devices else "none, 4 ranks share the CPU"
    findings = [_optional("accelerators", names, "fast training")]
    is_cpu_build = (_installed_version("torch") or "").endswith("+cpu")
    if devices and devices[0].kind == "cuda" and is_cpu_build:
        detail = "torch is a CPU build and cannot use the accelerator"
        fix = f"{_install('torch>=2.11')} --force-reinstall"
        findings.append(_optional("torch build", detail, "fast training", fix))
    try:
        machine = detect_local(accelerators=devices)
    except HyperParallelError as error:
        detail = f"[{error.code}] {error.what}"
        fix = error.hint or "hyper-parallel plan MODEL --topology FILE"
        return [*findings, _optional("topology", detail, "topology: local", fix)], None
    device, tier = machine.device, machine.tiers[0]
    peaks = ", ".join(f"{d} {q.value / 1e12:.3g}" for d, q in device.peak_flops.items())
    detail = (
        f"{machine.description}; per device {peaks} TFLOP/s, {format_bytes(device.memory_bytes.value)}; "
        f"{tier.name} {tier.bytes_s.value / 1e9:.3g} GB/s, {format_seconds(tier.latency_s.value)}"
    )
    return [*findings, _optional("topology", detail, "topology: local")], encode(machine)


def _storage() -> list[Finding]:
    from hyper_parallel.topology import cache_dir
    from hyper_parallel.units import GB, format_bytes

    cache, fix = cache_dir(), None
    detail = str(cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        detail = f"{cache}: {error.strerror}"
        fix = "export XDG_CACHE_HOME=/a/writable/directory"
    findings = [_optional("cache", detail, "tokenised data, measurements", fix)]
    free = shutil.disk_usage(Path.cwd()).free
    detail = f"{format_bytes(free)} free in the working directory"
    fix = None if free > 5 * GB else "free some space, or set `output_dir` to another disk"
    return [*findings, _optional("disk", detail, "runs and checkpoints", fix)]


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
    for feature, usable in verdicts:
        say(f"{feature}: {'works' if usable else 'does not work, see the hints above'}")
    if not training:
        say(f"\nhint: {_install(EXTRA)}")
        say("      from a checkout `make setup` does the same")

"""Write the reference pages generated from the code: docs/reference/{errors,config,cli,step_programs}.md.

    python tools/make_reference.py          write the pages
    python tools/make_reference.py --check  exit with 1 when a committed page differs from the code

Errors come from the docstrings of the error classes, configuration from the docstrings of the section fields, commands
from the application itself, operators of step programs from the tables of the back ends.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import typer  # noqa: E402

from hyper_parallel.backends import BACKENDS  # noqa: E402
from hyper_parallel.cli import application  # noqa: E402
from hyper_parallel.config import Recipe, Section, describe  # noqa: E402
from hyper_parallel.errors import all_codes  # noqa: E402

NOTE = "<!-- Written by tools/make_reference.py from the code; do not edit. -->\n\n"
FAMILIES = {
    "1": "Configuration",
    "2": "Layout",
    "3": "Plan and topology",
    "4": "Capacity",
    "5": "Back end",
    "6": "Run",
    "7": "Checkpoint",
}


def errors_page() -> str:
    """Return the page of error codes, with meaning, reason and fix of each."""
    lines = [
        "# Errors",
        "",
        "Every error that a user can cause has a code. Text after `hint:` can be pasted.",
    ]
    family = ""
    for code, cls in all_codes().items():
        if code[2] != family:
            family = code[2]
            lines += ["", f"## {FAMILIES[family]} errors"]
        doc = inspect.getdoc(cls) or ""
        doc = re.sub(r"\s*\b(Why|Fix): ", r"\n\n**\1.** ", doc)
        doc = re.sub(r"(\*\*(?:Why|Fix)\.\*\* )(\w)", lambda m: m[1] + m[2].upper(), doc)
        lines += ["", f"### {code} {cls.__name__}", "", doc]
    return _page(lines)


def config_page() -> str:
    """Return the page of recipe keys, with accepted values, default and meaning of each."""
    lines = [
        "# Recipe keys", "",
        "`null` means derived, unless the key says otherwise. How files, parents and overrides combine: "
        "[write a recipe](../how-to/write_a_recipe.md).",
    ]  # fmt: skip
    top = {n: f for n, f in Recipe.model_fields.items() if not _is_section(f.annotation)}
    lines += ["", "## Top level", "", *_table(top, _meanings(Recipe))]
    for name, field in Recipe.model_fields.items():
        if (section := _section_of(field.annotation)) is not None:
            lines += _section_lines(name, section)
    return _page(lines)


def _section_lines(key: str, section: type[Section]) -> Iterator[str]:
    yield from ("", f"{'#' * (key.count('.') + 2)} {key}", "", inspect.getdoc(section) or "", "")
    yield from _table(section.model_fields, _meanings(section))
    for alias, target in section.KEY_ALIASES.items():
        yield from ("", f"`{alias}` is accepted as another name of `{target}`.")
    for name, field in section.model_fields.items():
        if (inner := _section_of(field.annotation)) is not None:
            yield from _section_lines(f"{key}.{name}", inner)


def _section_of(annotation: Any) -> type[Section] | None:
    """Return the section class X of an annotation `X` or `X | None`; None for any other annotation."""
    return next((inner for inner in (annotation, *get_args(annotation)) if _is_section(inner)), None)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _meanings(section: type[Section]) -> dict[str, str]:
    """Return the docstring of every field of a section by name, from the source files of the class and its bases.

    Pydantic can read them as well, but this makes the import of sections slow.
    """
    (defined,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(defined, ast.ClassDef)
    inherited = {} if section.__base__ is Section else _meanings(section.__base__)
    return inherited | {
        field.target.id: inspect.cleandoc(str(below.value.value))
        for field, below in itertools.pairwise(defined.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }


def _table(fields: dict[str, Any], meanings: dict[str, str]) -> Iterator[str]:
    yield "| key | accepts | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        default = "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        cells = (
            f"`{name}`",
            describe(field),
            default,
            re.sub(r"\bNone:", "null:", meanings.get(name, "")),
        )
        yield _row(cells)


def _row(cells: Iterable[str]) -> str:
    """Return a row of a Markdown table, with line feeds replaced and bars escaped."""
    one_line = (" ".join(cell.split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(one_line)} |"


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Section):
        return _shown(value.model_dump(exclude_defaults=True))
    return str(list(value)) if isinstance(value, tuple) else str(value)


def cli_page() -> str:
    """Return the page of commands, with their arguments and options."""
    lines = [
        "# Commands", "",
        "Data goes to stdout, logs and errors to stderr. Exit status: 0 done, 1 a coded error, 2 wrong usage, 70 a "
        "defect, 128 + signal number when interrupted (130 after Ctrl-C). `NO_COLOR` is respected.",
    ]  # fmt: skip
    root = typer.main.get_command(application())
    lines += ["", "## hyper-parallel", "", *_command(root)]
    for path, command in _walk(root, "hyper-parallel"):
        lines += ["", f"## {path}", "", *_command(command)]
    return _page(lines)


_MINDSPORE = """
## MindSpore: processes and accuracy

With `dp_shard`, parameters, gradients and optimizer states are sharded between steps: a program gathers the parameters
of all layers once per microbatch and scatters the sums of their gradients. On the CPU, MindSpore has no reduce-scatter;
it is an all-reduce and a slice, and an all-to-all is an all-gather and a slice. Its CPU has collectives of all ranks
only, so a group of fewer ranks gathers the values of all ranks and selects its own. Each process registers with a
scheduler that rank 0 starts.

MindSpore orders the operators of a graph as it likes, and differently on ranks whose graphs differ. Each collective
therefore depends on the result of the previous one in the program.

With `ep`, each rank sends the rows of its tokens to the ranks of their experts, in slots of a fixed number: shapes must
be static, so `moe.capacity_factor` is required. With `tp`, a model whose packed projections are exchanged unevenly is
refused with HP104; an example is a fused query, key and value projection with fewer key heads than ranks.

With `pp`, each rank has two programs of its stage: one for the activations that it sends, and one for loss and
gradients, which computes the stage again from the activations that it has received. Ranks run them in the order of the
schedule, one stage per rank. Activations and their gradients are sent by torch, through the memory of the host.

With `training.recompute: full`, the program repeats the operators of a layer before backward first reads their results.
The repetition reads its inputs through `hyper_parallel.after`, which returns its first argument once the second one is
computed, so MindSpore does not merge it with the first run. Results are bitwise equal. In the program of an 8-layer
Qwen3 (width 256, 2 x 256 tokens), results that live at the same time take at most 169 MiB without and 38 MiB with
recompute. The resident memory of a process on the CPU does not fall: kernels of MindSpore that transpose or broadcast
keep a workspace each, and a recomputed operator is one more kernel. In that step it was 2.1 GiB without and 2.6 GiB
with recompute.

With `offload.budget` or `offload.max_slowdown`, the memory planner decides per result of the program of loss and
gradients: keep, recompute, or offload to the host. The decisions are operators of the program: `hyper_parallel.to_host`
copies a value to the host, and `hyper_parallel.to_device` copies it back once its second argument is computed, which is
the prefetch position of the plan. `programs/gradients/memory.json` lists each value with its bytes, its residency and
the positions between which it is off the device; values that it does not list are kept. Results are bitwise equal. On a
CPU, device and host share their memory: both operators are identities, and the peak is **simulated**, as the report
says. On Ascend they would be `ops.move_to` of MindSpore, which was not run. Weights and optimizer states stay on the
device, and there are no files (`offload.flash_dir`). Operators are listed in the order of the plan; MindSpore may run
independent ones in another order, but copies and recomputation wait for the results that the plan names.

With `training.compile: graph-kernel`, the compiler AKG of MindSpore generates one kernel from each chain of
elementwise operators and reductions. It needs the package `decorator`, which MindSpore does not declare, and `g++`; a
recipe is refused with HP501 without them, and `hyper-parallel doctor` names them. The report and the summary of a run
list the kernels with their operators, as read from the files that AKG has written; `run.json` has them as
`fused_kernels`. Lines that AKG prints are in `programs/kernels.log`. Kernels are generated
again at each start. Exponential, logarithm and tanh are not fused: those of AKG are off by up to 2.9e-4, 3.6e-4 for
tanh, and finite at infinity. A sigmoid stays an operator for the same reason. Divisions take a form that AKG fuses, and
broadcasts that the reading operators repeat are omitted. AKG uses fast math, so results differ in the last digits:
losses of a tiny Llama agree to 1e-5. `python benchmarks/fusion.py` compares losses and times with those without fusion.

`memory_bytes` in `metrics.jsonl` is the anonymous memory of the process above its start. Losses agree with torch to
float32 rounding; on the CPU, MindSpore's exponential is off by up to 1e-5, and its tanh by up to 1e-4 near zero.

`make test-mindspore` compares each operator and whole runs with torch, and gradients of two and four processes, or of
two stages, with those of one.
"""


def operators_page() -> str:
    """Return the page of operators that back ends of step programs execute, with their limits."""
    lines = [
        "# Operators of step programs", "",
        "A back end that runs [step programs](../how-to/train_on_mindspore.md) executes the operators of its table. A "
        "recipe whose model needs another one is refused with HP104, which names the operator and the module.",
    ]  # fmt: skip
    packages = {name: b.programs for name, b in BACKENDS.items() if b.programs is not None}
    for backend, package in packages.items():
        table = importlib.import_module(f"{package}.operators")
        lines += ["", f"## backend: {backend}", ""]
        lines += [f"{len(table.OPERATORS)} operators. Complex numbers are not supported.", ""]
        lines += ["| operator | function of `kernels.py` | only |", "|---|---|---|"]
        for name, function in sorted(table.OPERATORS.items()):
            limit = table.LIMITS[name][0] if name in table.LIMITS else ""
            lines.append(_row((f"`{name}`", f"`{function}`", limit)))
    return _page([*lines, _MINDSPORE.rstrip()])


def _walk(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in getattr(group, "commands", {}).items():
        yield f"{path} {name}", command
        yield from _walk(command, f"{path} {name}")


def _command(command: Any) -> Iterator[str]:
    yield inspect.cleandoc(command.help or "")
    rows = []
    for p in command.params:
        if p.param_type_name == "argument":
            name = f"`{p.name.upper()}`" if p.required else f"`[{p.name.upper()}]`"
        else:
            name = ", ".join(f"`{o}`" for o in sorted([*p.opts, *p.secondary_opts], key=len, reverse=True))
        default = "required" if p.required else "" if p.default in (None, False) else f"`{p.default}`"
        rows.append(_row((name, default, getattr(p, "help", "") or "")))
    if rows:
        yield from ("", "| argument or option | default | meaning |", "|---|---|---|", *rows)


def _page(lines: list[str]) -> str:
    head, *rest = lines
    return head + "\n\n" + NOTE.rstrip() + "\n" + "\n".join(rest) + "\n"


def pages() -> dict[Path, str]:
    """Return the content of every generated page by path."""
    folder = ROOT / "docs" / "reference"
    return {
        folder / "errors.md": errors_page(),
        folder / "config.md": config_page(),
        folder / "cli.md": cli_page(),
        folder / "step_programs.md": operators_page(),
    }


def main() -> int:
    """Write the pages, or with `--check` compare them and return 1 if one differs."""
    stale = [
        (path, text) for path, text in pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    if "--check" in sys.argv[1:]:
        for path, _ in stale:
            print(
                f"stale: {path.relative_to(ROOT)}; run python tools/make_reference.py",
                file=sys.stderr,
            )
        return 1 if stale else 0
    for path, text in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

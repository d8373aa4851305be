"""Sweep: SGD steps on MindSpore give torch's losses, in one process; `tools/mindspore_cases.py` stores torch's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mindspore_cases import LR, prepared, rounding

from sweeps.interface import causal_types, refusal_or_failure

TITLE = "MindSpore"
TEXT = """Losses of five SGD steps in float32 on MindSpore against the same steps in torch, to 1e-5 relative, on two
rows of eight tokens. Models have four layers, or two where all layers are alike. They compute attention eagerly and
experts as batched products on both. `HP104` names the operators that MindSpore lacks, each with the module that needs
it, or refuses shapes and branches that depend on values of tensors. `skipped` are types whose steps are chaotic: losses
of torch in float32 and float64 differ by more than the limit. Further types have not been tried yet."""
COLUMNS = ("train",)
SECONDS = 3600
CPU_SECONDS = 240
TYPES_PER_PROCESS = 16
NEEDS = ("mindspore",)
PRELOADED = (
    *("hyper_parallel.backends.torch.program_capture", "transformers.modeling_utils"),
    *("census", "census_models"),
    "hyper_parallel.backends.mindspore.runner",  # it starts threads in `join` only
)
LIMIT = 1e-5


def model_types() -> list[str]:
    """Return the causal language models of transformers."""
    return causal_types()


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    try:
        return {"train": _compared(prepared(model_type), folder)}
    except Exception as error:
        return {"train": refusal_or_failure(error)}


def _compiled(runner: Any, program: Any, source: Path) -> Any:
    """Return the compiled program; types with equal operators and constants share it."""
    from hyper_parallel.backends.mindspore.translate import to_source

    kinds = [(kind.shape, kind.dtype) for _, kind in program.inputs.values()]
    constants = [(array.dtype, array.shape, array.tobytes()) for array in program.constants.values()]
    key = to_source(program, {}), str(kinds), str(constants)
    if key not in _COMPILED:
        _COMPILED[key] = program, runner.compile(program, source)
    first, step = _COMPILED[key]

    def run(values: dict[str, Any]) -> dict[str, Any]:
        renamed = dict(zip(first.inputs, (values[n] for n in program.inputs), strict=True))
        results = step(renamed)
        return dict(zip(program.outputs, (results[n] for n in first.outputs), strict=True))

    return run


_COMPILED: dict[tuple[str, ...], tuple[Any, Any]] = {}
"""Source, types and constants of a program to the program and its function, in this process."""


def _compared(place: Path, folder: Path) -> str:
    """Return the result text of a type whose torch results are in `place`."""
    import numpy as np

    from hyper_parallel.backends.program_runner import join_ranks, unsupported_operators
    from hyper_parallel.backends.step_program import StepProgram

    case = json.loads((place / "case.json").read_text(encoding="utf-8"))
    if "cell" in case:
        return str(case["cell"])
    program = StepProgram.load(place)
    if missing := unsupported_operators("mindspore", program):
        needed = (f"{op} ({module or case['model']})" for op, module in missing.items())
        return f"HP104: {case['model']} uses {', '.join(sorted(needed))}"
    runner = join_ranks("mindspore", 0, 1, lambda text: str(text), {})
    step = _compiled(runner, program, folder / f"{place.name.replace('-', '_')}.py")
    with np.load(place / "values.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    sums = [name for name in program.inputs if name.startswith("sum.")]
    zeros = {name: arrays[name.replace("sum.", "param.", 1)] * 0 for name in sums}
    for number, value in enumerate(case["losses"]):
        values = {name: runner.value(array) for name, array in (arrays | zeros).items()}
        results = {name: runner.array(result) for name, result in step(values).items()}
        if not abs(float(results["loss"]) - value) <= LIMIT * abs(value):
            if (own := rounding(place.name)[number]) > LIMIT:
                what = f"torch's own losses in float32 and float64 differ by {own:.1e}"
                return f"skipped: {what} in step {number + 1}, earlier steps are equal"
            return f"wrong: loss {float(results['loss'])!r} of step {number + 1} is not {value!r}"
        for name in zeros:
            param = name.replace("sum.", "param.", 1)
            arrays[param] = arrays[param] - LR * results[name]
    return "ok"

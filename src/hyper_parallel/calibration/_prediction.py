"""Predictions for the training runs in a CSV: step time with its prediction interval, memory and cost terms."""

from __future__ import annotations

import csv
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Final

from hyper_parallel.calibration._published_run import PublishedRun, read_run
from hyper_parallel.calibration.csv_rows import MEASURED, SURPLUS, RowError, read_rows, stated
from hyper_parallel.cost import (
    RECOMPUTE,
    Candidates,
    DeviceCard,
    Machine,
    ModelNumbers,
    PricingCase,
    Scores,
    StackCard,
    card_names,
    device_card,
    load_card,
    matching_card,
    read_card,
    score,
    stack_card,
)
from hyper_parallel.errors import CardUnreadable, HyperParallelError, RunsUnreadable, written
from hyper_parallel.ir import Workload
from hyper_parallel.owned_folder import check_output_file
from hyper_parallel.serde import write_text
from hyper_parallel.units import GiB

_SAFE: Final = 1.1
"""Fraction of device memory up to which a run is assumed to fit, if the row does not state its recomputation.

It is above 1, because published runs use memory-saving options that rows do not state.
"""
_FIRST: Final = {
    "predicted_step_s": 6, "predicted_tok_s_dev": 6, "predicted_mem_gib": 4, "interval_low_s": 6, "interval_high_s": 6,
}  # fmt: skip
"""Dict from output column before the cost terms to its number of significant digits."""


@dataclass(frozen=True, slots=True)
class Cards:
    """Device and stack cards by name, which take precedence over the shipped cards."""

    device: Mapping[str, DeviceCard] = field(default_factory=dict)
    stack: Mapping[str, StackCard] = field(default_factory=dict)

    def device_for(self, name: str, kind: str) -> DeviceCard:
        """Return the first of these cards that matches a device name, else the shipped card for the name or `kind`."""
        return matching_card(self.device.values(), name) or device_card(name, kind)

    def stack_for(self, name: str) -> StackCard:
        """Return the stack card `name` of these cards, else the shipped one; raise HP313 if there is none."""
        return self.stack.get(name) or stack_card(name)


def read_cards(folder: str | Path | None = None) -> Cards:
    """Return all shipped cards and the cards in files `*.yaml` of `folder`, which replace cards of the same name.

    Raises:
        CardUnreadable: HP313 when the folder has no file `*.yaml`. An invalid file raises the errors of `read_card`.
    """
    files = sorted(Path(folder).glob("*.yaml")) if folder else []
    if folder and not files:
        hint = shlex.join(["hyper-parallel", "calibrate", "--runs", "RUNS.csv", "--output", str(folder)])
        raise CardUnreadable("the folder has no card", where=str(folder), allowed="a folder of *.yaml files", hint=hint)
    pairs = [*map(load_card, card_names()), *map(read_card, files)]
    return Cards(
        {device.name: device for device, _ in pairs if device}, {stack.name: stack for _, stack in pairs if stack}
    )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step time and memory of one published run."""

    run: PublishedRun
    scores: Scores  # time and memory terms of the run, as one candidate
    recompute: str  # none, selective or full
    half_width: float  # half width of the 80 % interval of the step time, in natural logarithm
    assumptions: tuple[str, ...]  # one sentence each

    @property
    def step_s(self) -> float:
        """Predicted seconds per step."""
        return float(self.scores.step_s[0])

    @property
    def memory_gib(self) -> float:
        """Predicted peak memory of the fullest device in GiB."""
        return float(self.scores.memory_bytes[0]) / GiB

    def columns(self) -> dict[str, str]:
        """Return the predicted columns of the run's row, as a dict from column to text."""
        low, high = (self.step_s * math.exp(s * self.half_width) for s in (-1.0, 1.0))
        tokens_s = self.run.sequences * self.run.seq_len / self.step_s
        values = (self.step_s, tokens_s / self.run.devices, self.memory_gib, low, high)
        return {
            **{k: f"{v:.{n}g}" for (k, n), v in zip(_FIRST.items(), values, strict=True)},
            **{f"term: {t.name}": f"{float(t.seconds[0]):.6g}" for t in self.scores.time},
            "assumptions": "; ".join(self.assumptions),
        }


def machine_of(run: PublishedRun, cards: Cards) -> Machine:
    """Return the machine of a run, with cards adjusted to the release and the options that the row states."""
    device, stack = run.supernode.device, cards.stack_for(run.stack)
    card = cards.device_for(device.name, device.kind)
    release = run.release_month
    # Older releases route and permute more slowly; `StackCard.moe` includes the time of the newest release.
    months = max(0.0, stack.moe_release - release) if release is not None else 0.0
    older = stack.moe_month * card.maturing * math.sqrt(months)
    card = replace(card, context_bytes=card.context_bytes + stack.reserve_bytes)
    copy_s, host_s = stack.moe_copy_s * older, stack.moe_host_s * (1.0 + older)
    stack = replace(stack, moe_copy_s=copy_s, moe_host_s=host_s)
    if "sp" in re.split(r"\W", run.row.recompute.lower()):
        stack = replace(stack, sequence_parallel=1.0)
    elif "no sequence parallel" in run.row.notes.lower():
        stack = replace(stack, sequence_parallel=0.0)
    compute = run.matmul_dtype if run.matmul_dtype in ("float16", "float32") else "bfloat16"
    return Machine.of(run.supernode, compute, matmul_dtype=run.matmul_dtype, card=card, stack=stack)


def setting_of(run: PublishedRun, numbers: ModelNumbers, machine: Machine, recompute: str) -> PricingCase:
    """Return the inputs of the cost formulas for one run with a recomputation (none, selective or full)."""
    d = run.degrees
    workload = Workload(
        run.seq_len, run.sequences * run.seq_len, run.microbatch, run.accumulation, machine.compute_dtype
    )  # fmt: skip
    candidate = Candidates.of_columns(
        pp=d["pp"], vpp=d["vpp"], dp_shard=d["dp"], cp=d["cp"], tp_x=d["tp"], ep=d["ep"], etp=d["etp"],
        microbatch=run.microbatch, accumulation=run.accumulation, zero=run.zero,
        recompute=RECOMPUTE.index(recompute),
    )  # fmt: skip
    return PricingCase(numbers, machine, workload, candidate)


def predict(run: PublishedRun, cards: Cards | None = None) -> Prediction:
    """Return the predicted step time and memory of one run; `cards` None: the shipped cards.

    If the row does not state the recomputation, `none` is assumed if the run then fits (see `_SAFE`), else `selective`.
    """
    notes = list(run.assumptions)
    machine = machine_of(run, cards or Cards())
    if not machine.stack.sequence_parallel and run.degrees["tp"] > 1:
        notes.append("the sequence is not sharded between tensor-parallel blocks")
    numbers = ModelNumbers.of(run.model)
    for recompute in (run.recompute,) if run.recompute else RECOMPUTE[:2]:
        scores = score(setting_of(run, numbers, machine, recompute))
        fits = bool(scores.memory_bytes[0] <= _SAFE * machine.memory_bytes)
        if fits:
            break
    if run.recompute is None:
        why = "the lightest that fits in memory" if fits else "nothing fits by prediction"
        notes.append(f"recompute={recompute}: not stated, {why}")
    step = float(scores.step_s[0])
    assert 0.0 < step < math.inf, f"the price of a run is {step} s"
    width = machine.stack.half_width(run.kind)
    if not run.known_stack:
        width = max(width, machine.stack.interval.get(f"{run.kind}_unknown_stack", 0.0))
    return Prediction(run, scores, recompute, width, tuple(notes))


def _is_prediction(text: str) -> bool:
    return "assumptions" in text.partition("\n")[0].strip().split(",")


def predict_file(source: str | Path, output: str | Path, cards: Cards | None = None) -> tuple[int, int]:
    """Predict the run in every row of a CSV file, and write a CSV file with the predictions added.

    Columns added: predicted_step_s, predicted_tok_s_dev, predicted_mem_gib, interval_low_s, interval_high_s, a column
    `term: NAME` per cost term (seconds), assumptions; also id, step_s, tok_s_dev and mem_gib if absent. A `step_s`,
    `tok_s_dev` or `mem_gib` that the row does not state is filled with the prediction; other text is kept. A row that
    is invalid or describes an impossible run is not predicted; `assumptions` then has the reason.

    Args:
        source: CSV file to read; see `RunRow` for its columns.
        output: CSV file to write.
        cards: Cards for the predictions; None: the shipped cards.

    Returns:
        (number of predicted rows, number of rows in the file).

    Raises:
        RunsUnreadable: HP314 when the file cannot be read or no row can be predicted. In the second case the output is
            written, with the reason for every row.
        OutputNotWritable: HP105 when the output cannot be written, or exists and is no output of this function.
        Exception: For any other failure, which is a bug of this package, with a note that names the row.
    """
    check_output_file(Path(output), _is_prediction, "a prediction", "--output")
    columns, rows = read_rows(source)
    names: dict[str, None] = {}
    failures = 0
    for index, row in enumerate(rows):
        try:
            added = predict(read_run(row), cards).columns()
        except (RowError, HyperParallelError) as error:
            failures += 1
            why = error.what if isinstance(error, HyperParallelError) else str(error)
            added = {"assumptions": f"not predicted: {why}"}
        except Exception as error:
            error.add_note(f"in row {index + 1} of {source} (id {row.get('id') or 'none'})")
            raise
        row.pop(SURPLUS, None)
        names |= dict.fromkeys(added)
        for name in MEASURED:
            if not stated(row.get(name)) and f"predicted_{name}" in added:
                row[name] = added[f"predicted_{name}"]
        row |= added
    terms = sorted(name for name in names if name.startswith("term: "))
    first = [name for name in _FIRST if name in names]
    header = dict.fromkeys([*columns, "id", *MEASURED, *first, *terms, "assumptions"])
    with written(output):
        write_text(Path(output), _csv_text(header, rows))
    if failures == len(rows):
        raise RunsUnreadable(
            "no row of the runs can be predicted",
            where=str(source),
            got=rows[0]["assumptions"] if rows else "no rows",
            hint="correct a row; the column `assumptions` of the output has the reason for each"
            if rows
            else "add a row to the CSV",
        )
    return len(rows) - failures, len(rows)


def _csv_text(header: Iterable[str], rows: Iterable[Mapping[str, str]]) -> str:
    table = StringIO(newline="")
    writer = csv.DictWriter(table, [*header], restval="")
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()

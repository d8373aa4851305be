"""Terminal output of rank 0 on standard error: start-up panel, progress bar and log lines."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from hyper_parallel.cost import LOCAL_CARD
from hyper_parallel.errors import console
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.data_record import panel_rows
from hyper_parallel.units import format_bytes, format_count, format_seconds, plural

if TYPE_CHECKING:
    from hyper_parallel.trainer.job import Job


class Display:
    """Progress bar and log lines of a run with `steps` steps.

    Prints nothing unless `enabled` is set and the logger `hyper_parallel` has level INFO or lower.

    Attributes:
        bar: Context manager of the progress bar, which is drawn only if standard error is a terminal.
    """

    def __init__(self, steps: int, enabled: bool) -> None:
        enabled = enabled and logging.getLogger("hyper_parallel").level <= logging.INFO
        self._enabled, self._steps = enabled, steps
        self._epoch: int | None = None
        self._begun = ""
        self._console = console(stderr=True, soft_wrap=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[epochs]}"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
            transient=True,
        )
        self._task = self.bar.add_task("step", total=steps, epochs="")

    def advance(self, step: int, epochs: float | None = None) -> None:
        """Move the progress bar to a step, and show the number of passes over the data; `epochs` None: show none.

        If a new epoch began, the next call of `line` prints so.
        """
        shown = "" if epochs is None else f"epoch {epochs:.2f}"
        self.bar.update(self._task, completed=step, epochs=shown)
        if epochs is None:
            return
        before, self._epoch = self._epoch, int(epochs)
        if before is not None and before < self._epoch and step < self._steps:
            self._begun = f"epoch {self._epoch + 1} began after step {step}"

    def line(self, text: str) -> None:
        """Print a line above the progress bar; if a new epoch began since the last call, announce it first."""
        if self._enabled:
            if self._begun:
                self._console.print(self._begun)
                self._begun = ""
            self._console.print(text)


def startup_panel(job: Job) -> Panel:
    """Return the start-up panel of a run: topology, model, mesh, data, plan, prediction and output directory."""
    plan, weights = job.plan, f"pretrained, {job.weights}"
    if job.weights is None:
        weights = f"from scratch, drawn with training.seed={job.recipe.training.seed}"
    work = plan.workload
    share = plan.memory_bytes / plan.memory_capacity_bytes if plan.memory_capacity_bytes else 0.0
    tokens, params = format_count(work.tokens_per_step or 0), format_count(plan.model.num_params)
    batch = f"microbatch {work.microbatch} x {work.accumulation_steps} accumulated, sequences of {work.seq_len} tokens"
    rows = {
        "topology": f"{plan.topology}, {plural(plan.num_ranks, 'rank')}"
        + ("" if job.on_topology else "; not this machine, so no time is compared with the prediction"),
        "model": f"{plan.model.name} ({plan.model.family}), {params} parameters",
        "weights": weights,
        **({"trained": job.trained} if job.trained else {}),
        "mesh": str(plan.mesh) if plan.submodels is None else plan.degrees,
        "step": f"{tokens} tokens: per data rank {batch}, {work.compute_dtype}",
        **panel_rows(job),
        **({} if job.router_loss is None else {"router loss": job.router_loss}),
        "plan": plan.fingerprint,
        "predicted step": f"{format_seconds(plan.whole_step_s)}, MFU {plan.predicted_mfu:.1%}"
        + _role_seconds(plan)
        + _calibration_advice(plan),
        "predicted memory": f"{format_bytes(plan.memory_bytes)} per rank ({share:.1%})",
        "output": str(job.output_dir),
    }
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    for row in rows.items():
        table.add_row(*row)
    return Panel(table, title="hyper-parallel train", title_align="left", expand=False)


def _role_seconds(plan: Plan) -> str:
    roles = plan.roles
    if roles is None:
        return ""
    return f"; sampling {format_seconds(roles.sample_s)}, learning {format_seconds(roles.learn_s)}"


def _calibration_advice(plan: Plan) -> str:
    measured = any(f"device card {LOCAL_CARD}:" in term.source for term in plan.cost)
    if plan.topology != "local" or measured:
        return ""
    return "; `hyper-parallel calibrate` measures this machine for better predictions"

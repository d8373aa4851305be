"""What a run writes per step: metrics.jsonl and eval.jsonl (full precision), TensorBoard, one line for people.

The two JSONL files are the contract with the reports. A record is one line, written at once, so a reader never sees
half of one; a resumed run first drops the records after the checkpoint it continues from.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from hyper_parallel.trainer._files import write_text
from hyper_parallel.units import format_bytes


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl.

    Attributes:
        step: Optimizer step, from 1.
        loss: Mean over all valid tokens of the step, over every rank and microbatch.
        grad_norm: Global norm of the gradients before clipping.
        lr: Learning rate of the step.
        tokens: Tokens of this step over all ranks.
        valid_tokens: Those of them that the loss counts.
        tokens_seen: Tokens since step 1, this step included.
        step_s: Seconds of the step.
        tps: Tokens per second and device.
        tflops: Model TFLOP/s per device, recomputation not counted.
        mfu: Model FLOP/s utilisation (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B).
        memory_bytes: Peak memory of the step on the fullest rank; with offload that of the counted device.
        pred_step_s: Step time the plan predicts.
        routing: Routing of the experts; left out of the line for other models.
        offload: What offload predicted and measured; left out when it is off.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    valid_tokens: int
    tokens_seen: int
    step_s: float
    tps: float
    tflops: float
    mfu: float
    memory_bytes: int
    pred_step_s: float
    routing: dict[str, Any] | None = None
    offload: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One line of eval.jsonl: the mean loss over the held-out tokens before step 1 (step 0) or after `step`."""

    step: int
    loss: float
    tokens: int
    seconds: float


class MetricsLog:
    """The metric files of a run directory; rank 0 holds one.

    Args:
        directory: Run directory.
        resumed_step: Last step the run already has, 0 for a new run.
    """

    def __init__(self, directory: Path, resumed_step: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, TextIO] = {}
        for name in ("metrics", "eval"):
            path = directory / f"{name}.jsonl"
            _keep_until(path, resumed_step)
            self._files[name] = path.open("a", encoding="utf-8")
        board = directory / "tensorboard"
        if resumed_step == 0 and board.exists():
            for old in board.glob("events.out.tfevents.*"):
                old.unlink()
        self._board = _Board(board, resumed_step)

    def step(self, record: StepRecord) -> None:
        """Append a training step."""
        self._append("metrics", record)
        names = ("loss", "grad_norm", "lr", "tps", "mfu", "memory_bytes", "step_s")
        self._board.add(record.step, "train", {name: getattr(record, name) for name in names})
        self._board.add(record.step, "offload", record.offload or {})
        self._board.add(record.step, "routing", record.routing or {})

    def evaluation(self, record: EvalRecord) -> None:
        """Append an evaluation."""
        self._append("eval", record)
        self._board.add(record.step, "eval", {"loss": record.loss})

    def close(self) -> None:
        """Flush and close all files."""
        for file in self._files.values():
            file.close()
        self._board.close()

    def _append(self, name: str, record: Any) -> None:
        line = {key: value for key, value in asdict(record).items() if value is not None}
        self._files[name].write(json.dumps(line) + "\n")
        self._files[name].flush()


class _Board:
    """Scalars as TensorBoard reads them.

    Args:
        directory: Where the event file goes.
        resumed_step: Last step that stays; TensorBoard drops what an earlier run wrote after it.
    """

    def __init__(self, directory: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._writer = EventFileWriter(str(directory))
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._writer.add_event(
            self._event(wall_time=time.time(), step=resumed_step + 1, session_log=start)
        )

    def add(self, step: int, group: str, values: Mapping[str, float | None]) -> None:
        """Append the values that are not None."""
        scalars = [
            self._summary.Value(tag=f"{group}/{name}", simple_value=float(value))
            for name, value in values.items()
            if value is not None
        ]
        summary = self._summary(value=scalars)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _keep_until(path: Path, step: int) -> None:
    """Drop the records after a step, and a last line a killed run may have cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if step and record["step"] <= step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))


def log_line(record: StepRecord, steps: int, capacity_bytes: int) -> str:
    """One step for people, in the field's usual order, with the deviation from the plan."""
    width = len(str(steps))
    share = f" ({record.memory_bytes / capacity_bytes:.1%})" if capacity_bytes else ""
    parts = [
        f"step {record.step:>{width}}/{steps}",
        f"loss {record.loss:.4f}",
        f"grad_norm {record.grad_norm:.3f}",
        f"memory {format_bytes(record.memory_bytes)}{share}",
        f"tps {record.tps:,.0f}",
        f"tflops {record.tflops:.3g}",
        f"mfu {record.mfu:.1%}",
    ]
    if record.pred_step_s > 0 and math.isfinite(record.pred_step_s):
        parts.append(f"pred {record.step_s / record.pred_step_s - 1:+.1%}")
    return "  ".join(parts)

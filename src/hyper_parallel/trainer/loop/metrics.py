"""Metrics of a run: metrics.jsonl and eval.jsonl in full precision, trackers, and one log line per step.

Reports read the two JSONL files. A resumed run first drops the records after its checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TextIO

from hyper_parallel.errors import DISK_ERRORS, Unwritten, not_writable
from hyper_parallel.received import Limits, parse_json
from hyper_parallel.serde import append_file, write_text
from hyper_parallel.trainer.directory_watch import DirectoryWatch
from hyper_parallel.trainer.loop.trackers import Tracker, make_trackers
from hyper_parallel.units import MiB, format_bytes, format_count

_log = logging.getLogger(__name__)
LINE_WIDTH: Final = 80
"""Maximum columns of the log line of a step."""
_MOST_DIGITS: Final = 2
"""Log lines contain the total number of steps only if it has at most this many digits."""
_RECORD: Final = Limits(MiB, num_elements=100_000)


@dataclass(frozen=True, slots=True)
class StepMeasurements:
    """Measurements of one step; equal on every rank, except `step_s` and `overlap`, which each rank measures."""

    loss: float  # mean over the valid tokens or, by stage, pairs or answers of the step, over all ranks
    grad_norm: float  # global norm of the gradients before clipping
    valid_tokens: int  # tokens of this step counted by the loss
    step_s: float  # seconds of the step
    # Peak memory of the step on the rank that uses most; with offload, of the device memory that is planned
    memory_bytes: int
    routing: dict[str, Any] | None = None  # routing statistics; None without experts
    offload: dict[str, Any] | None = None  # metrics of offload; None without offload
    loss_scale: float | None = None  # scale of the loss in this step; None without scaling
    # 1 for a skipped step: gradients overflowed or spiked, or the stage rejected it; else 0. None: no rule skips steps
    skipped: int | None = None
    rollout: dict[str, Any] | None = None  # rewards and lengths of completions; None outside of stage grpo
    preference: dict[str, Any] | None = None  # scores of pairs of answers; None without pairs
    # Numbers of layers run on half-batches and on whole batches; in recorded steps also exposed communication
    overlap: dict[str, Any] | None = None
    # Tokens of images and audio, and the imbalance of ranks before and after `data.balance`
    balance: dict[str, Any] | None = None

    @property
    def finite(self) -> bool:
        """True if loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord(StepMeasurements):
    """Line of metrics.jsonl, with the measurements of rank 0; values that are None, NaN or infinite are omitted."""

    step: int  # optimizer step, from 1
    lr: float  # learning rate of the step
    tokens: int  # tokens of this step over all ranks
    tokens_seen: int  # tokens since step 1, this step included
    tps: float  # tokens per second and device
    tflops: float  # model TFLOP/s per device, recomputation not counted
    mfu: float  # model FLOP/s utilisation (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B)
    # Predicted seconds of the step; None on another machine than planned, and for rollouts without planned roles
    pred_step_s: float | None


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Measurements of an evaluation; equal on every rank."""

    loss: float  # mean over the held-out tokens or, by stage, pairs or answers
    tokens: int  # held-out tokens counted by the loss
    preference: dict[str, Any] | None = None  # scores of pairs of answers; None without pairs
    rollout: dict[str, Any] | None = None  # rewards and lengths of completions; None outside of stage grpo
    token_accuracy: float | None = None  # share of held-out targets that the model ranks first; None if not counted
    answer_accuracy: float | None = None  # share of answers with all targets ranked first; None if not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord(EvalResult):
    """Line of eval.jsonl; values that are None are omitted. Only records of stage sft have `answer_accuracy`."""

    step: int  # last finished optimizer step; 0: before the first step
    seconds: float  # seconds of the evaluation


class MetricsLog:
    """Metric files and trackers of a run directory; exists on rank 0 only.

    Args:
        directory: Run directory.
        resumed_step: Last finished step of the run. Later records are dropped. 0: a new run, drop all records.
        report_to: Names of trackers, as in `training.report_to`.
        recipe: Recipe values that wandb and mlflow show.
        watch: Watch on the directory that is already open; None: open a new watch.

    Raises:
        RunDirectoryLost: HP721 when the directory was removed, moved or replaced.
        TrackerFailed: HP632 when a tracker cannot start a run.
        OSError: A file cannot be written.

    Attributes:
        notes: Lines about records dropped from existing files.
        unwritten: Write failures of trackers on a full, broken or read-only disk.
    """

    def __init__(
        self,
        directory: Path,
        resumed_step: int,
        report_to: Sequence[str] = ("tensorboard",),
        recipe: Mapping[str, Any] = MappingProxyType({}),
        watch: DirectoryWatch | None = None,
    ) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self.unwritten = directory, Unwritten()
        self.notes: list[str] = []
        self._trackers: list[Tracker] = []
        self._open = ExitStack()
        self._watch = watch or self._open.enter_context(closing(DirectoryWatch(directory)))
        try:
            self._files = {name: self._open_lines(name, resumed_step) for name in ("metrics", "eval")}
            self._watch.follow("metrics.jsonl")
            self._trackers += make_trackers(report_to, directory, resumed_step, recipe, self._watch.check)
        except BaseException:
            self.close()
            raise

    def _open_lines(self, name: str, resumed_step: int) -> TextIO:
        path = self._directory / f"{name}.jsonl"
        self._watch.check()
        if line := _keep_until(path, resumed_step):
            self.notes.append(line)
        self._watch.check()  # again, because dropping records takes time
        return self._open.enter_context(append_file(path))

    def step(self, record: StepRecord) -> None:
        """Append the record of a training step to metrics.jsonl, and log its main values to the trackers."""
        self._append("metrics", record)
        names = ("loss", "grad_norm", "lr", "tps", "mfu", "memory_bytes", "step_s")
        self._draw(record.step, "train", {name: getattr(record, name) for name in names})
        for group in ("offload", "routing", "rollout", "preference", "balance"):
            self._draw(record.step, group, getattr(record, group) or {})

    def evaluation(self, record: EvalRecord) -> None:
        """Append the record of an evaluation to eval.jsonl, and log its loss and scores to the trackers."""
        self._append("eval", record)
        scores = record.preference or record.rollout or {}
        self._draw(record.step, "eval", {"loss": record.loss, **scores})

    def close(self) -> None:
        """Close the trackers, and flush and close all files.

        Raises:
            OSError: A metric file cannot be written. All files are closed nevertheless.
        """
        for tracker in self._trackers:
            self._try(tracker, tracker.close)
        self._open.close()

    def _append(self, name: str, record: Any) -> None:
        self._watch.check()
        self._files[name].write(json.dumps(as_line(record)) + "\n")
        self._files[name].flush()

    def _draw(self, step: int, group: str, values: Mapping[str, float | None]) -> None:
        """Log values to the trackers as `group/NAME`, without None; drop trackers that fail."""
        points = {f"{group}/{k}": float(v) for k, v in values.items() if v is not None}
        for tracker in tuple(self._trackers) if points else ():
            if not self._try(tracker, lambda tracker=tracker: tracker.log(step, points)):
                self._trackers.remove(tracker)

    def _try(self, tracker: Tracker, action: Callable[[], Any]) -> bool:
        """Run an action of a tracker; return whether it succeeded. Log failures; add disk errors to `unwritten`."""
        try:
            action()
        except Exception as error:  # every tracker has its own exception classes
            _log.warning("%s receives no more metrics: %s", tracker.name, error)
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                self.unwritten.keep(not_writable(error, self._directory / tracker.name))
        else:
            return True
        return False


def as_line(record: Any) -> dict[str, Any]:
    """Return a record as a dict for JSON with `step` first, without fields that are None, NaN or infinite."""
    items = {"step": record.step, **asdict(record)}.items()
    return {k: v for k, v in items if v is not None and (not isinstance(v, float) or math.isfinite(v))}


def _keep_until(path: Path, step: int) -> str | None:
    """Drop damaged lines and records after `step` (0: all records) from a JSONL file.

    Return a note about the dropped lines; None if no line is dropped or the file does not exist.
    """
    if not path.exists():
        return None
    records, later, damaged = [], 0, 0
    for line in path.read_bytes().splitlines():
        number = _step_of(line)
        if number is None:
            damaged += 1
        elif step and number <= step:
            records.append(line.decode() + "\n")
        else:
            later += 1
    if later or damaged or not records:
        write_text(path, "".join(records))
    parts = [f"{later} records after step {step}"] if later else []
    parts += [f"{damaged} lines that are not records"] if damaged else []
    return f"{path.name}: dropped {' and '.join(parts)}" if parts else None


def _step_of(line: bytes) -> int | None:
    try:
        step = parse_json(line, _RECORD)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and step >= 0 else None


def log_line(record: StepRecord, steps: int) -> str:
    """Return the log line of a step of a run with `steps` steps, at most `LINE_WIDTH` columns if possible.

    A second line names the possible causes of a skipped step.
    """
    digits, score = len(str(steps)), f"loss {record.loss:.4f}"
    total = f"/{steps}" if digits <= _MOST_DIGITS else ""
    numbers = [f"step {record.step:>{digits}}{total}", f"step {record.step}{total}"]
    if record.rollout is not None:
        score = f"reward {record.rollout['reward']:.4f}"
    parts = [
        score,
        f"grad_norm {record.grad_norm:.3g}",
        f"lr {record.lr:.1e}",
        f"{_three_digits(format_count(record.tps))} tok/s",
        _three_digits(format_bytes(record.memory_bytes)),
    ]
    if record.pred_step_s and math.isfinite(record.pred_step_s):
        parts.append(f"pred {record.step_s / record.pred_step_s - 1:+.0%}")
    numbers += [f"step {record.step}", str(record.step)]
    forms = [" ".join([number, *parts]) for number in numbers]
    line = next((form for form in forms if len(form) <= LINE_WIDTH), forms[-1])
    if not record.skipped:
        return line
    scale = "" if record.loss_scale is None else f" at loss scale {record.loss_scale:g}"
    why = "the gradient is above training.skip_grad_norm"
    if record.rollout is not None:
        why += ", or the effective sample size is below grpo.min_effective_samples"
    if not record.finite:
        why = "the loss or the gradient is not finite"
    return f"{line}\n  skipped: {why}{scale}"


def _three_digits(text: str) -> str:
    number = re.match(r"[\d,.]+", text)
    if number is None:
        return text
    return f"{float(number[0].replace(',', '')):.3g}{text[number.end() :]}"

"""What a run writes per step: metrics.jsonl and eval.jsonl (full precision), trackers, one line for people.

The two JSONL files are the contract with the reports. A record is one line, written at once, so a reader never sees
half of one; a resumed run first drops the records after the checkpoint it continues from.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
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
"""Columns of the line of a step."""
_MOST_DIGITS: Final = 2
"""Digits of the number of steps up to which every line shows it; the progress bar always does."""
_RECORD: Final = Limits(MiB, num_elements=100_000)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl; what is None is left out of it."""

    step: int  # optimizer step, from 1
    loss: float  # mean over all valid tokens of the step, over every rank and microbatch
    grad_norm: float  # global norm of the gradients before clipping
    lr: float  # learning rate of the step
    tokens: int  # tokens of this step over all ranks
    valid_tokens: int  # those of them that the loss counts
    tokens_seen: int  # tokens since step 1, this step included
    step_s: float  # seconds of the step
    tps: float  # tokens per second and device
    tflops: float  # model TFLOP/s per device, recomputation not counted
    mfu: float  # model FLOP/s utilisation (Chowdhery et al., PaLM, arXiv:2204.02311, appendix B)
    memory_bytes: (
        int  # peak of the step on the fullest rank; with offload that of the counted device
    )
    pred_step_s: float | None  # step time the plan predicts; None for another machine
    routing: dict[str, Any] | None = None  # routing of the experts; None for other models
    offload: dict[str, Any] | None = None  # what it predicted and measured; None when off
    loss_scale: float | None = None  # scale of the loss in this step; None without
    skipped: int | None = (
        None  # 1 when the step was left out: gradients overflowed or spiked; None where none can be
    )
    rollout: dict[str, Any] | None = None  # rewards and lengths of completions
    preference: dict[str, Any] | None = None  # scores of pairs of answers


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One line of eval.jsonl: the mean loss over the held-out tokens before step 1 (step 0) or after `step`."""

    step: int
    loss: float
    tokens: int
    seconds: float
    preference: dict[str, Any] | None = None  # scores of pairs of answers
    rollout: dict[str, Any] | None = None  # rewards and lengths of completions


class MetricsLog:
    """The metric files of a run directory, and its trackers; rank 0 holds one.

    Args:
        directory: Run directory.
        resumed_step: Last step the run already has, 0 for a new run.
        report_to: Names of trackers.
        recipe: What trackers show as the configuration of the run.

    Attributes:
        notes: What was dropped of the files of the run before, one line each.
        unwritten: Failures of trackers that the system has refused to write.
    """

    def __init__(
        self,
        directory: Path,
        resumed_step: int,
        report_to: Sequence[str] = ("tensorboard",),
        recipe: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        directory.mkdir(exist_ok=True)
        self._directory, self.unwritten = directory, Unwritten()
        self.notes: list[str] = []
        self._files: dict[str, TextIO] = {}
        for name in ("metrics", "eval"):
            path = directory / f"{name}.jsonl"
            if line := _keep_until(path, resumed_step):
                self.notes.append(line)
            self._files[name] = append_file(path)
        self._watch = DirectoryWatch(directory, "metrics.jsonl")
        self._trackers = make_trackers(report_to, directory, resumed_step, recipe)

    def step(self, record: StepRecord) -> None:
        """Append a training step."""
        self._append("metrics", record)
        names = ("loss", "grad_norm", "lr", "tps", "mfu", "memory_bytes", "step_s")
        self._draw(record.step, "train", {name: getattr(record, name) for name in names})
        self._draw(record.step, "offload", record.offload or {})
        self._draw(record.step, "routing", record.routing or {})
        self._draw(record.step, "rollout", record.rollout or {})
        self._draw(record.step, "preference", record.preference or {})

    def evaluation(self, record: EvalRecord) -> None:
        """Append an evaluation."""
        self._append("eval", record)
        self._draw(
            record.step,
            "eval",
            {"loss": record.loss, **(record.preference or record.rollout or {})},
        )

    def close(self) -> None:
        """Flush and close all files.

        Raises:
            OSError: A file of metrics cannot be closed; the others are.
        """
        self._watch.close()
        for tracker in self._trackers:
            self._try(tracker, tracker.close)
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)

    def check_directory(self) -> None:
        """Raise RunDirectoryLost (HP721) when the run directory was removed, moved or replaced since it was opened."""
        self._watch.check()

    def _append(self, name: str, record: Any) -> None:
        self.check_directory()
        self._files[name].write(json.dumps(as_line(record)) + "\n")
        self._files[name].flush()

    def _draw(self, step: int, group: str, values: Mapping[str, float | None]) -> None:
        """Give trackers the values that are not None."""
        given = {f"{group}/{k}": float(v) for k, v in values.items() if v is not None}
        for tracker in tuple(self._trackers) if given else ():
            if not self._try(tracker, lambda tracker=tracker: tracker.log(step, given)):
                self._trackers.remove(tracker)

    def _try(self, tracker: Tracker, action: Callable[[], Any]) -> bool:
        """Return whether a tracker does something; one that fails does not end the run: metrics.jsonl has its curve."""
        try:
            action()
        except Exception as error:  # each raises classes of its own
            _log.warning("%s gets no more curves: %s", tracker.name, error)
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                self.unwritten.keep(not_writable(error, self._directory / tracker.name))
        else:
            return True
        return False


def as_line(record: Any) -> dict[str, Any]:
    """A record by its keys, without those that are None, NaN or infinite, which JSON does not have."""
    items = asdict(record).items()
    return {
        k: v for k, v in items if v is not None and (not isinstance(v, float) or math.isfinite(v))
    }


def _keep_until(path: Path, step: int) -> str | None:
    """Drop the records after a step, and lines that are none: a killed run may have cut its last; what was dropped."""
    if not path.exists():
        return None
    kept, later, damaged = [], 0, 0
    for line in path.read_bytes().splitlines():
        number = _step_of(line)
        if number is None:
            damaged += 1
        elif step and number <= step:
            kept.append(line.decode() + "\n")
        else:
            later += 1
    if later or damaged or not kept:
        write_text(path, "".join(kept))
    parts = [f"{later} records after step {step}"] if later else []
    parts += [f"{damaged} lines that are no record"] if damaged else []
    return f"{path.name}: dropped {' and '.join(parts)}" if parts else None


def _step_of(line: bytes) -> int | None:
    """Return the step of a record; None for a line that is none."""
    try:
        step = parse_json(line, _RECORD)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int and step >= 0 else None


def log_line(record: StepRecord, steps: int) -> str:
    """Return the line of a step for people, at most 80 columns wide, with the deviation from the plan.

    All lines of a run start with the same form of the step, as far as its numbers leave space.
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
        f"{_brief(format_count(record.tps))} tok/s",
        _brief(format_bytes(record.memory_bytes)),
    ]
    if record.pred_step_s and math.isfinite(record.pred_step_s):
        parts.append(f"pred {record.step_s / record.pred_step_s - 1:+.0%}")
    forms = [" ".join([number, *parts]) for number in (*numbers, str(record.step))]
    line = next((form for form in forms if len(form) <= LINE_WIDTH), forms[-1])
    if not record.skipped:
        return line
    scale = "" if record.loss_scale is None else f" at loss scale {record.loss_scale:g}"
    is_finite = math.isfinite(record.grad_norm)
    why = "is above training.skip_grad_norm" if is_finite else "is not finite"
    return f"{line}\n  skipped: the gradient {why}{scale}"


def _brief(text: str) -> str:
    """Return a number with a prefix to three significant digits: `139 GiB`, `12.3k`."""
    number = re.match(r"[\d,.]+", text)
    if number is None:
        return text
    return f"{float(number[0].replace(',', '')):.3g}{text[number.end() :]}"

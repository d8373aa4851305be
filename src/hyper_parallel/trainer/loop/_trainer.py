"""The training loop of one rank: an `Engine` computes, this file drives it, records and shows. No framework.

    load -> begin -> evaluate -> [step, evaluate or save when due] * steps -> finish -> export

A back end is trained with by implementing `Engine`; recipe, data order, learning rate, records and files are the same.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hyper_parallel.config import PREFERENCE_STAGES
from hyper_parallel.errors import (
    HyperParallelError,
    LossNotFinite,
    OutputNotWritable,
    Unwritten,
    written,
)
from hyper_parallel.ir import Plan, Timeline
from hyper_parallel.received import Limits, read_json
from hyper_parallel.trainer.data.summary import records_word
from hyper_parallel.trainer.data_record import write_data_record
from hyper_parallel.trainer.directory_watch import DirectoryWatch, continuing_words
from hyper_parallel.trainer.files import write_text, write_timeline
from hyper_parallel.trainer.loop._display import Display
from hyper_parallel.trainer.loop._schedule import LrSchedule
from hyper_parallel.trainer.loop.callback import Callback
from hyper_parallel.trainer.loop.early_stopping import EarlyStopping
from hyper_parallel.trainer.loop.metrics import (
    EvalRecord,
    MetricsLog,
    StepRecord,
    as_line,
    log_line,
)
from hyper_parallel.trainer.loop.resume import Changes, changes_line, check_resume
from hyper_parallel.trainer.loop.run_facts import run_facts
from hyper_parallel.trainer.run_directory import clear_run_directory, mark_run_directory
from hyper_parallel.trainer.run_parts import RunPart
from hyper_parallel.trainer.signals import StopRequest
from hyper_parallel.trainer.user_code import load_class

if TYPE_CHECKING:
    from hyper_parallel.trainer.data import Batches, StreamBatches
    from hyper_parallel.trainer.job import Job


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step measured; equal on every rank."""

    loss: float  # mean over all valid tokens of the step
    grad_norm: float  # global gradient norm before clipping
    valid_tokens: int  # tokens the loss counts
    step_s: float  # seconds of the step on this rank
    memory_bytes: int  # peak memory of the step on the fullest rank
    routing: dict[str, Any] | None = None  # routing of the experts; None for other models
    offload: dict[str, Any] | None = None  # what it predicted and measured; None when off
    loss_scale: float | None = None  # scale of the loss in this step; None without
    skipped: int | None = (
        None  # 1 when the step was left out: gradients overflowed or spiked; None where none can be
    )
    rollout: dict[str, Any] | None = None  # rewards and lengths of completions
    preference: dict[str, Any] | None = None  # scores of pairs of answers
    stop: bool = False  # a rank wishes to end the run after this step
    save: bool = False  # a rank wishes a checkpoint after this step


class EvalResult(NamedTuple):
    """What an evaluation measured; equal on every rank."""

    loss: float  # mean over the held-out tokens, or pairs of answers
    tokens: int  # tokens that counted
    preference: dict[str, Any] | None = None  # scores of pairs of answers
    rollout: dict[str, Any] | None = None  # rewards and lengths of completions


class Engine(Protocol):
    """Model, optimizer and ranks of a back end; every rank calls the same methods in the same order.

    Attributes:
        rank: This process; rank 0 writes the records.
        world_size: Number of processes.
        plan: The plan as the ranks carry it out, known after `begin`.
        wishes: Set by the trainer: whether this rank wishes to stop, and to save, after the present step. A step
            asks late, and gives every rank in its result what any rank wished.
        unwritten: Set by the trainer: keeps failures of outputs that the run can do without.
    """

    rank: int
    world_size: int
    plan: Plan
    wishes: Callable[[], tuple[bool, bool]]
    unwritten: Unwritten

    def load(self) -> tuple[int, dict[str, Any]]:
        """Continue from the newest intact checkpoint: its step and the `extra` of its save; step 0 for a new run."""

    def begin(self, done: int, batches: Batches | StreamBatches) -> None:
        """Prepare for the steps after step `done`."""

    def step(self, step: int, batches: Batches | StreamBatches, lr: float) -> StepResult:
        """Run one optimizer step, counted from 1.

        Raises:
            LossNotFinite: HP604 when the loss or the gradient norm is NaN or infinite.
        """

    def evaluate(self, batches: Batches | StreamBatches) -> tuple[Any, ...]:
        """Mean loss over the first step of `batches`, and how many tokens counted: fields of an `EvalResult`."""

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Save a checkpoint after a step; may return before it is written."""

    def snapshot(self, step: int, extra: dict[str, Any]) -> None:
        """Save in memory what lost ranks go on from; called where the recipe has `checkpoint.snapshot_every`."""

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""

    def finish(self) -> None:
        """Wait for what is still written, and end what `begin` has started."""

    def timeline(self) -> Timeline | None:
        """The measured timeline of all ranks on rank 0; None elsewhere."""

    def export(self) -> None:
        """Write the model in its published format."""

    def facts(self) -> dict[str, Any]:
        """Facts about device and versions that belong to the numbers of the run."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run achieved; rank 0 returns it."""

    steps: int  # last step
    first_eval_loss: (
        float  # held-out loss before the first step of the run, NaN without held-out text
    )
    last_eval_loss: float  # held-out loss after the last step
    loss: float  # training loss of the last step, NaN when there was nothing left to do
    seconds: float  # seconds of training, evaluations included
    complete: bool = False  # the run had ended before: no record of it was written
    unwritten: tuple[
        HyperParallelError, ...
    ] = ()  # failures of outputs that the run went on without


class Trainer:
    """Drives one run on one rank.

    Args:
        job: The run.
        engine: What computes.
        display: Where lines for people go.
        stop: Where the wish comes from to end before the last step; None: from nowhere.
    """

    def __init__(
        self, job: Job, engine: Engine, display: Display, stop: StopRequest | None = None
    ) -> None:
        self._job, self._engine, self._display = job, engine, display
        self._batches = job.train_batches()
        self._holdout = job.holdout_batches()
        self._log: MetricsLog | None = None
        self._asked, self._stop, self._saved_s = False, stop or StopRequest(), time.monotonic()
        self._between = True  # whether a run that ends after the present step would go on exactly as if it had not
        engine.wishes = self._wishes
        engine.unwritten = self._unwritten = Unwritten()
        self._callbacks: list[Callback] = []
        for path in job.recipe.training.callbacks:
            self._callbacks.append(load_class(path, Callback, "training.callbacks")())
            self._callbacks[-1].rank = engine.rank

    def train(self) -> Summary | None:
        """All steps, evaluations and files of the run; the summary on rank 0."""
        try:
            # From before anything is loaded: records and checkpoints are those of one directory.
            with closing(DirectoryWatch(self._job.output_dir)) as self._watch:
                return self._train()
        except LossNotFinite as error:
            error.hint = error.hint or continuing_words(self._job)
            raise

    def _train(self) -> Summary | None:
        job, recipe, engine = self._job, self._job.recipe, self._engine
        training, every = recipe.training, recipe.checkpoint.every
        snapshot_every = recipe.checkpoint.snapshot_every
        done, extra = engine.load()
        facts = run_facts(job) | {"environment.device": engine.facts().get("device")}
        stopping = EarlyStopping(
            training.early_stopping_patience,
            training.early_stopping_threshold,
            **extra.get("early_stopping", {}),
        )
        last_step = done if stopping.over else training.steps
        changed = self._continue(done, extra, facts, stopping)
        complete = done >= last_step and self._is_complete(done)
        history: list[dict[str, Any]] = extra.get("resumes", [])
        if 0 < done < last_step:
            history = [*history, {"step": done, "changed": changed}]
        part, first_step = RunPart(job.output_dir, done, changed), done + 1
        saved = {"run": facts, "resumes": history}
        schedule = LrSchedule.of(training)
        begin = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(self._display.bar)
            engine.begin(done, self._batches)
            self._watch.check()
            if engine.rank == 0:
                # Not before: a start that fails leaves an earlier run as it was.
                with written(job.output_dir):
                    mark_run_directory(job.output_dir)
                    if job.starts_over and (removed := clear_run_directory(job.output_dir)):
                        self._display.line(
                            f"checkpoint.resume=never: removed {', '.join(removed)} of {job.output_dir}"
                        )
                    if not part.is_late:
                        self._write(part)
                    shown = recipe.model_dump(mode="json")
                    trackers = training.report_to if done < last_step else ()
                    if not complete:
                        self._log = MetricsLog(job.output_dir, done, trackers, shown)
                if self._log is not None:
                    stack.push(self._close_log)
                    for line in self._log.notes:
                        self._display.line(line)
            for callback in self._callbacks:
                callback.on_train_begin(job)
            first = last = math.nan if complete else self._evaluate(done)
            loss, stopped, self._saved_s = math.nan, False, time.monotonic()
            for step in range(first_step, last_step + 1):
                self._between = step % recipe.grpo.num_iterations == 0
                lr = schedule.lr(step)
                result = engine.step(step, self._batches, lr)
                loss = result.loss
                if part.is_late and step == first_step:
                    self._write(part)
                self._report(step, result, lr)
                done, stopped = step, result.stop
                final = stopped or step == training.steps or self._stops()
                metrics = {}
                if not stopped and (
                    final or (training.eval_every and step % training.eval_every == 0)
                ):
                    last = self._evaluate(step)
                    metrics = {"loss": last} if math.isfinite(last) else {}
                    stopping.take(last)
                    if stopping.over:
                        self._display.line(f"ended after step {step}: {stopping.why}")
                    final = final or self._stops() or stopping.over
                snaps = snapshot_every and step % snapshot_every == 0 and not final
                saves = final or result.save or (every and step % every == 0)
                if snaps or saves:
                    extra = {"data": self._batches.state_dict(step), "metrics": metrics, **saved}
                    extra["early_stopping"] = stopping.state_dict()
                if snaps:
                    self._save(step, extra, snapshot=True)
                if saves:
                    self._save(step, extra)
                    self._saved_s = time.monotonic()
                    for callback in self._callbacks:
                        callback.on_save(step)
                if final:
                    break
            for callback in self._callbacks:
                callback.on_train_end(done)
            seconds = time.perf_counter() - begin
            with self._directory_named():
                engine.finish()
            self._watch.check()
        if stopped:
            self._stop.obeyed(done)
        trained = done >= first_step
        timeline = engine.timeline() if trained else None
        if timeline is not None:
            with self._unwritten.spare(job.output_dir):
                write_timeline(timeline, job.output_dir / "timeline.json")
                part.keep()  # the plan may be another one since
        if recipe.checkpoint.export and not stopped and not (complete and self._has_export()):
            engine.export()
        if engine.rank != 0:
            return None
        if complete:
            return Summary(done, first, last, loss, seconds, complete)
        about = {
            "step": done,
            "complete": not stopped,
            "ranks": engine.world_size,
            "python": platform.python_version(),
            "training_s": round(seconds, 3),
            "resumes": history,
            **engine.facts(),
        }
        with self._unwritten.spare(job.output_dir):
            if job.recipe.data.streaming:
                write_data_record(job)
            write_text(job.output_dir / "run.json", json.dumps(about, indent=1) + "\n")
        unwritten = [*self._unwritten.errors, *(self._log.unwritten.errors if self._log else ())]
        return Summary(done, first, last, loss, seconds, unwritten=tuple(unwritten))

    def _close_log(self, failure: type[BaseException] | None, *_: object) -> None:
        """Close the records; after another failure, which comes first, theirs is left out."""
        assert self._log is not None
        try:
            with written(self._job.output_dir / "metrics.jsonl"):
                self._log.close()
        except OutputNotWritable:
            if failure is None:
                raise

    def _save(self, step: int, extra: dict[str, Any], *, snapshot: bool = False) -> None:
        """Save a checkpoint or a snapshot."""
        with self._directory_named():
            (self._engine.snapshot if snapshot else self._engine.save)(step, extra)

    @contextmanager
    def _directory_named(self) -> Iterator[None]:
        """Name a run directory that is gone as the reason of a failed save; every rank fails, and says the same."""
        try:
            yield
        except OutputNotWritable:
            self._watch.check()
            raise

    def _continue(
        self, done: int, extra: dict[str, Any], facts: dict[str, Any], stopping: EarlyStopping
    ) -> Changes:
        """Continue the data from a checkpoint, and state what has changed since; nothing for a new run.

        Raises:
            CheckpointMismatch: HP702.
        """
        if not done:
            return {}
        job, line = self._job, self._display.line
        changed = check_resume(extra.get("run"), facts, job.resume_dir.parent)
        self._batches.load_state_dict(extra["data"])
        line(f"resumed from {extra.get('snapshot', job.resume_dir)}, step {done}")
        steps = job.recipe.training.steps
        why = f"training.steps is {steps}" if done >= steps else ""
        why = stopping.why if stopping.over else why
        if why:
            without = f"; without effect: {changes_line(changed)}" if changed else ""
            line(f"nothing is left to train, no record of the run changes: {why}{without}")
        elif changed:
            line(f"changed since then: {changes_line(changed)}")
        return changed

    def _is_complete(self, done: int) -> bool:
        """Whether the run had ended in its directory after step `done`, with all its records; equal on all ranks."""
        job, ended = self._job, False
        if self._engine.rank == 0 and job.resume_dir == job.checkpoint_dir:
            with suppress(OSError, ValueError):
                about = read_json(job.output_dir / "run.json", Limits())
                told = isinstance(about, dict) and (about.get("complete"), about.get("step"))
                ended = told == (True, done)
        return self._engine.any(ended)

    def _has_export(self) -> bool:
        names = ("config.json", "adapter_config.json")
        found = any((self._job.export_dir / name).is_file() for name in names)
        return self._engine.any(self._engine.rank == 0 and found)

    def _write(self, part: RunPart) -> None:
        """Write recipe and plan of the run, and keep them for this part."""
        if self._engine.rank == 0:
            with written(self._job.output_dir):
                self._job.write(self._engine.plan)
                part.keep()

    def _wishes(self) -> tuple[bool, bool]:
        """Whether this rank wishes to stop, and to save, after the present step; rank 0's clock counts."""
        if not self._between:
            return False, False
        due_s = 60 * self._job.recipe.checkpoint.every_minutes
        passed_s = time.monotonic() - self._saved_s
        return self._stop.asked, self._engine.rank == 0 and 0 < due_s <= passed_s

    def _stops(self) -> bool:
        """Whether a callback of any rank asks to end the run; nobody is asked where there is no callback."""
        return bool(self._callbacks) and self._engine.any(self._asked)

    def _evaluate(self, step: int) -> float:
        """Loss on the held-out text, written to eval.jsonl; NaN when nothing is held out."""
        if self._holdout is None:
            return math.nan
        start = time.perf_counter()
        loss, tokens, *scores = EvalResult(*self._engine.evaluate(self._holdout))
        if not math.isfinite(loss):
            raise LossNotFinite(
                "the held-out loss is not finite",
                where=f"evaluation after step {step}",
                got=f"loss={loss}",
            )
        record = EvalRecord(step, loss, tokens, time.perf_counter() - start, *scores)
        for callback in self._callbacks:
            self._asked |= callback.on_evaluate(step, as_line(record)) is True
        if self._log:
            with written(self._job.output_dir):
                self._log.evaluation(record)
            measured = {**(record.preference or {}), **(record.rollout or {})}
            told = "".join(
                f", {name} {measured[name]:.4g}"
                for name in ("accuracy", "margin", "reward")
                if name in measured
            )
            self._display.line(
                f"eval after step {step}: held-out loss {loss:.4f}{told} ({self._held_out(tokens)})"
            )
        return loss

    def _held_out(self, tokens: int) -> str:
        """Return how much an evaluation reads: tokens, or pairs, answers or prompts of stages that compare them."""
        stage = self._job.recipe.stage
        if stage not in PREFERENCE_STAGES or self._holdout is None:
            return f"{tokens:,} tokens"
        return f"{self._holdout.num_sequences:,} {records_word(stage)}"

    def _report(self, step: int, result: StepResult, lr: float) -> None:
        if self._log is None and not self._callbacks:
            return
        plan, training = self._job.plan, self._job.recipe.training
        tokens = plan.workload.tokens_per_step or 0
        per_device = tokens / result.step_s / self._engine.world_size
        flops = per_device * plan.model.flops_per_token
        if self._job.recipe.stage == "kto":
            # Every other row is only read forward, a third of the work of one that is learned from.
            flops *= 2 / 3
        record = StepRecord(
            step=step,
            lr=lr,
            tokens=tokens,
            tokens_seen=self._batches.sequences_seen(step) * plan.workload.seq_len,
            tps=per_device,
            tflops=flops / 1e12,
            mfu=flops / plan.peak_flops if plan.peak_flops else 0.0,
            pred_step_s=plan.whole_step_s
            if self._job.on_topology and (plan.roles or not result.rollout)
            else None,
            **{k: v for k, v in asdict(result).items() if k not in ("stop", "save")},
        )
        for callback in self._callbacks:
            self._asked |= callback.on_step_end(step, as_line(record)) is True
        if self._log is None:
            return
        with written(self._job.output_dir):
            self._log.step(record)
        self._display.advance(step, self._job.epochs_at(step, self._batches))
        if step % training.log_every == 0 or step in (1, training.steps):
            self._display.line(log_line(record, training.steps))

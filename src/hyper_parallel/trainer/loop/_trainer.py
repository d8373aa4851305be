"""Training loop of one rank: drives an `Engine`, writes records and prints progress. Imports no framework.

  load -> begin -> evaluate -> [step, evaluate and save when due] * steps -> finish -> export

A back end implements `Engine`. Data order, learning-rate schedule and record formats are the same for all back ends.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

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
from hyper_parallel.trainer.directory_watch import DirectoryWatch, nonfinite_hint
from hyper_parallel.trainer.files import write_text, write_timeline
from hyper_parallel.trainer.loop._display import Display
from hyper_parallel.trainer.loop._schedule import LrSchedule
from hyper_parallel.trainer.loop.callback import Callback
from hyper_parallel.trainer.loop.early_stopping import EarlyStopping
from hyper_parallel.trainer.loop.metrics import (
    EvalRecord,
    EvalResult,
    MetricsLog,
    StepMeasurements,
    StepRecord,
    as_line,
    log_line,
)
from hyper_parallel.trainer.loop.run_facts import Changes, changes_line, check_resume, run_facts
from hyper_parallel.trainer.run_directory import RunPart, clear_run_directory, mark_run_directory
from hyper_parallel.trainer.signals import StopRequest
from hyper_parallel.trainer.user_code import load_class

if TYPE_CHECKING:
    from hyper_parallel.trainer.data import Batches, StreamBatches
    from hyper_parallel.trainer.job import Job


@dataclass(frozen=True, slots=True)
class StepResult(StepMeasurements):
    """Measurements of one step, and whether any rank requests a stop or a checkpoint."""

    stop: bool = False  # a rank requests the end of the run after this step
    save: bool = False  # a rank requests a checkpoint after this step


class Engine(Protocol):
    """Interface of a back end to the training loop; every rank calls the same methods in the same order.

    Attributes:
        rank: Rank of this process; rank 0 writes the records.
        world_size: Number of processes.
        plan: Plan that the ranks execute. With offload, `begin` adds the memory plan, and `finish` sets the final one.
        wishes: Function, set by the trainer, that returns (stop, save): whether this rank requests the end of the run
            or a checkpoint after the current step. `step` combines the requests of all ranks.
        unwritten: Collector of errors in writing optional outputs, which do not end the run; set by the trainer.
    """

    rank: int
    world_size: int
    plan: Plan
    wishes: Callable[[], tuple[bool, bool]]
    unwritten: Unwritten

    def load(self) -> tuple[int, dict[str, Any]]:
        """Load the newest intact checkpoint; return its step and extra values, or (0, {}) for a new run."""

    def begin(self, done: int, batches: Batches | StreamBatches) -> None:
        """Prepare for the steps after step `done`; called once, after `load`."""

    def step(self, step: int, batches: Batches | StreamBatches, lr: float) -> StepResult:
        """Run optimizer step number `step`, counted from 1.

        Raises:
            LossNotFinite: HP604 when the loss or the gradient norm is NaN or infinite and the recipe does not skip such
                steps, or when too many consecutive steps were skipped.
        """

    def evaluate(self, batches: Batches | StreamBatches) -> EvalResult:
        """Evaluate the model on the held-out data, which `batches` has as a single step."""

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Save a checkpoint after step `step`, with the values `extra` that `load` returns.

        May return before the files are written.
        """

    def snapshot(self, step: int, extra: dict[str, Any]) -> None:
        """Save a snapshot after step `step`, from which the run resumes after a rank fails; `extra` as for `save`."""

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any rank; collective over all ranks."""

    def finish(self) -> None:
        """Wait for pending writes after the last step."""

    def timeline(self) -> Timeline | None:
        """Return the measured timelines, gathered on rank 0; None on other ranks, or without measurements."""

    def export(self) -> None:
        """Write the trained model in Hugging Face format, or its adapters in peft's format."""

    def facts(self) -> dict[str, Any]:
        """Return device, package versions and other facts about this rank, for run.json."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Outcome of a run, returned on rank 0."""

    steps: int  # last finished step
    # Held-out loss before the first step of this process, NaN without held-out data or if `complete`
    first_eval_loss: float
    last_eval_loss: float  # held-out loss of the last evaluation, NaN if there was none
    loss: float  # training loss of the last step, NaN if no step was run
    seconds: float  # seconds of preparation, steps, evaluations and saves, without loading
    complete: bool = False  # True: the run had already ended, no metric was written
    unwritten: tuple[HyperParallelError, ...] = ()  # write failures of optional outputs
    # Names of the operators of each kernel that the back end generated
    fused_kernels: tuple[tuple[str, ...], ...] = ()


@dataclass
class _RunState:
    done: int  # last finished step
    first_step: int  # first step of this process
    last_step: int  # last step of the run
    complete: bool  # the run had already ended
    stopping: EarlyStopping
    part: RunPart
    facts: dict[str, Any]  # facts of this process, stored in every checkpoint
    history: list[dict[str, Any]]  # resumes so far, stored in every checkpoint
    first_eval_loss: float = math.nan
    last_eval_loss: float = math.nan
    loss: float = math.nan
    stopped: bool = False  # the run ended on request before the last step


class Trainer:
    """Training loop of one run on one rank. When `stop` is requested, it saves a checkpoint and ends."""

    def __init__(self, job: Job, engine: Engine, display: Display, stop: StopRequest | None = None) -> None:
        self._job, self._engine, self._display = job, engine, display
        self._batches = job.train_batches()
        self._holdout = job.holdout_batches()
        self._log: MetricsLog | None = None
        self._asked, self._stop, self._saved_s = False, stop or StopRequest(), time.monotonic()
        self._between = True  # whether the run can resume exactly after the current step
        engine.wishes = self._wishes
        engine.unwritten = self._unwritten = Unwritten()
        self._callbacks: list[Callback] = []
        for path in job.recipe.training.callbacks:
            self._callbacks.append(load_class(path, Callback, "training.callbacks")())
            self._callbacks[-1].rank = engine.rank

    def train(self) -> Summary | None:
        """Run the remaining steps, evaluations and the export; return the summary on rank 0, None on other ranks.

        Raises:
            RunDirectoryLost: HP721 when the run directory is removed, moved or replaced.
            LossNotFinite: HP604 from the engine, or for a non-finite held-out loss.
            CheckpointMismatch: HP702 when settings or data of the run differ from those of the checkpoint, and the
                difference forbids resuming.
            HyperParallelError: Other errors of the engine, and of writing files.
        """
        try:
            # Open the watch before loading: records and checkpoints must belong to the same directory.
            with closing(DirectoryWatch(self._job.output_dir)) as self._watch:
                return self._train()
        except LossNotFinite as error:
            error.hint = error.hint or nonfinite_hint(self._job)
            raise

    def _train(self) -> Summary | None:
        job, engine = self._job, self._engine
        run = self._load()
        begin = time.perf_counter()
        with ExitStack() as stack:
            stack.enter_context(self._display.bar)
            engine.begin(run.done, self._batches)
            self._watch.check()
            if engine.rank == 0:
                # Records are opened only now: a failed start must not change the files of an earlier run.
                with self._check_directory_on_failure():
                    self._open_records(run, stack)
            for callback in self._callbacks:
                callback.on_train_begin(job)
            run.first_eval_loss = math.nan if run.complete else self._evaluate(run.done)
            run.last_eval_loss, self._saved_s = run.first_eval_loss, time.monotonic()
            self._run_steps(run)
            for callback in self._callbacks:
                callback.on_train_end(run.done)
            seconds = time.perf_counter() - begin
            with self._check_directory_on_failure():
                engine.finish()
            self._watch.check()
        if run.stopped:
            self._stop.record_stop(run.done)
        timeline = engine.timeline() if run.done >= run.first_step else None
        if timeline is not None:
            with self._unwritten.spare(job.output_dir):
                write_timeline(timeline, job.output_dir / "timeline.json")
                run.part.keep()  # the memory plan may have changed since the start
        exports = job.recipe.checkpoint.export and not run.stopped
        if exports and not (run.complete and self._has_export()):
            engine.export()
        return self._write_summary(run, seconds) if engine.rank == 0 else None

    def _load(self) -> _RunState:
        job, training = self._job, self._job.recipe.training
        done, extra = self._engine.load()
        facts = run_facts(job) | {"environment.device": self._engine.facts().get("device")}
        stopping = EarlyStopping(
            training.early_stopping_patience,
            training.early_stopping_threshold,
            **extra.get("early_stopping", {}),
        )
        last_step = done if stopping.should_stop else training.steps
        changed = self._continue(done, extra, facts, stopping)
        history: list[dict[str, Any]] = extra.get("resumes", [])
        complete = done >= last_step and self._is_complete(done)
        if 0 < done < last_step:
            history = [*history, {"step": done, "changed": changed}]
        part = RunPart(job.output_dir, done, changed)
        return _RunState(done, done + 1, last_step, complete, stopping, part, facts, history)

    def _open_records(self, run: _RunState, stack: ExitStack) -> None:
        job, recipe = self._job, self._job.recipe
        with written(job.output_dir):
            mark_run_directory(job.output_dir)
            if job.ignore_checkpoints and (removed := clear_run_directory(job.output_dir)):
                self._display.line(f"checkpoint.resume=never: removed {', '.join(removed)} of {job.output_dir}")
            if not run.part.is_late:
                self._write(run.part)
            shown = recipe.model_dump(mode="json")
            trackers = recipe.training.report_to if run.done < run.last_step else ()
            if not run.complete:
                self._log = MetricsLog(job.output_dir, run.done, trackers, shown, self._watch)
        if self._log is not None:
            stack.push(self._close_log)
            for line in self._log.notes:
                self._display.line(line)

    def _run_steps(self, run: _RunState) -> None:
        recipe = self._job.recipe
        training, checkpoint = recipe.training, recipe.checkpoint
        schedule = LrSchedule(training)
        for step in range(run.first_step, run.last_step + 1):
            self._between = step % recipe.grpo.num_iterations == 0
            lr = schedule.lr(step)
            result = self._engine.step(step, self._batches, lr)
            run.loss = result.loss
            if run.part.is_late and step == run.first_step:
                self._write(run.part)
            self._report(step, result, lr)
            run.done, run.stopped = step, result.stop
            final = run.stopped or step == training.steps or self._stops()
            metrics = {}
            evaluates = final or (training.eval_every and step % training.eval_every == 0)
            if evaluates and not run.stopped:
                run.last_eval_loss = last = self._evaluate(step)
                metrics = {"loss": last} if math.isfinite(last) else {}
                run.stopping.update(last)
                if run.stopping.should_stop:
                    self._display.line(f"ended after step {step}: {run.stopping.reason}")
                final = final or self._stops() or run.stopping.should_stop
            snapshot_every = checkpoint.snapshot_every
            snaps = snapshot_every and step % snapshot_every == 0 and not final
            saves = final or result.save or (checkpoint.every and step % checkpoint.every == 0)
            if snaps or saves:
                extra: dict[str, Any] = {"data": self._batches.state_dict(step), "metrics": metrics}
                extra |= {"run": run.facts, "resumes": run.history}
                extra["early_stopping"] = run.stopping.state_dict()
                if snaps:
                    self._save(step, extra, snapshot=True)
                if saves:
                    self._save(step, extra)
                    self._saved_s = time.monotonic()
                    for callback in self._callbacks:
                        callback.on_save(step)
            if final:
                break

    def _write_summary(self, run: _RunState, seconds: float) -> Summary:
        """Write run.json, unless the run had already ended before this process, and return the summary."""
        losses = run.first_eval_loss, run.last_eval_loss, run.loss
        if run.complete:
            return Summary(run.done, *losses, seconds, run.complete)
        about = {
            "step": run.done,
            "complete": not run.stopped,
            "ranks": self._engine.world_size,
            "python": platform.python_version(),
            "training_s": round(seconds, 3),
            "resumes": run.history,
            **self._engine.facts(),
        }
        directory = self._job.output_dir
        with self._unwritten.spare(directory):
            if self._job.recipe.data.streaming:
                write_data_record(self._job)
            write_text(directory / "run.json", json.dumps(about, indent=1) + "\n")
        unwritten = [*self._unwritten.errors, *(self._log.unwritten.errors if self._log else ())]
        kernels = tuple(tuple(kernel["operators"]) for kernel in about.get("fused_kernels", ()))
        return Summary(run.done, *losses, seconds, unwritten=tuple(unwritten), fused_kernels=kernels)

    def _close_log(self, failure: type[BaseException] | None, *_: object) -> None:
        """Close the metric files; raise their write errors only if no other exception (`failure`) is propagating."""
        assert self._log is not None
        try:
            with written(self._job.output_dir / "metrics.jsonl"):
                self._log.close()
        except OutputNotWritable:
            if failure is None:
                raise

    def _save(self, step: int, extra: dict[str, Any], *, snapshot: bool = False) -> None:
        with self._check_directory_on_failure():
            (self._engine.snapshot if snapshot else self._engine.save)(step, extra)

    @contextmanager
    def _check_directory_on_failure(self) -> Iterator[None]:
        """Replace OutputNotWritable inside the context by RunDirectoryLost (HP721) if the run directory was lost."""
        try:
            yield
        except OutputNotWritable:
            self._watch.check()
            raise

    def _continue(self, done: int, extra: dict[str, Any], facts: dict[str, Any], stopping: EarlyStopping) -> Changes:
        """Restore the data position from a checkpoint; print and return the changed facts, {} for a new run."""
        if not done:
            return {}
        job, line = self._job, self._display.line
        changed = check_resume(extra.get("run"), facts, job.resume_dir.parent)
        has_source = job.recipe.checkpoint.from_dir is not None
        start_over = ("checkpoint.from_dir=null " if has_source else "") + "checkpoint.resume=never"
        self._batches.load_state_dict(extra["data"], start_over)
        line(f"resumed from {extra.get('snapshot', job.resume_dir)}, step {done}")
        steps = job.recipe.training.steps
        why = f"training.steps is {steps}" if done >= steps else ""
        why = stopping.reason if stopping.should_stop else why
        if why:
            without = f"; without effect: {changes_line(changed)}" if changed else ""
            line(f"nothing is left to train, and the run is unchanged: {why}{without}")
        elif changed:
            line(f"changed since then: {changes_line(changed)}")
        return changed

    def _is_complete(self, done: int) -> bool:
        """Return whether, according to run.json, the run was completed at step `done`; collective over all ranks."""
        job, ended = self._job, False
        if self._engine.rank == 0 and job.resume_dir == job.checkpoint_dir:
            with suppress(OSError, ValueError):
                about = read_json(job.output_dir / "run.json", Limits())
                status = isinstance(about, dict) and (about.get("complete"), about.get("step"))
                ended = status == (True, done)
        return self._engine.any(ended)

    def _has_export(self) -> bool:
        names = ("config.json", "adapter_config.json")
        exists = any((self._job.export_dir / name).is_file() for name in names)
        return self._engine.any(self._engine.rank == 0 and exists)

    def _write(self, part: RunPart) -> None:
        """On rank 0, write recipe and plan into the run directory, and a copy into the folder of this run part."""
        if self._engine.rank == 0:
            with written(self._job.output_dir):
                self._job.write(self._engine.plan)
                part.keep()

    def _wishes(self) -> tuple[bool, bool]:
        """Return (stop, save): whether this rank requests the end of the run or a checkpoint after the current step.

        Only rank 0 requests checkpoints, when `checkpoint.every_minutes` have passed. Both are False while more steps
        on the same GRPO rollout follow.
        """
        if not self._between:
            return False, False
        due_s = 60 * self._job.recipe.checkpoint.every_minutes
        passed_s = time.monotonic() - self._saved_s
        return self._stop.is_requested, self._engine.rank == 0 and 0 < due_s <= passed_s

    def _stops(self) -> bool:
        """Return whether a callback on any rank requested a stop; collective if the run has callbacks."""
        return bool(self._callbacks) and self._engine.any(self._asked)

    def _evaluate(self, step: int) -> float:
        """Evaluate the held-out data, append the result to eval.jsonl, and return the loss.

        Return NaN if the run has no held-out data. Raise LossNotFinite (HP604) for a non-finite loss.
        """
        if self._holdout is None:
            return math.nan
        start = time.perf_counter()
        result = self._engine.evaluate(self._holdout)
        loss = result.loss
        if not math.isfinite(loss):
            raise LossNotFinite(
                "the held-out loss is not finite",
                where=f"evaluation after step {step}",
                got=f"loss={loss}",
            )
        seconds = time.perf_counter() - start
        record = EvalRecord(**asdict(result), step=step, seconds=seconds)
        if self._job.recipe.stage != "sft":  # only conversations have answers
            record = replace(record, answer_accuracy=None)
        for callback in self._callbacks:
            self._asked |= callback.on_evaluate(step, as_line(record)) is True
        if self._log:
            with written(self._job.output_dir):
                self._log.evaluation(record)
            measured = {**(record.preference or {}), **(record.rollout or {}), **as_line(record)}
            scores_text = "".join(
                # Hide rounding errors and -0.
                f", {name.replace('_', ' ')} {round(measured[name], 6) + 0.0:.4g}"
                for name in ("accuracy", "margin", "reward", "token_accuracy", "answer_accuracy")
                if name in measured
            )
            self._display.line(
                f"eval after step {step}: held-out loss {loss:.4f}{scores_text} ({self._held_out(result.tokens)})"
            )
        return loss

    def _held_out(self, tokens: int) -> str:
        """Return the amount of held-out data for the log, in tokens or, by stage, in pairs, answers or prompts."""
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
            # Half of the sequences run forward only, which is a third of the work of a training sequence.
            flops *= 2 / 3
        record = StepRecord(
            step=step,
            lr=lr,
            tokens=tokens,
            tokens_seen=self._batches.sequences_seen(step) * plan.workload.seq_len,
            tps=per_device,
            tflops=flops / 1e12,
            mfu=flops / plan.peak_flops if plan.peak_flops else 0.0,
            pred_step_s=plan.whole_step_s if self._job.on_topology and (plan.roles or not result.rollout) else None,
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

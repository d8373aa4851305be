"""What every rank of a training run does, from joining the world to the last file."""

from __future__ import annotations

import json
import math
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyper_parallel.backends.torch import load_pretrained, materialize
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.trainer._checkpoint import Checkpointer
from hyper_parallel.trainer._console import Display
from hyper_parallel.trainer._export import export_hf
from hyper_parallel.trainer._files import write_text, write_timeline
from hyper_parallel.trainer._job import Job
from hyper_parallel.trainer._loop import Loop, StepResult
from hyper_parallel.trainer._memory import MemoryGauge
from hyper_parallel.trainer._metrics import EvalRecord, MetricsLog, StepRecord, log_line
from hyper_parallel.trainer._model import (
    build_model,
    compile_layers,
    routing_of,
    weights_directory,
)
from hyper_parallel.trainer._offload import PlannedSteps, StepOutputs, lent
from hyper_parallel.trainer._offload_machine import Assumed
from hyper_parallel.trainer._offload_record import (
    drift_line,
    offload_line,
    with_memory,
    write_timelines,
)
from hyper_parallel.trainer._optimizer import build_optimizer
from hyper_parallel.trainer._schedule import Schedule
from hyper_parallel.trainer._spans import SpanRecorder


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run achieved; rank 0 returns it.

    Attributes:
        steps: Last step.
        first_eval_loss: Held-out loss before the first step of the run, NaN without held-out text.
        last_eval_loss: Held-out loss after the last step.
        loss: Training loss of the last step, NaN when there was nothing left to do.
        seconds: Seconds of training, evaluations included.
    """

    steps: int
    first_eval_loss: float
    last_eval_loss: float
    loss: float
    seconds: float


def train_rank(job: Job, flash: Path | None = None) -> Summary | None:
    """Train on this rank; the summary on rank 0, None on the others.

    Args:
        job: The run.
        flash: Folder for files of all ranks that this process starts; needed when the recipe has `offload.flash_dir`.
    """
    # A terminal sends its interrupt to every rank: the launcher alone acts on it and stops the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with World.join() as world:
        return _Run(job, world, flash).train()


class _Run:
    """The state of one run on one rank."""

    def __init__(self, job: Job, world: World, flash: Path | None) -> None:
        self._job = job
        self._flash = None if flash is None else flash / f"rank{world.rank}"
        self._recipe = job.recipe
        self._world = world
        self._main = world.rank == 0
        if self._recipe.training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._train = job.train_batches()
        self._holdout = job.holdout_batches()
        self._gauge = MemoryGauge(world.device)
        self._model = self._make_model()
        self._optimizer = build_optimizer(self._model, self._recipe.training)

    def train(self) -> Summary | None:
        """All steps, evaluations and files of the run."""
        job, recipe, world = self._job, self._recipe, self._world
        training = recipe.training
        done = self._resume()
        checkpointer = self._checkpointer(job.checkpoint_dir)
        if world.world_size > 1:
            dist.barrier()
        recorder = SpanRecorder(world.rank, world.device, done + 1)
        loop = Loop(self._model, self._optimizer, job.plan, world, recorder, self._gauge)
        schedule = Schedule.of(training)
        begin = time.perf_counter()
        with ExitStack() as stack:
            self._log = MetricsLog(job.output_dir, done) if self._main else None
            if self._log:
                stack.callback(self._log.close)
            self._display = Display(training.steps, self._main)
            self._display.start()
            stack.callback(self._display.stop)
            if recipe.offload.on and done < training.steps:
                loop.planned = stack.enter_context(
                    self._plan_memory(loop, recorder, schedule, done)
                )
            first = last = self._evaluate(loop, done)
            result = None
            for step in range(done + 1, training.steps + 1):
                result = loop.step(step, self._train, schedule.lr(step), training.max_grad_norm)
                self._report(step, result, schedule.lr(step))
                final = step == training.steps
                if final or (training.eval_every and step % training.eval_every == 0):
                    last = self._evaluate(loop, step)
                every = recipe.checkpoint.every
                if final or (every and step % every == 0):
                    recorder.begin_step(None)
                    with recorder.span("checkpoint", "checkpoint"), lent(loop):
                        checkpointer.save(
                            step,
                            self._model,
                            self._optimizer,
                            {"data": self._train.state_dict(step)},
                        )
            seconds = time.perf_counter() - begin
            checkpointer.finish()
        timeline = recorder.gather(world.world_size)
        if timeline is not None:
            write_timeline(timeline, job.output_dir / "timeline.json")
        if recipe.checkpoint.export:
            export_hf(self._model, self._model.config, job.packed.tokenizer_dir, job.export_dir)
        if not self._main:
            return None
        write_text(job.output_dir / "run.json", json.dumps(self._facts(seconds), indent=1) + "\n")
        loss = result.loss if result else math.nan
        return Summary(training.steps, first, last, loss, seconds)

    @contextmanager
    def _plan_memory(
        self, loop: Loop, recorder: SpanRecorder, schedule: Schedule, done: int
    ) -> Iterator[PlannedSteps]:
        """Rehearse and plan the memory of a step; the state is the device's until the end of the context."""
        job, world = self._job, self._world
        most = self._recipe.training.max_grad_norm

        def whole(
            spans: Any, parts: list[dict[str, torch.Tensor]], valid: Any, lr: Any
        ) -> StepOutputs:
            one = loop
            if spans is not None:
                one = Loop(self._model, self._optimizer, job.plan, world, spans, self._gauge)
            loss_sum, grad_norm = one.gradients(parts, valid, most)
            one.update(lr)
            return loss_sum, grad_norm, one.count_routing()

        planned = PlannedSteps(
            self._model,
            self._optimizer,
            whole,
            Assumed.of(self._recipe, job.plan),
            self._flash,
            self._display.line,
        )
        recorder.begin_step(0)  # no step of the run: nothing is recorded
        steps = (
            loop.inputs(self._train, step, schedule.lr(min(step, self._recipe.training.steps)))
            for step in (done + 1, done + 2)
        )
        planned.prepare(*steps)
        self._write_plan(planned)
        self._display.line(offload_line(planned.plan))
        try:
            yield planned
        finally:
            planned.close()
        self._write_plan(planned)  # a step may have been planned again
        if self._main and planned.timelines is not None:
            write_timelines(planned.timelines, job.output_dir)

    def _write_plan(self, planned: PlannedSteps) -> None:
        """plan.json with the memory of the fullest rank's memory plan in place of the cost model's."""
        plan = with_memory(self._job.plan, planned.memory_terms(), planned.plan, planned.notes)
        if self._main:
            write_text(self._job.output_dir / "plan.json", plan.to_json() + "\n")

    def _make_model(self) -> nn.Module:
        recipe = self._recipe
        model = parallelize(
            build_model(recipe), self._job.plan, self._world, routing=routing_of(recipe)
        )
        directory = weights_directory(recipe)
        if directory is None:
            materialize(model, seed=recipe.training.seed, device=self._world.device)
        else:
            load_pretrained(model, directory, device=self._world.device)
        if recipe.training.compile:
            compile_layers(model)
        return model

    def _checkpointer(self, directory: Path) -> Checkpointer:
        choice, plan = self._recipe.checkpoint, self._job.plan
        return Checkpointer(
            directory,
            keep=choice.keep,
            asynchronous=choice.asynchronous,
            fingerprint={
                "model": plan.model.fingerprint,
                "optimizer": plan.workload.optimizer,
                "param_dtype": plan.workload.param_dtype,
            },
        )

    def _resume(self) -> int:
        """Load the newest intact checkpoint; the step to continue after, 0 for a new run."""
        choice = self._recipe.checkpoint
        if choice.resume == "never":
            return 0
        source = self._checkpointer(self._job.resume_dir)
        if source.latest() is None:
            return 0
        step, extra = source.load(self._model, self._optimizer)
        self._train.load_state_dict(extra["data"])
        return step

    def _evaluate(self, loop: Loop, step: int) -> float:
        """Loss on the held-out text, written to eval.jsonl; NaN when nothing is held out."""
        if self._holdout is None:
            return math.nan
        start = time.perf_counter()
        with lent(loop):
            loss, tokens = loop.evaluate(self._holdout)
        if self._log:
            self._log.evaluation(EvalRecord(step, loss, tokens, time.perf_counter() - start))
            self._display.line(
                f"eval after step {step}: held-out loss {loss:.4f} ({tokens:,} tokens)"
            )
        return loss

    def _report(self, step: int, result: StepResult, lr: float) -> None:
        if self._log is None:
            return
        plan, training = self._job.plan, self._recipe.training
        tokens = plan.workload.tokens_per_step or 0
        per_device = tokens / result.seconds / self._world.world_size
        flops = per_device * plan.model.flops_per_token
        record = StepRecord(
            step=step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            tokens=tokens,
            valid_tokens=result.valid_tokens,
            tokens_seen=step * tokens,
            step_s=result.seconds,
            tps=per_device,
            tflops=flops / 1e12,
            mfu=flops / plan.peak_flops if plan.peak_flops else 0.0,
            memory_bytes=result.memory_bytes,
            pred_step_s=plan.step_s,
            routing=result.routing,
            offload=result.offload,
        )
        self._log.step(record)
        self._display.advance(step)
        if result.offload is not None and result.offload.replanned:
            self._display.line(drift_line(step, result.offload))
        if step % training.log_every == 0 or step in (1, training.steps):
            self._display.line(log_line(record, training.steps, plan.memory_capacity_bytes))

    def _facts(self, seconds: float) -> dict[str, Any]:
        """Facts about machine and versions that belong to the numbers of this run."""
        import transformers

        device = self._world.device
        module = torch.get_device_module(device)
        known = device.type != "cpu" and hasattr(module, "get_device_name")
        name = module.get_device_name(device) if known else platform.machine()
        return {
            "device": f"{device.type} ({name})",
            "ranks": self._world.world_size,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "training_s": round(seconds, 3),
            "memory": _memory_source(device, offload=self._recipe.offload.on),
        }


def _memory_source(device: torch.device, *, offload: bool) -> str:
    """What `memory_bytes` of the steps is, in words."""
    if device.type != "cpu":
        return "allocator peak"
    return "counted device bytes" if offload else "peak anonymous memory above the start"

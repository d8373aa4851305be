"""Torch engine: model, optimizer and checkpoints of one rank, driven by the `Trainer`."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import local, materialize
from hyper_parallel.backends.torch.dropout import original_config
from hyper_parallel.backends.torch.embedding_noise import EmbeddingNoise
from hyper_parallel.backends.torch.memory import spill_mode
from hyper_parallel.backends.torch.rank_seed import derive_seed, rank_seed
from hyper_parallel.backends.torch.weights.huggingface import model_of_part
from hyper_parallel.backends.torch.weights.lora import initialise_adapters
from hyper_parallel.errors import Unwritten
from hyper_parallel.ir import Timeline
from hyper_parallel.model import GENERATION
from hyper_parallel.runtime import World, parallelize, parallelize_submodels
from hyper_parallel.trainer.checkpoints.adapter_files import export_adapter
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer, load_newest
from hyper_parallel.trainer.checkpoints.extra_state import check_trainer_extra
from hyper_parallel.trainer.checkpoints.model_export import export_hf
from hyper_parallel.trainer.engine.base_weights import BaseWeights, load_base
from hyper_parallel.trainer.engine.offload import PlannedSteps
from hyper_parallel.trainer.engine.offload_machine import OffloadMachine
from hyper_parallel.trainer.engine.optimizer import build_optimizer, recipe_values
from hyper_parallel.trainer.engine.recipe_model import (
    build_model,
    compile_layers,
    joint_schedule,
    routing_of,
    set_token_ids,
    submodel_layouts,
)
from hyper_parallel.trainer.engine.step_checks import check_ranks
from hyper_parallel.trainer.engine.step_gauges import (
    MemoryGauge,
    SpanRecorder,
    device_name,
    write_profile,
)
from hyper_parallel.trainer.engine.step_loop import Loop, LossScale, SkipPolicy
from hyper_parallel.trainer.files import write_text
from hyper_parallel.trainer.input_checksums import BASE, INPUTS, RunInputs
from hyper_parallel.trainer.job import Job
from hyper_parallel.trainer.loop import Display, EvalResult, LrSchedule, StepResult
from hyper_parallel.trainer.snapshots import SNAPSHOTS_KEPT
from hyper_parallel.trainer.stages.build_stage import build_stage
from hyper_parallel.trainer.stages.sampling import all_reduce_max

if TYPE_CHECKING:
    from hyper_parallel.trainer.data import Batches, StreamBatches


class TorchEngine:
    """Torch implementation of `Engine`: model, optimizer and checkpoints of one rank.

    `flash` is the folder for offload files of all ranks; None: no flash tier. `snapshots` is the folder in host memory
    for snapshots, from which a restart recovers; None: no snapshots.
    """

    _make_loop: Callable[..., Loop] = Loop
    _executes_plans = True  # whether this engine executes the memory plans of `offload`

    def __init__(
        self,
        job: Job,
        world: World,
        display: Display,
        flash: Path | None = None,
        snapshots: Path | None = None,
    ) -> None:
        self.rank, self.world_size = world.rank, world.world_size
        self._job, self._recipe, self._world = job, job.recipe, world
        self._display = display
        self._inputs = RunInputs()
        self._base: BaseWeights | None = None
        self._flash = None if flash is None else flash / f"rank{world.rank}"
        training = self._recipe.training
        if training.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._gauge = MemoryGauge(world.device)
        torch.manual_seed(derive_seed(training.seed, world.rank))
        self._assumed, self._spill = None, None
        if self._executes_plans and self._recipe.offload.on:
            # Until a memory plan exists, model and optimizer are evicted to host memory within its budget.
            self._assumed = OffloadMachine.of(self._recipe, job.plan, world.device)
            budget = self._assumed.budget_bytes
            self._spill = spill_mode(world.device, budget, keep_offloaded=True)
        with self._spill or nullcontext():
            self._model = self._make_model()
        self._stream = rank_seed(self._model, training.seed)
        alpha = training.neftune_noise_alpha
        self._noise = None if alpha is None else EmbeddingNoise.attach(self._model, alpha)
        self._optimizer = build_optimizer(self._model, training)
        # During a step FSDP replaces the model's parameters by unsharded parameters.
        self._parameters = list(self._model.parameters())
        # Offload counts bytes itself, and the counter does not see the tensors of compiled code.
        if not (self._assumed is not None or training.compile):
            self._gauge.state = lambda: [t for kind in self._state().values() for t in kind]
            # Count the parameters now, because the first step may pad local shards.
            parameters = {"parameters": self._bytes_by_kind()["parameters"]}
            self._gauge.kinds = lambda: self._bytes_by_kind() | parameters
        self._snapshots = None if snapshots is None else self._checkpointer(snapshots, snapshot=True)
        self._scale = LossScale() if training.dtype == "float16" else None
        self._planned: PlannedSteps | None = None
        self._stack, self._profiles = ExitStack(), ExitStack()
        self.plan = job.plan
        self.wishes: Callable[[], tuple[bool, bool]] = lambda: (False, False)
        self.unwritten = Unwritten()

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def load(self) -> tuple[int, dict[str, Any]]:
        """Load the newest intact checkpoint or snapshot; return its step and extra values.

        Return (0, {}) if there are none, or if the run ignores them.

        Raises:
            CheckpointCorrupt: HP701 when checkpoints exist, but none is intact.
            CheckpointFormat: HP740 when an earlier version wrote the newest one.
            CheckpointMismatch: HP702 for a checkpoint of another model or optimizer.
        """
        if self._job.ignore_checkpoints:
            return 0, {}
        source, memory = self._checkpointer(self._job.resume_dir), self._snapshots
        saved = [s for s in (source, memory) if s is not None and s.latest() is not None]
        if not saved:
            return 0, {}
        recipe_groups = [dict(group) for group in self._optimizer.param_groups]
        with self._spill or nullcontext():
            done, extra = load_newest(saved, self._model, self._optimizer)
        # Values set by the recipe override the values of the checkpoint.
        keys = recipe_values(self._optimizer, self._recipe.training)
        for group, own in zip(self._optimizer.param_groups, recipe_groups, strict=True):
            group.update({key: own[key] for key in keys if key in own})
        self._inputs.load(extra)
        if self._scale is not None and "loss_scale" in extra:
            self._scale = LossScale(**extra["loss_scale"])
        return done, extra

    def begin(self, done: int, batches: Batches | StreamBatches) -> None:
        """Prepare the steps after step `done`: open checkpoints, begin the learning stage, plan memory with offload.

        Raises:
            CheckpointMismatch: HP702 when the base weights of adapters differ from those of the checkpoint.
            HyperParallelError: Errors of the learning stage and, with offload, of `PlannedSteps.prepare`.
        """
        job, training = self._job, self._recipe.training
        if self._base is not None:
            self._inputs.check(BASE, self._base.checksum, str(job.weights))
        self._saver = self._checkpointer(job.checkpoint_dir)
        if self.world_size > 1:
            dist.barrier()
        self._recorder = SpanRecorder(self.rank, self._world.device, done + 1, self._world.heartbeat)
        self._loop = self._make_loop(
            self._model,
            self._optimizer,
            job.plan,
            self._world,
            self._recorder,
            self._gauge,
            training.max_grad_norm,
            self._scale,
            lambda: self.wishes(),
            self._seed,
            SkipPolicy(training.on_nonfinite == "skip", training.skip_grad_norm),
            build_stage(job, self._world, self._model, done, self._recorder, self._inputs),
        )
        if self._loop.stage is not None:
            self._stack.callback(self._loop.stage.end)
            if done < training.steps:
                self._loop.stage.begin(batches)
        self._seed(done + 1)
        if training.profile is not None and training.profile.start <= done:
            self._display.line(
                f"no step is profiled: training.profile.start={training.profile.start} is not after the "
                f"checkpoint of step {done}"
            )
        if self._assumed is None or self._spill is None or done >= training.steps:
            return
        line, schedule = self._display.line, LrSchedule(training)
        planned = PlannedSteps(self._loop, self._assumed, self._flash, line, self._spill)
        self._recorder.begin_step(0)  # outside the recorded window
        planned.prepare(
            *(self._loop.inputs(batches, step, schedule.lr(min(step, training.steps))) for step in (done + 1, done + 2))
        )
        self._stack.callback(planned.close)
        self._planned = planned
        self.plan = planned.plan_with_memory(job.plan)

    def step(self, step: int, batches: Batches | StreamBatches, lr: float) -> StepResult:
        """Run optimizer step number `step`, counted from 1.

        Raises:
            LossNotFinite: HP604; see `Loop.step`.
            RanksDisagree: HP625 when `check_ranks_every` detects a rank with different results.
            HyperParallelError: With offload, errors of `PlannedSteps.step`.
        """
        every, plan = self._recipe.training.check_ranks_every, self._job.plan
        if every and step % every == 0:
            inputs = self._loop.inputs(batches, step, lr, share=0)
            check_ranks(self._model, plan, inputs.microbatches, int(inputs.valid_tokens), step)
        with self._profiled(step):
            return (self._planned or self._loop).step(step, batches, lr)

    def evaluate(self, batches: Batches | StreamBatches) -> EvalResult:
        """Evaluate the held-out rows, which are the only step of `batches`; return the mean loss and other metrics."""
        streamed = self._spill if self._planned is None else self._planned.streamed()
        with streamed or nullcontext():
            return self._loop.evaluate(batches)

    def save(self, step: int, extra: dict[str, Any]) -> None:
        """Save a checkpoint after a step; with `checkpoint.asynchronous`, return before the files are written."""
        self._save(self._saver, step, extra)

    def snapshot(self, step: int, extra: dict[str, Any]) -> None:
        """Write the snapshot from which the run recovers after the loss of a rank; no effect without a folder."""
        if self._snapshots is not None:
            extra = extra | {"snapshot": str(self._snapshots.directory)}
            self._save(self._snapshots, step, extra)

    def _save(self, saver: Checkpointer, step: int, extra: dict[str, Any]) -> None:
        self._recorder.begin_step(None)
        extra = extra | {INPUTS: self._inputs.state()}
        if self._scale is not None:
            extra = extra | {"loss_scale": asdict(self._scale)}
        with self._recorder.span("checkpoint", "checkpoint"):
            saver.save(step, self._model, self._optimizer, extra, self._resident)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any rank; collective over all ranks."""
        return all_reduce_max(torch.tensor(float(flag), device=self._world.device)) > 0

    @contextmanager
    def _profiled(self, step: int) -> Iterator[None]:
        window = self._recipe.training.profile
        if window is None or (self.rank and window.ranks == "first"):
            yield
            return
        if step == window.start:
            path = self._job.output_dir / "profile" / f"rank{self.rank}.json"
            profiler = torch.profiler.profile(record_shapes=True)
            self._profiles.callback(write_profile, profiler, path, self.unwritten)
            self._profiles.enter_context(profiler)
        yield
        if step == window.start + window.steps - 1:
            self._profiles.close()

    def finish(self) -> None:
        """Wait for the checkpoint in progress; with offload, also write the final plan and its timelines."""
        self._saver.finish()
        self._profiles.close()  # the run may end inside the profiled window
        if (planned := self._planned) is not None:
            planned.finish()
            # The plan may have changed after a step.
            self.plan = planned.plan_with_memory(self._job.plan)
            if self.rank == 0:
                with self.unwritten.spare(self._job.output_dir):
                    write_text(self._job.output_dir / "plan.json", self.plan.to_json() + "\n")
                    planned.write_timelines(self._job.output_dir)

    def _resident(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the current values of a model or optimizer tensor, on the tier where it lives."""
        owner = self._planned or self._spill
        return tensor.detach() if owner is None else owner.on_current_tier(tensor)

    def timeline(self) -> Timeline | None:
        """Gather the measured timelines of the first 64 ranks on rank 0; return None on other ranks."""
        return self._recorder.gather(self.world_size)

    def export(self) -> None:
        """Write the export: a Hugging Face model directory or, with `lora`, the adapters in peft's format."""
        job = self._job
        if job.recipe.lora is not None:
            export_adapter(
                self._model,
                job.packed.tokenizer_dir,
                job.export_dir,
                resident=self._resident,
                metadata=self._base.to_metadata() if self._base else {},
            )
            return
        complete = model_of_part(self._model)
        set_token_ids(complete, job.packed.tokenizer_dir, pretrained=job.weights is not None)
        generation = job.model_dir / GENERATION
        export_hf(
            self._model,
            original_config(complete),
            job.packed.tokenizer_dir,
            job.export_dir,
            generation=generation,
            resident=self._resident,
        )

    def facts(self) -> dict[str, Any]:
        """Return device name, package versions and the kind of memory measurement, for run.json."""
        import transformers

        device = self._world.device
        memory = "peak anonymous memory above the start"
        if device.type != "cpu":
            memory = "allocator peak"
        elif self._assumed is not None:
            memory = "counted device bytes"
        elif self._gauge.state is not None:
            memory = "counted tensor bytes"
        return {
            "device": device_name(device),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "memory": memory,
        }

    def _make_model(self) -> nn.Module:
        recipe, directory = self._recipe, self._job.weights
        plan, routing = self._job.plan, routing_of(recipe)
        if recipe.parallel.submodels is None:
            model = parallelize(
                build_model(recipe),
                plan,
                self._world,
                routing=routing,
                one_order=recipe.parallel.one_order,
            )
        else:
            model = parallelize_submodels(
                build_model(recipe),
                submodel_layouts(recipe, plan),
                self._world,
                plan.workload,
                ranks=recipe.parallel.submodels.members,
                routing=routing,
                schedule=joint_schedule(plan),
            )
        if directory is None:
            materialize(model, seed=recipe.training.seed, device=self._world.device)
        else:
            options = {"device": self._world.device, "seed": recipe.training.seed}
            self._base = load_base(model, directory, frozen=recipe.lora is not None, **options)
        if recipe.lora is not None:
            gaussian = recipe.lora.init_lora_weights == "gaussian"
            initialise_adapters(model, recipe.training.seed, gaussian=gaussian)
        if recipe.training.compile is True:
            compile_layers(model)
        return model

    def _seed(self, step: int) -> None:
        number = derive_seed(self._stream, step)
        if self._noise is not None:
            self._noise.key = derive_seed(self._recipe.training.seed, step)  # the same on all ranks
        torch.manual_seed(number)  # for the CPU and all accelerators
        random.seed(number)
        np.random.seed(number % 2**32)  # noqa: NPY002  the generator used by third-party code

    def _state(self) -> dict[str, list[Tensor]]:
        """Return the current tensors by kind: parameters (with buffers), gradients, optimizer states."""
        slots = [value for state in self._optimizer.state.values() for value in state.values()]
        return {
            "parameters": [*self._parameters, *self._model.buffers()],
            "gradients": [p.grad for p in self._parameters if p.grad is not None],
            "optimizer states": [slot for slot in slots if isinstance(slot, Tensor)],
        }

    def _bytes_by_kind(self) -> dict[str, int]:
        return {kind: sum(local(tensor).nbytes for tensor in tensors) for kind, tensors in self._state().items()}

    def _checkpointer(self, directory: Path, *, snapshot: bool = False) -> Checkpointer:
        choice, plan = self._recipe.checkpoint, self._job.plan
        return Checkpointer(
            directory,
            keep=SNAPSHOTS_KEPT if snapshot else choice.keep,
            asynchronous=choice.asynchronous and not snapshot,
            fingerprint={
                "model": plan.model.fingerprint,
                "optimizer": plan.workload.optimizer,
                "param_dtype": plan.workload.param_dtype,
            },
            on_error="continue" if snapshot else choice.on_error,
            keep_best="loss" if choice.keep_best and not snapshot else None,
            check_extra=check_trainer_extra,
        )

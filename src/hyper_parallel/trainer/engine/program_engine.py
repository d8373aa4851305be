"""Engine that runs captured step programs in another framework, with torch for checkpoints and exports.

A step program is a graph of tensor operators, captured from the torch training step and compiled by the framework (see
`step_programs`). Batches, data order, learning rates, records, checkpoints and exports come from the torch engine.
Weights and optimizer state live in the framework. Saves, exports and resumes copy this state from or to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyper_parallel.backends.program_runner import CompiledProgram, ProgramRunner, join_ranks
from hyper_parallel.backends.torch import handle, local
from hyper_parallel.runtime import gather_objects
from hyper_parallel.trainer.data import Batches, StreamBatches
from hyper_parallel.trainer.engine.program_pipeline import ProgramPasses
from hyper_parallel.trainer.engine.step_loop import Loop, StepInputs
from hyper_parallel.trainer.engine.step_programs import (
    AXES,
    VALID_TOKENS,
    StepPrograms,
    program_block,
    state_names,
    update_scalars,
)
from hyper_parallel.trainer.engine.torch_engine import TorchEngine


class FrameworkState:
    """Weights and optimizer state of one rank, stored as arrays of another framework.

    The initial values are copied from a torch model and optimizer. `shapes` gives the shape of each array by name;
    smaller torch shards are padded with zeros.

    Attributes:
        step: Number of finished optimizer steps; for SGD only those of this process.
        values: Arrays by name: `param.NAME` of parameters and persistent buffers, `STATE.NAME` of optimizer state.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        runner: ProgramRunner,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._runner, self._optimizer = runner, optimizer
        self._tensors: dict[str, Tensor] = {}
        self.step = 0
        saved = model.state_dict().keys()
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
        for name, param in (*model.named_parameters(), *buffers):
            self._tensors[f"param.{name}"] = param
            if not param.requires_grad:
                continue
            state = optimizer.state[param]
            for kind in state_names(optimizer):
                self._tensors[f"{kind}.{name}"] = state.setdefault(kind, torch.zeros_like(param))
            if isinstance(optimizer, torch.optim.AdamW):
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
                self.step = int(state["step"])
        self.values = {
            name: runner.value(_padded(local(t.detach()).numpy(), shapes.get(name)))
            for name, t in self._tensors.items()
        }
        # Checkpoints and exports call `on_host` with local tensors.
        self._names = {id(local(tensor)): name for name, tensor in self._tensors.items()}

    @property
    def parameters(self) -> dict[str, Any]:
        """Arrays of parameters and persistent buffers, by name `param.NAME`."""
        return {k: v for k, v in self.values.items() if k.startswith("param.")}

    def adopt(self, values: dict[str, Any]) -> None:
        """Replace arrays by the results of an optimizer update, and increment the step count."""
        self.values |= values
        self.step += 1
        for state in self._optimizer.state.values():
            if "step" in state:
                state["step"].fill_(self.step)

    def on_host(self, tensor: Tensor) -> Tensor:
        """Copy the framework's array, if any, into its torch tensor; return the torch tensor, detached."""
        name = self._names.get(id(local(tensor)))
        if name is not None:
            array = torch.from_numpy(self._runner.array(self.values[name]))
            target = local(tensor.detach())
            target.copy_(array[: len(target)] if target.dim() else array)
        return tensor.detach()


def _padded(array: NDArray[Any], shape: tuple[int, ...] | None) -> NDArray[Any]:
    if shape is None or array.shape == shape:
        return array
    return np.pad(array, [(0, wanted - n) for wanted, n in zip(shape, array.shape, strict=True)])


@dataclass
class ProgramLoop(Loop):
    """Training loop whose steps and evaluations run compiled step programs.

    Attributes:
        runner: Interface to the framework.
        reports: Whether this rank adds its loss to the sum over ranks. Tensor-parallel ranks compute the same loss, so
            only the first of these ranks adds its loss.
        state: Weights and optimizer state in the framework.
        passes: Runner of forward and backward over the microbatches of a step.
        programs: Compiled programs by name: `loss`, `gradients`, `update`.
    """

    runner: ProgramRunner = field(init=False)
    reports: bool = field(init=False)
    state: FrameworkState = field(init=False)
    passes: ProgramPasses = field(init=False)
    programs: dict[str, CompiledProgram] = field(init=False)
    _pending: dict[str, Any] = field(init=False, default_factory=dict)

    def connect(self, runner: ProgramRunner, programs: StepPrograms, compiled: dict[str, CompiledProgram]) -> None:
        """Copy weights and optimizer state from torch into the framework, and set all attributes of this loop."""
        self.runner, self.programs = runner, compiled
        plan, rank = handle(self.model).plan, handle(self.model).ranks.rank
        self.reports = plan.mesh.coordinate(rank)["tp_x"] == 0
        known = programs.gradients.inputs
        messages = [known[n] for n in ("batch.received", "batch.gradient") if n in known]
        shape = messages[0][1].shape if messages else ()
        stage = plan.mesh.coordinate(rank)["pp"]
        self.passes = ProgramPasses(runner, compiled, plan.strategy, stage, shape)
        inputs = programs.gradients.inputs | programs.update.inputs
        shapes = {name: kind.shape for name, (_, kind) in inputs.items()}
        self.state = FrameworkState(self.model, self.optimizer, runner, shapes)
        self._zeros = {
            name: runner.value(np.zeros(shape, np.float32)) for name, shape in shapes.items() if name.startswith("sum.")
        }

    def gradients(self, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        """Run the programs of a step; return (this rank's share of the loss, gradient norm before clipping).

        The program `update` also computes new weights and optimizer state; the method `update` applies them.
        """
        count = int(inputs.valid_tokens)
        batches = [self._batch(part, count) for part in inputs.microbatches]
        with self.recorder.span("forward and backward", "compute"):
            loss, sums = self.passes.train(self.state.parameters, self._zeros, batches)
        grads = {name.replace("sum.", "grad.", 1): value for name, value in sums.items()}
        with self.recorder.span("update", "optimizer"):
            scalars = update_scalars(self.optimizer, self.state.step + 1, float(inputs.lr))
            inputs_by_name = {k: self.runner.value(torch.tensor(v).numpy()) for k, v in scalars.items()}
            self._pending = self.programs["update"](self.state.values | grads | inputs_by_name)
            norm = float(self.runner.array(self._pending.pop("grad_norm")))
        return torch.tensor(loss * self.reports, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64)

    def update(self, lr: float | Tensor, skip: Tensor | None = None) -> None:
        """Apply the new weights and optimizer state of the last `gradients` call unless `skip` is True."""
        if skip is None or not bool(skip):
            self.state.adopt(self._pending)
        self._pending = {}

    def held_out_loss(self, parts: list[dict[str, Tensor]], count: int) -> Tensor:
        """Return this rank's share of the held-out loss: summed cross entropy divided by `count`."""
        batches = [self._batch(part, count) for part in parts]
        return torch.tensor(self.passes.evaluate(self.state.parameters, batches) * self.reports)

    def count_routing(self) -> None:
        """Return None: step programs do not count tokens per expert."""

    def _locate(self, inputs: StepInputs, step: int) -> None:
        """Return None: intermediate values of a compiled program cannot be read."""

    def _batch(self, part: dict[str, Tensor], valid_tokens: int) -> dict[str, Any]:
        ids = part["input_ids"]
        positions = part.get("position_ids")
        if positions is None:
            positions = torch.arange(ids.shape[1]).expand(ids.shape).contiguous()
        tensors = {
            "input_ids": ids,
            "shift_labels": part["shift_labels"],
            "position_ids": positions,
            VALID_TOKENS: torch.tensor(float(valid_tokens), dtype=torch.float32),
        }
        return {f"batch.{name}": self.runner.value(t.numpy()) for name, t in tensors.items()}


class ProgramEngine(TorchEngine):
    """Engine of a back end that executes step programs."""

    _make_loop: Callable[..., Loop] = ProgramLoop
    _executes_plans = False  # the step programs already contain the memory plan

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Training does not use torch's tensors, so the gauge measures the process instead.
        self._gauge.state = self._gauge.kinds = None

    def __enter__(self) -> ProgramEngine:
        strategy = self._job.plan.strategy
        groups = {
            axis: mesh.group(self.rank, axis)
            for mesh in (strategy.expert_mesh(), strategy.mesh())
            for axis in AXES
            if axis in mesh.names and mesh.degree(axis) > 1
        }
        size = program_block(strategy).world_size
        first = self.rank // size * size
        positions = self._programs.gradients.groups() | self._programs.update.groups()
        groups |= {name: [first + p for p in own] for name, own in positions.items()}
        recipe = self._recipe
        self._runner = join_ranks(
            recipe.backend,
            self.rank,
            self.world_size,
            lambda text: str(gather_objects(text)[0]),
            groups,
            fuse=recipe.training.compile == "graph-kernel",
        )
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._runner.close(failed=any(error))

    def begin(self, done: int, batches: Batches | StreamBatches) -> None:
        """Open the run's checkpoints, compile the step programs, and copy the state into the framework."""
        super().begin(done, batches)
        programs = self._programs
        folder = Path(self._job.output_dir) / "programs"
        folder.mkdir(exist_ok=True)
        compiled = {
            name: self._runner.compile(getattr(programs, name), folder / f"{name}_rank{self.rank}.py")
            for name in ("loss", "gradients", "update")
        }
        assert isinstance(self._loop, ProgramLoop)
        self._loop.connect(self._runner, programs, compiled)

    @property
    def _programs(self) -> StepPrograms:
        programs = self._job.programs
        assert programs is not None
        return programs[self.rank % len(programs)]

    def facts(self) -> dict[str, Any]:
        """Return device, package versions and, with offload, the predicted memory of the programs, for run.json."""
        facts = super().facts() | self._runner.facts()
        if (memory := self._programs.memory) is not None:
            facts["program_memory"] = {
                "peak_bytes": memory.peak_bytes,
                "unplanned_bytes": memory.unplanned_bytes,
                "host_bytes": memory.host_bytes,
                "seconds": memory.seconds,
                "unplanned_s": memory.unplanned_s,
                "origin": "simulated",
            }
        return facts

    def _resident(self, tensor: Tensor) -> Tensor:
        assert isinstance(self._loop, ProgramLoop)
        return self._loop.state.on_host(tensor)

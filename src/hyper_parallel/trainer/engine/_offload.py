"""Training steps by a memory plan: rehearse one step, capture it, plan it, then run the plan.

Before the first step two steps are rehearsed on a copy of the state and undone: a plain one, whose results the first
planned step must repeat bit for bit, and a recorded one on other data, with another learning rate and another number
of tokens, so that a value that should have been a tensor cannot pass unnoticed. Nothing is lost when no plan fits.

From then on the device of the plan (an accelerator, on a CPU a simulated one) owns parameters and optimizer state.
Evaluation, checkpoints and export borrow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch import handle
from hyper_parallel.backends.torch.memory import (
    Captured,
    LruSpillMode,
    Measured,
    PlannedDevice,
    StepCapture,
    StorageWatch,
    as_graph,
    model_state,
    optimizer_state,
)
from hyper_parallel.errors import HyperParallelError, StepChanged
from hyper_parallel.ir import MemoryPlan, MemoryTerm, Timeline
from hyper_parallel.offload import peak_by_kind, plan_memory, predicted_timeline, summarise
from hyper_parallel.trainer.engine._model import set_lr
from hyper_parallel.trainer.engine._offload_machine import (
    Assumed,
    measured_machine,
    rehearsal_bytes,
    resolved_budget,
)
from hyper_parallel.trainer.engine._offload_record import (
    OffloadRecord,
    StepInputs,
    agreed,
    graph_line,
    planned_waits,
    updates_line,
)
from hyper_parallel.trainer.engine._offload_rehearsal import (
    Phases,
    digests,
    near,
    refuse_hidden_state,
    same,
    sample,
)

DRIFT = 0.02
"""Share of a step that waits may take beyond the plan before it is planned again."""

REPLANS = 3
"""Most new plans of a run: measured bandwidths differ a little in every step, and planning takes seconds."""

StepOutputs = tuple[Tensor, Tensor, tuple[Tensor, Tensor | None] | None]
"""This rank's share of the loss, the gradient norm, and the routing of the experts, if there are any."""
Step = Callable[[Any, list[dict[str, Tensor]], Any, Any], StepOutputs]
"""(spans, microbatches, valid tokens, learning rate) to the outputs of a step."""


class PlannedSteps:
    """Runs the steps of one rank by a memory plan.

    Args:
        model: Model that passed through `parallelize` and holds its weights.
        optimizer: Its optimizer.
        step: One whole step, optimizer included.
        assumed: Machine and goal.
        flash: Directory of this rank's files, which is made here, or None.
        say: Prints a line on rank 0.

    Attributes:
        plan: The memory plan that runs now.
        notes: What the plan of the run should say about it.
        timelines: Predicted and measured timeline of the first planned step, then of the first after a new plan.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: Step,
        assumed: Assumed,
        flash: Path | None,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._optimizer, self._step = model, optimizer, step
        self._assumed, self._flash, self._say = assumed, flash, say
        self._machine = assumed.planned
        self._where = handle(model).device
        self._budget = assumed.budget_bytes
        self.notes: tuple[str, ...] = ()
        self.timelines: tuple[Timeline, Timeline] | None = None
        self._traced = False
        self._replans = 0
        self._expected: dict[str, Any] | None = None
        self._expected_samples: dict[str, Tensor] = {}
        self._spread: dict[str, float] = {}

    # -- before the first step -----------------------------------------------------------------

    def prepare(self, first: StepInputs, second: StepInputs) -> None:
        """Rehearse the first step, capture one on the second's data, plan it, and hand the state to the device.

        Args:
            first: The step that comes next; its plain results are kept to be compared with.
            second: Any other step of the same shape.

        Raises:
            CaptureUnsupported: HP511 for a step that cannot be repeated faithfully.
            BudgetImpossible: HP402 with the least budget that every rank could keep.
            TierFull: HP403.
        """
        if self._flash is not None:
            self._flash.mkdir()
        if self._assumed.choice.budget == "auto" and self._budget is not None:
            self._budget, line = resolved_budget(self._budget, self._where)
            self.notes = (line,)
            self._say(line)
        self._expected, empty = self._rehearsed(first)
        if self._where.type != "cpu":
            self._spread = self._run_to_run(self._expected, self._rehearsed(first)[0])
        with self._undone():
            self._captured = self._capture(second, empty)
        if self._assumed.choice.capture == "graph":
            recorded, self._captured = self._captured, as_graph(self._captured)
            line = graph_line(recorded.program, self._captured.program)
            self.notes += (line,)
            self._say(line)
        self._program = self._assumed.annotate(self._captured.program)
        self.plan = agreed(lambda: self._planned(self._machine))
        if self._assumed.choice.update_on_host:
            self._say(updates_line(self.plan, bitwise=self._where.type == "cpu"))
        self._open()

    def _rehearsed(self, first: StepInputs) -> tuple[dict[str, Any], list[Any]]:
        """What a plain step gives, and the storages that it leaves empty; everything is undone."""
        with self._undone():
            watch = StorageWatch(inputs=True)
            with watch, self._room():
                loss, norm, counted = self._step(
                    None, first.microbatches, first.valid_tokens, first.lr
                )
            empty = watch.emptied
            found = {"loss": loss.clone(), "grad_norm": norm.clone(), **digests(self._state())}
            self._expected_samples = self._samples()
            if counted is not None:
                found["routing"] = counted[0].clone()
        return found, empty

    def _room(self) -> AbstractContextManager[Any]:
        """A rehearsed step has no plan yet: on an accelerator it runs within what the device has."""
        if self._where.type == "cpu":
            return nullcontext()
        return LruSpillMode(rehearsal_bytes(self._where), self._where)

    def _run_to_run(self, once: dict[str, Any], again: dict[str, Any]) -> dict[str, float]:
        """How far two plain steps are apart, for loss and gradient norm; empty when they are the same bit for bit.

        Kernels of an accelerator may add in another order every time.
        """
        if all(same(value, again[name]) for name, value in once.items()):
            return {}
        spread = {name: float((once[name] - again[name]).abs()) for name in ("loss", "grad_norm")}
        self._say(
            f"offload: two plain steps differ by {spread['loss']:.1e} in the loss, because some kernels are not "
            "deterministic; the first planned step is compared with ten times that, not bit for bit "
            "(training.deterministic=true)"
        )
        return spread

    @contextmanager
    def _undone(self) -> Iterator[None]:
        """Put everything that a step changes back where it was."""
        self._reshard()
        # In host memory: the device may have no room for a second copy.
        before = {name: t.detach().to("cpu", copy=True) for name, t in self._state().items()}
        fresh = not self._optimizer.state
        devices = [] if self._where.type == "cpu" else [self._where]
        with torch.random.fork_rng(devices, device_type=self._where.type):
            yield
        with torch.no_grad():
            # By name: the first forward pass gives uneven shards of FSDP new local tensors, with room for padding.
            now = self._state()
            for name, value in before.items():
                now[name].copy_(value)
            if fresh:  # AdamW begins with zeros in every slot
                for tensor, _ in optimizer_state(self._model, self._optimizer).values():
                    tensor.zero_()
        self._reshard()

    def _reshard(self) -> None:
        for module in handle(self._model).fsdp:
            module.reshard()

    def _capture(self, inputs: StepInputs, empty: list[Any]) -> Captured:
        # Other values than any step will have: one that was taken for a constant shows in the first planned step.
        other = StepInputs(inputs.microbatches, inputs.valid_tokens + 1, inputs.lr / 2)
        tensors = other.tensors()
        named: dict[str, Any] = {
            **{name: (tensor, "input") for name, tensor in tensors.items()},
            **model_state(self._model),
            **optimizer_state(self._model, self._optimizer),
        }
        recorder = StepCapture(named, training=True, alignment_bytes=512, empty=empty)
        parts = [
            {name: tensors[f"{name}.{i}"] for name in part}
            for i, part in enumerate(inputs.microbatches)
        ]
        spans = Phases(recorder, self._model)
        with recorder, self._room():
            result = self._step(spans, parts, tensors["valid_tokens"], tensors["lr"])
        set_lr(self._optimizer, inputs.lr)
        captured = recorder.captured(result, tensors, f"{type(self._model).__name__} train")
        refuse_hidden_state(captured, set(named))
        return captured

    def _planned(self, machine: Any) -> MemoryPlan:
        choice = self._assumed.choice
        return plan_memory(
            self._program,
            machine,
            budget_bytes=self._budget,
            max_slowdown=choice.max_slowdown,
            recompute=choice.recompute,
            reorder=choice.reorder,
        )

    def _open(self) -> None:
        self._device = PlannedDevice(
            self._captured, self.plan, self._assumed.actual, copies="threads", flash=self._flash
        )
        self._traced = False

    def _state(self) -> dict[str, Tensor]:
        named = {**model_state(self._model), **optimizer_state(self._model, self._optimizer)}
        return {name: tensor for name, (tensor, _) in named.items()}

    def _samples(self) -> dict[str, Tensor]:
        """What the state is compared by when an update on the host may have rounded differently than the device."""
        if self._where.type == "cpu" or not self._assumed.choice.update_on_host:
            return {}
        return {name: sample(tensor) for name, tensor in self._state().items()}

    # -- steps ---------------------------------------------------------------------------------

    def step(self, inputs: StepInputs) -> tuple[StepOutputs, Measured]:
        """One planned step.

        Returns:
            What the step returns, and what was measured.

        Raises:
            StepChanged: HP512 when the plan does not repeat the plain step.
            TransferFailed: HP513. TierFull: HP403.
        """
        set_lr(self._optimizer, inputs.lr)  # not used by the program, but saved in checkpoints
        outputs, measured = self._device.step(inputs.tensors(), trace=not self._traced)
        if measured.timeline is not None:
            both = (predicted_timeline(self.plan, self._machine), measured.timeline)
            self.timelines = (summarise(both[0], self.plan), summarise(both[1], self.plan))
            self._traced = True
        if self._expected is not None:
            self._compare(outputs, self._expected)
            self._expected, self._expected_samples = None, {}
        return outputs, measured

    def _compare(self, outputs: StepOutputs, expected: dict[str, Any]) -> None:
        """The first planned step must be the rehearsed plain one, bit for bit but for rounding on another processor."""
        got: dict[str, Any] = {"loss": outputs[0], "grad_norm": outputs[1]}
        if outputs[2] is not None:
            got["routing"] = outputs[2][0]
        on_host = any(action.kind == "update" for action in self.plan.actions)
        with self._device.lent():
            got.update(digests(self._state()))
            samples, types = self._samples(), {n: t.dtype for n, t in self._state().items()}
        for name, value in expected.items():
            if self._spread:
                noisy = name in self._spread
                if not noisy or float((got[name] - value).abs()) <= 10 * self._spread[name]:
                    continue
            elif name in samples and on_host:
                if near(samples[name], self._expected_samples[name], types[name]):
                    continue
            elif same(got[name], value):
                continue
            raise StepChanged(
                "the planned step does not give what the plain one gave",
                where=name,
                got=got[name].tolist() if isinstance(value, Tensor) else "other bytes",
                allowed=value.tolist() if isinstance(value, Tensor) else None,
                hint="something changes from step to step without being a tensor; train with `offload.budget=null`",
            )

    def record(self, measured: Measured) -> OffloadRecord:
        """What this rank predicted and measured; plans again when the waits are not as planned."""
        predicted, plan = self.plan.peak_bytes, self.plan
        wait_s, join_s = planned_waits(plan, self._machine)
        again = self._watch(measured, wait_s)
        return OffloadRecord(
            plan.device_bytes,
            max(
                abs(measured.device_bytes - plan.device_bytes),
                abs(measured.dram_bytes - plan.dram_bytes),
                *(abs(measured.peak_bytes[tier] - predicted[tier]) for tier in predicted),
            ),
            measured.dram_bytes,
            measured.peak_bytes["flash"],
            measured.seconds,
            plan.seconds,
            measured.wait_s,
            wait_s,
            measured.join_s,
            join_s,
            again,
        )

    def _watch(self, measured: Measured, planned_s: float) -> bool:
        """Plan again with the measured bandwidth when the step waits longer than planned.

        Only waits count: how long operators take on a real device is not what a plan for copies can change.
        """
        if self._replans == REPLANS or measured.wait_s - planned_s <= DRIFT * measured.seconds:
            return False
        machine = measured_machine(self._machine, measured)
        if machine == self._machine:
            return False
        self._machine = machine
        self._replans += 1
        try:
            plan = self._planned(machine)
        except HyperParallelError as error:
            self._say(
                f"offload: waits are longer than planned, and no other plan fits: {error.what}"
            )
            return False
        self._device.close()
        self.plan = plan
        self._open()
        return True

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Between steps: model and optimizer hold their real values for the time of this context."""
        with self._device.lent():
            yield
            self._reshard()  # what an evaluation has gathered

    def close(self) -> None:
        """Give everything back for good."""
        self._device.close()

    def memory_terms(self) -> tuple[MemoryTerm, ...]:
        """The predicted device memory of this rank as terms of a plan, and what is in the other tiers."""
        plan = self.plan
        at_peak = "memory plan: bytes of this kind at the device peak"
        kinds = [(kind, "hbm", size, at_peak) for kind, size in peak_by_kind(plan).items()]
        unused = plan.arena_bytes - plan.peak_bytes["device"]
        kinds += [
            (name, "hbm", size, why)
            for name, size, why in (
                ("gaps", unused, "memory plan: between the addresses of the arena"),
                (
                    "staging",
                    plan.program.staging_bytes,
                    "memory plan: results made beside the arena",
                ),
            )
            if size
        ]
        tiers = [
            (f"offloaded to {tier}", tier, size, why)
            for tier, size, why in (
                ("dram", plan.dram_bytes, "memory plan: buffers, reserved before the first step"),
                ("flash", plan.peak_bytes["flash"], "memory plan: peak of the tier"),
            )
            if size
        ]
        return tuple(MemoryTerm(*term) for term in (*kinds, *tiers))


def lent(loop: Any) -> AbstractContextManager[None]:
    """Context between steps in which a loop's model and optimizer hold their real values."""
    return nullcontext() if loop.planned is None else loop.planned.lent()

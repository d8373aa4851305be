"""Generation under a device budget: prompt and decode step captured without bytes, planned, run.

Weights and KV cache have their homes where the plans put them and are streamed. The steps are those that run without a
budget, operator by operator, so every token is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyper_parallel.backends.torch._static_cache import (
    bind_cache,
    cache_tensors,
    decode_inputs,
    new_cache,
    prompt_inputs,
    run_step,
    why_no_static_cache,
)
from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._device import Measured, PlannedDevice
from hyper_parallel.backends.torch.memory._fake_model import fake_copy
from hyper_parallel.backends.torch.memory._handover import spare_buffers
from hyper_parallel.backends.torch.memory._run_folder import run_folder
from hyper_parallel.backends.torch.memory._steps import Named, model_state, record
from hyper_parallel.errors import BudgetImpossible, CaptureUnsupported, TierFull
from hyper_parallel.ir import MEMORY_TIERS, MemoryPlan, slab_bytes
from hyper_parallel.memory import MemoryMachine, Roofline, plan_memory_cached
from hyper_parallel.units import format_bytes

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MemoryLimits:
    """What a generation may take.

    Attributes:
        device_bytes: Device budget.
        machine: Channels, DRAM and flash capacities.
        roofline: Seconds of operators on the virtual clock.
        flash: Where the folder of the file tier is made; needed when the machine has one.
    """

    device_bytes: int
    machine: MemoryMachine
    roofline: Roofline
    flash: Path | None = None


@dataclass
class MemoryUse:
    """What was predicted and what was measured.

    Attributes:
        predicted_bytes: Peak per tier of the two plans; of device and DRAM what they give: the arena and what is made
            beside it, and the buffers.
        measured_bytes: The same of everything that ran, the move from one plan to the other included.
        state_bytes: Weights, buffers and KV cache.
        seconds: Seconds of all steps.
        wait_s: Those of them in which the device waited for copies.
        steps: Steps that ran.
        simulated: On the simulated device of a CPU: seconds are those of a virtual clock. Else all is measured.
    """

    predicted_bytes: dict[str, int] = field(default_factory=dict)
    measured_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_TIERS, 0))
    state_bytes: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    simulated: bool = True


class PlannedGeneration:
    """Prompt and decode steps under a device budget.

    Args:
        model: In host memory, in eval mode; its tensors are empty until `close`.
        prompt_tokens: Length of the prompt.
        length: Slots of the cache: prompt and continuation.
        limits: Budget and machine.
        device: Where the steps run; on a CPU the device is simulated.

    Raises:
        CaptureUnsupported: HP511 when the model's steps cannot be recorded once and run at every position.
        BudgetImpossible: HP402 with the least device bytes that prompt and decode step get by with.
        TierFull: HP403 when DRAM and flash cannot hold what the device does not, with the DRAM that is enough.
    """

    def __init__(
        self,
        model: Any,
        prompt_tokens: int,
        length: int,
        limits: MemoryLimits,
        device: torch.device = _CPU,
    ) -> None:
        self.model, self.length, self.limits, self.position = model, length, limits, 0
        self.use = MemoryUse(simulated=device.type == "cpu")
        self._where = device
        self._device: PlannedDevice | None = None
        self._stack = ExitStack()
        self._files: Path | None = None
        if model.device.type != "cpu":
            raise CaptureUnsupported(
                "under a device budget the model is given in host memory; it is on another device",
                got=str(model.device),
                hint="model.cpu()",
            )
        if why := why_no_static_cache(model):
            raise CaptureUnsupported(
                f"generation under a device budget needs steps of fixed shape: {why}",
                got=type(model).__name__,
                hint="leave out --device-memory",
            )
        _own_storages(model)
        self._captured = self._capture(prompt_tokens)
        self._plans = self._plan()
        state = self._plans[0].program
        self.use.state_bytes = sum(
            size
            for size, storage in zip(state.sizes, state.storages, strict=True)
            if storage.persistent
        )
        # One arena serves both steps.
        self._arena_bytes = max(plan.arena_bytes for plan in self._plans)
        self.use.predicted_bytes = {
            "device": self._arena_bytes + self._staging_bytes,
            "dram": _dram_bytes(self._plans),
            "flash": max(plan.peak_bytes["flash"] for plan in self._plans),
        }

    def _capture(self, prompt_tokens: int) -> list[Captured]:
        """Prompt step and, when it is needed, decode step, recorded on tensors without bytes."""
        model, length = self.model, self.length
        with fake_copy(model, self._where) as fake:
            cache = new_cache(fake, length)
            first = prompt_inputs(fake, [0] * prompt_tokens)
            run_step(fake, cache, {k: v[:, :1] for k, v in first.items()})  # makes the cache
            shapes = cache_tensors(cache)
            named: Named = {**model_state(fake), **{k: (t, "kv") for k, t in shapes.items()}}
            recorded = [_record(fake, cache, first, named, "prompt")]
            if length > prompt_tokens:
                inputs = decode_inputs(fake, 0, prompt_tokens, length)
                recorded.append(_record(fake, cache, inputs, named, "decode"))
        self.cache = new_cache(model, length)
        tensors = {k: torch.zeros(t.shape, dtype=t.dtype) for k, t in shapes.items()}
        bind_cache(self.cache, tensors)
        real = {**{k: t for k, (t, _) in model_state(model).items()}, **tensors}
        return [
            _bind(captured, real, self._inputs(at, captured))
            for at, captured in enumerate(recorded)
        ]

    def _inputs(self, at: int, captured: Captured) -> Mapping[str, Tensor]:
        """Real tensors for the inputs of a step."""
        if at == 0:
            return prompt_inputs(self.model, [0] * captured.inputs["input_ids"].size[1])
        return decode_inputs(self.model, 0, 0, self.length)

    def _plan(self) -> list[MemoryPlan]:
        dram = self.limits.machine.dram_bytes
        refused: TierFull | None = None
        while True:
            try:
                plans = self._planned(dram)
            except TierFull as error:
                refused = refused or error
                dram = error.enough_bytes["dram"]
                continue
            if refused is None:
                return plans
            raise TierFull(
                "DRAM and flash cannot hold what the device does not",
                got=f"device {self.limits.device_bytes} bytes, dram {self.limits.machine.dram_bytes} bytes, "
                f"flash {'none' if self.limits.flash is None else 'unlimited'}",
                hint=f"--dram {dram}",
            ) from refused

    def _planned(self, dram_bytes: int | None) -> list[MemoryPlan]:
        """Plans with buffers that are together, because each step has those of the other as well, within the DRAM.

        Raises:
            BudgetImpossible: HP402. TierFull: HP403, with more DRAM, which may be enough.
        """
        machine, together = replace(self.limits.machine, dram_bytes=dram_bytes), list[int]()
        while True:
            try:
                plans = self._planned_apart(machine)
            except TierFull as error:
                assert dram_bytes is not None
                more = min(together, default=error.enough_bytes["dram"])
                error.enough_bytes = {"dram": max(more, dram_bytes + dram_bytes // 64 + 1)}
                raise
            together.append(_dram_bytes(plans))
            if dram_bytes is None or together[-1] <= dram_bytes:
                return plans
            # They need buffers of different sizes: each gets less.
            assert machine.dram_bytes is not None
            less = machine.dram_bytes - (together[-1] - dram_bytes)
            machine = replace(machine, dram_bytes=max(less, 0))

    def _planned_apart(self, machine: MemoryMachine) -> list[MemoryPlan]:
        limits, plans, least = self.limits, [], 0
        for captured in self._captured:
            program = limits.roofline.annotate(captured.program)
            # What the other step makes beside the arena must fit too.
            other = self._staging_bytes - program.staging_bytes
            budget = limits.device_bytes - other
            try:
                plans.append(plan_memory_cached(program, machine, budget_bytes=budget))
            except BudgetImpossible as error:
                least = max(least, error.least_bytes + other)
        if least:
            raise BudgetImpossible(
                f"no memory plan of this generation fits {format_bytes(limits.device_bytes)}",
                got=f"{limits.device_bytes} bytes",
                allowed=f"at least {least} bytes ({format_bytes(least)})",
                hint=f"--device-memory {least}",
            )
        return plans

    @property
    def _staging_bytes(self) -> int:
        return max(captured.program.staging_bytes for captured in self._captured)

    def prompt(self, ids: list[int]) -> Tensor:
        """Logits [V] after the prompt."""
        if self.limits.flash is not None:
            self._files = self._stack.enter_context(run_folder(self.limits.flash, "generate"))
        self._device = PlannedDevice(
            self._captured[0],
            self._plans[0],
            self.limits.machine,
            flash=self._files,
            arena_bytes=self._arena_bytes,
        )
        self.position = len(ids)
        return self._run(prompt_inputs(self.model, ids))

    def next(self, token: int) -> Tensor:
        """Logits [V] after one more token."""
        assert self._device is not None
        if len(self._plans) > 1 and self._device.plan is self._plans[0]:
            self._device.hardware.reset_peaks()
            self._device = PlannedDevice(
                self._captured[1],
                self._plans[1],
                self.limits.machine,
                copies=self._device.copies,
                flash=self._files,
                before=self._device,
            )
            self._count({"device": self._device.hardware.gauge.peak_bytes})
        inputs = decode_inputs(self.model, token, self.position, self.length)
        self.position += 1
        return self._run(inputs)

    def close(self) -> None:
        """Give the weights' bytes back to the model."""
        with self._stack:
            if self._device is not None:
                self._device.close()

    def _run(self, inputs: dict[str, Tensor]) -> Tensor:
        assert self._device is not None
        measured: Measured
        logits, measured = self._device.step(inputs)
        self._count(
            {
                "device": measured.device_bytes,
                "dram": measured.dram_bytes,
                "flash": measured.peak_bytes["flash"],
            }
        )
        self.use.seconds += measured.seconds
        self.use.wait_s += measured.wait_s
        self.use.steps += 1
        result: Tensor = logits
        return result

    def _count(self, peaks: Mapping[str, int]) -> None:
        for tier, peak in peaks.items():
            self.use.measured_bytes[tier] = max(self.use.measured_bytes[tier], peak)


def _dram_bytes(plans: list[MemoryPlan]) -> int:
    """Bytes of the buffers, when each plan, and the way to it, adds what those before it did not have."""
    made, taken = Counter[int](), 0
    needed = [Counter(plan.replayed.host_buffers) for plan in plans]
    needed += [spare_buffers(*pair) for pair in pairwise(plans)]
    for wanted in needed:
        taken += slab_bytes(wanted - made)
        made |= wanted
    return taken


def _record(model: Any, cache: Any, inputs: dict[str, Tensor], named: Named, name: str) -> Captured:
    def run(**batch: Tensor) -> Tensor:
        return run_step(model, cache, batch)

    return record(run, inputs, named, name=f"{type(model).__name__} {name}", training=False)


def _bind(captured: Captured, real: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Captured:
    """The recorded step with real tensors behind the names of its state."""
    owners = {**real, **inputs}
    state = {}
    for s in captured.state:
        name = captured.program.storages[s].name
        if name not in owners:
            raise CaptureUnsupported(
                "the model keeps a tensor that is neither parameter nor buffer",
                got=name,
                hint="register it with `register_buffer`",
            )
        state[s] = owners[name]
    return replace(captured, state=state, owners=())


def _own_storages(model: Any) -> None:
    """Copy what lies in a mapped file or in another library's memory: the device cannot empty that."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()

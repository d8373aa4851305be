"""Generation under a device budget: prompt (prefill) and decode steps are captured on fake tensors, planned and run.

Weights and KV cache may be in DRAM or in files; the plans copy them to the device for the operators that use them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
)

from hyper_parallel.backends.torch.decode_slots import FixedPasses, SlotSteps
from hyper_parallel.backends.torch.memory._capture import Named, model_state, read_error, record
from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._device import Measured, PlannedDevice
from hyper_parallel.backends.torch.memory._fake_values import grouped_products
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._tiers import run_folder
from hyper_parallel.backends.torch.static_cache import bind_cache, cache_tensors, why_no_static_cache
from hyper_parallel.errors import BudgetImpossible, CaptureUnsupported, TierFull
from hyper_parallel.ir import MEMORY_TIERS, MemoryPlan
from hyper_parallel.memory import MemoryMachine, Roofline, merge_errors, plan_memory_cached, sufficient_device_bytes


@dataclass(frozen=True)
class MemoryLimits:
    """Memory limits of a generation.

    Attributes:
        device_bytes: Budget of device memory.
        machine: Capacities and channels of the memory tiers.
        roofline: Model of the operators' seconds, for the plans and the virtual clock.
        flash: Folder in which the files of the file tier are created; required when the machine has a file tier.
    """

    device_bytes: int
    machine: MemoryMachine
    roofline: Roofline
    flash: Path | None = None


@dataclass
class MemoryUse:
    """Predicted and measured memory use of a generation.

    Attributes:
        predicted_bytes: Predicted peak per tier, the largest of all plans; for the device, arena and staging buffers.
        measured_bytes: Measured peak per tier over all steps.
        state_bytes: Bytes of weights, buffers and KV cache.
        seconds: Seconds of all steps.
        wait_s: Part of `seconds` in which the device waited for copies.
        steps: Number of steps that ran.
        simulated: True on a CPU, which simulates a device: seconds are those of a virtual clock. False: measured.
    """

    predicted_bytes: dict[str, int] = field(default_factory=dict)
    measured_bytes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MEMORY_TIERS, 0))
    state_bytes: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0
    steps: int = 0
    simulated: bool = True

    def add(self, other: MemoryUse) -> None:
        """Add the use of other steps on the same machine: keep the maximum of bytes, add seconds and steps."""
        self.state_bytes = max(self.state_bytes, other.state_bytes)
        for peaks, other_peaks in (
            (self.predicted_bytes, other.predicted_bytes),
            (self.measured_bytes, other.measured_bytes),
        ):
            peaks |= {tier: max(size, peaks.get(tier, 0)) for tier, size in other_peaks.items()}
        self.seconds += other.seconds
        self.wait_s += other.wait_s
        self.steps += other.steps


_CPU = torch.device("cpu")


class PlannedSlots(FixedPasses):
    """Prompt and decode passes under a device budget; all prompts must precede all decoding.

    A slot is a row of the fixed-size batch. Construction records and plans both steps.

    Args:
        model: Model in host memory, in eval mode; its tensors are empty from `begin` to `close`.
        fixed: Number of slots and lengths of the two steps.
        limits: Device budget and machine.
        device: Device of the steps; a CPU simulates one.

    Attributes:
        use: Predicted and measured memory use.

    Raises:
        CaptureUnsupported: HP511 when the model's steps cannot be recorded once and run at every position.
        BudgetImpossible: HP402 with a device budget that suffices for both steps.
        TierFull: HP403 when the offloaded bytes exceed DRAM or flash, with a DRAM size or device budget that suffices.
    """

    def __init__(self, model: Any, fixed: SlotSteps, limits: MemoryLimits, device: torch.device = _CPU) -> None:
        if model.device.type != "cpu":
            raise CaptureUnsupported(
                "a device budget needs the model in host memory, but it is on another device",
                got=str(model.device),
                hint="model.cpu()",
            )
        if why := why_no_static_cache(model):
            raise CaptureUnsupported(
                f"generation under a device budget needs steps of fixed shape: {why}",
                got=type(model).__name__,
                hint="leave out --device-memory",
            )
        super().__init__(model, fixed)
        self.limits = limits
        self.use = MemoryUse(simulated=device.type == "cpu")
        self._target_device = device
        self._planned_device: PlannedDevice | None = None
        self._stack = ExitStack()
        self._files: Path | None = None
        _own_storages(model)
        self._captured = self._capture()
        self._plans = self._plan()
        state = self._plans[0].program
        self.use.state_bytes = sum(
            size for size, storage in zip(state.sizes, state.storages, strict=True) if storage.persistent
        )
        self.use.predicted_bytes = {
            "device": max(plan.device_bytes for plan in self._plans),
            "dram": max(plan.dram_bytes for plan in self._plans),
            "flash": max(plan.peak_bytes["flash"] for plan in self._plans),
        }

    def _capture(self) -> list[Captured]:
        model, fixed = self._model, self._fixed
        with fake_copy(model, self._target_device) as fake:
            cache = fixed.new_cache(fake)
            short = replace(fixed, prompt_tokens=1)
            short.run(fake, cache, short.example(fake, prompt=True))  # allocate the cache
            shapes = cache_tensors(cache)
            named: Named = {**model_state(fake), **{k: (t, "kv") for k, t in shapes.items()}}
            recorded = [_record(fake, cache, fixed, named, prompt=True)]
            if fixed.length > fixed.prompt_tokens:
                recorded.append(_record(fake, cache, fixed, named, prompt=False))
        tensors = {k: torch.zeros(t.shape, dtype=t.dtype) for k, t in shapes.items()}
        bind_cache(self.cache, tensors)
        real = {**{k: t for k, (t, _) in model_state(model).items()}, **tensors}
        return [
            _bind(captured, real, fixed.example(model, prompt=index == 0)) for index, captured in enumerate(recorded)
        ]

    def _plan(self) -> list[MemoryPlan]:
        limits, plans, errors = self.limits, list[MemoryPlan](), list[BudgetImpossible | TierFull]()
        for captured in self._captured:
            program = limits.roofline.annotate(captured.program)
            try:
                plans.append(
                    plan_memory_cached(
                        program, limits.machine, measured=captured.seconds, budget_bytes=limits.device_bytes
                    )
                )
            except (BudgetImpossible, TierFull) as error:
                errors.append(error)
        if error := merge_errors(errors):
            if isinstance(error, TierFull) and "dram" in error.enough_bytes:
                error.hint = f"--dram {error.enough_bytes['dram']}"
            else:
                error.hint = f"--device-memory {sufficient_device_bytes(error)}"
            raise error
        return plans

    def begin(self) -> None:
        """Move the state to the planned device of the prompt step."""
        if self.limits.flash is not None:
            self._files = self._stack.enter_context(
                run_folder(self.limits.flash, "generate", "--flash-dir WRITABLE_FOLDER")
            )
        self._planned_device = self._open(0)

    def _open(self, index: int) -> PlannedDevice:
        return PlannedDevice(self._captured[index], self._plans[index], self.limits.machine, flash=self._files)

    def enter_decode(self) -> None:
        """Move the state to the planned device of the decode step, if there is one and the state is not there yet."""
        assert self._planned_device is not None
        if len(self._plans) > 1 and self._planned_device.plan is self._plans[0]:
            self._planned_device.close()
            self._planned_device = self._open(1)

    def close(self) -> None:
        """Return the weights' bytes to the model, and delete the folder of the file tier."""
        with self._stack:
            if self._planned_device is not None:
                self._planned_device.close()

    def _run_step(self, inputs: dict[str, Tensor], *, prompt: bool) -> Tensor:
        if self._planned_device is None:
            self.begin()
        if not prompt:
            self.enter_decode()
        return self.run(inputs)

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Run the step of the current planned device, and return its logits."""
        assert self._planned_device is not None
        measured: Measured
        logits, measured = self._planned_device.step(inputs)
        peaks = {"device": measured.device_bytes, "dram": measured.dram_bytes, "flash": measured.peak_bytes["flash"]}
        self.use.add(MemoryUse(measured_bytes=peaks, seconds=measured.seconds, wait_s=measured.wait_s, steps=1))
        result: Tensor = logits
        return result


def _record(model: Any, cache: Any, fixed: SlotSteps, named: Named, *, prompt: bool) -> Captured:
    def run(**batch: Tensor) -> Tensor:
        return fixed.run(model, cache, batch)

    name = f"{type(model).__name__} {'prompt' if prompt else 'decode'}"
    return record(run, fixed.example(model, prompt=prompt), named, name=name, training=False)


def _bind(captured: Captured, real: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Captured:
    owners = {**real, **inputs}
    state = {}
    for s in captured.state:
        name = captured.program.storages[s].name
        if name not in owners:
            raise CaptureUnsupported(
                "the model keeps a tensor that is neither parameter nor buffer",
                got=name,
                hint="leave out --device-memory, or register the tensor with `register_buffer`",
            )
        state[s] = owners[name]
    return replace(captured, state=state, owners=())


def _own_storages(model: Any) -> None:
    """Clone tensors of a model whose storages cannot be resized, such as those in memory-mapped files."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()


@contextmanager
def fake_copy(model: torch.nn.Module, device: torch.device) -> Iterator[Any]:
    """Yield a copy of a model in host memory, on fake tensors of `device`; record its steps inside the context.

    Raises:
        CaptureUnsupported: HP511 when the model's code needs a value or a size that depends on the data.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the model's code may create real tensors
    with FakeCopyMode(mode):
        fake = copy.deepcopy(model)
    try:
        with mode, OperatorMode(grouped_products):
            _move(fake, device)
            yield fake
    except DataDependentOutputException as error:
        raise read_error(error.func) from error
    except DynamicOutputShapeException as error:
        raise CaptureUnsupported(
            f"`{error.func}` returns a result whose size depends on the data",
            hint="leave out --device-memory; for experts, `model.set_experts_implementation('grouped_mm')`",
        ) from error


def _move(model: torch.nn.Module, device: torch.device) -> None:
    """Move fake parameters and buffers to a device, which `Module.to` cannot do; shared tensors stay shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == device:
                    continue
                if id(tensor) not in moved:
                    target = tensor.detach().to(device)
                    if isinstance(tensor, torch.nn.Parameter):
                        target = torch.nn.Parameter(target, tensor.requires_grad)
                    moved[id(tensor)] = target
                tensors[name] = moved[id(tensor)]  # type: ignore[index]

"""Comparison of the first planned step with an eager reference step on equal inputs, state and random numbers.

The comparison detects a value that was recorded as a constant, a kernel that the capture missed, and an operator that
did not run. Results must be equal bit for bit, unless two eager runs differ: kernels of an accelerator may sum in a
different order every time. In this case, samples of every tensor are compared. The tolerance is `ULPS` plus ten times
the difference of the two eager runs; a small share of the elements may exceed it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._lru_spill import within_device
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._untracked_effects import RawAccessMode, checksum
from hyper_parallel.backends.torch.memory.hardware import has_room
from hyper_parallel.backends.torch.memory.operators import numbers_read
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.errors import StepChanged

_SAMPLED: Final = 4096
"""Minimum number of elements to sample; a smaller tensor is compared as a whole."""
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ULPS: Final = 4
"""Tolerance in units in the last place of a tensor's largest value, used if two eager runs differ."""
_SPREAD_TOLERANCE: Final = 10
"""Tolerance of a planned step in multiples of the difference of two eager runs."""
_OUTLIER_SHARE: Final = 0.01
"""Share of the samples that may exceed the tolerance: Adam's steps have random signs where a gradient is noise."""
OUTPUTS: Final = ("loss", "gradient norm", "routing")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results of a step, by name of every output and state tensor: checksums, and samples with the tensor's dtype."""

    digests: dict[str, int]
    samples: dict[str, tuple[Tensor, torch.dtype]]

    @classmethod
    def of(cls, outputs: Any, state: Mapping[str, Tensor]) -> StepOutcome:
        """Return the results of a run from its return value `outputs` and the named state after the step.

        The first tensors in `outputs` get the names in `OUTPUTS`; further ones are numbered.
        """
        flat = [value for value in tree_flatten(outputs)[0] if isinstance(value, Tensor)]
        names = [*OUTPUTS, *(f"output {position}" for position in range(len(OUTPUTS), len(flat)))]
        tensors = {**dict(zip(names, flat, strict=False)), **state}
        return cls(
            {name: _digest(tensor) for name, tensor in tensors.items()},
            {name: (sample(tensor), tensor.dtype) for name, tensor in tensors.items()},
        )


class ReferenceStep:
    """Results of the eager step, which a planned step must reproduce.

    Args:
        first: Results of the eager step.
        second: Results of a second eager run; None: results must be equal bit for bit.

    Attributes:
        spread: Largest difference between samples of the two runs, by tensor name; empty if the runs are equal.
    """

    def __init__(self, first: StepOutcome, second: StepOutcome | None = None) -> None:
        self._first = first
        self.spread: dict[str, float] = {}
        if second is not None and second.digests != first.digests:
            pairs = ((k, a, second.samples[k][0]) for k, (a, _) in first.samples.items())
            self.spread = {k: float((a - b).abs().max()) if a.numel() else 0.0 for k, a, b in pairs}

    @classmethod
    def from_eager_run(cls, captured: Captured, inputs: Mapping[str, Tensor]) -> ReferenceStep:
        """Run the step without a plan, twice on an accelerator, and roll it back; the state must be materialized.

        Raises:
            StepChanged: HP512 when data-dependent sizes or values differ from the recorded ones.
        """
        assert captured.run_eager is not None
        device = captured.device
        bases = {s: tensor.untyped_storage() for s, tensor in captured.state.items()}
        allocated_bytes = captured.eager_peak_bytes - sum(base.nbytes() for base in bases.values())
        runs = []
        for _ in range(1 if device.type == "cpu" else 2):
            changed = [bases[s] for s in captured.written_state]
            with _rolled_back(changed, device, captured.generators, allocated_bytes):
                with within_device(device, captured.owned), _RecordedDecisions(captured) as decisions:
                    outputs = captured.run_eager(**inputs)
                if decisions.error is not None:
                    raise decisions.error
                state = {k: view.as_tensor(bases[view.storage]) for k, view in captured.named.items()}
                runs.append(StepOutcome.of(outputs, state))
                del outputs
        return cls(*runs)

    def check(self, got: StepOutcome) -> None:
        """Raise StepChanged (HP512) for the first tensor of a planned step outside the tolerance of the eager step."""
        for name, digest in self._first.digests.items():
            expected, dtype = self._first.samples[name]
            actual = got.samples[name][0]
            tolerance = _SPREAD_TOLERANCE * self.spread.get(name, 0.0)
            if got.digests[name] == digest or (self.spread and is_close(actual, expected, dtype, tolerance)):
                continue
            is_scalar = expected.numel() == 1
            raise StepChanged(
                "with the memory plan, a step computes other results than without it",
                where=name,
                got=actual.item() if is_scalar else "other bytes",
                allowed=expected.item() if is_scalar else None,
                hint="if a Python value changes between steps, keep it in a tensor; or train "
                "without a memory plan (in a recipe: offload=null)",
            )


class _RecordedDecisions(OperatorMode):
    """Context around an eager step that compares data-dependent sizes and values with the recorded ones.

    `error` is the error for the first difference, or None. A planned step would stop there, and lose the state.
    """

    def __init__(self, captured: Captured) -> None:
        super().__init__(self._operator)
        self._state, self._values = captured.state, RawAccessMode(self._on_raw_access)
        calls = (call for call in captured.calls if call.guards or _decides_sizes(call.func))
        self._recorded, self._in_operator = deque(calls), False
        self.error: StepChanged | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self._values.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._values.__exit__(*error)
        super().__exit__(*error)

    def _on_raw_access(self, tensor: Tensor, values: bool) -> None:
        """Compare a tensor whose values Python reads with the values that Python read in the recorded step."""
        call = self._recorded[0] if values and self._recorded and not self._in_operator else None
        if call is None or call.func is not torch.ops.aten.equal.default:
            return
        before = call.args[1]
        if (state := self._state.get(before.storage)) is not None:
            torch.equal(tensor.detach(), before.as_tensor(state.untyped_storage()))

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._in_operator = True
        out = func(*args, **kwargs)
        self._in_operator = False
        flat = tree_flatten(out)[0]
        if _decides_sizes(func) or (numbers_read(func, flat) and tensors_in(args, kwargs)):
            if not self._recorded or self._recorded[0].func is not func:
                self._recorded.clear()  # the step has taken another branch: stop comparing
                return out
            call = self._recorded.popleft()
            for position, view in call.results:
                if (size := tuple(flat[position].shape)) != view.size:
                    self.error = self.error or size_error(func, size, view.size)
            for position, value in call.guards:
                if flat[position] != value:
                    self.error = self.error or value_error(func, flat[position], value)
        return out


def size_error(func: Any, got: tuple[int, ...] | None, allowed: Sequence[int]) -> StepChanged:
    """Return the error for a result whose data-dependent size differs from the recorded one."""
    return StepChanged(
        f"the size of a result of `{func}` differs from the captured step",
        got=got,
        allowed=tuple(allowed),
        hint="the size depends on the data: multiply by a mask instead of indexing with it, or pad; "
        "for experts use `experts_implementation='grouped_mm'`",
    )


def value_error(func: Any, got: Any, allowed: Any) -> StepChanged:
    """Return the error for a value read by Python code that differs from the recorded one."""
    return StepChanged(
        "a value that Python read during the captured step has changed",
        got=f"`{func}` returns {got}; during the capture it returned {allowed}",
        hint="move `.item()`, `.tolist()` and `.numpy()` out of the step; for an optimizer, "
        "`fused=True` keeps the step count in a tensor",
    )


def _decides_sizes(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


@contextmanager
def _rolled_back(
    storages: Iterable[torch.UntypedStorage],
    device: torch.device,
    generators: Sequence[torch.Generator],
    allocated_bytes: int,
) -> Iterator[None]:
    """Restore the bytes of storages, and the states of random generators, at the end of the context.

    Default generators are restored too. The copies are on the device if `allocated_bytes`, the bytes that a step
    allocates, still fit there; otherwise in host memory.
    """
    storages = list(storages)
    num_bytes = sum(base.nbytes() for base in storages)
    copy_device = device if has_room(device, num_bytes + allocated_bytes) else torch.device("cpu")
    before = [(base, torch.UntypedStorage(base.nbytes(), device=copy_device).copy_(base)) for base in storages]
    states = [generator.get_state() for generator in generators]
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        for base, copy in before:
            base.copy_(copy)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    return torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat


def _digest(tensor: Tensor) -> int:
    flat = _flat(tensor)
    return checksum(flat.view(_WORDS[flat.element_size()]))


def sample(tensor: Tensor) -> Tensor:
    """Return evenly spaced elements of a tensor, fewer than `2 * _SAMPLED`, in float64 on the host."""
    flat = _flat(tensor)
    return flat[:: max(flat.numel() // _SAMPLED, 1)].to("cpu", torch.float64, copy=True)


def is_close(a: Tensor, b: Tensor, dtype: torch.dtype, tolerance: float = 0.0) -> bool:
    """Return whether two samples of a tensor differ by at most `tolerance` plus a rounding error.

    The rounding error is `ULPS` units in the last place of the largest value of `b`.

    Args:
        a: Sample of the planned step.
        b: Sample of the eager step.
        dtype: The tensor's dtype.
        tolerance: Absolute tolerance. If positive, the fraction `_OUTLIER_SHARE` of the elements may differ more.
    """
    unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    largest = b.abs().max() if b.numel() else 0.0
    # The negation counts NaN as different.
    outside = ~((a - b).abs() <= tolerance + ULPS * unit * largest)
    return int(outside.sum()) <= (_OUTLIER_SHARE * a.numel() if tolerance else 0)

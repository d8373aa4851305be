"""The first planned step is compared with the plain one: the same inputs, state and random numbers give the same.

So a value that was taken for a constant, a kernel that the capture did not see, or an operator that did not run cannot
pass unnoticed. What is equal is equal bit for bit, unless plain runs themselves differ: kernels of an accelerator may
add in another order every time. Then every tensor may be away from the plain one by ten times what two plain runs are.
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
from hyper_parallel.backends.torch.memory._operator_mode import OperatorMode
from hyper_parallel.backends.torch.memory._spill_mode import within_device
from hyper_parallel.backends.torch.memory._unseen import TakenMode
from hyper_parallel.backends.torch.memory._workspace import has_room
from hyper_parallel.backends.torch.memory.operators import numbers_read, tensors_in
from hyper_parallel.errors import StepChanged

_SAMPLED: Final = 4096
"""Elements of a tensor kept to tell rounding from another value; all bytes are compared by digest. Not measured."""
_CHUNK: Final = 1 << 20
"""Words of a large tensor that are digested at a time, where the tensor is: 24 MiB beside it."""
_CACHED: Final = 1 << 16  # on the host: they stay in its cache
_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ULPS: Final = 4
"""Units in the last place of a tensor's largest value that are rounding, where an update runs on another processor."""
_SPREADS: Final = 10
"""Differences of two plain runs by which a planned step may differ from one of them; no hardware has met it yet."""
_OUTLIERS: Final = 0.01
"""Share of a tensor's elements that may be further away: where a gradient is noise, Adam's steps have either sign."""
OUTPUTS: Final = ("loss", "gradient norm", "routing")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one run of a step gave, to be compared with another run of the same step.

    Attributes:
        digests: A checksum of every output and of every tensor of the state.
        samples: Elements of each, and its type.
    """

    digests: dict[str, int]
    samples: dict[str, tuple[Tensor, torch.dtype]]

    @classmethod
    def of(cls, outputs: Any, state: Mapping[str, Tensor]) -> StepOutcome:
        """Copy what is compared to the host.

        Args:
            outputs: What the step returned; its tensors count.
            state: Parameters, buffers and optimizer state after the step.
        """
        flat = [value for value in tree_flatten(outputs)[0] if isinstance(value, Tensor)]
        names = [*OUTPUTS, *(f"output {at}" for at in range(len(OUTPUTS), len(flat)))]
        every = {**dict(zip(names, flat, strict=False)), **state}
        return cls(
            {name: _digest(tensor) for name, tensor in every.items()},
            {name: (sample(tensor), tensor.dtype) for name, tensor in every.items()},
        )


class PlainStep:
    """What a planned step must give.

    Args:
        first: What the plain step gave.
        again: What it gave when it was run once more; None: on hardware that gives the same.
    """

    def __init__(self, first: StepOutcome, again: StepOutcome | None = None) -> None:
        self._first = first
        self.spread: dict[str, float] = {}
        if again is not None and again.digests != first.digests:
            pairs = ((k, a, again.samples[k][0]) for k, (a, _) in first.samples.items())
            self.spread = {k: float((a - b).abs().max()) if a.numel() else 0.0 for k, a, b in pairs}

    @classmethod
    def of(cls, captured: Captured, inputs: Mapping[str, Tensor]) -> PlainStep:
        """Run the step without a plan, on an accelerator twice, and undo it; the model must have its state.

        Raises:
            StepChanged: HP512 when data decide what they decided otherwise while the step was recorded.
        """
        assert captured.plain is not None
        where = captured.device
        bases = {s: tensor.untyped_storage() for s, tensor in captured.state.items()}
        made = captured.eager_peak_bytes - sum(base.nbytes() for base in bases.values())
        runs = []
        for _ in range(1 if where.type == "cpu" else 2):
            changed = [bases[s] for s in captured.changed]
            with _undone(changed, where, captured.generators, made):
                with within_device(where, captured.owned), _AsRecorded(captured) as found:
                    outputs = captured.plain(**inputs)
                if found.other is not None:
                    raise found.other
                state = {k: view.on(bases[view.storage]) for k, view in captured.named.items()}
                runs.append(StepOutcome.of(outputs, state))
                del outputs
        return cls(*runs)

    def refuse_other(self, got: StepOutcome, *, rounded: bool = False) -> None:
        """Compare.

        Args:
            got: What the planned step gave.
            rounded: Updates ran on another processor.

        Raises:
            StepChanged: HP512 with the first value that is another one.
        """
        for name, digest in self._first.digests.items():
            mine, dtype = self._first.samples[name]
            other = got.samples[name][0]
            far = _SPREADS * self.spread.get(name, 0.0)
            inexact = bool(self.spread) or (rounded and name not in OUTPUTS)
            if got.digests[name] == digest or (inexact and near(other, mine, dtype, far)):
                continue
            few = mine.numel() == 1
            raise StepChanged(
                "the planned step does not give what the plain one gave",
                where=name,
                got=other.item() if few else "other bytes",
                allowed=mine.item() if few else None,
                hint="something changes from step to step without being a tensor: make it one, or train without a plan "
                "(`offload.budget=null` in a recipe)",
            )


class _AsRecorded(OperatorMode):
    """Around a plain step: do data decide the same sizes and numbers as while it was recorded?

    A planned step would stop at the first that is another one, in its middle, where the state is lost.

    Attributes:
        other: The error of that.
    """

    def __init__(self, captured: Captured) -> None:
        super().__init__(self._operator)
        self._state, self._values = captured.state, TakenMode(self._taken)
        calls = (call for call in captured.calls if call.guards or _decides_sizes(call.func))
        self._recorded, self._inside = deque(calls), False
        self.other: StepChanged | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        self._values.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._values.__exit__(*error)
        super().__exit__(*error)

    def _taken(self, tensor: Tensor, values: bool) -> None:
        """Python is given all numbers of a tensor; recorded as a comparison with what they were."""
        call = self._recorded[0] if values and self._recorded and not self._inside else None
        if call is None or call.func is not torch.ops.aten.equal.default:
            return
        before = call.args[1]
        if (kept := self._state.get(before.storage)) is not None:
            torch.equal(tensor.detach(), before.on(kept.untyped_storage()))

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        out = func(*args, **kwargs)
        self._inside = False
        flat = tree_flatten(out)[0]
        if _decides_sizes(func) or (numbers_read(func, flat) and tensors_in(args, kwargs)):
            if not self._recorded or self._recorded[0].func is not func:
                self._recorded.clear()  # it took another way already
                return out
            call = self._recorded.popleft()
            for at, view in call.made:
                if (size := tuple(flat[at].shape)) != view.size:
                    self.other = self.other or other_size(func, size, view.size)
            for at, value in call.guards:
                if flat[at] != value:
                    self.other = self.other or other_number(func, flat[at], value)
        return out


def other_size(func: Any, got: tuple[int, ...] | None, allowed: Sequence[int]) -> StepChanged:
    """The error of a result whose size the data decide."""
    return StepChanged(
        f"`{func}` makes a result of another size than in the captured step",
        got=got,
        allowed=tuple(allowed),
        hint="the size depends on the data: weight by a mask instead of selecting by one, or pad; "
        "for experts use `experts_implementation='grouped_mm'`",
    )


def other_number(func: Any, got: Any, allowed: Any) -> StepChanged:
    """The error of a number that Python has read."""
    return StepChanged(
        "the captured step took a branch or read a value",
        got=f"`{func}` gives {got}, it gave {allowed}",
        hint="leave what Python reads (`.item()`, `.tolist()`, `.numpy()`) out of the step; "
        "for an optimizer keep the step count in tensors with `fused=True`",
    )


def _decides_sizes(func: Any) -> bool:
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


@contextmanager
def _undone(
    storages: Iterable[torch.UntypedStorage],
    device: torch.device,
    generators: Sequence[torch.Generator],
    made_bytes: int,
) -> Iterator[None]:
    """Put the bytes of storages, and random numbers, back where they were.

    The copies are on the device where they leave room for what a step makes, `made_bytes`; else in host memory, from
    which gigabytes take seconds.
    """
    storages = list(storages)
    num_bytes = sum(base.nbytes() for base in storages)
    home = device if has_room(device, num_bytes + made_bytes) else torch.device("cpu")
    before = [
        (base, torch.UntypedStorage(base.nbytes(), device=home).copy_(base)) for base in storages
    ]
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
    """A number that changes with the value of any word, and when two words change places: sum of word x odd number.

    Modulo 2**64, the same on every device: to bring gigabytes to the host takes longer than the step.
    """
    flat, digest = _flat(tensor), 0
    words = flat.view(_WORDS[flat.element_size()])
    if words.numel() <= _CHUNK:
        words = words.cpu()
    step = min(words.numel(), _CACHED if words.device.type == "cpu" else _CHUNK)
    odd = 2 * torch.arange(step, device=words.device) + 1
    for at, chunk in enumerate(words.split(step) if step else ()):
        values = chunk.long()
        digest += int((values * odd[: len(chunk)]).sum()) + 2 * at * step * int(values.sum())
    return digest % 2**64


def sample(tensor: Tensor) -> Tensor:
    """Up to so many elements of a tensor, evenly spread, in float64 on the host."""
    flat = _flat(tensor)
    return flat[:: max(flat.numel() // _SAMPLED, 1)].to("cpu", torch.float64, copy=True)


def near(a: Tensor, b: Tensor, dtype: torch.dtype, far: float = 0.0) -> bool:
    """Two samples of a tensor of this type that differ by rounding: a few units in the last place of the largest.

    Args:
        a: One.
        b: The other.
        dtype: The tensor's type.
        far: What they may differ by beyond that, up to a few elements.
    """
    unit = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    largest = b.abs().max() if b.numel() else 0.0
    # Not the other way round: what is no number is never near.
    away = ~((a - b).abs() <= far + ULPS * unit * largest)
    return int(away.sum()) <= (_OUTLIERS * a.numel() if far else 0)

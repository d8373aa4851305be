"""Detection of untracked effects: effects of a step that no recorded operator shows.

reads of values     `tolist` and `numpy` become a guard: a planned step stops if the value differs from the recorded one
untracked writes    by a kernel with a raw pointer, or by an operator with an incomplete schema: refused
Python state        the step changes a Python value of a module or an optimizer, or draws random numbers of Python or
                    NumPy: refused
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel.backends.torch.memory._fake_values import fake_mode
from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, TORCH, Storages
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import Operator

_VALUES: Final = frozenset(("tolist", "numpy", "__array__"))
_POINTERS: Final = _VALUES | {"data_ptr", "__dlpack__"}
_PLAIN: Final = frozenset((Tensor, nn.Parameter))
_DEPTH: Final = 4
"""Number of nested levels of lists, dicts and objects that are inspected in an attribute."""
TORCH_ATTRIBUTES: Final = frozenset(vars(nn.Module())) | {"_opt_called", "_need_device_dtype_check_for_fused"}
"""Attributes that are not inspected: those of every module, and two that torch sets on optimizers."""
_CHUNK: Final = 1 << 20
"""Words of a large tensor per chunk of its checksum."""
_CACHED: Final = 1 << 16  # words per chunk on the host, small enough for its cache
_CODE: Final = (type, FunctionType, MethodType, ModuleType, nn.Module, torch.optim.Optimizer)


def checksum(words: Tensor) -> int:
    """Return the sum of `words[i] * (2 * i + 1)` modulo 2**64, for a flat tensor of integers.

    A large tensor is summed on its device, because copying gigabytes to the host would take too long.
    """
    if words.numel() <= _CHUNK:
        words = words.cpu()
    step = min(words.numel(), _CACHED if words.device.type == "cpu" else _CHUNK)
    odd = 2 * torch.arange(step, device=words.device) + 1
    total = 0
    for position, chunk in enumerate(words.split(step) if step else ()):
        values = chunk.long()
        total += int((values * odd[: len(chunk)]).sum()) + 2 * position * step * int(values.sum())
    return total % 2**64


def digest(base: torch.UntypedStorage) -> tuple[int, int]:
    """Return two checksums of a storage's bytes: of its words of 8 bytes, and of the remaining bytes."""
    with _disable_current_modes():
        flat = torch.empty(0, dtype=torch.uint8, device=base.device).set_(base)  # type: ignore[call-overload]
        whole = base.nbytes() // 8 * 8
        return checksum(flat[:whole].view(torch.int64)), checksum(flat[whole:])


def untracked_write_error(name: str) -> CaptureUnsupported:
    """Return the error for bytes that change although no recorded operator writes them."""
    return CaptureUnsupported(
        f"`{name}` is written by code that torch's dispatcher does not see, so a plan would not run it",
        hint="wrap the kernel with `torch.library.custom_op(..., mutates_args=...)`, which declares its writes",
    )


class RawAccessMode(TorchFunctionMode):
    """Mode that calls `on_access` with a tensor whose values (True) or address (False) Python code reads."""

    def __init__(self, on_access: Callable[[Tensor, bool], None]) -> None:
        super().__init__()
        self._raw_access = on_access

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _POINTERS and args and type(args[0]) in _PLAIN:
            self._raw_access(args[0], name in _VALUES)
        return func(*args, **(kwargs or {}))


class UntrackedEffects:
    """Context around a recorded step that detects its untracked effects; the recorder reports every operator to it.

    Attributes:
        drew: True if the last observed call of a custom operator has drawn random numbers.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self.drew = False
        self._python, self._raw_access = PythonValues(), RawAccessMode(self._on_raw_access)
        self._inside = False  # True inside of an operator, whose effects are recorded
        self._state: dict[int, tuple[int, int]] = {}  # state storage -> digest at its first use
        self._exposed: dict[int, tuple[int, int]] = {}  # storage whose pointer was read -> digest
        self._uninitialised: set[int] = set()  # storages that were allocated but not yet written

    def __enter__(self) -> Self:
        self._python.__enter__()
        self._raw_access.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._raw_access.__exit__(*error)
        self._python.__exit__(*error)

    def _on_raw_access(self, tensor: Tensor, values: bool) -> None:
        """Record a read of values as a guard, and watch a storage whose pointer was read for untracked writes."""
        if self._inside or isinstance(tensor, FakeTensor) or fake_mode() is not None:
            return
        if values:
            with _disable_current_modes():
                seen = tensor.detach().clone()
            torch.equal(tensor.detach(), seen)  # recorded as an operator whose result is a guard
        if (storage := self._storages.find(tensor)) is not None:
            self._exposed[storage] = digest(tensor.untyped_storage())

    def register_state(self, storage: int, base: torch.UntypedStorage) -> None:
        """Register a storage that existed before the step."""
        self._state[storage] = digest(base)

    def check_operands(self, tensors: Sequence[Tensor]) -> None:
        """Raise CaptureUnsupported (HP511) if an operand was written through its pointer."""
        for tensor in tensors if self._exposed else ():
            storage = self._storages.find(tensor)
            before = None if storage is None else self._exposed.pop(storage, None)
            if before is not None and before != digest(tensor.untyped_storage()):
                raise self._write_error(storage)

    @contextmanager
    def observe(self, func: Any, tensors: Sequence[Tensor], written: Sequence[Tensor]) -> Iterator[None]:
        """Observe the call of an operator inside this context, and set `drew`.

        Raises:
            CaptureUnsupported: HP511 for a custom operator that writes an argument that its schema declares read-only.
        """
        declared = {id(tensor) for tensor in written}
        foreign = func.namespace not in TORCH and fake_mode() is None
        bases = [t.untyped_storage() for t in tensors if id(t) not in declared] if foreign else []
        states = generator_states(bases) if foreign else []
        before = [digest(base) for base in bases]
        fake_communication = func.namespace in COMMUNICATION and fake_mode() is not None
        self._inside, random_state = True, random.getstate() if fake_communication else None
        try:
            yield
        finally:
            self._inside = False
            if random_state is not None:  # undo torch's draws for ids of fake collectives
                random.setstate(random_state)
        self.drew = foreign and not all(map(torch.equal, states, generator_states(bases)))
        if before != [digest(base) for base in bases]:
            raise untracked_write_error(f"an argument of {func}")

    def after_operator(self, func: Any, reads: Sequence[int], writes: Sequence[int], allocated: Sequence[int]) -> None:
        """Raise HP511 for an operator that reads uninitialised storages, and update the set of such storages."""
        self._uninitialised.difference_update(writes)
        name, allocates = func._opname, "empty" in func._opname
        # `*_like` and `new_*` read only the shape of their argument.
        if not (allocates or name.startswith("new_") or name.endswith("_like")):
            for storage in self._uninitialised.intersection(reads):
                raise CaptureUnsupported(
                    f"`{func}` reads `{self._storages.entries[storage].name}`, which no recorded operator has written: "
                    "it is uninitialised, or written by code that torch's dispatcher does not see",
                    hint="initialise it, or wrap the kernel that writes it with "
                    "`torch.library.custom_op(..., mutates_args=...)`",
                )
        if allocates:
            self._uninitialised.update(s for s in allocated if self._storages.entries[s].num_bytes)

    def refuse_state_changes(
        self, operators: Sequence[Operator], state: Mapping[int, Tensor], make_resident: Callable[[Tensor], None]
    ) -> None:
        """Raise HP511, after the step, for state that changed without a recorded operator.

        State is tensors (also if replaced), Python values of modules and optimizers, and random states of Python and
        NumPy. `state` has a tensor per storage from before the step; `make_resident` makes a tensor resident.
        """
        read = {s for operator in operators for s in operator.reads}
        written = {s for operator in operators for s in operator.writes}
        # Only tensors from before the step matter, because others are recorded where the step produces them.
        self._python.refuse_changes(lambda tensor: self._storages.find(tensor) in read & self._state.keys())
        for storage, before in self._state.items():
            make_resident(state[storage])
            if storage not in written and digest(state[storage].untyped_storage()) != before:
                raise self._write_error(storage)

    def _write_error(self, storage: int | None) -> CaptureUnsupported:
        assert storage is not None
        return untracked_write_error(self._storages.entries[storage].name)


def generator_states(bases: Sequence[torch.UntypedStorage]) -> list[Tensor]:
    """Return the states of the default random generators that an operator on these storages may use."""
    devices = {base.device for base in bases if base.device.type != "cpu"}
    states = [torch.get_device_module(device).get_rng_state(device) for device in devices]
    return [torch.get_rng_state(), *states]


class PythonValues:
    """Context that compares Python values of modules and optimizers before and after a step.

    Every module and optimizer, except those of this package, is inspected before it first runs inside the context.
    """

    def __init__(self) -> None:
        self._inspected: dict[int, tuple[Any, str, dict[str, Any]]] = {}
        self._tensors: list[tuple[Any, str, str, Tensor]] = []

    def _module(self, root: nn.Module, _: Any) -> None:
        if id(root) not in self._inspected:
            for name, module in root.named_modules():
                self._add(module, name or type(root).__name__)

    def _optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._add(optimizer, type(optimizer).__name__)

    def _add(self, owner: Any, name: str) -> None:
        # Modules of this package keep values of a pass only while it runs.
        if id(owner) in self._inspected or type(owner).__module__.startswith("hyper_parallel."):
            return
        self._inspected[id(owner)] = owner, name, dict(python_attributes(owner))
        attributes = {**vars(owner), **getattr(owner, "_buffers", {})}
        self._tensors += [(owner, name, k, v) for k, v in attributes.items() if isinstance(v, Tensor)]

    def __enter__(self) -> Self:
        self._random = _random_state()
        self._hooks = [
            register_module_forward_pre_hook(self._module),
            register_optimizer_step_pre_hook(self._optimizer),
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def refuse_changes(self, was_read: Callable[[Tensor], bool]) -> None:
        """Raise HP511 if the step has changed a Python attribute, replaced a tensor, or drawn Python or NumPy numbers.

        `was_read` returns whether an operator of the step has read a tensor; otherwise it may be replaced.
        """
        for owner, name, key, tensor in self._tensors:
            now = getattr(owner, key, None)
            if now is not tensor and was_read(tensor):
                raise CaptureUnsupported(
                    f"the step replaces the tensor `{name}.{key}`, but planned steps would read the old tensor",
                    hint=f"change it in place: `self.{key}.copy_(...)`",
                )
        for owner, name, before in self._inspected.values():
            after = dict(python_attributes(owner))
            changed = [key for key in before if before[key] != after.get(key)]
            if changed:
                key = changed[0]
                if isinstance(owner, torch.optim.Optimizer) and key == "state" and not before[key]:
                    raise CaptureUnsupported(
                        f"{name} updates the weights in this call of the step, but did not in the previous call",
                        hint="run all microbatches of an update in one step, which ends with the update",
                    )
                raise CaptureUnsupported(
                    f"the step changes `{key}` of {name}, which is not a tensor: planned steps would repeat one value",
                    got=f"{before[key]} before the step, {after.get(key)} after it"[:200],
                    hint="keep it in a tensor that is changed in place, such as a buffer",
                )
        if self._random != _random_state():
            raise CaptureUnsupported(
                "the step draws random numbers of Python or NumPy, which every planned step would repeat",
                hint="draw them with torch (`torch.rand`), or outside of the step, as an input",
            )


def _random_state() -> tuple[Any, ...]:
    drawn: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), drawn[1].tobytes(), drawn[2]


def python_attributes(owner: Any, seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each attribute of a module or an optimizer, except tensors and `TORCH_ATTRIBUTES`.

    Values can be compared with `==`. `seen` has objects to skip, by id; it is extended by the inspected objects. None:
    skip none.
    """
    seen = {} if seen is None else seen
    for key, value in vars(owner).items():
        if key not in TORCH_ATTRIBUTES and not isinstance(value, Tensor):
            if key == "param_groups":
                value = [{k: v for k, v in group.items() if k != "params"} for group in value]
            yield key, _plain(list(value.values()) if key == "state" else value, _DEPTH, seen)


def _plain(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, Tensor):
        return "a tensor", id(value)
    if isinstance(value, (np.ndarray, np.generic)):
        seen[id(value)] = value
        return value.tobytes()
    if not depth or isinstance(value, _CODE) or id(value) in seen:
        return None
    seen[id(value)] = value
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return tuple(_plain(v, depth - 1, seen) for v in value)
    if isinstance(value, dict):
        named = ((k, v) for k, v in value.items() if isinstance(k, (str, int)))
        return tuple((k, _plain(v, depth - 1, seen)) for k, v in named)
    return _plain(getattr(value, "__dict__", None), depth - 1, seen)

"""What a step does without an operator that a capture could record, found while it is recorded.

a value is read       `tolist` and `numpy` make a guard: the program runs as long as the value is the recorded one
bytes are written     by a kernel that was given a pointer, by an operator whose schema does not say so: refused
Python keeps count    a number of a module or an optimizer changes, random numbers of Python are drawn: refused
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from hyper_parallel.backends.torch.memory.operators import COMMUNICATION, TORCH
from hyper_parallel.backends.torch.memory.storages import Storages
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.ir import Operator

_VALUES: Final = frozenset(("tolist", "numpy", "__array__"))
_POINTERS: Final = _VALUES | {"data_ptr", "__dlpack__"}
_PLAIN: Final = frozenset((Tensor, nn.Parameter))
_DEPTH: Final = 4
"""Levels of lists, dicts and objects below an attribute that are looked into."""
TORCH_KEEPS: Final = frozenset(vars(nn.Module())) | {
    "_opt_called",
    "_need_device_dtype_check_for_fused",
}
"""Attributes that torch keeps in every module, a scheduler in an optimizer, a fused optimizer until its first step."""
_CODE: Final = (type, FunctionType, MethodType, ModuleType, nn.Module, torch.optim.Optimizer)


def digest(base: torch.UntypedStorage) -> tuple[int, ...]:
    """Sums of a storage's words: other bytes have other sums, but for odd chances; nothing is copied."""
    with _disable_current_modes():
        words = base.nbytes() // 8
        empty = torch.empty(0, dtype=torch.int64, device=base.device)
        flat = empty.set_(base, 0, (words,), (1,))  # type: ignore[call-overload]
        sums = [flat.sum(), flat[::3].sum()]
        if rest := base.nbytes() - words * 8:
            tail = torch.empty(0, dtype=torch.uint8, device=base.device)
            sums.append(tail.set_(base, words * 8, (rest,), (1,)).sum())  # type: ignore[call-overload]
        return tuple(map(int, sums))


def written_unseen(name: str) -> CaptureUnsupported:
    """The error of bytes that change although no operator writes them."""
    return CaptureUnsupported(
        f"`{name}` is written by code that torch's dispatcher does not see, so a plan would not run it",
        hint="wrap the kernel with `torch.library.custom_op(..., mutates_args=...)`, which names what it writes",
    )


class TakenMode(TorchFunctionMode):
    """Tells of tensors whose bytes Python code takes, and whether it sees their values."""

    def __init__(self, taken: Callable[[Tensor, bool], None]) -> None:
        super().__init__()
        self._taken = taken

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _POINTERS and args and type(args[0]) in _PLAIN:
            self._taken(args[0], name in _VALUES)
        return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Inside:
    """One call of an operator: whether it has drawn random numbers unsaid."""

    drew: bool = False


class Unseen:
    """Watches a step that is recorded: use it around the step, and tell it of every operator.

    Args:
        storages: The storages of the recording.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._python, self._taken = PythonValues(), TakenMode(self._take)
        self._inside = False  # what a kernel does is the operator's
        self._state: dict[int, tuple[int, ...]] = {}  # digests of state, when the step met it
        self._lent: dict[int, tuple[int, ...]] = {}  # digests of what other code has a pointer to
        self._blank: set[int] = set()  # allocated, not yet written

    def __enter__(self) -> Self:
        self._python.__enter__()
        self._taken.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._taken.__exit__(*error)
        self._python.__exit__(*error)

    def _take(self, tensor: Tensor, values: bool) -> None:
        """What Python sees becomes a guard, and nobody may write unseen where it has a pointer to."""
        if self._inside or isinstance(tensor, FakeTensor) or fake_mode() is not None:
            return
        if values:
            with _disable_current_modes():
                seen = tensor.detach().clone()
            torch.equal(tensor.detach(), seen)  # recorded, with its result
        if (known := self._storages.find(tensor)) is not None:
            self._lent[known] = digest(tensor.untyped_storage())

    def meet(self, storage: int, base: torch.UntypedStorage) -> None:
        """A storage that was there before the step."""
        self._state[storage] = digest(base)

    def use(self, tensors: Sequence[Tensor]) -> None:
        """An operator is about to run on tensors."""
        for tensor in tensors if self._lent else ():
            storage = self._storages.find(tensor)
            before = None if storage is None else self._lent.pop(storage, None)
            if before is not None and before != digest(tensor.untyped_storage()):
                raise self._error(storage)

    @contextmanager
    def inside(
        self, func: Any, given: Sequence[Tensor], written: Sequence[Tensor]
    ) -> Iterator[_Inside]:
        """Around a call of an operator; one that is not torch's own is watched, whatever its schema says."""
        call, said = _Inside(), {id(tensor) for tensor in written}
        foreign = func.namespace not in TORCH and fake_mode() is None
        bases = [t.untyped_storage() for t in given if id(t) not in said] if foreign else []
        states, before = generators(bases) if foreign else [], [digest(base) for base in bases]
        fake_talk = func.namespace in COMMUNICATION and fake_mode() is not None
        self._inside, numbers = True, random.getstate() if fake_talk else None
        try:
            yield call
        finally:
            self._inside = False
            if numbers is not None:  # torch numbers collectives without bytes by random numbers
                random.setstate(numbers)
        if foreign:
            call.drew = not all(map(torch.equal, states, generators(bases)))
            if before != [digest(base) for base in bases]:
                raise written_unseen(f"an argument of {func}")

    def fill(
        self, func: Any, reads: Sequence[int], writes: Sequence[int], made: Sequence[int]
    ) -> None:
        """An operator has run on storages: what an allocation gives is written before it is read, or unseen."""
        self._blank.difference_update(writes)
        name, allocates = func._opname, "empty" in func._opname
        # Of what they are like they read the shape only.
        if not (allocates or name.startswith("new_") or name.endswith("_like")):
            for storage in self._blank.intersection(reads):
                raise self._error(storage)
        if allocates:
            self._blank.update(s for s in made if self._storages.entries[s].num_bytes)

    def refuse(
        self,
        operators: Sequence[Operator],
        state: Mapping[int, Tensor],
        bring: Callable[[Tensor], None],
    ) -> None:
        """After the step: refuse what changed other than by its operators.

        Args:
            operators: What ran.
            state: What was there before, by storage.
            bring: Brings a tensor's bytes to the device.

        Raises:
            CaptureUnsupported: HP511 with what changed.
        """
        read = {s for operator in operators for s in operator.reads}
        written = {s for operator in operators for s in operator.writes}
        # What was made in the step and is held for a while is read where it was made.
        self._python.refuse_changes(
            lambda tensor: self._storages.find(tensor) in read & self._state.keys()
        )
        for storage, before in self._state.items():
            bring(state[storage])
            if storage not in written and digest(state[storage].untyped_storage()) != before:
                raise self._error(storage)

    def _error(self, storage: int | None) -> CaptureUnsupported:
        assert storage is not None
        return written_unseen(self._storages.entries[storage].name)


def generators(bases: Sequence[torch.UntypedStorage]) -> list[Tensor]:
    """States of the random generators that an operator on these storages may use."""
    devices = {base.device for base in bases if base.device.type != "cpu"}
    states = [torch.get_device_module(device).get_rng_state(device) for device in devices]
    return [torch.get_rng_state(), *states]


class PythonValues:
    """Values that modules and optimizers keep in Python, as a step finds them and as it leaves them.

    Inside its context every module and optimizer that runs is looked at before it does.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, str, dict[str, Any]]] = {}
        self._tensors: list[tuple[Any, str, str, Tensor]] = []

    def _module(self, root: nn.Module, _: Any) -> None:
        if id(root) not in self._found:
            for name, module in root.named_modules():
                self._add(module, name or type(root).__name__)

    def _optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._add(optimizer, type(optimizer).__name__)

    def _add(self, owner: Any, name: str) -> None:
        # Our own modules keep what a pass needs while it runs, and forget it afterwards.
        if id(owner) in self._found or type(owner).__module__.startswith("hyper_parallel."):
            return
        self._found[id(owner)] = owner, name, dict(kept(owner))
        held = {**vars(owner), **getattr(owner, "_buffers", {})}
        self._tensors += [(owner, name, k, v) for k, v in held.items() if isinstance(v, Tensor)]

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
        """Refuse a step after which something in Python is another.

        Args:
            was_read: An operator of the step has read a tensor; only then it matters which one an attribute is next.

        Raises:
            CaptureUnsupported: HP511 with the attribute.
        """
        for owner, name, key, tensor in self._tensors:
            now = getattr(owner, key, None)
            if now is not tensor and was_read(tensor):
                raise CaptureUnsupported(
                    f"the step replaces the tensor `{name}.{key}`, and the program would go on reading the old one",
                    hint=f"change it in place: `self.{key}.copy_(...)`",
                )
        for owner, name, before in self._found.values():
            after = dict(kept(owner))
            changed = [key for key in before if before[key] != after.get(key)]
            if changed:
                key = changed[0]
                if isinstance(owner, torch.optim.Optimizer) and key == "state" and not before[key]:
                    raise CaptureUnsupported(
                        f"{name} updates the weights in this call and has not done so in the one before",
                        hint="take all micro-batches of an update into one step, which ends with the update",
                    )
                raise CaptureUnsupported(
                    f"the step changes `{key}` of {name}, which is no tensor: the program would repeat one value",
                    got=f"{before[key]} before the step, {after.get(key)} after it"[:200],
                    hint="keep it in a tensor that is changed in place, such as a buffer",
                )
        if self._random != _random_state():
            raise CaptureUnsupported(
                "the step draws random numbers of Python or NumPy: the program would repeat those of one step",
                hint="draw them with torch (`torch.rand`), or outside of the step, as an input",
            )


def _random_state() -> tuple[Any, ...]:
    drawn: Any = np.random.get_state()  # noqa: NPY002
    return random.getstate(), drawn[1].tobytes(), drawn[2]


def kept(owner: Any, seen: dict[int, Any] | None = None) -> Iterator[tuple[str, Any]]:
    """What a module or an optimizer keeps in attributes beside tensors: (name, something to compare).

    Args:
        owner: The module or optimizer.
        seen: Objects that were looked into already, and are not once more.
    """
    seen = {} if seen is None else seen
    for key, value in vars(owner).items():
        if key not in TORCH_KEEPS and not isinstance(value, Tensor):
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

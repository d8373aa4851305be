"""Tensors of model and optimizer (owner tensors), and detection of their use while a planned device owns their bytes.

A planned device executes a memory plan. While it owns the bytes, the owner tensors are stubs: empty tensors of a
subclass. An operation on a stub raises an error instead of reading freed memory.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.errors import StepChanged

_ALLOWED: Final = frozenset(
    (
        "__get__", "__set__", "__delete__", "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex",
        "is_conj", "is_contiguous", "is_floating_point", "is_inference", "is_neg", "nelement", "numel", "register_hook",
        "register_post_accumulate_grad_hook", "requires_grad_", "size", "storage_offset", "stride", "untyped_storage",
    )
)  # fmt: skip
"""Functions that are allowed on stubs, because they access no values."""


class _StubMixin:
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            allowed = getattr(func, "__name__", "") in _ALLOWED
            if not allowed and any(map(_has_no_bytes, tree_leaves((args, kwargs)))):
                raise StepChanged(
                    "a memory plan manages this tensor, so it is empty outside of the planned step",
                    where=f"`{getattr(func, '__name__', func)}`",
                    hint="use it inside `with step.materialized():`",
                )
            out = func(*args, **(kwargs or {}))
            if _has_no_bytes(out):  # the result is the stub's own storage, as of `.data`
                make_stubs([out])
        return out


class TensorStub(_StubMixin, Tensor):
    """Empty tensor whose bytes a planned device owns."""


class ParameterStub(_StubMixin, Parameter):
    """Empty parameter whose bytes a planned device owns."""


_STUB_CLASSES: Final[dict[type, type]] = {Tensor: TensorStub, Parameter: ParameterStub}


def _has_no_bytes(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.untyped_storage().nbytes() and value.numel() > 0


def make_stubs(tensors: Iterable[Tensor]) -> list[tuple[Tensor, type]]:
    """Change the class of tensors without bytes to a stub class, as torch does with uninitialised parameters.

    Returns:
        Each changed tensor, and its former class.
    """
    stubs = [(t, type(t)) for t in tensors if type(t) in _STUB_CLASSES and _has_no_bytes(t)]
    for tensor, cls in stubs:
        tensor.__class__ = _STUB_CLASSES[cls]  # type: ignore[assignment]
    return stubs


def aliases_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors and parameters not in `tensors` that share a storage with one of them.

    Example: a `weight.detach()` that is still referenced. Tensors of subclasses, and tensors that only C++ refers to,
    are not found.
    """
    known = {id(tensor): tensor for tensor in tensors}
    uses = Counter(tensor.untyped_storage()._cdata for tensor in known.values())
    # torch counts the Python object of the storage as one use.
    shared = {key for key, n in uses.items() if torch._C._storage_Use_Count(key) > n + 1}
    if not shared:
        return []
    live_tensors = (t for t in gc.get_objects() if type(t) in _STUB_CLASSES and id(t) not in known)
    return [t for t in live_tensors if t.untyped_storage()._cdata in shared]


_KEY = attrgetter("_cdata")


class Owners:
    """Tensors of model and optimizer that own the state of a recorded step."""

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._stubs: list[tuple[torch.Tensor, type]] = []
        # (storage, its tensor, version of the tensor)
        self._input_state: list[tuple[int, torch.Tensor, int]] = []
        # Checked in every step; the key identifies a torch storage.
        self._tensors = [tensor for _, tensor in captured.owners]
        self._recorded = [_KEY(captured.state[s].untyped_storage()) for s, _ in captured.owners]
        self._written = captured.written_state

    def check(self) -> None:
        """Raise StepChanged (HP512) if model or optimizer no longer have the recorded storages and settings."""
        with torch._C.DisableTorchFunctionSubclass():  # only metadata of stub tensors is read
            if self._captured.source is not None:
                self._captured.source.check()
            keys = list(map(_KEY, map(torch.Tensor.untyped_storage, self._tensors)))
        if keys != self._recorded:
            changed = next(index for index, key in enumerate(keys) if key != self._recorded[index])
            raise StepChanged(
                f"`{self._name(self._captured.owners[changed][0])}` no longer has the storage "
                "that it had in the recorded step",
                hint="change its values in place (`tensor.copy_(...)`), inside `with step.materialized():`",
            )

    def check_bytes(self, num_bytes: Callable[[torch.UntypedStorage], int]) -> None:
        """Raise StepChanged (HP512) if another offloaded step owns the bytes of a state tensor.

        `num_bytes` returns the size of a storage, resident or evicted.
        """
        for s, tensor in self._captured.state.items():
            if num_bytes(tensor.untyped_storage()) != self._captured.program.storages[s].num_bytes:
                raise StepChanged(
                    f"the storage of `{self._name(s)}` belongs to another offloaded step",
                    hint="call `close()` on the other `hp.offload` step first",
                )

    def make_stubs(self) -> None:
        """Turn the emptied owner tensors and their aliases into stubs, and block model and optimizer.

        Call it when a planned device has taken their bytes.
        """
        storages, inputs = self._captured.program.storages, self._captured.input_storages
        tensors = [*self._captured.state.values(), *(tensor for _, tensor in self._captured.owners)]
        emptied = [t for t in tensors if not t.untyped_storage().nbytes()]
        self._stubs = make_stubs([*emptied, *aliases_of(emptied)])
        self._input_state = [
            (s, tensor, tensor._version)
            for s, tensor in self._captured.owners
            if storages[s].kind == "input" and s not in inputs and not tensor.is_inference()
        ]
        if self._captured.source is not None:
            self._captured.source.block_use()

    def restore_tensors(self) -> None:
        """Turn the stubs back into tensors, and unblock model and optimizer; call it before the bytes return."""
        for tensor, kind in self._stubs:
            tensor.__class__ = kind  # type: ignore[assignment]
        self._stubs = []
        if self._captured.source is not None:
            self._captured.source.allow_use()

    def kept_by_caller(self, s: int) -> bool:
        """Return whether the caller keeps the bytes of a storage: step inputs, and input state that is only read.

        Input state is buffers and other state of kind `input`.
        """
        read = self._captured.program.storages[s].kind == "input" and s not in self._written
        return read or s in self._captured.input_storages

    def changes(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (storage, tensor) of state of kind `input` (buffers, a learning rate) changed since the last call.

        Raises:
            StepChanged: HP512 for a tensor that the step also writes: the two values conflict.
        """
        for index, (s, tensor, version) in enumerate(self._input_state):
            if tensor._version == version:
                continue
            if s in self._written:
                raise StepChanged(
                    f"`{self._name(s)}` was modified between two steps, but the step modifies it too",
                    hint="change it inside `with step.materialized():`",
                )
            yield s, tensor
            self._input_state[index] = s, tensor, tensor._version

    def _name(self, s: int) -> str:
        return self._captured.program.storages[s].name

"""Owner tensors of a recorded step's state; changes to them are detected while a device owns the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import torch

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._tensor_stubs import aliases_of, make_stubs
from hyper_parallel.errors import StepChanged

_KEY = attrgetter("_cdata")


class Owners:
    """Tensors that own the state of a step.

    Args:
        captured: The recorded step.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._stubs: list[tuple[torch.Tensor, type]] = []
        # (storage, its tensor, its version)
        self._input_state: list[tuple[int, torch.Tensor, int]] = []
        # Checked in every step; the key identifies a torch storage.
        self._tensors = [tensor for _, tensor in captured.owners]
        self._recorded = [_KEY(captured.state[s].untyped_storage()) for s, _ in captured.owners]
        operators = captured.program.operators
        self._written = {s for operator in operators for s in operator.writes}

    def check(self) -> None:
        """Check that model and optimizer own the recorded storages and are as they were when the step was recorded.

        Raises:
            StepChanged: HP512 that names the change.
        """
        with torch._C.DisableTorchFunctionSubclass():  # only metadata of stub tensors is read
            self._check()

    def _check(self) -> None:
        if self._captured.source is not None:
            self._captured.source.check()
        keys = list(map(_KEY, map(torch.Tensor.untyped_storage, self._tensors)))
        if keys != self._recorded:
            changed = next(index for index, key in enumerate(keys) if key != self._recorded[index])
            raise StepChanged(
                f"`{self._name(self._captured.owners[changed][0])}` has another storage than in the recorded step",
                hint="change its values in place (`tensor.copy_(...)`), inside `with device.materialized():`",
            )

    def check_bytes(self, num_bytes: Callable[[torch.UntypedStorage], int]) -> None:
        """Check that every owner has its bytes, resident or evicted.

        Raises:
            StepChanged: HP512 when another offloaded step owns them.
        """
        for s, tensor in self._captured.state.items():
            if num_bytes(tensor.untyped_storage()) != self._captured.program.storages[s].num_bytes:
                raise StepChanged(
                    f"the storage of `{self._name(s)}` belongs to another offloaded step",
                    hint="call `close()` on the other `hp.offload` step first",
                )

    def make_stubs(self) -> None:
        """Turn the owners into stubs: a device owns the bytes from now on."""
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
        """Turn the stubs back into tensors: they own their bytes."""
        for tensor, kind in self._stubs:
            tensor.__class__ = kind  # type: ignore[assignment]
        self._stubs = []
        if self._captured.source is not None:
            self._captured.source.allow_use()

    def kept_by_caller(self, s: int) -> bool:
        """Return whether the caller keeps a storage: inputs of the step, and input state that it only reads."""
        read = self._captured.program.storages[s].kind == "input" and s not in self._written
        return read or s in self._captured.input_storages

    def changes(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (storage, tensor) of input state (buffers, a learning rate) that was changed since the last call.

        Raises:
            StepChanged: HP512 for a tensor that the step also writes: the two values conflict.
        """
        for index, (s, tensor, version) in enumerate(self._input_state):
            if tensor._version == version:
                continue
            if s in self._written:
                raise StepChanged(
                    f"`{self._name(s)}` was changed between two steps, and the step changes it too",
                    hint="change it with `device.write_state`, or inside `with device.materialized():`",
                )
            yield s, tensor
            self._input_state[index] = s, tensor, tensor._version

    def _name(self, s: int) -> str:
        return self._captured.program.storages[s].name

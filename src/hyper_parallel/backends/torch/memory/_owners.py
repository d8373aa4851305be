"""Owner tensors of a recorded step's state; changes to them are detected while a device owns the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import torch

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._held_tensor import hold, sharing
from hyper_parallel.errors import StepChanged

_KEY = attrgetter("_cdata")


class Owners:
    """Tensors that own the state of a step.

    Args:
        captured: The recorded step.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._held: list[tuple[torch.Tensor, type]] = []
        self._left: list[tuple[int, torch.Tensor, int]] = []  # (storage, its tensor, its version)
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
        now = list(map(_KEY, map(torch.Tensor.untyped_storage, self._tensors)))
        if now != self._recorded:
            changed = next(at for at, key in enumerate(now) if key != self._recorded[at])
            raise StepChanged(
                f"`{self._name(self._captured.owners[changed][0])}` was given another storage",
                hint="change its values in place (`tensor.copy_(...)`), inside `with device.lent():`",
            )

    def check_bytes(self, num_bytes: Callable[[torch.UntypedStorage], int]) -> None:
        """Check that every owner has its bytes, resident or evicted.

        Raises:
            StepChanged: HP512 when another planned device owns them.
        """
        for s, tensor in self._captured.state.items():
            if num_bytes(tensor.untyped_storage()) != self._captured.program.storages[s].num_bytes:
                raise StepChanged(
                    f"`{self._name(s)}` has no bytes: another device holds them",
                    hint="close the other device first",
                )

    def hold(self) -> None:
        """Turn the owners into stubs: a device owns the bytes from now on."""
        kinds, given = self._captured.program.storages, self._captured.given
        mine = [*self._captured.state.values(), *(tensor for _, tensor in self._captured.owners)]
        gone = [t for t in mine if not t.untyped_storage().nbytes()]
        self._held = hold([*gone, *sharing(gone)])
        self._left = [
            (s, tensor, tensor._version)
            for s, tensor in self._captured.owners
            if kinds[s].kind == "input" and s not in given and not tensor.is_inference()
        ]
        if self._captured.source is not None:
            self._captured.source.hold()

    def release(self) -> None:
        """Turn the stubs back into tensors: they own their bytes."""
        for tensor, kind in self._held:
            tensor.__class__ = kind  # type: ignore[assignment]
        self._held = []
        if self._captured.source is not None:
            self._captured.source.release()

    def keep(self, s: int) -> bool:
        """Return whether the caller keeps a storage: inputs of the step, and input state that it only reads."""
        read = self._captured.program.storages[s].kind == "input" and s not in self._written
        return read or s in self._captured.given

    def changes(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (storage, tensor) of input state (buffers, a learning rate) that was changed since the last call.

        Raises:
            StepChanged: HP512 for a tensor that the step also writes: the two values conflict.
        """
        for at, (s, tensor, version) in enumerate(self._left):
            if tensor._version == version:
                continue
            if s in self._written:
                raise StepChanged(
                    f"`{self._name(s)}` was changed between two steps, and the step changes it too",
                    hint="change it with `device.write_state`, or inside `with device.lent():`",
                )
            yield s, tensor
            self._left[at] = s, tensor, tensor._version

    def _name(self, s: int) -> str:
        return self._captured.program.storages[s].name

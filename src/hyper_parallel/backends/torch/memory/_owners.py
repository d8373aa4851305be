"""The tensors that own the state of a recorded step, while a device has its bytes: nobody may change them unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

import torch

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._held_tensor import hold, sharing
from hyper_parallel.errors import StepChanged

_KEY = attrgetter("_cdata")


class Owners:
    """Owners of the state of a step.

    Args:
        captured: The recorded step.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._held: list[tuple[torch.Tensor, type]] = []
        self._left: list[tuple[int, torch.Tensor, int]] = []  # (storage, its tensor, its version)
        # Looked at in every step; the key tells torch's storage from another one.
        self._tensors = [tensor for _, tensor in captured.owners]
        self._recorded = [_KEY(captured.state[s].untyped_storage()) for s, _ in captured.owners]
        operators = captured.program.operators
        self._written = {s for operator in operators for s in operator.writes}

    def check(self) -> None:
        """The state is still that of the model and the optimizer, and they are as they were when it was recorded.

        Raises:
            StepChanged: HP512 with what has changed.
        """
        with (
            torch._C.DisableTorchFunctionSubclass()
        ):  # tensors that are held are asked for nothing but facts
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
        """Every one of them has its bytes, on the device or where they are lent to.

        Raises:
            StepChanged: HP512 when another device has them.
        """
        for s, tensor in self._captured.state.items():
            if num_bytes(tensor.untyped_storage()) != self._captured.program.storages[s].num_bytes:
                raise StepChanged(
                    f"`{self._name(s)}` has no bytes: another device holds them",
                    hint="close the other device first",
                )

    def hold(self) -> None:
        """A device has the bytes from now on."""
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
        """The bytes are back."""
        for tensor, kind in self._held:
            tensor.__class__ = kind  # type: ignore[assignment]
        self._held = []
        if self._captured.source is not None:
            self._captured.source.release()

    def keep(self, s: int) -> bool:
        """A storage's bytes are the caller's: inputs, and what the step only reads of what stays with the caller."""
        read = self._captured.program.storages[s].kind == "input" and s not in self._written
        return read or s in self._captured.given

    def changes(self) -> Iterator[tuple[int, torch.Tensor]]:
        """What stays with the caller beside the inputs (buffers, a learning rate) and has new values, by storage.

        Raises:
            StepChanged: HP512 for one that the step changes itself: two values cannot both be right.
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

"""Count the bytes of every storage while a program runs, on real or on fake tensors.

The counter sits below autograd: it sees every operator of forward, backward, FSDP, clipping and optimizer with plain
local tensors, and follows storages with weak references, so a byte is live exactly as long as Python and autograd
keep it. Storages that are resized in place (FSDP frees gathered parameters that way) are looked at again after every
operator.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch._ledger import Ledger, Record
from hyper_parallel.backends.torch.memory._fake_values import fake_mode, run

Workspace = Callable[[Any, tuple[Any, ...], dict[str, Any]], int]
"""Bytes that a kernel takes inside itself: operator, arguments, keyword arguments."""

_GATHERED = "init_all_gather_outputs"
"""Function of FSDP that makes the tensors whose storages it later frees and fills again in place."""
_SHAPES = "torch.distributed.tensor._sharding_prop"
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class MemoryCounter(TorchDispatchMode):
    """Context in which every storage is written into a ledger.

    Args:
        ledger: Where to.
        workspace: Bytes that operators take inside themselves; None: not counted.

    Attributes:
        operators: Operators that ran, views included.
        found_late: Storages whose first change of size was seen only when the next piece of the program began.
    """

    def __init__(self, ledger: Ledger, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.ledger = ledger
        self._workspace = workspace
        self._records: dict[int, Record] = {}
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._resizable: dict[int, Record] = {}
        self._fake: Any = None
        self.operators = 0
        self.found_late = 0

    def __enter__(self) -> MemoryCounter:
        self._fake = fake_mode()
        return super().__enter__()

    def register(self, tensor: Tensor, made_by: str, mark: str) -> None:
        """Say what a tensor's storage holds; takes it in when it is not known yet."""
        record = self._see(tensor, made_by)
        known = record.made_by if record.mark == mark else made_by
        if known != made_by:  # several tensors on one storage
            record.made_by = _common(known, made_by)
            record.shape = (tensor.untyped_storage().nbytes() // tensor.element_size(),)
            return
        record.made_by, record.mark = made_by, mark
        record.shape, record.dtype = tuple(tensor.shape), _dtype(tensor)

    def enter(self, segment: str) -> None:
        """Say that another piece of the program begins, and look for sizes that changed unseen."""
        for key in [
            k for k, ref in self._watch.items() if _size(ref) != self._records[k].num_bytes
        ]:
            self._resizable[key] = self._records[key]
        self._poll()
        self.ledger.enter(segment)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor: its local operators come here next
        kwargs = kwargs or {}
        if fake_mode() is not self._fake or _asks_for_a_shape():
            return func(*args, **kwargs)
        self.operators += 1
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func.namespace in _COLLECTIVES or func.namespace == "fsdp":
            self._communicates(func, tensors)
        self._poll()
        if self._workspace is not None:
            hidden = self._workspace(func, args, kwargs)
        out = run(func, tensors, args, kwargs)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor, func)
        if self._workspace is not None and hidden:
            self.ledger.spike(hidden, f"inside {_name(func)}")
        return out

    def _see(self, tensor: Tensor, made_by: Any) -> Record:
        storage = tensor.untyped_storage()
        key = storage._cdata
        record = self._records.get(key)
        if record is not None:
            return record
        name = made_by if isinstance(made_by, str) else _name(made_by)
        backward = torch._C._current_graph_task_id() != -1
        record = self.ledger.open(
            storage.nbytes(), name, tuple(tensor.shape), _dtype(tensor),
            backward and torch.is_grad_enabled(),
        )  # fmt: skip
        self._records[key] = record
        if made_by is torch.ops.aten.empty.memory_format and called_from(_GATHERED):
            record.mark = "gathered parameters"
            self._resizable[key] = record

        def gone(_: Any) -> None:
            self._watch.pop(key, None)
            self._resizable.pop(key, None)
            self.ledger.close(self._records.pop(key))

        self._watch[key] = weakref.ref(storage, gone)
        return record

    def _communicates(self, func: Any, tensors: list[Tensor]) -> None:
        """Note the buffers of a collective; of FSDP's own operators the one that all ranks share is the first."""
        for tensor in tensors[:1] if func.namespace == "fsdp" else tensors:
            self._see(tensor, func).sent = True

    def _poll(self) -> None:
        for key, record in self._resizable.items():
            size = _size(self._watch[key])
            if size != record.num_bytes:
                self.ledger.resize(record, size)


def _asks_for_a_shape() -> bool:
    """DTensor runs an operator on the whole, fake tensors for the shape of its result, once per shape in a process.

    It does so in the running fake mode or one of its own, which depends on torch's version; a real run takes no bytes.
    """
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == _SHAPES:
            return True
        if not module.startswith("torch."):
            return False
        frame = frame.f_back
    return False


def called_from(name: str) -> bool:
    """A function of this name is among the innermost callers."""
    frame = sys._getframe(1)
    for _ in range(12):
        if frame is None or frame.f_code.co_name == name:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == name


def _common(first: str, second: str) -> str:
    """The leading parts that two dotted names share, and a star."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    same = [a for a, b in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return ".".join([*same, "*"])


def _size(reference: weakref.ref[Any]) -> int:
    storage = reference()
    return 0 if storage is None else storage.nbytes()


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

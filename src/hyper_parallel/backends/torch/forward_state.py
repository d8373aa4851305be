"""State that a forward pass leaves on modules and that no checkpoint holds: a pass must not depend on earlier ones.

Rotary embeddings of `rope_type: dynamic` keep the longest text that they have seen, and the frequencies that belong to
it. What a rank has read before, an evaluation, or a resume would then change the numbers of a run. Here such a module
begins every call of its forward as it was before the first one. It is a function of its inputs alone, also where
recomputation or a pipeline runs passes in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

Values = dict[tuple[str, str], Any]
"""Kind (`buffer` or `attribute`) and name of what a module holds, with its value."""

_BUFFER, _ATTRIBUTE = "buffer", "attribute"
_MARKER: Final = "max_seq_len_cached"
"""End of the name of the attribute that rotary embeddings keep their longest text in."""


def reset_before_calls(model: nn.Module) -> None:
    """Let every rotary embedding of a model begin each call of its forward with the state before its first call."""
    for module in model.modules():
        if any(name.endswith(_MARKER) for name in vars(module)):
            _ResetState().attach(module)


def changed_state(model: nn.Module, run_forward: Callable[[], object]) -> tuple[str, ...]:
    """Return the names of buffers and attributes that a forward pass changes and no checkpoint holds.

    Args:
        model: Any module with real buffers.
        run_forward: Runs a pass of it.
    """
    modules = dict(model.named_modules())
    before = {path: _copied(_values(module)) for path, module in modules.items()}
    run_forward()
    names = []
    for path, module in modules.items():
        after = _values(module)
        for kind, name in {**before[path], **after}:
            if kind == _BUFFER and name not in module._non_persistent_buffers_set:
                continue
            old, new = (values.get((kind, name)) for values in (before[path], after))
            if not _equal(old, new):
                names.append(f"{path}.{name}".lstrip("."))
    return tuple(sorted(names))


class _ResetState:
    """State of one module before and after a call of its forward.

    The state after a call is put back to the state before it. A state that something else has set since, such as a move
    to another device, becomes the new state before a call.
    """

    def __init__(self) -> None:
        self._before: Values = {}
        self._after: Values | None = None

    def attach(self, module: nn.Module) -> None:
        """Reset a module whenever its forward begins."""
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, _: Any) -> None:
        now = _values(module)
        if self._after is None or not _same(now, self._after):
            self._before = now
            return
        for kind, name in now:
            if (kind, name) not in self._before:
                del (module._buffers if kind == _BUFFER else vars(module))[name]
        for (kind, name), value in self._before.items():
            (module._buffers if kind == _BUFFER else vars(module))[name] = value

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        self._after = _values(module)


def _values(module: nn.Module) -> Values:
    """Return the buffers, and the numbers, texts and tensors among the attributes, of one module."""
    held: Values = {(_BUFFER, name): buffer for name, buffer in module._buffers.items()}
    for name, value in vars(module).items():
        if name == "training":  # a mode, which others set
            continue
        if value is None or isinstance(value, (bool, int, float, str, Tensor)):
            held[_ATTRIBUTE, name] = value
    return held


def _copied(values: Values) -> Values:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def _same(values: Values, others: Values) -> bool:
    """Whether the very same objects are held."""
    return values.keys() == others.keys() and all(others[k] is v for k, v in values.items())


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    return type(value) is type(other) and value == other

"""Reset of module state that a forward pass changes and no checkpoint contains, so that passes are independent.

Rotary embeddings of `rope_type: dynamic` store the length of the longest earlier sequence, and frequencies for this
length. Therefore every call starts from the state that the module had before its first call.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn

Values = dict[tuple[str, str], Any]
"""State of a module: values by kind (`buffer` or `attribute`) and name."""

BUFFER, _ATTRIBUTE = "buffer", "attribute"
_MARKER: Final = "max_seq_len_cached"
"""Suffix of the attribute in which rotary embeddings store the length of the longest sequence."""


def reset_before_calls(model: nn.Module) -> None:
    """Make every rotary embedding with state start each call from the state before its first call."""
    for module in model.modules():
        if any(name.endswith(_MARKER) for name in vars(module)):
            _ResetState(module)


class _ResetState:
    """State of a module before its first call, which is restored before every later call.

    If other code changes the state between two calls, for example by a move to another device, the changed state is
    restored from then on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: Values = {}
        self._after: Values | None = None
        module.register_forward_pre_hook(self._begin)
        module.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, _: Any) -> None:
        now = state_of(module)
        if self._after is None or not _same(now, self._after):
            self._before = now
            return
        for kind, name in now:
            if (kind, name) not in self._before:
                del (module._buffers if kind == BUFFER else vars(module))[name]
        for (kind, name), value in self._before.items():
            (module._buffers if kind == BUFFER else vars(module))[name] = value

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        self._after = state_of(module)


def state_of(module: nn.Module) -> Values:
    """Return the buffers of one module, and its attributes that are numbers, strings, tensors or None."""
    state: Values = {(BUFFER, name): buffer for name, buffer in module._buffers.items()}
    for name, value in vars(module).items():
        if name == "training":  # set by the caller, not by forward
            continue
        if value is None or isinstance(value, (bool, int, float, str, Tensor)):
            state[_ATTRIBUTE, name] = value
    return state


def _same(first: Values, second: Values) -> bool:
    """Return whether two states have the same names and the very same objects, without comparing values."""
    return first.keys() == second.keys() and all(second[k] is v for k, v in first.items())

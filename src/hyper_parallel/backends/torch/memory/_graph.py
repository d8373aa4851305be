"""The graph of a recorded step: what its backward part keeps is decided anew, over all storages.

Autograd decides operator by operator what to save. A recorded step shows all of it at once, so `cut_program` decides
for the whole, and the calls behind repeated operators follow. Kernels and bits are those of the recorded step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch.utils._pytree import tree_map_only

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._operators import Call, View
from hyper_parallel.memory import cut_program


def as_graph(captured: Captured) -> Captured:
    """The same step with the least kept from forward to backward; see `cut_program`."""
    cut = cut_program(captured.program)
    calls = tuple(
        _on(captured.calls[index], names)
        for index, names in zip(cut.origins, cut.renamed, strict=True)
    )
    return replace(captured, program=cut.program, calls=calls)


def _on(call: Call, names: Mapping[int, int]) -> Call:
    """The call on other storages."""
    if not names:
        return call

    def view(old: View) -> View:
        return replace(old, storage=names.get(old.storage, old.storage))

    args, kwargs = tree_map_only(View, view, (call.args, call.kwargs))
    made: tuple[tuple[int, Any], ...] = tuple((i, view(v)) for i, v in call.made)
    return replace(call, args=args, kwargs=kwargs, made=made)

"""Execution of the towers of one rank in one step: in rounds, or under a joint schedule; see `exchange`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn

from hyper_parallel.backends.torch.collectives import all_reduce
from hyper_parallel.backends.torch.pipeline.apply import Span
from hyper_parallel.backends.torch.shared_gradients import divide_gradients, sum_gradients
from hyper_parallel.backends.torch.submodels.exchange import Submodels, is_trained
from hyper_parallel.errors import CollectiveMismatch
from hyper_parallel.ir import Action, Purpose

_Served = Sequence[Sequence[Mapping[str, Any] | None]]


class Rounds:
    """Towers that compute in rounds, between the microbatches of the language part; see `Tower.serve`.

    `served` are the microbatches of each tower, from `Submodels.divided`.
    """

    # Without a joint schedule, the language part has its own schedule, and `Border.owner` selects the tower's ranks.
    actions: Sequence[Action] | None = None
    owner: Callable[[int, int], int] | None = None

    def __init__(
        self,
        submodels: Submodels,
        served: _Served,
        span: Span,
        train: bool,
        deferred: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> None:
        self._language = submodels.language
        self._running = [
            tower.serve(part, batches, span, train, deferred)
            for (part, tower), batches in zip(submodels.towers, served, strict=True)
        ]

    def _advance(self) -> None:
        """Run the passes of every tower up to the next microbatch of the language part, or to the end of the step."""
        self._running = [tower for tower in self._running if next(tower, None) is not None]

    def begin(self, index: int) -> None:
        """Run the towers' passes before microbatch `index` of the language part, and select it for the forward."""
        self._advance()
        if self._language is not None:
            self._language[1].begin(index)

    def run(self, action: Action) -> None:
        """Raise AssertionError, because a tower in rounds has no actions."""
        raise AssertionError(f"{action} is no action of a round")

    def end(self) -> None:
        """Run all remaining passes of the towers."""
        while self._running:
            self._advance()


class Joint:
    """Tower under a joint schedule with the pipeline of the language part; arguments as for `Rounds`.

    `count` is the number of microbatches of the step. The microbatches of other ranks are None in `served`.

    Raises:
        CollectiveMismatch: HP622 for a tower that was frozen when the model was parallelized and is not any more.
    """

    def __init__(
        self,
        submodels: Submodels,
        count: int,
        served: _Served,
        span: Span,
        train: bool,
        deferred: Callable[[nn.Module], AbstractContextManager[None]],
    ) -> None:
        assert submodels.joint is not None
        self._joint, self._language = submodels.joint, submodels.language
        self.actions = self._joint.actions(count, train)
        self._owners, self._deferred = self._joint.owners(count), deferred
        self._backwards = sum(a.stage < 0 and a.kind in ("B", "W") for a in self.actions)
        self._span, self._trains, self._batches = span, False, served[0] if served else ()
        self._tower = next(iter(submodels.towers), None)
        if self._tower is None:
            return
        part = self._tower[0]
        self._trains = train and is_trained(part)
        if self._trains and self._joint.frozen:
            raise CollectiveMismatch(
                "an encoder that was frozen when the model was parallelized has trained parameters",
                where=f"rank {dist.get_rank()}",
                allowed="the same frozen parameters as in hp.parallelize_submodels",
                hint="encoder.requires_grad_(False)",
            )
        if self._trains and self._joint.copies is not None:
            divide_gradients([*part.parameters()], self._joint.copies.size())

    def owner(self, _: int, index: int) -> int:
        """Return the world rank that computes the features of microbatch `index` of this rank's share."""
        return self._owners[index]

    def begin(self, index: int) -> None:
        """Select the microbatch of the next forward on a language stage that reads features."""
        assert self._language is not None
        self._language[1].begin(index)

    def run(self, action: Action) -> None:
        """Run an action of the tower; actions without a microbatch of this rank compute no features."""
        assert self._tower is not None
        assert action.microbatch is not None
        (part, tower), i, batches = self._tower, action.microbatch, self._batches
        self._backwards -= action.kind in ("B", "W")
        with self._deferred(part) if self._backwards else nullcontext():
            if action.kind == "F":
                batch = batches[i] if i < len(batches) else None
                source = None if batch is None else (self._joint.place[0], i)
                tower.forward(part, batch, i, source, self._span, self._trains)
            elif action.kind in ("B", "W"):
                tower.backward(i, self._span)

    def end(self) -> None:
        """Run all actions on a rank without the language part, then sum the gradients of the tower's copies."""
        for action in self.actions if self._language is None else ():
            self.run(action)
        copies = self._joint.copies
        if self._trains and self._tower is not None and copies is not None:
            params = [p for p in self._tower[0].parameters() if p.requires_grad]
            with self._span("gradient reduction", "communication"):
                sum_gradients(
                    params,
                    lambda flat: all_reduce(flat, copies, Purpose.REPLICA_GRADIENTS),
                    self._joint.reduce_dtype,
                )

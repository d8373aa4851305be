"""Execution of step programs on the microbatches of a step, in sequence or in the order of a pipeline schedule.

A step program is a graph of tensor operators that another framework compiles (see `step_programs`). Each pipeline rank
has one stage with two programs. `loss` runs forward: it computes the activations `sent` to the next stage or, on the
last stage, the loss. `gradients` repeats the forward and runs backward, so only the stage's input is kept in between.
All stages but the last read the gradient of `sent` as `batch.gradient`. All stages but the first return the gradient of
`batch.received`. Torch sends activations and gradients between ranks through host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyper_parallel.backends.program_runner import CompiledProgram, ProgramRunner
from hyper_parallel.ir import Schedule, Strategy
from hyper_parallel.mpmd import forward_schedule, one_by_one, step_schedule

Values = Mapping[str, Any]
"""Arrays of the framework by name."""


class SerialPasses:
    """Runner of the compiled programs `loss` and `gradients` without pipeline: one microbatch after the other."""

    def __init__(self, runner: ProgramRunner, programs: Mapping[str, CompiledProgram]) -> None:
        self._runner, self._programs = runner, programs

    def train(
        self, parameters: Values, sums: Values, batches: Sequence[Values]
    ) -> tuple[float, Values]:
        """Run forward and backward of all microbatches.

        Args:
            parameters: Parameters, by name `param.NAME`.
            sums: Gradient sums to which the gradients are added, by name `sum.NAME`.
            batches: Input arrays of each microbatch, by name `batch.NAME`.

        Returns:
            Summed loss of the microbatches, and the new gradient sums.
        """
        loss = 0.0
        for batch in batches:
            results = self._programs["gradients"]({**parameters, **sums, **batch})
            loss += float(self._runner.array(results.pop("loss")))
            sums = results
        return loss, sums

    def evaluate(self, parameters: Values, batches: Sequence[Values]) -> float:
        """Run forward of all microbatches; return their summed loss."""
        losses = (self._programs["loss"]({**parameters, **batch})["loss"] for batch in batches)
        return sum(float(self._runner.array(loss)) for loss in losses)


class PipelinePasses(SerialPasses):
    """Runner of one pipeline stage's step programs in the order of a pipeline schedule.

    The strategy has one stage per rank and no axis except pp, so `rank` is also the index of the stage. `shape` is the
    shape of the activations between stages.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        programs: Mapping[str, CompiledProgram],
        strategy: Strategy,
        rank: int,
        shape: tuple[int, ...],
    ) -> None:
        super().__init__(runner, programs)
        self._strategy, self._rank, self._shape = strategy, rank, shape
        self._is_first, self._is_last = rank == 0, rank == strategy.pp - 1

    def train(
        self, parameters: Values, sums: Values, batches: Sequence[Values]
    ) -> tuple[float, Values]:
        """Run this stage's part of a step; see `SerialPasses.train`. The loss is 0.0 except on the last stage."""
        schedule = one_by_one(step_schedule(self._strategy, len(batches)))
        inputs: dict[int, Values] = {}
        loss = 0.0

        def forward(i: int, received: Any) -> Any:
            inputs[i] = batches[i] if self._is_first else {**batches[i], "batch.received": received}
            if self._is_last:
                return None
            return self._programs["loss"]({**parameters, **inputs[i]})["sent"]

        def backward(i: int, gradient: Any) -> Any:
            nonlocal loss, sums
            own = {} if self._is_last else {"batch.gradient": gradient}
            results = self._programs["gradients"]({**parameters, **sums, **inputs.pop(i), **own})
            value = results.pop("loss")
            loss += float(self._runner.array(value)) if self._is_last else 0.0
            message = results.pop("grad.received", None)
            sums = results
            return message

        self._run(schedule, {"F": forward, "B": backward, "I": backward})
        return loss, sums

    def evaluate(self, parameters: Values, batches: Sequence[Values]) -> float:
        """Run this stage's part of a forward pass; the loss is 0 except on the last stage."""
        losses = []

        def forward(i: int, received: Any) -> Any:
            own = {} if self._is_first else {"batch.received": received}
            results = self._programs["loss"]({**parameters, **batches[i], **own})
            if self._is_last:
                losses.append(float(self._runner.array(results["loss"])))
            return results.get("sent")

        self._run(forward_schedule(self._strategy, len(batches)), {"F": forward})
        return sum(losses)

    def _run(self, schedule: Schedule, compute: Mapping[str, Any]) -> None:
        """Run this rank's actions of a schedule by the functions `compute`, keyed by action kind (F, B, I).

        Each function takes a microbatch index and the received tensor or None, and returns the tensor to send or None.
        """
        arriving: dict[tuple[str, int], tuple[Tensor, Any]] = {}
        results: dict[tuple[str, int], Any] = {}
        sending: list[tuple[Tensor, Any]] = []
        for leaf in (leaf for a in schedule.ranks[self._rank] for leaf in a.leaves):
            kind, i = leaf.kind, leaf.microbatch
            if i is None or kind == "W":  # action I has already computed the weight gradients
                continue
            step = 1 if kind[-1] == "F" else -1
            if kind.startswith("RECV"):
                buffer = torch.empty(self._shape)
                arriving[kind[-1], i] = buffer, dist.irecv(buffer, self._rank - step)
            elif kind.startswith("SEND"):
                tensor = torch.from_numpy(self._runner.array(results.pop((kind[-1], i))))
                sending.append((tensor, dist.isend(tensor, self._rank + step)))
            else:
                direction = "F" if kind == "F" else "B"
                results[direction, i] = compute[kind](i, self._take(arriving, (direction, i)))
        for _, work in sending:
            work.wait()

    def _take(
        self, arriving: dict[tuple[str, int], tuple[Tensor, Any]], key: tuple[str, int]
    ) -> Any:
        """Wait for a received tensor and return it as the framework's array; None if the stage receives none."""
        if key not in arriving:
            return None
        buffer, work = arriving.pop(key)
        work.wait()
        return self._runner.value(buffer.numpy())

"""Execution of step programs on the microbatches of a step, in the order of the schedule.

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


class ProgramPasses:
    """Runner of the compiled programs `loss` and `gradients` of one rank, in the order of the schedule.

    With a pipeline, the strategy has one stage per rank and no axis except pp, so the rank is also the index of the
    stage. Without a pipeline, every rank runs one microbatch after the other.

    Args:
        runner: Interface to the framework.
        programs: Compiled programs by name.
        strategy: Strategy of all ranks.
        rank: Pipeline rank; 0 without a pipeline.
        shape: Shape of the activations between stages; () without a pipeline.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        programs: Mapping[str, CompiledProgram],
        strategy: Strategy,
        rank: int,
        shape: tuple[int, ...],
    ) -> None:
        self._runner, self._programs = runner, programs
        self._strategy, self._rank, self._shape = strategy, rank, shape
        self._is_first, self._is_last = rank == 0, rank == strategy.pp - 1

    def train(self, parameters: Values, sums: Values, batches: Sequence[Values]) -> tuple[float, Values]:
        """Run this stage's forward and backward of all microbatches.

        Args:
            parameters: Parameters, by name `param.NAME`.
            sums: Gradient sums to which the gradients are added, by name `sum.NAME`.
            batches: Input arrays of each microbatch, by name `batch.NAME`.

        Returns:
            Summed loss of the microbatches, 0.0 except on the last stage, and the new gradient sums.
        """
        schedule = one_by_one(step_schedule(self._strategy, len(batches)))
        inputs: dict[int, Values] = {}
        loss = 0.0

        def forward(i: int, received: Any) -> Any:
            inputs[i] = self._inputs(batches[i], received)
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
        """Run this stage's forward of all microbatches; return their summed loss, 0 except on the last stage."""
        losses = []

        def forward(i: int, received: Any) -> Any:
            results = self._programs["loss"]({**parameters, **self._inputs(batches[i], received)})
            if self._is_last:
                losses.append(float(self._runner.array(results["loss"])))
            return results.get("sent")

        self._run(forward_schedule(self._strategy, len(batches)), {"F": forward})
        return sum(losses)

    def _inputs(self, batch: Values, received: Any) -> Values:
        return batch if self._is_first else {**batch, "batch.received": received}

    def _run(self, schedule: Schedule, compute: Mapping[str, Any]) -> None:
        """Run this rank's actions of a schedule with the functions in `compute`, keyed by action kind (F, B, I).

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
                direction, received = "F" if kind == "F" else "B", None
                if (direction, i) in arriving:
                    buffer, work = arriving.pop((direction, i))
                    work.wait()
                    received = self._runner.value(buffer.numpy())
                results[direction, i] = compute[kind](i, received)
        for _, work in sending:
            work.wait()

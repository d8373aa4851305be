"""Step programs of one pipeline stage.

The forward computes the activations `sent` to the next stage from those `received`. Backward repeats it: it is the
gradient of the product of `sent` with its own gradient, which the next stage returns as that of `received`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hyper_parallel.backends.step_program import StepProgram
from hyper_parallel.backends.torch.parallel_handle import handle
from hyper_parallel.backends.torch.program_capture import capture_gradients, capture_loss

_TOKENS = ("input_ids", "position_ids")
"""Arguments of the model on stages that compute no loss."""


def capture_stage(
    model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor]
) -> tuple[StepProgram, StepProgram]:
    """Return the programs of forward, and of loss and gradients, of the stage of a pipeline rank.

    Args:
        model: Parallelized model whose rank has one stage.
        batch: Arguments of `loss` by name: `input_ids` and more.
        loss: Function of the model and the batch, by keyword, that the last stage runs.

    Returns:
        Program with the output `sent`, or `loss` on the last stage, and that of `capture_gradients`. Further inputs are
        `batch.received` on stages other than the first one, whose gradient is the output `grad.received`, and
        `batch.gradient` for gradients on stages other than the last one.
    """
    parallel = handle(model)
    assert parallel.pipeline is not None
    stages, stage = parallel.pipeline.stages, parallel.ranks.rank
    is_last = stage == parallel.pipeline.last
    message = torch.zeros(*batch["input_ids"].shape, *stages.tail, dtype=stages.dtype)
    received = {"received": message} if stage else {}
    gradient = {} if is_last else {"gradient": message}

    def forward(
        model: nn.Module,
        received: Tensor | None = None,
        gradient: Tensor | None = None,
        **inputs: Tensor,
    ) -> Tensor:
        with stages.running.run(stage, received):
            if is_last:
                return loss(model, **inputs)
            model(**{k: inputs[k] for k in _TOKENS if k in inputs}, use_cache=False)
            sent = stages.running.output
        assert sent is not None
        return sent if gradient is None else (sent * gradient).sum()

    own, output = batch | received, "loss" if is_last else "sent"
    return (
        capture_loss(model, own, forward, output=output),
        capture_gradients(model, own | gradient, forward, differentiated=[*received]),
    )

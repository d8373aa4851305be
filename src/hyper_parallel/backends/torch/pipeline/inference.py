"""Forward pass through the stages of a pipeline in sequence, without backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch.collectives import purpose
from hyper_parallel.backends.torch.pipeline.apply import Pipeline
from hyper_parallel.backends.torch.tensor.state import PassShape
from hyper_parallel.ir import Purpose


def run_stages(pipeline: Pipeline, model: nn.Module, inputs: Mapping[str, Any]) -> Tensor | None:
    """Run the stages in sequence; return the logits on the rank of the last stage, None on others.

    All ranks pass the same inputs.
    """
    stages, rank = pipeline.stages, pipeline.rank
    hidden: Tensor | None = None
    logits: Tensor | None = None
    for stage in range(pipeline.last + 1):
        if stages.rank_of[stage] != rank:
            continue
        if stage and (source := stages.rank_of[stage - 1]) != rank:
            hidden = pipeline.message(inputs)
            dist.recv(hidden, group=pipeline.group, group_src=source)
        if pipeline.tp is not None:
            # Set by the model's first layer otherwise
            pipeline.tp.shape = PassShape(pipeline.tokens(inputs))
        running = stages.running
        with running.run(stage, hidden), running.trace_media(model, inputs):
            output = model(**inputs)
            hidden = running.output
        if stage == pipeline.last:
            logits = output.logits
        elif (target := stages.rank_of[stage + 1]) != rank:
            assert hidden is not None
            with purpose(Purpose.PIPELINE_ACTIVATIONS):
                dist.send(hidden.contiguous(), group=pipeline.group, group_dst=target)
    return logits

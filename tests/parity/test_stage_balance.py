"""The auxiliary loss of experts over pipeline stages against one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, end_step, forward_backward, launch, parallelize
from tests.parity.universal import Reference, Setup, check
from tests.slow import slow_cells

pytestmark = pytest.mark.parity

S = Strategy
AUX = (("output_router_logits", True), ("router_aux_loss_coef", 0.5))


class _Dealt(Setup):
    """One device whose i-th microbatch has the i-th sequence of each of two data ranks."""

    def batch(self) -> dict[str, Tensor]:
        return {k: torch.stack(v.chunk(2), 1).flatten(0, 1) for k, v in super().batch().items()}


@slow_cells("True")
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_auxiliary_loss_passes_over_pipeline_stages(few: bool) -> None:
    """Some stages have no experts, all need the load of the others; the loss is that of all data ranks together."""
    mixed = (*AUX, ("num_hidden_layers", 4), ("decoder_sparse_step", 2))
    alone = Setup("qwen3_moe", sequences=4, seq_len=15, accumulation=4, config=mixed)
    shared = {"family": "mixtral", "sequences": 8, "accumulation": 4}
    shared["config"] = (*AUX, ("num_hidden_layers", 4))
    cases = [
        (Reference(alone), (
            S(pp=4, schedule="1f1b"),
            S(pp=2, tp_x=2, ep=2, schedule="zb-h1"),
            S(pp=2, cp=2, schedule="dualpipev", virtual_stages=2, recompute="full"),
        )),
        (Reference(_Dealt(**shared)).of(Setup(**shared)), (
            S(pp=2, dp_shard=2, ep=2, schedule="zbv", virtual_stages=2),
            S(pp=2, dp_replicate=2, schedule="interleaved", virtual_stages=2),
        )),
    ]  # fmt: skip

    def rank(_: int) -> list[float | None]:
        with World.join("cpu") as world:
            for expected, strategies in cases:
                for strategy in strategies[:1] if few else strategies[1:]:
                    check(expected, strategy, world, bytes_too=False)
            return [_mean_aux(alone, strategy, world) for strategy in (S(dp_shard=4), S(pp=4))]

    found = launch(rank, 4, timeout_s=100)
    assert found == [found[0]] * 4
    assert found[0][0] == pytest.approx(found[0][1], rel=1e-12)


def _mean_aux(setup: Setup, strategy: Strategy, world: World) -> float | None:
    """The auxiliary loss of a step in which every data rank sees the same four microbatches."""
    plan = replace(setup, sequences=4 * strategy.dp).plan(strategy)
    model = parallelize(setup.build(), plan, world)
    parts = [{k: v[i : i + 1] for k, v in setup.batch().items()} for i in range(4)]
    forward_backward(model, parts, 100)
    return end_step(model).aux_loss

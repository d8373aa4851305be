"""Short training steps of small models with several layouts on the ranks of this machine, timed.

All models are there at once and take their steps in turn, round after round, and the fastest round counts: what else
the machine does meets all layouts alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from hyper_parallel.backends.torch import clip_grad_norm_, forward_backward, materialize
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec, spec_from_config
from hyper_parallel.planner import plan as make_plan
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.topology import Supernode

_ROUNDS: Final = 3
_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class Probe:
    """One layout of one small model.

    Attributes:
        config: Its config, as in a `config.json`.
        plan_model: The same as the planner sees it.
        plan: What runs.
    """

    config: dict[str, Any]
    plan_model: ModelSpec
    plan: Plan


def make_probes(supernode: Supernode) -> list[Probe]:
    """Layouts that tell the constants of a machine apart; the first two differ in their layers only.

    Width tells work from operators, layers and microbatches tell what comes per layer and per step, and every axis
    that the ranks allow has its turn.
    """
    ranks, kind = supernode.num_devices, supernode.device.kind
    narrow, wide = (64, 256) if kind == "cpu" else (512, 2048)
    made = [_probe(supernode, narrow, layers, Strategy(dp_replicate=ranks), 1) for layers in (2, 6)]
    if kind != "cpu":
        return made
    made.append(_probe(supernode, narrow, 4, Strategy(dp_replicate=ranks), 3))
    made.append(_probe(supernode, wide, 2, Strategy(dp_replicate=ranks), 1))
    if ranks > 1:
        made.append(_probe(supernode, narrow, 4, Strategy(dp_shard=ranks), 2))
        made.append(_probe(supernode, wide, 2, Strategy(dp_shard=ranks), 2))
    if ranks % 2 == 0:
        rest = ranks // 2
        halves = (
            Strategy(dp_replicate=rest, tp_x=2),
            Strategy(dp_replicate=rest, cp=2),
            Strategy(dp_replicate=rest, cp=2, cp_kind="ulysses"),
            Strategy(dp_replicate=rest, pp=2),
        )
        made += [_probe(supernode, narrow, 4, half, 2) for half in halves]
        made.append(_probe(supernode, wide, 2, Strategy(dp_replicate=rest, tp_x=2), 1))
        made.append(_probe(supernode, wide, 4, Strategy(dp_replicate=rest, pp=2), 4))
    if ranks % 4 == 0:
        rest = ranks // 4
        both = Strategy(dp_replicate=rest, tp_x=2, tp_y=2)
        made.append(_probe(supernode, narrow, 4, both, 2))
        made.append(_probe(supernode, narrow, 4, Strategy(dp_replicate=rest, cp=4), 2))
        made.append(_probe(supernode, narrow, 4, Strategy(dp_replicate=rest, tp_x=4), 2))
    return made


def _probe(
    supernode: Supernode, width: int, layers: int, strategy: Strategy, microbatches: int
) -> Probe:
    cpu = supernode.device.kind == "cpu"
    config = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    workload = Workload(
        256, microbatch=1, accumulation_steps=microbatches, compute_dtype="float32" if cpu else "bfloat16"
    ).resolve(strategy.dp)  # fmt: skip
    spec = spec_from_config(config, name=f"calibration, {layers} layers of width {width}")
    return Probe(config, spec, make_plan(spec, supernode, workload, strategy=strategy))


def time_probes(probes: Sequence[Probe], world: World) -> list[float]:
    """Seconds per step of every probe on this rank, of the fastest round."""
    runs = [_Run(probe, world) for probe in probes]
    rounds = [[run.turn() for run in runs] for _ in range(_ROUNDS + 1)]
    return [min(turns) for turns in zip(*rounds[1:], strict=True)]


class _Run:
    """One probe on this rank."""

    def __init__(self, probe: Probe, world: World) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            config = AutoConfig.for_model(**probe.config)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        parallelize(model, probe.plan, world)
        materialize(model, seed=0, device=world.device)
        self._model, self._world = model, world
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        work = probe.plan.workload
        tokens = torch.arange(work.seq_len, device=world.device)[None] % 1000
        self._batches = [{"input_ids": tokens, "shift_labels": tokens}] * (
            work.accumulation_steps or 1
        )
        self._tokens = work.tokens_per_step or 1

    def turn(self) -> float:
        """Mean seconds of some steps after a barrier."""
        if self._world.world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(_STEPS):
            loss = forward_backward(self._model, self._batches, self._tokens)
            clip_grad_norm_(self._model, 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            float(loss)  # waits for the device
        return (time.perf_counter() - start) / _STEPS

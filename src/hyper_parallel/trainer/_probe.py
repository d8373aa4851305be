"""Timing of short training steps of small models, with several layouts on the ranks of this machine.

All models of one start are resident at once and run their steps in turn, round after round; the fastest round counts.
Other load on the machine therefore affects all layouts alike.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyper_parallel.backends.torch import clip_grad_norm_, forward_backward, materialize
from hyper_parallel.ir import Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec, spec_from_config
from hyper_parallel.planner import plan as make_plan
from hyper_parallel.runtime import World, parallelize
from hyper_parallel.topology import Supernode

_NARROW: Final = 64
_WIDE: Final = 256
_MANY_RANKS: Final = 4
"""Number of ranks above which probes have fewer layers."""
AT_ONCE: Final = 5
"""Probes of one start: dozens of resident models and process groups slow a rank by a factor of up to three."""
_MIN_ROUNDS: Final = 3
_MAX_ROUNDS: Final = 15
_BUDGET_S: Final = 2.0
"""Seconds after which only the minimum number of rounds runs."""

_Row = tuple[int, int, Mapping[str, Any], int, int, bool]


@dataclass(frozen=True, slots=True)
class Probe:
    """Layout of a small model.

    Attributes:
        config: Config of the model, as in a `config.json`.
        plan_model: Model as read by the planner.
        plan: Plan to run.
    """

    config: dict[str, Any]
    plan_model: ModelSpec
    plan: Plan


def make_probes(supernode: Supernode, *, short: bool = False) -> list[Probe]:
    """Return layouts that separate the constants of a machine; the first two differ only in their layers.

    Width separates the time of FLOPs from that of operators. Layers and microbatches separate costs per layer from
    costs per step. Every axis that fits the ranks has a probe.

    Args:
        supernode: The machine.
        short: On a CPU only dense models, and only the axes dp_replicate, dp_shard, tp_x, cp and pp.
    """
    ranks, kind = supernode.num_devices, supernode.device.kind
    if kind != "cpu":
        return [_probe(supernode, 512, layers, {}, 1) for layers in (2, 6)]
    # Width, layers, degrees except dp_replicate, microbatches, sequences per microbatch, experts.
    repeats = 2 if ranks <= _MANY_RANKS else 1
    rows: list[_Row] = [
        (_NARROW, 1, {}, 1, 1, False), (_NARROW, 3, {}, 1, 1, False), (_NARROW, 2, {}, 3, 1, False),
        (_WIDE, 2, {}, 1, 1, False), (_WIDE, 2, {}, 1, 2, False), (_NARROW, 2, {}, 1, 1, True),
        (_WIDE, 2, {}, 1, 1, True),
    ]  # fmt: skip
    widths = (_NARROW, _WIDE)
    if short:
        rows = [rows[0], rows[1], rows[3]]
        if ranks > 1:
            rows += [(w, repeats, {"dp_shard": ranks}, 2, 1, False) for w in widths]
        if ranks % 2 == 0:
            rows += [(w, 2, {"pp": 2}, 2, 1, False) for w in widths]
            rows += [(w, repeats, {"tp_x": 2}, 2, 1, False) for w in widths]
            rows += [(_WIDE, repeats, {"cp": 2}, 2, 1, False)]
        return [_probe(supernode, *row) for row in rows]
    if ranks > 1:
        rows += [(w, repeats, {"dp_shard": ranks}, 2, 1, False) for w in widths]
    if ranks % 2 == 0:
        halves = ({"tp_x": 2}, {"cp": 2}, {"cp": 2, "cp_kind": "ulysses"})
        rows += [(w, repeats, half, 2, 1, False) for half in halves for w in widths]
        rows += [(w, 2, {"pp": 2}, m, 1, False) for w, m in ((_NARROW, 2), (_WIDE, 2), (_WIDE, 4))]
        rows += [(w, repeats, {"dp_shard": ranks, "ep": 2}, 1, 1, True) for w in widths]
    if ranks % 4 == 0:
        quarters = ({"tp_x": 4}, {"tp_x": 2, "tp_y": 2}, {"cp": 4})
        rows += [(w, repeats, quarter, repeats, 1, False) for quarter in quarters for w in widths]
    return [_probe(supernode, *row) for row in rows]


def _probe(
    supernode: Supernode,
    width: int,
    layers: int,
    degrees: Mapping[str, Any],
    microbatches: int,
    sequences: int = 1,
    experts: bool = False,
) -> Probe:
    cpu, ranks = supernode.device.kind == "cpu", supernode.num_devices
    product = math.prod(v for k, v in degrees.items() if isinstance(v, int) and k != "ep")
    strategy = Strategy(dp_replicate=ranks // product, **degrees)
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if experts:
        config |= {
            "model_type": "qwen3_moe", "head_dim": width // 4, "num_experts": 8, "num_experts_per_tok": 2,
            "moe_intermediate_size": width, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    workload = Workload(
        256, microbatch=sequences, accumulation_steps=microbatches, compute_dtype="float32" if cpu else "bfloat16"
    ).resolve(strategy.dp)  # fmt: skip
    spec = spec_from_config(config, name=f"calibration, {layers} layers of width {width}")
    return Probe(config, spec, make_plan(spec, supernode, workload, strategy=strategy))


def time_probes(
    probes: Sequence[Probe], world: World, pick: Callable[[Sequence[float]], float] = min
) -> list[float]:
    """Return the seconds per step of every probe on this rank; the first round warms up and does not count.

    Args:
        probes: Probes to time.
        world: The ranks.
        pick: Reduction over rounds: the minimum compares layouts, the median resembles a run.
    """
    runs = [_TimedProbe(probe, world) for probe in probes]
    # A real run has one model: garbage collection must not traverse the objects of all models.
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    rounds: list[list[float]] = []
    spent = torch.zeros(1, device=world.device)
    while len(rounds) < _MIN_ROUNDS or (len(rounds) < _MAX_ROUNDS and float(spent) < _BUDGET_S):
        rounds.append([run.turn() for run in runs])
        spent.fill_(time.perf_counter() - start)
        if world.world_size > 1:
            dist.all_reduce(spent, dist.ReduceOp.MAX)  # all ranks stop at the same round
    return [pick(turns) for turns in zip(*rounds[1:], strict=True)]


def short_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    microbatches: Sequence[dict[str, Tensor]],
    valid_tokens: int,
    world: World,
) -> Tensor:
    """Run a step as in the trainer: forward and backward of all microbatches, clipping, loss, optimizer.

    Returns:
        The loss over all ranks, without synchronization.
    """
    loss = forward_backward(model, microbatches, valid_tokens)
    clip_grad_norm_(model, 1.0)
    if world.world_size > 1:
        dist.all_reduce(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss


class _TimedProbe:
    """Model of one probe on this rank."""

    def __init__(self, probe: Probe, world: World) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            config = AutoConfig.for_model(**probe.config)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False
            ).train()
        parallelize(model, probe.plan, world)
        materialize(model, seed=0, device=world.device)
        self._model, self._world = model, world
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        work = probe.plan.workload
        tokens = (
            torch.arange(work.seq_len, device=world.device).repeat(work.microbatch or 1, 1) % 1000
        )
        self._batches = [{"input_ids": tokens, "shift_labels": tokens}] * (
            work.accumulation_steps or 1
        )
        self._tokens = work.tokens_per_step or 1

    def turn(self) -> float:
        """Return the seconds of a step after a barrier."""
        if self._world.world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        loss = short_step(self._model, self._optimizer, self._batches, self._tokens, self._world)
        float(loss)  # synchronizes with the device
        return time.perf_counter() - start

"""Any tiny Hugging Face model on any strategy, one step, against one device: loss, norm, every gradient, bytes.

reference = Reference(Setup("llama", tied=True))        # one device, before ranks are forked
launch(lambda rank: check(reference, Strategy(tp_x=2)), 2)
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from hyper_parallel.cost import step_collectives
from hyper_parallel.ir import Collective, Plan, Strategy, Workload
from hyper_parallel.model import ModelSpec, spec_from_config
from hyper_parallel.runtime import (
    CommCounter,
    World,
    clip_grad_norm_,
    forward_backward,
    handle,
    launch,
    parallelize,
)
from tests.parity.planned import ByGroup, by_group, make_plan, whole

RTOL = 1e-10
_BASE = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "deepseek_v3": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 8, "head_dim": 4,
    },
    "gpt_oss": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma2": {"sliding_window": 9, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 9, "query_pre_attn_scalar": 8,
                    "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
}  # fmt: skip
"""Families of the compatibility table, by `model_type`, with what their tiny configs add to the common sizes."""

EAGER = ("gemma2", "gemma3_text", "gpt_oss")
"""Attention that caps scores or has sinks, which the fused kernel cannot."""


@dataclass(frozen=True)
class Setup:
    """One model and one batch.

    Attributes:
        family: Key of FAMILIES.
        tied: Head and embedding share their weight.
        sequences: Sequences of the step over all data ranks.
        seq_len: Tokens per sequence.
        accumulation: Microbatches per data rank.
        packed: Documents of several lengths in every sequence, told by `position_ids` that begin again.
        config: Further values of the config, as pairs.
    """

    family: str = "llama"
    tied: bool = False
    sequences: int = 8
    seq_len: int = 16
    accumulation: int = 1
    packed: bool = False
    config: tuple[tuple[str, object], ...] = ()
    predicted: ClassVar[bool] = True
    """Whether there is a ModelSpec, so that bytes are predicted."""

    def model_config(self) -> PretrainedConfig:
        """The tiny config."""
        values = {**_BASE, **FAMILIES[self.family], **dict(self.config)}
        if kinds := values.get("layer_types"):
            count = values["num_hidden_layers"]
            values["layer_types"] = [kinds[i % len(kinds)] for i in range(count)]
        return AutoConfig.for_model(self.family, **values, tie_word_embeddings=self.tied)

    def build(self) -> nn.Module:
        """The model in float64, norms and biases away from their initial ones and zeros."""
        torch.manual_seed(0)
        attention = "eager" if self.family in EAGER else "sdpa"
        model = AutoModelForCausalLM.from_config(
            self.model_config(), attn_implementation=attention, experts_implementation="eager"
        )
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param) * 0.05)
        return model.double().train()

    @property
    def spec(self) -> ModelSpec:
        """What planning sees."""
        return spec_from_config(self.model_config().to_dict(), name="tiny")

    def batch(self) -> dict[str, Tensor]:
        """input_ids, shift_labels and, when packed, position_ids, [sequences, seq_len]."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, 96, (self.sequences, self.seq_len), generator=generator)
        labels = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].clone()
        labels[torch.rand(labels.shape, generator=generator) < 0.1] = -100
        found = {"input_ids": ids, "shift_labels": labels}
        if self.packed:
            starts = torch.rand(ids.shape, generator=generator) < 0.2
            starts[:, 0] = True
            index = torch.arange(self.seq_len).expand_as(ids)
            begins = torch.where(starts, index, torch.zeros_like(index)).cummax(dim=1).values
            found["position_ids"] = index - begins
        return found

    def workload(self, strategy: Strategy) -> Workload:
        """The step, in float64."""
        return Workload(
            seq_len=self.seq_len,
            microbatch=self.sequences // strategy.dp // self.accumulation,
            accumulation_steps=self.accumulation,
            compute_dtype="float64",
            param_dtype="float64",
            reduce_dtype="float64",
        )

    def plan(self, strategy: Strategy) -> Plan:
        """A plan as planning makes it: starred names, rules of the family table, no framework."""
        return make_plan(self.spec, strategy, self.workload(strategy))


@dataclass
class Result:
    """One step on one rank.

    Attributes:
        share: This rank's share of the loss; the sum over all ranks is the loss.
        norm: Global gradient norm.
        grads: Whole gradients of the parameters this rank has a part of.
        counted: (kind, axes) to calls and bytes sent, counted.
        planned: The same by formula.
    """

    share: float
    norm: float
    grads: dict[str, Tensor]
    counted: ByGroup = field(default_factory=dict)
    planned: ByGroup = field(default_factory=dict)


class Reference:
    """A setup's model and its step on one device; run it before ranks are forked."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model = setup.build()
        assert self.result.grads

    def of(self, setup: Setup) -> Reference:
        """This run as the reference of a setup that cuts the same step into other microbatches."""
        found = copy.copy(self)
        found.setup = setup
        assert found.result is self.result
        return found

    @cached_property
    def result(self) -> Result:
        """The step on one device."""
        with World.join("cpu") as world:
            return run(self.setup, self.model, Strategy(), world)


def run(setup: Setup, model: nn.Module, strategy: Strategy, world: World, plan: Plan | None = None) -> Result:
    """One step of a copy of `model` on this rank of a layout."""
    model = copy.deepcopy(model)
    plan = plan or setup.plan(strategy)
    parallelize(model, plan, world)
    batch = setup.batch()
    num_tokens = int((batch["shift_labels"] != -100).sum())
    where = strategy.mesh().coordinate(world.rank)
    share = setup.sequences // strategy.dp
    first = (where["dp_replicate"] * strategy.dp_shard + where["dp_shard"]) * share
    mine = {name: tensor[first : first + share] for name, tensor in batch.items()}
    parts = [
        {name: tensor.chunk(setup.accumulation)[i] for name, tensor in mine.items()} for i in range(setup.accumulation)
    ]
    counter = CommCounter(strategy.mesh(), world.rank, strategy.expert_mesh())
    with counter:
        loss = forward_backward(model, parts, num_tokens)
        norm = clip_grad_norm_(model, None)
    grads = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    counted = by_group(counter.collectives)
    planned = by_group(_collectives(setup, plan, model, where["pp"]))
    return Result(float(loss), float(norm), grads, counted, planned)


def _collectives(setup: Setup, plan: Plan, model: nn.Module, pp_rank: int) -> tuple[Collective, ...]:
    """Collectives by formula; where experts were sent rows, with the numbers of rows that really occurred."""
    if not setup.predicted:
        return ()
    experts = handle(model).experts
    rows = None
    if experts is not None and experts.group is not None:
        rows = {
            int(re.search(r"\.(\d+)\.", f".{name}.")[1]): (layer.sent, layer.received)
            for name, layer in experts.layers.items()
        }
    if rows is None and plan.strategy.pp == 1:
        return plan.collectives
    return step_collectives(setup.spec, dict(plan.layouts), plan.strategy, plan.workload, rows, pp_rank)


def check(
    reference: Reference,
    strategy: Strategy,
    world: World,
    *,
    plan: Plan | None = None,
    rtol: float = RTOL,
    bytes_too: bool = True,
) -> Result:
    """Run a strategy on this rank and compare with one device; every rank of the world calls this."""
    expected = reference.result
    found = run(reference.setup, reference.model, strategy, world, plan)
    total = torch.tensor(found.share, dtype=torch.float64)
    if world.world_size > 1:
        torch.distributed.all_reduce(total)
    found = replace(found, share=float(total))
    _close("loss", found.share, expected.share, rtol)
    for name, grad in found.grads.items():
        whole = expected.grads[name]
        scale = max(float(whole.abs().max()), 1e-30)
        error = float((grad - whole).abs().max()) / scale
        assert error <= rtol, f"{strategy}: gradient of {name} differs by {error:.1e}"
    _close("gradient norm", found.norm, expected.norm, rtol)
    if bytes_too:
        where = strategy.mesh().coordinate(world.rank)
        largest = not any(at for axis, at in where.items() if axis != "pp")
        counted, planned = _comparable(found, largest)
        differing = {
            key: (counted.get(key), planned.get(key))
            for key in counted.keys() | planned.keys()
            if counted.get(key) != planned.get(key)
        }
        assert not differing, f"{strategy}: counted and planned differ: {differing}"
    return found


reference = functools.cache(Reference)
"""Step of a setup on one device, run once in a process."""


def check_on_ranks(size: int, cases: Iterable[tuple[Setup, Strategy]], timeout_s: float = 200) -> None:
    """Check that every strategy of `cases`, on `size` ranks, repeats one device."""
    pairs = [(reference(setup), strategy) for setup, strategy in cases]

    def rank(_: int) -> None:
        with World.join("cpu") as world:
            for expected, strategy in pairs:
                check(expected, strategy, world)

    launch(rank, size, timeout_s=timeout_s)


def _comparable(found: Result, largest: bool) -> tuple[dict, dict]:
    """Counted and planned collectives: calls on every rank, bytes at coordinate 0 of every axis but pp.

    The ranks there hold the largest pieces, which the formula is for.
    """
    sides = found.counted, found.planned
    return sides if largest else tuple({k: c for k, (c, _) in side.items()} for side in sides)


def _close(what: str, found: float, expected: float, rtol: float) -> None:
    assert abs(found - expected) <= rtol * abs(expected), f"{what} {found} instead of {expected}"

"""Bytes that a plan of generation predicts are those that ranks have: weights, and the cache that slots allocate."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch import data_share, read_model
from hyper_parallel.backends.torch.decode_slots import SlotPasses, slot_cache_refusal
from hyper_parallel.errors import NoLegalStrategy
from hyper_parallel.ir import GenerateWorkload, Workload
from hyper_parallel.model import FAMILIES_READ
from hyper_parallel.planner.generation import plan_generation
from hyper_parallel.runtime import World, launch, parallelize, plan_of
from hyper_parallel.trainer.decoding import Sampling, make_decoder
from tests.cost.machines import machine
from tests.trainer_generate.test_batch import FAMILIES, model_of, running

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

GREEDY = Sampling(8, temperature=0)
WORK = GenerateWorkload(prompts=6, prompt_len=20, new_tokens=8, dtype="float64")
CASES = [
    (family, layout)
    for family in ("llama", "gpt2", "qwen3_moe", "gpt_oss", "deepseek_v3")
    for layout in ("tp=2", "pp=2", "dp_replicate=2", "dp_shard=2")
    if (family, layout) != ("gpt2", "tp=2")  # not priced
] + [("qwen3_moe", "dp_shard=2 ep=2"), ("qwen3_moe", "tp=2 ep=2")]


def measured(model, share=0, shares=1):
    """Bytes of the parameters of this rank, and of the cache of its slots after a pass."""
    prompts = [[5] * WORK.prompt_len] * WORK.prompts
    mine = running(GREEDY, prompts)[share::shares]
    decoder = make_decoder(model, mine, GREEDY, (), slots=len(mine))
    decoder.step()
    assert isinstance(decoder.passes, SlotPasses)
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return sum(p.nbytes for p in local), decoder.passes.cache_bytes


def predicted(model, layout=""):
    made = plan_generation(read_model(model, "tiny"), machine(), WORK, strategy=layout).best
    return made.weight_bytes, made.cache_bytes


@pytest.mark.parametrize("family", sorted({*FAMILIES} & {*FAMILIES_READ}))
def test_one_device_has_the_predicted_bytes(family):
    model = model_of(family)
    assert predicted(model) == measured(model)


@pytest.mark.slow
def test_the_fullest_of_two_ranks_has_the_predicted_bytes():
    def rank(_):
        with World.join("cpu") as world:
            return [bytes_on(world, *case) for case in CASES]

    made = launch(rank, 2, timeout_s=100)
    for case, *found in zip(CASES, *made, strict=True):
        assert max(found, key=sum) == predicted(model_of(case[0]), case[1]), case


def bytes_on(world, family, layout):
    model = model_of(family)
    formats = dict.fromkeys(("compute_dtype", "param_dtype", "reduce_dtype"), "float64")
    work = Workload(64, microbatch=1, accumulation_steps=4, **formats)
    parallelize(model, plan_of(model, layout, work), world).eval()
    return measured(model, *data_share(model))


def test_what_tensor_parallelism_leaves_whole_is_not_priced():
    with pytest.raises(NoLegalStrategy, match="cannot shard its attention"):
        predicted(model_of("gpt2"), "tp=2")


@pytest.mark.parametrize("family", FAMILIES_READ)
def test_every_family_that_is_planned_keeps_its_cache_in_slots(family):
    config = AutoConfig.for_model(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shallow(config))
    assert slot_cache_refusal(model) is None


def shallow(config):
    """Two layers of a family's own sizes."""
    setattr(config, config.attribute_map.get("num_hidden_layers", "num_hidden_layers"), 2)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    return config

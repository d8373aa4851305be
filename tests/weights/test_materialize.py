import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import SiglipVisionConfig, SiglipVisionModel

from hyper_parallel.backends.torch.model_structure import PlaceholderModule
from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.shard_ranges import copy_full, local
from hyper_parallel.errors import UnsupportedSharding, WeightsUninitialised
from hyper_parallel.runtime import launch
from tests.weights.models import (
    Mlp,
    assert_same,
    full_state,
    join,
    on_meta,
    qwen3,
    qwen3_moe,
    shard,
)


def reference(build=qwen3, **kwargs):
    model = on_meta(build, **kwargs)
    materialize(model, seed=7, device="cpu")
    return model


@pytest.mark.torch
def test_values_follow_the_rules_of_the_model_and_the_seed():
    model = reference(hidden_size=64, vocab_size=512)
    layer = model.model.layers[0]
    assert 0.018 < layer.mlp.gate_proj.weight.std() < 0.022
    assert torch.equal(layer.input_layernorm.weight, torch.ones(64))
    layers = model.model.layers
    assert not torch.equal(layers[0].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    fresh = qwen3(hidden_size=64, vocab_size=512)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)
    other = on_meta(qwen3, hidden_size=64, vocab_size=512)
    materialize(other, seed=8, device="cpu")
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


@pytest.mark.torch
def test_a_model_with_storage_gets_the_same_values_and_the_global_random_state_is_untouched():
    model = qwen3()
    before = torch.get_rng_state()
    materialize(model, seed=7, device="cpu")
    assert torch.equal(before, torch.get_rng_state())
    assert_same(full_state(model), full_state(reference()))


@pytest.mark.torch
def test_float64_and_bfloat16_values_are_the_float32_values_cast():
    want = full_state(reference())
    for dtype in (torch.float64, torch.bfloat16):
        model = on_meta(qwen3).to(dtype)
        materialize(model, seed=7, device="cpu")
        assert_same(full_state(model), {n: t.to(dtype) for n, t in want.items()})


@pytest.mark.torch
def test_tied_parameters_share_one_storage_and_take_the_value_of_the_first():
    model = reference(tied=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, reference().model.embed_tokens.weight)


@pytest.mark.torch
def test_fused_experts_and_router_are_initialised():
    model = reference(qwen3_moe)
    mlp = model.model.layers[0].mlp
    assert 0.015 < mlp.experts.gate_up_proj.std() < 0.025
    assert mlp.gate.weight.std() > 0


@pytest.mark.torch
def test_a_rule_of_the_parent_that_scales_a_child_is_applied():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=8, n_embd=64, n_head=2, vocab_size=64, n_positions=16)
    model = on_meta(GPT2LMHeadModel, config)
    materialize(model, seed=0, device="cpu")
    block = model.transformer.h[0]
    assert 0.0045 < block.mlp.c_proj.weight.std() < 0.0055
    assert 0.018 < block.mlp.c_fc.weight.std() < 0.022


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(3))


def siglip():
    config = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return SiglipVisionModel(config)


@pytest.mark.torch
@pytest.mark.parametrize("absent", ["position_embedding", "patch_embedding"])
def test_rules_skip_tensors_of_modules_on_other_pipeline_ranks(absent):
    """The rule of the embeddings also sets the weight of its child `position_embedding`."""
    want = full_state(reference(siglip))
    model = on_meta(siglip)
    embeddings = next(m for m in model.modules() if hasattr(m, absent))
    setattr(embeddings, absent, PlaceholderModule(getattr(embeddings, absent)))
    materialize(model, seed=7, device="cpu")
    assert_same(full_state(model), {name: t for name, t in want.items() if absent not in name})
    assert not hasattr(getattr(embeddings, absent), "weight")


class HalfSet(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, 2))

    def reset_parameters(self):
        nn.init.zeros_(self.table[:2])


@pytest.mark.torch
@pytest.mark.parametrize(("build", "name"), [(Bare, "`scale`"), (HalfSet, "`table`")])
def test_a_parameter_that_no_rule_sets_is_refused_by_name(build, name):
    with pytest.raises(WeightsUninitialised, match=name):
        materialize(on_meta(build), seed=0, device="cpu")


@pytest.mark.torch
def test_a_meta_buffer_that_no_rule_sets_is_refused_and_a_real_one_is_kept():
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.arange(3.0))
    materialize(model, seed=0, device="cpu")
    assert torch.equal(model.mask, torch.arange(3.0))
    with pytest.raises(WeightsUninitialised, match="mask"):
        materialize(model.to("meta"), seed=0, device="cpu")


def _layouts(layouts, build, world, **kwargs):
    def rank_fn(rank):
        join()
        for degrees in layouts:
            model = shard(on_meta(build, **kwargs), **degrees)
            materialize(model, seed=7, device="cpu")
            assert not any(p.is_meta for p in model.parameters())
            state = full_state(model)
            if rank == 0:
                assert_same(state, want)

    want = full_state(reference(build, **kwargs))
    launch(rank_fn, world, timeout_s=100)


@pytest.mark.slow
@pytest.mark.dist
def test_same_weights_on_four_ranks():
    layouts = [
        {"tp": 4},
        {"fsdp": 4},
        {"replicate": 2, "fsdp": 2},
        {"fsdp": 2, "tp": 2},
        {"replicate": 2, "tp": 2},
    ]
    _layouts(layouts, qwen3, 4)


@pytest.mark.dist
def test_same_weights_on_two_ranks_and_for_experts():
    _layouts([{"tp": 2}, {"fsdp": 2}], qwen3, 2, tied=True)
    _layouts([{"fsdp": 2}], qwen3_moe, 2)


@pytest.mark.dist
def test_uneven_shards_and_a_forward_pass_after_materialising():
    def rank_fn(rank):
        join()
        mesh = init_device_mesh("cpu", (4,))
        model = on_meta(Mlp)
        fully_shard(model, mesh=mesh)
        materialize(model, seed=3, device="cpu")
        out = model(torch.ones(2, 7))
        return full_state(model), out.detach()

    plain = on_meta(Mlp)
    materialize(plain, seed=3, device="cpu")
    for state, out in launch(rank_fn, 4, timeout_s=180):
        assert_same(state, full_state(plain))
        assert torch.equal(out, plain(torch.ones(2, 7)))


@pytest.mark.dist
def test_copy_full_agrees_with_distribute_tensor():
    def rank_fn(rank):
        join()
        mesh = init_device_mesh("cpu", (2, 2))
        full = torch.arange(13.0 * 6).view(13, 6)
        cases = [(Shard(0), Shard(0)), (Shard(0), Shard(1)), (Replicate(), Shard(1))]
        for placements in cases:
            want = distribute_tensor(full, mesh, placements)
            got = torch.zeros_like(want)
            copy_full(got, full)
            assert torch.equal(local(got), local(want)), placements

    launch(rank_fn, 4, timeout_s=180)


@pytest.mark.dist
def test_an_ambiguous_uneven_split_is_refused():
    """Seven rows: tp gives (4, 3); dp of 3 splits these into (2, 2, 0) and (1, 1, 1)."""

    def rank_fn(rank):
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        join()
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        model = on_meta(nn.Sequential, nn.Linear(2, 7, bias=False, device="meta"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        try:
            materialize(model, seed=0, device="cpu")
        except UnsupportedSharding as error:
            return str(error)

    assert all("split unevenly" in text for text in launch(rank_fn, 6, timeout_s=180))

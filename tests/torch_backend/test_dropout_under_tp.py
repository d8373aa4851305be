"""Dropout of tensor-parallel ranks: one mask on what is whole, an own one for every group of heads and slice."""

import json

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import CaptureUnsupported
from hyper_parallel.runtime import World, launch
from hyper_parallel.trainer.engine.torch_engine import TorchEngine
from hyper_parallel.trainer.job import prepare_job
from hyper_parallel.trainer.loop import Display
from tests.e2e.runs import make_stage_place
from tests.slow import slow_cells

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
APERTUS = SIZES | {"num_key_value_heads": 4, "intermediate_size": 48, "attention_dropout": 0.5}
OPT = SIZES | {
    **{"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    **{"dropout": 0.5, "attention_dropout": 0.5},
}
IDS = torch.arange(32)[None]


def run_rank(number, model_type, sizes, recompute=False):
    """Masks of attention of each pass, inputs of layers, and whole gradients of this rank, of two passes."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **sizes, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config).double().train()
    masks, streams = [], []
    plain = torch.nn.functional.dropout

    def dropout(x, p=0.5, training=True, inplace=False):
        out = plain(x, p, training, inplace)
        again = bool(masks) and masks[-1][0] is out
        if x.dim() == 4 and training and not x.is_meta and not again:
            masks.append((out, (out != 0)[:, :, 16:]))  # torch calls it by its name once more
        return out

    with World.join("cpu") as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", dropout)
        torch.manual_seed(number)
        work = hp.Workload(32, microbatch=1, compute_dtype="float64", param_dtype="float64")
        plan = hp.plan_of(model, "tp_x=2" + " recompute=full" * recompute, work)
        net = hp.parallelize(model, plan, world)
        for layer in net.get_decoder().layers:
            layer.register_forward_pre_hook(lambda _, args: streams.append(args[0].detach()))
        for _ in range(2):
            net(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
        whole = {
            n: g.to_local() if isinstance(g, DTensor) else g
            for n, g in grads.items()
            if not isinstance(g, DTensor) or g.placements[0].is_replicate()
        }
        return [mask for _, mask in masks], streams, whole


@pytest.fixture(scope="module", params=[("apertus", APERTUS), ("opt", OPT)], ids=["apertus", "opt"])
def family(request):
    return request.param


def passes(family, recompute=False):
    return launch(lambda number: run_rank(number, *family, recompute), 2, timeout_s=60)


@pytest.mark.dist
def test_heads_of_each_rank_have_masks_of_their_own_and_what_is_whole_has_one(family):
    (masks, streams, whole), (other_masks, other_streams, other_whole) = passes(family)
    assert len(masks) == 4
    assert masks[0].shape == (1, 2, 16, 32)
    for mine, theirs in zip(masks, other_masks, strict=True):
        assert 0.3 < (mine == theirs)[..., :16].double().mean() < 0.7
    for mine in masks[1:]:
        assert not torch.equal(mine, masks[0]), "layers and passes differ"
    assert all(torch.equal(a, b) for a, b in zip(streams, other_streams, strict=True))
    assert whole
    assert all(torch.equal(grad, other_whole[name]) for name, grad in whole.items())


@slow_cells("apertus", "opt")
@pytest.mark.dist
def test_a_recomputed_layer_draws_the_masks_of_its_forward_pass(family):
    (_, _, kept), _ = passes(family)
    (_, _, recomputed), _ = passes(family, recompute=True)
    for name, grad in kept.items():
        torch.testing.assert_close(recomputed[name], grad, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
@pytest.mark.dist
def test_whole_parameters_stay_the_same_on_all_ranks_over_steps_of_a_run(tmp_path):
    place = make_stage_place(tmp_path, "pt", [{"text": "a b c d " * 40}] * 9)
    (place / "model.json").write_text(json.dumps({"model_type": "opt", **OPT, "vocab_size": 264}))
    job = prepare_job(load_recipe(place / "recipe.yaml", ["parallel.tp=2"]), progress=False)

    def rank(_):
        with World.join("cpu") as world, TorchEngine(job, world, Display(0, False)) as engine:
            batches = job.train_batches()
            engine.begin(0, batches)
            for step in (1, 2, 3):
                engine.step(step, batches, 0.1)
            parameters = engine._model.named_parameters()
            return {n: p.to_local().detach() for n, p in parameters if p.placements[0].is_replicate()}

    first, second = launch(rank, 2, timeout_s=60)
    assert first
    assert all(torch.equal(p, second[name]) for name, p in first.items())


@pytest.mark.torch
def test_offload_refuses_masks_of_several_streams_and_its_hint_works(tmp_path):
    place = make_stage_place(tmp_path, "pt", [{"text": "a b c d " * 40}] * 9)
    (place / "model.json").write_text(json.dumps({"model_type": "opt", **OPT, "vocab_size": 264}))
    words = ["parallel.tp=2", "offload.budget=1GiB"]

    def prepare(*more):
        return prepare_job(load_recipe(place / "recipe.yaml", [*words, *more]), progress=False)

    with pytest.raises(CaptureUnsupported, match="its own random stream") as refusal:
        prepare()
    assert refusal.value.code == "HP511"
    assert prepare(refusal.value.hint).recipe.disables_dropout


@pytest.mark.torch
def test_rates_of_heads_that_a_model_lacks_refuse_nothing(tmp_path):
    """GPT-2 configs have `summary_first_dropout: 0.1` by default; causal language models have no such head."""
    place = make_stage_place(tmp_path, "pt", [{"text": "a b c d " * 40}] * 9)
    rates = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    sizes = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    (place / "model.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **rates}))
    words = ["parallel.tp=2", "offload.budget=1GiB"]
    job = prepare_job(load_recipe(place / "recipe.yaml", words), progress=False)
    assert not job.recipe.disables_dropout

"""Tensor parallelism of a model whose stream is whole on every rank."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import hyper_parallel as hp
from hyper_parallel.backends.torch import read_model
from hyper_parallel.backends.torch.model_layouts import module_rules
from hyper_parallel.backends.torch.tensor.gradients import to_local
from hyper_parallel.ir import ModelRef, Plan, Strategy, Workload
from hyper_parallel.planner.request import rules_of
from hyper_parallel.runtime import World, launch, parallelize
from hyper_parallel.shard import plan_layouts


@pytest.mark.dist
def test_ranks_drop_the_same_of_what_is_whole_on_each():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = transformers.AutoConfig.for_model("gpt2", **sizes, resid_pdrop=0.5, attn_pdrop=0.5)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    spec, strategy = read_model(model, "tiny"), Strategy(tp_x=2)
    params = {p.name: p for block in spec.blocks for p in block.params}
    shard = plan_layouts(
        [(p.name, p.shape, p.dims) for p in params.values()], rules_of(spec), strategy,
        num_heads=4, num_kv_heads=4, head_dim=8, vocab_size=64,
    )  # fmt: skip
    assert shard.whole_stream
    workload = Workload(32, 32, compute_dtype="float64", param_dtype="float64").resolve(1)
    reference = ModelRef("tiny", "gpt2", 1, 1, 0.0, "")
    plan = Plan(reference, "local", 0.0, workload, strategy, shard.layouts, 0.0, (), (), 0)
    ids = torch.arange(32)[None]

    def rank(number: int) -> dict[str, torch.Tensor]:
        with World.join("cpu") as world:
            torch.manual_seed(number)
            net = parallelize(model, plan, world)
            net(input_ids=ids, labels=ids).loss.backward()
            whole = {n for n, layout in shard.layouts.items() if "tp_x" not in layout.sharding_axes}
            names = {n for n, _ in net.named_parameters() if n.replace(".0.", ".*.") in whole}
            grads = {n: p.grad for n, p in net.named_parameters() if n in names}
            return {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}

    first, second = launch(rank, 2, timeout_s=60)
    assert first
    for name, grad in first.items():
        assert torch.equal(grad, second[name]), name


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("family", ["stablelm", "opt", "gpt2"])
def test_pipeline_stages_with_replicated_activations_repeat_one_rank(family, schedule):
    """Weights of embedding and head are shared by two stages, except for stablelm."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        family, vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64,
        intermediate_size=64, max_position_embeddings=64, word_embed_proj_dim=32, num_key_value_heads=4,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double().train()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.05)
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 96, (2, 16), generator=generator) for _ in range(4)]

    def run(net):
        loss = float(hp.forward_backward(net, [{"input_ids": i, "labels": i} for i in ids]))
        norm = float(hp.clip_grad_norm_(net, None))
        grads = {n: getattr(p.grad, "full_tensor", p.grad.clone)() for n, p in net.named_parameters()}
        return loss, norm, grads

    single = copy.deepcopy(model)
    loss, norm, grads = run(parallelize(single, hp.plan_of(single, ""), World.join("cpu")))

    def rank(_):
        with World.join("cpu") as world:
            net = copy.deepcopy(model)
            plan = hp.plan_of(net, f"pp=2 tp=2 schedule={schedule}")
            assert any("holds all tokens" in note for note in plan.notes)
            found = run(parallelize(net, plan, world))
        assert found[:2] == pytest.approx((loss, norm), rel=1e-10)
        for name, grad in found[2].items():
            torch.testing.assert_close(grad, grads[name], rtol=1e-10, atol=1e-12)
        return set(found[2])

    assert set().union(*launch(rank, 4, timeout_s=200)) == set(grads)


@pytest.mark.dist
def test_a_gradient_lies_in_memory_as_its_parameter():
    def rank(_: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        with World.join("cpu"):
            mesh = init_device_mesh("cpu", (1,))
            weight = torch.nn.Parameter(DTensor.from_local(torch.ones(1, 2, 3), mesh, [Replicate()]))
            torch.bmm(torch.ones(1, 4, 3), to_local(weight, None).transpose(1, 2)).sum().backward()
            return weight.grad.to_local().stride(), weight.to_local().stride()

    ((gradient, parameter),) = launch(rank, 1, timeout_s=60)
    assert gradient == parameter == (6, 3, 1)


def test_a_head_is_split_where_the_embedding_has_a_forward_of_its_own():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model("gpt_neox", **sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert {rule.style for rule in module_rules(model)} >= {"vocab", "head"}
        model.gpt_neox.embed_in = type("Own", (torch.nn.Module,), {})()
        styles = {rule.style for rule in module_rules(model)}
        assert "head" in styles
        assert "vocab" not in styles

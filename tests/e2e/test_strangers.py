"""Models that no reader knows train through the command, and a layout gives the losses of one rank."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.backends.torch import load_pretrained, read_model
from hyper_parallel.backends.torch.forward_variants import keep_float64
from hyper_parallel.errors import ModelUnreadable, NoLegalStrategy, RuleError, UnsupportedSharding
from hyper_parallel.ir import Strategy, Workload
from hyper_parallel.model import read_config
from hyper_parallel.runtime import World, clip_grad_norm_, forward_backward, launch, parallelize
from hyper_parallel.trainer.engine.recipe_model import read_spec
from tests.e2e.runs import assert_same_curve, command, curve, train, write_functions
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e

SIZES = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
STRANGERS = {
    "gpt_neox": {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64},
    "mamba": {**SIZES, "state_size": 4, "pad_token_id": 0},
    "granitemoe": {**SIZES, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2,
                   "num_key_value_heads": 2, "pad_token_id": 0},
}  # fmt: skip

SPLIT = {
    "gpt_neox": "mlp.dense_h_to_4h.weight",
    "mamba": "embeddings.weight",
    "granitemoe": "self_attn.k_proj.weight",
}
"""What tensor parallelism splits of each, among others."""


@pytest.fixture
def place(request, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("stranger") / request.param
    tmp_path.mkdir()
    (tmp_path / "model.json").write_text(json.dumps({"model_type": request.param, **STRANGERS[request.param]}))
    write_functions(tmp_path / "text.txt", 60)
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{path: {tmp_path / 'model.json'}}}\n"
        f"data: {{source: {tmp_path / 'text.txt'}, seq_len: 24, vocab_size: 300}}\n"
        "training: {steps: 2, dtype: float64, tokens_per_step: 96}\n"
        "checkpoint: {export: false}\n"
    )
    return tmp_path


@slow_cells("mamba", "granitemoe", "gpt_neox")
@pytest.mark.parametrize("place", STRANGERS, indirect=True)
def test_a_stranger_trains_sharded_as_on_one_rank(place):
    train(place, place / "one", "parallel.dp_shard=1")
    train(place, place / "two", "parallel.dp_shard=2", "training.recompute=full")
    assert_same_curve(curve(place / "two"), curve(place / "one"))
    train(place, place / "split", "parallel.tp=2", "training.recompute=full")
    assert_same_curve(curve(place / "split"), curve(place / "one"))
    layouts = json.loads((place / "split" / "plan.json").read_text())["layouts"]
    cut = {name for name, layout in layouts.items() if "tp_x" in json.dumps(layout)}
    assert any(name.endswith(SPLIT[place.name]) for name in cut)
    assert len(cut) < len(layouts)


@pytest.mark.parametrize("place", ["gpt_neox"], indirect=True)
def test_rules_of_a_user_hold_for_a_stranger(place):
    def refused(error, match, *patterns):
        rules = [f"parallel.rules.{pattern}=replicate" for pattern in patterns]
        with pytest.raises(error, match=match) as caught:
            train(place, place / "run", "parallel.tp=2", *rules)
        return caught.value

    assert refused(RuleError, "matches no module", "gpt_neox.*.ffn").code == "HP204"
    whole = refused(UnsupportedSharding, "are inconsistent", "gpt_neox", "lm_head")
    assert whole.changes == {"parallel.tp": 1, "parallel.dp_shard": 2}
    alone = "gpt_neox.layers.*.mlp.dense_h_to_4h"
    refused(UnsupportedSharding, "are inconsistent", alone)
    assert not (place / "run" / "metrics.jsonl").exists()


@pytest.fixture(scope="module")
def tool():
    path = Path(__file__).resolve().parents[2] / "tools" / "census.py"
    spec = importlib.util.spec_from_file_location("census", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@slow_cells(
    "loss and places of its own",
    "more of the images' layers than of the text's",
    "rows of the embedding read without a call",
    "images and text",
)
@pytest.mark.parametrize(
    ("name", "axis"),
    [
        pytest.param("bart", "cp", id="loss and places of its own"),
        pytest.param("roberta", "cp", id="tokens that see all, positions from ids", marks=pytest.mark.slow),
        pytest.param("mistral3", "pp", id="more of the images' layers than of the text's"),
        pytest.param("zamba2", "dp_shard", id="layers that share parameters", marks=pytest.mark.slow),
        pytest.param("zamba", "tp", id="split layers that share parameters", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", "dp_shard", id="images and text"),
        pytest.param("gemma4", "tp", id="rows of the embedding read without a call"),
        pytest.param("nanochat", "tp", id="a norm before the layers and behind them", marks=pytest.mark.slow),
        pytest.param("gemma3n_text", "tp", id="methods of modules that layers call", marks=pytest.mark.slow),
    ],
)
def test_one_rank_takes_the_step_of_plain_transformers_and_two_the_same(tool, name, axis):
    rows = {}
    tool.census({name: [axis]}, rows.__setitem__)
    assert rows == {name: {"plain": "ok", "one rank": "ok", axis: "ok"}}


@pytest.mark.parametrize("family", ["hrm_text", "deepseek_v4", "inkling2_text"])
def test_weights_that_transformers_converts_in_its_own_way_are_loaded(tool, tmp_path, family):
    # One stores several projections in one tensor; renamings of another match names that are right already; the last
    # casts to the format of the parameters.
    config = AutoConfig.for_model(**tool.tiny(family))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        loaded = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    load_pretrained(loaded, tmp_path)
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_a_tied_weight_is_loaded_by_a_name_that_another_stage_has(tool, tmp_path):
    config = AutoConfig.for_model(**tool.tiny("camembert"))
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    with torch.device("meta"):
        last = AutoModelForCausalLM.from_config(config)
    last.roberta.embeddings.word_embeddings = torch.nn.Identity()
    load_pretrained(last, tmp_path)
    assert torch.equal(last.lm_head.decoder.weight, model.lm_head.decoder.weight)


def test_infinity_is_read_as_transformers_writes_it(tmp_path):
    made = AutoConfig.for_model("granitemoehybrid", time_step_limit=(0.5, float("inf")))
    made.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_config(tmp_path).values["time_step_limit"] == [0.5, float("inf")]


@pytest.mark.parametrize("family", ["t5", "t5gemma2"])
def test_an_encoder_decoder_model_is_refused_by_name(tmp_path, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ModelUnreadable, match=f"`{family}` is an encoder-decoder model"):
        read_spec(str(tmp_path))


def test_a_part_of_a_model_is_made_by_the_class_that_its_config_names(tool, tmp_path):
    made = tool.auto_class("emu3").from_config(AutoConfig.for_model(**tool.tiny("emu3")))
    made.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] not in tool.all_types()
    assert read_spec(str(tmp_path)).num_params == sum(p.numel() for p in made.parameters())
    config["architectures"] = ["LlamaForCausalLM"]  # of another type
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelUnreadable, match="no language model"):
        read_spec(str(tmp_path))


def test_rows_of_two_processes_stay_beside_each_other(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "PAGE", tmp_path / "census.json")
    tool.record("llama", {"plain": "ok", "one rank": "ok", "dp_shard": "ok"})
    tool.record("gpt2", {"plain": "ok", "one rank": "HP999: no"})
    tool.record("llama", {"plain": "ok", "one rank": "ok", "tp": "ok"})
    assert tool.lacks("llama", ["tp", "dp_shard", "pp"]) == ["pp"]
    assert not tool.lacks("gpt2", ["pp"]), "what fails on one rank has no more cells"
    assert tool.lacks("mamba", ["one rank"]) == ["one rank"]


# transformers hands out pictures' features as a view; nothing here writes to them.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_a_model_called_with_images_steps_sharded_as_in_plain_transformers(tool):
    config = tool.tiny("llava")
    image_token = config["image_token_index"]
    sequences, patches = 4, 16  # 4 x 4 patches of an image of 16 pixels; the class token is dropped
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (sequences, 24), generator=generator)
    ids[:, 2 : 2 + patches] = image_token
    pixels = torch.rand(sequences, 3, 16, 16, generator=generator, dtype=torch.float64)
    targets = torch.nn.functional.pad(ids, (0, 1), value=-100)[:, 1:].clone()
    targets[targets == image_token] = -100
    count = int((targets != -100).sum())

    def build():
        torch.manual_seed(0)
        made = AutoConfig.for_model(**config)
        return tool.auto_class("llava").from_config(made, dtype=torch.float64).train()

    def parts(rank, ranks):
        mine = slice(rank * sequences // ranks, (rank + 1) * sequences // ranks)
        return [{"input_ids": ids[mine], "shift_labels": targets[mine], "pixel_values": pixels[mine]}]

    plain = build()
    keep_float64(plain)
    logits = plain(input_ids=ids, pixel_values=pixels).logits
    cross = torch.nn.functional.cross_entropy
    loss = cross(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    loss.backward()
    tower = [p.grad for n, p in plain.named_parameters() if "vision_tower" in n and p.grad is not None]
    assert max(float(g.abs().max()) for g in tower) > 0, "the images must matter"
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    norm = float(sum(g.square().sum() for g in grads)) ** 0.5

    def rank(index):
        with World.join("cpu") as world:
            model = build()
            work = Workload(
                seq_len=24,
                microbatch=sequences // world.world_size,
                accumulation_steps=1,
                compute_dtype="float64",
                param_dtype="float64",
                reduce_dtype="float64",
            )
            strategy = Strategy(dp_shard=world.world_size)
            plan = hp.plan(read_model(model, "tiny"), "local", work, strategy=strategy)
            model = parallelize(model, plan, world)
            total = forward_backward(model, parts(index, world.world_size), count)
            return float(total), float(clip_grad_norm_(model, None))

    for ranks in (1, 2):
        results = launch(rank, ranks)
        assert sum(share for share, _ in results) == pytest.approx(loss.item(), rel=1e-10)
        assert results[0][1] == pytest.approx(norm, rel=1e-10)


def test_plans_know_what_the_forward_pass_of_a_stranger_refuses(tool, tmp_path):
    (tmp_path / "gemma3.json").write_text(json.dumps(tool.tiny("gemma3")))
    words = ["plan", str(tmp_path / "gemma3.json"), "-t", "dgx-h100", "--devices", "4", "--seq-len", "32"]  # fmt: skip
    with pytest.raises(NoLegalStrategy, match="cannot shard its sequences over ranks") as caught:
        command(*words, "--pin", "cp=2")
    assert caught.value.hint == "--pin cp=1"
    chosen = json.loads(command(*words, "--pin", "dp_shard=1", "--pin", "dp_replicate=1", "--json").stdout)["strategy"]
    assert chosen["cp"] == 1

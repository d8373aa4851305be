"""Directories in forms that occur in the wild, against plain transformers; and what an export keeps of them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForPreTraining,
    DeepseekV3Config,
    GPT2Config,
    GPT2LMHeadModel,
)

import hyper_parallel as hp
from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.errors import BadValue, WeightsUnreadable
from hyper_parallel.model import load_model, read_config
from hyper_parallel.trainer.checkpoints.conversion import export_checkpoint, import_checkpoint
from hyper_parallel.trainer.engine.auto_model import model_from_config
from hyper_parallel.trainer.generation import from_pretrained
from tests.weights.models import mixtral, qwen3, qwen3_moe

pytestmark = pytest.mark.torch

TOKENS = torch.arange(24).view(2, 12)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def written(model, directory):
    """A model as transformers writes it, in float64; returns its tensors."""
    materialize(model.double().eval(), seed=3, device="cpu")
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def rewrite(directory, tensors, *, index=True, ghosts=()):
    """Two shards in place of the single file."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    weight_map = {}
    for k in (0, 1):
        file = f"model-0000{k + 1}-of-00002.safetensors"
        own = {name: tensors[name].contiguous() for name in list(tensors)[k::2]}
        save_file(own, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    weight_map |= dict.fromkeys(ghosts, "model-00001-of-00002.safetensors")
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (directory / "model.safetensors.index.json").write_text(text)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits


def plain(directory, dtype=torch.float64):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def ours(directory):
    """The model as the trainer makes it of a directory."""
    load_model(directory)
    model = model_from_config(read_config(directory), torch.float64)
    hp.load_pretrained(model, directory)
    return model


def test_a_head_that_differs_from_its_embedding_is_untied(tmp_path, caplog):
    tensors = written(qwen3(tied=True), tmp_path / "a")
    tensors[HEAD] = 2 * tensors[EMBEDDING].flip(0)
    rewrite(tmp_path / "a", tensors)
    want = logits(plain(tmp_path / "a"))
    model = ours(tmp_path / "a")
    assert torch.equal(logits(model), want)
    assert "not tied" in caplog.text
    assert not load_model(tmp_path / "a").tied_embeddings
    tied = qwen3(tied=True).double()
    hp.load_pretrained(tied, tmp_path / "a")  # of a config that nobody has read from the directory
    assert torch.equal(logits(tied), want)
    for number, source in enumerate((model, tied, plain(tmp_path / "a"))):
        hp.save_pretrained(source, tmp_path / f"out{number}")
        assert torch.equal(logits(plain(tmp_path / f"out{number}")), want)
        assert load_file(tmp_path / f"out{number}" / "model.safetensors").keys() == tensors.keys()
    laid_out = qwen3(tied=True).double()
    hp.parallelize(laid_out, hp.plan_of(laid_out, ""), hp.World.join("cpu"))
    with pytest.raises(WeightsUnreadable, match="tie_word_embeddings") as refusal:
        hp.load_pretrained(laid_out, tmp_path / "a")
    assert "config.json" in refusal.value.hint


@pytest.mark.parametrize("form", ["head only", "both", "in the index", "foreign", "no index"])
def test_valid_directories_load(tmp_path, form):
    tensors = written(qwen3(tied=True), tmp_path)
    want = logits(plain(tmp_path))
    if form == "head only":
        tensors[HEAD] = tensors.pop(EMBEDDING)
    if form == "both":
        tensors[HEAD] = tensors[EMBEDDING].clone()
    ghosts = {"in the index": [HEAD], "foreign": ["vision.0.weight"]}.get(form, [])
    rewrite(tmp_path, tensors, index=form != "no index", ghosts=ghosts)
    assert torch.equal(logits(ours(tmp_path)), want)
    if form == "no index":
        generating, report = from_pretrained(str(tmp_path), torch.float64, trusted=False)
        assert torch.equal(logits(generating), want)
        assert not report["missing_keys"]


def test_shards_without_an_index_have_to_be_complete(tmp_path):
    rewrite(tmp_path, written(qwen3(), tmp_path), index=False)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsUnreadable, match="no index") as refusal:
        ours(tmp_path)
    assert "model-00002-of-00002.safetensors" in refusal.value.hint


def test_a_tensor_in_two_files_has_to_be_the_same(tmp_path):
    tensors = written(qwen3(), tmp_path)
    want = logits(plain(tmp_path))
    rewrite(tmp_path, tensors)
    first, second = (tmp_path / f"model-0000{k}-of-00002.safetensors" for k in (1, 2))
    name = next(iter(load_file(first)))
    both = load_file(second) | {name: tensors[name]}
    save_file(both, second, metadata={"format": "pt"})
    assert torch.equal(logits(ours(tmp_path)), want)
    save_file(both | {name: tensors[name] + 1}, second, metadata={"format": "pt"})
    with pytest.raises(WeightsUnreadable, match=f"different values of `{name}`"):
        ours(tmp_path)


@pytest.mark.parametrize(
    ("build", "part", "missing"),
    [(mixtral, "block_sparse_moe.experts.{}.w1", 2), (qwen3_moe, "mlp.experts.{}.down_proj", 1)],
)
def test_a_missing_expert_is_named(tmp_path, build, part, missing):
    """The experts behind it would otherwise move up by one; a number too high does not fill the gap."""
    tensors = written(build(), tmp_path)
    name = f"model.layers.1.{part.format(missing)}.weight"
    for extra in ({}, {f"model.layers.1.{part.format(4)}.weight": tensors[name].clone()}):
        changed = {n: t for n, t in tensors.items() if n != name} | extra
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = build().double()
        with pytest.raises(WeightsUnreadable, match=name):
            hp.load_pretrained(model, tmp_path)


def test_buffers_of_older_files_and_heads_of_other_classes(tmp_path):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=2, n_head=2))
    tensors = written(gpt2, tmp_path / "gpt2")
    want = logits(plain(tmp_path / "gpt2"))
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e9)
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.uint8)
    save_file(tensors, tmp_path / "gpt2" / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(logits(ours(tmp_path / "gpt2")), want)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=64, num_attention_heads=2, is_decoder=True, **sizes)
    bert = written(BertForPreTraining(config), tmp_path / "bert")
    model = ours(tmp_path / "bert")
    assert torch.equal(logits(model), logits(plain(tmp_path / "bert")))
    hp.save_pretrained(model, tmp_path / "out")
    kept = load_file(tmp_path / "out" / "model.safetensors")
    name = "cls.seq_relationship.weight"
    assert torch.equal(kept[name], bert[name])


def test_an_export_carries_what_the_class_ignores_and_keeps_formats(tmp_path):
    config = DeepseekV3Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    source = tmp_path / "hf"
    tensors = written(AutoModelForCausalLM.from_config(config), source)
    carried = {
        "model.layers.61.eh_proj.weight": torch.randn(16, 32, dtype=torch.bfloat16),
        "model.layers.61.enorm.weight": torch.randn(16),
    }
    save_file(tensors | carried, source / "model.safetensors", metadata={"format": "pt"})
    hp.save_pretrained(ours(source), tmp_path / "out")
    written_again = load_file(tmp_path / "out" / "model.safetensors")
    assert written_again.keys() == tensors.keys() | carried.keys()
    for name, tensor in carried.items():
        assert torch.equal(written_again[name], tensor), name
        assert written_again[name].dtype == tensor.dtype, name
    import_checkpoint(source, tmp_path / "run" / "checkpoints", "float64")
    export_checkpoint(tmp_path / "run" / "checkpoints", source, tmp_path / "half", dtype="bfloat16")
    kept = load_file(tmp_path / "half" / "model.safetensors")
    assert carried.keys() <= kept.keys()
    want = plain(source, torch.bfloat16).state_dict()
    found = plain(tmp_path / "half", torch.bfloat16).state_dict()
    router = "model.layers.1.mlp.gate.weight"
    assert kept[router].dtype == want[router].dtype == torch.float32
    assert all(torch.equal(found[n], t) for n, t in want.items())


def test_parameters_that_one_stored_tensor_joins_are_exported_together(tmp_path):
    """Projections of queries, keys and values are parameters here, and one tensor in the files."""
    config = AutoConfig.for_model(
        "lara_mini", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
        linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    stored = written(model, tmp_path / "published")
    hp.save_pretrained(model, tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert len(stored) < len({*model.state_dict()})
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in stored.items())


def test_an_embedding_of_another_part_is_not_the_one_that_a_head_is_tied_to(tmp_path):
    """A tied model stored under the name of its head, beside an encoder whose table has the same shape."""
    save_file(
        {
            "language_model.lm_head.weight": torch.rand(8, 4),
            "qformer.embeddings.word_embeddings.weight": torch.rand(8, 4),
        },
        tmp_path / "model.safetensors",
    )
    config = {"model_type": "instructblip", "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).values["tie_word_embeddings"] is True
    save_file(
        {
            "language_model.lm_head.weight": torch.rand(8, 4),
            "language_model.model.decoder.embed_tokens.weight": torch.rand(8, 4),
        },
        tmp_path / "model.safetensors",
    )
    assert read_config(tmp_path).values["tie_word_embeddings"] is False


@pytest.mark.dist
def test_save_pretrained_of_a_parallelized_model(tmp_path):
    def rank_fn(rank, strategy):
        with hp.World.join("cpu") as world:
            model = qwen3(tied=True)
            materialize(model, seed=5)
            hp.parallelize(model, hp.plan_of(model, strategy), world)
            model.save_pretrained(tmp_path / "own", max_shard_size="20KB")
            hp.save_pretrained(model, tmp_path / "hp", max_file_bytes=20_000)
            model.save_pretrained(tmp_path / "own", token=None, max_shard_size="20KB")
            for name, value in (("state_dict", {}), ("push_to_hub", True), ("max_shard", "20KB")):
                with pytest.raises(BadValue, match=f"does not support `{name}`"):
                    model.save_pretrained(tmp_path / "other", **{name: value})

    want = qwen3(tied=True)
    materialize(want, seed=5)
    for strategy, ranks in (("", 1), ("dp_shard=2", 2)):
        if ranks == 1:
            rank_fn(0, strategy)
        else:
            hp.launch(lambda rank: rank_fn(rank, "dp_shard=2"), ranks, timeout_s=100)
        files = sorted(p.name for p in (tmp_path / "hp").iterdir())
        assert sorted(p.name for p in (tmp_path / "own").iterdir()) == files
        assert len(files) > 3
        for name in files:
            assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "hp" / name).read_bytes()
        assert torch.equal(logits(plain(tmp_path / "own", torch.float32)), logits(want))

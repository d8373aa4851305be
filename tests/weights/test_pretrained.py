import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.pretrained import load_pretrained
from hyper_parallel.backends.torch.weights.tensor_files import WeightFiles
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.runtime import launch
from tests.weights.models import (
    Mlp,
    assert_same,
    full_state,
    join,
    mixtral,
    on_meta,
    qwen3,
    qwen3_moe,
    shard,
)

TOKENS = torch.arange(24).view(2, 12)


def saved(build, directory, max_shard_size="50GB", **kwargs):
    """A model as transformers itself writes it."""
    model = build(**kwargs).eval()
    materialize(model, seed=11, device="cpu")
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


@pytest.mark.torch
@pytest.mark.parametrize(
    ("build", "kwargs"),
    [(qwen3, {}), (qwen3, {"tied": True}), (qwen3_moe, {}), (mixtral, {})],
    ids=["dense", "tied", "qwen3_moe", "mixtral"],
)
@pytest.mark.parametrize("max_shard_size", ["50GB", "20KB"])
def test_a_directory_written_by_transformers_loads_bitwise(tmp_path, build, kwargs, max_shard_size):
    model = saved(build, tmp_path, max_shard_size, **kwargs)
    loaded = on_meta(build, **kwargs).eval()
    report = load_pretrained(loaded, tmp_path)
    assert_same(full_state(loaded), full_state(model))
    assert torch.equal(logits(loaded), logits(model))
    assert report.bytes_read == sum(4 * p.numel() for p in model.parameters())
    if kwargs.get("tied"):
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


@pytest.mark.torch
def test_experts_are_stored_one_by_one(tmp_path):
    """Guards the test above: the file really has the per-expert form."""
    saved(mixtral, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in file.keys()  # noqa: SIM118


@pytest.mark.torch
def test_values_are_cast_to_the_dtype_of_the_parameters(tmp_path):
    model = saved(qwen3, tmp_path)
    loaded = on_meta(qwen3).to(torch.bfloat16)
    load_pretrained(loaded, tmp_path)
    want = {n: p.bfloat16() for n, p in model.named_parameters()}
    assert_same({n: p.detach() for n, p in loaded.named_parameters()}, want)


@pytest.mark.torch
def test_a_plain_module_loads_by_its_own_names(tmp_path):
    model = Mlp()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    loaded = on_meta(Mlp)
    load_pretrained(loaded, tmp_path)
    assert_same(full_state(loaded), full_state(model))


def rewrite(path, change):
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def drop(name):
    return lambda directory: rewrite(directory / "model.safetensors", lambda t: t.pop(name))


def truncate(directory):
    with (directory / "model.safetensors").open("r+b") as file:
        file.truncate(5000)


def put(name, tensor):
    return lambda directory: rewrite(directory / "model.safetensors", lambda t: t.update({name: tensor}))


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "model.safetensors").unlink(), r"missing[^$]*model\.safetensors"),
        (truncate, r"truncated[^$]*model\.safetensors"),
        (drop(NORM), f"no file contains the parameter `{NORM}`"),
        (put("model.other", torch.ones(2)), r"no parameter for `model\.other`"),
        (put(NORM, torch.ones(21)), rf"`{NORM}` does not fit[^$]*\(21,\)[^$]*\(20,\)"),
        (put(NORM, torch.ones(19)), rf"`{NORM}` does not fit"),
    ],
    ids=["missing file", "truncated", "missing", "unexpected", "too large", "too small"],
)
def test_a_damaged_directory_is_refused_before_anything_is_loaded(tmp_path, damage, message):
    saved(qwen3, tmp_path)
    damage(tmp_path)
    model = qwen3()
    before = full_state(model)
    with pytest.raises(WeightsUnreadable, match=message):
        load_pretrained(model, tmp_path)
    assert_same(full_state(model), before)


@pytest.mark.torch
def test_damaged_shards_and_a_missing_expert(tmp_path):
    saved(qwen3_moe, tmp_path, "20KB")
    index = tmp_path / "model.safetensors.index.json"
    key = "model.layers.0.mlp.experts.2.up_proj.weight"
    shard_file = tmp_path / json.loads(index.read_text())["weight_map"][key]
    whole = shard_file.read_bytes()
    rewrite(shard_file, lambda t: t.pop(key))
    with pytest.raises(WeightsUnreadable, match=f"has no tensor `{key}`"):
        load_pretrained(on_meta(qwen3_moe), tmp_path)
    content = json.loads(index.read_text())
    del content["weight_map"][key]
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsUnreadable, match=r"no file contains `model\.layers\.0\.mlp\.experts"):
        load_pretrained(on_meta(qwen3_moe), tmp_path)
    shard_file.write_bytes(whole[:-1])
    with pytest.raises(WeightsUnreadable, match=shard_file.name):
        load_pretrained(on_meta(qwen3_moe), tmp_path)


@pytest.mark.dist
def test_each_rank_reads_only_its_part(tmp_path):
    model = saved(qwen3, tmp_path, "20KB")
    experts = saved(qwen3_moe, tmp_path / "moe")

    def rank_fn(rank):
        join()
        read = []
        for degrees in ({"fsdp": 4}, {"tp": 4}, {"fsdp": 2, "tp": 2}):
            loaded = shard(on_meta(qwen3), **degrees)
            report = load_pretrained(loaded, tmp_path)
            held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in loaded.parameters())
            assert report.bytes_read == 4 * held
            assert_same(full_state(loaded), full_state(model))
            read.append(report.bytes_read)
        loaded = shard(on_meta(qwen3_moe), fsdp=4)
        report = load_pretrained(loaded, tmp_path / "moe")
        assert_same(full_state(loaded), full_state(experts))
        return [*read, report.bytes_read]

    results = launch(rank_fn, 4, timeout_s=100)
    total = 4 * sum(p.numel() for p in model.parameters())
    assert sum(r[0] for r in results) == total
    assert max(r[1] for r in results) < 0.3 * total
    assert sum(r[3] for r in results) == 4 * sum(p.numel() for p in experts.parameters())


@pytest.mark.torch
@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/hostname", "a/b.safetensors", 3])
def test_an_index_names_files_beside_itself_only(tmp_path, file):
    index = {"weight_map": {"lm_head.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsUnreadable, match="index"):
        WeightFiles(tmp_path)

import json

import pytest
import torch
from torch import nn

from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.pretrained import load_pretrained
from hyper_parallel.errors import ModelUnreadable, OutputNotWritable
from hyper_parallel.runtime import launch
from hyper_parallel.trainer.checkpoints.model_export import export_hf
from tests.weights.models import (
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


def initial(build, **kwargs):
    model = on_meta(build, **kwargs).eval()
    materialize(model, seed=21, device="cpu")
    return model


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits


def reload(directory):
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=False, output_loading_info=True)
    assert not any(info.get(k) for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


CASES = pytest.mark.parametrize(
    ("build", "kwargs"),
    [(qwen3, {}), (qwen3, {"tied": True}), (qwen3_moe, {}), (mixtral, {})],
    ids=["dense", "tied", "qwen3_moe", "mixtral"],
)


@pytest.mark.torch
@CASES
@pytest.mark.parametrize("max_file_bytes", [1 << 30, 20_000])
def test_transformers_loads_the_export_bitwise(tmp_path, build, kwargs, max_file_bytes):
    model = initial(build, **kwargs)
    out = export_hf(model, model.config, None, tmp_path / "x", max_file_bytes=max_file_bytes)
    assert len(list(out.glob("*.safetensors"))) == (1 if max_file_bytes > 20_000 else len(set(index(out).values())))
    assert torch.equal(logits(reload(out)), logits(model))
    again = on_meta(build, **kwargs)
    load_pretrained(again, out)
    assert_same(full_state(again), full_state(model))
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def index(directory):
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.torch
def test_dtype_tokenizer_and_configuration_files(tmp_path):
    (tmp_path / "tok").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "notes.txt"):
        (tmp_path / "tok" / name).write_text("{}")
    model = initial(qwen3)
    out = export_hf(model, model.config, tmp_path / "tok", tmp_path / "x", torch.bfloat16)
    names = {p.name for p in out.iterdir()}
    assert names == {
        ".hyper_parallel.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert "auto_map" not in config
    loaded = reload(out)
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    assert model.config.dtype != "bfloat16"


@pytest.mark.torch
def test_an_export_is_replaced_and_other_directories_are_refused(tmp_path):
    model = initial(qwen3)
    export_hf(model, model.config, None, tmp_path / "x")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    export_hf(model, model.config, None, tmp_path / "x")
    assert not reload(tmp_path / "x").lm_head.weight.any()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(OutputNotWritable, match="mine"):
        export_hf(model, model.config, None, tmp_path / "mine")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputNotWritable, match="file"):
        export_hf(model, model.config, None, tmp_path / "file" / "x")
    with pytest.raises(ModelUnreadable, match="Linear"):
        export_hf(nn.Linear(2, 2), None, None, tmp_path / "y")


@pytest.mark.dist
def test_sharded_models_export_the_same_files(tmp_path):
    def rank_fn(rank):
        join()
        for name, build, degrees in jobs:
            model = shard(on_meta(build, **kwargs[name]), **degrees)
            materialize(model, seed=21, device="cpu")
            export_hf(model, model.config, None, tmp_path / name, max_file_bytes=20_000)
        (tmp_path / "mine").mkdir(exist_ok=True)
        (tmp_path / "mine" / "thesis.txt").write_text("precious")
        model = shard(qwen3(), fsdp=4)
        try:
            export_hf(model, model.config, None, tmp_path / "mine")
        except OutputNotWritable:
            return "refused"

    jobs = [
        ("dense", qwen3, {"fsdp": 2, "tp": 2}),
        ("tied", qwen3, {"fsdp": 4}),
        ("moe", qwen3_moe, {"fsdp": 4}),
    ]
    kwargs = {"dense": {}, "tied": {"tied": True}, "moe": {}}
    assert launch(rank_fn, 4, timeout_s=100) == ["refused"] * 4
    for name, build, _ in jobs:
        assert torch.equal(logits(reload(tmp_path / name)), logits(initial(build, **kwargs[name])))

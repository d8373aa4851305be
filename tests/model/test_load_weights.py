"""What load_model makes of the weights beside a config."""

import json
import os
import struct

import pytest

from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.model import load_model
from tests.model.files import TINY, check, model_dir, tensors_of, write_config, write_weights

pytestmark = pytest.mark.unit


def test_matching_weights_leave_no_note_and_give_the_dtype(tmp_path):
    spec = load_model(model_dir(tmp_path))
    assert (spec.dtype, spec.notes) == ("bfloat16", ())
    spec = load_model(model_dir(tmp_path, dtype="F32"))
    assert spec.dtype == "float32"
    assert "stored in float32, config.json says bfloat16" in spec.notes[0]


def test_tied_head_may_be_in_the_file_or_not(tmp_path):
    tied = {**TINY, "tie_word_embeddings": True}
    assert load_model(model_dir(tmp_path, tied)).notes == ()
    assert load_model(model_dir(tmp_path, tied, {"lm_head.weight": ("BF16", (50, 16))})).notes == ()


def test_tensors_without_a_place_are_noted(tmp_path):
    change = {
        "model.layers.2.extra.weight": ("BF16", (3,)),
        "model.rotary_emb.inv_freq": ("F32", (2,)),
    }
    notes = load_model(model_dir(tmp_path, change=change)).notes
    assert notes == ("tensors of the weights that are not planned: 1, first `model.layers.2.extra.weight`",)


def test_wrong_shape_is_refused_by_name(tmp_path):
    change = {"model.layers.1.mlp.up_proj.weight": ("BF16", (25, 16))}
    with pytest.raises(WeightsUnreadable) as error:
        load_model(model_dir(tmp_path, change=change))
    check(
        error,
        "HP703",
        "config.json (1 in all)",
        "layers.1.mlp.up_proj.weight: config [24, 16], file [25, 16]",
    )


def test_missing_parameter_is_refused_by_name(tmp_path):
    directory = model_dir(tmp_path)
    write_config(directory, {**TINY, "num_hidden_layers": 3})
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", "config.json (9 in all)", "model.layers.2.self_attn.q_proj.weight: missing")


def test_mismatch_of_a_guessed_family_is_a_note(tmp_path):
    directory = model_dir(tmp_path, change={"model.norm.weight": ("BF16", (8,))})
    write_config(directory, {**TINY, "model_type": "novel"})
    assert "differ from the weight files: 1," in load_model(directory).notes[1]


def per_expert(block, names):
    """Weights of a tiny mixture in the published form: one matrix per expert."""
    values = {**TINY, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1}
    gate, up, down = names
    tensors = {}
    for name, (dtype, shape) in tensors_of(values).items():
        layer = name.split("mlp.")[0]
        if "experts" not in name:
            tensors[name.replace(".mlp.", f".{block}.")] = (dtype, shape)
            continue
        for e in range(2):
            at = f"{layer}{block}.experts.{e}"
            tensors[f"{at}.{gate}.weight"] = tensors[f"{at}.{up}.weight"] = (dtype, (24, 16))
            tensors[f"{at}.{down}.weight"] = (dtype, (16, 24))
    return values, tensors


def test_experts_stored_apart_are_recognised(tmp_path):
    values, tensors = per_expert("block_sparse_moe", ("w1", "w3", "w2"))
    write_config(tmp_path, values)
    write_weights(tmp_path / "model.safetensors", tensors)
    assert load_model(tmp_path).notes == ()
    name = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
    write_weights(tmp_path / "model.safetensors", {**tensors, name: ("BF16", (24, 16))})
    with pytest.raises(WeightsUnreadable) as error:
        load_model(tmp_path)
    check(error, "HP703", "config.json (1 in all)", f"{name}: config [16, 24], file [24, 16]")
    del tensors[name]
    write_weights(tmp_path / "model.safetensors", tensors)
    with pytest.raises(WeightsUnreadable) as error:
        load_model(tmp_path)
    check(error, "HP703", "model.layers.1.mlp.experts.down_proj: missing")


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("model.language_model.", "model."), ("language_model.model.", "model.")],
)
def test_language_part_of_multimodal_weights(tmp_path, outer, inner):
    values = {"model_type": "gemma3", "text_config": {**TINY, "model_type": "gemma3_text"},
              "tie_word_embeddings": True, "vision_config": {}}  # fmt: skip
    write_config(tmp_path, values)
    tensors = tensors_of({**TINY, "model_type": "gemma3_text", "tie_word_embeddings": True})
    tensors = {n.replace(inner, outer, 1): t for n, t in tensors.items()}
    tensors["vision_tower.patch.weight"] = ("BF16", (4, 4))
    write_weights(tmp_path / "model.safetensors", tensors)
    spec = load_model(tmp_path)
    assert spec.family == "gemma3_text"
    assert len(spec.notes) == 2
    assert "tensors of the weights that are not planned: 1, first `vision_tower" in spec.notes[1]


def test_weights_saved_without_the_prefix(tmp_path):
    values = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 20}
    write_config(tmp_path, values)
    tensors = {n.removeprefix("transformer."): t for n, t in tensors_of(values).items()}
    tensors["h.0.attn.bias"] = ("F32", (1, 1, 4, 4))
    write_weights(tmp_path / "model.safetensors", tensors)
    assert all("not planned" not in n for n in load_model(tmp_path).notes)


def corruptions(raw):
    length = int.from_bytes(raw[:8], "little")
    return {
        "empty": b"",
        "half the length": raw[:4],
        "half the header": raw[: 8 + length // 2],
        "no data": raw[: 8 + length],
        "last byte lost": raw[:-1],
        "huge length": b"\xff" * 8 + raw[8:],
        "not json": raw[:8] + b"x" * length + raw[8 + length :],
        "a list": struct.pack("<Q", 2) + b"[]",
        "no shape": struct.pack("<Q", 10) + b'{"a": {} }',
        "before the data": struct.pack("<Q", 63)
        + b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [-12, 0]}}',
        "negative": struct.pack("<Q", 60) + b'{"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 12]}}',
    }  # fmt: skip


@pytest.mark.parametrize("kind", corruptions(bytes(8)))
def test_corrupt_weights_name_the_file(tmp_path, kind):
    path = model_dir(tmp_path) / "model.safetensors"
    path.write_bytes(corruptions(path.read_bytes())[kind])
    with pytest.raises(WeightsUnreadable) as error:
        load_model(path.parent)
    check(error, "HP703", "`model.safetensors` is truncated, corrupt or unreadable", f"--> {path}")


def sharded(tmp_path):
    directory = tmp_path / "shards"
    write_config(directory)
    tensors = tensors_of(TINY)
    halves = [dict(list(tensors.items())[i::2]) for i in range(2)]
    weight_map = {}
    for i, half in enumerate(halves, 1):
        file = f"model-0000{i}-of-00002.safetensors"
        write_weights(directory / file, half)
        weight_map |= dict.fromkeys(half, file)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory, index


def test_shards(tmp_path):
    directory, _ = sharded(tmp_path)
    assert load_model(directory).notes == ()


def test_missing_shard_is_named_and_no_shard_is_a_note(tmp_path):
    directory, _ = sharded(tmp_path)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", "weight files are missing (1 of 2)", "fetch `model-00002-of-00002.safetensors` again")
    (directory / "model-00001-of-00002.safetensors").unlink()
    assert "not checked" in load_model(directory).notes[0]


def test_a_huge_number_of_shards_is_not_listed(tmp_path):
    directory = model_dir(tmp_path)
    (directory / "model.safetensors").rename(directory / "model-1-of-9999999999999.safetensors")
    assert load_model(directory).notes == ()


@pytest.mark.parametrize("with_index", [True, False])
def test_a_shard_that_is_a_pipe_is_refused_by_name(tmp_path, with_index):
    directory, index = sharded(tmp_path)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.unlink()
    os.mkfifo(shard)
    if not with_index:
        index.unlink()
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", "00002-of-00002.safetensors")


def test_index_that_lists_foreign_names_or_is_corrupt(tmp_path):
    directory, index = sharded(tmp_path)
    data = json.loads(index.read_text())
    data["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(data))
    assert load_model(directory).notes == ()
    index.unlink()
    assert load_model(directory).notes == ()
    index.write_text(json.dumps(data)[:20])
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", index.name)


def test_tied_weights_may_be_stored_under_the_name_of_the_head(tmp_path):
    tied = {**TINY, "tie_word_embeddings": True}
    tensors = tensors_of(tied)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    write_config(tmp_path, tied)
    write_weights(tmp_path / "model.safetensors", tensors)
    assert load_model(tmp_path).tied_embeddings
    del tensors["lm_head.weight"]
    write_weights(tmp_path / "model.safetensors", tensors)
    with pytest.raises(WeightsUnreadable) as error:
        load_model(tmp_path)
    check(error, "HP703", "model.embed_tokens.weight: missing")


def test_an_index_of_gigabytes_is_refused_before_it_is_read(tmp_path):
    directory = model_dir(tmp_path)
    (directory / "model.safetensors").rename(directory / "model-00001-of-00001.safetensors")
    index = directory / "model.safetensors.index.json"
    index.touch()
    os.truncate(index, 1 << 40)
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", "bytes", "index.json")

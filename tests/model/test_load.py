"""What load_model accepts, notes and refuses."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import ModelUnreadable, UnknownModel, WeightsUnreadable
from hyper_parallel.model import ModelSpec, load_model, preset_names, spec_from_config
from hyper_parallel.model._presets import read_preset

pytestmark = pytest.mark.unit

TINY = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 50,
}


def write_config(directory, values=TINY):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    return path


def write_weights(path, tensors):
    """A safetensors file of zeros: name to (dtype word, shape)."""
    width = {"F32": 4, "BF16": 2, "F16": 2}
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        size = width[dtype]
        for s in shape:
            size *= s
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def tensors_of(values, dtype="BF16"):
    spec = spec_from_config(values, name="t")
    return {name: (dtype, p.shape) for name, p in spec.named_params() if not p.tied_to}


def model_dir(tmp_path, values=TINY, change=None, dtype="BF16"):
    directory = tmp_path / "tiny"
    write_config(directory, values)
    tensors = tensors_of(values, dtype)
    write_weights(directory / "model.safetensors", {**tensors, **(change or {})})
    return directory


# accepted


def test_directory_file_and_memory_give_the_same_model(tmp_path):
    path = write_config(tmp_path / "my-model")
    from_dir, from_file = load_model(path.parent), load_model(str(path))
    assert from_dir == from_file == spec_from_config(TINY, name="my-model")
    assert (from_dir.name, from_dir.family, from_dir.dtype) == ("my-model", "llama", "bfloat16")


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("LLAMA_3_8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.1-405B", "llama-3-405b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("DeepSeek-R1", "deepseek-v3"),
    ],
)
def test_names_and_hub_ids_find_presets(text, preset):
    assert load_model(text) == load_model(preset)


def test_presets_state_their_source():
    for name in preset_names():
        values = read_preset(name)
        assert len(values["_source"]) > 20
        assert load_model(name).notes == ()


def test_a_path_wins_over_a_preset(tmp_path, monkeypatch):
    write_config(tmp_path / "llama-3-8b")
    monkeypatch.chdir(tmp_path)
    assert load_model("llama-3-8b").hidden_size == 16


def test_a_directory_without_config_does_not_hide_a_preset(tmp_path, monkeypatch):
    (tmp_path / "llama-3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("llama-3-8b").hidden_size == 4096


def test_unknown_family_is_read_like_llama_with_a_note():
    spec = spec_from_config({**TINY, "model_type": "novel"}, name="n")
    assert spec.blocks == spec_from_config(TINY, name="n").blocks
    assert "`novel` is not known" in spec.notes[0]


def test_quantised_weights_are_noted(tmp_path):
    values = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    directory = model_dir(tmp_path, values, {"model.norm.weight_scale_inv": ("F32", (1,))})
    notes = " ".join(load_model(directory).notes)
    assert "quantised (fp8)" in notes
    assert "unchecked" in notes


def test_a_dtype_object_of_a_live_config_is_read():
    class Float16:
        def __str__(self):
            return "torch.float16"

    assert spec_from_config({**TINY, "dtype": Float16()}, name="n").dtype == "float16"


# refused


def check(error, code, *words):
    text = str(error.value)
    assert error.value.code == code
    assert error.value.hint
    for word in words:
        assert word in text
    return text


def test_unknown_name_shows_the_nearest_preset():
    with pytest.raises(UnknownModel) as error:
        load_model("llama-3-80b", where="recipe.yaml: model.path")
    check(error, "HP304", "did you mean `llama-3-8", "recipe.yaml: model.path", "deepseek-v3")


def test_unknown_hub_id_shows_how_to_fetch_it():
    with pytest.raises(UnknownModel) as error:
        load_model("some-org/zzz")
    check(error, "HP304", "hf download some-org/zzz --include config.json --local-dir zzz")


def test_another_organisations_model_is_not_taken_for_a_preset():
    with pytest.raises(UnknownModel) as error:
        load_model("some-org/Qwen3-8B")
    check(error, "HP304", "did you mean `qwen3-8b`")


@pytest.mark.parametrize("text", ["x" * 5000, "a\x00b", "", "~nobody-here/model"])
def test_odd_paths_are_unknown_models(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModel) as error:
        load_model(text)
    check(error, "HP304")


def test_directory_without_config(tmp_path):
    with pytest.raises(UnknownModel) as error:
        load_model(tmp_path)
    check(error, "HP304", "has no config.json")


def test_missing_keys_are_all_named():
    values = {k: v for k, v in TINY.items() if k not in ("hidden_size", "vocab_size")}
    for model_type in ("llama", "novel"):
        with pytest.raises(ModelUnreadable) as error:
            spec_from_config({**values, "model_type": model_type}, name="n", where="c.json")
        check(error, "HP305", "`hidden_size`", "`vocab_size`", "c.json")
    with pytest.raises(ModelUnreadable) as error:
        spec_from_config({"model_type": "gpt2", "vocab_size": 10}, name="n")
    check(error, "HP305", "`n_embd`", "`n_layer`", "`n_head`")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": "16"}, ["`hidden_size`", "'16'"]),
        ({"hidden_size": 0}, ["`hidden_size`", "whole number >= 1"]),
        ({"num_hidden_layers": True}, ["`num_hidden_layers`"]),
        ({"tie_word_embeddings": "yes"}, ["`tie_word_embeddings`", "true or false"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4, num_key_value_heads=3"]),
        ({"num_attention_heads": 6}, ["hidden_size=16, num_attention_heads=6", "head_dim"]),
        ({"dtype": "int3"}, ["int3"]),
        ({"model_type": 3}, ["`model_type`"]),
        ({"text_config": 3}, ["`text_config`"]),
        ({"layer_types": ["linear_attention"] * 2}, ["linear_attention"]),
        ({"model_type": "novel_moe", "num_experts": 8}, ["`novel_moe`", "num_experts=8"]),
        ({"model_type": "t5", "is_encoder_decoder": True}, ["`t5`", "is_encoder_decoder"]),
        ({"model_type": "qwen3", **{"use_sliding_window": True, "layer_types": ["full_attention"]}}, ["`layer_types`"]),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, ["bidirectional"]),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, ["num_experts_per_tok=9, experts=8"]),
        ({"model_type": "deepseek_v3", "moe_layer_freq": 2}, ["`moe_layer_freq`"]),
        ({"model_type": "gpt2", "n_embd": 18, "n_head": 4, "n_layer": 1}, ["n_embd=18, n_head=4"]),
        ({"model_type": "gpt2", "add_cross_attention": True}, ["`add_cross_attention`"]),
    ],
)  # fmt: skip
def test_unreadable_values_are_named(change, words):
    values = {**TINY, **change}
    if "num_attention_heads" in change:
        values["num_key_value_heads"] = None
    with pytest.raises(ModelUnreadable) as error:
        spec_from_config(values, name="n", where="c.json")
    check(error, "HP305", "c.json", *words)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"llama"', "\x00"])
def test_config_that_is_not_a_json_object(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelUnreadable) as error:
        load_model(tmp_path)
    check(error, "HP305", str(path))


KEYS = [*TINY, "head_dim", "tie_word_embeddings", "text_config", "quantization_config", "layer_types",
        "sliding_window", "use_sliding_window", "mlp_only_layers", "num_experts", "num_local_experts",
        "n_shared_experts", "q_lora_rank", "torch_dtype", "sliding_window_pattern", "n_embd", "n_inner"]  # fmt: skip
VALUES = st.integers(-2, 40) | st.sampled_from(
    [None, True, False, 0.5, 2.0, float("inf"), "", "16", "bfloat16", [], [1], ["full_attention"] * 2,
     [None, 0], ["sliding_attention", 3], {}, {"a": 1}, {"hidden_size": 8}, {"quant_method": 3}]
)  # fmt: skip
TYPES = ["llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "gpt2", "novel"]


@given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3))
def test_any_config_is_read_or_refused_by_code(model_type, change):
    values = {**TINY, "model_type": model_type, **change}
    try:
        spec = spec_from_config(values, name="fuzz")
    except ModelUnreadable:
        return
    assert isinstance(spec, ModelSpec)
    assert spec.num_params > 0


# weights


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
    assert notes == (
        "tensors of the weights that are not planned: 1, first `model.layers.2.extra.weight`",
    )


def test_wrong_shape_is_refused_by_name(tmp_path):
    change = {"model.layers.1.mlp.up_proj.weight": ("BF16", (25, 16))}
    with pytest.raises(WeightsUnreadable) as error:
        load_model(model_dir(tmp_path, change=change))
    check(
        error,
        "HP703",
        "config.json: 1",
        "layers.1.mlp.up_proj.weight: config [24, 16], file [25, 16]",
    )


def test_missing_parameter_is_refused_by_name(tmp_path):
    directory = model_dir(tmp_path)
    write_config(directory, {**TINY, "num_hidden_layers": 3})
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", "config.json: 9", "model.layers.2.self_attn.q_proj.weight: missing")


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
    check(error, "HP703", "config.json: 1", f"{name}: config [16, 24], file [24, 16]")
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
    check(error, "HP703", "1 of 2 weight files", "fetch `model-00002-of-00002.safetensors` again")
    (directory / "model-00001-of-00002.safetensors").unlink()
    assert "unchecked" in load_model(directory).notes[0]


def test_index_that_disagrees_or_is_corrupt(tmp_path):
    directory, index = sharded(tmp_path)
    data = json.loads(index.read_text())
    data["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", "ghost.weight")
    index.write_text(index.read_text()[:20])
    with pytest.raises(WeightsUnreadable) as error:
        load_model(directory)
    check(error, "HP703", index.name)

"""What load_model accepts, notes and refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyper_parallel.errors import ModelUnreadable, UnknownModel
from hyper_parallel.model import ModelSpec, load_model, preset_names, spec_from_config
from hyper_parallel.model.loading import read_preset
from tests.model.files import TINY, check, model_dir, write_config

pytestmark = pytest.mark.unit

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


def test_a_null_dtype_does_not_hide_another_key():
    text = {**TINY, "model_type": "gemma3_text", "dtype": None}
    outer = {"model_type": "gemma3", "dtype": "float16", "text_config": text}
    assert spec_from_config(outer, name="n").dtype == "float16"
    assert spec_from_config({**TINY, "dtype": None, "torch_dtype": "float16"}, name="n").dtype == "float16"


def test_unknown_family_is_read_like_llama_with_a_note():
    spec = spec_from_config({**TINY, "model_type": "novel"}, name="n")
    assert spec.blocks == spec_from_config(TINY, name="n").blocks
    assert "`novel` is not known" in spec.notes[0]


def test_quantised_weights_are_noted(tmp_path):
    values = {**TINY, "quantization_config": {"quant_method": "fp8"}}
    directory = model_dir(tmp_path, values, {"model.norm.weight_scale_inv": ("F32", (1,))})
    notes = " ".join(load_model(directory).notes)
    assert "quantised (fp8)" in notes
    assert "not checked" in notes


def test_pickled_weights_are_noted(tmp_path):
    directory = write_config(tmp_path / "my-model").parent
    (directory / "pytorch_model.bin").write_bytes(b"x")
    assert "pickled" in " ".join(load_model(directory).notes)


def test_a_dtype_object_of_a_live_config_is_read():
    class Float16:
        def __str__(self):
            return "torch.float16"

    assert spec_from_config({**TINY, "dtype": Float16()}, name="n").dtype == "float16"


# refused


def test_unknown_name_shows_the_nearest_preset():
    with pytest.raises(UnknownModel) as error:
        load_model("llama-3-80b", where="recipe.yaml: model.path")
    check(error, "HP304", "did you mean `llama-3-8", "recipe.yaml: model.path", "deepseek-v3")


def test_unknown_hub_id_shows_how_to_fetch_it(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownModel) as error:
        load_model("some-org/zzz")
    check(error, "HP304", "HF_HUB_OFFLINE=0 hf download some-org/zzz config.json")


def test_another_organisations_model_is_not_taken_for_a_preset(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownModel) as error:
        load_model("some-org/Qwen3-8B")
    check(error, "HP304", "HF_HUB_OFFLINE=0 hf download some-org/Qwen3-8B config.json")


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
        ({"num_hidden_layers": 10**12}, ["`num_hidden_layers`", "from 1 to 100000"]),
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

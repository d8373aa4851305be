"""The oracle of this room: what transformers builds on the meta device and writes to disk."""

import itertools
import json

import pytest
import torch

from hyper_parallel.backends.torch import read_model
from hyper_parallel.model import ModelSpec, load_model, preset_names, spec_from_config
from hyper_parallel.model.families import FAMILIES
from hyper_parallel.model.loading import read_preset
from tests.model.tiny import VARIANTS

pytestmark = pytest.mark.torch


def class_config(model_type, changes):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **changes)


def build(config, device="meta"):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture(params=VARIANTS, ids=[f"{t}-{n}" for t, n, _ in VARIANTS])
def case(request, tmp_path):
    """A tiny config and the spec read from the config.json that transformers saves for it."""
    model_type, _, changes = request.param
    config = class_config(model_type, changes)
    config.save_pretrained(tmp_path)
    return config, load_model(tmp_path)


def test_names_shapes_and_ties_are_those_transformers_builds(case):
    config, spec = case
    model = build(config)
    real = dict(model.named_parameters(remove_duplicate=False))
    read = list(spec.named_params())
    assert {n: p.shape for n, p in read} == {n: tuple(p.shape) for n, p in real.items()}
    assert len(read) == len(real)
    shared = {(n, m) for n, m in itertools.permutations(real, 2) if real[n] is real[m] and n.startswith("lm_head")}
    assert {(n, p.tied_to) for n, p in read if p.tied_to} == shared
    assert spec.num_params == sum(p.numel() for p in model.parameters())
    assert not [note for note in spec.notes if "were not measured" not in note]


def test_the_module_is_read_as_the_config_is(case):
    config, spec = case
    read = read_model(build(config), spec.name)
    assert {(n, p.shape, p.tied_to) for n, p in read.named_params()} == {
        (n, p.shape, p.tied_to) for n, p in spec.named_params()
    }
    kinds = [(b.layers, b.attention, b.mlp) for b in read.decoder_blocks]
    assert kinds == [(b.layers, b.attention, b.mlp) for b in spec.decoder_blocks]
    numbers = ("family", "hidden_size", "vocab_size", "num_active_params", "num_matmul_params")
    assert [getattr(read, n) for n in numbers] == [getattr(spec, n) for n in numbers]


def test_windows_are_those_of_the_config_class(case):
    config, spec = case
    types = getattr(config, "layer_types", None)
    if types is None:
        window = getattr(config, "sliding_window", None)
        expected = [window] * config.num_hidden_layers
    else:
        expected = [config.sliding_window if t == "sliding_attention" else None for t in types]
    assert [spec.block_of(i).attention.window for i in range(spec.num_layers)] == expected


def test_tied_head_points_to_the_embedding(case):
    config, spec = case
    head = spec.blocks[-1].params[0]
    assert (head.tied_to is not None) == config.tie_word_embeddings == spec.tied_embeddings
    if head.tied_to:
        assert head.tied_to == spec.blocks[0].params[0].name


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "shards"])
def test_saved_weights_agree_with_the_spec(case, sharded, tmp_path):
    config, spec = case
    model = build(config, "cpu").to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    checked = load_model(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    assert not [note for note in checked.notes if "were not measured" not in note]
    assert checked.dtype == "bfloat16"
    assert checked.fingerprint == spec.fingerprint


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults_are_those_of_the_config_class(model_type):
    """An entry repeats defaults of transformers for keys that a config.json may leave out."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    fields = cls.__dataclass_fields__
    family = FAMILIES[model_type]
    for key, value in family.defaults.items():
        if key == "sliding_window_pattern":  # a number in older files, `layer_types` today
            continue
        name = next((k for k in (family.aliases.get(key, key), key) if k in fields), None)
        assert name is not None, f"{model_type} has no `{key}`"
        assert fields[name].default == value, key


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_config_of_only_required_keys_reads_as_transformers_reads_it(model_type):
    values = {
        "model_type": model_type,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "intermediate_size": 64,
        "vocab_size": 160000,  # above every default pad token
    }
    model = build(class_config(model_type, {k: v for k, v in values.items() if k != "model_type"}))
    spec = spec_from_config(values, name="bare")
    assert {n: p.shape for n, p in spec.named_params()} == {
        n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize("preset", preset_names())
def test_presets_are_what_transformers_builds_at_full_size(preset):
    values = {k: v for k, v in read_preset(preset).items() if not k.startswith("_")}
    model = build(class_config(values.pop("model_type"), values))
    spec = load_model(preset)
    real = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    assert {n: p.shape for n, p in spec.named_params()} == real
    assert spec.num_params == sum(p.numel() for p in model.parameters())


def test_text_part_of_a_multimodal_model(tmp_path):
    from transformers import AutoConfig

    text = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 100,
        "head_dim": 12,
    }
    config = AutoConfig.for_model("qwen3_vl", text_config=text, tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    spec = load_model(tmp_path)
    assert isinstance(spec, ModelSpec)
    assert (spec.family, spec.hidden_size, spec.tied_embeddings) == ("qwen3", 32, True)
    assert "only its language part" in spec.notes[0]
    alone = spec_from_config({"model_type": "qwen3", "tie_word_embeddings": True, **text}, name="x")
    assert spec.blocks == alone.blocks
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_vl"

"""Properties of models are measured: what leaks, what is causal, which caches equal the whole text."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import Contradiction
from hyper_parallel.model import ConfigFile, ModelProperties, read_config
from hyper_parallel.planner import plan_recipe
from hyper_parallel.topology import cache_dir
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.engine.recipe_model import read_spec
from hyper_parallel.trainer.generation import Generator, Sampling
from hyper_parallel.trainer.model_properties import (
    check_properties,
    measure_config,
    properties_of,
)
from tests.e2e.runs import command

pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
VISION = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14, "projection_dim": 32,
}  # fmt: skip
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES},
    "sliding": {"model_type": "mistral", **SIZES, "sliding_window": 4096},
    "experts": {
        "model_type": "qwen3_moe", **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "head_dim": 8,
    },
    "explicit masks": {
        "model_type": "gpt_oss", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    },
    "linear attention": {
        "model_type": "minimax", **SIZES, "num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8,
    },
    "state space": {"model_type": "mamba", "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2},
    "bidirectional": {
        "model_type": "bert", **SIZES, "is_decoder": False, "bos_token_id": None, "eos_token_id": None,
    },
    "growing rope": {
        "model_type": "llama", **SIZES, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    },
}  # fmt: skip
LACKS = {
    "linear attention": {"documents_independent"},
    "state space": {"documents_independent"},
    "bidirectional": {"causal", "documents_independent", "padding_inert", "growing_cache"},
    "growing rope": {"history_independent"},
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def file_of(config):
    return ConfigFile(config, "model", "model")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_property_that_a_class_lacks_is_measured_and_no_other(name):
    measured = measure_config(file_of(CONFIGS[name]))
    answers = measured.by_name()
    assert {n for n, answer in answers.items() if answer.holds is False} == LACKS.get(name, set())
    assert answers["causal"].holds is not None
    assert not any(answer.error for answer in answers.values())
    assert all(a.difference > 1e-4 for a in answers.values() if a.holds is False)


def test_layers_that_do_not_run_on_half_batches_are_found():
    """Bloom passes its position biases as one tensor of [sequences * heads], whose halves cannot be told."""
    bloom = {"model_type": "bloom", "vocab_size": 320, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    assert measure_config(file_of(CONFIGS["experts"])).half_batches.holds
    assert not measure_config(file_of(bloom)).half_batches.holds


def test_a_config_of_any_size_is_measured_on_a_small_copy():
    """Keys that a config leaves out have the sizes of the class, billions of parameters here."""
    measured = measure_config(file_of({"model_type": "qwen3_next"}))
    assert measured.documents_independent.holds is False
    assert measured.causal.holds


CODE = """
from transformers import Qwen3Config, Qwen3ForCausalLM
class StrangeConfig(Qwen3Config):
    model_type = "strange"
class StrangeModel(Qwen3ForCausalLM):
    config_class = StrangeConfig
    def forward(self, *args, position_ids=None, **kwargs):
        return super().forward(*args, **kwargs)
"""


def test_code_beside_a_config_is_measured_on_a_small_copy(tmp_path, monkeypatch):
    """Sizes of billions of parameters; the class ignores positions, so packed documents see each other."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    classes = {"AutoConfig": "code.StrangeConfig", "AutoModelForCausalLM": "code.StrangeModel"}
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "head_dim": 128,
    }
    config = {
        "model_type": "strange",
        **sizes,
        "architectures": ["StrangeModel"],
        "auto_map": classes,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(CODE)
    measured = properties_of(read_config(str(tmp_path)), trusted=True)
    assert measured.model_class == "StrangeModel"
    assert measured.causal.holds
    assert measured.documents_independent.holds is False


def test_a_class_that_ends_the_process_is_not_measured_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hf"))
    classes = {"AutoConfig": "code.StrangeConfig", "AutoModelForCausalLM": "code.StrangeModel"}
    config = {"model_type": "strange", **SIZES, "head_dim": 8, "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(CODE.replace("return super()", "import os; os._exit(3)\n        return super()"))
    measured = properties_of(read_config(str(tmp_path)), trusted=True)
    assert measured.causal.holds is None
    assert measured.causal.reason
    assert not [*(cache_dir() / "properties").glob("*.json")]


def test_answers_are_measured_once_for_a_config():
    first = properties_of(file_of(CONFIGS["llama"]))
    (stored,) = (cache_dir() / "properties").glob("*.json")
    values = json.loads(stored.read_text())
    stored.write_text(json.dumps(values | {"measured_on": "read from the cache"}))
    named = {**CONFIGS["llama"], "transformers_version": "4.0", "pad_token_id": 7}
    assert properties_of(file_of(named)).measured_on == "read from the cache"
    other = properties_of(file_of({**CONFIGS["llama"], "num_key_value_heads": 4}))
    assert other.measured_on == first.measured_on.replace("36,000", "38,048")
    stored.write_text("damaged")
    assert properties_of(file_of(CONFIGS["llama"])) == first


@pytest.fixture
def place(tmp_path):
    """A recipe of instruction tuning without a model."""
    turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "an answer"}]
    lines = [json.dumps({"messages": turns}) for _ in range(8)]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        f"stage: sft\ndata: {{source: {tmp_path}/chat.jsonl, seq_len: 32, vocab_size: 320, holdout: 0}}\n"
        "training: {steps: 1, dtype: float64, tokens_per_step: 32}\n"
        f"parallel: {{dp_shard: 1}}\ncheckpoint: {{export: false}}\noutput_dir: {tmp_path}/out\n"
    )
    return tmp_path


def dry(place, name, *words, **keys):
    path = place / "model.json"
    path.write_text(json.dumps(CONFIGS[name] | keys))
    return command("train", f"{place}/recipe.yaml", "--dry-run", f"model.path={path}", *words)


def test_packing_is_refused_where_documents_see_each_other_and_nowhere_else(place):
    for name in ("sliding", "experts"):
        dry(place, name)
    with pytest.raises(Contradiction, match="same sequence attend to each other") as refused:
        dry(place, "linear attention")
    dry(place, "linear attention", *refused.value.hint.split())


def test_flash_attention_takes_packed_documents_in_rows_of_their_own(place):
    """Flash attention masks documents in batches of one row only. It needs a GPU, so only the check runs here."""
    path = place / "model.json"
    path.write_text(json.dumps(CONFIGS["llama"]))
    words = (f"model.path={path}", "model.attn_implementation=flash_attention_2", "training.microbatch=2",
             "training.tokens_per_step=64")  # fmt: skip
    loaded = load_recipe(place / "recipe.yaml", words)
    plan = plan_recipe(loaded.recipe, None, loaded.where, read_spec(str(path)))
    with pytest.raises(Contradiction, match="microbatches of a single sequence") as refused:
        check_properties(loaded, plan)
    loaded = load_recipe(place / "recipe.yaml", (*words, refused.value.hint))
    plan = plan_recipe(loaded.recipe, None, loaded.where, read_spec(str(path)))
    assert check_properties(loaded, plan).documents_independent.holds


def test_a_model_that_sees_its_labels_is_refused(place):
    with pytest.raises(Contradiction, match="not causal") as refused:
        dry(place, "bidirectional", "data.packing=false")
    assert refused.value.hint.startswith('set "is_decoder": true in ')
    dry(place, "bidirectional", "data.packing=false", is_decoder=True)


def test_a_plan_and_doctor_say_what_was_measured(place):
    path = place / "model.json"
    path.write_text(json.dumps(CONFIGS["llama"]))
    words = (f"model.path={path}", "data.packing=false", "--no-calibrate")
    command("train", f"{place}/recipe.yaml", *words)
    plan = json.loads((place / "out" / "plan.json").read_text())
    shown = json.loads(command("doctor", "--model", str(path), "--json").stdout)
    assert plan["properties"] == shown
    assert shown["model_class"] == "LlamaForCausalLM"
    text = command("doctor", "--model", str(path)).stdout
    assert "packed documents do not influence each other: yes" in text
    assert isinstance(properties_of(read_config(str(path))), ModelProperties)


def greedy(model, ids, count):
    """Tokens from a forward pass of the whole text for each."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "dory", **SIZES, "head_dim": 8},
        {"model_type": "moshi", **SIZES, "ffn_dim": 48, "head_dim": 8},
        CONFIGS["bidirectional"],
        {
            "model_type": "recurrent_gemma",
            **SIZES,
            "lru_width": 48,
            "attention_window_size": 16,
            "block_types": ["recurrent", "attention"],
        },
        {"model_type": "roberta", **SIZES, "is_decoder": True, "pad_token_id": 1},
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama", **SIZES},
            "vision_config": VISION,
        },
    ],
    ids=[
        "state outside of the cache",
        "other state",
        "bidirectional",
        "state in modules",
        "own positions",
        "images",
    ],
)
def test_generation_equals_the_whole_text_alone_and_in_a_batch(run_dir, tmp_path, config):
    torch.manual_seed(1)
    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    model = auto.from_config(AutoConfig.for_model(**config), dtype=torch.float64)
    model.eval().save_pretrained(tmp_path / "export")
    load_tokenizer(run_dir / "export").save_pretrained(str(tmp_path / "export"))
    generator = Generator(tmp_path, device="cpu", dtype="float64")
    prompts, sampling = ("def f1", "return 12 and more", "x"), Sampling(6, temperature=0.0)
    whole = [greedy(model, generator.encode(prompt), 6) for prompt in prompts]
    assert [list(generator.generate(p, sampling).token_ids) for p in prompts] == whole
    batch = generator.generate_batch(prompts, sampling, slots=2)
    assert [list(made.token_ids) for made in batch] == whole

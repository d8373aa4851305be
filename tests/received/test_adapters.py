"""Directories of adapters that somebody else may have written: read, or refused with a code at little cost."""

import copy
import json
import resource
import time
from functools import cache

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch.peft_adapters import read_adapter_config
from hyper_parallel.config import Recipe
from hyper_parallel.errors import (
    BadValue,
    HyperParallelError,
    UnsupportedSharding,
    WeightsUnreadable,
)
from hyper_parallel.trainer.checkpoints.adapter_files import load_adapter
from hyper_parallel.trainer.engine.recipe_model import build_model
from tests.e2e.runs import CONFIG

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # peft's own

FOREVER = r"([a-z_.0-9]|[a-z.]|.)+\d\d"
NESTED = "(" * 3000
WIDEST = 64


@cache
def original():
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG))


def model():
    return copy.deepcopy(original())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    adapted = peft.get_peft_model(model(), peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"]))
    place = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(place)
    return json.loads((place / "adapter_config.json").read_text()), load_file(place / "adapter_model.safetensors")


@pytest.fixture
def adapter(written, tmp_path):
    """Write the adapter with some values of its configuration, and tensors, changed."""

    def write(tensors=None, **changes):
        config, stored = written
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
        save_file(stored if tensors is None else tensors(stored), tmp_path / "adapter_model.safetensors")
        return tmp_path

    return write


def refused(directory):
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(HyperParallelError) as raised:
        load_adapter(model(), directory)
    assert time.process_time() - start < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert len(raised.value.render()) < 2000
    return raised.value


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"r": 10**9}, WeightsUnreadable, "no factor of rank"),
        ({"r": 10**9, "rank_pattern": {"q_proj": 4}}, BadValue, f"1 to {WIDEST}"),
        ({"rank_pattern": {"q_proj": 10**9}}, BadValue, f"1 to {WIDEST}"),
        ({"rank_pattern": {"q_proj": 0}}, WeightsUnreadable, "rank_pattern.q_proj"),
        ({"r": True}, WeightsUnreadable, "$.r"),
        ({"r": "8"}, WeightsUnreadable, "$.r"),
        ({"lora_alpha": float("nan")}, WeightsUnreadable, "finite"),
        ({"lora_alpha": -1}, WeightsUnreadable, "lora_alpha"),
        ({"lora_dropout": 2.0}, WeightsUnreadable, "lora_dropout"),
        ({"target_modules": FOREVER}, BadValue, "takes more than"),
        ({"target_modules": NESTED}, BadValue, "not a valid regular expression"),
        ({"target_modules": "a" * 20_000}, BadValue, "20,000 characters"),
        ({"target_modules": {"a": 1}}, WeightsUnreadable, "target_modules"),
        ({"target_modules": ["nothing"] * 20_000}, BadValue, "no module"),
        ({"exclude_modules": FOREVER}, BadValue, "takes more than"),
        ({"rank_pattern": {FOREVER: 4}}, BadValue, "takes more than"),
        ({"alpha_pattern": {FOREVER: 4}}, BadValue, "takes more than"),
        ({"layers_to_transform": [0], "layers_pattern": FOREVER}, BadValue, "not regular expressions"),
        ({"layers_pattern": "layers"}, WeightsUnreadable, "layers_to_transform"),
        ({"modules_to_save": ["(a+)+$"]}, BadValue, "no module"),
        ({"modules_to_save": [3]}, WeightsUnreadable, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_999999"}, UnsupportedSharding, "pissa_niter"),
        ({"init_lora_weights": "lora_ga"}, UnsupportedSharding, "lora_ga"),
        ({"use_dora": True}, UnsupportedSharding, "use_dora"),
        ({"of_tomorrow": {"x": 1}}, UnsupportedSharding, "of_tomorrow"),
        *(({"peft_type": kind}, UnsupportedSharding, kind) for kind in
          ("IA3", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "LOHA", "LOKR", "ADALORA", "VERA", "OFT", "nothing")),
        ({"peft_type": None}, WeightsUnreadable, "peft_type"),
    ],
)  # fmt: skip
def test_a_configuration_is_refused_by_its_value(adapter, changes, error, says):
    found = refused(adapter(**changes))
    assert isinstance(found, error)
    assert says in found.render()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda s: {k: v for k, v in s.items() if ".0." not in k},
            "do not match its configuration",
        ),
        (lambda s: s | {"more": torch.zeros(1)}, "do not match its configuration"),
        (
            lambda s: {k: v[:, :1].contiguous() for k, v in s.items()},
            "do not match its configuration",
        ),
        (lambda s: {k: v.int() for k, v in s.items()}, "torch.int32"),
        (lambda s: {k: v / 0 for k, v in s.items()}, "NaN or infinity"),
        (lambda s: {k: v.unsqueeze(0) for k, v in s.items()}, "rank 4"),
        (lambda s: {}, "rank 4"),
    ],
    ids=["fewer", "more", "shape", "integers", "infinite", "dims", "none"],
)
def test_tensors_are_refused_by_name(adapter, change, says):
    found = refused(adapter(change))
    assert isinstance(found, WeightsUnreadable)
    assert says in found.render()


@pytest.mark.parametrize("targets", [["q_projection"], "q_projection", ["q_proj", "self_attn"]])
def test_hints_name_the_key_of_the_file_that_is_read(adapter, targets):
    directory = adapter(target_modules=targets)
    hint = refused(directory).hint
    assert hint.startswith("set target_modules to [q_proj")
    assert hint.endswith(f"] in {directory / 'adapter_config.json'}")


def test_without_a_suitable_name_the_hint_is_all_linear(adapter):
    directory = adapter(target_modules=["self_attn"])
    assert refused(directory).hint == f'set target_modules to "all-linear" in {directory / "adapter_config.json"}'


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"r": 1' + "0" * 9999 + "}", "\ud800"])
def test_a_configuration_that_is_no_object_is_refused(adapter, text):
    directory = adapter()
    (directory / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    assert refused(directory).code == "HP703"


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({"target_modules": r".*\.[qv]_proj"}, None),
        ({"target_modules": ["q_proj", "k_proj", "v_proj"], "exclude_modules": r".*k_proj"}, None),
        ({"target_modules": ["q_proj", "v_proj", "up_proj"], "exclude_modules": ["up_proj"]}, None),
        ({"layers_to_transform": [1]}, "layers.1."),
        ({"layers_to_transform": 0, "layers_pattern": "layers"}, "layers.0."),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]}, None),
        ({"rank_pattern": {r"layers\.[01]\..*q_proj": 4}, "r": 4, "init_lora_weights": "eva"}, None),
    ],
)  # fmt: skip
def test_patterns_choose_the_modules_that_peft_chooses(adapter, written, changes, chosen):
    directory = adapter(lambda s: {k: v for k, v in s.items() if (chosen or "") in k}, **changes)
    mine, plain = model(), model()
    load_adapter(mine, directory)
    loaded = peft.PeftModel.from_pretrained(plain, directory)
    theirs = {
        n.rpartition(".lora_A")[0].removeprefix("base_model.model.")
        for n, _ in loaded.named_parameters()
        if "lora_A" in n
    }
    assert {n for n, m in mine.named_modules() if hasattr(m, "lora_A")} == theirs


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"r": 10**9}, "less than or equal"),
        ({"lora_alpha": float("inf")}, "finite"),
        ({"rank_pattern": {"(": 4}}, "is not a regular expression"),
        ({"target_modules": NESTED}, "is not a regular expression"),
        ({"alpha_pattern": {"a" * 20_000: 4}}, "20,000 characters"),
    ],
)
def test_a_recipe_section_is_refused_before_a_model_is_built(lora, says):
    with pytest.raises(ValueError, match=says):
        Recipe.model_validate({"lora": lora})


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"r": 65}, "lora.r"),
        ({"target_modules": FOREVER}, "takes more than"),
        ({"rank_pattern": {FOREVER: 4}}, "rank_pattern"),
    ],
)
def test_a_recipe_section_is_refused_by_its_model(tmp_path, lora, says):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    start = time.process_time()
    with pytest.raises(BadValue, match=says):
        build_model(Recipe.model_validate({"model": {"path": str(tmp_path)}, "lora": lora}))
    assert time.process_time() - start < 5


def test_a_plain_configuration_is_read_as_it_is(adapter):
    config = read_adapter_config(adapter())
    assert (config.r, config.lora_alpha, set(config.target_modules)) == (
        4,
        12,
        {"q_proj", "v_proj"},
    )

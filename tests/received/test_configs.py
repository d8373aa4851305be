"""Hostile configs: refused on their text, by all that read one."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.model import (
    load_model,
    preset_names,
    read_config,
    read_generation_config,
    read_preset,
)
from hyper_parallel.model.config_limits import check_config
from tests.received.bounds import refusal
from tests.received.tokenizers import write

pytestmark = pytest.mark.unit

SMALL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
EXPERTS = SMALL | {"model_type": "qwen3_moe", "num_experts": 16_384, "num_experts_per_tok": 2,
                   "moe_intermediate_size": 32, "num_hidden_layers": 500}  # fmt: skip
FACTORS = {"rope_type": "longrope", "long_factor": [1.0] * 10**6, "short_factor": [1.0]}

REFUSED: dict[str, tuple[Any, str]] = {
    "labels": (SMALL | {"num_labels": 10**9}, "num_labels"),
    "names of labels": (SMALL | {"id2label": {str(n): "x" for n in range(300_001)}}, "elements"),
    "layers": (SMALL | {"num_hidden_layers": 100_000}, "num_hidden_layers"),
    "20,000 layers": (SMALL | {"num_hidden_layers": 20_000}, "num_hidden_layers"),
    "vocabulary": (SMALL | {"vocab_size": 2**31 - 1}, "vocab_size"),
    "width": (SMALL | {"hidden_size": 2**30}, "hidden_size"),
    "width of the MLP": (SMALL | {"intermediate_size": 2**30}, "intermediate_size"),
    "heads": (SMALL | {"num_attention_heads": 2**30}, "num_attention_heads"),
    "experts": (SMALL | {"num_experts": 10**6}, "num_experts"),
    "experts of all layers": (EXPERTS, "experts in all layers"),
    "positions": (SMALL | {"max_position_embeddings": 10**18}, "max_position_embeddings"),
    "windows": (SMALL | {"max_window_layers": 10**9}, "max_window_layers"),
    "language part": ({"model_type": "llava", "text_config": SMALL | {"vocab_size": 2**31 - 1}}, "text_config.vocab"),
    "vision part": ({"model_type": "llava", "vision_config": {"depth": 10**6}}, "vision_config.depth"),
    "list": ({"model_type": "swin", "depths": [2, 10**6]}, "depths"),
    "negative": (SMALL | {"hidden_size": -32}, "hidden_size"),
    "very negative": (SMALL | {"hidden_size": -(2**40)}, "hidden_size"),
    "zero": (SMALL | {"num_attention_heads": 0}, "num_attention_heads"),
    "text": (SMALL | {"hidden_size": "32"}, "hidden_size"),
    "infinite": (SMALL | {"hidden_size": float("inf")}, "hidden_size"),
    "no number": (SMALL | {"hidden_size": float("nan")}, "hidden_size"),
    "factors": (SMALL | {"rope_scaling": FACTORS}, "elements"),
    "nested": ('{"text_config":' * 20_000 + "1" + "}" * 20_000, "recursion"),
    "nested parts": ('{"text_config":' * 40 + "1" + "}" * 40, "nested deeper than 30"),
    "digits": ('{"hidden_size": ' + "9" * 4000 + "}", "integer of more than 64 bits"),
    "more digits": ('{"hidden_size": ' + "9" * 5000 + "}", "digits"),
    "long": ('{"a": "' + "x" * 9 * 2**20 + '"}', "bytes"),
    "format": (SMALL | {"torch_dtype": "evil\x1b[31m"}, "dtype"),
    "formats": (SMALL | {"torch_dtype": [["x" * 10**5] * 50]}, "dtype"),
    "type": (SMALL | {"model_type": ["x"]}, "model_type"),
    "classes": (SMALL | {"architectures": 0.5}, "architectures"),
    "class": (SMALL | {"architectures": "Qwen3ForCausalLM"}, "architectures"),
    "classes of numbers": (SMALL | {"architectures": [1]}, "architectures"),
    "special number": (SMALL | {"rope_theta": {"__float__": [1]}}, "__float__"),
    "large special number": (SMALL | {"rope_theta": {"__float__": 10**400}}, "too large"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_is_refused_with_a_code(tmp_path: Path, name: str) -> None:
    values, word = REFUSED[name]
    path = tmp_path / "config.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    refusal(lambda: load_model(path), "HP305", word)


@pytest.mark.torch
@pytest.mark.parametrize(
    "command", ["plan", "plan --recipe", "train --dry-run", "parity", "generate", "doctor --model"]
)
def test_every_command_refuses_alike(tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hyper_parallel.cli import application

    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(SMALL | {"num_labels": 10**9}))
    Path("recipe.yaml").write_text("model: {path: model}\nparallel: {dp_shard: 1}\n")
    word, *options = command.split()
    of_model = word == "generate" or options == ["--model"] or command == "plan"
    words = [word, *options, "model" if of_model else "recipe.yaml"]
    words += ["--prompt", "a"] if word == "generate" else []
    import transformers  # noqa: F401  # not counted

    write(Path("model"))

    refusal(lambda: application(word)(words, standalone_mode=False), "HP305", "num_labels")


def test_code_beside_a_config_does_not_run(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from hyper_parallel.trainer.engine.recipe_model import read_spec

    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    values = SMALL | {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    refusal(lambda: read_spec(str(tmp_path)), "HP305", "trust_remote_code")
    alone = refusal(lambda: read_spec(str(tmp_path / "config.json"), trusted=True), "HP305", "no model of this type")
    assert "trust_remote_code" not in str(alone)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_far_within_the_bounds(preset: str) -> None:
    values = read_preset(preset)
    check_config(values | {"num_hidden_layers": 2 * int(values.get("num_hidden_layers") or 1)}, preset)


def test_small_configs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL | {"rope_theta": 10**9, "num_labels": 100_000}))
    assert read_config(path).values["num_labels"] == 100_000
    assert load_model(path).num_layers == 2


STOPS: dict[str, tuple[Any, str]] = {
    "fraction": ({"eos_token_id": 2.5}, "2.5"),
    "text": ({"eos_token_id": "2"}, "'2'"),
    "negative": ({"eos_token_id": -1}, "-1"),
    "truth": ({"eos_token_id": True}, "True"),
    "part of a list": ({"eos_token_id": [2, "x"]}, "x"),
    "nothing in a list": ({"eos_token_id": [2, None]}, "None"),
    "object": ({"eos_token_id": {"a": 1}}, "a"),
    "list": ([2], "object"),
    "cut": ('{"eos_token_id": 2', "delimiter"),
    "nested": ("[" * 100_000, "nested"),
    "long": ('{"a": "' + "x" * 2**21 + '"}', "bytes"),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_damaged_generation_config_is_refused(tmp_path: Path, name: str) -> None:
    value, word = STOPS[name]
    path = tmp_path / "generation_config.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    refusal(lambda: read_generation_config(tmp_path), "HP305", word, "generation_config.json")


@pytest.mark.parametrize("stops", [2, [2, 3], None])
def test_stop_tokens_of_a_generation_config_are_read(tmp_path: Path, stops: Any) -> None:
    path = tmp_path / "generation_config.json"
    assert read_generation_config(tmp_path) is None
    path.write_text(json.dumps({"eos_token_id": stops, "temperature": 0.6}))
    assert read_generation_config(tmp_path) == {"eos_token_id": stops, "temperature": 0.6}


def test_a_generation_config_of_another_name_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "secret.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "model" / "generation_config.json").symlink_to("../secret.json")
    refusal(lambda: read_generation_config(tmp_path / "model"), "HP305", "secret.json")

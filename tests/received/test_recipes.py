"""Hostile recipes: each is refused with one code, before anything is built from it."""

import json
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.config import KNOWN_REWARDS, Recipe, leaves, load_recipe, recipe_to_yaml
from hyper_parallel.errors import HyperParallelError, abbreviated
from tests.received.bounds import refusal, within_bounds
from tests.slow import slow_cells

pytestmark = pytest.mark.unit

USES = ", ".join(["*{0}"] * 9)
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{USES.format(f'a{n - 1}')}]\n" for n in range(1, 12)
)
MERGES = "a0: &a0 {k: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{USES.format(f'a{n - 1}')}], k{n}: 1}}\n" for n in range(1, 12)
)
TEXTS = f"a: &a {'x' * 60_000}\nmodel: {{path: [{', '.join(['*a'] * 5000)}]}}\n"

FILES = {
    "aliases": (BOMB + "model: *a11\n", "elements"),
    "aliases in a value": (BOMB + "model: {path: *a11}\n", "elements"),
    "aliases in a free section": (BOMB + "training: {optimizer_args: {a: *a11}}\n", "elements"),
    "texts": (TEXTS, "characters of text"),
    "itself": ("model: &a {path: *a}\n", "nested"),
    "itself merged": ("model: &a {<<: *a, path: x}\n", "nested"),
    "nested": ("model: " + "[" * 100_000 + "]" * 100_000, "nest"),
    "indented": ("".join(" " * n + "a:\n" for n in range(500)), "nested"),
    "long": ("model: " + "x" * 600_000, "bytes"),
    "base 60": ("model: {path: x}\ntraining: {steps: " + "1:" * 100_000 + "1}", "number"),
    "digits": ("model: {path: x}\ntraining: {steps: " + "9" * 100_000 + "}", "number"),
    "date": ("model: {path: x}\ntraining: {steps: 2026-99-99}", "month"),
    "binary": ("model: !!binary x", "cannot be read"),
    "object": ("model: !!python/object/apply:os.system [id]", "cannot be read"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_beyond_its_limits_is_refused(tmp_path: Path, name: str) -> None:
    text, word = FILES[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    refusal(lambda: load_recipe(path), "HP103", word)


def test_merges_of_merges_cost_little(tmp_path: Path) -> None:
    """PyYAML merges a key once since 6.0.3; before, each level has nine times the keys."""
    path = tmp_path / "recipe.yaml"
    path.write_text(MERGES + "model: *a11\n")
    with within_bounds(), pytest.raises(HyperParallelError):
        load_recipe(path)


def test_a_json_recipe_has_the_same_limits(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": {"path": "x"}, "data": {"source": [1] * 60_000}}))
    refusal(lambda: load_recipe(path), "HP103", "more than 50,000 elements")


@pytest.mark.parametrize(
    "override",
    [
        "parallel.dp_shard=1000000000",
        "parallel.pp=1000000",
        "training.steps=1000000000000000000",
        "data.seq_len=1099511627776",
        "training.tokens_per_step=9007199254740992",
        "grpo.num_generations=1000000000",
        "launch.nproc_per_node=1000000000",
        "parallel.world_size=1000000000",
        f"parallel.stage_layers={[1] * 5000}",
        f"training.lr={'[' * 1000}{']' * 1000}",
        "training.timeout_s=1e300",
        "lora.r=1000000000",
        "data.vocab_size=2147483647",
        "offload.budget=" + "9" * 400 + "GiB",
        "lora.target_modules=a{99999999999}",
    ],
)
def test_a_count_beyond_every_run_is_refused(tmp_path: Path, override: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: tiny}\nparallel: {dp_shard: 1}\n")
    refusal(lambda: load_recipe(path, [override]), "HP102", override.partition("=")[0])


def test_products_of_allowed_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: tiny}\n")
    ranks = ["parallel.dp_shard=65536", "parallel.dp_replicate=65536"]
    refusal(lambda: load_recipe(path, ranks), "HP104", "4294967296 ranks")
    sequences = ["training.tokens_per_step=4294967296", "data.seq_len=2", "parallel.dp_shard=1"]
    refusal(lambda: load_recipe(path, sequences), "HP104", "2147483648 sequences")


FEW: list[Any] = [-1, 10**400, float("nan"), "\x1b[31m\u202e" + "x" * 200_000, [[[[[[1]]]]]]]
MANY: list[Any] = [
    0,
    2**31,
    2**53,
    2**63,
    float("inf"),
    [1] * 5000,
    {"a": {"b": 1}},
    None,
    True,
    "a\0b",
]


@slow_cells("many")
@pytest.mark.parametrize("values", ["few", "many"])
def test_every_key_takes_a_value_or_refuses_it_with_a_code(tmp_path: Path, values: str) -> None:
    path, counts = tmp_path / "recipe.json", {"read": 0, "refused": 0}
    for key, _ in leaves(Recipe):
        for value in FEW if values == "few" else MANY:
            tree: dict[str, Any] = {"model": {"path": "tiny"}}
            node = tree
            *sections, name = key.split(".")
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
            path.write_text(json.dumps(tree))
            try:
                with within_bounds():
                    load_recipe(path)
                counts["read"] += 1
            except HyperParallelError as error:
                text = error.render()
                assert len(text) < 25_000, key
                assert "\x1b" not in text, key
                counts["refused"] += 1
    assert counts["refused"] > counts["read"] > 10, counts


def test_a_message_holds_a_bounded_part_of_a_value() -> None:
    shared = ["x" * 1000] * 1000
    for _ in range(30):
        shared = [shared] * 10
    assert len(abbreviated(shared)) <= 80
    assert abbreviated(10**5000).startswith("an integer of 16,610 bits")
    assert abbreviated("short") == "'short'"


def test_a_quoted_control_character_is_the_same_value_when_it_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text('model: {path: "a\\u202eb\\x1b"}\n')
    loaded = load_recipe(path)
    again = tmp_path / "again.yaml"
    again.write_text(recipe_to_yaml(loaded.recipe))
    assert load_recipe(again).recipe.model.path == "a\u202eb\x1b"


@pytest.mark.parametrize(
    ("value", "key"),
    [
        ({"sbatch": ["--exclusive\nrm -rf x"]}, "launch.sbatch"),
        ({"partition": "a\nb"}, "launch.partition"),
        ({"time": "1\nb"}, "launch.time"),
    ],
)
def test_an_option_of_a_job_script_is_one_line(tmp_path: Path, value: Any, key: str) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({"model": {"path": "x"}, "launch": value}))
    refusal(lambda: load_recipe(path), "HP102", key)


CODE = {
    "model.trust_remote_code": True,
    "training.optimizer": "evil.Optimizer",
    "training.callbacks": ["evil.Callback"],
    "grpo.environment": "evil.Environment",
    "grpo.reward_funcs": ["exact_match", "sub/evil.reward"],
}


@pytest.mark.parametrize("command", ["train", "train --dry-run", "plan", "parity"])
@pytest.mark.parametrize("key", CODE)
def test_no_code_refuses_a_recipe_that_names_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, key: str
) -> None:
    from hyper_parallel.cli import application

    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('ran', 'w').close()")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "evil.py").write_text("open('ran', 'w').close()")
    section, _, name = key.partition(".")
    tree: dict[str, Any] = {"model": {"path": "absent"}}
    if section == "grpo":
        data = {"source": "x", "packing": False, "format": "prompt_completion"}
        tree |= {"stage": "grpo", "data": data}
    tree.setdefault(section, {})[name] = CODE[key]
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(tree))
    word, *options = command.split()
    recipe = ["--recipe", str(path)] if word == "plan" else [str(path)]
    words = [word, *recipe, *options, "--no-code"]
    refusal(lambda: application(word)(words, standalone_mode=False), "HP110", key)
    assert not (tmp_path / "ran").exists()


@pytest.mark.torch
def test_known_rewards_are_those_of_the_trainer() -> None:
    from hyper_parallel.trainer.stages.rewards import REWARDS

    assert set(KNOWN_REWARDS) == set(REWARDS)

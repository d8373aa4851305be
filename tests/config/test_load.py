"""Recipes: merging with origins, the rules of `parallel`, and every mistake refused with a hint."""

import pickle
import shlex
import textwrap

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyper_parallel.config import Parallel, Recipe, load_recipe, recipe_to_yaml, with_steps
from hyper_parallel.errors import (
    BadValue,
    Contradiction,
    DegreesMismatch,
    HyperParallelError,
    RecipeUnreadable,
    UnknownKey,
)

pytestmark = pytest.mark.unit


@pytest.fixture
def write(tmp_path):
    def _write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return _write


@pytest.fixture
def minimal(write):
    return write("model: {path: tiny}\n")


# --- values and origins ---------------------------------------------------------------------------------------------


def test_defaults_parent_file_and_command_line_in_this_order(write):
    write(
        """
        model: {path: tiny}
        training: {steps: 50, lr: 1e-3, seed: 1}
        data: {seq_len: 128}
        """,
        "base.yaml",
    )
    path = write("extends: base.yaml\ntraining: {lr: 2e-3, seed: 2}\n")
    loaded = load_recipe(path, ["training.seed=3", "data.shuffle=false"])
    assert loaded.path == path
    training = loaded.recipe.training
    assert (training.steps, training.lr, training.seed) == (50, 2e-3, 3)
    assert loaded.recipe.data.seq_len == 128
    assert {
        key: loaded.origins[key]
        for key in (
            "training.steps",
            "training.lr",
            "training.seed",
            "training.eps",
            "data.shuffle",
        )
    } == {
        "training.steps": "extends base.yaml",
        "training.lr": "recipe",
        "training.seed": "command line",
        "training.eps": "default",
        "data.shuffle": "command line",
    }
    assert loaded.where("training.seed") == f"{path}: training.seed (set by command line)"
    assert loaded.where("training.lr") == f"{path}: training.lr"


def test_every_value_has_an_origin(minimal):
    loaded = load_recipe(minimal)
    dump = loaded.recipe.model_dump()
    keys = [
        f"{section}.{key}" if isinstance(value, dict) else section
        for section, value in dump.items()
        for key in (value if isinstance(value, dict) else [None])
    ]
    assert set(keys) <= set(loaded.origins)


def test_json_recipe(write):
    path = write('{"model": {"path": "tiny"}, "training": {"lr": 0.01}}', "recipe.json")
    assert load_recipe(path).recipe.training.lr == 0.01


def test_unquoted_exponents_and_dtype_aliases(write):
    path = write("model: {path: tiny}\ntraining: {lr: 1e-4, dtype: bf16}\n")
    training = load_recipe(path, ["training.eps=1e-6"]).recipe.training
    assert (training.lr, training.dtype, training.eps) == (1e-4, "bfloat16", 1e-6)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("training.betas=[0.8, 0.9]", lambda r: r.training.betas, (0.8, 0.9)),
        ("training.max_grad_norm=null", lambda r: r.training.max_grad_norm, None),
        ("sample_prompt=def f(x): return {x", lambda r: r.sample_prompt, "def f(x): return {x"),
        ("sample_prompt=yes", lambda r: r.sample_prompt, "yes"),
        ("model.path=123", lambda r: r.model.path, "123"),
        ("data.tokenizer=null", lambda r: r.data.tokenizer, None),
        (
            "parallel.rules.model.layers.*.mlp.up_proj=replicate",
            lambda r: r.parallel.rules,
            {"model.layers.*.mlp.up_proj": "replicate"},
        ),
        ("data={seq_len: 64, shuffle: false}", lambda r: r.data.seq_len, 64),
    ],
)
def test_override_values(minimal, override, get, value):
    assert get(load_recipe(minimal, [override]).recipe) == value


def test_steps_of_a_profile_are_compared_with_steps_not_with_epochs(minimal):
    profile = ["training.profile.start=300", "training.epochs=3"]
    loaded = load_recipe(minimal, profile)
    assert with_steps(loaded, 400).recipe.training.steps == 400
    with pytest.raises(Contradiction, match=r"profile\.start=199"):
        with_steps(loaded, 200)


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.warmup_ratio=0.1", "training.steps=30"],
        ["training.epochs=2"],
        ["training.epochs=2", "training.warmup_ratio=0.1"],
        ["offload.max_slowdown=1.2"],
    ],
)
def test_a_written_recipe_has_one_of_two_alternative_keys(minimal, tmp_path, overrides):
    recipe = load_recipe(minimal, overrides).recipe
    path = tmp_path / "config.yaml"
    path.write_text(recipe_to_yaml(recipe))
    assert load_recipe(path).recipe == recipe
    trained = with_steps(load_recipe(path), 40).recipe if recipe.training.epochs else recipe
    path.write_text(recipe_to_yaml(trained))
    assert load_recipe(path, ["checkpoint.resume=must"]).recipe.training == trained.training


# --- parallel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", [], {"auto": True}),
        ("parallel: auto", [], {"auto": True}),
        ("parallel: {world_size: 2}", [], {"auto": True, "world_size": 2}),
        ("parallel: {tp: 2}", [], {"auto": False, "tp_x": 2}),
        ("parallel: {tp_x: 2, tp: 2}", [], {"auto": False, "tp_x": 2}),
        ("parallel: {auto: true, tp: 2}", [], {"auto": True, "tp_x": 2}),
        ("", ["parallel.tp=2"], {"auto": False, "tp_x": 2}),
        ("parallel: auto", ["parallel.tp=2"], {"auto": False, "tp_x": 2}),
        ("parallel: auto", ["parallel.tp=2", "parallel.auto=true"], {"auto": True, "tp_x": 2}),
        ("parallel: {dp_shard: 2}", ["parallel.tp=2"], {"auto": False, "dp_shard": 2, "tp_x": 2}),
        ("parallel: {dp_shard: 2}", ["parallel=auto"], {"auto": True}),
        ("parallel: {dp_shard: 2}", ["parallel.auto=true"], {"auto": True, "dp_shard": 2}),
        ("parallel: {tp_x: 2}", ["parallel.tp=4"], {"auto": False, "tp_x": 4}),
        ("parallel: {tp_x: 2}", ["parallel.tp=null"], {"auto": False}),
    ],
)
def test_parallel_rules(write, text, overrides, expected):
    path = write(f"model: {{path: tiny}}\n{text}\n")
    loaded = load_recipe(path, overrides)
    assert loaded.recipe.parallel == Parallel(**expected)
    given = loaded.recipe.parallel.model_fields_set
    assert given == set(expected) | {"auto"}


def test_rules_are_overridden_together_one_by_one_and_removed(write):
    path = write("model: {path: tiny}\nparallel: {dp_shard: 1, rules: {a.*: colwise}}\n")

    def rules(*overrides):
        return load_recipe(path, overrides).recipe.parallel.rules

    whole = "parallel.rules={model.embed_tokens: replicate, lm_head: replicate}"
    assert rules(whole) == {"model.embed_tokens": "replicate", "lm_head": "replicate"}
    assert rules("parallel.rules.lm_head=replicate") == {"lm_head": "replicate", "a.*": "colwise"}
    assert rules("parallel.rules={}") == {}


def test_two_names_of_one_degree_must_agree(write):
    path = write("model: {path: tiny}\nparallel: {tp: 2, tp_x: 4}\n")
    with pytest.raises(Contradiction, match="two names of one degree"):
        load_recipe(path)


def test_errors_name_the_alias_that_the_user_wrote(write):
    path = write("model: {path: tiny}\n")
    assert load_recipe(path, ["parallel.tp=4", "parallel.tp_x=1"]).recipe.parallel.tp_x == 1
    loaded = load_recipe(path, ["parallel.tp_x=1", "parallel.tp=4"])
    assert loaded.recipe.parallel.tp_x == 4
    assert loaded.where("parallel.tp_x") == f"{path}: parallel.tp (set by command line)"
    with pytest.raises(BadValue, match=r"`parallel\.tp` has a value that is not allowed") as caught:
        load_recipe(path, ["parallel.tp_x=1", "parallel.tp=0"])
    assert caught.value.where == f"{path}: parallel.tp (set by command line)"
    assert caught.value.hint == "write `parallel.tp=1`, the default"


# --- round trip -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    lr=st.floats(1e-9, 1.0),
    seed=st.integers(-(2**40), 2**40),
    prompt=st.none() | st.text(max_size=30),
    degrees=st.dictionaries(st.sampled_from(["tp_x", "dp_shard", "pp", "ep"]), st.integers(1, 9)),
    auto=st.booleans(),
    rules=st.dictionaries(st.from_regex(r"[a-z.*]{1,12}", fullmatch=True), st.just("colwise"), max_size=2),
)
@example(lr=1.0, seed=0, prompt="a\x85b", degrees={}, auto=False, rules={})
def test_resolved_recipe_round_trips(tmp_path_factory, lr, seed, prompt, degrees, auto, rules):
    recipe = Recipe(
        model={"path": "tiny"},
        training={"lr": lr, "seed": seed},
        parallel={"auto": auto, "rules": rules, **degrees},
        sample_prompt=prompt,
    )
    path = tmp_path_factory.mktemp("resolved") / "config.yaml"
    path.write_text(recipe_to_yaml(recipe))
    again = load_recipe(path).recipe
    assert again == recipe
    if auto:  # a degree that was left to the planner is still left to it
        assert set(degrees) == again.parallel.model_fields_set & {"tp_x", "dp_shard", "pp", "ep"}
    assert recipe_to_yaml(again) == recipe_to_yaml(recipe)


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "overrides", "error", "words"),
    [
        ("trainings: {lr: 1}", [], UnknownKey, ["unknown key `trainings`", "write `training"]),
        ("training: {learning_rate: 1}", [], UnknownKey, ["training.learning_rate"]),
        ("training: {warmup_step: 1}", [], UnknownKey, ["write `training.warmup_steps: 1`"]),
        ("lr_schedule: wsd", [], UnknownKey, ["write `training.lr_schedule: wsd`"]),
        ("", ["training.stpes=5"], UnknownKey, ["(set by command line)", "write `training.steps=5`"]),
        ("", ["parallel.dpshard=2"], UnknownKey, ["write `parallel.dp_shard=2`"]),
        ("training: {lr: 0}", [], BadValue, ["training.lr", "got: 0", "a number > 0"]),
        ("training: {lr: fast}", [], BadValue, ["training.lr", "got: 'fast'", "a number > 0"]),
        ("training: {lr: .nan}", [], BadValue, ["training.lr", "got: nan"]),
        ("training: {min_lr_ratio: 2}", [], BadValue, [">= 0 and <= 1"]),
        ("", ["training.lr_schedule=cosin"], BadValue, ["cosine, wsd", "training.lr_schedule=cosine"]),
        ("", ["data.seq_len=1.5"], BadValue, ["data.seq_len (set by command line)", "integer >= 2"]),
        ("", [f"data.max_records={10**400}"], BadValue, ["data.max_records", "beyond 2^53"]),
        ("", ["training.betas=[0.9]"], BadValue, ["training.betas", "2 values"]),
        ("", ["training.deterministic=maybe"], BadValue, ["true or false"]),
        ("training: fast", [], BadValue, ["`training`", "a mapping of keys"]),
        ("parallel: sometimes", [], BadValue, ["`parallel`"]),
        ("", ["parallel=aut"], BadValue, ["auto or a mapping of keys", "write `parallel=auto`"]),
        ("overlap: every", [], BadValue, ["none or auto or a mapping of keys"]),
        (
            "", ["parallel.submodels=aut"], BadValue,
            ["auto or a mapping of keys or null", "write `parallel.submodels=auto`"],
        ),
        (
            "", ["training.compile=graph"], BadValue,
            ["`training.compile` has", "true or false or graph-kernel", "=graph-kernel`"],
        ),
        (
            "", ["grpo.rollout_ranks=many"], BadValue,
            ["`grpo.rollout_ranks` has", "an integer or auto", "=0`, the default"],
        ),
        ("", ["training.lr"], BadValue, ["not an override", "training.lr=VALUE"]),
        ("", ["data.seq_len=[1"], BadValue, ["is not YAML", "close all brackets"]),
        ("", ["lora={r: 8, r: 9}"], BadValue, ["the value of `lora` cannot be read: the key `r` is given twice"]),
        ("", ["training.steps=2026-99-99"], BadValue, ["the value of `training.steps` cannot be read: month"]),
        ("stage: sft", [], Contradiction, ["conversations", "data.source"]),
        ("stage: sft\ndata: {source: x, format: text}", [], Contradiction, ["data.format"]),
        ("training: {warmup_steps: 9, steps: 8}", [], Contradiction, ["training.warmup_steps=0"]),
        ("training: {decay_steps: 5}", [], Contradiction, ["training.lr_schedule=wsd"]),
        (
            "training: {decay_steps: 95, lr_schedule: wsd}", [], Contradiction,
            ["training.decay_steps=90"],
        ),
        ("parallel: {zero: 1, pp: 2}", [], Contradiction, ["parallel.reshard_after_forward=false"]),
        ("training: {recompute_layers: 2}", [], Contradiction, ["training.recompute_layers=null"]),
        ("parallel: {dp_shard: 2}\ntraining: {recompute_layers: 2}", [], Contradiction, ["training.recompute=full"]),
        (
            "parallel: auto\ntraining: {recompute: full, recompute_layers: 2}", [], Contradiction,
            ["training.recompute_layers=null"],
        ),
        ("training: {eval_every: 5}\ndata: {holdout: 0}", [], Contradiction, ["data.holdout=0.02"]),
        ("checkpoint: {from_dir: a, resume: never}", [], Contradiction, ["checkpoint.from_dir"]),
        ("parallel: {tp: 2, world_size: 4}", [], DegreesMismatch, ["parallel.world_size=2"]),
        ("extends: 3", [], BadValue, ["extends"]),
        ("extends: absent.yaml", [], RecipeUnreadable, ["absent.yaml", "No such file"]),
    ],
)  # fmt: skip
def test_mistakes(write, text, overrides, error, words):
    path = write(f"model: {{path: tiny}}\n{text}\n")
    with pytest.raises(error) as caught:
        load_recipe(path, overrides)
    rendered = caught.value.render()
    assert str(path.parent) in rendered
    for word in words:
        assert word in rendered
    assert "and 1 more" not in rendered


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("model: {path: tiny\ntraining: [", "r.yaml", ["is not YAML", "line 2"]),
        ('{"model": {"path": "tiny"},}', "r.json", ["is not JSON", "line 1"]),
        ("training: {lr: 1}\nmodel: {path: a}\ntraining: {lr: 2}\n", "r.yaml", ["twice", "line 3"]),
        ('{"a": 1, "a": 2}', "r.json", ["`a` is given twice"]),
        ("- 1\n", "r.yaml", ["not a mapping", "list"]),
        ("", "r.yaml", ["an empty file"]),
        ("model: {path: a}\n? [b]\n: 3\n", "r.yaml", ["unhashable key", "line 2"]),
    ],
)
def test_unreadable_files_name_the_line(write, text, name, words):
    path = write(text, name)
    with pytest.raises(RecipeUnreadable) as caught:
        load_recipe(path)
    for word in words:
        assert word in caught.value.render()


def test_missing_file_and_missing_model(write, tmp_path):
    with pytest.raises(RecipeUnreadable, match="No such file"):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(BadValue, match="`model` is missing"):
        load_recipe(write("training: {lr: 1}\n"))


def test_grandparents_are_refused(write):
    write("extends: c.yaml\n", "b.yaml")
    with pytest.raises(Contradiction, match="parent of its own") as caught:
        load_recipe(write("extends: b.yaml\n"))
    assert "c.yaml that" in caught.value.hint
    write("extends: null\nmodel: {path: tiny}\n", "b.yaml")
    assert load_recipe(write("extends: b.yaml\n")).recipe.model.path == "tiny"


def test_all_problems_are_reported_at_once(write):
    path = write("model: {path: tiny}\ntraining: {lr: -1, stepz: 3}\ndata: {seq_len: 1}\n")
    with pytest.raises(HyperParallelError) as caught:
        load_recipe(path)
    text = caught.value.render()
    assert "and 2 more:" in text
    assert text.count("error[") == 3
    assert pickle.loads(pickle.dumps(caught.value)).render() == text  # ranks send errors to their parent
    for word in ("data.seq_len", "training.lr", "training.stepz", "training.steps: 3"):
        assert word in text


def test_default_warmup_shrinks_with_a_very_short_run_and_says_so(minimal):
    loaded = load_recipe(minimal, ["training.steps=5"])
    assert loaded.recipe.training.warmup_steps == 0
    assert loaded.origins["training.warmup_steps"].startswith("derived: a tenth")
    assert load_recipe(minimal, ["training.steps=10"]).recipe.training.warmup_steps == 10


@pytest.mark.parametrize("value", ["12Gx", "-5", "true", "0", "0GiB", "1.5", "[1]"])
def test_sizes_of_offload_are_bytes_or_words_for_them(minimal, value):
    assert load_recipe(minimal, ["offload.budget=1.5GiB"]).recipe.offload.budget == 3 * 2**29
    assert load_recipe(minimal, ["offload.budget=auto"]).recipe.offload.on
    assert not load_recipe(minimal).recipe.offload.on
    for key in ("budget", "dram"):
        with pytest.raises(BadValue, match=rf"`offload\.{key}`: .* is not a size"):
            load_recipe(minimal, ["offload.max_slowdown=0.02", f"offload.{key}={value}"])


def test_the_bandwidth_of_offload_is_bytes_or_bytes_per_second(minimal):
    given = ["offload.max_slowdown=0.02", "offload.bandwidth=50GB/s"]
    assert load_recipe(minimal, given).recipe.offload.bandwidth == 50 * 10**9
    with pytest.raises(BadValue, match="is not a size"):
        load_recipe(minimal, [*given, "offload.dram=50GB/s"])


def test_an_empty_text_is_no_flash_directory(minimal):
    with pytest.raises(BadValue, match=r"`offload\.flash_dir`: an empty text"):
        load_recipe(minimal, ["offload.max_slowdown=0.02", "offload.flash_dir="])


def test_a_saved_auto_recipe_fixes_no_more_than_was_given(tmp_path):
    path = tmp_path / "recipe.yaml"
    given = {"auto": True, "tp": 2, "gathered_inputs": "keep"}
    path.write_text(yaml.safe_dump({"model": {"path": "llama-3-8b"}, "parallel": given}))
    recipe = load_recipe(path).recipe
    path.write_text(recipe_to_yaml(recipe))
    again = load_recipe(path).recipe
    assert again == recipe
    assert "gathered_inputs" in again.parallel.model_fields_set
    chosen = {"pp", "cp", "cp_kind", "attention_shape", "reshard_after_forward", "virtual_stages"}
    assert not chosen & again.parallel.model_fields_set
    assert "recompute" not in again.training.model_fields_set


def test_a_key_below_a_value_is_refused(write):
    path = write("model: {path: llama-3-8b}\ntraining: {lr: 1.0e-3}\n")
    with pytest.raises(UnknownKey, match=r"training\.lr\.x") as caught:
        load_recipe(path, ["training.lr.x=3"])
    assert caught.value.hint == "training.lr=3"


def test_a_contradiction_with_a_default_says_default(write):
    path = write("model: {path: llama-3-8b}\nstage: sft\n")
    with pytest.raises(Contradiction) as caught:
        load_recipe(path)
    assert caught.value.where.endswith("data.source (default)")


SFT = (
    "stage: sft\ndata: {source: x.jsonl, packing: true}\n"
    "training: {steps: 100, microbatch: 3, warmup_ratio: 0.5}\nparallel: {dp_shard: 1}\n"
)


def test_a_later_layer_replaces_what_says_the_same_in_another_way(write):
    path = write(f"model: {{path: tiny}}\n{SFT}")
    epochs = load_recipe(path, ["training.epochs=1"]).recipe.training
    assert (epochs.epochs, "steps" in epochs.model_fields_set) == (1.0, False)
    back = load_recipe(path, ["training.epochs=1", "training.epochs=null", "training.steps=7"])
    assert (back.recipe.training.epochs, back.recipe.training.steps) == (None, 7)
    assert load_recipe(path, ["training.warmup_steps=3"]).recipe.training.warmup_steps == 3
    with pytest.raises(Contradiction, match="epochs and steps"):
        load_recipe(path, ["training.epochs=1", "training.steps=7"])


def test_two_lengths_of_the_warm_up_in_one_layer_are_refused(write):
    path = write(f"model: {{path: tiny}}\n{SFT}")
    with pytest.raises(Contradiction, match="warmup_steps and warmup_ratio") as caught:
        load_recipe(path, ["training.warmup_steps=3", "training.warmup_ratio=0.1"])
    assert caught.value.hint.startswith("set `training.warmup_ratio=null`")
    ratio = load_recipe(path, ["training.warmup_steps=0", "training.warmup_ratio=0.1"]).recipe
    assert ratio.training.warmup_steps == 10


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("lora={r:8}", "'lora={r: 8}'"),
        ("data.source=[{source:a.jsonl, weight:2}]", "'data.source=[{source: a.jsonl, weight: 2}]'"),
        ("lora={r: 8,lora_alpha:16}", "'lora={r: 8,lora_alpha: 16}'"),
        ("training.optimizer_args={eps:1e-7, amsgrad:true}", "'training.optimizer_args={eps: 1e-7, amsgrad: true}'"),
    ],
)  # fmt: skip
def test_a_mapping_without_spaces_is_refused_with_the_mapping_that_is_meant(write, text, hint):
    path = write(f"model: {{path: tiny}}\n{SFT}")
    with pytest.raises(BadValue, match="colon without a space") as caught:
        load_recipe(path, [text])
    assert caught.value.hint == hint
    assert load_recipe(path, shlex.split(hint)).recipe


def test_a_list_of_texts_is_a_mixture_of_equal_weights(write):
    path = write(f"model: {{path: tiny}}\n{SFT}")
    data = load_recipe(path, ["data.source=[a.jsonl, {source: b.csv, weight: 3}]"]).recipe.data
    assert [(part.source, weight) for part, weight in data.parts()] == [
        ("a.jsonl", 1),
        ("b.csv", 3),
    ]
    with pytest.raises(BadValue, match=r"data.source\[0\]"):
        load_recipe(path, ["data.source=[3]"])


@pytest.mark.parametrize("section", ["columns", "roles"])
def test_one_name_in_the_data_has_one_meaning(write, section):
    names = ("prompt", "completion") if section == "columns" else ("user", "assistant")
    path = write(f"model: {{path: tiny}}\n{SFT}")
    with pytest.raises(Contradiction, match="map to the same name") as caught:
        load_recipe(path, [f"data.{section}.{name}=q" for name in names])
    assert caught.value.hint == f"set `data.{section}.{names[1]}=NAME`"


def test_null_unsets_a_key_of_any_type(write):
    path = write(f"model: {{path: tiny}}\n{SFT}output_dir: elsewhere\nsample_prompt: x\n")
    loaded = load_recipe(
        path,
        [
            "training.steps=null",
            "output_dir=null",
            "sample_prompt=null",
            "training.warmup_ratio=null",
        ],
    )
    recipe = loaded.recipe
    assert (recipe.training.steps, recipe.output_dir) == (100, "runs/run")
    assert (recipe.sample_prompt, recipe.training.warmup_ratio) == (None, None)
    assert loaded.origins["training.steps"] == "default"
    whole = load_recipe(path, ["training=null"]).recipe.training
    assert whole.model_fields_set == set()


def test_a_stage_on_pairs_over_an_sft_recipe_derives_packing_and_microbatch(write):
    path = write(f"model: {{path: tiny}}\n{SFT}")
    loaded = load_recipe(path, ["stage=dpo"])
    assert (loaded.recipe.data.packing, loaded.recipe.training.microbatch) == (False, 2)
    assert loaded.origins["data.packing"].startswith("derived")
    # In one layer, they contradict each other.
    with pytest.raises(Contradiction, match="one conversation in a sequence"):
        load_recipe(path, ["stage=dpo", "data.packing=true"])


def test_a_mapping_given_as_a_whole_replaces_the_recipes(write):
    path = write("model: {path: tiny}\ntraining: {optimizer: sgd, optimizer_args: {momentum: 0.9, eps: 1e-8}}\n")
    assert load_recipe(path).recipe.training.optimizer_args == {"momentum": 0.9, "eps": 1e-8}
    more = load_recipe(path, ["training.optimizer_args.nesterov=true"]).recipe.training
    assert more.optimizer_args == {"momentum": 0.9, "eps": 1e-8, "nesterov": True}
    none = load_recipe(path, ["training.optimizer_args={}"]).recipe.training
    assert none.optimizer_args == {}


@pytest.mark.parametrize(
    ("written", "pasted"),
    [("model=m", "model.path=m"), ("data=x.jsonl", "data.source=x.jsonl"), ("lora=16", "lora.r=16")],
)  # fmt: skip
def test_a_value_in_place_of_a_section_leads_to_its_main_key(write, written, pasted):
    path = write("model: {path: tiny}\n")
    with pytest.raises(BadValue) as caught:
        load_recipe(path, [written])
    assert caught.value.hint == f"write `{pasted}`"
    load_recipe(path, [pasted])


def test_names_of_modules_with_commas_are_a_list(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {path: llama-3-8b}\n")
    lora = load_recipe(path, ["lora.target_modules=q_proj,v_proj"]).recipe.lora
    assert lora.target_modules == ("q_proj", "v_proj")

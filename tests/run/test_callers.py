"""Hints of errors are pasted where the caller of the library writes its settings: a recipe, a command, or Python."""

import pickle
import shlex

import pytest

import hyper_parallel as hp
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import BadValue, Caller, HyperParallelError, reported_by
from hyper_parallel.integration.llamafactory.arguments import HyperParallelArguments, OptionNames
from hyper_parallel.planner import plan
from hyper_parallel.runtime import StrategyText
from hyper_parallel.trainer.data.source_errors import VALIDATION, SourceKey

pytestmark = pytest.mark.torch

ENTRY = SourceKey("data.source[1]")


@pytest.mark.parametrize(
    ("changes", "hint", "values"),
    [
        ({"data.seq_len": 64, "data.packing": False}, "data.seq_len=64 data.packing=false", [64, False]),
        ({"data.name": None, "data.split": None}, "data.name=null data.split=null", [None, None]),
        ({"data.source": "my data/a b.txt"}, "'data.source=my data/a b.txt'", ["my data/a b.txt"]),
        ({"data.source": "a[1].txt"}, "'data.source=a[1].txt'", ["a[1].txt"]),
        ({"data.text_key": "it's"}, "'data.text_key=it'\"'\"'s'", ["it's"]),
        ({"data.ignore_keys": "[a,b]"}, "data.ignore_keys=[a,b]", [("a", "b")]),
        ({"data.ignore_keys": '["a b"]'}, "'data.ignore_keys=[\"a b\"]'", [("a b",)]),
        ({"parallel.pp": 2, "parallel.stage_layers": (4, 4)}, "parallel.pp=2 'parallel.stage_layers=[4, 4]'", None),
        ({"parallel.schedule_file": ""}, "parallel.schedule_file=", [""]),
        (
            {"parallel.rules": {"layers.*.up": "colwise", "*.down": "rowwise"}},
            "'parallel.rules={layers.*.up: colwise, \"*.down\": rowwise}'",
            [{"layers.*.up": "colwise", "*.down": "rowwise"}],
        ),
    ],
)
def test_overrides_are_read_back_from_a_shell(changes, hint, values, tmp_path):
    assert BadValue("x", changes=changes).hint == hint
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {path: llama-3-8b}\ndata: {source: words.txt}\n")
    if values is not None:
        loaded = load_recipe(recipe, shlex.split(hint)).recipe
        sections = [key.split(".") for key in changes]
        assert [getattr(getattr(loaded, section), name) for section, name in sections] == values


@pytest.mark.parametrize(
    ("caller", "where", "changes", "found"),
    [
        (Caller(), "--device", {"--device": "auto"}, ("--device", "--device auto")),
        (Caller(), "--pin", {"--pin": {"tp": 8}, "--exclude": ("cp",)}, ("--pin", "--pin tp=8 --exclude cp")),
        (Caller(), "m", {"--chat": None}, ("m", "leave out --chat")),
        (Caller(), "m", {"--trust-remote-code": True}, ("m", "--trust-remote-code")),
        (
            StrategyText("tp=4 dp_shard=2"), "parallel.tp", {"parallel.tp_x": 2, "parallel.stage_layers": [1, 2]},
            ("strategy: tp", 'hp.plan_of(model, "tp=2 dp_shard=2 stage_layers=[1,2]")'),
        ),
        (
            StrategyText("tp=2 rules.a.*=rowwise"), None, {"parallel.rules": {"b.*": "colwise"}},
            (None, 'hp.plan_of(model, "tp=2 rules.b.*=colwise")'),
        ),
        (StrategyText("tp=2"), "x", {"data.seq_len": 8}, ("x", "data.seq_len=8")),
        (
            StrategyText("tp=4 dp_shard=2", "--parallel"), "parallel.tp", {"parallel.tp": 1, "parallel.dp_shard": 8},
            ("--parallel", '--parallel "dp_shard=8"'),
        ),
        (
            StrategyText("tp=4", "--parallel"), "parallel.tp", {"parallel.tp_x": 1},
            ("--parallel", "leave out --parallel"),
        ),
        (
            OptionNames(HyperParallelArguments(efsdp_size=2)), "parallel.ep", {"parallel.ep": 2, "parallel.tp_y": 1},
            ("hyper_parallel_args: ep_size", '{"ep_size": 2, "efsdp_size": null}'),
        ),
        (SourceKey(), "data.source: a", {"data.format": "text"}, ("data.source: a", "data.format=text")),
        (
            ENTRY, "data.source: a", {"data.format": "text"},
            ("data.source[1]: a", "set in the entry `data.source[1]`: format: text"),
        ),
        (
            ENTRY, "a.jsonl:1", {"data.columns.a": "x y", "data.columns.b": '"1"', "data.text_key": "t"},
            ("a.jsonl:1", 'set in the entry `data.source[1]`: columns: {a: x y, b: "1"}, text_key: t'),
        ),
        (
            ENTRY, "a", {"data.name": "no", "data.split": "2023"},
            ("a", 'set in the entry `data.source[1]`: name: "no", split: "2023"'),
        ),
        (
            ENTRY, "a", {"data.name": None, "data.split": None},
            ("a", "set `name` and `split` only in those entries of `data.source` to which they apply"),
        ),
        (ENTRY, "a", {"data.seq_len": 64}, ("a", "data.seq_len=64")),
        (
            ENTRY, "a", {"stage": "pt"},
            ("a", "remove the entry `data.source[1]`, or use a stage that reads its records"),
        ),
        (
            SourceKey(VALIDATION), "data.source: a", {"data.source": "my data"},
            ("data.validation: a", "'data.validation=my data'"),
        ),
        (SourceKey(VALIDATION), "a", {"data.split": "test"}, ("a", "data.validation_split=test")),
        (
            SourceKey(VALIDATION), "a", {"data.split": "train"},
            ("a", "set `data.validation_split` to the split for evaluation"),
        ),
        (
            SourceKey(VALIDATION), "a", {"data.format": "text"},
            ("a", "give the records of `data.validation` the keys and the format of the training data"),
        ),
        (SourceKey(VALIDATION), "a", {"data.format": "auto"}, ("a", "data.format=auto")),
        (
            SourceKey(VALIDATION), "a", {"data.seq_len": 64},
            ("a", "add data to `data.validation`, or train with data.seq_len=64"),
        ),
    ],
)  # fmt: skip
def test_a_caller_writes_location_and_hint(caller, where, changes, found):
    with pytest.raises(BadValue) as caught, reported_by(caller):
        raise BadValue("x", where=where, changes=changes)
    assert (caught.value.where, caught.value.hint) == found
    copied = pickle.loads(pickle.dumps(caught.value))
    assert copied.render() == caught.value.render()


def test_the_outermost_caller_decides_and_sentences_stay():
    error = BadValue("x", where="data.source: a", changes={"data.format": "text"})
    with pytest.raises(BadValue), reported_by(Caller()), reported_by(ENTRY):
        raise error
    assert (error.where, error.hint) == ("data.source: a", "data.format=text")
    error.hint = "correct `data.source`"
    with pytest.raises(BadValue), reported_by(ENTRY):
        raise error
    assert error.hint == "correct `data.source[1]`"


@pytest.mark.parametrize(
    ("choices", "where", "hint", "option"),
    [
        ({"pins": {"tpx": 8}}, "pins", 'pins={"tp_x": 8}', "--pin tp_x=8"),
        ({"pins": {"schedule": "x"}}, "pins", 'pins={"schedule": "gpipe"}', "--pin schedule=gpipe"),
        (
            {"pins": {"order": "x"}}, "pins", 'pins={"order": "pp>dp_replicate>dp_shard>cp>tp_x>tp_y"}',
            "--pin 'order=pp>dp_replicate>dp_shard>cp>tp_x>tp_y'",
        ),
        ({"exclude": ("recomputed",)}, "exclude", 'exclude=("recompute",)', "--exclude recompute"),
        ({"exclude": ("xyz",)}, "exclude", "leave `xyz` out of exclude", "leave `xyz` out of --exclude"),
        ({"objective": "memry"}, "objective", 'objective="memory"', "--objective memory"),
        (
            {"deadline_s": 0.5}, "deadline_s", 'objective="fewest-devices", deadline_s=0.5',
            "--objective fewest-devices --deadline 0.5",
        ),
    ],
)  # fmt: skip
def test_a_plan_is_changed_by_arguments_or_options(choices, where, hint, option):
    with pytest.raises(HyperParallelError) as caught:
        plan("llama-3-8b", "dgx-h100", **choices)
    assert (caught.value.where, caught.value.hint) == (where, hint)
    with pytest.raises(HyperParallelError) as caught, reported_by(Caller()):
        plan("llama-3-8b", "dgx-h100", **choices)
    assert caught.value.hint == option


def test_generation_is_changed_by_arguments():
    with pytest.raises(HyperParallelError) as caught:
        hp.generate("runs/none", "Once", device="nowhere")
    assert (caught.value.where, caught.value.hint) == ("hyper_parallel.generate", "device='auto'")

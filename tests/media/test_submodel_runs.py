"""Runs of recipes with `parallel.submodels`: metrics, continuation, export and refusals."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    LlavaForConditionalGeneration,
    LlavaModel,
)
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

from hyper_parallel.config import LoadedRecipe, load_recipe
from hyper_parallel.errors import (
    BadValue,
    BatchMismatch,
    Contradiction,
    HyperParallelError,
    UnknownKey,
    UnsupportedSharding,
)
from hyper_parallel.ir import Plan
from hyper_parallel.mpmd import TowerLanes, check_submodel_schedule
from hyper_parallel.planner import plan_recipe
from hyper_parallel.trainer.engine.recipe_model import joint_schedule, read_recipe_spec
from hyper_parallel.trainer.engine.submodel_search import layouts
from hyper_parallel.trainer.job import plan_with_submodels, prepare_job, resolve_submodels
from tests.e2e.runs import CONFIG, assert_same_curve, curve, rows, train
from tests.media.records import write_data, write_place
from tests.media.tiny_models import needs_torchvision

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
SPLIT = "parallel.submodels={vision: {dp_shard: 1}, language: {tp_x: 2}}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    training = "steps: 3, microbatch: 1, accumulation_steps: 4"
    return write_place(tmp_path_factory.mktemp("submodels"), training, repeats=4)


AUTO = (
    "parallel.submodels=auto",
    "training.microbatch=null",
    "training.accumulation_steps=null",
    "training.tokens_per_step=384",
)


def _weights(run: Path, model_type: Any = AutoModelForImageTextToText) -> dict[str, torch.Tensor]:
    model = model_type.from_pretrained(run / "export", dtype=torch.float64)
    return dict(model.named_parameters())


def test_a_tower_on_its_own_rank_repeats_one_rank(place: Path) -> None:
    train(place, place / "one", "parallel.dp_shard=1", "checkpoint.export=true")
    train(place, place / "split", SPLIT, "training.steps=1", "checkpoint.every=1")
    train(place, place / "split", SPLIT, "checkpoint.export=true", report=True)
    assert_same_curve(curve(place / "split"), curve(place / "one"))
    norms = [[row["grad_norm"] for row in rows(place / run / "metrics.jsonl")] for run in ("split", "one")]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)
    expected = _weights(place / "one")
    for name, weight in _weights(place / "split").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_parts_that_share_ranks_repeat_one_rank(place: Path) -> None:
    train(place, place / "single", "parallel.dp_shard=1", "checkpoint.export=true")
    shared = "parallel.submodels={vision: {dp_shard: 2, ranks: [0, 1]}, language: {tp_x: 2}}"
    train(place, place / "shared", shared, "training.steps=1", "checkpoint.every=1")
    partly = "parallel.submodels={vision: {dp_shard: 2, ranks: [1, 2]}, language: {tp_x: 2}}"
    train(place, place / "shared", partly, "checkpoint.export=true", report=True)
    assert_same_curve(curve(place / "shared"), curve(place / "single"))
    expected = _weights(place / "single")
    for name, weight in _weights(place / "shared").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_parts_train_from_scratch_while_the_number_of_microbatches_with_media_varies(
    place: Path,
) -> None:
    """The tower is sharded on the ranks of the language part; after a few equal steps come others."""
    values = ("model.init=random", "training.steps=12", "training.accumulation_steps=8")
    train(place, place / "alone12", "parallel.dp_shard=1", *values)
    shared = "parallel.submodels={vision: {dp_shard: 2, ranks: [0, 1]}, language: {tp_x: 2}}"
    for name, layout in (("varied", shared), ("apart12", SPLIT)):
        train(place, place / name, layout, *values)
        assert_same_curve(curve(place / name), curve(place / "alone12"))


@pytest.mark.slow
def test_a_language_part_with_pipeline_stages_continues_a_run_of_one_rank(place: Path) -> None:
    train(place, place / "whole", "parallel.dp_shard=1")
    train(place, place / "staged", "parallel.dp_shard=1", "training.steps=1", "checkpoint.every=1")
    stages = "parallel.submodels={vision: {dp_shard: 1}, language: {pp: 2}}"
    train(place, place / "staged", stages, report=True)
    assert_same_curve(curve(place / "staged"), curve(place / "whole"))


def _write_images_and_audio(folder: Path) -> None:
    """Write a model with two encoders, records with images, audio or text alone, and a recipe."""
    needs_torchvision("qwen2_5_omni_thinker")
    training = "steps: 3, microbatch: 1, accumulation_steps: 4"
    write_place(folder, training, family="qwen2_5_omni_thinker", repeats=2)
    lines = (folder / "train.jsonl").read_text()
    lines += write_data(folder, repeats=2, kind="audio").read_text()
    (folder / "train.jsonl").write_text(lines)


@pytest.mark.slow
def test_encoders_of_images_and_of_audio_on_ranks_of_their_own_repeat_one_rank(
    tmp_path: Path,
) -> None:
    _write_images_and_audio(tmp_path)
    train(tmp_path, tmp_path / "one", "parallel.dp_shard=1", "checkpoint.export=true")
    split = "parallel.submodels={vision: {ranks: [0]}, audio: {ranks: [1]}, language: {tp_x: 2}}"
    train(tmp_path, tmp_path / "split", split, "training.steps=1", "checkpoint.every=1")
    train(tmp_path, tmp_path / "split", split, "checkpoint.export=true", report=True)
    notes = Plan.load(tmp_path / "split" / "plan.json").notes
    assert any("records keep the order of the data" in note for note in notes)
    assert_same_curve(curve(tmp_path / "split"), curve(tmp_path / "one"))
    weights, expected = (_weights(tmp_path / run, AutoModelForMultimodalLM) for run in ("split", "one"))
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["both", "language"])
def test_adapters_on_parts_repeat_and_continue_one_rank(place: Path, tmp_path: Path, parts: str) -> None:
    """With adapters of the language part alone, the tower's rank has nothing to save."""
    lora = ["lora.r=2"]
    if parts == "language":
        lora += ["lora.target_modules='.*language_model.*\\.(q|v)_proj'"]
    run, one = tmp_path / "run", tmp_path / "one"
    train(place, one, "parallel.dp_shard=1", *lora, "checkpoint.export=true")
    train(place, run, SPLIT, *lora, "training.steps=1", "checkpoint.every=1")
    shutil.copytree(run, joined := tmp_path / "joined")
    train(place, joined, "parallel.dp_shard=1", *lora)
    train(place, run, SPLIT, *lora, "checkpoint.export=true", report=True)
    for each in (run, joined):
        assert_same_curve(curve(each), curve(one))
    norms = [[row["grad_norm"] for row in rows(each / "metrics.jsonl")] for each in (run, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-10)
    adapters = [load_file(each / "export" / "adapter_model.safetensors") for each in (run, one)]
    assert any("vision_tower" in name for name in adapters[1]) == (parts == "both")
    torch.testing.assert_close(*adapters, rtol=1e-9, atol=1e-11)
    stated = [(each / "export" / "adapter_config.json").read_text() for each in (run, one)]
    assert stated[0] == stated[1]


@pytest.mark.torch
def test_plans_hold_the_parts_and_the_schedule_that_training_runs(place: Path) -> None:
    """The encoder's time follows from its operations; text-only microbatches count as zero."""
    filled = "parallel.submodels={vision: {dp_replicate: 2, ranks: [0, 1]}, language: {pp: 2}}"
    apart = "parallel.submodels={vision: {dp_shard: 1}, language: {tp_x: 2}}"
    for override, joint in ((filled, True), (apart, False)):
        loaded = load_recipe(place / "recipe.yaml", [override])
        spec = read_recipe_spec(loaded)
        plan = plan_recipe(loaded.recipe, None, loaded.where, spec)
        plan = Plan.from_json(plan_with_submodels(loaded, plan).to_json())
        parts = plan.submodels
        assert parts is not None
        assert [(part.name, part.ranks) for part in parts.parts] == (
            [("language", (0, 1)), ("vision", (0, 1) if joint else (2,))]
        )
        assert 0 < parts.lower_s <= parts.step_s
        assert 0 <= parts.bubble < 1
        assert parts.parts[1].backward_s == pytest.approx(2 * parts.parts[1].forward_s)
        assert "sub-models" in plan.summary()
        assert (joint_schedule(plan) is not None) == joint
        if joint:
            schedule = joint_schedule(plan)
            assert schedule is not None
            check_submodel_schedule(schedule, TowerLanes(2, (0, 1)), frozen=False)
            assert schedule.microbatches == 4


def _read_values(monkeypatch: pytest.MonkeyPatch, owner: type[torch.nn.Module], name: str) -> None:
    """Let a method of a model read values of its first argument, as encoders do whose operations depend on them."""
    method = getattr(owner, name)

    def reading(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        media = (*args, *kwargs.values())[0]
        assert float(media.abs().sum()) >= 0
        return method(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, reading)


@pytest.mark.torch
def test_a_note_names_the_cause_for_an_encoder_without_predicted_times(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _read_values(monkeypatch, LlavaModel, "get_image_features")
    loaded = load_recipe(place / "recipe.yaml", [SPLIT])
    plan = plan_recipe(loaded.recipe, None, loaded.where, read_recipe_spec(loaded))
    plan = plan_with_submodels(loaded, plan)
    assert plan.submodels is None
    cause = "does not run on meta tensors (RuntimeError: Tensor.item() cannot be called on meta tensors)"
    assert any(cause in note and "times are not predicted" in note for note in plan.notes)
    auto = load_recipe(place / "recipe.yaml", [*AUTO, "parallel.world_size=2"])
    with pytest.raises(UnsupportedSharding, match=re.escape(cause)) as refused:
        resolve_submodels(auto, None)
    (hint,) = shlex.split(refused.value.hint)
    assert not load_recipe(place / "recipe.yaml", [*AUTO, hint]).recipe.parallel.submodels.auto


@pytest.mark.torch
def test_errors_of_other_kinds_are_not_taken_for_reads_of_values(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("a package of the encoder is missing")

    monkeypatch.setattr(LlavaModel, "get_image_features", missing)
    loaded = load_recipe(place / "recipe.yaml", [SPLIT])
    plan = plan_recipe(loaded.recipe, None, loaded.where, read_recipe_spec(loaded))
    with pytest.raises(ImportError, match="of the encoder"):
        plan_with_submodels(loaded, plan)


@pytest.mark.torch
def test_an_encoder_that_reads_values_costs_the_elements_of_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Windows of recordings have one size, so each recording costs the same, whatever its number of tokens."""
    write_place(tmp_path, "steps: 1, microbatch: 1", family="qwen2_audio", kind="audio")
    _read_values(monkeypatch, Qwen2AudioEncoder, "forward")
    loaded = load_recipe(tmp_path / "recipe.yaml", ["parallel.dp_shard=1"])
    job = prepare_job(loaded, progress=False)
    tokens = job.packed.train.media_costs(np.arange(len(job.packed.train)))[:, 1]
    assert len({*tokens[tokens > 0]}) > 1
    assert job.media_costs == (1, 0)
    cause = (
        "input elements, because the encoder of Qwen2AudioForConditionalGeneration does not run on "
        "meta tensors (RuntimeError: Tensor.item() cannot be called on meta tensors)"
    )
    (note,) = (n for n in job.plan.notes if n.endswith(cause))
    assert note in caplog.messages
    unbalanced = load_recipe(tmp_path / "recipe.yaml", ["parallel.dp_shard=1", "data.balance=none"])
    assert not any(cause in n for n in prepare_job(unbalanced, progress=False).plan.notes)


@pytest.mark.torch
def test_a_model_with_several_encoders_costs_numbers_of_tokens(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_recipe(place / "recipe.yaml", ["parallel.dp_shard=1"])
    counted = prepare_job(loaded, progress=False)
    assert not any("estimated" in note for note in (*counted.plan.notes, *caplog.messages))
    kinds = ("image", "audio", "text")
    monkeypatch.setattr(LlavaForConditionalGeneration, "input_modalities", kinds)
    job = prepare_job(loaded, progress=False)
    assert job.media_costs == (0, 1)
    (note,) = (n for n in job.plan.notes if "estimated by numbers of tokens" in n)
    assert "belongs to none of its encoders by name" in note
    assert note in caplog.messages


@pytest.mark.torch
def test_no_layout_that_can_run_is_faster_than_the_chosen_one(place: Path) -> None:
    loaded = load_recipe(place / "recipe.yaml", [*AUTO, "parallel.world_size=2"])
    chosen, (note,), proof = resolve_submodels(loaded, None)
    spec = read_recipe_spec(loaded)

    def seconds(one: LoadedRecipe) -> float:
        plan = plan_recipe(one.recipe, None, one.where, spec)
        assert plan.workload.tokens_per_step == 384
        return plan_with_submodels(one, plan).whole_step_s

    times = []
    for parts in layouts(["vision"], 2):
        explicit = [*AUTO, f"parallel.submodels={json.dumps(parts)}"]
        one = load_recipe(place / "recipe.yaml", explicit)
        assert set(one.recipe.parallel.submodels.members["vision"]) <= {0, 1}
        with suppress(HyperParallelError):
            times.append(seconds(one))
    assert len(times) >= 4
    assert seconds(chosen) == min(times) < max(times)
    assert f"fastest of {len(times)} layouts" in note
    assert proof is not None
    assert proof.bound <= proof.value == pytest.approx(min(times))
    assert proof.priced == len(times) >= proof.simulated


@pytest.mark.slow
def test_the_planner_places_each_of_several_encoders(tmp_path: Path) -> None:
    """The encoder of audio reads lengths of recordings, which have values in the trace that counts its operations."""
    _write_images_and_audio(tmp_path)
    auto = load_recipe(tmp_path / "recipe.yaml", [*AUTO, "parallel.world_size=3"])
    chosen, _, proof = resolve_submodels(auto, None)
    spec, times = read_recipe_spec(auto), []
    for parts in layouts(["audio", "vision"], 3):
        one = load_recipe(tmp_path / "recipe.yaml", [*AUTO, f"parallel.submodels={json.dumps(parts)}"])
        with suppress(HyperParallelError):
            plan = plan_recipe(one.recipe, None, one.where, spec)
            plan = plan_with_submodels(one, plan)
            assert plan.submodels is not None
            assert all(part.forward_s > 0 for part in plan.submodels.parts)
            times.append(plan.whole_step_s)
    assert proof is not None
    assert len(times) == proof.priced >= 5
    assert proof.bound <= proof.value == pytest.approx(min(times))
    assert chosen.recipe.parallel.submodels is not None
    assert {*chosen.recipe.parallel.submodels.members} == {"language", "vision", "audio"}
    train(tmp_path, tmp_path / "auto", *AUTO, "parallel.world_size=3")
    train(tmp_path, tmp_path / "one", *AUTO[2:], "training.microbatch=1", "parallel.dp_shard=1")
    assert_same_curve(curve(tmp_path / "auto"), curve(tmp_path / "one"))


def test_the_planner_chooses_the_layout_of_a_run(place: Path) -> None:
    train(place, place / "auto", *AUTO, "parallel.world_size=2", "training.steps=1")
    train(place, place / "auto", *AUTO, "parallel.world_size=2", report=True)
    train(place, place / "lone", "parallel.dp_shard=1")
    assert_same_curve(curve(place / "auto"), curve(place / "lone"))
    written = load_recipe(place / "auto" / "config.yaml").recipe.parallel.submodels
    assert written is not None
    assert not written.auto
    assert {rank for ranks in written.members.values() for rank in ranks} == {0, 1}
    assert "is the fastest of" in (place / "auto" / "report.html").read_text()


def test_a_later_layer_replaces_a_layout_or_the_word_for_it(place: Path) -> None:
    auto = load_recipe(place / "recipe.yaml", [SPLIT, "parallel.submodels=auto"])
    assert auto.recipe.parallel.submodels is not None
    assert auto.recipe.parallel.submodels.model_fields_set == {"auto"}
    given = load_recipe(place / "recipe.yaml", ["parallel.submodels=auto", SPLIT])
    assert given.recipe.parallel.submodels is not None
    assert given.recipe.parallel.submodels.members == {"language": (0, 1), "vision": (2,)}


@pytest.mark.slow
def test_towers_on_the_ranks_of_pipeline_stages_repeat_one_rank(place: Path) -> None:
    train(place, place / "alone2", "parallel.dp_shard=1", "checkpoint.export=true")
    filled = "parallel.submodels={vision: {dp_replicate: 2, ranks: [0, 1]}, language: {pp: 2}}"
    train(place, place / "filled", filled, "training.steps=1", "checkpoint.every=1")
    train(place, place / "filled", filled, "checkpoint.export=true", report=True)
    assert_same_curve(curve(place / "filled"), curve(place / "alone2"))
    assert "Parts of the model" in (place / "filled" / "report.html").read_text()
    expected = _weights(place / "alone2")
    for name, weight in _weights(place / "filled").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sharded_towers_and_data_parallel_stages_on_shared_ranks_repeat_one_rank(
    place: Path,
) -> None:
    train(place, place / "alone3", "parallel.dp_shard=1")
    sharded = "parallel.submodels={vision: {dp_shard: 2, ranks: [0, 1]}, language: {pp: 2}}"
    train(place, place / "rounds", sharded)
    assert_same_curve(curve(place / "rounds"), curve(place / "alone3"))
    four = "parallel.submodels={vision: {dp_shard: 4, ranks: [0, 1, 2, 3]}, language: {pp: 2, dp_shard: 2}}"
    train(place, place / "four", four, "training.accumulation_steps=2")
    assert_same_curve(curve(place / "four"), curve(place / "alone3"))
    tensor = "parallel.submodels={vision: {dp_shard: 4, ranks: [0, 1, 2, 3]}, language: {pp: 2, tp_x: 2}}"
    train(place, place / "tensor", tensor)
    assert_same_curve(curve(place / "tensor"), curve(place / "alone3"))
    notes = Plan.load(place / "tensor" / "plan.json").notes
    assert any(note.startswith("with pp, time and memory are predicted as if") for note in notes)


@pytest.mark.slow
def test_a_checkpoint_of_sub_models_continues_on_one_rank(place: Path) -> None:
    frozen = "training.freeze=['model.vision_tower.*', 'model.multi_modal_projector.*']"
    shared = "parallel.submodels={vision: {dp_shard: 2}, language: {dp_shard: 2}}"
    split = (frozen, "training.microbatch=1", "training.accumulation_steps=2")
    train(place, place / "alone", "parallel.dp_shard=1", frozen)
    train(place, place / "moved", shared, *split, "training.steps=1", "checkpoint.every=1")
    train(place, place / "moved", "parallel.dp_shard=1", frozen)
    assert_same_curve(curve(place / "moved"), curve(place / "alone"))


@pytest.mark.parametrize(
    ("overrides", "code", "match"),
    [
        ((SPLIT, "training.compile=true"), Contradiction, "HP104[\\s\\S]*compile=false"),
        ((SPLIT, "parallel.dp_shard=2"), Contradiction, "HP104[\\s\\S]*parallel.dp_shard=1"),
        (("parallel.submodels={language: {tp_x: 2}}",), Contradiction, "HP104[\\s\\S]*vision"),
        (
            ("parallel.submodels={vision: {ranks: [0, 1]}, language: {tp_x: 2}}",),
            Contradiction,
            "HP104[\\s\\S]*vision.ranks=null",
        ),
        (
            ("parallel.submodels={vision: {ranks: [3]}, language: {tp_x: 2}}",),
            Contradiction,
            "HP104[\\s\\S]*rank 2 of 4",
        ),
        (
            (
                "parallel.submodels={vision: {dp_shard: 2, ranks: [0, 1]}, language: {pp: 2}}",
                "training.accumulation_steps=3",
            ),
            BatchMismatch,
            "HP308[\\s\\S]*accumulation_steps=4",
        ),
        (
            ("parallel.submodels={vision: {ranks: [3]}, language: {pp: 2, dp_shard: 2}}",),
            UnsupportedSharding,
            "HP205[\\s\\S]*language.pp=1",
        ),
        ((*AUTO, "training.compile=true"), Contradiction, "HP104[\\s\\S]*compile=false"),
        (("parallel.submodels={auto: true, vision: {dp_shard: 1}}",), HyperParallelError, "HP10"),
        (
            (*AUTO, "model.path=TEXT", "data.tokenizer=MODEL"),
            UnsupportedSharding,
            "HP205[\\s\\S]*submodels=null",
        ),
        (("parallel.submodels={visoin: {}, language: {tp_x: 2}}",), HyperParallelError, "HP10"),
        (("parallel.submodels={vision: {tp_x: 2}, language: {tp_x: 2}}",), UnknownKey, "HP101"),
        (
            ("parallel.submodels={audio: {dp_shard: 1}, language: {tp_x: 2}}",),
            BadValue,
            "HP102[\\s\\S]*vision",
        ),
        (
            (SPLIT, "model.path=TEXT", "data.tokenizer=MODEL"),
            UnsupportedSharding,
            "HP205[\\s\\S]*submodels=null",
        ),
    ],
)
def test_sub_models_that_cannot_run_are_refused_before_training(
    place: Path, overrides: tuple[str, ...], code: type[HyperParallelError], match: str
) -> None:
    (place / "text.json").write_text(json.dumps(CONFIG))
    paths = {"TEXT": place / "text.json", "MODEL": place / "model"}
    words = [re.sub("TEXT|MODEL", lambda match: str(paths[match[0]]), word) for word in overrides]
    with pytest.raises(code, match=match):
        train(place, place / "refused", *words)
    assert not (place / "refused" / "metrics.jsonl").exists()

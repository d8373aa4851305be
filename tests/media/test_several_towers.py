"""Models with encoders of images and of audio on ranks of their own: losses, gradients and norms of one rank."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hyper_parallel as hp
from hyper_parallel.backends.torch.submodels.parts import tower_flops
from hyper_parallel.config import LoadedRecipe, load_recipe
from hyper_parallel.errors import (
    BadValue,
    Contradiction,
    HyperParallelError,
    UnsupportedSharding,
)
from hyper_parallel.ir import Plan
from hyper_parallel.planner import plan_recipe
from hyper_parallel.planner.submodels import layouts
from hyper_parallel.runtime import submodel_strategies
from hyper_parallel.trainer.data import Batches
from hyper_parallel.trainer.engine.recipe_model import read_recipe_spec
from hyper_parallel.trainer.engine.recipe_submodels import divided_step, sampled_tower_flops
from hyper_parallel.trainer.engine.submodel_search import choose_submodels
from tests.media.results import assert_equal_results
from tests.media.tiny_models import _MROPE, _TEXT, _WHISPER

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
_IMAGE, _AUDIO, _VIDEO = 301, 302, 303
_VISION = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
_TOKENS = {"image_token_id": _IMAGE, "audio_token_id": _AUDIO, "video_token_id": _VIDEO}
STEPS = ("iabt", "ttta", "tivi", "bbaa")
"""Microbatches of each step, with images (i), videos (v), audio (a), images and audio (b) or text only (t)."""
Layouts = Mapping[str, str]
Placement = Mapping[str, Sequence[int]]


def _qwen2_5() -> Any:
    vision = {**_VISION, "window_size": 16, "fullatt_block_indexes": [1]}
    config = transformers.Qwen2_5OmniThinkerConfig(
        text_config={**_TEXT, **_MROPE}, vision_config=vision,
        audio_config={**_WHISPER, "n_window": 10, "output_dim": 32},
        image_token_index=_IMAGE, audio_token_index=_AUDIO, video_token_index=_VIDEO,
    )  # fmt: skip
    return transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)


def _qwen3() -> Any:
    vision = {**_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    audio = {
        "num_mel_bins": 8, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16,
        "max_source_positions": 50, "output_dim": 32, "downsample_hidden_size": 8,
    }  # fmt: skip
    text = {
        **_TEXT,
        **_MROPE,
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text, vision_config=vision, audio_config=audio, **_TOKENS
    )  # fmt: skip
    return transformers.Qwen3OmniMoeThinkerForConditionalGeneration(config)


BUILDERS = {"qwen2_5_omni": _qwen2_5, "qwen3_omni_moe": _qwen3}


def _model(family: str, frozen: str = "") -> Any:
    """Return a model with the same random values in every call; `frozen` is a part of parameter names."""
    torch.manual_seed(0)
    model = BUILDERS[family]().double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
            parameter.requires_grad_(not frozen or frozen not in name)
    return model


def _media(kind: str, seed: int) -> dict[str, Tensor]:
    """Return arguments of the forward with an image of 16 patches, a video of 32 or a recording of 40 frames."""
    random, media = torch.Generator().manual_seed(seed), {}
    if kind in "ib":
        media["pixel_values"] = torch.randn(16, 96, generator=random, dtype=torch.float64)
        media["image_grid_thw"] = torch.tensor([[1, 4, 4]])
    if kind == "v":
        media["pixel_values_videos"] = torch.randn(32, 96, generator=random, dtype=torch.float64)
        media["video_grid_thw"] = torch.tensor([[2, 4, 4]])
    if kind in "ab":
        media["input_features"] = torch.randn(1, 8, 60, generator=random, dtype=torch.float64)
        media["feature_attention_mask"] = (torch.arange(60) < 40).long()[None]
    return media


def _batches(family: str) -> list[list[dict[str, Tensor]]]:
    """Return the microbatches of each step, of 48 tokens."""
    model, steps = _model(family), []
    media = _media("b", 0)
    with torch.no_grad():
        recording = model.get_audio_features(media["input_features"], media["feature_attention_mask"], return_dict=True)
    counts = {_IMAGE: 4, _AUDIO: len(recording.last_hidden_state), _VIDEO: 8}
    for step, kinds in enumerate(STEPS):
        steps.append([])
        for number, kind in enumerate(kinds):
            seed = 10 * step + number
            ids = torch.randint(3, 300, (1, 48), generator=torch.Generator().manual_seed(seed))
            tokens = {_IMAGE: kind in "ib", _AUDIO: kind in "ab", _VIDEO: kind == "v"}
            marks = [token for token, used in tokens.items() if used for _ in range(counts[token])]
            ids[0, 2 : 2 + len(marks)] = torch.tensor(marks, dtype=torch.long)
            labels = ids.roll(-1, 1).masked_fill(ids.roll(-1, 1) > 300, -100)
            labels[0, -1] = -100
            steps[-1].append({"input_ids": ids, "shift_labels": labels, **_media(kind, seed)})
    return steps


def _run(model: Any, batches: list[list[dict[str, Tensor]]], shares: int = 1) -> list[Any]:
    """Return loss, gradient norm and gradients of every step."""
    results, count = [], 4 // shares
    for rows in batches:
        sources = hp.microbatch_sources(model, count)
        parts = [s and rows[s[0] * count + s[1]] for s in sources]
        loss = float(hp.forward_backward(model, parts))
        norm = float(hp.clip_grad_norm_(model, 0.5))
        grads = {
            n: None if p.grad is None else getattr(p.grad, "full_tensor", p.grad.clone)()
            for n, p in model.named_parameters()
        }
        if rows is batches[0]:
            assert float(hp.forward_loss(model, parts)) == pytest.approx(loss, rel=1e-10)
        model.zero_grad()
        results.append((loss, norm, grads))
    return results


PLACES: dict[str, tuple[Layouts, Placement]] = {
    "disjoint": (
        {"vision": "", "audio": "", "language": ""},
        {"vision": (0,), "audio": (1,), "language": (2,)},
    ),
    "equal": (
        {"language": "dp_shard=2", "audio": "dp_shard=2", "vision": "dp_shard=2"},
        {"language": (0, 1), "audio": (0, 1), "vision": (1, 0)},
    ),
    "overlapping": (
        {"vision": "dp_shard=2", "audio": "", "language": "tp=2"},
        {"vision": (2, 0), "audio": (0,), "language": (0, 1)},
    ),
    "together": (
        {"language": "", "vision": "dp_replicate=2", "audio": "dp_shard=2"},
        {"language": (0,), "vision": (1, 2), "audio": (1, 2)},
    ),
    "stages": (
        {"vision": "", "audio": "", "language": "pp=2"},
        {"vision": (2,), "audio": (2,), "language": (0, 1)},
    ),
}
CASES = [
    ("qwen2_5_omni", "overlapping", ""),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("qwen2_5_omni", "overlapping", "visual"),
            *product(["qwen2_5_omni"], ("disjoint", "equal", "together", "stages"), ("", "visual")),
            ("qwen3_omni_moe", "overlapping", ""),
            ("qwen3_omni_moe", "disjoint", "visual"),
        )
    ),
]
"""Family, places, and part of the names of frozen parameters."""


@pytest.mark.parametrize(("family", "place", "frozen"), CASES)
def test_several_towers_repeat_one_rank(tmp_path: Path, family: str, place: str, frozen: str) -> None:
    """Steps with images, videos, audio, both or text alone; checkpoint and export contain the whole model."""
    layouts, ranks = PLACES[place]
    batches = _batches(family)
    single = _model(family, frozen)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected = _run(single, batches)
    every = {name for name, _ in single.named_parameters()}

    def rank(_: int) -> set[str]:
        with hp.World.join("cpu") as world:
            part = hp.parallelize_submodels(_model(family, frozen), layouts, world, ranks=ranks)
            assert_equal_results(_run(part, batches, 2 if "dp" in layouts["language"] else 1), expected)
            with torch.no_grad():
                for parameter in part.parameters():
                    parameter.mul_(2)
            hp.save(part, torch.optim.SGD(part.parameters()), tmp_path / "saved", step=1)
            hp.save_pretrained(part, tmp_path / "export")
            return {name for name, _ in part.named_parameters()}

    size = len({r for members in ranks.values() for r in members})
    owned = hp.launch(rank, size, timeout_s=200)
    assert set.union(*owned) == every
    exported = type(single).from_pretrained(tmp_path / "export", dtype=torch.float64)
    doubled = {name: 2 * p.detach() for name, p in single.named_parameters()}
    hp.load(single, None, tmp_path / "saved")
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(parameter.detach(), doubled[name], rtol=0, atol=0)
        torch.testing.assert_close(exported.get_parameter(name).detach(), doubled[name], rtol=0, atol=0)
    for number, names in enumerate(owned):
        assert any("visual" in name for name in names) == (number in ranks["vision"])
        assert any("audio" in name for name in names) == (number in ranks["audio"])


@pytest.mark.torch
def test_parts_that_cannot_be_told_apart_or_do_not_fit_are_refused() -> None:
    with torch.device("meta"):
        model, unnamed, mixed = (_qwen2_5() for _ in range(3))
        unnamed.model.mixer = nn.Linear(4, 4)
        mixed.lm_head = nn.Sequential(OrderedDict(vision_head=mixed.lm_head))
    parts = {"vision": "", "audio": "", "language": ""}
    with pytest.raises(UnsupportedSharding, match=r"belongs to none of its encoders by name[\s\S]*model\.mixer"):
        submodel_strategies(unnamed, parts, 3)
    with pytest.raises(UnsupportedSharding, match=r"with text only uses[\s\S]*lm_head\.vision_head"):
        submodel_strategies(mixed, parts, 3)
    with pytest.raises(BadValue, match=r"`audio` has no layout[\s\S]*audio\.dp_shard=1"):
        submodel_strategies(model, {"vision": "", "language": ""}, 2)
    ranks = {"vision": (0,), "audio": (2,), "language": (0, 1)}
    with pytest.raises(UnsupportedSharding, match="several encoders"):
        submodel_strategies(model, {**parts, "language": "pp=2"}, 3, ranks)
    assert {*submodel_strategies(model, parts, 3)} == {*parts}


def _recipe(folder: Path, submodels: str) -> LoadedRecipe:
    """Return a recipe of a model with two encoders, whose weights are not written."""
    with torch.device("meta"):
        config = _qwen2_5().config
    config.architectures = ["Qwen2_5OmniThinkerForConditionalGeneration"]
    config.to_json_file(folder / "config.json", use_diff=False)
    (folder / "recipe.yaml").write_text(
        f"model: {{path: {folder / 'config.json'}}}\nstage: sft\n"
        "data: {source: none.jsonl, packing: false, seq_len: 64}\n"
        f"parallel: {{submodels: {submodels}, world_size: null}}\n"
    )
    return load_recipe(folder / "recipe.yaml")


@pytest.mark.parametrize("ranks", [2, 4])
def test_layouts_of_several_encoders_use_all_ranks(tmp_path: Path, ranks: int) -> None:
    """Encoders have ranks of their own, each or together, or all ranks of a language part without stages."""
    kinds, places = ("audio", "vision"), set[tuple[tuple[int, ...], ...]]()
    for parts in layouts(kinds, ranks):
        submodels = _recipe(tmp_path, json.dumps(parts)).recipe.parallel.submodels
        assert submodels is not None
        language, *towers = submodels.members.values()
        assert {*language}.union(*towers) == {*range(ranks)}
        shared = not {*language}.isdisjoint({*towers[0], *towers[1]})
        assert {*towers[0]} == {*towers[1]} or {*towers[0]}.isdisjoint(towers[1])
        assert not shared or (submodels.language.pp == 1 and towers == [language] * 2)
        places.add((language, *towers))
    splits = [(n, k) for n in range(1, ranks) for k in range(1, ranks - n)]
    assert len(places) == 1 + len(splits) + (ranks - 1)


class _Records:
    """Microbatches of one of `STEPS` in place of a data set: the keywords of `_batches` as arrays."""

    def __init__(self, family: str, step: int) -> None:
        self._rows = _batches(family)[step]

    def microbatches(self, _: int, share: int, shares: int, rows: int, count: int) -> Iterator[Any]:
        for batch in self._rows[share::shares][:count]:
            arrays = {n: t.numpy() for n, t in batch.items() if n != "shift_labels"}
            yield SimpleNamespace(input_ids=arrays.pop("input_ids"), media=arrays)


@pytest.mark.torch
@pytest.mark.parametrize("family", BUILDERS)
def test_the_operations_of_every_encoder_are_counted(family: str) -> None:
    """Encoders may read grids, lengths and masks; texts and media of another encoder cost zero."""
    with torch.device("meta"):
        model = BUILDERS[family]().double()
    real, media = _model(family), _media("b", 0)
    real.set_attn_implementation("eager")  # fused attention is not counted on a CPU
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        real.get_image_features(media["pixel_values"], media["image_grid_thw"])
        image = counter.get_total_flops()
        real.get_audio_features(media["input_features"], media["feature_attention_mask"])
    audio = counter.get_total_flops() - image
    batches = [*_Records(family, 0).microbatches(0, 0, 1, 1, 4)]
    flops = tower_flops(model, [{"input_ids": b.input_ids, **b.media} for b in batches])
    assert STEPS[0] == "iabt"
    assert flops == {"vision": [image, 0, image, 0], "audio": [0, audio, audio, 0]}


@pytest.mark.torch
def test_the_fastest_layout_of_several_encoders_is_chosen(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = _qwen2_5()
    auto = _recipe(tmp_path, "auto")
    spec = read_recipe_spec(auto)

    def plan_of(candidate: LoadedRecipe) -> Plan:
        return plan_recipe(candidate.recipe, None, candidate.where, spec)

    assert STEPS[3].startswith("bb"), "images and recordings in every microbatch"
    records = cast(Batches, _Records("qwen2_5_omni", 3))
    chosen, note, proof = choose_submodels(auto, model, 3, plan_of, lambda *_: records)
    times = {}
    for parts in layouts(["audio", "vision"], 3):
        one = _recipe(tmp_path, json.dumps(parts))
        with suppress(HyperParallelError):
            plan = plan_of(one)
            flops = sampled_tower_flops(plan, model, records)
            step = divided_step(one.recipe, plan, model, flops).planned()
            assert step.submodels is not None
            assert all(part.forward_s > 0 for part in step.submodels.parts)
            tokens = plan.workload.tokens_per_step or 1
            times[json.dumps(parts)] = step.whole_step_s / tokens
    assert len(times) == proof.priced >= 5
    assert f"fastest of {proof.priced} layouts" in note
    (chosen_s,) = (
        seconds
        for parts, seconds in times.items()
        if _recipe(tmp_path, parts).recipe.parallel.submodels == chosen.recipe.parallel.submodels
    )
    assert chosen_s == min(times.values()) < max(times.values())
    assert proof.bound <= proof.value


def test_stages_share_no_ranks_with_several_encoders(tmp_path: Path) -> None:
    parts = "{vision: {ranks: [0]}, audio: {ranks: [2]}, language: {pp: 2}}"
    with pytest.raises(Contradiction, match=r"HP104[\s\S]*one encoder[\s\S]*language\.pp=1"):
        _recipe(tmp_path, parts)
    recipe = _recipe(tmp_path, "{vision: {ranks: [2]}, audio: {ranks: [2]}, language: {pp: 2}}")
    assert recipe.recipe.parallel.tower_ranks == 1


@pytest.mark.torch
def test_encoders_on_different_ranks_are_predicted_to_run_at_the_same_time(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = _qwen2_5()
    steps = []
    for vision, audio in ((0, 1), (0, 0)):
        parts = f"{{vision: {{ranks: [{vision}]}}, audio: {{ranks: [{audio}]}}, language: {{ranks: [{audio + 1}]}}}}"
        loaded = _recipe(tmp_path, parts)
        plan = plan_recipe(loaded.recipe, None, loaded.where, read_recipe_spec(loaded))
        steps.append(divided_step(loaded.recipe, plan, model, {"vision": 3e9, "audio": 1e9}))
    for step, total in zip(steps, (max, sum), strict=True):
        seconds = [tower.cost.forward_s for tower in step.towers.values()]
        assert step.costs[0].forward_s == pytest.approx(total(seconds))
        planned = step.planned().submodels
        assert planned is not None
        assert [part.name for part in planned.parts] == [*step.members]
        assert 0 < planned.lower_s <= planned.step_s
        assert 0 <= planned.bubble < 1
        assert step.max_bytes > 0

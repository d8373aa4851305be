"""Towers on ranks of their own: losses, gradients and norms of one rank, on disjoint meshes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hyper_parallel as hp
from hyper_parallel.backends.torch import handle
from hyper_parallel.backends.torch.peft_adapters import add_adapters
from hyper_parallel.backends.torch.submodels.channel import Channel, pack
from hyper_parallel.backends.torch.weights.initialization import is_adapter
from hyper_parallel.backends.torch.weights.lora import has_adapters
from hyper_parallel.config import Data
from hyper_parallel.errors import BadValue, DegreesMismatch, HyperParallelError, ScheduleError, UnsupportedSharding
from hyper_parallel.ir import Action, Schedule, StageCost
from hyper_parallel.mpmd import TowerLanes, check_submodel_schedule, submodel_schedule
from hyper_parallel.planner import parse_strategy
from hyper_parallel.runtime import submodel_strategies
from hyper_parallel.trainer.data import Batches, Order, prepare
from tests.media.records import write_data
from tests.media.results import assert_equal_results
from tests.media.tiny_models import MEDIA, needs_torchvision, write_model
from tests.parity._case import Case
from tests.slow import slow_cells

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]
FAMILIES = ("llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "internvl", "qwen2_audio")
STEPS = ("itti", "tttt", "iiti", "tiit")
"""Rows of each step with media (i) or text only (t); each row is a microbatch."""
Layouts = Mapping[str, str]
Placement = Mapping[str, Sequence[int]]
Results = list[tuple[float, float, dict[str, Tensor | None]]]


def _batches(folder: Path, family: str) -> Batches:
    needs_torchvision(family)
    write_model(family, folder / "model")
    source = write_data(folder, kind=MEDIA[family][-1])
    (several, single, _, text) = source.read_text().splitlines(keepends=True)
    media = iter([several, single] * 8)
    source.write_text("".join(next(media) if kind == "i" else text for kind in "".join(STEPS)))
    data = Data(source=str(source), seq_len=320, holdout=0.0, packing=False, cache_dir=str(folder / "cache"))
    packed = prepare(data, stage="sft", model_path=str(folder / "model"), seed=0, progress=False)
    return Batches(packed.train, sequences_per_step=4, order=Order(shuffle=False))


def _model(folder: Path, frozen: bool) -> Any:
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder / "model", dtype=torch.float64).train()
    for name, parameter in model.named_parameters():
        if frozen and any(part in name for part in ("vision", "visual", "audio", "projector")):
            parameter.requires_grad_(False)
    return model


def _inputs(batch: Any) -> dict[str, Tensor]:
    arrays = {"input_ids": batch.input_ids, "shift_labels": batch.shift_labels, **batch.media}
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}


def _run(model: Any, batches: Batches, shares: int, microbatch: int = 1) -> Results:
    results: Results = []
    count = 4 // (shares * microbatch)
    for step in range(len(STEPS)):
        parts = [
            None
            if source is None
            else _inputs([*batches.microbatches(step, source[0], shares, microbatch, count)][source[1]])
            for source in hp.microbatch_sources(model, count)
        ]
        loss = float(hp.forward_backward(model, parts))
        norm = float(hp.clip_grad_norm_(model, 0.5))
        grads = {
            n: None if p.grad is None else getattr(p.grad, "full_tensor", p.grad.clone)()
            for n, p in model.named_parameters()
        }
        assert float(hp.forward_loss(model, parts)) == pytest.approx(loss, rel=1e-10)
        model.zero_grad()
        results.append((loss, norm, grads))
    return results


DISJOINT = (
    {"language": "tp=2", "vision": ""},
    {"vision": "dp_shard=2", "language": "tp=2"},
    {"vision": "", "language": ""},
    {"vision": "", "language": "dp_shard=2"},
    {"vision": "dp_shard=2", "language": "dp_shard=2"},
)


OVERLAPPING: tuple[tuple[Layouts, Placement], ...] = (
    ({"vision": "dp_shard=2", "language": "tp=2"}, {"vision": (0, 1), "language": (0, 1)}),
    ({"vision": "dp_shard=2", "language": "tp=2"}, {"vision": (0, 1), "language": (1, 2)}),
    ({"vision": "dp_shard=2", "language": "dp_shard=2"}, {"vision": (1, 0), "language": (0, 1)}),
    ({"language": "dp_replicate=2", "vision": ""}, {"vision": (1,), "language": (0, 1)}),
    ({"vision": "", "language": ""}, {"vision": (0,), "language": (0,)}),
)


PIPELINES: tuple[Layouts, ...] = (
    {"vision": "", "language": "pp=2"},
    {"language": "pp=2 dp_shard=2", "vision": "dp_shard=2"},
    {"language": "pp=2 schedule=zb-h1", "vision": ""},
)


def _named(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {kind if name == "vision" else name: value for name, value in values.items()}


def _ranks(layouts: Layouts) -> int:
    return sum(parse_strategy(layout).world_size for layout in layouts.values())


@pytest.mark.timeout(600)  # up to 13 launches
@slow_cells(
    "qwen2_5_vl",
    "qwen3_vl",
    "internvl",
    "gemma3",
    "llava-frozen",
    "llava-trained",
    "qwen2_audio-frozen",
    "qwen2_audio-trained",
)
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_on_its_own_ranks_repeats_one_rank(tmp_path: Path, family: str, frozen: bool) -> None:
    batches = _batches(tmp_path, family)
    single = _model(tmp_path, frozen)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected = _run(single, batches, 1)
    kind = "audio" if family == "qwen2_audio" else "vision"

    def rank(layouts: Layouts, ranks: Placement | None) -> set[str]:
        with hp.World.join("cpu") as world:
            part = hp.parallelize_submodels(_model(tmp_path, frozen), layouts, world, ranks=ranks)
            assert_equal_results(_run(part, batches, 2 if "dp" in layouts["language"] else 1), expected)
            return {name for name, _ in part.named_parameters()}

    every = {name for name, _ in single.named_parameters()}
    pipelines = PIPELINES if family == "llava" else PIPELINES[:1]
    for layouts in (*(DISJOINT if family == "llava" else DISJOINT[:2]), *pipelines):
        layouts = _named(layouts, kind)
        owned = hp.launch(lambda _, g=layouts: rank(g, None), _ranks(layouts), timeout_s=200)
        assert owned[0].isdisjoint(owned[-1])
        assert set.union(*owned) == every
    for layouts, ranks in OVERLAPPING if family == "llava" else OVERLAPPING[:2]:
        given = _named(layouts, kind), _named(ranks, kind)
        size = len({r for members in ranks.values() for r in members})
        owned = hp.launch(lambda _, given=given: rank(*given), size, timeout_s=200)
        assert set.union(*owned) == every
        both = {*ranks["vision"]} & {*ranks["language"]}
        assert all(owned[r] == every for r in both)


_ALL_PARTS, _LANGUAGE = r".*\.(q|v)_proj", r".*language_model.*\.(q|v|down)_proj"
_SECOND_STAGE = r".*language_model\.layers\.1\..*(q|v)_proj"
_STAGES = {"vision": "", "language": "pp=2"}
ADAPTED: dict[str, tuple[str, tuple[Layouts, Placement]]] = {
    "apart": (
        _ALL_PARTS,
        ({"vision": "", "language": "tp=2"}, {"vision": (2,), "language": (0, 1)}),
    ),
    "shared": (_ALL_PARTS, OVERLAPPING[0]),
    "language": (_LANGUAGE, OVERLAPPING[1]),
    "joint": (_ALL_PARTS, (_STAGES, {"vision": (1,), "language": (0, 1)})),
    "one-stage": (_SECOND_STAGE, (_STAGES, {"vision": (2,), "language": (0, 1)})),
}
"""Modules with adapters, layouts and ranks."""


@slow_cells("shared", "language", "joint", "one-stage")
@pytest.mark.parametrize("adapters", ADAPTED)
def test_adapters_on_parts_get_the_gradients_of_one_rank(tmp_path: Path, adapters: str) -> None:
    """Every rank knows that the model has adapters, also if they are all on other ranks."""
    peft = pytest.importorskip("peft")
    targets, (layouts, ranks) = ADAPTED[adapters]
    batches = _batches(tmp_path, "llava")

    def model() -> Any:
        built = _model(tmp_path, frozen=False)
        add_adapters(built, peft.LoraConfig(target_modules=targets, r=2, lora_alpha=8))
        torch.manual_seed(3)
        for name, parameter in built.named_parameters():
            if is_adapter(name):
                parameter.data.normal_(std=0.2)
        return built

    single = model()
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected = _run(single, batches, 1)
    assert sum(g is not None and bool(g.any()) for g in expected[0][2].values()) >= 4

    def rank(_: int) -> set[str]:
        with hp.World.join("cpu") as world:
            part = hp.parallelize_submodels(model(), layouts, world, ranks=ranks)
            assert_equal_results(_run(part, batches, 1), expected)
            assert has_adapters(part)  # checkpoints then save only adapters
            return {name for name, _ in part.named_parameters() if is_adapter(name)}

    size = len({r for members in ranks.values() for r in members})
    owned = hp.launch(rank, size, timeout_s=200)
    assert set.union(*owned) == {name for name in expected[0][2] if is_adapter(name)}


JOINT: tuple[tuple[Layouts, Placement], ...] = (
    ({"vision": "dp_replicate=2", "language": "pp=2"}, {"vision": (0, 1), "language": (0, 1)}),
    ({"vision": "", "language": "pp=2"}, {"vision": (1,), "language": (0, 1)}),
    ({"vision": "dp_replicate=2", "language": "pp=2"}, {"vision": (2, 0), "language": (0, 1)}),
    ({"vision": "dp_shard=2", "language": "pp=2"}, {"vision": (0, 1), "language": (0, 1)}),
)
FOUR = (0, 1, 2, 3)
REPLICATED: tuple[tuple[Layouts, Sequence[int]], ...] = (
    ({"vision": "dp_replicate=4", "language": "pp=2 dp_shard=2"}, FOUR),
    ({"vision": "dp_replicate=2", "language": "pp=2 dp_replicate=2"}, (2, 3)),
    ({"vision": "dp_shard=4", "language": "pp=2 dp_shard=2"}, FOUR),
    ({"vision": "dp_replicate=2 dp_shard=2", "language": "pp=2 dp_replicate=2"}, FOUR),
    ({"vision": "dp_shard=2", "language": "pp=2 dp_shard=2"}, (0, 1)),
    ({"vision": "dp_replicate=4", "language": "pp=2 tp=2"}, FOUR),
    ({"vision": "dp_shard=4", "language": "pp=2 tp=2"}, FOUR),
    ({"vision": "dp_replicate=2 dp_shard=2", "language": "pp=2 tp=2"}, FOUR),
    ({"vision": "dp_shard=2", "language": "pp=2 tp=2"}, (0, 1)),
    ({"vision": "dp_shard=2", "language": "pp=2 tp=2"}, (1, 2)),
)
"""Layouts on four ranks, and the ranks of copies or shards of the tower."""
COPIES = TowerLanes(2, (0, 1))


def _joint_schedules() -> dict[str, Schedule | None]:
    """Return schedules of 4 microbatches: from equal costs, the longest encoder passes first, and 1F1B."""
    costs = [StageCost(seconds, 0.0, 2 * seconds) for seconds in (0.1, 3.0, 0.1, 5.0)]
    graph = COPIES.graph()
    rows = (
        "0F0 1F0 0F1 1F1 1B0 0B0 0F2 1F2 1B1 0B1 0F3 1F3 1B2 0B2 1B3 0B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )
    actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
    return {
        "equal costs": None,
        "longest first": submodel_schedule(COPIES, 4, [costs, *[StageCost(1.0, 1.0, 1.0)] * 2]),
        "1f1b": Schedule("1f1b", 3, 4, actions, graph),
    }


@slow_cells("2-trained", "1-trained", "3-trained", "0-frozen", "1-frozen", "2-frozen", "3-frozen")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("number", range(len(JOINT)))
def test_pipeline_stages_share_ranks_with_towers(tmp_path: Path, number: int, frozen: bool) -> None:
    """Under any schedule, and with gradients added to those of an earlier step."""
    layouts, ranks = JOINT[number]
    batches = _batches(tmp_path, "llava")
    single = _model(tmp_path, frozen)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected, twice = _run(single, batches, 1), _twice(single, batches, 1)
    schedules = _joint_schedules() if number == 0 and not frozen else {"equal costs": None}

    def rank(_: int) -> None:
        with hp.World.join("cpu") as world:
            for schedule in schedules.values():
                part = hp.parallelize_submodels(
                    _model(tmp_path, frozen), layouts, world, ranks=ranks, schedule=schedule
                )
                assert_equal_results(_run(part, batches, 1), expected)
                assert _twice(part, batches, 1) == pytest.approx(twice, rel=1e-10)

    hp.launch(rank, len({r for members in ranks.values() for r in members}), timeout_s=200)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(REPLICATED)))
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_towers_share_ranks_with_data_or_tensor_parallel_stages(tmp_path: Path, frozen: bool, number: int) -> None:
    """Data-parallel ranks have their own microbatches; tensor-parallel ranks take turns to encode the same ones."""
    layouts, ranks = REPLICATED[number]
    shares = 2 if "dp" in layouts["language"] else 1
    batches = _batches(tmp_path, "llava")
    single = _model(tmp_path, frozen)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected, twice = _run(single, batches, 1), _twice(single, batches, 1)

    def rank(_: int) -> None:
        with hp.World.join("cpu") as world:
            places = {"vision": ranks, "language": FOUR}
            part = hp.parallelize_submodels(_model(tmp_path, frozen), layouts, world, ranks=places)
            assert_equal_results(_run(part, batches, shares), expected)
            assert _twice(part, batches, shares) == pytest.approx(twice, rel=1e-10)

    hp.launch(rank, 4, timeout_s=200)


FROZEN_LANGUAGE: dict[str, tuple[Layouts | str, Placement | None]] = {
    "dp_shard=2": ("dp_shard=2", None),
    "dp_replicate=2": ("dp_replicate=2", None),
    "pp=2 dp_shard=2": ("pp=2 dp_shard=2", None),
    "one rank each": ({"vision": "", "language": ""}, None),
    "apart": ({"vision": "", "language": "dp_shard=2"}, None),
    "equal": ({"vision": "dp_shard=2", "language": "dp_shard=2"}, {"vision": (0, 1), "language": (0, 1)}),
    "joint": ({"vision": "dp_replicate=2", "language": "pp=2"}, {"vision": (0, 1), "language": (0, 1)}),
    "joint dp": ({"vision": "dp_replicate=4", "language": "pp=2 dp_shard=2"}, {"vision": FOUR, "language": FOUR}),
    "joint tp": ({"vision": "dp_shard=4", "language": "pp=2 tp=2"}, {"vision": FOUR, "language": FOUR}),
}  # fmt: skip
"""Strategy of the whole model, or layouts and ranks of its parts."""


def _trained_tower(folder: Path) -> Any:
    """Return a model whose language part is frozen."""
    model = _model(folder, frozen=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision" in name or "projector" in name)
    return model


@slow_cells(*(name for name in FROZEN_LANGUAGE if name != "dp_shard=2"))
@pytest.mark.parametrize("case", FROZEN_LANGUAGE)
def test_a_trained_tower_of_a_frozen_language_part_repeats_one_rank(tmp_path: Path, case: str) -> None:
    """Microbatches of text train no parameter, also while another data-parallel rank has images."""
    layouts, ranks = FROZEN_LANGUAGE[case]
    language = layouts if isinstance(layouts, str) else layouts["language"]
    batches, shares = _batches(tmp_path, "llava"), 2 if "dp" in language else 1
    single = _trained_tower(tmp_path)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected, twice = _run(single, batches, 1), _twice(single, batches, 1)
    assert [norm > 0.0 for _, norm, _ in expected] == ["i" in kinds for kinds in STEPS]

    def rank(_: int) -> None:
        with hp.World.join("cpu") as world:
            part = _trained_tower(tmp_path)
            if isinstance(layouts, str):
                hp.parallelize(part, hp.plan_of(part, layouts), world)
            else:
                part = hp.parallelize_submodels(part, layouts, world, ranks=ranks)
            assert_equal_results(_run(part, batches, shares), expected)
            assert _twice(part, batches, shares) == pytest.approx(twice, rel=1e-10)

    parts = {"language": layouts} if isinstance(layouts, str) else layouts
    size = _ranks(parts) if ranks is None else len({r for own in ranks.values() for r in own})
    hp.launch(rank, size, timeout_s=200)


@pytest.mark.slow
def test_a_microbatch_without_trained_parameters_is_refused_where_others_have_a_backward(
    tmp_path: Path,
) -> None:
    """A trained parameter of the decoder that no microbatch uses hides that only the tower is trained."""
    batches = _batches(tmp_path, "llava")

    def rank(_: int) -> None:
        with hp.World.join("cpu") as world:
            model = _trained_tower(tmp_path)
            model.model.language_model.unused = torch.nn.Linear(2, 2, dtype=torch.float64)
            hp.parallelize(model, hp.plan_of(model, "dp_shard=2"), world)
            _run(model, batches, 2)

    with pytest.raises(UnsupportedSharding, match=r"HP205[\s\S]*`training\.freeze`"):
        hp.launch(rank, 2, timeout_s=60)


LATER_LAYERS: tuple[tuple[Layouts, Placement | None], ...] = (
    ({"vision": "", "language": "pp=2"}, None),
    ({"vision": "dp_replicate=2", "language": "pp=2"}, {"vision": (0, 1), "language": (0, 1)}),
    ({"vision": "dp_shard=2", "language": "pp=2"}, {"vision": (0, 1), "language": (0, 1)}),
    ({"language": "pp=2 schedule=zb-h1", "vision": ""}, None),
)


@slow_cells(0, 2, 3, "1-frozen")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("number", range(len(LATER_LAYERS)))
def test_features_reach_the_pipeline_stages_of_later_layers(tmp_path: Path, number: int, frozen: bool) -> None:
    """Features that are added in the second layer go to the second stage, which returns their gradients."""
    layouts, ranks = LATER_LAYERS[number]
    batches = _batches(tmp_path, "qwen3_vl")
    single = _model(tmp_path, frozen)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected = _run(single, batches, 1)

    def rank(_: int) -> None:
        with hp.World.join("cpu") as world:
            part = hp.parallelize_submodels(_model(tmp_path, frozen), layouts, world, ranks=ranks)
            stages = handle(part).pipeline
            assert stages is None or stages.stages.running.media_stages == {0, 1}
            assert_equal_results(_run(part, batches, 1), expected)

    hp.launch(rank, 3 if ranks is None else 2, timeout_s=200)


def _twice(model: Any, batches: Batches, shares: int) -> float:
    """Return the norm of the sum of the gradients of two steps."""
    for step in (0, 2):
        rows = [[*batches.microbatches(step, k, shares, 1, 4 // shares)] for k in range(shares)]
        sources = hp.microbatch_sources(model, 4 // shares)
        hp.forward_backward(model, [s and _inputs(rows[s[0]][s[1]]) for s in sources])
    norm = float(hp.clip_grad_norm_(model, None))
    model.zero_grad()
    return norm


def test_messages_are_received_by_key_in_any_order() -> None:
    def rank(index: int) -> None:
        with hp.World.join("cpu"):
            group = dist.new_group([0, 1])
            channel = Channel(group, torch.device("cpu"))
            keys = [((0, 1), 0, i) for i in range(3)]
            for i, key in enumerate(keys):
                value = torch.full((i + 1,), float(i), requires_grad=i == 1)
                channel.send(key, *pack([("label", value)]), 1 - index)
            for i in (2, 0, 1):
                ((label, value),) = channel.receive(keys[i], 1 - index)
                assert (label, value.tolist()) == ("label", [float(i)] * (i + 1))
                assert value.requires_grad == (i == 1)
            channel.flush()

    hp.launch(rank, 2, timeout_s=60)


@pytest.mark.torch
def test_schedules_that_do_not_fit_the_sub_models_are_refused(tmp_path: Path) -> None:
    write_model("llava", tmp_path / "model")
    schedule = submodel_schedule(TowerLanes(3, (0,)), 4)
    with pytest.raises(ScheduleError, match="other ranks or stages than the sub-models"):
        check_submodel_schedule(schedule, COPIES, frozen=False)
    with pytest.raises(ScheduleError, match="no joint schedule"):
        hp.parallelize_submodels(
            _model(tmp_path, frozen=False),
            {"vision": "", "language": ""},
            hp.World.join("cpu"),
            ranks={"vision": (0,), "language": (0,)},
            schedule=schedule,
        )
    with pytest.raises(BadValue, match="without a strategy"):
        hp.parallelize_submodels(
            _model(tmp_path, frozen=False),
            {"vision": "", "language": ""},
            hp.World.join("cpu"),
            ranks={"vision": (0,), "language": (0,), "audio": (1,)},
        )


@pytest.mark.slow
def test_tower_ranks_without_a_microbatch_and_replicas_repeat_one_rank(tmp_path: Path) -> None:
    batches = _batches(tmp_path, "llava")
    single = _model(tmp_path, frozen=False)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    expected = _run(single, batches, 1)

    def rank(layouts: Layouts, shares: int, microbatch: int) -> None:
        with hp.World.join("cpu") as world:
            part = hp.parallelize_submodels(_model(tmp_path, frozen=False), layouts, world)
            assert_equal_results(_run(part, batches, shares, microbatch), expected)

    for layouts, *cut in (
        ({"vision": "dp_shard=2", "language": ""}, 1, 4),
        ({"language": "dp_replicate=2", "vision": "dp_replicate=2"}, 2, 2),
    ):
        ranks = _ranks(layouts)
        hp.launch(lambda _, given=(layouts, *cut): rank(*given), ranks, timeout_s=200)


EQUAL_RANKS = ((0, 1), (0, 1))


@slow_cells("disjoint", "equal", "overlapping")
@pytest.mark.parametrize(
    ("ranks", "steps"),
    [(None, 64), (EQUAL_RANKS, 64), (((1, 2), (0, 1)), 64), (EQUAL_RANKS, 8)],
    ids=["disjoint", "equal", "overlapping", "few steps on equal ranks"],
)
def test_steps_with_and_without_media_alternate(
    tmp_path: Path, ranks: tuple[tuple[int, ...], ...] | None, steps: int
) -> None:
    """Mixed, text-only and image-only microbatches on either rank, with losses of one rank."""
    batches = _batches(tmp_path, "llava")
    single = _model(tmp_path, frozen=False)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))

    def train(model: Any, shares: int) -> list[float]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
        for step in range(steps):
            sources = hp.microbatch_sources(model, 4 // shares)
            cut = [[*batches.microbatches(step % len(STEPS), share, shares, 1, 4 // shares)] for share in range(shares)]
            parts = [s and _inputs(cut[s[0]][s[1]]) for s in sources]
            losses.append(float(hp.forward_backward(model, parts)))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    expected = train(single, 1)

    def rank(_: int) -> list[float]:
        with hp.World.join("cpu") as world:
            layouts = {"vision": "dp_shard=2", "language": "dp_shard=2"}
            places = None if ranks is None else dict(zip(layouts, ranks, strict=True))
            part = hp.parallelize_submodels(_model(tmp_path, frozen=False), layouts, world, ranks=places)
            return train(part, 2)

    size = 4 if ranks is None else len({r for members in ranks for r in members})
    for losses in hp.launch(rank, size, timeout_s=200):
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.torch
def test_layouts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_model("llava", tmp_path / "model")
    model = _model(tmp_path, frozen=False)
    for layouts, ranks, error in (
        ({"vision": "", "language": "tp=2"}, 2, DegreesMismatch),
        ({"vision": "tp=2", "language": ""}, 3, UnsupportedSharding),
        ({"vision": "", "language": "cp=2"}, 3, UnsupportedSharding),
        (
            {"vision": "", "language": "pp=2 schedule=interleaved virtual_stages=2"},
            3,
            UnsupportedSharding,
        ),
        ({"audio": "", "language": ""}, 2, BadValue),
        ({"language": "tp=2"}, 2, BadValue),
    ):
        with pytest.raises(error):
            submodel_strategies(model, layouts, ranks)
    shared = {"vision": (0, 1), "language": (0, 1)}
    for layouts in (
        {"vision": "dp_shard=2", "language": "pp=2 schedule=zb-h1"},
        {"vision": "dp_replicate=2", "language": "pp=2 schedule=gpipe"},
    ):
        with pytest.raises(UnsupportedSharding, match="cannot share ranks"):
            submodel_strategies(model, layouts, 2, shared)
    layouts = {"vision": "", "language": "tp=2"}
    for ranks, error in (
        ({"vision": (0, 1), "language": (0, 1)}, BadValue),
        ({"vision": (0,), "language": (1, 1)}, BadValue),
        ({"language": (0, 1)}, BadValue),
        ({"vision": (3,), "language": (0, 1)}, DegreesMismatch),
    ):
        with pytest.raises(error):
            submodel_strategies(model, layouts, 2, ranks)
    with pytest.raises(UnsupportedSharding, match="has no encoder"):
        submodel_strategies(Case().build(), {"vision": "", "language": ""}, 2)


@pytest.mark.torch
def test_errors_of_layouts_name_arguments_and_in_a_recipe_keys(tmp_path: Path) -> None:
    write_model("llava", tmp_path / "model")
    model = _model(tmp_path, frozen=False)
    world = hp.World.join("cpu")
    stages = "pp=2 schedule=interleaved virtual_stages=2"
    for layouts, ranks, where, hint, override in (
        (
            {"audio": "", "language": ""}, None, "parallelize_submodels",
            "leave out `audio`, `dp_shard=1` in the layout of `vision`",
            "parallel.submodels.audio=null parallel.submodels.vision.dp_shard=1",
        ),
        (
            {"vision": "", "language": ""}, {"vision": (0, 1), "language": (0,)},
            "parallelize_submodels: vision.ranks", "ranks={'vision': [0]}", "'parallel.submodels.vision.ranks=[0]'",
        ),
        (
            {"vision": "", "language": stages}, None, "parallelize_submodels: language.pp",
            "`schedule=1f1b` in the layout of `language`, `virtual_stages=1` in the layout of `language`",
            "parallel.schedule=1f1b parallel.virtual_stages=1",
        ),
    ):  # fmt: skip
        with pytest.raises(HyperParallelError) as caught:
            hp.parallelize_submodels(model, layouts, world, ranks=ranks)
        assert (caught.value.where, caught.value.hint) == (where, hint)
        with pytest.raises(HyperParallelError) as caught:
            submodel_strategies(model, layouts, 1, ranks)
        assert caught.value.hint == override


def test_weights_are_read_saved_and_exported_as_those_of_one_model(tmp_path: Path) -> None:
    batches = _batches(tmp_path, "llava")
    single = _model(tmp_path, frozen=False)
    hp.parallelize(single, hp.plan_of(single, ""), hp.World.join("cpu"))
    optimizer = torch.optim.AdamW(single.parameters(), lr=1e-2)

    def train(model: Any, optimizer: Any, step: int) -> float:
        parts = [
            _inputs([*batches.microbatches(step, source[0], 1, 1, 4)][source[1]])
            for source in hp.microbatch_sources(model, 4)
            if source is not None
        ]
        loss = float(hp.forward_backward(model, parts))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    expected = [train(single, optimizer, step) for step in range(3)]
    config = transformers.AutoConfig.from_pretrained(tmp_path / "model")

    def begin(world: Any) -> Any:
        with torch.device("meta"):
            whole = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float64)
        layouts = {"vision": "", "language": "tp=2"}
        model = hp.parallelize_submodels(whole.train(), layouts, world)
        hp.load_pretrained(model, tmp_path / "model")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def rank(_: int) -> list[float]:
        with hp.World.join("cpu") as world:
            model, optimizer = begin(world)
            losses = [train(model, optimizer, step) for step in range(2)]
            hp.save(model, optimizer, tmp_path / "saved", step=2)
            hp.save_pretrained(model, tmp_path / "export")
            model, optimizer = begin(world)
            assert hp.load(model, optimizer, tmp_path / "saved")["step"] == 2
            return [*losses, train(model, optimizer, 2)]

    for losses in hp.launch(rank, 3, timeout_s=200):
        assert losses == pytest.approx(expected, rel=1e-10)
    again = _model(tmp_path, frozen=False)
    hp.parallelize(again, hp.plan_of(again, ""), hp.World.join("cpu"))
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    hp.load(again, optimizer, tmp_path / "saved")
    assert train(again, optimizer, 2) == pytest.approx(expected[2], rel=1e-10)
    exported = transformers.AutoModelForMultimodalLM.from_pretrained(tmp_path / "export", dtype=torch.float64)
    hp.load(single, None, tmp_path / "saved")
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(exported.get_parameter(name), parameter, rtol=0, atol=0)

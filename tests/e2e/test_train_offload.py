"""Training by a memory plan gives the bits of training without one, and takes exactly the predicted bytes."""

import functools
import json
import os

import pytest
import torch
from safetensors.torch import load_file

from hyper_parallel.backends.torch.memory import FileTier
from hyper_parallel.errors import (
    BudgetImpossible,
    CaptureUnsupported,
    Contradiction,
    OutputNotWritable,
    TierFull,
    TransferFailed,
)
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.checkpoints.manifest import check
from tests.e2e import runs
from tests.e2e.runs import CONFIG, curve, rows, write_functions
from tests.slow import slow_cells

pytestmark = pytest.mark.e2e

EXPERTS = CONFIG | {
    "num_hidden_layers": 1, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [],
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 385, "n_embd": 32, "n_layer": 1, "n_head": 4}
STEPS = 4
FREE = "training.max_grad_norm=null"  # without clipping, updates may run inside the backward pass
# Of a machine whose rates are known: whether so little host memory is enough hangs on them.
THREE_TIERS = (FREE, "topology=dgx-h100", "offload.budget=1200KiB", "offload.dram=300KiB")
FOUR = ("parallel.dp_shard=2", "parallel.tp_x=2", "training.microbatch=2")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("offload")
    (root / "model.json").write_text(json.dumps(CONFIG))
    (root / "gpt2.json").write_text(json.dumps(GPT2))
    (root / "one_layer.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    (root / "four_layers.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    (root / "experts.json").write_text(json.dumps(EXPERTS))
    (root / "odd_experts.json").write_text(json.dumps(EXPERTS | {"moe_intermediate_size": 20}))
    write_functions(root / "text.txt", 4000)
    (root / "recipe.yaml").write_text(
        f"""
model: {{path: {root}/model.json}}
data: {{source: {root}/text.txt, seq_len: 32, vocab_size: 384, cache_dir: {root}/cache}}
training:
  steps: {STEPS}
  dtype: float32
  tokens_per_step: 256
  microbatch: 4
  lr: 1.0e-2
  warmup_steps: 2
  eval_every: {STEPS // 2}
  eval_tokens: 200
parallel: {{dp_shard: 1}}
checkpoint: {{every: {STEPS // 2}, export: false}}
"""
    )
    return root


@pytest.fixture(scope="module")
def train(place):
    """Run a recipe once per name; the run directory."""

    @functools.cache
    def run(name, *overrides, report=False):
        runs.train(place, place / name, *overrides, report=report)
        return place / name

    return run


def state(out, step):
    """Every tensor, as its pieces, and number of a checkpoint."""
    (path,) = out.glob(f"checkpoints/*{step}")
    _, index = check(path)
    flat = dict(index.values) | {str(group.parameters): group.values for group in index.groups}
    for file in index.by_file():
        flat |= load_file(path / file)
    return flat


def assert_same_run(mine, reference, last=STEPS):
    """Bitwise the same losses, norms, evaluations, parameters and optimizer states; peaks exactly as predicted."""
    for file in ("metrics.jsonl", "eval.jsonl"):
        for a, b in zip(rows(mine / file), rows(reference / file), strict=True):
            for key in ("step", "loss", "grad_norm", "lr", "valid_tokens"):
                assert a.get(key) == b.get(key), (file, key, a["step"])
    a, b = state(mine, last), state(reference, last)
    assert a.keys() == b.keys()
    assert any("exp_avg_sq" in key for key in a)
    for key, value in a.items():
        same = torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        assert same, key
    for row in rows(mine / "metrics.jsonl"):
        assert row["offload"]["difference_bytes"] == 0
        assert row["memory_bytes"] == row["offload"]["pred_memory_bytes"]
        assert not row["offload"]["replanned"]
    assert Plan.load(mine / "plan.json").memory_bytes == row["memory_bytes"]
    assert not any("offload" in row for row in rows(reference / "metrics.jsonl"))
    return row["memory_bytes"]


@pytest.mark.slow
def test_one_rank_through_three_tiers(place, train):
    flash = place / "flash"
    mine = train("one-off", *THREE_TIERS, f"offload.flash_dir={flash}", report=True)
    assert assert_same_run(mine, train("one", FREE)) <= 1200 * 1024
    assert rows(mine / "metrics.jsonl")[-1]["offload"]["flash_bytes"] > 0
    assert not list(flash.iterdir())
    page = (mine / "report.html").read_text()
    assert "host to device" in page
    assert "host memory: predicted peak" in page
    assert "counted device bytes" in page


@pytest.mark.slow
def test_a_step_that_recomputes_every_layer(train):
    given = ("training.recompute=full", "training.steps=3")
    mine = train("full recompute-off", *given, "offload.max_slowdown=0.05")
    assert_same_run(mine, train("full recompute", *given), last=3)


@slow_cells("false", "true")
@pytest.mark.parametrize("reorder", ["true", "false"])
def test_two_ranks_of_fsdp(train, reorder):
    given = ("parallel.dp_shard=2", FREE)
    mine = train(f"two-{reorder}", *given, "offload.max_slowdown=0.05", f"offload.reorder={reorder}")
    assert_same_run(mine, train("two", *given))


@slow_cells("experts-3", "gpt2-2")
@pytest.mark.parametrize(("model", "ranks"), [("gpt2", 2), ("experts", 3)])
def test_fsdp_whose_shards_are_uneven(place, train, model, ranks):
    """GPT-2 with an odd vocabulary, its head the embedding, with dropout; the third rank has none of four experts."""
    given = (
        f"model.path={place}/{model}.json", "training.steps=3", f"parallel.dp_shard={ranks}",
        f"training.tokens_per_step={ranks * 128}",
    )  # fmt: skip
    mine = train(f"uneven-{model}-off", *given, "offload.budget=1GiB")
    assert_same_run(mine, train(f"uneven-{model}", *given), last=3)


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_four_ranks_of_fsdp_and_tensor_parallelism_with_accumulation(place, train):
    given = (*FOUR, f"model.path={place}/one_layer.json")
    mine = train("four-off", *given, "offload.max_slowdown=0.05")
    assert_same_run(mine, train("four", *given))


FOUR_LAYERS = "model.path={place}/four_layers.json"


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(("parallel.cp=2",), marks=pytest.mark.slow),
        pytest.param(
            (
                "parallel.pp=2",
                "parallel.schedule=zbv",
                "parallel.virtual_stages=2",
                FREE,
                FOUR_LAYERS,
            ),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["ring attention", "zbv"],
)
@pytest.mark.timeout(300)
def test_messages_between_two_ranks(place, train, given, request):
    given = [part.format(place=place) for part in (*given, "training.steps=5", "training.eval_every=0")]
    name = request.node.callspec.id
    mine = train(f"{name}-off", *given, "offload.budget=900KiB")
    assert assert_same_run(mine, train(name, *given), last=5) <= 900 * 1024


@pytest.mark.slow
def test_a_checkpoint_of_a_plain_run_is_continued_by_plan(place, train):
    """And the first planned step is then not the first step of all."""
    plain = train("two", "parallel.dp_shard=2", FREE)
    mine = train(
        "resumed", "parallel.dp_shard=2", FREE, "offload.max_slowdown=0.05",
        f"checkpoint.from_dir={_until(place, plain, STEPS // 2)}",
    )  # fmt: skip
    assert curve(mine) == curve(plain)[STEPS // 2 :]


def _until(place, run, step):
    """A copy of a run directory whose newest checkpoint is `step`."""
    copy = place / f"{run.name}-until-{step}"
    (copy / "checkpoints").mkdir(parents=True)
    (found,) = run.glob(f"checkpoints/*{step}")
    (copy / "checkpoints" / found.name).symlink_to(found)
    return copy


MACHINE = """
name: slow-link
description: One rank whose host memory is far away.
num_devices: 1
device:
  name: cpu
  kind: cpu
  peak_tflops: {{float32: {number}}}
  memory_gib: {number}
  memory_gb_s: {number}
tiers:
  - {{name: node, size: 0, kind: host, gb_s: {number}, latency_us: {number}}}
pools:
  - {{kind: dram, shared_by: 1, capacity_gb: {number}, gb_s: {link}}}
"""


def _quantity(value):
    return f"{{value: {value}, source: test, certainty: general}}"


@pytest.mark.slow
def test_a_slower_link_than_planned_is_noticed_and_planned_again(place, train):
    """The link really has 70 % of the bandwidth that the plan was made for."""
    machine = place / "machine.yaml"
    machine.write_text(MACHINE.format(number=_quantity(1), link=_quantity(0.2)))
    mine = train(
        "drift", f"topology={machine}", "offload.budget=450KiB", "offload.bandwidth=286MB", "training.steps=6"
    )  # fmt: skip
    found = [row["offload"] for row in rows(mine / "metrics.jsonl")]
    assert found[0]["sim_step_s"] > 1.02 * found[0]["pred_sim_step_s"]
    assert [r["replanned"] for r in found] == [True, False, False, False, False, False]
    assert found[1]["sim_step_s"] == pytest.approx(found[1]["pred_sim_step_s"], rel=1e-9)
    assert found[1]["sim_step_s"] <= found[0]["sim_step_s"]
    assert all(r["difference_bytes"] == 0 for r in found)
    assert curve(mine) == curve(train("one-clipped", "training.steps=6"))


@pytest.mark.slow
def test_an_impossible_budget_is_refused_before_the_first_step(place, train):
    given = ("parallel.dp_shard=2", f"model.path={place}/one_layer.json")
    with pytest.raises(BudgetImpossible, match=r"offload\.budget=") as caught:
        train("impossible", *given, "offload.budget=20KiB")
    assert not (place / "impossible" / "metrics.jsonl").exists()  # a start that fails writes nothing
    assert "HP402" in str(caught.value)
    hint = str(caught.value.hint).split("`")[1]
    mine = train("least", *given, hint, "training.steps=2")  # what it asks for is enough
    assert rows(mine / "metrics.jsonl")[0]["memory_bytes"] <= int(hint.partition("=")[2])
    with pytest.raises(TierFull):
        train("no-dram", *given[1:], "offload.budget=600KiB", "offload.dram=10KiB")


@pytest.mark.slow
def test_the_budget_auto_is_said(train):
    mine = train("auto", "offload.budget=auto", "training.steps=2", "training.eval_every=0")
    plan = Plan.load(mine / "plan.json")
    (note,) = [note for note in plan.notes if "budget auto" in note]
    assert "the memory of a rank" in note
    assert rows(mine / "metrics.jsonl")[-1]["memory_bytes"] <= plan.memory_capacity_bytes


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (["offload.budget=1MiB", "offload.max_slowdown=0.02"], Contradiction, "one goal"),
        (["offload.dram=1GiB"], Contradiction, "no effect"),
        (["offload.budget=1MiB", "offload.flash=1GiB"], Contradiction, "directory"),
        (["offload.budget=1MiB", "training.compile=true"], Contradiction, "compiled"),
    ],
)
def test_what_cannot_work_is_refused_by_name(place, train, overrides, error, text):
    with pytest.raises(error, match=text):
        train("refused", *overrides)
    assert not (place / "refused").exists()


def test_a_flash_directory_that_cannot_be_written_is_refused_before_any_rank(place, train):
    (place / "occupied").write_text("a file")
    with pytest.raises(OutputNotWritable, match=r"offload\.flash_dir=.*occupied"):
        train("refused", "offload.budget=1MiB", f"offload.flash_dir={place}/occupied/flash")
    assert not (place / "refused").exists()


@pytest.mark.slow
def test_experts_and_their_routing(place, train):
    """Experts of one rank: their routing is counted inside the planned step."""
    given = (f"model.path={place}/experts.json", "training.steps=6", FREE)
    mine = train("experts-off", *given, "offload.max_slowdown=0.05")
    reference = train("experts", *given)
    for a, b in zip(rows(mine / "metrics.jsonl"), rows(reference / "metrics.jsonl"), strict=True):
        assert [a[k] for k in ("loss", "grad_norm", "routing")] == [b[k] for k in ("loss", "grad_norm", "routing")]
        assert a["offload"]["difference_bytes"] == 0


@pytest.mark.slow
def test_expert_parallelism_with_a_capacity(place, train):
    """Every expert has as many rows in every step, whatever the router says; some tokens are dropped."""
    given = (
        f"model.path={place}/experts.json", "training.steps=6", "parallel.dp_shard=2", "parallel.ep=2",
        "moe.capacity_factor=1.0",
    )  # fmt: skip
    mine = train("ep-off", *given, "offload.max_slowdown=0.05")
    reference = train("ep", *given)
    assert_same_run(mine, reference, last=6)
    dropped = [row["routing"]["dropped"] for row in rows(mine / "metrics.jsonl")]
    assert dropped == [row["routing"]["dropped"] for row in rows(reference / "metrics.jsonl")]
    assert len(set(dropped)) > 1


@pytest.mark.parametrize(
    ("model", "given"),
    [
        ("experts", ("parallel.dp_shard=2", "parallel.ep=2")),
        ("experts", ("training.dtype=float64",)),
        ("odd_experts", ("training.dtype=bfloat16",)),
    ],
)
def test_experts_of_any_size_are_refused_by_name(place, train, model, given):
    with pytest.raises(CaptureUnsupported, match=r"moe\.capacity_factor=1\.25"):
        train("refused", f"model.path={place}/{model}.json", "offload.max_slowdown=0.02", *given)
    assert not (place / "refused").exists()


@pytest.mark.slow
def test_experts_in_rows_that_grouped_products_refuse(place, train):
    """Rows of 20 in bfloat16 are 40 bytes, no multiple of 16: the model's own loop, on as many rows in every step."""
    given = (
        f"model.path={place}/odd_experts.json", "training.steps=3", "training.dtype=bfloat16",
        "moe.capacity_factor=1.0",
    )  # fmt: skip
    mine = train("odd-off", *given, "offload.max_slowdown=0.05")
    assert_same_run(mine, train("odd", *given), last=3)


@slow_cells("full", "truncated")
@pytest.mark.parametrize("fault", ["truncated", "full", "dies"])
def test_a_failing_copy_ends_the_run_with_its_cause(place, train, monkeypatch, fault):
    """During a step a file is cut short, the disk is full, or the copy thread dies."""
    read, write, calls = FileTier.read, FileTier.write, []

    def reading(self, storage, target):
        calls.append(storage)
        if len(calls) > 20 and target.nbytes() > 64:
            if fault == "dies":
                raise RuntimeError("the thread died")
            if fault == "truncated":
                self.path(storage).write_bytes(b"short")
        read(self, storage, target)

    def writing(self, storage, source):
        if fault == "full" and len(calls) > 20:
            monkeypatch.setattr(os, "fsync", _no_space)
        write(self, storage, source)

    monkeypatch.setattr(FileTier, "read", reading)
    monkeypatch.setattr(FileTier, "write", writing)
    said = {"truncated": "wrong size", "full": "No space left", "dies": "the thread died"}[fault]
    with pytest.raises(TransferFailed, match=said):
        train(f"fault-{fault}", *THREE_TIERS, f"offload.flash_dir={place}/flash-{fault}")
    assert len(rows(place / f"fault-{fault}" / "metrics.jsonl")) < STEPS
    assert not list((place / f"fault-{fault}").glob(f"checkpoints/*{STEPS}"))
    assert not list((place / f"flash-{fault}").iterdir())


def _no_space(_):
    raise OSError(28, "No space left on device")

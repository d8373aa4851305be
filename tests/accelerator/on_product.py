"""The command line on the emulated accelerator: training with and without a budget, on one and two ranks, a resumed
run, a plan that is made again, and generation from what was trained."""

import functools
import json
import tempfile
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hyper_parallel as hp
from hyper_parallel.runtime import World, launch
from tests.e2e.runs import CONFIG, command, curve, rows, train, write_functions

KIB = 1024
BUDGET = 600 * KIB


@functools.cache
def place():
    """A directory with a recipe; plain runs in it serve several cases."""
    folder = Path(tempfile.mkdtemp())
    (folder / "model.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    write_functions(folder / "text.txt", 1000)
    (folder / "recipe.yaml").write_text(
        f"""
model: {{path: {folder}/model.json}}
data: {{source: {folder}/text.txt, seq_len: 32, vocab_size: 384, cache_dir: {folder}/cache}}
training:
  {{steps: 4, dtype: float32, tokens_per_step: 128, microbatch: 2, lr: 1.0e-2, lr_schedule: constant, eval_every: 2,
    eval_tokens: 64}}
parallel: {{dp_shard: 1}}
checkpoint: {{every: 2, export: false}}
topology: dgx-h100
"""
    )
    return folder


def trained(name, *overrides):
    out = place() / name
    train(place(), out, *overrides, report=True)
    return out


@functools.cache
def plain(*overrides):
    return trained("-".join(("plain", *overrides)).replace("=", "-"), *overrides)


def assert_as_planned(out, reference):
    """The plain run's losses, and what the allocators gave is what was predicted."""
    assert curve(out) == curve(reference)
    evaluations = [{r["step"]: r["loss"] for r in rows(o / "eval.jsonl")} for o in (out, reference)]
    assert evaluations[0] == evaluations[1]
    for row in rows(out / "metrics.jsonl"):
        assert row["memory_bytes"] == row["offload"]["pred_memory_bytes"]
        assert row["offload"]["difference_bytes"] == 0
    page = (out / "report.html").read_text()
    assert "host to device" in page
    assert "host memory: predicted and measured peak" in page


def on_train_with_a_budget(knobs, folder):
    """In two runs, the second one resumed."""
    reference = plain()
    assert all(row["memory_bytes"] > 0 for row in rows(reference / "metrics.jsonl"))
    budget = f"offload.budget={BUDGET}"
    trained("mine", budget, "training.steps=2")
    mine = trained("mine", budget)
    assert_as_planned(mine, reference)
    assert rows(mine / "metrics.jsonl")[-1]["memory_bytes"] <= BUDGET


def on_train_two_ranks_with_a_budget(knobs, folder):
    """Parameters are gathered and gradients scattered between two devices, beside the copies, behind slow operators."""
    knobs.set_devices(2)
    knobs.set_operator_delay_us(100)
    knobs.set_late_poison(1)  # FSDP drops gradients that the update, on another stream, has yet to read
    two = ("parallel.dp_shard=2", "training.steps=2")
    assert_as_planned(trained("two", *two, f"offload.budget={BUDGET}"), plain(*two))


def own_loop(kind, budget):
    """A loop of a user on a rank's device, with clipping and an evaluation between steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))).to(
        "emu"
    )
    plain = model
    if kind == "fsdp":
        mesh = init_device_mesh("emu", (2,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, bucket_cap_mb=0.03)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def step(x):
        loss = (model(x) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if budget is None else hp.offload(step, budget=budget, topology="dgx-h100")
    draws = torch.Generator().manual_seed(0)
    losses, most = [], 0
    for at in range(5):
        losses.append(float(run(torch.randn(16, 64, generator=draws).to("emu"))))
        if budget is not None and at > 2:
            assert run.measured.device_bytes == run.plan.device_bytes
            most = run.measured.device_bytes
            with run.materialized(), torch.no_grad():
                plain(torch.ones(1, 64, device="emu"))
    return losses, most


def on_a_loop_on_two_ranks_by_one_call(knobs, folder):
    """Behind slow operators; what FSDP empties and refills stays its own while a plain step shares the device."""
    knobs.set_devices(2)
    knobs.set_operator_delay_us(100)
    knobs.set_late_poison(1)

    def body(rank):
        with World.join():
            for kind, budget in (("fsdp", 150 * KIB), ("replicas", 200 * KIB)):
                plain, _ = own_loop(kind, None)
                found, most = own_loop(kind, budget)
                assert found == plain, kind
                assert 0 < most <= budget

    launch(body, 2, timeout_s=200)


def on_train_with_copies_slower_than_planned(knobs, folder):
    """A link of 2 MB/s, far slower than operators on a busy machine: a plan is made with what was measured."""
    knobs.set_bytes_per_s(2_000_000)
    steps = "training.steps=2"
    mine = trained("drift", steps, f"offload.budget={BUDGET}")
    assert_as_planned(mine, plain(steps))
    found = [row["offload"] for row in rows(mine / "metrics.jsonl")]
    assert found[0]["replanned"]
    assert found[0]["wait_s"] > 20e-3 > found[0]["pred_wait_s"]
    assert found[1]["pred_sim_step_s"] > found[0]["pred_sim_step_s"]


def on_generate_with_device_memory(knobs, folder):
    """The last case: the device is used in this process, which can fork no rank afterwards."""
    out = trained("export", "checkpoint.export=true", "training.steps=1")

    def generated(*more):
        given = ("--prompt", "def ", "--max-new-tokens", "6", "--json")
        return json.loads(command("generate", str(out / "export"), *given, *more).stdout)

    expected = generated()
    mine = generated("--device-memory", "64KiB")
    assert mine["text"] == expected["text"]
    memory = mine["memory"]
    assert not memory["simulated"]
    assert memory["measured_bytes"] == memory["predicted_bytes"]
    assert memory["predicted_bytes"]["device"] <= 64 * KIB < memory["state_bytes"]

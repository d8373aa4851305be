"""A planned step on the simulated device: the same bits as the plain step, and exactly the predicted bytes."""

import itertools

import pytest
import torch
from benchmarks._model_steps import capture_inference, capture_training, training_step

from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.errors import CaptureUnsupported, StepChanged
from hyper_parallel.memory import (
    Channel,
    MemoryMachine,
    Roofline,
    clocked,
    order_peak,
    plan_memory,
)
from tests.slow import slow_cells
from tests.torch_memory.models import FAMILIES, static_cache, tiny_model, tokens

pytestmark = pytest.mark.torch

ROOFLINE = Roofline(1e9, 1e9, 1e-6)
MACHINE = MemoryMachine(Channel(1e9, 1e-6), Channel(1e9, 1e-6))
STEPS = 8
AS_OTHERS = ("qwen3", "mixtral", "gemma")
"""Families whose inference is llama's or, with experts, that of qwen3_moe."""


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch(step):
    return {"input_ids": tokens(step), "labels": tokens(step)}


def trainer(family, **changes):
    model = tiny_model(family, **changes).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(5)  # dropout draws from here on
    return model, optimizer


def plain_losses(family, clip_norm=None, steps=STEPS):
    model, optimizer = trainer(family)
    losses = [training_step(model, optimizer, batch(i), clip_norm=clip_norm) for i in range(steps)]
    return model, optimizer, losses


def captured_training(family, clip_norm=None):
    """Step 0 is plain (it makes the optimizer's state), step 1 is the recorded one."""
    model, optimizer = trainer(family)
    training_step(model, optimizer, batch(0), clip_norm=clip_norm)
    captured = capture_training(model, optimizer, batch(1), clip_norm=clip_norm)
    return model, optimizer, captured


def assert_same_state(model, optimizer, other, other_optimizer):
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other_optimizer.state[b][key]), (name, key)


@slow_cells("gemma-True", "gpt2-True", "llama-False", "qwen3-True", "mixtral-False", "mixtral-True")
@pytest.mark.parametrize(
    ("family", "reorder"),
    [*((family, True) for family in FAMILIES), ("llama", False), ("mixtral", False)],
)
def test_training(family, reorder):
    steps = 20 if family in ("llama", "qwen3_moe") else STEPS
    reference, reference_optimizer, losses = plain_losses(family, steps=steps)
    model, optimizer, captured = captured_training(family)
    program = ROOFLINE.annotate(captured.program)
    peak = order_peak(program, range(len(program.operators)))
    assert peak <= captured.eager_peak_bytes
    if reorder:
        plan = plan_memory(program, MACHINE, max_slowdown=0.05)
        assert plan.seconds <= 1.05 * program.seconds
    else:
        plan = plan_memory(program, MACHINE, budget_bytes=peak // 2, reorder=False)
    assert plan.peak_bytes["device"] <= peak // 2
    assert plan.arena_bytes <= 1.02 * plan.peak_bytes["device"]
    with PlannedDevice(captured, plan, MACHINE) as device:
        for step in range(2, steps):
            loss, measured = device.step(batch(step))
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(loss, losses[step])
        assert measured.seconds == plan.seconds == clocked(program, MACHINE, plan.actions).now_s
    assert_same_state(model, optimizer, reference, reference_optimizer)


def test_bits_do_not_depend_on_when_copies_happen(tmp_path):
    """Copies at the earliest and the latest legal moment and on threads, through three tiers, with recomputation."""
    reference, reference_optimizer, losses = plain_losses("llama")
    model, optimizer, captured = captured_training("llama")
    program = Roofline(1e12, 1e11, 1e-7).annotate(captured.program)  # recompute is cheap beside a copy
    disk = Channel(5e8, 1e-6)
    machine = MemoryMachine(Channel(1e9), Channel(1e9), disk, disk, dram_bytes=150_000)
    plan = plan_memory(program, machine, budget_bytes=420_000)
    assert plan.peak_bytes["flash"] > 0
    assert plan.replayed.recompute_seconds > 0
    waits_s = clocked(program, machine, plan.actions).wait_s
    assert waits_s > 0
    steps = iter(range(2, STEPS))
    for copies in ("at_issue", "at_wait", "threads"):  # the state goes from one device to the next
        with PlannedDevice(captured, plan, machine, copies=copies, flash=tmp_path) as device:
            for step in itertools.islice(steps, 2):
                loss, measured = device.step(batch(step))
                assert measured.peak_bytes == plan.peak_bytes
                assert torch.equal(loss, losses[step])
            assert (measured.wait_s, measured.join_s) == (waits_s, 0)
        assert not list(tmp_path.iterdir())
    assert next(steps, None) is None
    assert_same_state(model, optimizer, reference, reference_optimizer)


@pytest.mark.slow
def test_clipping_keeps_updates_after_backward_and_stays_bitwise():
    reference, reference_optimizer, losses = plain_losses("llama", clip_norm=0.5)
    model, optimizer, captured = captured_training("llama", clip_norm=0.5)
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=0.05)
    assert any("needs every gradient" in line for line in plan.statement)
    with PlannedDevice(captured, plan, MACHINE) as device:
        for step in range(2, STEPS):
            loss, measured = device.step(batch(step))
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(loss, losses[step])
    assert_same_state(model, optimizer, reference, reference_optimizer)


def test_requested_bytes_are_exact_without_rounding():
    model = tiny_model("llama").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    training_step(model, optimizer, batch(0))
    captured = capture_training(model, optimizer, batch(1), alignment_bytes=1)
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=0.05)
    weights = sum(s.num_bytes for s in program.storages if s.kind == "weight")
    assert weights == sum(p.nbytes for p in model.parameters())
    with PlannedDevice(captured, plan, MACHINE) as device:
        _, measured = device.step(batch(2))
    assert measured.peak_bytes == plan.peak_bytes


def forward(model, cache, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{cache_argument(model.forward): cache}).logits


def assert_same_cache(cache, other):
    for a, b in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(a.keys, b.keys)
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.cumulative_length, b.cumulative_length)


@slow_cells(*AS_OTHERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill(family):
    prompts = [tokens(i, length=12) for i in range(4)]
    reference = tiny_model(family).eval()
    cache = static_cache(reference)
    expected = []
    for prompt in prompts:
        cache.reset()
        expected.append(forward(reference, cache, prompt))
    model = tiny_model(family).eval()
    mine = static_cache(model)
    captured = capture_inference(model, {"input_ids": prompts[0].clone()}, mine)
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=0.05)
    assert plan.peak_bytes["device"] <= order_peak(program, range(len(program.operators))) // 2
    with PlannedDevice(captured, plan, MACHINE) as device:
        for prompt, logits in zip(prompts, expected, strict=True):
            with device.materialize_state():
                mine.reset()
            got, measured = device.step({"input_ids": prompt})
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(got, logits)
    assert_same_cache(mine, cache)


@slow_cells("qwen3_moe", *AS_OTHERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decode(family):
    """The recorded decode step at position 13 is replayed at positions 14 and on."""
    following = [tokens(20 + i, length=1) for i in range(7)]
    reference = tiny_model(family).eval()
    cache = static_cache(reference)
    forward(reference, cache, tokens(0, length=12))
    expected = [forward(reference, cache, ids) for ids in following]
    model = tiny_model(family).eval()
    mine = static_cache(model)
    forward(model, mine, tokens(0, length=12))
    captured = capture_inference(model, {"input_ids": following[0].clone()}, mine)
    program = ROOFLINE.annotate(captured.program)
    plan = plan_memory(program, MACHINE, max_slowdown=0.05)
    assert plan.peak_bytes["device"] <= order_peak(program, range(len(program.operators))) // 2
    with PlannedDevice(captured, plan, MACHINE) as device:
        for ids, logits in zip(following[1:], expected[1:], strict=True):
            got, measured = device.step({"input_ids": ids})
            assert measured.peak_bytes == plan.peak_bytes
            assert torch.equal(got, logits)
    assert_same_cache(mine, cache)


def test_a_cache_that_counts_in_python_is_recorded_from_the_start_only():
    """With a sliding window the position is a Python number: a prompt may be repeated after a reset, nothing else."""
    model = tiny_model("mistral", sliding_window=16).eval()
    cache = static_cache(model)
    prompts = [tokens(i, length=12) for i in range(2)]
    expected = []
    for prompt in prompts:
        cache.reset()
        expected.append(forward(model, cache, prompt))
    with pytest.raises(CaptureUnsupported, match="HP511"):
        capture_inference(model, {"input_ids": tokens(9, length=1)}, cache)
    cache.reset()
    captured = capture_inference(model, {"input_ids": prompts[0].clone()}, cache)
    program = ROOFLINE.annotate(captured.program)
    with PlannedDevice(captured, plan_memory(program, MACHINE, max_slowdown=0.05), MACHINE) as device:
        for prompt, logits in zip(prompts, expected, strict=True):
            with device.materialize_state():
                cache.reset()
            assert torch.equal(device.step({"input_ids": prompt})[0], logits)
        with pytest.raises(StepChanged, match="HP512"):
            device.step({"input_ids": prompts[0]})

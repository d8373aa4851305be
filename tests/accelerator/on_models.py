"""Steps of tiny models on the emulated accelerator: the plain steps' bits, exactly the predicted bytes."""

import pytest
import torch
from benchmarks._model_steps import capture_inference, capture_training, training_step
from transformers import StaticCache

from hyper_parallel.backends.torch.decode_slots import SlotSteps
from hyper_parallel.backends.torch.forward_variants import cache_argument
from hyper_parallel.backends.torch.memory import (
    LruSpillMode,
    PlannedDevice,
    StepCapture,
    model_state,
    optimizer_state,
    record,
)
from hyper_parallel.backends.torch.memory.generation import PlannedSlots
from hyper_parallel.errors import BudgetImpossible
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory
from hyper_parallel.trainer.generation import Sampling, decode_tokens
from tests.torch_memory.models import tiny_model, tokens
from tests.torch_memory.test_generation import PROMPT, limits

EMU = torch.device("emu", 0)
MACHINE = MemoryMachine(Channel(1e9, 1e-6), Channel(1e9, 1e-6))
ROOFLINE = Roofline(1e9, 1e9, 1e-6)
SLOW_US = 100


def model_of(family, **changes):
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    return tiny_model(family, **{layers: 2}, **changes)


def batch(number):
    return {"input_ids": tokens(number).to(EMU), "labels": tokens(number).to(EMU)}


def trainer(family, dtype=torch.float32):
    model = model_of(family).to(dtype).train().to(EMU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    torch.manual_seed(5)  # dropout draws from here on
    return model, optimizer


def trained(
    knobs,
    family,
    dtype=torch.float32,
    roofline=ROOFLINE,
    **known,
):
    """Plain steps, then the same ones by a plan, with slow copies; the plan."""
    reference, other = trainer(family, dtype)
    clip = {"clip_norm": known["clip_norm"]} if "clip_norm" in known else {}
    losses = [training_step(reference, other, batch(n), **clip) for n in range(4)]
    model, optimizer = trainer(family, dtype)
    training_step(model, optimizer, batch(0), **clip)
    step = capture_training(model, optimizer, batch(1), **known)
    plan = plan_memory(roofline.annotate(step.program), MACHINE, max_slowdown=0.05)
    knobs.set_copy_delay_us(SLOW_US)
    with PlannedDevice(step, plan, MACHINE) as device:
        for number in (2, 3):
            loss, measured = device.step(batch(number))
            assert torch.equal(loss, losses[number])
            assert measured.peak_bytes == plan.peak_bytes
            assert measured.device_bytes == plan.device_bytes
    knobs.set_copy_delay_us(0)
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b), name
        for key, value in optimizer.state[a].items():
            assert torch.equal(value, other.state[b][key]), (name, key)
    return step, plan


def on_llama_training(knobs, folder):
    """Attention of an accelerator returns lengths as plain numbers; it may be made again all the same."""
    step, plan = trained(knobs, "llama")
    attention = [op for op in step.program.operators if op.name.endswith("overrideable")]
    assert len(attention) == 2
    assert all(op.repeatable for op in attention)
    assert not any(op.ordered for op in attention)
    assert plan.peak_bytes["device"] < step.eager_peak_bytes / 2


def on_llama_training_with_clipping_and_recomputation(knobs, folder):
    _, plan = trained(knobs, "llama", roofline=Roofline(1e12, 1e11, 1e-7), clip_norm=0.5)
    assert plan.replayed.recompute_seconds


def on_qwen3_moe_training(knobs, folder):
    trained(knobs, "qwen3_moe")


def on_gpt2_training_with_dropout(knobs, folder):
    trained(knobs, "gpt2")


def on_training_in_bfloat16_with_seeds_of_attention_on_the_host(knobs, folder):
    knobs.set_host_seeds(1)
    step, _ = trained(knobs, "llama", dtype=torch.bfloat16)
    assert len(step.on_host) == 4


def on_bytes_that_a_kernel_takes_for_itself(knobs, folder):
    """No formula knows this loss: its kernel holds several tensors of the size of its input besides its result."""
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 4096).to(EMU))
    inputs = {"x": torch.ones(4096, device=EMU), "y": torch.zeros(4096, device=EMU)}

    def step(x, y):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(weight * x, y)
        loss.backward()
        weight.grad = None
        return loss.detach()

    recorded = record(step, inputs, {"weight": (weight, "weight")}, name="loss", training=True)
    (loss,) = (op for op in recorded.program.operators if op.name.startswith("binary_cross"))
    assert sum(loss.scratch_bytes) >= 2 * 4 * 4096
    plan = plan_memory(ROOFLINE.annotate(recorded.program), MACHINE, max_slowdown=1.0)
    with PlannedDevice(recorded, plan, MACHINE) as device:
        _, measured = device.step(inputs)
        assert measured.device_bytes == plan.device_bytes


def on_operators_are_timed_while_they_are_recorded(knobs, folder):
    """The delay of a device is in the recorded times; parts of an update share its time.

    The seconds of issuing an operator are subtracted, of which a busy machine can take some after the kernel started:
    half of the delay tells the kernels with it from those without.
    """
    delay_s = 2e-2  # far above what an operator takes on a busy machine
    taken = []
    for us in (0, round(delay_s * 1e6)):
        model, optimizer = trainer("llama")
        training_step(model, optimizer, batch(0))
        knobs.set_operator_delay_us(us)
        taken.append(capture_training(model, optimizer, batch(1)))
        knobs.set_operator_delay_us(0)
    fast, slow = (dict(enumerate(step.seconds)) for step in taken)
    operators = taken[1].program.operators
    parts = [n for n, op in enumerate(operators) if op.name == "_fused_adamw_"]
    assert len(parts) == len([*model.parameters()])
    assert delay_s / 2 < sum(slow[n] for n in parts) < len(parts) * delay_s / 2
    alone = [n for n, op in enumerate(operators) if op.name == "mm"]
    assert min(slow[n] for n in alone) > delay_s / 2 > sorted(fast[n] for n in alone)[len(alone) // 2]


def on_prefill_and_decode_with_a_cache(knobs, folder):
    for length in (8, 1):
        model = model_of("llama").eval().to(EMU)
        ids, at = tokens(3, length=length).to(EMU), torch.arange(length, device=EMU)

        def cache_of(model=model):
            cache = StaticCache(config=model.config, max_cache_len=16)
            with torch.no_grad():
                model(tokens(99, 2, 4).to(EMU), **{cache_argument(model.forward): cache})
            cache.reset()
            return cache

        inputs = {"input_ids": ids, "cache_position": at}
        plain_cache, cache = cache_of(), cache_of()
        with torch.no_grad():
            logits = model(**inputs, **{cache_argument(model.forward): plain_cache}).logits
        step = capture_inference(model, inputs, cache)
        cache.reset()
        plan = plan_memory(ROOFLINE.annotate(step.program), MACHINE, budget_bytes=100_000)
        knobs.set_copy_delay_us(SLOW_US)
        with PlannedDevice(step, plan, MACHINE) as device:
            mine, measured = device.step(inputs)
            assert measured.device_bytes == plan.device_bytes
        assert torch.equal(mine, logits)
        for a, b in zip(cache.layers, plain_cache.layers, strict=True):
            assert torch.equal(a.keys, b.keys)
            assert torch.equal(a.values, b.values)


def generated(model, budget, **tiers):
    sampling = Sampling(6)
    length = len(PROMPT) + sampling.max_new_tokens - 1
    fixed = SlotSteps(1, len(PROMPT), length)
    steps = PlannedSlots(model, fixed, limits(budget, **tiers), EMU)
    found = list(decode_tokens(model, PROMPT, sampling, passes=steps))
    steps.close()
    return found, steps.use


def on_generation_under_a_budget(knobs, folder):
    """Recorded under fake tensors of the device; nothing ran on it before, so libraries take their workspaces first."""
    model = model_of("llama", initializer_range=0.3).eval()
    expected = list(decode_tokens(model.to(EMU), PROMPT, Sampling(6)))
    model.cpu()
    knobs.set_copy_delay_us(SLOW_US)
    knobs.set_workspace_bytes(1 << 16)
    found, use = generated(model, 40_000)
    assert found == expected
    assert use.measured_bytes == use.predicted_bytes
    assert not use.simulated
    assert use.wait_s > 0
    assert use.predicted_bytes["device"] <= 40_000 < use.state_bytes
    with pytest.raises(BudgetImpossible):
        generated(model, 1000)


def on_room_for_a_step_without_a_plan(knobs, folder):
    """A step in less memory than it takes, on a device that has no more; same bits, same recording."""
    reference, other = trainer("llama")
    plain = training_step(reference, other, batch(0), clip_norm=0.5)
    torch.emu.reset_peak_memory_stats()
    model, optimizer = trainer("llama")
    start = torch.emu.memory_allocated()
    with LruSpillMode(1 << 40, EMU) as all_of_it:
        training_step(*trainer("llama"), batch(0), clip_norm=0.5)
    del all_of_it._records
    room = LruSpillMode(all_of_it.peak_bytes // 2, EMU)
    torch.emu.synchronize()
    torch.emu.reset_peak_memory_stats()
    with room:
        loss = training_step(model, optimizer, batch(0), clip_norm=0.5)
    assert torch.equal(loss, plain)
    assert room.moved_bytes > 0
    assert torch.emu.max_memory_allocated() - start < 0.8 * all_of_it.peak_bytes
    named = {**model_state(model), **optimizer_state(model, optimizer)}
    inputs = batch(1)
    named |= {name: (tensor, "input") for name, tensor in inputs.items()}
    recorder, room = (
        StepCapture(named, training=True, alignment_bytes=512),
        LruSpillMode(all_of_it.peak_bytes // 2, EMU),
    )
    with recorder, room:
        loss = training_step(model, optimizer, inputs, clip_norm=0.5)
    program = recorder.captured(loss, inputs, "step").program
    expected = capture_training(reference, other, batch(1), clip_norm=0.5).program
    assert [op.name for op in program.operators] == [op.name for op in expected.operators]
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)

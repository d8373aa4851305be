"""A small model in training, as plain steps and as planned ones, for tests of what happens between steps."""

from __future__ import annotations

import functools

import torch
from benchmarks._model_steps import capture_training, training_step

from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory
from tests.torch_memory.models import tiny_model, tokens

FAST = Channel(1e9, 1e-6)
MACHINE = MemoryMachine(FAST, FAST)
DISK = MemoryMachine(FAST, FAST, FAST, FAST, dram_bytes=130_000)
_plan = functools.cache(lambda program, machine, **goal: plan_memory(program, machine, **goal))


def batch(number):
    return {"input_ids": tokens(number, length=8), "labels": tokens(number, length=8)}


def trainer(lr=1e-2):
    model = tiny_model("llama", num_hidden_layers=1, attention_dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
    torch.manual_seed(3)
    return model, optimizer


def trained(steps, lr=1e-2):
    """The plain steps that the tests compare with."""
    model, optimizer = trainer(lr)
    losses = [training_step(model, optimizer, batch(i)) for i in range(steps)]
    return model, optimizer, losses


def captured(lr=1e-2, data=None):
    """Two steps are done; the next batch is number 2."""
    model, optimizer = trainer(lr)
    training_step(model, optimizer, batch(0))
    return model, optimizer, capture_training(model, optimizer, data or batch(1))


def planned(step, machine=MACHINE):
    program = Roofline(1e9, 1e9, 1e-6).annotate(step.program)
    if machine is DISK:
        budget = int(0.6 * step.eager_peak_bytes)
        return _plan(program, machine, budget_bytes=budget, recompute=False, reorder=False)
    return _plan(program, machine, budget_bytes=1 << 30, recompute=False, reorder=False)


def opened(step, folder=None, **options):
    machine = MACHINE if folder is None else DISK
    return PlannedDevice(step, planned(step, machine), machine, flash=folder, **options)


def bits(model):
    return [p.detach().clone() for p in model.parameters()]


def same(model, other):
    return all(map(torch.equal, bits(model), bits(other)))

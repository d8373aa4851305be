"""A chunked loss is the plain loss up to the order of a sum, needs less memory, and is captured like any step."""

import pytest
import torch
import torch.nn.functional as F
from benchmarks._model_steps import capture_training, chunked_loss, training_step

from hyper_parallel.backends.torch.memory import PlannedDevice
from hyper_parallel.errors import BadValue
from hyper_parallel.memory import Channel, MemoryMachine, Roofline, plan_memory
from tests.torch_memory.models import tiny_model, tokens

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("chunks", [1, 3, 8])
def test_loss_and_gradients_are_those_of_the_model(chunks):
    model = tiny_model("llama").double()
    batch = {"input_ids": tokens(0), "labels": tokens(0).clone()}
    batch["labels"][0, :5] = -100
    # Not the model's own loss, which converts logits to float32.
    logits = model(batch["input_ids"], use_cache=False).logits[:, :-1]
    plain = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())
    plain.backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    loss = chunked_loss(model, batch, chunks)
    (2 * loss).backward()
    torch.testing.assert_close(loss, plain.detach(), rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, 2 * wanted[name], rtol=1e-10, atol=1e-14)


def test_a_captured_chunked_step_is_exact():
    batch = {"input_ids": tokens(1), "labels": tokens(1)}
    models = [tiny_model("llama") for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in models]
    for m, o in zip(models, optimizers, strict=True):
        training_step(m, o, batch, loss_chunks=4)
    captured = capture_training(models[0], optimizers[0], batch, loss_chunks=4)
    training_step(models[1], optimizers[1], batch, loss_chunks=4)
    machine = MemoryMachine(Channel(1e9, 0), Channel(1e9, 0))
    plan = plan_memory(Roofline(1e9, 1e9).annotate(captured.program), machine, max_slowdown=0.1)
    with PlannedDevice(captured, plan, machine) as device:
        loss, measured = device.step(batch)
    assert measured.peak_bytes == plan.peak_bytes
    assert torch.equal(loss, training_step(models[1], optimizers[1], batch, loss_chunks=4))
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_head_that_is_more_than_a_product_is_refused():
    model = tiny_model("llama")
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(BadValue, match="one matrix product"):
        chunked_loss(model, {"input_ids": tokens(0), "labels": tokens(0)}, 2)

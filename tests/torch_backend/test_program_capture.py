"""Step programs of Hugging Face models: torch runs them operator by operator and gets loss and gradients."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.backends.mindspore.fusion import without_broadcasts
from hyper_parallel.backends.mindspore.operators import OPERATORS
from hyper_parallel.backends.plan_sink import plan_program
from hyper_parallel.backends.program_memory import (
    live_bytes,
    memory_program,
    planned,
    recompute_layers,
)
from hyper_parallel.backends.program_runner import unsupported_operators
from hyper_parallel.backends.step_program import (
    AFTER,
    COLLECTIVES,
    OWN,
    TO_DEVICE,
    TO_HOST,
    Ref,
    StepProgram,
)
from hyper_parallel.backends.torch.program_capture import (
    Shards,
    capture_gradients,
    capture_stage,
    capture_update,
)
from hyper_parallel.backends.torch.traced_groups import TRACED
from hyper_parallel.errors import Contradiction
from hyper_parallel.memory import Channel, MemoryMachine, Roofline
from hyper_parallel.runtime import World, parallelize

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
    "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "bos_token_id": 1, "eos_token_id": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def _model(kind, **changes):
    config = AutoConfig.for_model(kind, **(SMALL | changes))
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model


def _batch():
    ids = torch.randint(3, 96, (2, 12))
    positions = torch.arange(12).repeat(2, 1)
    positions[0, 5:] = torch.arange(7)  # two documents in one row
    labels = ids.roll(-1, 1)
    labels[1, 3] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def _loss(model, input_ids, labels, position_ids):
    logits = model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def _run(program, values):
    """Execute a program by torch."""
    numbers = {i: torch.from_numpy(a) for i, a in program.constants.items()}
    numbers |= {i: values[name] for name, (i, _) in program.inputs.items()}

    def resolved(x):
        if isinstance(x, Ref):
            return numbers[x.index]
        if isinstance(x, (list, tuple)):
            return [resolved(part) for part in x]
        return x

    for node in program.nodes:
        _, name, overload = node.op.split(".")
        if name == "view":  # a program has no strides
            name = "reshape"
        if node.op in OWN:
            assert {r.index for r in node.args} <= numbers.keys()
            value = numbers[node.args[0].index]
            assert isinstance(value, torch.Tensor) == (node.op != TO_DEVICE)
            moved = {TO_HOST: [value], TO_DEVICE: value[0]}  # no operator reads a list as a tensor
            numbers[node.results[0]] = moved.get(node.op, value)
            continue
        operator = getattr(getattr(torch.ops.aten, name), overload)
        kwargs = {k: getattr(torch, v) if k == "dtype" else v for k, v in node.kwargs.items() if v is not None}
        results = operator(*map(resolved, node.args), **kwargs)
        results = results if isinstance(results, (list, tuple)) else [results]
        numbers |= dict(zip(node.results, results, strict=True))
        for result, kind in zip(results, node.types, strict=True):
            assert (tuple(result.shape), str(result.dtype)) == (kind.shape, f"torch.{kind.dtype}")
    return {name: numbers[i] for name, i in program.outputs.items()}


def _values(model, batch):
    state = {f"param.{n}": p.detach() for n, p in (*model.named_parameters(), *model.named_buffers())}
    sums = {f"sum.{n}": torch.ones_like(p) for n, p in model.named_parameters() if p.requires_grad}
    return state | sums | {f"batch.{n}": t for n, t in batch.items()}


@pytest.mark.parametrize(
    ("kind", "changes", "tolerance"),
    [
        # RMS norms compute in float32, and the order of their operators differs.
        ("qwen3", {"tie_word_embeddings": True}, 2e-6),
        pytest.param("gemma2", {"sliding_window": 4}, 2e-6, marks=pytest.mark.slow),
        ("gpt2", {}, 1e-11),
        pytest.param("qwen3_moe", {"output_router_logits": False}, 2e-6, marks=pytest.mark.slow),
    ],
)
def test_a_program_computes_loss_and_gradients_of_the_model(kind, changes, tolerance, tmp_path):
    model, batch = _model(kind, **changes), _batch()
    capture_gradients(model, batch, _loss).save(tmp_path)
    program = StepProgram.load(tmp_path)

    loss = _loss(model, **batch)
    loss.backward()
    results = _run(program, _values(model, batch))
    torch.testing.assert_close(results["loss"], loss.detach(), rtol=tolerance, atol=0)
    grads = {n: p.grad for n, p in model.named_parameters()}
    assert {f"sum.{n}" for n in grads} == results.keys() - {"loss"}
    for name, grad in grads.items():
        torch.testing.assert_close(results[f"sum.{name}"], grad + 1, rtol=0, atol=tolerance)
    assert not unsupported_operators("mindspore", program)


def test_a_program_reads_other_tokens_and_weights_than_it_was_captured_with():
    model, batch = _model("qwen3"), _batch()
    program = capture_gradients(model, {n: torch.zeros_like(t) for n, t in batch.items()}, _loss)
    for param in model.parameters():
        param.data.mul_(1.5)
    results = _run(program, _values(model, batch))
    torch.testing.assert_close(results["loss"], _loss(model, **batch).detach(), rtol=1e-6, atol=0)


def test_frozen_parameters_and_saved_buffers_are_inputs_without_gradients():
    model, batch = _model("qwen3"), _batch()
    model.register_buffer("scale", torch.tensor(2.0, dtype=torch.float64))
    model.model.embed_tokens.requires_grad_(False)

    def loss(model, **batch):
        return model.scale * _loss(model, **batch)

    program = capture_gradients(model, batch, loss)
    assert {"param.scale", "param.model.embed_tokens.weight"} <= program.inputs.keys()
    assert "sum.model.embed_tokens.weight" not in program.outputs
    model.scale.fill_(3.0)
    results = _run(program, _values(model, batch))
    torch.testing.assert_close(results["loss"], 3 * _loss(model, **batch).detach(), rtol=1e-12, atol=0)


def test_a_counter_that_a_model_writes_is_an_unsupported_operator():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return (self.weight * x).sum()

    program = capture_gradients(Counting(), {"x": torch.ones(3)}, lambda model, x: model(x))
    assert unsupported_operators("mindspore", program)


class _Inner(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(3)), function

    def forward(self, x):
        return self.function(self.weight * x).sum()


def _capture(function):
    model = nn.Sequential(nn.Identity(), _Inner(function))
    return capture_gradients(model, {"x": torch.ones(3)}, lambda model, x: model(x))


def test_a_program_has_no_tensors_without_elements():
    """Rotary embeddings of a whole head slice an empty rest and append it."""

    def function(x):
        return torch.cat([x[:3].sin(), x[3:], x[3:] * 2, x.cos()[:2]]) * torch.cat([x, x[3:], x[:2]])

    model = _Inner(function)
    program = capture_gradients(model, {"x": torch.ones(3)}, lambda model, x: model(x))
    kinds = [kind for node in program.nodes for kind in node.types]
    assert all(0 not in kind.shape for kind in kinds)
    assert all(array.size > 0 for array in program.constants.values())
    values = {"batch.x": torch.tensor([0.5, -1.0, 2.0]), "param.weight": torch.ones(3)}
    loss = model(values["batch.x"])
    loss.backward()
    results = _run(program, values | {"sum.weight": torch.zeros(3)})
    torch.testing.assert_close(results["loss"], loss.detach())
    torch.testing.assert_close(results["sum.weight"], model.weight.grad)


@pytest.mark.parametrize(
    ("function", "operator"),
    [
        (lambda x: x[x > 0], "aten.index.Tensor"),
        (lambda x: x if x.sum() > 0 else -x, "a branch"),
    ],
)
def test_values_that_decide_are_refused_with_operator_and_module(function, operator):
    with pytest.raises(Contradiction) as error:
        _capture(function)
    assert (error.value.got, error.value.where) == (operator, "1")


def test_a_parameter_that_forward_changes_is_refused_with_the_module():
    class Clipped(nn.Linear):
        def forward(self, x):
            self.weight.data.clamp_(-1, 1)
            return super().forward(x)

    def loss(model, x):
        return model(x).sum()

    model = nn.Sequential(nn.ReLU(), Clipped(3, 2))
    with pytest.raises(Contradiction) as error:
        capture_gradients(model, {"x": torch.ones(4, 3)}, loss)
    assert (error.value.got, error.value.where) == ("aten.clamp_.default", "1")


def test_an_unsupported_operator_is_named_with_its_module():
    assert unsupported_operators("mindspore", _capture(lambda x: torch.linalg.eigvalsh(x.outer(x)))) == {
        "aten._linalg_eigh.default": "1"
    }
    pairs = unsupported_operators("mindspore", _capture(lambda x: torch.complex(x, x).abs()))
    assert pairs["aten.complex.default"] == "1"
    images = _capture(lambda x: nn.functional.conv2d(x.expand(1, 1, 3, 3), x.expand(1, 1, 3, 3)))
    assert unsupported_operators("mindspore", images)["aten.convolution.default"] == "1"
    counted = _capture(lambda x: x * x.long().topk(2).values.sum())
    assert unsupported_operators("mindspore", counted) == {"aten.topk.default": "1"}


def test_a_sharded_program_gathers_parameters_and_scatters_gradients():
    model, batch = _model("qwen3"), _batch()
    program = capture_gradients(model, batch, _loss, Shards(5))
    kinds = {name: kind.shape for name, (_, kind) in program.inputs.items()}
    assert kinds["param.model.embed_tokens.weight"] == kinds["sum.model.embed_tokens.weight"] == (20, 32)
    count = len([*model.parameters()])
    counts = Counter(node.op for node in program.nodes)
    assert counts["_c10d_functional.all_gather_into_tensor.default"] == count
    assert counts["_c10d_functional.reduce_scatter_tensor.default"] == count
    assert not unsupported_operators("mindspore", program)
    changed, memory = _with_memory_plan(program, 1e9)
    assert memory.values
    orders = [[n.results for n in p.nodes if n.op.startswith(COLLECTIVES)] for p in (program, changed)]
    assert orders[0] == orders[1]  # else ranks would wait for each other


def test_stage_programs_compute_the_gradients_of_the_model():
    model, batch = _model("qwen3", tie_word_embeddings=True).float(), _batch()
    programs, values = [], []
    for rank in range(2):
        with World.fake(rank, 2, TRACED) as world:
            own = parallelize(copy.deepcopy(model), hp.plan_of(model, "pp=2"), world)
            programs.append(capture_stage(own, batch, _loss))
            values.append(_values(own, batch))

    sent = _run(programs[0][0], values[0])["sent"]
    received = {"batch.received": sent}
    last = _run(programs[1][1], values[1] | received)
    first = _run(programs[0][1], values[0] | {"batch.gradient": last["grad.received"]})
    loss = _loss(model, **batch)
    loss.backward()
    evaluated = _run(programs[1][0], values[1] | received)["loss"]
    torch.testing.assert_close(last["loss"], loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(evaluated, last["loss"], rtol=0, atol=0)
    for name, param in model.named_parameters():
        parts = [r[f"sum.{name}"] - 1 for r in (first, last) if f"sum.{name}" in r]
        assert len(parts) == 1 + ("embed_tokens" in name)  # both stages use the tied embedding
        torch.testing.assert_close(sum(parts), param.grad, rtol=1e-5, atol=1e-5)


def test_a_captured_reduction_keeps_its_kind():
    def update(values):
        largest = values["a"].clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {"b": largest}

    with World.fake(0, 2, TRACED):
        program = capture_update(update, {"a": torch.ones(3)})
    assert [node.args[1] for node in program.nodes if node.op.startswith(COLLECTIVES)] == ["max"]
    assert [*unsupported_operators("mindspore", program)] == ["_c10d_functional.all_reduce.default"]


def test_writes_in_place_become_new_values():
    def update(values):
        doubled = values["a"] * 2
        doubled.add_(values["b"])
        return {"c": doubled}

    program = capture_update(update, {"a": torch.ones(3), "b": torch.ones(3)})
    assert Counter(node.op for node in program.nodes).keys() <= OPERATORS.keys()
    results = _run(program, {"a": torch.full((3,), 2.0), "b": torch.full((3,), 5.0)})
    np.testing.assert_array_equal(results["c"], [9.0, 9.0, 9.0])


def test_recomputed_layers_have_the_same_gradients_and_less_memory():
    model, batch = _model("gpt2", num_hidden_layers=4), _batch()
    program = capture_gradients(model, batch, _loss)
    layers = [f"transformer.h.{i}" for i in range(4)]
    values, peaks = _values(model, batch), []
    wanted = _run(program, values)
    for count in range(5):
        changed = planned(program, recompute_layers(program, layers[:count]))
        results = _run(changed, values)
        assert all(torch.equal(results[name], value) for name, value in wanted.items())
        peaks.append(max(live_bytes(changed)))
        repeated = [n.module for n in changed.nodes if n.residency == "recompute"]
        assert {".".join(name.split(".")[:3]) for name in repeated} == {*layers[:count]}
        waiting = [n for n in changed.nodes if n.op == AFTER]
        assert len({n.args[1] for n in waiting}) == count  # each layer waits for backward
    assert peaks[0] == max(live_bytes(program))
    assert peaks[0] > peaks[1] > peaks[2] >= peaks[4]
    gradients = sum(p.nbytes for p in model.parameters())  # live at the end of backward
    assert peaks[4] - gradients < 0.5 * (peaks[0] - gradients)


def test_broadcasts_that_readers_repeat_are_omitted():
    """A narrow value reaches readers of full size alone; `_run` compares the shape of each result with its type."""

    def update(values):
        a, row = values["a"], values["row"]
        wide = (row[:, None].expand(4, 3) / 3 * 2).expand(4, 3)
        return {
            "fused": a * wide + a,
            "summed": row[:, None].expand(4, 3).sum(),
            "kept": row[:, None].expand(4, 3) * 2,
            "scalar": a * row.sum().expand(4, 3),
        }

    values = {"a": torch.randn(4, 3), "row": torch.randn(4)}
    program = capture_update(update, values)
    changed = without_broadcasts(program)
    counts = [Counter(node.op for node in p.nodes)["aten.expand.default"] for p in (program, changed)]
    assert counts[0] - counts[1] in (1, 2)
    results, wanted = _run(changed, values), _run(program, values)
    assert all(torch.equal(results[name], value) for name, value in wanted.items())
    assert results["kept"].shape == (4, 3)


def _with_memory_plan(program, bytes_s, **options):
    channel = Channel(bytes_s, 1e-6)
    machine, roofline = MemoryMachine(channel, channel), Roofline(1e9, 1e9, 1e-6)
    return plan_program(program, machine, roofline, max_slowdown=0.2, **options)


@pytest.mark.parametrize(
    ("family", "bytes_s", "options", "residency"),
    [
        ("gpt2", 1e9, {"recompute": False}, "offload"),
        ("llama", 1e9, {"reorder": False}, "offload"),
        ("llama", 1e5, {}, "recompute"),
    ],
)
def test_memory_plans_have_the_same_gradients_and_less_memory(family, bytes_s, options, residency):
    model, batch = _model(family), _batch()
    program = capture_gradients(model, batch, _loss)
    values = _values(model, batch)
    wanted = _run(program, values)
    changed, memory = _with_memory_plan(program, bytes_s, **options)
    results = _run(changed, values)
    assert all(torch.equal(results[name], value) for name, value in wanted.items())
    stored = sum(s.num_bytes for s in memory_program(program).storages if s.at_start)
    assert memory.unplanned_bytes == max(live_bytes(program)) + stored
    # A copy to the host takes time in the prediction, so a value leaves later than in the program.
    assert max(live_bytes(changed)) + stored <= memory.peak_bytes < 0.9 * memory.unplanned_bytes
    assert {v.residency for v in memory.values} == {residency}
    assert {n.residency for n in changed.nodes} == {"keep", residency}
    copies = Counter(node.op for node in changed.nodes)
    assert copies[TO_DEVICE] == sum(v.residency == "offload" for v in memory.values)
    assert not unsupported_operators("mindspore", changed)

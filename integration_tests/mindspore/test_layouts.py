"""Gradients of several processes on MindSpore against those of one process, without torch in the processes."""

import copy
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import hyper_parallel as hp
from hyper_parallel.backends.mindspore.runner import MindSporeRunner
from hyper_parallel.backends.plan_sink import plan_program
from hyper_parallel.backends.program_memory import planned, recompute_layers
from hyper_parallel.backends.step_program import group_name
from hyper_parallel.backends.torch import Routing, handle, local
from hyper_parallel.backends.torch.program_capture import (
    Shards,
    capture_gradients,
    capture_stage,
    capture_update,
    sum_over,
)
from hyper_parallel.backends.torch.traced_groups import TRACED
from hyper_parallel.memory import Channel, MemoryMachine, Roofline
from hyper_parallel.runtime import World, parallelize

RANKS = 2
SIZES = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_local_experts": 4, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 0, "moe_layer_start_index": 0,
}  # fmt: skip
FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "phi3", "gpt_neox", "qwen3_moe")
MOE = ("qwen3_moe", "mixtral", "qwen2_moe", "olmoe", "glm4_moe", "ernie4_5_moe")
DENSE = ("llama", "qwen3", "gemma2", "phi3", "gpt_neox", "olmo2")


def _loss(model, input_ids, labels):
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 24


def _model(family, **sizes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")
    return model


def _inputs(program, state, batch, rank):
    """Return the input arrays of a rank: its rows of the parameters, zeros as sums, its rows of the batch."""
    arrays = {}
    for name, (_, kind) in program.inputs.items():
        group, _, rest = name.partition(".")
        if group == "sum":
            arrays[name] = np.zeros(kind.shape, np.float32)
            continue
        whole = (batch if group == "batch" else state)[rest].detach().numpy()
        rows = kind.shape[0] if kind.shape else 0
        if kind.shape != whole.shape:
            whole = whole[rank * rows : (rank + 1) * rows]
            whole = np.pad(whole, [(0, w - n) for w, n in zip(kind.shape, whole.shape, strict=True)])
        arrays[name] = whole
    return arrays


def _write(folder, name, program, arrays_of_ranks):
    """Write a program of all ranks with the inputs of each; `NAME.RANK` is one of a single rank."""
    program.save(folder / name)
    name, _, only = name.partition(".")
    for rank, arrays in enumerate(arrays_of_ranks, int(only or 0)):
        np.savez(folder / f"{name}_{rank}.npz", **arrays)


def _run(folder):
    """Run the programs of a folder, one process for each rank that has inputs."""
    ranks = 1 + max(int(path.stem.rpartition("_")[2]) for path in folder.glob("*.npz"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("program_rank.py")
    command = [sys.executable, script, folder, "0", str(ranks), str(port)]
    processes = [
        subprocess.Popen(
            [*command[:3], str(rank), *command[4:]],
            env=os.environ | {"GLOG_v": "4"},
            cwd=folder,  # MindSpore writes its logs there
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=580)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)


def _results(folder, name, rank):
    with np.load(folder / f"{name}_out_{rank}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_have_the_gradients_of_one(family, tmp_path):
    model = _model(family)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ids = torch.randint(3, 97, (RANKS, 12))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    own = [{name: value[[rank]] for name, value in batch.items()} for rank in range(RANKS)]
    one = capture_gradients(model, batch, _loss)
    sharded = capture_gradients(model, own[0], _loss, Shards(RANKS))
    _write(tmp_path, "one_process.0", one, [_inputs(one, state, batch, 0)])
    inputs = [_inputs(sharded, state, own[rank], rank) for rank in range(RANKS)]
    _write(tmp_path, "sharded", sharded, inputs)
    _run(tmp_path)

    wanted = _results(tmp_path, "one_process", 0)
    results = [_results(tmp_path, "sharded", rank) for rank in range(RANKS)]
    assert sum(r["loss"] for r in results) == pytest.approx(wanted["loss"], rel=1e-6)
    assert max(np.abs(grad).max() for name, grad in wanted.items() if name != "loss") > 1e-3
    for name in wanted.keys() - {"loss"}:
        rows = np.concatenate([r[name] for r in results])
        np.testing.assert_allclose(rows[: len(wanted[name])], wanted[name], rtol=0, atol=1e-6)
        assert not rows[len(wanted[name]) :].any()  # padding


def test_replicas_sum_their_gradients(tmp_path):
    example = {"matrix": torch.ones(3, 2), "scalar": torch.ones(())}
    program = capture_update(lambda given: {name: sum_over(x, "dp_replicate") for name, x in given.items()}, example)
    inputs = [{n: (t * (rank + 1)).numpy() for n, t in example.items()} for rank in range(RANKS)]
    _write(tmp_path, "sums", program, inputs)
    _run(tmp_path)
    for rank in range(RANKS):
        for name, total in _results(tmp_path, "sums", rank).items():
            np.testing.assert_array_equal(total, np.full(example[name].shape, 3.0, np.float32))


def test_collectives_of_a_part_of_the_ranks_move_its_values(tmp_path):
    """Four ranks in two groups: each one exchanges, gathers and sums rows with the other rank of its group."""
    collective = torch.ops._c10d_functional
    groups = ((0, 2), (1, 3))
    values = [torch.arange(4.0) + 100 * rank for rank in range(4)]
    for rank, x in enumerate(values):
        name = group_name(groups[rank % 2])

        def program(given, name=name):
            x = given["x"]
            return {
                "exchanged": collective.all_to_all_single(x, [2, 2], [2, 2], name),
                "gathered": collective.all_gather_into_tensor(x, 2, name),
                "scattered": collective.reduce_scatter_tensor(x, "sum", 2, name),
                "summed": collective.all_reduce(x, "sum", name),
            }

        captured = capture_update(program, {"x": x})
        _write(tmp_path, f"moves.{rank}", captured, [{"x": x.numpy()}])
    _run(tmp_path)
    for rank in range(4):
        first, second = (values[member] for member in groups[rank % 2])
        rows = slice(0, 2) if rank < 2 else slice(2, 4)
        results = _results(tmp_path, "moves", rank)
        for name, value in {
            "exchanged": torch.cat((first[rows], second[rows])),
            "gathered": torch.cat((first, second)),
            "scattered": (first + second)[rows],
            "summed": first + second,
        }.items():
            np.testing.assert_array_equal(results[name], value.numpy(), err_msg=name)


LAYOUTS = {
    "tp=2": (1, DENSE),
    "tp=2 of experts": (1, [family for family in MOE if family != "olmoe"]),
    "tp=4": (1, ("llama", "qwen3", "gemma2", "mistral", "gpt_neox", "olmo2")),
    "tp=2 with dp_shard=2": (2, DENSE),
}
"""Layout to the number of data-parallel ranks, and families; olmoe cannot have the heads of this test."""


def _loss_of_model(model, input_ids, labels):
    output = model(
        input_ids=input_ids,
        shift_labels=labels,
        labels=labels,
        num_items_in_batch=24,
        use_cache=False,
    )
    return output.loss


def _on_ranks(model, words, members, world, **options):
    """Return a copy of the model as ranks of a world share it, and its values on this rank."""
    own = parallelize(copy.deepcopy(model), hp.plan_of(model, words), world, members, **options)
    values = (*own.named_parameters(), *own.named_buffers())
    return own, {name: local(value.detach()) for name, value in values}


def _gradients_as_parameters(model):
    """Return a copy of the model whose parameters are its gradients."""
    gradients = copy.deepcopy(model)
    for name, param in gradients.named_parameters():
        grad = model.get_parameter(name).grad
        param.data = torch.zeros_like(param) if grad is None else grad
    return gradients


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_model_have_the_gradients_of_one(layout, tmp_path):
    words, (replicas, families) = layout.partition(" ")[0], LAYOUTS[layout]
    size = int(words.partition("=")[2])
    models, wanted = {}, {}
    for family in families:
        model = models[family] = _model(family, num_key_value_heads=2, num_attention_heads=4)
        ids = torch.randint(3, 97, (2, 12))
        batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
        _loss(model, **batch).backward()
        wanted[family] = _gradients_as_parameters(model)
        model.zero_grad()
        for rank in range(size * replicas):
            with World.fake(rank, size * replicas, TRACED) as world:
                first = rank // size * size
                own, state = _on_ranks(model, words, range(first, first + size), world)
                rows = {n: value.chunk(replicas)[rank // size] for n, value in batch.items()}
                shards = Shards(replicas, group_name(range(rank % size, size * replicas, size)))
                program = capture_gradients(own, rows, _loss_of_model, shards)
                _write(
                    tmp_path,
                    f"{family}.{rank}",
                    program,
                    [_inputs(program, state, rows, rank // size)],
                )
    _run(tmp_path)
    for family in families:
        for rank in range(size * replicas):
            results = _results(tmp_path, family, rank)
            with World.fake(rank, size * replicas, TRACED) as world:
                first = rank // size * size
                _, expected = _on_ranks(wanted[family], words, range(first, first + size), world)
            for name in results.keys() - {"loss"}:
                grad = expected[name.removeprefix("sum.")].numpy()
                rows = len(results[name])
                grad = grad[rank // size * rows :][:rows] if replicas > 1 else grad
                np.testing.assert_allclose(
                    results[name][: len(grad)], grad, rtol=0, atol=1e-6, err_msg=f"{family} {name}"
                )
            assert max(np.abs(value).max() for name, value in results.items() if name != "loss") > 1e-3


def _write_experts(family, folder):
    """Write programs of two ranks, each with its rows and half of the experts, which drop rows above their capacity.

    Returns:
        Loss of one process, its gradients with the experts of each rank, and the names of the experts.
    """
    model = _model(family)
    for param in model.parameters():
        param.data *= 10 if param.dim() == 3 else 1  # experts count
    routing = Routing(capacity_factor=1.0, aux_loss_coef=0.0)
    ids = torch.randint(3, 97, (RANKS, 12))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    own = [{name: value[[rank]] for name, value in batch.items()} for rank in range(RANKS)]
    with World.fake(0, 1, TRACED) as world:
        one, _ = _on_ranks(model, "dp_replicate=1", None, world, routing=routing)
        loss = sum(_loss_of_model(one, **rows) for rows in own)
    loss.backward()
    with torch.no_grad():
        assert abs(float(loss) - float(_loss(model, **batch))) > 1e-4  # rows were dropped
    gradients, parts = _gradients_as_parameters(one), []
    for rank in range(RANKS):
        with World.fake(rank, RANKS, TRACED) as world:
            layout = "dp_shard=2 ep=2", None, world
            part, state = _on_ranks(model, *layout, routing=routing)
            parts.append(_on_ranks(gradients, *layout, routing=routing)[1])
            experts = [n for n, p in handle(part).layouts.items() if "ep" in p.sharding_axes]
            assert experts
            shards = Shards(RANKS, others=dict.fromkeys(experts, Shards()))
            program = capture_gradients(part, own[rank], _loss_of_model, shards)
            inputs = _inputs(program, state, own[rank], rank)
            _write(folder, f"{family}.{rank}", program, [inputs])
    return float(loss.detach()), parts, experts


def test_ranks_that_share_experts_have_the_gradients_of_one(tmp_path):
    wanted = {family: _write_experts(family, tmp_path) for family in MOE}
    _run(tmp_path)
    for family, (loss, parts, experts) in wanted.items():
        results = [_results(tmp_path, family, rank) for rank in range(RANKS)]
        assert sum(r["loss"] for r in results) == pytest.approx(loss, rel=1e-6)
        for rank in range(RANKS):
            for name in results[rank].keys() - {"loss"}:
                param, rows = name.removeprefix("sum."), results[rank][name]
                grad = parts[rank][param].numpy()
                grad = grad if param in experts else grad[rank * len(rows) :][: len(rows)]
                np.testing.assert_allclose(rows[: len(grad)], grad, rtol=0, atol=1e-6, err_msg=f"{family} {name}")


def _two_layers(runner):
    """Return the gradients program of a Llama of two layers, and the values of its inputs."""
    model = _model("llama", num_hidden_layers=2)
    ids = torch.randint(3, 97, (2, 12))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    program = capture_gradients(model, batch, _loss)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = _inputs(program, state, batch, 0)
    return program, {name: runner.value(value) for name, value in values.items()}


def test_recomputed_layers_have_the_gradients_of_kept_ones(tmp_path):
    runner, results = MindSporeRunner({}), []
    program, values = _two_layers(runner)
    recomputed = planned(program, recompute_layers(program, ["model.layers.0", "model.layers.1"]))
    assert len(recomputed.nodes) > len(program.nodes)
    for name, own in (("kept", program), ("recomputed", recomputed)):
        step = runner.compile(own, tmp_path / f"{name}.py")
        results.append({k: runner.array(value) for k, value in step(values).items()})
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value, err_msg=name)


@pytest.mark.parametrize(("bytes_s", "residency"), [(1e9, "offload"), (1e5, "recompute")])
def test_a_memory_plan_has_the_gradients_of_kept_values(bytes_s, residency, tmp_path):
    runner, results = MindSporeRunner({}), []
    program, values = _two_layers(runner)
    channel = Channel(bytes_s, 1e-6)
    machine, roofline = MemoryMachine(channel, channel), Roofline(1e9, 1e9, 1e-6)
    changed, memory = plan_program(program, machine, roofline, max_slowdown=0.2)
    assert {value.residency for value in memory.values} == {residency}
    for name, own in (("kept", program), ("planned", changed)):
        step = runner.compile(own, tmp_path / f"{name}.py")
        results.append({k: runner.array(value) for k, value in step(values).items()})
    for name, value in results[0].items():
        np.testing.assert_array_equal(results[1][name], value, err_msg=name)


@pytest.mark.parametrize("family", DENSE)
def test_stages_have_the_gradients_of_the_model(family, tmp_path):
    """Two stages of a pipeline, in one process; the first one repeats its forward in backward."""
    model = _model(family, num_hidden_layers=2)
    ids = torch.randint(3, 97, (2, 12))
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    runner = MindSporeRunner({})

    def run(program, state, **messages):
        step = runner.compile(program, tmp_path / f"step{len([*tmp_path.iterdir()])}.py")
        arrays = _inputs(program, state, batch | messages, 0)
        values = {name: runner.value(array) for name, array in arrays.items()}
        return {name: runner.array(value) for name, value in step(values).items()}

    stages = []
    for rank in range(2):
        with World.fake(rank, 2, TRACED) as world:
            own, state = _on_ranks(model, "pp=2", None, world)
            stages.append((*capture_stage(own, batch, _loss), state))
    (forward, backward, first_state), (_, last, last_state) = stages
    sent = run(forward, first_state)["sent"]
    last_results = run(last, last_state, received=torch.from_numpy(sent))
    gradient = torch.from_numpy(last_results["grad.received"])
    results = run(backward, first_state, gradient=gradient)
    loss = _loss(model, **batch)
    loss.backward()
    assert float(last_results["loss"]) == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, param in model.named_parameters():
        parts = [r[f"sum.{name}"] for r in (results, last_results) if f"sum.{name}" in r]
        np.testing.assert_allclose(sum(parts), param.grad.numpy(), rtol=0, atol=1e-6, err_msg=f"{family} {name}")

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
from hyper_parallel.backends.step_program import group_name
from hyper_parallel.backends.torch import local
from hyper_parallel.backends.torch.program_capture import capture_gradients, capture_update
from hyper_parallel.backends.torch.program_shards import Shards, sum_over
from hyper_parallel.backends.torch.traced_groups import TRACED
from hyper_parallel.runtime import World, parallelize

RANKS = 2
SIZES = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "phi3", "gpt_neox", "qwen3_moe")
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
            whole = np.pad(
                whole, [(0, w - n) for w, n in zip(kind.shape, whole.shape, strict=True)]
            )
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
    program = capture_update(
        lambda given: {name: sum_over(x, "dp_replicate") for name, x in given.items()}, example
    )
    inputs = [{n: (t * (rank + 1)).numpy() for n, t in example.items()} for rank in range(RANKS)]
    _write(tmp_path, "sums", program, inputs)
    _run(tmp_path)
    for rank in range(RANKS):
        for name, total in _results(tmp_path, "sums", rank).items():
            np.testing.assert_array_equal(total, np.full(example[name].shape, 3.0, np.float32))


LAYOUTS = {
    "tp=2": (1, DENSE),
    "tp=2 with dp_shard=2": (2, DENSE[:1]),
}
"""Layout to the number of data-parallel ranks, and families."""


def _loss_of_model(model, input_ids, labels):
    output = model(
        input_ids=input_ids,
        shift_labels=labels,
        labels=labels,
        num_items_in_batch=24,
        use_cache=False,
    )
    return output.loss


def _on_ranks(model, words, members, world):
    """Return a copy of the model as ranks of a world share it, and its values on this rank."""
    own = parallelize(copy.deepcopy(model), hp.plan_of(model, words), world, members)
    values = (*own.named_parameters(), *own.named_buffers())
    return own, {name: local(value.detach()) for name, value in values}


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
        gradients = wanted[family] = copy.deepcopy(model)
        for name, param in gradients.named_parameters():
            grad = model.get_parameter(name).grad
            param.data = torch.zeros_like(param) if grad is None else grad
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
            assert (
                max(np.abs(value).max() for name, value in results.items() if name != "loss") > 1e-3
            )

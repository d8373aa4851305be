"""Gradients of two processes on MindSpore against those of one process, without torch in the processes."""

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

from hyper_parallel.backends.torch.program_capture import capture_gradients, capture_update
from hyper_parallel.backends.torch.program_shards import Shards, sum_over

RANKS = 2
SIZES = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
FAMILIES = ("llama", "qwen3", "gpt2", "gemma2", "phi3", "gpt_neox", "qwen3_moe")


def _loss(model, input_ids, labels):
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 24


def _model(family):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES)
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
    program.save(folder / name)
    for rank, arrays in enumerate(arrays_of_ranks):
        np.savez(folder / f"{name}_{rank}.npz", **arrays)


def _run(folder):
    """Run the programs of a folder on two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("program_rank.py")
    command = [sys.executable, script, folder, "0", str(RANKS), str(port)]
    processes = [
        subprocess.Popen(
            [*command[:3], str(rank), *command[4:]],
            env=os.environ | {"GLOG_v": "4"},
            cwd=folder,  # MindSpore writes its logs there
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=580)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(outputs)


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
    _write(tmp_path, "one_process", one, [_inputs(one, state, batch, 0)])
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

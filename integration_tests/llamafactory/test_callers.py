"""Callers of LlamaFactory's main branch, by generation: losses of two ranks are those of one process.

make test-llamafactory
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from caller import MAX_NORM, SAVED, STEPS, batch_of, start

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "output_router_logits": False,
}  # fmt: skip


def alone(model_dir):
    """Loss and gradient norm of every step in one process, without us."""
    model, optimizer = start(model_dir)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    curve = []
    for number in range(STEPS):
        batch = batch_of(number)
        count = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        curve.append((float(loss.detach()), float(norm)))
    return curve, model


def make(place, kind, freeze=False):
    """A small model in a folder, and what training it alone gives."""
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    set_seed(0)
    shape = SHAPE | (EXPERTS if kind == "qwen3_moe" else {})
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape)).save_pretrained(place / "model")
    if freeze:
        (place / "model" / "freeze").touch()
    return alone(place / "model")


def call(place, name, ranks, hyper, *source):
    """Curves of `caller.py` on some ranks."""
    out = place / name
    out.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}",
         str(Path(__file__).with_name("caller.py")), str(place / "model"), str(out), json.dumps(hyper), *source],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((out / "curves.json").read_text())


def same(found, wanted):
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "hyper", "freeze"),
    [
        ("qwen3", {}, False), ("qwen3", {"cp_size": 2}, False),
        ("qwen3_moe", {"ep_size": 2, "efsdp_size": 1, "token_dispatcher": "all_to_all"}, False),
        ("qwen3", {"activation_mode": "swap"}, False), ("qwen3", {"activation_mode": "recompute"}, True),
    ],
    ids=["G2", "G3", "G4", "G2 swap", "G2 freeze"],
)  # fmt: skip
def test_losses_and_a_resumed_run_are_those_of_one_process(tmp_path, kind, hyper, freeze):
    from transformers import AutoModelForCausalLM

    wanted, trained = make(tmp_path, kind, freeze)
    curves = call(tmp_path, "out", 2, hyper)
    same(curves["curve"], wanted)
    same(curves["resumed"], wanted[SAVED:])
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out/export", dtype=torch.float32)
    for (name, a), b in zip(exported.named_parameters(), trained.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-4), name


def test_a_run_saved_on_four_ranks_goes_on_on_two(tmp_path):
    wanted, _ = make(tmp_path, "qwen3")
    same(call(tmp_path, "four", 4, {"cp_size": 2})["curve"], wanted)
    on = call(tmp_path, "two", 2, {"fsdp_size": 1}, str(tmp_path / "four"))
    same(on["resumed"], wanted[SAVED:])

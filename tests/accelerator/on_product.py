"""The command line on the emulated accelerator, one rank: training with and without a budget, a resumed run."""

import json

from tests.e2e.runs import CONFIG, curve, rows, train, write_functions

KIB = 1024


def trained(folder, name, *overrides):
    out = folder / name
    train(folder, out, *overrides)
    return out


def on_train_with_a_budget(knobs, folder):
    """Same losses as without, what the allocator gave is what was predicted."""
    (folder / "model.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    write_functions(folder / "text.txt", 1000)
    (folder / "recipe.yaml").write_text(
        f"""
model: {{path: {folder}/model.json}}
data: {{source: {folder}/text.txt, seq_len: 32, vocab_size: 384, cache_dir: {folder}/cache}}
training:
  {{steps: 4, dtype: float32, tokens_per_step: 64, microbatch: 2, lr: 1.0e-2, lr_schedule: constant, eval_every: 2,
    eval_tokens: 64}}
parallel: {{dp_shard: 1}}
checkpoint: {{every: 2, export: false}}
topology: dgx-h100
"""
    )
    plain = trained(folder, "plain")
    assert [row["memory_bytes"] > 0 for row in rows(plain / "metrics.jsonl")] == [True] * 4
    mine = trained(
        folder,
        "mine",
        f"offload.budget={500 * KIB}",
        "training.steps=2",
        "training.max_grad_norm=1.0",
    )
    whole = trained(folder, "mine", f"offload.budget={500 * KIB}")
    assert mine == whole
    assert curve(whole) == curve(plain)
    of = [{r["step"]: r["loss"] for r in rows(out / "eval.jsonl")} for out in (whole, plain)]
    assert of[0] == of[1]
    for row in rows(whole / "metrics.jsonl"):
        assert row["offload"]["pred_memory_bytes"] <= 500 * KIB
        assert row["memory_bytes"] == row["offload"]["pred_memory_bytes"]
        assert row["offload"]["difference_bytes"] == 0

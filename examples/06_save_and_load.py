"""Save model, optimizer and learning-rate schedule on one layout, and continue training on another."""

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import hyper_parallel as hp

CONFIG = Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip
BATCH, SEQ_LEN = 4, 16


def train(strategy: str, steps: int, folder: Path, resume: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).double()
    tokens = torch.randint(0, CONFIG.vocab_size, (6, BATCH, SEQ_LEN))

    hp.parallelize(model, hp.plan_of(model, strategy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    done = 0
    if resume:
        extra = hp.load(model, optimizer, folder)  # works on any layout and number of ranks
        done = extra["step"]
        schedule.load_state_dict(extra["schedule"])
    rank, size = hp.data_share(model)
    losses = []
    for batch in tokens[done : done + steps]:
        mine = batch.chunk(size)[rank].to(model.device)
        losses.append(hp.forward_backward(model, [{"input_ids": mine, "labels": mine}]).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    hp.save(model, optimizer, folder, step=done + steps, schedule=schedule.state_dict())
    return losses


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = train("", 6, folder / "one")
        begun = hp.launch(lambda _: train("tp=2", 3, folder / "own"), 2)[0]
        ended = hp.launch(lambda _: train("dp_shard=4", 3, folder / "own", resume=True), 4)[0]
        files = sorted(p.name for p in (folder / "own").iterdir())
    print("six steps on one rank       ", [f"{loss:.10f}" for loss in whole])
    print("three on tp=2 + dp_shard=4  ", [f"{loss:.10f}" for loss in begun + ended], files)
    assert all(abs(a - b) <= 1e-10 * a for a, b in zip(whole, begun + ended, strict=True))
    print("the saved run continues as if it had never stopped")

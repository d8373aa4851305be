"""Train an unmodified transformers model in your own loop on four ranks, with FSDP x tensor parallelism."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import hyper_parallel as hp

CONFIG = Qwen3Config(
    vocab_size=512, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, head_dim=8, tie_word_embeddings=True,
)  # fmt: skip
STEPS, BATCH, SEQ_LEN = 5, 8, 32
torch.manual_seed(0)
MODEL = AutoModelForCausalLM.from_config(CONFIG).double()
TOKENS = torch.randint(0, CONFIG.vocab_size, (STEPS, BATCH, SEQ_LEN))


def train(plan: hp.Plan) -> list[float]:
    """Train on this rank and return the loss of every step."""
    model = hp.parallelize(MODEL, plan)  # same parameter names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, size = hp.data_share(model)
    losses = []
    for tokens in TOKENS:
        mine = tokens.chunk(size)[rank].to(model.device)
        loss = hp.forward_backward(model, [{"input_ids": mine, "labels": mine}])
        hp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = {}
    for strategy, ranks in (("", 1), ("dp_shard=2 tp=2", 4)):
        plan = hp.plan_of(MODEL, strategy)
        found[ranks] = hp.launch(lambda _, plan=plan: train(plan), ranks)[0]
        print(f"{ranks} ranks", [f"{loss:.12f}" for loss in found[ranks]])
    assert all(abs(a - b) <= 1e-10 * a for a, b in zip(found[1], found[4], strict=True))
    print("equal to 10 digits")

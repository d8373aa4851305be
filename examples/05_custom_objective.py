"""Train with a custom loss, direct preference optimization, on tensor, pipeline and context parallelism at once."""

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, Qwen3Config

import hyper_parallel as hp

CONFIG = Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16,
)  # fmt: skip
PAIRS, SEQ_LEN, PROMPT, BETA, STEPS = 4, 24, 8, 0.1, 3
WORKLOAD = hp.Workload(
    SEQ_LEN, microbatch=4, accumulation_steps=2,
    compute_dtype="float64", param_dtype="float64", reduce_dtype="float64",
)  # fmt: skip


def dpo(logprobs: torch.Tensor, batch: dict) -> torch.Tensor:
    """Return the DPO loss. Rows of `logprobs` [2 pairs, S] alternate between chosen and rejected answers.

    On any layout, the rows are whole sequences.
    """
    margins = (logprobs - batch["reference"]).sum(-1).view(-1, 2)
    return -F.logsigmoid(BETA * (margins[:, 0] - margins[:, 1])).sum() / PAIRS


def train(strategy: str) -> list[float]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).double()
    ids = torch.randint(0, CONFIG.vocab_size, (2 * PAIRS, SEQ_LEN))
    labels = ids.clone()
    labels[:, :PROMPT] = -100  # no loss on the prompt

    hp.parallelize(model, hp.plan_of(model, strategy, WORKLOAD))
    with torch.no_grad():
        reference = hp.token_logprobs(model, input_ids=ids, labels=labels)
    batch = {"input_ids": ids, "labels": labels, "reference": reference}
    microbatches = [{k: v.chunk(2)[i] for k, v in batch.items()} for i in range(2)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses = []
    for _ in range(STEPS):
        losses.append(hp.forward_backward(model, microbatches, objective=dpo).item())
        hp.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


if __name__ == "__main__":
    one, eight = train(""), hp.launch(lambda _: train("tp=2 pp=2 cp=2"), 8)[0]
    print("one rank   ", [f"{loss:.12f}" for loss in one])
    print("eight ranks", [f"{loss:.12f}" for loss in eight])
    assert all(abs(a - b) <= 1e-10 * a for a, b in zip(one, eight, strict=True))
    print("equal to 10 digits, and lower with every step:", one == sorted(one, reverse=True))

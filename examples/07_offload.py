"""Run your own training step in half of its memory with one call, with bitwise equal losses."""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import hyper_parallel as hp

CONFIG = Qwen3Config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=32,
)  # fmt: skip
STEPS = 6


def train(share: float | None) -> tuple[list[float], int]:
    """Return the losses, and the peak device bytes of a step; `share` is the budget as a fraction of the state.

    None trains without offload.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.8**step)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step
    if share is not None:  # weights, gradients and the two moments of AdamW, without activations
        state_bytes = 16 * sum(p.numel() for p in model.parameters())
        run = hp.offload(step, budget=int(share * state_bytes))
    losses = []
    for i in range(STEPS):
        ids = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(i))
        losses.append(run(ids).item())
        schedule.step()
    if share is None:
        return losses, 0
    run.close()  # restores the values of model and optimizer
    return losses, run.measured.device_bytes


if __name__ == "__main__":
    plain, (planned, most) = train(None)[0], train(0.8)
    print(f"device memory of a step: {most / 1e6:.1f} MB (counted on a simulated device)")
    print("bit for bit the losses without a plan:", planned == plain)

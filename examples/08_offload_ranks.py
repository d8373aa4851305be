"""Run a loop with torch's FSDP2 or DDP on two ranks in less memory with one call, with equal losses."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

import hyper_parallel as hp
from hyper_parallel.runtime import World

CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def train(sharded: bool, budget: str | None) -> tuple[list[float], int]:
    """Return this rank's losses, and the peak device bytes of a step; `budget` None trains without offload."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if budget is None else hp.offload(step, budget=budget)
    draws = torch.Generator().manual_seed(dist.get_rank())
    losses = [run(torch.randint(0, 512, (2, 64), generator=draws)).item() for _ in range(5)]
    if budget is None:
        return losses, 0
    run.close()
    return losses, run.measured.device_bytes


def rank(_: int) -> list[str]:
    said = []
    with World.join("cpu"):  # under torchrun `dist.init_process_group("gloo")` does as well
        for sharded, budget in ((True, "3MiB"), (False, "6MiB")):
            plain, (planned, most) = train(sharded, None)[0], train(sharded, budget)
            how = "fully_shard" if sharded else "DistributedDataParallel"
            said.append(f"{how}: the losses without a plan: {planned == plain}; {most / 2**20:.1f} MiB of {budget}")
    return said


if __name__ == "__main__":
    print(*hp.launch(rank, 2)[0], sep="\n")

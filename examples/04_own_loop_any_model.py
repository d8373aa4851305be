"""Parallelize a plain `nn.Module` in a loop written for one device, with five added lines (numbered)."""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hyper_parallel as hp


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))  # fmt: skip


def train(strategy: str) -> list[float]:
    model = make().double()
    inputs = torch.linspace(-1, 1, 64 * 16, dtype=torch.float64).view(64, 16)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))

    hp.parallelize(model, hp.plan_of(model, strategy))  # 1, 2
    rank, size = hp.data_share(model)  # 3
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    norms = []
    for _ in range(3):
        for inputs, wanted in DataLoader(data, batch_size=32 // size, sampler=sampler):
            loss = nn.functional.mse_loss(model(inputs), wanted)
            (loss / size).backward()  # 4: gradients are summed over ranks, and the loss is a mean
            norms.append(hp.clip_grad_norm_(model, 1.0).item())  # 5
            optimizer.step()
            optimizer.zero_grad()
    return norms


if __name__ == "__main__":
    one = train("")
    print("one rank       ", [f"{norm:.10f}" for norm in one])
    for strategy in (
        "dp_shard=4",
        "dp_replicate=2 dp_shard=2",
        "dp_shard=2 tp=2 rules.0=colwise rules.2=rowwise rules.4=replicate",
    ):
        norms = hp.launch(lambda _, strategy=strategy: train(strategy), 4)[0]
        print(f"{strategy[:24]:24}", [f"{norm:.10f}" for norm in norms])
        assert all(abs(a - b) <= 1e-10 * a for a, b in zip(one, norms, strict=True))
    print("gradient norms of every layout are equal to 10 digits")

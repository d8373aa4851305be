"""Low-rank adapters as parameters of the linear modules they belong to.

    y = x W^T + scaling * dropout(x) A^T B^T        W [out, in] frozen, A [r, in], B [out, r]

`lora_A` and `lora_B` are parameters of the `nn.Linear` itself, so that every other name of the model stays what it
was: plans, weight files and exports find what they look for. Tensor parallelism cuts A where it cuts the columns of W
and B where it cuts the rows; the product is then a summand, or a slice, of the very thing that W gives. Where an axis
cuts only one of the two, the ranks' gradients of the other are added.

Source: Hu et al. 2021, "LoRA", arXiv:2106.09685; the scaling r^-1/2 of Kalajdzievski 2023, arXiv:2312.03732.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyper_parallel.backends.torch.weights.initialization import (
    LORA_A,
    LORA_B,
    base_parameters,
    canonical_name,
    is_adapter,
    module_seed,
    named_tensors,
)
from hyper_parallel.backends.torch.weights.linear_map import OUT_IN, weight_order
from hyper_parallel.backends.torch.weights.shard_ranges import copy_full
from hyper_parallel.errors import NotDivisible, UnsupportedSharding
from hyper_parallel.ir import Layout, Strategy

_TENSOR_AXES: Final = ("tp_x", "tp_y")


@dataclass(frozen=True, slots=True)
class Adapter:
    """What an adapted module knows beside its parameters: factor of the product, and share of inputs dropped."""

    scaling: float
    dropout: float


def adapt(module: nn.Module, a: Tensor, b: Tensor, adapter: Adapter) -> None:
    """Give a linear module an adapter of A [r, in] and B [out, r]; its own parameters stay as they are.

    Args:
        module: One of `linear_maps`.
        a: A.
        b: B.
        adapter: Scaling and dropout.
    """
    module.register_parameter(LORA_A, nn.Parameter(a.detach()))
    module.register_parameter(LORA_B, nn.Parameter(b.detach()))
    module.__dict__["adapter"] = adapter
    module.forward = partial(_forward, module)


def has_adapters(model: nn.Module) -> bool:
    """Whether some module of a model has an adapter."""
    return next(adapted(model), None) is not None


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of everything that has an adapter."""
    for name, module in model.named_modules():
        if LORA_A in module._parameters:
            yield canonical_name(name), module


def delta(
    module: nn.Module, x: Tensor, a: Tensor, b: Tensor, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """Return what an adapter adds to the product of its module.

    Args:
        module: Has an adapter.
        x: Its input, or a part of the features of it.
        a: A, or its columns for these features.
        b: B.
        part: Which part of how many equal ones `x` is, on ranks that draw the same random numbers: every rank draws
            the mask of all features and takes its part.
    """
    adapter: Adapter = module.__dict__["adapter"]
    index, count = part
    if count == 1 or not module.training or adapter.dropout == 0.0:
        x = F.dropout(x, adapter.dropout, module.training)
    else:
        whole = x.new_ones(*x.shape[:-1], count * x.shape[-1])
        x = x * F.dropout(whole, adapter.dropout).chunk(count, -1)[index]
    return F.linear(F.linear(x, a), b) * adapter.scaling


def _forward(module: nn.Module, x: Tensor) -> Tensor:
    plain: Tensor = type(module).forward(module, x)
    return plain + delta(module, x, module.lora_A, module.lora_B)


def adapter_layouts(
    model: nn.Module, layouts: dict[str, Layout], strategy: Strategy
) -> dict[str, Layout]:
    """Layouts of all adapters, from those of the weights they belong to.

    Raises:
        UnsupportedSharding: HP205 for experts, whose ranks are others than those of the rest of the model, and where
            weights are moved between tensor-parallel ranks.
        NotDivisible: HP203 when data-parallel ranks would have to cut the rank of an adapter and it does not divide.
    """
    found: dict[str, Layout] = {}
    shapes = (strategy.attention_shape, strategy.mlp_shape)
    # A weight that several modules share has the name of the first one.
    names = {id(p): canonical_name(n) for n, p in base_parameters(model)}
    for name, module in adapted(model):
        if strategy.tp_y > 1 and "weight" in shapes:
            raise UnsupportedSharding(
                "a projection whose weight moves over tp_y has no adapter",
                where=name,
                got=f"attention_shape={shapes[0]}, mlp_shape={shapes[1]}",
                allowed="1d and 2d",
                hint="parallel.attention_shape=2d parallel.mlp_shape=2d",
            )
        weight = layouts[names[id(module.weight)]]
        if weight.one_of or "ep" in weight.sharding_axes:
            raise UnsupportedSharding(
                "adapters of experts are not spread over ranks",
                where=name,
                got=f"layout {weight}",
                allowed="parallel.ep=1, or lora.target_modules without the experts",
                hint="parallel.ep=1",
            )
        # A weight [in, out] of another class than nn.Linear is not cut by tensor parallelism.
        rows, columns = ([a for a in on if a in _TENSOR_AXES] for on in weight.axes)
        parts, rank = weight.parts_of(0), module.lora_A.shape[0]
        shards = strategy.mesh().degree(strategy.fsdp_axes)
        if parts > 1 and rank % shards:
            raise NotDivisible(
                f"{shards} data-parallel ranks do not divide the rank of the adapter",
                where=name,
                got=f"lora.r={rank}",
                changes={"lora.r": -(-rank // shards) * shards},
            )
        whole = Layout.replicated(2)
        found[f"{name}.{LORA_A}"] = whole.split(1, *columns).split(0, *strategy.fsdp_axes)
        b = whole.stack(0, parts) if parts > 1 else whole
        b = b.split(0, *rows).split(1 if parts > 1 else 0, *strategy.fsdp_axes)
        found[f"{name}.{LORA_B}"] = b
    return found


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int, *, gaussian: bool = False) -> None:
    """B is 0; A is drawn as peft draws it, a function of seed and module name on every layout.

    Args:
        model: Holds storage; changed in place.
        seed: Of the run.
        gaussian: A normal distribution of standard deviation 1/r in place of a uniform one.
    """
    tensors = {canonical_name(n): t for n, t in named_tensors(model).items() if is_adapter(n)}
    for name, module in adapted(model):
        full = torch.empty(module.lora_A.shape, dtype=torch.float32)
        own = torch.Generator().manual_seed(module_seed(seed, f"{name}.{LORA_A}"))
        uniform = nn.init.kaiming_uniform_
        full.normal_(std=1 / len(full), generator=own) if gaussian else uniform(
            full, 5**0.5, generator=own
        )
        copy_full(tensors[f"{name}.{LORA_A}"], full, name)
        copy_full(tensors[f"{name}.{LORA_B}"], torch.zeros(module.lora_B.shape), name)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add every adapter of a model of plain tensors to its weight, and take it away.

    Raises:
        UnsupportedSharding: HP205 for a weight that other modules use too.
    """
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    for name, module in [*adapted(model)]:
        if owners[id(module.weight)] > 1:
            raise UnsupportedSharding(
                "an adapter cannot be added to a weight that several modules share",
                where=name,
                allowed="an export without --merge",
                hint="hyper-parallel checkpoint export RUN_DIR",
            )
        product = module.lora_B @ module.lora_A * module.__dict__.pop("adapter").scaling
        product = product if weight_order(module) == OUT_IN else product.t()
        module.weight += product.to(module.weight.dtype)
        for name in (LORA_A, LORA_B):
            del module._parameters[name]
        del module.forward

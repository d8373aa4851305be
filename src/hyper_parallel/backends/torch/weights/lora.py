"""Low-rank adapters as parameters of the linear modules that they adapt.

    y = x W^T + scaling * dropout(x) A^T B^T        W [out, in] frozen, A [r, in], B [out, r]

`lora_A` and `lora_B` are parameters of the linear module itself, so that all other names of the model are unchanged for
plans, weight files and exports. Tensor parallelism shards A like the columns of W, and B like its rows. The product is
then partial, or sharded, exactly like the product of W. If a tensor-parallel axis shards only one factor, the gradients
of the other factor are summed over the ranks of this axis.

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

from hyper_parallel.backends.torch.weights.huggingface import model_of_part
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
from hyper_parallel.shard import without_axes
from hyper_parallel.units import round_up

CONFIGURATION: Final = "adapter_config"
"""Attribute of a model with adapters: their `peft.LoraConfig`."""
_TENSOR_AXES: Final = ("tp_x", "tp_y")


@dataclass(frozen=True, slots=True)
class Adapter:
    """Constants of a low-rank adapter: factor of its product, and dropout rate of its input."""

    scaling: float
    dropout: float


def adapt(module: nn.Module, a: Tensor, b: Tensor, adapter: Adapter) -> None:
    """Add an adapter with the factors A [r, in] and B [out, r] to a module of `linear_maps`."""
    module.register_parameter(LORA_A, nn.Parameter(a.detach()))
    module.register_parameter(LORA_B, nn.Parameter(b.detach()))
    module.__dict__["adapter"] = adapter
    module.forward = partial(_forward, module)


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model, or the complete model that it is a part of, has an adapter."""
    known = CONFIGURATION in model_of_part(model).__dict__
    return known or next(adapted_modules(model), None) is not None


def adapted_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, module) of each module with an adapter."""
    for name, module in model.named_modules():
        if module._parameters.get(LORA_A) is not None:
            yield canonical_name(name), module


def delta(module: nn.Module, x: Tensor, a: Tensor, b: Tensor, part: tuple[int, int] = (0, 1)) -> Tensor:
    """Return the output of an adapter, which is added to the output of its module.

    Args:
        module: A module with an adapter.
        x: Input of the module, or a slice of its features.
        a: Factor A, or its columns for these features.
        b: Factor B.
        part: (index of the slice `x`, number of equal slices of the features), for ranks with equal random numbers.
            Every rank draws the dropout mask of all features and uses its slice of it.
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


def adapter_layouts(model: nn.Module, layouts: dict[str, Layout], strategy: Strategy) -> dict[str, Layout]:
    """Return the layouts of all adapters, derived from the layouts of their weights.

    Raises:
        UnsupportedSharding: HP205 for experts, which have another mesh, and for weights gathered over tp_y.
        NotDivisible: HP203 when FSDP must shard the dim r of an adapter, and its degree does not divide r.
    """
    result: dict[str, Layout] = {}
    keys = ("attention_shape", "mlp_shape")
    shapes = tuple(getattr(strategy, key) for key in keys)
    # In `layouts`, a shared weight has the name of the first module.
    names = {id(p): canonical_name(n) for n, p in base_parameters(model)}
    for name, module in adapted_modules(model):
        if strategy.tp_y > 1 and "weight" in shapes:
            changes = {f"parallel.{key}": "2d" for key in keys if getattr(strategy, key) == "weight"}
            raise UnsupportedSharding(
                "a projection whose weight is gathered over tp_y does not support an adapter",
                where=next(iter(changes)),
                got=f"{name}: attention_shape={shapes[0]}, mlp_shape={shapes[1]}",
                allowed="1d and 2d",
                changes=changes,
            )
        weight = layouts[names[id(module.weight)]]
        if weight.one_of or "ep" in weight.sharding_axes:
            raise UnsupportedSharding(
                "adapters of experts cannot be sharded",
                where="parallel.ep",
                got=f"{name}: layout {weight}",
                allowed="parallel.ep=1, or lora.target_modules without the experts",
                changes=without_axes(strategy, "ep"),
            )
        # Tensor parallelism shards weights [out, in] of nn.Linear only, never [in, out] of other classes.
        rows, columns = ([a for a in axes if a in _TENSOR_AXES] for axes in weight.axes)
        parts, rank = weight.parts_of(0), module.lora_A.shape[0]
        shards = strategy.mesh().degree(strategy.fsdp_axes)
        by_pattern = getattr(vars(model).get(CONFIGURATION), "r", rank) != rank
        if parts > 1 and rank % shards:
            raise NotDivisible(
                f"r of the adapter of `{name}` is not a multiple of the {shards} ranks over which FSDP shards it",
                where="lora.rank_pattern" if by_pattern else "lora.r",
                got=f"r={rank}",
                allowed=f"multiples of {shards}",
                changes=None if by_pattern else {"lora.r": round_up(rank, shards)},
                hint=f"set `{name}` in `lora.rank_pattern` to {round_up(rank, shards)}" if by_pattern else None,
            )
        whole = Layout.replicated(2)
        result[f"{name}.{LORA_A}"] = whole.split(1, *columns).split(0, *strategy.fsdp_axes)
        b = whole.stack(0, parts) if parts > 1 else whole
        b = b.split(0, *rows).split(1 if parts > 1 else 0, *strategy.fsdp_axes)
        result[f"{name}.{LORA_B}"] = b
    return result


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int, *, gaussian: bool = False) -> None:
    """Initialise adapters: B with zeros, A with the distribution of peft, from the seed and the module names only.

    With `gaussian`, A has a normal distribution of standard deviation 1/r instead of a uniform distribution.
    """
    tensors = {canonical_name(n): t for n, t in named_tensors(model).items() if is_adapter(n)}
    for name, module in adapted_modules(model):
        full = torch.empty(module.lora_A.shape, dtype=torch.float32)
        own = torch.Generator().manual_seed(module_seed(seed, f"{name}.{LORA_A}"))
        if gaussian:
            full.normal_(std=1 / len(full), generator=own)
        else:
            nn.init.kaiming_uniform_(full, 5**0.5, generator=own)
        copy_full(tensors[f"{name}.{LORA_A}"], full, name)
        copy_full(tensors[f"{name}.{LORA_B}"], torch.zeros(module.lora_B.shape), name)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Add every adapter of a model of plain tensors to its weight, and remove the adapter.

    Raises:
        UnsupportedSharding: HP205 for a weight shared with other modules.
    """
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    for name, module in [*adapted_modules(model)]:
        if owners[id(module.weight)] > 1:
            raise UnsupportedSharding(
                "an adapter cannot be merged into a weight that several modules share",
                where=name,
                allowed="weights of one module",
                hint="export the adapter without merging it, and run it with peft",
            )
        product = module.lora_B @ module.lora_A * module.__dict__.pop("adapter").scaling
        product = product if weight_order(module) == OUT_IN else product.t()
        module.weight += product.to(module.weight.dtype)
        for name in (LORA_A, LORA_B):
            del module._parameters[name]
        del module.forward
    model.__dict__.pop(CONFIGURATION, None)

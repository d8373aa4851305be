"""Two checks of a step over all ranks: comparison of data-parallel ranks, and search for the first non-finite value.

For the comparison, all data-parallel ranks run the same microbatches and compare checksums. A checksum covers the bits
of the outputs and output gradients of the model and of every decoder layer. Weight gradients are left out, because FSDP
reduces them during backward.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch import forward_backward, handle, local
from hyper_parallel.backends.torch.experts.routing import LayerRouting
from hyper_parallel.errors import RanksDisagree
from hyper_parallel.ir import Plan
from hyper_parallel.runtime import gather_objects

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_ranks(
    model: nn.Module, plan: Plan, microbatches: Sequence[dict[str, Tensor]], tokens: int, step: int
) -> None:
    """Check that data-parallel ranks compute bitwise equal activations and gradients; collective over all ranks.

    All data-parallel ranks pass the same microbatches. The loss is divided by `tokens`, the number of their valid
    tokens. The gradients of the model are cleared.

    Raises:
        RanksDisagree: HP625 on all ranks, naming the ranks that differ from the majority of their data-parallel peers.
            If peers have no majority, all ranks run the check again. Of these peers, the error names the ranks whose
            two results differ or, if there are none, all ranks.
    """
    first = _checksums(model, microbatches, tokens, step)
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(len(first)):
        coordinate = plan.mesh.coordinate(rank)
        groups[tuple(coordinate[axis] for axis in ("pp", "cp", "tp_x", "tp_y"))].append(rank)
    wrong, tied = [], []
    for ranks in groups.values():
        value, votes = Counter(first[rank] for rank in ranks).most_common(1)[0]
        if 2 * votes > len(ranks):
            wrong += [rank for rank in ranks if first[rank] != value]
        else:
            tied += ranks
    reason = "the other ranks agree with one another"
    if tied:
        second = _checksums(model, microbatches, tokens, step)
        wrong += [rank for rank in tied if second[rank] != first[rank]] or tied
        reason = "a repeat on the same rank differs" if set(wrong) < set(tied) else "no majority agrees"
    if wrong:
        names = f"rank{'s' * (len(wrong) > 1)} {', '.join(map(str, sorted(wrong)))}"
        raise RanksDisagree(
            f"{names} computed a bitwise different result than the data-parallel peers from the same microbatch; "
            f"{reason}",
            where=f"step {step}",
            hint=f"exclude the device of {names}, and train again from a checkpoint before this step",
        )


def _checksums(model: nn.Module, microbatches: Sequence[dict[str, Tensor]], tokens: int, step: int) -> list[int]:
    """Run forward and backward with equal random numbers on all ranks; return the checksums of all ranks, by rank."""
    total = torch.zeros((), dtype=torch.int64, device=handle(model).device)

    def add(value: object) -> None:
        if isinstance(value, Tensor) and value.is_floating_point():
            bits = local(value.detach()).contiguous().view(_WORDS[value.element_size()])
            total.mul_(31).add_(bits.to(torch.int64).sum())  # an overflow wraps around

    def watch(_: nn.Module, __: object, output: object) -> None:
        for value in tree_leaves(output):
            add(value)
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(add)

    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [m for m in model.modules() if type(m).__name__ in names or m is model]
    hooks = [layer.register_forward_hook(watch) for layer in layers]
    torch.manual_seed(step)  # equal dropout masks on all ranks
    try:
        forward_backward(model, microbatches, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    model.zero_grad(set_to_none=True)
    attached = handle(model)
    if attached.experts is not None:  # discard the token counts of this check
        attached.experts.layers.update({name: LayerRouting() for name in attached.experts.layers})
    if attached.balance is not None:
        attached.balance.mean()
    values = torch.zeros(attached.plan.strategy.world_size, dtype=torch.int64, device=total.device)
    values[attached.ranks.rank] = total
    if len(values) > 1:
        dist.all_reduce(values)
    checksums: list[int] = values.tolist()
    return checksums


def first_not_finite(model: nn.Module, rerun: Callable[[], Any], stage: int) -> str | None:
    """Find the first tensor of a step with NaN or infinity; collective, with the same result on all ranks.

    If all parameters are finite, `rerun` repeats forward and backward with the same random numbers. The gradients of
    the model are cleared. `stage` is the pipeline stage of this rank.

    Returns:
        Description of the tensor and its rank; None if all parameters, module outputs and gradients are finite.
    """
    hits: list[tuple[int, str]] = []

    def note(order: int, what: str, value: Any) -> None:
        if not hits and isinstance(value, Tensor) and value.is_floating_point():
            value = local(value.detach())
            if not torch.isfinite(value).all():
                kind = "NaN" if torch.isnan(value).any() else "infinity"
                hits.append((order, f"{what} has {kind}"))

    def watch(name: str, _: nn.Module, __: Any, output: Any) -> None:
        for value in tree_leaves(output):
            note(1, f"the output of module `{name}` in forward", value)
            if isinstance(value, Tensor) and value.requires_grad:
                what = f"the gradient of the output of module `{name}` in backward"
                value.register_hook(partial(note, 2, what))

    for name, parameter in model.named_parameters():
        note(0, f"parameter `{name}`, before the step,", parameter)
    if not any(gather_objects(bool(hits))):
        hooks = [m.register_forward_hook(partial(watch, n or "the model")) for n, m in model.named_modules()]
        try:
            rerun()
        finally:
            for hook in hooks:
                hook.remove()
        for name, parameter in model.named_parameters():
            note(3, f"the gradient of parameter `{name}`", parameter.grad)
    model.zero_grad(set_to_none=True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    # Forward starts at the first pipeline stage, backward at the last.
    own = [(order, -stage if order > 1 else stage, rank, what) for order, what in hits]
    first = min((one for each in gather_objects(own) for one in each), default=None)
    return None if first is None else f"{first[3]} (rank {first[2]})"

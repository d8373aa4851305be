"""Muon optimizer for linear weights, with AdamW for all other parameters.

A parameter may stack several linear weights, for example those of all experts in a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.parameter_roles import ParameterKind, ParameterRole
from hyper_parallel.backends.torch.weights.shard_ranges import local

MATRICES: Final = "num_matrices"
"""Key of a parameter group: number of linear weights that each parameter stacks; 0: AdamW updates the group."""
_MOMENTUM: Final = "momentum_buffer"


def muon_groups(groups: list[dict[str, Any]], roles: dict[nn.Parameter, ParameterRole]) -> list[dict[str, Any]]:
    """Return the groups, split so that all parameters of a group stack the same number of linear weights.

    Muon updates the groups with at least one linear weight per parameter, AdamW the other groups.
    """
    result = []
    for group in groups:
        counts = {p: roles[p].num_matrices for p in group["params"]}
        for count in sorted({*counts.values()}, reverse=True):
            params = [p for p in group["params"] if counts[p] == count]
            result.append({**group, "params": params, "muon": count > 0, MATRICES: count})
    # A pipeline rank may have no trained parameters.
    return result or [{**groups[0], "muon": False, MATRICES: 0}]


def describe_muon(roles: dict[str, ParameterRole]) -> str:
    """Return a log line: number of linear weights that Muon updates, and the parameters that AdamW updates."""
    stacked = [r for r in roles.values() if r.kind is ParameterKind.STACKED]
    single = sum(r.kind is ParameterKind.LINEAR for r in roles.values())
    rest = {r.kind for r in roles.values()} - {ParameterKind.LINEAR, ParameterKind.STACKED}
    text = f"muon: {single} linear weights"
    if stacked:
        text += f" and {sum(r.num_matrices for r in stacked)} in {len(stacked)} stacked parameters"
    other_names = [name for name, r in roles.items() if r.kind is ParameterKind.OTHER]
    text += f"; adamw: {', '.join(sorted(rest - {ParameterKind.OTHER}))}"
    return text + (f", and {', '.join(other_names[:3])}{' ...' * (len(other_names) > 3)}" if other_names else "")


class Muon(torch.optim.Optimizer):
    """Optimizer that applies Muon to linear weights and AdamW to other parameters, with the same learning rate.

    Each linear weight of a stacked parameter is orthogonalised separately. Source: Jordan et al. 2024, Muon. By
    default, the updates are scaled to the root mean square of AdamW updates (Liu et al., arXiv:2502.16982), so learning
    rates tuned for AdamW apply.

    Args:
        groups: Groups of parameters, as returned by `muon_groups`.
        lr: Learning rate.
        betas: Decay rates of AdamW's moments.
        eps: Epsilon of AdamW.
        options: Further arguments of `torch.optim.Muon`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        **options: Any,
    ) -> None:
        options = {"adjust_lr_fn": "match_rms_adamw", **options}
        # The two torch optimizers validate their options here; `step` replaces their parameters.
        unused = nn.Parameter(torch.empty(1, 1))
        self._muon = torch.optim.Muon([unused], lr=lr, **options)
        self._adamw = torch.optim.AdamW([unused], lr=lr, betas=betas, eps=eps)
        defaults = {True: self._muon.defaults, False: self._adamw.defaults}
        super().__init__([{**defaults[g["muon"]], **g} for g in groups], {"lr": lr})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters; return the loss computed by `closure`, or None without a closure."""
        loss = None if closure is None else closure()
        self._adamw.param_groups = [g for g in self.param_groups if not g["muon"]]
        self._adamw.state = self.state
        self._adamw.step()
        for group in self.param_groups:
            if group["muon"]:
                matrices = [m for p in group["params"] for m in self._matrices(p, group)]
                self._muon.param_groups = [{**group, "params": matrices}]
                self._muon.step()
                self._muon.state.clear()
        return loss

    def _matrices(self, parameter: nn.Parameter, group: dict[str, Any]) -> Iterator[nn.Parameter]:
        """Yield a view of each linear weight in `parameter`, with gradient and momentum; nothing without a gradient."""
        if parameter.grad is None:
            return
        state = self.state[parameter]
        if _MOMENTUM not in state:
            state[_MOMENTUM] = torch.zeros_like(parameter.detach())
        tensors = (parameter.detach(), parameter.grad.contiguous(), state[_MOMENTUM])
        views = (_split_rows(local(t), group[MATRICES]) for t in tensors)
        for weight, grad, momentum in zip(*views, strict=True):
            matrix = nn.Parameter(weight)
            matrix.grad = grad
            self._muon.state[matrix] = {_MOMENTUM: momentum}
            yield matrix


def _split_rows(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """Split a tensor [count, rows, columns] or [count * rows, columns] into views of `count` matrices."""
    return tensor.view(count, -1, tensor.shape[-1]).unbind(0)

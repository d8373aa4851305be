"""The optimizer of a recipe: one of torch's by name, or a class of the user by its dotted path."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyper_parallel.backends.torch._token_scores import head_of
from hyper_parallel.backends.torch.weights._ranges import local
from hyper_parallel.config import Recipe, Training
from hyper_parallel.errors import BadValue, Contradiction
from hyper_parallel.ir import Plan
from hyper_parallel.trainer._user_code import load_class

_MATRIX_WISE: Final = ("adafactor", "muon")
"""Optimizers that need a whole matrix: what they compute of a shard is something else."""


class Muon(torch.optim.Optimizer):
    """Muon for the hidden matrices, AdamW for embeddings, the head and vectors, with one learning rate.

    Source: Jordan et al. 2024, Muon; updates are scaled to the root mean square of AdamW's as in Liu et al.,
    arXiv:2502.16982, so that a learning rate of AdamW fits.

    Args:
        groups: Groups of parameters; those with `muon: True` hold hidden matrices.
        lr: Learning rate.
        betas: Moments of AdamW.
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
        super().__init__(groups, {"lr": lr})
        mine = [g for g in self.param_groups if g["muon"]]
        rest = [g for g in self.param_groups if not g["muon"]]
        options = {"adjust_lr_fn": "match_rms_adamw", **options}
        self._parts = [torch.optim.Muon(mine, lr=lr, **options)] if mine else []
        self._parts += [torch.optim.AdamW(rest, lr=lr, betas=betas, eps=eps)] if rest else []
        self.param_groups = [g for part in self._parts for g in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters, by the groups and the state that this optimizer has now."""
        loss = None if closure is None else closure()
        for part in self._parts:
            muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [g for g in self.param_groups if g["muon"] == muon]
            part.state = self.state
            part.step()
        return loss


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups by number of dims: matrices are decayed; vectors (norm weights, biases) are not.

    The number of dims is the logical one, so the groups are the same on every layout.
    """
    matrices, vectors = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # A pipeline rank may hold nothing that is trained.
    return [group for group in groups if group["params"]] or groups[:1]


def build_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """The recipe's optimizer; AdamW with decoupled decay (Loshchilov and Hutter, arXiv:1711.05101) where it names none.

    Adam and AdamW are fused, so that the device decides whether a step is applied.
    """
    name, groups = training.optimizer, parameter_groups(model, training.weight_decay)
    given: dict[str, Any] = {"lr": training.lr}
    if name in ("adamw", "adam", "muon"):
        given |= {"betas": training.betas, "eps": training.eps}
    if name in ("adamw", "adam"):  # torch has no sharding rule for the fused SGD
        given["fused"] = True
    if name == "muon":
        groups = _hidden_apart(model, groups)
    return optimizer_class(name)(groups, **(given | training.optimizer_args))


def optimizer_class(name: str, where: str = "training.optimizer") -> Any:
    """The class of a name or of a dotted path.

    Raises:
        BadValue: HP102 for a name that is not known.
        NotImportable: HP109 for a path without an optimizer.
    """
    known = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adafactor": torch.optim.Adafactor,
        "muon": Muon,
    }
    if name in known:
        return known[name]
    if "." not in name:
        allowed = [*known, "the dotted path of a subclass of torch.optim.Optimizer"]
        raise BadValue(
            "there is no optimizer of this name",
            where=where,
            got=name,
            allowed=allowed,
            hint="set `training.optimizer=adamw`",
        )
    return load_class(name, torch.optim.Optimizer, where)


def check_optimizer(recipe: Recipe, plan: Plan, where: Callable[[str], str]) -> None:
    """Refuse an optimizer that does not exist, does not take its arguments, or cannot do with the layout.

    Raises:
        BadValue: HP102, NotImportable: HP109, Contradiction: HP104.
    """
    training, s = recipe.training, plan.strategy
    name, key = training.optimizer, where("training.optimizer")
    optimizer_class(name, key)
    sharding = {"dp_shard": s.dp_shard, "cp": s.cp, "tp": s.tp_x * s.tp_y, "ep": s.ep}
    cut = [f"{axis}={degree}" for axis, degree in sharding.items() if degree > 1]
    if name in _MATRIX_WISE and cut:
        raise Contradiction(
            f"{name} needs whole matrices, and the layout shards them",
            where=key,
            got=f"optimizer={name}, {', '.join(cut)}",
            allowed="pp and dp_replicate; or an optimizer that works element by element: adamw, adam, sgd",
            hint="set `training.optimizer=adamw`",
        )
    if training.dtype == "float16" and plan.model.num_active_params != plan.model.num_params:
        raise Contradiction(
            "the loss scale of float16 does not reach the balancing loss of experts",
            where=where("training.dtype"),
            got="float16 and a mixture of experts",
            hint="set `training.dtype=bfloat16`",
        )
    if recipe.offload.on and name != "adamw":
        raise Contradiction(
            "offload plans the steps of adamw only",
            where=key,
            got=f"optimizer={name} with offload",
            hint="set `training.optimizer=adamw`",
        )
    try:
        build_optimizer(nn.Linear(2, 2), training)
    except (TypeError, ValueError) as error:
        allowed = [*inspect.signature(optimizer_class(name)).parameters][1:]
        raise BadValue(
            f"{name} does not take its arguments: {error}",
            where=where("training.optimizer_args"),
            got=training.optimizer_args,
            allowed=allowed,
            hint="set `training.optimizer_args={}`",
        ) from error


def _hidden_apart(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups, each parted by whether Muon is for it: matrices that are neither embedding nor head."""
    ends = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = head_of(model)
    ends |= set() if head is None else set(head.parameters())
    parted = []
    for group in groups:
        for muon in (True, False):
            chosen = [p for p in group["params"] if (p.ndim == 2 and p not in ends) == muon]
            parted.append({**group, "params": chosen, "muon": muon})
    return [group for group in parted if group["params"]] or parted[:1]


def set_lr(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """Give every group the learning rate of the coming step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class _OnShards(TorchFunctionMode):
    """Gives the fused kernels local parts: DTensor looks for a layout of every list first, for longer than they run."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch._fused_adam_, torch._fused_adamw_):
            args = tuple([local(tensor) for tensor in tensors] for tensors in args)
        return func(*args, **(kwargs or {}))


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
    """Update the parameters; where `skip` is true nothing changes, decided on the device without a host read.

    Fused optimizers of torch read the attribute `found_inf` (as `torch.amp.GradScaler` sets it) in their kernels. For
    any other the host reads `skip` before the update.

    Args:
        optimizer: The optimizer.
        skip: Scalar on the parameters' device; None: always update.
    """
    if skip is None:
        with _OnShards():
            optimizer.step()
        return
    if not optimizer.defaults.get("fused"):
        if not skip.item():
            optimizer.step()
        return
    optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
    try:
        with _OnShards():
            optimizer.step()
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]

"""Optimizer of a recipe: a named optimizer, or a user class by its dotted path."""

from __future__ import annotations

import difflib
import inspect
import json
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hyper_parallel.backends.torch.parameter_roles import UNDECAYED, ParameterRole, parameter_roles
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.config import Recipe, Training
from hyper_parallel.errors import BadValue, CheckpointMismatch, Contradiction, MissingDependency
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.engine.muon import Muon, describe_muon, muon_groups
from hyper_parallel.trainer.engine.optimizer_trial import check_trial_step, resumed_failure
from hyper_parallel.trainer.user_code import load_class

logger = logging.getLogger(__name__)


_LIKE_ADAM: Final = {
    "adamax": "torch.optim.Adamax",
    "nadam": "torch.optim.NAdam",
    "radam": "torch.optim.RAdam",
    "adamw_torch_4bit": "torchao.optim.AdamW4bit",
    "adamw_torch_8bit": "torchao.optim.AdamW8bit",
    "adamw_torch_fp8": "torchao.optim.AdamWFp8",
    "adamw_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "adam_8bit": "bitsandbytes.optim.Adam8bit",
    "paged_adamw": "bitsandbytes.optim.PagedAdamW",
    "paged_adamw_32bit": "bitsandbytes.optim.PagedAdamW32bit",
    "paged_adamw_8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "lamb": "bitsandbytes.optim.LAMB",
}
"""Optimizers that take `betas` and `eps` as Adam does: dotted path by short name."""
NAMED_OPTIMIZERS: Final = {
    **_LIKE_ADAM,
    "adadelta": "torch.optim.Adadelta",
    "adagrad": "torch.optim.Adagrad",
    "rmsprop": "torch.optim.RMSprop",
    "ademamix": "bitsandbytes.optim.AdEMAMix",
    "ademamix_8bit": "bitsandbytes.optim.AdEMAMix8bit",
    "paged_ademamix_32bit": "bitsandbytes.optim.PagedAdEMAMix32bit",
    "paged_ademamix_8bit": "bitsandbytes.optim.PagedAdEMAMix8bit",
    "lion": "bitsandbytes.optim.Lion32bit",
    "lion_32bit": "bitsandbytes.optim.Lion32bit",
    "lion_8bit": "bitsandbytes.optim.Lion8bit",
    "paged_lion_32bit": "bitsandbytes.optim.PagedLion32bit",
    "paged_lion_8bit": "bitsandbytes.optim.PagedLion8bit",
    "rmsprop_bnb": "bitsandbytes.optim.RMSprop",
    "rmsprop_bnb_8bit": "bitsandbytes.optim.RMSprop8bit",
    "rmsprop_bnb_32bit": "bitsandbytes.optim.RMSprop32bit",
    "sgd_8bit": "bitsandbytes.optim.SGD8bit",
}
"""Dotted paths of optimizers by short name; `optimizer_class` reports a missing package."""


class Adafactor(torch.optim.Adafactor):
    """Adafactor of torch, applied to the local shards of parameters and states.

    DTensor has no sharding rule for Adafactor's in-place row and column norms. Parameters must therefore be replicated:
    the local tensor is then the full matrix, and every rank computes the same update.
    """

    def _init_group(self, group: dict[str, Any], *tensors: Any) -> bool:
        has_complex: bool = super()._init_group(group, *tensors)  # type: ignore[misc]
        for collected in tensors:
            collected[:] = [None if tensor is None else local(tensor) for tensor in collected]
        return has_complex


_NEED_FULL_MATRICES: Final = (torch.optim.Adafactor, torch.optim.Muon, Muon)
"""Optimizers, with subclasses, that need full matrices: their update of a shard differs from the full update."""


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trained parameters as optimizer groups: a group with weight decay and a group without.

    Norms, biases, vectors and state-space parameters have no weight decay. The split depends on module types, names and
    unsharded shapes, so it is the same on every layout. Empty groups are omitted; if both are empty, the group with
    weight decay is returned.
    """
    decayed, undecayed = [], []
    for name, role in trained_roles(model).items():
        group = undecayed if role.kind in UNDECAYED else decayed
        group.append(model.get_parameter(name))
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    # A pipeline rank may have no trained parameters.
    return [group for group in groups if group["params"]] or groups[:1]


def trained_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role (linear weight, norm, bias, ...) of each trained parameter by name."""
    roles = parameter_roles(model)
    return {name: roles[name] for name, p in model.named_parameters() if p.requires_grad}


def build_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Return the recipe's optimizer; by default AdamW (Loshchilov and Hutter, arXiv:1711.05101).

    Adam and AdamW use torch's fused kernels, which can skip a step by a flag on the device (see `step_unless`).
    """
    name, groups = training.optimizer, parameter_groups(model, training.weight_decay)
    options: dict[str, Any] = {"lr": training.lr}
    if name in ("adamw", "adam", "muon", *_LIKE_ADAM):
        options |= {"betas": training.betas, "eps": training.eps}
    if name in ("adamw", "adam"):  # torch has no sharding rule for the fused SGD
        options["fused"] = True
    if name == "muon":
        roles = trained_roles(model)
        groups = muon_groups(groups, {model.get_parameter(n): role for n, role in roles.items()})
    return optimizer_class(name)(groups, **(options | training.optimizer_args))


def optimizer_class(name: str, where: str = "training.optimizer") -> Any:
    """Return the optimizer class for a short name or a dotted path.

    Raises:
        BadValue: HP102 for an unknown short name.
        MissingDependency: HP501 when the package of a named optimizer is not installed.
        NotImportable: HP109 for a dotted path that is not an optimizer class.
    """
    known = {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "adafactor": Adafactor,
        "muon": Muon,
    }
    if name in known:
        return known[name]
    if name in NAMED_OPTIMIZERS:
        path = NAMED_OPTIMIZERS[name]
        package = path.partition(".")[0]
        if find_spec(package) is None:
            of_torch = [n for n, p in NAMED_OPTIMIZERS.items() if p.startswith("torch.")]
            raise MissingDependency(
                f"the optimizer {name} is in the package `{package}`, which is not installed",
                where=where,
                got=f"optimizer={name}",
                allowed=f"an optimizer of torch: {', '.join([*known, *of_torch])}",
                hint=f"pip install {package}",
            )
        return load_class(path, torch.optim.Optimizer, where)
    if "." not in name:
        near = difflib.get_close_matches(name.lower(), [*known, *NAMED_OPTIMIZERS], n=1)
        allowed = [
            *known,
            *NAMED_OPTIMIZERS,
            "the dotted path of a subclass of torch.optim.Optimizer",
        ]
        raise BadValue(
            f"unknown optimizer `{name}`",
            where=where,
            got=name,
            allowed=allowed,
            hint=f"set `training.optimizer={near[0] if near else 'adamw'}`",
        )
    loaded = load_class(name, torch.optim.Optimizer, where)
    return Adafactor if loaded is torch.optim.Adafactor else loaded


def check_optimizer(recipe: Recipe, plan: Plan, where: Callable[[str], str], model: nn.Module) -> None:
    """Check that the recipe's optimizer exists, accepts its arguments and supports the layout.

    For Muon, also log which parameters Muon and AdamW update.

    Raises:
        BadValue, MissingDependency, NotImportable: See `optimizer_class`; also HP102 for an invalid argument.
        Contradiction: HP104 for an optimizer that does not support the layout or offload, for float16 with experts, or
            for an optimizer that fails in a trial step.
        RankFailed: HP601 when the trial step crashes its process or hangs.
    """
    training, s = recipe.training, plan.strategy
    name, key = training.optimizer, where("training.optimizer")
    chosen = optimizer_class(name, key)
    sharding = {"dp_shard": s.dp_shard, "cp": s.cp, "tp": s.tp_x * s.tp_y, "ep": s.ep}
    sharded_axes = [f"{axis}={degree}" for axis, degree in sharding.items() if degree > 1]
    if issubclass(chosen, _NEED_FULL_MATRICES) and sharded_axes:
        raise Contradiction(
            f"{name} needs unsharded matrices, but the layout shards them",
            where=key,
            got=f"optimizer={name}, {', '.join(sharded_axes)}",
            allowed="only pp and dp_replicate, or an element-wise optimizer: adamw, adam, sgd",
            hint=_adamw_hint(training),
        )
    if training.dtype == "float16" and plan.model.num_active_params != plan.model.num_params:
        raise Contradiction(
            "float16 loss scaling does not support the load-balancing loss of experts",
            where=where("training.dtype"),
            got="float16 and a mixture of experts",
            hint="set `training.dtype=bfloat16`",
        )
    if recipe.offload.on and name != "adamw":
        raise Contradiction(
            "offload supports the optimizer adamw only",
            where=key,
            got=f"optimizer={name} with offload",
            hint=_adamw_hint(training),
        )
    try:
        build_optimizer(nn.Linear(2, 2), training)
    except (TypeError, ValueError) as error:
        raise BadValue(
            f"{name} rejects its arguments: {error}",
            where=where("training.optimizer_args") if training.optimizer_args else key,
            got=training.optimizer_args or name,
            allowed=[*inspect.signature(optimizer_class(name)).parameters][1:],
            hint="set `training.optimizer_args={}`" if training.optimizer_args else _adamw_hint(training),
        ) from error
    if name == "muon":
        logger.info(describe_muon(trained_roles(model)))
    if "." in name or name in NAMED_OPTIMIZERS:
        check_trial_step(
            lambda layer: build_optimizer(layer, training),
            name,
            key,
            _adamw_hint(training),
            sharded=bool(sharded_axes),
            replicated=s.dp_replicate > 1,
        )


def _adamw_hint(training: Training) -> str:
    """Return overrides that select AdamW, without arguments that the recipe sets for another optimizer."""
    return "set `training.optimizer=adamw" + (" training.optimizer_args={}`" if training.optimizer_args else "`")


def check_resumed_state(training: Training, saved_args: dict[str, Any], directory: Path) -> None:
    """Check that the optimizer of a resumed run can continue from the state of an optimizer with `saved_args`.

    Raises:
        CheckpointMismatch: HP702 naming the current and the saved arguments.
    """
    saved_training = training.model_copy(update={"optimizer_args": saved_args})
    failure = resumed_failure(
        lambda layer: build_optimizer(layer, saved_training),
        lambda layer: build_optimizer(layer, training),
    )
    if failure is not None:
        raise CheckpointMismatch(
            f"the optimizer cannot continue from the state in the checkpoint: {failure}",
            where=str(directory),
            got=f"training.optimizer_args={json.dumps(training.optimizer_args)}",
            allowed=json.dumps(saved_args),
            changes={"training.optimizer_args": json.dumps(saved_args)},
        )


def recipe_values(optimizer: torch.optim.Optimizer, training: Training) -> tuple[str, ...]:
    """Return the parameter-group keys whose values a resumed run takes from the recipe, not from the checkpoint."""
    parameters = inspect.signature(type(optimizer).__init__).parameters
    return ("weight_decay", *parameters, *training.optimizer_args)


def set_lr(optimizer: torch.optim.Optimizer, lr: float | Tensor) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


class _OnShards(TorchFunctionMode):
    """Mode that unwraps DTensors for fused Adam kernels, to avoid DTensor's slow dispatch of tensor lists."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch._fused_adam_, torch._fused_adamw_):
            args = tuple([local(tensor) for tensor in tensors] for tensors in args)
        return func(*args, **(kwargs or {}))


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor | None) -> None:
    """Run the optimizer step unless `skip`, a bool scalar on the parameters' device, is True; None: always run it.

    Fused torch optimizers read `skip` on the device, as their attribute `found_inf` (see `torch.amp.GradScaler`). For
    other optimizers the host reads `skip` before the step.
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

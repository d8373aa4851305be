"""Roles of a model's parameters, for optimizer groups, derived from module types, names and unsharded shapes.

    linear        weight of a linear module, [out, in] or [in, out]; matrix of a LoRA adapter
    stacked       several linear weights in one parameter: experts [E, in, out], groups, a block-diagonal map
    embedding     table of an embedding module
    head          weight of the output head
    norm, bias    of any shape: stacked biases [E, F], norms over heads [H, K], tables of relative position biases
    convolution   kernel of a convolution
    state         A_log and D of state-space layers, of any shape
    vector        at most one dimension above 1: sinks, residual scales, gates, class tokens
    other         position tables, latent queries, recurrent cells, weights with unknown names

A parameter shared by several modules has the role `embedding` if one of these modules is an embedding, else the role
from the first module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from torch import Tensor, nn

from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.backends.torch.weights.initialization import is_adapter


class ParameterKind(StrEnum):
    """Kind of a parameter; see the module docstring."""

    LINEAR = "linear"
    STACKED = "stacked"
    EMBEDDING = "embedding"
    HEAD = "head"
    NORM = "norm"
    BIAS = "bias"
    CONVOLUTION = "convolution"
    STATE = "state"
    VECTOR = "vector"
    OTHER = "other"


UNDECAYED: Final = (
    ParameterKind.NORM,
    ParameterKind.BIAS,
    ParameterKind.STATE,
    ParameterKind.VECTOR,
)
"""Kinds of parameters without weight decay."""


@dataclass(frozen=True, slots=True)
class ParameterRole:
    """Role of one parameter.

    Attributes:
        kind: Kind of the parameter.
        num_matrices: Number of linear weights in the parameter; 0 for kinds other than linear and stacked.
    """

    kind: ParameterKind
    num_matrices: int = 0


_FLAT_STACKS: Final[Mapping[str, Callable[[Any], int]]] = {
    "DbrxExpertGLU": lambda module: int(module.moe_num_experts),
    "DeepseekV4GroupedLinear": lambda module: int(module.n_groups),
}
"""Function from a module to the number of matrices stacked along the rows of its 2-D weight, by module class."""
_STATE_NAMES: Final = ("A_log", "D")
_NORM: Final = re.compile(r"norm", re.IGNORECASE)
_NORM_PATH: Final = re.compile(r"(^|_)norm($|_|\d)|layernorm", re.IGNORECASE)
_EXPERTS: Final = re.compile(r"expert", re.IGNORECASE)
_RECURRENT: Final = (nn.RNNBase, nn.RNNCellBase)
_CONVOLUTION: Final = nn.modules.conv._ConvNd


def parameter_roles(model: nn.Module) -> dict[str, ParameterRole]:
    """Return the role of every parameter of a model by name, the same on every layout."""
    head = head_of(model)
    roles: dict[int, ParameterRole] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            role = _role(module, path.rpartition(".")[2], name, parameter)
            if module is head and role.kind is ParameterKind.LINEAR:
                role = ParameterRole(ParameterKind.HEAD)
            if id(parameter) not in roles or role.kind is ParameterKind.EMBEDDING:
                roles[id(parameter)] = role
    return {name: roles[id(parameter)] for name, parameter in model.named_parameters()}


def _role(module: nn.Module, module_name: str, name: str, parameter: Tensor) -> ParameterRole:
    simple = _simple_role(module, module_name, name, parameter)
    if simple is not None:
        return ParameterRole(simple)
    classes = [c.__name__ for c in type(module).__mro__]
    dims = parameter.dim()
    rows = next((_FLAT_STACKS[c](module) for c in classes if c in _FLAT_STACKS), 1)
    named_weight = "weight" in name
    if dims == 2 and (rows > 1 or named_weight or is_adapter(name)):
        return ParameterRole(ParameterKind.LINEAR if rows == 1 else ParameterKind.STACKED, rows)
    if dims == 3 and (named_weight or any(_EXPERTS.search(c) for c in classes)):
        return ParameterRole(ParameterKind.STACKED, parameter.shape[0])
    return ParameterRole(ParameterKind.OTHER)


def _simple_role(module: nn.Module, module_name: str, name: str, parameter: Tensor) -> ParameterKind | None:
    """Return the kind of a parameter that holds no linear weights; None if the parameter may hold some."""
    is_linear = isinstance(module, nn.Linear)
    if "bias" in name or ("bias" in module_name and not is_linear):
        return ParameterKind.BIAS
    if isinstance(module, nn.Embedding):
        return ParameterKind.EMBEDDING if parameter.dim() > 1 else ParameterKind.VECTOR
    if name in _STATE_NAMES:
        return ParameterKind.STATE
    if not isinstance(module, _CONVOLUTION) and not is_linear:
        by_class = _NORM.search(type(module).__name__) or _NORM.search(name)
        if by_class or _NORM_PATH.search(module_name):
            return ParameterKind.NORM
    if isinstance(module, _CONVOLUTION):
        return ParameterKind.CONVOLUTION if parameter.dim() > 1 else ParameterKind.VECTOR
    if isinstance(module, _RECURRENT):
        return ParameterKind.OTHER
    is_weight = is_linear and parameter.dim() == 2
    if not is_weight and sum(size > 1 for size in parameter.shape) <= 1:
        return ParameterKind.VECTOR
    return None

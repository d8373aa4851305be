"""Measure the auxiliary loss of the routers of a transformers model.

The forward of the model's class runs on the CPU with stubs for decoder and head. The stub decoder returns chosen router
logits, so that loss and auxiliary loss are functions of these logits only:

    coefficient   (loss with router logits - loss without) / auxiliary loss
    requested     the loss depends on the logits although the caller does not ask for router logits
    definition    the number k of experts per token for which the load-balancing loss is proportional to the auxiliary
                  loss, for several random logits

No parameter is read, so the model may be on the meta device and of any size. The measured values are those of the given
object, including a coefficient set after construction. The modules with router logits are those declared by the model's
classes (`_can_record_outputs`), otherwise the routers next to the experts.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.forward_variants import KeepFloat64
from hyper_parallel.backends.torch.model_structure import text_config, view_of

FLAG: Final = "output_router_logits"
"""Argument and config key of transformers that adds the loss of the routers."""

_ROUTERS: Final = ("gate", "router")
_TOKENS, _LAYERS, _DRAWS, _MOST_CHOICES = 32, 2, 3, 128  # means over tokens and layers, powers of two, are exact


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """Auxiliary loss of a model's routers, as computed by its class on one device.

    Attributes:
        coefficient: Weight of the auxiliary loss in the model's loss; NaN if it cannot be measured.
        requested: True if the model adds the loss although the caller does not ask for router logits.
        num_experts: Number of experts of a layer; 0 for an unknown definition.
        top_k: Number of experts per token in the definition of the loss.
        scale: Ratio of the auxiliary loss to `load_balance`; 1 for most models.
        product_keys: True if logits are scores [2, T, n] of two keys each, whose sums are the logits of n^2 experts.
        routers: (name, index) of every module with router logits; index: position of the logits in its outputs.
    """

    coefficient: float
    requested: bool
    num_experts: int
    top_k: int
    scale: float
    product_keys: bool
    routers: tuple[tuple[str, int], ...]

    @property
    def known(self) -> bool:
        """True if the definition is the load-balancing loss, which can be computed over ranks."""
        return self.num_experts > 0 and bool(self.routers)


def expert_logits(logits: Tensor, product_keys: bool) -> Tensor:
    """Return router logits reshaped to [T, E].

    With `product_keys` they are scores [2, T, n], and the logit of expert i n + j is score i plus score j: E = n^2.
    """
    if not product_keys:
        return logits.reshape(-1, logits.shape[-1])
    first, second = logits.reshape(2, -1, logits.shape[-1])
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(1)


def router_loss_facts(model: nn.Module) -> RouterLoss | None:
    """Return the measured auxiliary loss of a model's routers; None for a model without such a loss.

    The parameters may be on the meta device.
    """
    if not _takes_flag(type(model)):
        return None
    configured = bool(getattr(text_config(model), FLAG, False))
    unknown = RouterLoss(math.nan, configured, 0, 0, 0.0, False, ())
    stubbed = _with_stubs(model)
    if stubbed is None or getattr(model.config, "is_encoder_decoder", False):
        return unknown  # an encoder has separate routers
    routers, runs, has_loss = tuple(_routers(model)), False, False
    for product_keys in (False, True):
        for size in _sizes(model, routers):
            try:
                measured = _measure(stubbed, size, product_keys)
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
                continue  # wrong size of the logits
            runs = True
            if measured is None:
                continue
            has_loss = True
            coefficient, requested, top_k, scale = measured
            experts = size * size if product_keys else size
            if top_k:
                facts = coefficient, requested, experts, top_k, scale, product_keys, routers
                return RouterLoss(*facts)
            unknown = replace(unknown, coefficient=coefficient, requested=requested)
            if not product_keys:
                return unknown
    return None if runs and not has_loss else unknown


def causal_form(model: nn.Module) -> nn.Module | None:
    """Return the causal language model for the config of `model`, on meta; None if `model` is one, or has none."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    from transformers import AutoModelForCausalLM

    mapped = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if mapped is None or isinstance(model, mapped):
        return None
    with torch.device("meta"):
        causal: nn.Module = AutoModelForCausalLM.from_config(config)
    return causal


def _takes_flag(kind: type[nn.Module]) -> bool:
    parameters = inspect.signature(kind.forward).parameters
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    bases = [base.forward for base in kind.__mro__[1:] if "forward" in vars(base)]
    return FLAG in parameters or (
        has_kwargs and any(FLAG in inspect.signature(forward).parameters for forward in bases)
    )


class _Stub(nn.Module):
    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original
        self.__dict__["value"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["value"]


class _DecoderOutput:
    """Output of the stub decoder: hidden states, router logits for attributes named `*router*`, None for all others."""

    def __init__(self, logits: tuple[Tensor, ...]) -> None:
        self.last_hidden_state = torch.zeros(1, _TOKENS, 1, dtype=torch.float64)
        self.router_logits = logits

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["router_logits"] if "router" in name else None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state, self.router_logits)[index]


def _with_stubs(model: nn.Module) -> nn.Module | None:
    """Return a copy of the root module with stubs for decoder and head; None if it has no such children."""
    prefix = getattr(model, "base_model_prefix", "")
    base, head = model._modules.get(prefix), getattr(model, "get_output_embeddings", lambda: None)()
    names = [n for n, m in model._modules.items() if m is not None and (m is base or m is head)]
    if base is None or head is None or len(names) != 2:
        return None
    stubbed = copy.copy(model)
    modules = {n: _Stub(m) if n in names else m for n, m in model._modules.items() if m}
    stubbed.__dict__.update(_modules=modules, _parameters={}, _forward_hooks={}, _forward_pre_hooks={})
    stubbed.__dict__.pop("forward", None)
    for name in names:
        modules[name].__dict__["value"] = torch.zeros(1, _TOKENS, 2, dtype=torch.float64)
    modules[prefix].__dict__["is_decoder_stub"] = True
    stubbed.loss_function = lambda *_, **__: torch.zeros((), dtype=torch.float64)
    return stubbed


def _run(stubbed: nn.Module, logits: tuple[Tensor, ...], **flag: bool) -> tuple[Tensor, Any]:
    for child in stubbed._modules.values():
        if child is not None and child.__dict__.get("is_decoder_stub"):
            child.__dict__["value"] = _DecoderOutput(logits)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    with torch.enable_grad(), KeepFloat64():
        out = type(stubbed).forward(stubbed, input_ids=ids, labels=ids, **flag)  # type: ignore[attr-defined]
    return out.loss, getattr(out, "aux_loss", None)


def _measure(stubbed: nn.Module, size: int, product_keys: bool) -> tuple[float, bool, int, float] | None:
    """Return (coefficient, requested, top_k, scale), see `RouterLoss`; None if there is no auxiliary loss.

    An unknown definition of the loss has top_k 0.

    The auxiliary loss is divided by the load-balancing loss of every k, for several random logits. The k whose ratio is
    the same for all of them is top_k, and this ratio is the scale. If the model does not output the auxiliary loss, its
    weighted loss is used: the ratio is the coefficient, which is NaN without such a k, and the scale is 1.

    Raises:
        RuntimeError, IndexError: From the model's code, for a wrong `size`.
    """
    generator = torch.Generator().manual_seed(7)
    shape = (2, _TOKENS, size) if product_keys else (_TOKENS, size)
    losses, ratios = [], []  # ratios: [k] per draw
    for _ in range(_DRAWS):
        logits = tuple(
            torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(_LAYERS)
        )
        loss_with, aux = _run(stubbed, logits, **{FLAG: True})
        loss_without, _ = _run(stubbed, logits, **{FLAG: False})
        loss_default, _ = _run(stubbed, logits)
        added = loss_with - loss_without
        has_aux_output = isinstance(aux, Tensor)
        aux = aux if has_aux_output else added
        if not aux.requires_grad:
            return None
        aux, added = aux.detach(), added.detach()
        losses.append((float(added / aux), bool(loss_default.requires_grad)))
        by_top_k = _load_balance_by_top_k([expert_logits(x.detach(), product_keys) for x in logits])
        ratios.append(float(aux) / by_top_k)
    coefficient, requested = losses[0]
    by_draw = torch.stack(ratios)  # [draws, k]
    equal = ((by_draw - by_draw[0]).abs() <= 1e-9 * by_draw[0].abs()).all(0).nonzero().flatten()
    if len(equal) != 1:
        return coefficient if has_aux_output else math.nan, requested, 0, 0.0
    top_k = int(equal) + 1
    ratio = float(by_draw[0, int(equal)])
    if not has_aux_output:  # only the weighted loss is measurable
        coefficient, ratio = ratio, 1.0
    scale = float(Fraction(ratio).limit_denominator(_MOST_CHOICES))
    return float(f"{coefficient:.12g}"), requested, top_k, scale


def load_balance(load: Tensor, probability: Tensor, number: Tensor) -> Tensor:
    """Return E * sum_e f_e P_e, with f = `load` / `number` and P = `probability` / `number`.

    Args:
        load: Number of rows of each expert [E].
        probability: Sum of the probabilities of each expert [E].
        number: Number of (layer, token) pairs.
    """
    return len(load) * (load * probability).sum() / number.square()


def _load_balance_by_top_k(layers: list[Tensor]) -> Tensor:
    """Return a tensor of the load-balancing losses for k = 1, 2, ..., given the logits [T, E] of each layer."""
    probabilities = torch.cat([layer.softmax(-1) for layer in layers])
    number, experts = probabilities.shape
    most = min(experts, _MOST_CHOICES)
    order = probabilities.topk(most, dim=-1).indices
    load = torch.zeros(experts, dtype=torch.float64)
    losses = []
    for k in range(most):
        load = load + torch.bincount(order[:, k], minlength=experts)
        losses.append(load_balance(load, probabilities.sum(0), torch.tensor(float(number))))
    return torch.stack(losses)


def _sizes(model: nn.Module, routers: tuple[tuple[str, int], ...]) -> list[int]:
    """Return candidate sizes of the last dim of router logits: sizes of router weights, then integers of the config."""
    weights = model.get_submodule(routers[0][0]).parameters() if routers else ()
    rows = [size for p in weights for size in (p.shape[0], p.shape[0] // 2)]
    values = (v for v in tree_leaves(model.config.to_dict()) if isinstance(v, int))
    return [size for size in dict.fromkeys([*rows, *values]) if 2 <= size <= 4096]


def _routers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield (name, index) of each decoder module with router logits; index: their position in its outputs."""
    view = view_of(model)
    if view.base is None:
        return
    within = view.path
    declared = list(_declared(model, "", ()))
    if any(declares for _, declares in declared):
        for (name, module), tasks in declared:
            for target, index, layer in tasks:
                dotted = f".{name}."
                if not name.startswith(f"{within}.") or not isinstance(module, target):
                    continue
                if layer is None or f".{layer.strip('.')}." in dotted:
                    yield name, index
        return
    for name, module in model.named_modules():
        if name.startswith(f"{within}.") and name.rpartition(".")[2] in _ROUTERS:
            parent = model.get_submodule(name.rpartition(".")[0])
            if hasattr(parent, "experts") and next(module.parameters(), None) is not None:
                yield name, 0


_Task = tuple[type, int, str | None]


def _declared(
    model: nn.Module, name: str, tasks: tuple[_Task, ...]
) -> Iterator[tuple[tuple[str, nn.Module], tuple[_Task, ...]]]:
    """Yield ((name, module), tasks) for `model` and each of its submodules.

    In transformers, a model class declares in `_can_record_outputs` which submodules return router logits. `tasks` are
    the (module class, output index, layer name) tuples that the nearest enclosing model declares.
    """
    outputs = getattr(type(model), "_can_record_outputs", None)
    if outputs is not None or hasattr(model, "base_model_prefix"):
        specs = (outputs or {}).get("router_logits", [])
        tasks = tuple(
            (getattr(s, "target_class", s), getattr(s, "index", 1), getattr(s, "layer_name", None))
            for s in (specs if isinstance(specs, list) else [specs])
        )
    yield (name, model), tasks
    for child, module in model.named_children():
        yield from _declared(module, f"{name}.{child}" if name else child, tasks)

"""Measure the auxiliary loss that a model of transformers adds for its routers.

The forward of the model's own class runs on the CPU with stand-ins for the decoder and the head. The stand-in decoder
returns router logits of our choice, so that loss and auxiliary loss are functions of these logits alone:

    coefficient   (loss with router logits - loss without) / auxiliary loss
    requested     the loss depends on the logits although the caller asks for nothing
    definition    the k whose load-balancing loss is proportional to the auxiliary loss for several random logits

No parameter is read, so the model may be on the meta device and of any size, and the values are those of this very
object: a coefficient that was set after construction counts. The modules whose outputs the model collects as router
logits are the ones that its classes declare (`_can_record_outputs`), else the routers beside the experts.
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

from hyper_parallel.backends.torch.forward_variants import float64_kept
from hyper_parallel.backends.torch.model_structure import decoder_of, text_config

FLAG: Final = "output_router_logits"
"""Argument and config key by which models of transformers add the loss of their routers."""

_ROUTERS: Final = ("gate", "router")
_TOKENS, _LAYERS, _DRAWS, _MOST_CHOICES = 32, 2, 3, 128  # powers of two: means of counts are exact


@dataclass(frozen=True, slots=True)
class RouterLoss:
    """The auxiliary loss of a model's routers, as its class computes it on one device.

    Attributes:
        coefficient: Weight of the auxiliary loss in the model's loss.
        requested: The model adds it although the caller does not ask for router logits.
        num_experts: Experts of a layer; 0 where the definition is not known.
        top_k: Experts of a token in the definition.
        scale: The auxiliary loss over `load_balance`; 1 for most types.
        product_keys: Logits are [2, T, n] scores of two keys each, whose sums are the logits of n^2 experts.
        routers: Name of every module that gives logits of the loss, and which of its outputs they are.
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
        """Whether the definition is the load-balancing loss, so that it can be computed over ranks."""
        return self.num_experts > 0 and bool(self.routers)


def expert_logits(logits: Tensor, product_keys: bool) -> Tensor:
    """Return [T, E] logits of router logits as a model gives them."""
    if not product_keys:
        return logits.reshape(-1, logits.shape[-1])
    first, second = logits.reshape(2, -1, logits.shape[-1])
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(1)


def router_loss_facts(model: nn.Module) -> RouterLoss | None:
    """Measure the auxiliary loss of a model's routers.

    Args:
        model: Causal or image-text model; parameters are real or on the meta device. It stays as it is.

    Returns:
        The facts; None for a model that adds no such loss.
    """
    if not _takes_flag(type(model)):
        return None
    configured = bool(getattr(text_config(model), FLAG, False))
    unknown = RouterLoss(math.nan, configured, 0, 0, 0.0, False, ())
    hollow = _hollow(model)
    if hollow is None or getattr(model.config, "is_encoder_decoder", False):
        return unknown  # an encoder has routers of its own
    routers, runs = tuple(_routers(model)), False
    for product_keys in (False, True):
        for size in _sizes(model, routers):
            try:
                found = _measure(hollow, size, product_keys)
            except (RuntimeError, IndexError, ValueError, TypeError, AttributeError):
                continue  # logits of another size
            runs = True
            if found is None:
                continue
            coefficient, requested, top_k, scale = found
            experts = size * size if product_keys else size
            if top_k:
                return RouterLoss(
                    coefficient, requested, experts, top_k, scale, product_keys, routers
                )
            unknown = replace(unknown, coefficient=coefficient, requested=requested)
            if not product_keys:
                return unknown
    return None if runs and math.isnan(unknown.coefficient) else unknown


def causal_form(model: nn.Module) -> nn.Module | None:
    """Return the causal language model of a model's config, on the meta device; None when it is one or has none."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    from transformers import AutoModelForCausalLM

    mapped = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if mapped is None or isinstance(model, mapped):
        return None
    with torch.device("meta"):
        found: nn.Module = AutoModelForCausalLM.from_config(config)
    return found


def _takes_flag(kind: type[nn.Module]) -> bool:
    """Return whether a forward takes router logits as an argument, maybe for that of a class it derives from."""
    own = inspect.signature(kind.forward).parameters
    rest = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in own.values())
    bases = [base.forward for base in kind.__mro__[1:] if "forward" in vars(base)]
    return FLAG in own or (
        rest and any(FLAG in inspect.signature(forward).parameters for forward in bases)
    )


class _StandIn(nn.Module):
    """Decoder or head of a hollow model; returns what it was told to."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original
        self.__dict__["value"] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["original"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["value"]


class _DecoderOutput:
    """Output of the stand-in decoder: hidden states, router logits by any name, and None for everything else."""

    def __init__(self, logits: tuple[Tensor, ...]) -> None:
        self.last_hidden_state = torch.zeros(1, _TOKENS, 1, dtype=torch.float64)
        self.router_logits = logits

    def __getattr__(self, name: str) -> Any:
        return self.__dict__["router_logits"] if "router" in name else None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state, self.router_logits)[index]


def _hollow(model: nn.Module) -> nn.Module | None:
    """Return a copy of the outermost module with stand-ins for decoder and head; None when it has no such parts."""
    prefix = getattr(model, "base_model_prefix", "")
    base, head = model._modules.get(prefix), getattr(model, "get_output_embeddings", lambda: None)()
    names = [n for n, m in model._modules.items() if m is not None and (m is base or m is head)]
    if base is None or head is None or len(names) != 2:
        return None
    hollow = copy.copy(model)
    modules = {n: _StandIn(m) if n in names else m for n, m in model._modules.items() if m}
    hollow.__dict__.update(
        _modules=modules, _parameters={}, _forward_hooks={}, _forward_pre_hooks={}
    )
    hollow.__dict__.pop("forward", None)
    for name in names:
        modules[name].__dict__["value"] = torch.zeros(1, _TOKENS, 2, dtype=torch.float64)
    modules[prefix].__dict__["is_decoder_stand_in"] = True
    hollow.loss_function = lambda *_, **__: torch.zeros((), dtype=torch.float64)
    return hollow


def _run(hollow: nn.Module, logits: tuple[Tensor, ...], **flag: bool) -> tuple[Tensor, Any]:
    """Return loss and auxiliary loss for given router logits."""
    for stand_in in hollow._modules.values():
        if stand_in is not None and stand_in.__dict__.get("is_decoder_stand_in"):
            stand_in.__dict__["value"] = _DecoderOutput(logits)
    ids = torch.zeros(1, _TOKENS, dtype=torch.long)
    with torch.enable_grad(), float64_kept():
        out = type(hollow).forward(hollow, input_ids=ids, labels=ids, **flag)  # type: ignore[attr-defined]
    return out.loss, getattr(out, "aux_loss", None)


def _measure(
    hollow: nn.Module, size: int, product_keys: bool
) -> tuple[float, bool, int, float] | None:
    """Return coefficient, requested, top_k (0: not the known definition) and scale; None: there is no such loss."""
    generator = torch.Generator().manual_seed(7)
    shape = (2, _TOKENS, size) if product_keys else (_TOKENS, size)
    losses, ratios = [], []
    for _ in range(_DRAWS):
        logits = tuple(
            torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
            for _ in range(_LAYERS)
        )
        on, aux = _run(hollow, logits, **{FLAG: True})
        off, _ = _run(hollow, logits, **{FLAG: False})
        usual, _ = _run(hollow, logits)
        added = on - off
        named = isinstance(aux, Tensor)
        aux = aux if named else added
        if not aux.requires_grad:
            return None
        aux, added = aux.detach(), added.detach()
        losses.append((float(added / aux), bool(usual.requires_grad)))
        every = _every_load_balance([expert_logits(x.detach(), product_keys) for x in logits])
        ratios.append(float(aux) / every)
    coefficient, requested = losses[0]
    spread = torch.stack(ratios)
    same = ((spread - spread[0]).abs() <= 1e-9 * spread[0].abs()).all(0).nonzero().flatten()
    if len(same) != 1:
        return coefficient, requested, 0, 0.0
    top_k = int(same) + 1
    ratio = float(spread[0, int(same)])
    if not named:  # only the weighted loss is known
        coefficient, ratio = ratio, 1.0
    scale = float(Fraction(ratio).limit_denominator(_MOST_CHOICES))
    return float(f"{coefficient:.12g}"), requested, top_k, scale


def load_balance(load: Tensor, probability: Tensor, number: Tensor) -> Tensor:
    """Return E * sum_e f_e P_e of [E] rows and [E] sums of probabilities over `number` (layer, token) pairs."""
    return len(load) * (load * probability).sum() / number.square()


def _every_load_balance(layers: list[Tensor]) -> Tensor:
    """Return the load-balancing loss of logits [T, E] for k = 1, 2, ..., one number each."""
    probabilities = torch.cat([layer.softmax(-1) for layer in layers])
    number, experts = probabilities.shape
    most = min(experts, _MOST_CHOICES)
    order = probabilities.topk(most, dim=-1).indices
    load = torch.zeros(experts, dtype=torch.float64)
    found = []
    for k in range(most):
        load = load + torch.bincount(order[:, k], minlength=experts)
        found.append(load_balance(load, probabilities.sum(0), torch.tensor(float(number))))
    return torch.stack(found)


def _sizes(model: nn.Module, routers: tuple[tuple[str, int], ...]) -> list[int]:
    """Return numbers that the last dim of router logits may have: sizes of router weights, then of the config."""
    found: dict[int, None] = {}
    if routers:
        for p in model.get_submodule(routers[0][0]).parameters():
            found.update(dict.fromkeys(p.shape[:1]))
            found.update(dict.fromkeys([p.shape[0] // 2]))
    found.update(dict.fromkeys(_integers(model.config.to_dict())))
    return [size for size in found if 2 <= size <= 4096]


def _integers(value: Any) -> Iterator[int]:
    if isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _integers(part)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _routers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield name and output of the modules under the decoder that give router logits."""
    decoder = decoder_of(model)
    if decoder is None:
        return
    within = next(n for n, m in model.named_modules() if m is decoder[1])
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
    """Yield every module with the declarations of router logits that hold for it, those of its nearest model."""
    own = getattr(type(model), "_can_record_outputs", None)
    if own is not None or hasattr(model, "base_model_prefix"):
        specs = (own or {}).get("router_logits", [])
        every = specs if isinstance(specs, list) else [specs]
        tasks = tuple(
            (spec.target_class, spec.index, spec.layer_name)
            if hasattr(spec, "target_class")
            else (spec, 1, None)
            for spec in every
        )
    yield (name, model), tasks
    for child, module in model.named_children():
        yield from _declared(module, f"{name}.{child}" if name else child, tasks)

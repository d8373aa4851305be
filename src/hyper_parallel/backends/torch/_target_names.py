"""Checks of the module names of adapters: matching modules, supported modules, and suggestions for wrong names."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

from torch import nn

from hyper_parallel.backends.torch._name_patterns import chosen_names, name_suffixes
from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.backends.torch.weights.linear_map import is_linear_class, linear_maps
from hyper_parallel.config import NAMES_OF_EXPERTS
from hyper_parallel.errors import BadValue, UnsupportedSharding

_SHOWN: Final = 5  # maximum names in an error message
_MAMBA: Final = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_REFUSED_BY_PEFT: Final = dict.fromkeys(_MAMBA, ("out_proj", "conv1d"))
"""Names of modules without adapters in peft, by model type: fused kernels read their weights."""


def adaptable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that support an adapter, by name: linear maps, except the head and modules refused by peft."""
    head, config = head_of(model), getattr(model, "config", None)
    excluded = {*_REFUSED_BY_PEFT.get(getattr(config, "model_type", ""), ())}
    if any(".experts." in name and p.dim() == 3 for name, p in model.named_parameters()):
        # In peft these names select the fused experts of a layer, which are one parameter.
        excluded |= {*NAMES_OF_EXPERTS}
    return {
        name: module
        for name, module in linear_maps(model).items()
        if module is not head and _last(name) not in excluded
    }


def all_linear(model: nn.Module, adaptable: Mapping[str, nn.Module]) -> str | list[str]:
    """Return the `target_modules` with which peft selects exactly the modules that support an adapter.

    Raises:
        UnsupportedSharding: HP205 when no module supports an adapter.
    """
    if not adaptable:
        raise UnsupportedSharding(
            "no module of this model supports an adapter",
            where="lora.target_modules",
            got=type(model).__name__,
            allowed="models with linear modules other than the head",
            hint="lora=null",
        )
    head = head_of(model)
    modules = dict(model.named_modules())
    fused = any(".experts." in name and p.dim() == 3 for name, p in model.named_parameters())
    chosen_by_peft = {n for n, m in modules.items() if is_linear_class(m) and m is not head}
    if chosen_by_peft == adaptable.keys() and not fused:
        return "all-linear"
    ends = last_names(adaptable)
    known = {*ends}
    fits = {name for name in modules if not known.isdisjoint(name_suffixes(name))}
    return ends if fits == adaptable.keys() else sorted(adaptable)


def check_names(
    model: nn.Module, config: Any, adaptable: Mapping[str, nn.Module], where: str
) -> AbstractSet[str]:
    """Return the names of the modules that get an adapter.

    Args:
        model: The model, before peft.
        config: A `peft.LoraConfig`.
        adaptable: Modules that support an adapter, by name.
        where: Origin of the names, for errors.

    Raises:
        BadValue: HP102 for names that match no module.
        UnsupportedSharding: HP205 for modules that do not support an adapter.
    """
    modules = {n: m for n, m in model.named_modules() if n}
    saved, targets = config.modules_to_save or (), config.target_modules
    owners = [n for n, m in modules.items() if any(True for _ in m.parameters(recurse=False))]
    known = {end for name in modules for end in name_suffixes(name)}
    absent = (s for s in saved if s not in known and not any(n.endswith(s) for n in modules))
    if missing := [*itertools.islice(absent, _SHOWN)]:
        names = last_names(owners)
        raise BadValue(
            "no module of the model has this name",
            where=where.replace("target_modules", "modules_to_save"),
            got=_shown(missing),
            allowed=names,
            hint=f"'lora.modules_to_save=[{', '.join(_nearest([*saved], missing, names))}]'",
        )
    if targets == "all-linear" or targets is None:
        return adaptable.keys()
    chosen, ends = chosen_names(config, modules, where), last_names(adaptable)
    listed = [targets] if isinstance(targets, str) else sorted(targets)
    missing = [t for t in listed if t not in known]
    if isinstance(targets, str):
        missing = [] if chosen or config.exclude_modules else [targets]
    if missing:
        raise BadValue(
            "no module of the model has this name",
            where=where,
            got=_shown(missing),
            allowed=ends,
            hint=target_hint(_nearest(listed, missing, ends) or ["all-linear"], adaptable),
        )
    inside_saved = {n for n in chosen if _inside(n, saved)}
    if config.exclude_modules or config.layers_to_transform is not None:
        return chosen - inside_saved  # `absorb_adapters` checks the modules that peft selects
    if refused := sorted(chosen - adaptable.keys() - inside_saved):
        supported = [t for t in ends if t in listed]
        raise UnsupportedSharding(
            "a selected module does not support an adapter",
            where=f"{where}: {refused[0]}",
            got=type(modules[refused[0]]).__name__,
            allowed=ends,
            hint=target_hint(supported or ["all-linear"], adaptable),
        )
    return chosen - inside_saved


def last_names(names: Iterable[str]) -> list[str]:
    """Return the sorted distinct last parts of names."""
    return sorted({_last(name) for name in names})


def target_hint(names: list[str], adaptable: Mapping[str, nn.Module] | None = None) -> str:
    """Return the override that selects modules by these names, or disables adapters if no module supports one."""
    if not names or (adaptable is not None and not adaptable):
        return "lora=null"
    if names == ["all-linear"]:
        return "lora.target_modules=all-linear"
    return f"'lora.target_modules=[{', '.join(names)}]'"


def _inside(name: str, saved: Iterable[str]) -> bool:
    """Return whether a module is, or is inside, a module that is trained in full."""
    return any(f".{s}." in f".{name}." for s in saved)


def _shown(names: Iterable[str]) -> str:
    """Return the first names, truncated for a message."""
    return ", ".join(f"{name:.120}" for name in [*names][:_SHOWN])


def _nearest(listed: Iterable[str], missing: Iterable[str], names: list[str]) -> list[str]:
    """Return the listed names that exist, and the closest existing name for each missing one."""
    suggestions = [name for name in listed if name in names]
    for name in missing[:_SHOWN]:
        suggestions += difflib.get_close_matches(name[:120], names, n=1)
    return [*dict.fromkeys(suggestions)]


def _last(name: str) -> str:
    return name.rpartition(".")[2]

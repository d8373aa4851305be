"""Selection of the modules that get LoRA adapters: matching of names, supported modules, suggestions for wrong names.

peft matches the patterns of a configuration with `re`, which has no time limit, and a received configuration may
contain a pattern with exponential backtracking. Here these patterns are matched with a time limit, and peft gets the
matching names instead.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import re
import time
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import regex
from torch import nn

from hyper_parallel.backends.torch.token_scores import head_of
from hyper_parallel.backends.torch.weights.linear_map import is_linear_class, linear_maps
from hyper_parallel.config import NAMES_OF_EXPERTS
from hyper_parallel.errors import BadValue, UnsupportedSharding

_PLAIN: Final = re.compile(r"[\w.-]+")
"""Pattern of plain name suffixes, which `re` matches in linear time."""
_LONGEST: Final = 10_000
"""Maximum characters of a pattern; a pattern that lists all modules of a layer has a few hundred."""
_MOST_S: Final = 0.5
"""Maximum seconds to match all names; a pattern without nested repetitions takes microseconds per name."""
_MOST_NAMES: Final = 2000
"""Maximum names that a key of `rank_pattern` or `alpha_pattern` may match: peft compares each module with each name."""


def _matching(pattern: str, names: Iterable[str], where: str) -> set[str]:
    """Return the names that match a Python regular expression in full; raise HP102 if it is invalid, too long or slow.

    `where` is the recipe key or file that contains the pattern.
    """
    shown, in_recipe = f"{pattern:.120}", where == "lora.target_modules"
    hint = "lora.target_modules=all-linear" if in_recipe else "replace the pattern by module names"
    try:
        if len(pattern) > _LONGEST:
            raise ValueError(f"{len(pattern):,} characters, more than {_LONGEST:,}")
        re.compile(pattern)
        compiled = regex.compile(pattern)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        raise BadValue(
            f"the pattern is too long, or not a valid regular expression: {error!s:.200}",
            where=where,
            got=shown,
            hint=hint,
        ) from None
    end_s, matching = time.perf_counter() + _MOST_S, set()
    for name in names:
        try:
            remaining_s = max(end_s - time.perf_counter(), 1e-3)
            if compiled.fullmatch(name, timeout=remaining_s) is not None:
                matching.add(name)
        except TimeoutError:
            raise BadValue(
                f"the regular expression takes more than {_MOST_S:g} s to match the module names",
                where=where,
                got=shown,
                allowed="name suffixes, or an expression without nested repetitions",
                hint=hint,
            ) from None
    return matching


def with_plain_patterns(config: Any, chosen: Iterable[str], where: str) -> Any:
    """Return a copy of a `peft.LoraConfig` with module names in place of patterns, exclusions and layer numbers.

    `chosen` are the names of the modules that the configuration selects. Raise HP102 for a key of `rank_pattern` or
    `alpha_pattern` that is an invalid or slow pattern, or that matches too many names.
    """
    config, names = copy.copy(config), sorted(chosen)
    pattern = isinstance(config.target_modules, str) and config.target_modules != "all-linear"
    if pattern or config.exclude_modules or config.layers_to_transform is not None:
        config.target_modules = set(names)
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    for key in ("rank_pattern", "alpha_pattern"):
        place = f"lora.{key}" if where.startswith("lora.") else f"{where}: {key}"
        setattr(config, key, _plain_keys(getattr(config, key) or {}, names, place))
    return config


def chosen_names(config: Any, names: Iterable[str], where: str) -> set[str]:
    """Return the names that a `peft.LoraConfig` selects by peft's rules; `names` are those of all modules.

    `target_modules` of the config must be names or a regular expression. Raise HP102 for an invalid or slow pattern,
    and for a `layers_pattern` that is not a name.
    """
    targets, excluded = config.target_modules, config.exclude_modules or ()
    if isinstance(targets, str):
        chosen = _matching(targets, names, where)
    else:
        chosen = _with_ends(targets, names)
        if config.layers_to_transform is not None:
            listed = _in_layers(config, chosen - {*targets}, where)
            chosen = listed | (chosen & {*targets})
    if isinstance(excluded, str):
        return chosen - _matching(excluded, chosen, f"{where}: exclude_modules")
    return chosen - _with_ends(excluded, chosen)


def name_suffixes(name: str) -> list[str]:
    """Return a name and its suffixes: `a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _with_ends(ends: Iterable[str], names: Iterable[str]) -> set[str]:
    known = {*ends}
    return {name for name in names if not known.isdisjoint(name_suffixes(name))}


def _in_layers(config: Any, names: Iterable[str], where: str) -> set[str]:
    """Return the names whose first index after a `layers_pattern` is in `layers_to_transform`.

    Without patterns, at least two names must precede the index.
    """
    wanted, patterns = config.layers_to_transform, config.layers_pattern or ()
    wanted = {wanted} if isinstance(wanted, int) else {*wanted}
    patterns = {patterns} if isinstance(patterns, str) else {*patterns}
    if odd := [p for p in patterns if not _PLAIN.fullmatch(p)]:
        raise BadValue(
            "`layers_pattern` must contain names, not regular expressions",
            where=f"{where}: layers_pattern",
            got=f"{odd[0]:.120}",
            allowed="the name of a list of layers, such as layers",
            hint=f"set layers_pattern to names in {where}",
        )
    selected = set()
    for name in names:
        parts = name.split(".")
        for i in range(1, len(parts) - 1):
            fits = not patterns and i > 1
            fits = fits or not patterns.isdisjoint(name_suffixes(".".join(parts[:i])))
            if fits and parts[i].isdecimal():
                if int(parts[i]) in wanted:
                    selected.add(name)
                break
    return selected


def _plain_keys(patterns: Mapping[str, Any], names: list[str], where: str) -> dict[str, Any]:
    """Return `patterns` with each key that is not a plain name suffix replaced by the names that it matches."""
    plain: dict[str, Any] = {}
    for pattern, value in patterns.items():
        if _PLAIN.fullmatch(pattern):
            plain[pattern] = value
            continue
        fits = sorted(_matching(rf"(?:.*\.)?(?:{pattern})", names, where), key=len, reverse=True)
        if len(fits) > _MOST_NAMES:
            raise BadValue(
                f"the pattern matches {len(fits)} modules, more than {_MOST_NAMES}",
                where=where,
                got=f"{pattern:.120}",
                allowed="name suffixes, such as q_proj",
            )
        plain |= {re.escape(name): value for name in fits if re.escape(name) not in plain}
    return plain


_SHOWN: Final = 5
"""Maximum number of names in an error message."""
_MAMBA: Final = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
_REFUSED_BY_PEFT: Final = dict.fromkeys(_MAMBA, ("out_proj", "conv1d"))
"""Names of modules that peft refuses to adapt, by model type, because fused kernels read their weights."""


def adaptable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that support an adapter, by name.

    These are the linear modules, except the head, the modules that peft refuses, and, in a model with fused experts,
    modules with one of the `NAMES_OF_EXPERTS`.
    """
    head, config = head_of(model), getattr(model, "config", None)
    excluded = {*_REFUSED_BY_PEFT.get(getattr(config, "model_type", ""), ())}
    if _has_fused_experts(model):
        # In peft these names select the fused experts of a layer, which are one parameter.
        excluded |= {*NAMES_OF_EXPERTS}
    return {
        name: module
        for name, module in linear_maps(model).items()
        if module is not head and name.rpartition(".")[2] not in excluded
    }


def all_linear(model: nn.Module, adaptable: Mapping[str, nn.Module], where: str) -> str | list[str]:
    """Return the `target_modules` with which peft selects all `adaptable` modules; raise HP205 if there are none.

    `where` is the recipe key or file that selects the modules, for the error.
    """
    if not adaptable:
        raise UnsupportedSharding(
            "no module of this model supports an adapter",
            where=where,
            got=type(model).__name__,
            allowed="models with linear modules other than the head",
            hint=target_hint([], where),
        )
    head = head_of(model)
    modules = dict(model.named_modules())
    chosen_by_peft = {n for n, m in modules.items() if is_linear_class(m) and m is not head}
    if chosen_by_peft == adaptable.keys() and not _has_fused_experts(model):
        return "all-linear"
    ends = last_names(adaptable)
    return ends if _with_ends(ends, modules) == adaptable.keys() else sorted(adaptable)


def check_names(model: nn.Module, config: Any, adaptable: Mapping[str, nn.Module], where: str) -> AbstractSet[str]:
    """Return the names of the modules that get an adapter; `where` is the recipe key or file with the names.

    Raises:
        BadValue: HP102 for names that match no module, and for an invalid or slow pattern.
        UnsupportedSharding: HP205 for a selected module that does not support an adapter, unless the configuration has
            `exclude_modules` or `layers_to_transform`.
    """
    modules = {n: m for n, m in model.named_modules() if n}
    saved, targets = config.modules_to_save or (), config.target_modules
    owners = [n for n, m in modules.items() if any(True for _ in m.parameters(recurse=False))]
    known = {end for name in modules for end in name_suffixes(name)}
    absent = (s for s in saved if s not in known and not any(n.endswith(s) for n in modules))
    if missing := [*itertools.islice(absent, _SHOWN)]:
        names = last_names(owners)
        valid = [s for s in saved if s not in missing]
        nearest = ", ".join(_nearest([*saved], missing, [*valid, *names]))
        raise BadValue(
            "no module of the model has this name",
            where=where.replace("target_modules", "modules_to_save"),
            got=_shown(missing),
            allowed=names,
            hint=f"'lora.modules_to_save=[{nearest}]'"
            if where.startswith("lora.")
            else f"set modules_to_save to [{nearest}] in {where}",
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
            hint=target_hint(_suitable(listed, _nearest([], missing, ends), modules, adaptable), where, adaptable),
        )
    # Modules trained in full need no adapters, and neither do the modules in them.
    inside_saved = {n for n in chosen if any(f".{s}." in f".{n}." for s in saved)}
    if config.exclude_modules or config.layers_to_transform is not None:
        return chosen - inside_saved  # `absorb_adapters` checks the modules that peft selects
    if refused := sorted(chosen - adaptable.keys() - inside_saved):
        raise UnsupportedSharding(
            "a selected module does not support an adapter",
            where=f"{where}: {refused[0]}",
            got=type(modules[refused[0]]).__name__,
            allowed=ends,
            hint=target_hint(_suitable(listed, [], modules, adaptable), where, adaptable),
        )
    return chosen - inside_saved


def _suitable(
    listed: Iterable[str], nearest: Iterable[str], modules: Mapping[str, nn.Module], adaptable: Mapping[str, nn.Module]
) -> list[str]:
    """Return the names that select only `adaptable` modules; ["all-linear"] if there are none."""
    selected = {name: _with_ends([name], modules) for name in (*listed, *nearest)}
    return [name for name, modules in selected.items() if modules and modules <= adaptable.keys()] or ["all-linear"]


def last_names(names: Iterable[str]) -> list[str]:
    """Return the distinct last components of dotted module names, sorted."""
    return sorted({name.rpartition(".")[2] for name in names})


def target_hint(names: list[str], where: str, adaptable: Mapping[str, nn.Module] | None = None) -> str | None:
    """Return a hint that selects modules by `names`: a recipe override, or the key to set in the adapter file `where`.

    `where` may also be LlamaFactory's key `lora_target`. If `names` or `adaptable` is empty, the hint is `lora=null`
    for a recipe key, else None.
    """
    is_recipe = where.startswith("lora.")
    if not names or (adaptable is not None and not adaptable):
        return "lora=null" if is_recipe else None
    if where == "lora_target":
        return f"lora_target: {','.join(names)}"
    if not is_recipe:
        shown = '"all-linear"' if names == ["all-linear"] else f"[{', '.join(names)}]"
        return f"set target_modules to {shown} in {where}"
    if names == ["all-linear"]:
        return "lora.target_modules=all-linear"
    return f"'lora.target_modules=[{', '.join(names)}]'"


def _has_fused_experts(model: nn.Module) -> bool:
    return any(".experts." in name and p.dim() == 3 for name, p in model.named_parameters())


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"{name:.120}" for name in [*names][:_SHOWN])


def _nearest(listed: Iterable[str], missing: Iterable[str], names: list[str]) -> list[str]:
    """Return the listed names that are in `names`, and the closest match in `names` for each of the first missing."""
    suggestions = [name for name in listed if name in names]
    for name in missing[:_SHOWN]:
        suggestions += difflib.get_close_matches(name[:120], names, n=1)
    return [*dict.fromkeys(suggestions)]

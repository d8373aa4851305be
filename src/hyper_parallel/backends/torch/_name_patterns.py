"""Regular expressions over names of modules, matched in bounded time.

peft matches the patterns of a configuration with `re`, which has no time limit, and a received configuration may hold a
pattern that backtracks for ever. Here every pattern that is more than a plain end of names is matched under a time
limit, and peft is given the names instead.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import regex

from hyper_parallel.errors import BadValue

_PLAIN: Final = re.compile(r"[\w.-]+")
_LONGEST: Final = 10_000
"""Characters of a pattern; alternations over all modules of a layer are a few hundred."""
_MOST_S: Final = 0.5
"""Seconds for all names; a pattern without nested repetitions takes microseconds per name."""
_MOST_NAMES: Final = 2000
"""Names that a pattern of ranks or scales may stand for: peft compares each module with each of them."""


def is_plain(pattern: str) -> bool:
    """Return whether a pattern is the end of a name, which `re` matches in linear time."""
    return _PLAIN.fullmatch(pattern) is not None


def matcher(pattern: str, where: str) -> Callable[[str], bool]:
    """Return a function that tells whether a whole name matches a pattern.

    Args:
        pattern: A regular expression of Python.
        where: Origin of the pattern, for errors.

    Raises:
        BadValue: HP102 when it is no regular expression; from the function, when matching takes too long.
    """
    shown = f"{pattern:.120}"
    try:
        if len(pattern) > _LONGEST:
            raise ValueError(f"{len(pattern):,} characters, more than {_LONGEST:,}")
        re.compile(pattern)
        compiled = regex.compile(pattern)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        raise BadValue(
            f"the pattern is no regular expression: {error!s:.200}",
            where=where,
            got=shown,
            hint="lora.target_modules=all-linear",
        ) from None
    left_s = _MOST_S

    def fits(name: str) -> bool:
        nonlocal left_s
        start_s = time.perf_counter()
        try:
            found = compiled.fullmatch(name, timeout=max(left_s, 1e-3))
        except TimeoutError:
            raise BadValue(
                f"the regular expression takes more than {_MOST_S:g} s to compare with the names of modules",
                where=where,
                got=shown,
                allowed="ends of names, or an expression without nested repetitions",
                hint="lora.target_modules=all-linear",
            ) from None
        left_s -= time.perf_counter() - start_s
        return found is not None

    return fits


def fitting(pattern: str, names: Iterable[str], where: str) -> set[str]:
    """Return the names that match a pattern; arguments and errors as of `matcher`."""
    fits = matcher(pattern, where)
    return {name for name in names if fits(name)}


def with_plain_patterns(config: Any, chosen: Iterable[str], where: str) -> Any:
    """Return a `peft.LoraConfig` whose patterns are replaced by the names that they stand for.

    Args:
        config: The configuration; not changed.
        chosen: Names of the modules that get an adapter.
        where: Origin of the configuration, for errors.

    Raises:
        BadValue: HP102 as of `matcher`, and for patterns that stand for too many names.
    """
    config, names = copy.copy(config), sorted(chosen)
    pattern = isinstance(config.target_modules, str) and config.target_modules != "all-linear"
    if pattern or config.exclude_modules or config.layers_to_transform is not None:
        config.target_modules = set(names)
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    for key in ("rank_pattern", "alpha_pattern"):
        setattr(config, key, _plain_keys(getattr(config, key) or {}, names, f"{where}: {key}"))
    return config


def chosen_names(config: Any, names: Iterable[str], where: str) -> set[str]:
    """Return the names of modules that a `peft.LoraConfig` chooses, by peft's rules.

    Args:
        config: Its `target_modules` are names or a regular expression.
        names: Names of all modules.
        where: Origin of the configuration, for errors.

    Raises:
        BadValue: HP102 as of `matcher`, and for a `layers_pattern` that is no name.
    """
    targets, excluded = config.target_modules, config.exclude_modules or ()
    if isinstance(targets, str):
        chosen = fitting(targets, names, where)
    else:
        chosen = _with_ends(targets, names)
        if config.layers_to_transform is not None:
            listed = _in_layers(config, chosen - {*targets}, where)
            chosen = listed | (chosen & {*targets})
    if isinstance(excluded, str):
        return chosen - fitting(excluded, chosen, f"{where}: exclude_modules")
    return chosen - _with_ends(excluded, chosen)


def ends_of(name: str) -> list[str]:
    """Return a name and its ends: `a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _with_ends(ends: Iterable[str], names: Iterable[str]) -> set[str]:
    known = {*ends}
    return {name for name in names if not known.isdisjoint(ends_of(name))}


def _in_layers(config: Any, names: Iterable[str], where: str) -> set[str]:
    """Return the names whose first number, after one of `layers_pattern`, is in `layers_to_transform`."""
    wanted, patterns = config.layers_to_transform, config.layers_pattern or ()
    wanted = {wanted} if isinstance(wanted, int) else {*wanted}
    patterns = {patterns} if isinstance(patterns, str) else {*patterns}
    if odd := [p for p in patterns if not is_plain(p)]:
        raise BadValue(
            "a name of layers is a regular expression",
            where=f"{where}: layers_pattern",
            got=f"{odd[0]:.120}",
            allowed="names, such as layers",
        )
    found = set()
    for name in names:
        parts = name.split(".")
        for at in range(1, len(parts) - 1):
            # Without a pattern a name comes before the number, and another name before that one.
            fits = not patterns and at > 1
            fits = fits or not patterns.isdisjoint(ends_of(".".join(parts[:at])))
            if fits and parts[at].isdecimal():
                if int(parts[at]) in wanted:
                    found.add(name)
                break
    return found


def _plain_keys(patterns: Mapping[str, Any], names: list[str], where: str) -> dict[str, Any]:
    """Return patterns in their order, with those that are no ends of names replaced by the whole names they fit."""
    found: dict[str, Any] = {}
    for pattern, value in patterns.items():
        if is_plain(pattern):
            found[pattern] = value
            continue
        fits = sorted(fitting(rf"(?:.*\.)?(?:{pattern})", names, where), key=len, reverse=True)
        if len(fits) > _MOST_NAMES:
            raise BadValue(
                f"the pattern stands for more than {_MOST_NAMES} modules",
                where=where,
                got=f"{pattern:.120}",
                allowed="ends of names, such as q_proj",
            )
        found |= {re.escape(name): value for name in fits if re.escape(name) not in found}
    return found

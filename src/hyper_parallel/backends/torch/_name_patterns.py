"""Regular expressions over module names, matched in bounded time.

peft matches the patterns of a configuration with `re`, which has no time limit, and a received configuration may
contain a pattern with exponential backtracking. Here every pattern that is not a plain name suffix is matched with a
time limit, and peft gets the matching names instead.
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
"""Maximum characters of a pattern; alternations over all modules of a layer have a few hundred."""
_MOST_S: Final = 0.5
"""Maximum seconds for all names; a pattern without nested repetitions takes microseconds per name."""
_MOST_NAMES: Final = 2000
"""Maximum names that a pattern of ranks or scales may match: peft compares each module with each name."""


def is_plain(pattern: str) -> bool:
    """Return whether a pattern is a plain name suffix, which `re` matches in linear time."""
    return _PLAIN.fullmatch(pattern) is not None


def matcher(pattern: str, where: str) -> Callable[[str], bool]:
    """Return a predicate: whether a full name matches a pattern.

    Args:
        pattern: A Python regular expression.
        where: Origin of the pattern, for errors.

    Raises:
        BadValue: HP102 for an invalid regular expression; from the predicate, when matching takes too long.
    """
    shown = f"{pattern:.120}"
    try:
        if len(pattern) > _LONGEST:
            raise ValueError(f"{len(pattern):,} characters, more than {_LONGEST:,}")
        re.compile(pattern)
        compiled = regex.compile(pattern)
    except (re.error, regex.error, ValueError, OverflowError, RecursionError) as error:
        raise BadValue(
            f"the pattern is not a valid regular expression: {error!s:.200}",
            where=where,
            got=shown,
            hint="lora.target_modules=all-linear",
        ) from None
    remaining_s = _MOST_S

    def fits(name: str) -> bool:
        nonlocal remaining_s
        start_s = time.perf_counter()
        try:
            match = compiled.fullmatch(name, timeout=max(remaining_s, 1e-3))
        except TimeoutError:
            raise BadValue(
                f"the regular expression takes more than {_MOST_S:g} s to match the module names",
                where=where,
                got=shown,
                allowed="name suffixes, or an expression without nested repetitions",
                hint="lora.target_modules=all-linear",
            ) from None
        remaining_s -= time.perf_counter() - start_s
        return match is not None

    return fits


def fitting(pattern: str, names: Iterable[str], where: str) -> set[str]:
    """Return the names that match a pattern; see `matcher` for arguments and errors."""
    fits = matcher(pattern, where)
    return {name for name in names if fits(name)}


def with_plain_patterns(config: Any, chosen: Iterable[str], where: str) -> Any:
    """Return a `peft.LoraConfig` in which matching names replace the patterns.

    Args:
        config: The configuration; not changed.
        chosen: Names of the modules that get an adapter.
        where: Origin of the configuration, for errors.

    Raises:
        BadValue: HP102 from `matcher`, and for patterns that match too many names.
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
    """Return the names of the modules that a `peft.LoraConfig` selects, by peft's rules.

    Args:
        config: Configuration with names or a regular expression as `target_modules`.
        names: Names of all modules.
        where: Origin of the configuration, for errors.

    Raises:
        BadValue: HP102 from `matcher`, and for a `layers_pattern` that is not a name.
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


def name_suffixes(name: str) -> list[str]:
    """Return a name and its suffixes: `a.b.c`, `b.c`, `c`."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(len(parts))]


def _with_ends(ends: Iterable[str], names: Iterable[str]) -> set[str]:
    known = {*ends}
    return {name for name in names if not known.isdisjoint(name_suffixes(name))}


def _in_layers(config: Any, names: Iterable[str], where: str) -> set[str]:
    """Return the names whose first index after a `layers_pattern` is in `layers_to_transform`."""
    wanted, patterns = config.layers_to_transform, config.layers_pattern or ()
    wanted = {wanted} if isinstance(wanted, int) else {*wanted}
    patterns = {patterns} if isinstance(patterns, str) else {*patterns}
    if odd := [p for p in patterns if not is_plain(p)]:
        raise BadValue(
            "`layers_pattern` must contain names, not regular expressions",
            where=f"{where}: layers_pattern",
            got=f"{odd[0]:.120}",
            allowed="names, such as layers",
        )
    selected = set()
    for name in names:
        parts = name.split(".")
        for i in range(1, len(parts) - 1):
            # Without patterns, at least two names must precede the index.
            fits = not patterns and i > 1
            fits = fits or not patterns.isdisjoint(name_suffixes(".".join(parts[:i])))
            if fits and parts[i].isdecimal():
                if int(parts[i]) in wanted:
                    selected.add(name)
                break
    return selected


def _plain_keys(patterns: Mapping[str, Any], names: list[str], where: str) -> dict[str, Any]:
    """Return the patterns in order; full matching names replace all patterns that are not plain suffixes."""
    plain: dict[str, Any] = {}
    for pattern, value in patterns.items():
        if is_plain(pattern):
            plain[pattern] = value
            continue
        fits = sorted(fitting(rf"(?:.*\.)?(?:{pattern})", names, where), key=len, reverse=True)
        if len(fits) > _MOST_NAMES:
            raise BadValue(
                f"the pattern matches more than {_MOST_NAMES} modules",
                where=where,
                got=f"{pattern:.120}",
                allowed="name suffixes, such as q_proj",
            )
        plain |= {re.escape(name): value for name in fits if re.escape(name) not in plain}
    return plain

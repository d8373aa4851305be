"""Written forms of suggested changes: overrides of a recipe, options of a command, or the form of another caller."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping


class Caller:
    """Translation of recipe keys and command options in errors to the caller's names; this class changes nothing.

    Subclasses are for callers with other names, such as a Python function with arguments. See `reported_by`.
    """

    def hint(self, changes: Mapping[str, object]) -> str | None:
        """Return the hint for changes by recipe key or option; None selects the text of `overrides`."""
        return None

    def where(self, text: str) -> str:
        """Return the location of an error, given the location in a recipe or command."""
        return text

    def sentence(self, text: str) -> str:
        """Return a hint that is a sentence, not `changes`, given the hint for a recipe or command."""
        return text


def overrides(changes: Mapping[str, object]) -> str:
    """Return changes as words to paste in a shell: `parallel.pp=2 'parallel.stage_layers=[4, 4]'`, `--device auto`.

    Strings are copied without YAML quotes. For an option, None means to leave it out, True that it takes no value, a
    tuple is joined by commas, and a mapping gives the form `--pin NAME=VALUE`.
    """
    return " ".join(_option(k, v) if k.startswith("--") else _override(k, v) for k, v in changes.items())


def _option(name: str, value: object) -> str:
    if value is None:
        return f"leave out {name}"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {shlex.quote(f'{key}={item}')}" for key, item in value.items())
    return name if value is True else f"{name} {','.join(value) if isinstance(value, tuple) else value}"


def _override(key: str, value: object) -> str:
    word = f"{key}={value_text(value)}"
    # bash reads brackets around names without quotes as they are.
    is_list_of_names = isinstance(value, str) and re.fullmatch(r"\[[\w,.-]*\]", value)
    return word if is_list_of_names else shlex.quote(word)


def value_text(value: object) -> str:
    """Return the text of a value in an override: `null`, `true`, `[4, 4]`, `{layers.*.up: colwise}`."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, Mapping):
        # YAML reads an initial `*` as an alias.
        keys = {k: k if re.match("[A-Za-z0-9_]", k) else json.dumps(k) for k in value}
        return f"{{{', '.join(f'{keys[k]}: {value_text(v)}' for k, v in value.items())}}}"
    return str(value)

"""Typed access to the keys of a config.json, with family defaults and errors that name the key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from hyper_parallel.errors import ModelUnreadable, abbreviated

STANDARD_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
)  # fmt: skip
"""Keys that a Llama-like config must have, unless its family has a default."""
PUBLISHED: Final = "use the config.json that the model was published with"
"""Hint for a value that no published config has."""
_MOST = 2**31 - 1
"""Largest accepted integer."""


@dataclass(frozen=True, slots=True)
class ConfigView:
    """Values of a config.json, with the defaults and key names of its model family.

    An absent key has the family's default; a null key is None, as in transformers.

    Attributes:
        values: The JSON object.
        where: The file, for errors.
        defaults: Defaults of the family's config class for keys that are read.
        aliases: Map from standard key to the family's key, such as hidden_size to n_embd.
    """

    values: Mapping[str, Any]
    where: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """Return the value of the family's alias of `key`, else of `key`, else the default; None without a default."""
        for name in (self.aliases.get(key, key), key):
            if name in self.values:
                return self.values[name]
        return self.defaults.get(key)

    def require(self, keys: Iterable[str]) -> None:
        """Raise HP305 with all `keys` that are null, or absent without a default."""
        missing = [self.aliases.get(k, k) for k in keys if self.get(k) is None]
        if missing:
            self.refuse(
                f"the config lacks {', '.join(f'`{k}`' for k in missing)}",
                got=f"keys: {', '.join(sorted(self.values)[:50]) or 'none'}",
                hint=f"add the missing keys, or {PUBLISHED}",
            )

    def integer(self, key: str, minimum: int = 1, maximum: int = _MOST) -> int:
        """Return the value of `key`; raise HP305 unless it is a whole number from `minimum` to `maximum`."""
        self.require((key,))
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self._refuse_value(key, value, f"a whole number >= {minimum}")
        if value > maximum:
            self._refuse_value(key, value, f"a whole number from {minimum} to {maximum}")
        return value

    def optional_integer(self, key: str, minimum: int = 1) -> int | None:
        """Return the value of `key`, checked as by `integer`; None if the key is null, or absent without a default."""
        return None if self.get(key) is None else self.integer(key, minimum)

    def flag(self, key: str) -> bool:
        """Return the value of `key`; False if null, or absent without a default; raise HP305 if it is no boolean."""
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            self._refuse_value(key, value, "true or false")
        return bool(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the list of whole numbers of `key`, empty if null or absent; raise HP305 for another value."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(type(v) is int and abs(v) <= _MOST for v in value):
            self._refuse_value(key, value, "a list of whole numbers")
        return tuple(value)

    def refuse(self, problem: str, *, got: object, hint: str = PUBLISHED, allowed: object = None) -> NoReturn:
        """Raise ModelUnreadable (HP305) with the sentence `problem`."""
        raise ModelUnreadable(problem, where=self.where, got=got, allowed=allowed, hint=hint)

    def _refuse_value(self, key: str, value: object, allowed: str) -> NoReturn:
        name = self.aliases.get(key, key)
        problem = f"`{name}` has a value that is not allowed"
        hint = f"correct `{name}` in the config"
        self.refuse(problem, got=abbreviated(value), hint=hint, allowed=allowed)

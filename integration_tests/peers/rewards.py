"""The reward function of the rows of GRPO: both sides call it with the texts of completions."""

from __future__ import annotations

from typing import Any


def many_kinds(completions: list[str], **rest: Any) -> list[float]:
    """Return the number of different characters of every completion, less an eighth of its length."""
    return [float(len(set(text)) - len(text) / 8) for text in completions]

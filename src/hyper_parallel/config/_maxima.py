"""Largest counts that a recipe may name: beyond all machines and runs that are published, and cheap to plan for."""

from __future__ import annotations

from typing import Final

MOST_RANKS: Final = 2**20
"""Ranks of a run, and each degree: the largest clusters that are announced have some hundred thousand devices."""
MOST_STAGES: Final = 2**12
"""Pipeline stages, virtual ones included: no model has as many layers."""
MOST_LAYERS: Final = 2**16
"""Decoder layers of one stage."""
MOST_STEPS: Final = 10**9
"""Steps of a run; published runs have some million."""
MOST_SEQ_LEN: Final = 2**25
"""Tokens of a sequence; the longest context that is published has 10 million."""
MOST_TOKENS: Final = 2**32
"""Tokens of a step; published runs have up to some hundred million."""
MOST_SEQUENCES: Final = 2**22
"""Sequences of a step, over all ranks: each has an entry in memory."""
MOST_VOCABULARY: Final = 2**22
"""Entries of a tokenizer; the largest that is published has about a million."""
MOST_RANK: Final = 2**16
"""Rank of an adapter."""
MOST_REPEATS: Final = 2**16
"""Completions of a prompt, and steps from the same completions."""
MOST_SECONDS: Final = 1e9
"""Of a deadline: thirty years."""
MOST_WEIGHT: Final = 1e9
"""Of one source among several, as its inverse is the least: sums and shares stay exact enough."""

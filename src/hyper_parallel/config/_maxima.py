"""Upper bounds of counts in a recipe: above all published machines and runs, and still cheap to plan for."""

from __future__ import annotations

from typing import Final

MOST_RANKS: Final = 2**20
"""Ranks of a run, and each parallel degree. The largest announced clusters have some 100,000 devices."""
MOST_STAGES: Final = 2**12
"""Pipeline stages, including virtual ones. No model has that many layers."""
MOST_LAYERS: Final = 2**16
"""Decoder layers of one stage."""
MOST_STEPS: Final = 10**9
"""Steps of a run. Published runs have a few million."""
MOST_SEQ_LEN: Final = 2**25
"""Tokens of a sequence. The longest published context is 10 million."""
MOST_TOKENS: Final = 2**32
"""Tokens of a step. Published runs use up to a few hundred million."""
MOST_SEQUENCES: Final = 2**22
"""Sequences of a step over all ranks; each has an entry in memory."""
MOST_VOCABULARY: Final = 2**22
"""Entries of a tokenizer. The largest published one has about a million."""
MOST_RANK: Final = 2**16
"""Rank of an adapter."""
MOST_REPEATS: Final = 2**16
"""Completions per prompt, and optimizer steps on the same completions."""
MOST_SECONDS: Final = 1e9
"""Seconds or minutes of a deadline: 1e9 s is about thirty years."""
MOST_WEIGHT: Final = 1e9
"""Weight of a mixed source; its inverse is the minimum. Within these bounds float64 sums and shares are exact
enough."""
MOST_CHUNKS: Final = 64
"""Chunks of the tokens of one rank. Each is a collective of its own: large batches become slower long before."""

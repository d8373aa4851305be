"""Cost model: step time and memory of a strategy as terms with formulas, and the collectives of a step.

A candidate is a strategy with batch numbers; the formulas are evaluated for arrays of candidates. To price a candidate
is to predict its step time and memory. A card has measured or fitted constants of a device or of a stack (training
framework). A block is the attention or the feed-forward part of a layer.
"""

from hyper_parallel.cost._cards import (
    LOCAL_CARD,
    UNFITTED_HALF_WIDTH,
    DeviceCard,
    StackCard,
    by_field,
    card_names,
    cards_for_ranks,
    device_card,
    load_card,
    matching_card,
    numbers_of,
    own_cards_by_ranks,
    own_path,
    read_card,
    shipped_cards,
    stack_card,
    with_numbers,
)
from hyper_parallel.cost._collectives import (
    LINEAR_ENTRY,
    check_stage_layers,
    partition,
    rank_model,
    stage_layers,
    step_collectives,
)
from hyper_parallel.cost._memory import (
    RankStages,
    kept_bytes,
    memory_key,
    memory_terms,
    min_recompute_layers,
    offloaded_bytes,
    with_choices,
)
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._offload_copies import (
    COPIES,
    OffloadDemand,
    interpolate_copies,
    move_to_host,
)
from hyper_parallel.cost._pricing_case import Machine, Places, PricingCase
from hyper_parallel.cost._time import BlockPrices, LayerPrices, Scores, score, step_seconds
from hyper_parallel.cost.candidates import (
    COLUMN_OF,
    ORDERS,
    RECOMPUTE,
    SCHEDULES,
    SHAPES,
    VALUES,
    Candidates,
    distinct,
)

__all__ = [
    "COLUMN_OF",
    "COPIES",
    "LINEAR_ENTRY",
    "LOCAL_CARD",
    "ORDERS",
    "RECOMPUTE",
    "SCHEDULES",
    "SHAPES",
    "UNFITTED_HALF_WIDTH",
    "VALUES",
    "BlockPrices",
    "Candidates",
    "DeviceCard",
    "LayerPrices",
    "Machine",
    "ModelNumbers",
    "OffloadDemand",
    "Places",
    "PricingCase",
    "RankStages",
    "Scores",
    "StackCard",
    "by_field",
    "card_names",
    "cards_for_ranks",
    "check_stage_layers",
    "device_card",
    "distinct",
    "interpolate_copies",
    "kept_bytes",
    "load_card",
    "matching_card",
    "memory_key",
    "memory_terms",
    "min_recompute_layers",
    "move_to_host",
    "numbers_of",
    "offloaded_bytes",
    "own_cards_by_ranks",
    "own_path",
    "partition",
    "rank_model",
    "read_card",
    "score",
    "shipped_cards",
    "stack_card",
    "stage_layers",
    "step_collectives",
    "step_seconds",
    "with_choices",
    "with_numbers",
]

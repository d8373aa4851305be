"""Cost model: step time, memory and communication of a strategy, each as terms with a formula and a source."""

from hyper_parallel.cost._budget import offloaded_bytes
from hyper_parallel.cost._candidates import (
    ORDERS,
    RECOMPUTE,
    SCHEDULES,
    SHAPES,
    Candidates,
    distinct,
)
from hyper_parallel.cost._cards import (
    UNFITTED_HALF_WIDTH,
    DeviceCard,
    StackCard,
    by_field,
    card_names,
    device_card,
    load_card,
    numbers_of,
    read_card,
    stack_card,
    with_numbers,
)
from hyper_parallel.cost._collectives import LINEAR_ENTRY, Rows, step_collectives
from hyper_parallel.cost._copies import COPIES, Load, mixed_term, put_away
from hyper_parallel.cost._machine import Machine, Ring
from hyper_parallel.cost._memory import (
    RankStages,
    kept_bytes,
    memory_key,
    memory_terms,
    min_recompute_layers,
    under,
)
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._own_cards import (
    LOCAL_CARD,
    at_ranks,
    own_cards,
    own_cards_by_ranks,
    own_path,
)
from hyper_parallel.cost._setting import Places, Setting
from hyper_parallel.cost._stages import check_stage_layers, cut_layers, rank_model, stage_layers
from hyper_parallel.cost._step import BlockPrices, LayerPrices
from hyper_parallel.cost._time import Scores, peak_memory, score, step_cost, step_seconds

__all__ = [
    "COPIES",
    "LINEAR_ENTRY",
    "LOCAL_CARD",
    "ORDERS",
    "RECOMPUTE",
    "SCHEDULES",
    "SHAPES",
    "UNFITTED_HALF_WIDTH",
    "BlockPrices",
    "Candidates",
    "DeviceCard",
    "LayerPrices",
    "Load",
    "Machine",
    "ModelNumbers",
    "Places",
    "RankStages",
    "Ring",
    "Rows",
    "Scores",
    "Setting",
    "StackCard",
    "at_ranks",
    "by_field",
    "card_names",
    "check_stage_layers",
    "cut_layers",
    "device_card",
    "distinct",
    "kept_bytes",
    "load_card",
    "memory_key",
    "memory_terms",
    "min_recompute_layers",
    "mixed_term",
    "numbers_of",
    "offloaded_bytes",
    "own_cards",
    "own_cards_by_ranks",
    "own_path",
    "peak_memory",
    "put_away",
    "rank_model",
    "read_card",
    "score",
    "stack_card",
    "stage_layers",
    "step_collectives",
    "step_cost",
    "step_seconds",
    "under",
    "with_numbers",
]

"""Cost model: step time, memory and communication of a strategy, each as terms with a formula and a source."""

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
from hyper_parallel.cost._machine import Machine, Ring
from hyper_parallel.cost._memory import (
    RankStages,
    kept_bytes,
    memory_key,
    memory_terms,
    min_recompute_layers,
    with_choices,
)
from hyper_parallel.cost._numbers import ModelNumbers
from hyper_parallel.cost._offload_copies import (
    COPIES,
    OffloadDemand,
    interpolate_copies,
    move_to_host,
)
from hyper_parallel.cost._offload_demand import offloaded_bytes
from hyper_parallel.cost._overlap import BlockSeconds, PassSeconds, layer_program, pass_span
from hyper_parallel.cost._own_cards import (
    LOCAL_CARD,
    cards_for_ranks,
    own_cards,
    own_cards_by_ranks,
    own_path,
)
from hyper_parallel.cost._pricing_case import Places, PricingCase
from hyper_parallel.cost._scores import Scores, peak_memory, score, step_cost
from hyper_parallel.cost._stages import check_stage_layers, cut_layers, rank_model, stage_layers
from hyper_parallel.cost._step import BlockPrices, LayerPrices
from hyper_parallel.cost._time import step_seconds

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
    "BlockSeconds",
    "Candidates",
    "DeviceCard",
    "LayerPrices",
    "Machine",
    "ModelNumbers",
    "OffloadDemand",
    "PassSeconds",
    "Places",
    "PricingCase",
    "RankStages",
    "Ring",
    "Rows",
    "Scores",
    "StackCard",
    "by_field",
    "card_names",
    "cards_for_ranks",
    "check_stage_layers",
    "cut_layers",
    "device_card",
    "distinct",
    "interpolate_copies",
    "kept_bytes",
    "layer_program",
    "load_card",
    "memory_key",
    "memory_terms",
    "min_recompute_layers",
    "move_to_host",
    "numbers_of",
    "offloaded_bytes",
    "own_cards",
    "own_cards_by_ranks",
    "own_path",
    "pass_span",
    "peak_memory",
    "rank_model",
    "read_card",
    "score",
    "stack_card",
    "stage_layers",
    "step_collectives",
    "step_cost",
    "step_seconds",
    "with_choices",
    "with_numbers",
]

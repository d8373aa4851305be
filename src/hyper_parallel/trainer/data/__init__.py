"""Data: from records on disk to packed, memory-mapped sequences, and to the batches of every rank.

    source -> documents -> tokens -> held-out split -> packed arrays (cached)            prepare(), one process
    packed arrays -> seeded order -> steps -> slice of a rank -> microbatches            Batches, every rank

A document is a text or a conversation. A target is a token with loss, such as a token of an assistant's answer.
`prepare` tokenizes and packs before ranks start, and ranks memory-map the arrays, so no collective waits for
tokenization. With `data.streaming`, each rank instead tokenizes and packs while it trains; see `streaming`.
"""

from hyper_parallel.trainer.data.batches import Balance, Batch, Batches, Grid, Order, StepRows
from hyper_parallel.trainer.data.chat import CHATML, PLAIN, render, stop_ids
from hyper_parallel.trainer.data.preparation import PackedData, prepare
from hyper_parallel.trainer.data.prompt_media import PromptMedia, encode_parts, has_parts
from hyper_parallel.trainer.data.saved_tokenizer import (
    copy_tokenizer,
    has_tokenizer,
    load_tokenizer,
    require_tokenizer,
)
from hyper_parallel.trainer.data.sequences import (
    IGNORE_INDEX,
    JoinedSequences,
    PackedSequences,
    media_inputs,
    media_rows,
)
from hyper_parallel.trainer.data.streaming import Stream, StreamBatches
from hyper_parallel.trainer.data.tokenizer_limits import tokenizing

__all__ = [
    "CHATML",
    "IGNORE_INDEX",
    "PLAIN",
    "Balance",
    "Batch",
    "Batches",
    "Grid",
    "JoinedSequences",
    "Order",
    "PackedData",
    "PackedSequences",
    "PromptMedia",
    "StepRows",
    "Stream",
    "StreamBatches",
    "copy_tokenizer",
    "encode_parts",
    "has_parts",
    "has_tokenizer",
    "load_tokenizer",
    "media_inputs",
    "media_rows",
    "prepare",
    "render",
    "require_tokenizer",
    "stop_ids",
    "tokenizing",
]

"""Generation on several ranks: the model is parallelized and loaded as for training, and ranks share the prompts.

dp   data-parallel ranks decode different prompts; with FSDP all ranks run the same number of forward passes
tp   the key-value cache is sharded by heads; logits are gathered, so all ranks choose the same token
pp   the key-value cache is sharded by layers; the last stage chooses the token and broadcasts it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyper_parallel.backends.torch import check_flow, check_pretrained, data_share, load_pretrained
from hyper_parallel.backends.torch.forward_variants import loop_over_experts
from hyper_parallel.errors import UnsupportedSharding, reported_by
from hyper_parallel.ir import Plan, Workload
from hyper_parallel.model import read_config, read_generation_config
from hyper_parallel.planner import parse_strategy
from hyper_parallel.runtime import (
    StrategyText,
    World,
    check_rank_count,
    gather_objects,
    launch,
    local_capacity,
    parallelize,
    plan_of,
)
from hyper_parallel.topology import rank_threads
from hyper_parallel.trainer.checkpoints.pieces import check_dtype
from hyper_parallel.trainer.data import load_tokenizer
from hyper_parallel.trainer.decoding import SLOTS, DecodingSequence, Sampling
from hyper_parallel.trainer.engine.auto_model import model_from_config
from hyper_parallel.trainer.engine.recipe_model import check_parameters
from hyper_parallel.trainer.generation import DTYPES, OTHER_TOKENIZER, TRUST, decode, find_export
from hyper_parallel.trainer.job import under_torchrun
from hyper_parallel.trainer.model_properties import properties_of
from hyper_parallel.trainer.signals import StopRequest
from hyper_parallel.trainer.text_codec import Generation, PromptBatch, TextCodec

_WHERE = "--parallel"
_Sequences = dict[int, DecodingSequence]
"""Sequences by the index of their prompt."""


def generate_on_ranks(
    directory: str | Path,
    prompts: Sequence[str | Generation],
    sampling: Sampling,
    parallel: str,
    *,
    chat: bool = False,
    slots: int = SLOTS,
    device: str = "auto",
    dtype: str | None = None,
    trusted: bool = False,
    stop: StopRequest | None = None,
) -> list[Generation]:
    """Continue many prompts like `Generator.generate_batch`, on local ranks launched here or on ranks of torchrun.

    `directory`, `device`, `dtype` and `trusted` are arguments of `Generator`; adapters are not supported. `parallel`
    is a layout as keys of a recipe's `parallel` section, for example `tp=2` or `dp_replicate=2 pp=2`. `slots` is the
    maximum number of concurrent sequences per data-parallel rank. A request by `stop` returns the results so far.

    Raises:
        UnsupportedSharding: HP205 for the axis cp, for adapters, and for layouts that `parallelize` does not support.
        BadValue: HP102 for an invalid layout or dtype, or for prompts with images or audio.
        RunUnreadable: HP603 when `directory` has no exported model, or no tokenizer.
        DeviceUnavailable: HP502 for more ranks than this machine can run.
        RankFailed: HP601 when a rank died.
        HyperParallelError: Errors of `PromptBatch`, of launching ranks, and of loading model and tokenizer.
    """
    strategy = parse_strategy(parallel)
    if strategy.cp > 1:
        raise UnsupportedSharding(
            "generation does not support cp, because a decoding step has a single token per sequence",
            where=_WHERE,
            got=f"cp={strategy.cp}",
            allowed="pp, dp_replicate, dp_shard, tp, ep",
            hint="leave out cp and its options, or use tp, pp or dp_replicate in its place",
        )
    kind = None if device == "auto" else device.partition(":")[0]
    if not under_torchrun():
        hint = "fewer ranks, or torchrun --nnodes=N --nproc-per-node=8 -m hyper_parallel generate"
        check_rank_count(strategy.world_size, local_capacity(kind), _WHERE, hint)
    export = find_export(directory)
    check_dtype(dtype, DTYPES)
    with reported_by(StrategyText(parallel, _WHERE)):
        model, plan = _model_and_plan(export, parallel, dtype, trusted=trusted)
    tokenizer = load_tokenizer(export, trusted=trusted, other=OTHER_TOKENIZER, code=TRUST)
    texts = TextCodec(tokenizer, model.config, model.generation_config.eos_token_id)
    batch = PromptBatch(texts, prompts, sampling, chat=chat)

    def rank(_: int = 0) -> list[_Sequences]:
        with World.join(kind) as world:
            parallelized = parallelize(model, plan, world)
            load_pretrained(parallelized, export, device=world.device)
            return gather_objects(_decode_share(parallelized, batch, slots, stop))

    ranks = strategy.world_size
    for part in rank() if under_torchrun() else launch(rank, ranks, threads=rank_threads(ranks), echo_rank=0)[0]:
        batch.sequences.update(part)
    return batch.generations()


def _decode_share(model: nn.Module, batch: PromptBatch, slots: int, stop: StopRequest | None) -> _Sequences:
    share, shares = data_share(model)
    own = dict([*batch.sequences.items()][share::shares])
    decode(model.eval(), [*own.values()], batch, slots, None if stop is None else lambda: stop.is_requested)
    return own


def _model_and_plan(export: Path, parallel: str, dtype: str | None, *, trusted: bool) -> tuple[Any, Plan]:
    """Return the exported model on the meta device, and a checked plan for the model in the layout `parallel`."""
    from transformers import GenerationConfig

    if not (export / "config.json").is_file():
        raise UnsupportedSharding(
            "--parallel does not support adapters, because adapters are merged on a single rank",
            where=_WHERE,
            got=str(export),
            hint="leave out --parallel",
        )
    file = read_config(str(export))
    stored = file.values.get("dtype") or file.values.get("torch_dtype") or "float32"
    dtype = dtype or str(stored)
    model = model_from_config(file, getattr(torch, dtype), trusted=trusted)
    if read_generation_config(export) is not None:
        model.generation_config = GenerationConfig.from_pretrained(export)
    check_pretrained(model, export)
    loop_over_experts(model, getattr(torch, dtype))
    formats = dict.fromkeys(("compute_dtype", "param_dtype", "reduce_dtype"), dtype)
    # No pipeline schedule runs; this number of microbatches is valid for every schedule.
    steps = 2 * parse_strategy(parallel).stages
    work = Workload(128, microbatch=1, accumulation_steps=steps, **formats)
    plan = plan_of(model, parallel, work)
    plan = replace(plan, properties=properties_of(file, trusted=trusted))
    check_parameters(model, plan, str(export), "more ranks in --parallel, or a smaller model")
    check_flow(model, plan)
    return model, plan

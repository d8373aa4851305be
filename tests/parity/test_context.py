"""Context parallelism against one device: every kind, mask and combination, each world size in one fork."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

import hyper_parallel as hp
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.ir import Strategy
from hyper_parallel.runtime import World, launch, parallelize
from tests.parity.universal import Reference, Setup, check_on_ranks, run
from tests.slow import slow_cells

pytestmark = pytest.mark.parity


class _Frozen(dict):
    """A dict that can be a part of a setup, which is a key."""

    def __hash__(self) -> int:
        return hash(repr(self))


_SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA = Setup("llama", sequences=4)
QWEN = Setup("qwen3", tied=True, sequences=4, seq_len=13)
MISTRAL = Setup("mistral", sequences=4, config=(("sliding_window", 3),))
"""A window so small that some rounds of the ring are left out."""
PACKED = Setup("llama", sequences=4, seq_len=15, packed=True, accumulation=2)
MLA = Setup("deepseek_v3", sequences=2, config=(("first_k_dense_replace", 2),))
GEMMA = Setup("gemma3_text", sequences=2, packed=True)
CAPPED = Setup("gemma2", sequences=2)
SINKS = Setup("gpt_oss", sequences=2, config=(("experts_implementation", "eager"),))
SINKS_PACKED = replace(SINKS, packed=True)
ONE_KEY_HEAD = Setup("llama", sequences=2, config=(("num_key_value_heads", 1),))
THREE_HEADS = Setup("qwen3", sequences=2, config=(("num_attention_heads", 6), ("num_key_value_heads", 3)))
LONGROPE = Setup(
    "phi3",
    sequences=2,
    config=(
        ("original_max_position_embeddings", 14),
        ("rope_parameters", _Frozen({
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 14,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        })),
    ),
)  # fmt: skip
"""The second rank alone would take the factors of short sequences: it sees 12 of 16 positions."""

CASES: dict[str, tuple[int, list[tuple[Setup, Strategy]]]] = {
    "2": (2, [
        (LLAMA, Strategy(cp=2)),
        (QWEN, Strategy(cp=2, recompute="full")),
        (MISTRAL, Strategy(cp=2, cp_kind="ulysses")),
        (PACKED, Strategy(cp=2, cp_kind="all_gather")),
        (MLA, Strategy(cp=2)),
        (MLA, Strategy(cp=2, cp_kind="ulysses", recompute="full")),
        (GEMMA, Strategy(cp=2)),
        (CAPPED, Strategy(cp=2)),
        (SINKS, Strategy(cp=2)),
        (SINKS_PACKED, Strategy(cp=2, cp_kind="ulysses")),
        (THREE_HEADS, Strategy(cp=2, cp_kind="ulysses")),
        (LONGROPE, Strategy(cp=2)),
        (PACKED, Strategy(tp_x=2)),
    ]),
    "4": (4, [
        (MISTRAL, Strategy(cp=4, recompute="full")),
        (PACKED, Strategy(cp=4, cp_kind="hybrid", cp_ulysses=2)),
        (GEMMA, Strategy(cp=4, cp_kind="hybrid", cp_ulysses=2, recompute="full")),
        (ONE_KEY_HEAD, Strategy(cp=2, cp_kind="ulysses", tp_x=2, recompute="full")),
        (PACKED, Strategy(cp=2, pp=2, recompute="full")),
    ]),
    "more on 4": (4, [
        (QWEN, Strategy(cp=4)),
        (ONE_KEY_HEAD, Strategy(cp=4, cp_kind="ulysses")),
        (QWEN, Strategy(cp=2, tp_x=2)),
        (PACKED, Strategy(cp=2, dp_shard=2, reshard_after_forward=False)),
        (LLAMA, Strategy(cp=2, dp_replicate=2)),
    ]),
    "8": (8, [
        (QWEN, Strategy(dp_shard=2, cp=2, tp_x=2, recompute="full")),
        (LLAMA, Strategy(cp=8, cp_kind="hybrid", cp_ulysses=4)),
        (QWEN, Strategy(cp=2, tp_x=2, tp_y=2)),
    ]),
}  # fmt: skip


@slow_cells("2", "more on 4", "8", "4")
@pytest.mark.parametrize("name", CASES)
def test_context_parallelism_equals_one_device(name: str) -> None:
    size, cases = CASES[name]
    check_on_ranks(size, cases)


def test_what_the_cases_are_about_changes_the_loss() -> None:
    """Documents, windows, caps and sinks would not be tested if one device gave the same without them."""
    plain = Reference(LLAMA).result.share
    assert plain != pytest.approx(Reference(MISTRAL).result.share, rel=1e-3)
    with World.join("cpu") as world:
        whole = Setup("llama", sequences=4, seq_len=15, accumulation=2)
        together = run(whole, whole.build(), Strategy(), world).share
    assert together != pytest.approx(Reference(PACKED).result.share, rel=1e-3)


def test_documents_do_not_see_each_other_on_one_device() -> None:
    """GPT-OSS of transformers alone would let them."""
    setup = replace(SINKS_PACKED, sequences=1, seq_len=24)
    batch = setup.batch()
    ids, positions = batch["input_ids"], batch["position_ids"]
    with World.join("cpu") as world, torch.no_grad():
        model = parallelize(setup.build(), setup.plan(Strategy()), world)
        found = model(input_ids=ids, position_ids=positions).logits
        starts = [*(positions[0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
        alone = [model(input_ids=ids[:, a:b]).logits for a, b in itertools.pairwise(starts)]
    assert len(alone) > 2
    torch.testing.assert_close(found, torch.cat(alone, dim=1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["mistral3", "llava"])
def test_the_decoder_of_a_model_with_a_larger_vision_tower_is_sharded_over_tp_and_cp(family: str) -> None:
    """With cp the decoder has its own config; the layers found afterwards must still be those of the decoder."""
    text = {"model_type": "mistral", **_SIZES, "num_hidden_layers": 2}
    vision = {"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4,
              "num_attention_heads": 4, "image_size": 32, "patch_size": 8, "head_dim": 16}  # fmt: skip
    config = AutoConfig.for_model(family, text_config=text, vision_config=vision, image_token_index=95)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float64)
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))

    def step(words: str) -> tuple[float, float]:
        parallel = copy.deepcopy(model)
        hp.parallelize(parallel, hp.plan_of(model, words))
        loss = hp.forward_backward(parallel, [{"input_ids": ids, "labels": ids}])
        return loss.item(), hp.clip_grad_norm_(parallel, None).item()

    expected = step("")
    for found in launch(lambda _: step("tp=2 cp=2"), 4, timeout_s=120):
        assert found == pytest.approx(expected, rel=1e-10)


def test_outputs_refusals_and_two_models_in_one_process() -> None:
    reference = Reference(LLAMA)
    ids = LLAMA.batch()["input_ids"]
    with torch.no_grad():
        wanted = LLAMA.build()(ids).logits

    def rank(number: int) -> None:
        with World.join("cpu") as world:
            strategies = (Strategy(cp=2), Strategy(cp=2, cp_kind="ulysses"))
            models = []
            for strategy in strategies:
                for ranks in ([0, 1], [2, 3]):
                    if number in ranks:
                        plan = LLAMA.plan(strategy)
                        models.append(parallelize(LLAMA.build(), plan, world, ranks))
                    else:
                        world.mesh(strategy, ranks)
            for model in models:
                assert model.config._attn_implementation == "hyper_parallel"
                found = model(input_ids=ids)
                torch.testing.assert_close(found.logits, wanted, rtol=1e-6, atol=1e-6)
                # Labels are shifted before the cut, so a target may lie on another rank.
                found = model(ids, labels=ids)
                assert found.logits is None
                total = found.loss.detach().clone()
                torch.distributed.all_reduce(total)
                expected = torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
                torch.testing.assert_close(total, 2 * expected, rtol=1e-6, atol=0.0)
                for wrong in (
                    {"attention_mask": torch.ones_like(ids)},
                    {"use_cache": True},
                    {"output_hidden_states": True},
                    {"output_attentions": True},
                ):
                    with pytest.raises(UnsupportedSharding) as caught:
                        model(input_ids=ids, **wrong)
                    assert next(iter(wrong)) in caught.value.what

    launch(rank, 4, timeout_s=100)
    assert reference.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ((("attention_dropout", 0.1),), "attention dropout"),
        ((("is_causal", False),), "not causal"),
    ],
)  # fmt: skip
def test_attention_that_would_not_be_repeated_is_refused(config, says) -> None:
    setup = Setup("llama", config=config)

    def rank(_: int) -> None:
        with World.join("cpu") as world, pytest.raises(UnsupportedSharding) as caught:
            parallelize(setup.build(), setup.plan(Strategy(cp=2)), world)
        assert says in caught.value.what

    launch(rank, 2, timeout_s=180)

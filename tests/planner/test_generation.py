"""Plans of generation: closed forms on a machine with round numbers, exact search, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hyper_parallel.cost import Machine
from hyper_parallel.errors import (
    BadValue,
    DegreesMismatch,
    DoesNotFit,
    HyperParallelError,
    NoLegalStrategy,
    UnsupportedSharding,
)
from hyper_parallel.ir import GenerateWorkload, Strategy, Workload
from hyper_parallel.model import load_model, spec_from_config
from hyper_parallel.planner import parse_strategy
from hyper_parallel.planner.generation import plan_generation
from tests.cost.machines import machine, score_strategy, small_model

LONG = GenerateWorkload(prompts=8, prompt_len=1024, new_tokens=64, dtype="bfloat16")
RATE = Machine.of(machine(), "bfloat16").stream_bytes_s


def experts(**more):
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "intermediate_size": 768,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "vocab_size": 4096,
    }
    return spec_from_config(config | more, name="experts")


def elements(model, *, routed=False):
    params = [p for b in model.decoder_blocks for p in b.params if p.is_expert == routed]
    return model.num_layers * sum(p.num_elements for p in params)


def priced(model, parallel="", work=LONG, **more):
    return plan_generation(model, machine(**more), work, strategy=parallel).best


def test_decode_reads_weights_and_cache_once():
    """Few sequences on one device with heads of their own: bytes over the memory's rate, to the last digit."""
    model = small_model(heads=8, kv_heads=8)
    made = priced(model)
    # Layers, sequences, mean length, bytes of keys and values of 8 heads of 32.
    cache = 4 * 8 * (1024 + 32) * 2 * 2 * 8 * 32
    assert made.decode["weights and products"] == pytest.approx(2 * elements(model) / RATE)
    assert made.decode["cache and attention"] == pytest.approx(cache / RATE)
    assert made.token_s == pytest.approx(sum(made.decode.values()))
    assert made.total_s == pytest.approx(made.prefill_s + 63 * made.token_s)
    assert made.tokens_s == pytest.approx(8 * 64 / made.total_s)


def test_a_mask_lets_grouped_keys_be_written_and_read_for_every_query_head():
    whole, grouped = (priced(small_model(heads=8, kv_heads=kv)) for kv in (8, 2))
    assert grouped.cache_bytes * 4 == whole.cache_bytes
    read, other = (m.decode["cache and attention"] for m in (grouped, whole))
    assert read == pytest.approx(other * (1 / 4 + 2))


def test_tensor_parallelism_divides_what_is_read_and_pays_latency():
    model = small_model(heads=8, kv_heads=4)
    one, two, eight = (priced(model, f"tp={n}" if n > 1 else "") for n in (1, 2, 8))
    # Norms are whole on every rank.
    norms = sum(p.num_elements for _, p in model.named_params() if not p.is_matrix)
    assert two.weight_bytes - 2 * norms == (one.weight_bytes - 2 * norms) / 2
    assert two.cache_bytes == one.cache_bytes / 2
    assert eight.cache_bytes == one.cache_bytes / 4  # a head on two ranks
    assert two.decode["cache and attention"] == pytest.approx(one.decode["cache and attention"] / 2)
    # A full mesh: one step of 5 us for each of the two gathers and scatters of a layer, and at both ends.
    assert two.decode["tp communication"] == pytest.approx((4 * 4 + 3) * 5e-6, rel=0.2)
    assert "tp communication" not in one.decode


def test_a_pipeline_divides_bytes_and_no_time():
    model = small_model(layers=4)
    one, two = priced(model), priced(model, "pp=2")
    assert two.cache_bytes == one.cache_bytes / 2
    assert two.parallel == "pp=2 stage_layers=[2,2]"
    for name in ("weights and products", "cache and attention"):
        assert two.decode[name] == pytest.approx(one.decode[name])
    assert two.decode["pipeline sends"] > 0
    assert two.token_s > one.token_s


def test_replicas_divide_sequences_and_shards_gather_what_they_lack():
    model = small_model(kv_heads=8)
    one, replicas, shards = (
        priced(model),
        priced(model, "dp_replicate=2"),
        priced(model, "dp_shard=2"),
    )
    assert (replicas.slots, replicas.batch, replicas.weight_bytes) == (4, 8, one.weight_bytes)
    assert replicas.decode["cache and attention"] == pytest.approx(one.decode["cache and attention"] / 2)
    assert "agreement" not in replicas.decode
    assert shards.weight_bytes == one.weight_bytes / 2
    assert shards.cache_bytes == replicas.cache_bytes
    assert shards.decode["fsdp communication"] > 0
    assert shards.token_s > replicas.token_s


def test_decode_reads_the_experts_that_tokens_choose():
    model = experts()
    dense, routed = 2 * elements(model), 2 * elements(model, routed=True)
    for prompts, parallel, share in (
        (1, "", 2 / 16),
        (4, "", 1 - (1 - 2 / 16) ** 4),
        (
            8,
            "dp_shard=2 ep=2",
            (1 - (1 - 2 / 16) ** 8) / 2,
        ),  # 8 tokens choose among the 8 of this rank
        (8, "dp_replicate=2", 1 - (1 - 2 / 16) ** 4),
    ):
        made = priced(model, parallel, replace(LONG, prompts=prompts))
        assert made.decode["weights and products"] == pytest.approx((dense + share * routed) / RATE)


@pytest.mark.parametrize("parallel", ["", "tp=4", "dp_replicate=4"])
def test_a_prefill_that_fills_the_device_is_the_forward_pass_of_training(parallel):
    """A third of the products of a training step, 2 of 7 parts of its attention, 4 of 8 calls of a layer."""
    model, node, formats = (
        small_model(hidden=1024, heads=16, kv_heads=16),
        machine(memory_gib=512),
        "bfloat16",
    )
    made = priced(model, parallel, GenerateWorkload(64, 512, 1, formats), memory_gib=512)
    strategy = parse_strategy(parallel)
    work = Workload(512, tokens_per_step=64 * 512, accumulation_steps=1, param_dtype=formats)
    scores = score_strategy(model, node, strategy, work.resolve(strategy.dp))
    terms = {t.name: t.seconds for t in scores.cost_at(0)}
    assert made.prefill["weights and products"] == pytest.approx(terms["matmul"] / 3)
    assert made.prefill["cache and attention"] == pytest.approx(terms["attention"] * 2 / 7)
    assert made.prefill["element-wise"] == pytest.approx(terms["element-wise"] * 0.4)
    if strategy.tp > 1:
        layers = made.prefill["tp communication"] - one_end(made, model, node)
        assert layers == pytest.approx(terms["tp communication"] / 2)


def one_end(made, model, node):
    """Seconds of scattering the embedding, gathering the last output and the logits of 64 sequences."""
    ring = Machine.of(node, "bfloat16").ring((np.array([4.0]), np.array([1.0])))
    stream = np.array([64 * 512 * model.hidden_size * 2.0])
    return float((2 * ring.seconds(stream) + ring.seconds(np.array([64 * 4096 * 2.0])))[0])


def test_more_prompts_take_longer_and_give_more_tokens():
    for model, parallel in itertools.product((small_model(), experts()), ("", "tp=2", "pp=2")):
        works = [replace(LONG, prompts=2**n) for n in range(12)]
        made = [priced(model, parallel, work) for work in works]
        for less, more in itertools.pairwise(made):
            assert more.token_s >= less.token_s
            assert more.prefill_s >= less.prefill_s
            assert more.tokens_s >= less.tokens_s
            assert more.memory_bytes > less.memory_bytes


@pytest.mark.parametrize("objective", ["throughput", "latency"])
@pytest.mark.parametrize("model", [small_model(), experts()], ids=["dense", "experts"])
def test_the_search_finds_the_best_of_everything_that_can_be_given(model, objective):
    """Brute force: every product of degrees is asked for by itself, and refused or priced."""
    node = machine(num_devices=8, memory_gib=1.3)
    work = GenerateWorkload(prompts=64, prompt_len=700, new_tokens=100)
    found = plan_generation(model, node, work, objective=objective, top=1000, memory_headroom=0.1)
    degrees, every, refused = (1, 2, 4, 8), {}, 0
    for pp, tp, replicas, shard, ep in itertools.product(degrees, repeat=5):
        if pp * tp * replicas * shard != 8:
            continue
        strategy = Strategy(pp=pp, tp_x=tp, dp_replicate=replicas, dp_shard=shard, ep=ep)
        try:
            one = plan_generation(model, node, work, strategy=strategy, objective=objective, memory_headroom=0.1).best
        except HyperParallelError:
            refused += 1
            continue
        if one.memory_bytes <= found.device_bytes:
            every[one.parallel] = one
    listed = (found.best, *found.runners_up)
    assert {p.parallel: p for p in listed} == every
    values = [p.total_s if objective == "latency" else -p.tokens_s for p in listed]
    assert values == sorted(values)
    assert refused
    assert len(every) == found.priced > 5


def test_throughput_lets_prompts_wait_and_latency_does_not():
    model, work = small_model(kv_heads=8), replace(LONG, prompts=100_000)
    node = machine(num_devices=2, memory_gib=2)
    made = plan_generation(model, node, work).best
    assert 0 < made.batch == made.largest_batch < work.prompts
    assert made.memory_bytes <= 2 * 2**30 * 0.95
    with pytest.raises(DoesNotFit, match="HP401") as caught:
        plan_generation(model, node, work, objective="latency")
    most = int(caught.value.hint.split()[1])
    plan_generation(model, node, replace(work, prompts=most), objective="latency")
    with pytest.raises(DoesNotFit):
        plan_generation(model, node, replace(work, prompts=most + 1), objective="latency")


def test_the_largest_batch_is_the_last_that_fits():
    model, node = small_model(), machine(num_devices=4, memory_gib=3)
    for parallel in ("tp=4", "pp=4", "dp_shard=4", "dp_replicate=2 tp=2"):
        one = plan_generation(model, node, LONG, strategy=parallel)
        most = one.best.largest_batch
        for prompts, fits in ((most, True), (most + 4, False)):
            work = replace(LONG, prompts=prompts)
            made = plan_generation(model, node, work, strategy=parallel, objective="latency")
            assert (made.best.memory_bytes <= made.device_bytes) == fits, parallel


def test_mla_keeps_its_latent_whole_and_expands_it_for_every_token():
    model = load_model("deepseek-v3")
    one, eight = (priced(model, p, memory_gib=4096) for p in ("", "tp=8"))
    assert one.cache_bytes == eight.cache_bytes == 61 * 8 * (1024 + 64) * (512 + 64) * 2
    cached = 8 * (1024 + 32)
    products = 61 * 2 * cached * 128 * (128 + 128) * 512 / machine().device.peak_flops["bfloat16"].value
    assert one.decode["cache and attention"] > products


def test_stages_are_cut_by_bytes():
    """The embedding of a wide vocabulary weighs as much as several layers."""
    model = small_model(layers=8)
    model = replace(
        model,
        blocks=tuple(
            replace(b, params=tuple(replace(p, shape=(40960, 256)) for p in b.params)) if b.name == "embedding" else b
            for b in model.blocks
        ),
    )
    cuts = [f"pp=2 stage_layers=[{n},{8 - n}]" for n in range(1, 8)]
    held = {m.parallel: m.weight_bytes + m.cache_bytes for m in (priced(model, cut) for cut in cuts)}
    chosen = priced(model, "pp=2")
    assert held[chosen.parallel] == chosen.weight_bytes + chosen.cache_bytes == min(held.values())
    assert chosen.parallel == "pp=2 stage_layers=[2,6]"


@pytest.mark.parametrize(
    ("error", "match", "more"),
    [
        (UnsupportedSharding, "does not support cp", {"strategy": "cp=2"}),
        (UnsupportedSharding, "tp_y", {"strategy": "tp_x=2 tp_y=2"}),
        (UnsupportedSharding, "virtual_stages", {"strategy": "pp=2 virtual_stages=2 schedule=interleaved"}),
        (DegreesMismatch, "HP301", {"strategy": "tp=2", "num_devices": 4}),
        (HyperParallelError, "HP203", {"strategy": "tp=3"}),
        (HyperParallelError, "HP203", {"strategy": "dp_shard=3 ep=3"}),
        (BadValue, "unknown objective", {"objective": "step-time"}),
        (BadValue, "does not support the dtype", {"workload": GenerateWorkload(dtype="float8_e4m3fn")}),
        (BadValue, "context", {"workload": GenerateWorkload(prompt_len=4000)}),
        (NoLegalStrategy, "more data-parallel ranks than prompts", {"num_devices": 7, "workload": GenerateWorkload(1)}),
    ],
)  # fmt: skip
def test_what_does_not_generate_is_refused_by_name(error, match, more):
    given = {"topology": machine(), "workload": LONG, **more}
    with pytest.raises(error, match=match) as caught:
        plan_generation(small_model(), **given)
    assert caught.value.hint


def test_hints_keep_no_option_that_contradicts_them():
    with pytest.raises(NoLegalStrategy, match="more data-parallel ranks") as caught:
        plan_generation(small_model(), machine(), GenerateWorkload(1), strategy="dp_shard=4")
    assert caught.value.hint == "--devices 4, without --parallel"
    context = small_model().max_position_embeddings
    too_long = GenerateWorkload(prompt_len=8, new_tokens=context)
    with pytest.raises(BadValue, match="context") as caught:
        plan_generation(small_model(), machine(), too_long)
    assert caught.value.hint == f"--prompt-len 1 --new-tokens {context - 1}"


def test_other_families_and_quantised_weights_are_refused_by_name():
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    config |= {"intermediate_size": 64, "model_type": "llama", "dtype": "bfloat16"}
    other = spec_from_config(config | {"model_type": "unknown_decoder", "rms_norm_eps": 1e-6}, name="x")
    with pytest.raises(UnsupportedSharding, match="family `unknown_decoder`"):
        plan_generation(other, machine())
    model = spec_from_config(config | {"quantization_config": {"quant_method": "fp8"}}, name="x")
    with pytest.raises(UnsupportedSharding, match="quantised weights") as caught:
        plan_generation(model, machine())
    assert "--dtype bfloat16" in caught.value.hint
    assert plan_generation(model, machine(), GenerateWorkload(dtype="bfloat16")).best.weight_bytes


@pytest.mark.parametrize("name", ["prompts", "prompt_len", "new_tokens"])
def test_lengths_start_at_one(name):
    with pytest.raises(BadValue, match=name):
        GenerateWorkload(**{name: 0})
    assert priced(small_model(), work=GenerateWorkload(1, 1, 1)).total_s > 0


def test_what_is_ruled_out_is_counted():
    found = plan_generation(small_model(), machine(num_devices=16), replace(LONG, prompts=4))
    reasons = Counter(found.ruled_out)
    assert reasons["more data-parallel ranks than prompts"]
    assert found.priced + sum(reasons.values()) > 20


@pytest.mark.parametrize("text", ["tp=2 'x", 'tp=2 "', "tp=2 \\"])
def test_a_strategy_with_an_open_quote_is_refused(text):
    with pytest.raises(BadValue, match="cannot be split into words"):
        plan_generation(small_model(), machine(), LONG, strategy=text)


def test_the_hint_without_cp_keeps_the_number_of_devices():
    asked = (small_model(), machine(), LONG)
    with pytest.raises(UnsupportedSharding) as caught:
        plan_generation(*asked, num_devices=8, strategy="cp=2 tp=4")
    assert caught.value.hint == '--parallel "dp_shard=2 tp=4"'
    plan_generation(*asked, num_devices=8, strategy="dp_shard=2 tp=4")


@pytest.mark.parametrize(("text", "where"), [("cp", "--parallel"), ("tp=x", "--parallel: tp_x"), ("'", "--parallel")])
def test_an_error_in_the_text_of_a_layout_names_its_option(text, where):
    with pytest.raises(BadValue) as caught:
        plan_generation("llama-3-8b", "dgx-h100", strategy=text)
    assert caught.value.where == where


def test_prompts_that_need_more_devices_are_answered_with_a_number_that_fits():
    asked = ("llama-3-70b", "dgx-h100", GenerateWorkload(prompts=512, prompt_len=6000))
    with pytest.raises(DoesNotFit) as caught:
        plan_generation(*asked, num_devices=1, objective="latency")
    assert caught.value.hint == "--devices 32"
    plan_generation(*asked, num_devices=32, objective="latency")

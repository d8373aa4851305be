"""Generation on two ranks chooses the tokens of one."""

import json
from itertools import cycle, product

import pytest
from typer.testing import CliRunner

from hyper_parallel.backends.torch import data_share
from hyper_parallel.backends.torch.decode_slots import SlotPasses
from hyper_parallel.cli import application
from hyper_parallel.errors import HyperParallelError, UnsupportedSharding
from hyper_parallel.ir import Workload
from hyper_parallel.runtime import World, launch, parallelize, plan_of
from hyper_parallel.trainer.decoding import Sampling, make_decoder
from tests.slow import slow_cells
from tests.trainer_generate.test_batch import FAMILIES, decoded, model_of, running

pytestmark = [pytest.mark.torch, pytest.mark.e2e]

GREEDY = Sampling(8, temperature=0)
LAYOUTS = ("tp=2", "pp=2", "dp_replicate=2")
AS_OTHERS = ("qwen2", "gemma2", "olmo2", "starcoder2", "stablelm", "granite", "cohere", "mixtral")
"""Families whose caches and products are cut as those of llama, gemma3_text, mistral or qwen3_moe."""
FEW = [
    *(case for case in zip(FAMILIES, cycle(LAYOUTS), strict=False) if case[0] not in AS_OTHERS),
    ("llama", "dp_shard=2"),
    ("mamba", "dp_shard=2"),
    ("qwen3_moe", "dp_shard=2 ep=2"),
]
# Fused products of GPT-2 are not cut; all heads of DeepSeek-V3 read one latent.
NOT_DIVIDED = {("gpt2", "tp=2"), ("deepseek_v3", "tp=2")}


def tokens_on(world, family, layout):
    """This rank's share of the sequences, and the bytes of its cache."""
    model = model_of(family)
    formats = dict.fromkeys(("compute_dtype", "param_dtype", "reduce_dtype"), "float64")
    work = Workload(64, microbatch=1, accumulation_steps=4, **formats)
    parallelize(model, plan_of(model, layout, work), world).eval()
    share, shares = data_share(model)
    # The first share ends long before the other, and goes on passing with it.
    sequences = running(GREEDY)[share * 4 :] if shares == 2 and share else running(GREEDY)
    sequences = sequences[:4] if shares == 2 and not share else sequences
    for sequence in sequences[:4] if share == 0 and shares == 2 else ():
        sequence.limit = 2
    decoder = make_decoder(model, sequences, GREEDY, (), 3)
    for _ in decoder.run():
        pass
    cached = decoder.passes.cache_bytes if isinstance(decoder.passes, SlotPasses) else 0
    return [(s.number, s.text) for s in sequences], cached


@slow_cells("cases0")
@pytest.mark.parametrize("cases", [FEW, pytest.param([*product(FAMILIES, LAYOUTS)], marks=pytest.mark.slow)])
def test_layouts_choose_the_tokens_of_one_rank_and_divide_the_cache(cases):
    expected, whole = {}, {}
    for family in {family for family, _ in cases}:
        model = model_of(family)
        expected[family] = [s.text for s in decoded(model, running(GREEDY), GREEDY)]
        decoder = make_decoder(model, running(GREEDY), GREEDY, (), 3)
        decoder.step()
        whole[family] = getattr(decoder.passes, "cache_bytes", 0)

    def rank(_):
        with World.join("cpu") as world:
            return [tokens_on(world, *case) for case in cases]

    for made in launch(rank, 2, timeout_s=100):
        for (family, layout), (texts, cached) in zip(cases, made, strict=True):
            assert texts, (family, layout)
            for number, text in texts:
                assert text == expected[family][number][: len(text)], (family, layout)
            if "dp" not in layout:
                ranks = 1 if (family, layout) in NOT_DIVIDED else 2
                assert cached == whole[family] / ranks, (family, layout)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": text} for text in ("def f1", "return 7", "x", "def f22(")]
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def generated(run_dir, prompts, *more):
    words = ["generate", str(run_dir), "--prompts", str(prompts), "--device", "cpu"]
    result = CliRunner().invoke(application(), [*words, "--max-new-tokens", "8", *more])
    if isinstance(result.exception, HyperParallelError):
        raise result.exception
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    return [(m["prompt"], m["text"], m["token_ids"], m["finish"]) for m in lines]


@pytest.mark.parametrize("layout", ["tp=2", "pp=2", "dp_replicate=2"])
def test_the_command_starts_ranks_and_writes_what_one_rank_does(run_dir, prompts, layout):
    one = generated(run_dir, prompts)
    assert generated(run_dir, prompts, "--parallel", layout, "--slots", "2") == one


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ("cp=2", "generation does not support cp"),
        ("tp=3", "HP203"),
        ("pp=4", "layers"),
        ("dq=2", "HP101"),
    ],
)
def test_what_decoding_does_not_do_is_refused_before_ranks_start(run_dir, prompts, words, match, monkeypatch):
    monkeypatch.setattr("hyper_parallel.trainer.generation_ranks.launch", None)
    with pytest.raises(HyperParallelError, match=match) as caught:
        generated(run_dir, prompts, "--parallel", words)
    assert caught.value.hint or not isinstance(caught.value, UnsupportedSharding)


def test_an_adapter_is_not_laid_out(tmp_path, prompts, run_dir):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for file in (run_dir / "export").glob("tokenizer*"):
        (adapter / file.name).write_bytes(file.read_bytes())
    (adapter / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedSharding, match="adapters are merged on a single rank"):
        generated(adapter, prompts, "--parallel", "tp=2")

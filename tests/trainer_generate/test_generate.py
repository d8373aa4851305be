"""Generation: the cache changes no token, a seed decides every draw, and what is missing is named."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from typer.testing import CliRunner

from hyper_parallel.cli.generate_command import generate as command
from hyper_parallel.config import load_recipe
from hyper_parallel.errors import (
    BadValue,
    BudgetImpossible,
    Contradiction,
    DeviceUnavailable,
    OutputNotWritable,
    RunUnreadable,
    UnknownPeak,
    WeightsUnreadable,
    printable,
)
from hyper_parallel.trainer.data import stop_ids
from hyper_parallel.trainer.decoding import choose
from hyper_parallel.trainer.generation import (
    Generator,
    Sampling,
    decode_tokens,
    stream_text,
)
from hyper_parallel.trainer.job import prepare_job
from hyper_parallel.trainer.stages.rollouts import Sampler
from hyper_parallel.trainer.stages.sampling import Weights
from hyper_parallel.trainer.text_codec import PromptBatch
from tests.trainer_generate.conftest import SIZES

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def generator(run_dir):
    return Generator(run_dir, device="cpu")


def recompute(model, ids, count):
    """Greedy tokens from a full forward pass per token, without any cache."""
    ids = list(ids)
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
    return ids[-count:]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_decoding_with_the_cache_equals_recomputing_everything(dtype, family, tied):
    torch.manual_seed(1)
    sizes = SIZES | {"tie_word_embeddings": tied}
    if family == "llama":
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))
    model = model.to(dtype).eval()
    prompt = [5, 300, 17, 17, 2]
    tokens = list(decode_tokens(model, prompt, Sampling(40, temperature=0)))
    assert tokens == recompute(model, prompt, 40)
    assert len(set(tokens)) > 1


def test_a_seed_decides_the_text(generator):
    texts = [generator.generate("def ", Sampling(30, seed=s)).text for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("cut", [{"top_p": 0.7}, {"top_p": 1.0, "top_k": 2}])
def test_a_sample_follows_the_distribution_cut_at_top_p_or_top_k(cut):
    logits = torch.tensor([0.1, 0.5, 0.3, 0.1]).log().expand(4000, 4)
    drawn = torch.rand(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = choose(logits, drawn, Sampling(temperature=1.0, **cut))
    share = torch.bincount(tokens.long(), minlength=4) / 4000
    torch.testing.assert_close(share, torch.tensor([0.0, 0.625, 0.375, 0.0]), atol=0.03, rtol=0)
    expected = logits.double().log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    assert torch.equal(logprobs, expected)


def test_the_distribution_is_that_of_transformers_processors():
    """Temperature, top_k, top_p of what is left: draws in the middle and near the ends of every share."""
    random = torch.Generator().manual_seed(0)
    for case in range(48):
        logits = 2 * torch.randn(1, 12, generator=random, dtype=torch.float64)
        temperature, top_k, top_p = (
            (0.5, 1.0, 1.7)[case % 3],
            case % 8,
            (1.0, 0.9, 0.6, 0.2)[case % 4],
        )
        if top_p == 1:  # tokens that are as likely as the last one stay
            logits = logits.round()
        wanted = TemperatureLogitsWarper(temperature)(None, logits)
        wanted = TopKLogitsWarper(top_k)(None, wanted) if top_k else wanted
        wanted = TopPLogitsWarper(top_p)(None, wanted) if top_p < 1 else wanted
        shares = wanted.softmax(-1)[0]
        ends = shares.cumsum(0)
        tokens = (shares > 0).nonzero()[:, 0]
        for place in (1e-6, 0.5, 1 - 1e-6):
            drawn = (ends - shares + place * shares)[tokens]
            sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
            chosen, _ = choose(logits.expand(len(tokens), -1), drawn, sampling)
            assert chosen.long().tolist() == tokens.tolist(), (case, shares)


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(generator):
    free = list(decode_tokens(generator.model, [5], Sampling(20, temperature=0)))
    stop = free[7]
    first = free.index(stop)
    stopped = decode_tokens(generator.model, [5], Sampling(20, temperature=0), {stop})
    assert list(stopped) == free[:first]


def test_rollouts_end_where_an_answer_of_generate_ends(run_dir, tmp_path):
    """Tokens that only generation_config.json lists: completions that began with two of them end there."""
    export = copy_export(run_dir, tmp_path / "model")
    asked = [{"prompt": text, "completion": "x"} for text in ("f1", "f2")]
    (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in asked))
    recipe = {
        "model": {"path": str(export)}, "stage": "grpo", "output_dir": str(tmp_path / "run"),
        "data": {"source": str(tmp_path / "records.jsonl"), "packing": False, "holdout": 0, "seq_len": 48,
                 "cache_dir": str(tmp_path / "cache")},
        "training": {"steps": 1, "tokens_per_step": 96, "microbatch": 2}, "parallel": {"dp_shard": 1},
        "grpo": {"max_completion_length": 4, "num_generations": 2},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))

    def completions():
        job = prepare_job(load_recipe(tmp_path / "recipe.yaml"), progress=False)
        generator = Generator(export, device="cpu")
        sampler = Sampler.of_job(job, generator.model)
        names = ("input_ids", "shift_labels")
        read = map(torch.from_numpy, job.packed.train.read(np.arange(2)))
        rows = [dict(zip(names, read, strict=True))]
        made = sampler.complete(rows, 1, 0, 2, Weights())
        batch = PromptBatch(generator._codec, ["a"], Sampling(4), chat=True)
        assert stop_ids(sampler.tokenizer, sampler.eos) == batch.stops
        return made.tokens, sampler.prompts(rows)[1], made.ends

    tokens, starts, ends = completions()
    assert (ends > starts + 1).all()
    first = tokens[torch.arange(2), starts].tolist()
    config = json.loads((export / "generation_config.json").read_text())
    (export / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": first}))
    again, _, ends = completions()
    assert (ends == starts + 1).all()
    assert again[torch.arange(2), starts].tolist() == first


def test_streaming_gives_whole_characters_and_the_same_text(generator):
    tokenizer = generator.tokenizer
    text = "\u00fcber \u4e16\u754c \U0001f680 def f"
    tokens = tokenizer(text)["input_ids"]
    pieces = list(stream_text(tokenizer, tokens))
    assert "".join(pieces) == text
    assert len(pieces) > 5
    assert not any("\ufffd" in p for p in pieces)
    cut = tokenizer("\U0001f680")["input_ids"][:2]
    assert "".join(stream_text(tokenizer, cut)) == tokenizer.decode(cut)


def test_streamed_pieces_add_up_to_the_generated_text(generator):
    sampling = Sampling(40, seed=3)
    result = generator.generate("def ", sampling)
    assert "".join(generator.stream("def ", sampling)) == result.text
    assert generator.tokenizer.decode(result.token_ids) == result.text
    assert len(result.token_ids) == 40
    assert not result.stopped


def test_an_empty_prompt_is_the_beginning_of_a_document(generator):
    assert generator.encode("") == [generator.tokenizer.eos_token_id]
    assert generator.generate("", Sampling(3)).num_prompt_tokens == 1


def test_a_chat_prompt_passes_through_the_template(generator):
    ids = generator.encode("2 + 2?", chat=True)
    text = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert generator.tokenizer.decode(ids) == text
    assert len(generator.generate("2 + 2?", Sampling(4), chat=True).token_ids) <= 4


def test_chat_without_a_template_is_refused(run_dir):
    plain = Generator(run_dir, device="cpu")
    plain.tokenizer.chat_template = None
    with pytest.raises(BadValue, match="no chat template"):
        plain.generate("x", chat=True)


def test_text_beyond_the_context_is_refused_with_the_room_left(generator):
    with pytest.raises(BadValue, match="longer than the context") as caught:
        generator.stream("x", Sampling(128))
    assert caught.value.hint == "--max-new-tokens 127"
    with pytest.raises(BadValue, match="longer than the context") as caught:
        generator.generate("\u00fc?" * 100, Sampling(1))
    assert caught.value.hint == "a shorter prompt"


@pytest.mark.parametrize("values", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"max_new_tokens": 0}])
def test_values_out_of_range_are_refused(values):
    with pytest.raises(BadValue, match=f"`{next(iter(values))}` is out of range"):
        Sampling(**values)


def test_a_run_without_export_is_refused_with_a_remedy(tmp_path):
    with pytest.raises(RunUnreadable, match="HP603") as caught:
        Generator(tmp_path)
    assert "checkpoint.export=true" in caught.value.hint
    with pytest.raises(RunUnreadable, match="does not exist"):
        Generator(tmp_path / "nothing")


def copy_export(run_dir, target, without=()):
    target.mkdir()
    for file in (run_dir / "export").iterdir():
        if file.name not in without:
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_an_export_without_tokenizer_is_refused(run_dir, tmp_path):
    export = copy_export(run_dir, tmp_path / "m", without=("tokenizer.json",))
    with pytest.raises(RunUnreadable, match="no tokenizer"):
        Generator(export)


def test_truncated_weights_are_refused(run_dir, tmp_path):
    export = copy_export(run_dir, tmp_path / "m")
    os.truncate(export / "model.safetensors", 5000)
    with pytest.raises(WeightsUnreadable, match="HP703"):
        Generator(export)


def test_weights_that_lack_a_parameter_are_refused(run_dir, tmp_path):
    from safetensors.torch import load_file, save_file

    export = copy_export(run_dir, tmp_path / "m")
    weights = load_file(export / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, export / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsUnreadable, match="lack parameters") as caught:
        Generator(export)
    assert caught.value.got == ["model.layers.1.mlp.up_proj.weight"]


def test_a_device_or_format_that_is_not_there_is_refused(run_dir):
    with pytest.raises(DeviceUnavailable, match="HP502"):
        Generator(run_dir, device="xpu")
    with pytest.raises(BadValue, match="unknown device"):
        Generator(run_dir, device="gpuu")
    with pytest.raises(BadValue, match="does not support the dtype `int3` for weights"):
        Generator(run_dir, dtype="int3")


@pytest.mark.e2e
def test_the_command_prints_text_and_json(run_dir):
    app = typer.Typer()
    app.command()(command)
    values = [str(run_dir), "--prompt", "def ", "--max-new-tokens", "12", "--seed", "4"]
    values += ["--temperature", "0.7", "--device", "cpu"]
    text = CliRunner().invoke(app, values, catch_exceptions=False)
    data = CliRunner().invoke(app, [*values, "--json"], catch_exceptions=False)
    result = json.loads(data.stdout)
    assert text.stdout == f"def {printable(result['text'])}\n"
    assert result["prompt"] == "def "
    assert len(result["token_ids"]) == 12
    expected = Generator(run_dir, device="cpu").generate("def ", Sampling(12, 0.7, seed=4))
    assert result["text"] == expected.text


@pytest.mark.slow
@pytest.mark.e2e
def test_the_command_with_a_device_smaller_than_the_model(run_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    app = typer.Typer()
    app.command()(command)
    values = [str(run_dir), "--prompt", "def ", "--max-new-tokens", "6", "--dtype", "float32"]
    values += ["--device", "cpu"]
    plain = CliRunner().invoke(app, values, catch_exceptions=False)
    small = [*values, "--device-memory", "64KiB", "--topology", "dgx-h100"]
    tiers = ["--dram", "100KiB", "--flash-dir", str(tmp_path / "flash")]
    told = CliRunner().invoke(app, [*small, *tiers], catch_exceptions=False)
    assert told.stdout == plain.stdout
    lines = told.stderr.splitlines()
    assert lines[0].startswith("weights and cache ")
    assert sum(line.endswith(", +0") for line in lines) == 3  # device, dram, flash: 0 bytes apart
    assert "waiting for copies" in lines[-1]
    result = json.loads(CliRunner().invoke(app, [*small, "--json"], catch_exceptions=False).stdout)
    assert f"def {printable(result['text'])}\n" == plain.stdout
    assert result["memory"]["measured_bytes"] == result["memory"]["predicted_bytes"]
    assert result["memory"]["measured_bytes"]["device"] <= 64 * 1024
    with pytest.raises(BudgetImpossible, match="--device-memory"):
        CliRunner().invoke(app, [*values, "--device-memory", "1KiB"], catch_exceptions=False)
    for wrong in (["--device-memory", "much"], ["--dram", "1GiB"]):
        with pytest.raises(BadValue, match="HP102"):
            CliRunner().invoke(app, [*values, *wrong], catch_exceptions=False)
    half = [*values, "--device-memory", "64KiB", "--dtype", "float16", "--topology", "local-cpu"]
    with pytest.raises(UnknownPeak, match="hint: --dtype float32"):
        CliRunner().invoke(app, half, catch_exceptions=False)
    asked = [{"prompt": "def f1"}, {"prompt": "return"}, {"prompt": ""}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, asked)))
    many = [str(run_dir), "--prompts", str(prompts), "--max-new-tokens", "6", "--dtype", "float64"]
    many += ["--device", "cpu", "--slots", "2"]
    plain = CliRunner().invoke(app, many, catch_exceptions=False)
    budget = ["--device-memory", "160KiB", "--topology", "dgx-h100"]
    told = CliRunner().invoke(app, [*many, *budget], catch_exceptions=False)
    for mine, other in zip(told.stdout.splitlines(), plain.stdout.splitlines(), strict=True):
        assert json.loads(mine)["token_ids"] == json.loads(other)["token_ids"]
    assert sum(line.endswith(", +0") for line in told.stderr.splitlines()) == 2
    (tmp_path / "file").touch()
    with pytest.raises(OutputNotWritable, match="--flash-dir"):
        CliRunner().invoke(app, [*small, "--flash-dir", str(tmp_path / "file")], catch_exceptions=False)


@pytest.mark.sanity
def test_the_command_module_imports_no_framework():
    program = (
        "import sys, hyper_parallel.cli.generate_command; "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_a_batch_gives_the_text_of_every_prompt_and_goes_on_after_an_interrupt(generator):
    prompts, sampling = ["def f1", "", "def f22(", "return 7", "x"], Sampling(20, seed=5)
    whole = generator.generate_batch(prompts, sampling, slots=2)
    assert whole[0].text == generator.generate("def f1", sampling).text
    assert [g.number for g in whole] == [0, 1, 2, 3, 4]
    assert all(len(g.logprobs) == len(g.token_ids) for g in whole)
    passes = iter(range(100))
    part = generator.generate_batch(prompts, sampling, slots=2, interrupt=lambda: next(passes) > 30)
    assert {g.finish for g in part} == {"length", None}
    for cut, expected in zip(part, whole, strict=True):
        assert cut.token_ids == expected.token_ids[: len(cut.token_ids)]
    # In another order: each goes on under its own number.
    again = generator.generate_batch(part[::-1], sampling)[::-1]
    assert [(g.text, g.finish) for g in again] == [(g.text, g.finish) for g in whole]


def test_a_stop_text_ends_the_text_before_it(generator):
    free = generator.generate("def f", Sampling(40, temperature=0))
    stop = free.text[6:9]
    sampling = Sampling(40, temperature=0, stop=("\u00fc\u00fc", stop))
    (batched,) = generator.generate_batch(["def f"], sampling)
    alone = generator.generate("def f", sampling)
    for found in (batched, alone):
        assert found.text == free.text[: free.text.index(stop)]
        assert found.stopped
        assert len(found.token_ids) < 40
    assert "".join(generator.stream("def f", sampling)) == alone.text


@pytest.mark.e2e
def test_the_command_continues_a_file_of_prompts_and_its_own_output(run_dir, tmp_path):
    app = typer.Typer()
    app.command()(command)
    asked = [{"prompt": "def f1", "id": 7}, {"prompt": "return \u2028"}, {"prompt": ""}]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "new" / "out.jsonl"
    prompts.write_text("\n\n".join(map(json.dumps, asked)))
    values = [str(run_dir), "--device", "cpu", "--max-new-tokens", "9", "--seed", "2"]

    def run(*more):
        return CliRunner().invoke(app, [*values, *more], catch_exceptions=False)

    run("--prompts", str(prompts), "-o", str(out), "--slots", "2")
    made = [json.loads(line) for line in out.read_text().strip().split("\n")]
    assert [{k: m[k] for k in a} for m, a in zip(made, asked, strict=True)] == asked
    assert [len(m["token_ids"]) for m in made] == [len(m["logprobs"]) for m in made] == [9, 9, 9]
    assert run("--prompt", "def f1").stdout == f"def f1{printable(made[0]['text'])}\n"
    # As an interrupt leaves it: the line goes on, the others stay.
    for key in ("token_ids", "logprobs"):
        made[1][key] = made[1][key][:4]
    made[1]["finish"] = None
    prompts.write_text("\n".join(map(json.dumps, made)))
    again = [json.loads(x) for x in run("--prompts", str(prompts)).stdout.strip().split("\n")]
    whole = [json.loads(line) for line in out.read_text().strip().split("\n")]
    for mine, expected in zip(again, whole, strict=True):
        assert (mine["text"], mine["finish"]) == (expected["text"], expected["finish"])
    prompts.write_text('{"prompt": "x"}\n{"text": "y"}')
    with pytest.raises(BadValue, match=r"prompts\.jsonl:2"):
        run("--prompts", str(prompts))
    foreign = {**made[1], "token_ids": [5, 320], "logprobs": [0, 0]}
    prompts.write_text(json.dumps(foreign))
    with pytest.raises(BadValue, match="outside the vocabulary"):
        run("--prompts", str(prompts))
    prompts.write_text(json.dumps({**foreign, "logprobs": []}))
    with pytest.raises(BadValue, match=r"prompts\.jsonl:1"):
        run("--prompts", str(prompts))
    for wrong in (["--prompt", "x"], ["--json"]):
        with pytest.raises(Contradiction, match="to a single prompt"):
            run("--prompts", str(prompts), *wrong)
    with pytest.raises(Contradiction, match="to a single device"):
        run("--prompts", str(prompts), "--device-memory", "1GiB", "--parallel", "tp=2")
    for wrong in ([], ["--prompt", "x", "--parallel", "tp=2"]):
        with pytest.raises(BadValue, match="HP102"):
            run(*wrong)

"""Adapters: `lora` in a recipe, on every layout, and in the format of peft."""

import json
import shlex
import shutil
import sys
import warnings

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hyper_parallel.errors import (
    BadValue,
    CheckpointMismatch,
    Contradiction,
    MissingDependency,
    UnsupportedSharding,
    WeightsUnreadable,
)
from hyper_parallel.ir import Plan
from hyper_parallel.trainer.checkpoints.adapter_files import load_adapter
from tests.e2e.runs import CURVE, assert_same_curve, command, curve, make_place, train

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.e2e

TEMPLATE = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
LORA = ("lora.r=4", "lora.lora_alpha=12", "lora.modules_to_save=[q_norm]")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A recipe whose weights are those that a short run has exported."""
    root = make_place(tmp_path_factory.mktemp("lora"))
    train(root, root / "base", "training.steps=2", "training.eval_tokens=100")
    recipe = yaml.safe_load((root / "recipe.yaml").read_text())
    recipe["model"]["path"] = str(root / "base" / "export")
    (root / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return root


@pytest.fixture(scope="module")
def one_rank(place):
    """A run whose tokenizer has a chat template, unlike the one of the base weights."""
    out, tokenizer = place / "one", place / "tokenizer"
    shutil.copytree(place / "base" / "export", tokenizer)
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    train(place, out, *LORA, f"data.tokenizer={tokenizer}", "training.eval_tokens=100")
    return out


def _logits(model):
    with torch.no_grad():
        return model(torch.arange(60)[None] % 97).logits


def test_an_export_with_a_model_does_not_look_up_the_base_of_the_run(place, one_rank, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(one_rank, run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["model"]["path"] = "acme/cannot-be-fetched"
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    words = ("checkpoint", "export", str(run), "--model", str(place / "base" / "export"))
    command(*words, "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_on_two_layouts_with_recompute_equals_one_rank(place, one_rank, tmp_path):
    words = (*LORA, "training.eval_tokens=100")
    first = ("parallel.dp_shard=2", "parallel.tp=2", "training.steps=2")
    train(place, tmp_path, *words, *first)
    second = ("parallel.pp=2", "parallel.cp=2", "training.recompute=full", "checkpoint.resume=must")
    train(place, tmp_path, *words, *second)
    assert_same_curve(curve(tmp_path), curve(one_rank))
    mine, theirs = (load_file(out / "export" / "adapter_model.safetensors") for out in (tmp_path, one_rank))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-8, atol=1e-10)
    assert max(t.abs().max() for n, t in mine.items() if "lora_B" in n) > 1e-3
    elements = sum(t.numel() for t in mine.values())
    assert _bytes(one_rank, "optimizer states") == (16 * elements, 16 * elements + 4 * len(mine))


@pytest.mark.slow
def test_two_tensor_parallel_axes_and_a_split_backward_equal_one_rank(place, one_rank, tmp_path):
    grid = ("parallel.tp_x=2", "parallel.tp_y=2", "training.steps=2")
    train(place, tmp_path / "grid", *LORA, *grid, *CURVE)
    assert_same_curve(curve(tmp_path / "grid"), curve(one_rank)[:2])
    piped = (
        "parallel.pp=2",
        "parallel.schedule=zb-h1",
        "training.microbatch=2",
        "training.steps=2",
    )
    train(place, tmp_path / "piped", *LORA, *piped, *CURVE)
    assert_same_curve(curve(tmp_path / "piped"), curve(one_rank)[:2])


def test_peft_reads_the_adapter_and_the_merged_model_has_its_logits(place, one_rank, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(place / "base" / "export", dtype="auto")
    plain = _logits(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about transformers
        model = peft.PeftModel.from_pretrained(base, one_rank / "export").to(torch.float64)
    adapted = _logits(model)
    assert (adapted - plain).abs().max() > 0.1
    command("checkpoint", "export", str(one_rank), "--merge")
    merged = AutoModelForCausalLM.from_pretrained(one_rank / "merged", dtype="auto")
    torch.testing.assert_close(_logits(merged), adapted, rtol=1e-6, atol=1e-6)

    command("checkpoint", "export", str(one_rank), "--out", str(tmp_path / "again"))
    mine, again = (load_file(d / "adapter_model.safetensors") for d in (one_rank / "export", tmp_path / "again"))
    assert all(torch.equal(again[name], tensor) for name, tensor in mine.items())
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["lora_alpha"] == 12
    for folder in (one_rank / "export", one_rank / "merged", tmp_path / "again"):
        assert (folder / "chat_template.jinja").read_text() == TEMPLATE

    said = [
        command("generate", str(d), "--prompt", "def f", "--max-new-tokens=4", "--temperature=0")
        for d in (one_rank, one_rank / "merged")
    ]
    assert said[0].stdout == said[1].stdout


def test_a_run_begins_with_the_adapter_that_another_has_written(place, one_rank, tmp_path):
    command("checkpoint", "import", str(one_rank / "export"), str(tmp_path / "at"), "--dtype=float64")
    nowhere = tmp_path / "nowhere"
    nowhere.mkdir()
    (nowhere / "adapter_config.json").write_text("{}")
    with pytest.raises(WeightsUnreadable, match="does not name its base model"):
        command("checkpoint", "import", str(nowhere), str(tmp_path / "no"))
    words = (*LORA, f"checkpoint.from_dir={tmp_path / 'at'}", "training.steps=2", *CURVE)
    train(place, tmp_path / "on", *words)
    assert curve(tmp_path / "on")[0][0] < curve(one_rank)[0][0] - 0.01


def test_an_imported_adapter_keeps_its_scale(place, tmp_path):
    """Rank and factor of some modules differ; the recipe has to say the same."""
    base = AutoModelForCausalLM.from_pretrained(place / "base" / "export", dtype="auto")
    config = peft.LoraConfig(
        r=4, lora_alpha=64, use_rslora=True, target_modules=["q_proj", "k_proj", "up_proj"],
        rank_pattern={"q_proj": 2}, alpha_pattern={"k_proj": 8},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own, about transformers
        model = peft.get_peft_model(base, config)
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if ".lora_" in name:
            p.data = torch.randn(p.shape, dtype=torch.float64) * 0.1
    model.save_pretrained(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(place / "base" / "export", dtype="auto")
    load_adapter(plain, tmp_path / "adapter")
    torch.testing.assert_close(_logits(plain), _logits(model), rtol=1e-10, atol=1e-12)
    where = tmp_path / "at"
    command("checkpoint", "import", str(tmp_path / "adapter"), str(where), "--dtype=float64")
    words = ("lora.r=4", "lora.target_modules=[q_proj, k_proj, up_proj]", "training.steps=2")
    words = (*words, f"checkpoint.from_dir={where}", *CURVE)
    with pytest.raises(CheckpointMismatch, match="lora_alpha") as raised:
        train(place, tmp_path / "no", *words, "--dry-run")
    mend = shlex.split(raised.value.hint)
    train(place, tmp_path / "on", *words, *mend)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    same = (
        f"model.path={tmp_path / 'merged'}",
        "lora.r=4",
        f"data.tokenizer={place / 'base' / 'export'}",
    )
    train(place, tmp_path / "merged_run", *same, "training.steps=2", *CURVE)
    first = [curve(tmp_path / run)[0][0] for run in ("on", "merged_run")]
    assert first[0] == pytest.approx(first[1], rel=1e-10)


@pytest.mark.parametrize(
    ("words", "error", "says"),
    [
        (("lora.target_modules=[q_prj]",), BadValue, "q_proj"),
        (("lora.target_modules=(q",), BadValue, "is not a regular expression"),
        (("lora.target_modules=[embed_tokens]",), UnsupportedSharding, "embed_tokens"),
        (("lora.r=2", "lora.modules_to_save=[embed_tokens]"), UnsupportedSharding, "share"),
        (("lora.r=2", "parallel.tp_x=2", "parallel.tp_y=2", "parallel.mlp_shape=weight"), UnsupportedSharding, "tp_y"),
        (("lora.r=2", "model.init=random"), Contradiction, "need saved base weights"),
        (("training.freeze=[model.layer.0.*]",), BadValue, "model.layers.0"),
        (('training.freeze=["*"]',), BadValue, "nothing is left"),
    ],
    ids=["no-module", "no-regex", "embedding", "tied", "moving-weight", "no-weights", "no-name", "all"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings:UserWarning")  # peft's own
def test_what_cannot_be_trained_is_refused_before_a_rank_starts(place, tmp_path, words, error, says):
    with pytest.raises(error, match=says):
        train(place, tmp_path / "out", "--dry-run", *words)
    assert not (tmp_path / "out").exists()


def test_without_peft_the_extra_is_named(place, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependency, match=r"hyper-parallel\[lora\]"):
        train(place, tmp_path / "out", "lora.r=2")


@pytest.mark.slow
def test_frozen_parameters_stay_as_they_are_on_every_layout(place, tmp_path):
    """The first of the stages trains nothing at all."""
    words = ("training.freeze=[model.embed_tokens.*,model.layers.0.*]", "training.eval_tokens=100")
    one, two = tmp_path / "one", tmp_path / "two"
    train(place, one, *words)
    train(place, two, *words, "parallel.pp=2", "training.steps=2")
    train(place, two, *words, "parallel.dp_shard=2", "parallel.tp=2", "checkpoint.resume=must")
    assert_same_curve(curve(two), curve(one))
    before, after = (load_file(run / "export" / "model.safetensors") for run in (place / "base", two))
    for name, tensor in before.items():
        frozen = name.startswith(("model.embed_tokens.", "model.layers.0."))
        assert torch.equal(after[name], tensor) == frozen, name
    elements = sum(t.numel() for n, t in before.items() if "layers.1." in n or n == "model.norm.weight")
    assert _bytes(one, "optimizer states") == (16 * elements, 16 * elements + 4 * len(before) // 2)
    weights = sum(t.nbytes for t in before.values())
    rotary = 4 * 8  # frequencies of the embedding of positions, a buffer
    assert _bytes(one, "parameters") == (weights, weights + rotary)


def _bytes(run, kind):
    """Bytes of a kind, predicted and measured; of optimizer states 4 more for the step of every trained tensor."""
    (planned,) = (t.bytes for t in Plan.load(run / "plan.json").memory if t.name == kind)
    counters = json.loads((run / "timeline.json").read_text())["counters"]
    (measured,) = (c["value"] for c in counters if c["lane"] == f"rank 0/peak {kind}")
    return planned, measured


@pytest.mark.slow
def test_weights_under_adapters_that_were_exchanged_are_refused(place, one_rank, tmp_path):
    base, run = tmp_path / "base", tmp_path / "run"
    shutil.copytree(place / "base" / "export", base)
    words = (*LORA, *CURVE, f"model.path={base}")
    train(place, run, *words, "training.steps=2", "checkpoint.export=true")
    file = base / "model.safetensors"
    tensors = load_file(file)
    other = {n: t.clone() for n, t in tensors.items()}
    other["model.layers.1.mlp.down_proj.weight"][3, 5] *= 1 + 2**-20
    save_file(other, file, {"format": "pt"})
    with pytest.raises(CheckpointMismatch, match="base weights have changed since"):
        train(place, run, *words, "parallel.tp=2", "training.steps=4")
    with pytest.raises(CheckpointMismatch, match="base weights have changed since"):
        command("checkpoint", "export", str(run), "--merge", "--out", str(tmp_path / "merged"))
    with pytest.raises(CheckpointMismatch, match="trained on other base weights"):
        command("generate", str(run), "--prompt", "def f", "--max-new-tokens=4")
    assert not (tmp_path / "merged").exists()
    file.unlink()
    names = sorted(tensors)
    for number, own in enumerate((names[::2], names[1::2]), start=1):
        part = {name: tensors[name] for name in own}
        save_file(part, base / f"model-{number:05}-of-00002.safetensors", {"format": "pt"})
    train(place, run, *words, "parallel.dp_shard=2", "training.steps=4")
    assert_same_curve(curve(run), curve(one_rank))

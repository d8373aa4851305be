"""A YAML file of LlamaFactory on MindSpore beside the same file on torch."""

import json
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

# peft asks transformers by a former name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
FILE = """
model_name_or_path: {root}/model
stage: sft
do_train: true
lora_rank: 4
dataset: chats
dataset_dir: {root}/data
template: qwen3_nothink
cutoff_len: 64
max_steps: 5
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1.0e-2
lr_scheduler_type: constant
bf16: false
report_to: none
"""
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ONE = ("parallel.dp_shard=1",)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("llamafactory")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / "model")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["What is one?"], 300, special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(root / "model")
    (root / "data").mkdir()
    chats = [{"instruction": f"What is {i}?", "input": "", "output": f"It is {i}" + "!" * (i % 5)} for i in range(40)]
    (root / "data" / "chats.json").write_text(json.dumps(chats))
    (root / "data" / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "chats.json"}}))
    (root / "file.yaml").write_text(FILE.format(root=root))
    return root


@pytest.fixture(scope="module")
def adapters_on_torch(root):
    return _losses(root, "torch_lora", *ONE)


def _losses(root, name, *words):
    command = [sys.executable, "-m", "hyper_parallel", "train", "file.yaml", *words]
    command += [f"output_dir={name}", "--no-calibrate"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    noted = "keeps activations instead of recomputing them" in done.stderr
    assert noted == ("backend=mindspore" in words)
    lines = (root / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def _logits(root, name):
    """Logits of a model directory, or of the base model with the merged adapters of a directory."""
    directory = root / name
    if (directory / "adapter_config.json").is_file():
        base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        model = PeftModel.from_pretrained(base, directory).merge_and_unload()
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def _assert_same_export(root, name, reference):
    wanted = _logits(root, f"{reference}/export")
    assert (wanted - _logits(root, "model")).abs().max() > 1e-2  # training has changed the model
    torch.testing.assert_close(_logits(root, f"{name}/export"), wanted, rtol=0, atol=1e-4)


def test_all_parameters_train_as_on_torch(root):
    words = ("finetuning_type=full", "learning_rate=1.0e-3", *ONE)
    wanted = _losses(root, "torch_full", *words)
    losses = _losses(root, "mindspore_full", *words, "backend=mindspore")
    assert losses == pytest.approx(wanted, rel=1e-5)
    _assert_same_export(root, "mindspore_full", "torch_full")


@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_replicate=2", "dp_shard=2", "tp=2", "pp=2"])
def test_adapters_train_as_on_torch(root, adapters_on_torch, layout):
    name = layout.replace("=", "")
    words = ["parallel.dp_replicate=1", f"parallel.{layout}", "backend=mindspore"]
    if layout in ("dp_replicate=2", "dp_shard=2"):
        words.append("gradient_accumulation_steps=1")
    losses = _losses(root, name, *words)
    assert len(losses) == 5
    assert losses == pytest.approx(adapters_on_torch, rel=1e-5)
    assert losses[0] - losses[-1] > 0.05
    assert (root / name / "export" / "adapter_config.json").is_file()
    _assert_same_export(root, name, "torch_lora")


def test_a_run_with_adapters_changes_the_back_end_twice(root, adapters_on_torch):
    for steps, backend in ((2, "torch"), (4, "mindspore"), (5, "torch")):
        losses = _losses(root, "changing", *ONE, f"max_steps={steps}", f"backend={backend}")
    assert losses == pytest.approx(adapters_on_torch, rel=1e-5)
    _assert_same_export(root, "changing", "torch_lora")

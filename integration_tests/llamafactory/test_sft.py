"""Unmodified LlamaFactory with `use_hyper_parallel`: the losses, files and evaluations of its own run.

make test-llamafactory      (an environment of its own: LlamaFactory caps versions)
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CONFIG = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny random Llama with a tokenizer, and chats in the format of Alpaca."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    root = tmp_path_factory.mktemp("llamafactory")
    set_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(root / "model")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        ["What is one and two? It is three."], 300, special_tokens=["<s>", "</s>", "<pad>"]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(root / "model")
    data = root / "data"
    data.mkdir()
    chats = [
        {"instruction": f"What is {i} and {i % 7}?", "input": "", "output": f"It is {i + i % 7}." + "!" * (i % 5)}
        for i in range(48)
    ]  # fmt: skip
    (data / "chats.json").write_text(json.dumps(chats))
    (data / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "chats.json"}}))
    return root


def run(place: Path, name: str, ranks: int, hyper: dict | None, **changes):
    """Losses and evaluations of `llamafactory-cli train`, by step; every number of ranks divides the data."""
    out = place / name
    recipe = {
        "model_name_or_path": str(place / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "chats", "dataset_dir": str(place / "data"), "template": "empty", "cutoff_len": 64,
        "output_dir": str(out), "per_device_train_batch_size": 8 // ranks, "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2, "max_steps": 5, "logging_steps": 1, "save_steps": 3, "lr_scheduler_type": "cosine",
        "val_size": 8, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1, "use_cpu": True,
        "report_to": "none", "disable_gradient_checkpointing": True, "overwrite_output_dir": True, "seed": 1,
        "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "ddp_timeout": 60, "max_grad_norm": 0.5,
        **changes,
    }  # fmt: skip
    if hyper is not None:
        (place / f"{name}.json").write_text(json.dumps(hyper))
        recipe |= {"use_hyper_parallel": True, "hyper_parallel_args": str(place / f"{name}.json")}
    (place / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    environment = {
        **os.environ, "FORCE_TORCHRUN": str(int(ranks > 1)), "NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "DISABLE_VERSION_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # it starts torchrun by name
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "llamafactory.cli", "train", str(place / f"{name}.yaml")],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {
        kind: [(row["step"], row[kind]) for row in history if kind in row]
        for kind in ("loss", "grad_norm", "eval_loss")
    }


@pytest.fixture(scope="module")
def plain(place):
    """Curves of LlamaFactory alone, by its number of ranks: of unequal batches it weighs evaluations by tokens."""
    return {ranks: run(place, f"plain{ranks}", ranks, None) for ranks in (1, 2)}


@pytest.mark.parametrize(
    ("ranks", "hyper", "shares"),
    [
        (1, {}, 1), (2, {"activation_mode": "recompute"}, 2), (2, {"activation_mode": "swap"}, 2),
        (2, {"tp_size": 2}, 1), (2, {"cp_size": 2}, 1),
        (4, {"fsdp_size": 2, "tp_size": 2}, 2),
    ],
)  # fmt: skip
def test_losses_are_those_of_llamafactory_alone(place, plain, ranks, hyper, shares):
    curves = run(
        place,
        f"hyper{ranks}" + "".join(hyper) + hyper.get("activation_mode", ""),
        ranks,
        hyper,
        per_device_train_batch_size=8 // shares,
    )
    assert len(plain[shares]["loss"]) == 5
    for kind, wanted in plain[shares].items():
        assert [step for step, _ in curves[kind]] == [step for step, _ in wanted]
        assert [v for _, v in curves[kind]] == pytest.approx([v for _, v in wanted], rel=1e-5), kind


def test_a_run_goes_on_from_its_checkpoint_on_another_number_of_ranks(place, plain):
    # Four ranks wrote the checkpoint of step 3.
    source = place / "hyper4fsdp_sizetp_size" / "checkpoint-3"
    changes = {"per_device_train_batch_size": 8, "resume_from_checkpoint": str(source)}
    curves = run(place, "resumed", 2, {"cp_size": 2}, **changes)
    wanted = [v for _, v in plain[1]["loss"]]
    assert [v for _, v in curves["loss"]] == pytest.approx(wanted, rel=1e-5)


def test_the_export_is_read_by_transformers(place):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, info = AutoModelForCausalLM.from_pretrained(
        place / "hyper2tp_size", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert len(AutoTokenizer.from_pretrained(place / "hyper2tp_size")) <= model.config.vocab_size


LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all", "learning_rate": 5e-2}


def test_adapters_are_those_of_llamafactory_alone_and_are_read_by_peft(place):
    from peft import PeftModel
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    alone = run(place, "plain_lora", 1, None, **LORA)
    mine = run(place, "lora", 4, {"tp_size": 2}, per_device_train_batch_size=4, **LORA)
    source = str(place / "lora" / "checkpoint-3")
    on = run(
        place,
        "lora_on",
        2,
        {"cp_size": 2},
        per_device_train_batch_size=8,
        resume_from_checkpoint=source,
        **LORA,
    )
    for curves in (mine, on):
        for kind in ("loss", "grad_norm"):
            assert [v for _, v in curves[kind]] == pytest.approx(
                [v for _, v in alone[kind]], rel=1e-5
            ), kind
    losses = [v for _, v in alone["loss"]]
    assert losses[-1] < losses[0]  # it learns
    theirs, ours = (
        load_file(place / d / "adapter_model.safetensors") for d in ("plain_lora", "lora")
    )
    assert theirs.keys() == ours.keys()
    for name, tensor in theirs.items():
        assert (tensor - ours[name]).abs().max() < 1e-4, name
    model = AutoModelForCausalLM.from_pretrained(place / "model")
    assert PeftModel.from_pretrained(model, place / "lora").peft_config["default"].r == 4


@pytest.mark.parametrize(
    ("hyper", "changes", "code"),
    [
        ({"tp_sise": 2}, {}, "HP101"), ({"tp_size": 0}, {}, "HP102"), ({}, {"finetuning_type": "oft"}, "HP104"),
        ({}, {"finetuning_type": "lora", "use_dora": True}, "HP205"),
        ({}, {"disable_gradient_checkpointing": False}, "HP104"), ({"tp_size": 3}, {}, "HP301"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(place, hyper, changes, code):
    with pytest.raises(AssertionError, match=code):
        run(place, "refused", 1, hyper, **changes)

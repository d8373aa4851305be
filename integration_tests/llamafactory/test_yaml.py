"""One YAML file given to LlamaFactory and to `hyper-parallel train`: the same losses.

make test-llamafactory
"""

import json
import os
import subprocess
import sys

import pytest
from test_sft import SHAPE, run

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny random Llama whose chat template is that of Llama 3, and data in the formats of LlamaFactory."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    root = tmp_path_factory.mktemp("yaml")
    set_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(root / "model")
    bpe = ByteLevelBPETokenizer()
    special = [
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<pad>",
    ]
    bpe.train_from_iterator(["What is one and two? It is three."], 300, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        bos_token=special[0],
        eos_token=special[1],
        pad_token="<pad>",
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(root / "model")
    data = root / "data"
    data.mkdir()
    asked = [(f"What is {i} and {i % 7}?", f"It is {i + i % 7}." + "!" * (i % 5)) for i in range(48)]
    shapes = {
        "chats": [{"instruction": q, "input": "", "output": a} for q, a in asked],
        "turns": [
            {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a},
                               {"from": "human", "value": a}, {"from": "gpt", "value": q}]}
            for q, a in asked
        ],
        "pairs": [
            {"conversations": [{"from": "human", "value": q}], "chosen": {"from": "gpt", "value": a},
             "rejected": {"from": "gpt", "value": a + "?"}}
            for q, a in asked
        ],
    }  # fmt: skip
    shapes["tagged"] = [
        {"conversations": row["conversations"][:2], "label": i % 3 > 0} for i, row in enumerate(shapes["turns"])
    ]
    shapes["texts"] = [{"text": f"{q} {a}"} for q, a in asked]
    for name, rows in shapes.items():
        (data / f"{name}.json").write_text(json.dumps(rows))
    turns = {"file_name": "turns.json", "formatting": "sharegpt"}
    columns = {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}
    pairs = {
        "file_name": "pairs.json",
        "formatting": "sharegpt",
        "ranking": True,
        "columns": columns,
    }
    (data / "dataset_info.json").write_text(
        json.dumps(
            {
                "chats": {"file_name": "chats.json"},
                "turns": turns,
                "pairs": pairs,
                "tagged": {
                    "file_name": "tagged.json",
                    "formatting": "sharegpt",
                    "columns": {"messages": "conversations", "kto_tag": "label"},
                },
                "texts": {"file_name": "texts.json", "columns": {"prompt": "text"}},
            }
        )
    )
    return root


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("sft", {}),
        ("turns", {"dataset": "turns", "cutoff_len": 128, "max_samples": 40}),
        ("freeze", {"finetuning_type": "freeze", "freeze_trainable_layers": 1}),
        ("pt", {"stage": "pt", "dataset": "texts", "template": "empty", "packing": False, "cutoff_len": 128}),
        ("dpo", {"stage": "dpo", "dataset": "pairs", "pref_beta": 0.2, "per_device_train_batch_size": 4}),
        ("orpo", {"stage": "dpo", "pref_loss": "orpo", "dataset": "pairs", "pref_beta": 0.2}),
        # Its KL term is that of a microbatch, ours that of the step.
        ("kto", {"stage": "kto", "dataset": "tagged", "pref_beta": 0.2, "kto_chosen_weight": 1.5,
                 "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}),
    ],
)  # fmt: skip
def test_losses_are_those_of_llamafactory(place, name, changes):
    same = {
        "template": "llama3", "disable_shuffling": True, "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "max_grad_norm": 1.0,
        "weight_decay": 0.1,
        "val_size": 0.0, "eval_strategy": "no", "per_device_eval_batch_size": 1,
    }  # fmt: skip
    curves = run(place, name, 1, None, **{**same, **changes})
    words = [
        sys.executable,
        "-m",
        "hyper_parallel",
        "train",
        f"{place}/{name}.yaml",
        "--no-calibrate",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*words, f"output_dir={place}/mine_{name}"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = (place / f"mine_{name}" / "metrics.jsonl").read_text().splitlines()
    mine = [json.loads(line) for line in lines]
    assert len(mine) == 5
    # With pt there is divided by all tokens, though the first of each of the 8 texts is no target.
    extra = 8 if name == "pt" else 0
    share = [row["valid_tokens"] / (row["valid_tokens"] + extra) for row in mine]
    for kind in ("loss", "grad_norm"):
        found = [row[kind] * part for row, part in zip(mine, share, strict=True)]
        assert found == pytest.approx([v for _, v in curves[kind]], rel=1e-4)

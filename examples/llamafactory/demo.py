"""Compare losses of LlamaFactory's own command with and without this package's layouts.

    make llamafactory-demo                                   creates an environment with LlamaFactory, then runs this
    python examples/llamafactory/demo.py [FOLDER] [RANKS]    in an environment that has both

FOLDER receives a tiny random Llama and some chats; nothing is downloaded. First, one process trains with LlamaFactory
alone. Then RANKS (default 2) train the same YAML file with `use_hyper_parallel: true` and tensor parallelism.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Write a tiny random Llama with a tokenizer, and chats in the format of Alpaca."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder / "model")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["What is one and two? It is three."], 300, special_tokens=["<s>", "</s>", "<pad>"])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder / "model")
    chats = [
        {"instruction": f"What is {i} and {i % 7}?", "input": "", "output": f"It is {i + i % 7}." + "!" * (i % 5)}
        for i in range(48)
    ]  # fmt: skip
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data/chats.json").write_text(json.dumps(chats))
    (folder / "data/dataset_info.json").write_text(json.dumps({"chats": {"file_name": "chats.json"}}))


def train(folder: Path, name: str, ranks: int, **keys: Any) -> dict[str, list[tuple[int, float]]]:
    """Run `llamafactory-cli train`, and return (step, value) pairs of loss, grad_norm and eval_loss, by name."""
    out = folder / name
    recipe = {
        "model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "chats", "dataset_dir": str(folder / "data"), "template": "empty", "cutoff_len": 64,
        "output_dir": str(out), "per_device_train_batch_size": 8 // ranks, "gradient_accumulation_steps": 1,
        "learning_rate": 1e-2, "max_steps": 5, "logging_steps": 1, "save_steps": 3, "lr_scheduler_type": "cosine",
        "val_size": 8, "eval_strategy": "steps", "eval_steps": 3, "per_device_eval_batch_size": 1, "use_cpu": True,
        "report_to": "none", "disable_gradient_checkpointing": True, "overwrite_output_dir": True, "seed": 1,
        "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "ddp_timeout": 60, "max_grad_norm": 0.5,
        **keys,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(recipe, indent=1))  # JSON is YAML
    environment = {
        **os.environ, "FORCE_TORCHRUN": str(int(ranks > 1)), "NPROC_PER_NODE": str(ranks), "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", "DISABLE_VERSION_CHECK": "1", "PYTHONPATH": os.pathsep.join(sys.path),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),  # it starts torchrun by name
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "llamafactory.cli", "train", str(folder / f"{name}.yaml")],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout[-3000:] + done.stderr[-6000:])
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return {
        kind: [(row["step"], row[kind]) for row in history if kind in row]
        for kind in ("loss", "grad_norm", "eval_loss")
    }


def main() -> int:
    """Train with and without the layouts, print the losses, and return status 0 if they are equal to 1e-5."""
    folder = Path(sys.argv[1] if sys.argv[1:] else "runs/llamafactory").resolve()
    ranks = int(sys.argv[2]) if sys.argv[2:] else 2
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder)
    (folder / "layout.json").write_text(json.dumps({"tp_size": ranks}))
    alone = train(folder, "alone", 1)["loss"]
    ours = {"use_hyper_parallel": True, "hyper_parallel_args": str(folder / "layout.json")}
    laid_out = train(folder, "laid_out", ranks, per_device_train_batch_size=8, **ours)["loss"]
    print(f"step   LlamaFactory, 1 process   use_hyper_parallel, tp_size {ranks}")
    for (step, a), (_, b) in zip(alone, laid_out, strict=True):
        print(f"{step:4d}   {a:23.6f}   {b:29.6f}")
    print(f"Each way's YAML file, checkpoints and model are in {folder}.")
    return int(any(abs(a - b) > 1e-5 * a for (_, a), (_, b) in zip(alone, laid_out, strict=True)))


if __name__ == "__main__":
    sys.exit(main())

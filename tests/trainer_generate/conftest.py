"""A tiny exported model with its tokenizer."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hyper_parallel.config import Data
from hyper_parallel.trainer.data import load_tokenizer, prepare

SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    """A run directory with the export of a tiny random Llama and a tokenizer trained on little text."""
    root = tmp_path_factory.mktemp("run")
    text = root / "text.txt"
    text.write_text("".join(f"def f{n}(\u00fcber): return {n}\n" for n in range(300)), encoding="utf-8")
    data = Data(source=str(text), seq_len=32, vocab_size=320, cache_dir=str(root / "cache"))
    packed = prepare(data, stage="pt", model_path=None, seed=0, progress=False)
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).double().save_pretrained(root / "export")
    load_tokenizer(packed.tokenizer_dir).save_pretrained(str(root / "export"))
    return root

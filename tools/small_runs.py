"""Model config of small runs for tools that inject faults, and the command as run by a forked process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip


def run_command_and_exit(words: Sequence[str]) -> NoReturn:
    """Run `hyper-parallel` with these arguments, and exit this process with its status."""
    status = 70
    try:
        from hyper_parallel.cli import main

        sys.argv = ["hyper-parallel", *words]
        main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

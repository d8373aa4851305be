"""Predictions of `plan --for generate` for this machine, compared with measured seconds of prefill and decode.

    python benchmarks/generation_predicted.py --json        # one process, one device, minutes

Equally long prompts fill all slots; decoding is greedy and weights are random. The measured value is the minimum over
three rounds of the CPU time of one thread, which other load affects only through caches and memory bandwidth.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from _machine import machine
from transformers import AutoConfig, AutoModelForCausalLM

from hyper_parallel.backends.torch import read_model
from hyper_parallel.ir import GenerateWorkload
from hyper_parallel.planner.generation import plan_generation
from hyper_parallel.trainer.decoding import DecodingSequence, Sampling, make_decoder

# Family, hidden, query and key heads; prompts, tokens of each, new ones.
CASES = (
    ("llama", 256, 4, 4, 32, 32, 32),
    ("llama", 256, 8, 2, 32, 512, 32),
    ("llama", 1024, 16, 16, 1, 64, 16),
    ("llama", 1024, 16, 16, 16, 64, 16),
    ("llama", 1024, 16, 4, 16, 256, 16),
    ("llama", 512, 8, 8, 32, 256, 16),
    ("qwen3_moe", 256, 8, 4, 32, 64, 16),
)
EXPERTS = {
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "head_dim": 32,
}


def main() -> None:
    """Run all cases, and print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [_case(*case, rounds=given.rounds) for case in CASES]
    if given.json:
        print(json.dumps({**machine(), "cases": rows}, indent=1))
        return
    for row in rows:
        for part in ("prefill", "token"):
            measured, predicted = row[f"{part}_s"], row[f"predicted_{part}_s"]
            print(f"{row['case']}: {part} {measured * 1e3:.1f} ms, predicted {predicted * 1e3:.1f} ms")


def _case(
    family: str, hidden: int, heads: int, kv_heads: int, prompts: int, length: int, new: int, *, rounds: int
) -> dict[str, Any]:  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=4, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=4096, max_position_embeddings=4096, bos_token_id=None,
        eos_token_id=None, **(EXPERTS if family == "qwen3_moe" else {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    work = GenerateWorkload(prompts, length, new, "float32")
    made = plan_generation(read_model(model, family), "local", work, num_devices=1).best
    times = [_measured(model, work) for _ in range(rounds)]
    return {
        "case": f"{family}, 4 layers of {hidden}, {heads}/{kv_heads} heads, {prompts} x ({length} + {new}) tokens",
        "prefill_s": min(t[0] for t in times),
        "predicted_prefill_s": made.prefill_s,
        "token_s": min(t[1] for t in times),
        "predicted_token_s": made.token_s,
        "predicted_decode": made.decode,
    }


def _measured(model: Any, work: GenerateWorkload) -> tuple[float, float]:
    """Return the measured seconds until all sequences have their first token, and of each later decode pass."""
    texts = torch.randint(3, 4096, (work.prompts, work.prompt_len)).tolist()
    sequences = [DecodingSequence(i, ids, len(ids), work.new_tokens) for i, ids in enumerate(texts)]
    start, ends = time.process_time(), []
    decoder = make_decoder(model, sequences, Sampling(work.new_tokens, temperature=0), (), work.prompts)
    while decoder.busy:
        if decoder.step():
            ends.append(time.process_time())
    return ends[0] - start, (ends[-1] - ends[0]) / (len(ends) - 1)


if __name__ == "__main__":
    main()

"""Tokens per second for many prompts of different lengths: in cache slots, one by one, and with transformers.

    python benchmarks/generation_speed.py --json        # one process, one device

* slots: `Decoder` with a slot per prompt.
* one by one: the same model and prompts, one prompt at a time, as `generate --prompt` does.
* transformers: greedy `model.generate` on the left-padded batch, as in its documentation.

The variants take turns in every round; ratios are medians over rounds of seconds for the same tokens. On a CPU, seconds
are CPU time of one thread, which excludes other load. The number of sequences with equal tokens is reported, because
float32 on a CPU may round differently for another number of rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _machine import machine
from transformers import AutoModelForCausalLM, LlamaConfig

from hyper_parallel.trainer.decoding import DecodingSequence, Sampling, make_decoder
from hyper_parallel.trainer.generation import decode_tokens

Texts = list[list[int]]


def main() -> None:
    """Run all variants, and print their times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(given.hidden, given.layers).to(device)
    lengths = torch.Generator().manual_seed(1)
    sizes = torch.randint(4, 65, (given.prompts,), generator=lengths).tolist()
    prompts = [torch.randint(3, 4096, (size,), generator=lengths).tolist() for size in sizes]
    variants: dict[str, Callable[[], Texts]] = {
        "slots": lambda: _in_slots(model, prompts, given.new_tokens),
        "one by one": lambda: _one_by_one(model, prompts, given.new_tokens),
        "transformers": lambda: _transformers(model, prompts, given.new_tokens),
    }
    texts = {name: run() for name, run in variants.items()}  # and warms up
    rounds = [{name: _seconds(run) for name, run in variants.items()} for _ in range(given.rounds)]
    tokens = given.prompts * given.new_tokens
    result: dict[str, Any] = {
        **machine(),
        "model": {
            "family": "llama",
            "hidden": given.hidden,
            "layers": given.layers,
            "dtype": "float32",
        },
        "prompts": given.prompts,
        "prompt_tokens": [min(sizes), max(sizes)],
        "new_tokens": given.new_tokens,
        "rounds": rounds,
        "tokens_per_s": {name: tokens / statistics.median(r[name] for r in rounds) for name in variants},
        "slots_over": {
            name: statistics.median(r[name] / r["slots"] for r in rounds) for name in ("one by one", "transformers")
        },
        "same_tokens": {
            name: sum(a == b for a, b in zip(texts["slots"], texts[name], strict=True))
            for name in ("one by one", "transformers")
        },
    }
    if given.json:
        print(json.dumps(result))
        return
    for name, rate in result["tokens_per_s"].items():
        print(f"{name:14} {rate:8.0f} tokens/s")
    for name, ratio in result["slots_over"].items():
        print(f"slots over {name}: {ratio:.2f}x, same tokens {result['same_tokens'][name]}")


def _model(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def _in_slots(model: Any, prompts: Texts, count: int) -> Texts:
    sampling = Sampling(count, temperature=0)
    sequences = [DecodingSequence(i, [*ids], len(ids), count) for i, ids in enumerate(prompts)]
    for _ in make_decoder(model, sequences, sampling, (), len(prompts)).run():
        pass
    return [s.tokens for s in sequences]


def _one_by_one(model: Any, prompts: Texts, count: int) -> Texts:
    sampling = Sampling(count, temperature=0)
    return [list(decode_tokens(model, ids, sampling)) for ids in prompts]


def _transformers(model: Any, prompts: Texts, count: int) -> Texts:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    with torch.no_grad():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=count)
    found: Texts = out[:, width:].tolist()
    return found


def _seconds(run: Callable[[], Texts]) -> float:
    on_cpu = not torch.cuda.is_available()
    clock = time.process_time if on_cpu else time.perf_counter
    begin = clock()
    run()  # ends with its tokens on the host
    return clock() - begin


if __name__ == "__main__":
    main()

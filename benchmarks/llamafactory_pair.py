"""Step time and peak memory of LlamaFactory with this package's layouts, against Accelerate's FSDP2.

Two jobs of `llamafactory-cli train` with the same model, data and seed, each on two ranks, take turns of some steps, so
that other load affects both; one job sleeps while the other trains. A callback of transformers reads clocks and /proc.
Losses must agree to 1e-5. CPU seconds are those of all threads of both ranks. Peak memory is the resident peak of a
rank, in total and minus its size before LlamaFactory reads its arguments. Exit status 1 if a bar is missed. Needs the
environment that tools/llamafactory_env.sh creates.

    build/llamafactory/bin/python benchmarks/llamafactory_pair.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BAR = 1.0
RANKS = 2
SIDES = ("ours", "fsdp2")
SHAPE = {
    "vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1056, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SEQ_LEN = 256
FSDP = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def prepare(place: Path, steps: int, batch: int) -> None:
    """Write a random Llama with tokenizer, chats that fill a sequence, and a recipe for each side."""
    import yaml
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(place / "model")
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["one two"], 300, special_tokens=["<s>", "</s>", "<pad>"])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(place / "model")
    draw = random.Random(0)
    chats = [
        {"instruction": "?", "input": "", "output": "".join(draw.choices("abcdefgh ", k=2 * SEQ_LEN))}
        for _ in range(steps * batch * RANKS)
    ]  # fmt: skip
    (place / "chats.json").write_text(json.dumps(chats))
    (place / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "chats.json"}}))
    common = {
        "model_name_or_path": str(place / "model"), "stage": "sft", "do_train": True, "finetuning_type": "full",
        "dataset": "chats", "dataset_dir": str(place), "template": "empty", "cutoff_len": SEQ_LEN, "seed": 1,
        "per_device_train_batch_size": batch, "max_steps": steps, "learning_rate": 1e-4, "logging_steps": 5,
        "save_strategy": "no", "use_cpu": True, "report_to": "none", "disable_gradient_checkpointing": True,
        "overwrite_output_dir": True, "preprocessing_num_workers": 1, "dataloader_num_workers": 0,
        "disable_tqdm": True,
    }  # fmt: skip
    for side, own in zip(SIDES, ({"use_hyper_parallel": True}, FSDP), strict=True):
        recipe = {**common, "output_dir": str(place / side), **own}
        (place / f"{side}.yaml").write_text(yaml.safe_dump(recipe))


def rank_main(place: Path, side: str, turn: int) -> None:
    """Run LlamaFactory's own entry point on a rank, with a measuring callback."""
    import torch.distributed as dist
    from llamafactory.hparams import read_args
    from llamafactory.train.tuner import run_exp
    from transformers import TrainerCallback

    if side == "fsdp2":
        _offer_fsdp_on_cpu()
    before = _resident("VmRSS")
    rounds: list[tuple[float, float]] = []
    start: list[tuple[float, float]] = []
    token = place / "turn"

    class Meter(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % turn == 0:
                while dist.get_rank() == 0 and token.read_text() != side:
                    time.sleep(0.002)
                dist.barrier()
                start.append((time.perf_counter(), time.process_time()))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % turn == 0:
                dist.barrier()
                wall, cpu = start.pop()
                rounds.append((time.perf_counter() - wall, time.process_time() - cpu))
                if dist.get_rank() == 0:
                    mine = token.with_suffix(f".{side}")
                    mine.write_text(SIDES[1 - SIDES.index(side)])
                    mine.rename(token)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            peak = _resident("VmHWM")
            report = {
                "rounds": rounds,
                "peak_bytes": peak,
                "grown_bytes": peak - before,
                "losses": [row["loss"] for row in state.log_history if "loss" in row],
            }
            Path(place, f"{side}.{args.process_index}.json").write_text(json.dumps(report))

    run_exp(read_args_of(read_args, place / f"{side}.yaml"), [Meter()])


def read_args_of(read_args: Any, recipe: Path) -> Any:
    """Make LlamaFactory read `recipe`, whose path it expects on the command line."""
    sys.argv = [sys.argv[0], str(recipe)]
    return read_args()


def _offer_fsdp_on_cpu() -> None:
    """Enable Accelerate's FSDP2 on CPU ranks with gloo, which it otherwise restricts to accelerators."""
    import torch
    import torch.distributed as dist
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


def measure(rounds: int, turn: int, batch: int) -> dict[str, object]:
    """Run both jobs, and return their combined measurements."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        prepare(place, (rounds + 1) * turn, batch)
        (place / "turn").write_text(SIDES[0])
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "DISABLE_VERSION_CHECK": "1", "CUDA_VISIBLE_DEVICES": "",
            "MALLOC_MMAP_THRESHOLD_": "65536",  # freed tensors go back, so that the resident size follows them
        }  # fmt: skip
        jobs = []
        for side in SIDES:
            words = ["torchrun", "--standalone", f"--nproc_per_node={RANKS}", __file__]
            words = [sys.executable, "-m", "torch.distributed.run", *words[1:]]
            words += ["--rank-of", side, "--place", name, "--turn", str(turn)]
            log = (place / f"{side}.log").open("w")
            jobs.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
        failed = None
        try:
            while failed is None and any(job.poll() is None for job in jobs):
                failed = next((s for s, job in zip(SIDES, jobs, strict=True) if job.poll()), None)
                time.sleep(0.2)
        finally:
            for job in jobs:
                job.terminate()
                job.wait()
        if failed:
            sys.exit(f"{failed} failed:\n" + (place / f"{failed}.log").read_text()[-4000:])
        read = {side: [json.loads((place / f"{side}.{r}.json").read_text()) for r in range(RANKS)] for side in SIDES}
    return _summary(read, turn)


def _summary(read: dict[str, list[dict[str, Any]]], turn: int) -> dict[str, object]:
    wall, cpu, peak, grown = {}, {}, {}, {}
    for side, ranks in read.items():
        pairs = [one["rounds"][1:] for one in ranks]  # the first makes optimizer states
        wall[side] = [seconds / turn for seconds, _ in pairs[0]]
        cpu[side] = [sum(r[1] for r in together) / turn for together in zip(*pairs, strict=True)]
        peak[side] = max(one["peak_bytes"] for one in ranks)
        grown[side] = max(one["grown_bytes"] for one in ranks)
    ours, theirs = SIDES
    losses = [abs(a / b - 1.0) for a, b in zip(read[ours][0]["losses"], read[theirs][0]["losses"], strict=True)]
    medians = {kind: {side: statistics.median(found) for side, found in values.items()}
               for kind, values in (("wall", wall), ("cpu", cpu))}  # fmt: skip
    ratios = {kind: two[ours] / two[theirs] for kind, two in medians.items()}
    ratios |= {"peak": peak[ours] / peak[theirs], "grown": grown[ours] / grown[theirs]}
    return {
        "shape": SHAPE, "ranks": RANKS, "seq_len": SEQ_LEN, "bar": BAR,
        "step_s": medians["wall"], "step_cpu_s": medians["cpu"], "peak_bytes": peak, "grown_bytes": grown,
        "time_ratio": ratios["wall"], "cpu_ratio": ratios["cpu"],
        "median_of_round_ratios": statistics.median(
            a / b for a, b in zip(wall[ours], wall[theirs], strict=True)
        ),
        "memory_ratio": ratios["peak"], "grown_ratio": ratios["grown"],
        "loss_difference": max(losses), "rounds_s": wall, "rounds_cpu_s": cpu,
        "passed": ratios["wall"] <= BAR and ratios["peak"] <= BAR and max(losses) <= 1e-5,
    }  # fmt: skip


def main() -> None:
    """Run the benchmark with the command-line options, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side")
    parser.add_argument("--turn", type=int, default=5, help="steps of a turn")
    parser.add_argument("--batch", type=int, default=2, help="sequences of a rank")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a line")
    parser.add_argument("--rank-of", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        rank_main(args.place, args.rank_of, args.turn)
        return
    found = measure(args.rounds, args.turn, args.batch)
    if args.json:
        from _machine import machine

        print(json.dumps({"machine": machine(), **found}, indent=1))
    else:
        print(
            f"time {found['time_ratio']:.3f} (CPU {found['cpu_ratio']:.3f}), "
            f"memory {found['memory_ratio']:.3f} (grown {found['grown_ratio']:.3f}), "
            f"losses differ by {found['loss_difference']:.1e}"
        )
    if not found["passed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()

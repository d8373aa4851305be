"""Read damaged files of every format: `make fuzz-inputs N=1000`.

    python tools/fuzz_inputs.py --inputs 1000 --seed 1 [--only recipe,plan] [--first I] [--json]

Good files of every format are made once. Each input is one of them with some mutations (keys dropped, types changed,
huge and negative numbers, NaN, deep nesting, other encodings, cut, repeated, flipped bits), drawn from seed and
number, and goes through the reader that a user reaches it by, in this process. It has to be read, or refused with a
code. Another exception, more than 5 s of the processor, or more than 2 GiB of memory is a finding: it is printed once
per place, with what repeats it, and its file is kept. The status is 0 when nothing was found.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import pickle
import platform
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from fuzz_mutations import mutated

from hyper_parallel.errors import HyperParallelError

SECONDS, MORE_BYTES = 5, 2 << 30
_OWN = "hyper_parallel/"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 384, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 128, "tie_word_embeddings": True, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
}  # fmt: skip
RECIPE = """
model: {{path: {root}/model/config.json}}
data: {{source: {root}/data/words.txt, seq_len: 32, vocab_size: 300, cache_dir: {root}/cache, holdout: 0.1}}
training: {{steps: 4, dtype: float32, tokens_per_step: 128, lr: 1.0e-2, warmup_steps: 1, betas: [0.9, 0.95]}}
parallel: {{dp_shard: 1}}
checkpoint: {{every: 2, keep: 2, export: false}}
offload: {{budget: null}}
output_dir: {root}/run
"""


class TooLong(BaseException):
    """An input took more processor time than it may; not to be caught by readers."""


# Readers: they get the folder of seed files, one of which is mutated.
def cli(*words: object) -> Any:
    """The command in this process: its status; what it raises is raised."""
    from hyper_parallel.cli import application

    return application()([str(word) for word in words], standalone_mode=False)


def _recipe(root: Path) -> None:
    cli("config", "show", root / "recipe.yaml")
    cli("plan", "--recipe", root / "recipe.yaml", "--dry-run")


def _plan(root: Path) -> None:
    cli("plan", "--diff", root / "plan.json", root / "run" / "plan.json")


def _topology(root: Path) -> None:
    cli(
        "plan", root / "model" / "config.json", "--topology", root / "topology.yaml", "--devices", 2
    )


def _config(root: Path) -> None:
    from hyper_parallel.config import Recipe
    from hyper_parallel.trainer.engine._model import build_model

    path = root / "model" / "config.json"
    cli("plan", path, "--topology", "local-cpu", "--devices", 2)
    build_model(Recipe.model_validate({"model": {"path": str(path), "init": "random"}}))


def _weights(root: Path) -> None:
    from hyper_parallel.backends.torch.weights._tensor_files import WeightFiles
    from hyper_parallel.model import load_model

    load_model(root / "model")
    files = WeightFiles(root / "model")
    for name in files.tensors:
        files.read(name)


def _checkpoint(root: Path) -> None:
    cli("checkpoint", "list", root / "run")
    intact = cli("checkpoint", "verify", root / "run") != 1
    cli("checkpoint", "inspect", root / "run")
    if intact:
        cli("checkpoint", "export", root / "run", "--out", root / "cache" / "exported")


def _run(root: Path) -> None:
    from hyper_parallel.trainer.loop._metrics import _keep_until

    cli("report", root / "run")
    _keep_until(root / "run" / "metrics.jsonl", 2)


def _dump(root: Path) -> None:
    cli("doctor", root / "dumps")


def _data(name: str, stage: str, **more: Any) -> Callable[[Path], None]:
    """`prepare` on one source."""

    def read(root: Path) -> None:
        from hyper_parallel.config import Data
        from hyper_parallel.trainer.data import prepare

        values = {
            "seq_len": 32,
            "cache_dir": str(root / "cache"),
            "tokenizer": str(root / "run" / "model"),
        }
        data = Data(source=str(root / "data" / name), **values, **more)
        prepare(data, stage=stage, model_path=None, seed=0, progress=False)

    return read


FORMATS: dict[str, tuple[int, str, Callable[[Path], None]]] = {
    "recipe": (4, "recipe.yaml", _recipe),
    "plan": (4, "plan.json", _plan),
    "topology": (4, "topology.yaml", _topology),
    "model config": (4, "model/config.json", _config),
    "safetensors": (8, "model/*.safetensors", _weights),
    "safetensors index": (6, "model/model.safetensors.index.json", _weights),
    "checkpoint": (3, "run/checkpoints/step_*/*", _checkpoint),
    "run files": (1, "run/*.[jy]*", _run),
    "flight recorder": (4, "dumps/*", _dump),
    "text": (4, "data/words.txt", _data("words.txt", "pt", holdout=0.1)),
    "jsonl": (6, "data/chat.jsonl", _data("chat.jsonl", "sft", holdout=0.1)),
    "json": (6, "data/pairs.json", _data("pairs.json", "dpo", holdout=0.0)),
    "csv": (5, "data/table.csv", _data("table.csv", "pt")),
    "parquet": (4, "data/table.parquet", _data("table.parquet", "pt")),
    "dataset folder": (4, "data/saved/*", _data("saved", "pt")),
}
"""Format -> (share of the inputs, less where a reader takes longer; seed files, one of which is mutated; reader)."""


def make_seeds(root: Path) -> None:
    """A good file of every format."""
    import datasets
    import transformers

    for name in ("model", "data", "dumps"):
        (root / name).mkdir()
    words = [f"def f{i}(x):\n    return x * {i} + {i % 7}" for i in range(60)]
    (root / "data" / "words.txt").write_text("\n\n".join(words))
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**MODEL)
    )
    model.save_pretrained(root / "model", max_shard_size="60KB")
    cli("train", root / "recipe.yaml", "--no-calibrate")  # starts one rank, once
    cli(
        "plan",
        root / "model" / "config.json",
        "--topology",
        "local-cpu",
        "--devices",
        2,
        "-o",
        root / "plan.json",
    )
    preset = (
        Path(sys.modules["hyper_parallel"].__path__[0]) / "topology" / "presets" / "dgx-h100.yaml"
    )
    shutil.copy(preset, root / "topology.yaml")
    turns = [[{"from": "human", "value": w[:9]}, {"from": "gpt", "value": w}] for w in words]
    (root / "data" / "chat.jsonl").write_text(
        "\n".join(json.dumps({"conversations": t}) for t in turns)
    )
    pairs = [{"prompt": w[:9], "chosen": w, "rejected": w[::-1]} for w in words]
    (root / "data" / "pairs.json").write_text(json.dumps(pairs))
    with (root / "data" / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(words)])
    table = datasets.Dataset.from_dict({"text": words})
    table.to_parquet(root / "data" / "table.parquet")
    table.save_to_disk(root / "data" / "saved")
    entry = {
        "record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
        "op_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[3]], "input_dtypes": ["Float"],
        "output_sizes": [[3]], "output_dtypes": ["Float"], "state": "scheduled", "is_p2p": False, "frames": [],
    }  # fmt: skip
    dump = {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
        "pg_status": {},
        "entries": [entry],
    }
    (root / "dumps" / "rank_0.pickle").write_bytes(pickle.dumps(dump))
    (root / "dumps" / "rank_1.json").write_text(json.dumps(dump))


def seal(path: Path) -> None:
    """Give a mutated file of a checkpoint the checksums that its writer would have given it."""
    from hyper_parallel.trainer._files import FileEntry
    from hyper_parallel.trainer.checkpoints import _manifest as files

    manifest = path.with_name(files.MANIFEST)
    try:
        values = json.loads(manifest.read_bytes())
        if path.name in values["files"]:
            entry = FileEntry.of(path)
            values["files"][path.name] = {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
        values.pop("sha256", None)
        values["sha256"] = files.hashlib.sha256(files.json_text(values).encode()).hexdigest()
        manifest.write_text(files.json_text(values))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass  # no longer a manifest


def outcome(read: Callable[[Path], None], root: Path) -> tuple[str, str]:
    """`read`, or a code, or where in the package another exception came from, and how it was reached."""
    said = StringIO()
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with redirect_stdout(said), redirect_stderr(said):
                read(root)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except HyperParallelError as error:
        error.render()
        return error.code, ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _OWN in f.filename]
        lines = [f"{f.filename.rpartition(_OWN)[2]}:{f.lineno} {f.name}" for f in frames]
        name = type(error).__name__
        return f"{name} at {lines[-1] if lines else '?'}", "\n  ".join([*lines, f"{error!s:.300}"])
    return "read", ""


@contextmanager
def limited() -> Iterator[None]:
    """Inside, this process may take `MORE_BYTES` more than now, and a timer raises `TooLong`."""

    def stop(*_: object) -> None:
        raise TooLong

    before = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, stop)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, before[0][1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before[0])
        signal.signal(signal.SIGPROF, before[1])


def fuzz(kinds: list[str], seed: int, numbers: Iterable[int], kept: Path) -> dict[str, Any]:
    """Read the inputs of these numbers; how many of each format there were, and what came of them."""
    start, counts, outcomes = time.monotonic(), Counter(), Counter()
    findings: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_fuzz_") as name:
        root = Path(name)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            make_seeds(root)
        seeds = {k: sorted(p for p in root.glob(FORMATS[k][1]) if p.is_file()) for k in kinds}
        whole = {path: path.read_bytes() for paths in seeds.values() for path in paths}
        for kind in kinds:  # it also imports everything before memory is limited
            found = outcome(FORMATS[kind][2], root)
            assert found[0] == "read", (kind, found)
        turns = [kind for kind in kinds for _ in range(FORMATS[kind][0])]
        with limited(), suppress(KeyboardInterrupt):
            for number in numbers:
                draw, kind = random.Random(f"{seed} {number}"), turns[number % len(turns)]
                path = draw.choice(seeds[kind])
                path.unlink()  # readers may have mapped it
                path.write_bytes(mutated(path, whole[path], draw))
                if kind == "checkpoint" and draw.random() < 0.6:
                    seal(path)
                found, trace = outcome(FORMATS[kind][2], root)
                counts[kind] += 1
                outcomes[found] += 1
                if trace and found not in findings:
                    again = f"--seed {seed} --first {number} --inputs 1 --only '{','.join(kinds)}'"
                    findings[found] = {"format": kind, "file": path.name, "again": again}
                    kept.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, kept / f"{seed}_{number}_{path.name}")
                    words = f"{kind}, {path.name}: {found}\n  {again}\n  {trace}"
                    print(words, file=sys.stderr, flush=True)
                shutil.rmtree(root / "cache", ignore_errors=True)
                for each in seeds[kind]:
                    each.write_bytes(whole[each])
    seconds = round(time.monotonic() - start)
    result = {
        "inputs": counts.total(),
        "findings": len(findings),
        "seconds": seconds,
        "found": findings,
    }
    return result | {"formats": dict(counts), "outcomes": dict(outcomes.most_common())}


def main() -> int:
    """Read mutated inputs until there were enough; 0 when nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000, help="Inputs in all.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first one.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(FORMATS), help="Formats, with commas.")
    parser.add_argument("--kept", type=Path, default=Path("build/fuzz_inputs"))
    parser.add_argument("--json", action="store_true", help="Print all that was counted.")
    wanted = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    logging.basicConfig(handlers=[logging.NullHandler()])
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # prints what was counted until then
    numbers = range(wanted.first, wanted.first + wanted.inputs)
    result = fuzz(wanted.only.split(","), wanted.seed, numbers, wanted.kept)
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "command": " ".join(["python", "tools/fuzz_inputs.py", *sys.argv[1:]]),
    }
    brief = {key: result[key] for key in ("inputs", "findings", "seconds")}
    print(json.dumps(facts | result, indent=1) if wanted.json else json.dumps(brief))
    return 1 if result["findings"] else 0


if __name__ == "__main__":
    sys.exit(main())

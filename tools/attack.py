"""Robustness test: read hostile and damaged files of every kind (`make attack N=2000`).

    python tools/attack.py --inputs 2000 --seed 1 [--only recipe,plan] [--first I] [--json] [--record]

Valid files of every kind are created once. Each input is a valid file with random mutations that depend on seed and
number: dropped keys, changed types, huge and negative numbers, NaN, deep nesting, aliases, hostile templates and
patterns, other encodings, truncation, flipped bits, or a link, pipe, folder or file of another kind in its place. The
command that users call reads it in a separate process. It must be read, or refused with a coded error, within 1 GiB of
memory and 5 s of CPU time (or 5 s more than the valid files take). Findings are counted by kind:

    uncoded         an error without a code, a crash, or no end within a minute
    silent          a changed file is accepted as unchanged, or its values are dropped without a message
    no way back     a run with one damaged checkpoint of two cannot resume from the other
    outside writes  a file outside the folder of the input was created, changed or removed
    outside reads   content of a file outside the folder appears in the output or in a cache
    foreign         an unrelated file inside the folder was removed or changed
    slow, large     the limit on CPU time or memory was exceeded

Findings are printed once per place in the code, with the command that repeats them, and their files are kept. The exit
status is 0 without findings.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
import os
import pickle
import platform
import random
import resource
import select
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
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Final

from attack_mutations import PATTERNS, mutated, replaced
from small_runs import MODEL

from hyper_parallel.errors import HyperParallelError

SECONDS: Final = 5
MORE_BYTES: Final = 1 << 30
LONGEST_S: Final = 60
CEILING_BYTES: Final = 4 << 30
"""Maximum additional address space of an input, which protects the machine; reaching it is a finding."""
SECRET: Final = "words-of-somebody-else-7f3a"
RESULTS: Final = Path(__file__).resolve().parents[1] / "docs" / "results" / "attack.json"
_OWN: Final = "hyper_parallel/"
RECIPE = """
model: {{path: {root}/model/config.json}}
data: {{source: {root}/data/words.txt, seq_len: 32, vocab_size: 300, cache_dir: {root}/cache, holdout: 0.1}}
training: {{steps: 4, dtype: float32, tokens_per_step: 128, lr: 1.0e-2, warmup_steps: 1, betas: [0.9, 0.95]}}
parallel: {{dp_shard: 1}}
checkpoint: {{every: 2, keep: 2, export: true}}
offload: {{budget: null}}
output_dir: {root}/run
"""
OVERRIDES: Final = (
    "parallel.dp_shard=1000000000", "training.steps=-1", "training.lr=.nan", "data.seq_len=1e400", "a.b.c.d=1",
    "lora={}", "training=null", "data.source=" + "x" * 5000, "model.path=/dev/zero", "output_dir=" + "d/" * 3000,
    "=", "x", "training.betas=[[[[]]]]", "lora.target_modules='" + PATTERNS[0] + "'", "lora.r=1000000000",
    "parallel={pp: 100000}", "training.optimizer_args={a: &b [*b]}", "data=[1]", "training.seed=" + "9" * 5000,
)  # fmt: skip


def cli(*words: object) -> Any:
    """Run the command in this process, and return its exit status; errors are raised, OSErrors as coded errors."""
    from hyper_parallel.cli import application
    from hyper_parallel.cli.app import error_of_file

    try:
        return application()([str(word) for word in words], standalone_mode=False)
    except OSError as error:
        raise error_of_file(error) from error


# Readers receive the folder of files, one of which is changed, and return a description of a problem, or nothing.
def _recipe(root: Path) -> None:
    cli("config", "show", root / "recipe.yaml")
    cli("plan", "--recipe", root / "recipe.yaml", "--dry-run")


def _overrides(root: Path) -> None:
    words = (root / "overrides.txt").read_text(encoding="utf-8", errors="replace").split("\0")
    cli("config", "show", root / "recipe.yaml", *words)
    cli("train", root / "recipe.yaml", "--dry-run", "--no-calibrate", *words)


def _plan(root: Path) -> str:
    from hyper_parallel.ir import Plan

    cli("plan", "--diff", root / "plan.json", root / "run" / "plan.json")
    given = json.loads((root / "plan.json").read_bytes())
    given.pop("fingerprint", None)
    dropped = _different(given, json.loads(Plan.load(root / "plan.json").to_json()))
    return f"{dropped} has another value" if dropped else ""


def _different(given: Any, kept: Any, path: str = "$") -> str:
    """Return the path of the first value in `given` that differs in `kept`; empty if there is none.

    Keys that only `kept` has are ignored, because they have their default.
    """
    if isinstance(given, dict) and isinstance(kept, dict):
        pairs: list[tuple[Any, Any, Any]] = [(f".{k}", v, kept.get(k, "nothing")) for k, v in given.items()]
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = [(f"[{i}]", *pair) for i, pair in enumerate(zip(given, kept, strict=True))]
    else:
        return "" if given == kept or given != given else path
    return next((found for k, a, b in pairs if (found := _different(a, b, path + k))), "")


def _run_plan(root: Path) -> None:
    cli("report", root / "run")


def _topology(root: Path) -> None:
    config = root / "model" / "config.json"
    cli("plan", config, "--topology", root / "topology.yaml", "--devices", 2)


def _config(root: Path) -> None:
    from hyper_parallel.config import Recipe
    from hyper_parallel.trainer.engine.recipe_model import build_model

    path = root / "model" / "config.json"
    cli("plan", path, "--topology", "local-cpu", "--devices", 2)
    build_model(Recipe.model_validate({"model": {"path": str(path), "init": "random"}}))


def _weights(root: Path) -> None:
    from hyper_parallel.backends.torch.weights.tensor_files import WeightFiles
    from hyper_parallel.model import load_model

    load_model(root / "model")
    files = WeightFiles(root / "model")
    for name in files.tensors:
        files.read(name)


def _adapter(root: Path) -> str:
    from safetensors.torch import load_file

    shutil.rmtree(root / "imported", ignore_errors=True)
    cli("checkpoint", "import", root / "adapter", root / "imported")
    given = json.loads((root / "adapter" / "adapter_config.json").read_bytes())
    step = root / "imported" / "checkpoints" / "step_00000000"
    facts = json.loads((step / "extra.json").read_text())["run"]
    for key, default in (("r", 8), ("lora_alpha", 8), ("use_rslora", False)):
        if facts[f"lora.{key}"] != given.get(key, default):
            return f"{key} is {facts[f'lora.{key}']}, the file has {given.get(key)}"
    stored = load_file(root / "adapter" / "adapter_model.safetensors")
    read = load_file(step / "rank_00000.safetensors")
    sums = [round(float(t.double().abs().sum()), 6) for t in stored.values()]
    if sorted(sums) != sorted(round(float(t.double().abs().sum()), 6) for t in read.values()):
        return "other tensors than those of the file"
    return ""


def _checkpoint(root: Path) -> str:
    from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
    from hyper_parallel.trainer.checkpoints.extra_state import check_trainer_extra

    cli("checkpoint", "list", root / "run")
    intact = cli("checkpoint", "verify", root / "run") != 1
    with suppress(HyperParallelError):
        cli("checkpoint", "inspect", root / "run")
    saver = Checkpointer(
        root / "run" / "checkpoints", keep=1, asynchronous=False, fingerprint=None,
        check_extra=check_trainer_extra,
    )  # fmt: skip
    try:
        saver.newest_intact(None)
    except HyperParallelError as error:
        if error.code != "HP740":  # of an earlier version, which is no damage
            return f"no way back: {error.what}"
        raise
    cli("checkpoint", "export", root / "run", "--out", root / "cache" / "exported")
    sealed = (root / "sealed").exists()
    return "a changed file is verified" if intact and not sealed else ""


def _run(root: Path) -> None:
    from hyper_parallel.trainer.loop.metrics import _keep_until

    cli("report", root / "run", root / "other")
    _keep_until(root / "run" / "metrics.jsonl", 2)


def _run_directory(root: Path) -> None:
    with suppress(HyperParallelError):
        cli("report", root / "run")
    cli("checkpoint", "export", root / "run", "--out", root / "cache" / "exported")
    cli("generate", root / "run", "--prompt", "def", "--max-new-tokens", 2)


def _runs(root: Path) -> None:
    cli("predict", root / "runs.csv", "-o", root / "cache.csv")


def _dump(root: Path) -> None:
    cli("doctor", root / "dumps")


def _data(name: str, stage: str, **more: Any) -> Callable[[Path], None]:
    """Return a reader that runs the preparation of the data source `name`."""

    def read(root: Path) -> None:
        from hyper_parallel.config import Data
        from hyper_parallel.trainer.data import prepare

        place = {"cache_dir": str(root / "cache"), "tokenizer": str(root / "tokenizer")}
        data = Data(source=str(root / "data" / name), seq_len=32, **place, **more)
        prepare(data, stage=stage, model_path=None, seed=0, progress=False)

    return read


KINDS: dict[str, tuple[int, str, Callable[[Path], str | None]]] = {
    "recipe": (4, "recipe.yaml", _recipe),
    "overrides": (2, "overrides.txt", _overrides),
    "plan": (4, "plan.json", _plan),
    "plan of a run": (3, "run/plan.json", _run_plan),
    "topology": (3, "topology.yaml", _topology),
    "model config": (4, "model/config.json", _config),
    "safetensors": (4, "model/*.safetensors", _weights),
    "safetensors index": (3, "model/model.safetensors.index.json", _weights),
    "adapter": (6, "adapter/adapter_*", _adapter),
    "checkpoint": (8, "run/checkpoints/step_*/*", _checkpoint),
    "run files": (4, "run/*.[jy]*", _run),
    "run directory": (3, "run/*/*.json", _run_directory),
    "runs": (2, "runs.csv", _runs),
    "flight recorder": (2, "dumps/*", _dump),
    "tokenizer": (3, "tokenizer/tokenizer*.json", _data("words.txt", "pt")),
    "template": (3, "tokenizer/chat_template.jinja", _data("chat.jsonl", "sft", holdout=0.1)),
    "text": (2, "data/words.txt", _data("words.txt", "pt", holdout=0.1)),
    "jsonl": (3, "data/chat.jsonl", _data("chat.jsonl", "sft", holdout=0.1)),
    "json": (3, "data/pairs.json", _data("pairs.json", "dpo", holdout=0.0)),
    "csv": (2, "data/table.csv", _data("table.csv", "pt")),
    "parquet": (2, "data/table.parquet", _data("table.parquet", "pt")),
    "dataset folder": (3, "data/saved/*", _data("saved", "pt")),
}  # fmt: skip
"""By kind: share of the inputs, glob of the files of which one is changed, and reader."""


def make_good(root: Path) -> None:
    """Write valid files of every kind."""
    import transformers

    for name in ("model", "data", "dumps"):
        (root / name).mkdir()
    words = [f"def f{i}(x):\n    return x * {i} + {i % 7}" for i in range(60)]
    (root / "data" / "words.txt").write_text("\n\n".join(words))
    (root / "recipe.yaml").write_text(RECIPE.format(root=root))
    (root / "overrides.txt").write_text("training.lr=0.1")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**MODEL))
    model.save_pretrained(root / "model", max_shard_size="60KB")
    cli("train", root / "recipe.yaml", "--no-calibrate")  # starts one rank, once
    shutil.copytree(root / "run" / "model", root / "tokenizer")
    (root / "tokenizer" / "chat_template.jinja").write_text(
        "{% for m in messages %}<|{{ m.role }}|>{% generation %}{{ m.content }}{{ eos_token }}"
        "{% endgeneration %}{% endfor %}"
    )
    shutil.copytree(root / "run", root / "other", ignore=shutil.ignore_patterns("checkpoints", "export"))
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
    package = Path(sys.modules["hyper_parallel"].__path__[0])
    shutil.copy(package / "topology" / "presets" / "dgx-h100.yaml", root / "topology.yaml")
    _make_adapter(root, model)
    _make_data(root, words)
    _make_dumps(root)
    run = {
        "id": "a", "model": "Llama3-8B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128,
        "ffn": 14336, "gated": 1, "vocab": 128256, "seq": 8192, "device": "H100", "peak_tflops": 989, "n_dev": 16,
        "tp": 2, "zero": 1, "mbs": 1, "gbs": 128, "precision": "bf16", "step_s": "", "stack": "NeMo",
    }  # fmt: skip
    with (root / "runs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([run, run.values(), (run | {"id": "b", "n_dev": 32, "step_s": 9.5}).values()])


def _make_adapter(root: Path, model: Any) -> None:
    import peft

    base = root / "base"
    model.save_pretrained(base)
    for file in (root / "tokenizer").glob("*"):
        shutil.copy(file, base / file.name)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapted.save_pretrained(root / "adapter")
    (root / "adapter" / "README.md").unlink(missing_ok=True)


def _make_data(root: Path, words: list[str]) -> None:
    import datasets

    turns = [[{"from": "human", "value": w[:9]}, {"from": "gpt", "value": w}] for w in words]
    lines = (json.dumps({"conversations": t}) for t in turns)
    (root / "data" / "chat.jsonl").write_text("\n".join(lines))
    pairs = [{"prompt": w[:9], "chosen": w, "rejected": w[::-1]} for w in words]
    (root / "data" / "pairs.json").write_text(json.dumps(pairs))
    with (root / "data" / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "text"], *enumerate(words)])
    table = datasets.Dataset.from_dict({"text": words})
    table.to_parquet(root / "data" / "table.parquet")
    table.save_to_disk(root / "data" / "saved")


def _make_dumps(root: Path) -> None:
    entry = {
        "record_id": 0, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": 1, "p2p_seq_id": 0,
        "op_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[3]], "input_dtypes": ["Float"],
        "output_sizes": [[3]], "output_dtypes": ["Float"], "state": "scheduled", "is_p2p": False, "frames": [],
    }  # fmt: skip
    group = {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}
    dump = {"version": "2.10", "pg_config": {"0": group}, "pg_status": {}, "entries": [entry]}
    (root / "dumps" / "rank_0.pickle").write_bytes(pickle.dumps(dump))
    (root / "dumps" / "rank_1.json").write_text(json.dumps(dump))


def seal(path: Path) -> None:
    """Update the checksums in a checkpoint's manifest for a changed file, so that it appears intact."""
    from hyper_parallel.trainer.checkpoints import manifest as files
    from hyper_parallel.trainer.files import FileEntry

    manifest = path.with_name(files.MANIFEST)
    try:
        values = json.loads(manifest.read_bytes())
        if path.name in values["files"]:
            entry = FileEntry.of(path)
            values["files"][path.name] = {"size_bytes": entry.size_bytes, "sha256": entry.sha256}
        values.pop("sha256", None)
        values["sha256"] = hashlib.sha256(files.json_text(values).encode()).hexdigest()
        manifest.write_text(files.json_text(values))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OSError):
        pass  # no longer a manifest


@dataclass
class Outcome:
    """Outcome of reading one input.

    Attributes:
        result: `read`, an error code, or an exception with its place in the code.
        trace: Stack frames of this package, and the message of an exception without a code.
        silent: Description of a change that was accepted without a message; empty: none.
        seconds: CPU seconds.
        more_bytes: Memory in addition to that of the tool.
        leaks: Whether the output contains content of a file outside the folder.
    """

    result: str
    trace: str = ""
    silent: str = ""
    seconds: float = 0.0
    more_bytes: int = 0
    leaks: bool = False


def _read_here(read: Callable[[Path], str | None], root: Path) -> Outcome:
    """Call a reader in this process, and return the outcome."""
    said = StringIO()
    try:
        with redirect_stdout(said), redirect_stderr(said):
            silent = read(root) or ""
        outcome = Outcome("read", silent=silent)
    except HyperParallelError as error:
        said.write(error.render())
        outcome = Outcome(error.code)
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _OWN in f.filename]
        lines = [f"{f.filename.rpartition(_OWN)[2]}:{f.lineno} {f.name}" for f in frames]
        place = f"{type(error).__name__} at {lines[-1] if lines else '?'}"
        outcome = Outcome(place, "\n  ".join([*lines, f"{error!s:.300}"]))
    outcome.leaks = SECRET in said.getvalue()
    return outcome


def attempt(read: Callable[[Path], str | None], root: Path) -> Outcome:
    """Call a reader in a separate process, which is killed after a time limit, and return the outcome."""
    receiver, sender = os.pipe()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if (pid := os.fork()) == 0:
        os.setpgid(0, 0)
        os.close(receiver)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + CEILING_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        outcome = _read_here(read, root)
        with os.fdopen(sender, "wb") as file:
            file.write(pickle.dumps(outcome))
        os._exit(0)
    os.close(sender)
    content, deadline = b"", time.monotonic() + LONGEST_S
    with os.fdopen(receiver, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if not (part := file.read(1 << 16)):
                break
            content += part
        else:
            os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # ranks that it has left
    outcome = Outcome(f"ended with status {status}", "no word")
    if content and not status:
        outcome = pickle.loads(content)
    elif os.WIFSIGNALED(status):
        outcome = Outcome(f"{signal.Signals(os.WTERMSIG(status)).name} after {LONGEST_S} s or a crash", "no word")
    outcome.seconds = usage.ru_utime + usage.ru_stime
    outcome.more_bytes = max(0, usage.ru_maxrss - before) * 1024
    return outcome


def make_victim(victim: Path) -> None:
    """Write files outside the folder of inputs, to which links in inputs point."""
    (victim / "thesis").mkdir(parents=True)
    (victim / "thesis" / "chapter.txt").write_text(f"{SECRET}\n" * 50)
    (victim / "secret.json").write_text(json.dumps({"text": SECRET, "key": SECRET}))
    (victim / "rows.jsonl").write_text(json.dumps({"text": SECRET}) * 3)


def digest(folder: Path) -> dict[str, str]:
    """Return a hash of the content of every file below a folder, by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = hashlib.sha256(content).hexdigest()
    return found


@dataclass
class Attack:
    """Sequence of inputs derived from one set of valid files.

    Attributes:
        root: Folder of the valid files; every input changes one of them.
        victim: Folder outside `root` that must not be touched.
        kept: Folder for the files of findings.
        kinds: Kinds of files to change.
    """

    root: Path
    victim: Path
    kept: Path
    kinds: list[str]
    counts: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    totals: Counter[str] = field(default_factory=Counter)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def prepare(self) -> None:
        """Write the valid files, read each once, and record the files that must not be touched."""
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            make_good(self.root)
        self.foreign = [self.root / place / "thesis.txt" for place in (".", "run", "model", "data", "adapter")]
        for path in self.foreign:
            path.write_text("mine")
        self.files = {kind: sorted(p for p in self.root.glob(KINDS[kind][1]) if p.is_file()) for kind in KINDS}
        self.whole = {path: path.read_bytes() for paths in self.files.values() for path in paths}
        make_victim(self.victim)
        self.untouched = digest(self.victim)
        for kind in self.kinds:  # this also imports all modules before memory is measured
            outcome = _read_here(KINDS[kind][2], self.root)
            if kind == "checkpoint":  # nothing is changed yet
                outcome.silent = ""
            assert (outcome.result, outcome.silent) == ("read", ""), (kind, outcome)

    def read(self, number: int, seed: int) -> None:
        """Create input `number`, read it, and count the outcome and its findings."""
        turns = [kind for kind in self.kinds for _ in range(KINDS[kind][0])]
        draw, kind = random.Random(f"{seed} {number}"), turns[number % len(turns)]
        path = draw.choice(self.files[kind])
        what = self._change(kind, path, draw)
        outcome = attempt(KINDS[kind][2], self.root)
        self.counts[kind] += 1
        self.outcomes[outcome.result.partition(" at ")[0]] += 1
        problems = self._problems(outcome)
        if problems:
            self._keep(path, f"{seed}_{number}_{path.name}")
        self._restore(problems)
        if "slow" in problems:
            whole = attempt(KINDS[kind][2], self.root)
            if outcome.seconds <= whole.seconds + SECONDS:
                del problems["slow"]
        for name, words in problems.items():
            self.totals[name] += 1
            place = f"{name}, {kind}: {words}"
            if place not in self.findings:
                again = f"--seed {seed} --first {number} --inputs 1 --only '{','.join(self.kinds)}'"
                self.findings[place] = {"file": path.name, "change": what, "again": again}
                print(
                    f"{place}\n  {path.name}, {what}; {again}\n  {outcome.trace}",
                    file=sys.stderr,
                    flush=True,
                )

    def _change(self, kind: str, path: Path, draw: random.Random) -> str:
        """Change a file, and return a description of the change."""
        others = [p for paths in self.files.values() for p in paths if p != path]
        if kind != "overrides" and draw.random() < 0.12:
            return replaced(path, others, self.victim, draw)
        path.unlink()  # readers may have mapped it
        raw = self.whole[path]
        content = mutated(path, raw, draw)
        if kind == "overrides":
            content = b"\0".join(draw.sample([w.encode() for w in OVERRIDES], draw.choice([1, 1, 2])))
        if content == raw:
            content += b"\n"
        path.write_bytes(content)
        if kind == "checkpoint" and draw.random() < 0.6:
            (self.root / "sealed").touch()
            seal(path)
        return "mutated"

    def _problems(self, outcome: Outcome) -> dict[str, str]:
        found = {}
        if outcome.trace:
            found["uncoded"] = outcome.result
        if outcome.silent.startswith("no way back"):
            found["no_way_back"] = outcome.silent
        elif outcome.silent:
            found["silent"] = outcome.silent
        if outcome.seconds > SECONDS:
            found["slow"] = f"{outcome.result}, more than {SECONDS} s"
        if outcome.more_bytes > MORE_BYTES:
            found["large"] = f"{outcome.result}, more than {MORE_BYTES >> 30} GiB"
        now = digest(self.victim)
        if now != self.untouched:
            changed = sorted(k for k in now.keys() | self.untouched.keys() if now.get(k) != self.untouched.get(k))
            found["outside_writes"] = ", ".join(changed[:3])
        cached = any(SECRET.encode() in p.read_bytes() for p in (self.root / "cache").rglob("*") if p.is_file())
        if outcome.leaks or cached:
            found["outside_reads"] = "in a cache" if cached else "in the output"
        if lost := [p for p in self.foreign if not p.is_file() or p.read_text() != "mine"]:
            found["foreign"] = ", ".join(str(p.relative_to(self.root)) for p in lost)
        return found

    def _keep(self, path: Path, name: str) -> None:
        self.kept.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.stat().st_size < MORE_BYTES:
            shutil.copy(path, self.kept / name)

    def _restore(self, problems: dict[str, str]) -> None:
        """Restore the valid files."""
        shutil.rmtree(self.root / "cache", ignore_errors=True)
        (self.root / "sealed").unlink(missing_ok=True)
        for path, content in self.whole.items():
            if path.is_symlink() or not path.is_file():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            elif path.stat().st_size == len(content) and path.read_bytes() == content:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.write_bytes(content)
        if "outside_writes" in problems:
            shutil.rmtree(self.victim)
            make_victim(self.victim)
        for path in self.foreign:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine")


@contextmanager
def _own_folders(root: Path) -> Iterator[None]:
    """Direct caches and temporary files of this process into folders below `root`."""
    keys = ("XDG_CACHE_HOME", "TMPDIR")
    before = {key: os.environ.get(key) for key in keys}
    for key in keys:
        place = root / key.lower()
        place.mkdir()
        os.environ[key] = str(place)
    tempfile.tempdir = None  # read from TMPDIR once more
    try:
        yield
    finally:
        tempfile.tempdir = None
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


def attack(kinds: list[str], seed: int, numbers: Iterable[int], kept: Path) -> dict[str, Any]:
    """Read the inputs with these numbers, and return counts by kind, outcomes and findings."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="attack_") as name, _own_folders(Path(name)):
        (Path(name) / "root").mkdir()
        run = Attack(Path(name) / "root", Path(name) / "victim", kept, kinds)
        run.prepare()
        with suppress(KeyboardInterrupt):
            for number in numbers:
                run.read(number, seed)
    names = (
        "uncoded",
        "silent",
        "no_way_back",
        "outside_writes",
        "outside_reads",
        "foreign",
        "slow",
        "large",
    )
    return {
        "inputs": run.counts.total(),
        **{name: run.totals[name] for name in names},
        "seconds": round(time.monotonic() - start),
        "kinds": dict(run.counts),
        "outcomes": dict(run.outcomes.most_common()),
        "found": run.findings,
    }


def main() -> int:
    """Read the requested number of inputs, and return 0 if there are no findings."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=2000, help="Inputs in all.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first one.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(KINDS), help="Kinds, with commas.")
    parser.add_argument("--kept", type=Path, default=Path("build/attack"))
    parser.add_argument("--json", action="store_true", help="Print all that was counted.")
    parser.add_argument("--record", action="store_true", help=f"Write {RESULTS.name} under docs/results.")
    wanted = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    logging.basicConfig(handlers=[logging.NullHandler()])
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # prints what was counted until then
    numbers = range(wanted.first, wanted.first + wanted.inputs)
    result = attack(wanted.only.split(","), wanted.seed, numbers, wanted.kept)
    facts = {
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "python": platform.python_version(),
        "command": " ".join(["python", "tools/attack.py", *sys.argv[1:]]),
    }
    if wanted.record:
        RESULTS.write_text(json.dumps(facts | result, indent=1) + "\n", encoding="utf-8")
    brief = {key: value for key, value in result.items() if key not in ("kinds", "outcomes", "found")}
    print(json.dumps(facts | result, indent=1) if wanted.json else json.dumps(brief))
    return 1 if result["found"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Train every causal and image-text language model type of transformers on every parallel axis, via the command line.

    python tools/census.py                        all model types, into docs/census.json (1 to 2 hours on 2 cores)
    python tools/census.py --missing --shard 0/2  half of the rows and cells that the file lacks; 1/2: the others
    python tools/census.py starcoder2 mamba       these types only, printed; with --record, also recorded
    python tools/census.py --axes tp,pp cohere    these axes only

Each type has a config shrunk by `tools/census_models.py`, and must train in plain transformers. A cell is a run of two
steps of `hyper-parallel train` in float64, from weights that plain transformers has saved. On one rank, the first loss
and gradient norm must equal those of plain transformers to 1e-10. On an axis, both steps must equal those of one rank.
`auto` is the layout that the planner chooses for 4 ranks, with full recompute. A cell is `ok`, a coded refusal,
`differs` or `fails`. Every row is recorded when it is complete.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from census_models import SEQ_LEN, tiny  # noqa: E402

PAGE = ROOT / "docs" / "census.json"

AXES = {
    "one rank": ["parallel.dp_shard=1"],
    "dp_replicate": ["parallel.dp_replicate=2"],
    "dp_shard": ["parallel.dp_shard=2"],
    "auto": ["training.recompute=full"],
    "pp": ["parallel.pp=2"],
    "tp": ["parallel.tp=2"],
    "cp": ["parallel.cp=2"],
    "ep": ["parallel.dp_shard=2", "parallel.ep=2"],
}
LIMIT = 1e-10
SECONDS = 240
MOST_PARAMETERS = 4_000_000


def auto_class(name: str) -> Any:
    """Return the class of transformers that builds a model of this type."""
    import transformers

    causal = name in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForImageTextToText


def trains_plainly(config: dict[str, Any]) -> str | None:
    """Return the reason why plain transformers cannot train a config on a CPU; None if it can."""
    import torch
    from transformers import AutoConfig

    try:
        made, auto = AutoConfig.for_model(**config), auto_class(config["model_type"])
        with torch.device("meta"):
            size = sum(p.numel() for p in auto.from_config(made).parameters())
        if size > MOST_PARAMETERS:
            return f"not shrunk: {size} parameters"
        model = auto.from_config(made)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # grouped matmuls need rows of 16 bytes
        ids = torch.arange(3, 3 + SEQ_LEN)[None]
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except Exception as error:
        return one_line(error)
    return None


def one_line(error: BaseException) -> str:
    """Return the class and the first line of an error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or [''])[-1 if 'StrictData' in type(error).__name__ else 0].strip()[:120]}"


def recipe(weights: Path, folder: Path) -> dict[str, Any]:
    """Return the recipe of a cell's run."""
    return {
        "model": {"path": str(weights), "init": "pretrained"},
        "data": {
            "source": str(folder / "text"),
            "seq_len": SEQ_LEN,
            "tokenizer": str(folder / "tokenizer"),
            "holdout": 0.0,
        },
        "training": {
            **{"steps": 2, "dtype": "float64", "tokens_per_step": 4 * SEQ_LEN, "seed": 3},
            # The first update for a gradient g is lr g / (|g| + eps), so a small eps would amplify rounding errors of a
            # small g.
            "eps": 1e-6,
        },
        "checkpoint": {"export": False, "resume": "never"},
    }


def save_plain(config: dict[str, Any], weights: Path) -> Any:
    """Save a model of plain transformers in float64 with its random weights, and return it."""
    import torch
    from transformers import AutoConfig

    torch.manual_seed(3)
    made = AutoConfig.for_model(**config)
    model = auto_class(config["model_type"]).from_config(made, dtype=torch.float64).train()
    for p in model.parameters():  # some stay float32
        p.data = p.data.double()
    model.save_pretrained(weights)
    return model


def plain_step(model: Any, file: Path) -> dict[str, float]:
    """Return loss and gradient norm of the first step in plain transformers, on the tokens that the run reads.

    The loss is the mean cross entropy of the next token, plus the balance loss if the model's forward adds it.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from hyper_parallel.backends.torch import router_loss_facts
    from hyper_parallel.backends.torch.forward_variants import keep_float64
    from hyper_parallel.config import load_recipe
    from hyper_parallel.trainer.job import prepare_job

    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped matmuls do not support float64
    keep_float64(model)
    job = prepare_job(load_recipe(file, AXES["one rank"]), progress=False)
    batches = job.train_batches()
    size = job.plan.workload.microbatch or 1
    rounds = batches.sequences_per_step // size
    valid, total = batches.num_valid(0), 0.0
    for part in batches.microbatches(0, 0, 1, size, rounds):
        ids, targets = torch.from_numpy(part.input_ids), torch.from_numpy(part.shift_labels)
        out = model(input_ids=ids, use_cache=False)
        loss = cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="sum") / valid
        if getattr(out, "aux_loss", None) is not None and (facts := router_loss_facts(model)):
            share = int((targets != -100).sum()) / valid
            loss = loss + facts.coefficient * out.aux_loss * share
        loss.backward()
        total += float(loss.detach())
    grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return {"loss": total, "grad_norm": float(sum(g.square().sum() for g in grads)) ** 0.5}


def run_cell(file: Path, folder: Path, changes: list[str]) -> tuple[str, list[dict[str, float]]]:
    """Run the command, and return the cell and the metrics of the steps."""
    from hyper_parallel import reports
    from hyper_parallel.cli import main

    out = folder / "run"
    log = folder / "log"
    (out / "metrics.jsonl").unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.argv = [
            "hyper-parallel",
            "train",
            str(file),
            *changes,
            f"output_dir={out}",
            "--no-calibrate",
        ]
        reports.write_report = lambda run: (run, run)  # drawing it takes longer than the steps
        status = 70
        try:
            main()
        except SystemExit as ended:
            status = int(ended.code or 0)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = wait(pid)
    text = log.read_text(errors="replace")
    if status == 0:
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return "ok", [json.loads(line) for line in lines]
    code = re.search(r"error\[(HP\d+)\]: (.*)", text)
    if status is None:
        return f"fails: no end after {SECONDS} s", []
    if code and code[1] not in ("HP601", "HP206"):
        return f"{code[1]}: {code[2]}", []
    last = [line for line in text.splitlines() if re.match(r"^\S*(Error|Exception)\b", line.strip())]
    return f"fails: {(last or text.splitlines() or ['?'])[-1].strip()[:200]}", []


def wait(pid: int) -> int | None:
    """Wait for a child process and return its exit status; None if it was killed after the time limit."""
    begin = time.monotonic()
    while time.monotonic() - begin < SECONDS:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def worst(a: dict[str, float], b: dict[str, float]) -> float:
    """Return the larger of the relative differences of loss and gradient norm."""
    return max(abs(a[k] - b[k]) / max(abs(a[k]), 1e-300) for k in ("loss", "grad_norm"))


def row(name: str, axes: list[str], folder: Path) -> dict[str, str]:
    """Return the cells of a model type by axis."""
    try:
        config = tiny(name)
    except Exception as error:
        return {"plain": one_line(error)}
    if (why := trains_plainly(config)) is not None:
        return {"plain": why}
    weights, file = folder / "weights", folder / "recipe.json"
    shutil.rmtree(weights, ignore_errors=True)
    model = save_plain(config, weights)
    file.write_text(json.dumps(recipe(weights, folder)))
    write_tokenizer(folder / "tokenizer")
    cells = {"plain": "ok"}
    want: list[dict[str, float]] = []
    for axis in dict.fromkeys(["one rank", *axes]):
        outcome, got = run_cell(file, folder, AXES[axis])
        if outcome.startswith("HP102: the exported tokenizer"):
            write_tokenizer(folder / "tokenizer", weights / "config.json")
            outcome, got = run_cell(file, folder, AXES[axis])
        if outcome == "ok":
            if axis == "one rank":
                pairs = [(plain_step(model, file), got[0])]
                want = got
            else:
                pairs = list(zip(want, got, strict=True))
            off = max(worst(a, b) for a, b in pairs)
            outcome = "ok" if off <= LIMIT else f"differs: {off:.1e}"
        cells[axis] = outcome
        if not want:
            break
    return cells


def write_tokenizer(folder: Path, config: Path | None = None) -> None:
    """Write a byte-level BPE tokenizer whose vocabulary is smaller than the models', in the format of transformers.

    `config` is a model's config.json; the tokenizer gets the class that transformers demands next to it.
    """
    from tokenizers import ByteLevelBPETokenizer
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([(ROOT / "LICENSE").read_text()], 300, special_tokens=["<|end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>")
    tokenizer.save_pretrained(folder)
    if config is not None:
        copied, own = Path(shutil.copy(config, folder)), folder / "tokenizer_config.json"
        name = type(AutoTokenizer.from_pretrained(folder)).__name__
        copied.unlink()
        own.write_text(json.dumps(json.loads(own.read_text()) | {"tokenizer_class": name}))


def census(wanted: dict[str, list[str]], keep: Callable[[str, dict[str, str]], None]) -> None:
    """Compute the rows of model types, each in a separate process, and pass each row to `keep`.

    `wanted` maps model types to axes.
    """
    with tempfile.TemporaryDirectory(prefix="census_") as scratch:
        text = Path(scratch, "text")
        text.mkdir()
        (text / "a.txt").write_text((ROOT / "LICENSE").read_text())
        for name, axes in wanted.items():
            result = Path(scratch, "row.json")
            result.write_text(json.dumps({"plain": "ok", "one rank": "fails: killed, or no end"}))
            pid = os.fork()
            if pid == 0:
                signal.alarm(60 + SECONDS * len(AXES))
                warnings.simplefilter("ignore")
                try:
                    cells = row(name, axes, Path(scratch))
                except BaseException as error:
                    traceback.print_exc()
                    cells = {"plain": "ok", "one rank": f"fails: {one_line(error)}"}
                result.write_text(json.dumps(cells))
                os._exit(0)
            os.waitpid(pid, 0)
            cells = json.loads(result.read_text())
            print(name, json.dumps(cells), flush=True)
            keep(name, cells)


def record(name: str, cells: dict[str, str]) -> None:
    """Add the cells of a row to docs/census.json, which other processes may also update."""
    with PAGE.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        page = json.loads(file.read() or '{"types": {}}')
        page.update({package: version(package) for package in ("torch", "transformers")})
        page["image_text"] = sorted(all_types(images=True))
        old = page["types"].get(name, {})
        if not old.keys() - cells.keys():  # all of the row is new
            page.setdefault("older", {}).pop(name, None)
        page["types"][name] = {**old, **cells} if cells.get("one rank") == "ok" else cells
        page["types"] = dict(sorted(page["types"].items()))
        file.truncate(0)
        file.write(json.dumps(page, indent=1) + "\n")


def lacks(name: str, axes: list[str]) -> list[str]:
    """Return the axes that apply to a type but are missing in docs/census.json."""
    rows = json.loads(PAGE.read_text())["types"] if PAGE.exists() else {}
    cells = rows.get(name)
    if cells is None or cells.get("one rank") == "ok":
        return [axis for axis in axes if axis not in (cells or ())]
    return []


def all_types(images: bool = False) -> set[str]:
    """Return the causal language model types of transformers, or with `images` the types that are image-text only."""
    from transformers.models.auto import modeling_auto as auto

    causal = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    both = causal.union(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return both - causal if images else both


def main() -> None:
    """Run the census, and print the cells by axis."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*")
    parser.add_argument("--axes", default=",".join(AXES))
    parser.add_argument("--missing", action="store_true", help="only rows that the file lacks")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th type, from the i-th on")
    parser.add_argument("--record", action="store_true", help="keep rows of named types too")
    given = parser.parse_args()
    import tensorboard.summary.writer.event_file_writer  # noqa: F401
    import transformers

    import hyper_parallel.trainer.engine.torch_engine  # noqa: F401
    from hyper_parallel.runtime import launch

    launch(lambda rank: None, 1)  # imports what every run of a cell would import anew
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    axes = given.axes.split(",")
    part, parts = map(int, given.shard.split("/"))
    names = (given.types or sorted(all_types()))[part::parts]
    wanted = {name: lacks(name, axes) if given.missing else axes for name in names}
    keep = record if given.record or not given.types else (lambda name, cells: None)
    table: dict[str, dict[str, str]] = {}
    wanted = {name: some for name, some in wanted.items() if some}
    census(wanted, lambda name, cells: (table.__setitem__(name, cells), keep(name, cells))[1])
    plain = [r for r in table.values() if r["plain"] == "ok"]
    print(f"{len(plain)} of {len(table)} types train in plain transformers {version('transformers')}")
    for axis in AXES:
        cells = Counter(r[axis].partition(":")[0] for r in plain if axis in r)
        print(f"{axis:14}", dict(cells.most_common()))


if __name__ == "__main__":
    main()

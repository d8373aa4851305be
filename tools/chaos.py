"""Fault injection: break training runs and count losses that a user would notice (`make chaos N=200`).

    python tools/chaos.py --faults 20 --seed 1 [--only kill,stop] [--dir DIRECTORY]

Small runs of two ranks start through the command line, and each suffers a few random faults. Every run must end in time
with the curve of an undisturbed run, bitwise, and without output that is not meant for a user, such as a traceback. The
last line is JSON; the exit status is 0 when nothing was lost. Commands are forked from this process, which has imported
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from full_disk import FullDisk, preload
from small_runs import MODEL, run_command_and_exit

STEPS, EVERY, TIMEOUT_S, FAULTS_PER_RUN = 36, 3, 3, 9
MOST_LOSSES = 5  # enough to know that something is wrong
MOST_WRITES = 150  # of the command below its directory: more than of a run that goes on to its end
MOST_BYTES = 1 << 16  # of a file on a full disk: less than a checkpoint, more than an error
LONGEST_S = 240  # a run that takes longer hangs: ten times of what one takes on two busy cores
RECIPE = """
model: {{path: {root}/model.json}}
data: {{source: {root}/text.txt, seq_len: 32, vocab_size: 384}}
training: {{steps: {steps}, dtype: float64, tokens_per_step: 64, lr: 1.0e-2, warmup_steps: 2, eval_tokens: 64,
           timeout_s: {timeout_s}, max_restarts: {restarts}}}
checkpoint: {{every: {every}, keep: 3, export: false}}
parallel: {{dp_shard: 2}}
"""


class Lost(Exception):
    """Error for something that a user would have lost; arguments are the counter and a description."""


class Run:
    """Training run of the recipe in a directory, which is started again after a fault."""

    def __init__(self, place: Path, name: str, out: Path | None = None) -> None:
        self.place, self.out = place, out or place / name
        self.log = place / f"{name}.log"
        self.poison = place / f"{name}.poison"
        self.damaged: dict[Path, int] = {}
        self.cache, prepared = place / f"{name}.cache", place / "undisturbed.cache"
        if prepared.exists() and not self.cache.exists():
            shutil.copytree(prepared, self.cache)
        self.again()

    def again(self, reader: Callable[[int, int], None] | None = None, output: str = "", tmp: str = "") -> None:
        """Start the command in a separate process.

        Args:
            reader: Function that copies the command's output from one file descriptor to another.
            output: File for the output, instead of the log.
            tmp: TMPDIR of the command.
        """
        self.status: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        log = os.open(output or self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if tmp:
            os.environ["TMPDIR"], tempfile.tempdir = tmp, None
        if reader is not None:
            out, into = os.pipe()
            if os.fork() == 0:
                os.close(into)
                reader(out, log)
                os._exit(0)
            os.close(out)
            log = into
        os.dup2(log, 1)
        os.dup2(log, 2)
        _poisonable(self.poison)
        words = ["--no-calibrate", f"output_dir={self.out}", f"data.cache_dir={self.cache}"]
        run_command_and_exit(["train", str(self.place / "recipe.yaml"), *words])

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, in rank order."""
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.pid).children()
            return sorted(child.pid for child in children)[-2:]  # before them, who reads the output
        return []

    def step(self) -> int:
        """Return the last step in metrics.jsonl."""
        with suppress(OSError, IndexError, json.JSONDecodeError):
            return self.curve()[-1][0]
        return 0

    def saved(self) -> list[Path]:
        """Return the intact published checkpoints, newest last."""
        folder = self.out / "checkpoints"  # from which steps go at any time
        found = {Path(e.path): e.inode() for e in os.scandir(folder)} if folder.is_dir() else {}
        return sorted(p for p in found if self.damaged.get(p) != found[p] and p.name[:5] == "step_")

    def curve(self) -> list[tuple[int, float, float]]:
        """Return step, loss and gradient norm of every line of metrics.jsonl."""
        rows = map(json.loads, (self.out / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]

    def until(self, reached: Callable[[], bool], what: str) -> bool:
        """Wait until `reached` returns True; return False if the command ends first. `what` describes it in errors."""
        deadline = time.monotonic() + LONGEST_S
        while self.status is None and not reached():
            if time.monotonic() > deadline:
                self.end()
                raise Lost("hangs", f"{what} not reached in {LONGEST_S} s")
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.status = status
            time.sleep(0.01)
        return self.status is None

    def end(self) -> None:
        """Kill the command and its ranks."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def kill(run: Run, draw: random.Random) -> str:
    """Kill a rank, as by a lack of memory; the launcher restarts the ranks."""
    rank = draw.randrange(2)
    os.kill(run.ranks()[rank], signal.SIGKILL)
    return rf"\[HP601\] rank {rank} failed \(killed by SIGKILL\)"


def stop(run: Run, draw: random.Random) -> str:
    """Freeze a rank; the launcher detects and names it, and restarts the ranks."""
    rank = draw.randrange(2)
    os.kill(run.ranks()[rank], signal.SIGSTOP)
    return rf"\[HP620\] rank {rank} is stopped by a signal"


def slow(run: Run, draw: random.Random) -> str:
    """Pause a rank for less than the time-out; the run is unaffected."""
    rank = run.ranks()[draw.randrange(2)]
    os.kill(rank, signal.SIGSTOP)
    time.sleep(TIMEOUT_S / 3)
    os.kill(rank, signal.SIGCONT)
    return ""


def crash(run: Run, draw: random.Random) -> str:
    """Kill launcher and ranks, as by a loss of power; the same command resumes the run."""
    run.end()
    run.again()
    return ""


def second(run: Run, draw: random.Random) -> str:
    """Start the same command in the same directory during the run; it is refused, and the run is unaffected."""
    os.killpg(run.pid, signal.SIGSTOP)  # or it would have ended by then
    other = Run(run.place, f"{run.out.name}_second", run.out)
    ended = other.until(lambda: False, "the refusal of a second run")
    os.killpg(run.pid, signal.SIGCONT)
    if ended or other.status != 256:
        raise Lost("wrong_results", f"a second run in one directory ended with {other.status}")
    if "error[HP720]" not in (said := other.log.read_text()):
        raise Lost("wrong_blame", f"a second run says {said[-200:]}")
    return ""


def pipe(run: Run, draw: random.Random) -> str:
    """Close the reader of the output after the run has resumed; the run is unaffected.

    Later faults read the log, so the command is then restarted with output to the log.
    """

    def reader(out: int, log: int) -> None:
        text = b""
        while b"resumed from" not in text or not text.endswith(b"\n"):
            if not (more := os.read(out, 4096)):
                return
            os.write(log, more)
            text += more

    run.end()
    run.again(reader)
    reached = run.step() + 2
    if not run.until(lambda: run.step() >= reached, "two steps without a reader"):
        raise Lost("runs_ended", f"a closed pipe ended the run, status {run.status}")
    return crash(run, draw)


def _ends(run: Run, says: str) -> None:
    """Wait until the command has ended with a coded error."""
    begin = len(run.log.read_text())
    run.until(lambda: False, "the end of a run that cannot go on")
    if run.status != 256 or not re.search(says, run.log.read_text()[max(0, begin - 4000) :]):
        raise Lost("wrong_blame", f"status {run.status}, the log has no `{says}`")


def full(run: Run, draw: random.Random) -> str:
    """Make writes of checkpoint-sized files fail; the run ends with a coded error, and the command resumes it."""
    for rank in run.ranks():
        with suppress(psutil.NoSuchProcess):
            psutil.Process(rank).rlimit(psutil.RLIMIT_FSIZE, (MOST_BYTES, 1 << 40))
    _ends(run, r"error\[HP7\d\d\]|error\[HP10\d\]")
    run.again()
    return ""


def disk(run: Run, draw: random.Random) -> str:
    """Make all writes of the command fail from a random write on: at its start, in a step, a checkpoint, or at its end.

    The run ends with a coded error, or completes and reports the missing optional output with one. The command then
    resumes without the fault.
    """
    run.end()
    faults, begin = FullDisk(), len(run.log.read_text())
    faults.arm(run.out, draw.randint(1, MOST_WRITES))
    run.again()
    run.until(lambda: False, "the end of a run on a full disk")
    failed, said = faults.failed, run.log.read_text()[begin:]
    faults.disarm()
    if failed and (run.status != 256 or "error[HP105]" not in said):
        raise Lost("wrong_blame", f"status {run.status} on a full disk; it says {said[-300:]}")
    if left := [p for p in run.out.rglob(".*.part") if ".run.owner" not in p.name]:
        raise Lost("wrong_results", f"left behind: {left}")
    run.again()
    return ""


def full_tmp(run: Run, draw: random.Random) -> str:
    """Fill the directory of temporary files while the command continues; the run is unaffected."""
    run.end()
    place = run.place / f"{run.out.name}.tmp"
    place.mkdir(exist_ok=True)
    FullDisk().arm(place, 1)
    run.again(tmp=str(place))
    return ""


def full_output(run: Run, draw: random.Random) -> str:
    """Direct the output to a full disk; the run is unaffected. Then the command restarts with its log."""
    run.end()
    run.again(output="/dev/full")
    reached = run.step() + 2
    if not run.until(lambda: run.step() >= reached, "two steps with a full output"):
        raise Lost("runs_ended", f"a full output ended the run, status {run.status}")
    return crash(run, draw)


def nan(run: Run, draw: random.Random) -> str:
    """Set a gradient to NaN; the run ends before its step with the parameter's name, and the command resumes it."""
    run.poison.write_text("")
    _ends(run, r"error\[HP604\](.|\n)*gradient of parameter `model.embed_tokens.weight` has NaN")
    run.poison.unlink()
    run.again()
    return ""


def _recording(run: Run) -> None:
    """Wait for another record in metrics.jsonl, so that the run is within its steps."""
    before = run.step()
    run.until(lambda: run.step() != before, "another record")


def moved(run: Run, draw: random.Random) -> str:
    """Rename the run directory; the run ends and names the saved checkpoint, and resumes when the directory is back."""
    _recording(run)
    aside = run.out.with_name(f"{run.out.name}_moved")
    run.out.rename(aside)
    if draw.random() < 0.5:
        run.out.mkdir()  # replaced by an empty one
    _ends(run, r"error\[HP721\](.|\n)*moved to")
    if run.out.exists():
        run.out.rmdir()  # fails if the run has written to it
    aside.rename(run.out)
    run.again()
    return ""


def removed(run: Run, draw: random.Random) -> str:
    """Remove the run directory; the run ends without a directory, and the same command begins at step 1."""
    _recording(run)
    while run.out.exists():  # the run may write another file meanwhile
        shutil.rmtree(run.out, ignore_errors=True)
    _ends(run, r"error\[HP721\](.|\n)*no checkpoint is left")
    if run.out.exists():
        raise Lost("wrong_results", f"the run has made a new {run.out}")
    run.damaged = {}
    run.again()
    return ""


def _poisonable(flag: Path) -> None:
    """Make ranks forked from this process set the first gradient to NaN while the file `flag` exists."""
    import torch

    from hyper_parallel.trainer.engine import step_loop

    honest = step_loop.forward_backward

    def poisoned(model: torch.nn.Module, *args: object, **more: object) -> torch.Tensor:
        loss = honest(model, *args, **more)
        if flag.exists():
            with torch.no_grad():
                next(model.parameters()).grad.to_local().mul_(float("nan"))
        return loss

    step_loop.forward_backward = poisoned


def batch(run: Run, draw: random.Random) -> str:
    """Flip a bit of the prepared tokens while the run is stopped; the run detects it and continues unaffected."""
    run.end()
    tokens = max(run.cache.rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    _flip(tokens, draw)
    run.again()
    return r"damaged"


def _flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def torn(run: Run, draw: random.Random) -> str:
    """Truncate a file of the newest checkpoint; the run resumes from the previous one."""
    return flip(run, draw, lambda path, _: os.truncate(path, path.stat().st_size // 2))


def flip(run: Run, draw: random.Random, damage: Callable[[Path, random.Random], None] = _flip) -> str:
    """Flip a bit of the newest checkpoint; the run resumes from the previous one."""
    run.end()
    newest = run.saved()[-1]
    damage(max(newest.iterdir(), key=lambda path: path.stat().st_size), draw)  # weights, not words
    run.damaged[newest] = newest.stat().st_ino
    run.again()
    return rf"checkpoint of step {_step(newest)} is damaged"


_ALL = (
    *(kill, stop, slow, crash, torn, flip, second, pipe, full, disk, full_tmp, full_output, nan),
    *(batch, moved, removed),
)
FAULTS: dict[str, Callable[..., str]] = {fault.__name__: fault for fault in _ALL}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def inject(run: Run, name: str, at: int, draw: random.Random) -> bool:
    """Inject a fault after a step; False when the run has ended before."""
    needed = 2 if name in ("torn", "flip") else 1

    def reached() -> bool:
        return run.step() >= at and len(run.saved()) >= needed and len(run.ranks()) == 2

    if not run.until(reached, f"step {at}"):
        return False
    before, newest = run.log.read_text(), _step(run.saved()[-1])
    says = FAULTS[name](run, draw)
    newest -= EVERY * (name in ("torn", "flip"))
    if name in ("slow", "second", "removed"):
        return True

    def said() -> bool:
        new = run.log.read_text()[len(before) :]
        found = re.search(r"resumed from \S+, step (\d+)", new.replace("\n", " "))
        if found and int(found[1]) < newest:
            raise Lost("steps_lost", f"{name}: step {newest} was saved, resumed from {found[1]}")
        return found is not None

    if not run.until(said, f"the resumed run after {name}"):
        raise Lost("runs_ended", f"{name} at step {at} ended the run, status {run.status}")
    if says and not re.search(says, run.log.read_text()[len(before) :]):
        raise Lost("wrong_blame", f"{name}: the log has no `{says}`")
    return True


def check(run: Run, reference: list[tuple[int, float, float]]) -> None:
    """Wait for the end of a run, and compare its curve with the reference; raises `Lost`."""
    run.until(lambda: False, "the end")
    if run.status:
        raise Lost("runs_ended", f"status {run.status}")
    log = run.log.read_text()
    if uncoded := re.search(r"internal error|^Traceback.*", log, re.MULTILINE):
        raise Lost("uncoded", uncoded[0])
    if run.curve() != reference:
        raise Lost("wrong_results", "another curve than the undisturbed run's")


def _import_once(place: Path) -> None:
    """Import the modules that commands need, in this process, from which they are forked."""
    import tensorboard.compat.proto.event_pb2  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import hyper_parallel.reports
    import hyper_parallel.runtime
    import hyper_parallel.trainer.engine.torch_engine  # noqa: F401
    from hyper_parallel.config import load_recipe
    from hyper_parallel.trainer import prepare_job

    prepare_job(load_recipe(place / "recipe.yaml", [f"data.cache_dir={place / 'imports.cache'}"]))


def main() -> int:
    """Inject the requested number of faults, and return 0 when nothing was lost."""
    injected = preload()  # starts this program again where there is a C compiler
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=20, help="Faults in all.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default=",".join(FAULTS), help="Kinds of faults, with commas.")
    parser.add_argument("--dir", type=Path, help="Kept; default: a temporary directory.")
    wanted = parser.parse_args()
    kinds = [kind for kind in wanted.only.split(",") if injected or kind not in ("disk", "full_tmp")]
    if unknown := [kind for kind in kinds if kind not in FAULTS]:
        parser.error(f"no such faults: {unknown}; there are {', '.join(FAULTS)}")
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    place = wanted.dir or Path(tempfile.mkdtemp(prefix="hyper_parallel_chaos_"))
    place.mkdir(parents=True, exist_ok=True)
    (place / "model.json").write_text(json.dumps(MODEL))
    functions = (f"def f{i}(x):\n    return x * {i} + {i % 7}" for i in range(2000))
    (place / "text.txt").write_text("\n\n".join(functions))
    numbers = {"steps": STEPS, "every": EVERY, "timeout_s": TIMEOUT_S}
    recipe = RECIPE.format(root=place, restarts=FAULTS_PER_RUN + 1, **numbers)
    (place / "recipe.yaml").write_text(recipe)
    _import_once(place)

    start = time.monotonic()
    undisturbed = Run(place, "undisturbed")
    undisturbed.until(lambda: False, "the end of the undisturbed run")
    reference = undisturbed.curve()
    assert [step for step, _, _ in reference] == [*range(1, STEPS + 1)], undisturbed.log.read_text()
    draw, faults, losses, runs = random.Random(wanted.seed), Counter(), [], 0
    while sum(faults.values()) < wanted.faults:
        runs += 1
        run = Run(place, f"run{runs}")
        many = min(FAULTS_PER_RUN, wanted.faults - sum(faults.values()))
        names = draw.sample(kinds, many) if len(kinds) == many else draw.choices(kinds, k=many)
        try:
            places = sorted(draw.sample(range(EVERY + 1, STEPS - 4), many))
            for name, at in zip(names, places, strict=True):
                faults[name] += inject(run, name, at, draw)
            check(run, reference)
            shutil.rmtree(run.out)
            shutil.rmtree(run.cache)
        except Lost as lost:
            run.end()
            losses.append(lost.args[0])
            print(f"run {runs}", names, *lost.args, f"see {run.log}", sep=": ", file=sys.stderr)
            if len(losses) == MOST_LOSSES:
                break
    kept = ("steps_lost", "wrong_results", "hangs", "uncoded", "wrong_blame", "runs_ended")
    result = {
        "seed": wanted.seed, "runs": runs, "faults": dict(faults),
        **{kind: losses.count(kind) for kind in kept}, "seconds": round(time.monotonic() - start),
    }  # fmt: skip
    print(json.dumps(result))
    if not (wanted.dir or losses):
        shutil.rmtree(place)
    return bool(losses)


if __name__ == "__main__":
    sys.exit(main())

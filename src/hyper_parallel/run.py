"""Python interface to runs: `hp.train` trains a recipe, `hp.generate` continues prompts with the model of a run."""

from __future__ import annotations

import ast
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, overload

from hyper_parallel.errors import BadValue, Caller, Contradiction, Unwritten, abbreviated, reported_by
from hyper_parallel.received import Limits, parse_json

if TYPE_CHECKING:
    from hyper_parallel.ir import Plan

_LONGEST_LITERAL: Final = 80
"""Maximum characters of a value that a hint repeats."""
_RECORD = Limits(num_bytes=1024**2, num_elements=100_000)


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Finished run, identified by its directory.

    Attributes:
        output_dir: Directory of the run.
        steps: Last finished step.
        loss: Training loss of the last step; NaN when no step was left to train.
        eval_loss: Held-out loss of the last evaluation; NaN without one, as when the run was already complete.
        seconds: Seconds of preparation, training, evaluations and checkpoints.
    """

    output_dir: Path
    steps: int
    loss: float
    eval_loss: float
    seconds: float

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Records in metrics.jsonl, in file order; [] without this file."""
        return _records(self.output_dir / "metrics.jsonl")

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records in eval.jsonl, in file order; [] without this file."""
        return _records(self.output_dir / "eval.jsonl")

    @property
    def plan(self) -> Plan:
        """Plan of the run, loaded from its directory; PlanUnreadable (HP306) is raised if that fails."""
        from hyper_parallel.ir import Plan

        return Plan.load(self.output_dir / "plan.json")

    @property
    def export_dir(self) -> Path:
        """Path of the exported model or adapter in Hugging Face format; missing with `checkpoint.export=false`."""
        return self.output_dir / "export"

    @property
    def checkpoint_dir(self) -> Path:
        """Directory of the checkpoints."""
        return self.output_dir / "checkpoints"

    @property
    def report(self) -> Path:
        """Path of the report page of the run."""
        return self.output_dir / "report.html"

    def __str__(self) -> str:
        return f"{self.steps} steps in {self.seconds:.0f} s, loss {self.loss:.4f}: {self.output_dir}"


def train(recipe: str | os.PathLike[str], *overrides: str, **values: Any) -> TrainingRun | None:
    """Train a recipe on this machine, and return the run.

    Args:
        recipe: YAML or JSON file; LlamaFactory files can be used only with the command `hyper-parallel train`.
        overrides: Overrides as on the command line: `"training.lr=1e-4"`.
        values: Overrides by key. A key is a section with a mapping (`training={"lr": 1e-4}`), a name with two
            underscores for the dot (`training__lr=1e-4`), or a dotted name (`**{"training.lr": 1e-4}`).

    Returns:
        The run; None on ranks other than 0 if another launcher has started this process as a rank.

    Raises:
        BadValue: HP102 for a recipe that is not a path, or a value that a recipe cannot contain.
        Contradiction: HP104 for the launchers `slurm`, `kubernetes` and `ray`.
        KeyboardInterrupt: A signal has ended the run.
        HyperParallelError: Any error of the command.
    """
    from hyper_parallel.config import load_recipe
    from hyper_parallel.hub import stay_offline
    from hyper_parallel.reports import write_report
    from hyper_parallel.trainer import prepare_job, run_job

    stay_offline()
    _check_path(recipe, "hyper_parallel.train", "the recipe", 'hp.train("recipe.yaml")')
    override_texts = [*_checked_overrides(overrides), *_overrides_of(values)]
    loaded = load_recipe(recipe, override_texts)
    launcher = loaded.recipe.launch.launcher
    if launcher not in ("local", "torchrun"):
        raise Contradiction(
            f"a job of {launcher} is submitted by the command, not from Python",
            where=loaded.where("launch.launcher"),
            got=f"launcher={launcher}",
            hint=shlex.join(["hyper-parallel", "train", os.fspath(recipe), *override_texts]),
        )
    job = prepare_job(loaded)
    summary = run_job(job)
    if summary is None:
        return None
    with Unwritten().spare(job.output_dir):
        write_report(job.output_dir)
    return TrainingRun(job.output_dir, summary.steps, summary.loss, summary.last_eval_loss, summary.seconds)


@overload
def generate(model: Any, prompts: str, **choices: Any) -> str: ...
@overload
def generate(model: Any, prompts: Sequence[str], **choices: Any) -> list[str]: ...
def generate(model: Any, prompts: str | Sequence[str], **choices: Any) -> str | list[str]:
    """Generate the continuation of one prompt, or of several as one batch, with the model of a run.

    Args:
        model: A `TrainingRun`, its directory, a Hugging Face directory, or a name on the hub.
        prompts: One text, or several.
        choices: Sampling options `max_new_tokens`, `temperature`, `top_p`, `top_k`, `seed` and `stop` (texts); `chat`:
            treat each prompt as a user turn; `device` and `dtype` of the model.

    Returns:
        The continuation without the prompt: a text for one prompt, a list for a list of prompts.

    Raises:
        BadValue: HP102 for an unknown option, or a prompt that is not a text or is longer than the model's context.
        HyperParallelError: Any error of loading the model.
    """
    from hyper_parallel.trainer.generation import Generator, Sampling

    _check_prompts(prompts)
    if not isinstance(model, TrainingRun):
        allowed = "a string, a path, or a `TrainingRun`"
        _check_path(model, "hyper_parallel.generate", "the model", 'hp.generate("runs/run", "Once")', allowed)
    place = {key: choices.pop(key) for key in ("device", "dtype") if key in choices}
    chat = bool(choices.pop("chat", False))
    _check_options(choices, Sampling.__dataclass_fields__)
    if isinstance(stop := choices.get("stop"), (str, list)):
        choices["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    with reported_by(_GenerateCall()):
        generator = Generator(model.output_dir if isinstance(model, TrainingRun) else model, **place)
        generations = generator.generate_batch(texts, Sampling(**choices), chat=chat)
    answers = [generation.text for generation in generations]
    return answers[0] if isinstance(prompts, str) else answers


class _GenerateCall(Caller):
    """Call of `generate`: options of the command are its arguments."""

    def where(self, text: str) -> str:
        return "hyper_parallel.generate" if text.startswith("--") else text

    def hint(self, changes: Mapping[str, object]) -> str | None:
        if "--trust-remote-code" in changes:
            return "use the command `hyper-parallel generate` with --trust-remote-code"
        arguments = {key.strip("-").replace("-", "_"): value for key, value in changes.items()}
        return ", ".join(f"leave out `{k}`" if v is None else f"{k}={v!r}" for k, v in arguments.items())


def _check_prompts(prompts: object) -> None:
    several = prompts if isinstance(prompts, (list, tuple)) else [prompts]
    wrong = next((prompt for prompt in several if not isinstance(prompt, str)), None)
    if wrong is not None or prompts is None:
        raise BadValue(
            f"a prompt must be a string, not a value of type {type(wrong).__name__}",
            where="hyper_parallel.generate",
            got=abbreviated(prompts),
            allowed="a string, or a list of strings",
            hint='hp.generate("runs/run", "Once")',
        )


def _check_options(choices: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    allowed = [*known, "chat", "device", "dtype"]
    for key in choices:
        if key not in known:
            near = get_close_matches(key, allowed, 1)
            raise BadValue(
                f"unknown option `{key}` of `hp.generate`",
                where="hyper_parallel.generate",
                got=key,
                allowed=", ".join(allowed),
                hint=f"{near[0]}=..." if near else None,
            )


def _check_path(value: object, where: str, label: str, hint: str, allowed: str = "a string or a path") -> None:
    if isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str):
        return
    raise BadValue(
        f"{label} must be a path, not a value of type {type(value).__name__}",
        where=where,
        got=abbreviated(value),
        allowed=allowed,
        hint=hint,
    )


def _checked_overrides(overrides: Sequence[object]) -> list[str]:
    """Return the overrides; raise BadValue (HP102), with a corrected call as hint, for an override that is no text."""
    for value in overrides:
        if isinstance(value, str):
            continue
        hint = 'hp.train("recipe.yaml", "training.steps=10")'
        if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
            hint = f'hp.train("recipe.yaml", **{_in_full(dict(value)) or "overrides"})'
        elif isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            hint = f'hp.train("recipe.yaml", *{_in_full(list(value)) or "overrides"})'
        raise BadValue(
            f"an override must be a string, not a value of type {type(value).__name__}",
            where="hyper_parallel.train",
            got=abbreviated(value),
            allowed='strings such as "training.lr=1e-4", or keyword arguments',
            hint=hint,
        )
    return [str(value) for value in overrides]


def _in_full(value: object) -> str | None:
    """Return `repr(value)` if it is a short literal that Python reads as the same value, else None."""
    text = repr(value)
    try:
        return text if len(text) <= _LONGEST_LITERAL and ast.literal_eval(text) == value else None
    except (ValueError, SyntaxError):  # a path, for example
        return None


def _overrides_of(values: Mapping[str, Any]) -> list[str]:
    overrides = []
    for key, value in values.items():
        name = key.replace("__", ".")
        try:
            overrides.append(f"{name}={_as_yaml(value)}")
        except (TypeError, ValueError, RecursionError) as error:
            raise BadValue(
                f"the value of `{name}` cannot be written in a recipe",
                where=f"hyper_parallel.train: {name}",
                got=f"{type(value).__name__}: {abbreviated(value)}",
                allowed="texts, paths, numbers, booleans, None, and lists and mappings of these",
            ) from error
    return overrides


def _as_yaml(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        return item()
    raise TypeError(f"a {type(value).__name__} is not a recipe value")


def _records(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [parse_json(line, _RECORD) for line in file if line.strip()]

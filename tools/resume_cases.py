"""Cases of tools/resume_changes.py: small recipes, each with one change before the resume."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import small_runs

MODEL = {**small_runs.MODEL, "vocab_size": 300}
Command = Callable[[list[str], Path, dict[str, str], Path], int]


@dataclass(frozen=True)
class Place:
    """Folder of one case, and models that the case uses.

    Attributes:
        root: The folder; the recipe, its files and the run are in it.
        base: A language model with its tokenizer.
        reward: A reward model with the same tokenizer.
    """

    root: Path
    base: Path
    reward: Path

    def write(self, name: str, text: str) -> Path:
        """Write a file into the folder, and return its path."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def recipe(self, **sections: Any) -> None:
        """Write the recipe; `sections` extend the sections that all cases share."""
        training = {
            "steps": 4, "dtype": "float64", "tokens_per_step": 64, "microbatch": 2, "warmup_steps": 0, "lr": 1e-2,
            "lr_schedule": "constant", "report_to": [], "eval_tokens": 64,
        }  # fmt: skip
        values: dict[str, Any] = {
            "model": {"path": "model.json"},
            "data": {"source": "text.txt", "seq_len": 32, "vocab_size": 300, "cache_dir": "cache"},
            "training": training,
            "parallel": {"dp_shard": 1},
            "checkpoint": {"export": False},
        }
        for name, value in sections.items():
            both = isinstance(value, dict) and isinstance(values.get(name), dict)
            values[name] = values[name] | value if both else value
        self.write("recipe.yaml", json.dumps(values))


@dataclass(frozen=True)
class Case:
    """Change between a checkpoint and the run that resumes from it.

    Attributes:
        name: Description of the change.
        scene: Writes the recipe and its files.
        change: Applies the change, and returns further arguments of the second run.
        allowed: Correct outcomes.
        key: Part of the printed line that names the change, for the outcome `said`.
        before: Arguments of both runs.
        left_out: Arguments in `before` that the second run does not get.
        environment: Environment variables of the second run.
        command: Second command, if it is not `train`; it must be refused.
        is_interrupted: Restore the run directory to its state after step 2.
    """

    name: str
    scene: Callable[[Place], None]
    change: Callable[[Place], list[str] | None]
    allowed: tuple[str, ...]
    key: str = ""
    before: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    command: list[str] | None = None
    is_interrupted: bool = True


def base_model(root: Path, command: Command) -> Path:
    """Train and export a language model once, and return its directory."""
    place = Place(root / "base", root, root)
    text_scene(place)
    words = ["train", "recipe.yaml", "output_dir=run", "checkpoint.export=true", "--no-calibrate"]
    assert command(words, place.root, {}, place.root / "log") == 0, (place.root / "log").read_text()
    return place.root / "run" / "export"


def reward_model(root: Path, command: Command) -> Path:
    """Train and export a reward model with the language model's tokenizer once, and return its directory."""
    place = Place(root / "reward", root, root)
    _compared_scene(place, "rm", PAIRS, model={"path": str(root / "base" / "run" / "export")})
    words = ["train", "recipe.yaml", "output_dir=run", "checkpoint.export=true", "--no-calibrate"]
    assert command(words, place.root, {}, place.root / "log") == 0, (place.root / "log").read_text()
    return place.root / "run" / "export"


# Scenes.

SUMS = [(a, b) for a in range(4) for b in range(3)]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": f"{a + b + 1} or so"} for a, b in SUMS]
QUESTIONS = [{"prompt": f"{a}+{b}=", "completion": str(a + b), "solution": str(a + b)} for a, b in SUMS]
ANSWERS = [{"prompt": f"{a}+{b}=", "completion": f"it is {a + b}" if b else "no", "label": bool(b)} for a, b in SUMS]
OPTIMIZER = """
import torch
class Descent(torch.optim.SGD):
    factor = 1.0
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = group["lr"] * self.factor
        return super().step(closure)
"""
REWARD = """
def digits(completions, bonus, **_):
    return [b * len(t) + sum(c.isdigit() for c in t) for t, b in zip(completions, bonus)]
"""


def lines_of(count: int, factor: int = 1) -> str:
    """Return a text of `count` small Python functions."""
    return "\n\n".join(f"def f{i:03}(x):\n    return x * {i * factor:05} + {i % 7}" for i in range(count))


def records_of(texts: list[dict[str, Any]]) -> str:
    """Return the records as JSON lines."""
    return "".join(json.dumps(text) + "\n" for text in texts)


def text_scene(place: Place) -> None:
    """Write a case that trains a model with random weights on plain text."""
    place.write("model.json", json.dumps(MODEL))
    place.write("text.txt", lines_of(300))
    place.recipe()


def stream_scene(place: Place) -> None:
    """Write a case with streamed records; step 2 ends in the second block of documents, step 4 in the third."""
    place.write("model.json", json.dumps(MODEL))
    texts = [{"text": f"a{i} b{i % 7} c" * 3} for i in range(600)]
    place.write("text.jsonl", records_of(texts))
    shutil.copytree(place.base, place.root / "tokens", dirs_exist_ok=True)
    data = {"source": "text.jsonl", "streaming": True, "tokenizer": "tokens", "vocab_size": None}
    place.recipe(data=data, training={"tokens_per_step": 4096, "microbatch": 64})


def mixture_scene(place: Place) -> None:
    """Write a case with two weighted sources."""
    text_scene(place)
    place.write("more.txt", lines_of(200, 3))
    sources = [{"source": "text.txt", "weight": 3}, {"source": "more.txt", "weight": 1}]
    place.recipe(data={"source": sources})


def validation_scene(place: Place) -> None:
    """Write a case with plain text and a separate validation file."""
    text_scene(place)
    place.write("held.txt", lines_of(40, 5))
    place.recipe(data={"validation": "held.txt"}, training={"eval_every": 1})


def chat_scene(place: Place) -> None:
    """Write a case with conversations and the base model's chat template."""
    shutil.copytree(place.base, place.root / "base", dirs_exist_ok=True)
    place.write(
        "chat.jsonl",
        records_of([{k: q[k] for k in ("prompt", "completion")} for q in QUESTIONS] * 4),
    )
    place.recipe(
        stage="sft", model={"path": "base"}, data={"source": "chat.jsonl", "seq_len": 64, "vocab_size": None},
        training={"tokens_per_step": 128},
    )  # fmt: skip


def adapter_scene(place: Place) -> None:
    """Write a case with LoRA adapters on the base model."""
    shutil.copytree(place.base, place.root / "base", dirs_exist_ok=True)
    place.write("text.txt", lines_of(300))
    place.recipe(model={"path": "base"}, data={"vocab_size": None}, lora={"r": 4, "lora_alpha": 8})


def _compared_scene(place: Place, stage: str, records: list[dict[str, Any]], **sections: Any) -> None:
    place.write("model.json", json.dumps(MODEL))
    place.write("records.jsonl", records_of(records))
    data = {"source": "records.jsonl", "seq_len": 64, "packing": False, "holdout": 0.0}
    data |= {} if "model" not in sections else {"vocab_size": None}
    place.recipe(stage=stage, data=data, training={"tokens_per_step": 256}, **sections)


def pairs_scene(place: Place) -> None:
    """Write a case with pairs of answers and a reference model (DPO)."""
    _compared_scene(place, "dpo", PAIRS)


def answers_scene(place: Place) -> None:
    """Write a case with good and bad answers and a reference model (KTO)."""
    _compared_scene(place, "kto", ANSWERS)


def rollout_scene(place: Place) -> None:
    """Write a case with rewards from a function and a reward model, and a KL penalty to the initial model (GRPO)."""
    place.write("rewards.py", REWARD)
    shutil.copytree(place.base, place.root / "base", dirs_exist_ok=True)
    shutil.copytree(place.reward, place.root / "reward", dirs_exist_ok=True)
    grpo = {
        "num_generations": 2, "max_completion_length": 4, "beta": 0.1,
        "reward_funcs": ["rewards.digits", "reward/", "prefix_match"],
    }  # fmt: skip
    records = [q | {"bonus": number % 3} for number, q in enumerate(QUESTIONS)]
    _compared_scene(place, "grpo", records, model={"path": "base"}, grpo=grpo)


def optimizer_scene(place: Place) -> None:
    """Write a case with an optimizer class of the user."""
    text_scene(place)
    place.write("own_optimizer.py", OPTIMIZER)
    place.recipe(training={"optimizer": "own_optimizer.Descent"})


# Changes.


def words(*overrides: str) -> Callable[[Place], list[str]]:
    """Return a change that only adds arguments to the command line."""
    return lambda _: [*overrides]


def text(name: str, new: str | Callable[[str], str], *, keeps_time: bool = False) -> Callable[[Place], None]:
    """Return a change of a file's content; `keeps_time` preserves its modification time."""

    def change(place: Place) -> None:
        path = place.root / name
        before, old = path.stat(), path.read_text()
        path.write_text(new if isinstance(new, str) else new(old))
        if keeps_time:
            assert path.stat().st_size == before.st_size
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return change


def weights(name: str, factor: float = 1.5, dtype: str | None = None) -> Callable[[Place], None]:
    """Return a change of a safetensors file: one tensor multiplied by `factor`, or all tensors in another dtype."""

    def change(place: Place) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        path = place.root / name
        tensors = load_file(path)
        if dtype is not None:
            tensors = {n: t.to(getattr(torch, dtype)) for n, t in tensors.items()}
        else:
            first = min(n for n in tensors if n.endswith("proj.weight") or n.endswith("score.weight"))
            tensors[first] = tensors[first] * factor
        save_file(tensors, path, {"format": "pt"})

    return change


def shards(place: Place) -> None:
    """Rewrite the weights as two files with an index, with equal values."""
    from safetensors.torch import load_file, save_file

    path = place.root / "base" / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    index: dict[str, str] = {}
    for number in range(2):
        name = f"model-{number + 1:05}-of-00002.safetensors"
        own = {n: t for i, (n, t) in enumerate(sorted(tensors.items())) if i % 2 == number}
        save_file(own, path.with_name(name), {"format": "pt"})
        index |= dict.fromkeys(own, name)
    place.write("base/model.safetensors.index.json", json.dumps({"weight_map": index}))


def moved(source: str, target: str, *overrides: str) -> Callable[[Place], list[str]]:
    """Return a change that renames a file or folder."""

    def change(place: Place) -> list[str]:
        (place.root / source).rename(place.root / target)
        return [*overrides]

    return change


def array(name: str) -> Callable[[Place], None]:
    """Return a change of the values in a NumPy file."""

    def change(place: Place) -> None:
        import numpy as np

        path = place.root / "run" / name
        np.save(path, np.load(path) * 1.1)

    return change


def reference_model(place: Place) -> None:
    """Replace the reference model by an intact one of another run."""
    other = Place(place.root / "other", place.base, place.reward)
    rollout_scene(other)
    weights("base/model.safetensors")(other)
    shutil.copytree(other.root / "base", place.root / "exchanged")
    from resume_changes import command

    run = ["train", "recipe.yaml", "output_dir=run", "--no-calibrate"]
    assert command(run, other.root, {}, other.root / "log") == 0, (other.root / "log").read_text()
    shutil.rmtree(place.root / "run" / "reference")
    (other.root / "run" / "reference").rename(place.root / "run" / "reference")


def facts(edit: Callable[[dict[str, Any]], None]) -> Callable[[Place], None]:
    """Return a change of facts in the checkpoint, as another version of this package could have written them."""

    def change(place: Place) -> None:
        from dataclasses import replace

        from hyper_parallel.trainer.checkpoints import manifest as files
        from hyper_parallel.trainer.files import FileEntry

        path = place.root / "run" / "checkpoints" / "step_00000002"
        extra = files.read_extra(path)
        edit(extra["run"])
        (path / files.EXTRA).write_text(files.json_text(extra))
        manifest = files.read_manifest(path)
        entries = manifest.files | {files.EXTRA: FileEntry.of(path / files.EXTRA)}
        (path / files.MANIFEST).write_text(files.encode_manifest(replace(manifest, files=entries)))

    return change


def config(name: str, **values: Any) -> Callable[[Place], None]:
    """Return a change of values in a JSON file."""
    return text(name, lambda old: json.dumps(json.loads(old) | values))


def nothing(_: Place) -> None:
    """Change nothing."""


def swapped(old: str) -> str:
    """Return the text with its first two lines exchanged."""
    first, second, rest = old.split("\n", 2)
    return "\n".join([second, first, rest])


_LATE = 88  # percent of a stream that two steps and their blocks have read

EQUAL, SAID, REFUSED = ("equal",), ("said",), ("refused",)
EXPORT = ["checkpoint", "export", "run", "--merge"]
CASES = (
    Case("nothing", text_scene, nothing, EQUAL),
    Case(
        "layout: two ranks",
        text_scene,
        words("parallel.dp_shard=2", "training.microbatch=1"),
        EQUAL,
    ),
    Case("microbatch", text_scene, words("training.microbatch=1"), EQUAL),
    Case("run directory moved", text_scene, moved("run", "gone", "output_dir=gone"), EQUAL),
    Case("cache removed", text_scene, lambda p: shutil.rmtree(p.root / "cache"), EQUAL),
    Case("data moved", text_scene, moved("text.txt", "t.txt", "data.source=t.txt"), EQUAL),
    Case(
        "optimizer_args: {} -> maximize",
        text_scene,
        words("training.optimizer_args={maximize: true}"),
        SAID,
        "optimizer_args",
    ),
    Case(
        "optimizer_args: maximize -> {}",
        text_scene,
        nothing,
        SAID,
        "optimizer_args",
        before=("training.optimizer_args={maximize: true}",),
        left_out=("training.optimizer_args={maximize: true}",),
    ),
    Case(
        "optimizer_args: {} -> amsgrad",
        text_scene,
        words("training.optimizer_args={amsgrad: true}"),
        REFUSED,
    ),
    Case(
        "optimizer_args: amsgrad -> {}",
        text_scene,
        nothing,
        SAID,
        "optimizer_args",
        before=("training.optimizer_args={amsgrad: true}",),
        left_out=("training.optimizer_args={amsgrad: true}",),
    ),
    Case("learning rate", text_scene, words("training.lr=0.02"), SAID, "training.lr 0.01 -> 0.02"),
    Case(
        "learning rate schedule",
        text_scene,
        words("training.lr_schedule=cosine"),
        SAID,
        "lr_schedule",
    ),
    Case(
        "learning rate of a run that had ended",
        text_scene,
        words("training.lr=1.0"),
        EQUAL,
        is_interrupted=False,
    ),
    Case("weight decay", text_scene, words("training.weight_decay=0.5"), SAID, "weight_decay"),
    Case("betas", text_scene, words("training.betas=[0.5, 0.5]"), SAID, "betas"),
    Case(
        "clipping",
        text_scene,
        words("training.max_grad_norm=null", "training.lr=0.011"),
        SAID,
        "max_grad_norm",
    ),
    Case(
        "tokens per step",
        text_scene,
        words("training.tokens_per_step=128"),
        SAID,
        "tokens_per_step",
    ),
    Case("NEFTune noise", text_scene, words("training.neftune_noise_alpha=5"), SAID, "neftune"),
    Case("frozen parameters", text_scene, words("training.freeze=[model.norm.*]"), REFUSED),
    Case("seed", text_scene, words("training.seed=1"), REFUSED),
    Case("dtype", text_scene, words("training.dtype=float32"), REFUSED),
    Case("optimizer", text_scene, words("training.optimizer=sgd"), REFUSED),
    Case("deterministic kernels", text_scene, words("training.deterministic=true"), EQUAL),
    Case(
        "environment: threads",
        text_scene,
        nothing,
        ("equal", "said"),
        environment={"OMP_NUM_THREADS": "2"},
    ),
    Case("model config: rope_theta", text_scene, config("model.json", rope_theta=5000.0), REFUSED),
    Case(
        "model config: a default becomes dropout",
        text_scene,
        config("model.json", attention_dropout=0.2),
        REFUSED,
    ),
    Case(
        "model config: pad_token_id",
        text_scene,
        config("model.json", pad_token_id=65),
        ("said", "equal"),
        "pad_token_id",
    ),
    Case("adapters where there were none", text_scene, words("lora={r: 4}"), REFUSED),
    Case(
        "data: content",
        text_scene,
        text("text.txt", lambda t: t.replace("x * 000", "x * 717")),
        REFUSED,
    ),
    Case(
        "data: content, same size and time",
        text_scene,
        text("text.txt", lambda t: t.replace("x * 000", "x * 717"), keeps_time=True),
        REFUSED,
    ),
    Case(
        "data: another word, of which a trained tokenizer makes the same tokens",
        text_scene,
        text("text.txt", lambda t: t.replace("return", "yields")),
        EQUAL,
    ),
    Case("data: order", text_scene, text("text.txt", swapped), REFUSED),
    Case("data: more at the end", text_scene, text("text.txt", lambda t: t + lines_of(60)), REFUSED),
    Case("data: less", text_scene, text("text.txt", lambda t: t[: len(t) // 2]), REFUSED),
    Case("data.max_bytes", text_scene, words("data.max_bytes=5000"), REFUSED),
    Case("data.holdout", text_scene, words("data.holdout=0.2"), REFUSED),
    Case("data.shuffle", text_scene, words("data.shuffle=false"), REFUSED),
    Case("data.seq_len", text_scene, words("data.seq_len=16"), REFUSED),
    Case("data.mask_documents", text_scene, words("data.mask_documents=true"), REFUSED),
    Case(
        "data.vocab_size of the trained tokenizer",
        text_scene,
        words("data.vocab_size=280"),
        REFUSED,
    ),
    Case("validation: content", validation_scene, text("held.txt", lines_of(40, 7)), EQUAL),
    Case(
        "mixture: weights",
        mixture_scene,
        words("data.source=[{source: text.txt, weight: 1}, {source: more.txt, weight: 1}]"),
        REFUSED,
    ),
    Case("mixture: content of one source", mixture_scene, text("more.txt", lines_of(200, 4)), REFUSED),
    Case("stream: nothing", stream_scene, nothing, EQUAL),
    Case(
        "stream: content that was read",
        stream_scene,
        text("text.jsonl", lambda t: t.replace("a10 ", "a11 ")),
        REFUSED,
    ),
    Case(
        "stream: content that was read, same size and time",
        stream_scene,
        text("text.jsonl", lambda t: t.replace("a10 ", "a11 "), keeps_time=True),
        REFUSED,
    ),
    Case("stream: order", stream_scene, text("text.jsonl", swapped), REFUSED),
    Case(
        "stream: content still to be read",
        stream_scene,
        text(
            "text.jsonl",
            lambda t: t[: _LATE * len(t) // 100] + t[_LATE * len(t) // 100 :].replace("a", "e"),
        ),
        ("said", "equal"),
        "data.source",
    ),
    Case(
        "stream: cut before the place",
        stream_scene,
        text("text.jsonl", lambda t: "".join(t.splitlines(keepends=True)[:100])),
        REFUSED,
    ),
    Case(
        "stream: more at the end",
        stream_scene,
        text("text.jsonl", lambda t: t + t),
        ("said", "equal"),
        "data.source",
    ),
    Case("stream: seq_len", stream_scene, words("data.seq_len=16"), REFUSED),
    Case("chat template", chat_scene, text("base/chat_template.jinja", lambda t: "X" + t), REFUSED),
    Case("chat: packing", chat_scene, words("data.packing=false"), REFUSED),
    Case("base weights: values", adapter_scene, weights("base/model.safetensors"), REFUSED),
    Case(
        "base weights: format",
        adapter_scene,
        weights("base/model.safetensors", dtype="float32"),
        REFUSED,
    ),
    Case("base weights: in two files", adapter_scene, shards, EQUAL),
    Case(
        "base weights: on two ranks",
        adapter_scene,
        words("parallel.dp_shard=2", "training.microbatch=1"),
        EQUAL,
    ),
    Case(
        "base weights: values, on two ranks",
        adapter_scene,
        lambda p: weights("base/model.safetensors")(p) or ["parallel.dp_shard=1", "parallel.tp=2"],
        REFUSED,
    ),
    Case(
        "base weights: folder moved",
        adapter_scene,
        moved("base", "elsewhere", "model.path=elsewhere"),
        EQUAL,
    ),
    Case(
        "base weights: values, merged export",
        adapter_scene,
        weights("base/model.safetensors"),
        REFUSED,
        command=EXPORT,
        is_interrupted=False,
    ),
    Case("adapters: lora_alpha", adapter_scene, words("lora.lora_alpha=16"), REFUSED),
    Case("adapters: dropout", adapter_scene, words("lora.lora_dropout=0.3"), SAID, "lora_dropout"),
    Case("adapters: none any more", adapter_scene, words("lora=null"), REFUSED),
    Case("pairs: reference values", pairs_scene, array("reference.npy"), REFUSED),
    Case(
        "pairs: reference missing",
        pairs_scene,
        lambda p: (p.root / "run" / "reference.npy").unlink(),
        REFUSED,
    ),
    Case("pairs: beta", pairs_scene, words("dpo.beta=0.5"), SAID, "dpo.beta"),
    Case("pairs: loss", pairs_scene, words("dpo.loss_type=hinge"), SAID, "dpo.loss_type"),
    Case(
        "pairs: a record",
        pairs_scene,
        text("records.jsonl", lambda t: t.replace("or so", "or no")),
        REFUSED,
    ),
    Case("answers: reference values", answers_scene, array("reference.npy"), REFUSED),
    Case(
        "answers: a label",
        answers_scene,
        text("records.jsonl", lambda t: t.replace('"label": true', '"label": false', 1)),
        REFUSED,
    ),
    Case("rollouts: nothing", rollout_scene, nothing, EQUAL),
    Case(
        "rollouts: code of a reward",
        rollout_scene,
        text("rewards.py", lambda t: t.replace("isdigit", "isalpha")),
        SAID,
        "rewards.digits",
    ),
    Case(
        "rollouts: a column that a reward reads",
        rollout_scene,
        text("records.jsonl", lambda t: t.replace('"bonus": 1', '"bonus": 7')),
        SAID,
        "record columns",
    ),
    Case("rollouts: reward model", rollout_scene, weights("reward/model.safetensors", 3.0), REFUSED),
    Case("rollouts: reference model", rollout_scene, reference_model, REFUSED),
    Case(
        "rollouts: weight of the reference",
        rollout_scene,
        words("grpo.beta=0.5"),
        SAID,
        "grpo.beta",
    ),
    Case(
        "rollouts: length of completions",
        rollout_scene,
        words("grpo.max_completion_length=2"),
        SAID,
        "max_completion_length",
    ),
    Case(
        "rollouts: end of text of the model",
        rollout_scene,
        config("base/generation_config.json", eos_token_id=[0, 70, 71, 72, 73, 74, 75, 76, 77, 78]),
        ("said", "equal"),
        "generation_config",
    ),
    Case(
        "code of an optimizer",
        optimizer_scene,
        text("own_optimizer.py", lambda t: t.replace("1.0", "2.0")),
        SAID,
        "own_optimizer",
    ),
    Case(
        "version: the checkpoint lacks a key at its default",
        text_scene,
        facts(lambda f: f.pop("training.neftune_noise_alpha")),
        EQUAL,
    ),
    Case(
        "version: the checkpoint lacks a key that is set",
        text_scene,
        lambda p: facts(lambda f: f.pop("training.neftune_noise_alpha"))(p) or ["training.neftune_noise_alpha=5"],
        SAID,
        "neftune",
    ),
    Case(
        "version: of torch",
        text_scene,
        facts(lambda f: f.update({"environment.torch": "1.0"})),
        EQUAL,
    ),
)

"""Hints of recipe errors are pasted: they lead to a recipe that loads, or to another error than the first.

A hint may hold several overrides, and alternatives after `or`. Words in capitals (`HOST`, `FILE`, `REGISTRY`) stand for
something that only the user knows, and are filled in as a user would.
"""

import re
import shlex

import pytest

from hyper_parallel.config import load_recipe
from hyper_parallel.errors import HyperParallelError

BASE = "model: {path: llama-3-8b}\ndata: {source: words.jsonl}\nparallel: {dp_shard: 1}\n"
FILLED = {
    "HOST": "node1",
    "FILE": "held_out.jsonl",
    "REGISTRY": "registry.example",
    "TAG": "1",
    "VALUE": "1",
}

CONTRADICTIONS = (
    "stage=sft data.format=text",
    "stage=sft data.source=python-stdlib",
    "stage=dpo data.source=python-stdlib",
    "stage=dpo data.packing=true",
    "stage=dpo data.streaming=true",
    "stage=dpo data.max_bytes=1000",
    "stage=dpo offload.budget=auto",
    "stage=rm sample_prompt=x",
    "stage=dpo dpo.beta=0.2 parallel.submodels.vision.dp_shard=1",
    "stage=rm training.check_ranks_every=2 training.deterministic=true",
    "dpo.beta=0.2",
    "stage=grpo grpo.rollout_ranks=auto",
    "stage=grpo parallel.pp=2",
    "stage=grpo grpo.max_staleness=1",
    "stage=grpo grpo.reference_role=sampler",
    "stage=grpo grpo.partial_rollout=true grpo.rollout_ranks=1",
    "stage=grpo grpo.exact_logprobs=true grpo.environment=a.B",
    "stage=grpo grpo.reward_funcs=[environment]",
    "stage=grpo grpo.min_effective_samples=0.5",
    "stage=grpo grpo.epsilon=0.1",
    "stage=grpo grpo.num_iterations=2 checkpoint.every=3",
    "stage=grpo grpo.reward_weights=[1,2]",
    "stage=grpo grpo.reward_funcs=[a.score,b.score]",
    "stage=dpo data.packing=true data.mask_documents=true",
    "data.packing=false data.mask_documents=true",
    "data.streaming=true training.epochs=1",
    "data.streaming=true data.holdout=0.1",
    "data.validation=v.jsonl data.holdout=0.1",
    "data.validation_split=test",
    "data.mask_documents=true offload.budget=auto",
    "training.epochs=1 training.steps=5",
    "training.warmup_steps=50 training.steps=5",
    "training.decay_steps=5",
    "training.lr_schedule=wsd training.decay_steps=99 training.steps=100",
    "training.lr_schedule=polynomial training.lr_schedule_args={num_cycles:\\ 2}",
    "training.lr_schedule=polynomial training.min_lr_ratio=0.2",
    "training.elastic=true",
    "training.check_ranks_every=2",
    "training.check_ranks_every=2 training.deterministic=true offload.max_slowdown=0.1",
    "training.profile.start=99 training.profile.steps=5",
    "training.profile.start=2 training.profile.steps=500",
    "training.eval_every=5 data.holdout=0",
    "training.eval_every=5 data.streaming=true",
    "training.neftune_noise_alpha=5 offload.budget=auto",
    "training.early_stopping_patience=2",
    "training.early_stopping_threshold=0.1",
    "checkpoint.keep_best=true",
    "parallel.world_size=3",
    "parallel.zero=1 parallel.pp=2",
    "training.recompute_layers=2",
    "training.recompute=full training.recompute_layers=2 parallel=auto",
    "offload.budget=auto offload.max_slowdown=0.1",
    "offload.dram=1GiB",
    "offload.budget=auto offload.flash=1GiB",
    "offload.budget=auto training.dtype=float16",
    "offload.budget=auto training.on_nonfinite=skip",
    "offload.budget=auto training.compile=true",
    "training.compile=graph-kernel",
    "training.compile=true backend=mindspore",
    "overlap.tp=half-batch training.compile=true",
    "overlap.tp=chunks training.compile=true",
    "overlap.tp=symmetric training.compile=true",
    "overlap.tp=symmetric lora.r=8",
    "overlap.tp=symmetric parallel=auto",
    "checkpoint.from_dir=x checkpoint.resume=never",
    "parallel.dp_shard=1048576 parallel.pp=2",
    "parallel.tp=1048576 parallel.pp=2",
    "training.microbatch=4194304 parallel.dp_shard=2",
    "launch.nnodes=2",
    "launch.nnodes=2 launch.launcher=torchrun",
    "launch.nnodes=2 launch.launcher=ray parallel=auto",
    "launch.launcher=kubernetes",
)
KEYS_AND_VALUES = (
    "learning_rate=1e-5", "training.eval_steps=4", "lr=1e-4", "lora_alpha=8", "optimizer.lr=1e-4", "report_to=wandb",
    "trainer.n_gpus_per_node=1", "output=x", "flash_attn=auto", "gradient_checkpointing=true", "model=x", "lora=4",
    "lora=true", "training.lr_schedule=cosin", "training.dtype=bfloat1", "stage=dop", "checkpoint.resume=neve",
    "parallel.schedule=1f1", "training.optimizer.lr=3", "training.steps", "data.packing_=true", "parallel.tpx=1",
    "checkpoint.save_interval=3", "data.max_length=64", "training.warmup_step=3", "val_set_size=0.1",
)  # fmt: skip


def overrides_of(hint: str) -> list[str]:
    """Overrides of the first alternative of a hint."""
    first = hint.partition(", or")[0]
    quoted = re.findall("`([^`]*)`", first)
    text = " ".join(quoted) if quoted else first
    for word, value in FILLED.items():
        text = re.sub(rf"\b{word}\b", value, text)
    # A value in brackets has spaces.
    return [match[0] for match in re.finditer(r"[\w.]+=(?:\{[^}]*\}|\[[^\]]*\]|[^\s,`]+)", text)]


def error_of(path, words):
    try:
        load_recipe(path, words)
    except HyperParallelError as error:
        return error
    return None


@pytest.mark.parametrize("written", [*CONTRADICTIONS, *KEYS_AND_VALUES])
def test_a_pasted_hint_leads_on(tmp_path, written):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    words = shlex.split(written)
    first = error_of(path, words)
    assert first is not None
    assert first.hint, first.what
    pasted = overrides_of(first.hint)
    if not pasted:  # says to remove a key, or another name of it
        named = re.findall(r"`([\w.]+)`", first.hint)
        assert named, first.hint
        left = [w for w in words if w.partition("=")[0] not in named]
        assert left != words
        second = error_of(path, left)
    else:
        kept = words
        if first.code in ("HP101", "HP102") and written in KEYS_AND_VALUES:
            kept = []  # an unknown key or a wrong value is replaced
        second = error_of(path, [*kept, *pasted])
    assert second is None or second.what != first.what, second.render()


def test_hints_name_every_change_that_is_needed(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    for written, pasted in (
        ("training.check_ranks_every=2 offload.budget=auto", "offload.budget=null training.deterministic=true"),
        ("training.lr_schedule=inverse_sqrt training.min_lr_ratio=0.2", "training.lr_schedule=cosine"),
        ("training.lr_schedule=inverse_sqrt training.min_lr_ratio=0.2", "training.min_lr_ratio=null"),
        ("data.mask_documents=true offload.budget=auto", "data.packing=false data.mask_documents=null"),
        ("launch.nnodes=2", "launch.launcher=torchrun launch.rdzv_endpoint=HOST:29500"),
        ("training.early_stopping_threshold=0.1", "training.early_stopping_patience=3 training.eval_every=100"),
        ("stage=grpo grpo.epsilon=0.1 checkpoint.every=3", "grpo.num_iterations=2 checkpoint.every=4"),
    ):
        error = error_of(path, written.split())
        assert f"`{pasted}`" in error.hint
        assert error_of(path, [*written.split(), *pasted.split()]) is None


def test_the_name_of_an_environment_is_shown_as_it_was_written(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    error = error_of(path, ["stage=grpo", "grpo.exact_logprobs=true", "grpo.environment=my_module.MyEnv"])
    assert "environment=my_module.MyEnv" in error.render()


def test_no_hint_of_an_unknown_key_names_a_value_that_its_key_refuses(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    for written in ("special=x", "data_see=3", "batch_=3", "eval_token_=x", "load_=x", "save_=x"):
        error = error_of(path, [written])
        assert error is not None
        hint = re.fullmatch("write `(.*)`", error.hint or "")
        if hint is not None:
            assert error_of(path, [hint[1]]) is None, (written, error.hint)

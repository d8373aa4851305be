"""Names of keys in other training programs lead to the key of a recipe that says the same."""

import re

import pytest

from hyper_parallel.config import Lora, Recipe, leaves, load_recipe
from hyper_parallel.config.foreign_keys import FOREIGN_KEYS
from hyper_parallel.errors import UnknownKey

pytestmark = pytest.mark.unit
BASE = "model: {path: m}\ndata: {source: x.jsonl}\nparallel: {dp_shard: 1}\n"
KEY = re.compile(r"\b(?:model|data|training|parallel|checkpoint|lora|dpo|moe|grpo|launch)\.\w+")


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(BASE)
    return path


def hint_of(path, *words):
    with pytest.raises(UnknownKey) as refusal:
        load_recipe(path, list(words))
    assert refusal.value.hint is not None
    return refusal.value.hint


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("learning_rate=1e-5", "write `training.lr=1e-5`"),
        ("training.learning_rate=1e-5", "write `training.lr=1e-5`"),
        ("--learning-rate=1e-5", "write `training.lr=1e-5`"),
        ("training.learning_rte=1e-5", "write `training.lr=1e-5`"),
        ("per_device_train_batchsize=4", "write `training.microbatch=4`"),
        ("lr=1e-5", "write `training.lr=1e-5`"),
        ("tp=2", "write `parallel.tp=2`"),
        ("per_device_train_batch_size=4", "write `training.microbatch=4`"),
        ("gradient_checkpointing=true", "write `training.recompute=full`"),
        ("training.eval_steps=20", "write `training.eval_every=20`"),
        ("max_length=2048", "write `data.seq_len=2048`"),
        ("training.bf16=true", "write `training.dtype=bfloat16`"),
        ("optim=adamw_torch_fused", "write `training.optimizer=adamw`"),
        ("lr_scheduler_type=constant_with_warmup", "write `training.lr_schedule=constant`"),
        ("lr_scheduler_type=inverse_sqrt", "write `training.lr_schedule=inverse_sqrt`"),
        ("lora_alpha=16", "write `lora.lora_alpha=16`"),
        ("packing=true", "write `data.packing=true`"),
        ("flash_attn=auto", "write `model.attn_implementation=null`"),
        ("report_to=wandb", "write `'training.report_to=[wandb]'`"),
        ("model.name=x", "write `model.path=x`"),
        ("optimizer.name=AdamW", "write `training.optimizer=adamw`"),
        ("optimizer.lr=3e-5", "write `training.lr=3e-5`"),
        ("parallelism.tensor_parallel_degree=2", "write `parallel.tp=2`"),
        ("actor_rollout_ref.rollout.n=4", "write `grpo.num_generations=4`"),
        ("trainer.n_gpus_per_node=8", "write `launch.nproc_per_node=8`"),
        ("checkpoint.interval=3", "write `checkpoint.every=3`"),
        ("training_.lr=3", "write `'training={lr: 3}'`"),
        ("offload.update_on_host=true", "remove the key: optimizer updates always run on the device"),
        ("eval_every=x", "the key is `training.eval_every`: an integer >= 0"),
        ("tensor_model_parallel_size=8", "write `parallel.tp=8`"),
        ("local_rank=0", "remove the key: recipes have no such setting"),
        ("training.warmup_step=1", "write `training.warmup_steps=1`"),
    ],
)  # fmt: skip
def test_hints(recipe, written, hint):
    assert hint_of(recipe, written.removeprefix("--")) == hint


def test_every_key_that_a_hint_names_exists(recipe):
    known = {key for key, _ in leaves(Recipe)} | {f"lora.{key}" for key in Lora.model_fields}
    for name in FOREIGN_KEYS:
        hint = hint_of(recipe, f"{name}=1")
        named = KEY.findall(hint)
        assert named or "remove the key" in hint or "output_dir" in hint or "lora:" in hint, name
        assert {*named} - {"parallel.tp"} <= known, name


def test_hints_with_values_load_when_pasted(recipe):
    for name, value in {
        "learning_rate": "3e-5", "num_train_epochs": "2", "save_steps": "10", "save_total_limit": "3",
        "logging_steps": "5", "cutoff_len": "1024", "sample_packing": "false", "lora_rank": "16",
        "gradient_accumulation_steps": "2", "model_name_or_path": "my/model", "val_size": "0.1",
        "pipeline_parallel_degree": "1", "adam_epsilon": "1e-7",
        "gradient_checkpointing": "false", "fp16": "true", "flash_attn": "fa2", "output_path": "runs/x",
    }.items():  # fmt: skip
        written = re.fullmatch(r"write `(.*)`", hint_of(recipe, f"{name}={value}"))
        assert written is not None, name
        load_recipe(recipe, [written.group(1)])


def test_a_removed_key_without_effect_is_dropped_with_a_warning(recipe):
    recipe.write_text(BASE + "offload: {budget: 1GiB, update_on_host: false}\n")
    with pytest.warns(DeprecationWarning, match="update_on_host was removed"):
        loaded = load_recipe(recipe, [])
    assert loaded.recipe.offload.budget == 1 << 30

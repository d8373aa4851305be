"""Keys of other training programs, with the corresponding recipe keys, for hints in errors about unknown keys.

The keys are those of `TrainingArguments` of transformers, the configs of TRL, torchtitan and verl, the YAML files of
LlamaFactory and axolotl, and Megatron's options, among others. A recipe that contains such a key is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """Counterpart of a key of another program: a recipe key, or advice.

    Attributes:
        key: Corresponding recipe key; empty if there is `advice`.
        values: Recipe value by the other program's value, for values that are spelled differently.
        advice: Hint for a key that no single recipe key with the same value can replace.
    """

    key: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    advice: str = ""


def _by_name(table: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {name: key for key, names in table.items() for name in names}


_RECOMPUTE: Final = {True: "full", False: "none"}
_SCHEDULES: Final = {"constant_with_warmup": "constant", "WSD": "wsd"}
_OPTIMIZERS: Final = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf", "AdamW"), "adamw"),
    "Adam": "adam",
}
_ATTENTION: Final = {
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
    True: "flash_attention_2",
    "auto": None,
    "disabled": "eager",
    False: None,
}
_TRACKERS: Final = {
    **{name: [name] for name in ("wandb", "tensorboard", "mlflow")},
    "none": [],
    "all": ["tensorboard"],
}
_MODES: Final = {"full": "full", "selective": "full", "none": "none", "uniform": "full"}
_BFLOAT16: Final = {True: "bfloat16", False: "float32"}
_FLOAT16: Final = {True: "float16", False: "float32"}
_RENAMED: Final[Mapping[str, tuple[str, ...]]] = {
    "model.path": (
        "model_name_or_path", "model_name", "base_model", "model_id", "pretrained_model_name_or_path", "model.name",
        "model.hf_assets_path", "load", "pretrained_checkpoint",
    ),
    "data.tokenizer": ("tokenizer_name_or_path", "tokenizer_name", "tokenizer_config"),
    "data.source": (
        "dataset_name", "train_file", "data_path", "dataset_path", "datasets.path", "train_data", "train_files",
    ),
    "data.validation": (
        "eval_dataset", "validation_file", "eval_file", "valid_data_path", "val_files", "test_datasets",
    ),
    "data.holdout": ("val_size", "val_set_size", "validation_split_percentage"),
    "data.text_key": ("dataset_text_field", "text_column", "text_field"),
    "data.split": ("dataset_split", "train_split"),
    "data.max_records": ("max_samples", "max_train_samples"),
    "data.seq_len": (
        "max_length", "max_seq_length", "max_seq_len", "cutoff_len", "sequence_len", "sequence_length", "seq_length",
        "model_max_length", "block_size", "context_length",
    ),
    "data.packing": ("sample_packing",),
    "training.lr": ("learning_rate", "optimizer.lr", "optim.lr", "actor.optim.lr"),
    "training.steps": ("max_steps", "train_iters", "num_steps", "total_steps", "total_training_steps", "max_iters"),
    "training.epochs": ("num_train_epochs", "num_epochs", "n_epochs", "total_epochs"),
    "training.warmup_steps": ("num_warmup_steps", "lr_warmup_iters", "lr_warmup_steps", "warmup_iters"),
    "training.min_lr_ratio": ("min_lr_rate", "min_lr_factor", "lr_min_ratio", "cosine_min_lr_ratio"),
    "training.decay_steps": ("num_decay_steps", "lr_wsd_decay_iters"),
    "training.lr_schedule_args": ("lr_scheduler_kwargs",),
    "training.seed": ("random_seed", "manual_seed"),
    "training.microbatch": (
        "ppo_micro_batch_size_per_gpu", "micro_batch_size_per_gpu",
        "per_device_train_batch_size", "micro_batch_size", "train_micro_batch_size_per_gpu", "local_batch_size",
    ),
    "training.accumulation_steps": ("gradient_accumulation_steps", "gradient_accumulation", "accumulate_grad_batches"),
    "training.eps": ("adam_epsilon", "adam_eps"),
    "training.max_grad_norm": ("gradient_clipping", "clip_grad", "max_norm"),
    "training.eval_every": ("eval_steps", "eval_interval", "test_freq", "val_check_interval", "validation.freq"),
    "training.log_every": ("logging_steps", "log_interval", "log_freq"),
    "training.warmup_ratio": ("lr_warmup_fraction",),
    "training.compile": ("torch_compile",),
    "training.deterministic": ("full_determinism",),
    "training.early_stopping_patience": ("early_stopping_steps",),
    "training.timeout_s": ("ddp_timeout",),
    "training.freeze": ("frozen_parameters", "freeze_parameters"),
    "checkpoint.every": ("save_steps", "save_interval", "checkpoint_interval", "checkpoint.interval", "save_freq"),
    "checkpoint.keep": ("save_total_limit", "keep_latest_k"),
    "checkpoint.keep_best": ("load_best_model_at_end",),
    "lora.r": ("lora_r", "lora_rank"),
    "lora.lora_alpha": ("lora_alpha",),
    "lora.lora_dropout": ("lora_dropout",),
    "lora.use_rslora": ("use_rslora",),
    "lora.target_modules": ("lora_target", "lora_target_modules"),
    "lora.modules_to_save": ("lora_modules_to_save", "additional_target"),
    "dpo.loss_type": ("pref_loss",),
    "dpo.label_smoothing": ("dpo_label_smoothing",),
    "dpo.beta": ("pref_beta", "rl_beta"),
    "moe.aux_loss_coef": ("moe_aux_loss_coef", "router_aux_loss_coef"),
    "grpo.num_generations": ("num_samples_per_prompt", "group_size", "rollout.n", "generations_per_prompt"),
    "grpo.max_completion_length": ("max_response_length", "max_new_tokens", "response_length"),
    "grpo.reward_funcs": ("reward_functions", "reward_model", "reward_model_path"),
    "grpo.beta": ("kl_coef", "kl_loss_coef", "init_kl_coef"),
    "grpo.epsilon": ("clip_ratio", "cliprange", "clip_range"),
    "grpo.num_iterations": ("ppo_epochs", "num_ppo_epochs"),
    "launch.nproc_per_node": ("num_processes", "nproc", "n_gpus_per_node", "gpus_per_node"),
    "launch.nnodes": ("num_machines", "num_nodes"),
    "parallel.world_size": ("num_gpus", "gpus", "world_size"),
    "output_dir": (
        "output_path", "save_dir", "dump_folder", "default_local_dir", "output", "out_dir", "save", "checkpoint_dir",
        "checkpoint.folder", "job.dump_folder",
    ),
    "parallel.tp": (
        "tensor_parallel_size", "tensor_parallel_degree", "tensor_model_parallel_size", "tp_size", "tensor_parallel",
    ),
    "parallel.pp": ("pipeline_parallel_size", "pipeline_parallel_degree", "pipeline_model_parallel_size", "pp_size"),
    "parallel.cp": (
        "context_parallel_size", "context_parallel_degree", "sequence_parallel_size", "sequence_parallel_degree",
        "cp_size",
    ),
    "parallel.ep": ("expert_parallel_size", "expert_parallel_degree", "expert_model_parallel_size", "ep_size"),
    "parallel.dp_shard": (
        "data_parallel_shard_degree", "dp_shard_size", "fsdp_size", "dp", "dp_size", "data_parallel_size",
        "data_parallel_degree", "data_parallel",
    ),
    "parallel.dp_replicate": ("data_parallel_replicate_degree", "dp_replicate_size"),
}  # fmt: skip
"""Names of the same setting in other programs, by recipe key; hints keep the value if the key accepts it."""

_CONVERTED: Final = (
    (
        ForeignKey("training.recompute", _RECOMPUTE),
        ("gradient_checkpointing", "activation_checkpointing", "use_gradient_checkpointing",
         "enable_gradient_checkpointing"),
    ),
    (ForeignKey("training.recompute", _MODES),
     ("recompute_granularity", "recompute_method", "activation_checkpoint.mode")),
    (ForeignKey("training.lr_schedule", _SCHEDULES),
     ("lr_scheduler_type", "lr_scheduler", "lr_decay_style", "lr_scheduler.decay_type")),
    (ForeignKey("training.report_to", _TRACKERS), ("report_to",)),
    (ForeignKey("training.optimizer", _OPTIMIZERS), ("optimizer.name", "optim")),
    (ForeignKey("training.compile"), ("compile.enable",)),
    (ForeignKey("training.dtype", _BFLOAT16), ("bf16",)),
    (ForeignKey("training.dtype", _FLOAT16), ("fp16",)),
    (ForeignKey("training.dtype"), ("torch_dtype",)),
    (ForeignKey("model.attn_implementation", _ATTENTION), ("flash_attn", "flash_attention", "use_flash_attention_2")),
)  # fmt: skip
"""Pairs of a recipe key whose values may be spelled differently elsewhere, and its names in other programs."""

_ADVICE: Final[Mapping[str, tuple[str, ...]]] = {
    "training.tokens_per_step is the global batch size in tokens: sequences times data.seq_len": (
        "global_batch_size", "train_batch_size", "batch_size", "total_batch_size", "batch", "ppo_mini_batch_size",
        "rollout_batch_size", "num_prompts_per_step",
    ),
    "training.min_lr_ratio=0.1 sets the final rate as a fraction of training.lr; with "
    "training.lr_schedule=cosine_with_min_lr, `training.lr_schedule_args={min_lr: 1e-6}` sets the rate itself": (
        "min_lr", "lr_end",
    ),
    "training.decay_steps=N and training.warmup_steps=N are counted in optimizer steps": (
        "lr_scheduler.decay_ratio", "lr_warmup_samples", "lr_decay_iters",
    ),
    "training.eval_every=N evaluates every N steps; 0: never": (
        "evals_per_epoch", "eval_strategy", "evaluation_strategy",
    ),
    "checkpoint.every=N saves every N steps": ("saves_per_epoch",),
    "remove the key: evaluation uses the training microbatch; training.eval_tokens sets the tokens per evaluation": (
        "per_device_eval_batch_size", "eval_batch_size",
    ),
    "data.seq_len limits prompt plus answer; grpo.max_completion_length limits completions of stage=grpo": (
        "max_prompt_length", "max_source_length", "max_target_length",
    ),
    "data.seq_len limits a sequence, grpo.max_completion_length a completion": ("max_tokens",),
    "remove the key: stage=sft trains on assistant tokens only, stage=pt on all tokens": (
        "assistant_only_loss", "completion_only_loss", "mask_history", "train_on_prompt", "train_on_inputs",
    ),
    "data.packing=true packs; data.mask_documents=true blocks attention between the documents": (
        "neat_packing", "padding_free",
    ),
    "remove the key: data.packing applies to training and evaluation": (
        "eval_packing", "eval_sample_packing", "pad_to_sequence_len",
    ),
    "remove the key: optimizer updates always run on the device": ("update_on_host",),
    "`lora: {r: 8}` trains adapters": ("use_peft", "adapter", "peft_config"),
    "remove the key: weights are not quantized; `lora: {r: 8}` with training.recompute=full saves memory": (
        "quantization_bit", "load_in_4bit", "load_in_8bit", "quantization", "bnb_4bit_quant_type",
    ),
    "remove the key: the section `lora` supports peft's low-rank adapters only": (
        "use_dora", "loraplus_lr_ratio", "pissa_init", "galore", "use_galore",
    ),
    "training.freeze lists globs of parameter names to freeze, such as `[*.embed_tokens.*]`": (
        "freeze_trainable_layers",
    ),
    "remove the key: torch's kernels are used; training.compile=true fuses more of them": (
        "enable_liger_kernel", "use_liger_kernel", "use_liger", "use_unsloth", "liger_rope",
    ),
    "write it into the config.json of model.path, as transformers does": ("rope_scaling",),
    "remove the key: the tokenizer defines chat template and special tokens (data.tokenizer)": (
        "chat_template", "eos_token", "pad_token", "special_tokens",
    ),
    "model.path=org/name@REVISION names a revision": ("revision", "model_revision", "revision_of_model"),
    "model.path names a preset, a config.json or a directory, which define the sizes of the model": (
        "model_flavor", "model.flavor", "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size",
    ),
    "data.source is the path of a file or directory": ("dataset_dir", "dataset"),
    "remove the key: the reference is the initial model": ("ref_model",),
    "dpo.label_smoothing applies to stage=dpo; other losses have no smoothing": ("label_smoothing_factor",),
    "training.seed also sets the data order": ("data_seed",),
    "stage=grpo uses group-relative advantages; grpo.loss_type sets their normalization": ("adv_estimator",),
    "parallel.schedule=interleaved parallel.virtual_stages=2": ("num_layers_per_virtual_pipeline_stage",),
    "training.microbatch=N is the number of sequences of a microbatch": ("pipeline_parallel_microbatch_size",),
    "parallel.zero=1 shards the optimizer state; parallel.dp_shard=N also parameters": ("use_distributed_optimizer",),
    "training.report_to=[wandb]; WANDB_PROJECT in the environment names the project": ("wandb_project",),
    "write both in training.betas: [0.9, 0.95]": ("adam_beta1", "adam_beta2"),
    "checkpoint.every=N saves every N steps; checkpoint.every_minutes=M every M minutes": ("save_strategy",),
    "training.log_every=N prints every N steps": ("logging_strategy",),
    "checkpoint.resume=must continues output_dir; checkpoint.from_dir=RUN_DIR another run": ("resume_from_checkpoint",),
    "checkpoint.resume=never starts over in output_dir": ("overwrite_output_dir",),
    "`lora: {r: 8}` trains adapters; training.freeze freezes parameters; default: train all": ("finetuning_type",),
    "parallel.dp_shard=N shards parameters, gradients and optimizer state; `parallel: auto` plans the layout": (
        "deepspeed", "fsdp", "fsdp_config", "zero_stage",
    ),
    "tensor parallelism (parallel.tp=N) always includes sequence parallelism": ("sequence_parallel",),
    "data.source is a path, or a list of `{source: PATH, weight: 1.0}`": ("datasets",),
    "remove the key: the tokenizer defines the chat template (data.tokenizer)": ("template",),
    "remove the key: recipes have no such setting": (
        "do_train", "do_eval", "local_rank", "dataloader_num_workers", "dataloader_pin_memory",
        "remove_unused_columns", "group_by_length", "ddp_find_unused_parameters", "preprocessing_num_workers",
        "logging_first_step", "run_name", "bf16_full_eval", "fp16_full_eval", "dataset_kwargs", "dataset_num_proc",
        "save_only_model", "auto_find_batch_size", "use_cache", "hub_model_id", "hub_token", "save_safetensors",
        "dataloader_drop_last", "disable_tqdm", "log_level", "wandb_entity", "wandb_run_id", "wandb_name",
        "overwrite_cache", "plot_loss", "logging_dir", "push_to_hub", "tf32", "include_num_input_tokens_seen",
    ),
}  # fmt: skip
"""Keys of other programs that no single recipe key replaces, by the advice that hints give for them."""

FOREIGN_KEYS: Final[Mapping[str, ForeignKey]] = MappingProxyType(
    {
        **{name: ForeignKey(key) for key, names in _RENAMED.items() for name in names},
        **{name: foreign for foreign, names in _CONVERTED for name in names},
        **{name: ForeignKey(advice=text) for text, names in _ADVICE.items() for name in names},
    }
)
"""Keys of other programs by name, in lower case with underscores."""

FOREIGN_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    _by_name({
        "prompt": ("question", "query", "problem", "ask", "user", "human"),
        "completion": ("response", "reply", "solution", "target"),
        "messages": ("conversations", "conversation", "turns", "dialog"),
        "system": ("system_prompt", "system_message"),
        "role": ("from",),
        "content": ("value",),
        "assistant": ("bot",),
    })
)  # fmt: skip
"""Common names in data sets, with the corresponding names of `data.columns` and `data.roles`."""

FOREIGN_VALUES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "stage": _by_name({
            "pt": ("pretrain", "pretraining", "pre_training", "cpt", "lm", "clm", "causal_lm"),
            "sft": ("finetune", "fine_tune", "finetuning", "instruct", "chat", "supervised", "it"),
            "grpo": ("ppo", "rl", "rlhf", "rlvr", "reinforce", "rloo", "dapo", "gspo"),
            "rm": ("reward", "reward_model", "rewards", "reward_modeling"),
            "dpo": ("preference", "ipo", "simpo"),
        }),
        "launch.launcher": _by_name({"kubernetes": ("k8s", "jobset"), "slurm": ("sbatch", "srun")}),
        "training.report_to": {"none": [], "null": [], "all": ["tensorboard"], "tb": "tensorboard"},
        "training.recompute": {**_MODES, "true": "full", "false": "none"},
        "training.dtype": {"half": "float16", "float": "float32", "single": "float32"},
    }
)  # fmt: skip
"""Recipe values by recipe key, then by value of another program in lower case."""

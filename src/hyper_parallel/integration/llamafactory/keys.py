"""Tables of LlamaFactory's YAML keys: keys with a recipe key, keys without effect here, and unsupported keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hyper_parallel.config import SCHEDULE_ARGS

NEEDED: Final = "needed"
"""Marker of a required key, which has no default."""

SAME: Final[dict[str, tuple[str, Any]]] = {
    "model_name_or_path": ("model.path", NEEDED),
    "trust_remote_code": ("model.trust_remote_code", False),
    "flash_attn": ("model.attn_implementation", "auto"),
    "stage": ("stage", "sft"),
    "cutoff_len": ("data.seq_len", 2048),
    "max_samples": ("data.max_records", None),
    "learning_rate": ("training.lr", 5e-5),
    "lr_scheduler_type": ("training.lr_schedule", "linear"),
    "optim": ("training.optimizer", "adamw_torch"),
    "weight_decay": ("training.weight_decay", 0.0),
    "adam_epsilon": ("training.eps", 1e-8),
    "per_device_train_batch_size": ("training.microbatch", 8),
    "gradient_accumulation_steps": ("training.accumulation_steps", 1),
    "seed": ("training.seed", 42),
    "early_stopping_steps": ("training.early_stopping_patience", None),
    "neftune_noise_alpha": ("training.neftune_noise_alpha", None),
    "full_determinism": ("training.deterministic", False),
    "logging_steps": ("training.log_every", 500),
    "save_steps": ("checkpoint.every", 500),
    "save_total_limit": ("checkpoint.keep", None),
    "output_dir": ("output_dir", NEEDED),
    "lora_rank": ("lora.r", 8),
    "lora_dropout": ("lora.lora_dropout", 0.0),
    "use_rslora": ("lora.use_rslora", False),
    "pref_loss": ("dpo.loss_type", "sigmoid"),
    "dpo_label_smoothing": ("dpo.label_smoothing", 0.0),
    "simpo_gamma": ("dpo.simpo_gamma", 0.5),
    "kto_chosen_weight": ("kto.desirable_weight", 1.0),
    "kto_rejected_weight": ("kto.undesirable_weight", 1.0),
    "moe_aux_loss_coef": ("moe.aux_loss_coef", None),
}
"""Recipe key and LlamaFactory's default, by LlamaFactory's key."""

WORDS: Final[dict[str, Mapping[Any, Any]]] = {
    "flash_attn": {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2"},
    "stage": {"pt": "pt", "sft": "sft", "dpo": "dpo", "kto": "kto", "rm": "rm"},
    "lr_scheduler_type": {
        "linear": "linear", "cosine": "cosine", "constant": "constant",
        **{name: name for name in SCHEDULE_ARGS}, "constant_with_warmup": "constant",  # with its warm-up
    },
    "optim": {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw"},
    "pref_loss": {word: word for word in ("sigmoid", "hinge", "ipo", "orpo", "simpo")},
    "finetuning_type": {word: word for word in ("full", "freeze", "lora")},
    "metric_for_best_model": {None: None, "loss": "loss", "eval_loss": "loss"},
    "greater_is_better": {None: None, False: False},
    "do_train": {True: True},
    "freeze_trainable_modules": {"all": "all"},
    "mix_strategy": {"concat": "concat"},
    "save_strategy": {"steps": True, "no": False, True: True, False: False},
    "eval_strategy": {"steps": True, "no": False, True: True, False: False},
    "hyper_parallel_token_dispatcher": {"all_to_all": "all_to_all"},
}  # fmt: skip
"""Dict from accepted value to value in a recipe, by LlamaFactory's key."""

TOGETHER: Final[dict[str, tuple[str, Any]]] = {
    "do_train": ("", NEEDED),
    "finetuning_type": ("lora, training.freeze", "lora"),
    "lora_alpha": ("lora.lora_alpha", None),
    "lora_target": ("lora.target_modules", "all"),
    "additional_target": ("lora.modules_to_save", None),
    "pref_beta": ("dpo.beta, kto.beta", 0.1),
    "freeze_trainable_layers": ("training.freeze", 2),
    "freeze_trainable_modules": ("", "all"),
    "mix_strategy": ("", "concat"),
    "disable_shuffling": ("data.shuffle", False),
    "train_from_scratch": ("model.init", False),
    "dataset": ("data.source, data.format, data.text_key", NEEDED),
    "dataset_dir": ("data.source", "data"),
    "eval_dataset": ("data.validation", None),
    "template": ("", None),
    "packing": ("data.packing, data.mask_documents", None),
    "neat_packing": ("data.packing, data.mask_documents", False),
    "num_train_epochs": ("training.epochs", 3.0),
    "max_steps": ("training.steps", -1),
    "lr_scheduler_kwargs": ("training.lr_schedule_args", None),
    "warmup_ratio": ("training.warmup_ratio", 0.0),
    "warmup_steps": ("training.warmup_steps", 0),
    "adam_beta1": ("training.betas", 0.9),
    "adam_beta2": ("training.betas", 0.999),
    "max_grad_norm": ("training.max_grad_norm", 1.0),
    "bf16": ("training.dtype", False),
    "fp16": ("training.dtype", False),
    "disable_gradient_checkpointing": ("training.recompute", False),
    "gradient_checkpointing": ("training.recompute", True),
    "val_size": ("data.holdout", 0.0),
    "eval_strategy": ("training.eval_every", "no"),
    "eval_steps": ("training.eval_every", None),
    "save_strategy": ("checkpoint.every", "steps"),
    "overwrite_output_dir": ("checkpoint.resume", False),
    "metric_for_best_model": ("", None),
    "greater_is_better": ("", None),
    "report_to": ("training.report_to", "none"),
    "hyper_parallel_args": ("parallel, training.recompute", None),
    "hyper_parallel_cp_size": ("parallel.cp", None),
    "hyper_parallel_ep_size": ("parallel.ep", None),
    "hyper_parallel_efsdp_size": ("parallel.dp_shard, parallel.dp_replicate", None),
    "hyper_parallel_token_dispatcher": ("", "all_to_all"),
}
"""Recipe keys that a key of LlamaFactory affects, and its default, for keys that are read in combination."""

WITHOUT_EFFECT: Final = (
    "overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size", "dataloader_num_workers",
    "dataloader_pin_memory", "plot_loss", "ddp_timeout", "save_only_model", "use_fast_tokenizer", "logging_dir",
    "logging_first_step", "do_eval", "per_device_eval_batch_size", "run_name", "disable_tqdm", "low_cpu_mem_usage",
    "ddp_find_unused_parameters", "deepspeed", "fsdp", "fsdp_config", "use_cpu", "tf32", "enable_liger_kernel",
    "include_num_input_tokens_seen", "include_effective_tokens_per_second", "remove_unused_columns", "cache_dir",
    "use_hyper_parallel", "enable_thinking", "use_cache", "use_reentrant_gc", "use_liger_kernel", "log_level",
    "dataloader_prefetch_factor", "dataloader_persistent_workers", "data_shared_file_system", "print_param_status",
    "hf_hub_token", "infer_dtype",
)  # fmt: skip
"""Keys that change neither the trained model nor the output here; `parallel` determines the layout of ranks."""

REFUSED: Final = (
    "quantization_bit", "use_unsloth", "use_galore", "use_badam", "use_apollo", "use_muon", "use_dora", "pissa_init",
    "loraplus_lr_ratio", "rope_scaling", "shift_attn", "mixture_of_depths", "pure_bf16",
    "adapter_name_or_path", "create_new_adapter", "ref_model", "ref_model_adapters", "reward_model", "pref_ftx",
    "train_on_prompt", "mask_history", "tokenized_path", "interleave_probs", "eval_on_each_dataset", "do_predict",
    "predict_with_generate", "compute_accuracy", "label_smoothing_factor", "group_by_length", "streaming",
    "freeze_extra_modules", "resize_vocab", "use_llama_pro", "use_dft_loss", "use_asft_loss", "push_to_hub",
    "resume_from_checkpoint", "load_best_model_at_end", "tool_format", "media_dir",
)  # fmt: skip
"""Keys of unsupported behaviour; they are accepted if their value is null, false, 0, an empty text or `none`."""

KNOWN: Final = (*SAME, *TOGETHER, *WITHOUT_EFFECT, *REFUSED)

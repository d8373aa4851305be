"""LlamaFactory's supervised trainer on the layouts of this package.

LlamaFactory and transformers still provide the training loop, data, callbacks and file formats. This class parallelizes
the model before the optimizer is created, and replaces the loss of a microbatch, the gradient norm, and saving. It
replaces `prepare` of its own accelerator, so that Accelerate prepares the optimizer and the data, but not the model.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from accelerate.data_loader import prepare_data_loader
from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer
from torch import Tensor, nn

import hyper_parallel as hp
from hyper_parallel.backends.torch.peft_adapters import absorb_adapters
from hyper_parallel.errors import Contradiction
from hyper_parallel.integration.llamafactory.arguments import HyperParallelArguments
from hyper_parallel.integration.llamafactory.parallel_model import (
    FORMATS,
    adopt_checkpointing,
    export,
    shard_model,
    wait,
    without_padding_mask,
)

_STATE: Final = "hyper_parallel"  # folder inside a checkpoint of transformers
_SCHEDULER: Final = "scheduler"


class HyperParallelTrainer(CustomSeq2SeqTrainer):
    """LlamaFactory's trainer with a model parallelized by `hp_args`.

    Args:
        hp_args: Parallel degrees and dtypes.
        kwargs: Arguments of LlamaFactory's trainer, `model` and `finetuning_args` among them.

    Raises:
        Contradiction: HP104 for another back end that parallelizes the model, and for unsupported options.
        DegreesMismatch: HP301 when the degrees do not divide the ranks.
        UnsupportedSharding: HP205 for adapters that `absorb_adapters` refuses.
    """

    def __init__(self, hp_args: HyperParallelArguments, **kwargs: Any) -> None:
        adapted = getattr(kwargs["model"], "peft_config", None)
        if adapted and kwargs["finetuning_args"].finetuning_type == "lora":
            kwargs["model"] = kwargs["model"].get_base_model()
            absorb_adapters(kwargs["model"], adapted["default"], where="lora_target")
        super().__init__(**kwargs)
        hp_args = adopt_checkpointing(self.model, hp_args, self.args.gradient_checkpointing)
        self.args.gradient_checkpointing = False  # otherwise transformers enables it again
        self._hp_args = hp_args
        self._strategy = hp_args.strategy(self.args.world_size)
        self._same_data = self._strategy.cp * self._strategy.tp
        self._parallel = False
        self._refuse()
        # Patched on this object only: models are not prepared; ranks of one tp and cp group read the same sequences.
        self._prepare = self.accelerator.prepare
        self.accelerator.prepare = self._prepare_but_the_model

    def _refuse(self) -> None:
        arguments = self.finetuning_args
        unsupported = {
            "deepspeed": self.is_deepspeed_enabled,
            "fsdp": self.is_fsdp_enabled,
            f"finetuning_type: {arguments.finetuning_type}": arguments.finetuning_type
            not in ("full", "freeze", "lora"),
            "pissa_init": arguments.pissa_init,
            "use_badam": arguments.use_badam,
            "use_galore": arguments.use_galore,
            "use_asft_loss": arguments.use_asft_loss,
            "label_smoothing_factor": bool(self.args.label_smoothing_factor),
        }  # fmt: skip
        if self.compute_loss_func is not None and self._same_data > 1:
            raise Contradiction(
                "tp_size and cp_size support no other loss than cross entropy",
                where="the arguments of LlamaFactory",
                got="use_dft_loss or use_eaft_loss",
                hint="remove use_dft_loss and use_eaft_loss, or set tp_size and cp_size to 1",
            )
        for name, is_set in unsupported.items():
            if is_set:
                raise Contradiction(
                    f"`{name}` cannot be combined with use_hyper_parallel",
                    where="the arguments of LlamaFactory",
                    got=name,
                    hint=f"remove {name}, or set use_hyper_parallel: false",
                )

    def _parallelize_once(self) -> None:
        """Parallelize the model, before the optimizer refers to its parameters; do nothing in later calls."""
        if self._parallel:
            return
        mixed = "bf16" if self.args.bf16 else "fp16" if self.args.fp16 else ""
        shard_model(self.model, self._strategy, self._hp_args, FORMATS.get(mixed))
        self._parallel = True

    def _prepare_but_the_model(self, *objects: Any, **kwargs: Any) -> Any:
        prepared = [self._prepare_one(item, kwargs) for item in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_one(self, item: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(item, nn.Module):
            return item
        if not isinstance(item, torch.utils.data.DataLoader) or self._same_data == 1:
            return self._prepare(item, **kwargs)
        accelerator = self.accelerator
        loader = prepare_data_loader(
            item,
            accelerator.device,
            num_processes=accelerator.num_processes // self._same_data,
            process_index=accelerator.process_index // self._same_data,
            put_on_device=True,
            rng_types=list(accelerator.rng_types),
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
        )
        accelerator._dataloaders.append(loader)
        return loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Create LlamaFactory's optimizer on the parallelized parameters."""
        self._parallelize_once()
        return super().create_optimizer(*args, **kwargs)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        self._parallelize_once()  # `do_eval` alone creates no optimizer
        return model

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Return the number of labelled tokens of the step, without copies on tensor- and context-parallel ranks."""
        count = super()._get_num_items_in_batch(batch_samples, device)
        averaged = self.args.average_tokens_across_devices and self.args.world_size > 1
        return count // self._same_data if count is not None and averaged else count

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Run forward and backward of one microbatch; gradients are summed, not averaged, over ranks and microbatches.

        Returns:
            This rank's part of the loss times the number of ranks, because transformers logs the mean over ranks.
        """
        model.train()
        inputs = self._ready(self._prepare_inputs(inputs))
        last = self.accelerator.sync_gradients
        with nullcontext() if last else hp.accumulate(model), self.compute_loss_context_manager():
            loss = self._share_of_loss(model, inputs, num_items_in_batch)
            loss.backward()
        return self._reported(loss.detach()) * self.args.world_size

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return this rank's loss of a batch, and the model's outputs if `return_outputs`.

        LlamaFactory's method computes the loss if `num_items_in_batch` is set, the batch has no labels, or the loss
        function is not cross entropy. In all other cases, the sum over this rank's tokens is divided by the number of
        labelled tokens of the batch, so the losses of context-parallel ranks add up to the mean.
        """
        if num_items_in_batch is not None or "labels" not in inputs or self.compute_loss_func is not None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        tokens = (inputs["labels"][:, 1:] != -100).sum().clamp(min=1)
        outputs = model(**inputs, num_items_in_batch=tokens)
        return (outputs.loss, outputs) if return_outputs else outputs.loss

    def _share_of_loss(self, model: nn.Module, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Return the part of the loss from this rank and microbatch; these parts add up to the loss of the step."""
        if num_items is None:  # mean over ranks and microbatches of their means
            ranks = self.args.world_size // self._same_data
            loss = self.compute_loss(model, inputs)
            return loss / (self.current_gradient_accumulation_steps * ranks)
        loss = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        # transformers multiplies the loss by the number of ranks, for reductions that average; here reductions sum.
        averaged = self.args.average_tokens_across_devices
        return loss / self.accelerator.num_processes if averaged else loss

    def _reported(self, loss: Tensor) -> Tensor:
        """Return the loss on the first rank of a tensor-parallel group; 0 on others, whose losses are equal."""
        return loss if self.args.process_index % self._strategy.tp == 0 else torch.zeros_like(loss)

    def _ready(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return inputs if self._strategy.cp == 1 else without_padding_mask(inputs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        *args: Any,
        **kw: Any,
    ) -> tuple[Any, Any, Any]:
        """Return loss, logits and labels of a batch; logits and labels are None with tensor or context parallelism.

        Raises:
            Contradiction: HP104 with tensor or context parallelism, if logits or generated texts are requested.
        """
        if self._same_data == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **kw)
        if not prediction_loss_only or self.args.predict_with_generate:
            options = ("predict_with_generate", "compute_accuracy")
            is_set = (self.args.predict_with_generate, getattr(self.finetuning_args, "compute_accuracy", False))
            option = next((name for name, value in zip(options, is_set, strict=True) if value), "do_predict")
            raise Contradiction(
                "with tp_size or cp_size, evaluation computes the loss only",
                where=f"{option} of LlamaFactory",
                got=f"{option}: true",
                hint=f"{option}: false" + (" and do_predict: false" if self.args.do_predict else ""),
            )
        batch = self._ready(self._prepare_inputs(inputs))
        tokens = self._get_num_items_in_batch([batch], self.args.device)
        with torch.no_grad():
            loss = self._reported(model(**batch, num_items_in_batch=tokens, use_cache=False).loss)
        dist.all_reduce(loss)  # the mean over the tokens of all ranks, as in LlamaFactory itself
        return loss, None, None

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return hp.clip_grad_norm_(model, self.args.max_grad_norm)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a transformers or peft directory with tokenizer and arguments; all ranks must call this."""
        target = Path(output_dir or self.args.output_dir)
        export(self.model, target, self.processing_class)
        if self.args.should_save:  # transformers writes this file next to every model
            torch.save(self.args, target / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save weights, optimizer state and scheduler as a checkpoint that any layout and number of ranks can load."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        scheduler = json.loads(json.dumps(self.lr_scheduler.state_dict()))
        hp.save(
            self.model,
            optimizer,
            Path(output_dir, _STATE),
            step=self.state.global_step,
            **{_SCHEDULER: scheduler},
        )
        wait()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # Saved without an optimizer, or by another trainer
        if not Path(resume_from_checkpoint, _STATE).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not Path(checkpoint, _STATE).is_dir():
            return
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        extra = hp.load(self.model, optimizer, Path(checkpoint, _STATE))
        self.lr_scheduler.load_state_dict(extra[_SCHEDULER])

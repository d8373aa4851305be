"""What LlamaFactory's own trainer does with our names, call by call, on Accelerate's FSDP2; started by torchrun.

torchrun --nproc_per_node 2 caller.py MODEL_DIR OUT_DIR '{"cp_size": 2}'
"""

import json
import sys
from pathlib import Path

import accelerate.accelerator as accelerate_module
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM

from hyper_parallel.integration.llamafactory import (
    HSDPModule,
    HyperParallelArguments,
    clip_grad_norm_,
    export_to_hf_format,
    fsdp2_prepare_model,
    hsdp_sync_stream,
    load_hsdp_model,
    load_hsdp_optimizer_and_scheduler,
    save_hsdp_checkpoint,
    wrap_optimizer_with_skip_dtensor_dispatch,
)
from hyper_parallel.integration.llamafactory.context_parallel import (
    cp_prepare_model,
    get_cp_rank,
    get_dp_rank,
    shard_inputs_for_cp,
)
from hyper_parallel.integration.llamafactory.expert_parallel import ep_prepare_model
from hyper_parallel.platform import get_platform

STEPS, SAVED, SEQUENCES, SEQ_LEN, MICROS, MAX_NORM = 4, 2, 4, 13, 2, 0.5


def batch_of(step):
    """Token ids [4, 13] and labels of a step; the second sequence ends in padding, as does the last."""
    ids = torch.randint(3, 64, (SEQUENCES, SEQ_LEN), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[:, :2] = -100
    labels[1::2, 9:] = -100
    mask = torch.ones_like(ids)
    mask[1::2, 9:] = 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def start(model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.config.use_cache = False
    # As LlamaFactory does unless it is told otherwise; with FSDP2 not reentrant.
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if Path(model_dir, "freeze").exists():  # as finetuning_type: freeze does
        for name, param in model.named_parameters():
            param.requires_grad_("layers.1." in name)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return model.train(), optimizer


def offer_fsdp_on_cpu():
    """Accelerate offers FSDP2 to accelerators alone."""
    dist.init_process_group("gloo")
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


class Caller:
    def __init__(self, model_dir, out, hyper):
        self.model_dir, self.out = model_dir, out
        self.hp_args = HyperParallelArguments.from_dict(hyper)
        self.hp_args.validate()
        self.first_loads = self.hp_args.cp_size > 1
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            cpu_ram_efficient_loading=self.first_loads,
        )
        self.accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
        assert self.accelerator.is_fsdp2
        accelerate_module.fsdp2_prepare_model = self.prepare_model

    def prepare_model(self, accelerator, model):
        if self.hp_args.ep_size > 1:
            model = ep_prepare_model(model, accelerator, self.hp_args)
        if self.hp_args.cp_size > 1:
            model = cp_prepare_model(model, accelerator, self.hp_args)
        return fsdp2_prepare_model(accelerator, model, self.hp_args)

    def prepare(self):
        model, optimizer = start(self.model_dir)
        if self.first_loads and get_platform().get_rank() > 0:  # as transformers leaves it there
            for param in model.parameters():
                param.data.zero_()
        wrap_optimizer_with_skip_dtensor_dispatch(optimizer)
        model, optimizer = self.accelerator.prepare(model, optimizer)
        assert isinstance(model, HSDPModule)
        assert fsdp2_prepare_model(self.accelerator, model, self.hp_args) is model
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.5)
        return model, optimizer, scheduler

    def step(self, model, optimizer, scheduler, number):
        cp, world = self.hp_args.cp_size, get_platform().get_world_size()
        shares = world // cp
        whole = batch_of(number)
        share = {k: v.chunk(shares)[get_dp_rank(self.hp_args)] for k, v in whole.items()}
        count = (whole["labels"][:, 1:] != -100).sum() * cp  # every rank has counted its own
        logged = torch.zeros(())
        for micro in range(MICROS):
            inputs = {k: v.chunk(MICROS)[micro] for k, v in share.items()}
            if cp > 1:
                inputs = shard_inputs_for_cp(inputs, get_cp_rank(self.hp_args), cp)
            last = micro == MICROS - 1
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            loss = model(**{**inputs, "num_items_in_batch": count}).loss * world
            self.accelerator.backward(loss)
            if last:
                hsdp_sync_stream()
            logged += loss.detach()
        norm = clip_grad_norm_(list(model.parameters()), MAX_NORM, norm_type=2)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        dist.all_reduce(logged)
        return float(logged) / world, float(norm)

    def run(self, source):
        model, optimizer, scheduler = self.prepare()
        curve = []
        for number in range(STEPS):
            if number == SAVED:
                save_hsdp_checkpoint(
                    model=model,
                    optimizer=optimizer,
                    lr_scheduler=scheduler,
                    output_dir=str(self.out),
                    should_save_scheduler=get_platform().get_rank() == 0,
                )
            curve.append(self.step(model, optimizer, scheduler, number))
        export_to_hf_format(model, None, str(self.out / "export"))
        self.accelerator._models.clear()
        model, optimizer, scheduler = self.prepare()
        assert not load_hsdp_model(model, str(self.out / "nothing"))
        assert load_hsdp_model(model, source)
        load_hsdp_optimizer_and_scheduler(optimizer, scheduler, source)
        resumed = [self.step(model, optimizer, scheduler, n) for n in range(SAVED, STEPS)]
        if get_platform().get_rank() == 0:
            (self.out / "curves.json").write_text(json.dumps({"curve": curve, "resumed": resumed}))


if __name__ == "__main__":
    offer_fsdp_on_cpu()
    Caller(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])).run(sys.argv[4] if sys.argv[4:] else sys.argv[2])
    dist.destroy_process_group()

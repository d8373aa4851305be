"""Context parallelism as LlamaFactory's own trainer asks for it: ranks of one group get the same whole sequences.

The model itself pads and cuts what it is given, in balanced pieces; so the caller's inputs stay whole.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import BadValue
from hyper_parallel.platform import get_platform


def get_cp_rank(hp_args: Any) -> int:
    """Which part of its sequences this rank has."""
    return get_platform().get_rank() % int(hp_args.cp_size)


def get_dp_rank(hp_args: Any) -> int:
    """Which share of the data this rank reads; those with the same one share sequences."""
    return get_platform().get_rank() // int(hp_args.cp_size)


def get_cp_group_ranks(hp_args: Any) -> tuple[int, ...]:
    """Ranks that share sequences with this one."""
    first = get_dp_rank(hp_args) * int(hp_args.cp_size)
    return tuple(range(first, first + int(hp_args.cp_size)))


def get_cp_group(hp_args: Any) -> Any:
    """A process group of `get_cp_group_ranks`; every rank calls this."""
    import torch.distributed as dist

    return dist.new_subgroups(int(hp_args.cp_size))[0]


def cp_prepare_model(model: Any, accelerator: Any, hp_args: Any) -> Any:
    """Let a model show the loss of its group's sequences; `fsdp2_prepare_model` then splits them.

    Ranks compute the losses of their own tokens, which add up; what is shown is `cp_size` times that, so that the mean
    over all ranks, which is logged, is the loss. Gradients are not touched.
    """
    del accelerator
    if hp_args.cp_size <= 1:
        return model
    others = hp_args.cp_size - 1

    def show(_: Any, __: Any, output: Any) -> Any:
        if getattr(output, "loss", None) is not None:
            output.loss = output.loss + others * output.loss.detach()
        return output

    model.register_forward_hook(show)
    return model


def shard_inputs_for_cp(inputs: dict[str, Any], cp_rank: int, cp_size: int) -> dict[str, Any]:
    """Inputs for a model that splits sequences itself, of any length: whole, without the mask of padding at their end.

    Where the caller does not say how many tokens the step has, the loss is the mean over those of these sequences.

    Raises:
        BadValue: HP102 without `input_ids` and `inputs_embeds`.
        UnsupportedSharding: HP205 for any other mask.
    """
    del cp_rank
    if cp_size <= 1:
        return inputs
    if inputs.get("input_ids") is None and inputs.get("inputs_embeds") is None:
        raise BadValue(
            "cp_size splits `input_ids` or `inputs_embeds`, and a batch has neither",
            got=sorted(inputs),
            hint="cp_size: 1",
        )
    from hyper_parallel.integration.llamafactory.parallel_model import without_padding_mask

    given = without_padding_mask(inputs)
    labels = given.get("labels")
    if labels is None:
        return given
    return {"num_items_in_batch": (labels[:, 1:] != -100).sum().clamp(min=1), **given}

"""Functions for context parallelism called by LlamaFactory's trainer: ranks of one group get equal full sequences.

The model itself pads and splits its inputs into balanced parts, so the inputs of the caller remain full.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import BadValue
from hyper_parallel.platform import get_platform


def get_cp_rank(hp_args: Any) -> int:
    """Return the context-parallel rank of this process."""
    return get_platform().get_rank() % int(hp_args.cp_size)


def get_dp_rank(hp_args: Any) -> int:
    """Return the index of this rank's data share; ranks with the same index share sequences."""
    return get_platform().get_rank() // int(hp_args.cp_size)


def get_cp_group_ranks(hp_args: Any) -> tuple[int, ...]:
    """Return the ranks that share sequences with this one, itself included."""
    first = get_dp_rank(hp_args) * int(hp_args.cp_size)
    return tuple(range(first, first + int(hp_args.cp_size)))


def get_cp_group(hp_args: Any) -> Any:
    """Create the process group of `get_cp_group_ranks`; must be called on every rank."""
    import torch.distributed as dist

    return dist.new_subgroups(int(hp_args.cp_size))[0]


def cp_prepare_model(model: Any, accelerator: Any, hp_args: Any) -> Any:
    """Scale the reported loss of a model for a mean over ranks; `fsdp2_prepare_model` later splits the sequences.

    Each rank computes the loss of its tokens, and these losses add up. The reported value is `cp_size` times larger,
    so that the logged mean over all ranks is the loss. Gradients are unchanged.
    """
    del accelerator
    if hp_args.cp_size <= 1:
        return model
    num_others = hp_args.cp_size - 1

    def show(_: Any, __: Any, output: Any) -> Any:
        if getattr(output, "loss", None) is not None:
            output.loss = output.loss + num_others * output.loss.detach()
        return output

    model.register_forward_hook(show)
    return model


def shard_inputs_for_cp(inputs: dict[str, Any], cp_rank: int, cp_size: int) -> dict[str, Any]:
    """Return inputs for a model that splits sequences itself: full, of any length, without a trailing padding mask.

    Unless the caller provides the number of tokens of the step, the loss is the mean over the tokens of these
    sequences.

    Raises:
        BadValue: HP102 without `input_ids` or `inputs_embeds`.
        UnsupportedSharding: HP205 for any other mask.
    """
    del cp_rank
    if cp_size <= 1:
        return inputs
    if inputs.get("input_ids") is None and inputs.get("inputs_embeds") is None:
        raise BadValue(
            "cp_size needs `input_ids` or `inputs_embeds`, but the batch has neither",
            got=sorted(inputs),
            hint="cp_size: 1",
        )
    from hyper_parallel.integration.llamafactory.parallel_model import without_padding_mask

    full_inputs = without_padding_mask(inputs)
    labels = full_inputs.get("labels")
    if labels is None:
        return full_inputs
    return {"num_items_in_batch": (labels[:, 1:] != -100).sum().clamp(min=1), **full_inputs}

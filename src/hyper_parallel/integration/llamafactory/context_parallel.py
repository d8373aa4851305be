"""Functions for context parallelism that LlamaFactory's trainer calls.

All ranks of a context-parallel group receive the same full sequences. The parallelized model pads and splits them.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.errors import BadValue
from hyper_parallel.platform import get_platform


def get_cp_rank(hp_args: Any) -> int:
    """Return the context-parallel rank of this process."""
    return get_platform().get_rank() % int(hp_args.cp_size)


def get_dp_rank(hp_args: Any) -> int:
    """Return the data-parallel rank of this process; ranks with the same data-parallel rank read the same sequences."""
    return get_platform().get_rank() // int(hp_args.cp_size)


def get_cp_group_ranks(hp_args: Any) -> tuple[int, ...]:
    """Return the ranks of this rank's context-parallel group, this rank included."""
    first = get_dp_rank(hp_args) * int(hp_args.cp_size)
    return tuple(range(first, first + int(hp_args.cp_size)))


def get_cp_group(hp_args: Any) -> Any:
    """Create and return the process group of `get_cp_group_ranks`; all ranks must call this."""
    import torch.distributed as dist

    return dist.new_subgroups(int(hp_args.cp_size))[0]


def cp_prepare_model(model: Any, accelerator: Any, hp_args: Any) -> Any:
    """Register a forward hook that multiplies the loss of a rank by `cp_size`, unless this is 1; return the model.

    The trainer logs the mean over ranks, but the loss of a sequence is the sum over the context-parallel ranks. The
    factor makes both equal. Gradients are unchanged.
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
    """Return the inputs without an attention mask; the parallelized model splits the sequences.

    If the inputs have labels but no `num_items_in_batch`, the number of labelled tokens of these sequences is added, so
    that the loss is their mean. With `cp_size` 1, the inputs are returned unchanged.

    Raises:
        BadValue: HP102 without `input_ids` and `inputs_embeds`.
        UnsupportedSharding: HP205 for an attention mask that masks other tokens than padding at the end.
    """
    del cp_rank
    if cp_size <= 1:
        return inputs
    if inputs.get("input_ids") is None and inputs.get("inputs_embeds") is None:
        raise BadValue(
            "cp_size needs `input_ids` or `inputs_embeds`, but the batch has neither",
            where="inputs of a batch",
            got=sorted(inputs),
            hint='{"cp_size": 1}',
        )
    from hyper_parallel.integration.llamafactory.parallel_model import without_padding_mask

    full_inputs = without_padding_mask(inputs)
    labels = full_inputs.get("labels")
    if labels is None:
        return full_inputs
    return {"num_items_in_batch": (labels[:, 1:] != -100).sum().clamp(min=1), **full_inputs}

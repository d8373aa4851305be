"""Function for expert parallelism called by LlamaFactory's trainer."""

from __future__ import annotations

from typing import Any


def ep_prepare_model(model: Any, accelerator: Any, hp_args: Any) -> Any:
    """Refuse experts that `ep_size` does not divide, before `fsdp2_prepare_model` splits them.

    Raises:
        UnsupportedSharding: HP205 and other errors of `plan_of` for a model without experts, or an indivisible number.
    """
    import hyper_parallel as hp

    if hp_args.ep_size > 1:
        hp.plan_of(model, hp_args.strategy(accelerator.num_processes))
    return model

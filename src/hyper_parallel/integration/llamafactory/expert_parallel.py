"""Function for expert parallelism that LlamaFactory's trainer calls."""

from __future__ import annotations

from typing import Any


def ep_prepare_model(model: Any, accelerator: Any, hp_args: Any) -> Any:
    """Check that `ep_size` divides the experts of a model, which `fsdp2_prepare_model` later splits; return the model.

    Raises:
        UnsupportedSharding: HP205, or another error of `plan_of`, without experts or for an indivisible number.
    """
    import hyper_parallel as hp

    if hp_args.ep_size > 1:
        hp.plan_of(model, hp_args.strategy(accelerator.num_processes))
    return model

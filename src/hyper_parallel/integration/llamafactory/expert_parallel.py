"""Expert parallelism as LlamaFactory's own trainer asks for it."""

from __future__ import annotations

from typing import Any


def ep_prepare_model(model: Any, accelerator: Any, hp_args: Any) -> Any:
    """Refuse experts that `ep_size` cannot divide before anything is laid out; `fsdp2_prepare_model` then divides them.

    Raises:
        UnsupportedSharding: HP205 and others of `plan_of` for a model without experts, or whose number does not divide.
    """
    import hyper_parallel as hp

    if hp_args.ep_size > 1:
        hp.plan_of(model, hp_args.strategy(accelerator.num_processes))
    return model

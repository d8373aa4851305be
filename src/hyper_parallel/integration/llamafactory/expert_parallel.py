"""Function for expert parallelism that LlamaFactory's trainer calls."""

from __future__ import annotations

from typing import Any


def ep_prepare_model(model: Any, accelerator: Any, hp_args: Any) -> Any:
    """Return the model unchanged, after checking that its experts can be divided among `ep_size` ranks.

    `fsdp2_prepare_model` divides them later.

    Raises:
        HyperParallelError: Errors of `HyperParallelArguments.strategy` and of `plan_of`, for `ep_size` above 1.
    """
    import hyper_parallel as hp
    from hyper_parallel.errors import reported_by
    from hyper_parallel.integration.llamafactory.arguments import OptionNames

    if hp_args.ep_size > 1:
        with reported_by(OptionNames(hp_args)):
            hp.plan_of(model, hp_args.strategy(accelerator.num_processes))
    return model

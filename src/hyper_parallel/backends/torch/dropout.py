"""Deterministic training mode: disable the sources of randomness in the forward of transformers models.

    dropout and stochastic-depth modules   set the probability (`p`, `drop_prob`) to 0
    attributes of other modules            set rates of functional dropout, attention, LayerDrop and router noise to 0
    keys of configs                        set the same rates to 0, because some forwards read them in every pass
    LoRA adapters                          set the dropout rate to 0
    modules that sample in training mode   keep them in evaluation mode

Rates are recognised by their names; `tools/sweeps/dropout.py` measures the effect for every model type.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from torch import nn

_RATE: Final = re.compile(r"drop|jitter", re.IGNORECASE)
"""Pattern of the names of attributes and config keys that are rates."""
_DROPOUT_CLASS: Final = re.compile(r"drop|stochasticdepth", re.IGNORECASE)
"""Pattern of the names of module classes whose rate is an attribute in `_SHORT_NAMES`."""
_SHORT_NAMES: Final = ("p", "prob", "rate")
_AUGMENTATIONS: Final = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")
"""Config keys of random changes to the positions of image patches; None disables them."""
_TASK_HEAD: Final = re.compile(r"^(classifier|cls|summary|seq_classif|qa|pooler)_")
"""Pattern of config keys with rates of task heads. `has_dropout` ignores them: a head has the rate on a module too."""
_SAMPLING_MODULES: Final = ("PhimoeTopKRouter",)
"""Classes that sample experts in training mode; their attribute called jitter is a threshold in both modes."""
_ORIGINAL_RATES: Final = "_hyper_parallel_original_rates"

Rates = list[tuple[tuple[str, ...], str, Any]]
"""Changed rates: path of a config inside the model's config, key, and value before dropout was disabled."""


def disable_dropout(model: nn.Module) -> None:
    """Disable dropout and other randomness of a model in place; `original_config` still returns the original rates."""
    config = getattr(model, "config", None)
    rates: Rates = []
    for path, part in _configs(config):
        for key, value in [*vars(part).items()]:
            off = None if key in _AUGMENTATIONS else _without_rate(key, value)
            if off is not value:
                rates.append((path, key, value))
                setattr(part, key, off)
    model.__dict__[_ORIGINAL_RATES] = rates
    for module in model.modules():
        if type(module).__name__ in _SAMPLING_MODULES:
            _fix_evaluation_mode(module)
            continue
        for name, replacement in _module_rates(module):
            setattr(module, name, replacement)
        adapter = vars(module).get("adapter")
        if adapter is not None and hasattr(adapter, "dropout"):
            vars(module)["adapter"] = replace(adapter, dropout=0.0)


def has_dropout(model: nn.Module, *, adapters: bool = True) -> bool:
    """Return whether a model samples in training mode or has dropout, in LoRA adapters too if `adapters`."""
    for _, part in _configs(getattr(model, "config", None)):
        rates = (k for k, v in vars(part).items() if _without_rate(k, v) is not v)
        if not all(map(_TASK_HEAD.match, rates)):
            return True
    for module in model.modules():
        samples = type(module).__name__ in _SAMPLING_MODULES and "train" not in vars(module)  # not fixed in evaluation
        if samples or next(_module_rates(module), None):
            return True
        if adapters and getattr(vars(module).get("adapter"), "dropout", 0.0):
            return True
    return False


def original_config(model: Any) -> Any:
    """Return the config of a model with its original dropout rates: a copy if `disable_dropout` changed the config."""
    rates: Rates = model.__dict__.get(_ORIGINAL_RATES, [])
    if not rates:
        return model.config
    config = copy.deepcopy(model.config)
    parts = dict(_configs(config))
    for path, key, value in rates:
        setattr(parts[path], key, value)
    return config


def _configs(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield a transformers config and all configs nested in it, each with its path of attribute names."""
    if not hasattr(config, "to_dict"):
        return
    yield path, config
    for key, value in [*vars(config).items()]:
        yield from _configs(value, (*path, key))


def _without_rate(name: str, value: Any) -> Any:
    """Return `value` with its rate, or its list of rates, set to 0; return `value` itself if it has no rate above 0."""
    if not _RATE.search(name):
        return value
    if isinstance(value, float) and 0 < value <= 1:
        return 0.0
    if isinstance(value, (list, tuple)) and all(isinstance(v, float) for v in value) and any(value):
        return type(value)(0.0 for _ in value)
    return value


def _module_rates(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, replacement) for each attribute of a module that is a rate above 0 or contains such rates."""
    is_dropout = _DROPOUT_CLASS.search(type(module).__name__) is not None
    for name, value in [*vars(module).items()]:
        is_rate = is_dropout and name in _SHORT_NAMES and isinstance(value, float) and value
        replacement = 0.0 if is_rate else _without_rate(name, value)
        if replacement is not value:
            yield name, replacement


def _fix_evaluation_mode(module: nn.Module) -> None:
    def train(mode: bool = True) -> nn.Module:
        return nn.Module.train(module, False)

    vars(module)["train"] = train
    module.eval()

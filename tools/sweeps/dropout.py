"""Sweep: with dropout disabled, a forward pass in training mode does not depend on random numbers."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from sweeps.interface import causal_types, image_text_types, one_line, plain_model

TITLE = "Dropout switched off"
TEXT = """
`training.disable_dropout` on the shrunk class in float64, with every rate of its config set to one half. Column `off`:
with different seeds two forward passes in training mode give the same logits, and so does one in evaluation mode.
`skipped`: the class draws nothing in training mode.
"""
COLUMNS = ("off",)
SECONDS = 240
RATES = ("drop", "jitter")
KEPT = ("router_jitter_noise",)
"""A threshold in one type; noise is another key there."""


def model_types() -> list[str]:
    """Return all causal and image-text types; child processes inherit the modules imported here."""
    import hyper_parallel.backends.torch.dropout  # noqa: F401

    return causal_types() + image_text_types()


def with_rates(values: dict[str, Any], rate: float = 0.5) -> dict[str, Any]:
    """Return the config with all dropout rates set to `rate`."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found[key] = value
        if isinstance(value, dict):
            found[key] = with_rates(value, rate)
        elif any(word in str(key) for word in RATES) and key not in KEPT and type(value) in (int, float):
            found[key] = rate
    return found


def logits(model: Any, seed: int) -> Any:
    """Return the logits of fixed tokens, after setting the random seed."""
    import random

    import numpy as np
    import torch
    from census_models import SEQ_LEN

    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    ids = torch.arange(3, 3 + 2 * SEQ_LEN).view(2, SEQ_LEN)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def rated_model(model_type: str) -> Any:
    """Return the shrunk model with every dropout rate that its config class accepts set to 0.5."""
    from census_models import tiny

    values = tiny(model_type)
    rated = with_rates(values)
    try:
        return plain_model(model_type, rated)
    except Exception:
        model = plain_model(model_type)
    accepted = dict(values)
    for key in (k for k in values if values[k] != rated[k]):
        with suppress(Exception):
            model = plain_model(model_type, accepted | {key: rated[key]})
            accepted[key] = rated[key]
    return model


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    import torch

    from hyper_parallel.backends.torch.dropout import disable_dropout, original_config
    from hyper_parallel.backends.torch.forward_variants import keep_float64

    try:
        model = rated_model(model_type)
        keep_float64(model)
        before = logits(model, 1)
    except Exception as error:
        return {"off": f"skipped: {one_line(error)}"}
    if torch.equal(before, logits(model, 2)):
        return {"off": "skipped: draws nothing"}
    model.eval()
    if not torch.equal(logits(model, 1), logits(model, 2)):
        return {"off": "skipped: draws in evaluation mode too"}
    config = model.config.to_dict()
    disable_dropout(model)
    if original_config(model).to_dict() != config:
        return {"off": "wrong: the config of an export differs"}
    model.train()
    first, second = logits(model, 1), logits(model, 2)
    if not torch.equal(first, second):
        return {"off": f"wrong: two seeds differ by {(first - second).abs().max():.1e}"}
    evaluated = logits(model.eval(), 1)
    if not torch.allclose(first, evaluated, rtol=1e-10, atol=1e-12):
        return {"off": f"wrong: evaluation differs by {(first - evaluated).abs().max():.1e}"}
    return {"off": "ok"}

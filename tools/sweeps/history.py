"""Sweep: a forward pass does not depend on earlier passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeps.interface import causal_types, image_text_types, one_line, plain_model

TITLE = "Passes that depend on earlier ones"
TEXT = """
Shrunk classes in float64. A pass over a short text on a new model is compared, bit for bit, with the same pass after
passes over other, longer texts in training and in evaluation mode, after `reset_before_calls`, which every layout
applies. Column `own`: the config as it is. Column `dynamic`: with rotary frequencies that follow the longest text, for
types that have rotary parameters.
"""
COLUMNS = ("own", "dynamic")
SECONDS = 240


def model_types() -> list[str]:
    """Return all causal and image-text types; child processes inherit the modules imported here."""
    import hyper_parallel.backends.torch.rotary_lengths  # noqa: F401

    return causal_types() + image_text_types()


def with_dynamic_rope(values: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config with dynamic RoPE scaling beyond 8 tokens; None for a model without rotary parameters."""
    found, changed = copy.deepcopy(values), False
    new = {"rope_type": "dynamic", "factor": 2.0}
    for part in (found, found.get("text_config") or {}):
        rope = part.get("rope_parameters")
        if not isinstance(rope, dict):
            continue
        if "rope_type" in rope:
            part["rope_parameters"] = rope | new
        else:  # by kind of layer
            part["rope_parameters"] = {k: v | new if isinstance(v, dict) else v for k, v in rope.items()}
        part["max_position_embeddings"], changed = 8, True
    return found if changed else None


def logits(model: Any, length: int, seed: int) -> Any:
    """Return the logits of two random rows of `length` tokens."""
    import torch

    torch.manual_seed(seed)
    ids = torch.randint(3, 290, (2, length))
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def changed_state(model: Any, run_forward: Callable[[], object]) -> tuple[str, ...]:
    """Return the names of buffers and attributes that a forward pass changes and no checkpoint contains.

    Args:
        model: Any module with real buffers.
        run_forward: Function that runs a forward pass of the model.
    """
    from hyper_parallel.backends.torch.rotary_lengths import BUFFER, state_of

    modules = dict(model.named_modules())
    before = {path: copied(state_of(module)) for path, module in modules.items()}
    run_forward()
    names = []
    for path, module in modules.items():
        after = state_of(module)
        for kind, name in {**before[path], **after}:
            if kind == BUFFER and name not in module._non_persistent_buffers_set:
                continue
            old, new = (values.get((kind, name)) for values in (before[path], after))
            if not equal(old, new):
                names.append(f"{path}.{name}".lstrip("."))
    return tuple(sorted(names))


def copied(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return the state of a module with copies of its tensors."""
    from torch import Tensor

    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()}


def equal(value: Any, other: Any) -> bool:
    """Return whether two values of a state are equal, tensors in shape and elements."""
    import torch

    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    return type(value) is type(other) and value == other


def cell(model: Any) -> str:
    """Return the result text of one model, from logits before and after other passes."""
    import torch

    from hyper_parallel.backends.torch.forward_variants import keep_float64
    from hyper_parallel.backends.torch.rotary_lengths import reset_before_calls

    new, used = copy.deepcopy(model), model
    for one in (new, used):
        keep_float64(one)
        reset_before_calls(one)
    try:
        alone = logits(new, 16, 1)
    except Exception as error:
        return f"skipped: {one_line(error)}"
    logits(used.train(), 32, 2)
    logits(used.eval(), 24, 3)
    used.train()
    names = changed_state(used, lambda: logits(used, 32, 2))
    after = logits(used, 16, 1)
    if torch.equal(alone, after):
        return "ok"
    return f"wrong: {(alone - after).abs().max():.1e}, changed {', '.join(names[:3])}"


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    from census_models import tiny

    try:
        values = tiny(model_type)
        cells = {"own": cell(plain_model(model_type))}
    except Exception as error:
        return dict.fromkeys(COLUMNS, f"skipped: {one_line(error)}")
    dynamic = with_dynamic_rope(values)
    if dynamic is None:
        return cells | {"dynamic": "skipped: no rotary parameters"}
    try:
        model = plain_model(model_type, dynamic)
    except Exception as error:
        return cells | {"dynamic": f"skipped: {one_line(error)}"}
    return cells | {"dynamic": cell(model)}

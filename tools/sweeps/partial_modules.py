"""Sweep: two ranks, of which only the first has an image, give the results of one rank with both sequences."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.interface import (
    image_text_types,
    names_of,
    number_of,
    one_line,
    plain_model,
    refusal_or_failure,
)

TITLE = "A tower that one of two ranks uses"
TEXT = (
    "Rank 0 trains on a sequence with an image, rank 1 on text alone: loss and all gradients of two steps of "
    "`forward_backward` under `dp_shard=2` and `dp_replicate=2` equal those of one rank with both sequences, in "
    "float64, relative 1e-9 of the largest gradient. `pp=2` and `cp=2` with an image are right or refused. Images are "
    "random and their form is found by trial; a type for which no form is found is skipped."
)
COLUMNS = ("dp_shard", "dp_replicate", "accumulation", "pp", "cp")
SECONDS = 240
_STRATEGIES = {
    "dp_shard": "dp_shard=2", "dp_replicate": "dp_replicate=2", "accumulation": "dp_shard=2",
    "pp": "pp=2", "cp": "cp=2",
}  # fmt: skip
_LENGTH = 48


def model_types() -> list[str]:
    """Return the image-text types."""
    return image_text_types()


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    try:
        model = plain_model(model_type)
        image = image_batch(model)
    except Exception as error:
        return dict.fromkeys(COLUMNS, f"skipped: {one_line(error)}")
    if image is None:
        return dict.fromkeys(COLUMNS, "skipped: no form of an image was found by trial")
    return {column: _cell(model, image, column) for column in COLUMNS}


def image_batch(model: Any) -> dict[str, Any] | None:
    """Return a sequence with an image whose loss has gradients in the tower; None if no trial succeeds."""
    import torch

    vision = [n for n, _ in model.named_parameters() if "vis" in n.lower() or "image" in n.lower()]
    for extra, tokens in _image_forms(model):
        batch = _sequence(model, extra, tokens)
        trial = copy.deepcopy(model)
        try:
            torch.manual_seed(0)
            trial(**_accepted(trial, batch), use_cache=False).loss.backward()
        except Exception:  # another form
            continue
        found = dict(trial.named_parameters())
        if any(found[n].grad is not None and found[n].grad.abs().sum() > 0 for n in vision):
            return batch
    return None


def _image_forms(model: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield image inputs, and the number of image tokens that the model computes from them."""
    import torch

    config = model.config
    vision = getattr(config, "vision_config", None) or config
    patch = number_of(vision, ("patch_size",), 4)
    side = number_of(vision, ("image_size", "max_image_size"), 16)
    frames = number_of(vision, ("temporal_patch_size",), 2)
    channels = number_of(vision, ("in_channels", "num_channels", "in_chans"), 3)
    merge = number_of(vision, ("spatial_merge_size",), 2)
    generator = torch.Generator().manual_seed(1)

    def pixels(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    grid = torch.tensor([[1, 2 * merge, 2 * merge]])
    patches = 4 * merge * merge
    forms: list[dict[str, Any]] = [
        {"pixel_values": pixels(patches, channels * frames * patch**2), "image_grid_thw": grid},
        {"pixel_values": pixels(patches, channels * patch**2), "image_grid_thw": grid},
        {"pixel_values": pixels(patches, channels, patch, patch), "image_grid_thw": grid},
    ]
    sizes = torch.tensor([[side, side]])
    for shape in itertools.product((1,), (channels,), (side,), (side,)):
        one = pixels(*shape)
        several = pixels(1, 2, *shape[1:])
        ones = torch.ones(1, 2, side, side, dtype=torch.bool)
        forms += [
            {"pixel_values": one},
            {"pixel_values": one, "image_sizes": sizes},
            {"pixel_values": one, "image_sizes": sizes.tolist()},
            {"pixel_values": several, "image_sizes": sizes},
            {"pixel_values": several},
            {"pixel_values": several, "pixel_attention_mask": ones},
            {"pixel_values": one, "spatial_shapes": sizes // patch},
        ]
    counted = [(form, tokens) for form in forms if (tokens := _image_tokens(model, form))]
    yield from counted
    if not counted:
        yield from itertools.product(forms, (16, 4, 1, 0))


def _image_tokens(model: Any, form: dict[str, Any]) -> int | None:
    """Return the number of tokens that the model computes from an image; None if it cannot be determined."""
    import torch

    base = next((m for m in model.modules() if hasattr(m, "get_image_features")), None)
    if base is None:
        return None
    width = model.get_input_embeddings().weight.shape[1]
    try:
        with torch.no_grad():
            given = {k: v for k, v in form.items() if k in names_of(base.get_image_features)}
            features = base.get_image_features(**given)
    except Exception:
        return None
    features = getattr(features, "pooler_output", features)
    parts = features if isinstance(features, (tuple, list)) else [features]
    sizes = [p.numel() for p in parts if hasattr(p, "numel")]
    return sum(sizes) // width if sizes else None


def _sequence(model: Any, extra: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return a batch of one sequence with `tokens` image tokens."""
    import torch

    image = number_of(model.config, ("image_token_id", "image_token_index"), -1)
    ids = torch.arange(3, 3 + _LENGTH)[None] % 200 + 3
    ids[ids == image] = 3
    types = torch.zeros_like(ids)
    if image >= 0:
        ids[0, 2 : 2 + tokens] = image
        types[0, 2 : 2 + tokens] = 1
    labels = torch.where(ids == image, -100, ids)
    more = {"mm_token_type_ids": types, "token_type_ids": types}
    more = {k: v for k, v in more.items() if k in names_of(model.forward)}
    return {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": torch.ones_like(ids),
        **more,
        **extra,
    }


def _text(model: Any, shift: int) -> dict[str, Any]:
    batch = _sequence(model, {}, 0)
    batch["input_ids"] = (batch["input_ids"] + shift) % 200 + 3
    batch["labels"] = batch["input_ids"].clone()
    return batch


def _cell(model: Any, image: dict[str, Any], column: str) -> str:
    import hyper_parallel as hp
    from hyper_parallel.errors import RankFailed

    texts = [_text(model, shift) for shift in range(3)]
    several = column == "accumulation"
    mine = [[texts[2], image], texts[:2]] if several else [[image], [texts[0]]]
    share = column not in ("pp", "cp")
    strategy = _STRATEGIES[column]

    def train(network: Any, microbatches: list[dict[str, Any]]) -> list[Any]:
        results = []
        for _ in range(2):
            loss = hp.forward_backward(network, [_accepted(network, m) for m in microbatches])
            gradients = {
                n: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
                for n, p in network.named_parameters() if p.grad is not None
            }  # fmt: skip
            results.append((float(loss), gradients))
            network.zero_grad()
        return results

    def rank(number: int) -> list[Any]:
        with hp.World.join("cpu") as world:
            network = copy.deepcopy(model)
            hp.parallelize(network, hp.plan_of(network, strategy), world)
            return train(network, mine[number] if share else mine[0] + mine[1])

    try:
        alone = hp.parallelize(copy.deepcopy(model), hp.plan_of(model, ""), hp.World.join("cpu"))
        expected = train(alone, [m for part in mine for m in part])
    except Exception as error:
        return f"skipped: {one_line(error)}"
    try:
        hp.plan_of(model, strategy)
        found = hp.launch(rank, 2, timeout_s=60)
    except RankFailed as error:
        lines = [line for line in error.what.splitlines() if line.strip()]
        return f"fails: {lines[-2 if len(lines) > 2 else -1][:160]}"
    except Exception as error:
        return refusal_or_failure(error)
    return _compare(expected, found, share)


def _compare(expected: list[Any], found: list[list[Any]], whole: bool) -> str:
    import torch

    for steps in found:
        for (loss, gradients), (wanted, right) in zip(steps, expected, strict=True):
            if abs(loss - wanted) > 1e-9 * abs(wanted):
                return f"wrong: loss {loss:.8g} for {wanted:.8g}"
            if whole and gradients.keys() != right.keys():
                return f"wrong: gradients of {sorted(gradients.keys() ^ right.keys())[:2]}"
            largest = max(float(g.abs().max()) for g in right.values())
            for name, gradient in gradients.items():
                if not torch.allclose(gradient, right[name], rtol=1e-8, atol=1e-9 * largest):
                    error = float((gradient - right[name]).abs().max())
                    return f"wrong: gradient of {name} off by {error:.3g}"
    return "ok"


def _accepted(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    names = names_of(model.forward)
    return {k: v for k, v in batch.items() if k in names or "kwargs" in names}

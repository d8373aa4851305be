"""Batches with an image or a recording for a model of transformers, made from its config and its forward's arguments.

No processor is needed. Layouts of the media are tried until one is found on which plain transformers trains: the loss
is finite, has gradients, and differs between two draws of the media.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from sweeps.interface import names_of, number_of
from torch import Tensor

TEXT_TOKENS = 12
Batch = dict[str, Any]
_ARRAYS = {
    "image": ("pixel_values", "image_pixel_values", "flattened_patches", "image_patches"),
    "audio": ("input_features", "audio_input_features", "input_values", "audio_input_ids"),
}
"""Names under which forwards read media, by kind."""
_PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}
_STARTS = {
    "image": ("vision_start_token_id", "image_start_token_id"),
    "audio": ("audio_start_token_id",),
}
_OF_PIXELS = {"image_sizes", "pixel_attention_mask"}
"""Arrays that describe images of pixels as well as images of patches."""
_PATCHES = {"image_patches", "flattened_patches"}
_TYPES = {"image": 1, "audio": 3}
"""Values of `mm_token_type_ids`, as processors give them."""


def name_placeholders(config: Any) -> None:
    """Give a token to placeholders that the config of a type leaves open."""
    for name in (*_PLACEHOLDERS["image"], *_PLACEHOLDERS["audio"]):
        if getattr(config, name, 0) is None:
            setattr(config, name, 301)


def kinds(model: Any) -> list[str]:
    """Return the kinds of media that the forward of a model reads."""
    known = names_of(model.forward)
    return [kind for kind, arrays in _ARRAYS.items() if known & {*arrays}]


def media_batches(model: Any, kind: str) -> tuple[list[Batch] | None, str]:
    """Return two batches of one sequence with media of a kind, or None, and the first reason of plain transformers."""
    reason = best = ""
    for form, companions in _forms(model, kind):
        try:
            counts = _counts(model, kind, {**form, **companions})
        except Exception as error:  # another layout
            reason = reason or f"get_{kind}_features: {_first_line(error)}"
            continue
        for count in counts:
            batches = [_sequence(model, kind, form, companions, count, seed) for seed in (1, 2)]
            try:
                if _trains(model, batches[0], form):
                    return batches, ""
                best = best or "the media do not change the loss, or a gradient is not finite"
            except Exception as error:  # another layout
                best = best or _first_line(error)
            finally:
                model.zero_grad()
    return None, best or reason or "no layout of the media is known"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:140]}"


def accepted(model: Any, batch: Batch) -> Batch:
    """Return the items of a batch that the forward of a model reads."""
    names = names_of(model.forward)
    return {k: v for k, v in batch.items() if k in names}


def _trains(model: Any, batch: Batch, form: Batch) -> bool:
    """Return whether a step gives finite gradients, and another loss with other media."""
    losses = []
    for media in (form, _redrawn(form, 5)):
        torch.manual_seed(0)
        loss = model(**accepted(model, {**batch, **media}), use_cache=False).loss
        losses.append(float(loss.detach()))
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    finite = bool(grads) and all(bool(g.isfinite().all()) for g in grads)
    return finite and all(map(math.isfinite, losses)) and abs(losses[0] - losses[1]) > 1e-12


def _redrawn(form: Batch, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {
        n: torch.randn(v.shape, generator=generator, dtype=torch.float64)
        if v.is_floating_point()
        else torch.randint(0, 4, v.shape, generator=generator)
        for n, v in form.items()
    }


def _counts(model: Any, kind: str, inputs: Batch) -> list[int]:
    """Return candidates for the number of placeholder tokens of the media; raise if the encoder raises."""
    method = f"get_{kind}_features"
    owner = next((m for m in model.modules() if hasattr(m, method)), None)
    if owner is None:
        return [0, 16, 4, 1]
    function = getattr(owner, method)
    with torch.no_grad():
        features = function(**{k: v for k, v in inputs.items() if k in names_of(function)})
    width = model.get_input_embeddings().weight.shape[1]
    pooled = getattr(features, "pooler_output", None)
    features = getattr(features, "last_hidden_state", features) if pooled is None else pooled
    parts = features if isinstance(features, (tuple, list)) else [features]
    tensors = [p for p in parts if isinstance(p, Tensor)]
    elements = sum(t.numel() for t in tensors)
    discrete = bool(tensors) and not tensors[0].is_floating_point()
    exact = elements if discrete else elements // width
    return [exact] if exact <= 600 else []


def _sequence(
    model: Any, kind: str, form: Batch, companions: Batch, count: int, seed: int
) -> Batch:
    """Return a batch of one sequence with `count` placeholders and text on both sides."""
    config, placeholder = model.config, _placeholder(model, kind)
    start = number_of(config, _STARTS[kind], -1)
    media = [] if placeholder is None else [placeholder] * count
    head = [1, 5 + seed] + ([start] if start >= 0 and media else [])
    words = [(7 * i + 11 * seed) % 200 + 5 for i in range(TEXT_TOKENS)]
    ids = torch.tensor([head + media + words])
    labels = ids.clone()
    labels[0, : len(head) + len(media)] = -100
    types = torch.zeros_like(ids)
    types[0, len(head) : len(head) + len(media)] = 1
    more: Batch = {
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types * _TYPES[kind],
        "moe_mm_token_type_ids": types,
        "token_type_ids": types,
        "image_embeds_position_mask": types.bool(),
        "image_attention_mask": torch.ones(1, ids.shape[1], 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 2, dtype=torch.long),
        "decoder_input_ids": ids,
        "qformer_input_ids": ids[:, -TEXT_TOKENS:],
    }
    media_inputs = {**companions, **_redrawn(form, seed)}
    return accepted(model, {"input_ids": ids, "labels": labels, **more, **media_inputs})


def _placeholder(model: Any, kind: str) -> int | None:
    number = number_of(model.config, _PLACEHOLDERS[kind], -1)
    return None if number < 0 else number


def _forms(model: Any, kind: str) -> Iterator[tuple[Batch, Batch]]:
    """Yield arrays of media and the arrays that describe them."""
    known = names_of(model.forward)
    name = next(n for n in _ARRAYS[kind] if n in known)
    forms = _image_forms(model) if kind == "image" else _audio_forms(model)
    for shape, companions in forms:
        arrays = {name: torch.empty(shape, dtype=torch.float64)}
        if name == "audio_input_ids":
            arrays = {name: torch.empty(shape, dtype=torch.long)}
        for further in ("pixel_values_local", "high_res_pixel_values"):
            if further in known:
                arrays[further] = torch.empty(companions.pop(further, shape), dtype=torch.float64)
        yield _redrawn(arrays, 1), {k: v for k, v in companions.items() if k in known}


def _image_forms(model: Any) -> Iterator[tuple[tuple[int, ...], Batch]]:
    vision = _part(model.config, ("vision", "image", "vq", "encoder"))
    patch = number_of(vision, ("patch_size",), 4)
    side = number_of(vision, ("image_size", "max_image_size"), 16)
    frames = number_of(vision, ("temporal_patch_size",), 2)
    channels = number_of(vision, ("in_channels", "num_channels", "in_chans"), 3)
    merge = number_of(vision, ("spatial_merge_size", "merge_size"), 2)
    for cells in (2 * merge, 4 * merge, 4):
        count, grid = cells * cells, torch.tensor([[1, cells, cells]])
        positions = torch.cartesian_prod(torch.arange(cells), torch.arange(cells))[None]
        described = {
            "image_grid_thw": grid,
            "image_grid_hw": grid[:, 1:],
            "spatial_shapes": grid[:, 1:],
            "target_sizes": grid[:, 1:],
            "image_sizes": grid[:, 1:] * patch,
            "image_position_ids": positions,
            "image_merge_sizes": torch.tensor([merge]),
            "pixel_attention_mask": torch.ones(1, count, dtype=torch.long),
        }
        if (described.keys() - _OF_PIXELS | _PATCHES) & names_of(model.forward):
            flat = channels * patch**2
            for shape in (
                (count, frames * flat), (count, flat), (count, channels, patch, patch),
                (count, channels, frames, patch, patch), (1, count, flat), (count, frames, channels, patch, patch),
                (1, channels, patch, patch * count), (count, 1, channels, patch, patch),
            ):  # fmt: skip
                yield shape, described
    known = names_of(model.forward)
    for pixels in dict.fromkeys((side, 4 * patch, 16, 32, 64)):
        sizes = torch.tensor([[pixels, pixels]])
        for tiles in ((1,), (1, 2), (1, 1), (2,), (1, 1, 2), (3,)):
            masks = torch.ones(*tiles, pixels, pixels, dtype=torch.bool)
            for listed in (False, True)[: 1 + bool({"image_sizes", "num_local_patches"} & known)]:
                yield (
                    (*tiles, channels, pixels, pixels),
                    {
                        "image_sizes": sizes.tolist() if listed else sizes,
                        "pixel_attention_mask": masks,
                        "pixel_mask": masks,
                        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
                        "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
                        "num_local_patches": torch.tensor([1]) if not listed else [1],
                    },
                )


def _audio_forms(model: Any) -> Iterator[tuple[tuple[int, ...], Batch]]:
    audio = _part(model.config, ("audio", "encoder", "speech"))
    mels = number_of(
        audio, ("num_mel_bins", "input_feat_size", "input_size", "n_mels", "input_dim"), 8
    )
    limit = number_of(audio, ("max_source_positions",), 16)
    for frames in dict.fromkeys((2 * limit, 32, 64, 100, 128, 200)):
        for shape in (
            (1, mels, frames),
            (1, frames, mels),
            (frames, mels),
            (1, frames * 16),
            (1, 1, frames * 16),
        ):
            for size in dict.fromkeys((frames, shape[-1])):
                ones = torch.ones(1, size, dtype=torch.long)
                yield (
                    shape,
                    {
                        "feature_attention_mask": ones,
                        "input_features_mask": ones.bool(),
                        "audio_attention_mask": ones.bool(),
                        "padding_mask": ones,
                        "input_values_mask": ones,
                        "audio_embed_sizes": torch.tensor([frames // 8]),
                        "audio_feature_lengths": torch.tensor([frames]),
                    },
                )


def _part(config: Any, words: tuple[str, ...]) -> Any:
    """Return the first part of a config whose key has one of the words; else the config."""
    keys = [k for k in getattr(config, "sub_configs", {}) if getattr(config, k, None) is not None]
    found = next((k for word in words for k in keys if word in k), None)
    return config if found is None else getattr(config, found)

"""Random batches with an image or an audio recording, for any multimodal model type of transformers.

The type's own processor creates the media inputs, with sizes from the config. For types without a suitable processor,
candidate inputs (forms) are derived from the config and the arguments of the forward. Forms are tried until plain
transformers trains on one: the loss is finite, has gradients, and differs between two random media.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy
import torch
import transformers
from PIL import Image
from sweeps.interface import names_of, number_of
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.forward_variants import KeepFloat64

TEXT_TOKENS = 12
MOST_TOKENS = 600
"""Most placeholder tokens of one image or recording."""
MOST_ELEMENTS = 2**18
"""Most elements of media that are tried before all others."""
Batch = dict[str, Any]
Draw = Callable[[int], Batch]
"""Function from a seed to media, with the arrays that describe them."""
_ARRAYS = {
    "image": ("pixel_values", "image_pixel_values", "flattened_patches", "image_patches"),
    "audio": ("input_features", "audio_input_features", "input_values", "audio_input_ids"),
}
"""Names under which forwards read media, by kind."""
_PLACEHOLDERS = {
    "image": (
        *("image_token_id", "image_token_index", "media_placeholder_token_id", "im_patch_id"),
        "video_token_index",
    ),
    "audio": ("audio_token_id", "audio_token_index"),
}
_STARTS = {
    "image": ("vision_start_token_id", "image_start_token_id"),
    "audio": ("audio_start_token_id",),
}
_OF_PIXELS = {"image_sizes", "pixel_attention_mask"}
"""Arrays that describe images of pixels as well as images of patches."""
_PATCHES = {"image_patches", "flattened_patches"}
_MASKS = {
    *("feature_attention_mask", "input_features_mask", "audio_attention_mask", "padding_mask"),
    *("input_values_mask", "flattened_attention_mask", "image_attention_mask"),
}
"""Argument names in forwards for the `attention_mask` that a media processor returns."""
_MELS = ("num_mel_bins", "input_feat_size", "n_mels", "n_mel_bins", "mel_bins", "feature_size")
"""Names of the number of frequencies of a recording."""
_TYPES = {"image": 1, "audio": 3}
"""Values of `mm_token_type_ids`, as processors give them."""


def name_placeholders(config: Any) -> None:
    """Set the placeholder tokens of media that the config of a type does not define."""
    for name in (*_PLACEHOLDERS["image"], *_PLACEHOLDERS["audio"]):
        if getattr(config, name, 0) is None:
            setattr(config, name, 301)
    if getattr(config, "image_grid_pinpoints", None):
        side = number_of(_part(config, ("vision",)), ("image_size",), 16)
        config.image_grid_pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    of_thinker = "omni" in config.model_type and config.model_type.endswith("thinker")
    published = {"vision_start_token_id": 318} if of_thinker else {}
    for name, value in {**published, "ignore_index": -100}.items():
        if not hasattr(config, name):
            setattr(config, name, value)


def kinds(model: Any) -> list[str]:
    """Return the kinds of media that the forward of a model reads."""
    known = names_of(model.forward)
    return [kind for kind, arrays in _ARRAYS.items() if known & {*arrays}]


def media_batches(model: Any, kind: str) -> tuple[list[Batch] | None, str]:
    """Return two batches of one sequence with media of a kind, and ""; without such batches, None and the reason."""
    reason = best = ""
    for draw in sorted((*_processed(model, kind), *_forms(model, kind)), key=_is_large):
        try:
            counts = _counts(model, kind, {**_sequence(model, kind, draw, 1, 1), **draw(1)})
        except Exception as error:  # another layout
            reason = reason or f"get_{kind}_features: {_first_line(error)}"
            continue
        trials, attempts = [(draw, count, words) for count, words in reversed(counts)], set[int]()
        while trials:
            form, count, words = trials.pop()
            attempts.add(count)
            batches = [_sequence(model, kind, form, count, seed, words) for seed in (1, 2)]
            try:
                if _trains(model, batches[0], form):
                    return batches, ""
                best = best or "the media do not change the loss, or a gradient is not finite"
            except Exception as error:  # another layout
                best = best or _first_line(error)
                trials += _retries(error, form, attempts)
            finally:
                model.zero_grad()
    return None, best or reason or "no layout of the media is known"


def _is_large(draw: Draw) -> bool:
    """Return whether media have more than `MOST_ELEMENTS` elements, as from a processor with a fixed size of images.

    The encoder of a shrunk model takes minutes on such media, and usually accepts smaller media too.
    """
    return sum(v.numel() for v in draw(1).values() if isinstance(v, Tensor)) > MOST_ELEMENTS


def _retries(error: Exception, draw: Draw, attempts: set[int]) -> list[tuple[Draw, int, int]]:
    """Return further trials (form, placeholders, words), derived from an error about feature counts or mask shapes."""
    matches = re.findall(
        r"features:? (?:of )?(\d+)|value tensor of shape \[(\d+)|\[\d+, (\d+), \d+\] at index 1",
        str(error),
    )
    numbers = {int(next(filter(None, groups))) for groups in matches} - {0}
    trials = [(draw, n, TEXT_TOKENS) for n in sorted(numbers - attempts) if n <= MOST_TOKENS]
    if "shape of the mask" in str(error) and getattr(draw, "func", None) is not _masked:
        trials += [(functools.partial(_masked, draw, n), n, TEXT_TOKENS) for n in sorted(numbers)]
    return trials


def _masked(draw: Draw, count: int, seed: int) -> Batch:
    """Return random media with masks of one element per placeholder."""
    media = draw(seed)
    names = _MASKS & media.keys()
    return {**media, **{n: torch.ones(1, count, dtype=media[n].dtype) for n in names}}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:140]}"


def accepted(model: Any, batch: Batch) -> Batch:
    """Return the items of a batch that the forward of a model accepts."""
    names = names_of(model.forward)
    return {k: v for k, v in batch.items() if k in names}


def _trains(model: Any, batch: Batch, draw: Draw) -> bool:
    """Return whether a step gives finite gradients, and a different loss with different media."""
    losses = []
    for media in (draw(1), draw(5)):
        torch.manual_seed(0)
        loss = model(**accepted(model, {**batch, **media}), use_cache=False).loss
        losses.append(float(loss.detach()))
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    finite = bool(grads) and all(bool(g.isfinite().all()) for g in grads)
    return finite and all(map(math.isfinite, losses)) and abs(losses[0] - losses[1]) > 1e-12


def _drawn(form: Batch, described: Batch, seed: int) -> Batch:
    """Return media arrays with random values, together with the arrays that describe them, such as grid sizes."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {
        n: torch.randn(v.shape, generator=generator, dtype=torch.float64)
        if v.is_floating_point()
        else torch.randint(0, 4, v.shape, generator=generator)
        for n, v in form.items()
    }
    return {**described, **drawn}


def _counts(model: Any, kind: str, inputs: Batch) -> list[tuple[int, int]]:
    """Return candidate pairs of placeholder and word counts, from the encoder's output; raises the encoder's errors."""
    method = f"get_{kind}_features"
    functions = [getattr(m, method) for m in model.modules() if hasattr(m, method)]
    if not functions:
        latents = number_of(model.config, ("latent_query_num",), 2)
        return [(count, TEXT_TOKENS) for count in (0, 16, 4, 1, latents)]
    function = max(functions, key=lambda f: len(names_of(f)))  # others pass all arguments on
    with torch.no_grad(), KeepFloat64():
        output = function(**{k: v for k, v in inputs.items() if k in names_of(function)})
    width = model.get_input_embeddings().weight.shape[1]
    pooled = getattr(output, "pooler_output", None)
    features = getattr(output, "last_hidden_state", output) if pooled is None else pooled
    parts = features if isinstance(features, (tuple, list)) else [features]
    tensors = [p for p in parts if isinstance(p, Tensor)]
    discrete = bool(tensors) and not tensors[0].is_floating_point()
    sizes = [sum(t.numel() for t in tensors)]
    if not tensors:  # features of several decoder layers, one placeholder for each position
        sizes = [t.numel() for t in tree_leaves([*output.values()]) if isinstance(t, Tensor)]
    exact = {size if discrete else size // width for size in sizes}
    counts = [(count, TEXT_TOKENS) for count in sorted(exact) if count <= MOST_TOKENS]
    if _placeholder(model, kind) is None:  # features that are added to all tokens
        counts += [(0, count - len(_HEAD)) for count, _ in counts if count > 2 * len(_HEAD)]
    return counts


_HEAD = (1, 5)
"""Tokens in front of the media; the last one differs between sequences."""


def _sequence(model: Any, kind: str, draw: Draw, count: int, seed: int, num_words: int = TEXT_TOKENS) -> Batch:
    """Return a batch of one sequence with `count` placeholders and text on both sides."""
    config, placeholder = model.config, _placeholder(model, kind)
    start = number_of(config, _STARTS[kind], -1)
    if placeholder is None and "image_embeds_position_mask" in names_of(model.forward):
        placeholder = 4  # any token: the mask gives the places
    media = [] if placeholder is None else [placeholder] * count
    head = [_HEAD[0], _HEAD[1] + seed] + ([start] if start >= 0 and media else [])
    words = [(7 * i + 11 * seed) % 200 + 5 for i in range(num_words)]
    ids = torch.tensor([head + media + words])
    labels = ids.clone()
    labels[0, : len(head) + len(media)] = -100
    tiles = number_of(_part(config, ("vision",)), ("max_num_tiles",), 2)
    types = torch.zeros_like(ids)
    types[0, len(head) : len(head) + len(media)] = 1
    more: Batch = {
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": types * _TYPES[kind],
        "moe_mm_token_type_ids": types,
        "token_type_ids": types,
        "bbox": torch.zeros(1, ids.shape[1], 4, dtype=torch.long),
        "image_embeds_position_mask": types.bool(),
        "image_attention_mask": torch.ones(1, ids.shape[1], 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, tiles, dtype=torch.long),
        "decoder_input_ids": ids,
        "qformer_input_ids": ids[:, -num_words:],
    }
    return accepted(model, {"input_ids": ids, "labels": labels, **more, **draw(seed)})


def _placeholder(model: Any, kind: str) -> int | None:
    words = ("vision", "image") if kind == "image" else ("audio",)
    part = number_of(_part(model.config, words), _PLACEHOLDERS[kind], -1)
    number = number_of(model.config, _PLACEHOLDERS[kind], part)
    return None if number < 0 else number


def _processed(model: Any, kind: str) -> Iterator[Draw]:
    """Yield functions from a seed to the output of the type's own processor on a random image or recording."""
    from transformers.models.auto import feature_extraction_auto, image_processing_auto

    listed: Any = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    if kind == "audio":
        listed = feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES
    model_type = model.config.model_type
    name = listed.get(model_type) or listed.get(model_type.removesuffix("_thinker"))
    if isinstance(name, dict):  # a processor of Pillow where torchvision is not installed
        name = name.get("torchvision" if find_spec("torchvision") else "pil")
    if name is None:
        return
    cls = getattr(transformers, name)
    names = names_of(model.forward)
    make = _image_output if kind == "image" else _audio_output
    for scale in (1, 2, 4):
        try:
            draw = functools.partial(make, cls, model.config, scale, names)
            draw(1)
        except Exception:  # the processor needs other arguments
            continue
        yield draw


def _image_output(cls: Any, config: Any, scale: int, names: set[str], seed: int) -> Batch:
    """Return the output of an image processor for a random image."""
    vision = _part(config, ("vision", "image", "vq", "encoder"))
    patch = number_of(vision, ("patch_size",), 4)
    if flat := number_of(vision, ("patch_embed_hidden_size",), 0):
        patch = math.isqrt(flat // 3)
    merge = number_of(vision, ("spatial_merge_size", "merge_size", "merge_kernel_size"), 2)
    side = number_of(vision, ("image_size", "max_image_size"), 4 * patch)
    own: Batch = {
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": number_of(vision, ("temporal_patch_size",), 2),
        "pooling_kernel_size": number_of(vision, ("pooling_kernel_size",), 2),
        "max_image_tiles": number_of(vision, ("max_num_tiles",), 2),
        "image_grid_pinpoints": getattr(config, "image_grid_pinpoints", None),
        "scale_resolution": side,
        "max_patches": 16,
        "max_soft_tokens": 70 * scale,
        "dynamic_hd": 1,
        "max_crops": 1,
        "overlap_margins": [1, 1],
        "min_pixels": (2 * merge * patch) ** 2,
        "max_pixels": (2 * merge * patch * scale) ** 2,
    }
    default = cls()
    options = {k: v for k, v in own.items() if getattr(default, k, None) is not None}
    if isinstance(getattr(default, "patch_size", None), dict):
        options["patch_size"] = {"height": patch, "width": patch}
    for key in ("size", "crop_size"):
        given = {k: v for k, v in dict(getattr(default, key, None) or {}).items() if v}
        if max(given.values(), default=0) > 10_000:  # numbers of pixels
            given = dict.fromkeys(given, (2 * merge * patch * scale) ** 2)
        if given:
            options[key] = {k: v if v > 10_000 else side for k, v in given.items()}
            if max(given.values()) == (2 * merge * patch * scale) ** 2:
                options[key] = given
    pixels = numpy.random.default_rng(seed).integers(0, 255, (side * scale,) * 2 + (3,))
    image = Image.fromarray(pixels.astype(numpy.uint8))
    return _as_inputs(cls(**options)(images=[image], return_tensors="pt"), names)


def _audio_output(cls: Any, config: Any, scale: int, names: set[str], seed: int) -> Batch:
    """Return the output of a feature extractor for a random recording."""
    audio = _part(config, ("audio", "encoder", "speech"))
    default = cls()
    rate = getattr(default, "sampling_rate", 16_000)
    hop = getattr(default, "hop_length", 160)
    frames = 2 * number_of(audio, ("max_source_positions",), 32) * scale
    mels = _inner_number(audio, _MELS)
    options: Batch = {"feature_size": mels} if mels and hasattr(default, "feature_size") else {}
    if hasattr(default, "chunk_length") and default.chunk_length:
        options["chunk_length"] = frames * hop / rate
    wave = numpy.random.default_rng(seed).standard_normal(frames * hop).astype(numpy.float32)
    extra = {"return_attention_mask": True} if hasattr(default, "return_attention_mask") else {}
    output = cls(**options)(wave, sampling_rate=rate, return_tensors="pt", **extra)
    return _as_inputs(output, names)


def _as_inputs(output: Any, names: set[str]) -> Batch:
    """Return a processor's output under the argument names of the forward, with floating-point values in float64."""
    inputs: Batch = {}
    for name, value in dict(output).items():
        masks = _MASKS & names if name == "attention_mask" else {name}
        value = value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        inputs |= dict.fromkeys(masks, value)
    return inputs


def _forms(model: Any, kind: str) -> Iterator[Draw]:
    """Yield functions from a seed to random media arrays and the arrays that describe them, in several forms."""
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
        described = {k: v for k, v in companions.items() if k in known}
        yield functools.partial(_drawn, arrays, described)


def _image_forms(model: Any) -> Iterator[tuple[tuple[int, ...], Batch]]:
    vision = _part(model.config, ("vision", "image", "vq", "encoder"))
    patch = number_of(vision, ("patch_size",), 4)
    side = number_of(vision, ("image_size", "max_image_size"), 16)
    frames = number_of(vision, ("temporal_patch_size",), 2)
    channels = number_of(vision, ("in_channels", "num_channels", "in_chans"), 3)
    merge = number_of(vision, ("spatial_merge_size", "merge_size", "merge_kernel_size"), 2)
    patches: list[tuple[tuple[int, ...], Batch]] = []
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
        flat, wide = channels * patch**2, merge * patch
        shapes = (
            (count, frames * flat), (count, flat), (count, channels, patch, patch),
            (count, channels, frames, patch, patch), (1, count, flat), (count, frames, channels, patch, patch),
            (1, channels, patch, patch * count), (count, 1, channels, patch, patch), (count, wide, wide, channels),
            (count, frames, patch, patch, channels),
        )  # fmt: skip
        if (described.keys() - _OF_PIXELS | _PATCHES) & names_of(model.forward):
            yield from ((shape, described) for shape in shapes)
        elif cells == 4:
            patches += [(shape, described) for shape in shapes if len(shape) > 4]
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
    yield from patches


def _audio_forms(model: Any) -> Iterator[tuple[tuple[int, ...], Batch]]:
    audio = _part(model.config, ("audio", "encoder", "speech"))
    numbers = (_inner_number(audio, names) for names in (_MELS, ("input_size", "input_dim")))
    widths = [number for number in dict.fromkeys(numbers) if number] or [128, 8]
    limit = number_of(audio, ("max_source_positions",), 16)
    hop = number_of(audio, ("hop_length",), 160)
    for frames, mels in itertools.product(dict.fromkeys((2 * limit, 32, 64, 100, 112, 128, 200)), widths):
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
                        "chunk_sample_lengths": torch.tensor([frames * hop]),
                    },
                )


def _part(config: Any, words: tuple[str, ...]) -> Any:
    """Return the first sub-config whose key contains one of the words; else the config itself."""
    keys = [k for k in getattr(config, "sub_configs", {}) if getattr(config, k, None) is not None]
    found = next((k for word in words for k in keys if word in k), None)
    if found is not None:
        return getattr(config, found)
    inner = (_part(getattr(config, key), words) for key in keys)
    return next((p for key, p in zip(keys, inner, strict=True) if p is not getattr(config, key)), config)


def _inner_number(config: Any, names: tuple[str, ...]) -> int:
    """Return the first number under one of the names in a config or its sub-configs, or 0."""
    parts = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
    inner = (_inner_number(part, names) for part in parts if part is not None)
    return number_of(config, names, 0) or next(filter(None, inner), 0)

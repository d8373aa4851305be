"""Towers: encoders of images or audio in a multimodal model, described as separate models for planning.

The planner predicts the cost of a tower like that of a language model. An image or recording is a sequence, and a
patch or audio frame is a token.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hyper_parallel.model._model_spec import AttentionSpec, Block, MlpSpec, ModelSpec, ParamSpec

_KINDS: Final = {"vision": re.compile("vis|image"), "audio": re.compile("audio|speech")}
"""Patterns of module names by kind of tower; the config section of a tower is `<kind>_config`."""
_PROJECTOR: Final = re.compile("projector|merger|adapter|connector|aligner")
_LAYER: Final = re.compile(r"^(.*?)\.(\d+)\.(.+)$")
_HEADS: Final = ("num_heads", "num_attention_heads", "encoder_attention_heads", "attention_heads")
IMAGE_SIZE: Final = 896
"""Default side of an image in pixels, for encoders that accept any size.

Patches of 14 pixels, merged 2 x 2, give 1,024 tokens. Qwen2-VL's model card recommends 256 to 1,280 tokens per image.
"""
_RECORDING_S: Final = 30
"""Seconds of a recording: the window of Whisper (Radford et al. 2022)."""


@dataclass(frozen=True, slots=True)
class Tower:
    """Encoder of images or audio recordings, with its projector.

    Attributes:
        name: `vision` or `audio`.
        spec: The encoder as a model; parameters outside its layers form the embedding block.
        positions: Tokens of the encoder per item, an image or recording.
        item: Description of the items, such as `images of 224x224 pixels`.
        forward_flops: FLOPs of the forward of one item.
        extra_bytes: Bytes that a bfloat16 forward of one item keeps beyond those of decoder layers of equal size.
    """

    name: str
    spec: ModelSpec
    positions: int
    item: str
    forward_flops: float
    extra_bytes: int

    @property
    def layer_flops(self) -> float:
        """Forward FLOPs of the layers for one item, counted with causal attention, as the planner prices decoders."""
        per_token = 2.0 * self.spec.num_matmul_params
        per_token += sum(
            b.attention.forward_flops_per_token(self.positions, causal=True) * b.count
            for b in self.spec.blocks
            if b.attention
        )
        return per_token * self.positions


def language_of(spec: ModelSpec, towers: Collection[str] | None = None) -> ModelSpec:
    """Return the spec without towers of these kinds (None: all); the projector belongs to the model's first tower."""
    kinds = tower_kinds(spec)
    names = set(kinds if towers is None else towers)
    if towers is None or not names.isdisjoint(kinds[:1]):
        names.add("projector")
    blocks = [
        replace(b, params=tuple(p for p in b.params if b.layers or _kind(p.name) not in names)) for b in spec.blocks
    ]
    return replace(spec, blocks=tuple(b for b in blocks if b.params))


def tower_kinds(spec: ModelSpec) -> list[str]:
    """Return the kinds, `vision` or `audio`, of the towers that have parameters in a model."""
    outside = [p for b in spec.blocks if not b.layers for p in b.params]
    return [kind for kind in _KINDS if any(_kind(p.name) == kind for p in outside)]


def fixed_image_size(config: Mapping[str, Any]) -> int | None:
    """Return the image side in pixels that a config states; None if it states none, or there is no image encoder."""
    section = config.get("vision_config")
    return (_side(section.get("image_size")) or None) if isinstance(section, Mapping) else None


def towers_of(spec: ModelSpec, config: Mapping[str, Any], image_size: int | None = None) -> tuple[Tower, ...]:
    """Return the towers of a model whose config states heads and the size of items, and which have numbered layers.

    Args:
        spec: Spec of the whole model, with the parameters of its towers.
        config: Values of its config.json.
        image_size: Side in pixels, rounded to whole patches, for encoders that accept any size; None: `IMAGE_SIZE`.
    """
    outside = [p for b in spec.blocks if not b.layers for p in b.params]
    towers, kinds = [], tower_kinds(spec)
    for kind in kinds:
        names = {kind, "projector"} if kind == kinds[0] else {kind}
        params = [p for p in outside if _kind(p.name) in names]
        section = config.get(f"{kind}_config")
        if isinstance(section, Mapping) and (tower := _tower(spec, kind, params, section, image_size)):
            towers.append(tower)
    return tuple(towers)


def tower_kind(name: str) -> str | None:
    """Return the kind of the tower to which a parameter belongs, `vision` or `audio`; None for other parameters."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), None)


def _kind(name: str) -> str | None:
    """Return the part to which a parameter outside the layers belongs: vision, audio, projector; None: language."""
    return tower_kind(name) or ("projector" if _PROJECTOR.search(name) else None)


def _tower(
    whole: ModelSpec,
    kind: str,
    params: Sequence[ParamSpec],
    config: Mapping[str, Any],
    image_size: int | None,
) -> Tower | None:
    stacks: dict[str, dict[int, list[ParamSpec]]] = {}
    for p in params:
        if match := _LAYER.match(p.name):
            path, index, rest = match.groups()
            layer = stacks.setdefault(path, {}).setdefault(int(index), [])
            layer.append(replace(p, name=f"{path}.*.{rest}"))
    heads = next((config[key] for key in _HEADS if isinstance(config.get(key), int)), None)
    positions, item = _positions(kind, config, image_size)
    if not stacks or not heads or not positions:
        return None
    path = max(stacks, key=lambda s: len(stacks[s]))
    layers = stacks[path]
    matrices = [p for p in layers[min(layers)] if p.is_matrix]
    hidden = min(size for p in matrices for size in p.shape)
    mlp = [p for p in matrices if "attn" not in p.name and "attention" not in p.name]
    kinds = Counter(tuple(_with_dims(p, hidden) for p in own) for own in layers.values())
    attention = AttentionSpec("full", heads, heads, hidden // heads, hidden // heads)
    width = max((size for p in mlp for size in p.shape), default=hidden)
    first, blocks = 0, []
    for own, count in kinds.items():
        numbers = tuple(range(first, first := first + count))
        blocks.append(Block("decoder", numbers, own, attention, MlpSpec(width, len(mlp) > 2)))
    rest = tuple(p for p in params if not p.name.startswith(f"{path}."))
    spec = ModelSpec(
        name=f"{whole.name}, {kind}",
        family=kind,
        dtype=whole.dtype,
        hidden_size=hidden,
        num_layers=len(layers),
        vocab_size=1,
        tied_embeddings=False,
        blocks=(Block("embedding", (), rest), *blocks),
    )
    inner = 2.0 * spec.num_matmul_params * positions
    inner += len(layers) * positions * attention.forward_flops_per_token(positions)
    merged = _merged(config)
    outer = sum(_outer_flops(p, positions, merged) for p in rest)
    # Projections outside the layers keep their inputs, and the inputs of the norm or activation before them.
    extra = sum(2.0 * math.prod(p.shape[1:]) * positions * _rows(p, merged) for p in rest)
    # Rotated queries and keys are copies, while the values keep the whole output of the fused projection.
    widths = 2 * hidden * any("qkv" in p.name for p in matrices)
    widths += width * (config.get("hidden_act") == "quick_gelu")
    extra += 2.0 * len(layers) * positions * widths
    return Tower(kind, spec, positions, item, inner + outer, round(extra))


def _with_dims(p: ParamSpec, hidden: int) -> ParamSpec:
    """Return a matrix with logical dims: `embed` for the last dim if its size is `hidden`, else for the first one."""
    if not p.is_matrix:
        return p
    return replace(p, dims=("features", "embed") if p.shape[-1] == hidden else ("embed", "features"))


def _merged(config: Mapping[str, Any]) -> float:
    """Return the number of encoder positions that are merged into one position of the projector."""
    ratio = config.get("pixel_shuffle_ratio") or 1.0
    return float(config.get("spatial_merge_size") or 1) ** 2 / float(ratio) ** 2


def _outer_flops(p: ParamSpec, positions: int, merged: float) -> float:
    """Return the forward FLOPs per image or recording of a parameter outside the layers; 0 for vectors and positions.

    `merged` positions of the encoder become one position of the projector.
    """
    if not _rows(p, merged):
        return 0.0
    is_projector = len(p.shape) == 2 and _PROJECTOR.search(p.name) is not None
    return 2.0 * p.size * positions / (merged if is_projector else 1.0)


def _rows(p: ParamSpec, merged: float) -> float:
    """Return the number of input rows per encoder position that the backward of a matrix outside the layers needs.

    A projector matrix counts two rows per projector position: its own input, and the input of the preceding norm.
    Vectors and position embeddings count 0.
    """
    if not p.is_matrix or re.search(r"pos\w*embed|embed\w*pos|wpe", p.name):
        return 0.0
    return 2.0 / merged if len(p.shape) == 2 and _PROJECTOR.search(p.name) else 1.0


def _positions(kind: str, config: Mapping[str, Any], image_size: int | None) -> tuple[int, str]:
    """Return encoder tokens per item, 0 if the config does not determine them, and a description of the items."""
    if kind == "audio":
        frames = 100 * _RECORDING_S
        longest = config.get("max_source_positions") or 0
        # Three convolutions of stride 2 on windows of 100 frames leave 13 positions of each.
        is_windowed = "downsample_hidden_size" in config
        positions = 13 * frames // 100 if is_windowed else min(longest, frames // 2)
        return positions, f"recordings of {_RECORDING_S} s"
    patch = _side(config.get("patch_size"))
    side = _side(config.get("image_size")) or image_size or IMAGE_SIZE
    if not patch:
        return 0, ""
    if not _side(config.get("image_size")):
        whole = patch * int(config.get("spatial_merge_size") or 1)
        side = max(whole, side // whole * whole)
    return (side // patch) ** 2, f"images of {side}x{side} pixels"


def _side(value: Any) -> int:
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        value = value[0]
    return value if isinstance(value, int) and value > 0 else 0

"""Images and recordings under pipeline stages.

The first stage runs the encoders and merges features into the embeddings. Stages with layers that features enter by
themselves (`layers_with_media`) run the encoders again, on a copy of their weights. Other stages run the forward
without the media; integer inputs such as grids and token types stay, because positions and masks follow from them. A
trace of the first pass with media refuses models in which features enter other layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyper_parallel.backends.torch.flow_tracer import FILL_OPS
from hyper_parallel.backends.torch.layer_flow import flow_error
from hyper_parallel.backends.torch.partial_use import encoder_inputs


class MediaTrace(TorchDispatchMode):
    """Dispatch mode that records the layers whose arguments depend on media, by storage.

    Args:
        media: Arrays of images and recordings.
        allowed: Layers of other stages that may depend on them.
    """

    def __init__(self, media: Mapping[str, Tensor], allowed: Set[int]) -> None:
        super().__init__()
        self._allowed = allowed
        # The values keep storages alive, so that no address is used again
        self._dependent: dict[int, Any] = {}
        self._layers: list[int] = []
        self.mark([*media.values()])

    def record_arguments(self, layer: int, arguments: Any) -> None:
        """Record a layer of another stage if its arguments depend on media."""
        if layer not in self._allowed and self._depends(arguments):
            self._layers.append(layer)

    def independent(self, hidden: Tensor) -> Tensor:
        """Return zeros for activations of the running stage, whose dependence on media is allowed."""
        return torch.zeros_like(hidden)

    def check(self, model: nn.Module) -> None:
        """Raise HP205 if a layer of another stage depends on media by more than the activations."""
        if self._layers:
            why = f"features of media enter layer {self._layers[0]}, after the first stage"
            raise flow_error(model, why, "pp")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket not in FILL_OPS and self._depends((args, kwargs)):
            written = args[:1] if func._schema.is_mutable else ()
            self.mark((out, written))
        return out

    def _depends(self, value: Any) -> bool:
        return any(key in self._dependent for key in map(_storage_key, _tensors(value)))

    def mark(self, value: Any) -> None:
        """Count the tensors of a value as media."""
        for tensor in _tensors(value):
            self._dependent[_storage_key(tensor)] = tensor


def layers_with_media(model: nn.Module) -> set[int]:
    """Return the layers whose arguments depend on features of media by more than the activations, from the config."""
    config: Any = getattr(model, "config", None)
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    layers: set[int] = set()
    for part in parts:
        # One feature map for each of these encoder layers is added after a decoder layer, from the first layer on.
        layers |= {*range(1, 1 + len(getattr(part, "deepstack_visual_indexes", None) or ()))}
        # Pairs of an encoder layer and the decoder layer before which its features are added.
        layers |= {layer for _, layer in getattr(part, "deepstack_layer_map", None) or ()}
        # Decoder layers before which features of some of the patches are added, one for each group of patches.
        layers |= {*(getattr(part, "spatial_target_layers", None) or ())}
    return layers


def without_media(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward without images and recordings."""
    media = encoder_inputs(inputs)
    return {name: value for name, value in inputs.items() if name not in media}


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _storage_key(tensor: Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor has no storage of its own
    return local.untyped_storage()._cdata

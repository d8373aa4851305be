"""How the names in a Hugging Face directory map to the parameters of a model.

Checkpoints store one tensor per expert, current models hold all experts of a layer in one parameter; transformers
publishes the mapping as data (renamings, and converters made of a few operations). Here it becomes boxes: each stored
tensor fills one box of one parameter, so a rank can read exactly the part of it that it stores. Conversions that are
more than that run as transformers wrote them, on whole stored tensors.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, slots=True)
class Box:
    """A stored tensor, by its name in the files, and where it lies in the parameter."""

    key: str
    offset: tuple[int, ...]
    """First index in the parameter, per dim of the parameter."""
    stacked: bool
    """The first dim of the parameter is not a dim of the stored tensor: it holds one index of it."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Stored tensors, by the patterns of a converter of transformers, which makes parameters of them."""

    name: str
    """The first parameter."""
    converter: Any
    keys: dict[str, list[str]]
    reference: nn.Module

    def run(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Parameters by name, of the stored tensors that `read` gives."""
        own = copy.deepcopy(self.converter)
        own.collected_tensors = {p: [read(k) for k in keys] for p, keys in self.keys.items()}
        made = own.convert(self.name, model=self.reference, config=self.reference.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in made.items()}


def twin(model: nn.Module) -> nn.Module | None:
    """The same Hugging Face model on the meta device, of its original class and unsharded; None for other modules.

    `fully_shard` replaces the class of a module, which hides from transformers which model it is. All parameters have
    the widest format of the model's, to which some conversions of weights cast.
    """
    cls = original_class(model)
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "get_expanded_tied_weights_keys", None)):
        return None
    formats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    with torch.device("meta"):
        made = cls(copy.deepcopy(config))
        return made.to(functools.reduce(torch.promote_types, formats)) if formats else made


def original_class(model: nn.Module) -> type[nn.Module]:
    """The class of a module before `fully_shard`."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


def boxes(
    reference: nn.Module | None, wanted: set[str], stored: dict[str, tuple[int, ...]]
) -> tuple[dict[str, list[Box]], list[Conversion], list[str]]:
    """Boxes of each parameter or buffer `wanted`, what only a conversion gives, and names that belong to none.

    `reference` is the model's `twin`; None: names in the files are parameter names.
    """
    whole = {key: [Box(key, (0,) * len(shape), False)] for key, shape in stored.items()}
    if reference is None:
        unknown = [k for k in stored if k not in wanted]
        return {k: v for k, v in whole.items() if k in wanted}, [], unknown
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        dot_natural_key,
        rename_source_key,
    )

    transforms = get_model_conversion_mapping(reference)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    state = reference.state_dict()
    prefix = reference.base_model_prefix
    result: dict[str, list[Box]] = {}
    groups: dict[str, dict[str, list[str]]] = {}
    unknown = []
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # transformers does so too
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in wanted:
            unknown.append(key)
        elif pattern is None:
            result.setdefault(name, []).extend(whole[key])
        else:
            groups.setdefault(name, {}).setdefault(pattern, []).append(key)
    conversions = []
    for name, by_source in groups.items():
        converter = by_pattern[next(iter(by_source))]
        parts = _converted(converter, by_source, stored)
        if parts is not None:
            result[name] = parts
        else:
            conversions.append(Conversion(name, converter, by_source, reference))
    return result, conversions, unknown


def _converted(
    converter: Any, by_source: dict[str, list[str]], stored: dict[str, tuple[int, ...]]
) -> list[Box] | None:
    """Boxes of a parameter that several stored tensors make up, stacked or side by side; None: it is made otherwise."""
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    stack = operations[:1] == [("MergeModulelist", 0)]
    rest = operations[1:] if stack else operations
    if len(rest) > 1 or any(kind != "Concatenate" for kind, _ in rest) or (not stack and not rest):
        return None
    axis = rest[0][1] if rest else None
    result = []
    start = 0
    for pattern in converter.source_patterns:
        shape: tuple[int, ...] = ()
        for number, key in enumerate(by_source.get(pattern, [])):
            shape = ((1,) if stack else ()) + stored[key]
            offset = [0] * len(shape)
            if stack:
                offset[0] = number
            if axis is not None:
                offset[axis] = start
            result.append(Box(key, tuple(offset), stack))
        start += shape[axis] if shape and axis is not None else 0
    return result


def may_be_unexpected(reference: nn.Module | None, key: str) -> bool:
    """Whether the model class declares that files may hold this tensor without the model using it."""
    patterns = getattr(reference, "_keys_to_ignore_on_load_unexpected", None) or []
    return any(re.search(p, key) for p in [*patterns, r"rotary_emb\.inv_freq$"])

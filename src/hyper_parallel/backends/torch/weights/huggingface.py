"""Map from the names in a Hugging Face directory to the parameters of a model.

Checkpoints store one tensor per expert, while current models have one parameter for all experts of a layer.
transformers publishes the mapping as data: renamings, and converters composed of a few operations. Here renamings,
stacking and concatenation become boxes, index ranges per dim: each stored tensor fills one box of one parameter, so a
rank reads only its shard. Other conversions run the code of transformers on full stored tensors.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hyper_parallel.ir import Box, Ranges

COMPLETE: Final = "_hyper_parallel_complete"
"""Attribute of a module that is only a part of a Hugging Face model: the complete model."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Stored tensor, by its name in the files, and the index ranges of the parameter that it fills."""

    key: str
    ranges: Ranges
    stacked: bool
    """True if the parameter has an additional first dim, and the stored tensor fills one index of this dim."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of stored tensors to parameters by a converter of transformers.

    Attributes:
        name: Name of the first parameter that the conversion produces.
        converter: `WeightConverter` of transformers.
        keys: Names of the stored tensors, by the pattern of the converter that matches them.
        reference: Result of `hf_reference_model`.
    """

    name: str
    converter: Any
    keys: dict[str, list[str]]
    reference: nn.Module

    def run(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the parameters by name, converted from stored tensors; `read` returns a stored tensor by its name."""
        own = copy.deepcopy(self.converter)
        own.collected_tensors = {p: [read(k) for k in keys] for p, keys in self.keys.items()}
        converted = own.convert(self.name, model=self.reference, config=self.reference.config)
        return {n: v[0] if isinstance(v, list) else v for n, v in converted.items()}


def model_of_part(model: nn.Module) -> nn.Module:
    """Return the complete Hugging Face model that contains a part, such as an encoder; return other modules as is."""
    complete: nn.Module = model.__dict__.get(COMPLETE, model)
    return complete


def hf_reference_model(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module | None:
    """Return an unsharded meta copy of a Hugging Face model, of its original class; None for other models.

    transformers identifies a model by its class, which `fully_shard` replaces. The copy has the dtype `dtype`, with the
    exceptions that transformers makes. If `dtype` is None, all parameters have the widest dtype of the model's
    parameters, to which some weight conversions cast. Parameters that transformers has untied are untied in the copy.
    """
    model = model_of_part(model)
    cls = original_class(model)
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "get_expanded_tied_weights_keys", None)):
        return None
    reference = _on_meta(cls, copy.deepcopy(config), dtype)
    tied = getattr(model, "all_tied_weights_keys", None)
    if tied is not None and not reference.all_tied_weights_keys.keys() <= tied.keys():
        reference = _on_meta(cls, with_tied_embeddings(config, False), dtype)
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if dtype is not None or not dtypes:
        return reference
    return reference.to(functools.reduce(torch.promote_types, dtypes))


def _on_meta(cls: type[nn.Module], config: Any, dtype: torch.dtype | None) -> Any:
    with torch.device("meta"):
        return cls(config) if dtype is None else cls._from_config(config, dtype=dtype)


def with_tied_embeddings(config: Any, tied: bool) -> Any:
    """Return a copy of a config with `tie_word_embeddings` set to `tied`, also in its text config."""
    own = copy.deepcopy(config)
    for part in (own, own.get_text_config()):
        part.tie_word_embeddings = tied
    return own


def tied_names(reference: nn.Module) -> dict[str, str]:
    """Return the parameters that a model class ties if its config allows it: dict from tied name to source name.

    The dict is empty if the class rejects such a config.
    """
    own = with_tied_embeddings(reference.config, True)
    with suppress(Exception):
        return dict(_on_meta(type(reference), own, None).all_tied_weights_keys)
    return {}


def published_dtypes(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes that parameters and saved buffers get, by name, if transformers loads the model with `dtype`.

    Some parameters stay in float32, for example the router of deepseek_v3. The dict is empty for models that are not
    from transformers.
    """
    reference = hf_reference_model(model, dtype)
    if reference is None:
        return {}
    from transformers.core_model_loading import build_glob_alternation

    state = reference.state_dict()
    exceptions = reference._get_dtype_plan(dtype)
    if not exceptions:
        return {name: tensor.dtype for name, tensor in state.items()}
    pattern, globs, _ = build_glob_alternation(list(exceptions))
    matches = {name: pattern.search(name) for name in state}
    return {
        name: tensor.dtype if (m := matches[name]) is None else exceptions[globs[m.lastgroup]]
        for name, tensor in state.items()
    }


def original_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a module before `fully_shard`."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


@dataclass(frozen=True, slots=True)
class NameMap:
    """Map from the stored names of a directory to the parameters of a model.

    Attributes:
        parts: Stored tensors that fill each parameter.
        conversions: Conversions that need the code of transformers.
        unknown: Stored names that belong to no parameter.
        gaps: Dict from parameter name to the name, or name pattern, of its first missing stored tensor.
    """

    parts: dict[str, list[StoredPart]]
    conversions: list[Conversion]
    unknown: list[str]
    gaps: dict[str, str]


def map_names(reference: nn.Module | None, wanted: set[str], stored: dict[str, tuple[int, ...]]) -> NameMap:
    """Return the map from stored tensors, given by name and shape, to the parameters and buffers in `wanted`.

    `reference` is the result of `hf_reference_model`; None: names in the files are parameter names.
    """
    full = {key: [StoredPart(key, tuple((0, n) for n in shape), stacked=False)] for key, shape in stored.items()}
    if reference is None:
        unknown = [k for k in stored if k not in wanted]
        return NameMap({k: v for k, v in full.items() if k in wanted}, [], unknown, {})
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

    transforms = get_model_conversion_mapping(reference)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    state = reference.state_dict()
    prefix = reference.base_model_prefix
    result = NameMap({}, [], [], {})
    groups: dict[str, _Sources] = {}
    for key in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:  # same rule as in transformers
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in wanted:
            result.unknown.append(key)
        elif pattern is None:
            result.parts.setdefault(name, []).extend(full[key])
        else:
            number = _number_of(pattern, rename_source_key(key, renamings, [])[0])
            groups.setdefault(name, {}).setdefault(pattern, []).append((number, key))
    for name, by_source in groups.items():
        converter = by_pattern[next(iter(by_source))]
        size = state[name].shape[0] if name in state and state[name].dim() else 0
        if gap := _gap(converter, by_source, size if _stacks(converter) else None):
            result.gaps[name] = gap
        parts = _stacked_or_concatenated_parts(converter, by_source, stored)
        if parts is not None:
            result.parts[name] = parts
        else:
            keys = {p: [key for _, key in numbered] for p, numbered in by_source.items()}
            result.conversions.append(Conversion(name, converter, keys, reference))
    return result


_Sources = dict[str, list[tuple[int | None, str]]]
"""Stored names by the matching pattern of a converter, each with the number at the `*` of the pattern."""


def _number_of(pattern: str, name: str) -> int | None:
    """Return the expert number in a stored name, at the star of its pattern; None without a star or a match."""
    if "*." not in pattern:
        return None
    with suppress(re.error):
        match = re.search(pattern.removeprefix("^").replace("*.", r"(\d+)\."), name)
        if match is not None and match.groups():
            return int([g for g in match.groups() if g is not None][-1])
    return None


def _stacks(converter: Any) -> bool:
    """Return whether the first operation of a converter stacks a list of tensors along dim 0."""
    first = converter.operations[0]
    return (type(first).__name__, getattr(first, "dim", None)) == ("MergeModulelist", 0)


def _gap(converter: Any, by_source: _Sources, size: int | None) -> str | None:
    """Return the first missing stored name of a parameter, or the pattern that no name matches; None without a gap.

    `size` is the number of experts; None: detect only gaps between numbers.
    """
    for numbered in by_source.values():
        numbers = {number for number, _ in numbered if number is not None}
        expected = range(max(numbers, default=-1) + 1 if size is None else size)
        if numbers and (missing := min(set(expected) - numbers, default=None)) is not None:
            number, key = numbered[0]
            head, _, tail = key.rpartition(f".{number}.")
            return f"{head}.{missing}.{tail}"
    if size is not None and (absent := set(converter.source_patterns) - by_source.keys()):
        return min(absent)
    return None


def _stacked_or_concatenated_parts(
    converter: Any, by_source: _Sources, stored: dict[str, tuple[int, ...]]
) -> list[StoredPart] | None:
    """Return the stored parts of a parameter that a converter stacks or concatenates; None for other operations."""
    stack = _stacks(converter)
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    rest = operations[1:] if stack else operations
    if len(rest) > 1 or any(kind != "Concatenate" for kind, _ in rest) or (not stack and not rest):
        return None
    axis = rest[0][1] if rest else None
    result = []
    start = 0
    for pattern in converter.source_patterns:
        shape: tuple[int, ...] = ()
        for index, (number, key) in enumerate(by_source.get(pattern, [])):
            shape = ((1,) if stack else ()) + stored[key]
            offset = [0] * len(shape)
            if stack:
                offset[0] = index if number is None else number
            if axis is not None:
                offset[axis] = start
            result.append(StoredPart(key, Box.at(key, offset, shape).ranges, stack))
        start += shape[axis] if shape and axis is not None else 0
    return result


def is_ignored_when(kind: Literal["unexpected", "missing"], model: Any, name: str) -> bool:
    """Return whether the model's class ignores `name` if it is unexpected in weight files, or missing (`kind`)."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or []
    return any(re.search(p, name) for p in patterns)


def names_of_other_classes(reference: nn.Module, stored: dict[str, tuple[int, ...]]) -> set[str]:
    """Return the stored names used by another transformers class with the same config, such as a pooler's weights."""
    from transformers.models.auto import modeling_auto as auto

    pretraining, masked = auto.MODEL_FOR_PRETRAINING_MAPPING, auto.MODEL_FOR_MASKED_LM_MAPPING
    known: set[str] = set()
    for table in (pretraining, auto.MODEL_MAPPING, masked):
        with suppress(Exception):  # the config has no such class, or the class rejects it
            cls = table[type(reference.config)]
            other = _on_meta(cls, copy.deepcopy(reference.config), None)
            remaining = {key: shape for key, shape in stored.items() if key not in known}
            names = map_names(other, {*other.state_dict()}, remaining)
            known |= remaining.keys() - {*names.unknown}
    return known

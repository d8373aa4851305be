"""Inventory of pretrained weights: the stored source of each tensor of a model, and the use of each stored tensor.

Loading, errors, exports and reports all derive from one inventory. The use of a stored tensor is its `Fate`; each
stored name has exactly one.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn

from hyper_parallel.backends.torch.token_scores import SCORE, scores_tokens
from hyper_parallel.backends.torch.weights.huggingface import (
    Conversion,
    NameMap,
    StoredPart,
    hf_reference_model,
    is_ignored_when,
    map_names,
    names_of_other_classes,
    tied_names,
)
from hyper_parallel.backends.torch.weights.initialization import (
    canonical_name,
    is_adapter,
    named_tensors,
)
from hyper_parallel.backends.torch.weights.tensor_files import WeightFiles, same_values
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.ir import Box

Source = list[StoredPart] | tuple[Conversion, str, tuple[int, ...]]
"""Stored tensors with their index ranges, or a conversion with the name and shape of its result."""


class Fate(StrEnum):
    """Use of a stored tensor."""

    LOADED = "loaded as it is"
    RENAMED = "loaded under another name"
    MERGED = "loaded as one part of a parameter, such as an expert"
    CONVERTED = "converted by transformers"
    TIED_EQUAL = "equal to the tensor that it is tied to"
    TIED_DIFFERENT = "tied by the config, but different in the files: no longer tied"
    IGNORED = "left out by the model class"
    OTHER_CLASS = "a parameter of another class of the same family"
    RECOMPUTED = "a buffer that the model computes"
    ABSENT = "listed by the index, in no file, and not needed"
    UNKNOWN = "unknown to the model"


CARRIED: Final = (Fate.IGNORED, Fate.OTHER_CLASS)
"""Fates of tensors that an export writes unchanged."""
_OTHER_CONFIG: Final = "use the config.json that was published with these weights"
_OTHER_WEIGHTS: Final = "check that config.json belongs to these weights, or fetch them again"
_RECOMPUTED: Final = (
    (r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", (1, 2, 4)),
    (r"(^|\.)position_ids$", (1, 2)),
    (r"(^|\.)token_type_ids$", (1, 2)),
    (r"attn\.bias$|attention\.bias$", (3, 4)),  # a causal mask; a bias of a projection has one dim
    (r"attn\.masked_bias$|attention\.masked_bias$", (0,)),
    (r"(^|\.)embed_positions\._float_tensor$", (1,)),
    (r"(^|\.)(encoder|decoder)\.version$", (1,)),
)
"""Buffers in published files that transformers computes or no longer has: name pattern, allowed numbers of dims."""


@dataclass(slots=True)
class Inventory:
    """Sources of a model's tensors in a directory, and the fate of each stored name.

    Attributes:
        fates: Fate of each stored name, and of names that only the index lists.
        sources: Source of each parameter or buffer of this rank; tied tensors have one entry.
        fresh: Parameters and buffers that no file contains and that get initial values.
        untied: Dict from each name that the model ties but the files do not, to the name that it was tied to.
        conversions: Conversions of transformers among the sources.
        shapes: Shape of each stored tensor.
    """

    fates: dict[str, Fate] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    untied: dict[str, str] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def names(self, *fates: Fate) -> list[str]:
        """Return the sorted stored names with one of the given fates."""
        return sorted(name for name, fate in self.fates.items() if fate in fates)


def take_inventory(model: nn.Module, files: WeightFiles) -> Inventory:
    """Return the inventory of the weight files in a directory for a model, or for its part on a pipeline rank.

    Values are compared only if a parameter is stored under several names.

    Raises:
        WeightsUnreadable: HP703 for a parameter that is missing, unknown, of another shape, or read from two stored
            tensors with different values, and for a conversion of transformers that fails.
    """
    return _InventoryBuilder(model, files).build()


class _InventoryBuilder:
    def __init__(self, model: nn.Module, files: WeightFiles) -> None:
        self._model, self._files = model, files
        self._reference = hf_reference_model(model)
        self._targets = loadable_tensors(model)
        self._inventory = Inventory(shapes={n: t.shape for n, t in files.tensors.items()})
        self._stored: dict[str, Source] = {}

    def build(self) -> Inventory:
        reference, inventory = self._reference, self._inventory
        # Map all names of the full model, although a pipeline rank has only a part of it.
        wanted = {*self._targets} | ({*reference.state_dict()} if reference is not None else set())
        names = map_names(reference, wanted, inventory.shapes)
        inventory.conversions = names.conversions
        self._record_known(names)
        if scores_tokens(self._model):
            inventory.fresh |= {f"{SCORE}.weight"} - self._stored.keys()
        self._classify_unknown(names.unknown)
        inventory.fates |= dict.fromkeys(self._files.missing_tensors, Fate.ABSENT)
        self._choose_sources(names)
        for name, source in inventory.sources.items():
            _check_shape(name, tuple(self._targets[name].shape), source, self._files)
        return inventory

    def _record_known(self, names: NameMap) -> None:
        """Record the source of each parameter in the name map, and the fates of the stored names that it uses."""
        for name, parts in names.parts.items():
            first = self._files.tensors[parts[0].key]
            is_whole = all(not p.stacked and not any(a for a, _ in p.ranges) for p in parts)
            if len(parts) > 1 and is_whole:
                for part in parts[1:]:
                    if not same_values(first, self._files.tensors[part.key]):
                        raise WeightsUnreadable(
                            f"`{parts[0].key}` and `{part.key}` are the same parameter, with different values",
                            where=str(self._files.tensors[part.key].file),
                            allowed=f"one tensor for `{name}`",
                            hint="fetch the weights again",
                        )
                parts = parts[:1]
            self._stored[name] = parts
            for part in names.parts[name]:
                merged = len(parts) > 1 or part.stacked
                single = Fate.LOADED if part.key == name else Fate.RENAMED
                self._inventory.fates[part.key] = Fate.MERGED if merged else single
        for conversion in names.conversions:
            for name, shape in self._converted_shapes(conversion).items():
                self._stored[name] = (conversion, name, shape)
            for keys in conversion.keys.values():
                self._inventory.fates |= dict.fromkeys(keys, Fate.CONVERTED)

    def _converted_shapes(self, conversion: Conversion) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters that a conversion produces; raise HP703 if transformers fails."""
        shapes = self._inventory.shapes
        try:
            converted = conversion.run(lambda key: torch.empty(shapes[key], device="meta"))
        except Exception as error:  # an operation may raise any exception
            keys = [key for group in conversion.keys.values() for key in group]
            raise WeightsUnreadable(
                f"transformers cannot convert the stored tensors to `{conversion.name}` ({error})",
                where=str(self._files.tensors[keys[0]].file),
                got=keys[:3],
                hint=_OTHER_WEIGHTS,
            ) from None
        return {name: tuple(value.shape) for name, value in converted.items()}

    def _classify_unknown(self, unknown: list[str]) -> None:
        """Set the fate of each stored name that is no parameter of the model; raise HP703 for the first unknown one."""
        fates, unclassified = self._inventory.fates, {}
        inside = f"{self._model.base_model_prefix}." if self._inventory.fresh else ""
        for key in unknown:
            dims = len(self._inventory.shapes[key])
            if any(re.search(name, key) and dims in allowed for name, allowed in _RECOMPUTED):
                fates[key] = Fate.RECOMPUTED
            elif is_ignored_when("unexpected", self._reference, key):
                fates[key] = Fate.IGNORED
            elif not key.startswith(inside):  # language-model head in the files of a reward model
                fates[key] = Fate.OTHER_CLASS
            else:
                unclassified[key] = self._inventory.shapes[key]
        if unclassified and self._reference is not None:
            other_class = names_of_other_classes(self._reference, unclassified)
            fates |= dict.fromkeys(other_class, Fate.OTHER_CLASS)
            unclassified = {k: s for k, s in unclassified.items() if k not in other_class}
        fates |= dict.fromkeys(unclassified, Fate.UNKNOWN)
        for key in unclassified:
            raise WeightsUnreadable(
                f"the model has no parameter for `{key}`",
                where=str(self._files.tensors[key].file),
                got=f"{len(unclassified)} such tensors" if len(unclassified) > 1 else None,
                hint="check that config.json belongs to these weights",
            )

    def _choose_sources(self, names: NameMap) -> None:
        """Select the source of each tensor of this rank; a tied tensor may be stored under any of its names."""
        inventory = self._inventory
        for group in self._tied_groups():
            present = [name for name in group if name in self._stored]
            if not present:
                aliases = [n for name in group for n in self._aliases_of_files.get(name, ())]
                present = [name for name in aliases if name in self._stored]
            own = [name for name in group if name in self._targets]
            if not own:
                continue
            if not present:
                self._use_initial_values(own[0], names)
                continue
            inventory.sources[own[0]] = self._stored[present[0]]
            for name in present:
                if gap := names.gaps.get(name):
                    self._raise_gap(name, gap)
            for name in present[1:]:
                equal = self._equal(present[0], name)
                if not equal:
                    inventory.untied[name] = present[0]
                for key in _keys(self._stored[name]):
                    inventory.fates[key] = Fate.TIED_EQUAL if equal else Fate.TIED_DIFFERENT

    def _tied_groups(self) -> Iterator[list[str]]:
        """Yield, for each tensor of this rank, its names on this rank followed by its names in the full model."""
        groups: dict[int, list[str]] = {}
        for name, tensor in self._targets.items():
            groups.setdefault(id(tensor), []).append(name)
        whole = {} if self._reference is None else named_tensors(self._reference)
        tied: dict[int, list[str]] = {}
        for name, tensor in whole.items():
            tied.setdefault(id(tensor), []).append(name)
        for group in groups.values():
            elsewhere = [n for name in group if name in whole for n in tied[id(whole[name])]]
            yield [*dict.fromkeys([*group, *elsewhere])]

    @functools.cached_property
    def _aliases_of_files(self) -> dict[str, list[str]]:
        """Names tied to each parameter by the config of the files; empty if the config of the model ties them too."""
        config: Any = getattr(self._reference, "config", None)
        if config is None or getattr(config, "tie_word_embeddings", True):
            return {}
        with suppress(Exception):  # the directory has no config, or one of another class
            values, _ = type(config).get_config_dict(self._files.directory, local_files_only=True)
            if values.get("tie_word_embeddings", type(config)().tie_word_embeddings):
                aliases = defaultdict[str, list[str]](list)
                for target, source in tied_names(self._reference).items():  # type: ignore[arg-type]
                    aliases[target].append(source)
                    aliases[source].append(target)
                return aliases
        return {}

    def _use_initial_values(self, name: str, names: NameMap) -> None:
        """Select initial values for a tensor that no file contains; raise HP703 if the model requires stored values."""
        if is_ignored_when("missing", self._reference, name):
            self._inventory.fresh.add(name)
        if name in self._inventory.fresh:
            return
        if gap := names.gaps.get(name):
            self._raise_gap(name, gap)
        missing = self._files.missing_tensors
        if name in missing:
            raise WeightsUnreadable(
                f"`{missing[name]}` has no tensor `{name}`, which the index places there",
                where=str(self._files.directory),
                hint=f"fetch `{missing[name]}` again",
            )
        raise WeightsUnreadable(
            f"no file contains the parameter `{name}`",
            where=str(self._files.directory),
            got=f"{len(self._files.tensors)} tensors in the files",
            hint=_OTHER_WEIGHTS,
        )

    def _raise_gap(self, name: str, gap: str) -> None:
        missing = self._files.missing_tensors
        lacks = f"`{missing[gap]}` has no tensor" if gap in missing else "no file contains"
        raise WeightsUnreadable(
            f"{lacks} `{gap}`, one of the parts of `{name}`",
            where=str(self._files.directory),
            got=f"{len(_keys(self._stored[name]))} parts" if name in self._stored else None,
            hint=f"fetch `{missing[gap]}` again" if gap in missing else "fetch the weights again",
        )

    def _equal(self, first: str, second: str) -> bool:
        """Return whether the files have equal values for tied names, in the parameter's dtype; False if converted."""
        keys = [_keys(self._stored[name]) for name in (first, second)]
        whole = {} if self._reference is None else self._reference.state_dict()
        tensors = {**whole, **self._targets}
        dtype = next(t.dtype for n, t in tensors.items() if n in (first, second))
        converted = any(isinstance(self._stored[n], tuple) for n in (first, second))
        if converted or len(keys[0]) != len(keys[1]):
            return False
        stored = self._files.tensors
        return all(same_values(stored[a], stored[b], dtype) for a, b in zip(*keys, strict=True))


def loadable_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that a model reads from weight files: parameters and persistent buffers, without adapters.

    Their names are those without compile and recompute wrappers.
    """
    skip = {
        f"{name}.{key}".lstrip(".")
        for name, module in model.named_modules()
        for key in module._non_persistent_buffers_set
    }
    return {canonical_name(n): t for n, t in named_tensors(model).items() if not (n in skip or is_adapter(n))}


def _keys(source: Source) -> list[str]:
    if isinstance(source, list):
        return [part.key for part in source]
    return [key for keys in source[0].keys.values() for key in keys]


def _check_shape(name: str, shape: tuple[int, ...], source: Source, files: WeightFiles) -> None:
    """Raise HP703 if the source of a parameter exceeds its shape or does not fill it."""
    if not isinstance(source, list):
        if source[2] != shape:
            raise WeightsUnreadable(
                f"the result of the conversion does not fit the parameter `{name}`",
                where=str(files.directory),
                got=f"shape {source[2]}",
                allowed=f"shape {shape}",
                hint=_OTHER_CONFIG,
            )
        return
    full, filled = Box.full(name, shape), 0
    for part in source:
        entry, box = files.tensors[part.key], Box(name, part.ranges)
        if not full.contains(box) or (len(source) == 1 and box != full):
            raise WeightsUnreadable(
                f"`{part.key}` does not fit the parameter `{name}`",
                where=str(entry.file),
                got=f"shape {entry.shape}",
                allowed=f"{'' if len(source) == 1 else f'one of {len(source)} parts of '}shape {shape}",
                hint=_OTHER_CONFIG,
            )
        filled += box.size
    if filled != full.size:
        raise WeightsUnreadable(
            f"the files contain {filled} of the {full.size} elements of `{name}`",
            where=str(files.tensors[source[0].key].file),
            got=[part.key for part in source],
            hint=_OTHER_WEIGHTS,
        )

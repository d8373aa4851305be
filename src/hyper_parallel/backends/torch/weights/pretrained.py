"""Loader of pretrained weights into a sharded model; each rank reads only the bytes of its own shard.

Conversions of transformers other than stacking and concatenation read full tensors on each rank that needs them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.backends.torch.weights.checksums import PartChecksum
from hyper_parallel.backends.torch.weights.huggingface import StoredPart, with_tied_embeddings
from hyper_parallel.backends.torch.weights.initialization import materialize, named_tensors
from hyper_parallel.backends.torch.weights.inventory import (
    CARRIED,
    Fate,
    Inventory,
    loadable_tensors,
    take_inventory,
)
from hyper_parallel.backends.torch.weights.shard_ranges import (
    copy_full,
    copy_parts,
    local,
    local_boxes,
)
from hyper_parallel.backends.torch.weights.tensor_files import Stored, WeightFiles
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.ir import Box
from hyper_parallel.received import Limits
from hyper_parallel.serde import DecodeError, read

logger = logging.getLogger(__name__)

HANDLE: Final = "_hyper_parallel"
"""Name of the attribute that `parallelize` sets on a model."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Report of `load_pretrained` on one rank.

    Attributes:
        tensors: Number of filled tensors.
        bytes_read: Bytes read from files.
        seconds: Duration of the call.
        fates: Use of each stored name.
        checksums: Checksums of the parts that were read; empty unless requested.
    """

    tensors: int
    bytes_read: int
    seconds: float
    fates: dict[str, Fate]
    checksums: tuple[PartChecksum, ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """Stored names that the model does not use."""
        unused = (*CARRIED, Fate.RECOMPUTED)
        return tuple(sorted(name for name, fate in self.fates.items() if fate in unused))


def check_pretrained(model: nn.Module, directory: str | Path) -> Inventory:
    """Return the inventory of a model and a directory without loading values; raise HP703 as in `load_pretrained`.

    The unused tensors of the directory are remembered for exports, see `carried_weights`.
    """
    files = WeightFiles(directory)
    inventory = take_inventory(model, files)
    _check_untied(model, inventory, files)
    remember_carried(model, CarriedWeights.of(inventory, directory))
    return inventory


def load_pretrained(
    model: nn.Module,
    directory: str | Path,
    *,
    device: torch.device | str | None = None,
    seed: int = 0,
    checksums: bool = False,
) -> LoadReport:
    """Fill a model from a Hugging Face directory of safetensors files, or of PyTorch files if there are none.

    Names, shapes and file sizes are checked from the headers before the first value is copied. Values are cast to the
    dtype of each parameter. Every rank reads the directory, without communication. As in transformers,
    parameters that the config ties and the files store with different values are untied, with a warning.

    Args:
        model: Module of plain tensors or DTensors, on any device including meta; changed in place.
        directory: Directory with `model.safetensors` or `pytorch_model.bin`, or shards, with or without their index.
        device: Device of tensors that are on the meta device; None: see `allocate`.
        seed: Seed of initial values. Only parameters that files may lack get them, such as the head of a reward model.
        checksums: Compute checksums of the parts that are read, for `joint_checksum`.

    Raises:
        WeightsUnreadable: HP703 naming the file or the directory, and the parameter if one is concerned: missing,
            truncated, unexpected, of another shape, stored twice with different values, not convertible, or untied
            after `parallelize`.
        WeightsUninitialised: HP704 for a parameter that is in no file and has no rule for initial values.
    """
    begin = time.perf_counter()
    files = WeightFiles(directory)
    inventory = take_inventory(model, files)
    _check_untied(model, inventory, files)
    if inventory.untied:
        fates = inventory.fates
        _untie(model, inventory)
        inventory = take_inventory(model, files)
        inventory.fates |= {n: f for n, f in fates.items() if f is Fate.TIED_DIFFERENT}
    sources, targets = inventory.sources, loadable_tensors(model)
    own = {name: local_boxes(targets[name], name) for name in sources}
    materialize(model, seed=seed, device=device, names=inventory.fresh)
    targets = loadable_tensors(model)
    files.checksums = [] if checksums else None
    with torch.no_grad():
        for name, parts in sources.items():
            if isinstance(parts, list):
                boxes = [(part, Box(name, part.ranges)) for part in parts]
                copy_parts(local(targets[name]).detach(), own[name], boxes, partial(_read, files))
        for conversion in inventory.conversions:
            converted = {n: p[1] for n, p in sources.items() if p[0] is conversion}
            values = conversion.run(files.read) if converted else {}
            for name, stored in converted.items():
                copy_full(targets[name], values[stored], name)
    remember_carried(model, CarriedWeights.of(inventory, directory))
    _log_inventory(inventory, files)
    return LoadReport(
        len(sources),
        files.bytes_read,
        time.perf_counter() - begin,
        inventory.fates,
        tuple(files.checksums or ()),
    )


def _log_inventory(inventory: Inventory, files: WeightFiles) -> None:
    directory = files.directory
    for fate in (*CARRIED, Fate.RECOMPUTED, Fate.ABSENT):
        if names := inventory.names(fate):
            logger.info("%s: %d tensors are %s, first `%s`", directory, len(names), fate, names[0])
    if inventory.fresh:
        fresh = ", ".join(sorted(inventory.fresh))
        logger.info("%s: no file contains %s, so initial values are used", directory, fresh)


def _check_untied(model: nn.Module, inventory: Inventory, files: WeightFiles) -> None:
    """Raise HP703 if the files untie parameters of a model that passed through `parallelize`: layouts are fixed."""
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if inventory.untied and (is_sharded or HANDLE in model.__dict__):
        name, first = next(iter(inventory.untied.items()))
        raise WeightsUnreadable(
            f"the config ties `{name}` to `{first}`, but the files have different values for them",
            where=str(files.directory),
            got="a model that passed through `parallelize` with tied parameters",
            allowed="a model whose config has tie_word_embeddings=False",
            hint=f'set "tie_word_embeddings": false in {files.directory / "config.json"}',
        )


def _untie(model: nn.Module, inventory: Inventory) -> None:
    """Give separate storage to parameters that the model ties but the files do not, and update the model's config."""
    tensors: dict[str, Tensor] = named_tensors(model)
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", {})
    for name, first in inventory.untied.items():
        logger.warning(
            "the config ties `%s` to `%s`, but the files have different values: they are untied",
            name, first,
        )  # fmt: skip
        old = tensors[name]
        parent, _, key = name.rpartition(".")
        own = nn.Parameter(torch.empty_like(old), requires_grad=old.requires_grad)
        model.get_submodule(parent)._parameters[key] = own
        for pair in ((name, first), (first, name)):
            if tied.get(pair[0]) == pair[1]:
                del tied[pair[0]]
    config: Any = getattr(model, "config", None)
    if config is not None:
        model.config = with_tied_embeddings(config, False)


def _read(files: WeightFiles, part: StoredPart, box: Box) -> Tensor:
    """Read the elements within `box`, index ranges of a parameter, from the stored part that contains them."""
    ranges = box.within(Box(box.name, part.ranges))
    if part.stacked:
        return files.read(part.key, ranges[1:]).unsqueeze(0)
    return files.read(part.key, ranges)


_ATTRIBUTE: Final = "_carried_weights"

CARRIED_FILE: Final = "carried_weights.json"
"""File next to the config of a run: directory and names of unused tensors that exports of the run include."""


@dataclass(frozen=True, slots=True)
class CarriedWeights:
    """Stored tensors that a model does not use, and that its exports include unchanged.

    Attributes:
        directory: Directory of their files.
        names: Names of the tensors.
    """

    directory: Path
    names: tuple[str, ...]

    def to_json(self) -> str:
        """Return the content of `CARRIED_FILE` as JSON."""
        return json.dumps({"directory": str(self.directory.resolve()), "names": self.names}, indent=1)

    @classmethod
    def read(cls, directory: Path) -> CarriedWeights | None:
        """Read the `CARRIED_FILE` of a directory; return None without a readable file."""
        try:
            return read(cls, directory / CARRIED_FILE, Limits())
        except (OSError, DecodeError):
            return None

    @classmethod
    def of(cls, inventory: Inventory, directory: str | Path) -> CarriedWeights:
        """Return the tensors of an inventory that an export writes unchanged."""
        return cls(Path(directory), tuple(inventory.names(*CARRIED)))


def remember_carried(model: nn.Module, carried: CarriedWeights) -> None:
    """Store the unused tensors of a model's files on the model, for `carried_weights`."""
    object.__setattr__(model, _ATTRIBUTE, carried)


def carried_weights(model: nn.Module) -> CarriedWeights | None:
    """Return the unused tensors of the files of a model; None for a model without readable files.

    The files are those of `load_pretrained`, or of the local directory of `from_pretrained`.
    """
    carried: CarriedWeights | None = model.__dict__.get(_ATTRIBUTE)
    if carried is not None:
        return carried
    source: Any = getattr(model, "name_or_path", None)
    # `from_pretrained` stores its name conversions; a model created from a config has none.
    if "_weight_conversions" not in model.__dict__ or not source or not Path(source).is_dir():
        return None
    return carried_of(model, Path(source))


def carried_of(model: nn.Module, directory: Path) -> CarriedWeights | None:
    """Return the unused tensors in `directory` that an export writes unchanged.

    The result is None, with a warning, if the files cannot be read or do not fit the model.
    """
    try:
        inventory = take_inventory(model, WeightFiles(directory))
    except WeightsUnreadable as error:
        logger.warning("unused tensors are not exported: %s (%s)", error.what, error.where)
        return None
    return CarriedWeights.of(inventory, directory)


def open_carried(carried: CarriedWeights | None, exported: Collection[str]) -> dict[str, Stored]:
    """Return the unused tensors to add to an export of `exported` tensors, by name; log included and omitted ones."""
    names = [] if carried is None else [n for n in carried.names if n not in exported]
    if carried is None or not names:
        return {}
    facts = (len(names), carried.directory, names[0])
    try:
        tensors = WeightFiles(carried.directory).tensors
        unused = {name: tensors[name] for name in names}
    except (WeightsUnreadable, KeyError):
        logger.warning("omitted from the export: %d unused tensors that %s no longer has, first `%s`", *facts)
        return {}
    logger.info("written unchanged: %d tensors of %s that the model does not use, first `%s`", *facts)
    return unused

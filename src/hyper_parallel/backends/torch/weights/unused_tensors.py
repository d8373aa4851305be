"""Tensors of pretrained files that a model does not use, such as prediction layers; exports include them."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn

from hyper_parallel.backends.torch.weights.inventory import CARRIED, Inventory, take_inventory
from hyper_parallel.backends.torch.weights.tensor_files import Stored, WeightFiles
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.received import Limits
from hyper_parallel.serde import DecodeError, read

logger = logging.getLogger(__name__)

_ATTRIBUTE: Final = "_carried_weights"

CARRIED_FILE: Final = "carried_weights.json"
"""File next to the config of a run: directory and names of the unused tensors that its exports include."""


@dataclass(frozen=True, slots=True)
class CarriedWeights:
    """Stored tensors that a model does not use.

    Attributes:
        directory: Directory of their files.
        names: Names of the tensors.
    """

    directory: Path
    names: tuple[str, ...]

    def to_json(self) -> str:
        """Return the text of `CARRIED_FILE`."""
        return json.dumps(
            {"directory": str(self.directory.resolve()), "names": self.names}, indent=1
        )

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
    """Store the unused tensors of its files on a model."""
    object.__setattr__(model, _ATTRIBUTE, carried)


def carried_weights(model: nn.Module) -> CarriedWeights | None:
    """Return the unused tensors of the files of a model; None for a model without files.

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
    """Return the tensors of a directory that a model does not use; None if the directory does not fit the model."""
    try:
        inventory = take_inventory(model, WeightFiles(directory))
    except WeightsUnreadable as error:
        logger.warning("unused tensors are not exported: %s (%s)", error.what, error.where)
        return None
    return CarriedWeights.of(inventory, directory)


def open_carried(carried: CarriedWeights | None, exported: Collection[str]) -> dict[str, Stored]:
    """Return the unused tensors to add to an export, by name; log included and omitted ones.

    Args:
        carried: Unused tensors of the files of the model.
        exported: Names of the tensors of the model.
    """
    names = [] if carried is None else [n for n in carried.names if n not in exported]
    if carried is None or not names:
        return {}
    facts = (len(names), carried.directory, names[0])
    try:
        tensors = WeightFiles(carried.directory).tensors
        unused = {name: tensors[name] for name in names}
    except (WeightsUnreadable, KeyError):
        logger.warning(
            "omitted from the export: %d unused tensors that %s no longer has, first `%s`", *facts
        )
        return {}
    logger.info(
        "written unchanged: %d tensors of %s that the model does not use, first `%s`", *facts
    )
    return unused

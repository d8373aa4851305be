"""Tensors of pretrained files that a model does not use, such as prediction layers: an export carries them on."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import nn
from typing_extensions import TypedDict

from hyper_parallel.backends.torch.weights.inventory import CARRIED, take_inventory
from hyper_parallel.backends.torch.weights.tensor_files import Stored, WeightFiles
from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.received import Limits
from hyper_parallel.serde import DecodeError, read

logger = logging.getLogger(__name__)

_ATTRIBUTE: Final = "_carried_weights"

CARRIED_FILE: Final = "carried_weights.json"
"""File beside the config that a run keeps: directory and names of the tensors that its exports carry on."""


class _Stored(TypedDict):
    """Content of `CARRIED_FILE`."""

    directory: str
    names: list[str]


@dataclass(frozen=True, slots=True)
class CarriedWeights:
    """Stored tensors that a model does not use.

    Attributes:
        directory: Where they are.
        names: Their names.
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
        """Return what a directory keeps in `CARRIED_FILE`; None where it has none that can be read."""
        try:
            stored = read(_Stored, directory / CARRIED_FILE, Limits())
        except (OSError, DecodeError):
            return None
        return cls(Path(stored["directory"]), tuple(stored["names"]))


def remember_carried(model: nn.Module, carried: CarriedWeights) -> None:
    """Remember on a model which tensors of its files it does not use."""
    object.__setattr__(model, _ATTRIBUTE, carried)


def carried_weights(model: nn.Module) -> CarriedWeights | None:
    """Return the tensors that the files of a model hold and that it does not use; None for a model without files.

    The files are those of `load_pretrained`, or the local directory that `from_pretrained` read.
    """
    found: CarriedWeights | None = model.__dict__.get(_ATTRIBUTE)
    if found is not None:
        return found
    source: Any = getattr(model, "name_or_path", None)
    # `from_pretrained` leaves the conversions of names that it used; a model made of a config has none.
    if "_weight_conversions" not in model.__dict__ or not source or not Path(source).is_dir():
        return None
    return carried_of(model, Path(source))


def carried_of(model: nn.Module, directory: Path) -> CarriedWeights | None:
    """Return the tensors of a directory that a model does not use; None where the two do not belong together."""
    try:
        inventory = take_inventory(model, WeightFiles(directory))
    except WeightsUnreadable as error:
        logger.warning("tensors beside the model are left out: %s (%s)", error.what, error.where)
        return None
    return CarriedWeights(directory, tuple(inventory.names(*CARRIED)))


def open_carried(carried: CarriedWeights | None, exported: Collection[str]) -> dict[str, Stored]:
    """Return the tensors to write beside the exported ones, by name; say which are left out or carried on.

    Args:
        carried: The tensors that the files of the model hold beside it.
        exported: Names of the tensors of the model.
    """
    names = [] if carried is None else [n for n in carried.names if n not in exported]
    if carried is None or not names:
        return {}
    facts = (len(names), carried.directory, names[0])
    try:
        tensors = WeightFiles(carried.directory).tensors
        found = {name: tensors[name] for name in names}
    except (WeightsUnreadable, KeyError):
        logger.warning(
            "left out of the export: %d tensors that %s held and the model does not use, first `%s`",
            *facts,
        )
        return {}
    logger.info(
        "written unchanged: %d tensors of %s that the model does not use, first `%s`", *facts
    )
    return found

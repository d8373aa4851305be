"""Loading of pretrained weights, and checksums of base weights, which checkpoints of adapters do not contain."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import nn

from hyper_parallel.backends.torch import load_pretrained
from hyper_parallel.backends.torch.weights.checksums import PartChecksum, joint_checksum
from hyper_parallel.backends.torch.weights.tensor_files import WeightFiles
from hyper_parallel.received import Limits, parse_json
from hyper_parallel.trainer.checkpoints.rank_group import RankGroup
from hyper_parallel.trainer.input_checksums import BASE, RunInputs

METADATA: Final = "base_weights"
"""Key in the metadata of an adapter's weight file."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Checksum of the base weights that adapters were trained on.

    Attributes:
        checksum: Combined checksum of the tensors, independent of the layout.
        names: Names of the stored tensors that the model reads.
    """

    checksum: str
    names: tuple[str, ...]

    def to_metadata(self) -> dict[str, str]:
        """Return the checksum and names as metadata of a safetensors file."""
        return {METADATA: json.dumps({"checksum": self.checksum, "names": self.names})}


def load_base(
    model: nn.Module, directory: Path, *, frozen: bool, **options: Any
) -> BaseWeights | None:
    """Load weights into a model; return their checksum over all ranks, or None if the weights themselves are trained.

    Args:
        model: Model, passed through `parallelize` or not.
        directory: Directory of the weights.
        frozen: Whether the weights stay frozen, so that checkpoints contain only adapters.
        options: Further arguments of `load_pretrained`.
    """
    report = load_pretrained(model, directory, checksums=frozen, **options)
    if not frozen:
        return None
    gathered = RankGroup("base weights", directory).everywhere(lambda: report.checksums)
    parts = list(itertools.chain.from_iterable(gathered))
    checksum = joint_checksum(parts, lambda name: WeightFiles(directory).read(name))
    return BaseWeights(checksum, tuple(sorted({part.box.name for part in parts})))


def check_base(adapter: Path, base: Path) -> None:
    """Raise if base weights are not those that an exported adapter was trained on.

    Adapters without a checksum, written by other programs, pass.

    Args:
        adapter: Weight file of the adapter.
        base: Directory of the weights.

    Raises:
        CheckpointMismatch: HP702 for a different checksum.
    """
    try:
        with safe_open(adapter, framework="pt") as file:
            stored = parse_json((file.metadata() or {}).get(METADATA, "null"), Limits())
        names, checksum = [str(n) for n in stored["names"]], str(stored["checksum"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return
    files = WeightFiles(base)
    parts = (
        PartChecksum.of(name, files.read(name), files.tensors[name].shape)
        for name in names
        if name in files.tensors
    )
    RunInputs({BASE: checksum}).check(BASE, joint_checksum(parts, files.read), base)

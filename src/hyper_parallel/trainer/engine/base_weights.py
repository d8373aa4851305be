"""Loading of pretrained weights, and checksums of the frozen base weights that adapter checkpoints leave out."""

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
from hyper_parallel.errors import CheckpointMismatch
from hyper_parallel.received import Limits, parse_json
from hyper_parallel.trainer.checkpoints.rank_group import RankGroup

METADATA: Final = "base_weights"
"""Key in the metadata of an adapter's weight file."""


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """Checksum of the base weights on which adapters were trained.

    Attributes:
        checksum: Combined checksum of the tensors, independent of the layout.
        names: Names of the tensors in the weight files that enter the checksum.
    """

    checksum: str
    names: tuple[str, ...]

    def to_metadata(self) -> dict[str, str]:
        """Return checksum and names in the metadata format of safetensors files: {`METADATA`: JSON text}."""
        return {METADATA: json.dumps({"checksum": self.checksum, "names": self.names})}


def load_base(model: nn.Module, directory: Path, *, frozen: bool, **options: Any) -> BaseWeights | None:
    """Load weight files into a model; return their checksum over all ranks with `frozen`, else None.

    `frozen` tells that only adapters are trained; the call is then collective over all ranks. `options` are further
    arguments of `load_pretrained`.
    """
    report = load_pretrained(model, directory, checksums=frozen, **options)
    if not frozen:
        return None
    gathered = RankGroup(directory).everywhere(lambda: report.checksums)
    parts = list(itertools.chain.from_iterable(gathered))
    checksum = joint_checksum(parts, lambda name: WeightFiles(directory).read(name))
    return BaseWeights(checksum, tuple(sorted({part.box.name for part in parts})))


def check_base(adapter: Path, base: Path) -> None:
    """Check by checksum that the adapter in weight file `adapter` was trained on the weights in directory `base`.

    Adapters without a readable checksum, as other programs write them, pass the check.

    Raises:
        CheckpointMismatch: HP702 when the checksums differ.
    """
    try:
        with safe_open(adapter, framework="pt") as file:
            stored = parse_json((file.metadata() or {}).get(METADATA, "null"), Limits())
        names, checksum = [str(n) for n in stored["names"]], str(stored["checksum"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return
    files = WeightFiles(base)
    parts = (
        PartChecksum.of(name, files.read(name), files.tensors[name].shape) for name in names if name in files.tensors
    )
    present = joint_checksum(parts, files.read)
    if present != checksum:
        raise CheckpointMismatch(
            "the adapter was trained on other base weights than those in its base model's directory",
            where=str(base),
            got=f"checksum {present}",
            allowed=f"checksum {checksum}",
            hint="restore the weight files, or correct `base_model_name_or_path` in adapter_config.json",
        )

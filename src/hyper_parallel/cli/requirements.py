"""Table of required and optional packages, with the features that need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from hyper_parallel.backends import BACKENDS

EXTRA: Final = "hyper-parallel[torch]"
"""Package name with extra for `pip install`, for training."""

Need = Literal["core", "training", "optional"]


@dataclass(frozen=True, slots=True)
class Requirement:
    """Required or optional package.

    Attributes:
        name: Distribution name.
        minimum: Lowest version that works. Empty: any version.
        need: core (planning and reports), training (also generation), or optional.
        gives: Feature that the package provides.
    """

    name: str
    minimum: str
    need: Need
    gives: str

    @property
    def wanted(self) -> str:
        """Requirement in the syntax of pip, with the lowest version if there is one."""
        return f"{self.name}>={self.minimum}" if self.minimum else self.name


REQUIREMENTS: Final = (
    Requirement("highspy", "1.13", "core", "linear programs of memory planning"),
    Requirement("numpy", "1.25", "core", "planning"),
    Requirement("pydantic", "2.12", "core", "recipes"),
    Requirement("pyyaml", "6.0", "core", "recipes and topology files"),
    Requirement("rich", "13.7", "core", "progress and panels"),
    Requirement("platformdirs", "4.0", "core", "the cache folder"),
    Requirement("scipy", "1.11", "core", "fits of calibration"),
    Requirement("typer", "0.15", "core", "this command"),
    Requirement("torch", "2.11", "training", "training and generation"),
    Requirement("transformers", "5.5", "training", "Hugging Face models"),
    Requirement("datasets", "4.0", "training", "JSONL and parquet data"),
    Requirement("tokenizers", "0.22", "training", "tokenizers"),
    Requirement("safetensors", "0.6", "training", "weight files"),
    Requirement("bokeh", "3.7", "core", "charts of the report page"),
    Requirement("jinja2", "3.1", "core", "the report page, chat templates"),
    Requirement("xxhash", "3.4", "core", "checksums of checkpoints"),
    Requirement("filelock", "3.13", "training", "locks, so that one process prepares the data"),
    Requirement("greenlet", "3.1", "training", "layers that run on half-batches"),
    Requirement("tensorboard", "2.19", "training", "TensorBoard logs"),
    Requirement("peft", "0.18", "optional", "low-rank adapters (lora)"),
    Requirement("ray", "", "optional", "runs and roles on several machines"),
    *(
        Requirement(name, "", "optional", gives)
        for backend in BACKENDS.values()
        for name, gives in backend.packages.items()
    ),
    Requirement(
        "torch_npu",
        "",
        "optional",
        "Ascend accelerators; install the vendor's libraries (CANN) first",
    ),
)

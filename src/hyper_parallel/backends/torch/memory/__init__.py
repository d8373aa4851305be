"""Memory planning on torch: recording of a step as a program over storages, and execution of memory plans.

A storage is one allocation, shared by a tensor and its views. The arena is one device buffer that contains every
resident storage at its planned address. The home tier of a storage is the tier that holds it between steps.

`memory.generation` contains planned generation; it is not imported here because it needs transformers.
"""

from hyper_parallel.backends.torch.memory._capture import StepCapture, model_state, optimizer_state, record
from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._device import Measured, PlannedDevice
from hyper_parallel.backends.torch.memory._fake_values import Workspace, cpu_workspace, device_workspace
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode, spill_mode
from hyper_parallel.backends.torch.memory._recorder import (
    CommCounter,
    Peak,
    Recorder,
    StorageWatch,
    collectives_of,
    peak_of,
)
from hyper_parallel.backends.torch.memory._tiers import FileTier, Meter, run_folder
from hyper_parallel.backends.torch.memory.first_step import ReferenceStep, StepOutcome

__all__ = [
    "Captured",
    "CommCounter",
    "FileTier",
    "LruSpillMode",
    "Measured",
    "Meter",
    "Peak",
    "PlannedDevice",
    "Recorder",
    "ReferenceStep",
    "StepCapture",
    "StepOutcome",
    "StorageWatch",
    "Workspace",
    "collectives_of",
    "cpu_workspace",
    "device_workspace",
    "model_state",
    "optimizer_state",
    "peak_of",
    "record",
    "run_folder",
    "spill_mode",
]

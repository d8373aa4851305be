"""Memory on torch: record a step as a program over storages, run a memory plan on a counted device.

`memory.generation` has the steps of generation; it is not imported here because it needs transformers.
"""

from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._chunked_loss import chunked_loss
from hyper_parallel.backends.torch.memory._device import Measured, PlannedDevice
from hyper_parallel.backends.torch.memory._graph import as_graph
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.memory._operators import Call, View
from hyper_parallel.backends.torch.memory._record import Recorder
from hyper_parallel.backends.torch.memory._resized import ResizeWatch
from hyper_parallel.backends.torch.memory._run_folder import run_folder
from hyper_parallel.backends.torch.memory._steps import (
    cache_state,
    capture_inference,
    capture_training,
    model_state,
    optimizer_state,
    record,
    training_step,
)
from hyper_parallel.backends.torch.memory._streams import DeviceApi
from hyper_parallel.backends.torch.memory._successor import SuccessorDevice
from hyper_parallel.backends.torch.memory._tiers import FileTier, Meter

__all__ = [
    "Call",
    "Captured",
    "DeviceApi",
    "FileTier",
    "LruSpillMode",
    "Measured",
    "Meter",
    "PlannedDevice",
    "Recorder",
    "ResizeWatch",
    "SuccessorDevice",
    "View",
    "as_graph",
    "cache_state",
    "capture_inference",
    "capture_training",
    "chunked_loss",
    "model_state",
    "optimizer_state",
    "record",
    "run_folder",
    "training_step",
]

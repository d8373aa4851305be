"""Offload on torch: capture a step as a program over storages, run a memory plan on a counted simulated device."""

from hyper_parallel.backends.torch.offload._calls import Call, View
from hyper_parallel.backends.torch.offload._captured import Captured
from hyper_parallel.backends.torch.offload._chunked_loss import chunked_loss
from hyper_parallel.backends.torch.offload._execute import Measured, PlannedDevice
from hyper_parallel.backends.torch.offload._generation import (
    MemoryLimits,
    MemoryUse,
    PlannedGeneration,
)
from hyper_parallel.backends.torch.offload._graph import as_graph
from hyper_parallel.backends.torch.offload._own_folder import own_folder
from hyper_parallel.backends.torch.offload._record import Recorder
from hyper_parallel.backends.torch.offload._resized import ResizeWatch
from hyper_parallel.backends.torch.offload._room import Room
from hyper_parallel.backends.torch.offload._steps import (
    cache_state,
    capture_inference,
    capture_training,
    model_state,
    optimizer_state,
    record,
    training_step,
)
from hyper_parallel.backends.torch.offload._streams import DeviceApi
from hyper_parallel.backends.torch.offload._successor import SuccessorDevice
from hyper_parallel.backends.torch.offload._tiers import FileTier, Meter

__all__ = [
    "Call",
    "Captured",
    "DeviceApi",
    "FileTier",
    "Measured",
    "MemoryLimits",
    "MemoryUse",
    "Meter",
    "PlannedDevice",
    "PlannedGeneration",
    "Recorder",
    "ResizeWatch",
    "Room",
    "SuccessorDevice",
    "View",
    "as_graph",
    "cache_state",
    "capture_inference",
    "capture_training",
    "chunked_loss",
    "model_state",
    "optimizer_state",
    "own_folder",
    "record",
    "training_step",
]

"""Memory planning on torch: recording of a step as a program over storages, and execution of memory plans.

`memory.generation` contains planned generation; it is not imported here because it needs transformers.
"""

from hyper_parallel.backends.torch.memory._capture import StepCapture
from hyper_parallel.backends.torch.memory._captured import Captured
from hyper_parallel.backends.torch.memory._device import Measured, PlannedDevice
from hyper_parallel.backends.torch.memory._fake_values import FakeKernels, Workspace
from hyper_parallel.backends.torch.memory._lru_spill import LruSpillMode
from hyper_parallel.backends.torch.memory._recorder import Recorder
from hyper_parallel.backends.torch.memory._run_folder import run_folder
from hyper_parallel.backends.torch.memory._spill_mode import spill_mode
from hyper_parallel.backends.torch.memory._steps import model_state, optimizer_state, record
from hyper_parallel.backends.torch.memory._storage_watch import StorageWatch
from hyper_parallel.backends.torch.memory._tiers import FileTier, Meter
from hyper_parallel.backends.torch.memory._views import CommCounter, Peak, collectives_of, peak_of
from hyper_parallel.backends.torch.memory._workspace import cpu_workspace, device_workspace
from hyper_parallel.backends.torch.memory.first_step import ULPS, ReferenceStep, StepOutcome
from hyper_parallel.backends.torch.memory.operators import Call, View
from hyper_parallel.backends.torch.memory.streams import DeviceApi

__all__ = [
    "ULPS",
    "Call",
    "Captured",
    "CommCounter",
    "DeviceApi",
    "FakeKernels",
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
    "View",
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

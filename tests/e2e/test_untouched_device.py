"""The process that forks ranks never starts the driver of an accelerator: its ranks could not use the device.

What starts it was measured on an H200 with torch 2.11 and CUDA 13: a process in which `cuDeviceGetCount` answers
"not initialized" before and a number after the call.
"""

import os

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hyper_parallel.runtime.launchers import local_capacity
from tests.e2e.runs import QUESTIONS, command, make_stage_place

pytestmark = pytest.mark.torch

STARTING = (
    (torch.cuda, "is_current_stream_capturing"),
    (torch.cuda, "current_device"),
    (torch.cuda, "get_device_properties"),
    (torch.cuda, "_lazy_init"),
    (torch.accelerator, "is_available"),
    (torch.accelerator, "current_device_index"),
    (torch.utils.checkpoint, "checkpoint"),
    (torch.autograd, "backward"),
    (torch.autograd, "grad"),
    (torch.Tensor, "backward"),
    (torch.Tensor, "pin_memory"),
    (FakeTensorMode, "__init__"),
)


@pytest.fixture
def started(monkeypatch):
    """Names of the calls in this process, not in its forks, that would start a driver."""
    calls, here = [], os.getpid()

    def watch(owner, name):
        original = getattr(owner, name)

        def call(*args, **keywords):
            if os.getpid() == here:
                calls.append(name)
            return original(*args, **keywords)

        monkeypatch.setattr(owner, name, call)

    for owner, name in STARTING:
        watch(owner, name)
    return calls


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("untouched")
    return make_stage_place(root, "sft", QUESTIONS, data={"packing": True})


CASES = {
    "packed": ["parallel.dp_shard=1"],
    "pp": ["parallel.pp=2", "data.packing=false"],
    "cp": ["parallel.cp=2"],
    "tp": ["parallel.tp=2"],
    "lora": ["parallel.tp=2", "lora.r=2"],
    "recompute": ["parallel.dp_shard=2", "training.recompute=full"],
    "auto": ["parallel=auto"],
}


@pytest.mark.parametrize("case", CASES)
def test_planning_starts_no_driver(place, started, tmp_path, case):
    out = f"output_dir={tmp_path}/run"
    result = command("train", str(place / "recipe.yaml"), *CASES[case], out, "--dry-run")
    assert result.exit_code == 0, result.output
    assert started == []


def test_counting_devices_asks_without_the_driver(monkeypatch):
    asked = []
    original = torch.accelerator.current_accelerator

    def call(*args, **keywords):
        asked.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))
        return original(*args, **keywords)

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", call)
    local_capacity()
    assert asked == ["1"]
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_the_trial_of_an_optimizer_starts_no_driver(place, started, tmp_path, monkeypatch):
    """Adam asks whether a stream is captured where torch is built for CUDA."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ("training.optimizer=torch.optim.NAdam", "parallel.dp_shard=2")
    out = f"output_dir={tmp_path}/run"
    result = command("train", str(place / "recipe.yaml"), *words, out, "--dry-run")
    assert result.exit_code == 0, result.output
    assert started == []

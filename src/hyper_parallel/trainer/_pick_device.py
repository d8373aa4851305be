"""The device that a command computes on, by name."""

from __future__ import annotations

import torch

from hyper_parallel.errors import BadValue, DeviceUnavailable


def pick_device(device: str) -> torch.device:
    """The device by name; `auto` is the accelerator when there is one, else the CPU.

    Raises:
        DeviceUnavailable: HP502 when the machine lacks it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device == "auto":
        return accelerator or torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise BadValue("not the name of a device", got=device, allowed="auto, cpu, cuda") from error
    present = accelerator is not None and accelerator.type == chosen.type
    if chosen.type != "cpu" and (
        not present or (chosen.index or 0) >= torch.accelerator.device_count()
    ):
        raise DeviceUnavailable(
            "this machine does not have the device",
            got=device,
            allowed=f"auto, cpu, {accelerator.type}" if accelerator else "auto, cpu",
            hint="--device auto",
        )
    return chosen

"""Selection of a command's device by name."""

from __future__ import annotations

import torch

from hyper_parallel.errors import BadValue, DeviceUnavailable


def pick_device(device: str) -> torch.device:
    """Return the device of a name; `auto` is the accelerator if there is one, else the CPU.

    Raises:
        BadValue: HP102 for a name that is not a device.
        DeviceUnavailable: HP502 when the machine does not have the device.
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

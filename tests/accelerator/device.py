"""The emulated accelerator `emu` as torch sees it: compiled once, registered as a vendor's plug-in would be.

It behaves as a real device does where the memory plans rely on it: streams and events are asynchronous, memory is
counted and can run out, freed bytes become NaN, only pinned memory is copied without the host. Its results are the
CPU's bits, because the CPU's kernels make them on the same memory. Importing `load` changes a process for good, so
the tests use a process of their own.
"""

import shutil
import types
from contextlib import contextmanager
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / ".cache" / "emulated_accelerator"


def why_not():
    """Why it cannot be built here; None: it can."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    return f"no compiler here: {' and '.join(missing)} missing" if missing else None


def _built():
    import torch
    from torch.utils.cpp_extension import load as compiled

    folder = BUILD / torch.__version__
    folder.mkdir(parents=True, exist_ok=True)
    return compiled(
        "emulated_accelerator",
        [str(HERE / "emulated.cpp")],
        extra_cflags=["-O0", "-g0"],
        build_directory=str(folder),
    )


@cache
def load():
    """Register the device as `emu`; its knobs."""
    import torch

    knobs = _built()
    torch.utils.rename_privateuse1_backend("emu")
    torch._register_device_module("emu", _module(torch, knobs))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _register_collectives(knobs)
    return knobs


def _register_collectives(knobs):
    import torch.distributed as dist

    def made(store, rank, size, timeout):
        return knobs.collectives(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("emuccl", made, devices=["emu"])


def _module(torch, knobs):
    """The names of `torch.cuda` that libraries use."""
    module = types.ModuleType("torch.emu")
    here = torch.accelerator

    def index(device=None):
        if device is None:
            return here.current_device_index()
        if isinstance(device, int):
            return device
        number = torch.device(device).index
        return here.current_device_index() if number is None else number

    class Event:  # makes torch's own: `elapsed_time` takes no derived ones
        elapsed_time = torch.Event.elapsed_time

        def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
            return torch.Event("emu", enable_timing=enable_timing, blocking=blocking)

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **known):
            if known:
                return super().__new__(cls, priority=priority, **known)
            return super().__new__(cls, torch.device("emu", index(device)), priority=priority)

    @contextmanager
    def stream(given):
        if given is None:
            yield
            return
        with given:
            yield

    def seeded(seed):
        for number in range(knobs.devices()):
            generator(number).manual_seed(seed)

    def generator(device=None):
        return knobs.generator(index(device))

    stats = here.memory
    names = {
        "Event": Event,
        "Stream": Stream,
        "stream": stream,
        "StreamContext": stream,
        "is_available": lambda: knobs.devices() > 0,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": knobs.devices,
        "current_device": here.current_device_index,
        "set_device": lambda device: here.set_device_index(index(device)),
        "device": lambda device: here.device_index(index(device)),
        "current_stream": lambda device=None: here.current_stream(index(device)),
        "default_stream": lambda device=None: torch.Stream(stream_id=0, device_index=index(device), device_type=20),
        "set_stream": here.set_stream,
        "synchronize": lambda device=None: here.synchronize(index(device)),
        "memory_allocated": lambda device=None: stats.memory_allocated(index(device)),
        "max_memory_allocated": lambda device=None: stats.max_memory_allocated(index(device)),
        "memory_reserved": lambda device=None: stats.memory_reserved(index(device)),
        "max_memory_reserved": lambda device=None: stats.max_memory_reserved(index(device)),
        "reset_peak_memory_stats": lambda device=None: stats.reset_peak_memory_stats(index(device)),
        "memory_stats": lambda device=None: stats.memory_stats(index(device)),
        "mem_get_info": lambda device=None: stats.get_memory_info(index(device)),
        "empty_cache": stats.empty_cache,
        "get_device_name": lambda device=None: "emulated accelerator",
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda: True,
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": seeded,
        "initial_seed": lambda: generator().initial_seed(),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "default_generators": [knobs.generator(n) for n in range(knobs.devices())],
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module

"""Local detection: vendor tools are read as they print, a CPU is divided among ranks, and no framework is imported."""

import json
import os
import stat
import subprocess
import sys

import pytest

from hyper_parallel.errors import BadValue, DeviceUnavailable, UnknownDevice
from hyper_parallel.topology import detect_local, find_accelerators, load_topology, rank_threads
from hyper_parallel.topology.cpu_machine import cache_dir, cpu_rates, read_cpu
from hyper_parallel.topology.loading import parse_npu_smi, parse_nvidia_smi

pytestmark = pytest.mark.unit

NVIDIA = "name, memory.total [MiB]\n" + "NVIDIA H200, 143771 MiB\n" * 8
NPU = """\
\tNPU ID                         Chip ID                        Chip Logic ID                  Chip Name
\t0                              0                              0                              Ascend 910B3
\t0                              1                              -                              Mcu
\t1                              0                              1                              Ascend 910B3
\t1                              1                              -                              Mcu
"""


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A PATH that holds only the given vendor tools, and an empty cache."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def add(name, output, status=0):
        (folder / f"{name}.out").write_text(output)
        script = folder / name
        script.write_text(f"#!/bin/sh\n/bin/cat {folder / name}.out\nexit {status}\n")
        script.chmod(script.stat().st_mode | stat.S_IEXEC)

    return add


def test_nvidia_machine_takes_its_card_and_reported_memory(tools):
    tools("nvidia-smi", NVIDIA)
    machine = detect_local()
    preset = load_topology("dgx-h200")
    assert machine.name == "local"
    assert machine.num_devices == 8
    assert machine.device.peak_flops == preset.device.peak_flops
    assert machine.device.memory_bytes.value == 143771 * 2**20
    assert machine.device.memory_bytes.certainty == "measured"
    assert machine.tiers == preset.tiers
    assert detect_local(2).num_devices == 2
    with pytest.raises(DeviceUnavailable, match="HP502"):
        detect_local(9)


def test_visible_devices_are_respected(tools, monkeypatch):
    tools("nvidia-smi", NVIDIA)
    for selection, count in (("0,3", 2), ("", 0), ("-1", 0), ("1,99,2", 1), ("GPU-aa,GPU-bb", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", selection)
        assert len(find_accelerators()) == count, selection


def test_npu_machine(tools):
    tools("npu-smi", NPU)
    machine = detect_local()
    assert machine.num_devices == 2
    assert machine.device.name == "Ascend 910B"


def test_unknown_accelerator_is_refused_by_name(tools):
    tools("nvidia-smi", "name, memory.total [MiB]\nNVIDIA Imaginary 9, 1000 MiB\n")
    with pytest.raises(UnknownDevice, match="Imaginary 9"):
        detect_local()


def test_failing_tool_means_no_accelerator(tools):
    tools("nvidia-smi", "NVIDIA-SMI has failed because it could not reach the driver\n", status=9)
    assert find_accelerators() == []


def test_parsers_ignore_other_lines():
    assert parse_nvidia_smi("") == []
    assert parse_nvidia_smi("header\n[N/A], [N/A]\n") == []
    assert [a.name for a in parse_npu_smi(NPU)] == ["Ascend 910B3", "Ascend 910B3"]


def test_cpu_is_divided_among_ranks_and_cached(tools, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(read_cpu().cores))
    four = detect_local()
    assert (four.num_devices, four.device.kind) == (4, "cpu")
    assert 1e8 < four.peak_flops("float32") < 1e14
    assert four.peak_flops("float64") < 1.5 * four.peak_flops("float32")
    assert 4 * four.device.memory_bytes.value <= read_cpu().memory_bytes
    files = list(cache_dir().glob("cpu-*.json"))
    assert len(files) == 1
    two = detect_local(2)  # from the cache: exactly twice the share
    assert two.peak_flops("float32") == 2 * four.peak_flops("float32")
    with pytest.raises(BadValue):
        detect_local(0)


def test_a_rank_computes_with_the_threads_it_has(tools, monkeypatch):
    cpu = read_cpu()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone, every = detect_local(1), detect_local(cpu.cores)
    # One thread is one core, however many are idle; as many ranks as cores use them all.
    assert alone.peak_flops("float32") == pytest.approx(cpu_rates(cpu)["float32"] / cpu.cores)
    assert every.peak_flops("float32") == pytest.approx(alone.peak_flops("float32"))
    assert alone.device.memory_bytes_s.value == every.device.memory_bytes_s.value
    monkeypatch.delenv("OMP_NUM_THREADS")
    whole = detect_local(1)
    assert whole.peak_flops("float32") == pytest.approx(cpu_rates(cpu)["float32"])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs CPU affinity")
def test_ranks_share_the_cores_that_the_process_may_use(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert [rank_threads(ranks) for ranks in (1, 2, 4)] == [2, 1, 1]


def test_damaged_cache_is_measured_again(tools):
    cpu = read_cpu()
    cpu_rates(cpu)
    (file,) = cache_dir().glob("cpu-*.json")
    file.write_text("{")
    assert cpu_rates(cpu)["float32"] > 0
    assert json.loads(file.read_text())["rates"]["float32"] > 0


@pytest.mark.parametrize(
    "failure", [("sys.executable", "/bin/false"), (f"{cpu_rates.__module__}._MEASURE_TIMEOUT_S", 0)]
)
def test_failed_measurement_is_a_coded_error(tools, monkeypatch, failure):
    monkeypatch.setattr(*failure)
    with pytest.raises(UnknownDevice, match="cannot be measured"):
        detect_local(1)


def test_detection_imports_no_framework(tmp_path):
    code = (
        "import sys; from hyper_parallel.topology import detect_local; detect_local();"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    env = {
        **os.environ,
        "PATH": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"


def test_cpu_ranks_that_share_cores_get_slower_links(tools):
    cores = read_cpu().cores
    own, shared = detect_local(cores), detect_local(4 * cores)
    assert shared.tiers[0].bytes_s.value == own.tiers[0].bytes_s.value / 4
    assert shared.tiers[0].latency_s.value == own.tiers[0].latency_s.value * 4

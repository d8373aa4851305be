"""Two hosts on one machine: network namespaces with a cable between them, own names and a shared folder."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HOSTS = {"hp-left": "192.0.2.1", "hp-right": "192.0.2.2"}  # TEST-NET-1, RFC 5737
IN_HOST = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


@contextmanager
def two_hosts(directory: Path) -> Iterator[Path]:
    """Make the hosts, and remove them with all that runs there; the file with their names."""
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} {h}\n" for h, a in HOSTS.items()))
    try:
        _ip("netns", "add", "hp-left", check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not make network namespaces")
    try:
        _ip("netns", "add", "hp-right", check=True)
        _ip(
            "link",
            "add",
            "eth0",
            "netns",
            "hp-left",
            "type",
            "veth",
            "peer",
            "eth0",
            "netns",
            "hp-right",
            check=True,
        )
        for host, address in HOSTS.items():
            _ip("-n", host, "address", "add", f"{address}/24", "dev", "eth0", check=True)
            for link in ("lo", "eth0"):
                _ip("-n", host, "link", "set", link, "up", check=True)
        yield hosts
    finally:
        for host in HOSTS:
            power_off(host)
            _ip("netns", "delete", host)


def running(host: str) -> list[int]:
    """Processes on a host."""
    return [int(pid) for pid in _ip("netns", "pids", host).split()]


def power_off(host: str) -> None:
    """Kill everything on a host."""
    while pids := running(host):
        for pid in pids:
            os.kill(pid, 9)


def on_host(host: str, hosts: Path, *words: str) -> subprocess.Popen[str]:
    """Start a command on a host."""
    inside = ["unshare", "--uts", "sh", "-c", IN_HOST, "sh", host, str(hosts), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *inside], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def _ip(*words: str, check: bool = False) -> str:
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True).stdout

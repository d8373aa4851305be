"""A Ray cluster that cannot be reached is an error with a code that names the setting of its address."""

import sys
from types import ModuleType

import pytest

from hyper_parallel import Controller
from hyper_parallel.errors import DeviceUnavailable
from hyper_parallel.runtime.launchers import launch_on_ray


@pytest.fixture
def ray(monkeypatch):
    module = ModuleType("ray")
    module.is_initialized = lambda: False
    module.problem = ConnectionError("Could not find any running Ray instance.")

    def init(address=None, **_options):
        raise module.problem

    module.init = init
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return module


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError])
def test_the_address_of_the_recipe_is_named(ray, kind):
    ray.problem = kind("no cluster")
    with pytest.raises(DeviceUnavailable, match="no cluster") as caught:
        launch_on_ray(print, ranks=2, nnodes=1, address="node7:6379")
    assert (caught.value.code, caught.value.where, caught.value.got) == ("HP502", "launch.ray_address", "node7:6379")


def test_the_environment_variable_is_named(ray, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "node8:6379")
    with pytest.raises(DeviceUnavailable) as caught:
        launch_on_ray(print, ranks=2, nnodes=1)
    assert (caught.value.where, caught.value.got) == ("RAY_ADDRESS", "node8:6379")
    with pytest.raises(DeviceUnavailable) as caught:
        Controller("ray")
    assert caught.value.where == "RAY_ADDRESS"


def test_a_failed_start_of_a_local_cluster_is_not_called_an_unreachable_address(ray):
    with pytest.raises(ConnectionError):
        launch_on_ray(print, ranks=2, nnodes=1)

"""Back-end and machine errors, HP5xx."""

from hyper_parallel.errors._base import HyperParallelError


class MissingDependency(HyperParallelError):
    """A package that the command needs is not installed or is too old.

    Fix: run the install command in the hint.
    """

    code = "HP501"


class DeviceUnavailable(HyperParallelError):
    """More ranks were asked for than the machine has accelerators, or the device kind is not present.

    Fix: lower the degrees, or start the run on more machines with torchrun.
    """

    code = "HP502"

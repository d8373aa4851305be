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


class CaptureUnsupported(HyperParallelError):
    """The step does something that a captured program cannot repeat faithfully.

    Examples: a result whose size depends on the data, a storage that is resized, a sparse tensor. Fix: the hint
    names the setting of the model or optimizer that avoids it.
    """

    code = "HP511"


class StepChanged(HyperParallelError):
    """A captured step met values, shapes, a model or an optimizer that it was not captured for.

    A branch of the model depends on a value; the capture recorded the branch that was taken. Or something has changed
    that is in no tensor: a learning rate, a hook, `eval()`, a parameter that was exchanged. Fix: undo the change, or
    capture again, or run this step without the plan.
    """

    code = "HP512"


class TransferFailed(HyperParallelError):
    """A copy between memory tiers failed: disk full, file truncated or changed, copy thread died.

    The step is stopped; nothing reads bytes that did not arrive. Fix: the message names the tier and the cause.
    """

    code = "HP513"

"""Layout and sharding errors, HP2xx."""

from hyper_parallel.errors._base import HyperParallelError


class MeshError(HyperParallelError):
    """A mesh names an axis twice, has a degree below one, or does not cover its devices.

    Fix: let the degrees multiply to the number of devices.
    """

    code = "HP201"


class LayoutError(HyperParallelError):
    """A layout uses an axis twice, or an axis that the mesh does not have.

    Why: two tensor dims split over one axis describe no tensor. Fix: use each axis once.
    """

    code = "HP202"


class NotDivisible(HyperParallelError):
    """A size of the model is not divisible by the degree that would split it.

    Why: whole attention heads and equal slices keep the result exact. Fix: choose one of the allowed degrees.
    """

    code = "HP203"


class RuleError(HyperParallelError):
    """A sharding rule matches no parameter, or names a style that does not exist.

    Fix: check the glob against the parameter names of the model.
    """

    code = "HP204"


class UnsupportedSharding(HyperParallelError):
    """The combination of model and parallel axes is not implemented.

    Why: an answer that is not exact is refused, never approximated. Fix: use the axes named in the hint.
    """

    code = "HP205"


class AuditError(HyperParallelError):
    """After parallelize, a parameter does not lie as its plan says.

    Fix: this is a defect of hyper_parallel or of a module that replaced its own parameters; report the name.
    """

    code = "HP206"

"""Configuration errors, HP1xx."""

from hyper_parallel.errors._base import HyperParallelError


class UnknownKey(HyperParallelError):
    """A recipe, override or file holds a key that does not exist.

    Why: a misspelt key that is ignored would silently change the run. Fix: use the nearest key named in the hint.
    """

    code = "HP101"


class BadValue(HyperParallelError):
    """A value has the wrong type or lies outside what its key allows.

    Fix: write one of the allowed values.
    """

    code = "HP102"


class RecipeUnreadable(HyperParallelError):
    """The recipe file is missing, is not YAML or JSON, or is not a mapping.

    Fix: check the path and the line that is named.
    """

    code = "HP103"


class Contradiction(HyperParallelError):
    """Two values that are each allowed cannot hold together.

    Fix: change or remove one of the two values named.
    """

    code = "HP104"


class OutputNotWritable(HyperParallelError):
    """A directory that is to be written cannot be created or written.

    Fix: choose another directory for the key that is named, or change the permissions.
    """

    code = "HP105"

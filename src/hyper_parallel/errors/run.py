"""Errors of a run, HP6xx."""

from hyper_parallel.errors._base import HyperParallelError


class RankFailed(HyperParallelError):
    """A rank ended with an error; the first one to fail is printed in full.

    Fix: read the first failure; the other ranks were stopped because of it.
    """

    code = "HP601"


class NoData(HyperParallelError):
    """The data source is missing, unreadable, or yields no training tokens.

    Fix: check the path, the format, and that `data.seq_len` is shorter than the text.
    """

    code = "HP602"


class RunUnreadable(HyperParallelError):
    """A run directory lacks the files the command needs.

    Fix: give the directory that `hyper-parallel train` wrote.
    """

    code = "HP603"


class LossNotFinite(HyperParallelError):
    """The loss became NaN or infinite; the step was not applied and the last checkpoint is intact.

    Fix: lower `training.lr`, or resume from the last checkpoint with other data.
    """

    code = "HP604"


class ForkUnsafe(HyperParallelError):
    """Local ranks were to be forked from a process that is a member of a process group.

    Fix: close the world (`World.close`, or leave its `with` block) before `launch`, or start the ranks with torchrun.
    """

    code = "HP605"

"""Errors before a run: configuration HP1xx, layouts HP2xx, plans and machines HP3xx."""

from hyper_parallel.errors._base import HyperParallelError


class UnknownKey(HyperParallelError, code="HP101"):
    """A recipe, override or file holds a key that does not exist.

    Why: a misspelt key that is ignored would silently change the run. Fix: use the nearest key named in the hint.
    """


class BadValue(HyperParallelError, code="HP102"):
    """A value has the wrong type or lies outside what its key allows.

    Fix: write one of the allowed values.
    """


class RecipeUnreadable(HyperParallelError, code="HP103"):
    """The recipe file is missing, is not YAML or JSON, or is not a mapping.

    Fix: check the path and the line that is named.
    """


class Contradiction(HyperParallelError, code="HP104"):
    """Two values that are each allowed cannot hold together.

    Fix: change or remove one of the two values named.
    """


class NotImportable(HyperParallelError, code="HP109"):
    """A recipe names code by a dotted path, and there is no such class or function, or none of the kind that is needed.

    Why: `module.Class` is imported from the current directory or what is installed, before any rank starts. Fix: check
    the path, and that the class derives from the base class that is named.
    """


class CodeRefused(HyperParallelError, code="HP110"):
    """`--no-code` was given, and the recipe names Python code that a run would import.

    Why: an optimizer, a callback, a reward, an environment or the code of a model is a program of whoever wrote it, and
    runs with your rights. Fix: read that code first and leave `--no-code` out, or remove the key that is named.
    """


class OutputNotWritable(HyperParallelError, code="HP105"):
    """A file or directory that is to be written cannot be created or written: permissions, or a disk without space.

    Outputs that a run can do without are reported so when everything else is done. Fix: choose another directory for
    the key that is named, change the permissions, or make space; a run then goes on from its newest checkpoint.
    """


class MeshError(HyperParallelError, code="HP201"):
    """A mesh names an axis twice, has a degree below one, or does not cover its devices.

    Fix: let the degrees multiply to the number of devices.
    """


class LayoutError(HyperParallelError, code="HP202"):
    """A layout uses an axis twice, or an axis that the mesh does not have.

    Why: two tensor dims split over one axis describe no tensor. Fix: use each axis once.
    """


class NotDivisible(HyperParallelError, code="HP203"):
    """A size of the model is not divisible by the degree that would split it.

    Why: whole attention heads and equal slices keep the result exact. Fix: choose one of the allowed degrees.
    """


class RuleError(HyperParallelError, code="HP204"):
    """A sharding rule matches no parameter, or names a style that does not exist.

    Fix: check the glob against the parameter names of the model.
    """


class UnsupportedSharding(HyperParallelError, code="HP205"):
    """The combination of model and parallel axes is not implemented.

    Why: an answer that is not exact is refused, never approximated. Fix: use the axes named in the hint.
    """


class AuditError(HyperParallelError, code="HP206"):
    """After parallelize, a parameter does not lie as its plan says.

    Fix: this is a defect of hyper_parallel or of a module that replaced its own parameters; report the name.
    """


class DegreesMismatch(HyperParallelError, code="HP301"):
    """The parallel degrees do not multiply to the number of ranks.

    Fix: change one degree as the hint shows, or start another number of ranks.
    """


class NoLegalStrategy(HyperParallelError, code="HP302"):
    """No combination of degrees is legal and fits for this model, machine and workload.

    Fix: the hint names the nearest change that makes one possible.
    """


class UnknownTopology(HyperParallelError, code="HP303"):
    """The topology is neither a preset, nor a YAML file, nor `local`.

    Fix: take one of the presets that the message lists, or give the path of a topology file.
    """


class UnknownModel(HyperParallelError, code="HP304"):
    """The model is neither a preset, nor a directory with a config.json, nor a config file.

    Fix: give a path, or one of the presets listed.
    """


class ModelUnreadable(HyperParallelError, code="HP305"):
    """The config of the model lacks what is needed to plan it.

    Fix: the message names the missing keys; add them or use a model of a family that is read.
    """


class PlanUnreadable(HyperParallelError, code="HP306"):
    """A plan file is not JSON, has another schema version, or a value of the wrong type.

    Fix: make the plan again with `hyper-parallel plan ... -o plan.json`.
    """


class PlanMismatch(HyperParallelError, code="HP307"):
    """A plan was made for another model, number of devices or workload than it is applied to.

    Fix: make a plan for this model and machine.
    """


class BatchMismatch(HyperParallelError, code="HP308"):
    """tokens_per_step, microbatch and accumulation do not agree, or do not divide.

    Why: of the three batch numbers two are given and the third is derived. Fix: take the value in the hint.
    """


class TopologyUnreadable(HyperParallelError, code="HP309"):
    """A topology file cannot be read, is not YAML, or is not a mapping.

    Fix: check the path and the line that is named; the presets are examples of the form.
    """


class UnknownPeak(HyperParallelError, code="HP310"):
    """The topology does not say how fast its device is in the number format that is asked for.

    Why: peak rates of two formats are not related by a rule that holds on every device.
    Fix: plan in a listed format, or add the number with its source to a copy of the topology file.
    """


class TopologyTooSmall(HyperParallelError, code="HP311"):
    """More devices are used than the outermost tier of the topology connects.

    Why: how the devices beyond it would talk to each other is not known.
    Fix: use fewer devices, or add an outer tier to a copy of the topology file.
    """


class UnknownDevice(HyperParallelError, code="HP312"):
    """This machine has an accelerator that no preset describes.

    Why: its peak rates and links are unknown, and a guess would decide the plan.
    Fix: write a topology file for it, with the nearest preset as the example, and give its path as the topology.
    """


class CardUnreadable(HyperParallelError, code="HP313"):
    """A card of device or stack numbers cannot be read, or holds a number that nothing reads.

    Why: a number that is silently ignored would decide predictions by its absence.
    Fix: take a shipped card as the example, or make one with `hyper-parallel calibrate`.
    """


class RunsUnreadable(HyperParallelError, code="HP314"):
    """A CSV of runs cannot be read, or no row of it holds what a prediction needs.

    Fix: the message names the columns; every row's own problem is in the column `assumptions` of the output.
    """


class LauncherIncomplete(HyperParallelError, code="HP315"):
    """The environment variables of a launcher (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...) are missing or wrong.

    Why: a rank that does not know its place would wait for the others for ever. Fix: start the ranks with torchrun,
    which sets all of them, or remove `RANK` from the environment to start local ranks without it.
    """


class ScheduleError(HyperParallelError, code="HP320"):
    """A pipeline schedule is impossible, would deadlock, computes something twice or not at all, or cannot be read.

    Why: a wrong schedule hangs or gives other gradients, so it is refused before any process starts.
    Fix: the message marks the offending action in the grid of the schedule; for a generated schedule take one of the
    microbatch counts that are listed.
    """


class TaskGraphError(HyperParallelError, code="HP321"):
    """A task graph lists a task before what it depends on, or has a negative duration.

    Why: the order of the list is the proof that the graph has no cycle and that its executors cannot deadlock.
    Fix: list every task after the tasks it depends on.
    """


class DeadlineMissed(HyperParallelError, code="HP322"):
    """No strategy on the devices that there are makes a step as short as the deadline asks.

    Fix: take the deadline in the hint, which is met, or give more devices.
    """

"""Errors before a run: configuration HP1xx, layouts HP2xx, plans and machines HP3xx."""

from hyper_parallel.errors._base import HyperParallelError


class UnknownKey(HyperParallelError, code="HP101"):
    """A recipe, override or file holds a key that does not exist.

    Why: a misspelt key that is ignored would silently change the run. Fix: use the nearest key named in the hint.
    """


class BadValue(HyperParallelError, code="HP102"):
    """A value has the wrong type or is outside the allowed range of its key.

    Fix: use one of the allowed values.
    """


class RecipeUnreadable(HyperParallelError, code="HP103"):
    """The recipe file is missing, is not YAML or JSON, or is not a mapping.

    Fix: check the path and the line that is named.
    """


class Contradiction(HyperParallelError, code="HP104"):
    """Two values are allowed individually, but not together.

    Fix: change or remove one of the two values named.
    """


class NotImportable(HyperParallelError, code="HP109"):
    """A dotted path in the recipe does not name an importable class or function of the required kind.

    Why: `module.Class` is imported from the current directory or the installed packages, before any rank starts.

    Fix: check the path, and that the class derives from the base class named in the message.
    """


class CodeRefused(HyperParallelError, code="HP110"):
    """`--no-code` was given, and the recipe names Python code that the run would import.

    Why: an optimizer, a callback, a reward, an environment or the code of a model is a program by its author and runs
    with your rights. Fix: review that code and omit `--no-code`, or remove the key named in the message.
    """


class OutputNotWritable(HyperParallelError, code="HP105"):
    """A file or directory cannot be created or written: missing permissions or a full disk.

    For optional outputs, the error is reported after the rest of the work is done. Fix: choose another directory for
    the key named in the message, change the permissions, or free disk space; a run then resumes from its newest
    checkpoint.
    """


class MeshError(HyperParallelError, code="HP201"):
    """A mesh names an axis twice, has a degree below one, or does not cover its devices.

    Fix: choose degrees whose product is the number of devices.
    """


class LayoutError(HyperParallelError, code="HP202"):
    """A layout uses an axis twice, or an axis that the mesh does not have.

    Why: two tensor dims cannot be sharded over the same axis. Fix: use each axis once, and only axes of the mesh.
    """


class NotDivisible(HyperParallelError, code="HP203"):
    """A size of the model is not divisible by the parallel degree that would shard it.

    Why: whole attention heads and equal slices keep the result exact. Fix: choose one of the allowed degrees.
    """


class RuleError(HyperParallelError, code="HP204"):
    """A rule of `parallel.rules` matches no parameter, or names an unknown sharding style.

    Fix: check the glob against the parameter names of the model, or use a style listed in the message.
    """


class UnsupportedSharding(HyperParallelError, code="HP205"):
    """The combination of model and parallel axes is not supported.

    Why: a combination without an exact result is refused, never approximated. Fix: use the axes named in the hint.
    """


class AuditError(HyperParallelError, code="HP206"):
    """After `parallelize`, the layout of a parameter differs from its plan.

    Fix: report the parameter name; this is a defect of hyper_parallel or of a module that replaced its own parameters.
    """


class DegreesMismatch(HyperParallelError, code="HP301"):
    """The product of the parallel degrees differs from the number of ranks.

    Fix: change a degree as shown in the hint, or start another number of ranks.
    """


class NoLegalStrategy(HyperParallelError, code="HP302"):
    """No combination of degrees is legal and fits this model, machine and workload.

    Fix: apply the change in the hint, the smallest change for which a strategy exists.
    """


class UnknownTopology(HyperParallelError, code="HP303"):
    """The topology is neither a preset, nor a YAML file, nor `local`.

    Fix: use one of the presets listed in the message, or the path of a topology file.
    """


class UnknownModel(HyperParallelError, code="HP304"):
    """The model is no preset, no directory with a config.json, no config file, and not available on the Hub.

    Fix: use a path, a Hub name, or one of the presets listed in the message.
    """


class ModelUnreadable(HyperParallelError, code="HP305"):
    """The config of the model lacks keys that planning requires.

    Fix: add the keys named in the message, or use a model of a supported family.
    """


class PlanUnreadable(HyperParallelError, code="HP306"):
    """A plan file is not JSON, has another schema version, or contains a value of the wrong type.

    Fix: create the plan again with `hyper-parallel plan ... -o plan.json`.
    """


class PlanMismatch(HyperParallelError, code="HP307"):
    """A plan was created for another model, number of devices or workload.

    Fix: create a plan for this model and machine.
    """


class BatchMismatch(HyperParallelError, code="HP308"):
    """tokens_per_step, microbatch and accumulation_steps contradict each other, or one of them is not divisible.

    Why: two of the three batch numbers determine the third, which must be a whole number. Fix: use the value in the
    hint.
    """


class TopologyUnreadable(HyperParallelError, code="HP309"):
    """A topology file cannot be read, is not YAML, or is not a mapping.

    Fix: check the path and the line named in the message; the presets are examples.
    """


class UnknownPeak(HyperParallelError, code="HP310"):
    """The topology states no peak FLOP/s of its device for the requested dtype.

    Why: the ratio between the peak rates of two dtypes differs from device to device.
    Fix: plan with a listed dtype, or add the peak rate and its source to a copy of the topology file.
    """


class TopologyTooSmall(HyperParallelError, code="HP311"):
    """The plan needs more devices than the outermost tier of the topology connects.

    Why: the interconnect beyond that tier is unknown.
    Fix: use fewer devices, or add an outer tier to a copy of the topology file.
    """


class UnknownDevice(HyperParallelError, code="HP312"):
    """No preset describes the accelerator of this machine.

    Why: its peak rates and links are unknown, and guesses would determine the plan.
    Fix: write a topology file based on the nearest preset, and set its path as the topology.
    """


class CardUnreadable(HyperParallelError, code="HP313"):
    """A card (file with cost-model constants of a device or a software stack) is unreadable or has unknown keys.

    Why: an ignored constant would silently change predictions.
    Fix: use a shipped card as an example, or create a card with `hyper-parallel calibrate`.
    """


class RunsUnreadable(HyperParallelError, code="HP314"):
    """A CSV of runs cannot be read, or no row has the columns that a prediction needs.

    Fix: add the columns named in the message. The column `assumptions` of the output states the problem of each row.
    """


class LauncherIncomplete(HyperParallelError, code="HP315"):
    """Environment variables of a launcher (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...) are missing or invalid.

    Why: a rank without a valid position would wait for the others forever. Fix: start the ranks with torchrun, which
    sets all of them, or unset `RANK` to start local ranks without a launcher.
    """


class ScheduleError(HyperParallelError, code="HP320"):
    """A pipeline schedule is illegal, deadlocks, repeats or omits an action, or cannot be read.

    Why: an invalid schedule hangs or computes wrong gradients, so it is refused before any process starts.
    Fix: see the action marked in the grid of the schedule; for a generated schedule, use one of the listed microbatch
    counts.
    """


class TaskGraphError(HyperParallelError, code="HP321"):
    """A task graph lists a task before one of its dependencies, or has a negative duration.

    Why: the order of the list proves that the graph has no cycle and that its executors cannot deadlock.
    Fix: list every task after its dependencies.
    """


class DeadlineMissed(HyperParallelError, code="HP322"):
    """No strategy on the available devices meets the deadline of a step.

    Fix: use the deadline in the hint, which can be met, or provide more devices.
    """

"""Coded errors, rendered in one fixed form.

Families: configuration 1xx, layout 2xx, plan 3xx, capacity 4xx, back end 5xx, run 6xx, checkpoint 7xx. Mistakes of
users and failures of machines raise one of these; `assert` guards internal invariants.
"""

from collections.abc import Mapping
from types import MappingProxyType

from hyper_parallel.errors._base import HyperParallelError as HyperParallelError
from hyper_parallel.errors._base import all_codes as all_codes
from hyper_parallel.errors._base import reported_by as reported_by
from hyper_parallel.errors._callers import Caller as Caller
from hyper_parallel.errors._callers import overrides as overrides
from hyper_parallel.errors._callers import value_text as value_text
from hyper_parallel.errors._printable import PrintableFormatter as PrintableFormatter
from hyper_parallel.errors._printable import abbreviated as abbreviated
from hyper_parallel.errors._printable import console as console
from hyper_parallel.errors._printable import printable as printable
from hyper_parallel.errors._written import DISK_ERRORS as DISK_ERRORS
from hyper_parallel.errors._written import OutputNotWritable as OutputNotWritable
from hyper_parallel.errors._written import Unwritten as Unwritten
from hyper_parallel.errors._written import not_writable as not_writable
from hyper_parallel.errors._written import written as written


class UnknownKey(HyperParallelError, code="HP101"):
    """A recipe, override or file holds a key that does not exist.

    Why: a misspelt key that is ignored would silently change the run. Fix: use the key in the hint, or an allowed key.
    """


class BadValue(HyperParallelError, code="HP102"):
    """A value has the wrong type or is outside the allowed range of its key.

    Fix: use one of the allowed values.
    """


class RecipeUnreadable(HyperParallelError, code="HP103"):
    """The recipe file is missing, too large, not YAML or JSON, or not a mapping, or contains data instead of a recipe.

    Fix: check the path and the line named in the message.
    """


class Contradiction(HyperParallelError, code="HP104"):
    """Values or options are allowed individually but not together, or a setting of another program is not supported.

    Fix: change or remove one of the values named in the message.
    """


class NotImportable(HyperParallelError, code="HP109"):
    """A dotted path in the recipe does not name an importable class or function of the required kind.

    Why: `module.Class` is imported from the current directory or the installed packages. Fix: check the path, and that
    the class derives from the base class named in the message.
    """


class CodeRefused(HyperParallelError, code="HP110"):
    """`--no-code` was given, and the recipe names Python code that the run would import.

    Why: an optimizer, a callback, a reward, an environment or the code of a model is a program by its author and runs
    with your rights. Fix: review that code and omit `--no-code`, or remove the key named in the message.
    """


class MeshError(HyperParallelError, code="HP201"):
    """A mesh is invalid, or does not contain the requested device or coordinate.

    Why: no axis and no device may occur twice, and the degrees, at least one each, must multiply to the number of
    devices. Fix: change the value named in the message.
    """


class LayoutError(HyperParallelError, code="HP202"):
    """A layout is invalid, or a redistribution between two layouts is not supported.

    Why: for example, two tensor dims cannot be sharded over the same axis. Fix: use each axis once, and only axes of
    the mesh and dims of the tensor; for a redistribution, use the layouts that the message allows.
    """


class NotDivisible(HyperParallelError, code="HP203"):
    """Parallel degrees do not divide a size of the model or each other, or stages do not match the layers.

    Examples: heads by tp, experts by ep, more stages than layers, `stage_layers` that do not add up. Why: whole
    attention heads and equal slices keep the result exact. Fix: choose one of the allowed values.
    """


class RuleError(HyperParallelError, code="HP204"):
    """A sharding rule matches no module, has an unknown or unsuitable style, or contradicts another rule.

    Fix: check the glob in `parallel.rules` against the module names of the model, or use a style listed in the message.
    """


class UnsupportedSharding(HyperParallelError, code="HP205"):
    """The combination of model, parallel axes and other settings is not supported.

    Why: a combination without an exact result is refused, not approximated. Fix: apply the change in the hint.
    """


class AuditError(HyperParallelError, code="HP206"):
    """After `parallelize`, a parameter was added or removed, or its layout differs from its plan.

    Fix: add or remove parameters before `parallelize`. Otherwise report the parameter name; this is a defect of
    hyper_parallel or of a module that replaced its own parameters.
    """


class DegreesMismatch(HyperParallelError, code="HP301"):
    """The parallel degrees, `parallel.world_size`, sub-models or `launch` do not match the number of ranks.

    Fix: change a value as shown in the hint, or start another number of ranks.
    """


class NoLegalStrategy(HyperParallelError, code="HP302"):
    """No combination of degrees is legal and fits this model, machine and workload.

    Fix: apply the change in the hint.
    """


class UnknownTopology(HyperParallelError, code="HP303"):
    """The topology is neither a preset, nor a YAML file, nor `local`.

    Fix: use one of the presets listed in the message, or the path of a topology file.
    """


class UnknownModel(HyperParallelError, code="HP304"):
    """The model is not a preset, a directory with a config.json, a config file, or an available name on the Hub.

    Fix: use a path, a Hub name, or one of the presets listed in the message.
    """


class ModelUnreadable(HyperParallelError, code="HP305"):
    """The config of the model cannot be read or lacks a key, or the model or one of its values is not supported.

    Fix: correct the key named in the message, or use a model of a supported family.
    """


class PlanUnreadable(HyperParallelError, code="HP306"):
    """A plan file cannot be read, is not JSON, has another schema version, or contains a value that is not allowed.

    Fix: create the plan again with `hyper-parallel plan ... -o plan.json`.
    """


class PlanMismatch(HyperParallelError, code="HP307"):
    """A saved plan does not match the model, the number of ranks, the batch or other settings of the run.

    Fix: create a plan for this run, or give the settings named in the message the values of the plan.
    """


class BatchMismatch(HyperParallelError, code="HP308"):
    """tokens_per_step, microbatch and accumulation_steps contradict each other or the pipeline schedule.

    Why: two of the three batch numbers determine the third, which must be a whole number. A pipeline schedule supports
    only some numbers of microbatches. Fix: use the value in the hint.
    """


class TopologyUnreadable(HyperParallelError, code="HP309"):
    """A topology file cannot be read, is not YAML or JSON, or is not a mapping.

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
    """No preset describes the accelerator of this machine, or the rates of its processor cannot be measured.

    Why: a plan from guessed rates and links could be slow or exceed memory.
    Fix: write a topology file based on the nearest preset, and give its path as the topology. If the measurement of a
    processor took too long, run the command again when the machine is idle.
    """


class CardUnreadable(HyperParallelError, code="HP313"):
    """A card (file with cost-model constants of a device or a software stack) is missing, unreadable or incomplete.

    It is also raised for unknown keys. Why: an ignored constant would silently change predictions.
    Fix: use a shipped card as an example, or create a card with `hyper-parallel calibrate`.
    """


class RunsUnreadable(HyperParallelError, code="HP314"):
    """A CSV of runs cannot be read, lacks required columns, or has no row that can be predicted or fitted.

    Fix: add the columns named in the message. `predict` writes the problem of each row into the column `assumptions`.
    """


class LauncherIncomplete(HyperParallelError, code="HP315"):
    """Environment variables of a launcher (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, ...) are missing or invalid.

    Why: a rank without a valid rank number would wait for the others forever. Fix: start the ranks with torchrun, which
    sets all variables, or unset `RANK` to start local ranks without a launcher.
    """


class ScheduleError(HyperParallelError, code="HP320"):
    """A pipeline schedule is illegal, deadlocks, repeats or omits an action, or cannot be read.

    Why: an invalid schedule hangs or computes wrong gradients, so it is refused before any process starts.
    Fix: see the action marked in the grid of the schedule; for a generated schedule, use one of the listed microbatch
    counts.
    """


class TaskGraphError(HyperParallelError, code="HP321"):
    """A task graph lists a task before one of its dependencies, or a task has a negative duration.

    Why: the order of the list proves that the graph has no cycle and that its executors cannot deadlock.
    Fix: list every task after its dependencies.
    """


class DeadlineMissed(HyperParallelError, code="HP322"):
    """No strategy on the available devices meets the deadline of a step.

    Fix: use the deadline in the hint, or provide more devices.
    """


class DoesNotFit(HyperParallelError, code="HP401"):
    """The predicted peak memory exceeds a memory tier of the machine.

    Fix: apply the change in the hint, such as more devices, recompute, or a smaller microbatch.
    """


class BudgetImpossible(HyperParallelError, code="HP402"):
    """The search found no memory plan that fits the byte budget.

    All operands of an operator must be on the device at once, so the largest working set is a lower bound of any plan.
    Fix: raise the budget, or reduce the largest operator (a chunked loss, a smaller microbatch).
    """

    least_bytes: int = 0
    """Smallest budget with a known plan, in bytes; 0 if it was not determined."""


class TierFull(HyperParallelError, code="HP403"):
    """A memory tier (device, host memory or files) is too small for the plan or the run.

    Fix: allow more bytes in the tier, set `offload.flash_dir`, or raise the device budget so that less is offloaded.
    """

    enough_bytes: Mapping[str, int] = MappingProxyType({})
    """Bytes that suffice in each tier, by tier name, if the other tiers keep their sizes."""


class MemoryPlanInvalid(HyperParallelError, code="HP404"):
    """A memory plan is illegal, or belongs to another step: an action uses bytes that are not in the required tier.

    Every plan is simulated action by action before it runs. Fix: plan again for this step.
    """


class MissingDependency(HyperParallelError, code="HP501"):
    """A required package or program is not installed, or is too old.

    Fix: run the install command in the hint.
    """


class DeviceUnavailable(HyperParallelError, code="HP502"):
    """The machine or cluster lacks the requested devices: too few accelerators, or too many CPU ranks.

    Why: ranks that share an accelerator cannot communicate, and too many CPU ranks for the cores and memory never
    finish starting. A machine without accelerators runs up to 4 ranks per core (at least 16), if each rank has 0.4 GiB
    of free memory.

    Fix: use `--dry-run` to see the plan without starting ranks, start the run on suitable machines with `--launcher
    torchrun`, `slurm` or `ray`, or lower the degrees. On a CPU, `launch.oversubscribe=true` starts the ranks anyway.
    """


class CaptureUnsupported(HyperParallelError, code="HP511"):
    """The step contains an operation that a captured program cannot reproduce.

    Examples: a result whose size depends on the data, a resized parameter. Fix: change the setting of the model or
    optimizer named in the hint.
    """


class StepChanged(HyperParallelError, code="HP512"):
    """A captured step was called with other values, shapes, model or optimizer than at its capture.

    Possible causes are a branch that depends on a value, and changed state outside of tensors: a learning rate, a hook,
    `eval()`, a replaced parameter. Fix: undo the change, capture again, or run this step without capture.
    """


class TransferFailed(HyperParallelError, code="HP513"):
    """A copy between memory tiers failed: a full disk, a missing or modified file, an error in a copy thread.

    The step is stopped, so no operator reads wrong bytes. Fix: correct the cause named in the message, and continue
    from the last checkpoint.
    """


class NoLoss(HyperParallelError, code="HP514"):
    """No loss or log-probabilities can be computed: a microbatch has no targets, or the model's output does not fit it.

    Cross entropy and token log-probabilities are computed from the logits of a causal language model and from targets
    (`labels`, or already shifted `shift_labels`). Fix: provide targets, or pass `forward_backward` an objective over
    the output of the model, `over="output"`.
    """


class BadObjective(HyperParallelError, code="HP515"):
    """An objective did not return a scalar that depends on its input.

    `objective(first, batch)` must return a scalar tensor computed from `first` without `detach` or `.item()`. Results
    of all microbatches and data-parallel ranks are summed; the objective divides by the total of the step.
    """


class RankFailed(HyperParallelError, code="HP601"):
    """A rank ended with an error; the first failure is printed in full.

    Fix: see the first failure; the other ranks were stopped because of it.
    """


class NoData(HyperParallelError, code="HP602"):
    """The data source is missing or unreadable, has a record that cannot be used, or yields no training tokens.

    Fix: check the path, the format, the named record, and that `data.seq_len` is shorter than the text.
    """


class RunUnreadable(HyperParallelError, code="HP603"):
    """A directory is not a run directory, lacks files that the command needs, or has a file that cannot be read.

    Fix: use the output directory of a `hyper-parallel train` run, or restore the file named in the message.
    """


class LossNotFinite(HyperParallelError, code="HP604"):
    """The loss, a gradient, the held-out loss or a weight became NaN or infinite; the last checkpoint is intact.

    A step with a non-finite loss or gradient is not applied. Weights and optimizer state are checked before they are
    saved or exported, because an update can overflow with a finite loss and gradient. A second run of the step locates
    the first non-finite tensor, except with offload or sub-models. Fix: lower `training.lr`, resume from the last
    checkpoint, or skip such steps with `training.on_nonfinite=skip`.
    """


class ForkUnsafe(HyperParallelError, code="HP605"):
    """Local ranks cannot be forked from a process that uses a process group or a device, or has a computing thread.

    A forked rank inherits locks held by other threads but not the threads, so it could wait forever. A rank also
    cannot use a device whose driver was initialized before the fork, for example by `tensor.cuda()`.

    Fix: close the world (`World.close`, or leave its `with` block) before `launch`, or start the ranks with torchrun.
    Join other threads first, and do not use a device in the process that starts the ranks.
    """


class RankHung(HyperParallelError, code="HP620"):
    """A rank made no progress within its deadline and the run was ended; the culprit is named first.

    Progress is the start of a phase of a step. The culprit is a rank that has ended or was stopped (by a signal or a
    debugger). If there is none, it is a rank outside of any collective: the other ranks wait for this rank in the
    collective named in the message. If all ranks wait in collectives, the collectives do not match.

    Fix: see where the culprit is in its code. If a phase may take this long, raise `training.timeout_s` (in a step) or
    `training.first_step_timeout_s` (first step, evaluation, checkpoint, export). A stopped or ended process is detected
    after `training.timeout_s` in every phase.
    """


class RestartsUsedUp(HyperParallelError, code="HP621"):
    """The ranks failed again after the last restart allowed by `training.max_restarts` or the controller.

    Fix: see the cause of the last failure; the newest checkpoint is intact, and the same command resumes from it.
    """


class CollectiveMismatch(HyperParallelError, code="HP622"):
    """Ranks called mismatched collectives, or would have: different operations, shapes, dtypes or orders.

    `training.debug_collectives` detects mismatches before the ranks hang. Fix: call the same collectives in the same
    order with matching shapes on all ranks of the group.
    """


class DumpUnreadable(HyperParallelError, code="HP623"):
    """A dump of torch's flight recorder is missing, cannot be read, or occurs twice for a rank.

    Fix: pass the files, or the directory, of `TORCH_FR_DUMP_TEMP_FILE`; file names end in the rank number.
    """


class LayoutDiffers(HyperParallelError, code="HP624"):
    """A layout computes a different loss or gradient than a run on one rank.

    `hyper-parallel parity` compares the two runs in float64 on a small copy of the model, so rounding is not the cause.
    Possible causes are a wrong sharding rule, user code that depends on the rank, or a defect of this package. The
    message names the first parameter in model order whose gradient differs. Fix: replicate its module with
    `parallel.rules`, or remove one axis at a time to find the cause.
    """


class RanksDisagree(HyperParallelError, code="HP625"):
    """A data-parallel rank computed a bitwise different result than its peers from the same microbatches.

    Detected by `training.check_ranks_every`: a defective device can return wrong numbers without any error. The message
    names the rank that differs from the majority. Without a majority, it names the ranks that do not reproduce their
    own result; if all do, it names all, because their software or hardware may differ. Fix: exclude the device, and
    resume from a checkpoint saved before the last agreement.
    """


class SnapshotsTooLarge(HyperParallelError, code="HP626"):
    """`checkpoint.snapshot_every` is set, and /dev/shm has too little space for the snapshots.

    Up to three snapshots exist at once: two kept, and one being written. Each contains the parameters (with LoRA, the
    trained ones) and two optimizer states per trained parameter. Fix: enlarge /dev/shm (`mount -o remount,size=`, or
    `--shm-size` of the container), or disable snapshots.
    """


class LauncherMissing(HyperParallelError, code="HP630"):
    """The submission program of the cluster's scheduler is not installed here, or rejects the job.

    The job script is written in any case. Fix: submit it on a machine with `sbatch`, or correct the option named in the
    message.
    """


class HostLost(HyperParallelError, code="HP631"):
    """A machine of the run has failed or is unreachable: its connections are closed and its ranks do not answer.

    Why: the ranks of the other machines cannot continue without it. Fix: check the machine named in the message; then
    resume from the newest checkpoint, on the same number of machines, or on fewer machines with another layout.
    """


class TrackerFailed(HyperParallelError, code="HP632"):
    """A tracker of `training.report_to` cannot start, for example because its server does not respond.

    Why: metrics would be missing from the tracker. Fix: follow the tracker's message; `WANDB_MODE=offline` and
    `MLFLOW_TRACKING_URI` select the destination. A tracker that fails later is disabled with a warning.
    """


class NotServed(HyperParallelError, code="HP633"):
    """A LlamaFactory version after 0.9.5 imports a name that this package does not provide.

    Why: the run would use other settings than requested. Fix: use LlamaFactory 0.9.5, or pass the same YAML file to
    `hyper-parallel train`, which does not need LlamaFactory.
    """


class CallFailed(HyperParallelError, code="HP640"):
    """A method of a role (a model instance that a controller calls) raised an exception on the rank in the message.

    The call is not retried, because the exception would be raised again. Fix: correct the cause shown in the traceback.
    A program restarted with the same journal resumes at this call.
    """


class JournalMismatch(HyperParallelError, code="HP641"):
    """A controller's journal, its record of calls and results, is damaged or belongs to another program.

    Why: recorded results of another program would be reused. A program that resumes from a journal must make the same
    calls to each role in the same order with the same arguments. Fix: use another journal file, or run the program that
    wrote the journal.
    """


class CheckpointCorrupt(HyperParallelError, code="HP701"):
    """The requested checkpoint, or every checkpoint of the run, is missing or damaged (a file truncated or modified).

    Fix: restore the file named in the message, choose another checkpoint, or start again without resume.
    """


class CheckpointMismatch(HyperParallelError, code="HP702"):
    """A checkpoint belongs to another model, optimizer, data set or dtype, or lacks a state that the run needs.

    Why: training would silently continue with different inputs. Layout, steps, learning rate and other optimizer
    numbers may change; the run reports such changes. Fix: use the value named in the message.
    """


class RunInUse(HyperParallelError, code="HP720"):
    """Another active process writes to this directory or journal.

    Why: two runs would mix their metrics and remove each other's checkpoints. Fix: wait for the other process, stop
    it, or choose another path. The lock of a killed process is released.
    """


class RunDirectoryLost(HyperParallelError, code="HP721"):
    """The directory of a run was removed, moved or replaced during the run.

    Why: the metrics and checkpoints of the rest of the run would be lost. The run ends at its next record, and reports
    the last saved step and its location. Fix: run the command in the hint, or the same command again; without a
    checkpoint it starts at step 1.
    """


class CheckpointFormat(HyperParallelError, code="HP740"):
    """A checkpoint has a format of an earlier version that is no longer supported.

    Why: the index of the first format was a pickle, and loading a pickle executes its code. Fix: export the checkpoint
    with the version that wrote it (`checkpoint export`), and start from the exported model with `model.path`.
    """


class WeightsUnreadable(HyperParallelError, code="HP703"):
    """A weight file of a model or adapter is missing or damaged, lacks a parameter, or has an unknown or invalid one.

    Why: transformers would initialize a missing parameter randomly and drop an unknown tensor. Fix: download the file
    named in the message again; names and shapes must match `config.json`. If the files contain an embedding and a
    different head, set `"tie_word_embeddings": false` in `config.json`.
    """


class TokenizerMissing(HyperParallelError, code="HP706"):
    """The directory of pretrained weights has no tokenizer.

    Why: a tokenizer trained on the recipe's data would give the token ids other meanings than the weights do. Fix: set
    `data.tokenizer` to the directory of the model's own tokenizer.
    """


class WeightsUninitialised(HyperParallelError, code="HP704"):
    """A parameter or buffer has no initialization rule, so training would start from undefined memory.

    Fix: add a `reset_parameters` method to its module, or initialize it in the model's `_init_weights`.
    """

"""Errors of a run: capacity HP4xx, back end and machine HP5xx, the run HP6xx, checkpoints and model files HP7xx."""

from collections.abc import Mapping
from types import MappingProxyType

from hyper_parallel.errors._base import HyperParallelError


class DoesNotFit(HyperParallelError, code="HP401"):
    """The predicted peak memory exceeds a tier of the machine.

    Fix: the hint names the nearest change that fits: more devices, recompute, or a smaller microbatch.
    """


class BudgetImpossible(HyperParallelError, code="HP402"):
    """No memory plan fits the byte budget.

    An operator needs all its operands on the device at once, so no plan can go below the largest working set. The
    message says that bound and the least peak the planner reached. Fix: raise the budget, or make the largest
    operator smaller (a chunked loss, a smaller microbatch).
    """

    least_bytes: int = 0
    """A budget that a plan was found for."""


class TierFull(HyperParallelError, code="HP403"):
    """A memory tier cannot hold what the plan or the run puts there.

    A plan that is refused names, for each tier, the bytes with which one was made while the other tiers stay as they
    are. Fix: allow more bytes in the tier, add a flash tier, or raise the device budget so that less is moved.
    """

    enough_bytes: Mapping[str, int] = MappingProxyType({})
    """By tier, bytes with which a plan was found while the other tiers stay as they are."""


class MemoryPlanInvalid(HyperParallelError, code="HP404"):
    """A memory plan is not legal: an action uses bytes that are not where it needs them.

    A plan is checked by replay before it runs. Fix: plan again for this program.
    """


class MissingDependency(HyperParallelError, code="HP501"):
    """A package that the command needs is not installed or is too old.

    Fix: run the install command in the hint.
    """


class DeviceUnavailable(HyperParallelError, code="HP502"):
    """More ranks were asked for than the machine has accelerators or its CPU runs, or the device kind is not present.

    Why: ranks that share an accelerator cannot communicate, and ranks that exceed cores and memory never finish their
    start. A machine without accelerators runs 4 ranks per core, at least 16, and as many as its free memory holds at
    0.4 GiB each.

    Fix: `--dry-run` shows the plan without a rank; `--launcher torchrun`, `slurm` or `ray` starts the run on machines
    that hold it; else lower the degrees. On a CPU `launch.oversubscribe=true` starts the ranks all the same.
    """


class CaptureUnsupported(HyperParallelError, code="HP511"):
    """The step does something that a captured program cannot repeat faithfully.

    Examples: a result whose size depends on the data, a storage that is resized, a sparse tensor. Fix: the hint
    names the setting of the model or optimizer that avoids it.
    """


class StepChanged(HyperParallelError, code="HP512"):
    """A captured step met values, shapes, a model or an optimizer that it was not captured for.

    A branch of the model depends on a value; the capture recorded the branch that was taken. Or something has changed
    that is in no tensor: a learning rate, a hook, `eval()`, a parameter that was exchanged. Fix: undo the change, or
    capture again, or run this step without the plan.
    """


class TransferFailed(HyperParallelError, code="HP513"):
    """A copy between memory tiers failed: disk full, file truncated or changed, copy thread died.

    The step is stopped; nothing reads bytes that did not arrive. Fix: the message names the tier and the cause.
    """


class NoLoss(HyperParallelError, code="HP514"):
    """A model gives no loss, or no log-probabilities, for the microbatches of a step.

    The cross entropy, and log-probabilities of tokens, come from the logits of a causal language model and from targets
    (`labels`, or `shift_labels` that were moved already). Fix: give them; or give `forward_backward` an objective over
    the output of the model, `over="output"`.
    """


class BadObjective(HyperParallelError, code="HP515"):
    """An objective returned something else than a scalar that depends on what it was given.

    `objective(first, batch)` returns one number as a tensor, computed from `first` without `detach` or `.item()`. The
    numbers of all microbatches and data-parallel ranks are added up: divide by what the whole step has, yourself.
    """


class RankFailed(HyperParallelError, code="HP601"):
    """A rank ended with an error; the first one to fail is printed in full.

    Fix: read the first failure; the other ranks were stopped because of it.
    """


class NoData(HyperParallelError, code="HP602"):
    """The data source is missing, unreadable, or yields no training tokens.

    Fix: check the path, the format, and that `data.seq_len` is shorter than the text.
    """


class RunUnreadable(HyperParallelError, code="HP603"):
    """A run directory lacks the files the command needs.

    Fix: give the directory that `hyper-parallel train` wrote.
    """


class LossNotFinite(HyperParallelError, code="HP604"):
    """The loss, a gradient, the held-out loss or a weight became NaN or infinite; the last checkpoint is intact.

    A step whose loss or gradient is not finite is not applied. Weights and the optimizer's state are looked at before
    they are saved, exported or replace older checkpoints: an update can overflow although loss and gradient are finite.
    The message names the first tensor that is not finite; that of a step is found by running it again, not with
    offload. Fix: lower `training.lr`, resume from the last checkpoint, or leave such steps out with
    `training.on_nonfinite=skip`.
    """


class ForkUnsafe(HyperParallelError, code="HP605"):
    """Local ranks were to be forked from a process that cannot be: a member of a process group, or a user of a device.

    A fork waits for the lock that a computing thread holds in its library, for ever if it computes on, and a rank
    inherits what such a thread has locked without the thread. A rank cannot use a device whose driver was started
    before the fork, by `tensor.cuda()` for example.

    Fix: close the world (`World.close`, or leave its `with` block) before `launch`, or start the ranks with torchrun;
    let threads end or wait before, and do not use a device in the process that starts the ranks.
    """


class RankHung(HyperParallelError, code="HP620"):
    """A rank did not move for longer than its deadline, and the run was ended; the culprit is named first.

    A rank moves when a phase of a step begins. The culprit is the rank that is stopped (a signal, a debugger) or gone,
    else the one that is anywhere but in a collective; the others wait for it in the collective that they name. Where
    all wait, their collectives do not fit one another.

    Fix: read where the culprit stands. Where a phase may take this long, raise `training.timeout_s` (in a step) or
    `training.first_step_timeout_s` (first step, evaluation, checkpoint, export). A process that a signal has stopped,
    or that is gone, is found after `training.timeout_s` in each of these.
    """


class RestartsUsedUp(HyperParallelError, code="HP621"):
    """The ranks were lost again after the last restart that `training.max_restarts`, or the controller's, allows.

    Fix: read why the last ones were lost; the newest checkpoint is intact, and the same command goes on from it.
    """


class CollectiveMismatch(HyperParallelError, code="HP622"):
    """Ranks have called collectives that do not fit one another: another operation, shape, dtype or order.

    Found by `training.debug_collectives`, before anything hangs. Fix: let all ranks of the group call the same
    collectives in the same order, with tensors of the shapes that the collective wants.
    """


class DumpUnreadable(HyperParallelError, code="HP623"):
    """A dump of torch's flight recorder is missing, holds objects that such a dump has not, or lacks its keys.

    Fix: give the files or the directory that `TORCH_FR_DUMP_TEMP_FILE` names; they end in the number of their rank.
    """


class LayoutDiffers(HyperParallelError, code="HP624"):
    """A layout does not compute what one rank computes: a loss or the gradient of a parameter differs.

    `hyper-parallel parity` compares both in float64 on a small copy of the model, so this is no rounding: a layer has
    a sharding rule that is wrong for it, code of the user depends on the rank, or this package has a defect. The first
    parameter in the order of the model is named. Fix: replicate the module of that parameter by `parallel.rules`, or
    leave out one axis after the other to see which one it is.
    """


class RanksDisagree(HyperParallelError, code="HP625"):
    """A data-parallel rank computed other bits than the others from the same microbatches.

    Found by `training.check_ranks_every`: a defective device gives wrong numbers that nothing else shows. The rank in
    the minority is named; of two, the one whose repeat differs from its first time. Where no repeat differs, both are
    named: their software or device may be of two kinds. Fix: leave out the device, and go on from a checkpoint that
    was saved before ranks last agreed.
    """


class SnapshotsTooLarge(HyperParallelError, code="HP626"):
    """`checkpoint.snapshot_every` is given, and the file system in memory, /dev/shm, has no space for the snapshots.

    Three of them are there for a moment: two that are kept, and the one being written. Each has the parameters and two
    optimizer states of each that is trained. Fix: make /dev/shm larger (`mount -o remount,size=`, or `--shm-size` of
    the container), or do without snapshots.
    """


class LauncherMissing(HyperParallelError, code="HP630"):
    """The program that submits a job to the scheduler of the cluster is not on this machine, or refuses the job.

    Why: what is asked for cannot be started from here. The script is written all the same. Fix: submit it from a
    machine that has `sbatch`, or mend the option that the message names.
    """


class HostLost(HyperParallelError, code="HP631"):
    """A machine of the run has ended or cannot be reached: its connections are closed, and its ranks say nothing more.

    Why: the ranks of the other machines cannot go on without it. Fix: see what has become of the machine that is named;
    then train again, on as many machines or with another layout on fewer, from the newest checkpoint.
    """


class TrackerFailed(HyperParallelError, code="HP632"):
    """A tracker of `training.report_to` cannot begin a run: its server does not answer, or refuses.

    Why: curves would be missing where they are looked for. Fix: what the tracker says; `WANDB_MODE=offline` and
    `MLFLOW_TRACKING_URI` choose where its data goes. A tracker that fails later is left out, with a warning.
    """


class NotServed(HyperParallelError, code="HP633"):
    """A version of LlamaFactory after 0.9.5 asks for names that this package does not have.

    Why: it would train with something else than what it asked for. Fix: LlamaFactory 0.9.5, or the same YAML file given
    to `hyper-parallel train`, which needs no LlamaFactory.
    """


class CallFailed(HyperParallelError, code="HP640"):
    """A method of a role has raised an exception on the rank that is named; its traceback ends as shown.

    Why: it would come again, so the call is not run again. Fix: what the traceback shows. A program that is started
    again with the same journal goes on with this call.
    """


class JournalMismatch(HyperParallelError, code="HP641"):
    """The journal of a controller has another role, call or choice where the program makes one now, or is damaged.

    Why: answers of another program would be taken for those of this one. A program that goes on with a journal makes
    the same calls of each role in the same order, with the same arguments. Fix: another journal, or the program that
    wrote this one.
    """


class CheckpointCorrupt(HyperParallelError, code="HP701"):
    """A file of a checkpoint is missing, truncated or altered, and no older intact one exists.

    Fix: restore the file named, or start again without resume.
    """


class CheckpointMismatch(HyperParallelError, code="HP702"):
    """A checkpoint belongs to another model, optimizer, data or number format than the run that loads it.

    Why: the run would go on with something else, and nobody would see it. Layout, steps, learning rate and the other
    numbers of the optimizer may change; the run says which have. Fix: use the value that the message names.
    """


class RunInUse(HyperParallelError, code="HP720"):
    """Another run, which is still going on, writes to this run directory.

    Why: two runs would mix their metrics and remove each other's checkpoints. Fix: wait for the process that is named,
    stop it, or choose another `output_dir`. A lock of a run that was killed is free.
    """


class RunDirectoryLost(HyperParallelError, code="HP721"):
    """The directory of a run was removed, moved or replaced while the run wrote to it.

    Why: files that are open would be written to the end and be gone afterwards, with all metrics and checkpoints. The
    run ends at its next record and says which step is saved, and where. Fix: run the command of the hint, or the same
    command again; without a checkpoint it begins at step 1.
    """


class CheckpointFormat(HyperParallelError, code="HP740"):
    """A checkpoint was written by a version of this package whose format is not read any more.

    Why: the first format had an index that was a pickle, and reading a pickle runs what is in it. Fix: export it with
    the version that wrote it (`checkpoint export`), and start from the exported model with `model.path`.
    """


class WeightsUnreadable(HyperParallelError, code="HP703"):
    """A weight file of a model directory is missing, truncated, lacks a parameter, or holds an unknown one.

    Why: transformers would give a missing parameter random values and drop an unknown tensor. Fix: fetch the file named
    again; names and shapes must match `config.json`. Where the files hold an embedding and a different head, a model
    that is already parallelized cannot untie the two: set `"tie_word_embeddings": false` in `config.json`.
    """


class TokenizerMissing(HyperParallelError, code="HP706"):
    """Pretrained weights come without the tokenizer that they were trained with.

    Why: a tokenizer made from the training text gives the ids other meanings than the weights have learnt, and the
    run would still look like one. Fix: name the directory of the model's own tokenizer as `data.tokenizer`.
    """


class WeightsUninitialised(HyperParallelError, code="HP704"):
    """A parameter or buffer has no initialisation rule, so training would start from undefined memory.

    Fix: give the module that holds it a `reset_parameters` method, or handle it in the model's `_init_weights`.
    """

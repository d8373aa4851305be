"""Saving and loading of checkpoints, which load on any layout and world size.

Each rank writes at most one safetensors file, and replicated shards are written once. A save can run in a background
thread on a copy of the state. A checkpoint is written to a hidden directory and published by a rename. Before a load,
each rank verifies the checksums of a part of the bytes; then each rank reads its shards.

The directory must be visible to all ranks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hyper_parallel.errors import CheckpointCorrupt, LossNotFinite, OutputNotWritable
from hyper_parallel.ir import Box, choose_senders
from hyper_parallel.trainer.checkpoints import manifest as files
from hyper_parallel.trainer.checkpoints._finite import first_not_finite
from hyper_parallel.trainer.checkpoints._named_state import (
    State,
    group_keys,
    joined_groups,
    model_tensors,
    state_of,
    tensor_facts,
    trained_tensors,
)
from hyper_parallel.trainer.checkpoints._restore import (
    check_groups,
    check_optimizer,
    compare_fingerprints,
    compare_tensors,
    read_tensors,
    restore_optimizer,
)
from hyper_parallel.trainer.checkpoints.extra_state import (
    EXTRA,
    CheckExtra,
    encode_extra,
    normalize_extra,
    read_extra,
)
from hyper_parallel.trainer.checkpoints.index import (
    INDEX,
    Index,
    Piece,
    StoredTensor,
    encode_index,
    read_index,
)
from hyper_parallel.trainer.checkpoints.manifest import CheckpointDirectory, Manifest
from hyper_parallel.trainer.checkpoints.pieces import Resident, StatePart, parts_of, write_pieces
from hyper_parallel.trainer.checkpoints.rank_group import RankGroup
from hyper_parallel.trainer.files import Damaged, FileEntry

_log = logging.getLogger(__name__)


class Checkpointer:
    """Writer and reader of the checkpoints of one run, in one directory.

    Construction and all methods except `latest` are collective: every rank of the default process group calls them in
    the same order. Without a process group, a single process saves and loads.

    Args:
        directory: Directory of the checkpoints, usually `RUN_DIR/checkpoints`. The first save creates it; every save
            removes leftovers of killed or failed saves.
        keep: Number of newest intact checkpoints to keep, at least 1. A save never removes checkpoints of later steps.
        asynchronous: Whether to write in a background thread while training continues.
        fingerprint: JSON values about model and optimizer, but not layout, that must agree between the saving and the
            loading run. None: load from any run with matching tensors; such a checkpointer cannot save.
        on_error: Whether to raise OutputNotWritable for a failed write ("stop"), or to log it ("continue"). With
            "continue", `finish` raises the error of the last save.
        keep_best: Name of a metric in `extra["metrics"]`. The intact checkpoint with the lowest value of this metric
            is kept in addition to the newest ones. None: keep only the newest.
        check_extra: Validator of the `extra` values. A checkpoint counts as damaged if the validator rejects its
            values, or if its step is not 0 and it has no optimizer state. None: accept both.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        asynchronous: bool,
        fingerprint: dict[str, Any] | None,
        on_error: Literal["stop", "continue"] = "stop",
        keep_best: str | None = None,
        check_extra: CheckExtra | None = None,
    ) -> None:
        self.directory = Path(directory)
        self._place = CheckpointDirectory(self.directory)
        self._keep = keep
        self._asynchronous = asynchronous
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._on_error, self._keep_best, self._check_extra = on_error, keep_best, check_extra
        self._ranks = RankGroup(self.directory, own_group=True)
        self._background: tuple[ThreadPoolExecutor, Future[None]] | None = None
        self._failure: OutputNotWritable | None = None
        self._checked: dict[int, bool] = {}
        """Whether each checkpoint is intact, by step, for checkpoints that this process has written or verified."""

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: dict[str, Any],
        resident: Resident = torch.Tensor.detach,
    ) -> None:
        """Save the state after `step` optimizer steps.

        An asynchronous save copies the blocks that this rank writes to host memory, starts the background write and
        returns. Each call first waits for the previous save, whose error it raises or logs depending on `on_error`.

        Args:
            step: Number of completed optimizer steps. An existing checkpoint of this step is replaced.
            model: Module of plain tensors or DTensors.
            optimizer: Optimizer of the model; None: weights only.
            extra: JSON values that `load` returns; those of rank 0 are stored.
            resident: Function that returns the current values of a local tensor, which may be offloaded.

        Raises:
            OutputNotWritable: HP105 when the checkpoint cannot be written, unless `on_error` is "continue". The error
                of a background write is raised by the next call of `save`, `load`, `finish` or `close`. Older
                checkpoints stay.
            UnsupportedSharding: HP205 for a partial tensor, or a dim that several mesh axes split unevenly.
            BadValue: HP102 for state that is neither a tensor nor a JSON value, for an unsupported dtype, for a
                parameter of the optimizer outside the model, and for extra values that are too large or not JSON.
            LossNotFinite: HP604 naming a trained parameter or optimizer state with NaN or infinity; no file is written
                or removed.
            ValueError: This checkpointer has no fingerprint.
        """
        if self._fingerprint is None:
            raise ValueError("a checkpointer without a fingerprint only loads")
        self._wait_for_background()
        self._failure = None  # only the last save has to succeed
        extra = normalize_extra(extra)
        index, parts = self._divide(step, model, optimizer, resident)
        if self._asynchronous:
            parts = [part.copy_to_host() for part in parts]
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint-{step}")
            self._background = thread, thread.submit(self._write, step, index, parts, extra)
            return
        try:
            self._write(step, index, parts, extra)
        except OutputNotWritable as error:
            self._handle_failure(error)

    def finish(self) -> None:
        """Wait for the background save, and raise the error of the last save unless it was already raised."""
        self._wait_for_background()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Call `finish`; if it raises no error, destroy the process group of this checkpointer."""
        self.finish()
        self._ranks.close()

    def latest(self) -> int | None:
        """Return the step of the newest published checkpoint, which may be damaged; None if there is none."""
        return max(files.steps(self.directory), default=None)

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, step: int | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint into a model and an optimizer in place; each rank reads its shards.

        Args:
            model: Model to fill, not on the meta device; layout and world size may differ from the saved model.
            optimizer: Optimizer to fill; unchanged if the checkpoint was saved without one. None: load only weights.
            step: Step to load; None: the newest intact checkpoint.

        Returns:
            The loaded step, and the `extra` values passed to `save`, after a JSON round trip.

        Raises:
            CheckpointCorrupt: HP701 when there is no intact checkpoint, or none of `step`; names the damaged files.
            CheckpointFormat: HP740 when an earlier version wrote it.
            CheckpointMismatch: HP702 with the first difference between the checkpoint and this run.
            BadValue, UnsupportedSharding: HP102, HP205 for a model or optimizer that `save` rejects.
            OutputNotWritable: HP105 of an earlier background save, unless `on_error` is "continue".
        """
        self._wait_for_background()
        loaded_step, manifest, index = self.newest_intact(step)
        path = self.directory / files.step_name(loaded_step)
        if self._fingerprint is not None:
            compare_fingerprints(manifest.fingerprint, self._fingerprint, path, index)
        targets = model_tensors(model)
        trained = optimizer if index.groups else None
        if optimizer is not None:
            check_groups(manifest.fingerprint, index, path)

        def describe() -> tuple[dict[str, Any], dict[str, list[str]]]:
            keys = group_keys(model, trained) if trained is not None else {}
            return tensor_facts(targets), keys

        gathered = self._ranks.everywhere(describe)
        compare_tensors({k: v for facts, _ in gathered for k, v in facts.items()}, index, path)
        if trained is not None:
            check_optimizer({k: v for _, facts in gathered for k, v in facts.items()}, index, path)

        def fill() -> None:
            if trained is not None:
                targets.update(restore_optimizer(model, trained, index, path))
            read_tensors(targets, index, path)

        self._ranks.everywhere(fill)
        return loaded_step, read_extra(path)

    def newest_intact(self, step: int | None) -> tuple[int, Manifest, Index]:
        """Verify the checkpoint of `step` (None: the newest intact one), and return (step, manifest, index).

        Each rank verifies a part of the bytes. CheckpointCorrupt and CheckpointFormat are raised as by `load`.
        """
        published = self._ranks.on_rank_0(lambda: files.steps(self.directory))
        candidates = published[::-1] if step is None else [s for s in published if s == step]
        damaged: list[str] = []
        for candidate in candidates:
            result = self._check(candidate)
            if not isinstance(result, str):
                return candidate, *result
            damaged.append(result)
        remedy = "choose one of these steps" if published else "check the path of the directory"
        remedy = "restore the named files" if damaged else remedy
        raise CheckpointCorrupt(
            f"no intact checkpoint{'' if step is None else f' of step {step}'}",
            where=str(self.directory),
            got=damaged or f"steps {published}" if published else "none",
            hint=f"{remedy}, or train from the start with `{files.START_OVER}`",
        )

    def _check(self, step: int) -> tuple[Manifest, Index] | str:
        """Verify a checkpoint, each rank a part; return (manifest, index), or an error text, equal on all ranks."""
        path, share = self.directory / files.step_name(step), (self._ranks.rank, self._ranks.size)
        contents: list[tuple[Manifest, Index]] = []

        def problem() -> str | None:
            try:
                contents.append(files.check(path, share=share, check_extra=self._check_extra))
            except Damaged as error:
                return str(error)
            return None

        problems = [p for p in self._ranks.everywhere(problem) if p is not None]
        self._checked[step] = not problems
        if problems and self._ranks.rank == 0:
            _log.warning("checkpoint of step %d is damaged: %s", step, problems[0])
        return problems[0] if problems else contents[0]

    def _wait_for_background(self) -> None:
        """Wait for the background save; for OutputNotWritable, raise or log it depending on `on_error`."""
        background, self._background = self._background, None
        if background is None:
            return
        thread, write = background
        thread.shutdown()
        try:
            write.result()
        except OutputNotWritable as error:
            self._handle_failure(error)

    def _handle_failure(self, error: OutputNotWritable) -> None:
        if self._on_error == "stop":
            raise error
        self._failure = error
        if self._ranks.rank == 0:
            _log.warning("the run continues without this checkpoint:\n%s", error)

    def _divide(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resident: Resident,
    ) -> tuple[Index, list[StatePart]]:
        """Return an index without pieces, and the blocks that this rank writes; raise HP604 for non-finite values."""
        parts: list[StatePart] = []

        def describe() -> tuple[dict[str, Any], dict[Box, int], State, str | None]:
            state = state_of(model, optimizer)
            parts.extend(parts_of(state.tensors, resident))
            boxes = {part.box: part.num_bytes for part in parts}
            trained = trained_tensors(model, state)
            bad = first_not_finite((p.box.name, p.read) for p in parts if p.box.name in trained)
            return tensor_facts(state.tensors), boxes, State({}, state.values, state.groups), bad

        gathered = self._ranks.everywhere(describe)
        for rank, (_, _, _, bad) in enumerate(gathered):
            if bad is not None:
                newest = self.latest()
                saved = "no checkpoint was saved" if newest is None else f"newest checkpoint: step {newest}"
                raise LossNotFinite(
                    f"`{bad}` has NaN or infinity after the update, so nothing is saved",
                    where=f"step {step}",
                    got=f"on rank {rank}; {saved}",
                )
        writer = choose_senders([boxes for _, boxes, _, _ in gathered])
        facts = {k: v for tensors, _, _, _ in gathered for k, v in tensors.items()}
        index = Index(
            {name: StoredTensor(shape, dtype, ()) for name, (shape, dtype) in facts.items()},
            {k: v for _, _, state, _ in gathered for k, v in state.values.items()},
            joined_groups([group for _, _, state, _ in gathered for group in state.groups]),
        )
        return index, [part for part in parts if writer[part.box] == self._ranks.rank]

    def _write(self, step: int, index: Index, parts: list[StatePart], extra: dict[str, Any]) -> None:
        """Write this rank's blocks, publish the checkpoint, and remove old ones; an error is raised on all ranks."""
        path = files.temporary(self.directory, step)
        own = path / f"rank_{self._ranks.rank:05d}.safetensors"
        try:
            self._ranks.on_rank_0(lambda: self._place.prepare(step))
            written = self._ranks.everywhere(lambda: write_pieces(own, parts) if parts else [])
            self._ranks.on_rank_0(lambda: self._publish(step, index, written, extra))
        except Exception:
            # `everywhere` has waited for all ranks, so no rank is still writing.
            if self._ranks.rank == 0:
                files.remove_parts(path)
            raise
        self._checked[step] = True
        self._retain(step)

    def _publish(self, step: int, index: Index, written: list[list[tuple[str, Piece]]], extra: dict[str, Any]) -> None:
        path = files.temporary(self.directory, step)
        pieces: dict[str, list[Piece]] = {}
        for name, piece in (entry for part in written for entry in part):
            pieces.setdefault(name, []).append(piece)
        tensors = {
            name: StoredTensor(t.shape, t.dtype, tuple(pieces.get(name, []))) for name, t in index.tensors.items()
        }
        files.write_synced(path / INDEX, encode_index(Index(tensors, index.values, index.groups)))
        files.write_synced(path / EXTRA, encode_extra(extra))
        read_index(path)  # an index that cannot be loaded is not published
        size = sum(p.stat().st_size for p in path.iterdir())
        entries = {name: FileEntry.of(path / name) for name in (INDEX, EXTRA)}
        metrics = extra.get("metrics") if self._keep_best else None
        manifest = Manifest(files.FORMAT, step, self._ranks.size, size, self._fingerprint, metrics or {}, entries)
        files.write_synced(path / files.MANIFEST, files.encode_manifest(manifest))
        files.publish(self.directory, step)

    def _retain(self, written: int) -> None:
        """Remove checkpoints before step `written`, unless they are the best or among the `keep` newest intact ones."""
        published = self._ranks.on_rank_0(lambda: files.steps(self.directory))
        retained: list[int] = []
        for step in published[::-1]:
            if len(retained) < self._keep and self._is_intact(step):
                retained.append(step)
        retained += [written, *self._best(published)]

        def remove() -> None:
            for step in published:
                if step < written and step not in retained:
                    files.remove(self.directory, step)

        self._ranks.on_rank_0(remove)

    def _is_intact(self, step: int) -> bool:
        if step not in self._checked:
            self._check(step)
        return self._checked[step]

    def _best(self, published: list[int]) -> list[int]:
        """Return [step] of the newest intact checkpoint with the lowest `keep_best` metric; [] if there is none."""
        metric, values = self._keep_best, {}
        if metric is None:
            return []
        for step in published:
            try:
                manifest = files.read_manifest(self.directory / files.step_name(step))
            except Damaged:
                continue
            if metric in manifest.metrics:
                values[step] = manifest.metrics[metric]
        order = sorted(values, key=lambda step: (values[step], -step))
        return [step for step in order if self._is_intact(step)][:1]


def load_newest(
    saved: Sequence[Checkpointer], model: nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[int, dict[str, Any]]:
    """Load the newest intact checkpoint of several directories; results and errors are those of `Checkpointer.load`.

    If no directory has an intact checkpoint, the error names the first directory.
    """
    candidates = [(step, number) for number, s in enumerate(saved) for step in files.steps(s.directory)]
    for step, number in sorted(candidates, reverse=True) if len(saved) > 1 else []:
        with suppress(CheckpointCorrupt):  # `load` has logged a warning that names the file
            return saved[number].load(model, optimizer, step)
    return saved[0].load(model, optimizer)

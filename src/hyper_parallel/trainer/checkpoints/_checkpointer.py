"""Save and load training state so that it resumes on any layout and world size.

Tensors go through torch.distributed.checkpoint: every rank writes the shards it stores, and a load reads whatever
part of them the new layout needs. Around it this file adds what a long run needs: writing in the background on a
copy of the state, a manifest with checksums, publication by one rename, retention, and on load the newest checkpoint
that is intact.

The directory must be visible to all ranks.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from hyper_parallel import serde
from hyper_parallel.backends.torch.weights._initialise import canonical_name
from hyper_parallel.backends.torch.weights._ranges import local_ranges
from hyper_parallel.errors import CheckpointCorrupt, CheckpointMismatch
from hyper_parallel.trainer._files import Damaged, FileEntry, check_files
from hyper_parallel.trainer.checkpoints import _manifest as files
from hyper_parallel.trainer.checkpoints._boxes import boxed
from hyper_parallel.trainer.checkpoints._manifest import Manifest
from hyper_parallel.trainer.checkpoints._rank_group import RankGroup

_log = logging.getLogger(__name__)
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpointer:
    """Checkpoints of one run in one directory.

    All methods except `latest` are collective: every rank of the process group calls them in the same order. Without
    a process group it works in a single process.

    Args:
        directory: Directory of the checkpoints, usually `RUN_DIR/checkpoints`. The first save creates it; every
            save removes what a killed or failed one left behind.
        keep: Newest checkpoints kept, at least 1.
        asynchronous: Write in a background thread while training goes on.
        fingerprint: JSON values that must agree between the run that saves and the run that loads (model, optimizer;
            not the layout). None: load from any run whose tensors fit; such a checkpointer cannot save.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int,
        asynchronous: bool,
        fingerprint: dict[str, Any] | None,
    ) -> None:
        self.directory = Path(directory)
        self._keep = keep
        self._asynchronous = asynchronous
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._ranks = RankGroup("checkpoint", self.directory, own_group=True)
        self._background: tuple[ThreadPoolExecutor, Future[None]] | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        extra: dict[str, Any],
    ) -> None:
        """Save the state after `step` optimizer steps.

        With `asynchronous` it returns when the state is copied; the copy takes the host memory of this rank's shards
        until it is written. The previous save is waited for, and its error raised here.

        Args:
            step: Completed optimizer steps; names the checkpoint. An existing one of this step is replaced.
            model: Module of plain tensors or DTensors.
            optimizer: None: weights only.
            extra: JSON values of the trainer, given back by `load`; rank 0's are stored.

        Raises:
            OutputNotWritable: HP105 when the directory cannot be written; in the background, raised by the next
                `save` or `finish`. Older checkpoints stay.
        """
        if self._fingerprint is None:
            raise ValueError("a checkpointer without a fingerprint only loads")
        self.finish()
        for name, parameter in model.named_parameters():
            local_ranges(parameter, name)  # refuses a split that the file format cannot express
        state = _state(model, optimizer)
        text = json.loads(json.dumps(extra))
        if not self._asynchronous:
            self._write(step, state, text)
            return
        copy = BlockingAsyncStager().stage(state)
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"checkpoint-{step}")
        self._background = thread, thread.submit(self._write, step, copy, text)

    def finish(self) -> None:
        """Wait for the save in the background, if there is one, and raise its error."""
        background, self._background = self._background, None
        if background is not None:
            thread, saved = background
            thread.shutdown()
            saved.result()

    def close(self) -> None:
        """Wait for the save in the background, and give the process group back."""
        self.finish()
        self._ranks.close()

    def latest(self) -> int | None:
        """Step of the newest published checkpoint; its files are checked by `load`, not here."""
        return max(files.steps(self.directory), default=None)

    def load(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        step: int | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Load a checkpoint into a model and an optimizer that hold storage.

        Args:
            model: Changed in place; may have another layout and world size than the one saved.
            optimizer: Changed in place; None: weights only.
            step: Load exactly this one; None: the newest intact one.

        Returns:
            The step, and the `extra` of its save.

        Raises:
            CheckpointCorrupt: HP701 when no intact checkpoint is left; names the damaged files.
            CheckpointMismatch: HP702 with the first difference between the checkpoint and this run.
        """
        self.finish()
        found, manifest = self.newest_intact(step)
        path = self.directory / files.step_name(found)
        if self._fingerprint is not None:
            _compare_fingerprints(manifest.fingerprint, self._fingerprint, path)
        stored = _described(path)
        state = _state(model, optimizer)
        idle = _take_idle(state.get("optimizer", {}), stored)
        _compare(self._everyones(state), stored, path)
        state = boxed(state)  # plain values, such as learning rates, are put into it
        self._transfer(dcp.load, state, path)
        set_model_state_dict(model, state["model"])
        if optimizer is not None:
            entries = state["optimizer"] | idle
            set_optimizer_state_dict(model, optimizer, entries, options=_OPTIONS)
            names = {_parameter_of(key) for key in idle}
            for name, parameter in model.named_parameters():
                if canonical_name(name) in names:
                    optimizer.state.pop(parameter, None)
        return found, json.loads((path / files.EXTRA).read_text(encoding="utf-8"))

    def _everyones(self, state: dict[str, Any]) -> dict[str, Any]:
        """Shape and dtype of the tensors of all ranks by name: a pipeline rank holds a part of the model."""
        mine = {
            f"{part}.{name}": (tuple(value.shape), value.dtype) if torch.is_tensor(value) else None
            for part, values in state.items()
            for name, value in values.items()
        }
        return {k: v for held in self._ranks.everywhere(lambda: mine) for k, v in held.items()}

    def newest_intact(self, step: int | None) -> tuple[int, Manifest]:
        """The newest checkpoint whose files agree with its manifest, or exactly `step`; the ranks share the reading.

        Raises:
            CheckpointCorrupt: HP701 when there is none; names the damaged files.
        """
        published = self._ranks.on_rank_0(lambda: files.steps(self.directory))
        candidates = published[::-1] if step is None else [s for s in published if s == step]
        damaged: list[str] = []
        for candidate in candidates:
            path = self.directory / files.step_name(candidate)

            def check(path: Path = path) -> Manifest | str:
                try:
                    manifest = files.read_manifest(path)
                    mine = sorted(manifest.files)[self._ranks.rank :: self._ranks.size]
                    check_files(path, manifest.files, mine)
                except Damaged as error:
                    return str(error)
                return manifest

            results = self._ranks.everywhere(check)
            problems = [r for r in results if isinstance(r, str)]
            if not problems:
                return candidate, results[0]
            damaged.append(problems[0])
            if self._ranks.rank == 0:
                _log.warning("checkpoint of step %d is damaged: %s", candidate, problems[0])
        raise CheckpointCorrupt(
            f"no intact checkpoint{'' if step is None else f' of step {step}'}",
            where=str(self.directory),
            got=damaged or f"steps {published}" if published else "none",
            hint="restore the file named, or train from the start with `checkpoint.resume=never`",
        )

    def _write(self, step: int, state: dict[str, Any], extra: dict[str, Any]) -> None:
        """Write, checksum and publish; every failure is raised on all ranks."""
        path = files.temporary(self.directory, step)

        rank = self._ranks.rank

        def prepare() -> None:
            self.directory.mkdir(parents=True, exist_ok=True)
            files.clean(self.directory)
            path.mkdir()

        def own_files() -> dict[str, FileEntry]:
            mine = [p for p in path.iterdir() if p.name.startswith(f"__{rank}_")]
            if rank == 0:
                files.write_json(path / files.EXTRA, extra)
                mine += [path / files.EXTRA, path / ".metadata"]
            return {p.name: FileEntry.of(p) for p in mine}

        self._ranks.on_rank_0(prepare)
        self._ranks.everywhere(lambda: self._transfer(dcp.save, boxed(state), path))
        entries = {n: e for part in self._ranks.everywhere(own_files) for n, e in part.items()}

        def publish() -> None:
            assert self._fingerprint is not None
            manifest = Manifest(files.FORMAT, step, self._ranks.size, self._fingerprint, entries)
            files.write_json(path / files.MANIFEST, serde.encode(manifest))
            files.publish(self.directory, step, self._keep)

        self._ranks.on_rank_0(publish)

    def _transfer(self, move: Callable[..., Any], state: dict[str, Any], path: Path) -> None:
        """`move` is dcp.save or dcp.load."""
        if self._ranks.several:
            move(state, checkpoint_id=path, process_group=self._ranks.group)
            return
        with warnings.catch_warnings():  # that a single process saves is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            move(state, checkpoint_id=path, no_dist=True)


def stored_dtypes(checkpoint: Path) -> dict[str, torch.dtype]:
    """Dtype of each parameter in a checkpoint, by name."""
    prefix = "model."
    stored = _described(checkpoint).items()
    return {k.removeprefix(prefix): v[1] for k, v in stored if v and k.startswith(prefix)}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    return state


def _take_idle(entries: dict[str, Any], stored: dict[str, Any]) -> dict[str, Any]:
    """Remove the optimizer state of parameters that had none when they were saved: they never got a gradient.

    Reading the state of an optimizer creates zeros for all parameters; those of such parameters are not in the files.
    """
    saved = {_parameter_of(key) for key in stored if key.startswith("optimizer.state.")}
    idle = [k for k in entries if k.startswith("state.") and _parameter_of(k) not in saved]
    return {key: entries.pop(key) for key in idle} if saved else {}


def _parameter_of(key: str) -> str:
    """`model.norm.weight` of `optimizer.state.model.norm.weight.exp_avg`."""
    return key.partition("state.")[2].rpartition(".")[0]


def _compare_fingerprints(saved: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    for key in [*ours, *(k for k in saved if k not in ours)]:
        if saved.get(key) != ours.get(key):
            raise CheckpointMismatch(
                f"the checkpoint was saved by a run with another `{key}`",
                where=str(path / files.MANIFEST),
                got=ours.get(key),
                allowed=saved.get(key),
            )


def _described(checkpoint: Path) -> dict[str, Any]:
    """Shape and dtype of everything in a checkpoint by name; None for what is no tensor."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        key: (tuple(e.size), e.properties.dtype) if isinstance(e, TensorStorageMetadata) else None
        for key, e in entries.items()
    }


def _compare(ours: dict[str, Any], theirs: dict[str, Any], path: Path) -> None:
    """Refuse the first tensor whose name, shape or dtype differs from the checkpoint's."""
    parts = {key.partition(".")[0] for key in ours}
    for key in ours:
        if key not in theirs:
            raise CheckpointMismatch(f"the checkpoint has no `{key}`", where=str(path))
    for key, stored in theirs.items():
        if key not in ours and key.partition(".")[0] in parts:
            raise CheckpointMismatch(
                f"the checkpoint holds `{key}`, this run has no such tensor", where=str(path)
            )
        if stored and ours.get(key) and ours[key] != stored:
            raise CheckpointMismatch(
                f"`{key}` has another shape or dtype in the checkpoint",
                where=str(path),
                got=f"{ours[key][0]} {ours[key][1]}",
                allowed=f"{stored[0]} {stored[1]}",
            )

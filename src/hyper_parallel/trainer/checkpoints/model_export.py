"""Export of a model as a Hugging Face directory that `from_pretrained` loads.

Rank 0 gathers one full parameter at a time and converts it to the published format: the names and shapes of the
model's files on the Hugging Face Hub, for example one tensor per expert. A rename publishes the complete directory.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyper_parallel.backends.torch.weights.huggingface import (
    hf_reference_model,
    model_of_part,
    original_class,
    published_dtypes,
    with_tied_embeddings,
)
from hyper_parallel.backends.torch.weights.initialization import canonical_name
from hyper_parallel.backends.torch.weights.pretrained import (
    CarriedWeights,
    carried_weights,
    open_carried,
)
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import ModelUnreadable
from hyper_parallel.model import GENERATION, read_generation_config
from hyper_parallel.owned_folder import Replacement
from hyper_parallel.trainer.checkpoints._finite import check_finite
from hyper_parallel.trainer.checkpoints.pieces import Resident, dtype_name
from hyper_parallel.trainer.checkpoints.rank_group import RankGroup
from hyper_parallel.trainer.data import copy_tokenizer

EXPORTS = ("export", "adapter")
"""Kinds of earlier folders that an export may replace; see `exported_folder`."""
_LAYER: Final = re.compile(r".*?\.\d+\.")
"""Pattern of the path of the outermost layer in a parameter name, for example `model.layers.3.`."""
MAX_FILE_BYTES = 5 * 1024**3
"""Default maximum bytes of a weight file: small enough for hosts with little memory, large enough for few files."""


def export_hf(
    model: nn.Module,
    config: Any,
    tokenizer_dir: str | Path | None,
    out_dir: str | Path,
    dtype: torch.dtype | None = None,
    *,
    generation: Path | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    resident: Resident = Tensor.detach,
    carried: CarriedWeights | None = None,
) -> Path:
    """Write the model, its configuration and its tokenizer; collective over all ranks.

    Memory: each rank holds at most one full parameter at a time; rank 0 also holds the tensors of incomplete files.

    Args:
        model: Hugging Face model of plain tensors or DTensors.
        config: Configuration of the model.
        tokenizer_dir: Directory whose tokenizer files are copied; None: no tokenizer.
        out_dir: Directory to create. An earlier export is replaced if its files are unchanged; any other directory that
            is not empty is rejected.
        dtype: Stored floating-point dtype; parameters that transformers always keeps in float32 stay float32. None:
            dtype of each parameter.
        generation: Path of a `generation_config.json` to copy. If None or missing, the model's own generation config,
            if any, is written.
        max_file_bytes: Maximum bytes of a weight file, unless a single tensor is larger.
        resident: Function that returns the current values of a local tensor, which a memory plan may have offloaded.
        carried: Tensors of the pretrained files that the model does not use, copied unchanged. None: those of the files
            from which the model was loaded.

    Returns:
        `out_dir`.

    Raises:
        ModelUnreadable: HP305 for an unsupported model, or an invalid `generation` file.
        BadValue, NoData: HP102, HP602 for tokenizer files that cannot be copied.
        OutputNotWritable, RunInUse: HP105, HP720 when the directory is rejected, not writable or in use.
        LossNotFinite: HP604 when a trained parameter is not finite in its stored dtype.
    """
    out = Path(out_dir)
    reference, ranks = _reference_of(model), RankGroup(out)
    state = {canonical_name(k): v for k, v in model.state_dict(keep_vars=True).items()}
    shards = ExportShards.of(ranks, model, state, resident)
    stored = _stored_tensors(model, reference, shards, dtype)
    folder, writers = exported_folder(out, "export"), list[_Writer]()

    def begin() -> None:
        unused = carried or carried_weights(model)
        trained = shards.trained
        writers.append(_Writer(folder, reference, stored, max_file_bytes, unused, trained))

    def finish() -> None:
        own = getattr(model_of_part(model), "generation_config", None)
        exported = _exported_config(config, reference, dtype or _main_dtype(stored))
        writers[0].finish(exported, own, generation, tokenizer_dir)

    ranks.on_rank_0(begin)
    write_export(ranks, shards, stored, folder, lambda n, full: writers[0].add(n, full), finish)
    return out


def _reference_of(model: nn.Module) -> nn.Module:
    """Return a copy of the Hugging Face model on the meta device; raise ModelUnreadable (HP305) for other models."""
    reference = hf_reference_model(model)
    if reference is None:
        raise ModelUnreadable(
            f"{original_class(model).__name__} is not a Hugging Face model, so it has no export format",
            hint='hp.save(model, optimizer, "checkpoint")',
        )
    return reference


def _stored_tensors(
    model: nn.Module, reference: nn.Module, shards: ExportShards, dtype: torch.dtype | None
) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the full shape and the stored dtype of every tensor to write, by name; tied tensors have one entry."""
    shapes = {n: v.shape for n, v in reference.state_dict().items() if n in shards.owners}
    forced = {} if dtype is None else published_dtypes(model, dtype)
    names = _stored_once(reference, shapes)
    return {n: (shapes[n], forced.get(n, shards.owners[n][1])) for n in names}


def write_export(
    ranks: RankGroup,
    shards: ExportShards,
    names: Iterable[str],
    folder: Replacement,
    add: Callable[[str, Tensor], None],
    finish: Callable[[], None],
) -> None:
    """Gather the full tensors one at a time and write them on rank 0; collective over all ranks.

    Rank 0 calls `add(name, full)` for each tensor, then `finish`, and publishes `folder`. An error of `add` is raised
    on all ranks after all tensors have been gathered.
    """
    failure: Exception | None = None
    ranks.on_rank_0(folder.open)
    for name in names:
        full = shards.gather_full(name)
        if ranks.rank == 0 and failure is None:
            try:
                add(name, full)
            except Exception as error:
                failure = error

    def end() -> None:
        with folder.discarded_on_error():
            if failure is not None:
                raise failure
            finish()
            folder.publish()

    ranks.on_rank_0(end)


def exported_folder(out: Path, kind: Literal["export", "adapter"], option: str | None = None) -> Replacement:
    """Return the folder of an export at path `out`, which may replace an earlier export of a model or an adapter.

    `option` is the command-line option that names the folder, for hints; None: no such option.
    """
    return Replacement(out, kind, "the export directory", EXPORTS, parents=True, option=option)


class _Writer:
    """Writer of the files of an export on rank 0, into the hidden directory `folder.partial`.

    `stored` gives shape and stored dtype of each tensor. `trained` names the parameters that must be finite.
    """

    def __init__(
        self,
        folder: Replacement,
        reference: nn.Module,
        stored: Mapping[str, tuple[torch.Size, torch.dtype]],
        max_file_bytes: int,
        carried: CarriedWeights | None,
        trained: Collection[str],
    ) -> None:
        self._target, self._temporary = str(folder.target), folder.partial
        self._reference, self._trained = reference, trained
        self._dtypes = {name: dtype for name, (_, dtype) in stored.items()}
        # Convert the model on the meta device to assign a file to each tensor before writing.
        meta = {n: torch.empty(x[0], dtype=x[1], device="meta") for n, x in stored.items()}
        self._groups, sizes = _published_sizes(reference, meta)
        self._waiting: dict[str, Tensor] = {}
        self._carried = open_carried(carried, sizes.keys())
        sizes |= {name: tensor.num_bytes for name, tensor in self._carried.items()}
        self._file_of = _assign_files(sizes, max_file_bytes)
        self._total_bytes = sum(sizes.values())
        self._left = Counter(self._file_of.values())
        self._open: dict[str, dict[str, Tensor]] = {}

    def add(self, name: str, full: Tensor) -> None:
        """Add a full parameter, which must be finite if it is trained, and write every file that is now complete."""
        if full.is_floating_point():
            full = full.to(self._dtypes[name])
        if name in self._trained:
            check_finite(name, full, self._target)
        self._waiting[name] = full.cpu()
        group = self._groups[name]
        if not self._waiting.keys() >= {*group}:
            return
        tensors = {name: self._waiting.pop(name) for name in group}
        for key, part in _published(self._reference, tensors).items():
            # Clone, because safetensors rejects tensors that share storage.
            self._add_tensor(key, part.clone(memory_format=torch.contiguous_format))

    def _add_tensor(self, key: str, tensor: Tensor) -> None:
        file = self._file_of[key]
        self._open.setdefault(file, {})[key] = tensor
        self._left[file] -= 1
        if self._left[file] == 0:
            save_file(self._open.pop(file), self._temporary / file, metadata={"format": "pt"})

    def finish(self, config: Any, own: Any, generation: Path | None, tokenizer_dir: str | Path | None) -> None:
        """Write the unused pretrained tensors, the index of several weight files, configs and tokenizer.

        The file `generation`, if it exists, takes precedence over the model's `own` generation config.
        """
        for name, tensor in self._carried.items():
            self._add_tensor(name, tensor.read(()).contiguous())
        assert not self._open, f"tensors never completed: {sorted(self._open)}"
        if len(self._left) > 1:
            index = {
                "metadata": {"total_size": self._total_bytes},
                "weight_map": dict(sorted(self._file_of.items())),
            }
            text = json.dumps(index, indent=2) + "\n"
            (self._temporary / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        config.save_pretrained(self._temporary)
        if generation is not None and read_generation_config(generation.parent) is not None:
            shutil.copyfile(generation, self._temporary / GENERATION)
        elif own is not None:
            own.save_pretrained(self._temporary)
        if tokenizer_dir is not None:
            copy_tokenizer(tokenizer_dir, self._temporary)


def _exported_config(config: Any, reference: nn.Module, dtype: torch.dtype) -> Any:
    """Return a copy of `config` with `architectures`, `dtype` and `tie_word_embeddings` of the exported model."""
    configured, actual = (getattr(c, "tie_word_embeddings", False) for c in (config, reference.config))
    tied = actual or not configured
    config = copy.deepcopy(config) if tied else with_tied_embeddings(config, False)
    config.architectures = [type(reference).__name__]
    config.dtype = dtype_name(dtype)
    return config


def _main_dtype(stored: Mapping[str, tuple[torch.Size, torch.dtype]]) -> torch.dtype:
    elements: Counter[torch.dtype] = Counter()
    for shape, dtype in stored.values():
        if dtype.is_floating_point:
            elements[dtype] += shape.numel()
    return elements.most_common(1)[0][0]


def _stored_once(reference: nn.Module, state: Iterable[str]) -> list[str]:
    """Return the names in `state`, except parameters tied to another parameter in `state`, which is stored for both."""
    tied = reference.get_expanded_tied_weights_keys(all_submodels=True)
    return [name for name in state if name not in tied or tied[name] not in state]


def _published(reference: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert parameters to the names and shapes of the published format."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(reference, tensors)


def _published_sizes(
    reference: nn.Module, meta: dict[str, Tensor]
) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    """Return two dicts: from parameter to all parameters converted together with it, and from stored tensor to bytes.

    Raises:
        ModelUnreadable: HP305 when the published format joins parameters of several layers in one tensor.
    """
    expected = _published(reference, meta).keys()
    for grouped in (_joined_names, _names_in_layer):
        # If a group lacks parameters that the conversion needs, it raises or returns different names.
        with suppress(RuntimeError, ValueError, KeyError):
            groups = grouped(reference, meta)
            sizes = {
                key: part.nbytes
                for group in dict.fromkeys(groups.values())
                for key, part in _published(reference, {n: meta[n] for n in group}).items()
            }
            if sizes.keys() == expected:
                return groups, sizes
    raise ModelUnreadable(
        "cannot export this model: its published format joins parameters of several layers in one tensor",
        got=type(reference).__name__,
        hint="keep only checkpoints: train with `checkpoint.export=false sample_prompt=null`, or use `hp.save` in your "
        "own loop",
    )


def _joined_names(reference: nn.Module, meta: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Return a dict from each parameter to all parameters in the same stored tensor, such as a joint QKV projection."""
    groups: dict[str, tuple[str, ...]] = {}
    first: dict[str, str] = {}
    for name, tensor in meta.items():
        joined = {name}
        for key in _published(reference, {name: tensor}):
            joined.update(groups.get(first.setdefault(key, name), ()))
        group = tuple(n for n in meta if n in joined)
        groups |= dict.fromkeys(group, group)
    return groups


def _names_in_layer(_: nn.Module, meta: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Return a dict from parameter to all parameters of its layer; parameters outside of layers form one group."""
    layers: dict[str, list[str]] = {}
    for name in meta:
        match = _LAYER.match(name)
        layers.setdefault(match[0] if match else "", []).append(name)
    return {name: tuple(names) for names in layers.values() for name in names}


def _assign_files(sizes: dict[str, int], max_file_bytes: int) -> dict[str, str]:
    pattern = "model{suffix}.safetensors"
    split = split_state_dict_into_shards_factory(
        sizes, get_storage_size=int, filename_pattern=pattern, max_shard_size=max_file_bytes
    )
    return split.tensor_to_filename


@dataclass(frozen=True)
class ExportShards:
    """Tensors to export, sharded or replicated over the ranks of each pipeline stage.

    Attributes:
        rank: This rank.
        state: Tensors of this rank by name.
        device: Device of this rank's tensors.
        owners: For each tensor of any rank: (lowest rank that has the tensor or a shard of it, dtype, full shape).
        trained: Names of the trained parameters.
        resident: Function that returns the current values of a local tensor, which a memory plan may have offloaded.
    """

    rank: int
    state: Mapping[str, Tensor]
    device: torch.device
    owners: Mapping[str, tuple[int, torch.dtype, torch.Size]]
    trained: frozenset[str]
    resident: Resident

    @classmethod
    def of(cls, ranks: RankGroup, model: nn.Module, state: Mapping[str, Tensor], resident: Resident) -> ExportShards:
        """Gather names, dtypes and shapes of the tensors of all ranks; collective over all ranks."""
        owners: dict[str, tuple[int, torch.dtype, torch.Size]] = {}
        trained: set[str] = set()
        gathered = ranks.everywhere(lambda: {n: (v.dtype, v.shape, v.requires_grad) for n, v in state.items()})
        for rank, facts in enumerate(gathered):
            for name, (dtype, shape, is_trained) in facts.items():
                owners.setdefault(name, (rank, dtype, shape))
                trained.update([name] if is_trained else ())
        device = next(model.parameters()).device
        return cls(ranks.rank, state, device, owners, frozenset(trained), resident)

    @torch.no_grad()
    def gather_full(self, name: str) -> Tensor:
        """Gather a full tensor on rank 0; collective over all ranks. Other ranks must ignore the result."""
        (rank, dtype, shape), tensor = self.owners[name], self.state.get(name)
        if tensor is None:
            shape = shape if self.rank == 0 else torch.Size()
            full = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            full = self.resident(local(tensor))
            if isinstance(tensor, DTensor):
                sharded: Any = DTensor(full.to(self.device), tensor._spec, requires_grad=False)
                full = sharded.full_tensor()
        if rank and self.rank == rank:
            dist.send(full.contiguous(), 0)
        elif rank and self.rank == 0:
            dist.recv(full, rank)
        return full

"""Check of a model spec against the names, shapes and dtypes in the headers of weight files."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from hyper_parallel.errors import WeightsUnreadable
from hyper_parallel.model._model_spec import ModelSpec, ParamSpec
from hyper_parallel.model._weight_listing import TensorInfo, list_weight_files, read_tensor_infos
from hyper_parallel.model.families import FAMILIES, FAMILIES_READ, Experts
from hyper_parallel.units import FLOAT_DTYPES

_BUFFERS = ("inv_freq", "e_score_correction_bias", "attn.bias", "attn.masked_bias")
"""Suffixes of names in published files that are buffers, not parameters."""


def read_headers(directory: Path) -> tuple[dict[str, TensorInfo], tuple[str, ...]]:
    """Return the tensors in the safetensors files of a directory by name, and notes for the user; both may be empty.

    Files in PyTorch's format (pickle) are not opened, and give a note.

    Raises:
        WeightsUnreadable: HP703 if some of several files are missing, or a file or index is damaged.
    """
    listing = list_weight_files(directory)
    files = [f for f in listing.files if f.endswith(".safetensors")]
    if listing.files and not files:
        return {}, ("the weight files are pickled: names and shapes are not checked",)
    missing = [f for f in files if not os.path.isfile(directory / f)]  # noqa: PTH113  too long a name
    if files and len(missing) == len(files):
        return {}, ("the weight files are missing: names and shapes are not checked",)
    if missing:
        files_to_fetch = ", ".join(f"`{file}`" for file in missing[:3])
        raise WeightsUnreadable(
            f"weight files are missing ({len(missing)} of {len(files)})",
            where=str(directory / (listing.index or "")),
            got=missing[:3],
            hint=f"fetch {files_to_fetch}{' and the other missing files' if len(missing) > 3 else ''} again",
        )
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        tensors |= read_tensor_infos(directory / file)
    return tensors, ()


def check_weights(spec: ModelSpec, tensors: Mapping[str, TensorInfo], directory: Path) -> ModelSpec:
    """Return the spec with the dtype of the weights, after comparing names and shapes.

    Tensors without a parameter in the spec, such as those of a vision tower, add a note. Quantised weights have other
    shapes and are not compared, which adds a note.

    Raises:
        WeightsUnreadable: HP703 if a parameter is missing or has another shape; outside `FAMILIES_READ` only a note.
    """
    if spec.quantised:
        return replace(spec, notes=(*spec.notes, "quantized weights: shapes are not checked"))
    file_tensors = _causal_lm_names(tensors, spec)
    experts = FAMILIES[spec.family].experts if spec.family in FAMILIES else None
    wrong, used = [], set()
    params = dict(spec.named_params())
    partner = {p.tied_to: name for name, p in params.items() if p.tied_to is not None}
    for name, param in params.items():
        for option in _stored_as(name, param, experts):
            if all(stored in file_tensors for stored, _ in option):
                wrong += [
                    f"{stored}: config {list(shape)}, file {list(file_tensors[stored].shape)}"
                    for stored, shape in option
                    if file_tensors[stored].shape != shape
                ]
                used |= {stored for stored, _ in option}
                break
        else:
            if param.tied_to is None and partner.get(name) not in file_tensors:
                wrong.append(f"{name}: missing")
    extra = [n for n in file_tensors if n not in used and not n.endswith(_BUFFERS)]
    notes = list(spec.notes)
    if wrong and spec.family in FAMILIES_READ:
        raise WeightsUnreadable(
            f"parameters of the weight files do not match config.json ({len(wrong)} in all)",
            where=str(directory),
            got=wrong[:3],
            hint="fetch config.json and the weight files again, from the same place",
        )
    if wrong:
        notes.append(
            f"parameters that differ from the weight files: {len(wrong)}, first {wrong[0]}; the files hold "
            f"{sum(math.prod(t.shape) for t in file_tensors.values()):,} "
            f"elements, the model is read with {spec.num_params:,}"
        )
    if extra:
        notes.append(f"tensors of the weights that are not planned: {len(extra)}, first `{extra[0]}`")
    dtype = _main_dtype([file_tensors[n] for n in used]) or spec.dtype
    if dtype != spec.dtype:
        notes.append(f"the weights are stored in {dtype}, config.json says {spec.dtype}")
    return replace(spec, dtype=dtype, notes=tuple(notes))


def _causal_lm_names(tensors: Mapping[str, TensorInfo], spec: ModelSpec) -> dict[str, TensorInfo]:
    """Return the tensors by their names in the causal language model.

    Files of multimodal models, and of models without a head, have other prefixes.
    """
    base = spec.blocks[0].params[0].name.partition(".")[0]
    prefixes = (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    )

    def rename(name: str) -> str:
        for old, new in prefixes:
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name

    renamed = {rename(name): info for name, info in tensors.items()}
    if any(name.startswith(f"{base}.") for name in renamed):
        return renamed
    return {n if n.startswith("lm_head.") else f"{base}.{n}": t for n, t in renamed.items()}


def _stored_as(name: str, param: ParamSpec, experts: Experts | None) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Yield every way in which files may store a parameter, as a list of tensor names with shapes.

    Published files contain one matrix per expert, although transformers stacks experts in memory. Files of GPT-OSS
    contain stacked experts.
    """
    yield [(name, param.shape)]
    if experts is None or experts.storage != "stacked":
        return
    block = name.replace(".mlp.", f".{experts.checkpoint_block}.")
    if not param.is_expert:
        yield [(block, param.shape)]
        return
    prefix, _, which = block.rpartition(".")
    gate, up, down = experts.checkpoint_names
    num, rows, columns = param.shape
    if which == "gate_up_proj":
        parts, shape = [gate, up], (rows // 2, columns)
    else:
        parts, shape = [down], (rows, columns)
    yield [(f"{prefix}.{e}.{part}.weight", shape) for e in range(num) for part in parts]


def _main_dtype(tensors: list[TensorInfo]) -> str | None:
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[tensor.dtype] += math.prod(tensor.shape)
    return FLOAT_DTYPES.get(elements.most_common(1)[0][0]) if elements else None

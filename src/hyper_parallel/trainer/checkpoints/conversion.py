"""Conversion of checkpoints to and from Hugging Face directories, and of adapters to and from peft directories."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from hyper_parallel.backends.torch.dropout import original_config
from hyper_parallel.backends.torch.peft_adapters import ADAPTER_CONFIG, base_of
from hyper_parallel.backends.torch.token_scores import SCORE
from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.lora import has_adapters, merge_adapters
from hyper_parallel.backends.torch.weights.pretrained import (
    CarriedWeights,
    carried_of,
    carried_weights,
    load_pretrained,
)
from hyper_parallel.config import Lora, Model, Recipe, Training
from hyper_parallel.errors import (
    BadValue,
    CheckpointCorrupt,
    CheckpointMismatch,
    ModelUnreadable,
    UnknownModel,
)
from hyper_parallel.model import GENERATION, list_weight_files
from hyper_parallel.owned_folder import move_away
from hyper_parallel.trainer.checkpoints import manifest as files
from hyper_parallel.trainer.checkpoints._restore import stored_dtypes
from hyper_parallel.trainer.checkpoints.adapter_files import (
    allocate_trained,
    export_adapter,
    load_adapter,
)
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.model_export import export_hf, exported_folder
from hyper_parallel.trainer.checkpoints.pieces import check_dtype
from hyper_parallel.trainer.engine.base_weights import load_base
from hyper_parallel.trainer.engine.recipe_model import build_model, read_spec, set_token_ids
from hyper_parallel.trainer.input_checksums import BASE, RunInputs

logger = logging.getLogger(__name__)

_EXPORTED_DTYPES: Final = ("float32", "bfloat16", "float16")
_IMPORTED_DTYPES: Final = ("float32", "float64")


@contextmanager
def _export_hints() -> Iterator[None]:
    """Replace the hints of `Checkpointer`, which name recipe keys, by hints for the command `checkpoint export`."""
    try:
        yield
    except CheckpointCorrupt as error:
        error.hint = (error.hint or "").partition(", or ")[0]
        raise
    except CheckpointMismatch as error:
        error.hint = "name the model of the run with `--model`"
        raise


@_export_hints()
def export_checkpoint(
    directory: Path,
    model_dir: Path,
    out_dir: Path,
    step: int | None = None,
    tokenizer_dir: Path | None = None,
    dtype: str | None = None,
    *,
    lora: Lora | None = None,
    merge: bool = False,
    trusted: bool = False,
) -> int:
    """Export the weights or adapters of a checkpoint. Host memory must hold all exported weights at once.

    Args:
        directory: Directory of the checkpoints.
        model_dir: Directory with a `config.json`, path of a `config.json`, or name of a preset. With `merge`, the
            directory must also have the base weights.
        out_dir: Directory to write.
        step: Step to export; None: the newest intact checkpoint.
        tokenizer_dir: Directory of the tokenizer; None: `model_dir`.
        dtype: Name of the stored dtype; None: as in the checkpoint.
        lora: Section `lora` of the run's recipe; None: a run without adapters.
        merge: Whether to write the full model with merged adapters instead of the adapters.
        trusted: Whether code in `model_dir` may run, for a model unknown to transformers.

    Returns:
        The exported step.

    Raises:
        BadValue: HP102 for an unknown dtype.
        ModelUnreadable: HP305 when the config is missing or is not a causal language model of transformers.
        CheckpointMismatch: HP702 when the model or, with `merge`, the base weights differ from those of the run.
        UnsupportedSharding: HP205 for adapters of a weight that several modules share, with `merge`.
        HyperParallelError: Other errors of `load_pretrained`, `Checkpointer.load` and `export_hf`.
    """
    check_dtype(dtype, _EXPORTED_DTYPES)
    exported_folder(out_dir, "adapter" if lora is not None and not merge else "export", "--out").check()
    model_dir = model_dir.expanduser()
    loader = Checkpointer(directory, keep=1, asynchronous=False, fingerprint=None)
    exported_step, _, index = loader.newest_intact(step)
    dtypes = stored_dtypes(index)
    scores = f"{SCORE}.weight" in dtypes  # language models have no such parameter
    options = {"lora": lora, "stage": "rm" if scores else "pt"}
    model = _build_model(str(model_dir), trusted=trusted, **options)
    _set_dtypes(model, dtypes)
    _load(model, loader, exported_step, model_dir, lora=lora is not None, merge=merge)
    if tokenizer_dir is None and model_dir.exists():
        tokenizer_dir = model_dir if model_dir.is_dir() else model_dir.parent
    stored = getattr(torch, dtype) if dtype else None
    if lora is not None and not merge:
        export_adapter(model.to(dtype=stored), tokenizer_dir, out_dir)
        return exported_step
    merge_adapters(model)
    if scores and tokenizer_dir is not None:
        set_token_ids(model, tokenizer_dir, pretrained=True)
    generation, config = model_dir / GENERATION, original_config(model)
    carried = _carried_weights(model, model_dir, merge=merge)
    export_hf(model, config, tokenizer_dir, out_dir, stored, generation=generation, carried=carried)
    return exported_step


def _set_dtypes(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Convert stored parameters to their dtype in `dtypes`, and base weights of adapters to the first dtype in it."""
    adapted = has_adapters(model)
    for name, parameter in model.named_parameters():
        default = next(iter(dtypes.values())) if adapted else parameter.dtype
        parameter.data = parameter.data.to(dtypes.get(name, default))


def _load(model: nn.Module, loader: Checkpointer, step: int, model_dir: Path, *, lora: bool, merge: bool) -> None:
    base = None
    if merge:
        base = load_base(model, model_dir, frozen=True)
    elif lora:
        allocate_trained(model)
    else:
        materialize(model, seed=0, names=())
    _, extra = loader.load(model, None, step)
    if base is not None:
        inputs = RunInputs()
        inputs.load(extra)
        inputs.check(BASE, base.checksum, model_dir)


def _carried_weights(model: nn.Module, model_dir: Path, *, merge: bool) -> CarriedWeights | None:
    """Return the tensors in `model_dir` that the model does not use; None: `export_hf` decides.

    The tensors are those recorded in `model_dir` or, unless `merge` has loaded the weights, those in its weight files.
    """
    carried = CarriedWeights.read(model_dir)
    if carried is None and not merge and model_dir.is_dir() and list_weight_files(model_dir).files:
        return carried_of(model, model_dir)
    return carried


def _build_model(path: str, *, trusted: bool, **sections: Any) -> nn.Module:
    """Build the model at `path` on the meta device; `sections` are further arguments of `Recipe`.

    Raise ModelUnreadable (HP305) if `path` names no model or transformers cannot build it.
    """
    # All models support eager attention, and checkpoints do not depend on the attention implementation.
    source = Model(path=path, attn_implementation="eager", trust_remote_code=trusted)
    try:
        return build_model(Recipe(model=source, **sections))
    except UnknownModel as error:
        raise ModelUnreadable(error.what, where=path, hint=error.hint) from error


def import_checkpoint(model_dir: Path, directory: Path, dtype: str = "float32", *, trusted: bool = False) -> Path:
    """Save the weights of a Hugging Face directory or a peft adapter as a checkpoint of step 0.

    Host memory must hold the saved weights.

    Args:
        model_dir: Directory of `config.json` and weight files, or of a peft adapter.
        directory: Directory of checkpoints, in which the checkpoint is created.
        dtype: Dtype of the stored parameters: `float32` or `float64`.
        trusted: Whether code in `model_dir` may run, for a model unknown to transformers.

    Returns:
        Directory of the checkpoint.

    Raises:
        BadValue: HP102 for an unsupported parameter dtype, or when the directory already has checkpoints.
        ModelUnreadable: HP305 when the model cannot be read or built.
        HyperParallelError: Errors of `load_pretrained`, `load_adapter` and `Checkpointer.save`.
    """
    check_dtype(dtype, _IMPORTED_DTYPES)
    if existing := files.steps(directory):
        raise BadValue(
            "the directory already has checkpoints",
            where=str(directory),
            got=f"steps {', '.join(map(str, existing))}",
            hint=move_away(directory),
        )
    model_dir = model_dir.expanduser()
    path, is_adapter = str(model_dir), (model_dir / ADAPTER_CONFIG).is_file()
    if is_adapter:
        path = base_of(model_dir)
    training = Training.model_validate({"dtype": dtype})
    model = _build_model(path, trusted=trusted, training=training)
    spec = read_spec(path, path, trusted=trusted)
    facts: dict[str, Any] = {}
    if is_adapter:
        facts = {"run": load_adapter(model, model_dir)}
    else:
        load_pretrained(model, path)
        carried = carried_weights(model)
        if carried is not None and carried.names:
            logger.warning(
                "%d tensors that the model does not use are not in the checkpoint, first `%s`: "
                "`checkpoint export --model %s` writes them with the model",
                len(carried.names), carried.names[0], shlex.quote(path),
            )  # fmt: skip
    fingerprint = {"model": spec.fingerprint, "param_dtype": dtype}
    saver = Checkpointer(directory, keep=1, asynchronous=False, fingerprint=fingerprint)
    saver.save(0, model, None, facts)
    return directory / files.step_name(0)

"""Export of a checkpoint as a Hugging Face directory, or of its adapters as a peft directory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hyper_parallel.backends.torch.dropout import original_config
from hyper_parallel.backends.torch.token_scores import SCORE
from hyper_parallel.backends.torch.weights.initialization import materialize
from hyper_parallel.backends.torch.weights.lora import merge_adapters
from hyper_parallel.backends.torch.weights.pretrained import CarriedWeights, carried_of
from hyper_parallel.config import Lora, Model, Recipe
from hyper_parallel.errors import ModelUnreadable, UnknownModel
from hyper_parallel.model import GENERATION, list_weight_files
from hyper_parallel.trainer.checkpoints._restore import stored_dtypes
from hyper_parallel.trainer.checkpoints.adapter_files import allocate_trained, export_adapter
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.index import Index
from hyper_parallel.trainer.checkpoints.model_export import export_hf, exported_folder
from hyper_parallel.trainer.checkpoints.pieces import check_dtype
from hyper_parallel.trainer.engine.base_weights import load_base
from hyper_parallel.trainer.engine.recipe_model import build_model, set_token_ids
from hyper_parallel.trainer.input_checksums import BASE, RunInputs

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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
        CheckpointMismatch: HP702 when the base weights are not those that the adapters were trained on.
        CheckpointCorrupt, CheckpointMismatch, OutputNotWritable: See `Checkpointer.load` and `export_hf`.
    """
    check_dtype(dtype, _DTYPES)
    exported_folder(out_dir, "adapter" if lora is not None and not merge else "export").check()
    model_dir = model_dir.expanduser()
    loader = Checkpointer(directory, keep=1, asynchronous=False, fingerprint=None)
    exported_step, _, index = loader.newest_intact(step)
    scores = f"{SCORE}.weight" in stored_dtypes(index)  # language models have no such parameter
    model = _build_model(model_dir, index, lora, scores=scores, trusted=trusted)
    _load(model, loader, exported_step, model_dir, lora=lora is not None, merge=merge)
    if tokenizer_dir is None and model_dir.exists():
        tokenizer_dir = model_dir if model_dir.is_dir() else model_dir.parent
    stored = _DTYPES[dtype] if dtype else None
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


def _load(
    model: nn.Module, loader: Checkpointer, step: int, model_dir: Path, *, lora: bool, merge: bool
) -> None:
    """Allocate the parameters of a meta-device model and load a checkpoint; with `merge`, also load base weights."""
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
    """Return the tensors of the pretrained files that the model does not use; None if there are no pretrained files."""
    carried = CarriedWeights.read(model_dir)
    if carried is None and not merge and model_dir.is_dir() and list_weight_files(model_dir).files:
        return carried_of(model, model_dir)
    return carried


def _build_model(
    model_dir: Path, index: Index, lora: Lora | None, *, scores: bool, trusted: bool
) -> nn.Module:
    """Return the model of a checkpoint (with `scores`, a reward model) on the meta device, in the stored dtypes."""
    dtypes = stored_dtypes(index)
    try:
        # All models support eager attention, and the export does not record the attention implementation.
        source = Model(path=str(model_dir), attn_implementation="eager", trust_remote_code=trusted)
        model = build_model(Recipe(model=source, lora=lora, stage="rm" if scores else "pt"))
    except UnknownModel as error:
        raise ModelUnreadable(error.what, where=str(model_dir), hint=error.hint) from error
    for name, parameter in model.named_parameters():
        default = next(iter(dtypes.values())) if lora is not None else parameter.dtype
        parameter.data = parameter.data.to(dtypes.get(name, default))
    return model

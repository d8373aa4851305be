"""Import of a Hugging Face directory as a checkpoint from which a run on any layout can start."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

from hyper_parallel.backends.torch import load_pretrained
from hyper_parallel.backends.torch.peft_adapters import ADAPTER_CONFIG, base_of
from hyper_parallel.backends.torch.weights.pretrained import carried_weights
from hyper_parallel.config import Model, Recipe, Training
from hyper_parallel.errors import BadValue, ModelUnreadable, UnknownModel
from hyper_parallel.trainer.checkpoints import manifest as files
from hyper_parallel.trainer.checkpoints.adapter_files import load_adapter
from hyper_parallel.trainer.checkpoints.checkpointer import Checkpointer
from hyper_parallel.trainer.checkpoints.pieces import check_dtype
from hyper_parallel.trainer.engine.recipe_model import build_model, read_spec

logger = logging.getLogger(__name__)

_DTYPES = ("float32", "float64")


def import_checkpoint(
    model_dir: Path, directory: Path, dtype: str = "float32", *, trusted: bool = False
) -> Path:
    """Save the weights of a Hugging Face directory or a peft adapter as a checkpoint of step 0.

    Host memory must hold the full model.

    Args:
        model_dir: Directory of `config.json` and weight files, or of a peft adapter.
        directory: Directory of checkpoints, in which the checkpoint is created.
        dtype: Dtype of the stored parameters: `float32` or `float64`.
        trusted: Whether code in `model_dir` may run, for a model unknown to transformers.

    Returns:
        Directory of the checkpoint.

    Raises:
        BadValue: HP102 for an unsupported parameter dtype, or when the directory already has checkpoints.
        ModelUnreadable, WeightsUnreadable, OutputNotWritable: See `build_model`, `load_pretrained`, `Checkpointer`.
    """
    check_dtype(dtype, _DTYPES)
    _check_empty(directory)
    model_dir = model_dir.expanduser()
    path, is_adapter = str(model_dir), (model_dir / ADAPTER_CONFIG).is_file()
    if is_adapter:
        path = base_of(model_dir)
    recipe = Recipe(
        model=Model(path=path, attn_implementation="eager", trust_remote_code=trusted),
        training=Training.model_validate({"dtype": dtype}),
    )
    try:
        model, spec = build_model(recipe), read_spec(path, path, trusted=trusted)
    except UnknownModel as error:
        raise ModelUnreadable(error.what, where=path, hint=error.hint) from error
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
                len(carried.names), carried.names[0], path,
            )  # fmt: skip
    saver = Checkpointer(
        directory,
        keep=1,
        asynchronous=False,
        fingerprint={"model": spec.fingerprint, "param_dtype": dtype},
    )
    saver.save(0, model, None, facts)
    return directory / files.step_name(0)


def _check_empty(directory: Path) -> None:
    if existing := files.steps(directory):
        raise BadValue(
            "the directory already has checkpoints",
            where=str(directory),
            got=f"steps {', '.join(map(str, existing))}",
            hint=shlex.join(["mv", str(directory), f"{directory}.old"]),
        )

"""Turn a checkpoint of any layout into a Hugging Face directory, in one process without a process group."""

from __future__ import annotations

from pathlib import Path

import torch

from hyper_parallel.backends.torch.weights._initialise import allocate_and_fill_buffers
from hyper_parallel.errors import BadValue, ModelUnreadable
from hyper_parallel.trainer import _manifest as files
from hyper_parallel.trainer._checkpoint import Checkpointer, stored_dtypes
from hyper_parallel.trainer._export import export_hf

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export_checkpoint(
    directory: Path,
    model_dir: Path,
    out_dir: Path,
    step: int | None = None,
    tokenizer_dir: Path | None = None,
    dtype: str | None = None,
) -> int:
    """Load the weights of a checkpoint and export them; holds the whole model in host memory.

    Args:
        directory: Directory of the checkpoints.
        model_dir: Directory of `config.json`, or the file itself.
        out_dir: Directory to write.
        step: Step; None: the newest intact one.
        tokenizer_dir: Directory of the tokenizer; None: that of the model.
        dtype: Name of the stored dtype; None: as in the checkpoint.

    Returns:
        The step exported.

    Raises:
        BadValue: HP102 for an unknown dtype.
        ModelUnreadable: HP305 when the config is missing or no causal language model of transformers.
        CheckpointCorrupt, CheckpointMismatch, OutputNotWritable: As in `Checkpointer.load` and `export_hf`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if dtype is not None and dtype not in _DTYPES:
        raise BadValue("unknown dtype", where="--dtype", got=dtype, allowed=list(_DTYPES))
    folder = model_dir if model_dir.is_dir() else model_dir.parent
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelUnreadable(
            f"the model cannot be built ({str(error).splitlines()[0]})", where=str(model_dir)
        ) from None
    loader = Checkpointer(directory, keep=1, asynchronous=False, fingerprint=None)
    found = loader.newest_intact(step)[0]
    dtypes = stored_dtypes(directory / files.step_name(found))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))
    allocate_and_fill_buffers(model)
    loader.load(model, None, found)
    export_hf(model, config, tokenizer_dir or folder, out_dir, _DTYPES[dtype] if dtype else None)
    return found

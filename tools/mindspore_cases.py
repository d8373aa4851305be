"""Torch results for the sweep `mindspore`: losses of a model type, its step program, and its weights.

    python tools/mindspore_cases.py                store all model types, in one process
    python tools/mindspore_cases.py llama gpt2     these types
    python tools/mindspore_cases.py --count        count the operators that MindSpore lacks over the stored programs

Results are stored in build/sweeps/mindspore under a digest of the sources on which they depend, so a changed operator
of MindSpore does not recompute them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tools")]

from sweeps.interface import causal_types, one_line, plain_model, refusal_or_failure  # noqa: E402

ROWS, LENGTH, STEPS, LR = 2, 8, 5, 0.05
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
SOURCES = (
    "src/hyper_parallel/backends/step_program.py",
    "src/hyper_parallel/backends/torch/program_capture.py",
    "src/hyper_parallel/trainer/small_configs.py",
    "tools/census_models.py",
    "tools/mindspore_cases.py",
)


def stored() -> Path:
    """Return the folder for results of the current sources."""
    digest = hashlib.sha256(f"{version('torch')} {version('transformers')}".encode())
    for source in SOURCES:
        digest.update((ROOT / source).read_bytes())
    return ROOT / "build" / "sweeps" / "mindspore" / digest.hexdigest()[:12]


def prepared(model_type: str) -> Path:
    """Return the folder with the results of a type, computed unless they are stored.

    It contains `case.json` with losses and class of the model (or the cell, for a type without a program), `values.npz`
    with the inputs of the first step, and the program.
    """
    place = stored() / model_type
    if not place.is_dir():
        scratch = place.with_name(f"{model_type}.{os.getpid()}")
        scratch.mkdir(parents=True)
        case = _computed(model_type, scratch)
        (scratch / "case.json").write_text(json.dumps(case), encoding="utf-8")
        scratch.rename(place)
    return place


def _computed(model_type: str, place: Path) -> dict[str, Any]:
    """Compute a type, save its program and values, and return the content of `case.json`."""
    import numpy as np

    from hyper_parallel.backends.torch.program_capture import capture_gradients

    warnings.simplefilter("ignore")
    try:
        model, batch, loss = _case(model_type)
        losses = _losses(model, batch, loss)
    except Exception as error:  # plain transformers cannot train it
        return {"cell": f"skipped: {one_line(error)}"}
    try:
        model, batch, loss = _case(model_type)  # the first one has been trained
        program = capture_gradients(model, batch, loss)
    except Exception as error:
        return {"cell": refusal_or_failure(error)}
    program.save(place)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    arrays = {
        name: state[name.removeprefix("param.")].detach().numpy()
        for name in program.inputs
        if name.startswith("param.")
    }
    arrays |= {f"batch.{name}": tensor.numpy() for name, tensor in batch.items()}
    np.savez(place / "values.npz", **arrays)
    return {"losses": losses, "model": type(model).__name__}


def _config(model_type: str) -> dict[str, Any]:
    """Return the shrunk config, with half of the layers if all layers are alike."""
    from census_models import tiny

    from hyper_parallel.trainer.small_configs import FAMILY_SIZES, LAYERS

    config = tiny(model_type)
    lists = {k: v for k, v in config.items() if isinstance(v, list) and v}
    differ = any(len({*map(str, v)}) > 1 for k, v in lists.items() if k != "architectures")
    if model_type in FAMILY_SIZES or differ:
        return config
    config |= {k: v[: LAYERS // 2] for k, v in lists.items() if len(v) == LAYERS}
    return config | {k: LAYERS // 2 for k in DEPTHS if config.get(k) == LAYERS}


def _case(model_type: str) -> tuple[Any, dict[str, Any], Any]:
    """Return a model in float32, a batch, and the loss function."""
    import torch
    import torch.nn.functional as F

    model = plain_model(model_type, _config(model_type)).float().train()
    for name, form in (("attn", "eager"), ("experts", "batched_mm")):
        if hasattr(model, f"set_{name}_implementation"):
            getattr(model, f"set_{name}_implementation")(form)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 90, (ROWS, LENGTH), generator=generator)
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1)}

    def loss(model: Any, input_ids: Any, labels: Any) -> Any:
        logits = model(input_ids=input_ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return model, batch, loss


def _losses(model: Any, batch: dict[str, Any], loss: Any) -> list[float]:
    """Return the losses of some SGD steps."""
    import torch

    losses = []
    for _ in range(STEPS):
        value = loss(model, **batch)
        value.backward()
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= LR * param.grad
                    param.grad = None
        losses.append(float(value))
    return losses


def rounding(model_type: str) -> list[float]:
    """Return the relative difference of torch's losses in float32 and float64, per step."""
    import torch

    model, batch, loss = _case(model_type)
    exact = _losses(model.to(torch.float64), batch, loss)
    model, batch, loss = _case(model_type)
    own = _losses(model, batch, loss)
    return [abs(a - b) / abs(b) for a, b in zip(own, exact, strict=True)]


def count_missing() -> None:
    """Print each missing operator: number of types that lack only it, number of all types, name, and examples."""
    from hyper_parallel.backends.program_runner import unsupported_operators
    from hyper_parallel.backends.step_program import StepProgram

    types, alone = defaultdict(list), defaultdict(list)
    for file in sorted(stored().glob("*/program.json")):
        missing = unsupported_operators("mindspore", StepProgram.load(file.parent))
        for op in missing:
            types[op].append(file.parent.name)
            if len(missing) == 1:
                alone[op].append(file.parent.name)
    for op, names in sorted(types.items(), key=lambda item: -len(item[1])):
        print(f"{len(alone[op]):4d} {len(names):4d}  {op}  {' '.join(names[:6])}")


def main() -> None:
    """Compute types, or count missing operators, as the arguments request."""
    if "--count" in sys.argv:
        count_missing()
        return
    for model_type in sys.argv[1:] or causal_types():
        case = json.loads((prepared(model_type) / "case.json").read_text(encoding="utf-8"))
        print(model_type, case.get("cell", "stored"), flush=True)


if __name__ == "__main__":
    main()

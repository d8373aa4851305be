"""Steps of SGD on MindSpore beside torch, for one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from sweeps.interface import causal_types, plain_model, refusal_or_failure

TITLE = "MindSpore"
TEXT = """Losses of five SGD steps in float32 on MindSpore against the same steps in torch, to 1e-5 relative, on two
packed rows. The model computes attention eagerly and experts as batched products on both. `HP104` names the operators
that MindSpore lacks, each with the module that needs it. The other types have not been tried yet."""
COLUMNS = ("train",)
SECONDS = 3600
CPU_SECONDS = 120
NEEDS = ("mindspore",)
PRELOADED = (
    *("hyper_parallel.backends.torch.program_capture", "transformers.modeling_utils"),
    *(
        "hyper_parallel.backends.mindspore.runner",
        "census_models",
    ),  # it starts threads in `join` only
)
ROWS, LENGTH, STEPS, LR, LIMIT = 2, 8, 5, 0.05, 1e-5


def model_types() -> list[str]:
    """Return the causal language models of transformers."""
    return causal_types()


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Return whether the losses are equal."""
    warnings.simplefilter("ignore")
    try:
        model, batch, loss = _case(model_type)
        wanted = _torch_losses(model, batch, loss)
    except Exception as error:  # plain transformers cannot train it
        return {"train": f"skipped: {type(error).__name__}: {str(error).splitlines()[:1]}"}
    try:
        return {"train": _compared(model_type, wanted, folder)}
    except Exception as error:
        return {"train": refusal_or_failure(error)}


def _case(model_type: str) -> tuple[Any, dict[str, Any], Any]:
    import torch
    import torch.nn.functional as F

    model = plain_model(model_type).float().train()
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


def _torch_losses(model: Any, batch: dict[str, Any], loss: Any) -> list[float]:
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


def _compared(model_type: str, wanted: list[float], folder: Path) -> str:
    from hyper_parallel.backends.program_runner import join_ranks, unsupported_operators
    from hyper_parallel.backends.torch.program_capture import capture_gradients

    model, batch, loss = _case(model_type)  # the first one has been trained
    program = capture_gradients(model, batch, loss)
    if missing := unsupported_operators("mindspore", program):
        needed = (f"{op} ({module or type(model).__name__})" for op, module in missing.items())
        return f"HP104: {type(model).__name__} uses {', '.join(sorted(needed))}"
    runner = join_ranks("mindspore", 0, 1, lambda text: str(text), {})
    step = runner.compile(program, folder / "step.py")
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    arrays = {
        name: state[name.removeprefix("param.")].detach().numpy()
        for name in program.inputs
        if name.startswith("param.")
    }
    zeros = {
        name: arrays[name.replace("sum.", "param.", 1)] * 0
        for name in program.inputs
        if name.startswith("sum.")
    }
    given = {f"batch.{name}": tensor.numpy() for name, tensor in batch.items()}
    for number, value in enumerate(wanted):
        values = {name: runner.value(array) for name, array in (arrays | zeros | given).items()}
        results = {name: runner.array(result) for name, result in step(values).items()}
        if not abs(float(results["loss"]) - value) <= LIMIT * abs(value):
            return f"wrong: loss {float(results['loss'])!r} of step {number + 1} is not {value!r}"
        for name in zeros:
            param = name.replace("sum.", "param.", 1)
            arrays[param] = arrays[param] - LR * results[name]
    return "ok"

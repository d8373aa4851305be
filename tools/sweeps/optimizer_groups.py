"""Sweep: weight decay applies to the same parameters as in transformers, and Muon to matmul weights."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from sweeps.interface import causal_types, image_text_types, one_line, plain_model

TITLE = "Optimizer groups"
TEXT = """
Shrunk classes. Column `decay`: the parameters with weight decay are those of transformers' `Trainer` (all but biases
and norms, by name), less vectors (at most one dimension above 1, in no linear module), `A_log` and `D` of state-space
layers and norms that only their class tells; a name of an outer module (`prelayernorm`) does not exempt a linear
weight. Column `muon`: of every parameter that Muon orthogonalises each matrix is an operand of a matrix product in a
forward pass on tokens, whole and by itself; a module that such a pass does not run counts by its type (`not run`).
"""
COLUMNS = ("decay", "muon")
SECONDS = 240
EXEMPT = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Name patterns of `Trainer.get_decay_parameter_names`."""


def model_types() -> list[str]:
    """Return all causal and image-text types; child processes inherit the modules imported here."""
    from transformers import Trainer  # noqa: F401

    import hyper_parallel.trainer.engine.optimizer  # noqa: F401

    return causal_types() + image_text_types()


def trainer_decays(model: Any) -> set[str]:
    """Return the names of the parameters with weight decay in transformers' Trainer."""
    from transformers import Trainer

    return set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]


def expected_decay(model: Any) -> set[str]:
    """Return the names of the parameters that must have weight decay: the Trainer's, with the documented exceptions."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    chosen = trainer_decays(model)
    names = {id(p): n for n, p in model.named_parameters()}
    found = set()
    for path, module in model.named_modules():
        linear = isinstance(module, (nn.Linear, nn.Embedding, Conv1D))
        for name, p in module._parameters.items():
            if p is None or names[id(p)] != f"{path}.{name}".lstrip("."):
                continue
            full, near = names[id(p)], ".".join([*path.split(".")[-1:], name]).lower()
            decays = full in chosen or (linear and "bias" not in near)
            vector = sum(size > 1 for size in p.shape) <= 1 and not (linear and name == "weight")
            normed = re.search(r"norm", type(module).__name__, re.IGNORECASE) and not linear
            if decays and not vector and not normed and name not in ("A_log", "D"):
                found.add(full)
    return found


def decay_cell(model: Any) -> str:
    """Return `ok` if the right parameters have weight decay, else the differences."""
    from hyper_parallel.trainer import parameter_groups

    names = {id(p): n for n, p in model.named_parameters()}
    groups = parameter_groups(model, 0.1)
    ours = {names[id(p)] for g in groups if g["weight_decay"] for p in g["params"]}
    everything = {names[id(p)] for g in groups for p in g["params"]}
    if everything != {n for n, p in model.named_parameters() if p.requires_grad}:
        return "wrong: a parameter is in no group"
    expected = expected_decay(model) & everything
    if ours == expected:
        return "ok"
    more, less = sorted(ours - expected), sorted(expected - ours)
    return f"wrong: decayed too {more[:3]}, not decayed {less[:3]} of {len(more) + len(less)}"


def operand_shapes(model: Any, ids: Any) -> dict[str, set[tuple[int, ...]]]:
    """Return, by parameter name, the shapes in which the parameter is an operand of matmuls in a forward pass."""
    import torch
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten
    products = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten._grouped_mm, aten.dot}
    copies = {aten._to_copy, aten.clone, aten.index, aten.index_select, aten.select}
    copies |= {aten.slice, aten.cat, aten.t, aten.transpose, aten.contiguous}
    owners: dict[int, set[str]] = {}
    kept: list[Any] = []
    found: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for name, p in model.named_parameters():
        owners[p.untyped_storage()._cdata] = {name}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
            packet = func.overloadpacket
            if packet in products:
                for t in tensors:
                    for name in owners.get(t.untyped_storage()._cdata, ()):
                        found[name].add(tuple(t.shape))
            elif packet in copies and isinstance(out, Tensor):
                names = {n for t in tensors for n in owners.get(t.untyped_storage()._cdata, ())}
                if names:
                    owners.setdefault(out.untyped_storage()._cdata, set()).update(names)
                    kept.append(out)
            return out

    with torch.no_grad(), Watch():
        model(input_ids=ids, use_cache=False)
    return found


def matrix_shapes(p: Any, count: int) -> set[tuple[int, ...]]:
    """Return the allowed (rows, columns) of a parameter's matrices as matmul operands."""
    rows, columns = p.numel() // count // p.shape[-1], p.shape[-1]
    return {(rows, columns), (columns, rows)}


def muon_cell(model: Any) -> str:
    """Return `ok` if Muon orthogonalises exactly the operands of matmuls, else the differences."""
    import torch
    from census_models import SEQ_LEN
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from hyper_parallel.backends.torch.forward_variants import keep_float64
    from hyper_parallel.backends.torch.parameter_roles import parameter_roles
    from hyper_parallel.config import Training
    from hyper_parallel.trainer import build_optimizer

    names = {id(p): n for n, p in model.named_parameters()}
    keep_float64(model)
    try:
        used = operand_shapes(model, torch.arange(3, 3 + 2 * SEQ_LEN).view(2, SEQ_LEN))
    except Exception as error:
        return f"skipped: {one_line(error)}"
    roles = parameter_roles(model)
    optimizer = build_optimizer(model, Training(optimizer="muon"))
    typed = {f"{path}.weight" for path, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D))}
    not_run, left = 0, set()
    for group in optimizer.param_groups:
        for p in group["params"]:
            name = names[id(p)]
            if not group["muon"]:
                left.add(str(roles[name].kind))
            elif used.get(name):
                shapes = matrix_shapes(p, group["num_matrices"])
                if not any(shape[-2:] in shapes for shape in used[name]):
                    return f"wrong: {name} {tuple(p.shape)} enters products as {sorted(used[name])}"
            elif name not in typed and not runs_elsewhere(model, name, used):
                not_run += 1
    unread = left & {"linear", "stacked"}
    if unread:
        return f"wrong: adamw has {sorted(unread)}"
    return "ok" if not not_run else f"ok: {not_run} not run"


def runs_elsewhere(model: Any, name: str, used: dict[str, Any]) -> bool:
    """Return whether another module of the same class uses its parameter with this name in matmuls."""
    owner, _, own = name.rpartition(".")
    kind = type(model.get_submodule(owner))
    return any(n.rpartition(".")[2] == own and type(model.get_submodule(n.rpartition(".")[0])) is kind for n in used)


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    try:
        model = plain_model(model_type)
    except Exception as error:
        return dict.fromkeys(COLUMNS, f"skipped: {one_line(error)}")
    cells = {"decay": decay_cell(model)}
    try:
        cells["muon"] = muon_cell(model.eval())
    except Exception as error:
        cells["muon"] = f"fails: {one_line(error)}"
    return cells

"""Sweep: dropout masks are equal or different between tensor-parallel ranks, as required."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.dropout import rated_model
from sweeps.interface import causal_types, one_line, refusal_or_failure

TITLE = "Dropout under tensor parallelism"
TEXT = """
Shrunk classes with every rate of their config at one half, eager attention, two training passes under `tp=2` from other
seeds on each rank. Every call of dropout is recorded. Where both ranks drop from equal values (activations that are
whole on each) their masks must be equal; where they drop from different values (heads, slices of a width, tokens) the
masks must differ. Dropout of embeddings that ranks cut into tokens afterwards is left out: a rank keeps its own tokens.
With activation recomputation the gradients must be the same. `skipped`: the class calls no dropout.
"""
COLUMNS = ("tp",)
SECONDS = 300
LENGTH = 32


def model_types() -> list[str]:
    """Return all causal types; child processes inherit the modules imported here."""
    import hyper_parallel.runtime
    import hyper_parallel.trainer.engine.optimizer  # noqa: F401

    return causal_types()


def record_calls(model_type: str, number: int, recompute: bool) -> tuple[list[Any], dict[str, Any]]:
    """Return inputs and masks of every dropout call in two passes, and gradients of this rank's shards by name."""
    import torch
    import torch.nn.functional as F

    import hyper_parallel as hp
    from hyper_parallel.backends.torch import handle, local
    from hyper_parallel.backends.torch.model_structure import view_of
    from hyper_parallel.runtime import World

    model = rated_model(model_type)
    model.set_attn_implementation("eager")
    plain, calls, inside, cut = F.dropout, [], [], []

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        own_tokens = cut and cut[0] is None  # each rank keeps its own tokens of these values
        if inside or not training or not p or own_tokens:
            return plain(x, p, training, inplace)
        inside.append(True)
        before = x.detach().clone()
        out = plain(x, p, training, inplace)
        inside.clear()
        calls.append((before, out.detach() != 0))
        return out

    ids = torch.arange(3, 3 + LENGTH)[None]
    with World.join("cpu") as world:
        torch.manual_seed(number)
        work = hp.Workload(LENGTH, microbatch=1, compute_dtype="float64", param_dtype="float64")
        words = "tp_x=2" + (" recompute=full" if recompute else "")
        net = hp.parallelize(model, hp.plan_of(model, words, work), world)
        state, view = handle(net).tp, view_of(net)
        if view.base is not None and state is not None and not state.replicated_activations:
            net.register_forward_pre_hook(lambda *_: cut.insert(0, None))
            view.layers[0].register_forward_pre_hook(lambda *_: cut.insert(0, True))
        F.dropout = dropout
        try:
            for _ in range(2):
                net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        finally:
            F.dropout = plain
        grads = {n: local(p.grad) for n, p in net.named_parameters() if p.grad is not None}
    return calls, grads


def compare(mine: list[Any], theirs: list[Any]) -> str:
    """Return the result text from the recorded dropout calls of two ranks."""
    import torch

    if len(mine) != len(theirs):
        return f"wrong: {len(mine)} and {len(theirs)} calls"
    if not mine:
        return "skipped: calls no dropout"
    for place, ((x, mask), (y, other)) in enumerate(zip(mine, theirs, strict=True)):
        if x.shape != y.shape:
            continue
        known = (x != 0) & (y != 0)
        if int(known.sum()) < 32:
            continue
        same_input, same_mask = torch.equal(x, y), torch.equal(mask[known], other[known])
        if same_input != same_mask:
            kind = "whole" if same_input else "split"
            return f"wrong: call {place} of {len(mine)} on {kind} values {tuple(x.shape)}"
    return "ok"


def run(model_type: str, folder: Path) -> dict[str, str]:
    """Check one model type, and return the result text of each column."""
    import torch

    from hyper_parallel.runtime import launch

    try:
        net = rated_model(model_type)
        net.set_attn_implementation("eager")
        ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
        net(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    except Exception as error:
        return {"tp": f"skipped: {one_line(error)}"}
    try:
        (mine, kept), (theirs, _) = launch(lambda number: record_calls(model_type, number, False), 2, timeout_s=120)
        cell = compare(mine, theirs)
        if cell != "ok":
            return {"tp": cell}
        (_, again), _ = launch(lambda number: record_calls(model_type, number, True), 2, timeout_s=120)
    except Exception as error:
        return {"tp": refusal_or_failure(error)}
    for name, grad in kept.items():
        if not torch.allclose(grad, again[name], rtol=1e-8, atol=1e-12):
            return {"tp": f"wrong: with recompute the gradient of {name} differs"}
    return {"tp": "ok"}

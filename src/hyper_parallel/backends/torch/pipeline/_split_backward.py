"""Split backward of a stage: first the gradients of its inputs (I), later the gradients of its weights (W).

The autograd graph of a stage has a trunk, the nodes on paths from its inputs to its output, and branches from the trunk
to weights. I runs the trunk and saves the gradients that reach each node with a branch. W runs these nodes again, for
their branches. Each run computes only the gradients that it needs, so torch's operators repeat no matrix product.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2 (B and W).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hyper_parallel.backends.torch.weights.shard_ranges import local


@dataclass(slots=True)
class _Fork:
    """Node of the trunk with branches to weights, and the gradients that reached the node in the input backward."""

    node: Any
    leaves: dict[Any, None]
    grads: tuple[Tensor | None, ...] = ()

    def save(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grads = grads


def input_gradients(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[tuple[Tensor | None, ...], Callable[[], None]]:
    """Compute the gradients of a stage's inputs; return them with a function that computes the weight gradients.

    Args:
        roots: Output of the stage, or the loss, and other tensors of the stage that the loss depends on.
        grads: Gradients of `roots`; None for the loss.
        inputs: Inputs of the stage, which must be leaves. The gradient of an input that no root depends on is None.
            The backward of roots that depend on no input runs entirely in the returned function.
    """
    edges = list(zip(roots, grads, strict=True))
    trunk, forks = _trunk([root.grad_fn for root in roots], inputs)
    outside = [(root, grad) for root, grad in edges if root.grad_fn not in trunk]
    input_grads: tuple[Tensor | None, ...] = (None,) * len(inputs)
    hooks = [fork.node.register_prehook(fork.save) for fork in forks]
    try:
        if trunk:
            reached = [(root, grad) for root, grad in edges if root.grad_fn in trunk]
            input_grads = torch.autograd.grad(
                [root for root, _ in reached],
                inputs,
                [grad for _, grad in reached],
                retain_graph=True,
                allow_unused=True,
            )
    finally:
        for hook in hooks:
            hook.remove()
    groups = _groups([fork for fork in forks if fork.grads])
    # A group of forks may run through nodes of other groups, so the largest group runs first, before these are freed.
    groups.sort(key=len)

    def weight_gradients() -> None:
        if outside:
            results, result_grads = zip(*outside, strict=True)
            torch.autograd.backward(results, result_grads, retain_graph=bool(groups))
            outside.clear()
        while groups:  # each group frees its saved tensors before the next one runs
            _run(groups.pop())

    return input_grads, weight_gradients


def _trunk(roots: list[Any], inputs: Sequence[Tensor]) -> tuple[set[Any], list[_Fork]]:
    """Return the trunk, the graph nodes on paths from `inputs` to `roots`, and its nodes with branches to weights."""
    starts = {id(tensor) for tensor in inputs}
    trunk, forks = set[Any](), list[_Fork]()
    branch: dict[Any, dict[Any, None]] = {}
    for node in _children_first(roots):
        children = [child for child, _ in node.next_functions if child is not None]
        variable = getattr(node, "variable", None)
        branch[node] = {leaf: None for c in children if c not in trunk for leaf in branch[c]}
        if id(variable) in starts or not trunk.isdisjoint(children):
            trunk.add(node)
            if branch[node]:
                forks.append(_Fork(node, branch[node]))
        elif variable is not None:
            branch[node] = {node: None}
    return trunk, forks


def _children_first(roots: list[Any]) -> list[Any]:
    """Return all nodes reachable from `roots` in post-order: each after its `next_functions`."""
    order, seen, stack = [], set(), [(None, iter([(root, 0) for root in roots]))]
    while stack:
        node, children = stack[-1]
        for child, _ in children:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            order.append(node)
            stack.pop()
    return order[:-1]


def _groups(forks: list[_Fork]) -> list[list[_Fork]]:
    """Group forks into connected components by shared weights."""
    groups: list[list[_Fork]] = []
    for fork in forks:
        merged, separate = [fork], []
        for group in groups:
            if any(not member.leaves.keys().isdisjoint(fork.leaves) for member in group):
                merged = [*group, *merged]
            else:
                separate.append(group)
        groups = [*separate, merged]
    return groups


def _run(group: list[_Fork]) -> None:
    leaves = list(dict.fromkeys(leaf for fork in group for leaf in fork.leaves))
    edges = [
        (GradientEdge(fork.node, i), grad) for fork in group for i, grad in enumerate(fork.grads) if grad is not None
    ]
    hooks = []
    if len(group) > 1:
        # The path from one fork to a shared weight may contain another fork, whose complete gradient is saved already.
        hooks = [fork.node.register_prehook(lambda _, saved=fork.grads: saved) for fork in group]
    try:
        grads = torch.autograd.grad(
            [edge for edge, _ in edges],
            [GradientEdge(leaf, 0) for leaf in leaves],
            [grad for _, grad in edges],
            retain_graph=len(group) > 1,
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    with torch.no_grad():
        for param, grad in zip((leaf.variable for leaf in leaves), grads, strict=True):
            if grad is not None and param.grad is not None:
                local(param.grad).add_(local(grad))
            elif grad is not None:
                param.grad = grad

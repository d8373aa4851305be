"""The two halves of a stage's backward: first the gradient of its input, later the gradients of its weights.

The graph of a stage has a trunk, the nodes through which its input reaches its output, and branches that lead from
the trunk to weights only. The first half runs the trunk and remembers what arrives at every node that has a branch;
the second half runs each of those nodes again, for its branch. A node is thus visited twice, once per kind of
gradient, and no product is computed twice.

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
    """A node of the trunk with branches to weights, and the gradients that arrived at it in the first half."""

    node: Any
    leaves: dict[Any, None]
    grads: tuple[Tensor | None, ...] = ()

    def keep(self, grads: tuple[Tensor | None, ...]) -> None:
        self.grads = grads


def input_gradient(
    roots: Sequence[Tensor], grads: Sequence[Tensor | None], given: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """Gradient of a stage's input `given`, a leaf, and the second half, which adds the gradients of all weights.

    `roots` are its output, or the loss (whose gradient is None), and what else of it the loss depends on.
    """
    forks = _forks([root.grad_fn for root in roots], given)
    hooks = [fork.node.register_prehook(fork.keep) for fork in forks]
    try:
        (input_grad,) = torch.autograd.grad(roots, given, grads, retain_graph=True)
    finally:
        for hook in hooks:
            hook.remove()
    groups = _groups([fork for fork in forks if fork.grads])
    # Forks that share a weight run together and pass others on their way, so their nodes must still be whole.
    groups.sort(key=len)

    def weight_gradients() -> None:
        while groups:  # each frees its tensors before the next one runs
            _run(groups.pop())

    return input_grad, weight_gradients


def _forks(roots: list[Any], given: Tensor) -> list[_Fork]:
    """Nodes of the trunk with the weights that their branches reach."""
    trunk, forks = set(), []
    branch: dict[Any, dict[Any, None]] = {}
    for node in _children_first(roots):
        children = [child for child, _ in node.next_functions if child is not None]
        variable = getattr(node, "variable", None)
        branch[node] = {leaf: None for c in children if c not in trunk for leaf in branch[c]}
        if variable is given or not trunk.isdisjoint(children):
            trunk.add(node)
            if branch[node]:
                forks.append(_Fork(node, branch[node]))
        elif variable is not None:
            branch[node] = {node: None}
    return forks


def _children_first(roots: list[Any]) -> list[Any]:
    """Every node at or below `roots`, each after the nodes it leads to."""
    order, seen, stack = [], set(), [(None, iter([(root, 0) for root in roots]))]
    while stack:
        node, rest = stack[-1]
        for child, _ in rest:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append((child, iter(child.next_functions)))
                break
        else:
            order.append(node)
            stack.pop()
    return order[:-1]


def _groups(forks: list[_Fork]) -> list[list[_Fork]]:
    """Forks joined where they share a weight."""
    groups: list[list[_Fork]] = []
    for fork in forks:
        joined, apart = [fork], []
        for group in groups:
            if any(not other.leaves.keys().isdisjoint(fork.leaves) for other in group):
                joined = [*group, *joined]
            else:
                apart.append(group)
        groups = [*apart, joined]
    return groups


def _run(group: list[_Fork]) -> None:
    leaves = list(dict.fromkeys(leaf for fork in group for leaf in fork.leaves))
    edges = [
        (GradientEdge(fork.node, i), grad)
        for fork in group
        for i, grad in enumerate(fork.grads)
        if grad is not None
    ]
    hooks = []
    if len(group) > 1:
        # On its way to a shared weight one fork passes another: what arrives there is already remembered.
        hooks = [fork.node.register_prehook(lambda _, kept=fork.grads: kept) for fork in group]
    try:
        made = torch.autograd.grad(
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
        for param, grad in zip((leaf.variable for leaf in leaves), made, strict=True):
            if grad is not None and param.grad is not None:
                local(param.grad).add_(local(grad))
            elif grad is not None:
                param.grad = grad

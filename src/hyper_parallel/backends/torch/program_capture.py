"""Capture of a training step, or of one pipeline stage, as a `StepProgram`, with fake tensors: nothing is computed.

Parameters may be sharded over ranks. All ranks of a stage run the same program, so shards have equal sizes. A
collective names its group by a mesh axis, or by the ranks in the group.

The forward program of a stage computes the activations `sent` to the next stage from the activations `received`. The
backward program recomputes `sent` and differentiates the inner product of `sent` and its gradient, which the next stage
has computed as the gradient of its input `received`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.func import functional_call, functionalize
from torch.fx import GraphModule, Interpreter
from torch.fx import Node as FxNode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.fx.traceback import preserve_node_meta
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._pytree import tree_leaves, tree_map

from hyper_parallel.backends.step_program import (
    Node,
    Ref,
    StepProgram,
    ValueType,
    group_name,
    refs,
)
from hyper_parallel.backends.torch.parallel_handle import attached, handle
from hyper_parallel.backends.torch.weights.shard_ranges import local
from hyper_parallel.errors import Contradiction

_OPERATORS = torch.ops._c10d_functional


def sum_over(x: Tensor, axis: str | None) -> Tensor:
    """Return the sum of `x` over the ranks of `axis`, a mesh axis or a group name; None: return `x` itself."""
    return x if axis is None else _OPERATORS.all_reduce(x, "sum", axis)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Shards:
    """Sharding of a model's parameters along one dim, with zero padding to shards of equal sizes.

    Attributes:
        ranks: Number of shards; 1: parameters are not sharded.
        axis: Mesh axis over which parameters are sharded.
        dim: Sharded dim.
        others: Sharding of the parameters that are sharded differently, by name.
    """

    ranks: int = 1
    axis: str = "dp_shard"
    dim: int = 0
    others: Mapping[str, Shards] = field(default_factory=dict)

    def of(self, name: str) -> Shards:
        """Return the sharding of a parameter."""
        return self.others.get(name, self)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a shard of a parameter with the shape `whole`."""
        if self.ranks == 1:
            return whole
        return (*whole[: self.dim], -(-whole[self.dim] // self.ranks), *whole[self.dim + 1 :])

    def gather(self, shard: Tensor, size: int) -> Tensor:
        """Gather the full parameter from its shards; `size` is the unpadded size of the sharded dim."""
        rows = _OPERATORS.all_gather_into_tensor(self._swap_to_first(shard), self.ranks, self.axis)
        return self._swap_to_first(rows[:size])

    def reduce(self, grad: Tensor) -> Tensor:
        """Sum the gradient of a full parameter over the ranks and return this rank's shard; no effect on 1 rank."""
        if self.ranks == 1:
            return grad
        rows = self._swap_to_first(grad)
        padding = -rows.shape[0] % self.ranks
        padded = F.pad(rows, [0, 0] * (rows.dim() - 1) + [0, padding]) if padding else rows
        shard = _OPERATORS.reduce_scatter_tensor(padded, "sum", self.ranks, self.axis)
        return self._swap_to_first(shard)

    def _swap_to_first(self, x: Tensor) -> Tensor:
        return x.transpose(0, self.dim) if self.dim else x


_ALIASES: Final = ("aten.alias.default", "aten.detach.default")
_SAME_VALUE: Final = (*_ALIASES, "aten.clone.default", "aten.lift_fresh_copy.default")
"""Operators that return the value of their argument, in a program without in-place writes."""
_CAT: Final = "aten.cat.default"
_SLICE_SCATTER: Final = "aten.slice_scatter.default"
_FOLDED_ELEMENTS: Final = 1 << 16
"""Maximum elements of a result for constant folding; larger results are computed in each step."""


_RUNNING: Final = "running"
"""Key in `nn_module_stack` of a traced operator under which the running module is recorded."""
_WHOLE: Final = Shards()


def capture_gradients(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Callable[..., Tensor],
    shards: Shards = _WHOLE,
    differentiated: Sequence[str] = (),
) -> StepProgram:
    """Return the program that computes the loss of one microbatch and adds its gradients to those of earlier ones.

    Args:
        model: The model. Non-persistent buffers become constants of the program, so they must have values.
        batch: Arguments of `loss` by name; only their shapes and dtypes matter.
        loss: Function called as `loss(model, **batch)`, which returns a scalar.
        shards: Sharding of parameters and gradients; the program gathers parameters and reduce-scatters gradients.
        differentiated: Names of the tensors in the batch whose gradients are outputs of the program.

    Returns:
        Program with inputs `param.NAME` (parameters and persistent buffers), `sum.NAME` (gradient sums of earlier
        microbatches) and `batch.NAME`. Outputs are `loss`, the new `sum.NAME` and, for `differentiated`, `grad.NAME`.

    Raises:
        Contradiction: HP104 when shapes or branches depend on tensor values, or the forward changes a parameter.
    """
    leaves = _leaves(model)
    trained = [name for name, leaf in leaves.items() if leaf.requires_grad]
    axes = _partial_gradients(model)

    def step(values: list[Tensor], sums: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        named = _gather_parameters(model, leaves, values, shards)
        own = dict(zip(batch, inputs, strict=True))
        own |= {name: own[name].detach().requires_grad_() for name in differentiated}
        value = _call_with(model, loss, named, own)
        sources = [*(named[name] for name in trained), *(own[name] for name in differentiated)]
        grads = torch.autograd.grad(value, sources, allow_unused=True)
        pairs = zip(trained, sums, grads[: len(trained)], strict=True)
        added = (s if g is None else s + shards.of(n).reduce(sum_over(g, axes.get(n))) for n, s, g in pairs)
        return [value.detach(), *added, *grads[len(trained) :]]

    parts = _parts(model, leaves, shards)
    sums = [parts[name].detach() for name in trained]
    graph = _trace(step, [*parts.values()], sums, [*batch.values()])
    sum_names = [f"sum.{name}" for name in trained]
    inputs = [*(f"param.{name}" for name in leaves), *sum_names]
    outputs = ["loss", *sum_names, *(f"grad.{name}" for name in differentiated)]
    return _program(graph, [*inputs, *(f"batch.{name}" for name in batch)], outputs)


def capture_loss(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    loss: Callable[..., Tensor],
    shards: Shards = _WHOLE,
    output: str = "loss",
) -> StepProgram:
    """Return the program of the loss only, with inputs as in `capture_gradients` and the output `output`."""
    leaves = _leaves(model)

    def step(values: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            named = _gather_parameters(model, leaves, values, shards)
            return [_call_with(model, loss, named, dict(zip(batch, inputs, strict=True)))]

    graph = _trace(step, [*_parts(model, leaves, shards).values()], [*batch.values()])
    inputs = [*(f"param.{name}" for name in leaves), *(f"batch.{name}" for name in batch)]
    return _program(graph, inputs, [output])


def capture_update(update: Callable[..., dict[str, Tensor]], example: Mapping[str, Tensor]) -> StepProgram:
    """Return the program of a function from tensors to tensors by name, which must not change its inputs.

    Only the shapes and dtypes of the input `example` matter.
    """
    outputs: list[str] = []

    def step(values: list[Tensor]) -> list[Tensor]:
        results = update(dict(zip(example, values, strict=True)))
        outputs[:] = results
        return [*results.values()]

    graph = _trace(step, [*example.values()])
    return _program(graph, [*example], outputs)


def _leaves(model: nn.Module) -> dict[str, Tensor]:
    """Return empty tensors with the shapes and dtypes of this rank's parameters and persistent buffers, by name."""
    saved = model.state_dict().keys()
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return {
        name: torch.empty(local(t).shape, dtype=t.dtype, requires_grad=t.requires_grad)
        for name, t in (*model.named_parameters(), *buffers)
    }


def _partial_gradients(model: nn.Module) -> dict[str, str]:
    """Return the name of the group over which tensor-parallel ranks must sum each partial gradient, by parameter."""
    handle = attached(model)
    if handle is None or handle.tp is None:
        return {}
    names = {param: name for name, param in model.named_parameters()}
    pairs = handle.tp.gradients.partial_parameters()
    return {names[param]: group_name(dist.get_process_group_ranks(group)) for param, group in pairs}


def _parts(model: nn.Module, leaves: Mapping[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    params = {name for name, _ in model.named_parameters()}
    return {
        name: leaf.new_empty(shards.of(name).shape(leaf.shape)).requires_grad_(leaf.requires_grad)
        if name in params
        else leaf
        for name, leaf in leaves.items()
    }


def _gather_parameters(
    model: nn.Module, leaves: Mapping[str, Tensor], values: list[Tensor], shards: Shards
) -> dict[str, Tensor]:
    """Return full parameters and buffers by name; `values` are shards and buffers in the order of `leaves`.

    Gathered parameters are detached from the shards, so that gradients of the full parameters can be computed.
    """
    named = dict(zip(leaves, values, strict=True))
    for name, param in model.named_parameters():
        own = shards.of(name)
        if own.ranks > 1:
            whole = own.gather(named[name].detach(), leaves[name].shape[own.dim])
            named[name] = whole.requires_grad_(param.requires_grad)
    return named


def _call_with(
    model: nn.Module,
    loss: Callable[..., Tensor],
    parameters: Mapping[str, Tensor],
    batch: dict[str, Tensor],
) -> Tensor:
    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **kwargs: Tensor) -> Tensor:
            return loss(self.model, **kwargs)

    if (handle := attached(model)) is not None and handle.tp is not None:
        handle.tp.same_random = True  # programs draw no random numbers
    own = {f"model.{name}": value for name, value in parameters.items()}
    with _module_names(model) as running:
        try:
            result: Tensor = functional_call(Call(), own, (), batch)
        except (DataDependentOutputException, GuardOnDataDependentSymNode) as error:
            operator = getattr(error, "func", "a branch")
            raise _dynamic(running[-1] if running else "", str(operator)) from error
    return result


@contextmanager
def _module_names(model: nn.Module) -> Iterator[list[str]]:
    """Record, for each operator traced in this context, the path of the module that calls it.

    Yields:
        List of the paths of the modules that are running, outermost first; it changes during the trace.
    """
    mode = get_proxy_mode()
    assert mode is not None
    notes, names = mode.tracer.module_stack, {id(m): name for name, m in model.named_modules()}
    running: list[str] = []

    def enter(module: nn.Module, *_: Any) -> None:
        if (name := names.get(id(module))) is not None:
            running.append(name)
            notes[_RUNNING] = (name, type(module))

    def leave(module: nn.Module, *_: Any) -> None:
        if id(module) in names:
            running.pop()
            notes[_RUNNING] = (running[-1] if running else "", type(model))

    hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave)
    try:
        yield running
    finally:
        notes.pop(_RUNNING, None)
        for hook in hooks:
            hook.remove()


def _trace(function: Callable[..., Any], *example: Any) -> GraphModule:
    """Trace a function on fake tensors into a graph of core ATen operators; only writes to inputs stay in place."""
    # Copy the examples: an object that is passed as two arguments would be traced as one argument.
    example = tree_map(lambda x: x.detach().clone().requires_grad_(x.requires_grad), example)

    def trace(traced: Callable[..., Any]) -> GraphModule:
        return make_fx(
            traced, core_aten_decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True
        )(*example)  # fmt: skip

    graph = trace(function)
    _refuse_dynamic(graph)
    _refuse_writes(graph, tree_leaves(example))
    if any(n.op == "call_function" and _writes(n.target) for n in graph.graph.nodes):
        with preserve_node_meta():  # keeps the paths of modules
            return trace(functionalize(Interpreter(graph).run, remove="mutations"))
    return graph


def _refuse_dynamic(graph: GraphModule) -> None:
    """Raise HP104 for the first operator that returns a Python number, or a tensor whose shape depends on values."""
    for node in graph.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else [values]:
            is_static = isinstance(value, Tensor) and all(isinstance(n, int) for n in value.shape)
            if value is not None and not is_static:
                raise _dynamic(_module(node), str(node.target))


def _refuse_writes(graph: GraphModule, example: Sequence[Tensor]) -> None:
    """Raise HP104 for the first in-place operator on an input that requires a gradient, such as weight clipping."""
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    trained = {node for node, x in zip(inputs, example, strict=True) if x.requires_grad}
    for node in graph.graph.nodes:
        if node.op != "call_function" or not _writes(node.target):
            continue
        source = node.args[0]
        while isinstance(source, FxNode) and str(source.target) in _ALIASES:
            source = source.args[0]
        if source in trained:
            raise Contradiction(
                "the model changes a parameter in forward, which only the back end torch supports",
                where=_module(node) or None,
                got=str(node.target),
                hint="backend=torch training.compile=false",
            )


def _dynamic(module: str, operator: str) -> Contradiction:
    return Contradiction(
        "shapes or branches of the model depend on tensor values, which only the back end torch supports",
        where=module or None,
        got=operator,
        hint="backend=torch training.compile=false",
    )


def _writes(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def _program(graph: GraphModule, inputs: list[str], outputs: list[str]) -> StepProgram:
    builder = _Builder(graph)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        builder.add(node, inputs)
    results = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    numbers = [builder.value(r) for r in results]
    return builder.finish(dict(zip(outputs, numbers, strict=True)))


class _Builder:
    def __init__(self, graph: GraphModule) -> None:
        self._graph = graph
        self._numbers: dict[FxNode, int] = {}
        self._folded: dict[FxNode, Any] = {}
        self._inputs: dict[str, tuple[int, ValueType]] = {}
        self._constants: dict[int, Tensor] = {}
        self._nodes: list[Node] = []
        self._results: dict[FxNode, tuple[int, ...]] = {}
        self._writing: set[str] = set()
        self._new = count().__next__

    def add(self, node: FxNode, inputs: list[str]) -> None:
        if node.op == "placeholder":
            self._numbers[node] = number = self._new()
            self._inputs[inputs[len(self._inputs)]] = number, _type(node.meta["val"])
        elif node.op == "get_attr":
            self._folded[node] = getattr(self._graph, str(node.target))
        elif node.op == "call_function":
            self._call(node)

    def value(self, node: FxNode) -> int:
        """Return the value number of a node in the program; a folded value is added to the constants."""
        if node not in self._numbers:
            self._numbers[node] = number = self._new()
            self._constants[number] = self._folded[node].detach()
        return self._numbers[node]

    def finish(self, outputs: dict[str, int]) -> StepProgram:
        """Return the program without dead nodes; nodes that write in place are kept."""
        needed, kept = set(outputs.values()), []
        for node in reversed(self._nodes):
            # Keep writes, such as those to a counter in a buffer: the back end refuses them by name.
            if needed & set(node.results) or node.op in self._writing:
                kept.append(node)
                for argument in (*node.args, *node.kwargs.values()):
                    needed |= {r.index for r in refs(argument)}
        constants = {
            i: (c.float() if c.dtype == torch.bfloat16 else c).cpu().numpy()
            for i, c in self._constants.items()
            if i in needed
        }
        return StepProgram(self._inputs, constants, tuple(reversed(kept)), outputs)

    def _call(self, node: FxNode) -> None:
        name = str(node.target)
        if node.target is operator.getitem:
            source, index = node.args
            if source in self._folded:
                self._folded[node] = self._folded[source][index]
            else:
                self._numbers[node] = self._results[source][index]
            return
        if (source := _same_value(node, name)) is not None:
            if source in self._folded:
                value = self._folded[source]  # run aliases too: later views may depend on their strides
                same = name in _SAME_VALUE
                self._folded[node] = node.target(value, **node.kwargs) if same else value
            else:
                self._numbers[node] = self.value(source)
            return
        if _is_empty(node):  # its value is known
            self._folded[node] = torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype)
            return
        if name == "aten.full_like.default" and node.meta["val"].numel() <= _FOLDED_ELEMENTS:
            like = node.meta["val"]  # only the shape of the argument is used
            self._folded[node] = torch.full(like.shape, node.args[1], dtype=like.dtype)
            return
        if self._folds(node):
            with torch.no_grad():
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self._folded.__getitem__)
                self._folded[node] = node.target(*args, **kwargs)
            return
        if _writes(node.target):
            self._writing.add(name)
        if name == _CAT:
            node.args = ([t for t in node.args[0] if not _is_empty(t)], *node.args[1:])
        self._append(node, name)

    def _folds(self, node: FxNode) -> bool:
        if any(arg not in self._folded for arg in node.all_input_nodes):
            return False
        values = node.meta["val"]
        tensors = values if isinstance(values, (list, tuple)) else [values]
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        return not (random or _writes(node.target)) and all(t is None or t.numel() <= _FOLDED_ELEMENTS for t in tensors)

    def _append(self, node: FxNode, name: str) -> None:
        values = node.meta["val"]
        tensors = list(values) if isinstance(values, (list, tuple)) else [values]
        args = tuple(_argument(a, self.value) for a in node.args)
        kwargs = {k: _argument(v, self.value) for k, v in node.kwargs.items()}
        results = tuple(self._new() for _ in tensors)
        if isinstance(values, (list, tuple)):
            self._results[node] = results
        else:
            self._numbers[node] = results[0]
        types = tuple(_type(t) for t in tensors)
        self._nodes.append(Node(name, args, kwargs, results, types, _module(node)))


def _same_value(node: FxNode, name: str) -> FxNode | None:
    """Return the argument whose value a node returns unchanged; None if the node computes a new value."""
    if name in _SAME_VALUE or (name == _SLICE_SCATTER and _is_empty(node.args[1])):
        return node.args[0]
    if name == _CAT and len(full := [t for t in node.args[0] if not _is_empty(t)]) == 1:
        return full[0]
    return None


def _is_empty(node: FxNode) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.numel() == 0


def _type(tensor: Tensor | None) -> ValueType:
    if tensor is None:
        return ValueType((), "none")
    return ValueType(tuple(tensor.shape), _dtype_name(tensor.dtype))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _argument(value: Any, number: Callable[[FxNode], int]) -> Any:
    if isinstance(value, FxNode):
        return Ref(number(value))
    if isinstance(value, (list, tuple)):
        return [_argument(part, number) for part in value]
    if isinstance(value, torch.dtype):
        return _dtype_name(value)
    if isinstance(value, (torch.device, torch.layout, torch.memory_format)):
        return None
    return value


def _module(node: FxNode) -> str:
    name, _ = (node.meta.get("nn_module_stack") or {}).get(_RUNNING, ("", None))
    return str(name)


_TOKENS = ("input_ids", "position_ids")
"""Arguments of the model's forward on stages before the last one."""


def capture_stage(
    model: nn.Module, batch: dict[str, Tensor], loss: Callable[..., Tensor]
) -> tuple[StepProgram, StepProgram]:
    """Return the forward program and the backward program of the pipeline stage on this rank.

    Args:
        model: Parallelized model with one stage per rank.
        batch: Arguments of `loss` by name, among them `input_ids`.
        loss: Function called as `loss(model, **batch)` on the last stage.

    Returns:
        The forward program has the output `sent`, or `loss` on the last stage. The backward program has the inputs and
        outputs of `capture_gradients`. After the first stage, both programs have the input `batch.received`, and the
        backward program the output `grad.received`. Before the last stage, the backward program has the input
        `batch.gradient`, the gradient of `sent`.
    """
    parallel = handle(model)
    assert parallel.pipeline is not None
    stages, stage = parallel.pipeline.stages, parallel.ranks.rank
    is_last = stage == parallel.pipeline.last
    message = torch.zeros(*batch["input_ids"].shape, *stages.tail, dtype=stages.dtype)
    received = {"received": message} if stage else {}
    gradient = {} if is_last else {"gradient": message}

    def forward(model: nn.Module, received: Any = None, gradient: Any = None, **inputs: Tensor) -> Tensor:
        with stages.running.run(stage, received):
            if is_last:
                return loss(model, **inputs)
            model(**{k: inputs[k] for k in _TOKENS if k in inputs}, use_cache=False)
            sent = stages.running.output
        assert sent is not None
        return sent if gradient is None else (sent * gradient).sum()

    own, output = batch | received, "loss" if is_last else "sent"
    return (
        capture_loss(model, own, forward, output=output),
        capture_gradients(model, own | gradient, forward, differentiated=[*received]),
    )

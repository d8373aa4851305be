"""The graph front end: a forward pass and its backward pass as two graphs, cut by torch's min-cut partitioner.

Ahead-of-time autograd traces the joint graph without any decomposition; the partitioner decides which results the
backward pass gets and which cheap ones it makes again. A call then runs the two graphs operator by operator,
so whatever records an eager step records this one, and the bits are those of eager autograd.

Python code that reads a value of a tensor is traced with the value it reads on the real tensors. The tensor becomes one
more output of the forward graph, and its value is read and compared in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.distributed.tensor import DTensor
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hyper_parallel.errors import CaptureUnsupported, HyperParallelError, StepChanged

_HINT = "record the eager step instead: `offload.capture=eager` (in Python front_end='eager')"
_READ = torch.ops.aten._local_scalar_dense.default
_Value = bool | int | float
_Tensors = dict[str, torch.Tensor]


class GraphForward:
    """A forward pass that is a graph, as is its backward pass; made at the first call for every kind of inputs.

    Args:
        model: Its parameters and buffers are inputs of the graphs.
        forward: Computes one tensor from keyword arguments, by calling the model.

    Raises:
        CaptureUnsupported: HP511 for parameters that are spread over ranks; when called, for a step that cannot be
            traced, naming the operator.
        StepChanged: HP512, when called, when a value that Python code reads is not the one it was traced with.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        if any(isinstance(p, DTensor) for p in model.parameters()):
            raise CaptureUnsupported(
                "this step cannot be captured as a graph: hooks gather its parameters from other ranks, which a traced "
                "graph would do once",
                hint=_HINT,
            )
        self._model = _Holder(model, forward)
        self._root = model
        self._traced: dict[Any, _Traced] = {}

    def __call__(self, **inputs: Any) -> torch.Tensor:
        """The tensor; autograd runs the backward graph."""
        tensors = {name: v for name, v in inputs.items() if isinstance(v, torch.Tensor)}
        rest = {name: v for name, v in inputs.items() if name not in tensors}
        kinds = tuple((k, v.shape, v.stride(), v.dtype, v.device) for k, v in tensors.items())
        casts = [
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", *(t.device.type for t in tensors.values())})
            if torch.is_autocast_enabled(kind)
        ]
        modes = self._root.training, torch.is_grad_enabled(), tuple(casts)
        key = kinds, repr(rest), modes
        if key not in self._traced:
            self._traced[key] = _Traced(self._model, tensors, rest)
        return self._traced[key](tensors)


@contextmanager
def forward_as_graph(model: torch.nn.Module) -> Iterator[None]:
    """For the time of this context a call of the model runs a graph, and gives an object with `.loss` alone.

    What hooks of the model itself do stays outside of the graph.
    """
    mine = vars(model).get("forward")
    forward = model.forward
    graph = GraphForward(model, lambda **inputs: forward(**inputs).loss)
    model.forward = lambda **inputs: SimpleNamespace(loss=graph(**inputs))
    try:
        yield
    finally:
        if mine is None:
            del model.forward
        else:
            model.forward = mine


class _Holder(torch.nn.Module):
    """The forward pass as a module, so that its state can be swapped."""

    def __init__(self, model: torch.nn.Module, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, forward

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.call(**inputs)

    def state(self) -> _Tensors:
        """Parameters and buffers; what is shared appears once."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}


class _Made(Exception):
    """Both graphs exist; nothing was run."""


class _Traced:
    """The graphs for one kind of inputs."""

    def __init__(self, model: _Holder, tensors: _Tensors, rest: Mapping[str, Any]) -> None:
        self._model = model
        self._making = True
        fake = any(isinstance(t, FakeTensor) for t in tensors.values())
        self._values: list[_Value] = []

        def function(state: _Tensors, inputs: _Tensors) -> tuple[torch.Tensor, ...]:
            with _Known(self._values) as known:
                out = torch.func.functional_call(model, state, (), {**inputs, **rest})
            return out, *known.tensors

        self._run = aot_function(
            function,
            self._as_it_is,
            self._as_it_is,
            partition_fn=min_cut_rematerialization_partition,
            enable_log=False,
        )
        with _disable_current_modes(), _refusals(), _use_lazy_graph_module(True):
            if not fake:
                self._values += _values_read(model, {**tensors, **rest})
            try:
                with _compiling(fake):
                    self._run(model.state(), dict(tensors))
            except _Made:
                self._making = False

    def _as_it_is(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[[list[Any]], Any]:
        """A compiler that changes nothing; every value of the graph is let go after its last use."""
        del inputs
        nodes = torch.fx.Interpreter(graph)
        nodes.extra_traceback = False  # errors stay as they are

        def run(values: list[Any]) -> Any:
            if self._making:
                raise _Made
            out = nodes.boxed_run(values)
            nodes.env.clear()  # autograd copies a gradient that someone else holds
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def __call__(self, tensors: _Tensors) -> torch.Tensor:
        out, *read = self._run(self._model.state(), dict(tensors))
        # Tracing may have read fewer values than were noted; what it used is compared, in its order.
        for tensor, value in zip(read, self._values, strict=False):
            now = tensor.item()
            if now != value:
                raise StepChanged(
                    f"the model's code read {value} from a tensor when it was traced, and now {now}",
                    hint="capture again with inputs of this kind",
                )
        result: torch.Tensor = out
        return result


class _Reads(TorchDispatchMode):
    """Notes the values that Python code reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[_Value] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _READ:
            self.values.append(out)
        return out


class _Known(TorchDispatchMode):
    """Gives known values to Python code that reads them from tensors, and keeps the tensors."""

    def __init__(self, values: list[_Value]) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self._values = values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not _READ or len(self.tensors) >= len(self._values):
            return func(*args, **(kwargs or {}))
        self.tensors.append(args[0])
        return self._values[len(self.tensors) - 1]


def _values_read(model: _Holder, inputs: Mapping[str, Any]) -> list[_Value]:
    """What the code reads in a forward pass that leaves no trace."""
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    devices = {t.device for t in inputs.values() if isinstance(t, torch.Tensor)}
    there = [device for device in devices if device.type != "cpu"]
    with (
        torch.random.fork_rng(there, device_type=there[0].type if there else "cpu"),
        torch.no_grad(),
        _Reads() as reads,
    ):
        torch.func.functional_call(model, buffers, (), dict(inputs))
    return reads.values


@contextmanager
def _compiling(fake: bool) -> Iterator[None]:
    """Under fake tensors there are no values: the code is told that it is traced, as it is when recorded eagerly."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = fake or before  # type: ignore[misc]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before  # type: ignore[misc]


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except HyperParallelError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise CaptureUnsupported(
            f"`{error.func}` depends on the data, so the step is no graph", hint=_HINT
        ) from error
    except GuardOnDataDependentSymNode as error:
        raise CaptureUnsupported(
            "a size depends on the data, so the step is no graph", got=str(error.cond), hint=_HINT
        ) from error
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise CaptureUnsupported(
            "ahead-of-time autograd cannot trace the step",
            got=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            hint=_HINT,
        ) from error

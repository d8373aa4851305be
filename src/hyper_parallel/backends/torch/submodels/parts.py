"""Division of a multimodal model into its language part and its tower (encoder and projector), in place.

A pass of text alone on meta tensors measures the parameters of the language part; all other parameters belong to the
tower. The model's code does not change: a rank drops the parameters of the other part, and calls that cross the border
are replaced on the instance. These calls are the model's own `get_image_features`, `get_video_features` and
`get_audio_features`, else the calls of the tower's modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel.backends.torch.flow_tracer import FlowTracer
from hyper_parallel.backends.torch.layer_flow import preserve_module_state, run_on_meta
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.pipeline.stages import layers_with_media
from hyper_parallel.backends.torch.submodels.channel import pack
from hyper_parallel.backends.torch.submodels.exchange import Reader
from hyper_parallel.backends.torch.weights.huggingface import COMPLETE, model_of_part
from hyper_parallel.errors import UnsupportedSharding

LANGUAGE: Final = "language"
_KINDS: Final = {"image": "vision", "video": "vision", "audio": "audio"}
"""Name of the tower by input modality."""
_TARGETS: Final = ("labels", "shift_labels")
_RECORDINGS: Final = ("hidden_states", "attentions")
"""Fields of a feature method's result with the values of every layer, which the language part does not read."""

_MODEL_ERRORS: Final = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of model code that reads values of meta tensors."""
_CAUSE_CHARS: Final = 120
"""Characters of an error of model code that notes and refusals quote: about one line of a terminal."""


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model into its tower and its language part.

    Attributes:
        kind: Kind of the tower: vision or audio.
        tower: Names of the tower's parameters.
        modules: Names of the tower's outermost modules.
        layers_with_features: Decoder layers after the first one to which features are added.
    """

    kind: str
    tower: frozenset[str]
    modules: tuple[str, ...]
    layers_with_features: frozenset[int] = frozenset()


class _ParameterUses(FlowTracer):
    """Tracer that records the parameters that operators read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.read.update(id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter))
        return super().__torch_dispatch__(func, types, args, kwargs)


def divide(model: nn.Module) -> Division:
    """Return the division of a model whose parameters may have values or be on the meta device.

    Raises:
        UnsupportedSharding: HP205 for a model of text alone, with several towers, or whose forward cannot be traced.
    """
    modalities = getattr(model, "input_modalities", "text")
    modalities = (modalities,) if isinstance(modalities, str) else modalities
    kinds = sorted({_KINDS[m] for m in modalities if m in _KINDS})
    if len(kinds) != 1 or view_of(model).base is None:
        raise _refusal(
            model,
            "its inputs are not text and media of one kind",
            f"inputs: {', '.join(modalities)}",
        )
    tracer = _ParameterUses()
    try:
        with preserve_module_state(model):
            run_on_meta(model, tracer, "tp")
    except UnsupportedSharding as error:
        raise _refusal(
            model, "a forward pass with text only cannot be traced", error.what
        ) from error
    tower = {name: p for name, p in model.named_parameters() if id(p) not in tracer.read}
    if not tower:
        raise _refusal(model, "a forward pass with text only uses every parameter", "no tower")
    owned, modules = {id(p) for p in tower.values()}, list[str]()
    for name, module in model.named_modules():
        parameters = [id(p) for p in module.parameters()]
        inside = any(name.startswith(f"{outer}.") for outer in modules)
        if parameters and not inside and owned.issuperset(parameters):
            modules.append(name)
    layers = frozenset(layers_with_media(model))
    return Division(kinds[0], frozenset(tower), tuple(modules), layers)


def _refusal(model: nn.Module, why: str, got: str) -> UnsupportedSharding:
    return UnsupportedSharding(
        f"{type(model).__name__} has no encoder that can run on separate ranks: {why}",
        where="parallel.submodels",
        got=got,
        allowed="a text decoder with one encoder, either for images and videos or for audio",
        hint="parallel.submodels=null",
    )


def _drop_parameters(model: nn.Module, dropped: set[int]) -> None:
    """Replace the parameters with the ids `dropped` by None, under all of their names."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in dropped:
                module._parameters[name] = None


def _remove_children(module: nn.Module, kept: set[nn.Module]) -> None:
    """Remove all submodules of a module that are not in `kept`."""
    for name, child in [*module.named_children()]:
        if child in kept:
            _remove_children(child, kept)
        else:
            del module._modules[name]


def _crossings(model: nn.Module, division: Division) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, name of its method, label) for every call that may cross the border."""
    for name, module in model.named_modules():
        if name in division.modules:
            yield module, "forward", name
        for modality in _KINDS:
            method = f"get_{modality}_features"
            if hasattr(type(module), method):
                yield module, method, f"{name}.{method}".lstrip(".")


def keep_language(model: nn.Module, division: Division, reader: Reader) -> nn.Module:
    """Drop the tower's parameters and make calls that cross the border return received results.

    Return the same model, changed in place.
    """
    for owner, attribute, label in _crossings(model, division):
        setattr(owner, attribute, lambda *_, label=label, **__: reader.receive(label))
    for name in division.modules:  # keep the methods and plain attributes of the tower's modules
        module = model.get_submodule(name)
        module._modules, module._parameters, module._buffers = {}, {}, {}
        _answer_for(module, model)
    _drop_parameters(model, {id(p) for n, p in model.named_parameters() if n in division.tower})
    return model


def _answer_for(module: nn.Module, model: nn.Module) -> None:
    """Make `device` and `dtype` of a module without parameters return those of the model."""
    answers = {
        name: property(lambda _, name=name: getattr(next(model.parameters()), name))
        for name in ("device", "dtype")
        if hasattr(type(module), name)
    }
    module.__class__ = type(type(module).__name__, (type(module),), answers)


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model that shares its parameters and buffers, for a rank with both parts."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def join_parts(language: nn.Module, tower: TowerModel, division: Division) -> nn.Module:
    """Return one module with the parameters of both parts of this rank, for optimizers and checkpoints.

    Modules that contain both parts are copies, so that FSDP of one part does not find the other part.
    """
    joined = _join_modules(language, tower, "", division)

    def train(mode: bool = True) -> nn.Module:
        joined.training = mode
        language.train(mode)
        tower.train(mode)
        return joined

    object.__setattr__(joined, "train", train)
    return joined


def _join_modules(
    language: nn.Module, tower: nn.Module, name: str, division: Division
) -> nn.Module:
    if name in division.modules:
        return tower
    # `FSDPModule.__new__` would run the constructor.
    joined: nn.Module = object.__new__(type(language))
    joined.__dict__.update(language.__dict__)
    joined._modules = {**language._modules}
    tower._buffers = language._buffers  # both use one dict, whose entries may be replaced later
    if any(parameter is not None for parameter in tower._parameters.values()):
        joined._parameters = tower._parameters
    for key, child in tower._modules.items():
        inner = f"{name}.{key}".lstrip(".")
        if any(f"{module}.".startswith(f"{inner}.") for module in division.modules):
            joined._modules[key] = _join_modules(language._modules[key], child, inner, division)
    return joined


class _DecoderReached(BaseException):
    """Signal that ends a forward pass when it reaches the decoder."""


class TowerModel(nn.Module):
    """Tower of a model, with the model's parameter names.

    Its forward runs the model's own forward up to the decoder and returns the results of the calls that cross the
    border, see `forward`.

    Args:
        model: The complete model; loses the parameters of its language part.
        division: Parts of the model.
    """

    def __init__(self, model: nn.Module, division: Division) -> None:
        super().__init__()
        self._crossed: list[tuple[str, Any]] = []
        self._running = False
        for owner, attribute, label in _crossings(model, division):
            setattr(owner, attribute, self._record_results(label, getattr(owner, attribute)))
        decoder, embedding = view_of(model).base, model.get_input_embeddings()  # type: ignore[operator]
        width = embedding.weight.shape[-1]
        dtype = model.get_parameter(min(division.tower)).dtype
        embedding.forward = lambda ids: torch.zeros(
            *ids.shape, width, dtype=dtype, device=ids.device
        )
        decoder.forward = _stop
        kept = {decoder, embedding}
        for name in division.modules:
            kept.update(model.get_submodule(name).modules())
        outer = {m for m in model.modules() if not kept.isdisjoint(m.modules())}
        _remove_children(model, kept | outer)
        for module in (decoder, embedding):
            module._buffers = {}
        language = {id(p) for n, p in model.named_parameters() if n not in division.tower}
        _drop_parameters(model, language)
        object.__setattr__(self, COMPLETE, model)  # keep the model itself out of the children
        self._modules, self._parameters = model._modules, model._parameters

    @property
    def has_features(self) -> bool:
        """True if a forward that ended with an error had computed features."""
        return bool(self._crossed)

    def _record_results(self, label: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Return `inner` with its results recorded under a label, except in calls inside of another such call."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return inner(*args, **kwargs)
            self._running = True
            try:
                output = inner(*args, **kwargs)
            finally:
                self._running = False
            self._crossed.append((label, output))
            return output

        return call

    def forward(self, **batch: Any) -> tuple[bytes, list[Tensor], Tensor]:
        """Return the features of a batch as structure and tensors of `pack`, and a scalar.

        Every backward pass must also start from the scalar, because there are no features without media. Without
        arguments the features are empty.
        """
        self._crossed.clear()
        if batch:
            inputs = {name: value for name, value in batch.items() if name not in _TARGETS}
            with suppress(_DecoderReached):
                model_of_part(self)(**inputs, use_cache=False)
        structure, tensors = pack([(label, _features(output)) for label, output in self._crossed])
        self._crossed.clear()
        device = next(self.parameters()).device
        start = torch.zeros((), device=device, requires_grad=torch.is_grad_enabled())
        return structure, tensors, start * 1


def _stop(*_: Any, **__: Any) -> Any:
    raise _DecoderReached


def _features(output: Any) -> Any:
    """Return the output of an encoder without the hidden states and attention weights of its layers."""
    if not isinstance(output, dict):
        return output
    return type(output)(**{k: v for k, v in output.items() if k not in _RECORDINGS})


class TowerNotTraced(Exception):
    """Forward of a tower that does not run on meta tensors; the message names the cause."""


def tower_flops(model: nn.Module, batches: Sequence[Mapping[str, NDArray[Any]]]) -> list[float]:
    """Return the FLOPs of the tower's forward on each batch.

    Args:
        model: Model of `parallelize_submodels`, on the meta device; not changed.
        batches: Arguments of its forward as arrays.

    Raises:
        TowerNotTraced: The tower's forward fails on meta tensors.
    """
    tower = TowerModel(copy.deepcopy(model), divide(model))
    dtype = next(tower.parameters()).dtype
    counts = []
    for batch in batches:
        inputs = {name: _meta(array, dtype) for name, array in batch.items()}
        if not any(t.is_floating_point() for t in inputs.values()):
            counts.append(0.0)
            continue
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            _trace_tower(tower, inputs)
        counts.append(float(counter.get_total_flops()))
    return counts


def _trace_tower(tower: TowerModel, inputs: Mapping[str, Tensor]) -> None:
    """Run the forward of a tower on meta tensors, up to the last features."""
    try:
        if tower(**inputs)[1]:
            return
    except _MODEL_ERRORS as error:
        # Models read values after the tower, for example to compare numbers of tokens: meta tensors have none. An
        # error inside of the tower leaves no features.
        if tower.has_features:
            return
        first_line = (str(error).splitlines() or [""])[0][:_CAUSE_CHARS]
        raise TowerNotTraced(f"{type(error).__name__}: {first_line}") from error
    raise TowerNotTraced("its forward returns no features")


def _meta(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor of an array; small integers, such as grids of patches, keep their values."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return tensor if tensor.dim() == 2 and tensor.shape[1] == 3 else tensor.to("meta")

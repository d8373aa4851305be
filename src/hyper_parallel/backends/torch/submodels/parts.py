"""Division of a multimodal model into its language part and its towers (encoders with projectors), in place.

A forward pass with text only, on meta tensors, finds the parameters of the language part. All other parameters belong
to the towers, by their names if there are several. A rank drops the parameters of other parts. A call crosses the
border to a tower if the language part reads its result. These are calls of `get_image_features`, `get_video_features`
and `get_audio_features` of the model, or, in models without these methods, of the tower's modules. The called functions
are replaced on the module instances; the model's classes do not change.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from hyper_parallel.backends.torch.flow_tracer import FlowTracer
from hyper_parallel.backends.torch.layer_flow import preserve_module_state, run_on_meta
from hyper_parallel.backends.torch.model_structure import view_of
from hyper_parallel.backends.torch.pipeline.apply import TARGETS
from hyper_parallel.backends.torch.pipeline.stages import keep_properties, layers_with_media
from hyper_parallel.backends.torch.submodels.channel import pack
from hyper_parallel.backends.torch.submodels.exchange import Reader
from hyper_parallel.backends.torch.tensor_trees import tensors_in
from hyper_parallel.backends.torch.weights.huggingface import COMPLETE, model_of_part
from hyper_parallel.errors import UnsupportedSharding
from hyper_parallel.model import tower_kind

LANGUAGE: Final = "language"
_KINDS: Final = {"image": "vision", "video": "vision", "audio": "audio"}
"""Name of the tower by input modality."""
_RECORDINGS: Final = ("hidden_states", "attentions")
"""Fields of a feature method's result with the values of every layer, which the language part does not read."""

_MODEL_ERRORS: Final = (*(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),)
"""Errors of model code that reads values of meta tensors."""
_CAUSE_CHARS: Final = 120
"""Maximum characters that messages quote from an error of model code."""


@dataclass(frozen=True, slots=True)
class TowerPart:
    """Tower of a model.

    Attributes:
        kind: Kind of the tower: vision or audio.
        parameters: Names of its parameters.
        modules: Names of its outermost modules.
        media: Arguments of the model's forward with its images, videos or audio; empty for the only tower of a model,
            which gets all arguments.
    """

    kind: str
    parameters: frozenset[str]
    modules: tuple[str, ...]
    media: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model into its towers and its language part.

    Attributes:
        towers: The towers, sorted by kind.
        layers_with_features: Indices of the decoder layers that read features in addition to activations.
    """

    towers: tuple[TowerPart, ...]
    layers_with_features: frozenset[int] = frozenset()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of the towers, sorted."""
        return tuple(tower.kind for tower in self.towers)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters of all towers."""
        return frozenset().union(*(tower.parameters for tower in self.towers))

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the outermost modules of all towers."""
        return tuple(name for tower in self.towers for name in tower.modules)


class _ParameterUses(FlowTracer):
    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        self.read.update(id(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter))
        return super().__torch_dispatch__(func, types, args, kwargs)


def divide(model: nn.Module) -> Division:
    """Return the division of a model whose parameters may have values or be on the meta device.

    Raises:
        UnsupportedSharding: HP205 for a model without towers, for a parameter that cannot be assigned to one part, and
            for a forward that cannot be traced.
    """
    modalities = getattr(model, "input_modalities", "text")
    modalities = (modalities,) if isinstance(modalities, str) else modalities
    kinds = sorted({_KINDS[m] for m in modalities if m in _KINDS})
    if not kinds or view_of(model).base is None:
        raise _refusal(model, "its inputs are not text and media", f"inputs: {', '.join(modalities)}")
    tracer = _ParameterUses()
    try:
        with preserve_module_state(model):
            run_on_meta(model, tracer, "tp")
    except UnsupportedSharding as error:
        raise _refusal(model, "a forward pass with text only cannot be traced", error.what) from error
    names = {name: id(p) in tracer.read for name, p in model.named_parameters()}
    if all(names.values()):
        raise _refusal(model, "a forward pass with text only uses every parameter", "no tower")
    outside = [name for name, is_language in names.items() if not is_language]
    if len(kinds) == 1:
        towers = [_tower_part(model, kinds[0], outside, frozenset())]
    else:
        _check_kinds(model, kinds, names)
        own = {kind: [name for name in outside if tower_kind(name) == kind] for kind in kinds}
        towers = [_tower_part(model, kind, own[kind], _media_of(model, kind)) for kind in kinds]
        _check_modules(model, towers)
    return Division(tuple(towers), frozenset(layers_with_media(model)))


def _check_kinds(model: nn.Module, kinds: Sequence[str], names: Mapping[str, bool]) -> None:
    """Raise HP205 if the parameters of a model with several towers cannot be assigned to one part each.

    `names` has the names of all parameters; True: a forward pass with text only uses the parameter.
    """
    for name, is_language in names.items():
        kind = tower_kind(name)
        if is_language and kind in kinds:
            raise _refusal(model, f"a pass with text only uses a parameter of its encoder `{kind}`", name)
        if not is_language and kind not in kinds:
            raise _refusal(model, "a parameter that text does not use belongs to none of its encoders by name", name)
    if missing := {*kinds} - {tower_kind(name) for name in names}:
        raise _refusal(model, "an encoder has no parameters", ", ".join(sorted(missing)))


def _check_modules(model: nn.Module, towers: Sequence[TowerPart]) -> None:
    for tower in towers:
        for name in sorted(tower.parameters):
            if not any(name.startswith(f"{module}.") for module in tower.modules):
                raise _refusal(model, "a module has parameters of several parts", name)


def _media_of(model: nn.Module, kind: str) -> frozenset[str]:
    """Return the forward arguments that the feature methods of a tower kind read; raise HP205 if one is missing."""
    accepted, media = inspect.signature(model.forward).parameters, set[str]()
    for modality, method in _feature_methods(kind):
        owner = next((m for m in model.modules() if hasattr(type(m), method)), None)
        if owner is not None:
            media.add(next(iter(inspect.signature(getattr(owner, method)).parameters)))
        elif modality in getattr(model, "input_modalities", ()):
            raise _refusal(model, f"it has several encoders, but no method `{method}`", modality)
    if unknown := sorted(media - accepted.keys()):
        raise _refusal(model, "its forward does not take the argument of its feature method", unknown[0])
    return frozenset(media)


def _feature_methods(kind: str) -> list[tuple[str, str]]:
    return [(m, f"get_{m}_features") for m, own in _KINDS.items() if own == kind]


def _tower_part(model: nn.Module, kind: str, names: Sequence[str], media: frozenset[str]) -> TowerPart:
    owned, modules = {id(model.get_parameter(name)) for name in names}, list[str]()
    for name, module in model.named_modules():
        parameters = [id(p) for p in module.parameters()]
        inside = any(name.startswith(f"{outer}.") for outer in modules)
        if parameters and not inside and owned.issuperset(parameters):
            modules.append(name)
    return TowerPart(kind, frozenset(names), tuple(modules), media)


def _refusal(model: nn.Module, why: str, got: str) -> UnsupportedSharding:
    return UnsupportedSharding(
        f"{type(model).__name__} has no encoder that can run on separate ranks: {why}",
        where="parallel.submodels",
        got=got,
        allowed="a text decoder with an encoder for images and videos, one for audio, or both",
        hint="parallel.submodels=null, or without a recipe hp.parallelize(model, plan)",
    )


def _drop_parameters(model: nn.Module, dropped: set[int]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) in dropped:
                module._parameters[name] = None


def _remove_children(module: nn.Module, kept: set[nn.Module]) -> None:
    for name, child in [*module.named_children()]:
        if child in kept:
            _remove_children(child, kept)
        else:
            del module._modules[name]


def _crossings(model: nn.Module, tower: TowerPart) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, method, dotted name of the call) for every call that may cross the border to a tower."""
    methods = [method for _, method in _feature_methods(tower.kind)]
    for name, module in model.named_modules():
        if name in tower.modules:
            yield module, "forward", name
        for method in methods:
            if hasattr(type(module), method):
                yield module, method, f"{name}.{method}".lstrip(".")


def keep_language(model: nn.Module, division: Division, reader: Reader) -> nn.Module:
    """Drop the parameters of all towers in place; calls of towers then return received features. Return the model."""
    for number, tower in enumerate(division.towers):
        for owner, attribute, label in [*_crossings(model, tower)]:
            setattr(owner, attribute, _receive(reader, number, label))
    _empty_modules(model, division.modules)
    dropped = division.parameters
    _drop_parameters(model, {id(p) for n, p in model.named_parameters() if n in dropped})
    return model


def _receive(reader: Reader, number: int, label: str) -> Callable[..., Any]:
    return lambda *_, **__: reader.receive(label, number)


def _empty_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Remove parameters, buffers and children of modules; their methods and plain attributes stay."""
    for module in map(model.get_submodule, names):
        module._modules, module._parameters, module._buffers = {}, {}, {}
    keep_properties(model)


def twin_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model with the same parameter and buffer tensors, for a rank with several parts."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def join_parts(whole: nn.Module, tower: TowerModel) -> nn.Module:
    """Return one module, for optimizers and files, with the parameters of `whole` and of a tower.

    `whole` has one or several parts. Modules around several parts are copies, so that FSDP of one finds no other part.
    """
    joined = _join_modules(whole, tower, "", tower.part.modules)

    def train(mode: bool = True) -> nn.Module:
        joined.training = mode
        whole.train(mode)
        tower.train(mode)
        return joined

    object.__setattr__(joined, "train", train)
    return joined


def _join_modules(whole: nn.Module, tower: nn.Module, name: str, modules: Sequence[str]) -> nn.Module:
    if name in modules:
        return tower
    # `FSDPModule.__new__` would run the constructor.
    joined: nn.Module = object.__new__(type(whole))
    joined.__dict__.update(whole.__dict__)
    joined._modules = {**whole._modules}
    tower._buffers = whole._buffers  # both use one dict, whose entries may be replaced later
    if any(parameter is not None for parameter in tower._parameters.values()):
        joined._parameters = tower._parameters
    for key, child in tower._modules.items():
        inner = f"{name}.{key}".lstrip(".")
        if any(f"{module}.".startswith(f"{inner}.") for module in modules):
            joined._modules[key] = _join_modules(whole._modules[key], child, inner, modules)
    return joined


class _DecoderReached(BaseException):
    """Signal that ends a forward pass when it reaches the decoder."""


class TowerModel(nn.Module):
    """Tower of a model, with the model's parameter names.

    Its forward runs the model's own forward up to the decoder and returns the results of the calls that cross the
    border. The constructor removes the parameters of all other parts from the model.
    """

    def __init__(self, model: nn.Module, division: Division, part: TowerPart) -> None:
        super().__init__()
        self.part = part
        self._crossed: list[tuple[str, Any]] = []
        self._running = False
        others = [tower for tower in division.towers if tower != part]
        self._unused = frozenset(TARGETS).union(*(tower.media for tower in others))
        for owner, attribute, label in _crossings(model, part):
            setattr(owner, attribute, self._record_results(label, getattr(owner, attribute)))
        decoder, embedding = view_of(model).base, model.get_input_embeddings()  # type: ignore[operator]
        width = embedding.weight.shape[-1]
        dtype = model.get_parameter(min(part.parameters)).dtype
        embedding.forward = lambda ids: torch.zeros(*ids.shape, width, dtype=dtype, device=ids.device)
        decoder.forward = _stop
        kept = {decoder, embedding, *map(model.get_submodule, division.modules)}
        for name in part.modules:
            kept.update(model.get_submodule(name).modules())
        outer = {m for m in model.modules() if not kept.isdisjoint(m.modules())}
        _remove_children(model, kept | outer)
        for module in (decoder, embedding):
            module._buffers = {}
        _drop_parameters(model, {id(p) for n, p in model.named_parameters() if n not in part.parameters})
        _empty_modules(model, [name for tower in others for name in tower.modules])
        object.__setattr__(self, COMPLETE, model)  # keep the model itself out of the children
        self._modules, self._parameters = model._modules, model._parameters

    @property
    def has_features(self) -> bool:
        """True if a forward that ended with an error had computed features."""
        return bool(self._crossed)

    def _record_results(self, label: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `inner` to record its results under a label, except in calls inside of another recorded call."""

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
        """Return (structure, tensors, scalar): the features of a batch as packed by `pack`, and a scalar.

        Every backward pass must also start from the scalar. It exists even if the batch has no features.
        """
        self._crossed.clear()
        if batch:
            inputs = {name: value for name, value in batch.items() if name not in self._unused}
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
    if not isinstance(output, dict):
        return output
    return type(output)(**{k: v for k, v in output.items() if k not in _RECORDINGS})


class TowerNotTraced(Exception):
    """Error for a tower whose forward does not run on meta tensors."""


def tower_flops(model: nn.Module, batches: Sequence[Mapping[str, NDArray[Any]]]) -> dict[str, list[float]]:
    """Return the FLOPs of each tower's forward on each batch of arrays, by kind of tower; 0 without media.

    The model is on the meta device.

    Raises:
        TowerNotTraced: A tower's forward fails on meta tensors.
    """
    division = divide(model)
    return {part.kind: _flops(TowerModel(copy.deepcopy(model), division, part), batches) for part in division.towers}


def _flops(tower: TowerModel, batches: Sequence[Mapping[str, NDArray[Any]]]) -> list[float]:
    dtype = next(tower.parameters()).dtype
    media, counts = tower.part.media, list[float]()
    for batch in batches:
        inputs = {name: _traced_input(name, array, dtype) for name, array in batch.items()}
        read = [t for n, t in inputs.items() if n in media] if media else [*inputs.values()]
        if not any(t.is_floating_point() for t in read):
            counts.append(0.0)
            continue
        with FlopCounterMode(display=False) as counter, _MetaResults(), torch.no_grad():
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


def _traced_input(name: str, array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """Return a meta tensor of images, recordings or tokens; grids of patches, lengths and masks keep their values."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if tensor.is_floating_point():
        return torch.empty(tensor.shape, dtype=dtype, device="meta")
    return tensor.to("meta") if name == "input_ids" else tensor


class _MetaResults(TorchDispatchMode):
    """Dispatch mode in which operators that mix meta tensors with tensors on the CPU return meta tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(tensor.is_meta for tensor in tensors_in(args, kwargs)):
            if func.overloadpacket is torch.ops.aten.index:
                args = (args[0], _without_masks(args[1]))
            args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
        return func(*args, **kwargs)


def _without_masks(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return indices in which boolean masks with values are replaced by the positions that they select."""
    numbers: list[Tensor | None] = []
    for index in indices:
        is_mask = index is not None and index.dtype == torch.bool and not index.is_meta
        numbers += index.nonzero().unbind(1) if index is not None and is_mask else [index]
    return numbers

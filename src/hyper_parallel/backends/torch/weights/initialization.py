"""Storage and random initial values of a model, equal for every layout and world size.

`materialize` initialises one module at a time, without communication: the model's own rule fills full-size float32
tensors on the CPU, and each rank copies its shard. The random state of a rule is derived only from `(seed, module
name)`. Tensors that no rule sets get the values that the constructor of a Hugging Face model assigns.

The rule is `_init_weights` of the nearest Hugging Face model around the module, or `reset_parameters` of a plain
module. Values are generated in float32 and then cast, so a float64 run starts from exactly the float32 weights.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from hyper_parallel.backends.torch.model_structure import PlaceholderModule
from hyper_parallel.backends.torch.weights.huggingface import original_class
from hyper_parallel.backends.torch.weights.shard_ranges import copy_full
from hyper_parallel.errors import WeightsUninitialised

LORA_A: Final = "lora_A"
LORA_B: Final = "lora_B"
"""Names of an adapter's parameters, which belong to the adapted linear module."""
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def canonical_name(name: str) -> str:
    """Return a module or parameter name without the segments that compile and recompute wrappers insert."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by its name."""
    return name.rpartition(".")[2] in (LORA_A, LORA_B)


def base_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield `named_parameters` without those of adapters."""
    for name, param in model.named_parameters(remove_duplicate=remove_duplicate):
        if not is_adapter(name):
            yield name, param


def allocate(model: nn.Module, *, device: torch.device | str | None = None) -> None:
    """Replace every meta tensor of a model by uninitialised storage of this rank's shard; tied parameters stay tied.

    Args:
        model: Module of plain tensors or DTensors; changed in place.
        device: Device of the storage; None: the CPU for plain tensors, the device of the mesh for DTensors.
    """
    new: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, old in table.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in new:
                    mesh_device = old.device_mesh.device_type if isinstance(old, DTensor) else "cpu"
                    storage = torch.empty_like(old, device=device or mesh_device)
                    if isinstance(old, nn.Parameter):
                        storage = nn.Parameter(storage, requires_grad=old.requires_grad)
                        storage.__dict__.update(old.__dict__)
                    new[id(old)] = (old, storage)
                table[name] = new[id(old)][1]


@torch.no_grad()
def materialize(
    model: nn.Module,
    *,
    seed: int,
    device: torch.device | str | None = None,
    names: Collection[str] | None = None,
) -> None:
    """Allocate a model, and set initial values that depend on `seed` and on module names only.

    Args:
        model: Module of plain tensors or DTensors, on any device including meta; changed in place.
        seed: Seed of the run.
        device: See `allocate`.
        names: Parameters to initialise, besides buffers on the meta device. None: all parameters except adapters, and
            all buffers that the rules set.

    Raises:
        WeightsUninitialised: HP704 with the first parameter or buffer that neither a rule nor the constructor sets.
    """
    before = named_tensors(model)
    # A tied parameter belongs to its first module; rules of later modules must not overwrite it.
    first: dict[int, str] = {}
    owned = {name for name, t in before.items() if first.setdefault(id(t), name) == name}
    required = {
        name
        for name in owned
        if not is_adapter(name) and (names is None if isinstance(before[name], nn.Parameter) else before[name].is_meta)
    }
    required |= owned & {*(names or ())}
    allocate(model, device=device)
    after = named_tensors(model)
    rules = _Rules(model, seed)
    unset = set(required)
    for module_name, own in rules.own.items():
        if names is not None and required.isdisjoint(own):
            continue
        for name, value in rules.values(module_name).items():
            keeps_value = isinstance(after[name], nn.Parameter) or names is not None
            if name not in owned or (name not in required and keeps_value):
                continue
            if value.is_floating_point() and bool(torch.isnan(value).any()):
                continue
            copy_full(after[name], value, name)
            unset.discard(name)
    for name, value in _constructor_values(model, unset, seed).items():
        copy_full(after[name], value, name)
        unset.discard(name)
    if unset:
        name = min(unset)
        holder = type(model.get_submodule(name.rpartition(".")[0])).__name__
        raise WeightsUninitialised(
            f"no rule initialises `{name}` of {holder}",
            got=f"{len(unset)} such tensors: {', '.join(sorted(unset)[:5])}",
            allowed="tensors set by `_init_weights` of the Hugging Face model, or by `reset_parameters` of the module",
            hint=f"set `{name.rpartition('.')[2]}` in `reset_parameters` of {holder}",
        )


def _constructor_values(model: nn.Module, names: set[str], seed: int) -> dict[str, Tensor]:
    """Return values that the constructor of a Hugging Face model assigns, such as decay rates of a state-space layer.

    A second model is constructed on the CPU, in which parameters are on the meta device unless the last component of
    their name is that of one of `names`.
    """
    cls, config = original_class(model), getattr(model, "config", None)
    if not names or not callable(getattr(cls, "_from_config", None)):
        return {}
    keys = {name.rpartition(".")[2] for name in names}

    def drop_others(_: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or name in keys:
            return None
        return nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    hook = register_module_parameter_registration_hook(drop_others)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            whole = cls(copy.deepcopy(config))
    finally:
        hook.remove()
    values = {canonical_name(n): t.detach() for n, t in named_tensors(whole).items()}
    selected = {name: values.get(canonical_name(name)) for name in names}
    return {name: t for name, t in selected.items() if t is not None and not t.is_meta}


class _Rules:
    """Initialisation rules of a model's modules, run on full-size CPU tensors."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._seed = model, seed
        self._rule: dict[str, Callable[[], object] | None] = {}
        self.own: dict[str, list[str]] = {}
        """Names of the direct tensors of each module, children before parents."""
        self._visit("", model, None, set())

    def _visit(self, name: str, module: nn.Module, owner: nn.Module | None, seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        if callable(getattr(module, "_init_weights", None)):
            owner = module
        for child_name, child in module.named_children():
            self._visit(_join(name, child_name), child, owner, seen)
        tables = (module._parameters, module._buffers)
        self.own[name] = [_join(name, n) for t in tables for n, v in t.items() if v is not None]
        if owner is not None:
            self._rule[name] = lambda: owner._init_weights(module)
        else:
            plain = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            self._rule[name] = plain if callable(plain) else None

    def values(self, name: str) -> dict[str, Tensor]:
        """Run the initialization rule of module `name`; return a dict from tensor name to full-size value.

        The rule may set tensors of the module and of its descendants. The dict is empty for a module without a rule or
        without tensors, for example if they are on ranks of other pipeline stages.
        """
        if self._rule[name] is None or not named_tensors(self._model.get_submodule(name)):
            return {}
        values, touched = self._run(name, {n: self._unset(n) for n in self.own[name]})
        if touched:
            # The rule changes tensors of descendants, for example scales a projection: run it on their values.
            inputs = {n: self._unset(n) for n in self.own[name]}
            for n in touched:
                inputs[n] = self.values(n.rpartition(".")[0]).get(n, self._unset(n))
            values, _ = self._run(name, inputs)
        return values

    def _unset(self, name: str) -> Tensor:
        """Return the input of a rule for one tensor: NaN (zeros for integers), or the value of a plain buffer.

        The result is a full-size tensor on the CPU.
        """
        module_name, _, key = name.rpartition(".")
        module = self._model.get_submodule(module_name)
        if key in module._buffers and not isinstance(module._buffers[key], DTensor):
            return module._buffers[key].detach().cpu().clone()
        old = module._parameters[key] if key in module._parameters else module._buffers[key]
        if old.is_floating_point():
            return torch.full(old.shape, torch.nan, dtype=torch.float32)
        return torch.zeros(old.shape, dtype=old.dtype)

    def _run(self, name: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], set[str]]:
        """Run one rule on `tensors`; all other tensors of the module and its descendants are on the meta device.

        Returns:
            The entries of `tensors` that the rule changed, and the names of other tensors that it changed.
        """
        rule = self._rule[name]
        assert rule is not None
        with _replace_tensors(self._model.get_submodule(name), name, tensors) as placed:
            versions = {n: t._version for n, (_, _, t) in placed.items()}
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(module_seed(self._seed, name))
                rule()
            now = {n: table[key] for n, (table, key, _) in placed.items()}
        changed = {n for n, tensor in now.items() if tensor is not placed[n][2] or tensor._version != versions[n]}
        values = {n: now[n].detach() for n in changed if n in tensors}
        return values, {n for n in changed if n not in tensors}


@contextmanager
def _replace_tensors(
    module: nn.Module, name: str, tensors: dict[str, Tensor]
) -> Iterator[dict[str, tuple[dict[str, Tensor], str, Tensor]]]:
    """Replace the tensors of `module` by those in `tensors`, or else by meta tensors, inside the context.

    Placeholders of modules on other pipeline ranks also get the meta tensors of these modules, which a rule may set.
    Yield a dict from name to (dict that contains the tensor, its key, replacement).
    """
    saved = []
    placed = {}
    for sub_name, sub in module.named_modules(prefix=name):
        if isinstance(sub, PlaceholderModule):
            saved.append((sub.__dict__, dict(sub.__dict__)))
            sub.__dict__.update(sub.direct_tensors)
        for table in (sub._parameters, sub._buffers):
            saved.append((table, dict(table)))
            for key, old in list(table.items()):
                if old is None:
                    continue
                full = _join(sub_name, key)
                new = tensors[full] if full in tensors else torch.empty(old.shape, device="meta")
                if isinstance(old, nn.Parameter):
                    new = nn.Parameter(new, requires_grad=False)
                table[key] = new
                placed[full] = (table, key, new)
    try:
        yield placed
    finally:
        for table, old_entries in saved:
            table.clear()
            table.update(old_entries)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters and buffers by name; a tied tensor has several names."""
    return {
        _join(name, key): tensor
        for name, module in model.named_modules()
        for table in (module._parameters, module._buffers)
        for key, tensor in table.items()
        if tensor is not None
    }


def module_seed(seed: int, name: str) -> int:
    """Return the seed of a named module or tensor, derived from the seed of the run."""
    digest = hashlib.sha256(f"{seed}:{canonical_name(name)}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key

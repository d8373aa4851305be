"""Parts of a model (layers, norm, config), found by its structure, and placeholders for modules of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyper_parallel.errors import UnsupportedSharding


class PlaceholderModule(nn.Module):
    """Placeholder for a module of another pipeline rank; its forward returns the first argument.

    Code can read plain attributes and properties of the replaced module, such as `attention_type` of a layer.

    Attributes:
        direct_tensors: Dict from name to meta copy of the replaced module's own parameters and buffers.
    """

    direct_tensors: dict[str, Tensor]

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        values = dict(vars(original))
        for key in {*dir(type(original))} - {*dir(nn.Module)}:
            # A property may raise, for example for another kind of module
            with suppress(Exception):
                if isinstance(value := getattr(original, key), str | int | float | tuple):
                    values[key] = value
        for key, value in values.items():
            if not key.startswith("_") and not isinstance(value, Tensor | nn.Module):
                self.__dict__[key] = value
        own = [*original.named_parameters(recurse=False), *original.named_buffers(recurse=False)]
        copies = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in own}
        self.__dict__["direct_tensors"] = copies

    def forward(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument unchanged."""
        return first


class SlotList(nn.ModuleList):
    """Module list whose iteration and indexing can return replacements of the modules."""

    def slots(self) -> list[Any] | None:
        """Return the replacements to use in place of the modules, or None to use the modules themselves."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        slots = self.slots()
        return super().__iter__() if slots is None else iter(slots)

    def __getitem__(self, index: Any) -> Any:
        if (slots := self.slots()) is not None:
            return slots[index]
        chosen = list(self._modules.values())[index]
        return nn.ModuleList(chosen) if isinstance(index, slice) else chosen


@dataclass(frozen=True, slots=True)
class ModelView:
    """Parts of a model, found by its structure.

    Attributes:
        base: Module that contains the token embedding and the layers; None unless the model is a Hugging Face model
            with a layer list.
        path: Name of the layer list; "" without a layer list.
        layers: Attribute `layers` of the Hugging Face base model, else the largest layer list; empty without one.
    """

    base: Any
    path: str
    layers: nn.ModuleList

    def final_norm(self) -> nn.Module:
        """Return the norm after the layers, a child of the base found by its name or class; raise HP205 without one."""
        base: nn.Module = self.base
        for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f"):
            if isinstance(norm := getattr(base, name, None), nn.Module):
                return norm
        for module in reversed([*base.children()]):
            if "norm" in type(module).__name__.lower():
                return module
        raise UnsupportedSharding(
            "no final norm was found after the decoder layers",
            where=type(base).__name__,
            got=", ".join(name for name, _ in base.named_children()),
            allowed="norm, final_layernorm, final_layer_norm, ln_f, or a module of a class *Norm*",
            hint="name the norm after the decoder layers `norm`",
        )


def view_of(model: nn.Module) -> ModelView:
    """Return the parts of a complete model, or of a model with only the modules of one pipeline rank."""
    prefix = getattr(model, "base_model_prefix", None)
    is_decoder = prefix is not None and hasattr(model, "config")
    if is_decoder:
        base = getattr(model, prefix, model)
        layers = getattr(base, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers):
            path = next(name for name, module in model.named_modules() if module is layers)
            return ModelView(base, path, layers)
    path, layers = _largest_list(model)
    if not path or not is_decoder:
        return ModelView(None, path, layers)
    outer = path
    while outer := outer.rpartition(".")[0]:
        if hasattr(base := model.get_submodule(outer), "get_input_embeddings"):
            return ModelView(base, path, layers)
    return ModelView(model, path, layers)


def _largest_list(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return name and members of the module list with most parameters; "" and an empty list if the model has none.

    Lists inside of other lists and lists without parameters are ignored. Lists in a module that has the config of the
    language model are preferred, then lists with layers of the classes in the model's `_no_split_modules`.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    parts = [n for n, m in model.named_modules() if text is not None and m.__dict__.get("config") is text]
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not inside and next(module.parameters(), None) is not None:
            lists[name] = module
    whole = set(getattr(model, "_no_split_modules", None) or ())
    of_text = {n: m for n, m in lists.items() if any(n.startswith(f"{p}.") for p in parts if p)}
    lists = of_text or lists
    named = {n: m for n, m in lists.items() if any(type(layer).__name__ in whole for layer in m)}
    sizes = {n: sum(p.numel() for p in m.parameters()) for n, m in (named or lists).items()}
    if not sizes:
        return "", nn.ModuleList()
    best = max(sizes, key=sizes.__getitem__)
    return best, lists[best]


def text_config(model: nn.Module) -> Any:
    """Return the Hugging Face config of the model's language model; None for a module without a config.

    If the config has different values per layer, the config of the first layer is returned, because the common config
    raises when such a value is read.
    """
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text

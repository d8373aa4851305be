"""Optimizers of torch, torchao and bitsandbytes by their common names, mostly those of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from hyper_parallel.errors import MissingDependency


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """Class of an optimizer.

    Attributes:
        path: Dotted path of the class.
        has_moments: Whether it takes `betas` and `eps` as Adam does.
    """

    path: str
    has_moments: bool = False

    @property
    def package(self) -> str:
        """Package of the class."""
        return self.path.partition(".")[0]


def _adam(path: str) -> NamedOptimizer:
    return NamedOptimizer(path, has_moments=True)


NAMED_OPTIMIZERS: Final = {
    "adadelta": NamedOptimizer("torch.optim.Adadelta"),
    "adagrad": NamedOptimizer("torch.optim.Adagrad"),
    "adamax": _adam("torch.optim.Adamax"),
    "nadam": _adam("torch.optim.NAdam"),
    "radam": _adam("torch.optim.RAdam"),
    "rmsprop": NamedOptimizer("torch.optim.RMSprop"),
    "adamw_torch_4bit": _adam("torchao.optim.AdamW4bit"),
    "adamw_torch_8bit": _adam("torchao.optim.AdamW8bit"),
    "adamw_torch_fp8": _adam("torchao.optim.AdamWFp8"),
    "adamw_8bit": _adam("bitsandbytes.optim.AdamW8bit"),
    "adamw_bnb_8bit": _adam("bitsandbytes.optim.AdamW8bit"),
    "adam_8bit": _adam("bitsandbytes.optim.Adam8bit"),
    "paged_adamw": _adam("bitsandbytes.optim.PagedAdamW"),
    "paged_adamw_32bit": _adam("bitsandbytes.optim.PagedAdamW32bit"),
    "paged_adamw_8bit": _adam("bitsandbytes.optim.PagedAdamW8bit"),
    "ademamix": NamedOptimizer("bitsandbytes.optim.AdEMAMix"),
    "ademamix_8bit": NamedOptimizer("bitsandbytes.optim.AdEMAMix8bit"),
    "paged_ademamix_32bit": NamedOptimizer("bitsandbytes.optim.PagedAdEMAMix32bit"),
    "paged_ademamix_8bit": NamedOptimizer("bitsandbytes.optim.PagedAdEMAMix8bit"),
    "lion": NamedOptimizer("bitsandbytes.optim.Lion32bit"),
    "lion_32bit": NamedOptimizer("bitsandbytes.optim.Lion32bit"),
    "lion_8bit": NamedOptimizer("bitsandbytes.optim.Lion8bit"),
    "paged_lion_32bit": NamedOptimizer("bitsandbytes.optim.PagedLion32bit"),
    "paged_lion_8bit": NamedOptimizer("bitsandbytes.optim.PagedLion8bit"),
    "rmsprop_bnb": NamedOptimizer("bitsandbytes.optim.RMSprop"),
    "rmsprop_bnb_8bit": NamedOptimizer("bitsandbytes.optim.RMSprop8bit"),
    "rmsprop_bnb_32bit": NamedOptimizer("bitsandbytes.optim.RMSprop32bit"),
    "sgd_8bit": NamedOptimizer("bitsandbytes.optim.SGD8bit"),
    "lamb": _adam("bitsandbytes.optim.LAMB"),
}
"""Optimizers by name; missing packages are reported when the optimizer is chosen."""


def check_package(name: str, where: str) -> None:
    """Raise for an optimizer whose package is not installed.

    Raises:
        MissingDependency: HP501 with the command that installs it.
    """
    package = NAMED_OPTIMIZERS[name].package
    if find_spec(package) is None:
        raise MissingDependency(
            f"the optimizer {name} is in the package `{package}`, which is not installed",
            where=where,
            got=f"optimizer={name}",
            allowed="an optimizer of torch: adamw, adam, sgd, adafactor, muon, adagrad, rmsprop, nadam, radam, adamax",
            hint=f"pip install {package}",
        )

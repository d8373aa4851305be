"""Learning-rate schedules by their names in transformers, and the arguments that each accepts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

_NUMBER: Final = (int, float)
_SHAPES: Final = ("linear", "cosine", "1-sqrt")

SCHEDULE_ARGS: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = MappingProxyType(
    {
        "constant_with_warmup": {},
        "cosine_with_min_lr": {"num_cycles": _NUMBER, "min_lr": _NUMBER, "min_lr_rate": _NUMBER},
        "cosine_with_restarts": {"num_cycles": _NUMBER},
        "cosine_warmup_with_min_lr": dict.fromkeys(("num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"), _NUMBER),
        "inverse_sqrt": {"timescale": _NUMBER},
        "polynomial": {"lr_end": _NUMBER, "power": _NUMBER},
        "warmup_stable_decay": {
            "num_decay_steps": (int,),
            "num_stable_steps": (int,),
            "warmup_type": _SHAPES,
            "decay_type": _SHAPES,
            "min_lr_ratio": _NUMBER,
            "num_cycles": _NUMBER,
        },
    }
)
"""Arguments of each schedule of transformers: names as in `lr_scheduler_kwargs`, with the allowed types or words."""

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal["cosine", "wsd", "linear", "constant", *SCHEDULE_ARGS]

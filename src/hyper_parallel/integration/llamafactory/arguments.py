"""Options in LlamaFactory's `hyper_parallel_args` and `hyper_parallel_*` keys: layout degrees, dtypes, recompute."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from hyper_parallel.config import validated
from hyper_parallel.errors import BadValue, Caller, DegreesMismatch, RecipeUnreadable, abbreviated
from hyper_parallel.ir import Strategy
from hyper_parallel.received import Limits, read_json
from hyper_parallel.units import canonical_dtype

YAML_KEYS: Final = ("cp_size", "ep_size", "efsdp_size", "token_dispatcher")
"""Options that LlamaFactory also accepts as keys of its YAML file, such as `hyper_parallel_cp_size`."""
_OPTIONS: Final = {
    "parallel.tp": "tp_size", "parallel.tp_x": "tp_size", "parallel.cp": "cp_size", "parallel.ep": "ep_size",
    "parallel.dp_shard": "fsdp_size",
}  # fmt: skip
"""Options by corresponding recipe key."""
_Dtype = Annotated[Literal["float32", "float16", "bfloat16"], BeforeValidator(canonical_dtype)]


class HyperParallelArguments(BaseModel):
    """Options in `hyper_parallel_args`; each has a default.

    Attributes:
        tp_size: Ranks of tensor parallelism.
        cp_size: Ranks among which a sequence is divided.
        ep_size: Ranks among which the experts are divided.
        efsdp_size: Ranks that shard the parameters of an expert (others are replicas). None: as `fsdp_size` implies.
        token_dispatcher: Must be `all_to_all`.
        fsdp_size: Data-parallel ranks that shard parameters (others are replicas). None: implied, or all ranks.
        param_dtype: Dtype of activations and of gathered parameters; None: determined by `bf16` and `fp16`.
        reduce_dtype: Dtype of gradient reductions; None: float32, or float64 for a model in float64.
        reshard_after_forward: Whether to free gathered parameters after forward and gather them again for backward.
            None: as in Accelerate's FSDP plugin, or True without one.
        activation_mode: `recompute`: recompute the activations of a layer. `swap`: offload the outputs of its matrix
            products and attention to the host, and recompute the rest. `none`: keep all on the device.
        activation_swap_inputs: With `swap`, also offload the inputs of a layer.
        device_type: `auto`, or the machine's accelerator; without one, `cpu`. Other values are refused.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True, strict=True)

    tp_size: int = Field(1, ge=1)
    cp_size: int = Field(1, ge=1)
    ep_size: int = Field(1, ge=1)
    efsdp_size: int | None = Field(None, ge=1)
    token_dispatcher: Literal["all_to_all"] = "all_to_all"
    fsdp_size: int | None = Field(None, ge=1)
    param_dtype: _Dtype | None = None
    reduce_dtype: _Dtype | None = None
    reshard_after_forward: bool | None = None
    activation_mode: Literal["none", "recompute", "swap"] = "none"
    activation_swap_inputs: bool = True
    device_type: Literal["auto", "cpu", "cuda", "npu"] = "auto"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "hyper_parallel_args") -> HyperParallelArguments:
        """Return the arguments in a dict of option names and values.

        Raises:
            UnknownKey: HP101 with the nearest key. BadValue: HP102 for a value that is not allowed.
        """
        return validated(
            cls,
            values,
            lambda key: f"{where}: {key}",
            lambda key, value, _: json.dumps({key: value}),
        )

    @classmethod
    def from_finetuning_args(cls, finetuning_args: Any) -> HyperParallelArguments:
        """Return the arguments in `hyper_parallel_args` and the `hyper_parallel_*` keys of LlamaFactory's arguments.

        A key that has not its default value overrides the option of the same name in `hyper_parallel_args`. Errors are
        those of `from_yaml`.
        """
        values = getattr(finetuning_args, "hyper_parallel_args", None)
        keys = {key: getattr(finetuning_args, f"hyper_parallel_{key}", None) for key in YAML_KEYS}
        unset = {"cp_size": 1, "ep_size": 1, "efsdp_size": 1, "token_dispatcher": "all_to_all"}
        return cls.from_yaml(values, {k: v for k, v in keys.items() if v != unset[k]})

    @classmethod
    def from_yaml(cls, value: Any, keys: Mapping[str, Any]) -> HyperParallelArguments:
        """Return the arguments in the value of `hyper_parallel_args`, overridden by keys of LlamaFactory's YAML file.

        Args:
            value: None, a dict, or the path of a JSON file.
            keys: Values of the keys `hyper_parallel_*`, by name without this prefix; None: not set.

        Raises:
            RecipeUnreadable: HP103 when the file cannot be read or is not JSON.
            BadValue: HP102 when the value or the content of the file is not an object. Other errors are those of
                `from_dict`.
        """
        where = "hyper_parallel_args"
        if isinstance(value, str):
            where = f"hyper_parallel_args: {value}"
            try:
                value = read_json(Path(value), Limits())
            except (OSError, ValueError) as error:
                raise RecipeUnreadable(
                    "the file of hyper_parallel_args cannot be read",
                    where=where,
                    got=str(error),
                    hint="correct the path in `hyper_parallel_args`"
                    if isinstance(error, OSError)
                    else "correct this file, which must contain one JSON object",
                ) from error
        if not isinstance(value or {}, dict):
            raise BadValue(
                "hyper_parallel_args must be one JSON object",
                where=where,
                got=abbreviated(value),
                allowed='null, the path of a JSON file, or an object such as {"tp_size": 2}',
            )
        set_keys = {key: key_value for key, key_value in keys.items() if key_value is not None}
        return cls.from_dict({**(value or {}), **set_keys}, where)

    def validate(self) -> None:
        """Do nothing: values are validated when they are read. LlamaFactory calls this method."""

    @property
    def smallest_world(self) -> int:
        """Smallest number of ranks compatible with these degrees."""
        dense = self.tp_size * self.cp_size * (self.fsdp_size or 1)
        return math.lcm(dense, self.ep_size * (self.efsdp_size or 1))

    def strategy(self, world_size: int) -> Strategy:
        """Return the layout of these arguments on `world_size` ranks.

        Raises:
            DegreesMismatch: HP301 when the degrees do not divide the ranks, or `efsdp_size` contradicts the others.
        """
        model_ranks = self.tp_size * self.cp_size
        shard = self._shard_ranks(world_size, model_ranks)
        if world_size % (model_ranks * shard):
            raise DegreesMismatch(
                "the product of tp_size, cp_size and fsdp_size does not divide the number of ranks",
                where="hyper_parallel_args",
                got=f"tp_size={self.tp_size}, cp_size={self.cp_size}, fsdp_size={shard} on {world_size} ranks",
                allowed=f"degrees whose product divides {world_size}",
                hint=f"start a multiple of {model_ranks * shard} ranks, or lower these degrees",
            )
        experts = max(model_ranks * shard // self.ep_size, 1)
        if self.efsdp_size not in (None, experts):
            ep_size = math.gcd(self.ep_size, model_ranks * shard)
            experts = model_ranks * shard // ep_size
            raise DegreesMismatch(
                "ep_size x efsdp_size must equal tp_size x cp_size x fsdp_size",
                where="hyper_parallel_args",
                got=f"efsdp_size={self.efsdp_size}, ep_size={self.ep_size} of {model_ranks * shard} ranks",
                allowed=f"efsdp_size={experts}"
                if ep_size == self.ep_size
                else f"ep_size={ep_size}, efsdp_size={experts}",
                hint=f'{{"ep_size": {ep_size}, "efsdp_size": {experts}}}',
            )
        return Strategy(
            dp_replicate=world_size // (model_ranks * shard),
            dp_shard=shard,
            cp=self.cp_size,
            tp_x=self.tp_size,
            ep=self.ep_size,
            recompute="none" if self.activation_mode == "none" else "full",
            reshard_after_forward=self.reshard_after_forward is not False,
        )

    def _shard_ranks(self, world_size: int, model_ranks: int) -> int:
        rest = max(world_size // model_ranks, 1)
        expert_ranks = self.ep_size * (self.efsdp_size or 1)
        if self.fsdp_size is None and self.efsdp_size and expert_ranks % model_ranks == 0:
            return min(expert_ranks // model_ranks, rest)
        return self.fsdp_size or rest


class OptionNames(Caller):
    """Caller whose errors name the options of `hyper_parallel_args` instead of recipe keys."""

    def __init__(self, arguments: HyperParallelArguments) -> None:
        self._has_efsdp = arguments.efsdp_size is not None

    def where(self, text: str) -> str:
        """Return the option that corresponds to a recipe key; any other location unchanged."""
        return f"hyper_parallel_args: {_OPTIONS[text]}" if text in _OPTIONS else text

    def hint(self, changes: Mapping[str, object]) -> str | None:
        """Return `changes` as JSON of options; None if a recipe key has no option."""
        if not changes.keys() <= {*_OPTIONS, "parallel.tp_y"}:  # `tp_y` is always 1
            return None
        options = {_OPTIONS[key]: value for key, value in changes.items() if key in _OPTIONS}
        # The value of `efsdp_size` may contradict the changed options.
        return json.dumps(options | ({"efsdp_size": None} if self._has_efsdp else {}))

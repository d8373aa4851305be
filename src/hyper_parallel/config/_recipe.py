"""Class `Recipe` with all sections of a training run, and the sections of adapters, planned memory and launchers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from hyper_parallel.backends import BACKENDS
from hyper_parallel.config._preference_sections import Dpo, Grpo, Kto, Orpo, Rm
from hyper_parallel.config._sections import (
    Checkpoint,
    Data,
    Model,
    Moe,
    Overlap,
    Parallel,
    Section,
    Training,
    source_tag,
)
from hyper_parallel.config._values import MOST_RANK, MOST_RANKS, directory, rate, size, size_or_auto
from hyper_parallel.config.foreign_keys import FOREIGN_KEYS, FOREIGN_VALUES, ForeignKey
from hyper_parallel.errors import abbreviated

if TYPE_CHECKING:
    BackendName = str
else:
    BackendName = Literal[tuple(BACKENDS)]

Bytes = Annotated[int, BeforeValidator(size)]
"""Number of bytes, at least 1; a text such as `12GiB` is converted."""


class Offload(Section):
    """Planned device memory: tensors that are not in use are offloaded to host memory or files; some are recomputed.

    Enabled by one goal: `budget` or `max_slowdown`.
    """

    budget: Annotated[int | Literal["auto"] | None, BeforeValidator(size_or_auto)] = None
    """Device memory per rank in bytes (`12GiB`); the fastest plan within it is used. auto: most of the device's free
    memory; on a CPU, the rank's memory in the topology."""
    max_slowdown: float | None = Field(default=None, ge=0)
    """Alternative goal: smallest device memory whose step time grows by at most this fraction (0.02: 2 %)."""
    dram: Bytes | None = None
    """Maximum host memory per rank in bytes. None: the rank's share of the topology's host memory; unlimited if the
    topology gives no host memory."""
    flash_dir: Annotated[str | None, BeforeValidator(directory)] = None
    """Directory for files of offloaded tensors that do not fit in host memory. None: no files are used."""
    flash: Bytes | None = None
    """Maximum bytes of files per rank in `flash_dir`. None: unlimited."""
    bandwidth: Annotated[int | None, BeforeValidator(rate)] = None
    """Copy bandwidth between device and host memory per direction (`50GB/s`) that the plan assumes. None: the
    topology's."""
    reorder: bool = True
    """Allow the plan to reorder operators. Results are unchanged."""
    recompute: bool = True
    """Allow the plan to free intermediate results and recompute them."""

    @model_validator(mode="before")
    @classmethod
    def _without_removed_key(cls, data: object) -> object:
        """Drop `update_on_host: false`, which earlier versions saved with every run."""
        if isinstance(data, dict) and data.get("update_on_host") is False:
            data = {key: value for key, value in data.items() if key != "update_on_host"}
            warnings.warn("offload.update_on_host was removed", DeprecationWarning, stacklevel=2)
        return data

    @property
    def on(self) -> bool:
        """True if offloading is enabled: `budget` or `max_slowdown` is given."""
        return self.budget is not None or self.max_slowdown is not None


NAMES_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3")
"""Names of linear modules that get no adapter in a model with fused experts, because peft would apply an adapter for
such a name to the experts' parameter."""

_NAMES: Final = re.compile(r"[\w.]+(\s*,\s*[\w.]+)+")
_LONGEST_PATTERN: Final = 10_000


class Lora(Section):
    """Low-rank adapters (LoRA), created and saved by peft. Keys have the names of its `LoraConfig`."""

    MAIN_KEY: ClassVar[str] = "r"

    r: int = Field(default=8, ge=1, le=MOST_RANK)
    """Rank r of the adapters' matrices."""
    lora_alpha: float = Field(default=16, gt=0, allow_inf_nan=False)
    """Scale: the output of an adapter is multiplied by `lora_alpha / r`."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the inputs of an adapter."""
    target_modules: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[tuple[str, ...], Field(min_length=1), Tag("[list]")],
        Discriminator(source_tag),
    ] = "all-linear"
    """Linear modules with an adapter: name suffixes (`[q_proj, v_proj]`), a regular expression, or all-linear."""
    use_rslora: bool = False
    """Multiply the output of an adapter by `lora_alpha / sqrt(r)`, not `lora_alpha / r` (rank-stabilized LoRA)."""
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=MOST_RANK)]] = Field(default_factory=dict)
    """Exceptions to `r`: module-name suffix or regular expression to rank."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Exceptions to `lora_alpha`: module-name suffix or regular expression to alpha."""
    modules_to_save: tuple[str, ...] = ()
    """Name suffixes of modules that are trained in full and saved with the adapter, such as norms."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """Initialization of matrix A, with peft's values; matrix B starts at 0."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _separate(cls, value: object) -> object:
        """Split `q_proj,v_proj` (LlamaFactory's form) into a list; as a regular expression it would match no module."""
        if isinstance(value, str) and _NAMES.fullmatch(value):
            return [name.strip() for name in value.split(",")]
        return value

    @field_validator("target_modules", "rank_pattern", "alpha_pattern")
    @classmethod
    def _compiles(cls, value: object) -> object:
        patterns = [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
        for pattern in patterns:
            try:
                if len(pattern) > _LONGEST_PATTERN:
                    raise ValueError(f"{len(pattern):,} characters, more than {_LONGEST_PATTERN:,}")
                re.compile(pattern)
            except (re.error, ValueError, OverflowError, RecursionError) as error:
                problem = f"{abbreviated(pattern)} is not a regular expression: {error!s:.120}"
                raise ValueError(problem) from None
        return value


_TIME: Final = re.compile(
    r"(?:(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+))?(?::(?P<seconds>\d+))?)"
    r"|(?:(?:(?P<h>\d+):)?(?P<m>\d+):(?P<s>\d+))|(?P<only>\d+)"
)
"""Time formats of sbatch: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]."""


def time_limit_s(text: str) -> int:
    """Return the seconds of a time limit in one of sbatch's formats, such as `12:00:00`, `90` (minutes) or `1-12`.

    Raises:
        ValueError: The text has another format, or is not a positive time.
    """
    parts = _TIME.fullmatch(text)
    if parts is None:
        raise ValueError(f"`{text}` is not a time limit; write for example 12:00:00, 90 or 1-12")
    days, hours, minutes, seconds, h, m, s, only = (int(part or 0) for part in parts.groups())
    limit = (days * 24 + hours + h) * 3600 + (minutes + m + only) * 60 + seconds + s
    if limit < 1:
        raise ValueError(f"`{text}` is not a positive time")
    return limit


class Launch(Section):
    """Launcher and machines of a run. Processes that are already ranks ignore this section."""

    launcher: Literal["local", "torchrun", "slurm", "ray", "kubernetes"] = "local"
    """How ranks start: by this process (local), by torchrun on every machine, as a Slurm job, as Ray actors, or as a
    Kubernetes JobSet, for which a manifest is written. Same as the option `--launcher`."""
    nnodes: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Number of machines."""
    nproc_per_node: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Ranks per machine. None: number of ranks / `nnodes`."""
    oversubscribe: bool = False
    """Allow more CPU ranks on this machine than its cores and free memory support."""
    rdzv_endpoint: Annotated[str, Field(pattern=r"^[^\s:]+:\d+$")] | None = None
    """HOST:PORT of torchrun's rendezvous. None: a single machine; under Slurm, the first machine of the job."""
    partition: str | None = None
    """Slurm partition, or Kueue queue on Kubernetes. None: Slurm's default partition; no queue."""
    time: str | None = None
    """Time limit for Slurm and Kubernetes in sbatch's format (`12:00:00`). None: the limit of the partition; on
    Kubernetes, no limit."""
    sbatch: tuple[str, ...] = ()
    """Additional sbatch options (`[--gpus-per-node=8, --exclusive]`)."""
    ray_address: str | None = None
    """Address of the Ray cluster (`auto`, `HOST:6379`). None: RAY_ADDRESS; if unset, a cluster is started on this
    machine."""
    image: str | None = None
    """Container image for Kubernetes; must contain this package and torch."""
    namespace: str | None = None
    """Kubernetes namespace. None: the current namespace of kubectl."""
    resource: str | None = "nvidia.com/gpu"
    """Kubernetes resource of which each rank requests one. None: CPU ranks."""
    volume: str | None = None
    """PersistentVolumeClaim on Kubernetes that holds model, data and output for all pods. None: no volume."""
    mount_path: str = "/workspace"
    """Mount point of the volume. All paths of the recipe must be below it, on this machine and in the pods."""

    @field_validator("time", mode="before")
    @classmethod
    def _time(cls, value: object) -> object:
        """Reject invalid formats, and integers, because YAML 1.1 reads an unquoted 12:00:00 as a base-60 integer."""
        if isinstance(value, int) and not isinstance(value, bool):
            raise ValueError("YAML reads an unquoted time as a number; quote it, as in time: '12:00:00'")
        if isinstance(value, str):
            time_limit_s(value)
        return value

    @field_validator("*")
    @classmethod
    def _one_line(cls, value: object) -> object:
        """Reject control characters: the values become lines of a script, and a line feed would end a line."""
        texts = value if isinstance(value, tuple) else (value,)
        if not all(text.isprintable() for text in texts if isinstance(text, str)):
            raise ValueError("the text contains characters that are not printable")
        return value


class Recipe(Section):
    """Configuration of one training run."""

    FOREIGN_KEYS: ClassVar[Mapping[str, ForeignKey]] = FOREIGN_KEYS
    FOREIGN_VALUES: ClassVar[Mapping[str, Mapping[str, Any]]] = FOREIGN_VALUES

    # Factories, because a default instance would build the validators of every section on import.

    model: Model
    """Model and source of its weights."""
    stage: Literal["pt", "sft", "dpo", "orpo", "kto", "rm", "grpo"] = "pt"
    """Training stage. pt: loss on every token. sft: loss on the assistant's tokens of conversations. dpo, orpo:
    preference between two answers. rm: a score per answer, learned from preferences, instead of next tokens. kto:
    answers labelled good or bad. grpo: rewards of the model's own answers to prompts."""
    backend: BackendName = "torch"
    """Framework that computes the steps. torch: PyTorch runs the model. Others: steps of the PyTorch model are captured
    as programs of operators, which the framework runs."""
    data: Data = Field(default_factory=Data)
    """Training and evaluation data."""
    training: Training = Field(default_factory=Training)
    """Optimization."""
    parallel: Parallel = Field(default_factory=lambda: Parallel(auto=True))
    """Layout over ranks."""
    dpo: Dpo = Field(default_factory=Dpo)
    """Settings of `stage: dpo`."""
    orpo: Orpo = Field(default_factory=Orpo)
    """Settings of `stage: orpo`."""
    kto: Kto = Field(default_factory=Kto)
    """Settings of `stage: kto`."""
    rm: Rm = Field(default_factory=Rm)
    """Settings of `stage: rm`."""
    grpo: Grpo = Field(default_factory=Grpo)
    """Settings of `stage: grpo`."""
    lora: Lora | None = None
    """Low-rank adapters; the weights of the base model are frozen. None: train all weights."""
    moe: Moe = Field(default_factory=Moe)
    """Routing of tokens to experts."""
    overlap: Overlap = Field(default_factory=Overlap)
    """Communication that runs during computation."""
    offload: Offload = Field(default_factory=Offload)
    """Planned device memory: offload and recomputation."""
    checkpoint: Checkpoint = Field(default_factory=Checkpoint)
    """Checkpoints and export."""
    launch: Launch = Field(default_factory=Launch)
    """Launcher and machines."""
    topology: str = "local"
    """Machine description: `local`, a preset name, or a YAML file."""
    output_dir: str = "runs/run"
    """Directory of the run: metrics, checkpoints, export and report."""
    sample_prompt: str | None = None
    """Text to continue after training. A chat model answers it as a user's message. None: no sample."""
    sample_answers: int = Field(default=0, ge=0, le=64)
    """Held-out conversations that the exported model answers after training, for the report (stage `sft`)."""

    @property
    def disables_dropout(self) -> bool:
        """True if the model trains without dropout."""
        choice = self.training.disable_dropout
        return self.stage not in ("pt", "sft") if choice is None else choice

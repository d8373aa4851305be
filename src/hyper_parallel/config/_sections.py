"""Sections of a recipe: one pydantic class each, a docstring under every field. Unknown keys are errors.

Validators here check one section. Rules across sections are rows of the tables that `_contradictions.py` combines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count, islice
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from hyper_parallel.config._values import (
    LEAST_TRAINED_VOCABULARY,
    MOST_CHUNKS,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_SECONDS,
    MOST_SEQ_LEN,
    MOST_SEQUENCES,
    MOST_STAGES,
    MOST_STEPS,
    MOST_TOKENS,
    MOST_VOCABULARY,
    MOST_WEIGHT,
    arguments,
    canonical_optimizer,
    size,
)
from hyper_parallel.config.foreign_keys import ForeignKey
from hyper_parallel.config.schedules import ScheduleName
from hyper_parallel.units import MiB, TiB, canonical_dtype


class Section(BaseModel):
    """Base class of every section: unknown keys are errors, instances are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    KEY_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Aliases of keys, accepted on input only: alias to key."""
    MAIN_KEY: ClassVar[str] = ""
    """Key that hints suggest if the user gives a plain value instead of the section. Empty: none."""
    WORDS: ClassVar[tuple[str, ...]] = ()
    """Words that stand for the whole section: `parallel: auto`."""
    FOREIGN_KEYS: ClassVar[Mapping[str, ForeignKey]] = MappingProxyType({})
    """Keys of other training programs, for hints. Only `Recipe` sets it."""

    @model_validator(mode="before")
    @classmethod
    def _expand_word(cls, data: object) -> object:
        """Replace a word that stands for the section by the key `auto`: true for `auto`, false for other words."""
        return {"auto": data == "auto"} if data in cls.WORDS else data

    @field_validator("*")
    @classmethod
    def _countable(cls, value: Any) -> Any:
        """Reject integers beyond 2^53, because float64, in which costs are computed, cannot represent them exactly."""
        if isinstance(value, int) and abs(value) > 2**53:
            raise ValueError("integers beyond 2^53 are not supported")
        return value


_S = TypeVar("_S", bound=Section)
Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class Model(Section):
    """Model architecture and the source of its weights."""

    MAIN_KEY: ClassVar[str] = "path"

    path: str
    """Hugging Face model directory, `config.json` file, Hub name, or preset name."""
    init: Literal["auto", "random", "pretrained"] = "auto"
    """Initial weights. random: new ones from `training.seed`. pretrained: the weight files of `path`, safetensors or
    `pytorch_model*.bin`. auto: pretrained if `path` has weight files, else random. auto is an error for a Hub name, or
    a directory with a tokenizer, without weight files."""
    attn_implementation: str | None = None
    """Attention implementation: a name in transformers' attention registry. None: `sdpa` if the model supports it, else
    `eager`."""
    trust_remote_code: bool = False
    """Allow the Python code in `model.path` to run, for architectures that transformers does not contain. false rejects
    such models."""


_Format = Literal[
    "auto", "text", "jsonl", "parquet", "csv", "alpaca", "sharegpt", "prompt_completion", "preference",
]  # fmt: skip

ColumnName = Literal[
    "prompt", "completion", "instruction", "input", "output", "answer", "system", "history", "messages", "chosen",
    "rejected", "tools", "label", "margin", "images", "audio", "role", "content",
]  # fmt: skip
"""Names that `data.columns` can map: first keys of records, then keys of turns."""
RoleName = Literal["system", "developer", "user", "assistant", "tool", "function_call"]


class MixedSource(Section):
    """Entry of a list of mixed sources. Omitted keys take the values of `data`."""

    source: str
    """Like `data.source`."""
    weight: float = Field(default=1.0, ge=1 / MOST_WEIGHT, le=MOST_WEIGHT)
    """Relative weight. The source supplies weight / (sum of weights) of the sequences."""
    name: str | None = None
    """Like `data.name`."""
    split: str | None = None
    """Like `data.split`."""
    format: _Format | None = None
    """Like `data.format`."""
    text_key: str | None = None
    """Like `data.text_key`."""
    columns: dict[ColumnName, str] | None = None
    """Like `data.columns`."""
    roles: dict[RoleName, str] | None = None
    """Like `data.roles`."""
    ignore_keys: tuple[str, ...] | None = None
    """Like `data.ignore_keys`."""


def _entry(value: object) -> object:
    return {"source": value} if isinstance(value, str) else value


def source_tag(value: object) -> str:
    """Return the pydantic union tag for the form of `data.source`: one text, or a list."""
    return "[list]" if isinstance(value, (list, tuple)) else "[text]"


class Data(Section):
    """Training and evaluation data, tokenizer and packing."""

    MAIN_KEY: ClassVar[str] = "source"

    source: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[
            tuple[Annotated[MixedSource, BeforeValidator(_entry)], ...],
            Field(min_length=1),
            Tag("[list]"),
        ],
        Discriminator(source_tag),
    ] = "python-stdlib"
    """Training data: a file, a directory, a folder written by `datasets`, or a dataset name on the Hugging Face Hub.
    `python-stdlib` is the source text of this machine's standard library, so that a first run needs no download. A list
    of `{source, weight}` entries, or of texts, is mixed."""
    name: str | None = None
    """Configuration of the dataset, if it has several."""
    split: str | None = None
    """Split of the dataset. None: `train`, or the only split."""
    format: _Format = "auto"
    """Format of the records. auto: detected from file names and the first record."""
    text_key: str = "text"
    """Key or column that holds the text of a record."""
    columns: dict[ColumnName, str] = {}
    """Maps names used here to keys of your records: `{prompt: question, completion: answer}`. `role` and `content` name
    keys of turns."""
    roles: dict[RoleName, str] = {}
    """Maps roles to the words your data uses: `{user: customer, assistant: agent}`. Common words (human, gpt, ...) are
    known without an entry."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of records, turns and tool calls to ignore. Any other unknown key is an error, so that no field is dropped
    by accident."""
    media_dir: str | None = None
    """Folder of the images and recordings of records. None: the folder of the source. No file outside of it is read."""
    bad_media: Literal["error", "skip"] = "error"
    """Reaction to an image or recording that cannot be read, or to a wrong number of placeholders in the text: fail
    with an error, or skip (omit and count) the conversation."""
    chat_template: str = "auto"
    """Template that turns conversations into text. auto: the tokenizer's template; without one, a plain template, and
    pairs of `prompt` and `completion` are concatenated. none: concatenate; records other than pairs are errors.
    Otherwise: path of a Jinja file."""
    seq_len: int = Field(default=512, ge=2, le=MOST_SEQ_LEN)
    """Tokens per sequence."""
    packing: bool = True
    """Pack several documents into one sequence. false: one document per sequence, padded. Conversations with images or
    audio are always padded."""
    mask_documents: bool | None = None
    """Block attention between the documents of a packed sequence, and restart positions at 0 in each document. None:
    true with `stage: sft`, else false."""
    tokenizer: str | None = None
    """Tokenizer directory or Hub name. None: the tokenizer of `model.path`; without one, a byte-level BPE trained on
    the source."""
    vocab_size: int | None = Field(default=None, ge=LEAST_TRAINED_VOCABULARY, le=MOST_VOCABULARY)
    """Vocabulary size of a tokenizer trained by this run. None: 4096, or the model's vocabulary size if that is
    smaller."""
    holdout: float = Field(default=0.02, ge=0.0, lt=0.5)
    """Approximate fraction of the documents held out for evaluation; if that is less than one text, the end of the
    longest text. Must be 0, its default then, when `validation` or `streaming` is set."""
    validation: str | None = None
    """Evaluation data, used instead of held-out documents: a single source, as for `source`."""
    validation_split: str | None = None
    """Split of the dataset in `validation`."""
    streaming: bool = False
    """Tokenize while training reads the data, without preparing files first. For endless or very large data."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Maximum bytes of text to read from each source. None: all."""
    max_records: int | None = Field(default=None, ge=1)
    """Maximum number of records to read from each source; does not limit text files. None: all."""
    max_record_bytes: Annotated[int, BeforeValidator(size)] = Field(default=64 * MiB, le=TiB)
    """Maximum size of one record in bytes (`64MiB`); a larger record is an error. Larger text files are read in pieces
    of at most this size, which end at a line break if possible."""
    shuffle: bool = True
    """Visit the packed sequences in a random order drawn from `training.seed`."""
    balance: Literal["auto", "cost", "none"] = "auto"
    """Assignment of a step's records to ranks. cost: ranks get about equal work of the encoder of images or audio,
    estimated from the number and tokens of the items; records and loss of a step do not change. none: the order of the
    data. auto: cost for data with images or audio, else none."""
    cache_dir: str | None = None
    """Directory for tokenized data. None: the user's cache directory."""

    def parts(self) -> list[tuple[Data, float]]:
        """Return one pair per source: a `Data` section with this source only, and its weight (1 for one source)."""
        if isinstance(self.source, str):
            return [(self, 1.0)]
        whole = self.model_dump()
        sources = [p.model_dump(exclude_none=True, exclude={"weight"}) for p in self.source]
        weights = [p.weight for p in self.source]
        return [(Data(**whole | own), w) for own, w in zip(sources, weights, strict=True)]

    def masks(self, stage: str) -> bool:
        """Return whether attention is blocked between the documents of a packed sequence in `stage`."""
        wanted = stage == "sft" if self.mask_documents is None else self.mask_documents
        return self.packing and wanted


class Profile(Section):
    """Steps recorded by torch.profiler; each trace is written to `profile/rank<r>.json`."""

    start: int = Field(ge=1, le=MOST_STEPS)
    """First profiled step, counted from 1."""
    steps: int = Field(default=2, ge=1, le=MOST_STEPS)
    """Number of profiled steps."""
    ranks: Literal["first", "all"] = "first"
    """Ranks that write a trace: rank 0 only (first), or every rank (all)."""


class Training(Section):
    """Optimization, numerics, evaluation and failure handling."""

    steps: int = Field(default=100, ge=1, le=MOST_STEPS)
    """Total optimizer steps, including those before a resume. If the data is shorter, further epochs follow."""
    epochs: float | None = Field(default=None, gt=0, le=MOST_STEPS)
    """Passes over the data, from which `steps` is derived; an error if `steps` is set too. None: `steps` is used."""
    seed: int = 0
    """Seed of the initial weights, the data order and all random numbers of a step."""
    dtype: Annotated[Dtype, BeforeValidator(canonical_dtype)] = "bfloat16"
    """Compute precision. With bfloat16 and float16, parameters and reductions are in float32, and float16 also scales
    the loss. float64 is meant for parity checks."""
    deterministic: bool = False
    """Use deterministic kernels only, so that a repeated run gives the same bits."""
    tokens_per_step: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Tokens of one optimizer step, summed over all ranks. None: microbatch x accumulation_steps x data-parallel ranks
    x seq_len."""
    microbatch: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Sequences per microbatch on one data-parallel rank. None: derived."""
    accumulation_steps: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Microbatches per optimizer step. None: derived."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    lr_schedule: ScheduleName = "cosine"
    """Shape of the learning rate after warm-up: cosine, wsd (warm-up, stable, decay), linear or constant. The other
    names are transformers' schedules, with the same values at every step."""
    lr_schedule_args: Annotated[dict[str, Any], BeforeValidator(arguments)] = {}
    """Arguments of a transformers schedule, with the names of its `lr_scheduler_kwargs`."""
    warmup_steps: int = Field(default=10, ge=0, le=MOST_STEPS)
    """Steps of warm-up. A run shorter than the default has no warm-up unless this key is set."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """Length of the warm-up as a fraction of `steps`, rounded up. None: `warmup_steps` sets the length."""
    decay_steps: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """Steps of the final decay of `wsd` and `warmup_stable_decay`. None: a tenth of the run, at least 1."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of `lr`; with `lr_schedule: warmup_stable_decay`, the default is 0. cosine, wsd
    and linear reach this rate one step after the last step."""
    optimizer: Annotated[str, BeforeValidator(canonical_optimizer)] = "adamw"
    """adamw, adam, sgd, adafactor, or muon (linear weights; AdamW for the rest). Also accepted: transformers' name of
    an optimizer of torch, torchao or bitsandbytes, or the dotted path of a class."""
    optimizer_args: Annotated[dict[str, Any], BeforeValidator(arguments)] = {}
    """Extra constructor arguments of the optimizer class."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Weight decay. Not applied to norms, biases, other vectors, and parameters of state-space layers."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Beta coefficients (beta1, beta2) of Adam-like optimizers, and of muon's AdamW."""
    eps: float = Field(default=1e-8, gt=0)
    """Epsilon of Adam-like optimizers, and of muon's AdamW."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip gradients to this global norm. None: no clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a NaN or infinite loss or gradient: end the run (stop), or skip the step (skip). 20 skipped steps in
    a row end the run. With `dtype: float16` such steps are always skipped while the loss scale is above 1."""
    skip_grad_norm: float | None = Field(default=None, gt=0)
    """Skip a step whose global gradient norm is larger, as a loss spike. None: never."""
    freeze: tuple[str, ...] = ()
    """Glob patterns of parameter names to freeze (`model.embed_tokens.*`). Frozen parameters have no gradient and no
    optimizer state."""
    neftune_noise_alpha: float | None = Field(default=None, gt=0)
    """NEFTune: add uniform noise of magnitude alpha / sqrt(tokens of a sequence x features) to embeddings during
    training. None: no noise."""
    disable_dropout: bool | None = None
    """Train without dropout, including `lora.lora_dropout`. None: yes in every stage except `pt` and `sft`."""
    recompute: Literal["none", "full"] = "none"
    """Activation recomputation in the backward pass: none, or every decoder layer (full)."""
    recompute_layers: int | None = Field(default=None, ge=1, le=MOST_LAYERS)
    """Number of layers per rank that `recompute` applies to: the first layers of each of the rank's pipeline stages,
    chosen in turn. None: all."""
    compile: bool | Literal["graph-kernel"] = False
    """Fusion of operators. true: torch.compile fuses each decoder layer. graph-kernel: a `backend` other than torch
    fuses operators of the captured step into generated kernels."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out data. 0: evaluate only before the first step and after the last one."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Stop after this many evaluations in a row without a better held-out loss, by transformers' rule. None: never."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """A held-out loss is better only if it is lower than the best one by more than this value."""
    log_every: int = Field(default=1, ge=1)
    """Steps between printed lines; steps 1 and `steps` are always printed. `metrics.jsonl` records every step."""
    eval_tokens: int = Field(default=65536, ge=1)
    """Approximate number of held-out tokens per evaluation, at least one sequence."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Trackers that receive the curves of `metrics.jsonl`. Their packages and services must be installed and
    reachable."""
    callbacks: tuple[str, ...] = ()
    """Dotted paths of subclasses of `hyper_parallel.trainer.Callback`."""
    profile: Profile | None = None
    """Steps to profile with torch.profiler. None: no profile."""
    timeout_s: float = Field(default=600.0, gt=0, le=MOST_SECONDS)
    """Seconds a rank may spend in one phase of a step before the run ends with an error that names the rank. A
    process that a signal has stopped has the same limit in every phase."""
    first_step_timeout_s: float = Field(default=1800.0, gt=0, le=MOST_SECONDS)
    """Like `timeout_s`, for the first step of a process and outside steps: start, evaluation, checkpoint, export."""
    max_restarts: int = Field(default=0, ge=0)
    """Number of times that all ranks are restarted from the newest checkpoint after a rank fails or hangs. The
    launchers torchrun and slurm pass it to torchrun as `--max-restarts`."""
    elastic: bool = False
    """Plan again for fewer ranks if ranks fail a second time before a restart has saved a checkpoint. Under torchrun,
    plan for the number of ranks that it started. Requires `tokens_per_step`, which does not change."""
    check_ranks_every: int = Field(default=0, ge=0)
    """Steps between bitwise comparisons of all data-parallel ranks on the same microbatches. Each comparison costs
    about one step. 0: never. Requires `deterministic`, and excludes `offload`."""
    debug_collectives: bool = False
    """Before each collective, compare its operation, shape and dtype across ranks. Slow; meant for finding hangs."""


class TowerDegrees(Section):
    """Degrees and ranks of one encoder: of images and videos, or of audio."""

    dp_replicate: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Like `parallel.dp_replicate`."""
    dp_shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Like `parallel.dp_shard`."""
    ranks: tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...] | None = Field(default=None, max_length=MOST_RANKS)
    """Ranks of this part, in ascending order in its mesh. Parts may share ranks. None: as many ranks as the product of
    the degrees; `language` starts at rank 0, and an encoder uses the lowest ranks without a part."""

    @property
    def num_ranks(self) -> int:
        """Product of the degrees."""
        degrees = self.model_dump(exclude={"ranks"})
        return math.prod(degrees.values())


class LanguageDegrees(TowerDegrees):
    """Degrees and ranks of the language part."""

    tp_x: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Like `parallel.tp_x`."""
    tp_y: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Like `parallel.tp_y`."""
    pp: int = Field(default=1, ge=1, le=MOST_STAGES)
    """Like `parallel.pp`. Encoders send features to the first stage, and to later stages whose layers read features. A
    single encoder may share ranks with the stages: one schedule then orders the actions of both."""


def _refuse_keys_beside_auto(section: _S) -> _S:
    if getattr(section, "auto", False) and section.model_fields_set - {"auto"}:
        name = type(section).__name__.lower()
        raise ValueError(f"`{name}: auto` cannot be combined with other keys of `{name}`, which the planner chooses")
    return section


class Submodels(Section):
    """Layouts of the parts of a multimodal model: `language`, and an encoder `vision`, `audio` or both; or `auto`."""

    WORDS: ClassVar[tuple[str, ...]] = ("auto",)

    auto: bool = False
    """Let the planner choose ranks and degrees of all parts, by predicted time. The other keys are then not allowed."""
    language: LanguageDegrees = Field(default_factory=LanguageDegrees)
    """Degrees and ranks of the language part."""
    vision: TowerDegrees | None = None
    """Degrees and ranks of the encoder of images and videos with its projector."""
    audio: TowerDegrees | None = None
    """Like `vision`, for an encoder of audio."""

    _auto_alone = model_validator(mode="after")(_refuse_keys_beside_auto)

    @property
    def towers(self) -> dict[str, TowerDegrees]:
        """Degrees of the encoders in this section, by name."""
        by_name = {"vision": self.vision, "audio": self.audio}
        return {name: degrees for name, degrees in by_name.items() if degrees is not None}

    @property
    def members(self) -> dict[str, tuple[int, ...]]:
        """Ranks of each part by name, in ascending order, the language part first."""
        parts = {"language": self.language, **self.towers}
        members = {name: tuple(sorted(part.ranks)) for name, part in parts.items() if part.ranks is not None}
        for name, part in parts.items():
            used = {rank for ranks in members.values() for rank in ranks}
            free = count() if name == "language" else (r for r in count() if r not in used)
            members.setdefault(name, tuple(islice(free, min(part.num_ranks, MOST_RANKS))))
        return {name: members[name] for name in parts}


class Parallel(Section):
    """Degrees of the mesh axes, and other choices of the layout. `parallel: auto` lets the planner choose."""

    KEY_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"tp": "tp_x"})
    WORDS: ClassVar[tuple[str, ...]] = ("auto",)

    auto: bool = False
    """Let the planner choose the degrees that are not given."""
    pp: int = Field(default=1, ge=1, le=MOST_STAGES)
    """Pipeline-parallel degree: ranks that split the layers into stages."""
    dp_replicate: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Data-parallel replicas that each hold all parameters (outer axis of HSDP)."""
    dp_shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    """FSDP degree: data-parallel ranks that shard parameters, gradients and optimizer state."""
    cp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Context-parallel degree: ranks that split each sequence."""
    tp_x: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel degree on axis x; `tp` is an alias. Sequence parallelism is always included."""
    tp_y: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel degree on axis y, the second axis of 2-D tensor parallelism."""
    ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Expert-parallel degree. Experts are distributed over ranks of dp_shard x cp x tp, so `ep` adds no ranks."""
    attention_shape: Literal["1d", "2d", "weight"] = "2d"
    """Attention on two tensor-parallel axes x and y. 1d: x and y act as one axis. 2d: activations are communicated over
    y. weight: weights are gathered over y."""
    mlp_shape: Literal["1d", "2d", "weight"] = "2d"
    """Like `attention_shape`, for the MLP."""
    attention_scatter: Literal["head", "token"] = "head"
    """Attention with shape 2d. head: y shards the heads, and attention needs no communication over y. token: y shards
    the sequence, and keys and values are gathered over y."""
    gathered_inputs: Literal["keep", "re-gather"] = "keep"
    """Gathered inputs of a matmul. keep: they stay in memory until the backward pass. re-gather: the backward pass
    gathers them again (less memory, more traffic)."""
    cp_kind: Literal["ring", "ulysses", "hybrid", "all_gather"] = "ring"
    """Context-parallel attention: ring (zigzag order), ulysses, hybrid (both), or all_gather (of keys and values)."""
    cp_ulysses: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Ulysses degree within cp, for `cp_kind: hybrid`."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"] = "1f1b"
    """Pipeline schedule."""
    schedule_file: str = ""
    """CSV file with the actions of every pipeline rank, as written by `plan --schedule-csv`. Empty: `schedule` is
    generated."""
    virtual_stages: int = Field(default=1, ge=1, le=MOST_STAGES)
    """Pipeline stages per rank: 2 or more for interleaved, 2 for zbv and dualpipev."""
    stage_layers: tuple[Annotated[int, Field(ge=0, le=MOST_LAYERS)], ...] = Field(default=(), max_length=MOST_STAGES)
    """Decoder layers of each (virtual) stage. Empty: balanced by estimated cost."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward (ZeRO-3). false: keep them (ZeRO-2), for less traffic and
    more memory."""
    zero: Literal[1] | None = None
    """1: shard only the optimizer state (ZeRO-1). Parameters are then gathered and gradients reduced once per step, not
    once per microbatch. None: `reshard_after_forward` decides."""
    one_order: bool = True
    """Assume that all data-parallel ranks call layers in the order of the first steps; a rank may skip layers. false:
    the order may vary, because the ranks agree on every FSDP collective by messages between hosts."""
    rules: dict[str, str] = {}
    """Overrides of the built-in sharding: glob pattern of module names to a style, such as colwise or replicate."""
    submodels: Submodels | None = None
    """Layouts of the parts of a multimodal model, such as `{vision: {dp_shard: 1}, language: {tp_x: 2}}`. The degrees
    of `language` also become those of this section. auto: the planner chooses. None: one layout for the whole model."""
    world_size: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Number of ranks for `auto`, also of `submodels`; explicit degrees must multiply to it. None: all accelerators of
    the topology, or 4 ranks on a machine without any."""

    @property
    def is_planned(self) -> bool:
        """True if the planner chooses degrees."""
        return self.auto or (self.submodels is not None and self.submodels.auto)

    @property
    def towers(self) -> tuple[str, ...]:
        """Names of the encoders in `submodels`."""
        return () if self.submodels is None else tuple(self.submodels.towers)

    @property
    def tower_ranks(self) -> int:
        """Number of ranks that only run encoders, not the language part."""
        members = {} if self.submodels is None else self.submodels.members
        towers = {rank for name, ranks in members.items() for rank in ranks}
        return len(towers - {*members.get("language", ())})

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, data: object) -> object:
        if isinstance(data, dict) and "tp" in data:
            data = dict(data)
            if "tp_x" in data and data["tp_x"] != data["tp"]:
                raise ValueError(f"tp={data['tp']} and tp_x={data['tp_x']} are two names of one degree")
            data["tp_x"] = data.pop("tp")
        return data


class Moe(Section):
    """Routing of mixture-of-experts models. A setting that the model cannot apply is an error."""

    aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss. None: the weight in the model's own loss, if it has one."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Change of each router bias toward equal load after an optimizer step (DeepSeek-V3: 0.001). 0: biases are
    fixed."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """Maximum tokens that a rank sends to one expert, as a multiple of an even distribution; the rest are dropped.
    None: no token is dropped."""


class Overlap(Section):
    """Communication within a layer that overlaps with computation: `none` (default), `auto`, or keys."""

    WORDS: ClassVar[tuple[str, ...]] = ("none", "auto")

    auto: bool = False
    """Let the planner choose, by predicted time. The other keys are then not allowed."""
    tp: Literal["none", "chunks", "symmetric", "half-batch"] = "none"
    """Collectives of tensor parallelism. chunks: one chunk of tokens is multiplied with the weights of a block while
    others are gathered or scattered. symmetric: CUDA operators gather or scatter tokens while they multiply them, over
    symmetric memory. half-batch: layers run on two halves of the sequences of a microbatch, and one half computes while
    a collective of the other is in flight."""
    ep: Literal["none", "chunks", "half-batch"] = "none"
    """All-to-all of tokens to experts and back. chunks: one chunk of tokens is sent while another is computed.
    half-batch: as for `tp`; either key sets it for both."""
    chunks: int = Field(default=4, ge=2, le=MOST_CHUNKS)
    """Chunks of tokens, for `tp: chunks` and `ep: chunks`."""

    _auto_alone = model_validator(mode="after")(_refuse_keys_beside_auto)


class Checkpoint(Section):
    """Checkpoints, snapshots, resuming, and export."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints. 0: only after the last step and as `every_minutes` requires."""
    every_minutes: float = Field(default=30.0, ge=0, le=MOST_SECONDS)
    """Minutes since the last checkpoint after which a step ends with a new one, independent of `every`. 0: never."""
    snapshot_every: int = Field(default=0, ge=0)
    """Steps between snapshots in memory (/dev/shm), from which restarted ranks continue (`training.max_restarts`). 0:
    none."""
    keep: int = Field(default=2, ge=1)
    """Number of newest intact checkpoints to keep."""
    keep_best: bool | Literal["loss"] = False
    """Also keep the checkpoint with the lowest held-out loss. Only checkpoints saved right after an evaluation are
    candidates."""
    on_error: Literal["stop", "continue"] = "stop"
    """Reaction to a write error of the disk: end the run (stop), or log it and skip this checkpoint (continue). A
    failed last checkpoint always ends the run."""
    asynchronous: bool = True
    """Write checkpoints in the background while training continues."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Resume from the newest intact checkpoint in `output_dir`: if there is one (auto), never, or fail without one
    (must)."""
    from_dir: str | None = None
    """Start from the newest checkpoint of another run directory. A checkpoint of a later step in `output_dir` takes
    precedence."""
    export: bool = True
    """Write a Hugging Face model directory after the last step; with `lora`, the adapters in peft's format."""

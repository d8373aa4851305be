"""The sections of a recipe: one pydantic class per room, a docstring under every field, unknown keys refused.

`None` means derived. Sections check themselves; checks across sections live in `_contradictions.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from hyper_parallel.config._maxima import (
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
)
from hyper_parallel.config._values import arguments, canonical_dtype, canonical_optimizer, size
from hyper_parallel.config.foreign_keys import ForeignKey
from hyper_parallel.config.schedules import ScheduleName
from hyper_parallel.units import MiB, TiB


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    KEY_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Other names of keys, accepted on input only."""
    MAIN_KEY: ClassVar[str] = ""
    """Key that is probably meant by a plain value in place of the section; empty: there is none."""
    FOREIGN_KEYS: ClassVar[Mapping[str, ForeignKey]] = MappingProxyType({})
    """Of a whole file: names of keys in other programs, for hints."""

    @field_validator("*")
    @classmethod
    def _countable(cls, value: Any) -> Any:
        """Costs are computed in float64, which counts to 2^53."""
        if isinstance(value, int) and abs(value) > 2**53:
            raise ValueError("a number beyond 2^53, which nothing is counted to")
        return value


Dtype = Literal["float64", "float32", "bfloat16", "float16"]


class Model(Section):
    """Which model, and where its weights come from."""

    MAIN_KEY: ClassVar[str] = "path"

    path: str
    """Hugging Face directory, config.json, or a preset name."""
    init: Literal["auto", "random", "pretrained"] = "auto"
    """Weights: random, from the safetensors files, or whichever is there (auto)."""
    attn_implementation: str | None = None
    """Attention of the model, a name in transformers' attention registry. None: sdpa where the model has it."""
    trust_remote_code: bool = False
    """Run the Python code that lies in `model.path`, for a model that transformers has not. Nobody is ever asked."""


_Format = Literal[
    "auto",
    "text",
    "jsonl",
    "parquet",
    "csv",
    "alpaca",
    "sharegpt",
    "prompt_completion",
    "preference",
]


ColumnName = Literal[
    "prompt", "completion", "instruction", "input", "output", "answer", "system", "history", "messages", "chosen",
    "rejected", "tools", "label", "margin", "role", "content",
]  # fmt: skip
"""Names of keys that a reader of records knows: those of records, then those of turns."""
RoleName = Literal["system", "developer", "user", "assistant", "tool", "function_call"]


class MixedSource(Section):
    """One source of several; a key that is not given is that of `data`."""

    source: str
    """As `data.source`."""
    weight: float = Field(default=1.0, ge=1 / MOST_WEIGHT, le=MOST_WEIGHT)
    """Its share of the sequences is its weight over the sum of the weights."""
    name: str | None = None
    """As `data.name`."""
    split: str | None = None
    """As `data.split`."""
    format: _Format | None = None
    """As `data.format`."""
    text_key: str | None = None
    """As `data.text_key`."""
    columns: dict[ColumnName, str] | None = None
    """As `data.columns`."""
    roles: dict[RoleName, str] | None = None
    """As `data.roles`."""
    ignore_keys: tuple[str, ...] | None = None
    """As `data.ignore_keys`."""


def source_tag(value: object) -> str:
    """Whether a value that may be one text or several is a list."""
    return "[list]" if isinstance(value, (list, tuple)) else "[text]"


class Data(Section):
    """What the model reads."""

    MAIN_KEY: ClassVar[str] = "source"

    source: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[tuple[MixedSource, ...], Field(min_length=1), Tag("[list]")],
        Discriminator(source_tag),
    ] = "python-stdlib"
    """`python-stdlib` (the source text of the standard library on this machine), a file, a directory, a folder that
    `datasets` wrote, or a name on the Hugging Face hub. A list of such, with weights, is mixed."""
    name: str | None = None
    """Configuration of the dataset, where it has several."""
    split: str | None = None
    """Split of the dataset. None: `train`, or the only one."""
    format: _Format = "auto"
    """Shape of the records; auto looks at the file name and the first record."""
    text_key: str = "text"
    """Key or column of the text in records."""
    columns: dict[ColumnName, str] = {}
    """Keys of the records by their names here: `{prompt: question, completion: answer}`. `role` and `content` are keys
    of turns."""
    roles: dict[RoleName, str] = {}
    """Words for the roles of turns: `{user: customer, assistant: agent}`, beside the usual ones (human, gpt, ...)."""
    ignore_keys: tuple[str, ...] = ()
    """Keys of records, turns and tool calls that are passed over. Every other key has a meaning, or is refused."""
    chat_template: str = "auto"
    """How conversations become text. auto: by the template of the tokenizer; where it has none, texts under `prompt`
    and `completion` are joined as plain text. none: every pair of texts is joined. Else a file with a template."""
    seq_len: int = Field(default=512, ge=2, le=MOST_SEQ_LEN)
    """Tokens per sequence."""
    packing: bool = True
    """Put several documents in one sequence. false: one document in each, padded."""
    mask_documents: bool | None = None
    """Block attention between the documents of a packed sequence, and let their positions begin at 0. None: between
    conversations yes (`stage: sft`), between texts no (`stage: pt`), where a sequence is a piece of one long stream."""
    tokenizer: str | None = None
    """Tokenizer directory. None: the one of `model.path`, else a byte-level BPE trained on the source."""
    vocab_size: int | None = Field(default=None, ge=260, le=MOST_VOCABULARY)
    """Entries of a tokenizer that is trained here. None: 4096, or as many as the model has where these are fewer."""
    holdout: float = Field(default=0.02, ge=0.0, lt=0.5)
    """Share of the documents kept for evaluation. With `validation` or `streaming` none are."""
    validation: str | None = None
    """What is evaluated instead of held-out documents, in any form of `source`."""
    validation_split: str | None = None
    """Split of the dataset in `validation`."""
    streaming: bool = False
    """Tokenise while the run reads, and prepare nothing: for data that is endless or very large."""
    max_bytes: int | None = Field(default=None, ge=1)
    """Read at most this much text. None: all of it."""
    max_records: int | None = Field(default=None, ge=1)
    """Read at most so many records of each source. None: all of them."""
    max_record_bytes: Annotated[int, BeforeValidator(size)] = Field(default=64 * MiB, le=TiB)
    """Most bytes of one record; a longer one is refused. A longer text file is read in pieces that end with a line."""
    shuffle: bool = True
    """Visit the packed sequences in an order drawn from `training.seed`."""
    cache_dir: str | None = None
    """Where tokenised files are kept. None: the user's cache directory."""

    def parts(self) -> list[tuple[Data, float]]:
        """Every source as a section of its own, with its weight."""
        if isinstance(self.source, str):
            return [(self, 1.0)]
        whole = self.model_dump()
        given = [p.model_dump(exclude_none=True, exclude={"weight"}) for p in self.source]
        weights = [p.weight for p in self.source]
        return [(Data(**whole | own), w) for own, w in zip(given, weights, strict=True)]

    def masks(self, stage: str) -> bool:
        """Whether attention is blocked between the documents of a sequence."""
        wanted = stage == "sft" if self.mask_documents is None else self.mask_documents
        return self.packing and wanted


class Profile(Section):
    """A window of steps that torch.profiler watches; the trace is written to `profile/rank<r>.json`."""

    start: int = Field(ge=1, le=MOST_STEPS)
    """First step."""
    steps: int = Field(default=2, ge=1, le=MOST_STEPS)
    """Steps."""
    ranks: Literal["first", "all"] = "first"
    """Whose trace is written: rank 0's, or every rank's."""


class Training(Section):
    """The optimisation."""

    steps: int = Field(default=100, ge=1, le=MOST_STEPS)
    """Optimizer steps in all, resumed ones included. More than the data has are further epochs."""
    epochs: float | None = Field(default=None, gt=0, le=MOST_STEPS)
    """Times that the data is read, instead of `steps`, which are derived. None: as many as the steps are."""
    seed: int = 0
    """Seed of the weights, the data order and every random number of a step."""
    dtype: Annotated[Dtype, BeforeValidator(canonical_dtype)] = "bfloat16"
    """Compute format. bfloat16 and float16 keep float32 parameters and reductions, float16 scales the loss; float64 is
    for parity runs."""
    deterministic: bool = False
    """Only deterministic kernels."""
    tokens_per_step: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    """Tokens of one optimizer step over all ranks. None: microbatch x accumulation_steps x data ranks x seq_len."""
    microbatch: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Sequences per microbatch on one data-parallel rank. None: derived."""
    accumulation_steps: int | None = Field(default=None, ge=1, le=MOST_SEQUENCES)
    """Microbatches per optimizer step. None: derived."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    lr_schedule: ScheduleName = "cosine"
    """Shape after warm-up: cosine, warm-up-stable-decay, linear or constant; or, by transformers' name, one that has
    the values of transformers at every step."""
    lr_schedule_args: Annotated[dict[str, Any], BeforeValidator(arguments)] = {}
    """Arguments of a schedule of transformers, by the names of its `lr_scheduler_kwargs`."""
    warmup_steps: int = Field(default=10, ge=0, le=MOST_STEPS)
    """Steps of linear warm-up."""
    warmup_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of the steps that warm up, instead of `warmup_steps`, rounded up. None: as `warmup_steps` says."""
    decay_steps: int | None = Field(default=None, ge=0, le=MOST_STEPS)
    """Steps of the final decay of `wsd`. None: a tenth of the run."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate that the decay ends at, one step after the last, over the peak one."""
    optimizer: Annotated[str, BeforeValidator(canonical_optimizer)] = "adamw"
    """adamw, adam, sgd, adafactor, muon (linear weights; AdamW for the rest), another one of torch, torchao or
    bitsandbytes by the name that transformers gives it, or the dotted path of a class."""
    optimizer_args: Annotated[dict[str, Any], BeforeValidator(arguments)] = {}
    """More arguments of the optimizer, by the names of its class."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decay of all parameters but norms, biases, vectors and those of state-space layers."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Moments of adamw and adam."""
    eps: float = Field(default=1e-8, gt=0)
    """Epsilon of adamw and adam."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm above which gradients are scaled down. None: never."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is NaN or infinite ends the run (stop), or leaves the step out (skip); 20 steps in a row
    end it in any case."""
    skip_grad_norm: float | None = Field(default=None, gt=0)
    """Global gradient norm above which a step is left out, as a spike. None: never."""
    freeze: tuple[str, ...] = ()
    """Globs over names of parameters that stay as they are, without gradient and state (`model.embed_tokens.*`)."""
    neftune_noise_alpha: float | None = Field(default=None, gt=0)
    """Uniform noise on embeddings while training, at most so much over the root of tokens x features. None: none."""
    disable_dropout: bool | None = None
    """Train without dropout, `lora.lora_dropout` included. None: yes in every stage but `pt` and `sft`."""
    recompute: Literal["none", "full"] = "none"
    """Activations redone in backward: none, or all of each decoder layer."""
    recompute_layers: int | None = Field(default=None, ge=1, le=MOST_LAYERS)
    """Layers of every rank that `recompute` applies to, the first of its stages. None: all."""
    compile: bool = False
    """Compile each decoder layer with torch.compile."""
    eval_every: int = Field(default=0, ge=0)
    """Steps between evaluations on held-out text; 0: only before the first and after the last step."""
    early_stopping_patience: int | None = Field(default=None, ge=1)
    """Evaluations in a row without a better held-out loss that end the run, by the rule of transformers. None: none."""
    early_stopping_threshold: float = Field(default=0.0, ge=0)
    """By how much a held-out loss has to be below the least one before to be better."""
    log_every: int = Field(default=1, ge=1)
    """Steps between printed lines; metrics.jsonl has every step."""
    eval_tokens: int = Field(default=65536, ge=1)
    """Held-out tokens per evaluation."""
    report_to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ("tensorboard",)
    """Trackers that draw the curves of metrics.jsonl too; packages and services are theirs."""
    callbacks: tuple[str, ...] = ()
    """Dotted paths of subclasses of `hyper_parallel.trainer.Callback`."""
    profile: Profile | None = None
    """Steps to profile. None: none."""
    timeout_s: float = Field(default=600.0, gt=0, le=MOST_SECONDS)
    """Seconds that a rank may stay in a phase of a step, or stopped by a signal in any; then its name ends the run."""
    first_step_timeout_s: float = Field(default=1800.0, gt=0, le=MOST_SECONDS)
    """The same in the first step of a process and outside of steps: start, evaluation, checkpoint, export."""
    max_restarts: int = Field(default=0, ge=0)
    """Times that lost ranks are started again from the newest checkpoint. torchrun has its own `--max-restarts`."""
    elastic: bool = False
    """Plan anew on fewer ranks where they are lost again before a restart has saved anything, and under torchrun on
    as many as it has started. Needs `tokens_per_step`, which stays."""
    check_ranks_every: int = Field(default=0, ge=0)
    """Steps between comparisons of all data-parallel ranks on the same microbatches, bit for bit, which cost a step;
    0: never. Needs `deterministic`."""
    debug_collectives: bool = False
    """Compare the operation, shape and dtype of every collective of all ranks before it runs; slow."""


class Parallel(Section):
    """Degrees of the mesh axes, outer to inner. `parallel: auto` lets the planner choose all of them."""

    KEY_ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({"tp": "tp_x"})

    auto: bool = False
    """Let the planner choose the degrees that are not given."""
    pp: int = Field(default=1, ge=1, le=MOST_STAGES)
    """Pipeline stages."""
    dp_replicate: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Data-parallel replicas with whole parameters (the outer axis of HSDP)."""
    dp_shard: int = Field(default=1, ge=1, le=MOST_RANKS)
    """FSDP ranks."""
    cp: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Context-parallel ranks."""
    tp_x: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel ranks on x; `tp` is an alias. Sequence parallelism comes with it."""
    tp_y: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Tensor-parallel ranks on y, the second direction of 2-D tensor parallelism."""
    ep: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Expert-parallel ranks, folded over dp_shard x cp x tp; does not multiply the number of ranks."""
    attention_shape: Literal["1d", "2d", "weight"] = "2d"
    """Attention on two tensor-parallel axes: as one axis (1d), activations moved on y (2d), or weights (weight)."""
    mlp_shape: Literal["1d", "2d", "weight"] = "2d"
    """The same for the MLP."""
    attention_scatter: Literal["head", "token"] = "head"
    """2-D attention exchanges heads (no traffic along y), or tokens (y joins context parallelism)."""
    gathered_inputs: Literal["keep", "re-gather"] = "keep"
    """Inputs gathered for a matmul are kept for backward, or gathered again there."""
    cp_kind: Literal["ring", "ulysses", "hybrid", "all_gather"] = "ring"
    """Attention over cp ranks: zigzag ring, Ulysses, both, or all keys and values gathered."""
    cp_ulysses: int = Field(default=1, ge=1, le=MOST_RANKS)
    """Ulysses ranks inside cp for the hybrid."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"] = "1f1b"
    """Order of pipeline actions."""
    schedule_file: str = ""
    """CSV file with the actions of every pipeline rank, as `plan --schedule-csv` writes it. Empty: generated."""
    virtual_stages: int = Field(default=1, ge=1, le=MOST_STAGES)
    """Pipeline stages per rank: 2 or more for interleaved, 2 for zbv and dualpipev."""
    stage_layers: tuple[Annotated[int, Field(ge=0, le=MOST_LAYERS)], ...] = Field(
        default=(), max_length=MOST_STAGES
    )
    """Decoder layers of each (virtual) stage. Empty: cut by cost."""
    reshard_after_forward: bool = True
    """Free gathered parameters between forward and backward (ZeRO-3); false keeps them (ZeRO-2)."""
    zero: Literal[1] | None = None
    """1: shard only the optimizer states (ZeRO-1): parameters are gathered and gradients reduced once per step, not
    per microbatch. None: as `reshard_after_forward` says."""
    rules: dict[str, str] = {}
    """Overrides of the model's own sharding: glob over module names -> colwise, rowwise, vocab or replicate."""
    world_size: int | None = Field(default=None, ge=1, le=MOST_RANKS)
    """Ranks for `auto`. None: every accelerator, or 4 ranks on a machine without one."""

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, data: object) -> object:
        if data == "auto":
            return {"auto": True}
        if isinstance(data, dict) and "tp" in data:
            data = dict(data)
            if "tp_x" in data and data["tp_x"] != data["tp"]:
                raise ValueError(
                    f"tp={data['tp']} and tp_x={data['tp_x']} are two names of one degree"
                )
            data["tp_x"] = data.pop("tp")
        return data


class Moe(Section):
    """Routing of mixture-of-experts models; a model that has nothing for a choice refuses it."""

    aux_loss_coef: float | None = Field(default=None, ge=0)
    """Weight of the load-balancing loss. None: the weight with which the model itself adds it, if it does."""
    bias_update_rate: float = Field(default=0.0, ge=0)
    """Step of the router biases towards equal load after each optimizer step (DeepSeek-V3: 0.001); 0: fixed."""
    capacity_factor: float | None = Field(default=None, gt=0)
    """An expert takes at most this multiple of its even share of a rank's tokens; the rest is dropped. None: all."""


class Checkpoint(Section):
    """When the state is saved."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: after the last step, and as `every_minutes` says."""
    every_minutes: float = Field(default=30.0, ge=0, le=MOST_SECONDS)
    """Minutes since the last checkpoint after which one is saved, whatever `every` is. 0: never."""
    snapshot_every: int = Field(default=0, ge=0)
    """Steps between snapshots in memory (/dev/shm), which lost ranks go on from (`training.max_restarts`); 0: none."""
    keep: int = Field(default=2, ge=1)
    """Newest intact checkpoints kept."""
    keep_best: bool | Literal["loss"] = False
    """Keep the checkpoint of the least held-out loss too, of those saved right after an evaluation."""
    on_error: Literal["stop", "continue"] = "stop"
    """A save that the disk refuses ends the run, or is logged and left out; the last one ends it in any case."""
    asynchronous: bool = True
    """Write in the background while training goes on."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Continue from the newest intact checkpoint in `output_dir`: when there is one, never, or fail without one."""
    from_dir: str | None = None
    """Start from the checkpoints of another run directory; a newer one in `output_dir` is continued instead."""
    export: bool = True
    """Write a Hugging Face directory after the last step."""

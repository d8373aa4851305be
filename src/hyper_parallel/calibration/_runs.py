"""Training runs as rows of a CSV: read, completed with stated assumptions, and turned into what the formulas need."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from hyper_parallel.calibration._cells import (
    MEASURED,
    RowError,
    matmul_format,
    measured,
    recomputation,
    stated,
    whole_numbers,
)
from hyper_parallel.model import (
    AttentionSpec,
    Block,
    MlpSpec,
    ModelSpec,
    ParamSpec,
    find_preset,
    load_model,
)

SHAPE: Final = ("layers", "hidden", "heads")
"""Columns of a model's shape that cannot be left out, unless a preset has the model's name."""
REQUIRED: Final = ("seq", "device", "n_dev")
"""Columns without which a row cannot be predicted."""
_TOO_MANY_SEQUENCES: Final = 100_000
"""From this number on `gbs` counts tokens: no run has so many sequences in a step."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """One row of a CSV with every gap filled.

    Attributes:
        row: The row as it was read.
        model: The model.
        seq_len: Tokens per sequence.
        devices: Devices.
        degrees: tp, cp, pp, vpp, ep, etp, dp.
        zero: ZeRO stage.
        microbatch: Sequences per microbatch and data-parallel rank.
        accumulation: Microbatches per step.
        sequences: Sequences per step.
        matmul_dtype: Format of matmul inputs.
        recompute: none, selective, full; None: the source does not say.
        sequence_parallel: False where the source says that the sequence is not sharded between blocks.
        assumptions: Sentences about gaps that were filled.
    """

    row: Mapping[str, str]
    model: ModelSpec
    seq_len: int
    devices: int
    degrees: Mapping[str, int]
    zero: int
    microbatch: int
    accumulation: int
    sequences: int
    matmul_dtype: str
    recompute: str | None
    sequence_parallel: bool
    assumptions: tuple[str, ...] = field(default=())

    @property
    def step_s(self) -> float | None:
        """Measured seconds per step, from either measured column."""
        step = measured(self.row, "step_s")
        if step:
            return step
        rate = measured(self.row, "tok_s_dev")
        return self.sequences * self.seq_len / rate / self.devices if rate else None

    @property
    def memory_gib(self) -> float | None:
        """Measured peak memory."""
        return measured(self.row, "mem_gib")

    @property
    def group(self) -> str:
        """Rows of one source, model, device and precision; they are near-duplicates."""
        keys = ("source", "model", "device", "precision")
        return self.row.get("group") or "|".join(self.row.get(k, "") for k in keys)


def read_run(row: Mapping[str, str]) -> PublishedRun:
    """A row with its gaps filled.

    Raises:
        RowError: When a needed number is missing, no number, or the degrees do not fit the devices.
    """
    told: list[str] = []
    given = whole_numbers(row)
    told += [
        f"{name}: `{row[name]}` is no positive number, not used"
        for name in MEASURED
        if stated(row, name) and measured(row, name) is None
    ]
    preset = _preset(row, given, told)
    needed = REQUIRED if preset else (*SHAPE, *REQUIRED)
    lacking = [f"`{n}`" for n in needed if not (row.get(n) if n == "device" else given.get(n))]
    if lacking:
        raise RowError(f"what is missing: {', '.join(lacking)}")

    def fill(name: str, default: int, why: str) -> int:
        if name not in given or (given[name] == 0 and default and name != "zero"):
            told.append(f"{name}={default}: {why}")
            return default
        return given[name]

    degrees = _degrees(given, told)
    if degrees["ep"] > 1 and not (preset.num_experts if preset else given.get("experts")):
        told.append(f"ep=1: the row says {degrees['ep']}, but the model has no experts")
        degrees["ep"] = 1
    if degrees["ep"] > 1:
        degrees["etp"] = fill("etp", 1, "not stated, an expert is not cut")
        block = degrees["tp"] * degrees["cp"] * degrees["dp"]
        if block % (degrees["ep"] * degrees["etp"]):
            raise RowError(
                f"ep*etp = {degrees['ep'] * degrees['etp']} does not divide tp*cp*dp = {block}"
            )
    else:
        degrees["etp"] = degrees["tp"]
    microbatch = fill("mbs", 1, "not stated")
    sequences = fill("gbs", degrees["dp"] * microbatch, "not stated, one microbatch per rank")
    seq_len = given["seq"]
    if sequences >= _TOO_MANY_SEQUENCES and sequences % seq_len == 0:
        told.append(f"gbs={sequences // seq_len}: {sequences} are taken to be tokens")
        sequences //= seq_len
    accumulation = -(-sequences // (degrees["dp"] * microbatch))
    if sequences % (degrees["dp"] * microbatch):
        told.append(f"{accumulation} microbatches: gbs does not divide by dp*mbs, rounded up")
    sharded = any(s in _stack_text(row) for s in ("torchtitan", "fsdp"))
    zero = fill("zero", 3 if sharded else 1, "not stated, usual for the stack")
    precision = matmul_format(row, told)
    recompute = recomputation(row, told)
    plain = "no sequence parallel" in row.get("notes", "").lower()
    model = preset or _model(row, given, told)
    _check(model, given, degrees, seq_len)
    return PublishedRun(
        row, model, seq_len, given["n_dev"], degrees, zero, microbatch, accumulation, sequences, precision, recompute,
        not plain, tuple(told),
    )  # fmt: skip


def _preset(row: Mapping[str, str], given: Mapping[str, int], told: list[str]) -> ModelSpec | None:
    """The shipped model a row names when it gives no shape of its own."""
    if any(given.get(name) for name in SHAPE):
        return None
    name = row.get("model", "")
    preset = find_preset(name) or find_preset(re.sub(r"(?<=[a-zA-Z])(?=\d)", "-", name, count=1))
    if preset is None:
        return None
    told.append(f"shape of the model: {preset}, by the model's name")
    return load_model(preset)


def _degrees(given: Mapping[str, int], told: list[str]) -> dict[str, int]:
    degrees = {k: max(1, given.get(k, 1)) for k in ("tp", "cp", "pp", "vpp", "ep")}
    devices = given["n_dev"]
    inner = degrees["tp"] * degrees["cp"] * degrees["pp"]
    if devices % inner:
        raise RowError(f"tp*cp*pp = {inner} does not divide n_dev = {devices}")
    degrees["dp"] = devices // inner
    if given.get("dp", degrees["dp"]) != degrees["dp"]:
        told.append(f"dp={degrees['dp']}: n_dev/(tp*cp*pp), the row says {given['dp']}")
    if not given.get("dp"):
        told.append(f"dp={degrees['dp']}: derived, n_dev/(tp*cp*pp)")
    if degrees["vpp"] > 1 and degrees["pp"] == 1:
        told.append(f"vpp=1: the row says {degrees['vpp']}, but there is one stage")
        degrees["vpp"] = 1
    return degrees


def _check(
    model: ModelSpec, given: Mapping[str, int], degrees: Mapping[str, int], seq_len: int
) -> None:
    """Refuse what no program can run."""
    heads = max((b.attention.num_heads for b in model.blocks if b.attention), default=1)
    for axis, most, what in (
        ("pp", model.num_layers, "layers"),
        ("tp", heads, "heads"),
        ("cp", seq_len, "tokens of a sequence"),
    ):
        if degrees[axis] > most:
            raise RowError(f"{axis} = {degrees[axis]} is more than the {most} {what}")
    if degrees["ep"] > max(1, model.num_experts):
        raise RowError(f"ep = {degrees['ep']} is more than the {model.num_experts} experts")
    if given.get("topk", 0) > model.num_experts > 0:
        raise RowError(f"topk = {given['topk']} is more than the {model.num_experts} experts")


def _stack_text(row: Mapping[str, str]) -> str:
    return f"{row.get('stack', '')} {row.get('source', '')}".lower()


def _model(row: Mapping[str, str], given: Mapping[str, int], told: list[str]) -> ModelSpec:
    """The model of a row: its shapes, with the kind of attention that its name implies."""
    name = row.get("model", "") or "model"
    hidden, heads = given["hidden"], given["heads"]
    kv_heads = given.get("kv_heads") or heads
    width = given.get("head_dim") or hidden // heads
    if not width or kv_heads > heads:
        wrong = f"hidden = {hidden}" if not width else f"kv_heads = {kv_heads}"
        raise RowError(f"{wrong} does not fit heads = {heads}")
    gated = bool(given.get("gated", 1))
    experts = given.get("experts", 0)
    ffn = given.get("ffn") or (given.get("moe_ffn", 0) if experts else 4 * hidden)
    if not ffn:
        raise RowError("what is missing: `moe_ffn`, the width of an expert")
    vocab = given.get("vocab") or 128000
    for key, value in (("kv_heads", kv_heads), ("head_dim", width), ("ffn", ffn), ("vocab", vocab)):
        if not given.get(key):
            told.append(f"{key}={value}: not stated")
    dense_layers = (
        min(given.get("dense_layers", 0), given["layers"]) if experts else given["layers"]
    )
    tied = not gated and not experts
    billions = re.search(r"(\d+(?:\.\d+)?)B\b", name)
    if billions and not experts:
        # Which of both counts the name means, where it is exact enough to tell.
        wide = (3 if gated else 2) * ffn
        total = given["layers"] * hidden * (2 * heads * width + 2 * kv_heads * width + wide)
        off = [abs((total + n * vocab * hidden) / 1e9 / float(billions[1]) - 1.0) for n in (1, 2)]
        if not tied and off[0] < 0.01 and off[1] > 0.03:
            tied = True
            told.append("embedding and head are tied: by the parameters in the model's name")

    attention, projections = _attention(name, hidden, heads, kv_heads, width, told)
    vectors = ParamSpec("model.layers.*.norms", (2 * hidden,), ("embed",))
    blocks = [
        Block("embedding", (), (ParamSpec("model.embed_tokens.weight", (vocab, hidden), ("vocab", "embed")),))
    ]  # fmt: skip

    def mlp(prefix: str, size: int) -> tuple[ParamSpec, ...]:
        names = ("gate_proj", "up_proj") if gated else ("up_proj",)
        up = tuple(
            ParamSpec(f"{prefix}.{n}.weight", (size, hidden), ("mlp", "embed")) for n in names
        )
        return (*up, ParamSpec(f"{prefix}.down_proj.weight", (hidden, size), ("embed", "mlp")))

    windows = _windows(name, attention, told)
    if dense_layers:
        params = (*projections, *mlp("model.layers.*.mlp", ffn), vectors)
        blocks += _alternate("decoder", 0, dense_layers, params, windows, MlpSpec(ffn, gated))
    if dense_layers < given["layers"]:
        size = given.get("moe_ffn") or ffn
        shared = given.get("shared_experts", 0) * size
        topk = given.get("topk") or min(2, experts)
        for key, value in (("topk", topk), ("moe_ffn", size)):
            if not given.get(key):
                told.append(f"{key}={value}: not stated")
        both = 2 if gated else 1
        params = (
            *projections,
            vectors,
            ParamSpec("model.layers.*.mlp.gate.weight", (experts, hidden), ("router", "embed")),
            ParamSpec("model.layers.*.mlp.experts.gate_up_proj", (experts, both * size, hidden),
                      ("expert", "gate_up", "embed")),
            ParamSpec("model.layers.*.mlp.experts.down_proj", (experts, hidden, size), ("expert", "embed", "mlp")),
            *(mlp("model.layers.*.mlp.shared_experts", shared) if shared else ()),
        )  # fmt: skip
        spec = MlpSpec(size, gated, experts, topk, shared)
        blocks += _alternate("moe_decoder", dense_layers, given["layers"], params, windows, spec)
    head = ParamSpec(
        "lm_head.weight",
        (vocab, hidden),
        ("vocab", "embed"),
        tied_to="model.embed_tokens.weight" if tied else None,
    )
    blocks.append(Block("head", (), (head,)))
    return ModelSpec(name, "run", "bfloat16", hidden, given["layers"], vocab, tied, tuple(blocks))


def _alternate(
    name: str,
    first: int,
    end: int,
    params: tuple[ParamSpec, ...],
    attentions: tuple[AttentionSpec, ...],
    mlp: MlpSpec,
) -> list[Block]:
    """Blocks of layers whose attention alternates."""
    found = []
    for index, attention in enumerate(attentions):
        layers = tuple(range(first + index, end, len(attentions)))
        if layers:
            found.append(Block(name, layers, params, attention, mlp))
    return found


def _windows(name: str, attention: AttentionSpec, told: list[str]) -> tuple[AttentionSpec, ...]:
    if re.search(r"gpt[-_ ]?oss", name.lower()):
        told.append("every other layer sees 128 tokens: by the model's name")
        slide = AttentionSpec(
            "sliding", attention.num_heads, attention.num_kv_heads, attention.qk_head_dim,
            attention.v_head_dim, window=128,
        )  # fmt: skip
        return slide, attention
    return (attention,)


def _attention(
    name: str, hidden: int, heads: int, kv_heads: int, width: int, told: list[str]
) -> tuple[AttentionSpec, tuple[ParamSpec, ...]]:
    def linear(which: str, outputs: int, inputs: int, *dims: str) -> ParamSpec:
        return ParamSpec(f"model.layers.*.self_attn.{which}.weight", (outputs, inputs), dims)

    if re.search(r"deepseek[-_ ]?(v2|v3|r1)|kimi[-_ ]?k2|moonlight", name.lower()):
        told.append("latent attention (MLA, 512 + 64 wide): by the model's name")
        nope, rope, latent, value = 128, 64, 512, 128
        queries = heads * (nope + rope)
        query = (
            (linear("q_a_proj", 1536, hidden, "q_lora", "embed"),
             linear("q_b_proj", queries, 1536, "heads", "q_lora"))
            if hidden >= 5120 else (linear("q_proj", queries, hidden, "heads", "embed"),)
        )  # fmt: skip
        params = (
            *query,
            linear("kv_a_proj_with_mqa", latent + rope, hidden, "kv_latent", "embed"),
            linear("kv_b_proj", heads * (nope + value), latent, "heads", "kv_lora"),
            linear("o_proj", hidden, heads * value, "embed", "heads"),
        )
        return AttentionSpec("mla", heads, heads, nope + rope, value), params
    params = (
        linear("q_proj", heads * width, hidden, "heads", "embed"),
        linear("k_proj", kv_heads * width, hidden, "kv_heads", "embed"),
        linear("v_proj", kv_heads * width, hidden, "kv_heads", "embed"),
        linear("o_proj", hidden, heads * width, "embed", "heads"),
    )
    return AttentionSpec("full", heads, kv_heads, width, width), params

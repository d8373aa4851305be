"""Published training runs, one per row of a CSV: inputs of the cost formulas, with assumptions for missing values.

Functions that complete a row append a sentence about each assumption to the argument `notes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hyper_parallel.calibration.csv_rows import MEASURED, REQUIRED, SHAPE, RowError, RunRow, stated
from hyper_parallel.model import Block, ModelSpec, ParamSpec, find_preset, load_model, spec_from_config
from hyper_parallel.topology import Quantity, Supernode, load_topology, preset_names
from hyper_parallel.units import TFLOP, GiB

_TOO_MANY_SEQUENCES: Final = 100_000
"""A `gbs` of at least this value that is a multiple of `seq` is assumed to count tokens, not sequences."""

_PRECISIONS: Final = (
    (r"fp4", "nvfp4"), (r"mx-?fp8|fp8[-_ ]?mx", "mxfp8"), (r"fp8|float8|e4m3", "float8_e4m3fn"),
    (r"bf16|bfloat16", "bfloat16"), (r"fp16|float16|half", "float16"), (r"fp32|float32|tf32", "float32"),
)  # fmt: skip
"""(pattern for column `precision`, dtype of matmul inputs); the first match wins, so `bf16 + fp8` is 8-bit."""

_RECOMPUTATION: Final = (
    ("selective", "selective"), ("full", "full"), (r"^(none|no|off|false|0)\b", "none"),
)  # fmt: skip

_DEVICES: Final = (
    (r"gb300", "gb300-nvl72"), (r"gb200", "gb200-nvl72"), (r"b300", "dgx-b300"), (r"b200", "dgx-b200"),
    (r"h200", "dgx-h200"), (r"h800", "dgx-h800"), (r"h100.*(96|hbm2e)", "h100-96gb"), (r"h100", "dgx-h100"),
    (r"a100", "dgx-a100"), (r"910c|a3\b|cloudmatrix", "cloudmatrix384"), (r"910b|a2\b", "atlas-900-a2"),
    (r"950", "atlas-950"), (r"v5p", "tpu-v5p"),
)  # fmt: skip
"""(pattern for device names, topology preset); the first match wins."""
_NAMED: Final = "A100, H100, H200, H800, B200, B300, GB200, GB300, 910B, 910C, 950, TPU v5p"
"""Known device names, for an error message."""

_PEAK_RATIO: Final = {"float8_e4m3fn": 2.0, "mxfp8": 2.0, "nvfp4": 4.0, "float32": 0.5}
"""Dense peak of each dtype relative to bfloat16, for topologies without an entry for the dtype."""
_FP4_RATIO: Final = {"gb300-nvl72": 6.0, "dgx-b300": 6.0}
"""Ratio of the dense fp4 peak to bfloat16, by topology: the published peaks are 14.7 and 13.5 PFLOP/s."""

_STACKS: Final = (
    (r"nanotron", "nanotron"), (r"torchtitan.*\beager\b", "torchtitan-eager"), (r"torchtitan", "torchtitan"),
    (r"megatron-bridge", "megatron-bridge"), (r"nemo", "nemo"), (r"modellink|mindspeed|mindformers", "mindspeed"),
    (r"llm-foundry|composer|mosaic|fsdp|deepspeed zero", "torch-fsdp"), (r"maxtext|jax|pax", "jax"),
)  # fmt: skip
"""(pattern for the stack of a run, stack card); the first match wins."""
_LAST_UNFUSED: Final = 2022
"""Runs of other stacks from sources up to this year are assumed to have no fused attention."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """Training run in one row of a CSV, with missing values filled by assumptions."""

    row: RunRow  # the row as read
    model: ModelSpec
    supernode: Supernode  # topology of the device, else of the nearest peak; with the peak that the row states
    stack: str  # name of the stack card
    known_stack: bool  # whether the row names a known stack, or a year up to `_LAST_UNFUSED`; else `stack` is a guess
    seq_len: int  # tokens per sequence
    devices: int
    degrees: Mapping[str, int]  # tp, cp, pp, vpp, ep, etp, dp
    zero: int  # ZeRO stage
    microbatch: int  # sequences per microbatch and data-parallel rank
    accumulation: int  # microbatches per step
    sequences: int  # sequences per step
    matmul_dtype: str  # format of matmul inputs
    recompute: str | None  # none, selective, full; None: the source does not say
    assumptions: tuple[str, ...] = field(default=())  # sentences about the assumed values

    @property
    def kind(self) -> str:
        """Kind of model: `dense` or `moe`."""
        return "moe" if self.model.num_experts else "dense"

    @property
    def step_s(self) -> float | None:
        """Measured seconds per step, from column `step_s` or `tok_s_dev`; None without either."""
        if self.row.step_s:
            return self.row.step_s
        rate = self.row.tok_s_dev
        return self.sequences * self.seq_len / rate / self.devices if rate else None

    @property
    def group(self) -> str:
        """Key that near-duplicate runs share: column `group`, else source, model, device and precision."""
        row = self.row
        return row.group or "|".join((row.source, row.model, row.device, row.precision))

    @property
    def release_month(self) -> float | None:
        """Months from January 2020 to the release in column `stack`, such as 26.04; None without a release."""
        release = re.search(r"\b(2\d)\.(0[1-9]|1[0-2])\b", self.row.stack)
        return (int(release[1]) - 20) * 12.0 + int(release[2]) - 1 if release else None

    def priced_as_unknown(self) -> PublishedRun:
        """Return the run with the stack card for unknown stacks, which depends on the ZeRO stage."""
        return replace(self, stack=_stand_in(self.zero), known_stack=False)


def read_run(cells: Mapping[str, str]) -> PublishedRun:
    """Return the run of one row, a dict from column to text, with missing values filled by assumptions.

    Raises:
        RowError: When a required value is missing, a cell is invalid, the run is impossible, or the device is unknown
            and `peak_tflops` is not stated.
        ModelUnreadable: HP305 when no model has this shape.
    """
    row = RunRow.of(cells)
    notes = [
        f"{name}: `{cells[name]}` is no positive number, not used"
        for name in MEASURED
        if stated(cells.get(name)) and getattr(row, name) is None
    ]
    preset = _preset(row, notes)
    needed = REQUIRED if preset else (*SHAPE, *REQUIRED)
    if lacking := [f"`{name}`" for name in needed if not getattr(row, name)]:
        raise RowError(f"missing: {', '.join(lacking)}")
    assert row.seq, "it is required"
    assert row.n_dev, "it is required"

    def fill(name: str, default: int, why: str) -> int:
        value: int | None = getattr(row, name)
        if value is None or (value == 0 and default and name != "zero"):
            notes.append(f"{name}={default}: {why}")
            return default
        return value

    degrees = _degrees(row, notes)
    if degrees["ep"] > 1 and not (preset.num_experts if preset else row.experts):
        notes.append(f"ep=1: the row says {degrees['ep']}, but the model has no experts")
        degrees["ep"] = 1
    degrees["etp"] = degrees["tp"]
    if degrees["ep"] > 1:
        degrees["etp"] = fill("etp", 1, "not stated, an expert is not sharded")
        cut, ranks = degrees["ep"] * degrees["etp"], degrees["tp"] * degrees["cp"] * degrees["dp"]
        if ranks % cut:
            raise RowError(f"ep*etp = {cut} does not divide tp*cp*dp = {ranks}")
    microbatch = fill("mbs", 1, "not stated")
    sequences = fill("gbs", degrees["dp"] * microbatch, "not stated, one microbatch per rank")
    if sequences >= _TOO_MANY_SEQUENCES and sequences % row.seq == 0:
        notes.append(f"gbs={sequences // row.seq}: {sequences} are taken to be tokens")
        sequences //= row.seq
    accumulation = -(-sequences // (degrees["dp"] * microbatch))
    if sequences % (degrees["dp"] * microbatch):
        notes.append(f"{accumulation} microbatches: gbs does not divide by dp*mbs, rounded up")
    sharded = any(s in f"{row.stack} {row.source}".lower() for s in ("torchtitan", "fsdp"))
    zero = fill("zero", 3 if sharded else 1, "not stated, usual for the stack")
    precision = _matmul_format(row, notes)
    recompute = _recomputation(row, notes)
    model = preset or model_of(row, notes)
    _check(model, degrees, row.seq)
    supernode = _supernode(row, notes)
    stack, known = _stack_card(row, zero, notes)
    return PublishedRun(
        row, model, supernode, stack, known, row.seq, row.n_dev, degrees, zero, microbatch, accumulation, sequences,
        precision, recompute, tuple(notes),
    )  # fmt: skip


def _first(table: Sequence[tuple[str, str]], text: str) -> str | None:
    return next((meant for pattern, meant in table if re.search(pattern, text)), None)


def _preset(row: RunRow, notes: list[str]) -> ModelSpec | None:
    if any(getattr(row, name) for name in SHAPE):
        return None
    dashed = re.sub(r"(?<=[a-zA-Z])(?=\d)", "-", row.model, count=1)
    preset = find_preset(row.model) or find_preset(dashed)
    if preset is None:
        return None
    notes.append(f"shape of the model: {preset}, by the model's name")
    return load_model(preset)


def _degrees(row: RunRow, notes: list[str]) -> dict[str, int]:
    degrees = {name: max(1, getattr(row, name) or 1) for name in ("tp", "cp", "pp", "vpp", "ep")}
    inner = degrees["tp"] * degrees["cp"] * degrees["pp"]
    devices = row.n_dev or 0
    if devices % inner:
        raise RowError(f"tp*cp*pp = {inner} does not divide n_dev = {devices}")
    degrees["dp"] = dp = devices // inner
    if not row.dp:
        notes.append(f"dp={dp}: derived, n_dev/(tp*cp*pp)")
    elif row.dp != dp:
        notes.append(f"dp={dp}: n_dev/(tp*cp*pp), the row says {row.dp}")
    if degrees["vpp"] > 1 and degrees["pp"] == 1:
        notes.append(f"vpp=1: the row says {degrees['vpp']}, but there is one stage")
        degrees["vpp"] = 1
    return degrees


def _check(model: ModelSpec, degrees: Mapping[str, int], seq_len: int) -> None:
    heads = max((b.attention.num_heads for b in model.blocks if b.attention), default=1)
    for axis, limit, unit in (
        ("pp", model.num_layers, "layers"), ("tp", heads, "heads"), ("cp", seq_len, "tokens of a sequence"),
        ("ep", max(1, model.num_experts), "experts"),
    ):  # fmt: skip
        if degrees[axis] > limit:
            raise RowError(f"{axis} = {degrees[axis]} is more than the {limit} {unit}")


def _matmul_format(row: RunRow, notes: list[str]) -> str:
    text = row.precision.lower()
    if dtype := _first(_PRECISIONS, text):
        return dtype
    notes.append(f"precision=bf16: {f'`{text}` is not known' if text else 'not stated'}")
    return "bfloat16"


def _recomputation(row: RunRow, notes: list[str]) -> str | None:
    """Return `none`, `selective` or `full`; None when the row does not state it, or states another text."""
    text = row.recompute.lower().strip()
    sure = text.rstrip("?")
    if not stated(sure) and sure != "none":
        return None
    if value := _first(_RECOMPUTATION, sure):
        if text != sure:
            notes.append(f"recompute={value}: inferred by the source of the row")
        return value
    notes.append(f"recompute: `{sure}` is not known, taken as not stated")
    return None


def _supernode(row: RunRow, notes: list[str]) -> Supernode:
    """Return the topology of a run's device, else the topology with the nearest peak.

    A peak in the row replaces that of the topology.
    """
    text, peak = row.device.lower(), row.peak_tflops
    name = _first(_DEVICES, text)
    # Variants of a part are often named only in the notes.
    if name == "dgx-h100" and re.search(r"hbm2e|96 ?gb", f"{text} {row.notes.lower()}"):
        name = "h100-96gb"
    if name is None:
        if peak is None:
            raise RowError(f"device `{row.device}` is not known and `peak_tflops` is blank; known are {_NAMED}")
        presets = [load_topology(name) for name in preset_names() if name != "local-cpu"]
        near = [abs(math.log(s.peak_flops("bfloat16") / (peak * TFLOP))) for s in presets]
        name = presets[near.index(min(near))].name
        notes.append(f"device `{row.device}` is not known: links and memory of {name}")
    supernode = load_topology(name)
    memory = supernode.device.memory_bytes
    if name == "dgx-a100" and re.search(r"40 ?g", text):
        memory = Quantity(40.0 * GiB, "A100 40 GB", "general")
    peaks = dict(supernode.device.peak_flops)
    if peak and abs(peak * TFLOP / peaks["bfloat16"].value - 1.0) > 1e-3:
        peaks["bfloat16"] = Quantity(peak * TFLOP, "column peak_tflops", "stated")
        notes.append(f"peak {peak:g} TFLOP/s: column peak_tflops")
    base = peaks["bfloat16"]
    peaks.setdefault("float16", base)
    for dtype, ratio in _PEAK_RATIO.items():
        factor = _FP4_RATIO.get(name, ratio) if dtype == "nvfp4" else ratio
        peaks.setdefault(dtype, Quantity(base.value * factor, f"{factor:g} x bfloat16", "derived"))
    device = replace(supernode.device, peak_flops=peaks, memory_bytes=memory)
    return replace(supernode, device=device)


def _stack_card(row: RunRow, zero: int, notes: list[str]) -> tuple[str, bool]:
    text = f"{row.stack} {row.notes}".lower()
    if name := _first(_STACKS, text):
        old = re.search(r"20(1\d|2[0-4])[01]\d", row.source)
        return ("torchtitan-2024" if name == "torchtitan" and old else name), True
    years = re.findall(r"\b(20[12]\d)\b", f"{row.source} {row.stack}")
    if years and min(map(int, years)) <= _LAST_UNFUSED:
        notes.append(f"stack of {min(years)}: attention is not fused")
        return "megatron-2022", True
    if re.search(r"megatron|deepspeed|galvatron|colossal", text):
        return "megatron", True
    name = _stand_in(zero)
    notes.append(f"stack `{row.stack}` is not known: priced as {name}")
    return name, False


def _stand_in(zero: int) -> str:
    return "torch-fsdp" if zero == 3 else "megatron"


_LATENT: Final = re.compile(r"deepseek[-_ ]?(v2|v3|r1)|kimi[-_ ]?k2|moonlight")
"""Pattern for names of models with multi-head latent attention."""
_SINKS: Final = re.compile(r"gpt[-_ ]?oss")
"""Pattern for names of models with experts that are read as `gpt_oss`: sinks, biases, windows in every other layer."""
_QUERY_RANK_FROM: Final = 5120
"""Hidden size from which latent attention is assumed to compress queries too: as in DeepSeek-V2, not V2-Lite."""
_VOCABULARY: Final = 128_000
"""Default vocabulary size: that of Llama 3 without its special tokens."""


def model_of(row: RunRow, notes: list[str]) -> ModelSpec:
    """Return the model of a row that states layers, hidden size and heads.

    Raises:
        RowError: When the numbers contradict each other, or the row states experts but no width.
        ModelUnreadable: HP305 for numbers that the model family does not allow.
    """
    assert row.layers, "it is stated"
    assert row.hidden, "it is stated"
    assert row.heads, "it is stated"
    name, experts, gated = row.model or "model", row.experts or 0, row.gated != 0
    kv_heads = row.kv_heads or row.heads
    width = row.head_dim or row.hidden // row.heads
    if not width or row.heads % kv_heads:
        wrong = f"kv_heads = {kv_heads} must divide" if width else f"hidden = {row.hidden} is below"
        raise RowError(f"{wrong} heads = {row.heads}")
    if row.topk and row.topk > experts > 0:
        raise RowError(f"topk = {row.topk} is more than the {experts} experts")
    ffn = row.ffn or ((row.moe_ffn or 0) if experts else 4 * row.hidden)
    if not ffn:
        raise RowError("missing: `moe_ffn`, the width of an expert")
    vocabulary = row.vocab or _VOCABULARY
    values = {"kv_heads": kv_heads, "head_dim": width, "ffn": ffn, "vocab": vocabulary}
    if experts:
        values |= {"topk": row.topk or min(2, experts), "moe_ffn": row.moe_ffn or ffn}
    assumed = {key: value for key, value in values.items() if not getattr(row, key)}
    notes += [f"{key}={value}: not stated" for key, value in assumed.items()]
    tied = not gated and not experts
    if not tied and not experts and _named_as_tied(row, values):
        tied = True
        notes.append("embedding and head are tied: by the parameters in the model's name")
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": row.hidden, "intermediate_size": ffn, "num_hidden_layers": row.layers,
        "num_attention_heads": row.heads, "num_key_value_heads": kv_heads, "head_dim": width,
        "vocab_size": vocabulary, "tie_word_embeddings": tied,
    }  # fmt: skip
    dense = min(row.dense_layers or 0, row.layers) if experts else row.layers
    shared = (row.shared_experts or 0) if experts else 0
    if experts:
        config |= {
            "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": values["topk"],
            "moe_intermediate_size": values["moe_ffn"], "mlp_only_layers": list(range(dense)),
        }  # fmt: skip
    if _LATENT.search(name.lower()):
        notes.append("latent attention (MLA, 512 + 64 wide): by the model's name")
        config |= {
            "model_type": "deepseek_v3", "n_shared_experts": shared or None, "first_k_dense_replace": dense,
            "q_lora_rank": 1536 if row.hidden >= _QUERY_RANK_FROM else None,
        }  # fmt: skip
        shared = 0
    elif experts and _SINKS.search(name.lower()):
        notes.append("every other layer has a window of 128 tokens: by the model's name")
        config |= {"model_type": "gpt_oss", "intermediate_size": values.get("moe_ffn", ffn)}
    spec = spec_from_config(config, name=name)
    if gated and not shared:
        return spec
    blocks = tuple(_changed(b, row.hidden, gated, shared) for b in spec.blocks)
    return replace(spec, blocks=blocks)


def _changed(block: Block, hidden: int, gated: bool, shared: int) -> Block:
    """Return a block with an MLP without gate unless `gated`, and with `shared` shared experts if it has experts."""
    mlp, params = block.mlp, block.params
    if mlp is None:
        return block
    if not gated:
        params = tuple(
            replace(p, shape=(p.shape[0], p.shape[1] // 2, p.shape[2]))
            if p.name.endswith("experts.gate_up_proj")
            else p
            for p in params
            if not p.name.endswith("mlp.gate_proj.weight")
        )
    if shared and mlp.num_experts:
        width, prefix = shared * mlp.intermediate_size, "model.layers.*.mlp.shared_experts"
        mlp = replace(mlp, shared_intermediate_size=width)
        inputs = ("gate_proj", "up_proj") if gated else ("up_proj",)
        for name in inputs:
            params += (ParamSpec(f"{prefix}.{name}.weight", (width, hidden), ("mlp", "embed")),)
        params += (ParamSpec(f"{prefix}.down_proj.weight", (hidden, width), ("embed", "mlp")),)
    return replace(block, params=params, mlp=replace(mlp, gated=gated))


def _named_as_tied(row: RunRow, values: dict[str, int]) -> bool:
    """Return whether the parameter count in a dense model's name, such as `7B`, implies tied embeddings.

    It does if it equals the count with one vocabulary matrix within 1 %, and differs from that with two by over 3 %.
    """
    billions = re.search(r"(\d+(?:\.\d+)?)B\b", row.model)
    if not billions:
        return False
    layers, hidden, heads = row.layers or 0, row.hidden or 0, row.heads or 0
    attention = 2 * (heads + values["kv_heads"]) * values["head_dim"]
    layer, named = attention + 3 * values["ffn"], 1e9 * float(billions[1])
    with_one, with_two = (abs((layers * layer + n * values["vocab"]) * hidden / named - 1.0) for n in (1, 2))
    return with_one < 0.01 and with_two > 0.03

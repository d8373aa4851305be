"""Widths, counts and saved activations of a model for the cost formulas, averaged over its layers.

Letters: h hidden, a heads, k width of all key (or value) heads, f width of the feed-forward part, V vocabulary, L
layers, E experts, P tensor-parallel ranks. The feed-forward part is an MLP or routed experts. The formulas treat a
pipeline stage as a number of equal layers, so layers of different kinds (dense and mixture of experts, full and sliding
attention) are averaged.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hyper_parallel.ir import Rule
from hyper_parallel.model import AttentionSpec, Block, KeptActivations, ModelSpec, ParamSpec
from hyper_parallel.shard import replicated_matrices

_ROW = re.compile(r"(o_proj|c_proj|out_proj|down_proj|dense_4h_to_h|fc2|w2)\b")
"""Names of projections whose output has the residual width; the others read the residual stream or a latent."""
_LATENT_NORM = re.compile(r"(q|kv)_a_layernorm\.weight$")
"""Names of norms of the latents in multi-head latent attention (MLA)."""
_LATENT_VALUES = re.compile(r"\bkv_b_proj\.weight$")
"""Names of MLA projections whose output contains the values of all heads and parts of their keys."""

_NORM_BYTES = 8.0
"""Bytes per element of an unfused norm in bfloat16: its input in float32, the normalized input, and its output."""
_CLAMPED = {"gpt_oss": 3.0}
"""Extra values that an expert's activation saves, in expert widths, by model family: clamped, shifted, sigmoid."""
_MEASURED = 1024
"""Tokens of the longer sequence in a measurement of saved activations, which uses attention masks."""
_WIDE_COMBINE = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families with float32 router weights, so that outputs of experts are weighted and summed in float32."""


@dataclass(frozen=True, slots=True)
class LayerElements:
    """Numbers of parameters of one layer."""

    dense: float  # in matrices that tensor parallelism shards, without experts
    whole: float  # in matrices that tensor parallelism replicates
    vectors: float  # in norms and biases
    experts: float  # in routed experts


@dataclass(frozen=True, slots=True)
class Matmul:
    """Matmul of one or more projections that read the same input, such as gate and up."""

    part: str  # attention, mlp or expert
    inputs: int  # input width; for experts, of one expert
    outputs: int  # output width
    count: float  # matmuls of this kind per token in an average layer
    row: bool  # whether the output has the residual width (row-parallel)


@dataclass(frozen=True, slots=True)
class Uncut:
    """Sizes of the parts of a model that tensor parallelism replicates because no sharding rule covers them.

    All fields are 0 or False for models whose rules cover every module.
    """

    weights: float = 0.0  # matrix elements per layer, without experts and routers
    attention: float = 0.0  # fraction of the matrix elements of attention
    mlp: float = 0.0  # fraction of the matrix elements of the dense feed-forward part
    stream: float = 0.0  # 1 if every rank has the residual stream of all tokens between blocks
    vocabulary: bool = False  # whether embedding or head is replicated
    # matrix elements outside the decoder layers, without embedding and head: vision and audio encoders, projectors
    outside: float = 0.0

    @classmethod
    def of(cls, model: ModelSpec, decoders: _Decoders, names: frozenset[str], stream: bool) -> Uncut:
        """Return the sizes for replicated matrices of the given names; `stream`: whether the stream is replicated."""

        def elements(part: str, names: frozenset[str] | None = None) -> float:
            """Return the matrix elements of a part of an average layer, without routers; `names`: of these matrices."""
            return decoders.mean(
                lambda b: sum(
                    p.num_elements
                    for p in b.params
                    if _part(p) == part and not _is_router(p, b)
                    if names is None or p.name in names
                )
            )

        attention, mlp = elements("attention", names), elements("mlp", names)
        outside = [p for b in model.blocks if not b.layers for p in b.params if p.name in names]
        return cls(
            weights=attention + mlp,
            attention=attention / max(1.0, elements("attention")),
            mlp=mlp / max(1.0, elements("mlp")),
            stream=float(stream),
            vocabulary=any(p.shape[0] == model.vocab_size for p in outside),
            outside=math.fsum(p.num_elements for p in outside if p.shape[0] != model.vocab_size),
        )


@dataclass(frozen=True, slots=True)
class _Decoders:
    """Decoder layers of a model, and means over them."""

    blocks: tuple[Block, ...]
    layers: int
    visits_all: bool  # whether forward sends every token to every expert, with weight 0 for those not chosen

    @classmethod
    def of(cls, model: ModelSpec) -> _Decoders:
        blocks = tuple(b for b in model.blocks if b.layers)
        measured_rows = 0.0 if model.kept is None else model.kept.expert_rows
        visits_all = model.num_experts > 1 and measured_rows >= model.num_experts
        return cls(blocks, max(1, sum(b.count for b in blocks)), visits_all)

    @property
    def routed(self) -> list[Block]:
        return [b for b in self.blocks if b.mlp and b.mlp.num_experts]

    def mean(self, value: Callable[[Block], float]) -> float:
        return math.fsum(b.count * value(b) for b in self.blocks) / self.layers

    def weights(self, part: str) -> float:
        """Return the number of parameters of one part of an average layer; `part` is a result of `_part`."""
        return self.mean(lambda b: sum(p.num_elements for p in b.params if _part(p) == part))

    def visits(self, block: Block) -> int:
        """Return the number of routed experts that a token visits in a layer."""
        if block.mlp is None or not block.mlp.num_experts:
            return 0
        return block.mlp.num_experts if self.visits_all else block.mlp.experts_per_token

    def expert_saved_width(self, block: Block, hidden: int) -> int:
        """Return the elements per token of inputs, outputs and intermediate tensors of the routed experts of a layer.

        Intermediate tensors are gate, up and their product, or two tensors without a gate. A dense layer has 0.
        """
        mlp = block.mlp
        if mlp is None:
            return 0
        return self.visits(block) * ((3 if mlp.gated else 2) * mlp.intermediate_size + 2 * hidden)

    @property
    def active_expert_weights(self) -> float:
        """Matrix elements of the routed experts that one token visits in an average layer."""
        active = (
            p.num_elements * (b.count * self.visits(b)) / b.mlp.num_experts
            for b in self.routed
            for p in b.params
            if b.mlp and _part(p) == "expert"
        )
        return math.fsum(active) / self.layers


@dataclass(frozen=True, slots=True)
class ModelNumbers:
    """Sizes and counts of a model for the cost formulas; an average layer is the mean of the decoder layers."""

    hidden: int  # h
    layers: int  # L
    vocab: int  # V
    num_heads: int  # query heads; here and down to `v_width`: of the first layer with attention, 1 without attention
    num_kv_heads: int  # key and value heads
    q_width: int  # width of all query heads
    k_width: int  # width of all key heads
    v_width: int  # query heads times width of a value head: input width of the output projection
    # number of layers and attention of each kind of layer
    attentions: tuple[tuple[int, AttentionSpec], ...]
    matmuls: tuple[Matmul, ...]  # the matmuls of an average layer
    normed_width: float  # width of the normalized query and key heads of an average layer; 0 for most models
    head_norms: float  # number of norms of query and key heads in an average layer
    unfused_norms: float  # norms of hidden states in an average layer, without torch's fused LayerNorm
    # bytes per token that norms of hidden states save beyond `saved_elements`, divided by h
    norm_bytes: float
    # bytes that norms of query and key heads save per element of their input
    head_norm_bytes: float
    latent_width: float  # width of the MLA latents that an average layer normalizes
    # output width of MLA's `kv_b_proj` minus the width of the keys of all heads; 0 without MLA
    latent_rest: float
    sinks: float  # share of the layers whose attention has sinks
    # mean width of the dense feed-forward part (dense MLPs and shared experts) over all layers
    mlp_width: float
    # number of further tensors of expert width that an activation with clamps saves
    clamped_widths: float
    wide_combine: bool  # whether outputs of routed experts are summed in float32
    # elements per token that the dense feed-forward part saves for backward: `mlp_width` times 3 with a gate, else 2
    mlp_saved_width: float
    expert_width: int  # width of one routed expert; 0 for a dense model
    experts: int  # routed experts of a layer; 0 for a dense model
    experts_per_token: float  # routed experts a token visits, mean over all layers
    moe_share: float  # share of the layers that have routed experts
    expert_saved_width: float  # elements per token of the inputs, activations and outputs of routed experts
    measured: KeptActivations | None  # measured activations kept by forward; None: not measured
    # measured bytes per token that the experts of an average layer keep in bfloat16 if a token visits all; else 0
    every_expert_bytes: float
    # measured bytes per token that tensor parallelism replicates, without experts
    measured_whole: float
    uncut: Uncut  # parts that tensor parallelism keeps whole on every rank
    attention_weights: float  # matrix elements of attention per layer
    mlp_weights: float  # matrix elements of dense MLP, shared experts and router per layer
    expert_weights: float  # matrix elements of all routed experts per layer
    # matrix elements of the routed experts that one token visits, per layer
    active_expert_weights: float
    vector_weights: float  # elements of norms and biases per layer
    bias_width: float  # elements of biases added per token in an average layer
    embedding_weights: int  # elements of all blocks outside the layers except the head: embedding, final norm, encoders
    head_weights: int  # elements of the output projection as a matmul, V h, tied or not
    head_params: int  # elements the head stores: 0 when tied
    # the last two layers, which are gathered and reduced at the peak
    last_layers: tuple[LayerElements, ...]

    @classmethod
    def of(cls, model: ModelSpec) -> ModelNumbers:
        """Return the sizes of a model."""
        decoders = _Decoders.of(model)
        mean, routed = decoders.mean, decoders.routed
        first = next((b.attention for b in decoders.blocks if b.attention), None)
        first = first or AttentionSpec("full", 1, 1, 1, 1)
        names, stream = _replicated_matrices(model)
        uncut = Uncut.of(model, decoders, names, stream)
        outside = [b for b in model.blocks if not b.layers]
        head_params = sum(b.num_params for b in outside if b.name == "head")
        mlp = routed[0].mlp if routed else None
        # Gemma's norms multiply by their weight before rounding, so the normalized input stays in float32.
        norm_kept_bytes = 8.0 if "gemma" in model.family else 6.0
        return cls(
            hidden=model.hidden_size,
            layers=decoders.layers,
            vocab=model.vocab_size,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            q_width=first.num_heads * first.qk_head_dim,
            k_width=first.num_kv_heads * first.qk_head_dim,
            v_width=first.num_heads * first.v_head_dim,
            attentions=tuple((b.count, b.attention) for b in decoders.blocks if b.attention),
            matmuls=_matmuls(decoders),
            normed_width=mean(lambda b: sum(_head_norms(b))),
            head_norms=mean(lambda b: len(_head_norms(b))),
            unfused_norms=mean(lambda b: _norms(b, model.hidden_size)[0]),
            norm_bytes=mean(lambda b: _norm_bytes(b, model.hidden_size, norm_kept_bytes)),
            head_norm_bytes=norm_kept_bytes,
            latent_width=mean(_latent_width),
            latent_rest=mean(_latent_rest),
            sinks=mean(lambda b: any("sinks" in p.name for p in b.params)),
            mlp_width=mean(_dense_width),
            clamped_widths=_CLAMPED.get(model.family, 0.0),
            wide_combine=model.family in _WIDE_COMBINE,
            mlp_saved_width=mean(_dense_saved_width),
            expert_width=mlp.intermediate_size if mlp else 0,
            experts=mlp.num_experts if mlp else 0,
            experts_per_token=mean(decoders.visits),
            moe_share=sum(b.count for b in routed) / decoders.layers,
            expert_saved_width=mean(lambda b: decoders.expert_saved_width(b, model.hidden_size)),
            measured=model.kept,
            every_expert_bytes=_measured_experts(model) if decoders.visits_all else 0.0,
            measured_whole=_measured_whole(model, names, stream),
            uncut=uncut,
            attention_weights=decoders.weights("attention"),
            mlp_weights=decoders.weights("mlp"),
            expert_weights=decoders.weights("expert"),
            active_expert_weights=decoders.active_expert_weights,
            vector_weights=decoders.weights("vector"),
            bias_width=mean(_bias_width),
            embedding_weights=sum(b.num_params for b in outside) - head_params,
            head_weights=model.vocab_size * model.hidden_size,
            head_params=head_params,
            last_layers=_last_layers(decoders.blocks, names if uncut.weights else frozenset()),
        )

    def whole_bytes(self, uncut: Uncut, width: float, eager: float) -> float:
        """Return the bytes per token and layer of saved activations that tensor parallelism replicates.

        `width` is the number of bytes of an activation element; `eager` is 1 with unfused operators, else 0.
        """
        own = uncut.stream * 4.0 * self.hidden + uncut.attention * self.attention_width
        own += uncut.mlp * self.mlp_saved_width
        norms = uncut.stream * self.norm_bytes * self.hidden
        norms += uncut.attention * self.head_norm_bytes * self.normed_width
        copies = uncut.attention * (self.v_width + self.latent_rest)
        copies += uncut.mlp * self._gate_width + uncut.stream * self.expert_copies
        return own * width + eager * (norms + width * copies)

    @property
    def _gate_width(self) -> float:
        """Elements per token of the activated gate, which unfused operators save; 0 without a gate."""
        return max(0.0, self.mlp_saved_width - 2.0 * self.mlp_width)

    @property
    def expert_copies(self) -> float:
        """Elements per token that unfused routed experts save beyond their inputs and activations.

        These are outputs, activated gates and clamped values. If forward sends every token to every expert, the number
        is from a measurement, which is then independent of the routing.
        """
        if self.every_expert_bytes:
            return self.every_expert_bytes / 2.0 + self.experts_per_token * self.hidden - self.expert_saved_width
        wide = (1.0 + self.clamped_widths) * self.expert_width
        return self.experts_per_token * (wide + self.hidden)

    @property
    def saved_elements(self) -> float:
        """Elements per token that a layer saves for backward on all tensor-parallel ranks together, without experts.

        The elements are 4h (inputs of two norms and two column-parallel matmuls), queries, keys, values, the output of
        attention, and the feed-forward part. Their number is 6h + 2k + 3f if all query heads together have width h.

        Source: Korthikanti et al. 2022, section 4.1, with flash attention and a gated feed-forward part.
        """
        return 4.0 * self.hidden + self.attention_width + self.mlp_saved_width

    @property
    def attention_width(self) -> float:
        """Elements per token of queries, keys, values and the output of attention; values count as wide as keys."""
        return self.q_width + self.v_width + 2.0 * self.k_width

    def eager_bytes(self, width: float) -> float:
        """Return the bytes per token and layer that unfused operators save beyond `saved_elements`.

        Norms save `norm_bytes` and `head_norm_bytes`, attention a copy of its output in token order, a gated MLP its
        activated gate, and experts `expert_copies`. In MLA, values are a view of a larger storage, whose other elements
        are saved too. `width` is the number of bytes of an activation element.
        """
        norms = self.norm_bytes * self.hidden + self.head_norm_bytes * self.normed_width
        return norms + width * (self.v_width + self._gate_width + self.expert_copies + self.latent_rest)

    @property
    def routed_experts_per_token(self) -> float:
        """Routed experts that a token visits in a layer with experts; 0 for a dense model."""
        return self.experts_per_token / max(self.moe_share, 1e-9)

    @property
    def predicted_bytes(self) -> float:
        """Predicted bytes per token that an average layer saves in bfloat16 with unfused operators.

        Routed experts and attention scores are excluded. Repeated keys and values are those of `_MEASURED` tokens.
        """
        formula_bytes = 2.0 * self.saved_elements + self.eager_bytes(2.0) + self.latent_bytes(2.0)
        return formula_bytes - 2.0 * self.expert_copies + 2.0 * self.repeated_elements(_MEASURED)

    @property
    def measured_ratio(self) -> float:
        """Measured divided by predicted bytes of a layer's saved activations, without experts and attention scores.

        1 without a measurement; at least 1 for a model with routed experts.
        """
        if self.measured is None:
            return 1.0
        share = self.measured.layer[0] / self.predicted_bytes
        # Some routing activations are measured with the experts, so a ratio below 1 is raised to 1.
        return max(1.0, share) if self.experts else share

    @property
    def whole_share(self) -> float:
        """Replicated fraction of a layer's measured activations, without experts; 0 without a measurement."""
        if self.measured is None:
            return 0.0
        return min(1.0, self.measured_whole / max(1.0, self.measured.layer[0]))

    @property
    def fullest_bytes(self) -> float:
        """Measured bytes per token that the layer with most saved bytes adds to the mean; 0 without a measurement."""
        if self.measured is None or self.measured.fullest is None:
            return 0.0
        return max(0.0, self.measured.fullest - self.measured.layer[0])

    @property
    def last_bytes(self) -> float:
        """Measured bytes per token of the last layer minus those of an average layer; 0 without a measurement."""
        if self.measured is None or self.measured.last is None:
            return 0.0
        return self.measured.last - self.measured.layer[0]

    def unfused_scores(self, seq_len: int) -> float:
        """Return the bytes per token and layer of attention scores and tensors of the same shape, from a measurement.

        The bytes are proportional to `seq_len`, and 0 if the measurement shows no such growth. They are also 0 without
        a measurement, and for models with attention sinks, for which `PricingCase.scores` has these bytes.
        """
        slope = 0.0 if self.measured is None or self.sinks else self.measured.layer[1]
        return max(0.0, slope * seq_len)

    @property
    def unpredicted_logit_bytes(self) -> float:
        """Measured bytes per token saved outside the layers beyond those of the final norm; 0 without a measurement."""
        # Norms that multiply in float32 keep two bytes more (Gemma); measured is 8 h for Llama and 10 h for Gemma 3.
        formula_bytes = (_NORM_BYTES + 2.0) * self.hidden
        return 0.0 if self.measured is None else max(0.0, self.measured.outside - formula_bytes)

    def latent_bytes(self, width: float) -> float:
        """Return the bytes per token and layer that unfused norms of MLA latents save; `width`: bytes per element.

        A norm saves its float32 input, the normalized input and its output.
        """
        return (4.0 + 2.0 * width) * self.latent_width

    def repeated_elements(self, seq_len: int) -> float:
        """Return the elements per token and layer that repeating keys and values for every query head adds.

        Eager attention repeats them in all layers of a model with attention sinks, and in layers with a sliding window
        of at most `seq_len` tokens. In other layers, the kernel broadcasts keys and values.
        """
        masked = (
            (count, a) for count, a in self.attentions if self.sinks or (a.window is not None and seq_len >= a.window)
        )
        repeated = (n * (a.num_heads - a.num_kv_heads) * (a.qk_head_dim + a.v_head_dim) for n, a in masked)
        return math.fsum(repeated) / self.layers

    def attention_flops(self, seq_len: int) -> float:
        """Return the FLOPs per token of the two attention matmuls of an average layer, forward, causal pairs only."""
        total = math.fsum(
            count * attention.forward_flops_per_token(seq_len, causal=True) for count, attention in self.attentions
        )
        return total / self.layers


def _head_norms(block: Block) -> list[int]:
    """Return the total width of all query heads and that of all key heads, if the layer normalizes them."""
    a, names = block.attention, [p.name for p in block.params]
    if a is None:
        return []
    widths = {"q_norm": a.num_heads * a.qk_head_dim, "k_norm": a.num_kv_heads * a.qk_head_dim}
    return [w for norm, w in widths.items() if any(f".{norm}." in name for name in names)]


def _norm_bytes(block: Block, hidden: int, norm_kept_bytes: float) -> float:
    """Return the bytes per token that the norms of a layer save beyond `saved_elements`, divided by h.

    An unfused norm saves its float32 input and the normalized input: `norm_kept_bytes` per element. These bytes replace
    the 4h bytes (bfloat16) of both norms' inputs in `saved_elements`. Torch's fused LayerNorm saves only its input. If
    a layer has a single LayerNorm, attention and MLP share its output, and the layer saves 4h bytes less.
    """
    unfused, fused = _norms(block, hidden)
    return 4.0 * fused - 8.0 if fused else norm_kept_bytes * unfused - 4.0


def _norms(block: Block, hidden: int) -> tuple[int, int]:
    """Return the numbers of norms of hidden states in a layer, as (unfused, torch's fused LayerNorm); one is 0.

    If all norms have a bias, they are fused. Otherwise all count as unfused, and at least two are assumed.
    """
    # The only modules whose weight is a vector as wide as the hidden states are norms.
    vectors = {p.name for p in block.params if p.shape == (hidden,)}
    norms = [name for name in vectors if name.endswith(".weight")]
    fused = sum(f"{name.removesuffix('weight')}bias" in vectors for name in norms)
    return (0, fused) if fused and fused == len(norms) else (max(2, len(norms)), 0)


def _latent_width(block: Block) -> int:
    """Return the total width of the MLA latents that a layer normalizes; 0 without MLA."""
    return sum(p.shape[0] for p in block.params if _LATENT_NORM.search(p.name))


def _latent_rest(block: Block) -> int:
    """Return the output width of MLA's `kv_b_proj` minus the width of the keys of all heads; 0 without MLA."""
    a = block.attention
    rows = sum(p.shape[0] for p in block.params if _LATENT_VALUES.search(p.name))
    return rows - a.num_kv_heads * a.qk_head_dim if a is not None and rows else 0


def _replicated_matrices(model: ModelSpec) -> tuple[frozenset[str], bool]:
    """Return (names of the matrices that tensor parallelism replicates, whether the residual stream is replicated).

    (empty, False) for models of a known family, whose sharding rules cover every module.
    """
    if model.rules is None:
        return frozenset(), False
    rules = tuple(Rule(pattern, style) for pattern, style in model.rules)
    return replicated_matrices([(p.name, p.shape) for b in model.blocks for p in b.params], rules)


def _measured_experts(model: ModelSpec) -> float:
    """Return the measured bytes per token that the routed experts of an average layer save; 0 if unmeasured."""
    modules = () if model.kept is None else model.kept.modules
    return math.fsum(kept for name, kept in modules if name.endswith(".experts"))


def _measured_whole(model: ModelSpec, names: frozenset[str], stream: bool) -> float:
    """Return the measured bytes per token of an average layer that tensor parallelism replicates, without experts.

    The bytes of a module count in proportion to its replicated matrices. If the residual stream is replicated, modules
    without matrices, such as norms, count in full, and so do the inputs of attention and MLP.
    """
    if model.kept is None:
        return 0.0
    params = [p for b in model.decoder_blocks for p in b.params if p.is_matrix and not p.is_expert]
    total = 0.0
    for module, module_bytes in model.kept.modules:
        if module.endswith(".experts"):
            continue
        sizes = {p.name: p.num_elements for p in params if p.name.startswith(f"{module}.")}
        matrices = 0 if module.endswith(".*") else sum(sizes.values())
        whole = sum(n for name, n in sizes.items() if name in names)
        share = whole / matrices if matrices else float(stream)
        total += share * module_bytes
        if matrices and stream:
            total += (1.0 - share) * min(module_bytes, 2.0 * model.hidden_size)
    return total


def _last_layers(decoders: Iterable[Block], whole: frozenset[str]) -> tuple[LayerElements, ...]:
    """Return the numbers of parameters of the last two layers; `whole` are the names of the replicated matrices."""
    last = sorted(((layer, b) for b in decoders for layer in b.layers), key=lambda pair: pair[0])
    layers = []
    for _, block in last[-2:]:
        sizes = Counter[str]()
        for p in block.params:
            sizes["whole" if p.name in whole else _part(p)] += p.num_elements
        dense = sizes["attention"] + sizes["mlp"]
        layers.append(LayerElements(dense, sizes["whole"], sizes["vector"], sizes["expert"]))
    return tuple(layers)


def _bias_width(block: Block) -> int:
    """Return the number of bias elements added per token in a layer; of routed experts, only chosen ones count."""
    visited = block.mlp.experts_per_token if block.mlp else 0
    return sum(p.shape[-1] * (visited if p.is_expert else 1) for p in block.params if p.name.endswith("bias"))


def _dense_width(block: Block) -> int:
    """Return the width of the dense MLP or of the shared experts of a layer; 0 for routed experts alone."""
    mlp = block.mlp
    if mlp is None:
        return 0
    return mlp.shared_intermediate_size if mlp.num_experts else mlp.intermediate_size


def _dense_saved_width(block: Block) -> int:
    """Return the elements per token that the dense MLP or the shared experts of a layer save for backward."""
    if block.mlp is None:
        return 0
    return _dense_width(block) * (3 if block.mlp.gated else 2)


def _matmuls(decoders: _Decoders) -> tuple[Matmul, ...]:
    """Return the matmuls of an average layer; projections with a common input are one matmul."""
    counts: dict[tuple[str, int, int, bool], float] = {}
    for block in decoders.blocks:
        fused: dict[tuple[str, str, int], int] = {}
        for param in block.params:
            part = _part(param)
            if part == "vector":
                continue
            row = _ROW.search(param.name) is not None
            first, second = param.shape[-2:]
            # Linear layers store (out, in), Conv1D and some experts (in, out): the dim named embed decides.
            embed = param.dims[-2:].index("embed") if "embed" in param.dims[-2:] else 1
            inputs, outputs = (second, first) if (embed == 1) != row else (first, second)
            source = "row" if row else f"..{param.name}".rsplit(".", 3)[-3] + part
            key = (part, source, inputs)
            fused[key] = fused.get(key, 0) + outputs
        for (part, source, inputs), outputs in fused.items():
            times = block.count / decoders.layers
            times *= decoders.visits(block) if part == "expert" else 1
            shape = (part, inputs, outputs, source == "row")
            counts[shape] = counts.get(shape, 0.0) + times
    return tuple(Matmul(part, i, o, n, row) for (part, i, o, row), n in counts.items())


def _is_router(param: ParamSpec, block: Block) -> bool:
    experts = block.mlp.num_experts if block.mlp else 0
    return bool(experts) and experts in param.shape


def _part(param: ParamSpec) -> str:
    """Return the part of a layer that a parameter belongs to: attention, mlp (routers too), expert or vector."""
    if not param.is_matrix:
        return "vector"
    if param.is_expert:
        return "expert"
    return "attention" if "attn" in param.name or "attention" in param.name else "mlp"

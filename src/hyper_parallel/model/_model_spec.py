"""ModelSpec: what planning needs to know of a model, without weights and without a framework.

Counts follow two conventions that are written down once, here:

* a parameter that shares its storage with another counts once (`num_elements` of the tied one is 0);
* training FLOPs per token are 6 per matmul weight the token meets (2 forward, 4 backward) plus the attention scores
  and their product with the values; the embedding lookup, norms, biases and recompute count nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from hyper_parallel.serde import encode


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, or the same parameter of several layers.

    Logical dims are the words sharding rules are written in:

    | dim | size | meaning |
    |---|---|---|
    | vocab, embed, position | V, D | rows of the embedding; residual width; learned positions |
    | heads, kv_heads | heads * head width (one per head for sinks) | cut only at whole heads |
    | qkv | (heads + 2 kv_heads) * head width | query, key, value stacked: each part is cut |
    | mlp | F | hidden width of the MLP or of one expert |
    | gate_up | 2F | gate and up stacked: each part is cut |
    | gate_up_pairs | 2F | gate and up interleaved: cut at even indices |
    | expert | E | routed experts |
    | router | E | scores of the router: kept whole, every rank needs all of them |
    | head_dim, q_lora, kv_lora, kv_latent | K, ... | inside one head; latent widths of MLA: kept whole |

    Attributes:
        name: Name in the Hugging Face state dict, `*` for the layer index: `model.layers.*.mlp.up_proj.weight`.
        shape: Logical shape, as torch stores it: (out, in) for linear layers, (in, out) for GPT-2's Conv1D.
        dims: Logical names of the dims, see the table.
        tied_to: Name of the parameter it shares its storage with, or None.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    tied_to: str | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), f"{self.name}: {self.shape} against {self.dims}"

    @property
    def size(self) -> int:
        """Elements of one instance, tied or not."""
        return math.prod(self.shape)

    @property
    def num_elements(self) -> int:
        """Elements of one instance; 0 when tied."""
        return 0 if self.tied_to else self.size

    @property
    def is_expert(self) -> bool:
        """One slice per routed expert; a token meets only some of them."""
        return "expert" in self.dims

    @property
    def is_matrix(self) -> bool:
        """Two dims besides the expert dim: used in a matmul (or a lookup), unlike norms and biases."""
        return len(self.shape) - self.is_expert >= 2


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention of a block.

    Attributes:
        kind: full, sliding (window tokens), or mla (DeepSeek latent attention).
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        qk_head_dim: Width of one query or key head.
        v_head_dim: Width of one value head.
        window: Tokens each query sees; None is all before it.
        kv_cache_width: Values a KV cache holds per token and layer: 2 * kv_heads * head width, or the latent of MLA.
    """

    kind: str
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    window: int | None = None
    kv_cache_width: int = 0

    def forward_flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """FLOPs of scores and their product with the values, one token, one layer, forward.

        Args:
            seq_len: Tokens per sequence.
            causal: Count only the tokens a query sees, on average `w * (1 - w / 2s)` for w = min(window, s); False
                counts w for every query, the convention of most published MFU numbers.
        """
        seen = min(seq_len, self.window or seq_len)
        average = seen * (1 - seen / (2 * seq_len)) if causal else seen
        return 2 * average * self.num_heads * (self.qk_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward part of a block.

    Attributes:
        intermediate_size: Width of one expert, or of the dense MLP.
        gated: Two input projections (SwiGLU, GeGLU) instead of one.
        num_experts: Routed experts; 0 is a dense MLP.
        experts_per_token: Experts each token visits.
        shared_intermediate_size: Total width of the shared experts; 0 is none.
    """

    intermediate_size: int
    gated: bool
    num_experts: int = 0
    experts_per_token: int = 0
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A part of the model that repeats: embedding, decoder layers of one kind, final norm, head.

    Layers that differ (dense or experts, full or sliding attention) are separate blocks; two blocks may then have the
    same name and parameter patterns, and `layers` tells which layer belongs to which.

    Attributes:
        name: embedding, decoder, moe_decoder, final_norm, head.
        layers: Layer indices the block stands for; () for parts outside the layers.
        params: Parameters of one instance.
        attention: Attention of one instance, or None.
        mlp: Feed-forward part of one instance, or None.
    """

    name: str
    layers: tuple[int, ...]
    params: tuple[ParamSpec, ...]
    attention: AttentionSpec | None = None
    mlp: MlpSpec | None = None

    @property
    def count(self) -> int:
        """How many instances the block stands for."""
        return len(self.layers) or 1

    @property
    def num_params(self) -> int:
        """Parameters of one instance."""
        return sum(p.num_elements for p in self.params)

    def _active(self, size: int, param: ParamSpec) -> int:
        """The part of `size` elements one token meets."""
        if not param.is_expert or self.mlp is None:
            return size
        return size * self.mlp.experts_per_token // self.mlp.num_experts

    @property
    def num_active_params(self) -> int:
        """Parameters of one instance one token meets: of the routed experts only those it visits."""
        return sum(self._active(p.num_elements, p) for p in self.params)

    @property
    def num_matmul_params(self) -> int:
        """Matmul weights of one instance one token meets; a tied head multiplies and counts, a lookup does not."""
        if self.name == "embedding":
            return 0
        return sum(self._active(p.size, p) for p in self.params if p.is_matrix)


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Bytes per token that a forward in bfloat16 keeps for backward on one device, as measured.

    Attributes:
        layer: Of a mean decoder layer without its routed experts, a pair (a, b): a + b T in a sequence of T tokens.
        outside: Of everything outside of the layers.
        fullest: The a of the layer that keeps most; None: as the mean one.
        last: The a of the last layer; None: as the mean one.
        modules: The parts of the mean a by the module that keeps them, as `model.layers.*.mixer`, experts included.
        expert_rows: Rows per token that come to the routed experts of a layer; 0 without such a module.
    """

    layer: tuple[float, float]
    outside: float
    fullest: float | None = None
    last: float | None = None
    modules: tuple[tuple[str, float], ...] = ()
    expert_rows: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A causal language model as planning sees it.

    Attributes:
        name: Preset name, directory name or hub id, for people.
        family: `model_type` of the config.
        dtype: Format the weights are published in.
        hidden_size: Embed width.
        num_layers: Decoder layers.
        vocab_size: Rows of the embedding.
        tied_embeddings: Head and embedding share one parameter.
        blocks: Parts in forward order (decoder blocks by their first layer).
        notes: Sentences about what was assumed while reading.
        max_position_embeddings: Longest sequence the model is made for; None when the config does not say.
        rules: Pattern and style of the modules that tensor and expert parallelism divide, for a model that was read
            from its module; None: those of the family.
        unsplit: Axes that a trial of its forward pass refused, each with the reason: of `pp` and `cp`.
        quantised: The published weights are; sizes are those of `dtype`.
        kept: Activations that its forward keeps, where they were measured.
    """

    name: str
    family: str
    dtype: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tied_embeddings: bool
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    max_position_embeddings: int | None = None
    rules: tuple[tuple[str, str], ...] | None = None
    unsplit: tuple[tuple[str, str], ...] = ()
    quantised: bool = False
    kept: KeptActivations | None = None

    @property
    def num_params(self) -> int:
        """All parameters, tied ones once."""
        return sum(b.num_params * b.count for b in self.blocks)

    @property
    def num_active_params(self) -> int:
        """Parameters one token meets, embedding included; equals `num_params` for dense models."""
        return sum(b.num_active_params * b.count for b in self.blocks)

    @property
    def num_matmul_params(self) -> int:
        """Matmul weights one token meets: the N of 6N FLOPs per token."""
        return sum(b.num_matmul_params * b.count for b in self.blocks)

    @property
    def decoder_blocks(self) -> tuple[Block, ...]:
        """The blocks that stand for layers."""
        return tuple(b for b in self.blocks if b.layers)

    @property
    def num_heads(self) -> int:
        """Query heads; the greatest common divisor when layers differ, so what divides it divides every layer."""
        return math.gcd(*(b.attention.num_heads for b in self.blocks if b.attention))

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads; the greatest common divisor when layers differ."""
        return math.gcd(*(b.attention.num_kv_heads for b in self.blocks if b.attention))

    @property
    def num_experts(self) -> int:
        """Routed experts of the expert layers (the greatest common divisor); 0 for dense models."""
        return math.gcd(*(b.mlp.num_experts for b in self.blocks if b.mlp and b.mlp.num_experts))

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Distinct widths of dense MLPs, experts and shared experts: what tensor parallelism would split."""
        sizes = {b.mlp.intermediate_size for b in self.blocks if b.mlp}
        sizes |= {b.mlp.shared_intermediate_size for b in self.blocks if b.mlp}
        return tuple(sorted(sizes - {0}))

    @property
    def fingerprint(self) -> str:
        """Hash of what must agree between a plan and the model it is applied to: every name, shape and layer.

        The display name, the notes and the published dtype may differ.
        """
        what = [self.family, self.vocab_size, self.tied_embeddings, encode(self.blocks)]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Training FLOPs per token: 6 N_matmul + 12 L * heads * head_dim * seq_len for full attention.

        Sliding layers count min(seq_len, window) tokens, MLA its query-key and value widths.

        Args:
            seq_len: Tokens per sequence.
            causal: Count the attention scores a causal mask keeps, about half, instead of all.

        Source: Narayanan et al. 2021, section 3.3, without recompute; PaLM (Chowdhery et al. 2022), appendix B.
        """
        attention = sum(
            b.attention.forward_flops_per_token(seq_len, causal) * b.count
            for b in self.blocks
            if b.attention
        )
        return 6 * self.num_matmul_params + 3 * attention

    def block_of(self, layer: int) -> Block:
        """The block that stands for a layer.

        Raises:
            IndexError: When the model has no such layer.
        """
        for block in self.blocks:
            if layer in block.layers:
                return block
        raise IndexError(f"layer {layer} of a model with {self.num_layers} layers")

    def named_params(self) -> Iterator[tuple[str, ParamSpec]]:
        """Every parameter with its full name, `*` replaced by the layer index; made lazily, planning never needs it."""
        for block in self.blocks:
            for layer in block.layers or (None,):
                for param in block.params:
                    yield (
                        param.name if layer is None else param.name.replace("*", str(layer)),
                        param,
                    )

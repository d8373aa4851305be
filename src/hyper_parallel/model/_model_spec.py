"""ModelSpec: description of a model for planning, without weights and without a framework.

All counts follow two conventions:

* a parameter that shares its storage with another counts once (`num_elements` of the tied one is 0);
* training FLOPs per token are 6 per matmul weight used by the token (2 forward, 4 backward) plus the attention scores
  and their product with the values; the embedding lookup, norms, biases and recompute are not counted.
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
    """Parameter, or one parameter per layer with equal name (`*` for the layer index) and equal shape.

    Sharding rules refer to these logical dims:

    | dim | size | meaning |
    |---|---|---|
    | vocab, embed, position | V, D | rows of the embedding; residual width; learned positions |
    | heads, kv_heads | heads * head width (one per head for sinks) | sharded only at whole heads |
    | qkv | (heads + 2 kv_heads) * head width | query, key, value stacked: each part is sharded |
    | mlp | F | hidden width of the MLP or of one expert |
    | gate_up | 2F | gate and up stacked: each part is sharded |
    | gate_up_pairs | 2F | gate and up interleaved: sharded at even indices |
    | expert | E | routed experts |
    | router | E | scores of the router: replicated, because every rank needs all of them |
    | head_dim, q_lora, kv_lora, kv_latent | K, ... | inside one head; latent widths of MLA: replicated |

    Attributes:
        name: Name in the Hugging Face state dict, `*` for the layer index: `model.layers.*.mlp.up_proj.weight`.
        shape: Logical shape, as torch stores it: (out, in) for linear layers, (in, out) for GPT-2's Conv1D.
        dims: Logical names of the dims, see the table.
        tied_to: Name of the parameter that owns the storage, for the second of two tied parameters; else None.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    tied_to: str | None = None

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), f"{self.name}: {self.shape} against {self.dims}"

    @property
    def size(self) -> int:
        """Number of elements of one instance, tied or not."""
        return math.prod(self.shape)

    @property
    def num_elements(self) -> int:
        """Number of elements of one instance; 0 when tied."""
        return 0 if self.tied_to else self.size

    @property
    def is_expert(self) -> bool:
        """True if the parameter has one slice per routed expert; a token uses only some of them."""
        return "expert" in self.dims

    @property
    def is_matrix(self) -> bool:
        """True if the parameter has two or more dims besides the expert dim, as weights of matmuls and lookups do."""
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
        window: Maximum number of tokens that a query attends to; None: all earlier tokens.
        kv_cache_width: Elements of a KV cache per token and layer: 2 * kv_heads * head width, or the latent of MLA.
    """

    kind: str
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    window: int | None = None
    kv_cache_width: int = 0

    def forward_flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Return the forward FLOPs of attention scores and their product with the values, per token and layer.

        Args:
            seq_len: Tokens per sequence.
            causal: Count only the tokens that a query attends to, on average `w * (1 - w / 2s)` for s = `seq_len` and w
                = min(window, s). False: count w tokens for every query, the convention of most published MFU numbers.
        """
        attended = min(seq_len, self.window or seq_len)
        average = attended * (1 - attended / (2 * seq_len)) if causal else attended
        return 2 * average * self.num_heads * (self.qk_head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """Feed-forward part of a block.

    Attributes:
        intermediate_size: Width of one expert, or of the dense MLP.
        gated: True for two input projections (SwiGLU, GeGLU), False for one.
        num_experts: Routed experts; 0 is a dense MLP.
        experts_per_token: Number of experts per token.
        shared_intermediate_size: Total width of the shared experts; 0 is none.
    """

    intermediate_size: int
    gated: bool
    num_experts: int = 0
    experts_per_token: int = 0
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class Block:
    """Repeated part of the model: embedding, decoder layers of one type, final norm or head.

    Layers that differ (dense or experts, full or sliding attention) are separate blocks. Two blocks may therefore have
    the same name and parameter patterns; `layers` distinguishes them.

    Attributes:
        name: embedding, decoder, moe_decoder, final_norm, head.
        layers: Indices of the layers that are instances of the block; () for a part outside the layers.
        params: Parameters of one instance.
        attention: Attention of one instance; None for a block without attention.
        mlp: Feed-forward part of one instance; None for a block without this part.
    """

    name: str
    layers: tuple[int, ...]
    params: tuple[ParamSpec, ...]
    attention: AttentionSpec | None = None
    mlp: MlpSpec | None = None

    @property
    def count(self) -> int:
        """Number of instances: layers, or 1 for a part outside the layers."""
        return len(self.layers) or 1

    @property
    def num_params(self) -> int:
        """Number of parameters of one instance."""
        return sum(p.num_elements for p in self.params)

    def _active(self, size: int, param: ParamSpec) -> int:
        """Return how many of a parameter's `size` elements one token uses: all, or those of the selected experts."""
        if not param.is_expert or self.mlp is None:
            return size
        return size * self.mlp.experts_per_token // self.mlp.num_experts

    @property
    def num_active_params(self) -> int:
        """Number of parameters of one instance that one token uses; counts only the selected routed experts."""
        return sum(self._active(p.num_elements, p) for p in self.params)

    @property
    def num_matmul_params(self) -> int:
        """Number of matmul weights of one instance that one token uses; counts a tied head, but no embedding lookup."""
        if self.name == "embedding":
            return 0
        return sum(self._active(p.size, p) for p in self.params if p.is_matrix)


@dataclass(frozen=True, slots=True)
class KeptActivations:
    """Measured bytes per token of the activations that a bfloat16 forward keeps for backward on one device.

    Attributes:
        layer: Pair (a, b): in a sequence of T tokens, the average decoder layer without its routed experts keeps
            a + b T bytes per token.
        outside: Bytes per token kept outside the layers.
        fullest: `a` of the layer that keeps the most; None: equal to `a` of the average layer.
        last: `a` of the last layer; None: equal to `a` of the average layer.
        modules: `a` of each module of the average layer, experts included, by name such as `model.layers.*.mixer`.
        expert_rows: Rows per token that reach the routed experts of a layer; 0 without experts.
    """

    layer: tuple[float, float]
    outside: float
    fullest: float | None = None
    last: float | None = None
    modules: tuple[tuple[str, float], ...] = ()
    expert_rows: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Description of a model for the planner, without weights.

    Attributes:
        name: Preset name, directory name or hub id, for display.
        family: `model_type` of the config; for a multimodal model, of its decoder.
        dtype: Dtype of the published weights.
        hidden_size: Embed width.
        num_layers: Decoder layers.
        vocab_size: Rows of the embedding.
        tied_embeddings: Whether head and embedding share one parameter.
        blocks: Parts in forward order (decoder blocks by their first layer).
        notes: Sentences about assumptions of the reader.
        max_position_embeddings: Maximum sequence length of the model; None when the config does not state it.
        rules: Pairs of module pattern and sharding style for tensor and expert parallelism, for a model read from its
            module; None: the rules of its family.
        unsplit: Pairs of axis (`pp` or `cp`) and reason, for axes that a probe of the model's forward has excluded.
        quantised: True if the published weights are quantised; sizes are those of `dtype`.
        kept: Activations that its forward keeps; None when not measured.
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
        """Number of parameters, tied ones once."""
        return sum(b.num_params * b.count for b in self.blocks)

    @property
    def num_active_params(self) -> int:
        """Number of parameters used by one token, embedding included; equals `num_params` for dense models."""
        return sum(b.num_active_params * b.count for b in self.blocks)

    @property
    def num_matmul_params(self) -> int:
        """Number of matmul weights used by one token: the N of 6N FLOPs per token."""
        return sum(b.num_matmul_params * b.count for b in self.blocks)

    @property
    def decoder_blocks(self) -> tuple[Block, ...]:
        """Blocks that consist of decoder layers."""
        return tuple(b for b in self.blocks if b.layers)

    @property
    def num_heads(self) -> int:
        """Number of query heads; the greatest common divisor over layers that differ, 0 without attention."""
        return math.gcd(*(b.attention.num_heads for b in self.blocks if b.attention))

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads; the greatest common divisor over layers that differ, 0 without attention."""
        return math.gcd(*(b.attention.num_kv_heads for b in self.blocks if b.attention))

    @property
    def num_experts(self) -> int:
        """Routed experts per layer; the greatest common divisor over layers with experts, 0 for dense models."""
        return math.gcd(*(b.mlp.num_experts for b in self.blocks if b.mlp and b.mlp.num_experts))

    @property
    def intermediate_sizes(self) -> tuple[int, ...]:
        """Distinct widths of dense MLPs, experts and shared experts, the dims that tensor parallelism shards."""
        sizes = {b.mlp.intermediate_size for b in self.blocks if b.mlp}
        sizes |= {b.mlp.shared_intermediate_size for b in self.blocks if b.mlp}
        return tuple(sorted(sizes - {0}))

    @property
    def fingerprint(self) -> str:
        """Hash of the properties that must agree between a plan and its model: family, vocabulary, tie and blocks.

        Other attributes, such as name, notes and published dtype, may differ.
        """
        facts = [self.family, self.vocab_size, self.tied_embeddings, encode(self.blocks)]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Return training FLOPs per token: 6 N_matmul + 12 L * heads * head_dim * seq_len for full attention.

        Layers with a window count min(seq_len, window) tokens. Latent attention counts its query-key and value widths.

        Args:
            seq_len: Tokens per sequence.
            causal: Count only the attention scores that a causal mask keeps, about half.

        Source: Narayanan et al. 2021, section 3.3, without recompute; PaLM (Chowdhery et al. 2022), appendix B.
        """
        attention = sum(
            b.attention.forward_flops_per_token(seq_len, causal) * b.count for b in self.blocks if b.attention
        )
        return 6 * self.num_matmul_params + 3 * attention

    def block_of(self, layer: int) -> Block:
        """Return the block of a layer.

        Raises:
            IndexError: When the model has no such layer.
        """
        for block in self.blocks:
            if layer in block.layers:
                return block
        raise IndexError(f"layer {layer} of a model with {self.num_layers} layers")

    def named_params(self) -> Iterator[tuple[str, ParamSpec]]:
        """Yield full name and spec of every parameter, with `*` replaced by the layer index."""
        for block in self.blocks:
            for layer in block.layers or (None,):
                for param in block.params:
                    name = param.name if layer is None else param.name.replace("*", str(layer))
                    yield name, param

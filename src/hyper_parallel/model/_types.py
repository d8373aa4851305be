"""ModelSpec: what planning needs to know of a model, without weights and without a framework."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, or the same parameter of several layers.

    Attributes:
        name: Name in the Hugging Face state dict, `*` for the layer index: `model.layers.*.mlp.up_proj.weight`.
        shape: Logical shape, as torch stores it (out, in).
        dims: Logical names of the dims: vocab, embed, heads, kv_heads, head_dim, mlp, expert, ...
        tied_to: Name of the parameter it shares its storage with, or None.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    tied_to: str | None = None

    @property
    def num_elements(self) -> int:
        """Elements of one instance; 0 when tied."""
        return 0 if self.tied_to else math.prod(self.shape)


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
    """

    kind: str
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    v_head_dim: int
    window: int | None = None


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
        blocks: Parts in forward order.
        notes: Sentences about what was assumed while reading.
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

    @property
    def num_params(self) -> int:
        """All parameters, tied ones once."""
        return sum(b.num_params * b.count for b in self.blocks)

"""A transformer as data: its layers, their shapes, and how many parameters they have."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

Shape = tuple[int, int]
"""Inputs and outputs of a matmul."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention with one key and value head per group of query heads (MHA, GQA, MQA).

    Attributes:
        heads: Query heads.
        kv_heads: Key and value heads.
        head_dim: Size of a head; ``heads * head_dim`` need not be the hidden size.
        window: Tokens that a query sees, its own included; None for all before it.
        gated: The query projection has a gate beside it, as in Qwen3-Next.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    gated: bool = False

    def projections(self, hidden: int) -> tuple[Shape, ...]:
        """Return the shapes of q, k, v and o."""
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        key_or_value = (hidden, narrow)
        return (hidden, wide * (1 + self.gated)), key_or_value, key_or_value, (wide, hidden)

    def core_flops(self, tokens: int, pairs: int, *, absorbed: bool = False) -> int:
        """Return the FLOPs of q k' and p v: the number of key heads does not matter."""
        return 4 * pairs * self.heads * self.head_dim

    @property
    def cached(self) -> int:
        """Numbers in the KV cache, per token."""
        return 2 * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek-V2 and V3 (arXiv:2405.04434, section 2.1).

    Attributes:
        heads: Query heads.
        query_rank: Rank of the query projection (``q_lora_rank``), None if it is one matrix.
        rank: Rank of keys and values (``kv_lora_rank``), which are cached compressed.
        nope_dim: Part of a query and key head without rotary positions.
        rope_dim: Part with them, one for all heads.
        value_dim: Size of a value head.
    """

    heads: int
    query_rank: int | None
    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    window: ClassVar[None] = None

    def projections(self, hidden: int) -> tuple[Shape, ...]:
        """Return the shapes of the query, compression, expansion and output matrices."""
        query, rank = self.heads * (self.nope_dim + self.rope_dim), self.query_rank
        return (
            *(((hidden, query),) if rank is None else ((hidden, rank), (rank, query))),
            (hidden, self.rank + self.rope_dim),
            (self.rank, self.heads * (self.nope_dim + self.value_dim)),
            (self.heads * self.value_dim, hidden),
        )

    def core_flops(self, tokens: int, pairs: int, *, absorbed: bool = False) -> int:
        """Return the FLOPs of q k' and p v.

        ``absorbed`` is the decode of vLLM and SGLang: queries meet the compressed keys, so each
        pair costs more, and the expansion matrix is applied to the new token alone.
        """
        if absorbed:
            return 2 * pairs * self.heads * (2 * self.rank + self.rope_dim)
        return 2 * pairs * self.heads * (self.nope_dim + self.rope_dim + self.value_dim)

    @property
    def cached(self) -> int:
        """Numbers in the KV cache, per token; tensor parallelism does not divide them."""
        return self.rank + self.rope_dim


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated DeltaNet of Qwen3-Next and Qwen3.5: a state of fixed size instead of a KV cache."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    window: ClassVar[None] = None

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def projections(self, hidden: int) -> tuple[Shape, ...]:
        """Return the shapes of the matrices of q, k, v, z, of b, a, and of the output."""
        values = self.value_heads * self.value_dim
        return (hidden, self.channels + values), (hidden, 2 * self.value_heads), (values, hidden)

    def core_flops(self, tokens: int, pairs: int, *, absorbed: bool = False) -> int:
        """Return the FLOPs of the convolution and of the recurrence, linear in the tokens.

        The recurrence is counted as in verl's flops_counter: 15 k v heads per token with the
        backward pass, so 5 forward.
        """
        recurrence = 5 * self.key_dim * self.value_dim * self.value_heads
        return tokens * (2 * self.channels * self.kernel + recurrence)

    @property
    def cached(self) -> int:
        """Numbers in the KV cache, per token."""
        return 0


@dataclass(frozen=True, slots=True)
class Mlp:
    """A dense feed-forward block; gated ones (SwiGLU, GeGLU) have three matrices."""

    width: int
    matrices: int = 3

    def projections(self, hidden: int) -> tuple[Shape, ...]:
        """Return the shapes of its matrices; the last one leads back."""
        return ((hidden, self.width),) * (self.matrices - 1) + ((self.width, hidden),)


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: a router, experts, and what every token passes besides.

    Attributes:
        count: Routed experts.
        per_token: How many of them a token passes.
        width: Of one expert.
        shared: Width of all shared experts together.
        shared_gate: The shared experts have a gate of one output.
        biased: The matmuls of an expert have biases.
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    shared_gate: bool = False
    biased: bool = False

    def projections(self, hidden: int) -> tuple[Shape, ...]:
        """Return the shapes of the matrices that every token passes."""
        shared = Mlp(self.shared).projections(hidden) if self.shared else ()
        gate = ((hidden, 1),) if self.shared_gate else ()
        return (hidden, self.count), *gate, *shared

    def expert(self, hidden: int) -> int:
        """Return the parameters of the matmuls of one routed expert."""
        return 3 * hidden * self.width

    def routed(self, hidden: int) -> int:
        """Return all parameters of the routed experts."""
        return self.count * (self.expert(hidden) + self.biased * (2 * self.width + hidden))


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention, a feed-forward block, and parameters that are in no matmul.

    Attributes:
        other: Norms, biases, sinks.
    """

    attention: Attention | LatentAttention | LinearAttention
    block: Mlp | Experts
    other: int = 0

    def every_token(self, hidden: int) -> int:
        """Return the parameters of the matmuls that every token passes."""
        shapes = self.attention.projections(hidden) + self.block.projections(hidden)
        return sum(ins * outs for ins, outs in shapes)

    def active(self, hidden: int) -> int:
        """Return the parameters of the matmuls that one token passes."""
        block = self.block
        routed = block.per_token * block.expert(hidden) if isinstance(block, Experts) else 0
        return self.every_token(hidden) + routed

    def parameters(self, hidden: int) -> int:
        """Return all parameters."""
        return self.every_token(hidden) + self.other + self.experts(hidden)

    def experts(self, hidden: int) -> int:
        """Return the parameters of all routed experts."""
        block = self.block
        return block.routed(hidden) if isinstance(block, Experts) else 0


@dataclass(frozen=True)
class Model:
    """A decoder-only transformer, with a vision tower if it has one.

    Attributes:
        model_type: As ``config.json`` names it.
        hidden: Size of a token inside the model.
        vocabulary: Rows of the embedding.
        layers: In order.
        tied: The output layer is the embedding.
        other: The last norm.
        head: What stands behind the layers: logits, or the single value of a critic.
        vision: Parameters of the vision tower; 0 without one.
    """

    model_type: str
    hidden: int
    vocabulary: int
    layers: tuple[Layer, ...]
    tied: bool = False
    other: int = 0
    head: Literal["logits", "value"] = "logits"
    vision: int = 0

    def critic(self) -> "Model":
        """Return this model with a value head instead of the output layer."""
        return replace(self, head="value")

    @cached_property
    def kinds(self) -> dict[Layer, int]:
        """How many layers there are of each kind."""
        return dict(Counter(self.layers))

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the matmul behind the layers, also if they are those of the embedding."""
        return self.hidden * (self.vocabulary if self.head == "logits" else 1)

    @property
    def parameters(self) -> int:
        """All parameters, those of the vision tower included, without multi-token prediction."""
        own_head = 0 if self.tied and self.head == "logits" else self.head_parameters
        layers = sum(layer.parameters(self.hidden) * n for layer, n in self.kinds.items())
        return self.embedding_parameters + layers + self.other + own_head + self.vision

    @property
    def expert_parameters(self) -> int:
        """Parameters of all routed experts, which expert parallelism divides."""
        return sum(layer.experts(self.hidden) * n for layer, n in self.kinds.items())

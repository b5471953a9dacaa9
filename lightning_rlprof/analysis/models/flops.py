"""FLOPs of a transformer: forward, backward, prefill and decode.

A multiply and an add count one each. Matmuls alone count: norms, rotary positions, softmax and
activations are left out, as in all published formulas. The look-up of an embedding costs nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lightning_rlprof.analysis.models.architecture import Experts, LinearAttention, Model


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one forward pass, by part.

    Attributes:
        linear: Matmuls of all layers.
        attention: Queries with keys, and weights with values.
        head: The output layer.
    """

    linear: int
    attention: int
    head: int

    @property
    def forward(self) -> int:
        """All parts."""
        return self.linear + self.attention + self.head

    @property
    def training(self) -> int:
        """Forward and backward, without recomputation: what MFU counts (PaLM, arXiv:2204.02311).

        The gradients of inputs and of weights are two matmuls for each one. Flash attention
        computes 2.5 instead of 2, as it recomputes; that is work, but not useful work.
        """
        return 3 * self.forward


def pairs(new: int, total: int | None = None, window: int | None = None) -> int:
    """Return how many pairs of query and key a causal mask leaves.

    Args:
        new: Queries: the last tokens of the sequence.
        total: Keys, None for a sequence without a cache.
        window: Keys that a query sees, its own included.

    Example::

        >>> pairs(4), pairs(1, 25), pairs(4, window=2)
        (10, 25, 7)
    """
    total = new if total is None else total
    return _triangle(total, window) - _triangle(total - new, window)


def _triangle(tokens: int, window: int | None) -> int:
    if window is None or tokens <= window:
        return tokens * (tokens + 1) // 2
    return window * (window + 1) // 2 + (tokens - window) * window


def forward(
    model: Model,
    lengths: Sequence[int],
    *,
    logits: int | None = None,
    causal: bool = True,
) -> Flops:
    """Return the FLOPs of a forward pass over sequences, packed or not, without their padding.

    A vision tower is left out: it does not follow from lengths.

    Args:
        model: The model, see `read_model`.
        lengths: Tokens of each sequence, of images the merged ones.
        logits: Tokens for which the output layer runs; None for all.
        causal: Count what the mask leaves. False counts every pair and ignores windows, as
            FlopCounterMode, PaLM and torchtitan do.
    """
    whole = sum(length**2 for length in lengths)
    seen = {
        window: whole if not causal else sum(pairs(length, window=window) for length in lengths)
        for window in {layer.attention.window for layer in model.layers}
    }
    tokens = sum(lengths)
    return _passes(model, tokens, seen, tokens if logits is None else logits)


def prefill(model: Model, prompts: Sequence[int]) -> Flops:
    """Return the FLOPs of reading prompts: logits of the last token of each.

    With prefix caching, the samples of one prompt share it: count it once.
    """
    return forward(model, prompts, logits=len(prompts))


def decode(model: Model, prompts: Sequence[int], responses: Sequence[int]) -> Flops:
    """Return the FLOPs of generating responses token by token behind their prompts.

    The first token of a response is that of the prefill, and each step has all tokens before it
    in the KV cache. Latent attention is absorbed, as in vLLM and SGLang.
    """
    steps = sum(max(response - 1, 0) for response in responses)
    return _passes(model, steps, _decode_pairs(model, prompts, responses), steps, absorbed=True)


def _decode_pairs(
    model: Model, prompts: Sequence[int], responses: Sequence[int]
) -> dict[int | None, int]:
    """Return the pairs of query and key of all steps, by window."""
    sizes = [(max(one - 1, 0), prompt) for prompt, one in zip(prompts, responses, strict=True)]
    return {
        window: sum(pairs(new, prompt + new, window) for new, prompt in sizes)
        for window in {layer.attention.window for layer in model.layers}
    }


def decode_cache_bytes(
    model: Model, prompts: Sequence[int], responses: Sequence[int], *, bytes_each: int = 2
) -> int:
    """Return the bytes of KV cache that decoding reads: each step, of each sequence, all of it."""
    seen = _decode_pairs(model, prompts, responses)
    per_pair = (
        n * layer.attention.cached * seen[layer.attention.window]
        for layer, n in model.kinds.items()
    )
    return bytes_each * sum(per_pair)


def decode_weight_bytes(model: Model, batch: float, *, bytes_each: int = 2) -> float:
    """Return the bytes of weights that one decode step of a batch reads.

    Of E experts of which each token passes k, a batch of B hits ``E (1 - (1 - k/E)^B)`` if routing
    is uniform (TraceLens' model). The input embedding is a look-up.
    """
    weights = float(model.head_parameters)
    for layer, n in model.kinds.items():
        own = layer.every_token(model.hidden) + layer.other
        if isinstance(block := layer.block, Experts):
            hit = block.count * (1 - (1 - block.per_token / block.count) ** batch)
            own += hit * block.expert(model.hidden)
        weights += n * own
    return bytes_each * weights


def cache_bytes(model: Model, lengths: Iterable[int], *, bytes_each: int = 2) -> int:
    """Return the bytes of KV cache of sequences; layers with a window keep that many tokens.

    A layer with linear attention keeps a state instead, in fp32.
    """
    lengths, found = list(lengths), 0
    for layer, n in model.kinds.items():
        attention = layer.attention
        if isinstance(attention, LinearAttention):
            heads = attention.value_heads * attention.key_dim * attention.value_dim
            found += n * len(lengths) * 4 * (heads + attention.channels * attention.kernel)
            continue
        window = attention.window
        kept = sum(length if window is None else min(length, window) for length in lengths)
        found += n * attention.cached * kept * bytes_each
    return found


def _passes(
    model: Model,
    tokens: int,
    seen: dict[int | None, int],
    logits: int,
    *,
    absorbed: bool = False,
) -> Flops:
    """Return the FLOPs of tokens, given the pairs that their masks leave."""
    linear = attention = 0
    for layer, n in model.kinds.items():
        linear += n * 2 * tokens * layer.active(model.hidden)
        core = layer.attention.core_flops(tokens, seen[layer.attention.window], absorbed=absorbed)
        attention += n * core
    return Flops(linear, attention, 2 * logits * model.head_parameters)

"""FLOPs and memory traffic of a stage, from its tokens and the model's configuration."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from lightning_rlprof.analysis.efficiency.peak_flops import token_flops
from lightning_rlprof.analysis.models.architecture import Model
from lightning_rlprof.analysis.models.flops import (
    decode_cache_bytes,
    decode_weight_bytes,
    forward,
)
from lightning_rlprof.analysis.models.huggingface import Source, read_model
from lightning_rlprof.analysis.steps.time_categories import kind_of

_GENERATES = re.compile(r"(actor_)?generate(_\w+)?|rollouts?|generation|gen")


def flops_of(
    model: Source | Model, lengths: Sequence[int], kind: Literal["training", "forward"] = "training"
) -> int:
    """Return the FLOPs of a batch of sequences, to be counted: ``count(flops=flops_of(…))``.

    Matmuls and causal attention, without padding and recomputation, of the whole model: with
    tensor or pipeline parallelism, count them on one rank of a replica. A file is read once.

    Args:
        model: Path of a ``config.json``, its content, or a configuration object of transformers.
        lengths: Tokens of each sequence.
        kind: Forward and backward, or forward alone.

    Raises:
        RlprofError: The configuration cannot be read, or its model type is unknown.

    Example::

        >>> sizes = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 96}
        >>> layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> flops_of({"model_type": "llama", **sizes, **layers}, [24, 24], "forward")
        10782720
    """
    found = forward(model if isinstance(model, Model) else model_from(model), lengths)
    return found.training if kind == "training" else found.forward


def model_from(source: Source) -> Model:
    """Return the model of a configuration; a file is read once."""
    return _read(source) if isinstance(source, str) else read_model(source)


@lru_cache(maxsize=8)
def _read(path: str) -> Model:
    return read_model(path)


def recorded_model(configs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return what a run recorded of its model: the content of the file that ``model`` names."""
    found = (each.get("model") for each in configs)
    return next((each for each in found if isinstance(each, Mapping)), None)


def stage_flops(model: Model, stage: str, tokens: float, samples: float) -> float | None:
    """Return the FLOPs of a stage's tokens; None if its name does not show what it computes.

    Attention is that of sequences of the mean length; longer and shorter ones together need more.
    Without samples it is left out. Critics have a value head. Generated tokens count as a forward
    pass over responses, so their prompts are left out.
    """
    kind = kind_of(stage)
    if kind is None:
        return None
    own = model.critic() if stage.lower().startswith("critic") else model
    length = max(round(tokens / samples), 1) if samples else 1
    found = forward(own, [length])
    each = found.forward - (0 if samples else found.attention)
    return tokens / length * each * (3 if kind == "training" else 1)


def counted_flops(
    stage: str,
    counts: Mapping[tuple[str, str], tuple[float, int]],
    model: Model | None,
    parameters: float | None = None,
) -> tuple[float, int] | None:
    """Return the FLOPs of a stage and in how many ns they were done; None if they are unknown.

    Args:
        stage: Its name.
        counts: By stage and counter, its sum, and the ns of the spans that counted.
        model: Gives the FLOPs of ``tokens`` if no ``flops`` were counted.
        parameters: How many a token passes, if the model is unknown.
    """
    if found := counts.get((stage, "flops")):
        return found
    kind, tokens = kind_of(stage), counts.get((stage, "tokens"))
    if kind is None or tokens is None:
        return None
    samples, _ = counts.get((stage, "samples"), (0, 0))
    known = stage_flops(model, stage, tokens[0], samples) if model else None
    if known is None and parameters is not None:
        known = token_flops(parameters, kind) * tokens[0]
    return None if known is None else (known, tokens[1])


def generates(stage: str) -> bool:
    """Return whether a stage generates responses, by its name."""
    return _GENERATES.fullmatch(stage.lower()) is not None


def decode_bytes(model: Model, tokens: float, samples: float, calls: float) -> float:
    """Return the bytes that generating responses reads at least, in bf16.

    Each call decodes all its samples in one batch, and reads the weights once per token of a mean
    response and the KV cache of the response so far. Longer responses, prompts and smaller batches
    add to it.
    """
    batch, length = samples / calls, max(round(tokens / samples), 1)
    cache = decode_cache_bytes(model, [0], [length + 1]) * batch
    return calls * (length * decode_weight_bytes(model, batch) + cache)

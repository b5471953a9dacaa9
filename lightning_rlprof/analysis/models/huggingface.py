"""`read_model`: a model from the ``config.json`` that Hugging Face keeps beside its weights."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_rlprof.analysis.models.architecture import (
    Attention,
    Experts,
    LatentAttention,
    Layer,
    LinearAttention,
    Mlp,
    Model,
)
from lightning_rlprof.errors import RlprofError

Source = str | Path | Mapping[str, Any] | Any
"""A path of a ``config.json`` or of its folder, its content, or a transformers config object."""

_NAME = "config.json"
_QWEN_WINDOW = {"use_sliding_window": False, "max_window_layers": 28}
_DEEPSEEK = {"first_k_dense_replace": 0, "n_shared_experts": None}

_VISION = {
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
}
"""Types with a vision tower, and the type of their text part."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What the code of a model type in transformers does, beyond its configuration.

    Attributes:
        qkv_bias: Biases of query, key and value; a text is the key that decides. Without that key
            there are none.
        out_bias: The same for the output projection.
        qk_norm: Norms of queries and keys: per ``head``, over ``all`` heads, none; or the key that
            decides about one per head.
        norms: Norms of a layer, each of the hidden size.
        experts: Has a mixture of experts.
        expert_bias: Router and experts have biases, and attention has a sink per head.
        gated: Query projections have a gate.
        every: Layers from one that sees everything to the next; the others have a window, or are
            linear.
        defaults: Of keys that a ``config.json`` may lack, as in the class of transformers.
    """

    qkv_bias: bool | str = "attention_bias"
    out_bias: bool | str = "attention_bias"
    qk_norm: str = ""
    norms: int = 2
    experts: bool = False
    expert_bias: bool = False
    gated: bool = False
    every: int | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN3_NEXT = _Family(
    qk_norm="head",
    gated=True,
    experts=True,
    every=4,
    defaults={"head_dim": 256, "linear_conv_kernel_dim": 4},
)
_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(defaults={"sliding_window": 4096}),
    "qwen2": _Family(qkv_bias=True, out_bias=False, defaults=_QWEN_WINDOW),
    "qwen3": _Family(qk_norm="head", defaults={"head_dim": 128, **_QWEN_WINDOW}),
    "gemma": _Family(defaults={"head_dim": 256, "tie_word_embeddings": True}),
    "gemma2": _Family(
        norms=4,
        every=2,
        defaults={"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096},
    ),
    "gemma3_text": _Family(
        qk_norm="head",
        norms=4,
        every=6,
        defaults={"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 4096},
    ),
    "phi3": _Family(),
    "olmo2": _Family(qk_norm="all"),
    "smollm3": _Family(defaults={"tie_word_embeddings": True}),
    "granite": _Family(),
    "seed_oss": _Family(
        out_bias="attention_out_bias",
        defaults={"attention_bias": True, "head_dim": 128},
    ),
    "glm4": _Family(out_bias=False, norms=4, defaults={"attention_bias": True, "head_dim": 128}),
    "mixtral": _Family(experts=True),
    "olmoe": _Family(qk_norm="all", experts=True),
    "qwen2_moe": _Family(
        qkv_bias="qkv_bias", out_bias=False, experts=True, defaults={"qkv_bias": True}
    ),
    "qwen3_moe": _Family(qk_norm="head", experts=True),
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_5_text": replace(_QWEN3_NEXT, experts=False),
    "qwen3_5_moe_text": _QWEN3_NEXT,
    "deepseek_v2": _Family(experts=True, defaults=_DEEPSEEK),
    "deepseek_v3": _Family(experts=True, defaults={"first_k_dense_replace": 3}),
    "kimi_k2": _Family(experts=True, defaults={"first_k_dense_replace": 3}),
    "glm4_moe": _Family(
        out_bias=False,
        qk_norm="use_qk_norm",
        experts=True,
        defaults={"first_k_dense_replace": 1},
    ),
    "gpt_oss": _Family(
        experts=True,
        expert_bias=True,
        every=2,
        defaults={"head_dim": 64, "sliding_window": 128, "attention_bias": True},
    ),
}

KNOWN = tuple(sorted({*_FAMILIES, *_VISION}))
"""The model types that `read_model` knows."""


def read_model(source: Source) -> Model:
    """Return the model that a Hugging Face configuration describes. Nothing is imported or loaded.

    Args:
        source: Path of a ``config.json`` or of the folder that has one, its content, or a
            configuration object of transformers.

    Raises:
        RlprofError: It cannot be read, a key is missing, or the model type is unknown.

    Example::

        >>> sizes = {"hidden_size": 64, "intermediate_size": 112, "vocab_size": 96}
        >>> layers = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
        >>> read_model({"model_type": "llama", **sizes, **layers}).parameters
        114112
    """
    config = _Config(_content(source))
    kind = config.text("model_type")
    text_config = config.values.get("text_config")
    if kind in _VISION:
        nested = text_config if isinstance(text_config, Mapping) else {}
        # Older files have the keys of the text part beside those of the tower.
        text = _Config({**config.values, **nested, "model_type": _VISION[kind]})
        tied = config.values.get("tie_word_embeddings", text.values.get("tie_word_embeddings"))
        text = _Config({**text.values, "tie_word_embeddings": bool(tied)})
        vision = config.values.get("vision_config")
        if not isinstance(vision, Mapping):
            raise _missing("vision_config")
        return _text_model(text, kind, _vision(kind, _Config(vision)))
    if kind not in _FAMILIES:
        inside = text_config.get("model_type") if isinstance(text_config, Mapping) else None
        raise RlprofError(
            f"unknown model type {kind!r}",
            hint=f"Its text part, {inside}, is known: pass the content of 'text_config'."
            if inside in _FAMILIES
            else f"Known are {', '.join(KNOWN)}. Pass FLOPs per token, or count(flops=…).",
            code="model_type",
        )
    return _text_model(config, kind)


def _content(source: Source) -> Mapping[str, Any]:
    """Return the keys of a configuration."""
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | Path):
        found: Mapping[str, Any] = source.to_dict()
        return found
    path = Path(source)
    path = path / _NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RlprofError(
            f"cannot read the model configuration {path} ({error.strerror})",
            hint=f"Give the {_NAME} of the model on the Hugging Face hub, or its folder.",
        ) from error
    except ValueError as error:
        raise RlprofError(f"{path} is not a {_NAME}: not JSON") from error
    if not isinstance(content, dict):
        raise RlprofError(f"{path} is not a {_NAME}: not a JSON object")
    return content


def _missing(key: str) -> RlprofError:
    text = f"the model configuration has no {key!r}"
    return RlprofError(text, hint=f"Give the whole {_NAME} of the model.", code="model_config")


class _Config:
    """The keys of a configuration; one that is None counts as missing, and takes no default."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self.values = {**(defaults or {}), **values}

    def text(self, key: str) -> str:
        if not isinstance(self.values.get(key), str):
            raise _missing(key)
        return str(self.values[key])

    def find(self, *keys: str) -> int | None:
        """Return the first of some whole numbers that is there."""
        for key in keys:
            value = self.values.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 40:
                raise RlprofError(f"{key}={value!r} in the model configuration is not a count")
            return value
        return None

    def size(self, *keys: str) -> int:
        found = self.find(*keys)
        if not found:
            raise _missing(keys[0])
        return found

    def sequence(self, key: str) -> Sequence[Any]:
        found = self.values.get(key)
        return found if isinstance(found, list | tuple) else ()

    def holds(self, decides: bool | str) -> bool:
        """Return a fact, or the value of the key that decides it."""
        return bool(self.values.get(decides)) if isinstance(decides, str) else decides


def _text_model(config: _Config, name: str, vision: int = 0) -> Model:
    family = _FAMILIES[config.text("model_type")]
    config = _Config(config.values, family.defaults)
    hidden, count = config.size("hidden_size"), config.size("num_hidden_layers")
    kinds = _layer_kinds(config, family, count)
    layers = []
    for at, kind in enumerate(kinds):
        attention, biases = _attention(config, family, hidden, kind)
        block, block_biases = _block(config, family, hidden, at)
        layers.append(Layer(attention, block, family.norms * hidden + biases + block_biases))
    return Model(
        name,
        hidden,
        config.size("vocab_size"),
        tuple(layers),
        tied=bool(config.values.get("tie_word_embeddings")),
        other=hidden,
        vision=vision,
    )


def _layer_kinds(config: _Config, family: _Family, count: int) -> list[str]:
    """Return for each layer: ``full_attention``, ``sliding_attention`` or ``linear_attention``."""
    given = config.sequence("layer_types")
    if given:
        if len(given) != count:
            raise RlprofError(f"layer_types has {len(given)} layers, num_hidden_layers {count}")
        return [str(each) for each in given]
    every = config.find("full_attention_interval", "sliding_window_pattern") or family.every
    partial = "linear_attention" if "linear_key_head_dim" in config.values else "sliding_attention"
    first = 0
    # In Qwen, only the upper layers use a sliding window.
    if "use_sliding_window" in config.values:
        first = config.size("max_window_layers") if config.holds("use_sliding_window") else count
    return [
        "full_attention" if at < first or (every and (at + 1) % every == 0) else partial
        for at in range(count)
    ]


def _attention(
    config: _Config, family: _Family, hidden: int, kind: str
) -> tuple[Attention | LatentAttention | LinearAttention, int]:
    """Return the attention of a layer, and its biases and norms."""
    heads = config.size("num_attention_heads")
    if kind == "linear_attention":
        heads_and_sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        sizes = [config.size(f"linear_{each}") for each in (*heads_and_sizes, "conv_kernel_dim")]
        linear = LinearAttention(*sizes)
        other = linear.channels * linear.kernel + 2 * linear.value_heads + linear.value_dim
        return linear, other
    if rank := config.find("kv_lora_rank"):
        query = config.find("q_lora_rank")
        dims = map(config.size, ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        latent = LatentAttention(heads, query or None, rank, *dims)
        return latent, rank + (query or 0)
    kv_heads = config.find("num_key_value_heads") or heads
    head_dim = config.find("head_dim") or hidden // heads
    window = config.find("sliding_window") if kind == "sliding_attention" else None
    wide, narrow = heads * head_dim, kv_heads * head_dim
    other = (wide + 2 * narrow) * config.holds(family.qkv_bias)
    other += hidden * config.holds(family.out_bias) + heads * family.expert_bias
    if family.qk_norm == "all":
        other += wide + narrow
    elif family.qk_norm == "head" or (family.qk_norm and config.holds(family.qk_norm)):
        other += 2 * head_dim
    return Attention(heads, kv_heads, head_dim, window or None, family.gated), other


def _block(config: _Config, family: _Family, hidden: int, at: int) -> tuple[Mlp | Experts, int]:
    """Return the feed-forward block of a layer, and its biases."""
    dense = at < (config.find("first_k_dense_replace") or 0) or at in config.sequence(
        "mlp_only_layers"
    )
    if not family.experts or dense or (at + 1) % (config.find("decoder_sparse_step") or 1):
        width = config.size("intermediate_size")
        return Mlp(width), (2 * width + hidden) * config.holds("mlp_bias")
    count = config.size("num_experts", "num_local_experts", "n_routed_experts")
    width = config.size("moe_intermediate_size", "intermediate_size")
    gated = config.find("shared_expert_intermediate_size") or 0
    shared = gated or (config.find("n_shared_experts") or 0) * width
    experts = Experts(
        count, config.size("num_experts_per_tok"), width, shared, bool(gated), family.expert_bias
    )
    return experts, count * family.expert_bias


def _vision(kind: str, config: _Config) -> int:
    """Return the parameters of the tower; biases and norms as in its class in transformers."""
    old = kind == "qwen2_vl"
    hidden = config.size("embed_dim") if old else config.size("hidden_size")
    width = 4 * hidden if old else config.size("intermediate_size")
    if old and isinstance(ratio := config.values.get("mlp_ratio"), int | float):
        width = int(ratio * hidden)
    depth, side = config.size("depth"), config.size("patch_size")
    patch = (config.find("in_channels", "in_chans") or 3) * side**2
    patch *= config.find("temporal_patch_size") or 2
    merge = config.find("spatial_merge_size") or 2
    out = config.size("hidden_size") if old else config.size("out_hidden_size")
    matrices = 3 if kind == "qwen2_5_vl" else 2
    biases = 3 * hidden + hidden + (matrices - 1) * width + hidden
    # RMSNorm has one parameter per value, LayerNorm two.
    norm = hidden if kind == "qwen2_5_vl" else 2 * hidden
    merged = merge**2 * hidden
    other = depth * (biases + 2 * norm) + norm + merged + out
    mergers = 1
    if kind.startswith("qwen3"):
        deep = len(config.sequence("deepstack_visual_indexes"))
        other += hidden + config.size("num_position_embeddings") * hidden
        other += deep * (3 * merged + out)
        mergers += deep
    layers = depth * (4 * hidden**2 + matrices * hidden * width)
    return hidden * patch + layers + mergers * merged * (merged + out) + other

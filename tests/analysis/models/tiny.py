"""Configurations of small models, one per model type: a `config.json` as transformers writes it."""

from typing import Any

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT = {
    **MOE,
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
}
WIDE = {"head_dim": 32}
LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
TOWER = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "depth": 4,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}


def _text(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **BASE, **changes}


def _eyes(model_type: str, text: str, tower: dict[str, Any], **changes: Any) -> dict[str, Any]:
    vision = {**TOWER, **tower}
    inner = {**BASE, **changes, "model_type": text}
    return {"model_type": model_type, "text_config": inner, "vision_config": vision}


QWEN3_TOWER = {"num_position_embeddings": 64, "deepstack_visual_indexes": [1, 2]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _text("llama"),
    "llama tied": _text("llama", tie_word_embeddings=True),
    "qwen2": _text("qwen2"),
    "qwen2 sliding": _text("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": _text("qwen3", **WIDE),
    "mistral": _text("mistral", head_dim=16, sliding_window=8),
    "gemma": _text("gemma", **WIDE),
    "gemma2": _text("gemma2", **WIDE, sliding_window=8),
    "gemma3": _text("gemma3_text", **WIDE, sliding_window=8, num_hidden_layers=7),
    "phi3": _text("phi3"),
    "olmo2": _text("olmo2"),
    "smollm3": _text("smollm3"),
    "granite": _text("granite"),
    "seed_oss": _text("seed_oss", **WIDE),
    "glm4": _text("glm4", **WIDE),
    "mixtral": _text("mixtral", num_local_experts=4, num_experts_per_tok=2),
    "olmoe": _text("olmoe", num_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _text("qwen2_moe", **MOE, num_experts=4, shared_expert_intermediate_size=80),
    "qwen3_moe": _text("qwen3_moe", **MOE, **WIDE, num_experts=4),
    "deepseek_v2": _text("deepseek_v2", **LATENT, n_shared_experts=2, q_lora_rank=None),
    "deepseek_v3": _text(
        "deepseek_v3", **LATENT, n_shared_experts=1, q_lora_rank=40, n_group=1, topk_group=1
    ),
    "gpt_oss": _text(
        "gpt_oss",
        **WIDE,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=48,
        sliding_window=8,
    ),
    "glm4_moe": _text(
        "glm4_moe",
        **MOE,
        **WIDE,
        n_routed_experts=4,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
    ),
    "qwen3_next": _text(
        "qwen3_next", **MOE, **LINEAR, num_experts=4, shared_expert_intermediate_size=80
    ),
    "qwen3_5": _text("qwen3_5_text", **LINEAR),
    "qwen2_vl": _eyes("qwen2_vl", "qwen2_vl_text", {"embed_dim": 48, "hidden_size": 64}),
    "qwen2_5_vl": _eyes(
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        {"window_size": 16, "fullatt_block_indexes": [3]},
    ),
    "qwen3_vl": _eyes("qwen3_vl", "qwen3_vl_text", QWEN3_TOWER, head_dim=16),
    "qwen3_vl_moe": _eyes(
        "qwen3_vl_moe", "qwen3_vl_moe_text", QWEN3_TOWER, head_dim=16, num_experts=4, **MOE
    ),
}

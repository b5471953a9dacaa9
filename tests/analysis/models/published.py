"""Dimensions of published models: the facts of their `config.json` on the Hugging Face hub."""

from typing import Any

from lightning_rlprof.analysis.models.architecture import Experts, Model


def _config(model_type: str, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    keys = dict(zip((*names, "intermediate_size", "vocab_size"), sizes, strict=True))
    return {"model_type": model_type, **keys, **others}


_QWEN3_MOE = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
_DEEPSEEK = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_QWEN3_LINEAR = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "head_dim": 256,
}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3-8B": _config("llama", (4096, 32, 32, 8, 14336, 128256)),
    "Llama-3-70B": _config("llama", (8192, 80, 64, 8, 28672, 128256)),
    "Llama-3.2-1B": _config("llama", (2048, 16, 32, 8, 8192, 128256), tie_word_embeddings=True),
    "Llama-2-7B": _config("llama", (4096, 32, 32, 32, 11008, 32000)),
    "Llama-2-13B": _config("llama", (5120, 40, 40, 40, 13824, 32000)),
    "Llama-2-70B": _config("llama", (8192, 80, 64, 8, 28672, 32000)),
    "Qwen2.5-0.5B": _config("qwen2", (896, 24, 14, 2, 4864, 151936), tie_word_embeddings=True),
    "Qwen2.5-1.5B": _config("qwen2", (1536, 28, 12, 2, 8960, 151936), tie_word_embeddings=True),
    "Qwen2.5-3B": _config("qwen2", (2048, 36, 16, 2, 11008, 151936), tie_word_embeddings=True),
    "Qwen2.5-7B": _config("qwen2", (3584, 28, 28, 4, 18944, 152064)),
    "Qwen2.5-14B": _config("qwen2", (5120, 48, 40, 8, 13824, 152064)),
    "Qwen2.5-32B": _config("qwen2", (5120, 64, 40, 8, 27648, 152064)),
    "Qwen2.5-72B": _config("qwen2", (8192, 80, 64, 8, 29568, 152064)),
    "Qwen2.5-VL-7B": {
        **_config("qwen2_5_vl", (3584, 28, 28, 4, 18944, 152064)),
        "vision_config": {
            **{"hidden_size": 1280, "intermediate_size": 3420, "depth": 32, "num_heads": 16},
            **{"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
            "out_hidden_size": 3584,
        },
    },
    "Qwen3-0.6B": _config(
        "qwen3", (1024, 28, 16, 8, 3072, 151936), head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3-4B": _config(
        "qwen3", (2560, 36, 32, 8, 9728, 151936), head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3-14B": _config("qwen3", (5120, 40, 40, 8, 17408, 151936), head_dim=128),
    "SmolLM3-3B": _config("smollm3", (2048, 36, 16, 4, 11008, 128256), tie_word_embeddings=True),
    "Qwen3-8B": _config("qwen3", (4096, 36, 32, 8, 12288, 151936), head_dim=128),
    "Qwen3-32B": _config("qwen3", (5120, 64, 64, 8, 25600, 151936), head_dim=128),
    "Qwen3-30B-A3B": _config(
        "qwen3_moe", (2048, 48, 32, 4, 6144, 151936), **_QWEN3_MOE, moe_intermediate_size=768
    ),
    "Qwen3-235B-A22B": _config(
        "qwen3_moe", (4096, 94, 64, 4, 12288, 151936), **_QWEN3_MOE, moe_intermediate_size=1536
    ),
    "DeepSeek-V3": _config(
        "deepseek_v3",
        (7168, 61, 128, 128, 18432, 129280),
        **_DEEPSEEK,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        first_k_dense_replace=3,
    ),
    "Kimi-K2": _config(
        "kimi_k2",
        (7168, 61, 64, 64, 18432, 163840),
        **_DEEPSEEK,
        n_routed_experts=384,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "GLM-4.5-Air": _config(
        "glm4_moe",
        (4096, 46, 96, 8, 10944, 151552),
        **{"head_dim": 128, "attention_bias": True, "use_qk_norm": False},
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "DeepSeek-V2": _config(
        "deepseek_v2",
        (5120, 60, 128, 128, 12288, 102400),
        **_DEEPSEEK,
        n_routed_experts=160,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        n_shared_experts=2,
        first_k_dense_replace=1,
    ),
    "Mixtral-8x7B": _config(
        "mixtral",
        (4096, 32, 32, 8, 14336, 32000),
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    "gpt-oss-120b": _config(
        "gpt_oss", (2880, 36, 64, 8, 2880, 201088), **_GPT_OSS, num_local_experts=128
    ),
    "gpt-oss-20b": _config(
        "gpt_oss", (2880, 24, 64, 8, 2880, 201088), **_GPT_OSS, num_local_experts=32
    ),
    "Gemma-2-9B": _config(
        "gemma2", (3584, 42, 16, 8, 14336, 256000), head_dim=256, sliding_window=4096
    ),
    "Gemma-3-27B": _config(
        "gemma3_text", (5376, 62, 32, 16, 21504, 262208), head_dim=128, sliding_window=1024
    ),
    "CodeLlama-34B": _config("llama", (8192, 48, 64, 8, 22016, 32000)),
    "Yi-34B": _config("llama", (7168, 60, 56, 8, 20480, 64000)),
    "Llama-3.1-405B": _config("llama", (16384, 126, 128, 8, 53248, 128256)),
    "Qwen3-1.7B": _config(
        "qwen3", (2048, 28, 16, 8, 6144, 151936), head_dim=128, tie_word_embeddings=True
    ),
    "Qwen3.6-27B": _config(
        "qwen3_5_text",
        (5120, 64, 24, 4, 17408, 248320),
        linear_num_value_heads=48,
        **_QWEN3_LINEAR,
    ),
    "Qwen3.6-35B-A3B": _config(
        "qwen3_5_moe_text",
        (2048, 40, 16, 2, 512, 248320),
        linear_num_value_heads=32,
        **_QWEN3_LINEAR,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "InternLM-7B": _config("llama", (4096, 32, 32, 32, 11008, 103168), attention_bias=True),
    "TinyLlama-1.1B": _config("llama", (2048, 22, 32, 4, 5632, 32000)),
    "KempnerForge-13B": _config("llama", (5120, 40, 40, 8, 17920, 128256)),
    "KempnerForge-29B": _config("llama", (6144, 56, 48, 8, 21504, 128256)),
    # MPT's blocks have two matrices of 4 x hidden: as many FLOPs and weights as these three.
    "MPT-13B": _config("llama", (5120, 40, 40, 40, 13653, 50368), tie_word_embeddings=True),
    "MPT-30B": _config("llama", (7168, 48, 56, 56, 19115, 50368), tie_word_embeddings=True),
    "MPT-70B": _config("llama", (8192, 80, 64, 64, 21845, 50368), tie_word_embeddings=True),
}


def active_parameters(model: Model) -> int:
    """Return the parameters that one token of text passes, the input embedding included.

    Model cards differ: gpt-oss leaves the input embedding out.
    """
    idle = sum(
        n * layer.experts(model.hidden) * (1 - block.per_token / block.count)
        for layer, n in model.kinds.items()
        if isinstance(block := layer.block, Experts)
    )
    return model.parameters - model.vision - round(idle)


def cache_bytes_per_token(model: Model) -> int:
    """Return the bytes of KV cache per token in bf16, of all layers, as if no window was full."""
    return 2 * sum(n * layer.attention.cached for layer, n in model.kinds.items())

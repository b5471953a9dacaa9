"""FLOPs, parameters and KV cache: against listed counts, published figures, and torch's counter."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_rlprof.analysis.models.architecture import Attention, Experts, Model
from lightning_rlprof.analysis.models.flops import (
    cache_bytes,
    decode,
    decode_cache_bytes,
    decode_weight_bytes,
    forward,
    pairs,
    prefill,
)
from lightning_rlprof.analysis.models.huggingface import read_model
from tests.analysis.models.published import CONFIGS, active_parameters, cache_bytes_per_token
from tests.analysis.models.tiny import MODELS

BATCH = [24, 24]
COUNTED = {
    "llama": (11_206_656, 10_782_720, 114_112),
    "llama tied": (11_206_656, 10_782_720, 107_968),
    "qwen2": (11_206_656, 10_782_720, 114_496),
    "qwen2 sliding": (11_206_656, 10_643_456, 114_496),
    "qwen3": (15_630_336, 14_782_464, 151_168),
    "mistral": (11_206_656, 10_573_824, 114_112),
    "gemma2": (15_630_336, 14_503_936, 145_216),
    "gemma3": (35_684_352, 32_870_400, 331_008),
    "mixtral": (17_473_536, 17_049_600, 308_416),
    "qwen2_moe": (14_837_760, 14_413_824, 207_616),
    "qwen3_moe": (14_819_328, 13_971_456, 198_016),
    "deepseek_v2": (15_826_944, 15_244_032, 195_720),
    "deepseek_v3": (14_131_200, 13_548_288, 178_176),
    "gpt_oss": (19_562_496, 18_153_472, 263_520),
    "glm4_moe": (16_859_136, 16_011_264, 200_640),
}
"""Forward FLOPs of 2 x 24 tokens, all pairs and causal, and parameters, counted by torch."""

PUBLISHED = {
    "Llama-3-8B": (8_030_261_248, None, (45.83, 48.25, 70.80), 131_072),
    "Llama-3-70B": (70_553_706_496, None, (421.0, 433.1, 545.9), 327_680),
    "Qwen2.5-0.5B": (494_032_768, None, (3.10, 3.49, 7.19), 12_288),
    "Qwen2.5-7B": (7_615_616_512, None, (43.04, 44.89, 62.15), 57_344),
    "Qwen2.5-32B": (32_763_876_352, None, (193.9, 200.0, 256.3), 262_144),
    "Qwen2.5-72B": (72_706_203_648, None, (432.8, 444.9, 557.6), 327_680),
    "Qwen3-8B": (8_190_735_360, None, (46.32, 49.03, 74.40), 147_456),
    "Qwen3-30B-A3B": (30_532_122_624, 3_353_032_704, (19.46, 23.08, 56.91), 98_304),
    "Qwen3-235B-A22B": (235_093_634_560, 22_190_763_520, (134.1, 148.3, 280.8), 192_512),
    # without the router's correction biases, which transformers keeps as buffers
    "DeepSeek-V3": (671_026_419_200 - 58 * 256, 37_552_282_624, (227.4, 250.5, 465.4), 70_272),
    "DeepSeek-V2": (235_741_434_880, 21_375_800_320, (132.7, 155.3, 366.7), 69_120),
    "Mixtral-8x7B": (46_702_792_704, 12_879_925_248, (77.30, 79.71, 102.3), 131_072),
    "gpt-oss-120b": (116_829_156_672, 5_711_982_912, (31.35, 32.71, 45.40), 73_728),
    "gpt-oss-20b": (20_914_757_184, 4_187_440_704, (22.02, 22.93, 31.38), 49_152),
    "Gemma-2-9B": (9_241_705_984, None, (None, 59.68, None), 344_064),
    "Gemma-3-27B": (27_009_346_304, None, (None, 165.3, None), 507_904),
}
"""Parameters, active ones, GFLOP per trained token at 1k, 4k and 32k, bytes of KV cache."""

CARDS = {
    **{"Llama-3-8B": (8.03, None), "Llama-3-70B": (70.6, None), "Qwen2.5-7B": (7.61, None)},
    **{"Qwen2.5-72B": (72.7, None), "Qwen3-8B": (8.2, None), "Qwen3-235B-A22B": (235, None)},
    **{"Mixtral-8x7B": (46.7, 12.9), "DeepSeek-V3": (671, None), "Qwen3-30B-A3B": (30.5, None)},
    **{"gpt-oss-120b": (116.83, None), "gpt-oss-20b": (20.91, None), "DeepSeek-V2": (236, None)},
    **{"Qwen2.5-0.5B": (0.49, None), "Gemma-2-9B": (9.24, None), "Gemma-3-27B": (27, None)},
}
"""Billions of parameters, and of active ones, on the model cards."""

RATES = {"Qwen3-30B-A3B": 23.10, "Qwen3-235B-A22B": 148.14, "gpt-oss-120b": 32.61}
"""GFLOP per trained token at 4096, of Megatron-Bridge's TFLOP/s over its tokens/s."""


def published(name: str) -> Model:
    return read_model(CONFIGS[name])


def tiny(name: str) -> Model:
    return read_model(MODELS[name])


@pytest.mark.parametrize("name", COUNTED)
def test_small_models_have_the_counts_of_torch(name: str) -> None:
    every_pair, causal, parameters = COUNTED[name]
    model = tiny(name)
    assert forward(model, BATCH, causal=False).forward == every_pair
    assert forward(model, BATCH).forward == causal
    assert model.parameters == parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_parameters_and_flops(name: str) -> None:
    parameters, active, trained, cache = PUBLISHED[name]
    model = published(name)
    assert model.parameters == parameters
    assert active_parameters(model) == (active or parameters)
    for length, gflops in zip((1024, 4096, 32768), trained, strict=True):
        own = forward(model, [length]).training / length / 1e9
        assert gflops is None or own == pytest.approx(gflops, rel=1e-3, abs=0.005)
    assert cache_bytes_per_token(model) == cache


@pytest.mark.parametrize("name", CARDS)
def test_parameters_are_those_of_the_model_cards(name: str) -> None:
    total, active = CARDS[name]
    model = published(name)
    assert model.parameters / 1e9 == pytest.approx(total, rel=0.005, abs=0.005)
    assert active is None or active_parameters(model) / 1e9 == pytest.approx(active, rel=0.005)


def test_gpt_oss_counts_active_parameters_without_the_embedding() -> None:
    for name, active in (("gpt-oss-120b", 5.13), ("gpt-oss-20b", 3.61)):
        model = published(name)
        own = (active_parameters(model) - model.embedding_parameters) / 1e9
        assert own == pytest.approx(active, rel=0.001)


@pytest.mark.parametrize("name", RATES)
def test_flops_are_those_that_megatron_bridge_reports(name: str) -> None:
    own = forward(published(name), [4096]).training / 4096 / 1e9
    assert own == pytest.approx(RATES[name], rel=0.005)


def test_the_lookup_of_the_embedding_is_no_matmul_as_in_verl() -> None:
    model = published("Qwen2.5-7B")
    own = forward(model, [512, 1024, 2048]).training
    assert own / 1e12 == pytest.approx(155.3562, abs=1e-4)
    lookup = 6 * 3584 * model.embedding_parameters
    assert (own + lookup) / 1e12 == pytest.approx(167.0737, rel=1e-4)  # verl's own test


def test_passes_of_training() -> None:
    assert forward(tiny("qwen3"), BATCH, causal=False).training == 46_891_008


def test_a_critic_has_one_output() -> None:
    critic = tiny("qwen3").critic()
    assert forward(critic, BATCH, causal=False).forward == 15_046_656
    assert critic.parameters == tiny("qwen3").parameters - 64 * 95
    assert tiny("llama tied").critic().parameters == 107_968 + 64  # the embedding stays


def test_prefill_and_decode() -> None:
    model = tiny("qwen3")
    assert forward(model, BATCH, logits=2, causal=False).forward == 15_065_088
    assert prefill(model, BATCH).forward == forward(model, BATCH, logits=2).forward
    assert decode(model, BATCH, [2, 2]).forward == 654_336
    assert cache_bytes(model, [25, 25], bytes_each=4) == 76_800


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral", "gpt_oss", "qwen3_next"])
def test_reading_a_prompt_and_decoding_is_a_forward_pass_in_parts(name: str) -> None:
    model = tiny(name)
    whole = forward(model, [30 + 11], logits=12)
    parts = prefill(model, [30]), decode(model, [30], [12])
    assert sum(part.forward for part in parts) == whole.forward


def test_an_absorbed_decode_costs_more_per_token_of_context() -> None:
    attention = published("DeepSeek-V3").layers[0].attention
    assert attention.core_flops(1, 1) == 81_920
    assert attention.core_flops(1, 1, absorbed=True) == 278_528
    model = published("DeepSeek-V3")
    more = decode(model, [1000], [2]).attention
    assert more == 61 * 1001 * 278_528


def test_pairs_are_what_a_mask_leaves() -> None:
    for total in range(1, 12):
        for new in range(1, total + 1):
            for window in (None, 1, 3, 20):
                seen = [
                    key
                    for query in range(total - new, total)
                    for key in range(query + 1)
                    if window is None or query - key < window
                ]
                assert pairs(new, total, window) == len(seen)


def test_decoding_reads_the_whole_cache_in_each_step() -> None:
    model = tiny("gemma2")
    steps = (cache_bytes(model, [5 + step]) for step in range(1, 10))
    assert decode_cache_bytes(model, [5], [10]) == sum(steps)


def test_decoding_reads_the_experts_that_a_batch_hits() -> None:
    model = published("DeepSeek-V3")
    block = model.layers[-1].block
    assert isinstance(block, Experts)
    one = active_parameters(model) - model.embedding_parameters - model.other
    assert decode_weight_bytes(model, 1) == pytest.approx(2 * one)
    everything = decode_weight_bytes(model, 10_000)
    assert everything == pytest.approx(2 * (model.parameters - model.embedding_parameters), 1e-6)
    hit = (decode_weight_bytes(model, 64) - decode_weight_bytes(model, 1)) / 2 / 58
    assert hit / block.expert(7168) == pytest.approx(222 - 8, abs=0.5)


def test_linear_attention_keeps_a_state_of_fixed_size() -> None:
    model = tiny("qwen3_next")
    full = 2 * 2 * 32 * 2  # one layer of four: keys and values, two heads, bf16
    assert cache_bytes_per_token(model) == full
    assert cache_bytes(model, [101]) - cache_bytes(model, [1]) == 100 * full
    states = 3 * 4 * (4 * 16 * 16 + (2 * 2 * 16 + 4 * 16) * 4)  # three layers, fp32: heads, kernel
    assert cache_bytes(model, [1, 1]) == 2 * (full + states)


def test_text_beside_a_tower() -> None:
    for name, flops in (("qwen3_vl", 10_730_496), ("qwen3_vl_moe", 10_020_864)):
        model = replace(tiny(name), vocabulary=160)  # with the tokens that stand for images
        assert forward(model, [42], causal=False).forward == flops


def test_windows_larger_than_a_sequence_do_nothing() -> None:
    assert Attention(4, 2, 16, window=8).core_flops(1, pairs(7, window=8)) == 4 * 28 * 64


@pytest.mark.deep
@pytest.mark.parametrize("name", MODELS)
def test_torch_counts_the_same_on_a_model_of_transformers(name: str) -> None:
    torch, model = _built(name)
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    for config in (MODELS[name], model.config):
        own = read_model(config)
        assert own.parameters == sum(each.numel() for each in model.parameters())
        ids = torch.randint(0, 96, (2, 24))
        with flop_counter.FlopCounterMode(display=False) as counted, torch.no_grad():
            model(input_ids=ids, use_cache=False)
        found = forward(own, BATCH, causal=False)
        cores = counted.get_flop_counts()["Global"]
        if "linear_attention" in (getattr(model.config, "layer_types", None) or ()):
            # Without its kernel, transformers computes the recurrence in another way.
            assert found.linear + found.head == cores[torch.ops.aten.mm] + _batched(cores, torch)
        else:
            assert found.forward == counted.get_total_flops()


def _batched(cores: Any, torch: Any) -> int:
    return int(cores.get(torch.ops.aten.addmm, 0))


def _built(name: str) -> tuple[Any, Any]:
    """Return torch, and a model with random weights, with attention that torch's counter sees."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    content = {key: value for key, value in MODELS[name].items() if key != "model_type"}
    if "text_config" in content:
        auto, none = transformers.AutoModelForImageTextToText, {}
        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        content["text_config"] = {**content["text_config"], "rope_parameters": rope}
    else:
        auto = transformers.AutoModelForCausalLM
        none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    config = transformers.CONFIG_MAPPING[MODELS[name]["model_type"]](**content, **none)
    # The default implementations call kernels that are not registered with the counter.
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return torch, auto.from_config(config, **eager)

"""Attainable times: what each fact does to a range, and gaps as their authors explained them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.efficiency.peak_flops import Peak, device_labeled
from lightning_rlprof.analysis.models.architecture import Model
from lightning_rlprof.analysis.models.huggingface import read_model
from lightning_rlprof.analysis.sizing.attainable import (
    BEST,
    WORST,
    Pass,
    Refit,
    Rollout,
    Work,
    lengths,
    tensors,
)
from lightning_rlprof.analysis.sizing.speed import Speed, judge_speed
from tests.analysis.models.published import CONFIGS

H100 = device_labeled("H100")


def model(name: str) -> Model:
    return read_model(CONFIGS[name])


def rollout(**facts: Any) -> Rollout:
    how: dict[str, Any] = {
        **{"samples": 2048, "prompt": 200, "mean": (795, 795), "longest": (4096, 4096)},
        **{"group": 32, "eager": (False, False), "max_num_seqs": (1024, 1024)},
    }
    return Rollout(model("Llama-3-8B"), H100, 8, **{**how, "share": (0.85, 0.85), **facts})


def update(**facts: Any) -> Pass:
    how: dict[str, Any] = {"samples": 2048, "mean": (995, 995), "backward": True}
    known = {"micro_tokens": (16384, 16384), "recompute": (True, True), "offload": (0, 0)}
    return Pass(model("Llama-3-8B"), H100, 8, **{**how, **known, "sharded": (True, True), **facts})


def verdict(seconds: float, work: Work) -> Speed:
    return judge_speed("stage", seconds, work)


def test_the_ranges_are_those_that_were_chosen_on_the_calibration_rows() -> None:
    assert rollout().range() == pytest.approx((34.2, 95.6), rel=0.01)
    refit = Refit(model("Llama-3-8B"), H100, 8, ("ipc", "ipc"))
    assert refit.range()[WORST] == pytest.approx(8.0, rel=0.01)


def test_the_longest_response_decides_and_few_sequences_at_a_time_take_longer() -> None:
    base = rollout().range()
    for facts in ({"longest": (8192, 8192)}, {"max_num_seqs": (64, 64)}, {"eager": (True, True)}):
        assert all(more > less for more, less in zip(rollout(**facts).range(), base, strict=True))
    assert rollout().parts(WORST)["tail"] > 0.1 * base[WORST]
    small = rollout(kv_tokens=(9000, 9000)).range()  # Two sequences at a time.
    assert small[BEST] > 4 * base[BEST]


def test_engines_have_the_gibibytes_of_the_data_sheet_less_what_they_keep() -> None:
    """80 GB are 85 x 10^9 bytes; activations and graphs keep 1.5 GB of the engine's at best."""
    most, least = (
        (0.85 * H100.usable - 2 * 8_030_261_248 - kept) / 131_072 for kept in (1.5e9, 3e9)
    )
    known = {"kv_tokens": (most, least), "longest": (8192, 8192)}
    assert H100.usable == pytest.approx(85.04e9, rel=1e-3)
    assert rollout(**known).range() == pytest.approx(rollout(longest=(8192, 8192)).range())


def test_devices_that_share_no_head_keep_the_whole_cache() -> None:
    """DeepSeek-V3 caches 576 numbers of each layer and token, which no head divides."""
    v3 = model("DeepSeek-V3")
    known = {"mean": (2000, 2000), "longest": (8192, 8192), "samples": 4096}
    one = replace(rollout(**known, tp=(32, 32)), model=v3, devices=32)
    free = (0.85 * H100.usable - 2 * v3.parameters / 32 - kept for kept in (1.5e9, 3e9))
    room = tuple(each / (61 * 576 * 2) for each in free)
    assert replace(one, kv_tokens=room).range() == pytest.approx(one.range())


def test_a_full_cache_loses_the_youngest_sequence_which_is_read_again() -> None:
    """Two of 2,000 tokens in a cache for 3,000: at 1,500 each, one goes, and returns at the end."""
    pair = {"samples": 16, "prompt": 1, "mean": (2000, 2000), "longest": (2000, 2000), "group": 1}
    full, roomy = (rollout(**pair, kv_tokens=(room, room)).parts(WORST) for room in (3000, 10_000))
    steps = 1500 + 500 + 500
    assert full["host"] == pytest.approx(steps * 6e-3 + 4000 * 40e-6, rel=0.01)
    assert roomy["host"] == pytest.approx(2000 * 6e-3 + 4000 * 40e-6)
    assert full["prefill"] == pytest.approx(roomy["prefill"] / 2 * (2 + 1500), rel=0.01)


def one_response(**facts: Any) -> Rollout:
    """Return a rollout of one response of 1,000 tokens: one sequence in 1,000 steps."""
    alone = {"samples": 1, "mean": (1000, 1000), "longest": (1000, 1000), "group": 1}
    return rollout(**{**alone, **facts})


def test_devices_of_an_engine_reduce_what_they_computed() -> None:
    """Two all-reduces per layer: a delay, and half of 4,096 numbers of 2 bytes there and back."""
    card = replace(one_response(tp=(2, 2)), device=device_labeled("A800-PCIe-80G"))
    each = 10e-6 + 2 * 0.5 * 4096 * 2 / (32e9 * 0.8)
    assert card.parts(BEST)["link"] == pytest.approx(1000 * 32 * 2 * each)
    assert one_response().parts(WORST)["link"] == 0


def test_engines_that_share_experts_exchange_tokens() -> None:
    """Sixteen devices on two nodes: FP8 there and BF16 back, once to the other node at best."""
    shared = replace(one_response(ep=16), model=model("DeepSeek-V3"), devices=16)
    best = 2 * 40e-6 + 3 * 7168 / 2 * 2 / (50e9 * 0.8)
    worst = 2 * (150e-6 + 16e-6) + 4 * 7168 * 8 * 15 / 16 / (50e9 * 0.35)
    links = [shared.parts(end)["link"] / 1000 / 58 for end in (BEST, WORST)]
    assert links == pytest.approx([best, worst])
    assert replace(shared, ep=0).parts(WORST)["link"] == 0


def test_launches_without_graphs_run_while_the_device_works() -> None:
    """A step reads 15 GB of weights: 8.2 ms at 0.55 of 3.35 TB/s; half is lost at worst."""
    busy = one_response().parts(WORST)["memory"] / 1000
    assert busy == pytest.approx(8.2e-3, rel=0.02)
    graphs, eager = (one_response(eager=(each, each)).parts(WORST)["host"] for each in (0, 1))
    assert eager - graphs == pytest.approx(1000 * (32 * 0.9e-3 - busy / 2))
    slow = replace(one_response(), device=Peak("x", "slow", 100, 300, 80))
    assert replace(slow, eager=(True, True)).range()[BEST] == pytest.approx(slow.range()[BEST])


def test_lengths_have_the_mean_and_the_longest() -> None:
    found = lengths(800, 4096, 0.8, 500)
    assert found.mean() == pytest.approx(800, rel=0.02)
    assert found.max() == found[-1] == 4096
    assert np.all(found >= 1)


def test_parts_of_a_pass_follow_what_it_does() -> None:
    whole = update().parts(WORST)
    assert update(micro_tokens=(1, 1)).parts(WORST)["launches"] > 10 * whole["launches"]
    assert update(padding=(2, 2)).parts(BEST)["compute"] == pytest.approx(
        2 * update().parts(BEST)["compute"]
    )
    assert update(recompute=(False, False)).range()[WORST] < whole["total"]
    alone = update(sharded=(False, False)).parts(WORST)
    assert alone["link"] == 0
    assert whole["launches"] == pytest.approx(alone["launches"] * (0.9 + 0.3) / 0.9)
    assert update(offload=(4, 4)).parts(WORST)["optimizer"] > whole["optimizer"]
    assert update(lora=True).range()[BEST] < update().range()[BEST]
    forward = update(backward=False).range()
    assert 2 < update().range()[BEST] / forward[BEST] < 4


def test_stages_of_a_pipeline_wait_and_context_parallelism_gathers_all_weights() -> None:
    """One micro-batch per update: two stages take twice as long, unless a schedule hides it."""
    alone = {"samples": 4, "mean": (16384, 16384), "updates": 1, "sharded": (False, False)}
    one, two = update(**alone, cp=2), update(**alone, pp=2)
    assert two.range()[BEST] == pytest.approx(one.range()[BEST])
    busy = {"compute", "launches"}
    least, most = (max(each.parts(WORST)[name] for name in busy) for each in (one, two))
    assert most == pytest.approx(least)
    heads = one.parts(WORST)["link"]
    assert two.range()[WORST] - one.range()[WORST] == pytest.approx(least - heads)
    sharded = {**alone, "sharded": (True, True)}
    links = [update(**sharded, **how).parts(BEST)["link"] for how in ({"cp": 2}, {"pp": 2})]
    assert links[0] - one.parts(BEST)["link"] == pytest.approx(2 * links[1])


@pytest.mark.parametrize("part", ["launches", "link"])
def test_a_pipeline_stage_runs_its_own_layers_alone(part: str) -> None:
    """Two stages get twice the micro-batches of half of the layers each."""
    alone = {"samples": 8, "mean": (16384, 16384), "sharded": (False, False), "tp": 2}
    one, two = (update(**alone, pp=stages).parts(WORST)[part] for stages in (1, 2))
    assert 0 < one == pytest.approx(two)


def test_heads_are_exchanged_or_keys_and_values_go_around() -> None:
    """Llama-3-8B has 4,096 numbers of queries, the same of outputs, and 2,048 of keys and values.

    Of two devices, each sends half of the heads of its half of the tokens, or all its keys.
    """
    alone = {"samples": 1, "mean": (16384, 16384), "sharded": (False, False), "cp": 2}
    both = replace(update(**alone, backward=False), devices=2)
    each = 32 * 2 * 16384 / 2  # Bytes of one number per token in all layers.
    assert both.parts(BEST)["link"] == pytest.approx(each * 2048 / 450e9 / 0.8)
    assert both.parts(WORST)["link"] == pytest.approx(each * (8192 + 2048) / 2 / 450e9 / 0.35)
    # Sixteen devices exchange over an adapter each.
    far = replace(both, devices=16, cp=16)
    heads = 32 * 2 * 1024 * max((8192 + 2048) * 15 / 16, 15 * 2048)
    assert far.parts(WORST)["link"] == pytest.approx(heads / 50e9 / 0.35)


def test_tokens_go_to_their_experts_and_back() -> None:
    """Seven of the eight experts of a token are on other devices, in 48 layers of 2,048 numbers."""
    alone = {"samples": 8, "mean": (4096, 4096), "sharded": (False, False), "backward": False}
    one = replace(update(**alone, ep=8), model=model("Qwen3-30B-A3B"))
    moved = 48 * 4096 * 7 * 2048 * 2 * 2
    assert one.parts(BEST)["link"] == pytest.approx(moved / 450e9 / 0.8)
    assert replace(one, ep=1).parts(WORST)["link"] == 0
    # Over four nodes, a token goes once to each of three others at best.
    far = replace(one, devices=32, samples=32, ep=32)
    assert far.parts(BEST)["link"] == pytest.approx(moved / 7 * 3 / 50e9 / 0.8)
    assert far.parts(WORST)["link"] == pytest.approx(moved / 7 * 8 * 31 / 32 / 50e9 / 0.35)


def test_weights_come_from_the_host_in_each_micro_batch() -> None:
    """Four micro-batches of 16,384 tokens on each of eight devices, an eighth of 8.03e9 weights."""
    alone = {"samples": 32, "mean": (16384, 16384), "streamed": (True, True)}
    own = model("Llama-3-8B").parameters / 8
    ends = [update(**alone, backward=False).parts(end)["host"] for end in (BEST, WORST)]
    assert ends == pytest.approx([4 * 2 * own / 25e9, 4 * 4 * own / 6e9])
    trained = update(**alone).parts(BEST)
    adds = 4 * 8 * own * 0.1e-9 * 12 / 28  # The host adds gradients of each micro-batch.
    assert trained["host"] == pytest.approx(4 * 3 * 2 * own / 25e9 + adds)
    assert trained["optimizer"] == pytest.approx(8 * own * 0.1e-9)


def test_an_optimizer_on_the_host_is_as_fast_as_the_memory_of_its_node() -> None:
    """A node has 8.03e9 parameters, or half of them where there are two."""
    own, known = model("Llama-3-8B").parameters, {"host_adam": (True, True), "updates": 3}
    one = update(**known).parts(WORST)["optimizer"]
    assert one == pytest.approx(3 * (2 * 4 * own / 8 / 6e9 + own * 1.5e-9))
    two = replace(update(**known), devices=16).parts(WORST)["optimizer"]
    assert two == pytest.approx(one / 2)
    assert update(**known, offload=(3, 3)).parts(WORST)["optimizer"] == pytest.approx(one)


def test_attention_may_be_no_faster_on_devices_that_are_newer_than_an_h100() -> None:
    """What twice the squares of lengths add takes as long at worst, and is faster at best."""
    new = replace(update(), device=device_labeled("B200"))
    more = [
        [replace(each, square=2.0).parts(end)["compute"] - each.parts(end)["compute"]]
        for end in (BEST, WORST)
        for each in (update(square=1.0), replace(new, square=1.0))
    ]
    assert more[1][0] < 0.5 * more[0][0]
    assert more[3] == pytest.approx(more[2])


def test_matmuls_reach_more_of_a_peak_that_is_small_beside_the_bandwidth() -> None:
    """An H20 reads operands 20% faster than an H100, and multiplies them at 15% of its speed."""
    slow = replace(rollout(), device=device_labeled("H20-96G"))
    best, worst = (
        slow.parts(end)["prefill"] / rollout().parts(end)["prefill"] for end in (BEST, WORST)
    )
    assert worst == pytest.approx(989.4 / 148)
    assert best == pytest.approx(989.4 / 148 * 0.6 / 0.923, rel=1e-2)


def test_cards_have_slower_links_than_modules() -> None:
    card = replace(update(), device=device_labeled("A6000-48G"))
    same = replace(card, device=Peak("x", "other", 154.8, 768, 48))
    assert card.parts(BEST)["link"] > 10 * same.parts(BEST)["link"]


def test_one_sender_gathers_all_weights_and_several_have_a_part_each() -> None:
    """16.06 GB go at 25 GB/s from one, and from eight at 200 GB/s at best."""
    moved = 2 * model("Llama-3-8B").parameters
    one, several = (
        Refit(model("Llama-3-8B"), H100, 8, ("nccl", "nccl"), senders=number) for number in (0, 8)
    )
    assert one.parts(BEST)["link"] == pytest.approx(moved / 25e9 + moved / 450e9 / 0.8)
    assert several.parts(BEST)["link"] == pytest.approx(moved / 200e9)
    # All engines get everything, on two nodes over eight adapters each.
    many = replace(several, devices=16, senders=16)
    assert many.parts(BEST)["link"] == pytest.approx(moved / 400e9 / 0.8)
    card = Refit(model("Llama-3-8B"), device_labeled("A800-PCIe-80G"), 4, ("ipc", "ipc"))
    assert card.parts(WORST)["link"] == pytest.approx(moved / 6e9 + 2 * moved / 32e9 / 0.35)


def test_weights_go_by_their_real_path() -> None:
    ranges = {
        path: Refit(model("Llama-3-8B"), H100, 8, (path, path)).range()  # type: ignore[arg-type]
        for path in ("ipc", "nccl", "p2p", "disk")
    }
    assert ranges["p2p"][BEST] < ranges["nccl"][BEST] < ranges["disk"][BEST]
    assert tensors(model("Llama-3-8B")) == 32 * 9 + 3
    assert tensors(model("Qwen3-30B-A3B")) > 48 * 3 * 128


def test_the_missing_fact_is_the_one_that_narrows_most() -> None:
    open_ = rollout(eager=(False, True), longest=(800, 4096))
    assert open_.narrowest() == (
        max(
            ("eager", rollout(longest=(800, 4096))),
            ("longest", rollout(eager=(False, True))),
            key=lambda each: -each[1].range()[WORST] / each[1].range()[BEST],
        )[0],
        pytest.approx(open_.narrowest()[1]),  # type: ignore[index]
    )
    assert rollout().narrowest() is None


def test_verdicts_by_the_range() -> None:
    assert verdict(60, rollout()).verdict == "normal"
    slow = verdict(191.3, rollout())
    assert (slow.verdict, slow.factors) == (
        "slow",
        (pytest.approx(2, rel=0.01), pytest.approx(5.59, rel=0.01)),
    )
    assert verdict(10, rollout()).verdict == "fast"
    assert verdict(1.9, rollout()).verdict == "too short"


# ---- gaps of published jobs, with the causes that their authors found

MOE = {"samples": 256, "mean": (1300, 1300)}


def test_graphs_that_were_off() -> None:
    engines = Rollout(
        *(model("Qwen3-30B-A3B"), H100, 32, 256, 300, (1004, 1004), (16384, 16384), 16, (2, 2)),
        eager=(False, False),
        max_num_seqs=(1024, 1024),
    )
    assert verdict(707.8, engines).causes == ("eager",)
    assert verdict(707.8, engines).factors[0] == pytest.approx(3.4, abs=0.1)
    assert verdict(82.7, engines).verdict == "normal"  # With graphs.


def test_experts_that_ran_in_a_loop() -> None:
    grouped = update(**MOE)
    looped = replace(grouped, model=model("Qwen3-30B-A3B"), devices=16)
    assert verdict(2810, looped).causes == ("expert_loop",)
    assert verdict(2810, grouped).causes == ()  # A dense model has no experts.


def test_tensors_that_were_exported_one_by_one() -> None:
    cut = Refit(
        *(model("DeepSeek-V3"), device_labeled("910C"), 8, ("nccl", "nccl")),
        bytes=105 * 2**30,
        tensors=4702,
    )
    found = verdict(1032.7, cut)
    assert found.causes == ("export",)
    assert (found.low, found.high) == (pytest.approx(5.6, abs=0.1), pytest.approx(32.7, abs=0.1))


def test_a_critic_that_was_padded() -> None:
    critic = update(
        **{"samples": 5120, "mean": (276, 276), "updates": 4, "longest": 1536.0},
    )
    padded = replace(critic, model=model("Qwen2.5-7B").critic(), device=device_labeled("H200"))
    assert verdict(98.8, padded).causes[0] == "padding"
    assert verdict(33.6, padded).verdict == "normal"  # The actor, packed.


def test_a_gap_that_no_hypothesis_explains_says_so() -> None:
    one = replace(update(samples=256, mean=(6300, 6300)), model=model("Qwen2.5-32B"), devices=16)
    found = verdict(1179, one)
    assert (found.verdict, found.causes) == ("slow", ())
    assert "none that is known" in found.cause

"""Sizing: amounts of published and of small jobs, what each option changes, what is refused."""

from typing import Any

import pytest

from lightning_rlprof.analysis.models.huggingface import read_model
from lightning_rlprof.analysis.sizing.attainable import WORST
from lightning_rlprof.analysis.sizing.job import Job, parse_devices
from lightning_rlprof.analysis.sizing.memory import GB, host_bytes, live_layer, rollout_tp
from lightning_rlprof.analysis.sizing.sizing import Sizing, concurrent, size, step_work
from lightning_rlprof.errors import RlprofError
from tests.analysis.models.published import CONFIGS


def job(name: str, devices: str, **changes: Any) -> Job:
    number, device = parse_devices(devices)
    lengths = {"prompt": 1024, "response": 1024}
    return Job(read_model(CONFIGS[name]), device, number, **{**lengths, **changes})


def sized(name: str, devices: str, **changes: Any) -> Sizing:
    return size(job(name, devices, **changes))


def parts(found: Sizing, phase: str) -> dict[str, tuple[float, float]]:
    (own,) = (each for each in found.phases if each.name == phase)
    return {part.name: (part.low / GB, part.high / GB) for part in own.parts}


LORA = {"lora": 32}
V3 = {"shard": "megatron", "tp": 8, "pp": 16, "ep": 8}
WIDE = {**V3, "tp": 1, "ep": 32}


def test_states_of_the_worked_example_with_fsdp() -> None:
    found = sized("Qwen2.5-7B", "8xH100", tokens=24_576)
    update = parts(found, "update")
    states = sum(update[name][0] for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(15.23, abs=0.01)
    assert update["reference"] == (0, pytest.approx(3.81, abs=0.01))
    assert update["gathered layers"][1] == pytest.approx(0.93 + 2.18 + 0.93, abs=0.02)
    kept, live = 24_576 * 200_704 / GB, 24_576 * 225_280 / GB
    assert update["activations"][0] == pytest.approx(0.9 * (kept + live), rel=0.01)
    logits = 24_576 * 152_064 / GB
    assert update["logits"] == (pytest.approx(6 * logits), pytest.approx(16 * logits))
    assert found.verdict == "close"  # fits without entropy


def test_states_of_the_worked_example_with_megatron() -> None:
    how = {**V3, "pp": 12, "offload": 1.0}
    found = sized("DeepSeek-V3", "96xH20-96G", **how)
    update = parts(found, "update")
    assert update["weights"][0] + update["gradients"][0] == pytest.approx(52.5, rel=0.01)
    assert found.phases[-1].low / GB < 66 < found.phases[-1].high / GB  # published
    assert host_bytes(found.job) / 1e12 == pytest.approx(1.0, abs=0.01)
    assert rollout_tp(job("DeepSeek-V3", "96xH20-96G", **how, rollout_tp=32)) == 32
    engine = parts(sized("DeepSeek-V3", "96xH20-96G", **how, rollout_tp=32), "rollout")
    assert engine["engine weights"][0] == pytest.approx(41.9, abs=0.1)
    on_device = sized("DeepSeek-V3", "96xH20-96G", **{**how, "offload": 0.0})
    assert on_device.verdict == "does not fit"


def test_activations_are_those_measured_on_llama() -> None:
    layer = read_model(CONFIGS["Llama-3-8B"]).layers[0]
    assert live_layer(layer, 4096) == pytest.approx(200_700, rel=1e-3)


@pytest.mark.parametrize(
    ("shard", "each"),
    [
        ("fsdp", (4 / 4, 4 / 4, 8 / 4)),
        ("zero1", (2, 2, 12 / 4)),
        ("zero2", (2, 2 / 4, 12 / 4)),
        ("zero3", (2 / 4, 2 / 4, 12 / 4)),
        ("megatron", (2, 4, 12 / 4)),
    ],
)
def test_bytes_per_parameter_by_how_states_are_divided(
    shard: str, each: tuple[float, float, float]
) -> None:
    update = parts(sized("Qwen2.5-7B", "4xH200", shard=shard), "update")
    own = [update[name][0] for name in ("weights", "gradients", "optimizer")]
    assert own == pytest.approx([7.615616512 * size for size in each])


def test_adapters_keep_a_frozen_base_and_no_reference() -> None:
    update = parts(sized("Qwen2.5-72B", "8xH100", **LORA), "update")
    assert update["weights"][0] == pytest.approx(18.2, rel=0.06)
    assert update["optimizer"][0] < 4
    assert "reference" not in update


def test_a_critic_is_a_second_model_and_supervised_training_has_one_phase() -> None:
    ppo, grpo = (sized("Qwen2.5-7B", "8xH100", algorithm=name) for name in ("ppo", "grpo"))
    names = [part.name for part in ppo.phases[-1].parts]
    assert {"critic weights", "critic gradients", "critic optimizer"} <= {*names}
    assert ppo.phases[-1].low > grpo.phases[-1].low + 12 * GB
    sft = sized("Qwen2.5-7B", "8xH100", algorithm="sft")
    assert [phase.name for phase in sft.phases] == ["update"]
    assert "reference" not in parts(sft, "update")


def test_what_each_knob_does_to_the_phase_it_is_for() -> None:
    base: dict[str, Any] = {"shard": "megatron", "tp": 2}
    one = sized("Qwen2.5-32B", "16xH100", **base)
    for change, part in (
        ({"tp": 4}, "weights"),
        ({"pp": 2}, "weights"),
        ({"offload": 1.0}, "optimizer"),
        ({"cp": 2}, "logits"),
    ):
        other = sized("Qwen2.5-32B", "16xH100", **{**base, **change})
        assert parts(other, "update")[part][0] < parts(one, "update")[part][0]
    longer = sized("Qwen2.5-32B", "16xH100", **base, tokens=4096)
    assert parts(longer, "update")["activations"][0] > parts(one, "update")["activations"][0]
    plain = sized("Qwen2.5-32B", "16xH100", **base, checkpointing=False)
    assert parts(plain, "update")["activations"][0] > 4 * parts(one, "update")["activations"][0]
    for change in ({"offload": 1.0}, {"rollout_devices": 8}):
        other = sized("Qwen2.5-32B", "16xH100", **{**base, **change})
        assert "training states" in parts(one, "rollout")
        assert "training states" not in parts(other, "rollout")
    experts = sized("Qwen3-30B-A3B", "8xH100", shard="megatron")
    spread = sized("Qwen3-30B-A3B", "8xH100", shard="megatron", ep=8)
    assert parts(spread, "update")["weights"][0] < 0.2 * parts(experts, "update")["weights"][0]


def test_changes_are_tried_and_those_that_help_are_listed() -> None:
    found = sized("Qwen2.5-7B", "1xH100")
    assert found.verdict == "does not fit"
    changes = dict(
        zip(found.changes().column("change"), found.changes().column("verdict"), strict=True)
    )
    assert [name for name in changes if "devices" in name] == []  # LoRA fits already
    assert changes["LoRA of rank 32"] == "fits"
    assert "pp 2" not in changes
    useless = sized("Qwen2.5-7B", "2xH800-80G", rollout_tp=1).changes()  # the update is full
    assert "rollout tp 2" not in useless.column("change")
    assert sized("Qwen2.5-0.5B", "8xH100").changes().abstained == "Nothing to change: it fits."


def test_the_summary_says_how_much_is_missing_or_to_spare() -> None:
    text = sized("Qwen2.5-7B", "1xH100").summary()
    assert text.startswith("Does not fit: ")
    assert text.endswith("GB more than the 85.0 GB of H100-80G.")
    assert sized("Qwen2.5-7B", "2xH800-80G").summary().startswith("Close: from ")
    assert "of the ~191.3 GB of B200-180G" in sized("Qwen2.5-7B", "8xB200").summary()


def test_sums_are_those_of_the_parts() -> None:
    table = sized("Qwen2.5-7B", "8xH100").memory()
    for phase in ("rollout", "update"):
        rows = [row for row in table.rows if row[0] == phase]
        for at in (2, 3):
            assert sum(float(row[at] or 0) for row in rows[:-1]) == pytest.approx(rows[-1][at])
    assert all(row[2] <= row[3] for row in table.rows)  # type: ignore[operator]


def test_a_step_takes_longer_with_longer_responses_and_needs_a_batch() -> None:
    assert sized("Qwen2.5-7B", "8xH100").times().abstained is not None
    short, long = (
        sized("Qwen2.5-7B", "8xH100", batch=128, response=each).times() for each in (1024, 4096)
    )
    assert short.column("stage")[0] == "actor_generate"
    assert short.column("limit")[0] == "memory"
    for each in (short, long):
        rows = each.rows
        assert all(0 < float(row[1] or 0) < float(row[2] or 0) for row in rows)
        assert rows[-1][1] == pytest.approx(sum(float(row[1] or 0) for row in rows[:-1]))
    assert float(long.rows[-1][1] or 0) > 2 * float(short.rows[-1][1] or 0)


def test_decoding_one_token_is_the_roofline_of_weights_and_cache() -> None:
    one = job("Qwen2.5-7B", "1xH100", batch=256, group=1, prompt=2048, response=2, **LORA)
    assert concurrent(one) > 256
    generate = step_work(one)["actor_generate"].parts(WORST)
    # 13.2 ms per step at full bandwidth: weights 4.2 ms, cache of 256 x 2k tokens 9 ms
    assert generate["memory"] == pytest.approx(2 * (4.2e-3 / 0.55 + 9e-3 / 0.40), rel=0.02)
    assert generate["prefill"] == pytest.approx(256 * 2048 * 14.3e9 / 989.4e12 / 0.25, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp": 3, "shard": "megatron"}, "not a multiple of tp x pp x cp = 3"),
        ({"tp": 2}, "tp, pp and ep need shard megatron"),
        ({"ep": 2, "shard": "megatron"}, "ep=2 does not divide no experts"),
        ({"pp": 0}, "pp=0 is not a positive count"),
        ({"prompt": -1}, "prompt=-1 is not a positive count"),
        ({"tokens": 0}, "tokens=0 is not a positive count"),
        ({"offload": 2.0}, "offload=2.0 is not a share"),
        ({"lora": -1}, "cannot be negative"),
        ({"rollout_devices": 8}, "0 devices for training"),
        ({"rollout_tp": 3}, "not a multiple of its tensor parallelism 3"),
        ({"rollout_ep": 2}, "rollout_ep=2 does not divide no experts"),
        ({"rollout_ep": 3}, "not a multiple of its expert parallelism 3"),
        ({"algorithm": "rloo"}, "algorithm 'rloo' is not one of grpo, ppo, dpo, sft"),
        ({"algorithm": "dpo", "rollout_devices": 4}, "rollout_devices: dpo has no rollout"),
        ({"algorithm": "sft", "rollout_tp": 4}, "rollout_tp: sft has no rollout"),
        ({"rollout_memory": 0.0}, "rollout_memory=0.0 is not a share above 0, to 1"),
        ({"algorithm": "dpo", "rollout_memory": 0.5}, "rollout_memory: dpo has no rollout"),
        ({"tokens": 2047}, "tokens=2047 is less than the 2048 tokens of one sequence"),
        ({"tokens": 2047, "cp": 2}, "tokens=2047 is less than the 2048 tokens"),
        ({"forward_tokens": 99}, "forward_tokens=99 is less than the 2048 tokens of one sequence"),
        ({"tokens": 4095, "algorithm": "dpo"}, "less than the 4096 tokens of one pair"),
    ],
)
def test_jobs_that_cannot_be_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(RlprofError, match=text):
        job("Qwen2.5-7B", "8xH100", **changes)


def test_any_device_is_given_by_its_figures() -> None:
    _, whole = parse_devices("8x48GB@180TFLOPS@1.8TB/s")
    assert (whole.memory_gb, whole.tflops, whole.gb_s) == (48, 180, 1800)
    known, same = (
        sized("Qwen2.5-7B", f"8x{each}", batch=8).times()
        for each in ("L40S-48G", "48GB@362.05TFLOPS@0.864TB/s")
    )
    assert same.column("stage") == known.column("stage")
    memory_alone = sized("Qwen2.5-0.5B", "1x20G", batch=8)
    assert memory_alone.verdict == "fits"
    assert "peak is unknown" in (memory_alone.times().abstained or "")


def test_what_is_known_of_a_rollout_narrows_its_range() -> None:
    def width(**known: Any) -> float:
        low, high = step_work(job("Qwen2.5-7B", "8xH100", batch=512, **known))[
            "actor_generate"
        ].range()
        return high / low

    assert width(mean=300, max_num_seqs=256) < width(mean=300) < width()
    with pytest.raises(RlprofError, match="mean=2000 is more than the longest response 1024"):
        job("Qwen2.5-7B", "8xH100", mean=2000)


@pytest.mark.parametrize("text", ["H100", "0xH100", "8", "xH100", "8xH1000", "9" * 5000 + "xH100"])
def test_devices_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(RlprofError):
        parse_devices(text)


def test_pipelines_keep_a_micro_batch_per_stage() -> None:
    def activations(**how: Any) -> float:
        found = sized("Qwen2.5-32B", "16xH100", shard="megatron", **how)
        return parts(found, "update")["activations"][0]

    assert activations(pp=2) == pytest.approx(activations())
    assert activations(tp=2) == pytest.approx(activations() / 2)
    assert activations(cp=2) == pytest.approx(activations() / 2)


def test_a_cache_is_divided_by_heads_and_that_of_latent_attention_by_none() -> None:
    cache = {"Qwen2.5-7B": 57_344 / 4, "DeepSeek-V3": 70_272}
    for name, each in cache.items():
        found = sized(name, "64xH200", rollout_tp=8, rollout_devices=32)
        assert parts(found, "rollout")["KV cache of one sequence"][0] == 2048 * each / GB


def test_optimizer_states_of_experts_have_their_own_copies() -> None:
    model = read_model(CONFIGS["DeepSeek-V3"])
    found = parts(sized("DeepSeek-V3", "512xH20-96G", **WIDE), "update")
    experts = 4 * 256 * 3 * 7168 * 2048 / 32
    assert found["weights"][0] > 2 * experts / GB
    dense = found["weights"][0] / 2 - experts / GB
    assert found["optimizer"][0] == pytest.approx(12 * (experts / GB + dense / 32))
    twice = parts(sized("DeepSeek-V3", "1024xH20-96G", **WIDE), "update")
    assert twice["optimizer"][0] == pytest.approx(found["optimizer"][0] / 2)
    assert model.expert_parameters == 58 / 4 * 32 * experts


def test_overhead_and_what_is_gathered() -> None:
    update = parts(sized("Qwen2.5-7B", "8xH100"), "update")
    others = sum(high for name, (_, high) in update.items() if name != "fragmentation")
    context, asleep = update["context, communicators"], update["sleeping engine"]
    assert (context, asleep) == ((1, 2), (0, 1.5))
    assert update["fragmentation"] == (0, pytest.approx(0.05 * (others - context[1] - asleep[1])))
    for how in ({"algorithm": "sft"}, {"rollout_devices": 4}):
        assert "sleeping engine" not in parts(sized("Qwen2.5-7B", "8xH100", **how), "update")
    wide = parts(sized("Qwen2.5-7B", "8xH100", rollout_tp=2), "forward")
    assert wide["sleeping engine"] == (0, 2.5)
    adapters = parts(sized("Qwen2.5-7B", "8xH100", **LORA), "update")
    layer = read_model(CONFIGS["Qwen2.5-7B"]).layers[0].parameters(3584)
    less = update["gathered layers"][1] - adapters["gathered layers"][1]
    assert less == pytest.approx(4 * layer / GB)
    assert "gathered layers" not in parts(sized("Qwen2.5-7B", "1xH200"), "update")


def test_a_critic_takes_the_time_of_an_update() -> None:
    table = sized("Qwen2.5-7B", "8xH100", algorithm="ppo", batch=8).times()
    low = dict(zip(table.column("stage"), table.column("low s"), strict=True))
    assert 0.8 < float(low["critic_update"] or 0) / float(low["actor_update"] or 0) < 1
    assert float(low["actor_update"] or 0) > 2 * float(low["critic_compute_values"] or 0)
    sft = sized("Qwen2.5-7B", "8xH100", algorithm="sft", batch=8).times()
    assert sft.column("stage") == ["train", "step"]


def test_a_device_of_unknown_bandwidth_has_no_time_of_generation() -> None:
    table = sized("Qwen2.5-0.5B", "8xGH200", batch=8).times()
    assert "actor_generate" not in table.column("stage")
    assert "the bandwidth is unknown" in table.note


def test_what_is_offloaded_may_stay_on_the_host() -> None:
    here, there = (
        step_work(job("Qwen2.5-7B", "8xH100", batch=256, offload=each)) for each in (0.0, 1.0)
    )
    slower = {name for name in here if there[name].range()[WORST] > here[name].range()[WORST]}
    assert slower == {"reference_compute_log_prob", "actor_update"}


def test_sequences_beyond_the_cache_wait_for_their_turn() -> None:
    one = job("Qwen2.5-7B", "1xH100", response=8192, group=1, **LORA)
    room = concurrent(one)
    times = [
        float(size(one.changed(batch=batch)).times().rows[0][2] or 0)
        for batch in (room, room + 1, 2 * room)
    ]
    again = 8192 * (14.1e9 / 3350e9 / 0.55 + 6e-3)  # Weights are read once more at most.
    assert 0 < times[1] - times[0] < again
    assert times[2] == pytest.approx(2 * times[0], rel=0.1)


def test_forward_only_passes_free_each_layer_and_have_tokens_of_their_own() -> None:
    one, two = (
        parts(sized("Qwen2.5-7B", "8xH100", forward_tokens=each), "forward")
        for each in (None, 4 * 2048)
    )
    live = 2048 * 225_280 / GB
    assert one["activations"] == pytest.approx((0.5 * live, live))
    assert one["logits"][1] == pytest.approx(7 * 2048 * 152_064 / GB)
    whole = parts(sized("Qwen2.5-7B", "8xH100", tokens=2048), "forward")
    assert whole == one
    shared = parts(sized("Qwen2.5-7B", "8xH100", forward_tokens=2 * 2048, cp=2), "forward")
    assert shared["logits"] == one["logits"]
    for part in ("activations", "logits"):
        assert two[part] == pytest.approx([4 * each for each in one[part]])
    states = 16 * 7.615616512 / 8
    assert one["training states"] == pytest.approx((0.75 * states, 1.02 * states))
    assert one["gathered layers"][1] == pytest.approx(0.93 + 2.18, abs=0.02)  # no gradients
    assert one["reference"][1] == pytest.approx(3.81, abs=0.01)


def test_offload_leaves_one_model_for_its_forward_pass() -> None:
    found = sized("Qwen2.5-7B", "8xH100", algorithm="ppo", offload=1.0)
    forward = parts(found, "forward")
    assert forward["weights"][0] == pytest.approx(4 * 7.615616512 / 8)
    assert "training states" not in forward
    both = parts(sized("Qwen2.5-7B", "8xH100", algorithm="ppo"), "forward")
    assert both["training states"][0] > 5 * forward["weights"][0]


def test_forward_only_passes_may_decide() -> None:
    found = sized("Qwen2.5-7B", "2xH800-80G", forward_tokens=128 * 2048, offload=1.0)
    verdicts = {row[0]: row[4] for row in found.memory().rows if row[1] == "total"}
    assert verdicts == {"rollout": "fits", "forward": "does not fit", "update": "fits"}
    assert found.verdict == "does not fit"
    changes = found.changes()
    assert changes.rows[0][:2] == ("tokens per micro-batch: one sequence", "fits")


def test_preferences_are_pairs_with_a_reference_and_without_a_rollout() -> None:
    dpo, sft = (sized("Qwen2.5-7B", "8xH100", algorithm=name) for name in ("dpo", "sft"))
    assert [phase.name for phase in dpo.phases] == ["forward", "update"]
    assert "reference" in parts(dpo, "update")
    for part in ("activations", "logits"):
        pair = parts(dpo, "update")[part]
        if part == "logits":  # no entropy
            assert pair[1] / pair[0] == pytest.approx(14 / 6)
        assert pair == pytest.approx([2 * each for each in parts(sft, "update")[part]])
    dpo, sft = (sized("Qwen2.5-7B", "8xH100", algorithm=name, batch=8) for name in ("dpo", "sft"))
    low = dict(zip(dpo.times().column("stage"), dpo.times().column("low s"), strict=True))
    assert [*low] == ["reference_compute_log_prob", "actor_update", "step"]
    assert 1 < float(low["actor_update"] or 0) / float(sft.times().rows[0][1] or 0) < 2
    assert "Rollout" not in dpo.memory().note


def test_experts_of_a_rollout_are_divided_among_its_replicas() -> None:
    how: dict[str, Any] = {**V3, "pp": 8, "ep": 32, "offload": 1.0, "rollout_tp": 4, "batch": 512}
    one = sized("DeepSeek-V3", "256xH20-96G", **how)
    wide = sized("DeepSeek-V3", "256xH20-96G", **how, rollout_ep=64)
    model = one.job.model
    dense = model.parameters - model.expert_parameters
    weights = 2 * (dense / 4 + model.expert_parameters / 64) / GB
    assert parts(wide, "rollout")["engine weights"][0] == pytest.approx(weights)
    assert parts(one, "rollout")["engine weights"][0] == pytest.approx(671.03 * 2 / 4, rel=1e-4)
    assert "expert parallelism 64" in wide.memory().note
    assert wide.verdict == "fits"
    with pytest.raises(RlprofError, match="rollout_ep=2 is not a multiple of rollout_tp=4"):
        job("DeepSeek-V3", "256xH20-96G", **{**how, "rollout_ep": 2})
    free = job("DeepSeek-V3", "256xH20-96G", **{**how, "rollout_tp": None}, rollout_ep=64)
    assert rollout_tp(free) == 1  # attention is small, and experts are divided already
    small = job("Qwen3-235B-A22B", "64xH20-96G", shard="megatron", tp=8, ep=8, rollout_ep=2)
    assert rollout_tp(small) == 2  # a replica is not wider than its experts


def test_replicas_that_share_experts_read_each_expert_once() -> None:
    how: dict[str, Any] = {"shard": "megatron", "ep": 8, "offload": 1.0, "rollout_tp": 1}
    times, few = (
        [
            step_work(job("Qwen3-30B-A3B", "8xH100", **how, **each, rollout_ep=ep))
            for ep in (None, 8)
        ]
        for each in ({"batch": 64}, {"batch": 8, "group": 1})
    )
    read = [work["actor_generate"].parts(WORST)["memory"] for work in (*times, *few)]
    assert read[1] < 0.6 * read[0]
    # 8 tokens hit 52 experts, so each of 8 devices reads 6.5 of them instead of 8.
    assert 0.8 < read[3] / read[2] < 0.95


def test_a_vision_tower_has_weights_alone() -> None:
    plain = sized("Qwen2.5-VL-7B", "8xH100")
    assert "Not included: activations of the vision tower." in plain.memory().note


def test_an_engine_has_a_share_of_the_device() -> None:
    how: dict[str, Any] = {"offload": 1.0, "rollout_tp": 1}
    rooms = {
        share: concurrent(job("Qwen2.5-7B", "8xH100", **how, rollout_memory=share))
        for share in (None, 0.9, 0.5)
    }
    assert rooms[None] == rooms[0.9] > 1.9 * rooms[0.5]
    one = job("Qwen2.5-7B", "8xH100", **how)
    assert (rooms[0.9] - rooms[0.5]) * 2048 * 57_344 == pytest.approx(
        0.4 * one.device.usable, rel=0.01
    )
    free = [job("Qwen2.5-7B", "8xH100", offload=1.0, rollout_memory=each) for each in (None, 0.2)]
    assert [rollout_tp(each) for each in free] == [1, 2]
    tight = sized("Qwen2.5-7B", "8xH100", **how, rollout_memory=0.2)
    assert [row[4] for row in tight.memory().rows if row[4]] == ["does not fit", "fits", "fits"]
    assert tight.spare[1] == pytest.approx(0.2 * one.device.usable - tight.phases[0].low)
    assert tight.changes().rows[0][:2] == ("rollout memory 0.9", "fits")
    assert "20% of the device: the KV cache of a replica has room for 0 seq" in tight.memory().note

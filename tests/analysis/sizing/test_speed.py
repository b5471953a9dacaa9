"""How fast the stages of a run are: what is read of it, what goes before it, what is missing."""

from typing import Any

import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.efficiency.peak_flops import Peak
from lightning_rlprof.analysis.models.huggingface import read_model
from lightning_rlprof.analysis.sizing.attainable import Pass, Path, Refit, Rollout
from lightning_rlprof.analysis.sizing.speed import Speed, speed_table, speeds
from lightning_rlprof.report.summary import speed_lines, summary
from tests.analysis.models.published import CONFIGS
from tests.builders.diagnosed import only, why
from tests.builders.runs import Row, loaded
from tests.builders.speedy import GENERATED, H100, KNOWN, SECOND, TRAINED, on_h100, speedy

STAGES = {
    "actor_generate": GENERATED | KNOWN,
    "actor_update": TRAINED | {"micro_tokens": 16384, "recompute": 1, "sharded": 1, "offload": 0},
}


def by_stage(*args: Any, **how: Any) -> dict[str, Speed]:
    return {each.stage: each for each in speeds(*args, **how)}


def test_a_run_is_compared_by_what_it_counts() -> None:
    found = by_stage(speedy({"actor_generate": 58, "actor_update": 400}, STAGES))
    rollout = Rollout(
        *(read_model(CONFIGS["Llama-3-8B"]), _h100(), 8, 2048, 200, (795, 795), (4096, 4096), 32),
        eager=(False, False),
        max_num_seqs=(1024, 1024),
    )
    own = found["actor_generate"]
    assert (own.low, own.high) == pytest.approx(rollout.range())
    assert (own.verdict, own.limit) == ("normal", "memory")
    assert found["actor_update"].verdict == "slow"


def _h100() -> Peak:
    from lightning_rlprof.analysis.efficiency.peak_flops import device_of

    found = device_of(H100)
    assert found is not None
    return found


def test_facts_of_a_caller_go_before_those_of_the_run() -> None:
    run = speedy({"actor_generate": 180}, STAGES)
    assert by_stage(run)["actor_generate"].causes[0] == "eager"
    assert by_stage(run, given={"eager": True})["actor_generate"].verdict == "normal"
    slower = Peak("x", "slow", 100, 300, 80)
    assert by_stage(run, given={"device": slower})["actor_generate"].verdict != "slow"


@pytest.mark.parametrize(
    ("change", "missing"),
    [({"model": None}, "model"), ({"device": "NVIDIA X"}, "devices"), ({"counters": {}}, "tokens")],
)
def test_what_is_missing_is_named(change: dict[str, Any], missing: str) -> None:
    how: dict[str, Any] = {"counters": STAGES} | change
    own = by_stage(speedy({"actor_generate": 58}, **how))["actor_generate"]
    assert (own.verdict, own.missing, own.low) == ("unknown", missing, None)
    assert own.needs in own.text


def test_a_short_stage_is_too_short_and_other_stages_are_not_judged() -> None:
    found = by_stage(speedy({"actor_generate": 1.9, "compute_reward": 30}, STAGES))
    assert {name: each.verdict for name, each in found.items()} == {"actor_generate": "too short"}


def test_the_fact_that_would_narrow_most_is_named() -> None:
    bare = {"actor_generate": GENERATED | {"prompt_tokens": 200}}
    own = by_stage(speedy({"actor_generate": 58}, bare))["actor_generate"]
    assert own.missing == "eager"
    assert "to narrow it: count(eager=...)" in own.text


def test_passes_without_tokens_take_those_of_the_samples() -> None:
    rows = list[Row]()
    for step in range(1, 7):
        begin, end = step * 30 * SECOND, (step * 30 + 20) * SECOND
        rows.append(Row("old_log_prob", "stage", step, begin, end))
        for number in range(8):
            told = {"sample": 10 * step + number, "tokens": 4000}
            rows.append(Row("sample trained", "mark", step, begin, begin, counters=told))
        rows.append(Row("step", "step", step, begin, end))
    own = by_stage(on_h100(loaded(rows)), given={"prompt_tokens": 500})["old_log_prob"]
    same = Pass(read_model(CONFIGS["Llama-3-8B"]), _h100(), 8, 8, (4500, 4500), backward=False)
    assert (own.low, own.high) == pytest.approx(same.range())


def test_the_weights_of_a_reference_may_come_from_the_host() -> None:
    counted = {"reference_compute_log_prob": TRAINED, "actor_compute_log_prob": TRAINED}
    run = speedy(dict.fromkeys(counted, 40.0), counted)
    for given in ({}, {"streamed": 0}, {"streamed": 1}, {"sharded": 0}):
        known = (bool(given["streamed"]),) * 2 if "streamed" in given else (False, not given)
        for stage, own in by_stage(run, given=given).items():
            if stage == "actor_compute_log_prob" and "streamed" not in given:
                known = (False, False)
            shard = (False, False) if "sharded" in given else Pass.sharded
            same = Pass(
                *(read_model(CONFIGS["Llama-3-8B"]), _h100(), 8, 2048, (995, 995)),
                backward=False,
                sharded=shard,
                streamed=known,
            )
            assert (own.low, own.high) == pytest.approx(same.range()), (stage, given)


def test_an_update_whose_optimizer_runs_on_the_host_takes_that_time() -> None:
    run = speedy({"actor_update": 60}, {"actor_update": TRAINED | {"offload": 0}})
    base, host = (by_stage(run, given=given)["actor_update"] for given in ({}, {"host_adam": 1}))
    assert (host.high or 0) > (base.high or 0) + 8.03 * 1.5


def test_weights_to_devices_of_their_own_go_another_way() -> None:
    run = speedy({"weight_sync": 30}, {})
    same = by_stage(run)["weight_sync"]
    apart = by_stage(run, given={"rollout_devices": 4})["weight_sync"]
    assert same.verdict == apart.verdict == "slow"
    assert same.low != apart.low


def test_several_devices_may_send_weights() -> None:
    run = speedy({"weight_sync": 30}, {"weight_sync": {"refit_senders": 8}})
    own = by_stage(run)["weight_sync"]
    same = Refit(read_model(CONFIGS["Llama-3-8B"]), _h100(), 8, ("ipc", "ipc"), senders=8)
    assert (own.low, own.high) == pytest.approx(same.range())


@pytest.mark.parametrize(
    ("inside", "path"),
    [
        ([], ("ipc", "ipc")),
        (["ipc"], ("ipc", "ipc")),
        (["NCCL.broadcast"], ("nccl", "nccl")),
        (["rdma_write"], ("p2p", "p2p")),
        (["gather", "disk"], ("disk", "disk")),
        (["upload", "ipc"], ("ipc", "disk")),
    ],
)
def test_spans_inside_a_sync_tell_the_way_of_the_weights(
    inside: list[str], path: tuple[Path, Path]
) -> None:
    rows = []
    for step in (1, 2, 3, 4):
        begin = step * 100 * SECOND
        rows.append(Row("weight_sync", "stage", step, begin, begin + 9 * SECOND))
        for at, name in enumerate(inside):
            start = begin + at * SECOND
            rows.append(Row(name, "region", step, start, start + SECOND // 2))
        # What moves outside of a sync says nothing.
        rows.append(Row("broadcast", "region", step, begin + 20 * SECOND, begin + 21 * SECOND))
        rows.append(Row("step", "step", step, begin, begin + 30 * SECOND))
    found = by_stage(on_h100(loaded(rows)))["weight_sync"]
    same = Refit(read_model(CONFIGS["Llama-3-8B"]), _h100(), 8, path)
    assert (found.low, found.high) == pytest.approx(same.range())


def test_a_slow_stage_is_a_finding_with_its_cause_and_price() -> None:
    run = speedy({"actor_generate": 180, "actor_update": 40}, STAGES)
    finding = only(run, "slow-stage")
    facts = finding.by_name
    assert facts["stage"].value == "actor_generate"
    assert "without graphs" in str(facts["cause:"].value)
    high = by_stage(run)["actor_generate"].high or 0.0
    assert finding.price is not None
    ranks = 8  # One of them has recorded.
    assert finding.price.share == pytest.approx((180 - high) / 220 / ranks, rel=0.01)
    assert [each.verdict for each in diagnose(run).speed] == ["slow", "normal"]


def test_summary_and_table_say_what_is_normal() -> None:
    run = speedy({"actor_generate": 58, "actor_update": 40}, STAGES)
    (line,) = speed_lines(summary(run).speed)
    assert line == "Speed: 2 stages normal"
    slow = speedy({"actor_generate": 180, "actor_update": 40}, STAGES)
    [line] = speed_lines(summary(slow).speed)
    assert line == "Speed: actor_generate slow by 1.9 to 5.3 x, 1 stage normal"
    text = by_stage(run)["actor_generate"].text
    assert text == "actor_generate normal (58 s; 34.2 to 95.6 s are attainable)"
    table = speed_table(speeds(run))
    assert table.column("verdict") == ["normal", "normal"]
    assert speed_table(()).abstained


def test_a_run_of_which_nothing_is_known_is_undecided_and_one_on_a_cpu_is_not_asked() -> None:
    assert "unknown" in why(speedy({"actor_generate": 58}, {}, model=None), "slow-stage")
    rows = [Row("step", "step", n, n * 10**10, (n + 1) * 10**10) for n in range(6)]
    stages = [Row("actor_generate", "stage", n, n * 10**10, n * 10**10 + 9) for n in range(6)]
    assert diagnose(loaded([*rows, *stages])).speed == ()

"""Quantities that look alike are not mixed up, and odd runs do not break advice."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.advice.advice import advice
from lightning_rlprof.analysis.advice.effects import AT_MOST, REPLAY
from lightning_rlprof.analysis.advice.evidence import Evidence
from lightning_rlprof.analysis.advice.rule import Measured
from lightning_rlprof.analysis.advice.time_shares import UPDATE
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.errors import TraceError
from lightning_rlprof.tables.spans import Counter, Spans
from lightning_rlprof.tables.table import Table
from tests.analysis.advice.cases import CASES, HALF, counted, device, memory, talk
from tests.analysis.findings.test_findings import job
from tests.builders.advised import TOTAL, Fact, Work, advised
from tests.builders.device_trace import KERNELS, table, thinned
from tests.builders.oracle import runs
from tests.builders.runs import Row, header, loaded
from tests.builders.scripted import Script, play
from tests.effort import examples


def row(found: Table, rule: str) -> dict[str, object]:
    names = [column.name for column in found.columns]
    rows = (dict(zip(names, each, strict=True)) for each in found.rows)
    return next(each for each in rows if each["advice"] == rule)


def verdict(spans: Spans, rule: str) -> object:
    return row(advice(spans), rule)["verdict"]


WHOLE_RUN = {"device_peak_bytes": int(0.97 * TOTAL), "device_total_bytes": TOTAL}


def test_memory_advice_uses_the_peak_of_the_stage_and_not_that_of_the_whole_run() -> None:
    whole = counted("actor_update", **WHOLE_RUN)
    found = row(advice(advised(whole)), "update-micro-batch")
    assert (found["verdict"], found["missing"]) == (
        "undecided",
        "0 captured steps have the memory peak of stage actor_update",
    )
    both = replace(whole, memory={"actor_update": (0.4, 0.1, 0.9)})
    found = row(advice(advised(both)), "update-micro-batch")
    assert found["verdict"] == "given"
    assert "free at the update's own peak, of the device's memory: 50%" in str(found["evidence"])


def test_the_peak_of_one_stage_does_not_count_for_another() -> None:
    full = {"actor_generate": (0.2, 0.1, 0.3), "actor_update": (0.9, 0.05, 0.95)}
    spans = advised(Fact(spans=HALF, memory=full))
    assert verdict(spans, "rollout-memory-fraction") == "given"
    assert verdict(spans, "update-micro-batch") == "not given"


def test_the_size_of_the_memory_is_the_recorded_one_not_that_of_the_data_sheet() -> None:
    fact = memory("actor_update", 0.45)
    spans = advised(fact)
    assert verdict(spans, "update-micro-batch") == "given"
    half = {"device_total_bytes": TOTAL // 2}  # a slice of a device that has all of it
    rows = spans.counters["device_total_bytes"]
    counters = {**spans.counters, "device_total_bytes": rows._replace(values=rows.values // 2)}
    assert half["device_total_bytes"] == int(counters["device_total_bytes"].values[0])
    assert verdict(replace(spans, counters=counters), "update-micro-batch") == "not given"


def test_one_captured_step_does_not_show_that_memory_is_free() -> None:
    spans = advised(memory("actor_update", 0.3))
    first = {
        name: each._replace(rows=each.rows[:1], values=each.values[:1])
        if name.startswith("device_")
        else each
        for name, each in spans.counters.items()
    }
    found = row(advice(replace(spans, counters=first)), "update-micro-batch")
    assert found["missing"] == "1 captured steps have the memory peak of stage actor_update"


def preempting(total: float, step: float) -> Spans:
    def counters(rank: int, number: int) -> dict[str, float]:
        return {"num_preemptions_total": total + step * number}

    return advised(Fact(spans=HALF, counters={"actor_generate": counters}))


def test_a_running_total_is_not_a_rate() -> None:
    assert verdict(preempting(500, 0), "kv-preemptions") == "not given"
    assert verdict(preempting(500, 3), "kv-preemptions") == "given"
    found = row(advice(preempting(500, 3)), "kv-preemptions")
    assert str(found["evidence"]).startswith("preempted requests per step: 2.75 ")


@pytest.mark.parametrize(
    ("limit", "expected"), [(None, "undecided"), (100, "given"), (1_000, "not given")]
)
def test_responses_that_end_together_are_clipped_only_at_the_limit(
    limit: int | None, expected: str
) -> None:
    known = {} if limit is None else {"actor_generate": {"response_limit": limit}}
    fact = Fact(spans=HALF, samples=[("trained", {"tokens": 100})] * 4, counters=known)
    assert verdict(advised(fact), "clipped-responses") == expected


def test_the_limit_of_a_sample_counts_before_that_of_the_stage_and_evaluations_do_not() -> None:
    ends = [("trained", {"tokens": 100, "response_limit": 100})] * 2
    others = [("evaluation", {"tokens": 9, "response_limit": 9})] * 3
    more = [("trained", {"tokens": 50, "response_limit": 100})] * 2
    found = row(
        advice(advised(Fact(spans=HALF, samples=[*ends, *others, *more]))), "clipped-responses"
    )
    assert found["verdict"] == "given"
    assert "responses that reach the limit of their length: 50%" in str(found["evidence"])
    assert (
        verdict(advised(Fact(spans=HALF, samples=[*others, *more])), "clipped-responses")
        == "not given"
    )


def test_warm_up_is_left_out() -> None:
    fact = Fact(spans={"data_fetch": 0.01, "actor_update": 0.99})
    assert verdict(advised(replace(fact, warm_up="data_fetch")), "data-workers") == "not given"
    assert verdict(job("data_fetch", [0.9] + [0.01] * 11), "data-workers") != "not given"


def test_of_stages_warm_up_and_captured_steps_are_left_out() -> None:
    fact = Fact(spans={"save_checkpoint": 0.01, "actor_update": 0.99}, warm_up="save_checkpoint")
    assert verdict(advised(fact), "checkpoint-cost") == "not given"
    spans = job("save_checkpoint", [0.01] * 9 + [0.9] * 3)
    assert verdict(spans, "checkpoint-cost") != "not given"
    steps = spans.rows(kind="step")[-3:]
    captured = replace(spans, counters={"capture": Counter(steps, np.ones(3, np.int64))})
    assert verdict(captured, "checkpoint-cost") == "not given"


def test_an_interval_around_the_limit_does_not_decide() -> None:
    found = row(advice(job("data_fetch", [0.01, 0.1] * 6)), "data-workers")
    assert found["verdict"] == "undecided"
    text = "The interval of waiting for data, of the step time includes the limit of 5.0%"
    assert (found["missing"], found["record"]) == (text, "Record more steps")


def test_four_steps_are_too_few() -> None:
    found = row(advice(job("data_fetch", [0.5] * 4)), "data-workers")
    assert found["missing"] == "4 complete steps after warm-up; 5 are needed"


def test_lost_kernels_decide_nothing() -> None:
    spans = advised(talk("AllGather"))
    rows = spans.table("kernels").rows
    kernels = [dict(zip(KERNELS, each, strict=True)) for each in rows]
    fewer = {**spans.tables, "kernels": lambda: table("kernels", KERNELS, thinned(kernels, 0.2, 1))}
    found = row(advice(replace(spans, tables=fewer)), "fsdp-prefetch")
    assert (found["verdict"], found["missing"]) == (
        "undecided",
        "Kernels were lost, see data_quality",
    )


def test_hidden_communication_is_not_exposed() -> None:
    nccl = Work("ncclDevKernel_AllGather", 0.0, 0.3, stream=9)
    assert verdict(advised(device(nccl, Work("gemm"))), "fsdp-prefetch") == "not given"


def test_a_stale_capture_mark_of_a_rank_that_ended_early_is_not_out_of_memory() -> None:
    early = advised(Fact(spans=HALF, status="interrupted by RuntimeError"))
    assert verdict(early, "out-of-memory") == "not given"
    out = advised(Fact(spans=HALF, status="interrupted by OutOfMemoryError"))
    assert verdict(out, "out-of-memory") == "given"


def test_clocks_of_an_idle_device_do_not_count() -> None:
    assert verdict(advised(CASES["low-clocks"].undecided), "low-clocks") == "undecided"


def test_a_tail_is_replayed_and_a_share_is_an_upper_limit() -> None:
    tail = row(advice(advised(CASES["rollout-tail"].given)), "rollout-tail")
    assert tail["saving"] == REPLAY
    assert tail["saved"] == pytest.approx(0.3 * 0.8, rel=0.02)
    waits = row(advice(advised(CASES["data-workers"].given)), "data-workers")
    assert waits["saving"] == AT_MOST
    assert waits["saved"] == pytest.approx(0.3)
    assert (waits["CI low"], waits["CI high"]) == (pytest.approx(0.3), pytest.approx(0.3))


def test_a_stage_that_overlaps_or_goes_is_replayed() -> None:
    spans = advised(CASES["reward-workers"].given)
    assert row(advice(spans), "reward-workers")["saving"] == REPLAY
    assert row(advice(spans), "reward-workers")["saved"] == pytest.approx(0.3, rel=0.01)
    copies = row(advice(advised(CASES["offload-less"].given)), "offload-less")
    assert (copies["saving"], copies["saved"]) == (REPLAY, pytest.approx(0.2, rel=0.01))


def test_a_rollout_inside_an_update_is_no_part_of_it() -> None:
    rows = []
    for step in range(1, 13):
        now = step * 1_000
        rows += [Row("step", "step", step, now, now + 1_000)]
        rows += [Row("actor_update", "stage", step, now, now + 1_000)]
        rows += [Row("actor_generate", "stage", step, now, now + 600, parent=len(rows))]
    found = UPDATE.measure(Evidence(loaded(rows)))
    assert isinstance(found, Measured)
    assert found.value == pytest.approx(0.4)


def test_balance_saves_at_most_what_ranks_wait_if_no_replay_shows_it() -> None:
    spans = play(Script(ranks=4, steps=40, uneven=0.3), 1).spans
    found = row(advice(spans), "length-balance")
    assert (found["verdict"], found["saving"]) == ("given", AT_MOST)
    shares = dict(zip(*(ledger(spans).column(name) for name in ("category", "share")), strict=True))
    assert found["saved"] == pytest.approx(shares["collective wait"], rel=0.1)


def test_memory_and_quality_have_no_saving() -> None:
    for rule in ("out-of-memory", "clipped-responses", "fragmentation"):
        found = row(advice(advised(CASES[rule].given)), rule)
        assert (found["saved"], found["saving"]) == (None, None)


def test_the_largest_saving_comes_first_then_what_is_undecided() -> None:
    spans = advised(Fact(spans={"data_fetch": 0.1, "weight_sync": 0.3, "actor_update": 0.6}))
    found = advice(spans)
    verdicts = found.column("verdict")
    order = ["given", "undecided", "not given"]
    assert verdicts == sorted(verdicts, key=lambda each: order.index(str(each)))
    assert found.column("advice")[:2] == ["weight-sync-overlap", "data-workers"]
    counts = [verdicts.count(each) for each in order]
    assert found.note == f"{counts[0]} given, {counts[1]} undecided, {counts[2]} not given."


def test_settings_are_those_of_the_frameworks_that_the_run_names() -> None:
    spans = advised(replace(CASES["data-workers"].given, versions={"trl": "1.16.0"}))
    settings_of = str(row(advice(spans), "data-workers")["settings"])
    assert "TRL: GRPOConfig.dataloader_num_workers (default 0): 2 to 4" in settings_of
    assert "PyTorch: DataLoader(num_workers=)" in settings_of
    assert "verl" not in settings_of
    assert "verl: data." in str(row(advice(advised(CASES["data-workers"].given)), "data-workers"))


def test_ignored_advice_is_left_out() -> None:
    spans = advised(CASES["data-workers"].given)
    found = advice(spans, ignore=["data-workers"])
    assert "data-workers" not in found.column("advice")
    assert found.note.endswith(" Ignored: data-workers.")
    config = {"ignore_advice": ["data-workers", "of a later version"]}
    own = replace(spans, headers={0: replace(header(), config=config)})
    assert advice(own).note.endswith(" Ignored: data-workers.")


def test_an_unknown_id_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(TraceError, match="unknown advice 'data-worker'") as refused:
        advice(advised(Fact(spans=HALF)), ignore=["data-worker"])
    assert refused.value.hint == "did you mean 'data-workers'? List all: rlprof explain"


def test_a_run_without_steps_or_devices_has_no_advice() -> None:
    assert advice(loaded([])).abstained == "no complete step was recorded"


@settings(max_examples=examples(30), deadline=None)
@given(runs(overlapping_steps=True))
def test_odd_runs_have_advice(rows: list[list[Row]]) -> None:
    advice(loaded(*rows))


ODD = (
    *("tokens", "padded_tokens", "samples", "bytes", "flops", "num_preempted", "kv_cache_usage"),
    *("device_peak_bytes", "device_other_bytes", "device_total_bytes", "device_reserved_bytes"),
    *("host_rss_bytes", "host_limit_bytes", "gc_pause_ns", "cpu_wait_ns", "response_limit"),
    *("sample", "version", "trainer_version", "num_preemptions_total", "lengths[3]"),
)


@pytest.mark.parametrize("odd", [2**63 - 1, -(2**63), 2**63, -(10**30), 1.7e308, 5e-324, 0])
def test_odd_counters_have_advice(odd: float) -> None:
    fact = counted("actor_update", **dict.fromkeys(ODD, odd))
    of_step = dict.fromkeys(("gc_pause_ns", "cpu_wait_ns", "host_rss_bytes"), odd)
    advice(advised(replace(fact, of_step=of_step)))


def test_the_run_is_left_as_it_is() -> None:
    spans = advised(device(Work(busy=0.5), memory={"actor_update": (0.4, 0.1, 0.5)}))
    before = [column.copy() for column in (spans.start_ns, spans.end_ns, spans.name)]
    assert advice(spans) == advice(spans)
    after = (spans.start_ns, spans.end_ns, spans.name)
    assert all((one == other).all() for one, other in zip(before, after, strict=True))

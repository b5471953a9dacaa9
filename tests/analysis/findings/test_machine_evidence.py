"""What background metrics show: each rule fires, must not fire, and abstains."""

from collections.abc import Callable

import pytest

from lightning_rlprof.analysis.findings.finding import Finding, NotChecked, Results, RunData
from lightning_rlprof.analysis.findings.findings import findings
from lightning_rlprof.analysis.findings.machine_evidence import (
    FEWEST_SAMPLES,
    cpu_contention,
    gc_pauses,
    gpu_throttling,
    memory_pressure,
)
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row
from tests.builders.sampled import Metrics, S, sampled_run

N = 100
WAITING = {"cpu_wait_ns": 300_000_000}  # of a second
ENOUGH = f"needs {FEWEST_SAMPLES} samples of background metrics, has 59"
CHECKS = (cpu_contention, memory_pressure, gpu_throttling)
Check = Callable[[RunData], Results]


def host(**metrics: float | list[float | None]) -> list[tuple[int, None, Metrics]]:
    values = {k: v if isinstance(v, list) else [v] * N for k, v in metrics.items()}
    return [(0, None, values)]


def gpu(rank: int = 0, **metrics: float | list[float | None]) -> tuple[int, int, Metrics]:
    usual = {"device_clock_mhz": 1980.0, "device_max_clock_mhz": [1980.0]} | {
        f"device_{each}": 0.0
        for each in ("thermal_throttled", "power_throttled", "hardware_slowdown")
    }
    values = usual | {f"device_{name}": value for name, value in metrics.items()}
    return (rank, 0, {k: v if isinstance(v, list) else [v] * N for k, v in values.items()})


def only(check: Check, spans: Spans) -> Finding:
    [found] = check(RunData(spans))
    assert isinstance(found, Finding)
    assert len(Run.of(spans).sql(found.query).rows) > 0
    return found


def why(check: Check, spans: Spans) -> list[str]:
    results = check(RunData(spans))
    assert all(isinstance(each, NotChecked) for each in results)
    return [each.why for each in results if isinstance(each, NotChecked)]


# ---- the CPU quota


def test_a_quota_that_is_used_up_fires_without_a_cost_if_no_wait_was_counted() -> None:
    spans = sampled_run(host(cpu_throttled_percent=54.0, cpu_quota_cores=[4.0]))
    found = only(cpu_contention, spans)
    assert found.title == "The CPU quota of the container is used up in 54% of its periods"
    assert (found.cost, found.confidence) == (None, "high")
    assert found.evidence == "host of rank 0, 4 cores, 95% CI 54–54% of the periods in 100 s"


def test_with_a_wait_that_was_counted_it_is_reported_once_with_that_cost() -> None:
    spans = sampled_run(host(cpu_throttled_percent=54.0), counters=WAITING)
    found = only(cpu_contention, spans)
    assert found.rule.name == "CPU quota"
    assert found.cost == N * WAITING["cpu_wait_ns"]
    assert found.confidence == "medium"  # some of the wait may have another cause


def test_a_quota_that_is_rarely_used_up_does_not_fire() -> None:
    assert cpu_contention(RunData(sampled_run(host(cpu_throttled_percent=1.0)))) == []
    spans = sampled_run(host(cpu_throttled_percent=1.0), counters=WAITING)
    assert only(cpu_contention, spans).rule.name == "CPU contention"


def test_a_quota_used_up_before_the_first_step_is_not_of_the_training() -> None:
    values: list[float | None] = [100.0] * 80 + [0.0] * 80
    rows = [Row("step", "step", at + 1, at * S, (at + 1) * S) for at in range(80, 160)]
    spans = sampled_run([(0, None, {"cpu_throttled_percent": values})], rows, seconds=0)
    assert cpu_contention(RunData(spans)) == []


def test_without_a_minute_of_samples_or_near_the_threshold_it_abstains() -> None:
    assert why(cpu_contention, sampled_run(host(cpu_throttled_percent=[54.0] * 59))) == [ENOUGH]
    values: list[float | None] = [0.0] * 91 + [54.0] * 9
    [text] = why(cpu_contention, sampled_run(host(cpu_throttled_percent=values)))
    assert text.endswith("includes the threshold of 5%")
    assert cpu_contention(RunData(sampled_run(host()))) == []


# ---- neighbors


def busy(ours: float, host_: float, samples: int = N) -> Spans:
    one = {"host_cpu_cores": [host_] * samples, "container_cpu_cores": [ours] * samples}
    return sampled_run([(0, None, {**one, "host_cpu_count": [8.0]})], counters=WAITING)


def test_programs_outside_of_the_container_that_keep_the_cpus_busy_are_named() -> None:
    found = only(cpu_contention, busy(2.0, 7.6))
    assert found.title == "Training threads wait for a CPU: other programs use 70% of the machine"
    assert found.cost == N * WAITING["cpu_wait_ns"]
    assert "host of rank 0: 95% of 8 CPUs in use, 70% by programs outside" in found.evidence


@pytest.mark.parametrize(("ours", "host_"), [(7.0, 7.6), (0.5, 4.0)])
def test_neighbors_are_not_named_if_the_job_fills_the_machine_or_cpus_are_free(
    ours: float, host_: float
) -> None:
    assert only(cpu_contention, busy(ours, host_)).title == "Training threads wait for a CPU"


def test_neighbors_are_not_named_without_a_minute_of_samples_or_a_wait() -> None:
    assert only(cpu_contention, busy(2.0, 7.6, 59)).title == "Training threads wait for a CPU"
    metrics = host(host_cpu_cores=7.6, container_cpu_cores=2.0, host_cpu_count=[8.0])
    assert cpu_contention(RunData(sampled_run(metrics))) == []


def test_the_wait_for_a_cpu_comes_last_whatever_its_cause() -> None:
    rows = [Row("actor_generate", "stage", at + 1, at * S, (at + 1) * S) for at in range(N)]
    metrics = host(cpu_throttled_percent=54.0)
    table = findings(sampled_run(metrics, rows, counters=WAITING))
    assert [str(each)[:13] for each in table.column("finding")] == [
        "Rollout takes",
        "The CPU quota",
    ]


# ---- memory


def test_waiting_for_memory_fires_and_says_how_full_the_container_is() -> None:
    limit = {"container_memory_limit_bytes": [1000.0], "container_memory_bytes": 970.0}
    found = only(memory_pressure, sampled_run(host(memory_full_pressure_percent=12.0, **limit)))
    assert found.title == (
        "Memory of the host is short: all active threads wait for it in 12% of the time"
    )
    assert found.cost is None
    assert found.evidence.endswith("the container uses up to 97% of its limit")


def test_reading_from_swap_fires() -> None:
    swaps: list[float | None] = [0.0, 5e7] * 50
    metrics = host(memory_full_pressure_percent=0.0, swap_in_bytes_per_s=swaps)
    found = only(memory_pressure, sampled_run(metrics))
    assert found.title.endswith("it reads from swap in 50% of the time")


def test_pages_that_are_swapped_in_now_and_then_do_not_fire() -> None:
    metrics = host(memory_full_pressure_percent=0.5, swap_in_bytes_per_s=4096.0)
    assert memory_pressure(RunData(sampled_run(metrics))) == []


def test_memory_abstains_without_a_minute_of_samples() -> None:
    metrics = host(memory_full_pressure_percent=[90.0] * 59, swap_in_bytes_per_s=[1e9] * 59)
    assert why(memory_pressure, sampled_run(metrics)) == [ENOUGH]
    assert memory_pressure(RunData(sampled_run([]))) == []


# ---- GPUs


@pytest.mark.parametrize(
    ("metric", "cause", "is_idea"),
    [
        ("thermal_throttled", "throttled by heat", False),
        ("power_throttled", "throttled by its power limit", True),
        ("hardware_slowdown", "slowed down by hardware, because of heat or power", False),
    ],
)
def test_a_throttled_gpu_fires_with_its_clock_and_share_of_time(
    metric: str, cause: str, is_idea: bool
) -> None:
    hot = {metric: [0.0, 0.0, 1.0, 1.0] * 25, "clock_mhz": [1980.0, 1980.0, 990.0, 990.0] * 25}
    found = only(gpu_throttling, sampled_run([gpu(), gpu(1, **hot)], ranks=2))
    assert found.title == (
        f"The GPU of rank 1 is {cause}: its clock is 50% lower in 49% of the time"
    )
    assert (found.cost, found.rule.idea) == (None, is_idea)
    assert "rank 1, device 0: 24% of its clock cycles" in found.evidence
    assert found.place is not None
    assert found.place.rank == 1


def test_several_hot_gpus_are_one_finding() -> None:
    hot = {"thermal_throttled": 1.0, "clock_mhz": 1200.0}
    found = only(gpu_throttling, sampled_run([gpu(0, **hot), gpu(1, **hot)], ranks=2))
    assert "rank 0 and 1 more" in found.title


@pytest.mark.parametrize(
    "metrics",
    [
        {"clock_mhz": 345.0},  # idle
        {"thermal_throttled": 1.0, "clock_mhz": 1950.0},  # by little
        {"thermal_throttled": [1.0, *[0.0] * 99], "clock_mhz": [990.0, *[1980.0] * 99]},  # once
    ],
)
def test_a_low_clock_alone_and_little_throttling_do_not_fire(
    metrics: dict[str, float | list[float | None]],
) -> None:
    assert gpu_throttling(RunData(sampled_run([gpu(**metrics)]))) == []


def test_gpus_abstain_without_a_minute_of_samples_or_reasons() -> None:
    names = gpu()[2]
    short = {name: [*values][:59] for name, values in names.items()}
    assert why(gpu_throttling, sampled_run([(0, 0, short)])) == [ENOUGH]
    blind = {name: values for name, values in names.items() if "clock" in name}
    assert why(gpu_throttling, sampled_run([(0, 0, blind)])) == [
        "the driver does not tell why clocks are low"
    ]
    assert gpu_throttling(RunData(sampled_run([]))) == []


# ---- garbage collection


def collected(ns: int, steps: int = 30) -> Spans:
    return sampled_run([], seconds=steps, counters={"gc_pause_ns": ns, "gc_collections": 3})


def test_pauses_fire_with_their_cost_though_none_is_a_span() -> None:
    found = only(gc_pauses, collected(80_000_000))
    assert found.title == "Python GC pauses the ranks"
    assert (found.cost, found.low, found.high) == (2_400_000_000,) * 3
    assert "Python GC pauses the ranks" in findings(collected(80_000_000)).column("finding")


def test_short_pauses_do_not_fire_and_pauses_are_not_checked_twice() -> None:
    assert gc_pauses(RunData(collected(1_000_000))) == []
    rows = []
    for at in range(30):
        start, stage = at * S, 31 + 2 * at
        rows.append(Row("actor_update", "stage", at + 1, start, start + S))
        pause = Row("garbage_collection", "region", at + 1, start + 1, start + S // 2)
        rows.append(pause._replace(parent=stage))
    counters = {"gc_pause_ns": S // 2, "gc_collections": 1}
    table = findings(sampled_run([], rows, seconds=30, counters=counters))
    assert table.column("finding").count("Python GC pauses the ranks") == 1


def test_pauses_abstain_with_few_steps_and_say_nothing_if_not_counted() -> None:
    assert why(gc_pauses, collected(80_000_000, 4)) == ["needs 5 steps, has 4"]
    assert gc_pauses(RunData(sampled_run([]))) == []


@pytest.mark.parametrize("check", CHECKS)
def test_a_run_without_steps_is_judged_by_all_its_samples(check: Check) -> None:
    metrics = [
        *host(cpu_throttled_percent=54.0, memory_full_pressure_percent=50.0),
        gpu(thermal_throttled=1.0, clock_mhz=990.0),
    ]
    assert len(check(RunData(sampled_run(metrics, seconds=0)))) == 1

"""What background metrics show: each rule fires, must not fire, and abstains."""

from dataclasses import replace
from typing import Any

import pytest

from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.diagnosis.machine_quantities import FEWEST_SAMPLES
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Spans
from tests.builders.diagnosed import found, judged, only, why
from tests.builders.runs import Row
from tests.builders.sampled import Metrics, S, sampled_run

N = 100
WAITING = {"cpu_wait_ns": 300_000_000}  # of a second
ENOUGH = f"59 samples of {{}}; {FEWEST_SAMPLES} are needed"
CPU = ("cpu-contention", "cpu-quota")
THROTTLED = ("device-heat", "device-power", "device-slowdown")
REMEDIES = {"own-threads", "fewer-workers", "other-programs", "cpu-limit"}


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


def offered(spans: Spans) -> set[str]:
    """Return the remedies that are offered against waiting for a CPU."""
    [own] = [each for each in diagnose(spans).problems if each.id == "cpu-contention"]
    return {each.remedy.id for each in own.remedies}


# ---- the CPU quota


def test_a_quota_that_is_used_up_fires_without_a_cost_if_no_wait_was_counted() -> None:
    spans = sampled_run(host(cpu_throttled_percent=54.0, cpu_quota_cores=[4.0]))
    own = only(spans, "cpu-quota")
    assert (own.price, own.confidence) == (None, "high")
    assert own.by_name["of the time"].value == pytest.approx(0.54)
    assert len(Run.of(spans).sql(own.query).rows) > 0


def test_with_a_wait_that_was_counted_the_limit_is_a_remedy_of_the_wait() -> None:
    spans = sampled_run(host(cpu_throttled_percent=54.0), counters=WAITING)
    own = [each for each in diagnose(spans).problems if each.id in CPU]
    assert [each.id for each in own] == ["cpu-contention"]
    assert own[0].price is not None
    assert own[0].price.ns == N * WAITING["cpu_wait_ns"]
    assert offered(spans) == {"cpu-limit"}


def test_a_quota_that_is_rarely_used_up_does_not_fire() -> None:
    assert judged(sampled_run(host(cpu_throttled_percent=1.0)), "cpu-quota") == []
    spans = sampled_run(host(cpu_throttled_percent=1.0), counters=WAITING)
    assert offered(spans) == set()


def test_a_quota_used_up_before_the_first_step_is_not_of_the_training() -> None:
    values: list[float | None] = [100.0] * 80 + [0.0] * 80
    rows = [Row("step", "step", at + 1, at * S, (at + 1) * S) for at in range(80, 160)]
    spans = sampled_run([(0, None, {"cpu_throttled_percent": values})], rows, seconds=0)
    assert judged(spans, "cpu-quota") == []


def test_without_a_minute_of_samples_or_near_the_limit_it_is_undecided() -> None:
    few = sampled_run(host(cpu_throttled_percent=[54.0] * 59))
    assert why(few, "cpu-quota") == ENOUGH.format("cpu_throttled_percent")
    values: list[float | None] = [0.0] * 91 + [54.0] * 9
    text = why(sampled_run(host(cpu_throttled_percent=values)), "cpu-quota")
    assert text.endswith("includes 5.0%")


# ---- who uses the CPUs


def busy(host_: float, samples: int = N, **cores: float) -> Spans:
    one = {name: [value] * samples for name, value in cores.items()}
    metrics = {**one, "host_cpu_cores": [host_] * samples, "host_cpu_count": [8.0]}
    return sampled_run([(0, None, metrics)], counters=WAITING)


@pytest.mark.parametrize("samples", [N, 3])
@pytest.mark.parametrize("container", [None, 7.0])
def test_own_threads_are_blamed_if_the_process_uses_the_cpus(
    samples: int, container: float | None
) -> None:
    """In runs of any length, on bare machines and in containers."""
    more = {} if container is None else {"container_cpu_cores": container}
    assert offered(busy(7.6, samples, process_cpu_cores=7.0, **more)) == {"own-threads"}


@pytest.mark.parametrize("container", [None, 0.3])
def test_other_programs_are_blamed_if_the_process_hardly_runs(container: float | None) -> None:
    more = {} if container is None else {"container_cpu_cores": container}
    assert offered(busy(7.6, process_cpu_cores=0.2, **more)) == {"other-programs"}


def test_what_the_process_uses_is_unknown_without_samples_and_no_process_is_blamed() -> None:
    assert offered(sampled_run(host(), counters=WAITING)) == set()


def test_waiting_for_a_cpu_comes_first_as_all_other_times_include_it() -> None:
    rows = [Row("weight_sync", "stage", at + 1, at * S, (at + 1) * S) for at in range(N)]
    found = diagnose(sampled_run(host(cpu_throttled_percent=54.0), rows, counters=WAITING))
    assert [each.id for each in found.problems][:2] == ["cpu-contention", "weight-sync"]


# ---- memory


def test_waiting_for_memory_or_reading_from_swap_fires() -> None:
    own = only(sampled_run(host(memory_full_pressure_percent=12.0)), "memory-pressure")
    assert (own.price, own.by_name["by"].value) == (None, "waits for memory")
    swaps: list[float | None] = [0.0, 5e7] * 50
    metrics = host(memory_full_pressure_percent=0.0, swap_in_bytes_per_s=swaps)
    assert only(sampled_run(metrics), "memory-pressure").by_name["by"].value == "reads from swap"


def test_pages_that_are_swapped_in_now_and_then_do_not_fire() -> None:
    metrics = host(memory_full_pressure_percent=0.5, swap_in_bytes_per_s=4096.0)
    assert judged(sampled_run(metrics), "memory-pressure") == []


def test_memory_is_undecided_without_a_minute_of_samples() -> None:
    metrics = host(memory_full_pressure_percent=[90.0] * 59, swap_in_bytes_per_s=[1e9] * 59)
    text = why(sampled_run(metrics), "memory-pressure")
    assert text == ENOUGH.format("memory_full_pressure_percent")


# ---- GPUs


def with_gpu(*lanes: tuple[int, int, Metrics], ranks: int = 1) -> Spans:
    spans = sampled_run([*lanes], ranks=ranks)
    heads = {rank: replace(head, device="cuda") for rank, head in spans.headers.items()}
    return replace(spans, headers=heads)


@pytest.mark.parametrize(
    ("metric", "name"),
    [*zip(("thermal_throttled", "power_throttled", "hardware_slowdown"), THROTTLED, strict=True)],
)
def test_a_throttled_gpu_fires_with_its_rank_and_lost_cycles(metric: str, name: str) -> None:
    hot = {metric: [0.0, 0.0, 1.0, 1.0] * 25, "clock_mhz": [1980.0, 1980.0, 990.0, 990.0] * 25}
    [own] = found(with_gpu(gpu(), gpu(1, **hot), ranks=2), *THROTTLED)
    assert (own.id, own.price) == (name, None)
    assert own.by_name["rank"].value == 1
    assert own.by_name["of the time"].value == pytest.approx(0.245, abs=0.01)
    assert own.place is not None
    assert own.place.rank == 1


def test_heat_is_not_said_of_a_run_on_cpus() -> None:
    hot = gpu(thermal_throttled=1.0, clock_mhz=990.0)
    assert judged(sampled_run([hot]), *THROTTLED) == []


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
    assert judged(with_gpu(gpu(**metrics)), *THROTTLED) == []


def test_heat_from_twelve_samples_is_undecided_everywhere() -> None:
    """One engine: it was "not checked, has 12" in findings, and given as advice from the same."""
    names = gpu(thermal_throttled=1.0, clock_mhz=990.0)[2]
    spans = with_gpu((0, 0, {name: [*values][:12] for name, values in names.items()}))
    assert why(spans, "device-heat").startswith("12 samples of device_thermal_throttled")
    answer = diagnose(spans)
    assert "device-heat" not in [each.id for each in answer.found]
    assert "device-heat" in [each.id for each in answer.undecided]


def test_gpus_are_undecided_without_reasons() -> None:
    blind = {name: values for name, values in gpu()[2].items() if "clock" in name}
    assert "does not report why" in why(with_gpu((0, 0, blind)), "device-heat")


# ---- garbage collection


def collected(ns: int, steps: int = 30) -> Spans:
    return sampled_run([], seconds=steps, counters={"gc_pause_ns": ns, "gc_collections": 3})


def test_pauses_fire_with_their_exact_cost_though_none_is_a_span() -> None:
    own = only(collected(80_000_000), "garbage-collection")
    assert own.price is not None
    assert (own.price.ns, own.price.low) == (2_400_000_000, None)


def test_short_pauses_do_not_fire_and_few_steps_are_undecided() -> None:
    assert judged(collected(1_000_000), "garbage-collection") == []
    assert "4 complete steps" in why(collected(80_000_000, 4), "garbage-collection")


def test_pauses_that_are_counted_and_marked_are_one_problem() -> None:
    rows = []
    for at in range(30):
        start, stage = at * S, 31 + 2 * at
        rows.append(Row("actor_update", "stage", at + 1, start, start + S))
        pause = Row("garbage_collection", "region", at + 1, start + 1, start + S // 2)
        rows.append(pause._replace(parent=stage))
    counters = {"gc_pause_ns": S // 2, "gc_collections": 1}
    answer = diagnose(sampled_run([], rows, seconds=30, counters=counters))
    assert [each.id for each in answer.problems].count("garbage-collection") == 1


def test_a_run_without_steps_is_judged_by_all_its_samples() -> None:
    metrics = host(cpu_throttled_percent=54.0, memory_full_pressure_percent=50.0)
    spans = sampled_run(metrics, seconds=0)
    assert {each.id for each in found(spans, "cpu-quota", "memory-pressure")} == {
        "cpu-quota",
        "memory-pressure",
    }


# ---- rollout engines


ROLLOUT = [Row("actor_generate", "stage", at + 1, at * S, at * S + S * 9 // 10) for at in range(N)]
ENGINE_REMEDIES = {"rollout-batching", "rollout-memory-fraction"}


def engine(waiting: float, kv: float, running: float = 8.0, device: int | None = None) -> Any:
    names = ("engine_running_requests", "engine_waiting_requests", "engine_kv_cache_percent")
    values = zip(names, (running, waiting, kv), strict=True)
    return (0, device, {name: [value] * N for name, value in values})


def ideas(*engines: Any, **more: float) -> tuple[set[str], set[str]]:
    """Return the remedies of a long rollout that are offered, and those that lack data."""
    spans = sampled_run([*engines, *host(**more)] if more else engines, ROLLOUT)
    answer = diagnose(spans, "vLLM")
    [rollout] = [each for each in answer.ideas if each.id == "rollout"]
    open_ones = {each.id for each in answer.undecided}
    return {each.remedy.id for each in rollout.remedies} & ENGINE_REMEDIES, (
        open_ones & ENGINE_REMEDIES
    )


@pytest.mark.parametrize(
    ("waiting", "kv", "offered_remedy"),
    [
        (20.0, 40.0, {"rollout-batching"}),
        (20.0, 99.0, {"rollout-memory-fraction"}),
        (20.0, 85.0, set()),
        (0.0, 40.0, set()),
    ],
)
def test_requests_that_wait_have_a_remedy_by_the_kv_cache(
    waiting: float, kv: float, offered_remedy: set[str]
) -> None:
    assert ideas(engine(waiting, kv)) == (offered_remedy, set())


def test_an_engine_that_has_no_request_is_not_a_part_of_the_time() -> None:
    names = ("engine_running_requests", "engine_waiting_requests", "engine_kv_cache_percent")
    busy = [(8.0, 20.0, 99.0)] * 70 + [(0.0, 0.0, 0.0)] * 30
    metrics = {name: [each[at] for each in busy] for at, name in enumerate(names)}
    assert ideas((0, None, metrics)) == ({"rollout-memory-fraction"}, set())


def test_the_fullest_of_several_engines_decides() -> None:
    both = engine(20.0, 99.0, device=0), engine(20.0, 40.0, device=1)
    assert ideas(*both) == ({"rollout-memory-fraction"}, set())


def test_without_an_engine_its_remedies_are_not_decided() -> None:
    assert ideas(process_cpu_cores=1.0) == (set(), ENGINE_REMEDIES)
    spans = sampled_run(host(process_cpu_cores=1.0), ROLLOUT)
    [own] = [each for each in diagnose(spans, "vLLM").undecided if each.id == "rollout-batching"]
    assert own.how == "Set engine_metrics to the URL of its /metrics page"

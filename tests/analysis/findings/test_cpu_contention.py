"""Steps that are slow for want of a CPU, and ranks that wait for such, accuse no code."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_rlprof.analysis.findings.findings import findings
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import Counter, Spans
from tests.analysis.steps.test_waiting import Job
from tests.builders.pairs import run_of

WAITS = "Training threads wait for a CPU"
USUAL = 1e8


def with_cpu_waits(spans: Spans, ns: np.ndarray) -> Spans:
    """Return the run with what each step waited, one value per row of a step."""
    rows = spans.rows(kind="step")
    return replace(spans, counters={"cpu_wait_ns": Counter(rows, np.asarray(ns, np.int64))})


def titles(spans: Spans) -> list[str]:
    return [str(each) for each in findings(spans).column("finding")]


def slow_steps(kind: str) -> np.ndarray:
    times = USUAL * np.exp(np.random.default_rng(1).normal(0, 0.02, 60))
    times[slice(40, 41) if kind == "outlier" else slice(40, None)] *= 5
    return times


@pytest.mark.parametrize("kind", ["outlier", "level"])
@pytest.mark.parametrize("share", [1.0, 0.6, 0.4, 0.0])
def test_a_slow_step_is_listed_unless_half_of_it_was_waiting_for_a_cpu(
    kind: str, share: float
) -> None:
    times = slow_steps(kind)
    spans = with_cpu_waits(run_of({"a": times}), share * np.maximum(times - USUAL, 0))
    table = findings(spans)
    assert any(each.startswith("Step") for each in titles(spans)) == (share < 0.5)
    explained = "steps (training threads waited for a CPU meanwhile)"
    became = "steps that became slower (training threads waited for a CPU meanwhile)"
    assert (explained in table.note or became in table.note) == (share > 0.5)


def test_waiting_for_a_cpu_all_the_time_explains_no_single_step() -> None:
    spans = with_cpu_waits(run_of({"a": slow_steps("outlier")}), np.full(60, 0.5 * USUAL))
    assert titles(spans)[0].startswith("Step 41 took")
    assert titles(spans)[-1] == WAITS


def test_the_wait_of_ranks_for_one_without_a_cpu_is_not_listed() -> None:
    job = Job(3, uneven=True)
    steps = job.spans.rows(kind="step")
    assert titles(job.spans)[0] == "Ranks wait for the slowest one"
    late = 20e6 * np.random.default_rng(2).integers(0, 2, len(steps))
    assert "Ranks wait for the slowest one" not in titles(with_cpu_waits(job.spans, late))
    alike = np.full(len(steps), 20e6)  # then none is later than the others
    assert "Ranks wait for the slowest one" in titles(with_cpu_waits(job.spans, alike))


def test_it_comes_last_with_its_price_and_evidence() -> None:
    spans = with_cpu_waits(run_of({"actor_generate": np.full(30, USUAL)}), np.full(30, 0.8 * USUAL))
    table = findings(spans)
    assert titles(spans) == ["Rollout takes most of the time", WAITS]
    row = dict(zip((each.name for each in table.columns), table.rows[-1], strict=True))
    assert row["cost"] == 30 * 0.8 * USUAL
    assert row["CI low"] <= row["cost"] <= row["CI high"] + 1
    assert (row["rank"], row["step"]) == (0, 1)
    assert len(Run.of(spans).sql(str(row["query"])).rows) == 30


@pytest.mark.parametrize(("share", "steps"), [(0.01, 30), (0.8, 4)])
def test_it_passes_below_5_percent_and_skips_few_steps(share: float, steps: int) -> None:
    spans = run_of({"a": np.full(steps, USUAL)})
    table = findings(with_cpu_waits(spans, np.full(steps, share * USUAL)))
    assert WAITS not in table.column("finding")
    assert ("CPU contention" in table.note) == (steps < 5)

"""The cost of recording, from steps that recorded all and steps that recorded only their length."""

import random

import pytest

from lightning_rlprof.analysis.diagnosis.data_quality import (
    MIN_PAIRS,
    data_quality,
    measured_overhead,
)
from lightning_rlprof.analysis.diagnosis.diagnosis import findings
from lightning_rlprof.analysis.ledger.ledger import ledger
from lightning_rlprof.analysis.steps.step_selection import STATES, counted, states
from lightning_rlprof.records.records import is_shadow
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, header, loaded

STEP_NS = 1_000_000


def rows(pairs: int, share: float, *, end_ns: int = 0, noise: float = 0.0, seed: int = 1) -> list:
    """Steps of which recorded ones cost ``share`` more, ``end_ns`` of it after their end."""
    draw, now, before, found = random.Random(seed), 0, 0, []
    for step in range(1, 2 * pairs + 2):
        shadow = is_shadow(step)
        work = STEP_NS * (1 + noise * draw.gauss(0, 1))
        own = round(work * (1 if shadow else 1 + share)) - (0 if shadow else end_ns)
        end = now + before + own
        more = {"shadow": 1} if shadow else {}
        counters = {"step_end_ns": before, **more} if step > 1 else more
        found.append(Row("step", "step", step, now, end, counters=counters or None))
        if not shadow:
            found.append(Row("actor_update", "stage", step, now + before, end))
        now, before = end, 0 if shadow else end_ns
    return found


def detail(spans: Spans) -> tuple[str, str]:
    return next((state, text) for name, state, text in data_quality(spans).rows if "over" in name)


@pytest.mark.parametrize("end_ns", [0, 20_000])
def test_the_cost_is_found_wherever_in_the_step_it_falls(end_ns):
    found = measured_overhead(loaded(rows(40, 0.05, end_ns=end_ns)))
    assert found.pairs == 40
    assert found.share == pytest.approx(0.05)
    assert (found.low, found.high) == pytest.approx((0.05, 0.05))


def test_noise_widens_the_interval():
    spans = loaded(rows(100, 0.02, noise=0.05))
    found = measured_overhead(spans)
    assert found.low < 0.02 < found.high
    state, text = detail(spans)
    assert state == "ok"
    assert text.startswith(f"recording adds {100 * found.share:.2f} points to a step (95% CI ")


def test_the_interval_contains_the_truth_in_most_runs():
    inside = 0
    for seed in range(60):
        found = measured_overhead(loaded(rows(60, 0.02, noise=0.05, seed=seed)))
        inside += found.low <= 0.02 <= found.high
    assert inside >= 50  # 57 are expected; fewer than 50 have a chance of 1 in 1,000


def test_few_pairs_give_no_number():
    state, text = detail(loaded(rows(3, 0.5)))
    assert state == "ok"
    assert text.startswith(f"no data yet (3 pairs of steps; {MIN_PAIRS} are needed)", 19)


def test_a_high_cost_is_a_warning():
    assert detail(loaded(rows(40, 0.08)))[0] == "warn"


def test_a_run_without_shadow_steps_says_nothing_of_them():
    plain = [row for row in rows(40, 0.05) if "shadow" not in (row.counters or {})]
    assert measured_overhead(loaded(plain)) is None
    assert "recording" not in detail(loaded(plain))[1].split(";")[0]


def test_asked_for_and_not_possible_says_so(tmp_path):
    from lightning_rlprof.loaders.load import load
    from tests.builders.runs import write_rank

    head = header(config={"measure_overhead": True})
    write_rank(tmp_path / "run", head, [Row("step", "step", 1, 0, 9)])
    assert detail(load(tmp_path / "run"))[1].startswith("cost of recording: no data, as every step")


def test_a_pair_needs_both_steps_on_all_ranks():
    first, second = rows(40, 0.05), rows(40, 0.05)
    second = [row for row in second if row.step != 7]
    assert measured_overhead(loaded(first, second)).pairs == 39
    flagged = [
        row._replace(counters={**row.counters, "capture": 1}) if row.step == 9 else row
        for row in first
    ]
    assert measured_overhead(loaded(flagged, first)).pairs == 39


def test_the_time_of_shadow_steps_is_not_called_untraced():
    titles = findings(loaded(rows(40, 0.0))).column("finding")
    assert "A large share of the time is untraced" not in titles


def test_shadow_steps_are_excluded_and_counted():
    spans = loaded(rows(5, 0.05))
    steps = spans.rows(kind="step")
    shadows = [STATES[code] == "shadow" for code in states(spans, steps)]
    assert shadows == [is_shadow(step) for step in range(1, 12)]
    assert sum(shadows) == 5
    assert counted(spans, steps).note == "Excluded steps: 5 shadow."
    assert "Includes shadow steps: 5." in ledger(spans).note

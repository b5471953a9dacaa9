import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.stages import StepTimes, stages, step_times
from lightning_rlprof.analysis.steps.step_selection import counted
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.table import rows_of
from tests.builders.ingest_traces import write_trace
from tests.builders.oracle import UNTRACED, innermost, runs, totals
from tests.builders.runs import STAGES, Row, grpo_rows, grpo_run, loaded, spans_of
from tests.effort import examples


@settings(max_examples=examples(120), deadline=None)
@given(runs())
def test_totals_are_the_rasterisers_and_add_up_to_the_steps(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps = spans.rows(kind="step")
    choice = counted(spans, steps)
    chosen = set(spans.step[steps[choice.mask]].tolist())
    slow = totals(spans, chosen)

    whole, by_rank = stages(spans), stages(spans, per_rank=True)

    found = dict(zip(whole.column("stage"), whole.column("total"), strict=True))
    by_name: Counter[str] = Counter()
    for (_, name), total in slow.items():
        by_name[name] += total
    assert {name: total for name, total in found.items() if total} == dict(by_name)
    keys = zip(by_rank.column("rank"), by_rank.column("stage"), strict=True)
    per_rank = dict(zip(keys, by_rank.column("total"), strict=True))
    assert {key: total for key, total in per_rank.items() if total} == dict(slow)
    if whole.abstained is None:
        wall = int(spans.duration_ns[steps[choice.mask]].sum())
        assert sum(found.values()) == wall  # type: ignore[arg-type]
        if wall:
            assert abs(sum(whole.column("share")) - 1.0) < 1e-9  # type: ignore[arg-type]
            assert list(found)[-1] == UNTRACED


@settings(max_examples=examples(60), deadline=None)
@given(runs())
def test_calls_begin_or_have_time_in_included_steps_and_share_that_of_their_stage(
    rows: list[list[Row]],
) -> None:
    spans = loaded(*rows)
    steps = spans.rows(kind="step")
    choice = counted(spans, steps)
    chosen = set(spans.step[steps[choice.mask]].tolist())
    timed = {
        (stage.rank, stage.id)
        for step, _, stage in innermost(spans)
        if stage is not None and step.step in chosen
    }
    called: dict[str, list[int]] = {}
    for span in spans:
        in_step = any(
            (step.kind, step.rank, step.thread) == ("step", span.rank, span.thread)
            and step.start_ns <= span.start_ns < step.end_ns
            and step.step in chosen
            for step in spans
        )
        if span.kind == "stage" and (in_step or (span.rank, span.id) in timed):
            called.setdefault(span.name, []).append(span.duration_ns)

    table = stages(spans)
    names = ("total", "calls", "per call", "inclusive per call")
    cells = zip(*(table.column(name) for name in names), strict=True)
    found = dict(zip(table.column("stage"), cells, strict=True))

    expected = {}
    for name, whole in called.items():
        total = found[name][0]
        each, inclusive = (int(np.floor(sum_ / len(whole) + 0.5)) for sum_ in (total, sum(whole)))
        once = len(whole) == int(choice.mask.sum())
        inner = inclusive if inclusive != each else None
        expected[name] = (total, len(whole), None if once else each, inner)
    assert {name: cells for name, cells in found.items() if cells[1] is not None} == expected


def test_an_outer_stage_has_its_own_time_and_that_of_whole_calls_beside_it() -> None:
    rows = [Row("step", "step", n, n * 100, n * 100 + 100) for n in (1, 2, 3)]
    rows += [Row("actor_update", "stage", row.step, row.start_ns, row.end_ns) for row in rows]
    inner = [row for row in rows if row.kind == "stage"]
    rows += [row._replace(name="weight_sync", end_ns=row.start_ns + 30) for row in inner]
    table = stages(loaded(rows))
    names = ("stage", "total", "mean", "max", "per call", "inclusive per call", "calls")
    assert [*zip(*(table.column(name) for name in names), strict=True)] == [
        ("actor_update", 210, 70, 70, None, 100, 3),
        ("weight_sync", 90, 30, 30, None, None, 3),
        ("untraced", 0, 0, 0, None, None, None),
    ]


def test_calls_are_without_waiting_where_ranks_wait_inside_a_stage_too() -> None:
    ranks = []
    for came in (60, 90):
        rows = []
        for step in range(1, 6):
            now = 100 * step
            rows.append(Row("step", "step", step, now, now + 100))
            rows.append(Row("actor_update", "stage", step, now, now + 100))
            rows.append(Row("all_reduce", "region", step, now + came, now + 100))
        ranks.append(rows)
    table = stages(loaded(*ranks))
    names = ("stage", "total", "mean", "per call", "inclusive per call", "calls")
    assert [*zip(*(table.column(name) for name in names), strict=True)] == [
        ("actor_update", 850, 85, None, 100, 10),
        ("waiting in actor_update", 150, 15, None, None, None),
        ("untraced", 0, 0, None, None, None),
    ]


def test_times_are_per_step_however_often_a_stage_is_called() -> None:
    """Four calls a step: once the mean of the table was that of a call, a quarter of the step's."""
    rows = [Row("step", "step", n, 100 * n, 100 * n + 100) for n in (1, 2, 3, 4)]
    for n in (1, 2, 3, 4):
        starts = range(100 * n, 100 * n + 80, 20)
        rows += [Row("actor_update", "stage", n, at, at + 5 * n) for at in starts]
    table = stages(loaded(rows))
    names = ("stage", "mean", "p50", "max", "per call", "calls")
    assert [*zip(*(table.column(name) for name in names), strict=True)] == [
        ("actor_update", 50, 50, 80, 13, 16),
        ("untraced", 50, 50, 80, None, None),
    ]


def test_steps_without_a_stage_count_as_zero_and_ranks_are_averaged_step_by_step() -> None:
    def rank(lengths: dict[int, int]) -> list[Row]:
        rows = [Row("step", "step", n, n * 100, n * 100 + 100) for n in range(1, 6)]
        return rows + [Row("a", "stage", n, n * 100, n * 100 + ns) for n, ns in lengths.items()]

    times = StepTimes(loaded(rank({1: 10, 2: 30}), rank({2: 50})))
    (own, _) = times.parts
    assert own.ns.tolist() == [5, 40, 0, 0, 0]
    assert times.statistics(own)[1:3] == (9, 0)
    assert StepTimes(times.spans, [0]).parts[0].ns.tolist() == [10, 30, 0, 0, 0]


def test_left_out_steps_are_counted_by_state() -> None:
    rows = [Row("step", "step", n, n * 100, n * 100 + 50) for n in range(2, 12)]
    rows[4] = rows[4]._replace(counters={"capture": 1})
    rows.append(Row("step", "step", 1, 0, 100))
    times = StepTimes(loaded(rows))
    assert times.left_out == {"warm-up": 1, "capture": 1}
    assert times.included.sum() == 9


def test_longer_stages_only_grow(tmp_path: Path) -> None:
    plain = stages(grpo_run(tmp_path / "a"))
    slow = stages(grpo_run(tmp_path / "b", slow={"actor_update": 3.0}))

    before, after = (
        dict(zip(table.column("stage"), table.column("total"), strict=True))
        for table in (plain, slow)
    )
    assert after["actor_update"] > 2.9 * before["actor_update"]  # type: ignore[operator]
    del after["actor_update"], before["actor_update"]
    assert after == before


def test_rows_are_ordered_by_time_with_untraced_last(tmp_path: Path) -> None:
    table = stages(grpo_run(tmp_path))
    names = ["actor_generate", "actor_update", "actor_compute_log_prob", "compute_reward"]
    assert table.column("stage") == [*names, "training_step", "untraced"]
    assert set(names) == set(STAGES)


def test_the_slowest_rank_has_the_most_time_per_step_not_in_all() -> None:
    def rank(steps: int, length: int) -> list[Row]:
        rows = [Row("step", "step", n, n * 100, n * 100 + 100) for n in range(1, steps + 1)]
        return rows + [Row("a", "stage", s.step, s.start_ns, s.start_ns + length) for s in rows]

    spans = loaded(rank(9, 20), rank(3, 30), rank(9, 10))
    assert stages(spans).column("slowest rank") == [1, None]
    assert stages(spans, ranks=[0, 2]).column("slowest rank") == [0, None]
    assert stages(spans, ranks=[2]).column("slowest rank") == [None, None]

    alike = loaded(rank(3, 20), rank(3, 20))
    assert stages(alike).column("slowest rank")[0] == 0
    assert stages(alike).column("slowest / peers")[0] == 1


def test_the_slow_rank_is_named_with_its_ratio(tmp_path: Path) -> None:
    slow = grpo_rows(5, 2, slow={"actor_update": 2.0})
    table = stages(spans_of(tmp_path, grpo_rows(5, 0), grpo_rows(5, 1), slow, grpo_rows(5, 3)))
    row = dict(zip(table.column("stage"), rows_of(table), strict=True))["actor_update"]
    assert row["slowest rank"] == 2
    assert row["slowest / peers"] == pytest.approx(2.0, abs=0.1)


def test_ranks_that_never_run_a_stage_are_not_peers() -> None:
    idle = [Row("step", "step", n, n * 10, n * 10 + 10) for n in (1, 2, 3)]
    trains = [
        [*idle, *(Row("update", "stage", n, n * 10, n * 10 + took) for n in (1, 2, 3))]
        for took in (4, 4, 6)
    ]
    update, untraced = rows_of(stages(loaded(*trains, idle, idle, idle)))
    assert (update["slowest rank"], update["slowest / peers"]) == (2, 1.5)
    assert (untraced["slowest rank"], untraced["slowest / peers"]) == (None, None)
    save = rows_of(stages(loaded(idle, [*idle, Row("save", "stage", 1, 10, 16)])))[0]
    assert (save["slowest rank"], save["slowest / peers"]) == (1, None)


def timed(name: str, step: int, start: int, end: int, device_ns: int | None = None) -> Row:
    counters = None if device_ns is None else {"device_ns": device_ns}
    return Row(name, "stage", step, start, end, counters=counters)


def test_device_time_is_the_mean_of_the_spans_that_measured_it() -> None:
    table = stages(
        loaded(
            [
                *[Row("step", "step", n, n * 100, n * 100 + 100) for n in range(1, 4)],
                timed("actor_update", 1, 100, 110, 40),
                timed("actor_update", 2, 200, 230, 20),
                timed("actor_update", 3, 300, 390),
                timed("compute_reward", 3, 390, 399),
                timed("actor_update", 0, 500, 600, 5),  # outside of every step
            ]
        )
    )
    assert table.column("device per call") == [30, None, None]
    assert "device per call: from when" in table.note
    assert "of 2 of" not in stages(loaded(grpo_rows(3))).note


def test_device_time_under_capture_is_left_out() -> None:
    rows = [Row("step", "step", n, n * 100, n * 100 + 100) for n in (1, 3)]
    rows += [Row("step", "step", 2, 200, 300, counters={"capture": 1})]
    rows += [timed("actor_update", n, n * 100, n * 100 + 10, n) for n in (1, 2, 3)]
    assert stages(loaded(rows)).column("device per call") == [2, None]


@pytest.mark.parametrize("seed", range(5))
def test_device_time_agrees_with_a_brute_force_sum_over_ranks(seed: int) -> None:
    noise = random.Random(seed)
    ranks = [
        [
            row._replace(counters={"device_ns": noise.randint(1, 10**9)})
            if row.kind == "stage" and noise.random() < 0.7
            else row
            for row in grpo_rows(4, seed + rank)
        ]
        for rank in (0, 1)
    ]
    for row in rows_of(stages(loaded(*ranks))):
        spans = [each for rows in ranks for each in rows if each[:2] == (row["stage"], "stage")]
        times = [
            each.counters["device_ns"] for each in spans if "device_ns" in (each.counters or {})
        ]
        mean = (2 * sum(times) + len(times)) // (2 * len(times)) if times else None
        assert row["device per call"] == mean


def test_a_stage_without_length_has_a_row() -> None:
    spans = loaded([Row("step", "step", 1, 0, 5), Row("a", "stage", 1, 2, 2)])
    assert stages(spans).rows == [
        ("a", 0.0, 0, 0, 0, 0, *(None,) * 5, 1, 0),
        ("untraced", 1.0, 5, 5, 5, 5, *(None,) * 6, 5),
    ]


def test_a_step_without_length_has_no_shares() -> None:
    table = stages(loaded([Row("step", "step", 1, 5, 5)]))
    assert table.abstained is None
    assert table.rows == [("untraced", None, 0, 0, 0, 0, *(None,) * 6, 0)]


def test_it_abstains_without_steps() -> None:
    assert stages(loaded([Row("a", "stage", 1, 0, 1)])).abstained == (
        "no complete step was recorded"
    )


def test_step_times_are_computed_once_and_keep_no_table_of_a_trace(tmp_path: Path) -> None:
    spans = load(write_trace(tmp_path / "rank0.pt.trace.json"))
    assert len(spans.table("kernels").rows) == 5
    assert step_times(spans) is step_times(spans)
    assert "kernels" not in step_times(spans).spans.tables

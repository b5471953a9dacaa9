"""Host time beside device time, against a brute-force sum."""

import random

import pytest

from lightning_rlprof.analysis.stages.overviews import host_vs_device
from tests.builders.runs import Row, grpo_rows, loaded


def timed(name, step, start, end, device_ns=None):
    counters = None if device_ns is None else {"device_ns": device_ns}
    return Row(name, "stage", step, start, end, counters=counters)


def steps(count, length=100):
    return [Row("step", "step", n, (n - 1) * length, n * length) for n in range(1, count + 1)]


def test_means_are_over_the_spans_that_were_measured():
    rows = [
        *steps(3),
        timed("actor_update", 1, 0, 10, 40),
        timed("actor_update", 2, 100, 130, 20),
        timed("actor_update", 3, 200, 290),
        timed("compute_reward", 3, 290, 299),
    ]

    table = host_vs_device(loaded(rows))

    assert list(table.rows) == [("actor_update", 20, 30, 1.5, 2, 3)]


def test_steps_under_capture_are_left_out():
    slow = Row("step", "step", 2, 100, 200, counters={"capture": 1})
    rows = [
        *[row for row in steps(3) if row.step != 2],
        slow,
        *[timed("actor_update", n, n * 100 - 90, n * 100 - 80, n) for n in (1, 2, 3)],
    ]

    table = host_vs_device(loaded(rows))

    assert table.column("device per call") == [2]
    assert table.column("calls") == [2]
    assert "1 captured" in table.note


def half_up(total, count):
    return (2 * total + count) // (2 * count)


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_a_brute_force_sum_over_ranks(seed):
    noise = random.Random(seed)
    ranks = []
    for rank in (0, 1):
        rows = grpo_rows(4, seed + rank)
        ranks.append(
            [
                row._replace(counters={"device_ns": noise.randint(1, 10**9)})
                if row.kind == "stage" and noise.random() < 0.7
                else row
                for row in rows
            ]
        )
    table = host_vs_device(loaded(*ranks))

    for name, host, own, _, measured, count in table.rows:
        spans = [row for rows in ranks for row in rows if row[:2] == (name, "stage")]
        having = [row for row in spans if row.counters and "device_ns" in row.counters]
        assert (measured, count) == (len(having), len(spans))
        assert own == half_up(sum(row.counters["device_ns"] for row in having), measured)
        assert host == half_up(sum(row.end_ns - row.start_ns for row in having), measured)


def test_it_abstains_where_no_device_time_was_recorded():
    assert "no device time was recorded" in host_vs_device(loaded(grpo_rows(3))).abstained


def test_a_stage_outside_of_every_step_is_no_part_of_it():
    rows = [*steps(1), timed("actor_update", 0, 500, 600, 5)]

    assert list(host_vs_device(loaded(rows)).rows) == []

"""The ledger of jobs written by hand: sums, crashed ranks, sources, costs."""

import itertools
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.ledger.ledger import (
    category_breakdown,
    category_totals,
    compute_accounts,
    ledger,
)
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table
from tests.builders.oracle import runs
from tests.builders.runs import Row, grpo_rows, header, loaded, write_rank
from tests.effort import examples


def stage(name: str, start: int, end: int, **changes: Any) -> Row:
    return Row(name, "stage", 1, start, end, **changes)


def steps(*edges: int) -> list[Row]:
    pairs = enumerate(itertools.pairwise(edges), start=1)
    return [Row("step", "step", number, start, end) for number, (start, end) in pairs]


def times(table: Table) -> dict[str, int]:
    """Return the categories that have time."""
    pairs = zip(table.column("category"), table.column("total"), strict=True)
    return {str(category): int(total) for category, total in pairs if total}


def totals_of(spans: Spans) -> dict[str, int]:
    return times(ledger(spans))


def by(spans: Spans, per_rank: bool = False, per_step: bool = False) -> Sequence[Any]:
    table = category_breakdown(compute_accounts(spans, per_rank=per_rank), per_step=per_step)
    names = [column.name for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


@settings(max_examples=examples(100), deadline=None)
@given(runs(overlapping_steps=True), st.integers(0, 3))
def test_all_tables_add_up_to_wall_clock_times_ranks(rows: list[list[Row]], silent: int) -> None:
    spans = loaded_of_world(len(rows) + silent, *rows)
    accounts = compute_accounts(spans)
    whole = accounts.wall_ns * (len(rows) + silent)

    found = times(category_totals(accounts))
    assert sum(found.values()) == whole
    for per_rank, per_step in ((True, False), (False, True), (True, True)):
        lines = by(spans, per_rank, per_step)
        assert sum(line["wall"] for line in lines) == whole
        for category, total in found.items():
            assert sum(line[category] for line in lines) == total
    assert {line["wall"] for line in by(spans, per_rank=True)} <= {accounts.wall_ns}


def loaded_of_world(world: int, *ranks: Sequence[Row], **changes: Any) -> Spans:
    with tempfile.TemporaryDirectory() as folder:
        for rank, rows in enumerate(ranks):
            write_rank(Path(folder) / "run", header(rank, world, **changes), rows)
        return load(Path(folder) / "run")


def test_the_innermost_name_that_means_something_counts() -> None:
    spans = loaded(
        [
            stage("actor_update", 0, 100, id=1),
            stage("my_part", 10, 60, parent=1, id=2),  # means nothing: compute, as around it
            Row("data_fetch", "region", 1, 20, 30, parent=2, id=3),
            Row("my_region", "region", 1, 100, 120, id=4),  # no stage, and means nothing
            stage("my_stage", 120, 150, id=5),
            Row("weights published", "mark", 1, 130, 130, id=6),
        ]
    )
    assert totals_of(spans) == {
        "compute": 90,
        "data wait": 10,
        "custom stage": 30,
        "outside steps": 20,
    }
    assert "Names without a category: stages my_part, my_stage." in (ledger(spans).note)


def test_a_rollout_in_a_validation_is_validation_and_one_in_a_data_loader_is_a_rollout() -> None:
    spans = loaded(
        [
            Row("validation", "region", 1, 0, 50, id=1),
            stage("actor_generate", 5, 45, parent=1, id=2),
            stage("compute_reward", 30, 40, parent=2, id=3),
            Row("data_fetch", "region", 1, 50, 100, id=4),
            stage("actor_generate", 60, 90, parent=4, id=5),
        ]
    )
    assert totals_of(spans) == {"checkpoint/eval": 50, "rollout": 30, "data wait": 20}


def test_of_threads_and_tasks_at_once_the_first_in_precedence_counts() -> None:
    spans = loaded(
        [
            Row("data_fetch", "region", 1, 0, 100, id=1),
            stage("actor_generate", 20, 60, thread=7, id=2),
            stage("compute_reward", 40, 80, thread=8, id=3),
            stage("gc", 0, 10, thread=9, id=4),
        ]
    )
    # Another thread is nothing inside of this one: the collection hides no wait for samples.
    assert totals_of(spans) == {"rollout": 40, "reward/tool/env": 20, "data wait": 40}


def test_a_task_that_outlives_the_stage_it_was_opened_in_hides_the_stage_around_both() -> None:
    spans = loaded(
        [
            stage("actor_update", 0, 100, id=1),
            stage("actor_generate", 15, 40, parent=1, id=2),
            Row("data_fetch", "region", 1, 16, 60, parent=2, id=3),
        ]
    )
    assert totals_of(spans) == {"compute": 55, "rollout": 1, "data wait": 44}


def test_a_rank_that_dies_is_outside_steps_and_no_smaller_denominator(tmp_path: Path) -> None:
    whole = [*steps(0, 100, 200, 300), stage("actor_update", 0, 300)]
    write_rank(tmp_path, header(0, 2), whole)
    write_rank(tmp_path, header(1, 2), [*steps(0, 110), stage("actor_update", 0, 110)], status=None)
    spans = load(tmp_path)

    assert totals_of(spans) == {"compute": 410, "outside steps": 190}
    dead = [line for line in by(spans, per_rank=True, per_step=True) if line["rank"] == 1]
    assert dead == [
        {"rank": 1, "step": 1, "wall": 110, "compute": 110, "untraced": 0, "outside steps": 0},
        # As long as on rank 0, but for what its own first step took of it.
        {"rank": 1, "step": 2, "wall": 90, "compute": 0, "untraced": 0, "outside steps": 90},
        {"rank": 1, "step": 3, "wall": 100, "compute": 0, "untraced": 0, "outside steps": 100},
    ]
    assert "Rank 1: file is truncated 1.9e-07 s before the end." in ledger(spans).note


def test_ranks_of_the_world_that_wrote_nothing_are_outside_steps() -> None:
    spans = loaded_of_world(4, [*steps(0, 60), stage("actor_update", 10, 50), stage("b", 60, 80)])
    accounts = compute_accounts(spans)

    assert (accounts.wall_ns, accounts.ranks, accounts.silent) == (80, (0,), (1, 2, 3))
    assert times(category_totals(accounts)) == {
        "compute": 40,
        "custom stage": 20,
        "untraced": 20,
        "outside steps": 3 * 80,
    }
    assert by(spans, per_step=True) == [
        {"step": 1, "wall": 240, "untraced": 20, "outside steps": 180, "compute": 40}
        | {"custom stage": 0},
        {"step": None, "wall": 80, "untraced": 0, "outside steps": 60, "compute": 0}
        | {"custom stage": 20},
    ]
    assert [line["outside steps"] for line in by(spans, per_rank=True)] == [0, 80, 80, 80]
    assert "No file, so outside steps: ranks 1, 2, 3." in ledger(spans).note


def test_one_file_alone_is_about_its_rank_alone(tmp_path: Path) -> None:
    file = write_rank(tmp_path, header(1, 8), [stage("actor_update", 0, 50)])
    assert totals_of(load(file)) == {"compute": 50}
    assert totals_of(load(tmp_path)) == {"compute": 50, "outside steps": 7 * 50}


def test_the_job_begins_with_the_first_header_and_lasts_as_long_as_anybody_writes(
    tmp_path: Path,
) -> None:
    zero = 1_700_000_000_000_000_000
    began = header(0, 1, clock_ns=1_000, unix_ns=zero)
    rows = [*steps(1_300, 1_400), stage("actor_update", 1_300, 1_350)]
    write_rank(tmp_path, began, rows, notes=[(1_900, "info", "still here")])
    assert totals_of(load(tmp_path)) == {"compute": 50, "untraced": 50, "outside steps": 800}


def test_what_lies_outside_of_steps_is_part_of_the_job() -> None:
    rows = [
        Row("sanity_check", "region", 0, 0, 40),
        *steps(50, 150),
        stage("actor_update", 60, 100),
    ]
    table = ledger(loaded([*rows, Row("save_checkpoint", "region", 1, 150, 170)]))
    pairs = zip(table.column("category"), table.column("in steps"), strict=True)
    inside = {category: ns for category, ns in pairs if ns is not None}
    whole = {"checkpoint/eval": 60, "compute": 40, "untraced": 60, "outside steps": 10}
    assert times(table) == whole
    assert inside == whole | {"checkpoint/eval": 0, "outside steps": 0}


def test_captured_and_interrupted_steps_are_part_of_the_sum_and_the_note_says_so() -> None:
    flags = ({"capture": 1}, {"interrupted": 1})
    rows = [row._replace(counters=flag) for row, flag in zip(steps(0, 40, 90), flags, strict=True)]
    table = ledger(loaded(rows))
    assert times(table) == {"untraced": 90}
    assert "Includes captured steps: 1." in table.note
    assert "Includes interrupted steps: 1." in table.note


def test_a_category_without_data_has_no_row_and_one_without_time_is_zero() -> None:
    rows = [stage("actor_update", 0, 50), Row("weight_sync", "stage", 1, 20, 20)]
    table = ledger(loaded(rows))
    lines = {category: told for category, *told in table.rows}
    assert lines["weight sync"] == [0.0, 0.0, 0, "spans", 0, None]
    assert "host-bound idle" not in lines
    assert lines["untraced"][3] == "none"
    assert "custom stage" not in lines
    assert "profiler overhead" not in lines
    assert "host-bound idle (needs device kernels)" in table.note


def test_hours_and_costs_are_those_of_all_ranks(tmp_path: Path) -> None:
    hour = 3_600 * 10**9
    spans = loaded_of_world(2, [stage("actor_update", 0, 3 * hour)], device="cuda")
    table = category_totals(compute_accounts(spans), price=2.5)
    lines = {row[0]: row for row in table.rows}
    names = [column.name for column in table.columns[:4]]
    assert names == ["category", "share", "GPU-hours", "cost"]
    assert lines["compute"][:5] == ("compute", 0.5, 3.0, 7.5, 3 * hour)
    assert lines["outside steps"][:5] == ("outside steps", 0.5, 3.0, 7.5, 3 * hour)
    assert "rollout" not in lines
    assert table.note.startswith("2 ranks × 10,800 s = 6 GPU-hours. ")
    on_cpu = ledger(loaded(grpo_rows(1)))
    assert on_cpu.columns[2].name == "rank-hours"
    assert " rank-seconds (CPU run). " in on_cpu.note


def test_sums_beyond_64_bits_are_exact() -> None:
    long = 2**59 + 1
    spans = loaded_of_world(64, *[[stage("actor_update", 0, long - rank)] for rank in range(40)])
    assert totals_of(spans) == {
        "compute": 40 * long - sum(range(40)),
        "outside steps": 24 * long + sum(range(40)),
    }


def test_a_job_of_which_nothing_was_recorded_abstains() -> None:
    spans = loaded([])
    assert ledger(spans).abstained == "no spans were recorded"
    for per_rank, per_step in ((True, False), (False, True)):
        table = category_breakdown(compute_accounts(spans, per_rank=per_rank), per_step=per_step)
        assert table.abstained == "no spans were recorded"


def test_a_parent_that_cannot_be_one_is_none() -> None:
    rows = [
        stage("actor_update", 0, 50, id=1, parent=2),  # in a circle
        stage("compute_reward", 0, 50, id=2, parent=1),
        stage("actor_generate", 60, 80, id=3, parent=4),  # in one that begins later
        stage("weight_sync", 70, 90, id=4),
        stage("gc", 95, 99, id=5, parent=5),
    ]
    assert totals_of(loaded(rows)) == {
        "reward/tool/env": 50,
        "rollout": 20,
        "weight sync": 10,
        "garbage collection": 4,
        "outside steps": 15,
    }


@pytest.mark.parametrize("requests", [3, 4])
def test_of_four_requests_or_more_the_end_of_a_rollout_is_its_tail(requests: int) -> None:
    rows = [stage("actor_generate", 0, 100, id=1)]
    rows += [stage("generate", 0, 10 * n, parent=1, id=1 + n) for n in range(1, requests)]
    rows += [stage("generate", 0, 90, parent=1, id=9)]
    found = totals_of(loaded(rows))
    # Of four, two are left until 30; the last 10 belong to the stage, in which no request is open.
    assert found == ({"rollout": 40, "rollout tail": 60} if requests == 4 else {"rollout": 100})


def test_a_run_without_any_rank_has_an_empty_ledger(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")

    accounts = compute_accounts(load(path), per_rank=True)

    assert (accounts.ranks, accounts.wall_ns, accounts.ns.sum()) == ((), 0, 0)


def test_stages_may_lie_in_each_other_to_any_depth() -> None:
    depth = 20_000
    edges = range(depth)
    outer = Row("actor_generate", "stage", 1, -1, 2 * depth)
    inner = [Row("odd", "region", 1, n, 2 * depth - 1 - n, parent=n + 1) for n in edges]

    began = time.process_time()
    totals_of(loaded([outer, *inner]))

    assert time.process_time() - began < 10  # of a CPU; by each pair of them it would be minutes


def test_the_forward_of_a_generation_is_rollout_and_that_of_an_update_is_not() -> None:
    rows = [
        *steps(0, 100),
        stage("actor_generate", 0, 60),
        Row("forward", "region", 1, 10, 50, parent=2),
        stage("actor_update", 60, 100),
        Row("forward", "region", 1, 70, 80, parent=4),
    ]
    assert totals_of(loaded(rows)) == {"rollout": 60, "compute": 40}

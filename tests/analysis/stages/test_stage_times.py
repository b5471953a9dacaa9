from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.stages.overviews import slowest_ranks
from lightning_rlprof.analysis.stages.stage_times import stages, stages_headline
from lightning_rlprof.analysis.steps.step_selection import counted
from tests.builders.oracle import UNTRACED, innermost, runs, totals
from tests.builders.runs import STAGES, Row, grpo_run, loaded
from tests.effort import examples


def _run(steps: int = 3, **lengths: int) -> str:
    rows = []
    for step in range(1, steps + 1):
        at = step * 100
        rows.append(Row("step", "step", step, at, at + 100))
        for name, length in lengths.items():
            rows.append(Row(name, "stage", step, at, at + length))
            at += length
    return stages_headline(loaded(rows))


def test_generation_that_dominates_points_at_the_rollout(tmp_path: Path) -> None:
    assert stages_headline(grpo_run(tmp_path)) == (
        "actor_generate takes 64% of the step. Check the rollout first: KV cache, batching, "
        "engine settings. Almost nothing is untraced."
    )


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ({"my_stage": 80}, "my_stage takes 80% of the step. Check my_stage first. 20% is untr"),
        (
            {"a": 30, "b": 35, "c": 25},
            "No stage dominates: the largest is b (35% of the step). 10%",
        ),
        ({"a": 30}, "70% of the step is untraced. Largest stage: a (30%)."),
        ({"a": 30, "b": 30}, "40% of the step is untraced. Largest stage: "),
        ({}, "No stages are marked in 3 steps. Mark them with stage() or wrap."),
    ],
)
def test_the_sentence_fits_the_run(lengths: dict[str, int], said: str) -> None:
    assert _run(**lengths).startswith(said)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_it_abstains_below_three_steps(steps: int) -> None:
    said = f"Not enough steps to show where the time goes: needs 3, has {steps}."
    assert _run(steps, a=90) == said


def test_captured_steps_alone_are_not_taken_for_the_run() -> None:
    rows = [Row("step", "step", n, n * 9, n * 9 + 9, counters={"capture": 1}) for n in (1, 2, 3)]
    assert stages_headline(loaded(rows)).startswith("No stages are marked")


@settings(max_examples=examples(120), deadline=None)
@given(runs())
def test_totals_are_the_rasterisers_and_add_up_to_the_steps(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps = spans.rows(kind="step")
    choice = counted(spans, steps)
    chosen = set(spans.step[steps[choice.mask]].tolist())
    slow = totals(spans, chosen)

    whole, slowest_ranks = stages(spans), stages(spans, per_rank=True)

    found = dict(zip(whole.column("stage"), whole.column("total"), strict=True))
    by_name: Counter[str] = Counter()
    for (_, name), total in slow.items():
        by_name[name] += total
    assert {name: total for name, total in found.items() if total} == dict(by_name)
    keys = zip(slowest_ranks.column("rank"), slowest_ranks.column("stage"), strict=True)
    per_rank = dict(zip(keys, slowest_ranks.column("total"), strict=True))
    assert {key: total for key, total in per_rank.items() if total} == dict(slow)
    if whole.abstained is None:
        wall = int(spans.duration_ns[steps[choice.mask]].sum())
        assert sum(found.values()) == wall  # type: ignore[arg-type]
        if wall:
            assert abs(sum(whole.column("share")) - 1.0) < 1e-9  # type: ignore[arg-type]
            assert list(found)[-1] == UNTRACED


@settings(max_examples=examples(60), deadline=None)
@given(runs())
def test_statistics_are_those_of_the_exclusive_time_of_each_span(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    steps = spans.rows(kind="step")
    chosen = set(spans.step[steps[counted(spans, steps).mask]].tolist())
    exclusive = Counter(
        (stage.rank, stage.id)
        for step, _, stage in innermost(spans)
        if stage is not None and step.step in chosen
    )
    lengths: dict[str, list[tuple[int, int]]] = {}
    for span in spans:
        in_step = any(
            (step.kind, step.rank, step.thread) == ("step", span.rank, span.thread)
            and step.start_ns <= span.start_ns < step.end_ns
            and step.step in chosen
            for step in spans
        )
        own = exclusive[span.rank, span.id]
        if span.kind == "stage" and (in_step or own):
            lengths.setdefault(span.name, []).append((own, span.duration_ns))

    table = stages(spans)
    names = ("count", "total", "max", "mean", "inclusive mean")
    rest = zip(*(table.column(name) for name in names), strict=True)
    found = dict(zip(table.column("stage"), rest, strict=True))

    expected = {}
    for name, both in lengths.items():
        own, whole = ([pair[at] for pair in both] for at in (0, 1))
        mean, inclusive = (int(np.floor(sum(each) / len(each) + 0.5)) for each in (own, whole))
        differs = inclusive if inclusive != mean else None
        expected[name] = (len(own), sum(own), max(own), mean, differs)
    assert {name: cells for name, cells in found.items() if cells[0] is not None} == expected


def test_an_outer_stage_has_its_own_time_and_the_inclusive_mean_beside_it() -> None:
    rows = [Row("step", "step", n, n * 100, n * 100 + 100) for n in (1, 2, 3)]
    rows += [Row("actor_update", "stage", row.step, row.start_ns, row.end_ns) for row in rows]
    inner = [row for row in rows if row.kind == "stage"]
    rows += [row._replace(name="weight_sync", end_ns=row.start_ns + 30) for row in inner]
    table = stages(loaded(rows))
    names = ("stage", "total", "mean", "inclusive mean", "max", "count")
    assert [*zip(*(table.column(name) for name in names), strict=True)] == [
        ("actor_update", 210, 70, 100, 70, 3),
        ("weight_sync", 90, 30, None, 30, 3),
        ("untraced", 0, None, None, None, None),
    ]


def test_the_mean_is_the_total_by_count_where_ranks_wait_inside_a_stage_too() -> None:
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
    names = ("stage", "total", "mean", "inclusive mean", "count")
    assert [*zip(*(table.column(name) for name in names), strict=True)] == [
        ("actor_update", 850, 85, 100, 10),
        ("waiting in actor_update", 150, None, None, None),
        ("untraced", 0, None, None, None),
    ]


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
    assert (
        stages(alike).column("slowest rank")[0]
        == slowest_ranks(alike).column("slowest rank")[0]
        == 0
    )


def test_a_stage_without_length_has_a_row() -> None:
    spans = loaded([Row("step", "step", 1, 0, 5), Row("a", "stage", 1, 2, 2)])
    assert stages(spans).rows == [
        ("a", 0.0, 0, 0, None, 0, 0, 0, 1, None),
        ("untraced", 1.0, 5, *(None,) * 7),
    ]


def test_a_step_without_length_has_no_shares() -> None:
    table = stages(loaded([Row("step", "step", 1, 5, 5)]))
    assert table.abstained is None
    assert table.rows == [("untraced", None, 0, *(None,) * 7)]


def test_it_abstains_without_steps() -> None:
    assert stages(loaded([Row("a", "stage", 1, 0, 1)])).abstained == (
        "no complete step was recorded"
    )

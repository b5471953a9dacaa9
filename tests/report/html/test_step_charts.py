"""What the charts of the report draw: exact sums, waiting apart, many steps and ranks thinned."""

import base64
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.stages import round_ns, stages
from lightning_rlprof.analysis.stragglers.stragglers import stragglers
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html import step_charts
from lightning_rlprof.report.html.step_charts import (
    LATE,
    OTHERS,
    StepCharts,
    marks,
    rank_rows,
    stage_rows,
    times_largest,
    with_verdicts,
)
from tests.builders.runs import Row, grpo_rows, grpo_run, header, loaded, write_rank
from tests.builders.scripted import Script, play


def rows_of(table: object) -> list[dict[str, object]]:
    names = [column.name for column in table.columns]  # type: ignore[attr-defined]
    return [dict(zip(names, row, strict=True)) for row in table.rows]  # type: ignore[attr-defined]


def test_parts_add_up_to_each_step_and_to_the_table_of_stages() -> None:
    spans = play(Script(ranks=4, steps=30, slow={2: 0.4}), 3).spans
    series = StepCharts(spans)
    total = np.sum([part.ns for part in series.parts], axis=0)
    assert np.allclose(total, series.wall_ns)
    table = stages(spans)
    shown = dict(zip(table.column("stage"), table.column("total"), strict=True))
    assert {part.name for part in series.parts} == set(shown)
    for part in series.parts:
        own = float(part.ns[series.included].sum()) * 4
        assert own == pytest.approx(float(shown[part.name] or 0), rel=1e-9)
    assert sum(part.kind == "waiting" for part in series.parts) == 1


def test_many_stages_are_drawn_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_charts, "_MAX_PARTS", 4)
    own = [Row(f"stage {n}", "stage", 1, 10 * n, 10 * n + 5 + n) for n in range(4)]
    more = [Row(f"stage {n}", "stage", 1, 100 + 10 * n, 102 + 10 * n) for n in range(4, 9)]
    series = StepCharts(loaded([Row("step", "step", 1, 0, 200), *own, *more]))
    assert [part.name for part in series.drawn] == [
        *("stage 3", "stage 2", "stage 1", OTHERS, "untraced")
    ]
    assert sum(float(part.ns[0]) for part in series.drawn) == 200


def test_many_steps_share_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_charts, "_MAX_COLUMNS", 3)
    series = StepCharts(grpo_run(tmp_path / "run", steps=7))
    data = series.data() | marks(
        [{"change": "outlier", "step": 5}, {"change": "level", "step": 4, "ratio": 2.0}]
    )
    assert list(zip(data["first"], data["last"], data["sizes"], strict=True)) == [
        *((1, 3, 3), (4, 6, 3), (7, 7, 1))
    ]
    assert data["wall"][0] == round(float(series.wall_ns[:3].mean()) / 1e3)
    assert data["most"][1] == round(float(series.wall_ns[3:6].max()) / 1e3)
    assert (data["outliers"], data["levels"]) == ([5], [[4, 2.0]])
    assert sum(part["us"][0] for part in data["parts"]) == pytest.approx(data["wall"][0], abs=6)


def test_shades_of_ranks_can_be_read_back_to_six_percent() -> None:
    series = StepCharts(play(Script(ranks=4, steps=30, slow={2: 0.4}), 3).spans)
    heat = series.heat()
    for value in heat["values"]:
        ns = series.by_rank[value["name"]].ravel()
        shade = np.frombuffer(base64.b64decode(value["bytes"]), np.uint8).astype(float)
        read = np.where(shade > 0, 2 ** ((shade - 1) / 12) - 1, 0) * 1e3
        assert np.all(np.abs(read - ns) <= 0.03 * ns + 1e3)
    assert int(np.argmax(times_largest(series.by_rank[LATE]))) == 2


def test_of_very_many_ranks_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_charts, "_MAX_HEAT_RANKS", 3)
    heat = StepCharts(play(Script(ranks=8, steps=24), 3).spans).heat()
    assert (len(heat["ranks"]), heat["total"]) == (3, 8)
    assert heat["ranks"] == sorted(heat["ranks"])


def test_one_rank_has_nobody_to_be_late_for(tmp_path: Path) -> None:
    series = StepCharts(grpo_run(tmp_path / "run", steps=5))
    assert series.heat() == {"ranks": [], "values": []}
    assert rank_rows(series) == []


def test_tokens_are_those_of_the_stage_that_generates(tmp_path: Path) -> None:
    series = StepCharts(grpo_run(tmp_path / "run", steps=4, ranks=2))
    assert series.tokens is not None
    name, tokens = series.tokens
    assert (name, tokens.tolist()) == (
        "actor_generate",
        [2 * (1000 + step) for step in range(1, 5)],
    )
    bare = [row._replace(counters=None) for row in grpo_rows(4)]
    assert StepCharts(loaded(bare)).tokens is None


def test_rows_of_stages_and_ranks_name_who_is_slow() -> None:
    spans = play(Script(ranks=4, steps=40, slow={2: 0.4}), 3).spans
    series = StepCharts(spans)
    rows = {row.name: row for row in stage_rows(series)}
    assert rows["actor_generate"].slowest.startswith("rank 2, 1.4")
    assert rows["actor_generate"].stands_out
    own = next(part.ns for part in series.parts if part.name == "actor_generate")
    assert rows["actor_generate"].times.p50 == round_ns(np.median(own[series.included]))
    ranks = with_verdicts(rank_rows(series), rows_of(stragglers(spans)), [])
    assert [row.rank for row in ranks if row.slow] == [2]
    assert float(ranks[2].waits) < min(float(row.waits) for row in ranks if row.rank != 2)


def test_memory_is_the_range_over_ranks(tmp_path: Path) -> None:
    for rank, much in enumerate((100, 300)):
        rows = [
            row._replace(counters={"host_rss_bytes": much + row.step})
            if row.kind == "step"
            else row
            for row in grpo_rows(3)
        ]
        write_rank(tmp_path / "run", header(rank, 2), rows)
    (memory,) = StepCharts(load(tmp_path / "run")).memory()
    assert (memory["low"], memory["high"]) == ([101, 102, 103], [301, 302, 303])


def test_excluded_steps_are_drawn_but_not_counted(tmp_path: Path) -> None:
    rows = [
        row._replace(counters={"capture": 1}) if row.kind == "step" and row.step == 3 else row
        for row in grpo_rows(6)
    ]
    series = StepCharts(loaded(rows))
    data = series.data()
    assert data["included"] == [1, 1, 0, 1, 1, 1]
    assert data["states"][data["state"][2]] == "capture"

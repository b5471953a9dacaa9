"""The timeline's data: bounded, honest about what is left out, no bar on top of another."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.report.html import timeline as page_timeline
from lightning_rlprof.report.html.timeline import timeline
from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import MAIN, Row, grpo_rows, grpo_run, loaded, spans_of


def numbers(lanes: dict[str, Any]) -> list[int]:
    return [step["number"] for step in lanes["steps"]]


def step_rows(lengths: list[int]) -> list[Row]:
    rows, now = [], 0
    for number, length in enumerate(lengths, start=1):
        rows += [Row("a", "stage", number, now, now + length - 1)]
        rows += [Row("step", "step", number, now, now + length)]
        now += length
    return rows


def test_a_small_run_is_there_with_every_span(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=4, ranks=2)
    lanes = timeline(spans)
    assert numbers(lanes) == [1, 2, 3, 4]
    assert lanes["total"] == 4
    drawn = sum(len(step["spans"]) + len(step["bounds"]) for step in lanes["steps"])
    assert drawn == len(spans) - len(spans.rows(kind="epoch"))


def test_what_is_remarkable_has_labels(tmp_path: Path) -> None:
    spans = spans_of(tmp_path / "run", step_rows([50, 40, 90, 30, 45]))
    labels = {step["number"]: step["labels"] for step in timeline(spans)["steps"]}
    assert labels == {1: ["first"], 2: [], 3: ["slowest"], 4: ["fastest"], 5: ["median", "last"]}


def test_steps_that_a_capture_slowed_or_a_crash_cut_say_so(tmp_path: Path) -> None:
    rows = step_rows([50, 40, 90])
    rows[2] = rows[2]._replace(counters={"capture": 1})
    rows[4] = rows[4]._replace(counters={"interrupted": 1, "capture": 0})
    labels = [step["labels"] for step in timeline(spans_of(tmp_path / "run", rows))["steps"]]
    assert "capture" in labels[1]
    assert "interrupted" in labels[2]
    assert not {"capture", "interrupted"} & set(labels[0])


def test_a_large_run_keeps_the_labelled_and_an_even_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [100] * 64
    lengths[20], lengths[41] = 900, 10
    spans = spans_of(tmp_path / "run", step_rows(lengths))
    whole = timeline(spans)
    monkeypatch.setattr(page_timeline, "_BYTES", len(json.dumps(whole["steps"])) // 4)
    lanes = timeline(spans)
    kept = numbers(lanes)
    assert 8 < len(kept) < 32
    assert {1, 21, 42, 64} < set(kept)
    assert lanes["total"] == 64
    assert max(b - a for a, b in itertools.pairwise(kept)) <= 16
    assert len(json.dumps(lanes["steps"])) < len(json.dumps(whole["steps"])) // 2


def test_one_step_is_there_however_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_timeline, "_BYTES", 1)
    lanes = timeline(grpo_run(tmp_path / "run", steps=9))
    assert len(lanes["steps"]) == 1
    assert "slowest" in lanes["steps"][0]["labels"]


def test_a_crowded_step_keeps_its_longest_spans_and_counts_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_timeline, "_SPANS_PER_STEP", 10)
    rows = [Row("r", "region", 1, 100 * at, 100 * at + at + 1) for at in range(25)]
    rows.append(Row("step", "step", 1, 0, 5000))
    (step,) = timeline(spans_of(tmp_path / "run", rows))["steps"]
    assert step["left_out"] == 15
    assert [span[5] for span in step["spans"]] == list(range(16, 26))
    assert step["hatched"]


def test_where_stages_are_left_out_nothing_is_called_untraced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(page_timeline, "_SPANS_PER_STEP", 3)
    rows = [Row("a", "stage", 1, at * 9, at * 9 + 9) for at in range(4)]
    (step,) = timeline(loaded([*rows, Row("step", "step", 1, 0, 36)]))["steps"]
    assert (step["left_out"], step["hatched"]) == (1, False)


def test_the_thread_that_trains_has_the_first_lane_even_when_empty() -> None:
    rows = [Row("reward", "stage", 1, 3, 6, thread=7), Row("step", "step", 1, 0, 9)]
    (step,) = timeline(loaded(rows))["steps"]
    assert step["lanes"] == [[0, "Main", 1], [0, "thread 7", 1]]
    assert [span[2] for span in step["spans"]] == [1]


def test_every_order_visits_every_step_once() -> None:
    for count in range(40):
        assert sorted(page_timeline._order(count, {})) == list(range(count))
        some = {at: [] for at in (count - 1, count // 2) if at >= 0}
        assert sorted(page_timeline._order(count, some)) == sorted({*range(count), *some})


def overlapping() -> list[Row]:
    """Nested, crossing and equal spans of asyncio tasks on one thread, and another thread."""
    rows = [Row("outer", "region", 1, 0, 100, id=1)]
    rows += [Row("task", "stage", 1, at, at + 40, parent=1, id=10 + at) for at in (0, 10, 20, 50)]
    rows += [Row("inner", "region", 1, 12, 48, parent=20, id=99)]
    rows += [Row("after", "region", 1, 62, 70, parent=20, id=96)]
    rows += [Row("mark", "mark", 1, 30, 30, parent=20, id=98)]
    rows += [Row("other", "stage", 1, 5, 95, thread=7, id=97)]
    rows += [Row("late", "region", 1, 0, 120, id=200), Row("step", "step", 1, 0, 130, id=201)]
    return rows


def test_no_bar_hides_another_and_children_lie_below_their_parents(tmp_path: Path) -> None:
    spans = spans_of(tmp_path / "run", overlapping())
    (step,) = timeline(spans)["steps"]
    assert step["lanes"][0][:2] == [0, "Main"]
    assert len(step["lanes"]) == 2
    placed = [(lane, row, at, at + length) for _, _, lane, row, at, length, *_ in step["spans"]]
    for one in range(len(placed)):
        for two in range(one):
            a, b = placed[one], placed[two]
            assert a[:2] != b[:2] or a[3] <= b[2] or b[3] <= a[2]
    names = [spans.names[span[0]] for span in step["spans"]]
    row = dict(zip(names, (span[3] for span in step["spans"]), strict=True))
    assert row["late"] == 0  # the longest of those that start together is the outermost
    assert row["inner"] > row["outer"] + 1
    tasks = [span[3] for span, name in zip(step["spans"], names, strict=True) if name == "task"]
    assert row["after"] > tasks[1]  # below the task that opened it, which has ended
    heights = [lane[2] for lane in step["lanes"]]
    assert all(row < heights[lane] for lane, row, _, _ in placed)


def test_counters_come_along_as_json_can_hold_them(tmp_path: Path) -> None:
    counters = {"tokens": 5, "loss": 0.5}
    rows = [Row("a", "stage", 1, 0, 9, counters=counters), Row("step", "step", 1, 0, 9)]
    lanes = timeline(spans_of(tmp_path / "run", rows))
    assert lanes["counters"] == ["loss", "tokens"]
    assert dict(zip(*[iter(lanes["steps"][0]["spans"][0][6])] * 2, strict=True)) == {0: 0.5, 1: 5}
    spans = spans_of(tmp_path / "other", rows)
    spans.counters["loss"].values[0] = float("nan")
    item = timeline(spans)["steps"][0]["spans"][0][6]
    assert "nan" in item


def test_what_is_outside_steps_can_be_opened_and_is_no_step(tmp_path: Path) -> None:
    rows = [Row("fit_start", "region", 0, 0, 400, MAIN), *grpo_rows(3)]
    lanes = timeline(spans_of(tmp_path / "run", rows))
    assert numbers(lanes) == [0, 1, 2, 3]
    assert lanes["total"] == 3
    assert lanes["steps"][0]["labels"] == []


def shifted(rows: list[Row], by: int) -> list[Row]:
    return [row._replace(start_ns=row.start_ns + by, end_ns=row.end_ns + by) for row in rows]


@pytest.mark.parametrize(("drift", "why"), [(0, ""), (80_000_000, "drift")])
def test_ranks_that_do_not_step_together_are_aligned(drift: int, why: str, tmp_path: Path) -> None:
    rows = grpo_rows(4)
    spans: Spans = spans_of(tmp_path / "run", rows, shifted(rows, drift))
    assert timeline(spans)["aligned"] == why
    assert timeline(spans)["steps"][0]["duration_ns"] == rows[5].end_ns - rows[5].start_ns

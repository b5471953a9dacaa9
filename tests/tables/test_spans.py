from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.records.records import KINDS, Span
from lightning_rlprof.tables.spans import NO_PARENT, rows_named
from tests.builders.runs import MAIN, Row, grpo_run, loaded

ROWS = [
    Row("step", "step", 1, 100, 200),
    Row("actor_update", "stage", 1, 110, 150, parent=1, counters={"tokens": 7, "loss": 0.5}),
    Row("mark", "mark", 1, 120, 120, thread=5),
]


def test_iterating_yields_spans_on_the_runs_axis_with_parents_and_counters() -> None:
    spans = loaded(ROWS)

    assert len(spans) == 3
    assert list(spans) == [
        Span("step", "step", 0, 1, 0, 100, MAIN, 1, None, None),
        Span("actor_update", "stage", 0, 1, 10, 50, MAIN, 2, 1, {"tokens": 7, "loss": 0.5}),
        Span("mark", "mark", 0, 1, 20, 20, 5, 3, None, None),
    ]
    assert spans.parent.tolist() == [NO_PARENT, 1, NO_PARENT]


def test_counters_are_plain_numbers_whatever_array_holds_them() -> None:
    values = {"small": 1, "huge": 2**80, "float": 0.25}
    spans = loaded([Row("a", "stage", 1, 0, 1, counters=values)])

    counters = spans.counters_of(0)
    assert counters == values
    assert counters is not None
    assert [type(value) for value in counters.values()] == [float, int, int]


def test_rows_selects_by_kind_name_and_rank(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, steps=3, ranks=2)

    def where(**wanted: object) -> list[int]:
        return [
            row
            for row, span in enumerate(spans)
            if all(getattr(span, key) == value for key, value in wanted.items())
        ]

    assert spans.rows().tolist() == list(range(len(spans)))
    assert spans.rows(kind="stage").tolist() == where(kind="stage")
    assert spans.rows(name="actor_update", rank=1).tolist() == where(name="actor_update", rank=1)
    assert spans.rows(kind="step", rank=0).tolist() == where(kind="step", rank=0)
    assert spans.rows(name="nobody").tolist() == []
    assert spans.rows(rank=9).tolist() == []
    with pytest.raises(ValueError, match=r"unknown kind 'nope' \(kinds: epoch, step, stage, "):
        spans.rows(kind="nope")  # type: ignore[arg-type]


def test_flagged_finds_rows_with_a_counter_that_is_not_zero() -> None:
    flags = [{"capture": 1}, {"capture": 0}, None, {"capture": 2**70}]
    rows = [Row("step", "step", n, n, n + 1, counters=flag) for n, flag in enumerate(flags)]
    spans = loaded(rows)

    assert spans.flagged("capture").tolist() == [0, 3]
    assert spans.flagged("absent").tolist() == []


@pytest.mark.parametrize(
    ("values", "kind", "rows"),
    [
        ([3, -4, 2**62], np.int64, [0, 1]),
        ([2**70, 3, -(2**70)], np.int64, [1]),
        ([2.0**63, 2.5], np.int64, [1]),
        ([2**70, 3, -1e308, 0.5], np.float64, [0, 1, 3]),
        ([10**300, 1e21], np.float64, [1]),
    ],
)
def test_amounts_are_numbers_that_can_be_added_up(
    values: list[float], kind: type[Any], rows: list[int]
) -> None:
    numbered = enumerate(values)
    spans = loaded([Row("a", "stage", 1, n, n + 1, counters={"n": own}) for n, own in numbered])

    found = spans.amounts("n", kind)
    assert (found.values.dtype, found.rows.tolist()) == (kind, rows)
    assert found.values.tolist() == [kind(values[row]) for row in rows]
    assert not len(spans.amounts("absent").rows)


def test_durations_are_ends_less_starts(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path)
    assert np.array_equal(spans.duration_ns, [span.duration_ns for span in spans])


def test_iterating_looks_into_thousands_of_counters_once() -> None:
    class Counted(dict[str, Any]):
        looks = 0

        def values(self) -> Any:
            Counted.looks += 1
            return super().values()

        def items(self) -> Any:
            Counted.looks += 1
            return super().items()

    rows = [Row("a", "stage", 1, at, at + 1, counters={f"c{at}": at}) for at in range(2_000)]
    spans = loaded(rows)
    spans = replace(spans, counters=Counted(spans.counters))
    assert [span.counters for span in spans] == [{f"c{at}": at} for at in range(2_000)]
    assert Counted.looks < 5


def test_a_run_without_spans_is_no_condition() -> None:
    with pytest.raises(TypeError, match="ask len"):
        bool(loaded([]))


def test_a_counter_of_some_rows_is_that_of_all_rows() -> None:
    rows = [
        Row("a", "stage", 1, at, at + 1, counters={"n": at} if at % 2 else None) for at in range(6)
    ]
    spans = loaded(rows)
    some = np.array([4, 1, 3, -1])
    assert spans.per_row("n", -7)[some[:3]].tolist() == [-7, 1, 3]
    assert spans.per_row("n", -7, some).tolist() == [-7, 1, 3, -7]
    assert spans.per_row("other", 0, some).tolist() == [0, 0, 0, 0]
    assert spans.took_ns(some[:3]).tolist() == [1, 1, 1]


def test_rows_of_wanted_names_are_of_the_wanted_kinds() -> None:
    spans = loaded(
        [Row("a", "stage", 1, 0, 1), Row("b", "stage", 1, 1, 2), Row("a", "mark", 1, 2, 2)]
    )
    is_a = np.array([*(name == "a" for name in spans.names), False])
    assert rows_named(spans, is_a, [KINDS.index("stage")]).tolist() == [0]
    assert rows_named(spans, ~is_a & False, [KINDS.index("stage")]).tolist() == []

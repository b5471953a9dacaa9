"""One matrix says where the time of every step went: as brute force does, and made once."""

import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.critical_path.critical_path import critical_path
from lightning_rlprof.analysis.ledger.ledger import OUTSIDE, compute_accounts, ledger
from lightning_rlprof.analysis.stages import StepTimes, stages
from lightning_rlprof.analysis.steps import partition as partition_module
from lightning_rlprof.analysis.steps import step_matrix as matrix_module
from lightning_rlprof.analysis.steps.partition import UNTRACED, partition
from lightning_rlprof.analysis.steps.step_matrix import step_matrix
from lightning_rlprof.analysis.steps.time_categories import Category
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.summary import summary, summary_lines
from lightning_rlprof.tables.table import rows_of
from tests.analysis.steps.test_waiting import Job
from tests.builders.oracle import innermost, runs
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play
from tests.effort import examples
from tests.places import ROOT

Cell = tuple[int, int, str]


def cells(spans) -> dict[str, Counter[Cell]]:  # type: ignore[no-untyped-def]
    """Return the matrix by rank, step row and stage."""
    matrix = step_matrix(spans)
    found = {}
    for column in ("work_ns", "waits_ns", "calls"):
        found[column] = Counter[Cell]()
        values = getattr(matrix, column).tolist()
        for step, name, value in zip(matrix.step, matrix.name.tolist(), values, strict=True):
            row = int(matrix.steps[step])
            stage = [*spans.names, "untraced"][name]
            found[column] += Counter({(int(spans.rank[row]), row, stage): value})
    return found


@settings(max_examples=examples(60), deadline=None)
@given(runs())
def test_cells_agree_with_labels_of_every_nanosecond_and_add_up_to_each_step(
    rows: list[list[Row]],
) -> None:
    spans = loaded(*rows)
    row_of = {(span.rank, span.id): row for row, span in enumerate(spans)}
    expected: Counter[Cell] = Counter()
    for step, _, stage in innermost(spans):
        expected[step.rank, row_of[step.rank, step.id], stage.name if stage else "untraced"] += 1
    found = cells(spans)
    assert found["work_ns"] + found["waits_ns"] == expected
    matrix = step_matrix(spans)
    walls = np.zeros(len(matrix.steps), np.int64)
    np.add.at(walls, matrix.step, matrix.work_ns + matrix.waits_ns)
    assert walls.tolist() == spans.duration_ns[matrix.steps].tolist()
    assert np.array_equal(matrix.steps, partition(spans).steps)


@settings(max_examples=examples(40), deadline=None)
@given(runs(), st.data())
def test_the_matrix_of_some_ranks_has_their_cells(
    rows: list[list[Row]], data: st.DataObject
) -> None:
    spans = loaded(*rows)
    some = data.draw(st.sets(st.sampled_from(spans.ranks)))
    own, whole = step_matrix(spans, some), step_matrix(spans)
    mine = np.isin(spans.rank[whole.steps[whole.step]], list(some))
    assert own.work_ns.tolist() == whole.work_ns[mine].tolist()
    assert own.steps[own.step].tolist() == whole.steps[whole.step[mine]].tolist()


def test_waiting_is_apart_and_calls_are_counted() -> None:
    job = Job(1, uneven=True)
    found = cells(job.spans)
    assert sum(found["waits_ns"].values()) == job.waited_ns
    assert {stage for _, _, stage in found["waits_ns"]} == {"actor_update"}
    assert set(found["calls"].values()) == {1}
    assert min(found["work_ns"].values()) > 0


def test_what_stages_counted_is_summed_by_cell() -> None:
    rows = [
        Row("step", "step", 1, 0, 9),
        Row("a", "stage", 1, 0, 3, counters={"tokens": 3}),
        Row("a", "stage", 1, 4, 6, counters={"tokens": 4}),
        Row("b", "stage", 1, 6, 8),
        Row("a", "stage", 0, 20, 30, counters={"tokens": 100}),
    ]
    spans = loaded(rows)
    found = step_matrix(spans).amounts(spans, "tokens")
    assert [column.tolist() for column in found] == [[0], [spans.names.index("a")], [7.0], [2]]
    assert not len(step_matrix(spans).amounts(spans, "samples").step)


def test_all_analyses_of_a_run_read_one_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = play(Script(ranks=4, steps=40), 0).spans
    made: Counter[str] = Counter()

    def counting(module, name):  # type: ignore[no-untyped-def]
        make = getattr(module, name)

        def counted(run):  # type: ignore[no-untyped-def]
            made[name] += 1
            return make(run)

        monkeypatch.setattr(module, name, counted)

    from lightning_rlprof.analysis.ledger import ledger as ledger_module

    counting(partition_module, "_divide_all")
    counting(matrix_module, "_compute")
    counting(matrix_module, "_find_waits")
    counting(ledger_module, "compute_accounts")
    summary_lines(summary(spans))
    for analysis in CATALOG:
        analysis.run(spans)
    assert made == dict.fromkeys(("_divide_all", "_compute", "_find_waits", "compute_accounts"), 1)


REGIONS = ("data_fetch", "batch_to_device", "save_checkpoint", "my_region", "garbage_collection")


@st.composite
def runs_with_regions(draw: st.DrawFn) -> list[list[Row]]:
    """Draw ranks of one thread each, with stages and regions anywhere in their steps."""
    ranks, steps = [], draw(st.integers(1, 4))
    for _ in range(draw(st.integers(1, 2))):
        rows, now = [], 0
        for step in range(1, steps + 1):
            length = draw(st.integers(1, 12))
            rows.append(Row("step", "step", step, now, now + length))
            now += length
        for _ in range(draw(st.integers(0, 8))):
            start = draw(st.integers(0, now - 1))
            end = draw(st.integers(start, now))
            stage = draw(st.booleans())
            name = draw(st.sampled_from(("actor_update", "mine") if stage else REGIONS))
            rows.append(Row(name, "stage" if stage else "region", 1, start, end))
        ranks.append(rows)
    return ranks


@settings(max_examples=examples(100), deadline=None)
@given(runs_with_regions())
def test_untraced_is_one_number_wherever_it_is_called_so(rows: list[list[Row]]) -> None:
    spans = loaded(*rows)
    matrix, accounts = step_matrix(spans), compute_accounts(spans)
    untraced = int(matrix.work_ns[matrix.name == UNTRACED].sum())
    warm = accounts.job_ns[:OUTSIDE, Category.WARM_UP].sum()
    # Its time outside steps has another name, and so has that outside stages on the critical path.
    assert int(accounts.job_ns[:, Category.UNTRACED].sum()) == untraced or warm
    assert "untraced" not in critical_path(spans).column("stage")
    table = stages(spans)
    if table.abstained is None and table.note.startswith("Times are"):
        assert dict(zip(table.column("stage"), table.column("total"), strict=True))["untraced"] == (
            untraced
        )
    series = StepTimes(spans)
    of_part = next(part for part in series.parts if part.kind == "untraced")
    ranks = np.unique(spans.step[matrix.steps], return_counts=True)[1]
    assert round(float((of_part.ns * ranks).sum())) == untraced


@pytest.mark.parametrize("name", ["demo", "slow", "kv"])
def test_untraced_is_one_number_of_the_example(tmp_path: Path, name: str) -> None:
    with tarfile.open(ROOT / "examples" / "runs.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    spans = load(tmp_path / name)
    tables = (stages(spans), ledger(spans), critical_path(spans))
    found = [row for table in tables for row in rows_of(table) if "untraced" in row.values()]
    assert len(found) == 2, "of the critical path it would be another number"
    of_stages, of_ledger = found
    assert of_stages["total"] == of_ledger["total"] == of_ledger["in steps"]
    assert f"{of_stages['share']:.1%}" == f"{of_ledger['share']:.1%}"

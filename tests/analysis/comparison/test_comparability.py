from dataclasses import replace

import numpy as np
import pytest

from lightning_rlprof.analysis.comparison.run_pair import HARDLY, comparability, score_of
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Table
from tests.builders.pairs import Half, run_of, scripted


def _scores(a: Spans, b: Spans) -> dict[object, object]:
    table = comparability(a, b)
    found = dict(zip(table.column("what"), table.column("score"), strict=True))
    return {what: score for what, score in found.items() if score != 1.0}


def _plain(**changes: object) -> Spans:
    times = 1e8 + 1e6 * (np.arange(20) % 7)
    return run_of({"a": times, "b": times}, {"tokens": {"a": times}}, **changes)  # type: ignore[arg-type]


def test_a_run_and_itself_are_alike_in_all() -> None:
    table = comparability(_plain(), _plain())
    assert set(table.column("score")) == {1.0}
    assert table.note.startswith("Comparability score: 1.00")


@pytest.mark.parametrize(
    ("changes", "what", "score"),
    [({"device": "Ascend 910B"}, "device", 0.7), ({"world_size": 4}, "ranks", 0.8)],
)
def test_other_hardware_and_ranks_lower_the_score(
    changes: dict[str, object], what: str, score: float
) -> None:
    assert _scores(_plain(), _plain(**changes)) == {what: score}


def test_stages_of_one_side_lower_it_by_their_share_of_time() -> None:
    times = np.full(20, 1e9)
    a = run_of({"a": times, "b": 3 * times})
    found = comparability(a, run_of({"a": times, "x": times}))
    assert found.rows[0][:3] == ("stages", "only here: b", "only here: x")
    assert found.rows[0][3] == pytest.approx(0.25, abs=1e-3)


def test_counters_of_one_side_and_no_counters_lower_it() -> None:
    counted, blind = scripted(Half(), 1), scripted(Half(counted=False), 1)
    assert _scores(counted, blind) == {"counters": 0.8}
    assert _scores(blind, blind) == {"counters": 0.9}


def test_work_that_does_not_overlap_lowers_it() -> None:
    near, far = (scripted(Half(length=length, lengths=0.02), 1) for length in (1.0, 3.0))
    assert _scores(near, far) == {"work": 0.5}


def test_graphs_on_one_side_lower_it() -> None:
    def traced(share: float) -> Spans:
        graph = np.ma.masked_less(np.where(np.arange(10) < 10 * share, 1, -1), 0)
        columns = (Column("kernel", "text"), Column("graph", "count"))
        rows = [("k", None if each is np.ma.masked else int(each)) for each in graph]
        return replace(_plain(), tables={"kernels": lambda: Table("kernels", columns, rows)})

    assert _scores(traced(1.0), traced(0.0)) == {"graph capture": pytest.approx(0.7)}
    assert _scores(traced(0.5), _plain()) == {}


def test_kernels_without_the_column_of_graphs_are_not_known() -> None:
    rows = ColumnRows([(np.zeros(3, dtype=np.int64), ["k"])])
    table = Table("kernels", (Column("kernel", "text"),), rows)
    run = replace(_plain(), tables={"kernels": lambda: table})
    assert comparability(run, run).rows[3] == ("graph capture", "unknown", "unknown", 1.0)


def test_the_score_is_the_product() -> None:
    table = comparability(_plain(), _plain(device="x", world_size=2))
    assert score_of(table) == pytest.approx(0.56)
    assert score_of(table) > HARDLY

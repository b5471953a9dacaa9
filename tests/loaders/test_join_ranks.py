"""Several traces as one run: a brute-force oracle, and what is said of what does not fit.

Tables of several ranks put end to end, in whatever form each of them is.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.join_ranks import Piece, join, join_tables
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.run import Run
from lightning_rlprof.tables.spans import NO_PARENT, Counter, RankNote, RunWarning, Spans, Thread
from lightning_rlprof.tables.table import Cell, Column, ColumnRows, Table
from tests.builders.runs import header
from tests.effort import examples

Row = tuple[int, str, int, int, int | None]  # rank, name, start, length, tokens


def spans_of(rows: list[Row], ranks: set[int], unix_ns: int = 1000, **more: Any) -> Spans:
    """Return spans whose parent is the one before them in their rank."""
    rows = sorted(rows, key=lambda row: (row[0], row[2]))
    names = sorted({row[1] for row in rows})
    rank, start, length = (np.array([row[at] for row in rows], np.int64) for at in (0, 2, 3))
    number = np.arange(len(rows)) - np.searchsorted(rank, rank)
    at = [row for row, each in enumerate(rows) if each[4] is not None]
    tokens = Counter(np.array(at, np.int64), np.array([rows[row][4] for row in at], np.int64))
    held = sorted(ranks)
    return Spans(
        **{"path": Path("/runs/x/part.json"), **more},
        names=tuple(names),
        threads=tuple(Thread(each, 7, "main") for each in held),
        name=np.array([names.index(row[1]) for row in rows], np.int64),
        kind=np.full(len(rows), KINDS.index("region")),
        rank=rank,
        step=np.arange(len(rows)),
        start_ns=start,
        end_ns=start + length,
        thread=np.searchsorted(held, rank),
        id=number,
        parent=np.where(number > 0, number - 1, NO_PARENT),
        counters={"tokens": tokens} if at else {},
        headers={each: header(each, 8, pid=unix_ns) for each in held},
        statuses=dict.fromkeys(held, "finished"),
        unix_ns=unix_ns,
    )


numbers = st.integers(0, 50)
parts_of_ranks = st.permutations(range(6)).flatmap(
    lambda ranks: st.lists(st.integers(1, 3), min_size=1, max_size=3).map(
        lambda sizes: [
            set(ranks[sum(sizes[:at]) : sum(sizes[: at + 1])])
            for at in range(len(sizes))
            if sum(sizes[:at]) < len(ranks)
        ]
    )
)


@st.composite
def parts(draw: st.DrawFn) -> list[Spans]:
    found = []
    for ranks in draw(parts_of_ranks):
        row = st.tuples(
            st.sampled_from(sorted(ranks)),
            st.sampled_from("abcd"),
            numbers,
            numbers,
            st.none() | numbers,
        )
        rows = draw(st.lists(row, max_size=8))
        found.append(spans_of(rows, ranks, draw(st.integers(1, 10**19 // 9))))
    return found


@settings(max_examples=examples(150), deadline=None)
@given(parts())
def test_every_span_of_every_part_is_there_once_by_rank_on_one_axis(own: list[Spans]) -> None:
    run = join(own)

    zero = min(part.unix_ns for part in own)
    wanted = [
        (*_plain(span), span.start_ns + part.unix_ns - zero, span.duration_ns)
        for part in own
        for span in part
    ]
    found = [(*_plain(span), span.start_ns, span.duration_ns) for span in run]
    assert found == sorted(wanted, key=lambda each: (each[0], each[1]))
    assert run.unix_ns == zero
    assert run.ranks == tuple(sorted(rank for part in own for rank in part.ranks))
    assert sorted(run.rank.tolist()) == run.rank.tolist()
    assert [run.threads[code].rank for code in run.thread.tolist()] == run.rank.tolist()


def _plain(span: Any) -> tuple[Any, ...]:
    return (span.rank, span.id, span.name, span.step, span.parent, span.thread, span.counters)


def test_the_newest_of_two_of_one_rank_stays_and_the_other_is_said() -> None:
    old = spans_of([(0, "old", 1, 1, None)], {0}, 1000, path=Path("/runs/old.json"))
    new = spans_of([(0, "new", 1, 1, None)], {0}, 5000, path=Path("/runs/new.json"))
    other = spans_of([], {1})

    run = join([old, new, other])

    assert [span.name for span in run] == ["new"]
    text = "old.json is left out: its rank is 0, as in new.json, which is kept"
    assert run.warnings[0] == RunWarning(0, text, "rank-left-out")


def test_what_else_is_lost_with_a_part_is_a_problem_of_those_ranks() -> None:
    old = spans_of([], {0, 2, 3}, 1000, path=Path("/runs/old.json"))
    run = join([old, spans_of([], {0}, 5000), spans_of([], {1})])

    assert run.ranks == (0, 1)
    assert [problem.rank for problem in run.warnings if "old.json" in problem.text] == [2, 3]
    assert "so rank 2-3 has no data" in run.warnings[0].text


def test_a_part_that_does_not_know_its_time_begins_at_zero_and_is_a_problem() -> None:
    dated = spans_of([(0, "a", 5, 1, None)], {0}, 7000)
    undated = spans_of([(1, "b", 5, 1, None)], {1}, 0, path=Path("/runs/b.json"))

    run = join([undated, dated])

    assert (run.start_ns.tolist(), run.unix_ns) == ([5, 5], 7000)
    text = "the trace has no recording time: its times start with those of the run"
    assert RunWarning(1, text, "time-unknown") in run.warnings


def test_problems_and_notes_are_of_the_rank_or_of_the_file_with_several() -> None:
    one = spans_of(
        [], {4}, 1000, warnings=(RunWarning(None, "lost"),), notes=(RankNote(None, 5, "info", "n"),)
    )
    two = spans_of([], {0, 1}, 1500, warnings=(RunWarning(None, "lost"), RunWarning(1, "cut")))

    run = join([two, one])

    assert [problem for problem in run.warnings if "have no trace" not in problem.text] == [
        RunWarning(None, "part.json: lost"),
        RunWarning(1, "cut"),
        RunWarning(4, "lost"),
    ]
    assert run.notes == (RankNote(4, 5, "info", "n"),)


def test_ranks_of_the_world_without_a_part_are_named_but_not_those_that_were_lost() -> None:
    run = join([spans_of([], {0}), spans_of([], {5})], [RunWarning(3, "broken")])

    assert run.warnings == (
        RunWarning(3, "broken"),
        RunWarning(None, "of 8 ranks, these have no trace: 1-2, 4, 6-7", "ranks-missing"),
    )


def test_tables_are_read_when_asked_and_on_the_axis_of_the_run() -> None:
    asked = []

    def kernels(rank: int) -> Table:
        asked.append(rank)
        columns = (Column("name", "text"), Column("rank", "count"), Column("start", "time"))
        return Table("kernels", columns, [("gemm", rank, 3)])

    run = join(
        [
            spans_of([], {rank}, 1000 + rank, tables={"kernels": lambda rank=rank: kernels(rank)})
            for rank in (0, 1)
        ]
    )

    assert asked == []
    assert list(run.table("kernels").rows) == [("gemm", 0, 3), ("gemm", 1, 4)]
    assert Run.of(run).sql("select count(*) as n from kernels").column("n") == [2]


def test_nothing_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        join([])


def test_the_path_is_the_folder_of_all() -> None:
    first = spans_of([], {0}, path=Path("/runs/a/b/0.json"))
    assert join([first, spans_of([], {1}, path=Path("/runs/a/1.json"))]).path == Path("/runs/a")


HEADS = (
    Column("rank", "count"),
    Column("start", "time", "ns"),
    Column("duration", "duration", "ns"),
    Column("kernel", "text"),
    Column("share", "number"),
)
cells = st.tuples(
    st.just(0),
    st.none() | st.integers(-(2**60), 2**60),
    st.integers(0, 9),
    st.none() | st.sampled_from("abc"),
    st.none() | st.floats(0, 1),
)


def table(rows: list[tuple[Cell, ...]], heads: tuple[Column, ...] = HEADS, **more: Any) -> Table:
    return Table("t", heads, rows, **more)


def columns(rows: list[tuple[Cell, ...]]) -> ColumnRows:
    """Return rows as columns; what is not known is masked, or a code below 0."""
    found: list[Any] = []
    for at, head in enumerate(HEADS):
        own = [row[at] for row in rows]
        if head.kind == "text":
            texts = sorted({each for each in own if isinstance(each, str)})
            found.append((np.array([texts.index(e) if e else -1 for e in own], np.int64), texts))
            continue
        mask = [each is None for each in own]
        kind = np.float64 if head.kind == "number" else np.int64
        found.append(np.ma.masked_array(np.array([each or 0 for each in own], kind), mask))
    return ColumnRows(found)


@given(st.lists(st.tuples(st.lists(cells, max_size=5), st.booleans(), st.integers(0, 2**61))))
def test_rows_come_in_order_exactly_with_their_times_moved(pieces: Any) -> None:
    made = [
        Piece((at,), later, lambda rows=rows, coded=coded: table(columns(rows) if coded else rows))
        for at, (rows, coded, later) in enumerate(pieces)
    ]

    found = join_tables("t", made)

    wanted = [
        (rank, None if start is None else start + later, *rest)
        for rows, _, later in pieces
        for rank, start, *rest in rows
    ]
    assert list(found.rows) == wanted


def test_a_column_that_one_table_lacks_is_not_known_there() -> None:
    short = table([(0, 1, 2)], HEADS[:3])
    long = table([(1, 3, 4, "gemm", 0.5)])

    found = join_tables("t", [Piece((0,), 0, lambda: short), Piece((1,), 0, lambda: long)])

    assert list(found.rows) == [(0, 1, 2, None, None), (1, 3, 4, "gemm", 0.5)]


def test_a_text_under_a_heading_of_numbers_elsewhere_is_not_lost() -> None:
    parts = [table([(cell,)], (Column("group", "text"),)) for cell in ("a", 7, None)]
    parts[1] = Table("t", (Column("group", "count"),), [(7,)])

    pieces = [Piece((at,), 0, lambda part=part: part) for at, part in enumerate(parts)]

    assert join_tables("t", pieces).column("group") == ["a", "7", None]


def test_rows_without_a_rank_get_that_of_their_piece_and_none_of_several() -> None:
    own = table([(4,)], (Column("time", "time", "ns"),))

    found = join_tables("t", [Piece((3,), 10, lambda: own), Piece((5, 6), 0, lambda: own)])

    assert [column.name for column in found.columns] == ["rank", "time"]
    assert list(found.rows) == [(3, 14), (None, 4)]


def test_times_are_moved_whatever_their_name_and_durations_are_not() -> None:
    heads = (
        Column("start_ns", "time", "ns"),
        Column("launch duration", "duration", "ns"),
        Column("any", "time", "ns"),
    )
    found = join_tables("t", [Piece((0,), 100, lambda: table([(1, 2, 3)], heads))])

    assert [*found.rows] == [(0, 101, 2, 103)]


def test_what_cannot_be_told_is_said_once_for_all_its_ranks() -> None:
    def broken() -> Table:
        raise TraceError("disk gone")

    pieces = [
        Piece((0,), 0, lambda: table([(0, 1, 2, None, None)], note="some lost")),
        *(Piece((rank,), 0, broken) for rank in (1, 2)),
        Piece((3,), 0, lambda: table([], abstained="no device")),
        Piece((4,), 0, None),
    ]

    found = join_tables("t", pieces)

    assert found.note == (
        "rank 0: some lost; rank 1-2: disk gone; rank 3: no device; "
        "rank 4: this table was not recorded"
    )
    assert len(found.rows) == 1
    assert join_tables("t", pieces[1:4]).abstained == "rank 1-2: disk gone; rank 3: no device"


def test_a_long_note_is_cut_and_says_so() -> None:
    pieces = [
        Piece((rank,), 0, lambda rank=rank: table([], note=f"lost {rank}")) for rank in range(12)
    ]

    assert join_tables("t", pieces).note.endswith("rank 7: lost 7; and 4 more warnings")


def test_a_rank_lacks_a_table_only_where_none_of_its_pieces_has_one() -> None:
    def read() -> Table:
        return table([])

    pieces = [Piece((0,), 0, None), Piece((0,), 0, read), Piece((1,), 0, None)]

    assert join_tables("t", pieces).note == "rank 1: this table was not recorded"
    assert join_tables("t", []).abstained == "this table was not recorded"
    assert [join_tables("t", some).recorded for some in (pieces, pieces[:1])] == [True, False]


def test_rows_are_numbered_on_in_each_rank_and_so_is_who_names_them() -> None:
    heads = tuple(Column(name, "count") for name in ("rank", "id", "parent"))

    def calls(rank: int) -> Piece:
        rows = [(rank, 0, None), (rank, 2, 0)]
        return Piece((rank,), 0, lambda: table(rows, heads))

    found = join_tables("t", [calls(0), calls(1), calls(0), calls(0)])

    assert list(found.rows) == [
        *((0, 0, None), (0, 2, 0), (1, 0, None), (1, 2, 0)),
        *((0, 3, None), (0, 5, 3), (0, 6, None), (0, 8, 6)),
    ]


def test_graph_replays_of_two_captures_of_a_rank_stay_apart() -> None:
    heads = (Column("rank", "count"), Column("graph", "count"))

    def kernels(rank: int) -> Piece:
        return Piece((rank,), 0, lambda: table([(rank, 0), (rank, 1), (rank, None)], heads))

    found = join_tables("t", [kernels(0), kernels(1), kernels(0)])

    assert found.column("graph") == [0, 1, None, 0, 1, None, 2, 3, None]


def test_a_table_that_cannot_be_read_is_a_loss() -> None:
    def broken() -> Table:
        raise TraceError("cut")

    one = Piece((0,), 0, lambda: Table("t", HEADS[:1], [(0,)]))
    assert join_tables("t", [one, Piece((1,), 0, broken)]).losses == ("rank 1: cut",)

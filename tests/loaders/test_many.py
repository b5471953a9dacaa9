"""Several traces as one run: a brute-force oracle, and what is said of what does not fit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.loaders.many import join
from lightning_rlprof.model import KINDS
from lightning_rlprof.spans import NO_PARENT, Counter, Problem, RankNote, Spans, Thread
from lightning_rlprof.table import Column, Table
from tests.runs import header

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
        headers={each: header(each, 8) for each in held},
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


@settings(max_examples=150, deadline=None)
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
    text = "old.json is left out: it says rank 0, as new.json does, which is kept"
    assert run.problems[0] == Problem(0, text)


def test_what_else_is_lost_with_a_part_is_a_problem_of_those_ranks() -> None:
    old = spans_of([], {0, 2, 3}, 1000, path=Path("/runs/old.json"))
    run = join([old, spans_of([], {0}, 5000), spans_of([], {1})])

    assert run.ranks == (0, 1)
    assert [problem.rank for problem in run.problems if "old.json" in problem.text] == [2, 3]
    assert "so nothing is read of rank 2-3" in run.problems[0].text


def test_a_part_that_does_not_know_its_time_begins_at_zero_and_is_a_problem() -> None:
    dated = spans_of([(0, "a", 5, 1, None)], {0}, 7000)
    undated = spans_of([(1, "b", 5, 1, None)], {1}, 0, path=Path("/runs/b.json"))

    run = join([undated, dated])

    assert (run.start_ns.tolist(), run.unix_ns) == ([5, 5], 7000)
    text = "b.json does not say when it was recorded: its times begin with those of the run"
    assert Problem(1, text) in run.problems


def test_problems_and_notes_are_of_the_rank_or_of_the_file_with_several() -> None:
    one = spans_of(
        [], {4}, 1000, problems=(Problem(None, "lost"),), notes=(RankNote(None, 5, "info", "n"),)
    )
    two = spans_of([], {0, 1}, 1500, problems=(Problem(None, "lost"), Problem(1, "cut")))

    run = join([two, one])

    assert [problem for problem in run.problems if "wrote no" not in problem.text] == [
        Problem(None, "part.json: lost"),
        Problem(1, "cut"),
        Problem(4, "lost"),
    ]
    assert run.notes == (RankNote(4, 5, "info", "n"),)


def test_ranks_of_the_world_without_a_part_are_named_but_not_those_that_were_lost() -> None:
    run = join([spans_of([], {0}), spans_of([], {5})], [Problem(3, "broken")])

    assert run.problems == (
        Problem(3, "broken"),
        Problem(None, "of 8 ranks, these wrote no trace: 1-2, 4, 6-7"),
    )


def test_tables_are_read_when_asked_and_on_the_axis_of_the_run() -> None:
    asked = []

    def kernels(rank: int) -> Table:
        asked.append(rank)
        return Table("kernels", (Column("rank", "count"), Column("start", "duration")), [(rank, 3)])

    run = join(
        [
            spans_of([], {rank}, 1000 + rank, tables={"kernels": lambda rank=rank: kernels(rank)})
            for rank in (0, 1)
        ]
    )

    assert asked == []
    assert list(run.table("kernels").rows) == [(0, 3), (1, 4)]
    assert run.sql("select count(*) as n from kernels").column("n") == [2]


def test_nothing_cannot_be_joined() -> None:
    with pytest.raises(ValueError, match="at least one trace"):
        join([])


def test_the_path_is_the_folder_of_all() -> None:
    first = spans_of([], {0}, path=Path("/runs/a/b/0.json"))
    assert join([first, spans_of([], {1}, path=Path("/runs/a/1.json"))]).path == Path("/runs/a")

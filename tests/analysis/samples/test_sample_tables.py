"""Tables of samples on runs that were written by hand, beside what a person counts."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.samples.sample_tables import (
    balanced,
    length_balance,
    sample_path,
    samples,
    staleness,
)
from lightning_rlprof.errors import TraceError
from lightning_rlprof.records.records import FATES
from lightning_rlprof.tables.table import Table
from tests.builders.runs import Row, loaded

MS = 10**6


def phase(number: int, start: int, end: int, step: int = 1, **counters: float) -> Row:
    told = {"sample": number, **counters}
    return Row("actor_generate", "region", step, start * MS, end * MS, counters=told)


def fate(number: int, what: str, at: int, step: int = 1, **counters: float) -> Row:
    told = {"sample": number, **counters}
    return Row(f"sample {what}", "mark", step, at * MS, at * MS, counters=told)


def step(number: int, start: int, end: int) -> Row:
    return Row("step", "step", number, start * MS, end * MS)


def as_dict(table: Table, row: int) -> dict[str, object]:
    return dict(zip([each.name for each in table.columns], table.rows[row], strict=True))


told = st.tuples(st.integers(0, 30), st.sampled_from([*FATES, "unknown"]), st.integers(0, 99))


@settings(max_examples=60, deadline=None)
@given(st.lists(told, max_size=60), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 50))))
def test_fates_add_up_to_what_was_generated_under_drops_and_duplicates(
    fates: list[tuple[int, str, int]], phases: list[tuple[int, int]]
) -> None:
    rows = [fate(number, what, 1 + at) for number, what, at in fates]
    rows += [phase(number, 1, 2, tokens=tokens) for number, tokens in phases]
    spans = loaded([step(1, 0, 100), *rows])
    table = samples(spans)
    if not fates:
        assert table.abstained is not None
        return
    best: dict[int, str] = {}
    for number, what, _ in fates:
        known = [each for each in (best.get(number), what) if each in FATES]
        best[number] = min(known, key=FATES.index) if known else "unknown"  # type: ignore[arg-type]
    for number, _ in phases:
        best.setdefault(number, "unknown")
    counts = dict(zip(table.column("fate"), table.column("samples"), strict=True))
    assert counts.pop("generated") == len(best) == sum(counts.values())
    assert {each: n for each, n in counts.items() if n} == {
        each: [*best.values()].count(each) for each in best.values()
    }
    tokens = [int(each or 0) for each in table.column("tokens")]
    assert tokens[0] == sum(own for _, own in phases) == sum(tokens[1:])
    assert table.column("tokens left")[-1] == tokens[-1]


def test_numbers_of_the_users_own_are_not_samples() -> None:
    assert samples(loaded([step(1, 0, 9), phase(1, 1, 2)])).abstained is not None


def test_other_marks_of_a_sample_are_no_fates() -> None:
    rows = [step(1, 0, 9), phase(1, 1, 2), fate(1, "taken", 3)]
    assert samples(loaded(rows)).abstained is not None
    table = samples(loaded([*rows, fate(1, "stale", 4)]))
    assert [row[:2] for row in table.rows] == [("generated", 1), ("stale", 1), ("trained", 0)]
    assert "had one" not in table.note


def test_useful_tokens_are_per_time_of_all_ranks() -> None:
    rows = [step(1, 0, 1000), phase(1, 0, 10, tokens=300), fate(1, "trained", 20)]
    other = [step(1, 0, 1000), phase(2, 0, 10, tokens=100), fate(2, "stale", 20)]
    table = samples(loaded(rows, other))
    assert table.note.startswith("150 useful tokens per rank-second, of 200 generated.")


def test_unknown_fates_do_not_make_all_tokens_useless() -> None:
    rows = [step(1, 0, 1000), phase(1, 0, 10, tokens=300), fate(1, "unknown", 20)]
    assert samples(loaded(rows)).note.startswith("300 tokens generated per rank-second.")
    rows.append(fate(1, "stale", 30))
    assert samples(loaded(rows)).note.startswith("0 useful tokens per rank-second, of 300")


def test_staleness_is_that_of_the_update_and_the_queue_is_what_waited() -> None:
    rows = [
        step(1, 0, 100),
        step(2, 100, 200),
        phase(1, 0, 10, version=3),
        phase(2, 0, 20, version=3, version_end=4),
        phase(3, 50, 90, 1, version=4),
        phase(4, 50, 95, 1, version=5),
        fate(1, "trained", 60, 1, trainer_version=3),
        fate(2, "zero_advantage", 60, 1, trainer_version=5),
        fate(3, "stale", 150, 2, trainer_version=9),
        fate(4, "trained", 160, 2, trainer_version=7),
    ]
    table = staleness(loaded(rows))
    every, first, second = (as_dict(table, row) for row in range(3))
    assert (every["samples"], every["staleness mean"], every["staleness max"]) == (3, 4 / 3, 2)
    assert (first["version"], first["off-policy"], first["mixed versions"]) == (None, 0.5, 0.5)
    assert (first["queue"], second["queue"]) == (2, 1)
    assert (second["staleness max"], second["wait max"]) == (2, 65 * MS)


def test_staleness_falls_back_to_the_version_that_was_published_last() -> None:
    sync = Row("weight_sync", "stage", 1, 30 * MS, 40 * MS, counters={"version": 6})
    rows = [step(1, 0, 100), phase(1, 0, 10, version=4), sync, fate(1, "trained", 60)]
    assert as_dict(staleness(loaded(rows)), 0)["staleness mean"] == 2
    reason = staleness(loaded([step(1, 0, 100), phase(1, 0, 10), fate(1, "trained", 60)])).abstained
    assert reason is not None
    assert "version=" in reason


def test_the_balance_is_that_of_the_ranks_that_trained() -> None:
    def rank(lengths: list[int], first: int) -> list[Row]:
        rows = [step(1, 0, 100)]
        for number, length in enumerate(lengths, start=first):
            rows += [
                phase(number, number, 50, tokens=length),
                fate(number, "trained", 60),
            ]
        return rows

    table = length_balance(loaded(rank([40, 10], 1), rank([30, 20], 3)))
    found = {row[0]: row[1:] for row in table.rows}
    assert found["as trained"] == (50, 50, 1.0, 1700 / 1500, 1, 4)
    assert found["best"][:3] == (50, 50, 1.0)
    alone = length_balance(loaded(rank([40, 10], 1)))
    assert alone.abstained is not None


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(2, 3))
def test_differencing_is_near_the_best_of_all_partitions(lengths: list[int], parts: int) -> None:
    given_ = np.array(lengths, np.int64)
    most = int(np.bincount(balanced(given_, parts), given_, parts).max())
    every = np.indices((parts,) * len(lengths)).reshape(len(lengths), -1)
    sums = [((every == part) * given_[:, None]).sum(axis=0) for part in range(parts)]
    best = int(np.max(sums, axis=0).min())
    assert best <= most <= best * 4 / 3 + 1e-9  # the bound of longest first, which it keeps here


def test_the_way_of_a_sample_ends_with_its_update() -> None:
    rows = [
        step(1, 0, 100),
        phase(7, 0, 10, tokens=5, version=2),
        Row("compute_reward", "region", 1, 25 * MS, 30 * MS, counters={"sample": 7}),
        Row("actor_update", "stage", 1, 40 * MS, 90 * MS),
        fate(7, "trained", 40),
        phase(8, 0, 10),
        fate(8, "trained", 20),
    ]
    spans = loaded(rows)
    table = sample_path(spans)
    assert [row[0] for row in table.rows] == [
        "actor_generate",
        "(wait)",
        "compute_reward",
        "(wait)",
        "sample trained",
        "actor_update",
    ]
    assert [row[3] for row in table.rows] == [each * MS for each in (0, 10, 25, 30, 40, 40)]
    assert table.rows[0][5:] == (5, 2)
    assert "Sample 7 of prompt unknown: trained" in table.note
    assert sample_path(spans, 8).rows[0][0] == "actor_generate"
    with pytest.raises(TraceError, match="no sample 9"):
        sample_path(spans, 9)

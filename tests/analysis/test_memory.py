from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.memory import memory
from lightning_rlprof.model import Number
from lightning_rlprof.spans import Spans
from tests.runs import Row, loaded

GIB = 2**30
COLUMNS = {
    "peak": "device_peak_bytes",
    "at end": "device_allocated_bytes",
    "reserved": "device_reserved_bytes",
    "used": "device_used_bytes",
    "others": "device_other_bytes",
    "host": "host_rss_bytes",
}


def span(
    name: str, step: int, counters: Mapping[str, float] | None, kind: str = "stage", at: int = 0
) -> Row:
    return Row(name, kind, step, at, at + 1, counters=counters)  # type: ignore[arg-type]


def gpu(peak: int, **more: int) -> dict[str, int]:
    return {"device_peak_bytes": peak, "host_rss_bytes": 7, **more}


def test_it_is_the_highest_of_each_with_the_step_of_the_peak() -> None:
    rank = [
        span("actor_update", 3, gpu(5 * GIB, device_reserved_bytes=9 * GIB)),
        span("actor_update", 4, gpu(6 * GIB, device_reserved_bytes=8 * GIB)),
        span("actor_generate", 3, gpu(2 * GIB)),
        span("step", 4, gpu(6 * GIB), "step"),
        span("backward", 4, gpu(99 * GIB), "region"),
        span("actor_update", 5, {"tokens": 3}),  # not captured
    ]
    table = memory(loaded(rank))
    assert [(row[0], row[2], row[3], row[-1]) for row in table.rows] == [
        ("actor_update", 4, 6 * GIB, 2),
        ("whole step", 4, 6 * GIB, 1),
        ("actor_generate", 3, 2 * GIB, 1),
    ]
    assert table.column("reserved") == [9 * GIB, None, None]
    assert table.column("used") == [None, None, None]
    assert "others" not in table.note


def test_ranks_of_a_stage_stand_together_and_the_stage_that_takes_most_comes_first() -> None:
    ranks = [
        [span("a", 1, gpu(10)), span("b", 1, gpu(20))],
        [span("a", 1, gpu(30)), span("b", 1, gpu(5, device_other_bytes=1))],
    ]
    table = memory(loaded(*ranks))
    assert list(zip(table.column("stage"), table.column("rank"), strict=True)) == [
        ("a", 0),
        ("a", 1),
        ("b", 0),
        ("b", 1),
    ]
    assert table.column("peak") == [10, 30, 20, 5]
    assert "“others” is what is used on the device beyond" in table.note


def test_ranks_of_stages_that_take_the_same_stand_together() -> None:
    rank = [span("a", 0, gpu(10)), span("b", 0, gpu(10)), span("a", 1, {"host_rss_bytes": 99})]
    table = memory(loaded(rank, rank))
    assert table.column("stage") == ["a", "a", "b", "b"]
    assert table.column("step") == [0, 0, 0, 0]


def test_where_no_device_tells_a_peak_the_step_is_that_of_the_hosts_highest() -> None:
    rank = [span("a", step, {"host_rss_bytes": size}) for step, size in ((1, 3), (2, 8), (3, 8))]
    table = memory(loaded([*rank, span("b", 1, {"host_rss_bytes": 9})]))
    assert table.column("stage") == ["b", "a"]
    assert table.column("step") == [1, 2]  # the first that had it
    assert table.column("peak") == [None, None]
    assert table.column("host") == [9, 8]


def test_it_abstains_without_memory_and_says_what_to_configure() -> None:
    for rows in ([], [span("a", 1, {"tokens": 1})], [span("a", 1, gpu(1), "region")]):
        table = memory(loaded(rows))
        assert table.rows == ()
        assert table.abstained == (
            "no span has memory: capture a step with memory.level or profile_with_memory"
        )


COUNTERS = st.dictionaries(st.sampled_from(list(COLUMNS.values())), st.integers(0, 2**50))
SPANS = st.tuples(
    st.sampled_from(["a", "b"]),
    st.integers(1, 3),
    st.one_of(st.none(), COUNTERS),
    st.sampled_from(["stage", "stage", "step", "region"]),
    st.integers(0, 9),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(SPANS, max_size=12), min_size=1, max_size=3))
def test_it_agrees_with_brute_force(drawn: list[list[Any]]) -> None:
    spans = loaded(*[[span(*one) for one in rank] for rank in drawn])
    table = memory(spans)
    groups = by_stage_and_rank(spans)
    found = dict(
        zip(zip(table.column("stage"), table.column("rank"), strict=True), table.rows, strict=True)
    )
    assert found.keys() == groups.keys()
    for key, group in groups.items():
        cells = dict(zip((column.name for column in table.columns), found[key], strict=True))
        for name, counter in COLUMNS.items():
            assert cells[name] == max(
                (one[counter] for _, one in group if counter in one), default=None
            )
        assert cells["spans"] == len(group)
        # Where the device told a peak the step is one that had it, else one of the host's highest.
        lead = "peak" if cells["peak"] is not None else "host"
        steps = {step for step, one in group if one.get(COLUMNS[lead]) == cells[lead]}
        assert cells["step"] in steps if cells[lead] is not None else cells["step"] is None


def by_stage_and_rank(
    spans: Spans,
) -> dict[tuple[str, int], list[tuple[int, Mapping[str, Number]]]]:
    """Return (step, counters) of every span that has memory."""
    groups = defaultdict(list)
    for one in spans:
        if one.kind in ("stage", "step") and set(one.counters or {}) & {*COLUMNS.values()}:
            name = "whole step" if one.kind == "step" else one.name
            groups[name, one.rank].append((one.step, one.counters or {}))
    return groups

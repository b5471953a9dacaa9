"""Launches: what they cost, how long they wait, and a queue counted moment by moment.

Launches without a kernel are counted exactly, per rank, and not guessed.
"""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.device.launches import FULL, launches
from lightning_rlprof.analysis.device.losses import launch_match
from lightning_rlprof.analysis.device.work import no_work
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.table import Table
from tests.builders.calls import Call, Copy, Kernel, run
from tests.builders.device_trace import Feed, feed, thinned, traced
from tests.builders.runs import Row, loaded
from tests.effort import examples
from tests.places import SHARED_DATA


def cells(table: Table, *columns: str) -> list[tuple[object, ...]]:
    return list(zip(*(table.column(name) for name in columns), strict=True))


def runtime(name: str, start: int, end: int, **changes: int) -> Call:
    return Call(name, start, end, kind="runtime", **changes)


def test_calls_delays_and_short_kernels_of_each_stream_and_call() -> None:
    calls = [
        runtime("cudaLaunchKernel", 0, 10),
        runtime("cudaLaunchKernel", 20, 24),
        runtime("cuLaunchKernelEx", 30, 35),
        runtime("cudaMemcpyAsync", 40, 48),
        runtime("cudaStreamSynchronize", 0, 90),
        runtime("elsewhere", 20, 24, rank=1),
        Call("aten::mm", 20, 24),
    ]
    kernels = [
        Kernel("a", 15, 20, launch=0, call=10, stream=7),
        Kernel("b", 25, 29, launch=20, call=4, stream=7),
        Kernel("c", 33, 90, launch=30, call=5, stream=7),
    ]
    copies = [Copy("HtoD", 50, 51, launch=40, call=8, stream=9)]
    table = launches(run(calls, kernels, copies))
    heads = ("rank", "device", "stream", "call", "launches", "kernels")
    assert cells(table, *heads) == [
        (0, 0, 7, "cudaLaunchKernel", 2, 2),
        (0, 0, 7, "cuLaunchKernelEx", 1, 1),
        (0, 0, 9, "cudaMemcpyAsync", 1, 1),
    ]
    assert cells(table, "API time total", "API time p50", "API time p95") == [
        (14, 4, 10),
        (5,) * 3,
        (8,) * 3,
    ]
    assert cells(table, "delay p50", "delay p95", "delay max") == [(5, 15, 15), (3,) * 3, (10,) * 3]
    assert table.column("shorter than launch") == [1, 0, None]


def test_without_names_rows_have_the_kind_of_launch() -> None:
    kernels = [
        Kernel("a", 5, 6, launch=0),
        Kernel("b", 9, 10, launch=3, graph=1),
        Kernel("c", 9, 9),
    ]
    table = launches(run(None, kernels, [Copy("HtoD", 5, 6, launch=1)]))
    assert sorted(map(str, table.column("call"))) == [
        "copy",
        "graph replay",
        "launch",
        "not recorded",
    ]
    assert table.column("API time total") == [None] * 4
    assert set(table.column("shorter than launch")) == {None}


def test_a_replay_is_one_launch_that_starts_with_its_first_kernel() -> None:
    calls = [runtime("cudaGraphLaunch", 0, 20), runtime("cudaGraphLaunch", 100, 120)]
    kernels = [
        Kernel("k", begin + at, begin + at + 1, launch=begin, call=20, graph=graph)
        for graph, begin in enumerate((0, 100))
        for at in (50, 30, 40)
    ]
    table = launches(run(calls, kernels))
    columns = (
        "call",
        "launches",
        "kernels",
        "API time total",
        "delay max",
        "shorter than launch",
        "queue max depth",
    )
    assert cells(table, *columns) == [("cudaGraphLaunch", 2, 6, 40, 30, None, 1)]


def test_kernels_and_copies_of_a_replay_are_one_launch_on_all_streams() -> None:
    calls = [runtime("cudaGraphLaunch", 0, 20)]
    kernels = [
        Kernel("k", 30 + at, 31 + at, launch=0, call=20, stream=at, graph=5) for at in range(2)
    ]
    copies = [
        Copy("DtoD", 40 + at, 41 + at, launch=0, call=20, stream=at, graph=5) for at in range(2)
    ]
    columns = ("stream", "call", "launches", "kernels", "API time total", "queue max depth")
    for named, title in ((calls, "cudaGraphLaunch"), ([], "graph replay")):
        assert cells(launches(run(named, kernels, copies)), *columns) == [
            (0, title, 1, 2, 20, 1),
            (1, title, 0, 2, None, None),
        ]


def test_kernels_of_unknown_launch_have_a_row() -> None:
    kernels = [Kernel("k", 9, 10, launch=0, call=3), Kernel("k", 20, 21), Kernel("k", 30, 31)]
    table = launches(run([], kernels))
    assert cells(table, "call", "launches", "kernels", "delay p50", "queue max depth") == [
        ("launch", 1, 1, 9, 1),
        ("not recorded", None, 2, None, 1),
    ]


def test_what_starts_before_its_launch_is_noted_and_counts_to_no_delay() -> None:
    kernels = [Kernel("k", 5, 6, launch=10, call=2), Kernel("k", 25, 26, launch=20, call=2)]
    table = launches(run([], kernels))
    assert cells(table, "launches", "API time total", "delay max", "queue max depth") == [
        (2, 4, 5, 1)
    ]
    assert table.note.startswith("1 launches start before they were launched")


def test_the_queue_of_a_stream_over_time() -> None:
    kernels = [
        Kernel("a", 10, 30, launch=0),
        Kernel("b", 30, 40, launch=5),
        Kernel("c", 50, 51, launch=50),
    ]
    table = launches(run(None, kernels))
    # 0 to 5: one, to 10: two, to 30: one, to 50: none
    assert cells(table, "queue max depth", "queue mean depth", "queue empty %", "queue full %") == [
        (2, (5 + 10 + 20) / 50, 20 / 50, 0.0)
    ]


def test_a_thousand_launches_are_a_full_queue() -> None:
    count = FULL + 10
    kernels = [Kernel("k", 10_000 + at, 10_001 + at, launch=at) for at in range(count)]
    table = launches(run(None, kernels))
    assert table.column("queue max depth") == [count]
    # full from the 1,000th launch to the moment when the 11th has started
    assert table.column("queue full %") == [(10_000 + 10 - (FULL - 1)) / (10_000 + count - 1)]


def test_a_stream_that_starts_all_at_once_has_no_time_in_which_to_queue() -> None:
    table = launches(run(None, [Kernel("k", 5, 9, launch=5)]))
    assert cells(table, "queue max depth", "queue mean depth", "queue empty %") == [(0, None, None)]


def test_between_captures_nothing_is_known_of_the_queue() -> None:
    rows = [
        Row("rlprof open capture", "region", 1, 0, 5),
        Row("rlprof close capture", "region", 1, 40, 45),
        Row("rlprof open capture", "region", 2, 990, 1_000),
        Row("rlprof close capture", "region", 2, 1_050, 1_060),
    ]
    kernels = [Kernel("a", 20, 30, launch=10), Kernel("b", 1_030, 1_031, launch=1_010)]
    spans = replace(loaded(rows), tables=run(None, kernels).tables)
    table = launches(spans)
    shift = min(spans.start_ns)  # the axis begins with the first span
    assert shift == 0
    # queued 10 to 20 and 1,010 to 1,030; empty 20 to 40 and 1,000 to 1,010
    assert cells(table, "queue mean depth", "queue empty %") == [(30 / 60, 30 / 60)]


def test_one_rank_alone() -> None:
    kernels = [Kernel("k", 5, 6, launch=0, rank=rank) for rank in (0, 1)]
    assert launches(run(None, kernels), ranks=[1]).column("rank") == [1]


@pytest.mark.parametrize(
    ("kernels", "why"),
    [
        (None, no_work(None)),
        ([], no_work(None)),
        ([Kernel("k", 0, 1)], "The profiler recorded no launch times of kernels."),
    ],
)
def test_it_abstains_without_launches(kernels: list[Kernel] | None, why: str) -> None:
    assert launches(run([], kernels)).abstained == why
    assert "Ranks [9] have" in str(launches(run([], kernels), ranks=[9]).abstained)


@st.composite
def works(draw: st.DrawFn) -> list[Kernel]:
    """Draw kernels of two ranks and streams, some in replays, some of unknown launch."""
    found = []
    for _ in range(draw(st.integers(1, 12))):
        graph = draw(st.none() | st.integers(0, 2))
        launch = draw(st.integers(0, 20)) if graph is None else 30 + 3 * graph
        start = launch + draw(st.integers(-2, 20))
        rank, stream = draw(st.integers(0, 1)), draw(st.sampled_from([7, None]))
        length, call = draw(st.integers(0, 9)), draw(st.integers(0, 9)) if graph is None else graph
        known = draw(st.booleans()) or graph is not None
        more = {"rank": rank, "stream": stream, "graph": graph}
        if known:
            more |= {"launch": launch, "call": call}
        found.append(Kernel("k", start, start + length, **more))  # type: ignore[arg-type]
    return found


@given(works())
@settings(max_examples=examples(200), deadline=None)
def test_every_number_is_that_of_brute_force(kernels: list[Kernel]) -> None:
    table = launches(run([], kernels))
    if table.abstained:
        assert all(each.launch is None for each in kernels)
        return
    groups = defaultdict(list)
    for each in kernels:
        title = "launch" if each.graph is None else "graph replay"
        title = "not recorded" if each.launch is None else title
        groups[each.rank, each.stream, title].append(each)
    keys = cells(table, "rank", "stream", "call")
    assert sorted(keys, key=str) == sorted(groups, key=str)
    first = {id(each) for each in firsts(kernels)}  # equal kernels are two
    for key, row in zip(keys, table.rows, strict=True):
        found = dict(zip([column.name for column in table.columns], row, strict=True))
        assert found["kernels"] == len(groups[key])
        own = [each for each in groups[key] if id(each) in first]
        sound = [each.start - each.launch for each in own if each.start >= each.launch]
        assert found["launches"] == (len(own) if key[2] != "not recorded" else None)
        assert found["API time total"] == (sum(each.call for each in own) if own else None)
        assert found["delay max"] == max(sound, default=None)
        both = [groups.get((key[0], key[1], name), []) for name in ("launch", "graph replay")]
        every = [each for some in both for each in some if id(each) in first]
        expected = queue([each for each in every if each.start >= each.launch])
        assert [
            found["queue max depth"],
            found["queue mean depth"],
            found["queue empty %"],
        ] == expected


def firsts(kernels: list[Kernel]) -> list[Kernel]:
    """Return the kernels that stand for launches."""
    found = [each for each in kernels if each.launch is not None and each.graph is None]
    graphs = {(each.rank, each.graph) for each in kernels if each.graph is not None}
    replays = [[each for each in kernels if each[6:9:2] == graph] for graph in graphs]
    return found + [min(replay, key=lambda each: each.start) for replay in replays]


def queue(kernels: list[Kernel]) -> list[float | None]:
    """Return most, mean and share of empty of a queue, one nanosecond after the other."""
    if not kernels:
        return [None] * 3
    first, last = min(e.launch for e in kernels), max(e.start for e in kernels)
    counts = [sum(e.launch <= at < e.start for e in kernels) for at in range(first, last)]
    if not counts:
        return [0, None, None]
    return [max(counts), sum(counts) / len(counts), counts.count(0) / len(counts)]


TRACES = SHARED_DATA / "kineto"


def test_in_a_whole_trace_each_launch_has_its_kernel() -> None:
    assert launch_match(traced(*feed(Feed(pieces=300))))[:2] == (300, 0)


def test_what_is_lost_is_counted_and_a_lost_launch_is_no_lost_kernel() -> None:
    kernels, calls = feed(Feed(pieces=300))
    kept = thinned(kernels, 0.2, 1)
    assert launch_match(traced(kept, calls))[:2] == (300, 300 - len(kept))
    less = thinned(calls, 0.2, 1)
    assert launch_match(traced(kernels, less))[:2] == (len(less), 0)


def test_a_launch_of_another_rank_at_the_same_time_is_another_one() -> None:
    kernels, calls = feed(Feed(pieces=300))
    others = [{**call, "rank": 1} for call in calls]
    assert launch_match(traced(kernels, [*calls, *others]))[:2] == (600, 300)


def test_copies_and_other_calls_are_no_launches_of_kernels() -> None:
    kernels, calls = feed(Feed(pieces=300))
    more = [{**call, "name": name} for call in calls[:9] for name in ("cudaMemcpyAsync", "aten::a")]
    assert launch_match(traced(kernels, [*calls, *more]))[:2] == (300, 0)
    assert launch_match(traced(kernels, more)).launches == 0
    assert launch_match(traced(kernels)).launches == 0


@pytest.mark.parametrize(
    "name", ["nccl", "h100_qwen1.5-0.5b", "mi300_bert-small", "alexnet", "ns_resolution_rank-0"]
)
def test_real_traces_are_whole(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    if not path.exists():
        pytest.skip(f"NO TRACES: {path} is not here")
    found = launch_match(load(path))
    assert found.launches > 50
    assert found.unmatched == 0

"""The breakdown against a rasteriser, its sums, and what it says of little evidence.

Why devices idled, against a rasteriser and against the breakdown.
"""

import sys
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings

from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.analysis.device.timeline import LATENCY_NS, device_timeline, idle
from lightning_rlprof.analysis.device.work import no_work
from lightning_rlprof.tables.spans import Spans
from tests.builders.device_jobs import jobs
from tests.builders.device_work import UNSEEN, Job, Work, devices, spans_of
from tests.builders.runs import Row
from tests.effort import examples

PARTS = ("compute", "exposed communication", "exposed memcpy", "idle", "unknown")
RUN = [Row("run", "region", 1, 0, 100)]
Key = tuple[int | None, int | None, str]


def breakdown_of(spans: Spans, *, per_rank: bool = True) -> dict[Key, dict[str, int]]:
    """Return what is not zero by rank, device and stage; every row's sum is checked."""
    table = breakdown(spans, per_rank=per_rank)
    names = [column.name for column in table.columns]
    found = {}
    for row in table.rows:
        cells = dict(zip(names, row, strict=True))
        key = (cells.pop("rank", None), cells.pop("device", None), cells.pop("stage"))
        assert cells["wall"] == sum(cells[part] or 0 for part in PARTS)
        found[key] = {name: ns for name, ns in cells.items() if ns}
    return found


def one(job: Job) -> dict[str, dict[str, int]]:
    """Return the rows of a job with one device by stage, without the total."""
    return {
        stage: cells
        for (_, _, stage), cells in breakdown_of(spans_of(job)).items()
        if stage != "total"
    }


def stage(name: str, start: int, end: int) -> Row:
    return Row(name, "stage", 1, start, end)


@settings(max_examples=examples(200), deadline=None)
@given(jobs())
def test_every_nanosecond_is_in_the_column_and_stage_that_a_rasteriser_puts_it(job: Job) -> None:
    spans = spans_of(job)
    expected: dict[Key, Counter[str]] = defaultdict(Counter)
    for (rank, device), own in devices(spans, job).items():
        for _, column, name in own.states():
            keys = ((rank, device, name or "untraced"), (None, None, "total"))
            for key in keys:
                expected[key][column] += 1
                expected[key]["wall"] += column in PARTS

    assert breakdown_of(spans) == {key: +times for key, times in expected.items()}


@settings(max_examples=examples(60), deadline=None)
@given(jobs())
def test_rows_by_stage_are_the_sums_of_the_rows_by_rank(job: Job) -> None:
    spans = spans_of(job)
    expected: dict[Key, Counter[str]] = defaultdict(Counter)
    for (_, _, name), cells in breakdown_of(spans).items():
        expected[None, None, name].update(cells)

    assert breakdown_of(spans, per_rank=False) == expected


def test_work_counts_to_the_stage_that_launched_it_and_idle_to_the_one_of_the_host() -> None:
    rows = [stage("actor_generate", 0, 40), stage("actor_update", 40, 100)]
    work = [
        Work("compute", 10, 50, "actor_generate"),  # runs on while the host is further
        Work("communication", 45, 70, "actor_update"),
        Work("copy", 65, 75, "actor_update"),
    ]

    assert one(Job({0: rows}, work)) == {
        "actor_generate": {"wall": 50, "compute": 40, "idle": 10},
        "actor_update": {
            **{"wall": 50, "exposed communication": 20, "exposed memcpy": 5, "idle": 25},
            **{"overlapped communication": 5, "overlapped memcpy": 5},
        },
    }


def test_of_two_at_once_the_last_started_one_decides_the_stage() -> None:
    work = [Work("compute", 0, 30, "actor_generate"), Work("compute", 10, 20, "actor_update")]

    found = one(Job({0: [Row("run", "region", 1, 0, 30)]}, work))

    assert {name: cells["wall"] for name, cells in found.items()} == {
        "actor_generate": 20,
        "actor_update": 10,
    }


def test_rows_come_by_rank_and_wall_then_untraced_and_the_total_at_last() -> None:
    rows = [stage("actor_generate", 10, 20), stage("actor_update", 30, 60), *RUN]
    work = [Work("compute", 0, 5, rank=rank) for rank in (1, 0)]

    table = breakdown(spans_of(Job({0: rows, 1: RUN}, work)))

    assert list(zip(table.column("rank"), table.column("stage"), strict=True)) == [
        (0, "actor_update"),
        (0, "actor_generate"),
        (0, "untraced"),
        (1, "untraced"),
        (None, "total"),
    ]


def test_time_before_the_first_and_after_the_last_kernel_exists() -> None:
    job = Job({0: RUN}, [Work("compute", 40, 50)])

    assert one(job) == {"untraced": {"wall": 100, "compute": 10, "idle": 90}}


def test_next_to_rlprofs_spans_a_device_is_profiled_from_first_to_last_work() -> None:
    work = [Work("compute", 40, 50), Work("compute", 60, 70)]
    job = Job({0: RUN}, work, ours=True)

    assert one(job) == {"untraced": {"wall": 100, "compute": 20, "idle": 10, "unknown": 70}}


def test_outside_of_captures_and_between_them_nothing_is_known() -> None:
    rows = [Row("step", "step", 1, 0, 100, id=1)]
    for at, (begin, end) in enumerate(((10, 30), (50, 70)), start=2):
        rows.append(Row("rlprof open capture", "region", 1, begin - 1, begin, id=10 * at))
        rows.append(Row("rlprof close capture", "region", 1, end, end + 1, id=10 * at + 1))
    job = Job({0: rows}, [Work("compute", 20, 25), Work("compute", 50, 55)], ours=True)

    assert one(job) == {"untraced": {"wall": 100, "compute": 10, "idle": 30, "unknown": 60}}


def test_between_steps_that_are_not_consecutive_the_device_is_not_profiled() -> None:
    rows = [Row("step", "step", 5, 0, 20, id=1), Row("step", "step", 9, 60, 80, id=2)]
    job = Job({0: rows}, [Work("compute", 5, 10), Work("compute", 65, 70)])

    assert one(job) == {"untraced": {"wall": 80, "compute": 10, "idle": 30, "unknown": 40}}


def test_inside_a_graph_replay_nothing_is_idle() -> None:
    work = [
        Work("compute", 10, 20, graph=7, launch_ns=1),
        Work("compute", 30, 40, graph=7, launch_ns=1),
        Work("compute", 60, 70, graph=7, launch_ns=50),  # the same number in another capture
    ]
    job = Job({0: [Row("run", "region", 1, 0, 70)]}, work)

    assert one(job) == {"untraced": {"wall": 70, "compute": 30, "idle": 30, "unknown": 10}}


def test_a_gap_between_copies_of_a_replay_is_not_idle() -> None:
    kernels = [Work("compute", 10, 20, graph=7, launch_ns=1)]
    copies = [Work("copy", 30, 40, graph=7, launch_ns=1), Work("copy", 50, 60, launch_ns=1)]
    copies += [Work("copy", 70, 80, graph=8), Work("copy", 90, 95, graph=8)]  # launches unknown
    found = one(Job({0: [Row("run", "region", 1, 0, 95)]}, kernels, copies))

    assert (found["untraced"]["idle"], found["untraced"]["unknown"]) == (20, 30)


def test_if_kernels_inside_graphs_are_not_visible_nothing_is_idle() -> None:
    job = Job({0: [Row("run", "region", 1, 0, 30)]}, [Work("compute", 10, 20)], note=UNSEEN)

    assert one(job) == {"untraced": {"wall": 30, "compute": 10, "unknown": 20}}
    assert "so device idle time is unknown" in breakdown(spans_of(job)).note


def test_devices_of_one_rank_are_apart_and_each_has_its_whole_time() -> None:
    work = [
        Work("compute", 0, 10),
        Work("compute", 5, 40, device=1),
        Work("copy", 0, 5, device=None),
    ]

    found = breakdown_of(spans_of(Job({0: [Row("run", "region", 1, 0, 50)]}, work)))

    walls = {(device, name): cells["wall"] for (_, device, name), cells in found.items()}
    assert walls == {(0, "untraced"): 50, (1, "untraced"): 50, (None, "untraced"): 50} | {
        (None, "total"): 150
    }


def test_copies_that_were_not_recorded_are_unknown_rather_than_zero() -> None:
    rows, work = {0: [Row("run", "region", 1, 0, 30)]}, [Work("compute", 10, 20)]

    without, with_none = (breakdown(spans_of(Job(rows, work, copies))) for copies in (None, []))

    assert without.column("exposed memcpy") == without.column("overlapped memcpy") == [None, None]
    assert "Copies were not recorded; their time counts as idle." in without.note
    assert with_none.column("exposed memcpy") == [0, 0]
    assert with_none.note == ""


def test_ranks_without_device_work_are_counted_and_not_idle() -> None:
    job = Job(
        {rank: [Row("run", "region", 1, 0, 30)] for rank in (0, 1)}, [Work("compute", 10, 20)]
    )

    table = breakdown(spans_of(job))

    assert table.column("rank") == [0, None]
    assert "Device work was recorded on 1 of 2 ranks." in table.note


def test_without_device_work_it_abstains() -> None:
    table = breakdown(spans_of(Job({0: [Row("run", "region", 1, 0, 30)]})))

    assert table.abstained == no_work(None)
    assert not table.rows


IDLE_RUN = {0: [Row("run", "region", 1, 0, 10**6)]}


def idle_told(spans: Spans) -> dict[tuple[object, ...], tuple[object, ...]]:
    """Return (total, count, median, longest) by rank, device, kind and stage."""
    return {row[:4]: row[5:] for row in idle(spans).rows}


def kinds(*work: Work, rows: dict[int, list[Row]] = IDLE_RUN) -> dict[str, int]:
    """Return the time of each kind up to the last work, which is followed by unknown idle."""
    table = idle(spans_of(Job(rows, work, [])))
    found: Counter[str] = Counter()
    for kind, ns in zip(table.column("kind"), table.column("total"), strict=True):
        found[str(kind)] += int(ns or 0)
    found["unattributed idle"] -= 10**6 - max(w.end_ns for w in work)
    return +found


@settings(max_examples=examples(200), deadline=None)
@given(jobs())
def test_every_idle_nanosecond_has_the_kind_and_stage_that_a_rasteriser_gives_it(job: Job) -> None:
    spans = spans_of(job)
    expected = {}
    for place, own in devices(spans, job).items():
        parts = defaultdict(list)
        for (_, kind, stage), ns in own.why(latency=4).items():
            parts[kind, stage or "untraced"].append(ns)
        for key, each in parts.items():
            middle = sorted(each)[(len(each) - 1) // 2]
            expected[(*place, *key)] = (sum(each), len(each), middle, max(each))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[device_timeline.__module__], "LATENCY_NS", 4)
        assert idle_told(spans) == expected


@settings(max_examples=examples(60), deadline=None)
@given(jobs())
def test_kinds_add_up_to_the_idle_time_of_the_breakdown_in_each_stage(job: Job) -> None:
    spans = spans_of(job)
    sums: Counter[tuple[object, ...]] = Counter()
    for rank, device, _, stage, share, total, *_ in idle(spans).rows:
        sums[rank, device, stage] += total
        assert 0 < share <= 1
    table = breakdown(spans)
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.rows[:-1]]

    assert sums == {(r["rank"], r["device"], r["stage"]): r["idle"] for r in rows if r["idle"]}


def test_a_launch_after_the_device_ran_empty_is_the_hosts_and_the_latency_with_it() -> None:
    work = [Work("compute", 0, 100), Work("compute", 20_000, 20_100, launch_ns=15_000)]

    assert kinds(*work) == {"host-bound idle": 19_900}


def test_work_that_lay_launched_and_began_soon_is_launch_bound() -> None:
    work = [Work("compute", 0, 100), Work("compute", 100 + LATENCY_NS, 40_000, launch_ns=100)]

    assert kinds(*work) == {"launch latency": LATENCY_NS}


@pytest.mark.parametrize(
    ("kind", "name"), [("communication", "collective wait"), ("compute", "unattributed idle")]
)
def test_work_that_lay_launched_for_long_waits_for_something(kind: str, name: str) -> None:
    work = [Work("compute", 0, 100), Work(kind, 101 + LATENCY_NS, 40_000, launch_ns=50)]

    assert kinds(*work) == {name: LATENCY_NS + 1}


def test_a_late_launch_that_then_waits_is_the_hosts_until_the_launch_alone() -> None:
    work = [Work("compute", 0, 100), Work("communication", 90_000, 90_100, launch_ns=10_000)]

    assert kinds(*work) == {"host-bound idle": 9_900, "collective wait": 80_000}


@pytest.mark.parametrize("launch", [None, 50_001])
def test_a_launch_that_is_not_known_or_comes_after_its_work_is_never_the_hosts(
    launch: int | None,
) -> None:
    work = [Work("compute", 0, 100), Work("compute", 50_000, 50_100, launch_ns=launch)]

    assert kinds(*work) == {"unattributed idle": 49_900}


def test_time_after_the_last_work_is_unknown_and_before_the_first_it_is_the_hosts() -> None:
    work = [Work("compute", 50_000, 50_100, launch_ns=45_000)]

    assert idle_told(spans_of(Job(IDLE_RUN, work))) == {
        (0, 0, "host-bound idle", "untraced"): (50_000, 1, 50_000, 50_000),
        (0, 0, "unattributed idle", "untraced"): (949_900, 1, 949_900, 949_900),
    }


def test_a_device_idles_only_where_none_of_its_streams_runs_and_the_next_to_begin_counts() -> None:
    work = [
        Work("compute", 0, 100),
        Work("compute", 50, 300),  # on another stream
        Work("copy", 400, 500, launch_ns=350),
        Work("compute", 400, 450, launch_ns=200),  # launched first: the host was not late
    ]

    assert kinds(*work) == {"launch latency": 100}


def test_a_gap_counts_in_each_stage_that_the_host_was_in() -> None:
    rows = {
        0: [
            *IDLE_RUN[0],
            *(Row(n, "stage", 1, a, a + 400) for n, a in (("one", 200), ("two", 600))),
        ]
    }
    work = [Work("compute", 0, 100), Work("compute", 900, 10**6, launch_ns=800)]

    assert idle_told(spans_of(Job(rows, work))) == {
        (0, 0, "host-bound idle", "one"): (400, 1, 400, 400),
        (0, 0, "host-bound idle", "two"): (300, 1, 300, 300),
        (0, 0, "host-bound idle", "untraced"): (100, 1, 100, 100),
    }


def test_the_first_kernel_of_a_replay_is_launched_by_the_call_that_replays() -> None:
    work = [
        Work("compute", 0, 100),
        Work("compute", 900, 1_000, launch_ns=800, graph=3),
        Work("compute", 1_100, 1_200, launch_ns=800, graph=3),  # within a replay: not idle
    ]

    assert kinds(*work) == {"host-bound idle": 800}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (Job(IDLE_RUN), no_work(None)),
        (
            Job(IDLE_RUN, [Work("compute", 0, 9)], [], note=UNSEEN),
            "No device was idle while it was profiled.",
        ),
        (
            Job(IDLE_RUN, [Work("compute", 0, 10**6)], []),
            "No device was idle while it was profiled.",
        ),
    ],
)
def test_without_idle_time_it_abstains(job: Job, reason: str) -> None:
    table = idle(spans_of(job))

    assert (table.abstained or "").startswith(reason)
    assert not table.rows

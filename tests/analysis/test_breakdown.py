"""The breakdown against a rasteriser, its sums, and what it says of little evidence."""

from collections import Counter, defaultdict

from hypothesis import given, settings

from lightning_rlprof.analysis.breakdown import breakdown
from lightning_rlprof.spans import Spans
from tests.analysis.device_jobs import jobs
from tests.analysis.device_work import UNSEEN, Job, Work, devices, spans_of
from tests.runs import Row

PARTS = ("compute", "exposed communication", "exposed copy", "idle", "unknown")
RUN = [Row("run", "region", 1, 0, 100)]
Key = tuple[int | None, int | None, str]


def told(spans: Spans, *, per_rank: bool = True) -> dict[Key, dict[str, int]]:
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
        stage: cells for (_, _, stage), cells in told(spans_of(job)).items() if stage != "total"
    }


def stage(name: str, start: int, end: int) -> Row:
    return Row(name, "stage", 1, start, end)


@settings(max_examples=200, deadline=None)
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

    assert told(spans) == {key: +times for key, times in expected.items()}


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_rows_by_stage_are_the_sums_of_the_rows_by_rank(job: Job) -> None:
    spans = spans_of(job)
    expected: dict[Key, Counter[str]] = defaultdict(Counter)
    for (_, _, name), cells in told(spans).items():
        expected[None, None, name].update(cells)

    assert told(spans, per_rank=False) == expected


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
            **{"wall": 50, "exposed communication": 20, "exposed copy": 5, "idle": 25},
            **{"overlapped communication": 5, "overlapped copy": 5},
        },
    }


def test_of_two_at_once_the_one_that_began_last_tells_the_stage() -> None:
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


def test_beside_spans_of_our_own_the_device_is_known_from_first_to_last_work_alone() -> None:
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


def test_between_steps_that_do_not_follow_one_another_nobody_looked() -> None:
    rows = [Row("step", "step", 5, 0, 20, id=1), Row("step", "step", 9, 60, 80, id=2)]
    job = Job({0: rows}, [Work("compute", 5, 10), Work("compute", 65, 70)])

    assert one(job) == {"untraced": {"wall": 80, "compute": 10, "idle": 30, "unknown": 40}}


def test_inside_of_a_replay_of_a_graph_nothing_is_said_to_idle() -> None:
    work = [
        Work("compute", 10, 20, graph=7, launch_ns=1),
        Work("compute", 30, 40, graph=7, launch_ns=1),
        Work("compute", 60, 70, graph=7, launch_ns=50),  # the same number in another capture
    ]
    job = Job({0: [Row("run", "region", 1, 0, 70)]}, work)

    assert one(job) == {"untraced": {"wall": 70, "compute": 30, "idle": 30, "unknown": 10}}


def test_where_replays_hide_their_kernels_nothing_is_said_to_idle() -> None:
    job = Job({0: [Row("run", "region", 1, 0, 30)]}, [Work("compute", 10, 20)], note=UNSEEN)

    assert one(job) == {"untraced": {"wall": 30, "compute": 10, "unknown": 20}}
    assert "whether the device idled is not known" in breakdown(spans_of(job)).note


def test_devices_of_one_rank_are_apart_and_each_has_its_whole_time() -> None:
    work = [
        Work("compute", 0, 10),
        Work("compute", 5, 40, device=1),
        Work("copy", 0, 5, device=None),
    ]

    found = told(spans_of(Job({0: [Row("run", "region", 1, 0, 50)]}, work)))

    walls = {(device, name): cells["wall"] for (_, device, name), cells in found.items()}
    assert walls == {(0, "untraced"): 50, (1, "untraced"): 50, (None, "untraced"): 50} | {
        (None, "total"): 150
    }


def test_copies_that_nobody_recorded_are_not_known_rather_than_none() -> None:
    rows, work = {0: [Row("run", "region", 1, 0, 30)]}, [Work("compute", 10, 20)]

    without, with_none = (breakdown(spans_of(Job(rows, work, copies))) for copies in (None, []))

    assert without.column("exposed copy") == without.column("overlapped copy") == [None, None]
    assert "Copies were not recorded: they are among idle." in without.note
    assert with_none.column("exposed copy") == [0, 0]
    assert with_none.note == ""


def test_ranks_without_device_work_are_counted_and_not_said_to_idle() -> None:
    job = Job(
        {rank: [Row("run", "region", 1, 0, 30)] for rank in (0, 1)}, [Work("compute", 10, 20)]
    )

    table = breakdown(spans_of(job))

    assert table.column("rank") == [0, None]
    assert "Of 1 ranks no device work was recorded" in table.note


def test_without_device_work_it_abstains() -> None:
    table = breakdown(spans_of(Job({0: [Row("run", "region", 1, 0, 30)]})))

    assert table.abstained == "no kernels and no copies of a device were recorded"
    assert not table.rows

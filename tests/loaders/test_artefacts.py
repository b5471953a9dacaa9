"""Run directories with what device tools left in them."""

import gzip
import json
from pathlib import Path

import pytest

from lightning_rlprof.loaders.artefacts import device_files
from lightning_rlprof.loaders.load import load
from lightning_rlprof.tracefile import rank_directory
from tests.loaders.nsys_export import EPOCH, NsysExport
from tests.runs import Row, header, write_rank

START = header().unix_ns  # of clock 0 of every rank


def run_of(path: Path, ranks: int = 1) -> Path:
    """Write a run: step 4 from 0 to 1000, with a stage from 100 to 500, on each rank."""
    for rank in range(ranks):
        rows = [
            Row("actor_update", "stage", 4, 100, 500),
            Row("step", "step", 4, 0, 1000),
            Row("elsewhere", "stage", 9, 0, 1000, thread=77),
        ]
        write_rank(path, header(rank, ranks), rows)
    return path


def report(run: Path, rank: int, name: str = "step-000004/a.sqlite", late: int = 0) -> NsysExport:
    """Return an export in a rank's folder whose zero is ``late`` after the run's."""
    return NsysExport(rank_directory(run, rank) / name, epoch=START + late)


def test_kernels_of_all_ranks_come_onto_the_axis_of_the_run(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    for rank in (0, 1):
        made = report(run, rank, late=2000 * (rank + 1))
        made.own("critic_update", "stage", 0, 50, step=7)
        made.kernel(f"of {rank}", 60, 70 + rank, 1)
        made.call(10, 1)
        made.write()

    table = load(run).table("kernels")

    assert [row[:9] for row in table.rows] == [
        (0, 0, 7, "of 0", 2060, 10, "critic_update", 7, "critic_update"),
        (1, 0, 7, "of 1", 4060, 11, "critic_update", 7, "critic_update"),
    ]
    assert table.note == ""


def test_without_ranges_of_ours_the_run_tells_stage_and_step_at_the_launch(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    made = report(run, 0, late=50)
    for number, launch in enumerate((60, 500, 2000)):
        made.kernel(f"{number}", 3000 + number, 3100, number)
        made.call(launch, number)
    made.kernel("unlaunched", 3010, 3020, 9)
    made.write()

    table = load(run).table("kernels")

    assert table.column("stage") == ["actor_update", None, None, None]
    assert table.column("step") == [4, 4, None, None]
    assert table.note == (
        "a.sqlite: 1 launches were not recorded: their stage, step and range are not known; "
        "a.sqlite: 3 launches count to the run's spans"
    )


def test_a_report_of_all_ranks_keeps_the_ranks_that_it_says(tmp_path: Path) -> None:
    run = run_of(tmp_path, 3)
    made = report(run, 0)
    for pid, rank in ((100, None), (101, 1), (102, 2)):
        if rank is not None:
            made.said("rlprof.rank", rank, pid=pid)
        made.kernel(f"{pid}", 10 * pid, 10 * pid + 5, 1, pid=pid)
    made.write()

    table = load(run).table("kernels")

    assert sorted(zip(table.column("rank"), table.column("kernel"), strict=True)) == [
        (0, "100"),
        (1, "101"),
        (2, "102"),
    ]


def test_reports_beside_the_ranks_need_a_rank_in_their_name(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    for name in ("actor_host_rank1_step4.sqlite", "other.sqlite"):
        made = NsysExport(run / name, epoch=START)
        made.kernel(name, 1, 2, 1)
        made.write()

    table = load(run).table("kernels")

    assert table.column("rank") == [1]
    assert f"{run / 'other.sqlite'}: is left out: nothing says which rank it is of" in table.note


def test_chrome_traces_are_joined_with_the_others(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    made = report(run, 0)
    made.kernel("from nsys", 10, 20, 1)
    made.write()
    folder = rank_directory(run, 1) / "step-000004"
    folder.mkdir(parents=True)
    event = {"ph": "X", "cat": "kernel", "name": "from torch", "pid": 0, "tid": 7}
    args = {"device": 0, "stream": 7, "correlation": 5}
    events = [{**event, "ts": 1.0, "dur": 2.0, "args": args}]
    trace = {"schemaVersion": 1, "baseTimeNanoseconds": START, "traceEvents": events}
    (folder / "x.trace.json.gz").write_bytes(gzip.compress(json.dumps(trace).encode()))

    table = load(run).table("kernels")

    rows = zip(*(table.column(n) for n in ("rank", "kernel", "start", "duration")), strict=True)
    assert list(rows) == [(0, "from nsys", 10, 10), (1, "from torch", 1000, 2000)]


def test_files_that_cannot_be_read_are_named_and_the_others_read(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    rank_directory(run, 0).mkdir()
    broken = rank_directory(run, 0) / "broken.sqlite"
    broken.write_bytes(b"no")
    clockless = NsysExport(rank_directory(run, 0) / "clockless.sqlite", epoch=None)
    clockless.kernel("k", 1, 2, 1)
    clockless.write()
    empty = report(run, 1, "empty.sqlite")
    empty.own("actor_update", "stage", 0, 50, step=7)
    empty.write()

    table = load(run).table("kernels")

    assert len(table.rows) == 0
    assert table.note.split("; ") == [
        f"{broken}: is no SQLite file, so no export of Nsight Systems",
        f"{clockless.path}: is left out: when it was recorded is not known",
        "empty.sqlite: holds no kernels",
    ]


def test_when_no_file_can_be_read_the_table_abstains(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    rank_directory(run, 0).mkdir()
    (rank_directory(run, 0) / "broken.sqlite").write_bytes(b"no")

    table = load(run).table("kernels")

    assert table.rows == ()
    assert table.abstained is not None
    assert "is no SQLite file" in table.abstained


def test_files_are_read_when_the_table_is_asked_for(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    made = report(run, 0)
    made.kernel("k", 1, 2, 1)

    rank_directory(run, 0).mkdir()
    made.path.parent.mkdir()
    made.path.touch()
    spans = load(run)
    made.path.unlink()
    made.write()

    assert spans.table("kernels").column("kernel") == ["k"]


def test_a_run_without_artefacts_offers_no_table(tmp_path: Path) -> None:
    assert dict(load(run_of(tmp_path)).tables) == {}


def test_one_ranks_file_takes_its_own_artefacts_only(tmp_path: Path) -> None:
    run = run_of(tmp_path, 2)
    for rank in (0, 1):
        made = report(run, rank)
        made.kernel(f"of {rank}", 1, 2, 1)
        made.write()

    assert load(run / "rank-00001.jsonl").table("kernels").column("kernel") == ["of 1"]


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["a.sqlite", "a.nsys-rep"], ["a.sqlite"]),
        (["a.trace.json.gz", "a.trace.json"], ["a.trace.json"]),
        (["a.sqlite", "a.trace.json.gz"], ["a.sqlite", "a.trace.json.gz"]),
        (["b.nsys-rep", "a.nsys-rep", "c.json", "d.sqlite-wal"], ["a.nsys-rep", "b.nsys-rep"]),
    ],
)
def test_of_one_thing_in_several_forms_one_is_read(
    tmp_path: Path, names: list[str], kept: list[str]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in device_files(tmp_path)] == kept


def test_links_out_of_the_run_are_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    folder.mkdir()
    outside = NsysExport(tmp_path / "outside" / "x.sqlite", epoch=EPOCH).write()
    (folder / "link.sqlite").symlink_to(outside)
    (folder / "folder").symlink_to(outside.parent)

    assert device_files(folder, deep=True) == []

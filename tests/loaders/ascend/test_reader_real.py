"""Real captures of a 910B: spans, kernels, axis; and what of a run verl's authors published."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from lightning_rlprof.loaders.ascend.reader import read_ascend
from tests.builders.ascend_recorded import (
    ABSENT,
    CAPTURES,
    DATA,
    DATABASE,
    OUTPUT,
    TEXT,
    ask,
    column,
    copied,
    ns,
    sheet,
)

TABLES = {
    **{"collectives": 4, "communication": 4, "kernels": 191, "memcpy": 24, "memory": 1004},
    "shapes": 9,
    **{"step_trace": 1, "sync": 13, "links": 8},
}

pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=ABSENT)


def called(folder: Path) -> int:
    """Return how many calls the files hold, but for the one that torch shows of the step."""
    if folder == DATABASE:
        sizes = (ask(f"SELECT COUNT(*) FROM {table}") for table in ("PYTORCH_API", "CANN_API"))
        return sum(size for ((size,),) in sizes) - 1
    events = json.loads((folder / OUTPUT / "trace_view.json").read_text())
    names = {each["pid"]: each["args"] for each in events if each["name"] == "process_name"}
    own = [pid for pid, args in names.items() if args["name"] in ("Python", "CANN")]
    return sum(each["ph"] == "X" and each["pid"] in own for each in events) - 1


@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_every_table_is_there_and_every_row_is_counted(folder: Path) -> None:
    run = read_ascend(folder)

    counts = {name: len(run.table(name).rows) for name in run.tables}
    assert counts == {**TABLES, "calls": called(folder)}
    assert run.warnings == ()
    assert [(span.name, span.kind, span.step) for span in run] == [("ProfilerStep#50", "step", 50)]


@pytest.mark.parametrize("folder", TEXT, ids=lambda folder: folder.name)
def test_kernels_are_the_rows_of_kernel_details_to_the_nanosecond(folder: Path) -> None:
    run = read_ascend(folder)
    rows = sheet(folder, "kernel_details.csv")

    table = run.table("kernels")

    expected = sorted(
        (ns(row["Start Time(us)"]), ns(row["Duration(us)"]), row["Name"]) for row in rows
    )
    starts = [start + run.unix_ns for start in table.column("start")]
    found = zip(starts, table.column("duration"), table.column("kernel"), strict=True)
    assert sorted(found) == expected
    streams = Counter(row["Stream ID"] for row in rows)
    assert Counter(map(str, table.column("stream"))) == {
        "None" if stream == "N/A" else stream: count for stream, count in streams.items()
    }
    assert set(table.column("step")) == {50}
    assert set(table.column("device")) == {TEXT.index(folder)}


def test_kernels_of_the_database_are_its_tasks_and_collectives() -> None:
    run = read_ascend(DATABASE)
    name = "(SELECT value FROM STRING_IDS WHERE id = {})"
    tasks = ask(
        f"SELECT startNs, endNs - startNs, {name.format('name')} FROM TASK NATURAL JOIN "
        "(SELECT globalTaskId, name FROM COMPUTE_TASK_INFO) UNION ALL "
        f"SELECT startNs, endNs - startNs, {name.format('opName')} FROM COMMUNICATION_OP",
    )

    table = run.table("kernels")

    starts = [start + run.unix_ns for start in table.column("start")]
    found = zip(starts, table.column("duration"), table.column("kernel"), strict=True)
    assert sorted(found) == sorted(tasks)
    assert set(table.column("step")) == {50}


@pytest.mark.parametrize("folder", CAPTURES, ids=lambda folder: folder.name)
def test_every_kernel_has_a_launch_before_it_and_inside_the_step(folder: Path) -> None:
    run = read_ascend(folder)
    kernels = run.table("kernels")
    launch = kernels.numbers("launch")

    assert (launch < kernels.numbers("start")).all()
    assert (launch >= run.start_ns[0]).all()
    assert (launch < run.end_ns[0]).all()
    assert set(kernels.column("step")) == {50}
    assert "119 kernels were launched by threads without marks" in run.table("kernels").note


def test_the_trace_alone_and_the_database_alone_are_read_by_name() -> None:
    trace = read_ascend(TEXT[0] / OUTPUT / "trace_view.json")
    database = read_ascend(DATABASE / OUTPUT / "ascend_pytorch_profiler_0.db")

    assert trace.headers[0].run_id == "trace_view.json"
    assert database.headers[0].device == "Ascend910B"
    assert [len(run.table("kernels").rows) for run in (trace, database)] == [191, 191]
    assert database.headers[0].host == "ubuntu"


def test_ranks_of_several_captures_share_an_axis() -> None:
    run = read_ascend(DATA)

    assert run.ranks == (0, 1)
    starts = {span.rank: span.start_ns + run.unix_ns for span in run if span.step == 50}
    assert starts[1] == 1_736_408_883_688_868_080
    assert [problem.text for problem in run.warnings] == [
        "step 50 is in captures far apart, and added up. Are they of one run?",
    ]


def test_reading_changes_nothing_and_writes_nothing_beside() -> None:
    def state() -> dict[Path, str]:
        return {
            path: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(DATABASE.rglob("*"))
            if path.is_file()
        }

    before = state()
    run = read_ascend(DATABASE)
    for name in run.tables:
        run.table(name)
    assert state() == before


def test_what_verl_recorded_has_its_versions() -> None:
    run = read_ascend(DATA / "rl_insight")

    assert run.headers[0].versions == {"torch_npu": "2.7.1", "cann": "8.3.RC1"}
    assert [len(run.table(name).rows) for name in run.tables] == [0] * len(run.tables)


def test_captures_of_several_runs_in_one_folder_are_a_doubt() -> None:
    texts = {(problem.rank, problem.text) for problem in read_ascend(DATA).warnings}
    assert (0, "step 50 is in captures far apart, and added up. Are they of one run?") in texts
    alone = read_ascend(DATA / "text_level1_rank0").warnings
    assert not [problem for problem in alone if "apart" in problem.text]


def test_steps_of_our_own_window_are_those_that_torch_npu_counted(tmp_path: Path) -> None:
    window = tmp_path / "rank-00000" / "step-000050"
    folder = copied(TEXT[0], window / "host_1_20250109074803340_ascend_pt")
    about = {"rlprof_window": "step-000050", "rlprof_rank": "0"}
    (folder / "profiler_metadata.json").write_text(json.dumps(about))

    run = read_ascend(tmp_path)

    assert set(column(run, "kernels", "step")) == {50}
    assert column(run, "step_trace", "step") == [50]
    assert set(run.step.tolist()) == {50}

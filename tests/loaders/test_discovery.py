"""Directories with one trace per rank, which `load` reads as one run."""

import gzip
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.discovery import items
from lightning_rlprof.loaders.load import load
from lightning_rlprof.loaders.rank_names import by_cause
from lightning_rlprof.report import chrome_trace
from lightning_rlprof.run import load as load_as_one
from lightning_rlprof.store.open_run import open_run, open_store
from lightning_rlprof.tables.spans import RunWarning
from tests.builders.ascend_output import capture_folder
from tests.builders.chrome import AFTER, BASE, ChromeTrace
from tests.builders.ingest_traces import write_trace, write_traces
from tests.builders.nsys_export import EPOCH, NsysExport
from tests.builders.runs import grpo_run
from tests.places import SHARED_DATA

DATA = SHARED_DATA


def names(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in items(folder)]


def test_a_file_and_a_run_stand_for_themselves(tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=1)
    trace = write_trace(tmp_path / "any.json")
    assert items(tmp_path / "run") == [tmp_path / "run"]
    assert items(trace) == [trace]


def test_below_a_folder_are_its_runs_and_traces_each_in_one_form(tmp_path: Path) -> None:
    grpo_run(tmp_path / "b" / "run", steps=1)
    write_traces(tmp_path / "a", 2)
    (tmp_path / "a" / "rank0.pt.trace.json.gz").write_bytes(b"")
    (tmp_path / "a" / "report.nsys-rep").write_bytes(b"")
    (tmp_path / "a" / "report.sqlite").write_bytes(b"")
    write_trace(tmp_path / "vllm.json")
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert names(tmp_path) == [
        "vllm.json",
        "a/rank0.pt.trace.json",
        "a/rank1.pt.trace.json",
        "a/report.sqlite",
        "b/run",
    ]


def test_a_broken_trace_counts_by_its_name_or_by_those_beside_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "rank0.json")
    (tmp_path / "rank17.json").write_text("")
    (tmp_path / "other.json").write_text("")
    (tmp_path / "x.pt.trace.json.gz").write_text("")
    assert names(tmp_path) == ["rank0.json", "rank17.json", "x.pt.trace.json.gz"]


def test_a_broken_rank_is_found_whatever_its_host_and_its_form(tmp_path: Path) -> None:
    write_trace(tmp_path / "gpu-a_rank0.json")
    for name in ("gpu-b_rank1.json.gz", "gpu-c_rank2.json"):
        (tmp_path / name).write_bytes(b"no trace")
    with gzip.open(tmp_path / "tokenizer.json.gz", "wt") as file:
        file.write('{"model": "bpe"}')
    (tmp_path / "config_rank0.json").write_text("{}")
    (tmp_path / "config.json").write_text("")
    assert names(tmp_path) == [
        "gpu-a_rank0.json",
        "gpu-b_rank1.json.gz",
        "gpu-c_rank2.json",
    ]


def test_what_looks_broken_is_left_where_no_trace_is_beside_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "server" / "vllm.json")
    (tmp_path / "server" / "config_rank3.json").write_text("{}")
    assert names(tmp_path) == ["server/vllm.json"]
    shutil.rmtree(tmp_path / "server")
    (tmp_path / "gpu-b_rank1.json.gz").write_bytes(b"no trace")
    with pytest.raises(TraceError, match="no run or trace found below it"):
        items(tmp_path)


def test_nothing_to_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no run or trace found below it"):
        items(tmp_path)
    with pytest.raises(TraceError, match="no such file"):
        items(tmp_path / "no")


def test_caches_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / ".rlprof-cache").mkdir()
    write_trace(tmp_path / ".rlprof-cache" / "x.pt.trace.json")
    write_trace(tmp_path / "x.pt.trace.json")
    assert names(tmp_path) == ["x.pt.trace.json"]


def test_links_in_a_circle_and_what_we_exported_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "a.json").symlink_to(tmp_path / "b.json")
    (tmp_path / "b.json").symlink_to(tmp_path / "a.json")
    trace = write_trace(tmp_path / "rank0.json")
    chrome_trace.write_trace(load(trace), tmp_path / "rank0-trace.json.gz")
    assert names(tmp_path) == ["rank0.json"]
    assert load(tmp_path).path == trace


def test_captures_hide_nothing_that_lies_beside_or_above_them(tmp_path: Path) -> None:
    for run in (tmp_path / "data" / "run-1", tmp_path / "data" / "run-2"):
        grpo_run(run, steps=1)
        capture_folder(run / "rank-00000" / "step-000003-actor_update")
    assert names(tmp_path) == ["data/run-1", "data/run-2"]
    capture_folder(tmp_path / "a" / "step-1" / "actor")
    capture_folder(tmp_path / "a" / "step-2" / "actor")
    write_trace(tmp_path / "b" / "rank0.json")
    assert names(tmp_path) == ["a", "b/rank0.json", "data/run-1", "data/run-2"]


def test_captures_alone_are_one_trace_however_deep_they_lie(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    capture = capture_folder(deep).parent
    assert names(tmp_path) == ["."]
    assert items(capture) == [capture]
    capture_folder(deep.parent / "x" / "y")
    assert names(tmp_path) == ["."]


def test_the_files_of_a_capture_are_one_trace_under_any_name_of_their_folder(
    tmp_path: Path,
) -> None:
    write_trace(tmp_path / "out" / "trace_view.json")
    (tmp_path / "out" / "ascend_pytorch_profiler_0.db").touch()
    write_trace(tmp_path / "rank0.json")
    assert names(tmp_path) == ["rank0.json", "out"]


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces in shared/data are not here")
def test_every_real_trace_is_found() -> None:
    found = names(DATA)
    assert (found[0], len(found)) == ("ascend", 20)
    assert names(DATA / "ascend") == ["."]


def test_a_link_to_a_trace_that_is_gone_is_not_overlooked(tmp_path: Path) -> None:
    (tmp_path / "rank0.pt.trace.json").symlink_to(tmp_path / "gone")
    write_trace(tmp_path / "rank1.pt.trace.json")
    assert names(tmp_path) == ["rank0.pt.trace.json", "rank1.pt.trace.json"]


def test_what_must_not_be_looked_at_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    write_trace(tmp_path / "a" / "rank0.pt.trace.json")
    write_trace(tmp_path / "closed" / "rank1.json")
    write_trace(tmp_path / "listed" / "rank2.pt.trace.json")
    (tmp_path / "closed").chmod(0)
    (tmp_path / "listed").chmod(0o444)
    paths = [str(tmp_path), str(tmp_path / "closed" / "rank1.json")]
    code = "import sys; from lightning_rlprof.store.ingest import ingest\n"
    code += "for row in ingest(sys.argv[1:], jobs=1).rows: print(*row[:4], sep='|')"
    command = [*_as_a_user(), sys.executable, "-c", code, *paths]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    a, closed, listed = (f"{tmp_path}/{name}" for name in ("a", "closed", "listed"))
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [
            f"{a}/rank0.pt.trace.json|0|cached|None",
            f"{closed}|None|failed|{closed}: cannot be read (Permission denied)",
            f"{listed}/rank2.pt.trace.json|2|failed|"
            f"{listed}/rank2.pt.trace.json: cannot be read (Permission denied)",
            f"{paths[1]}|1|failed|{paths[1]}: cannot be read (Permission denied)",
        ],
    )


def _as_a_user() -> list[str]:
    """Return what to put before a command so that permissions hold for it, which root ignores."""
    if os.geteuid():
        return []
    if shutil.which("setpriv") is None:
        pytest.skip("permissions do not hold for root, and there is no setpriv")
    less = "-dac_override,-dac_read_search"
    return ["setpriv", f"--bounding-set={less}", f"--inh-caps={less}"]


SEVERAL_DATA = SHARED_DATA / "kineto" / "two_ranks"


def chrome(path: Path, rank: int | None = None, late: int = 0, world: int = 0) -> Path:
    """Write a trace with a stage of 10 ns and a kernel; ``rank`` stands in its text."""
    job = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world}}
    head = {"schemaVersion": 1, "host_name": "node-a", **job}
    made = ChromeTrace(head, {**AFTER, "baseTimeNanoseconds": BASE + late})
    made.mark("actor_update", 0, 100)
    made.launched(1, 20)
    return made.write(path)


def export(path: Path, late: int = 0, rank: int | None = None) -> Path:
    made = NsysExport(path, epoch=EPOCH + late)
    made.own("actor_update", "stage", 0, 100, step=1)
    if rank is not None:
        made.said("rlprof.rank", rank)
    made.kernel("gemm", 30, 40, 1)
    made.call(20, 1)
    return made.write()


def test_chrome_traces_are_joined_by_what_is_in_them(tmp_path: Path) -> None:
    for rank, name in enumerate(("z.json", "a.json")):
        chrome(tmp_path / name, rank, late=1000 * rank, world=2)
    calls: list[tuple[int, int]] = []

    run = load(tmp_path, progress=lambda done, total: calls.append((done, total)))

    assert [(span.rank, span.start_ns) for span in run] == [(0, 0), (1, 1000)]
    assert [row[:6] for row in run.table("kernels").rows] == [
        (0, 0, 7, "gemm", 30, 10),
        (1, 0, 7, "gemm", 1030, 10),
    ]
    assert (run.warnings, run.path, calls) == ((), tmp_path, [(1, 2), (2, 2)])


def test_names_tell_the_ranks_of_traces_that_do_not(tmp_path: Path) -> None:
    for name in ("rank-0.json", "rank_1.json", "x_rank2_y.json"):
        chrome(tmp_path / name)

    assert load(tmp_path).ranks == (0, 1, 2)


def test_exports_are_joined_by_name_or_by_their_marks(tmp_path: Path) -> None:
    export(tmp_path / "actor_node_rank3_step1.sqlite", late=50)
    export(tmp_path / "other.sqlite", rank=1)

    run = load(tmp_path)

    assert [(span.rank, span.start_ns) for span in run] == [(1, 0), (3, 50)]
    assert run.table("kernels").column("start") == [30, 80]
    text = "of 4 ranks, these have no trace: 0, 2"
    assert run.warnings == (RunWarning(None, text, "ranks-missing"),)


@pytest.mark.parametrize("damage", [b"", b"hello", b"\x1f\x8b\x08\x00"])
def test_a_trace_that_cannot_be_read_is_a_problem_of_its_rank(
    tmp_path: Path, damage: bytes
) -> None:
    for rank in (0, 2):
        chrome(tmp_path / f"rank-{rank}.json", rank, world=3)
    (tmp_path / "rank-1.json").write_bytes(damage)

    run = load(tmp_path)

    assert run.ranks == (0, 2)
    assert [problem.rank for problem in run.warnings] == [1]
    why = "not a Chrome trace" if damage else "the file is empty"
    assert f"rank-1.json: {why}" in run.warnings[0].text


def test_a_damaged_export_costs_its_own_rank_alone(tmp_path: Path) -> None:
    for rank in (0, 1):
        export(tmp_path / f"x_rank{rank}_y.sqlite")
    (tmp_path / "x_rank2_y.sqlite").write_bytes(b"SQLite format 3\0 and no more")

    run = load(tmp_path)

    assert run.ranks == (0, 1)
    assert [(problem.rank, "cannot be read as SQLite" in problem.text) for problem in run.warnings]


def test_where_none_can_be_read_the_first_says_why(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"x_rank{rank}_y.sqlite").write_bytes(b"hello")

    with pytest.raises(TraceError, match=r"x_rank0_y\.sqlite: not an SQLite export"):
        load(tmp_path)


def test_a_trace_cut_off_is_read_up_to_its_cut_beside_the_others(tmp_path: Path) -> None:
    whole = chrome(tmp_path / "rank-0.json", 0, world=2).read_bytes()
    chrome(tmp_path / "rank-1.json", 1, world=2)
    cut = gzip.compress(whole.replace(b'"rank": 0', b'"rank": 1'))[:-40]
    (tmp_path / "rank-1.json").unlink()
    (tmp_path / "rank-1.json.gz").write_bytes(cut)

    run = load(tmp_path)

    assert run.statuses == {0: "finished", 1: None}
    assert {problem.rank for problem in run.warnings} == {1}


def test_other_json_beside_the_traces_is_no_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        chrome(tmp_path / f"rank-{rank}.json", rank, world=2)
        (tmp_path / f"profiler_rank{rank}.json").write_text("{}")
    (tmp_path / "settings.json").write_text("{}")

    assert load(tmp_path).warnings == ()


@pytest.mark.parametrize(
    "names",
    [("a.json", "rank-1.json"), ("rank-1.json", "rank_1.json"), ("a.json", "b.json")],
    ids=["one is not told", "one rank", "nothing is told"],
)
def test_where_ranks_are_not_known_to_differ_one_has_to_be_chosen(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    for name in names:
        chrome(tmp_path / name)

    with pytest.raises(TraceError, match=f"contains 2 traces, pass one of them: {names[0]}"):
        load(tmp_path)


def test_traces_of_two_tools_are_not_mixed(tmp_path: Path) -> None:
    chrome(tmp_path / "rank-0.trace.json", 0, world=2)
    export(tmp_path / "x_rank1_y.sqlite")

    with pytest.raises(TraceError, match="pass one of them"):
        load(tmp_path)


def test_each_role_of_verl_has_ranks_of_its_own(tmp_path: Path) -> None:
    for role, ranks in (("actor", 2), ("critic", 1)):
        for rank in range(ranks):
            name = f"{role}_step3_rank{rank}-of-{ranks}_pid{rank}_20261101120000123.json"
            chrome(tmp_path / name, rank, world=ranks)

    run = load(tmp_path)

    assert [header.role for header in run.headers.values()] == ["actor", "actor", "critic"]
    assert (run.ranks, run.warnings) == ((0, 1, 2), ())
    assert {*run.step.tolist()} == {3}


def test_an_older_trace_of_the_same_rank_is_left_out_and_said(tmp_path: Path) -> None:
    chrome(tmp_path / "rank-0.json", 0, world=2)
    chrome(tmp_path / "rank-1.json", 1, late=50, world=2)
    chrome(tmp_path / "rank-1-before.json", 1, world=2)

    run = load(tmp_path)

    assert [(span.rank, span.start_ns) for span in run] == [(0, 0), (1, 50)]
    assert [problem.rank for problem in run.warnings] == [1]
    assert "rank-1-before.json is left out" in run.warnings[0].text


def cycle(path: Path, number: int, rank: int | None = None, *, pid: int = 4000) -> Path:
    """Write one cycle of a profiler with a schedule: two steps, each with a kernel."""
    job = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": 2}}
    made = ChromeTrace({"schemaVersion": 1, **job})
    for step in (5 * number + 1, 5 * number + 2):
        made.mark(f"ProfilerStep#{step}", 1_000 * step, 1_000 * step + 900, pid=pid)
        made.call(step, 1_000 * step + 10, pid=pid)
        made.kernel(step, 1_000 * step + 20, 1_000 * step + 120)
    return made.write(path)


def test_traces_without_a_time_say_so_once_with_their_ranks(tmp_path: Path) -> None:
    for rank in range(8):
        path = chrome(tmp_path / f"rank-{rank}.json", rank, world=8)
        path.write_text(path.read_text().replace("baseTimeNanoseconds", "x"))

    found = [each for each in load(tmp_path).warnings if each.code == "time-unknown"]

    assert [each.rank for each in found] == [*range(8)]
    assert [each.who for each in by_cause((each.rank, each.text) for each in found)] == [
        "ranks 0-7"
    ]


@pytest.mark.parametrize("ranks", [(None,), (0,), (0, 1)])
def test_cycles_of_one_process_are_one_rank_in_the_order_of_time(
    tmp_path: Path, ranks: tuple[int | None, ...]
) -> None:
    for rank in ranks:
        for number in (2, 0, 1):
            worker, time = f"node-{rank}_4000", 1719853884123456789 - number
            cycle(tmp_path / f"{worker}.{time}.pt.trace.json", number, rank)

    runs = [load(tmp_path), open_run(tmp_path, cache=True)]
    if len(ranks) == 1:
        runs.append(load_as_one(items(tmp_path)))
    for run in runs:
        assert run.ranks == tuple(range(len(ranks)))
        for rank in run.ranks:
            own = [span for span in run if span.rank == rank]
            assert [span.step for span in own] == [1, 2, 6, 7, 11, 12]
            assert len({span.id for span in own}) == 6
        kernels = run.table("kernels")
        assert kernels.column("duration") == [100] * 6 * len(ranks)
        assert kernels.column("step") == [1, 2, 6, 7, 11, 12] * len(ranks)
        codes = [note.facts for note in run.notes if note.code == "cycles-joined"]
        assert codes == [{"traces": 3}] * len(ranks)
    store = open_store(tmp_path)
    assert store.sql("select count(*) from kernels").rows[0] == (6 * len(ranks),)


@pytest.mark.parametrize("why", ["another process", "the same step", "the same time"])
def test_traces_that_are_no_cycles_are_not_joined(tmp_path: Path, why: str) -> None:
    cycle(tmp_path / "a.json", 0)
    other = cycle(tmp_path / "b.json", 1, pid=7 if why == "another process" else 4000)
    text = other.read_text()
    if why == "the same step":
        other.write_text(text.replace("#6", "#1"))
    if why == "the same time":
        other.write_text((tmp_path / "a.json").read_text().replace("ProfilerStep", "x"))

    with pytest.raises(TraceError, match=r"pass one of them: a\.json, b\.json\. .*--as-one"):
        load(tmp_path)


@pytest.mark.skipif(not SEVERAL_DATA.is_dir(), reason="the real traces in shared/data are not here")
def test_two_real_ranks_are_what_they_are_alone() -> None:
    run = load(SEVERAL_DATA)

    alone = [load(SEVERAL_DATA / f"rank-{rank}.json.gz") for rank in (0, 1)]
    assert [span.name for span in run] == [span.name for part in alone for span in part]
    assert len(run.table("kernels").rows) == 1154 + 1104
    for part in alone:
        own = run.rows(rank=part.ranks[0])
        by = part.unix_ns - run.unix_ns
        assert (run.start_ns[own] == part.start_ns + by).all()
    text = "of 128 ranks, these have no trace: 2-127"
    assert run.warnings[0] == RunWarning(None, text, "ranks-missing")

"""Directories with one trace per rank, which `load` reads as one run."""

import gzip
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.spans import Problem
from tests.loaders.chrome import AFTER, BASE, ChromeTrace
from tests.loaders.nsys_export import EPOCH, NsysExport

DATA = Path(__file__).parents[3] / "shared" / "data" / "kineto" / "two_ranks"


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
    assert (run.problems, run.path, calls) == ((), tmp_path, [(1, 2), (2, 2)])


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
    assert run.problems == (Problem(None, "of 4 ranks, these wrote no trace: 0, 2"),)


@pytest.mark.parametrize("damage", [b"", b"hello", b"\x1f\x8b\x08\x00"])
def test_a_trace_that_cannot_be_read_is_a_problem_of_its_rank(
    tmp_path: Path, damage: bytes
) -> None:
    for rank in (0, 2):
        chrome(tmp_path / f"rank-{rank}.json", rank, world=3)
    (tmp_path / "rank-1.json").write_bytes(damage)

    run = load(tmp_path)

    assert run.ranks == (0, 2)
    assert [problem.rank for problem in run.problems] == [1]
    assert "rank-1.json: is no Chrome trace" in run.problems[0].text


def test_a_damaged_export_costs_its_own_rank_alone(tmp_path: Path) -> None:
    for rank in (0, 1):
        export(tmp_path / f"x_rank{rank}_y.sqlite")
    (tmp_path / "x_rank2_y.sqlite").write_bytes(b"SQLite format 3\0 and no more")

    run = load(tmp_path)

    assert run.ranks == (0, 1)
    assert [(problem.rank, "cannot be read as SQLite" in problem.text) for problem in run.problems]


def test_where_none_can_be_read_the_first_says_why(tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"x_rank{rank}_y.sqlite").write_bytes(b"hello")

    with pytest.raises(TraceError, match=r"x_rank0_y\.sqlite: is no SQLite file"):
        load(tmp_path)


def test_a_trace_cut_off_is_read_up_to_its_cut_beside_the_others(tmp_path: Path) -> None:
    whole = chrome(tmp_path / "rank-0.json", 0, world=2).read_bytes()
    chrome(tmp_path / "rank-1.json", 1, world=2)
    cut = gzip.compress(whole.replace(b'"rank": 0', b'"rank": 1'))[:-40]
    (tmp_path / "rank-1.json").unlink()
    (tmp_path / "rank-1.json.gz").write_bytes(cut)

    run = load(tmp_path)

    assert run.statuses == {0: "finished", 1: None}
    assert {problem.rank for problem in run.problems} == {1}


def test_other_json_beside_the_traces_is_no_trace(tmp_path: Path) -> None:
    for rank in (0, 1):
        chrome(tmp_path / f"rank-{rank}.json", rank, world=2)
        (tmp_path / f"profiler_rank{rank}.json").write_text("{}")
    (tmp_path / "settings.json").write_text("{}")

    assert load(tmp_path).problems == ()


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

    with pytest.raises(TraceError, match=f"holds 2 traces, choose one of them: {names[0]}"):
        load(tmp_path)


def test_traces_of_two_tools_are_not_mixed(tmp_path: Path) -> None:
    chrome(tmp_path / "rank-0.trace.json", 0, world=2)
    export(tmp_path / "x_rank1_y.sqlite")

    with pytest.raises(TraceError, match="choose one of them"):
        load(tmp_path)


def test_an_older_trace_of_the_same_rank_is_left_out_and_said(tmp_path: Path) -> None:
    chrome(tmp_path / "rank-0.json", 0, world=2)
    chrome(tmp_path / "rank-1.json", 1, late=500, world=2)
    chrome(tmp_path / "rank-1-before.json", 1, world=2)

    run = load(tmp_path)

    assert [(span.rank, span.start_ns) for span in run] == [(0, 0), (1, 500)]
    assert [problem.rank for problem in run.problems] == [1]
    assert "rank-1-before.json is left out" in run.problems[0].text


@pytest.mark.skipif(not DATA.is_dir(), reason="the real traces in shared/data are not here")
def test_two_real_ranks_are_what_they_are_alone() -> None:
    run = load(DATA)

    alone = [load(DATA / f"rank-{rank}.json.gz") for rank in (0, 1)]
    assert [span.name for span in run] == [span.name for part in alone for span in part]
    assert len(run.table("kernels").rows) == 1154 + 1104
    for part in alone:
        own = run.rows(rank=part.ranks[0])
        by = part.unix_ns - run.unix_ns
        assert (run.start_ns[own] == part.start_ns + by).all()
    text = "of 128 ranks, these wrote no trace: 2-127"
    assert run.problems[0] == Problem(None, text)

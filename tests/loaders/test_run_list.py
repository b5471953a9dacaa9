"""`rlprof ls`: the runs of a directory, from the ends of one file each."""

import os
from pathlib import Path

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.run_list import run_list
from tests.builders.runs import Row, grpo_rows, header, write_rank

DAY_NS = 86_400 * 10**9


def states(folder: Path) -> dict[str, str]:
    table = run_list(folder)
    return dict(zip(table.column("run"), table.column("state"), strict=True))  # type: ignore[arg-type]


def old(path: Path) -> None:
    os.utime(path, (1, 1))


def test_runs_are_listed_newest_first_with_steps_and_their_time(tmp_path: Path) -> None:
    start = header().unix_ns
    for day, name in enumerate(("b", "a", "c")):
        head = header(unix_ns=start + day * DAY_NS)
        rows = [Row("step", "step", n, 10 * n, 10 * n + 10) for n in range(3, 8 + day)]
        write_rank(tmp_path / name, head, rows)
    (tmp_path / "other").mkdir()
    (tmp_path / "file").write_text("x")
    table = run_list(tmp_path)
    assert table.column("run") == ["c", "a", "b"]
    assert table.column("steps") == [7, 6, 5]
    assert table.column("step") == [10, 10, 10]
    assert table.column("started")[0] == "2023-11-16 22:13"


def test_a_run_lists_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_rank(tmp_path / name, header(), grpo_rows(3))
    assert run_list(tmp_path / "a").column("run") == ["a"]
    monkeypatch.chdir(tmp_path / "b")
    assert run_list(Path()).column("run") == ["b"]


def test_the_state_is_what_the_files_say(tmp_path: Path) -> None:
    write_rank(tmp_path / "good", header(), grpo_rows(3))
    write_rank(tmp_path / "raised", header(), grpo_rows(3), status="interrupted by ValueError")
    write_rank(tmp_path / "now", header(), grpo_rows(3), status=None)
    old(write_rank(tmp_path / "killed", header(), grpo_rows(3), status=None))
    write_rank(tmp_path / "half", header(0, 4), grpo_rows(3))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "rank-00000.jsonl").write_bytes(b"\x00\xff")
    found = states(tmp_path)
    assert found.pop("bad").startswith("not readable: ")
    assert found == {
        "good": "finished",
        "raised": "interrupted by ValueError",
        "now": "running",
        "killed": "truncated",
        "half": "3 of 4 ranks are missing",
    }


def test_a_large_run_is_read_at_its_ends_alone(tmp_path: Path) -> None:
    rows = [Row("step", "step", n, 1000 * n, 1000 * n + 1000) for n in range(1, 20_001)]
    path = write_rank(tmp_path / "run", header(), rows)
    middle = path.read_bytes()
    assert len(middle) > 500_000
    path.write_bytes(middle[:200_000] + b"\x00" * (len(middle) - 400_000) + middle[-200_000:])
    table = run_list(tmp_path)
    assert (table.column("steps"), table.column("step")) == ([20_000], [1000])


def test_a_run_without_steps_and_a_directory_without_runs(tmp_path: Path) -> None:
    write_rank(tmp_path / "runs" / "one", header(), [])
    assert run_list(tmp_path / "runs").column("steps") == [None]
    with pytest.raises(TraceError, match="contains no run"):
        run_list(tmp_path)

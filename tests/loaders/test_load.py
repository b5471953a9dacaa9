import json
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load, run_list
from lightning_rlprof.records.run_directory import rank_directory
from tests.builders.nsys_export import NsysExport
from tests.builders.runs import Row, grpo_rows, header, write_rank

HOUR = 3600 * 10**9
DAY_NS = 86_400 * 10**9


def test_a_run_directory_and_a_single_file_and_their_save_path_are_read(tmp_path: Path) -> None:
    run = tmp_path / "save" / "run"
    file = write_rank(run, header(), grpo_rows(2))

    assert len(load(run)) == len(load(str(file))) == len(load(tmp_path / "save")) == 13
    assert load(tmp_path / "save").path == run
    assert load(tmp_path / "save").notes == ()


def test_of_several_runs_the_newest_is_read_and_said(tmp_path: Path) -> None:
    start = header().unix_ns
    for name, age in (("z-old", 2), ("a-new", 0), ("m-mid", 1)):
        write_rank(tmp_path / name, header(unix_ns=start - age * HOUR), grpo_rows(1))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "rank-00000.jsonl").write_text("nonsense")

    spans = load(tmp_path)

    assert spans.path == tmp_path / "a-new"
    assert [note.text for note in spans.notes] == [
        f"{tmp_path} contains 4 runs; this is the newest, a-new"
    ]


def test_progress_counts_files(tmp_path: Path) -> None:
    for rank in range(3):
        write_rank(tmp_path, header(rank, 3), [])
    calls: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def test_a_file_with_only_its_header_is_a_run_without_spans(tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [], status=None)
    spans = load(tmp_path)
    assert (len(spans), spans.ranks, list(spans)) == (0, (0,), [])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path / "nowhere", "no such file or directory"),
        (lambda path: path, "empty directory .expected rank-"),
        (
            lambda path: _file(path / "notes.txt", "hello").parent,
            "no run or trace in .* .expected rank-",
        ),
        (lambda path: _file(path / "x.jsonl", "hello"), "is not a rank file of rlprof"),
        (lambda path: _file(path / "rank-00000.jsonl", "").parent, "is not a rank file of rlprof"),
        (
            lambda path: _artefacts(path / "x"),
            r"contains the captures of one rank; the run is .*run$",
        ),
        (
            lambda path: _exports(path / "x", *"abcdefghij").parent,
            r"x: contains 10 traces, pass one of them: a\.sqlite, .* and 2 more\. .*--as-one$",
        ),
        (lambda path: _file(path / "x.sqlite", "hello"), "not an SQLite export of"),
    ],
)
def test_what_cannot_be_read_is_one_line_that_says_why(
    tmp_path: Path, make: Any, reason: str
) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        load(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_home_directory_may_be_named_by_its_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rank(tmp_path / "run", header(), grpo_rows(1))
    assert len(load("~/run")) == len(load(Path("~/run"))) == len(load(tmp_path / "run")) > 0


@pytest.mark.parametrize("given", [3, None, ["run"]])
def test_what_is_no_path_is_refused(given: Any) -> None:
    with pytest.raises(TraceError, match="expected a path or a URL, not "):
        load(given)


def test_a_path_made_of_a_url_repeats_no_credential() -> None:
    with pytest.raises(TraceError, match="bucket/run: no such file") as caught:
        load(Path("s3://key:hunter2222@bucket/run"))
    assert "hunter" not in str(caught.value)


def test_a_newer_format_says_how_to_read_it(tmp_path: Path) -> None:
    write_rank(tmp_path, header(format=2), [])
    with pytest.raises(TraceError, match=r"format 2, .*pip install -U"):
        load(tmp_path)


def test_a_directory_without_permission_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(TraceError, match=r"cannot be read \(Permission denied\)"):
        load(tmp_path)


def test_a_broken_rank_among_good_ones_is_a_problem_of_the_run(tmp_path: Path) -> None:
    write_rank(tmp_path, header(0, 2), [Row("step", "step", 1, 0, 5)])
    _file(tmp_path / "rank-00001.jsonl", "{}")

    spans = load(tmp_path)

    assert spans.ranks == (0,)
    assert [
        (problem.rank, "is not a rank file of rlprof" in problem.text) for problem in spans.warnings
    ] == [(1, True)]


def test_all_ranks_broken_is_an_error(tmp_path: Path) -> None:
    for rank in range(2):
        _file(tmp_path / f"rank-0000{rank}.jsonl", json.dumps({"format": "x"}))
    with pytest.raises(TraceError, match=r"rank-00000\.jsonl: is not a rank file of rlprof"):
        load(tmp_path)


def test_an_export_is_told_by_its_content(tmp_path: Path) -> None:
    export = _exports(tmp_path, "a")
    calls: list[tuple[int, int]] = []

    for name in ("a.sqlite", "a.db", "a", "a.trace.json", "a.nsys-rep"):
        export = export.rename(tmp_path / name)
        spans = load(export, progress=lambda done, total: calls.append((done, total)))
        assert [span.name for span in spans] == ["actor_update"]

    assert calls == [(1, 1)] * 5


def test_a_chrome_trace_is_told_by_its_content(tmp_path: Path) -> None:
    event = {
        "ph": "X",
        "cat": "user_annotation",
        "name": "a",
        "pid": 1,
        "tid": 1,
        "ts": 1,
        "dur": 1,
    }
    text = json.dumps({"schemaVersion": 1, "traceEvents": [event]})

    for name in ("x.trace.json", "x"):
        assert [span.name for span in load(_file(tmp_path / name, text))] == ["a"]


def test_a_rank_file_needs_no_suffix(tmp_path: Path) -> None:
    file = write_rank(tmp_path, header(), grpo_rows(1))

    assert len(load(file.rename(tmp_path / "renamed"))) == 7


def test_a_directory_with_one_export_is_that_export_in_either_form(tmp_path: Path) -> None:
    export = _exports(tmp_path, "a")
    _file(tmp_path / "a.nsys-rep", "what it was made from")

    assert load(tmp_path).path == export


def test_a_run_beside_an_export_is_read(tmp_path: Path) -> None:
    _exports(tmp_path, "a")
    write_rank(tmp_path / "run", header(), grpo_rows(1))

    assert load(tmp_path).path == tmp_path / "run"


def test_exports_in_a_folder_of_a_ranks_folder_are_read(tmp_path: Path) -> None:
    write_rank(tmp_path, header(), [])
    window = rank_directory(tmp_path, 0) / "step-000001"

    export = _exports(window, "a")

    assert load(window).path == export


def test_the_newest_of_several_runs_has_its_kernels(tmp_path: Path) -> None:
    for name, unix_ns in (("old", HOUR), ("new", 2 * HOUR)):
        write_rank(tmp_path / name, header(unix_ns=unix_ns), [])
        _exports(rank_directory(tmp_path / name, 0), name)

    assert load(tmp_path).table("kernels").column("kernel") == ["of new"]


def _exports(folder: Path, *names: str) -> Path:
    """Write exports; returns the last one."""
    for name in names:
        export = NsysExport(folder / f"{name}.sqlite")
        export.own("actor_update", "stage", 0, 9, step=1)
        export.kernel(f"of {name}", 0, 9, 1)
        export.write()
    return export.path


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def _artefacts(path: Path) -> Path:
    write_rank(path / "run", header(), [])
    folder = rank_directory(path / "run", 0)
    folder.mkdir()
    _file(folder / "trace.json.gz", "")
    return folder


def test_the_only_chrome_trace_of_a_directory_is_read_whatever_its_name(tmp_path: Path) -> None:
    event = {"ph": "X", "name": "actor_update", "cat": "user_annotation", "ts": 1, "dur": 2}
    trace = {"traceEvents": [event | {"pid": 1, "tid": 1}], "baseTimeNanoseconds": 0}
    (tmp_path / "worker.pt.json").write_text(json.dumps(trace))
    (tmp_path / "profiler_info.json").write_text('{"rank": 0}')

    assert [span.name for span in load(tmp_path)] == ["actor_update"]

    (tmp_path / "other.json").write_text(json.dumps(trace))
    with pytest.raises(TraceError, match=r"pass one of them: other\.json, worker\.pt\.json"):
        load(tmp_path)


@pytest.mark.parametrize("suffix", ["", ".nsys-rep", ".json"])
def test_a_name_that_is_too_long_is_an_error_of_one_line(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        load(tmp_path / ("a" * 300 + suffix))


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


def test_a_run_is_as_far_as_the_role_that_trains(tmp_path: Path) -> None:
    """Workers of a rollout take fewer steps, and are killed when the training has ended."""
    rollout, trainer = header(role="rollout"), header(1, 2, role="trainer")
    old(write_rank(tmp_path / "run", rollout, grpo_rows(3), status=None))
    write_rank(tmp_path / "run", trainer, grpo_rows(5))
    table = run_list(tmp_path)
    assert (table.column("state"), table.column("steps")) == (["finished"], [5])


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

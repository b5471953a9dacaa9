import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders.ascend_captures import HOST, OUTPUT, capture, database, install, tell, trace

Run = Callable[..., tuple[int, str, str]]
HOST_ONLY = {"activities": ["CPU"]}


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch)


def window(run: Path, rank: int, name: str = "actor_update") -> Path:
    folder = run / f"rank-{rank:05d}" / f"step-000003-{name}"
    return capture(folder / f"host_{rank}_ascend_pt", rank=rank, **HOST_ONLY)


def test_a_table_says_what_became_of_each_window(rlprof: Run, tmp_path: Path, hints: None) -> None:
    run = tmp_path / "run"
    tell(window(run, 0), HOST)
    tell(window(run, 1), HOST, tables=["PYTORCH_API"])
    output = window(run, 2) / OUTPUT
    trace(output, HOST)
    database(output, "PYTORCH_API")

    status, out, err = rlprof("ascend", "parse", run, "-j", 1)

    assert (status, err) == (0, f"next: rlprof summary {run}\n")
    rows = [line.split() for line in out.splitlines() if line.startswith("rank-")]
    assert [row[:-2] for row in rows] == [
        ["rank-00000/step-000003-actor_update", "0", "cached", "text"],
        ["rank-00001/step-000003-actor_update", "1", "cached", "text", "and", "db"],
        ["rank-00002/step-000003-actor_update", "2", "up", "to", "date", "text", "and"],
    ]
    assert out.endswith("\n2 cached, 1 up to date\n")
    assert "warning" not in out


def test_a_failure_is_told_in_full_and_is_exit_status_1(rlprof: Run, tmp_path: Path) -> None:
    good, bad = tell(window(tmp_path, 0), HOST), tell(window(tmp_path, 1), raises="x" * 100)
    status, out, err = rlprof("ascend", "parse", good, bad)
    said = "trace_view.json is missing; its process ended with status 1; torch_npu: "
    said += f"RuntimeError: {'x' * 100}"
    assert status == 1
    assert f"warning: rank-00001/step-000003-actor_update: {said}\n1 cached, 1 failed\n" in out
    assert err == f"rlprof: error: cannot parse 1 of 2 directories; {bad}: {said}\n"


def test_what_a_tool_says_cannot_steer_the_terminal(rlprof: Run, tmp_path: Path) -> None:
    _, out, err = rlprof("ascend", "parse", tell(window(tmp_path, 0), raises="\x1b[2Jgone"))
    assert "\x1b" not in out + err
    assert "\\x1b[2Jgone" in out


def test_as_json_it_is_the_outcomes(rlprof: Run, tmp_path: Path) -> None:
    directory = tell(window(tmp_path, 4), HOST)
    status, out, err = rlprof("ascend", "parse", tmp_path, "--json")
    (outcome,) = json.loads(out)["outcomes"]
    assert (status, err) == (0, "")
    assert outcome.pop("seconds") > 0
    assert outcome == {
        "path": str(directory),
        "rank": 4,
        "state": "cached",
        "files": ["analyse.done", "trace_view.json"],
        "message": "",
    }


def test_half_of_the_cores_work_at_least_one(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_rlprof.loaders.ascend import offline_analysis as room

    trace(window(tmp_path, 0) / OUTPUT, HOST)
    given = []
    real = room.parse_captures
    monkeypatch.setattr(room, "parse_captures", lambda *a: given.append(a[1].jobs) or real(*a))
    for cores, words in ((1, []), (7, []), (7, ["-j", 5])):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=cores: range(n))
        rlprof("ascend", "parse", tmp_path, *words)
    assert given == [1, 3, 5]


def test_options_reach_the_analysis(rlprof: Run, tmp_path: Path) -> None:
    directory = tell(window(tmp_path, 0), HOST, tables=["PYTORCH_API"])
    both = ["--export", "both"]
    assert rlprof("ascend", "parse", tmp_path, *both)[0] == 0
    called = directory / "called.json"
    assert json.loads(called.read_text())["options"] == [1, ["text", "db"]]
    called.unlink()
    assert rlprof("ascend", "parse", tmp_path, *both)[0] == 0
    assert not called.exists()
    assert rlprof("ascend", "parse", tmp_path, "--reparse")[0] == 0
    assert json.loads(called.read_text())["options"] == [1, None]
    tell(directory, HOST, hangs=True)
    _, out, _ = rlprof("ascend", "parse", tmp_path, "--reparse", "--timeout", 2)
    assert "stopped after 2 s (--timeout)" in out


def test_names_are_as_short_as_they_can_be(rlprof: Run, tmp_path: Path) -> None:
    alone = capture(tmp_path / "w" / "x_ascend_pt", **HOST_ONLY)
    twins = [capture(tmp_path / "t" / f"{n}_ascend_pt", **HOST_ONLY) for n in "ab"]
    deep = capture(tmp_path / "d" / ("l" * 50) / "y_ascend_pt", **HOST_ONLY)
    for each in (alone, *twins, deep):
        trace(each / OUTPUT, HOST)
    _, out, _ = rlprof("ascend", "parse", tmp_path)
    names = [line.split()[0] for line in out.splitlines() if " up to date " in line]
    assert names == [f"d/{'l' * 50}", "t/a_ascend_pt", "t/b_ascend_pt", "w"]


@pytest.mark.parametrize("words", [[], ["--export", "csv"], ["-j", "0"], ["--timeout", "0"]])
def test_wrong_words_are_one_line(rlprof: Run, tmp_path: Path, words: list[str]) -> None:
    status, out, err = rlprof("ascend", "parse", *([tmp_path] if words else []), *words)
    assert (status, out, err.count("\n")) == (2, "", 2)
    assert err.endswith("hint: See rlprof ascend parse --help\n")


def test_a_directory_without_raw_data_says_what_makes_it(rlprof: Run, tmp_path: Path) -> None:
    status, out, err = rlprof("ascend", "parse", tmp_path)
    assert (status, out) == (2, "")
    assert err == (
        f"rlprof: error: {tmp_path}: contains no *_ascend_pt directory; torch_npu.profiler writes "
        "one per capture\n"
    )

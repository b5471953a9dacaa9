import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.stages.stage_times import headline
from tests.builders.chrome import ChromeTrace
from tests.builders.ingest_traces import write_trace
from tests.builders.runs import Row, grpo_rows, grpo_run, header, write_rank

Run = Callable[..., tuple[int, str, str]]


def test_summary_shows_stages_headline_and_the_next_command(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "my run", steps=5, ranks=2)

    status, out, err = rlprof("summary", tmp_path / "my run")

    assert (status, err) == (0, "")
    assert "my run: 2 ranks on cpu, 5 steps" in out
    assert "actor_generate" in out
    assert "actor_generate takes 64% of the step. Check the rollout first" in out
    for table in ("stages", "regions", "gaps", "slowest_ranks"):
        assert f"\n{table}\n" in out
    assert "background" not in out
    assert out.endswith(f"\nNext: rlprof report '{tmp_path}/my run'\n")
    assert "\x1b" not in out


def test_summary_of_one_rank_shows_no_comparison_of_ranks(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, steps=1)
    _, out, _ = rlprof("summary", tmp_path)
    assert ": 1 rank on cpu, 1 step\n" in out
    assert "\nranks" not in out


def test_summary_by_rank_adds_a_table_to_both_outputs(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, ranks=2)
    assert "\nstages by rank\n" not in rlprof("summary", tmp_path)[1]
    assert "\nstages by rank\n" in rlprof("summary", tmp_path, "--per-rank")[1]
    data = json.loads(rlprof("summary", tmp_path, "--per-rank", "--json")[1])
    assert data["tables"][-1]["name"] == "stages by rank"


def test_summary_as_json_is_every_table_and_nothing_else(rlprof: Run, tmp_path: Path) -> None:
    spans = grpo_run(tmp_path, ranks=2)

    data = json.loads(rlprof("summary", tmp_path, "--json")[1])

    tables = [
        json.loads(json.dumps(each(spans).to_dict()))
        for each in [each.run for each in CATALOG if each.summary]
    ]
    assert data == {
        "run": str(tmp_path),
        "headline": headline(spans),
        "ranks": [0, 1],
        "warnings": [],
        "notes": [],
        "tables": tables,
    }


def test_summary_says_what_is_missing_and_what_the_run_noted(rlprof: Run, tmp_path: Path) -> None:
    notes = [(5, "warning", "disk was full\x1b[2J")]
    write_rank(tmp_path / "a", header(0, 3), grpo_rows(2), status=None, notes=notes)
    write_rank(tmp_path / "b", header(unix_ns=1), [])

    out = rlprof("summary", tmp_path)[1]

    assert "! of 3 ranks, these have no trace: 1-2\n" in out
    assert "! rank 0: its file is truncated: the rank was killed or is still running\n" in out
    assert f"note: {tmp_path} contains 2 runs; this is the newest, a\n" in out
    assert "note: disk was full\\x1b[2J\n" in out
    assert "\x1b" not in out


def test_many_problems_are_counted(rlprof: Run, tmp_path: Path) -> None:
    for rank in range(12):
        write_rank(tmp_path, header(rank, 12), [], status=None)
    out = rlprof("summary", tmp_path)[1]
    assert "! and 4 more: rlprof summary --json shows them all\n" in out
    assert len(json.loads(rlprof("summary", tmp_path, "--json")[1])["warnings"]) == 12


def test_many_notes_are_counted(rlprof: Run, tmp_path: Path) -> None:
    notes = [(at, "warning", f"remark {at}") for at in range(12)]
    write_rank(tmp_path, header(), grpo_rows(2), notes=notes)
    lines = rlprof("summary", tmp_path)[1].splitlines()
    assert [line for line in lines if line.startswith("note:")][-2:] == [
        "note: remark 7",
        "note: and 4 more: rlprof summary --json shows them all",
    ]


def test_hostile_names_reach_no_output_raw(rlprof: Run, tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07[red]\u202e"
    rows = [Row("step", "step", n, n * 9, n * 9 + 9) for n in (1, 2, 3)]
    rows += [Row(name, kind, 1, 10, 16, thread=t) for kind, t in (("stage", 1), ("region", 1))]
    rows += [Row(name, "stage", 1, 10, 17)]
    write_rank(tmp_path, header(host=name, device=name), rows)

    for words in (["summary"], ["summary", "--json"], ["compare", tmp_path]):
        _, out, err = rlprof(words[0], tmp_path, *words[1:])
        assert all(c.isprintable() or c == "\n" for c in out + err)
        assert "[red]" in out


def test_report_is_written_into_the_run_and_never_over_a_file(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path)
    path = tmp_path / "report.html"

    status, out, _ = rlprof("report", tmp_path)
    assert status == 0
    assert out == f"Wrote {path}\nNext: rlprof trace {tmp_path}\n"
    assert "actor_generate takes 64% of the step" in path.read_text()

    path.write_text("mine")
    status, out, err = rlprof("report", tmp_path)
    assert (status, out) == (1, "")
    assert err == f"rlprof: {path}: exists already; --force replaces it, -o names another file\n"
    assert path.read_text() == "mine"

    assert rlprof("report", tmp_path, "--force")[0] == 0
    assert path.read_text() != "mine"


def test_trace_is_packed_unless_the_name_says_otherwise(rlprof: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spans = grpo_run(run)

    assert f"Wrote {run}/trace.json.gz\n" in rlprof("trace", run)[1]
    packed = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    assert rlprof("trace", run, "-o", tmp_path / "x.json")[0] == 0
    assert json.loads((tmp_path / "x.json").read_text()) == packed
    assert sum(event["ph"] == "X" for event in packed["traceEvents"]) == len(spans)
    assert rlprof("trace", run)[0] == 1
    assert rlprof("trace", run, "--force")[0] == 0


def test_trace_shows_on_demand_what_devices_ran(rlprof: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    grpo_run(run)
    missing = "! no kernels: the run holds no capture of a device\n"
    assert missing not in rlprof("trace", run)[1]
    assert missing in rlprof("trace", run, "--kernels", "-o", tmp_path / "x.json")[1]

    capture, drawn = write_trace(tmp_path / "rank0.pt.trace.json"), tmp_path / "drawn.json"
    status, out, _ = rlprof("trace", capture, "--kernels", "-o", drawn)
    assert (status, "no kernels" in out) == (0, False)
    events = json.loads(drawn.read_text())["traceEvents"]
    assert "device 0, stream 7" in [event["args"].get("name") for event in events]


def test_hosts_that_never_compared_clocks_are_merged_by_force_alone_and_marked(
    rlprof: Run, tmp_path: Path
) -> None:
    for rank, host in enumerate("ab"):
        write_rank(tmp_path, header(rank, 2, host=host), grpo_rows(3))

    status, out, err = rlprof("trace", tmp_path)
    assert (status, out) == (1, "")
    assert "clocks of hosts a, b were not synchronized" in err
    assert "--force writes it, marked" in err
    assert not (tmp_path / "trace.json.gz").exists()

    status, out, _ = rlprof("trace", tmp_path, "--force")
    assert status == 0
    assert "! UNCALIBRATED: clocks of hosts a, b were not synchronized" in out
    found = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert found["otherData"]["clocks"].startswith("UNCALIBRATED: clocks of hosts a, b")
    alone = rlprof("trace", tmp_path / "rank-00000.jsonl")
    assert alone[0] == 0


def test_outputs_of_a_single_file_and_of_a_save_path_are_derived(
    rlprof: Run, tmp_path: Path
) -> None:
    file = write_rank(tmp_path / "save" / "run", header(), grpo_rows(3))
    assert f"Wrote {file.parent}/rank-00000-report.html\n" in rlprof("report", file)[1]
    assert f"Wrote {file.parent}/report.html\n" in rlprof("report", tmp_path / "save")[1]


@pytest.mark.parametrize(
    ("command", "name"), [("report", "report.html"), ("trace", "trace.json.gz")]
)
def test_outputs_of_a_folder_of_traces_lie_beside_it(
    rlprof: Run, tmp_path: Path, command: str, name: str
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in range(2):
        trace = ChromeTrace()
        trace.mark("ProfilerStep#1", 0, 1_000_000)
        trace.write(folder / f"rank-{rank}.json")

    status, out, err = rlprof(command, folder, "--force")

    assert (status, err) == (0, "")
    assert f"Wrote {tmp_path}/traces-{name}\n" in out
    assert sorted(path.name for path in folder.glob("*.*")) == ["rank-0.json", "rank-1.json"]


@pytest.mark.parametrize("command", ["report", "trace"])
def test_a_place_that_cannot_be_written_is_one_line(
    rlprof: Run, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo_run(tmp_path / "run")

    status, _, err = rlprof(command, tmp_path / "run", "-o", tmp_path)
    assert (status, err) == (
        1,
        f"rlprof: {tmp_path}: is a directory; -o takes the name of a file\n",
    )
    status, _, err = rlprof(command, tmp_path / "run", "-o", tmp_path / "no" / "x")
    assert (status, "there is no directory" in err) == (1, True)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr(Path, "replace", full)
    status, _, err = rlprof(command, tmp_path / "run", "-o", tmp_path / "x")
    assert status == 1
    assert err == (
        f"rlprof: {tmp_path}/x: cannot be written (No space left on device); "
        "-o names another file\n"
    )


def test_force_replaces_no_device(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=1)
    os.mkfifo(pipe := tmp_path / "x.json")
    for command in ("trace", "report"):
        status, _, err = rlprof(command, tmp_path / "run", "-o", pipe, "--force")
        assert (status, "is no regular file; -o names another file" in err) == (1, True)
    assert pipe.is_fifo()


def test_force_replaces_nothing_that_is_read(rlprof: Run, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    run, trace = tmp_path / "run", write_trace(tmp_path / "traces" / "rank0.json")
    grpo_run(run, steps=2)
    (tmp_path / "link.json").symlink_to(trace)
    rank = run / "rank-00000.jsonl"
    before = trace.read_bytes(), rank.read_bytes()

    for command in (
        ("trace", trace, "-o", trace),
        ("trace", trace, "-o", tmp_path / "link.json"),
        ("report", run, "-o", rank),
        ("trace", rank, "-o", rank),
        ("sql", run, "select 1", "-o", rank),
        ("report", trace.parent, "-o", trace),
    ):
        status, _, err = rlprof(*command, "--force")
        assert (status, "is part of what is read; -o names another file" in err) == (1, True)

    assert (trace.read_bytes(), rank.read_bytes()) == before
    for _ in range(2):  # what we wrote ourselves is replaced
        assert rlprof("report", run, "--force")[0] == 0
        for mine in (("report", "x.html"), ("trace", "x.json.gz"), ("sql", "x.csv", "select 1")):
            words = (mine[0], run, *mine[2:], "-o", run / mine[1], "--force")
            assert rlprof(*words)[0] == 0

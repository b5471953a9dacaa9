import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.perfetto import write_trace
from lightning_rlprof.spans import Spans
from lightning_rlprof.table import Column, Table
from tests.runs import MAIN, Row, grpo_run, header, loaded, write_rank


def _events(spans: Spans, path: Path) -> list[dict[str, Any]]:
    write_trace(spans, path)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(text, parse_float=str)["traceEvents"]
    return events


def _ns(micro: str) -> int:
    whole, _, part = micro.partition(".")
    assert len(part) == 3
    return int(whole) * 1000 + int(part)


def test_every_span_is_there_with_its_exact_nanoseconds(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=3, ranks=2)
    events = _events(spans, tmp_path / "trace.json")

    found = sorted(
        (e["pid"] - 1, e["name"], e["cat"], e["args"]["step"], _ns(e["ts"]), _ns(e["dur"]))
        for e in events
        if e["ph"] == "X"
    )
    assert found == sorted(
        (s.rank, s.name, s.kind, s.step, s.start_ns, s.duration_ns) for s in spans
    )


def test_times_beyond_what_a_float_holds_stay_exact(tmp_path: Path) -> None:
    far = 2**59 + 1
    spans = loaded([Row("a", "stage", 1, 0, 1), Row("b", "stage", 1, far, far + 3)])
    last = _events(spans, tmp_path / "t.json")[-1]
    assert (last["ts"], last["dur"]) == (f"{far // 1000}.{far % 1000:03d}", "0.003")


def _names(events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    kinds = ("process_name", "thread_name")
    named = [e for e in events if e["ph"] == "M" and e["name"] in kinds]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in named}


def test_tracks_have_names_and_no_thread_is_zero(tmp_path: Path) -> None:
    rows = [
        Row("epoch", "epoch", 1, 0, 20),
        Row("step", "step", 1, 0, 20),
        Row("a", "stage", 1, 1, 9),
        Row("task", "stage", 1, 2, 8),
        Row("b", "stage", 1, 1, 9, thread=7),
    ]
    run = tmp_path / "run"
    write_rank(run, header(0, 2), rows, threads={MAIN: "MainThread", 7: "reward"})
    write_rank(run, header(1, 2, host="node-b"), rows[:3])

    events = _events(load(run), tmp_path / "t.json")

    assert _names(events) == {
        (1, 0): "rank 0 (node-a)",
        (1, 1): "steps",
        (1, 2): "MainThread",
        (1, 3): "MainThread (2)",
        (1, 4): "reward",
        (2, 0): "rank 1 (node-b)",
        (2, 1): "steps",
        (2, 2): "Main",
    }
    tracks = {e["name"]: e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert tracks == {"epoch": 1, "step": 1, "a": 2, "task": 3, "b": 4}


def test_slices_of_a_track_nest_and_begin_in_order(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run", steps=3)
    open_ends: dict[tuple[int, int], list[int]] = {}
    for event in _events(spans, tmp_path / "t.json"):
        if event["ph"] == "X":
            start, length = _ns(event["ts"]), _ns(event["dur"])
            ends = open_ends.setdefault((event["pid"], event["tid"]), [])
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start + length <= ends[-1]
            ends.append(start + length)


def test_marks_are_instants_and_counters_are_arguments(tmp_path: Path) -> None:
    counters = {"tokens": 2**53 + 1, "loss": 0.125, "step": 9, "huge": 2**80, 'q"\x1b': 1}
    rows = [
        Row("a", "stage", 4, 0, 9, counters=counters),
        Row("resumed", "mark", 4, 3, 3, counters={"n": 1}),
        Row("b", "stage", 4, 10, 11),
    ]
    events = [e for e in _events(loaded(rows), tmp_path / "t.json") if e["ph"] != "M"]
    a, mark, b = events

    assert a["args"] == {
        "step": 4,
        "tokens": 2**53 + 1,
        "loss": "0.125",
        "step (counter)": 9,
        "huge": str(2**80),
        'q"\x1b': 1,
    }
    assert (mark["ph"], mark["s"], mark["ts"]) == ("i", "t", "0.003")
    assert mark["args"] == {"step": 4, "n": 1}
    assert "dur" not in mark
    assert b["args"] == {"step": 4}


def test_hostile_names_are_valid_json(tmp_path: Path) -> None:
    names = ['"', "\\", "\n", "\x1b[2J", "</script>", "名前", "\u2028"]
    spans = loaded([Row(name, "stage", 1, at, at + 1) for at, name in enumerate(names)])
    events = _events(spans, tmp_path / "t.json")
    assert [e["name"] for e in events if e["ph"] == "X"] == names


def test_the_suffix_gz_compresses_and_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    spans = grpo_run(tmp_path / "run")
    packed = _events(spans, tmp_path / "t.json.gz")
    assert packed == _events(spans, tmp_path / "t.json")
    first = (tmp_path / "t.json.gz").read_bytes()
    write_trace(spans, tmp_path / "u.json.gz")
    assert (tmp_path / "u.json.gz").read_bytes() == first


def test_a_run_without_spans_is_a_valid_trace(tmp_path: Path) -> None:
    assert {e["ph"] for e in _events(loaded([], []), tmp_path / "t.json")} == {"M"}


def test_progress_counts_ranks(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    spans = grpo_run(tmp_path / "run", ranks=2)
    write_trace(spans, tmp_path / "t.json", progress=lambda a, b: calls.append((a, b)))
    assert calls == [(1, 2), (2, 2)]


def test_a_failure_leaves_the_old_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("old")

    def fail(done: int, total: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_trace(loaded([Row("a", "stage", 1, 0, 1)]), path, progress=fail)
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]
    assert path.read_text() == "old"


def test_an_unwritable_directory_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_trace(loaded([]), tmp_path / "nowhere" / "t.json")


def two_hosts(run: Path, *, unsure: int | None) -> Spans:
    for rank, host in enumerate("ab"):
        write_rank(run, header(rank, 2, host=host), [Row("a", "stage", 1, 5, 9)])
    spans = load(run)
    cells = [(0, 0), (1, unsure)]
    columns = (Column("rank", "count"), Column("uncertainty", "duration", "ns"))
    return replace(spans, tables={"clocks": lambda: Table("clocks", columns, cells)})


def test_a_rank_whose_clock_may_be_off_says_by_how_much(tmp_path: Path) -> None:
    events = _events(two_hosts(tmp_path / "run", unsure=80_000), tmp_path / "t.json")
    names = [name for (_, tid), name in _names(events).items() if tid == 0]
    assert names == ["rank 0 (a)", "rank 1 (b, ±0.080 ms)"]


def test_a_watermark_is_in_the_metadata_on_every_rank_and_on_a_track_of_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t.json"
    write_trace(two_hosts(tmp_path / "run", unsure=None), path, watermark="nobody compared a, b")
    found = json.loads(path.read_text(), parse_float=str)
    assert found["otherData"]["clocks"] == "UNCALIBRATED: nobody compared a, b"
    names = [name for (_, tid), name in _names(found["traceEvents"]).items() if tid == 0]
    assert names == [
        "UNCALIBRATED: nobody compared a, b",
        "rank 0 (a, UNCALIBRATED)",
        "rank 1 (b, UNCALIBRATED)",
    ]
    slices = [e for e in found["traceEvents"] if e["ph"] == "X" and e["cat"] == "clocks"]
    assert [(e["pid"], e["name"]) for e in slices] == [(3, names[0])]
    end = max(_ns(e["ts"]) + _ns(e["dur"]) for e in found["traceEvents"] if e["ph"] == "X")
    assert _ns(slices[0]["ts"]) + _ns(slices[0]["dur"]) == end

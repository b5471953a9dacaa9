import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.chrome_trace import lanes, write_trace
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table, columns_of
from tests.builders.runs import MAIN, Row, grpo_run, header, loaded, write_rank
from tests.effort import examples


def _lanes(spans: Spans) -> list[list[str]]:
    return [[spans.span(row).name for row in lane] for lane in lanes(spans, spans.rows())]


def test_nested_stages_share_a_lane() -> None:
    rows = [
        Row("a", "stage", 1, 0, 9),
        Row("b", "stage", 1, 0, 9, parent=1),
        Row("c", "stage", 1, 2, 9, parent=2),
        Row("d", "stage", 1, 9, 12),
    ]
    assert _lanes(loaded(rows)) == [["a", "b", "c", "d"]]


def test_overlapping_tasks_get_lanes_with_their_own_children() -> None:
    rows = [
        Row("rollout", "stage", 1, 0, 100),
        Row("task 1", "stage", 1, 5, 60, parent=1),
        Row("task 2", "stage", 1, 10, 90, parent=1),
        Row("reward 1", "stage", 1, 20, 30, parent=2),
        Row("reward 2", "stage", 1, 21, 29, parent=3),
        Row("after", "stage", 1, 92, 95, parent=1),
    ]
    assert _lanes(loaded(rows)) == [
        ["rollout", "task 1", "reward 1", "after"],
        ["task 2", "reward 2"],
    ]


def test_a_task_within_its_sibling_is_not_drawn_as_its_child() -> None:
    rows = [Row("long", "stage", 1, 0, 100), Row("short", "stage", 1, 20, 30)]
    assert _lanes(loaded(rows)) == [["long"], ["short"]]


def test_regions_with_known_ends_nest_by_time() -> None:
    rows = [
        Row("update", "stage", 1, 10, 90),
        Row("minibatch", "stage", 1, 21, 39, parent=1),
        Row("training_step", "region", 1, 5, 95),
        Row("backward", "region", 1, 20, 40),
    ]
    assert _lanes(loaded(rows)) == [["training_step", "update", "backward", "minibatch"]]


def test_a_region_that_is_the_parent_holds_its_stages() -> None:
    rows = [
        Row("training_step", "region", 1, 0, 100),
        Row("optimizer_step", "region", 1, 10, 60),
        Row("update", "stage", 1, 20, 50, parent=1),
        Row("elsewhere", "stage", 1, 61, 90, parent=99),
    ]
    expected = ["training_step", "optimizer_step", "update", "elsewhere"]
    assert _lanes(loaded(rows)) == [expected]


def test_marks_go_to_the_first_lane_and_cover_nothing() -> None:
    rows = [
        Row("now", "mark", 1, 5, 5),
        Row("a", "stage", 1, 0, 9),
        Row("b", "stage", 1, 5, 9, parent=2),
    ]
    assert _lanes(loaded(rows)) == [["a", "b", "now"]]


def test_no_spans_no_lanes() -> None:
    assert lanes(loaded([]), loaded([]).rows()) == []


SPANS = st.tuples(
    st.sampled_from(["stage", "stage", "region", "step", "mark"]),
    st.integers(0, 30),
    st.integers(0, 30),
    st.none() | st.integers(1, 12),
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(SPANS, max_size=12))
def test_every_span_is_drawn_once_and_lanes_always_nest(given_spans: list[tuple]) -> None:  # type: ignore[type-arg]
    rows = [
        Row(str(at), kind, 1, start, start if kind == "mark" else start + length, parent=parent)
        for at, (kind, start, length, parent) in enumerate(given_spans, start=1)
    ]
    spans = loaded(rows)
    found = lanes(spans, spans.rows())

    assert sorted(row for lane in found for row in lane) == list(range(len(spans)))
    for lane in found:
        drawn = [span for span in map(spans.span, lane) if span.kind != "mark"]
        assert [span.start_ns for span in drawn] == sorted(span.start_ns for span in drawn)
        open_ends: list[tuple[int, str, int, int | None]] = []
        for span in drawn:
            while open_ends and open_ends[-1][0] <= span.start_ns:
                open_ends.pop()
            if open_ends:
                assert span.end_ns <= open_ends[-1][0]
                if span.kind == "stage" and open_ends[-1][1] == "stage":
                    assert span.parent == open_ends[-1][2]
            open_ends.append((span.end_ns, span.kind, span.id, span.parent))


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
        (s.rank, f"step {s.step}" if s.kind == "step" else s.name, s.kind, s.step, s.start_ns,
         s.duration_ns)
        for s in spans
    )  # fmt: skip


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
        (1, 1): "epochs",
        (1, 2): "steps",
        (1, 3): "MainThread",
        (1, 4): "MainThread (2)",
        (1, 5): "reward",
        (2, 0): "rank 1 (node-b)",
        (2, 1): "epochs",
        (2, 2): "steps",
        (2, 3): "Main",
    }
    tracks = {e["name"]: e["tid"] for e in events if e["ph"] == "X" and e["pid"] == 1}
    assert tracks == {"epoch": 1, "step 1": 2, "a": 3, "task": 4, "b": 5}


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


def two_hosts(run: Path) -> Spans:
    for rank, host in enumerate("ab"):
        write_rank(run, header(rank, 2, host=host), [Row("a", "stage", 1, 5, 9)])
    spans = load(run)
    cells = [(0, 0, 0), (1, 1, None)]
    columns = (*columns_of("count", "rank", "clock"), Column("uncertainty", "duration", "ns"))
    return replace(spans, tables={"clocks": lambda: Table("clocks", columns, cells)})


def test_a_watermark_is_in_the_metadata_and_on_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_trace(two_hosts(tmp_path / "run"), path, watermark="nobody compared a, b")
    found = json.loads(path.read_text(), parse_float=str)
    assert found["otherData"]["clocks"] == "UNCALIBRATED: nobody compared a, b"
    names = [name for (_, tid), name in _names(found["traceEvents"]).items() if tid == 0]
    assert names == ["rank 0 (a, UNCALIBRATED)", "rank 1 (b, UNCALIBRATED)"]

"""Each check of data quality can be ok, warn, and not checked if the run lacks the data."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.analysis.diagnosis.data_quality import check_quality, data_quality
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.tables.spans import Counter, RankNote, RunWarning, Spans
from lightning_rlprof.tables.table import Column, ColumnRows, Loss, Table, columns_of, noted
from tests.builders.chrome import ChromeTrace
from tests.builders.device_trace import Feed, feed, traced
from tests.builders.runs import Row, loaded
from tests.builders.scripted import Script, play


def checks(spans: Spans) -> dict[str, tuple[str, str]]:
    return {
        str(check): (str(state), str(detail)) for check, state, detail in data_quality(spans).rows
    }


@pytest.fixture
def spans() -> Spans:
    return play(Script(ranks=3, steps=4), 1).spans


def kernels(graph: list[int | None], note: str = "") -> Table:
    at = np.ma.masked_equal([-1 if each is None else each for each in graph], -1)
    heads = (
        *columns_of("count", "rank", "device", "graph"),
        *columns_of("text", "kernel", "kind", "stage"),
        *columns_of("duration", "start", "duration", unit="ns"),
    )
    zeros, none = np.zeros(len(graph), np.int64), (np.full(len(graph), -1), [])
    rows = ColumnRows([zeros, zeros, at, none, none, none, zeros, zeros + 1])
    return Table("kernels", heads, rows, note=note)


def test_a_healthy_run_has_no_warnings(spans: Spans) -> None:
    assert checks(spans) == {
        "ranks": ("ok", "3 of 3 present"),
        "files": ("ok", "all rank files ended cleanly"),
        "steps": ("ok", "4 of 4 complete"),
        "dropped events": ("ok", "none detected"),
        "remarks of the run": ("ok", "none"),
        "clocks": ("ok", "one host, one clock"),
        "profiler overhead": (
            "ok",
            "opening and closing captures took 0.00% of the recorded time",
        ),
    }


def test_missing_ranks_and_cut_files_are_warnings(spans: Spans) -> None:
    headers = {rank: replace(head, world_size=20) for rank, head in spans.headers.items()}
    lame = replace(spans, headers=headers, statuses={0: "finished", 1: None, 2: "killed"})
    rows = data_quality(lame).rows
    assert rows[0][1:] == ("warn", "3 of 20 present; missing: 3, 4, 5, 6, 7 and 12 more")
    assert rows[1][1:] == ("warn", "rank 1: file is truncated (killed or still running)")
    assert rows[2][1:] == ("warn", "rank 2: recording ended early")


def test_steps_that_ranks_lack_are_a_warning(spans: Spans) -> None:
    keep = ~((spans.rank == 2) & (spans.step == 4))
    names = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")
    cut = replace(spans, **{name: getattr(spans, name)[keep] for name in names}, counters={})
    assert checks(cut)["steps"] == ("warn", "some of 4 are missing on rank 2")
    roles = {**cut.headers, 2: replace(cut.headers[2], role="rollout")}
    assert checks(replace(cut, headers=roles))["steps"] == ("ok", "4 of 4 complete")
    none = replace(spans, kind=np.full(len(spans), KINDS.index("stage")))
    assert checks(none)["steps"] == ("not checked", "needs a complete step")


def test_steps_that_no_rank_has_are_a_warning_where_all_were_to_be_recorded(spans: Spans) -> None:
    keep = ~np.isin(spans.step, (2, 3))
    names = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")
    holed = replace(spans, **{name: getattr(spans, name)[keep] for name in names}, counters={})
    captures, headers = (
        {rank: replace(head, config={"spans": every}) for rank, head in spans.headers.items()}
        for every in (False, True)
    )
    of_captures = data_quality(replace(holed, headers=captures)).rows
    assert [row[1] for row in of_captures if row[0] == "steps"] == ["ok"]
    rows = data_quality(replace(holed, headers=headers)).rows
    assert ("steps", "warn", "2 between the others are in no file, the first is 2") in list(rows)
    far = replace(holed, headers=headers, step=np.where(holed.step == 4, 10**15, holed.step))
    (row,) = [row for row in data_quality(far).rows if row[:2] == ("steps", "warn")]
    assert row[2] == "999999999999998 between the others are in no file, the first is 2"


@pytest.mark.parametrize("name", ["kernels", "memcpy", "collectives"])
def test_rows_that_a_tool_lost_are_a_warning(name: str, spans: Spans) -> None:
    said = noted(["3 are fine", Loss("1721 rows are left out: their times are wrong")])
    table = replace(kernels([None]), name=name, **said)
    found = checks(replace(spans, tables={name: lambda: table}))["dropped events"]
    assert found == ("warn", f"{name}: 1721 rows are left out: their times are wrong")


def test_what_a_budget_left_out_is_a_warning_of_its_own(spans: Spans) -> None:
    """The last note of a rank has the counts; both are said once, and no event counts as lost."""
    first, last = "over budget: the file is full", "over budget: 7 lines were not kept"
    notes = [
        RankNote(rank, at, "warning", text, code)
        for rank in (0, 2)
        for at, text, code in (
            (1, first, Code.OVER_BUDGET),
            (2, last, Code.BUDGET_SUMMARY),
        )
    ]
    over = replace(spans, notes=tuple(notes))
    rows = [row[1:] for row in data_quality(over).rows if row[0] == "dropped events"]
    assert rows == [("warn", f"ranks 0, 2: {last}")]
    both = replace(over, warnings=(RunWarning(0, "3 lines are lost"),))
    rows = [row[1:] for row in data_quality(both).rows if row[0] == "dropped events"]
    assert rows == [("warn", f"ranks 0, 2: {last}"), ("warn", "3 lines are lost")]


def test_remarks_and_hosts_are_warnings(spans: Spans) -> None:
    lost = replace(
        spans,
        warnings=(RunWarning(0, "3 lines are lost"),),
        notes=(RankNote(1, 0, "info", "fine"), RankNote(1, 0, "warning", "disk full")),
    )
    assert checks(lost)["dropped events"] == ("warn", "3 lines are lost")
    assert checks(lost)["remarks of the run"] == ("warn", "disk full")
    apart = play(Script(ranks=2, steps=4, hosts=True), 1).spans
    assert checks(apart)["clocks"][0] == "warn"
    assert checks(apart)["clocks"][1].startswith("clocks of hosts node-0, node-1 were not")
    heads = tuple(Column(name, "count") for name in ("rank", "clock", "uncertainty"))
    for unsure, state in ((30_000, "ok"), (12_000_000, "warn")):
        clocks = Table("clocks", heads, [(0, 0, 0), (1, 1, unsure)])
        compared = replace(apart, tables={"clocks": lambda clocks=clocks: clocks})
        text = f"synchronized within {unsure / 1e6:.3f} ms between ranks"
        assert checks(compared)["clocks"] == (state, text)


def test_the_recording_is_one_line_and_says_what_is_needed_of_an_accelerator(spans: Spans) -> None:
    assert check_quality(spans).line == "Recording: complete"
    heads = {rank: replace(head, device="cuda") for rank, head in spans.headers.items()}
    on_gpu = replace(spans, headers=heads)
    line = check_quality(on_gpu).line
    assert line == "Recording: complete; 2 checks need a capture; 1 check needs FLOPs"
    two = replace(on_gpu, statuses=dict.fromkeys(on_gpu.statuses))
    assert check_quality(two).line == "Recording: 1 doubt"


@pytest.mark.parametrize(
    ("table", "state", "text"),
    [
        (kernels([None, None]), "ok", "no kernel ran in a graph replay"),
        (kernels([]), "not checked", "no kernels were recorded"),
        (kernels([None, 0, 0]), "warn", "2 kernels ran in graph replays"),
        (
            kernels([None], "5 CUDA graph replays: kernels inside CUDA graphs aren't visible"),
            "warn",
            "aren't visible",
        ),
    ],
)
def test_replays_of_graphs_are_a_warning(spans: Spans, table: Table, state: str, text: str) -> None:
    heads = {rank: replace(head, device="cuda") for rank, head in spans.headers.items()}
    on_gpu = replace(spans, headers=heads, tables={"kernels": lambda: table})
    found = checks(on_gpu)["CUDA graphs"]
    assert found[0] == state
    assert text in found[1]


def test_a_table_that_cannot_be_read_is_a_warning_and_not_a_run_without_kernels(
    spans: Spans,
) -> None:
    def broken() -> Table:
        raise TraceError("the file is cut off")

    found = checks(replace(spans, tables={"kernels": broken}))["CUDA graphs"]
    assert found == ("warn", "The table kernels could not be read: the file is cut off.")


@pytest.mark.parametrize(("flops", "state"), [(1e15, "ok"), (1e21, "warn")])
def test_an_mfu_beyond_the_hardware_is_a_warning(spans: Spans, flops: float, state: str) -> None:
    heads = {
        rank: replace(head, device="NVIDIA H100 80GB HBM3") for rank, head in spans.headers.items()
    }
    rows = np.flatnonzero(spans.kind == KINDS.index("stage"))
    counted = Counter(rows, np.full(len(rows), flops / len(rows)))
    stated = replace(spans, headers=heads, counters={**spans.counters, "flops": counted})
    assert checks(stated)["MFU"][0] == state


def test_captures_that_take_more_than_a_hundredth_are_a_warning(spans: Spans) -> None:
    first = spans.rows(kind="stage")[0]
    kind, name = spans.kind.copy(), spans.name.copy()
    kind[first], name[first] = KINDS.index("region"), len(spans.names)
    with_overhead = replace(
        spans, kind=kind, name=name, names=(*spans.names, "rlprof open capture")
    )
    assert checks(with_overhead)["profiler overhead"][0] == "warn"


def test_launches_that_lack_their_kernels_are_a_warning() -> None:
    kernels, calls = feed(Feed(pieces=300))
    assert checks(traced(kernels, calls))["kernel/launch match"] == (
        "ok",
        "300 of 300 launches have a kernel",
    )
    state, text = checks(traced(kernels[9:], calls))["kernel/launch match"]
    assert state == "warn"
    assert text.startswith("9 of 300 launches have no kernel: events were dropped")
    assert checks(traced(kernels[3:], calls))["kernel/launch match"][0] == "ok", (
        "the last of a capture"
    )


@pytest.mark.parametrize(("took", "state"), [(1_000, "ok"), (1_200, "warn")])
def test_captures_that_slow_their_steps_down_are_a_warning(took: int, state: str) -> None:
    rows, now = [], 0
    for number in range(1, 13):
        captured = number > 8
        length = took if captured else 1_000
        counters = {"capture": 1} if captured else None
        rows.append(Row("step", "step", number, now, now + length, counters=counters))
        now += length
    found = checks(loaded(rows))["profiler overhead"]
    assert found[0] == state
    assert found[1].endswith(f"captured steps are {(took - 1_000) / 1_000:.1%} slower")


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("collectives", {"group size": [8, None]}),
        ("links", {"source": [0, 1], "destination": [7, 3]}),
        ("links", {"source rank": [0, None], "destination rank": [7, None]}),
        ("links", {"source": [0, 2**40], "destination": [7, 1]}),  # one end is damaged
    ],
)
def test_groups_and_links_name_ranks_that_no_header_has(
    spans: Spans, name: str, columns: dict[str, list[int | None]]
) -> None:
    rows = list(zip(*columns.values(), strict=True))
    table = Table(name, tuple(Column(each, "count") for each in columns), rows)
    wide = replace(spans, tables={**spans.tables, name: lambda: table})
    assert checks(wide)["ranks"] == ("warn", "3 of 8 present; missing: 3, 4, 5, 6, 7")


def test_a_capture_without_single_launches_is_not_told_to_be_one(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.call(1, 0, name="hipGraphLaunch")
    trace.kernel(1, 10, 20)

    state, detail = checks(load(trace.write(tmp_path / "a.json")))["kernel/launch match"]

    assert (state, "needs a torch.profiler" in detail) == ("not checked", False)

"""Traces drawn by a seed, of which a part is removed that the file itself declares.

Whatever is removed, no analysis says that a device was idle while it worked, that a kind of work
took no time, or that nothing is missing.
"""

import csv
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from lightning_rlprof.analysis.device.breakdown import breakdown
from lightning_rlprof.analysis.device.losses import LossCode, launch_match
from lightning_rlprof.analysis.device.timeline import (
    IDLE_CATEGORIES,
    device_losses,
    device_timeline,
    idle,
    idle_causes,
)
from lightning_rlprof.analysis.diagnosis.data_quality import check_quality
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.analysis.ledger.ledger import accounts_of
from lightning_rlprof.loaders.join_ranks import Piece, join_tables
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.html.page import facts, report_tables, write_report
from lightning_rlprof.report.summary import device_lines, is_device_trace, nothing_found, summary
from lightning_rlprof.store.parquet import kept_table, write_table
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Loss, Table, rows_of
from tests.builders.ascend_output import EPOCH, DatabaseRows, TraceEvents, capture_folder, us
from tests.builders.chrome import ChromeTrace
from tests.builders.nsys_export import NsysExport

SEEDS = range(4)
_STEP_NS, _STEPS, _PER_STEP = 2_000_000, 4, 8


class Kernel(NamedTuple):
    number: int
    launch: int
    start: int
    end: int
    stream: int
    step: int


def drawn(seed: int, streams: int = 1) -> list[Kernel]:
    """Return kernels that are launched in order, each stream running its own one by one."""
    dice = random.Random(seed)
    free, found = [0] * streams, []
    for step in range(_STEPS):
        now = step * _STEP_NS + dice.randrange(1_000, 200_000)
        for _ in range(_PER_STEP):
            stream = dice.randrange(streams)
            start = max(free[stream], now + dice.randrange(3_000, 60_000))
            free[stream] = start + dice.randrange(20_000, 120_000)
            found.append(Kernel(len(found) + 1, now, start, free[stream], stream, step + 1))
            now += dice.randrange(2_000, 150_000)
    return found


def kineto(path: Path, kernels: list[Kernel], lost: set[int]) -> Path:
    trace = ChromeTrace({"schemaVersion": 1, "baseTimeNanoseconds": 1_735_632_360_000_000_000})
    for step in range(_STEPS):
        trace.mark(f"ProfilerStep#{step + 1}", step * _STEP_NS, (step + 1) * _STEP_NS)
    for each in kernels:
        trace.call(each.number, each.launch)
        if each.number not in lost:
            stream = 7 + each.stream
            trace.kernel(each.number, each.start, each.end, "gemm", stream=stream)
    return trace.write(path / "trace.json")


def nsys(path: Path, kernels: list[Kernel], lost: set[int]) -> Path:
    export = NsysExport(path / "report.sqlite")
    for step in range(_STEPS):
        export.own("step", "step", step * _STEP_NS, (step + 1) * _STEP_NS, step=step + 1)
    launch = export.string("cudaLaunchKernel_v7000")
    for each in kernels:
        export.call(each.launch, each.number)
        export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["nameId"] = launch
        if each.number not in lost:
            export.kernel("gemm", each.start, each.end, each.number, streamId=7 + each.stream)
    return export.write()


def ascend_database(path: Path, kernels: list[Kernel], lost: set[int]) -> Path:
    rows, output = DatabaseRows(), capture_folder(path)
    for each in kernels:
        rows.task("MatMul", each.start, each.end, each.number, stream=each.stream)
        if each.number in lost:
            rows.rows["TASK"].pop()  # COMPUTE_TASK_INFO still names it.
            rows.add("TASK", globalTaskId=-each.number, startNs=1, endNs=1, taskType="EVENT_WAIT")
    rows.write(output / "ascend_pytorch_profiler_0.db")
    return output.parent


def ascend_text(path: Path, kernels: list[Kernel], lost: set[int]) -> Path:
    trace, output = TraceEvents(), capture_folder(path)
    heads = ["Step Id", "Device_id", "Name", "Type", "Start Time(us)", "Duration(us)"]
    with (output / "kernel_details.csv").open("w", newline="") as file:
        sheet = csv.writer(file)
        sheet.writerow(heads)
        for each in kernels:
            trace.task("MatMul", each.start, each.end, stream=each.stream)
            if each.number not in lost:
                length = f"{(each.end - each.start) / 1000:.3f}"
                sheet.writerow([each.step, 0, "MatMul", "MatMul", us(EPOCH + each.start), length])
    trace.write(output / "trace_view.json")
    return output.parent


WRITERS: dict[str, Callable[[Path, list[Kernel], set[int]], Path]] = {
    "kineto": kineto,
    "nsys": nsys,
    "ascend database": ascend_database,
    "ascend text": ascend_text,
}


def parts_of(kernels: list[Kernel], seed: int) -> dict[str, set[int]]:
    """Return numbers of kernels to remove, by what kind of loss that is."""
    dice = random.Random(seed)
    numbers = [each.number for each in kernels]
    begin = dice.randrange(2, len(numbers) // 2)
    return {
        "first": set(numbers[: _PER_STEP + 4]),
        "last": set(numbers[-_PER_STEP - 4 :]),
        "middle": set(numbers[begin : begin + 10]),
        "some": set(dice.sample(numbers, len(numbers) // 3)),
        "all": set(numbers),
    }


def idle_times(spans: Spans) -> list[tuple[int, int]]:
    """Return when devices were idle."""
    found: list[tuple[int, int]] = []
    for lane in device_timeline(spans).lanes:
        start, end, _ = idle_causes(lane)
        found += zip(start.tolist(), end.tolist(), strict=True)
    return found


def ask_all(spans: Spans, folder: Path) -> dict[str, Any]:
    """Return what summary, breakdown, idle, ledger, findings and the report say."""
    assert is_device_trace(spans)
    found = summary(spans, captures=True)
    write_report(spans, report_tables(spans), folder / "report.html")
    return {
        "headline": " ".join(device_lines(found)),
        "shares": found.device,
        "nothing": nothing_found(found),
        "findings": diagnose(spans),
        "breakdown": rows_of(breakdown(spans)),
        "idle": rows_of(idle(spans)),
        "ledger": accounts_of(spans).job_ns.sum(axis=0),
        "quality": found.quality,
        "facts": facts(spans),
        "report": (folder / "report.html").read_text(encoding="utf-8"),
    }


def true_idle_ns(kernels: list[Kernel]) -> int:
    """Return how long no kernel ran, from the first step to the last."""
    busy = last = 0
    for start, end in sorted((each.start, each.end) for each in kernels):
        busy += max(0, end - max(start, last))
        last = max(last, end)
    return max(_STEPS * _STEP_NS, last) - busy


def check_truth(said: dict[str, Any], spans: Spans, kernels: list[Kernel]) -> None:
    """Check that nothing is idle while the removed kernels ran, in any analysis."""
    for start, end in idle_times(spans):
        assert not [each for each in kernels if each.start < end and each.end > start]
    limit = true_idle_ns(kernels)
    assert sum(row["total"] for row in said["idle"]) <= limit
    for row in said["breakdown"]:
        assert row["idle"] <= limit
        assert row["compute"] != 0
    assert sum(int(said["ledger"][each]) for each in IDLE_CATEGORIES) <= limit
    assert "Capture a step with torch.profiler or Nsight" not in said["report"]


@pytest.mark.deep
@pytest.mark.parametrize("shape", WRITERS)
@pytest.mark.parametrize("part", ["first", "last", "middle", "some", "all"])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_statement_is_untrue_after_kernels_are_removed(
    shape: str, part: str, seed: int, tmp_path: Path
) -> None:
    kernels = drawn(seed, streams=1 + seed % 2)
    lost = parts_of(kernels, seed)[part]
    spans = load(WRITERS[shape](tmp_path, kernels, lost))
    said = ask_all(spans, tmp_path)
    if (shape, part) == ("ascend text", "all"):  # The trace beside the sheet has them all.
        assert not device_losses(spans)
        return

    zero = spans.unix_ns - EPOCH if shape.startswith("ascend") else 0
    moved = [each._replace(start=each.start - zero, end=each.end - zero) for each in kernels]
    check_truth(said, spans, moved)
    losses = device_losses(spans)
    assert any(each.hides_time for each in losses)
    assert said["quality"].doubts
    assert "unknown" in said["headline"]
    assert "unknown" in said["nothing"] or said["findings"].found
    assert said["findings"].losses == losses


@pytest.mark.parametrize("shape", WRITERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_whole_trace_all_idle_time_is_idle(shape: str, seed: int, tmp_path: Path) -> None:
    kernels = drawn(seed, streams=1 + seed % 2)
    spans = load(WRITERS[shape](tmp_path, kernels, set()))
    assert not device_losses(spans)
    total = rows_of(breakdown(spans))[-1]
    assert total["unknown"] == 0
    last = max(_STEPS * _STEP_NS, *(each.end for each in kernels))
    ran = last - true_idle_ns(kernels)
    assert total["compute"] == ran
    text = nothing_found(summary(spans, captures=True))
    assert "unknown" not in text


def test_a_loss_of_the_first_steps_leaves_the_rest_as_measured(tmp_path: Path) -> None:
    kernels = drawn(3)
    first = [each for each in kernels if each.step == 1]
    (tmp_path / "whole").mkdir()
    whole = load(kineto(tmp_path / "whole", kernels, set()))
    damaged = load(kineto(tmp_path, kernels, {each.number for each in first}))
    after = [each for each in kernels if each.step > 1]
    ends = [interval for interval in idle_times(whole) if interval[0] >= after[0].end]
    assert [each for each in idle_times(damaged) if each[0] >= after[0].end] == ends
    # Step 1 has no kernel, and its kernels may have run until the first one of step 2.
    assert rows_of(breakdown(damaged))[-1]["unknown"] == after[0].start


def test_a_step_without_kernels_and_launches_has_unknown_device_time(tmp_path: Path) -> None:
    """CUPTI lost the launches, too: only the step remains."""
    kernels = [each for each in drawn(1) if each.step != 2]
    spans = load(kineto(tmp_path, kernels, set()))
    (loss,) = device_losses(spans)
    assert (loss.code, loss.rank, loss.missing, loss.of) == (LossCode.STEPS, 0, 1, _STEPS)
    assert rows_of(breakdown(spans))[-1]["unknown"] == _STEP_NS
    assert "1 of 4 steps have no kernel" in " ".join(device_lines(summary(spans, captures=True)))


@pytest.mark.parametrize("edge", ["begins", "ends"])
def test_a_recording_that_begins_or_ends_with_nothing_is_not_idle_there(
    edge: str, tmp_path: Path
) -> None:
    """One small kernel and a stray annotation are far from the rest; the host recorded nothing."""
    trace, far = ChromeTrace(), 40_000_000
    rest, alone = (far, 0) if edge == "begins" else (0, far)
    trace.mark("stray", alone, alone + 50_000)
    trace.launched(99, alone + 1_000)
    for each in drawn(0):
        trace.call(each.number, rest + each.launch)
        trace.kernel(each.number, rest + each.start, rest + each.end)
    spans = load(trace.write(tmp_path / "trace.json"))
    losses = {each.code: each for each in device_losses(spans)}
    assert losses.keys() == {LossCode.EDGES}
    assert 30_000_000 < losses[LossCode.EDGES].missing < far + 200_000
    total = rows_of(breakdown(spans))[-1]
    assert total["unknown"] == losses[LossCode.EDGES].missing
    assert total["idle"] < 10_000_000
    assert "unknown" in device_lines(summary(spans, captures=True))[0]


def test_first_work_that_was_queued_for_long_does_not_make_the_device_idle(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("run", 0, 90_000_000)
    trace.launched(98, 1_000)
    trace.call(99, 2_000)
    trace.kernel(99, 80_000_000, 89_000_000)
    (loss,) = device_losses(load(trace.write(tmp_path / "trace.json")))
    assert (loss.code, loss.missing) == (LossCode.EDGES, 80_000_000 - 2_000)


def test_a_host_that_computes_at_the_edge_leaves_the_device_idle(tmp_path: Path) -> None:
    """Its own record proves that nothing was launched meanwhile."""
    trace = ChromeTrace()
    trace.mark("prepare", 0, 80_000_000)
    for number in range(1, 20):
        trace.launched(number, 80_000_000 + number * 1_000)
    spans = load(trace.write(tmp_path / "trace.json"))
    assert not device_losses(spans)
    assert rows_of(idle(spans))[0]["kind"] == "host-bound idle"


def test_kernels_of_before_the_recording_have_no_launch_and_that_is_said(tmp_path: Path) -> None:
    trace = ChromeTrace()
    for number in range(1, 9):
        trace.kernel(number, number * 1_000, number * 1_000 + 500)
    for number in range(9, 20):
        trace.launched(number, number * 1_000)
    spans = load(trace.write(tmp_path / "trace.json"))
    match = launch_match(spans)
    assert match[:4] == (11, 0, 19, 8)
    states = {each.name: each.state for each in check_quality(spans).checks}
    assert states["kernel/launch match"] == "warn"
    assert not any(each.hides_time for each in device_losses(spans))


@pytest.mark.parametrize("processes", [1, 2])
def test_work_without_a_process_is_of_the_only_one_or_counted(
    processes: int, tmp_path: Path
) -> None:
    export = NsysExport(tmp_path / "report.sqlite")
    launch = export.string("cudaLaunchKernel_v7000")
    for pid in range(100, 100 + processes):
        for number in range(1, 21):
            export.call(number * 1_000, number, pid=pid)
            export.rows["CUPTI_ACTIVITY_KIND_RUNTIME"][-1]["nameId"] = launch
            export.kernel("gemm", number * 1_000 + 100, number * 1_000 + 600, number)
    names = export.columns["CUPTI_ACTIVITY_KIND_KERNEL"]
    names.remove("globalPid")
    spans = load(export.write())
    assert len(spans.ranks) == processes
    if processes == 1:
        assert not device_losses(spans)
        assert rows_of(breakdown(spans))[-1]["compute"] == 20 * 500
        return
    (loss,) = device_losses(spans)
    assert (loss.code, loss.rank, loss.missing, loss.of) == (LossCode.ROWS, None, 40, 40)
    (line,) = device_lines(summary(spans, captures=True))
    assert line.startswith("Device time: 40 of 40 kernels and copies could not be read")


def test_a_report_without_the_table_of_kernels_says_that_they_are_missing(tmp_path: Path) -> None:
    path = nsys(tmp_path, drawn(0), set())
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        database.commit()
    spans = load(path)
    assert [each.code for each in device_losses(spans)] == [LossCode.ROWS]
    assert "unknown" in device_lines(summary(spans, captures=True))[0]


def test_without_the_table_of_kernels_their_time_is_not_recorded_rather_than_zero(
    tmp_path: Path,
) -> None:
    rows, output = DatabaseRows(), capture_folder(tmp_path)
    for each in drawn(0):
        rows.task("MatMul", each.start, each.end, each.number)
    for at in (0, 7_000_000):
        rows.add(
            *("COMMUNICATION_OP",),
            opName="hcom_allReduce_",
            startNs=EPOCH + at,
            endNs=EPOCH + at + 90_000,
            connectionId=at,
            groupName="group",
        )
    del rows.rows["COMPUTE_TASK_INFO"]
    rows.write(output / "ascend_pytorch_profiler_0.db")
    spans = load(output.parent)
    total = rows_of(breakdown(spans))[-1]
    assert total["compute"] is None
    assert (total["exposed communication"], total["idle"]) == (180_000, 0)
    assert not rows_of(idle(spans))


def test_the_wall_of_a_trace_is_that_of_its_spans_and_devices(tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("execute", 0, 26_000_000)
    trace.call(1, 1_000)
    trace.kernel(1, 20_000_000, 308_000_000)
    assert "308 ms" in facts(load(trace.write(tmp_path / "trace.json")))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hipGraphLaunch", "all kernels ran in graph replays"),
        (None, "no call that launches"),
    ],
)
def test_a_check_names_what_it_really_lacks(name: str | None, reason: str, tmp_path: Path) -> None:
    trace = ChromeTrace()
    trace.mark("run", 0, 9_000)
    for number in range(1, 6):
        if name is not None:
            trace.call(number, number * 1_000, name=name)
        trace.kernel(number, number * 1_000 + 100, number * 1_000 + 600)
    checks = check_quality(load(trace.write(tmp_path / "trace.json"))).checks
    (check,) = [each for each in checks if each.name == "kernel/launch match"]
    assert (check.state, check.needs) == ("not checked", "launches")
    assert check.detail.startswith(reason)


def test_how_many_rows_are_lost_survives_the_cache_and_joining(tmp_path: Path) -> None:
    columns = (Column("rank", "count"), Column("start", "time", "ns"))
    losses = Loss("7 are lost", rows=7), Loss("and more")
    lossy = Table("kernels", columns, [(0, 5)], losses=losses)
    write_table(lossy, "kernels", tmp_path / "kernels.parquet")
    kept = kept_table(tmp_path / "kernels.parquet", "kernels")
    assert (kept.losses, kept.rows_lost) == (lossy.losses, 7)
    both = join_tables("kernels", [Piece((rank,), 0, lambda: lossy) for rank in (0, 1)])
    assert both.rows_lost == 14

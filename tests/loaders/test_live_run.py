"""Following a run that is being written: offsets, torn lines, damage, bounded memory."""

import json
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.analysis.stages import stages
from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.live_run import LATELY, LiveRun, hang_evidence, last_steps
from lightning_rlprof.loaders.load import load, run_directory
from lightning_rlprof.records.hang_reports import (
    FOLDER,
    Frame,
    HangReport,
    Heartbeat,
    ThreadStack,
    alive_file,
    dump_file,
    rank_ranges,
    ranks_in,
    read_beat,
    read_reports,
    write_beat,
    write_report,
)
from lightning_rlprof.records.records import OPTIMIZER_STEP
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.report.live_view import live_view
from lightning_rlprof.testing import make_header
from tests.builders.runs import grpo_run
from tests.effort import examples

MS = 1_000_000
REPORT = HangReport(0, 1, "hang", 5, 300.0, 300.0, 3, in_step=True)
ENTRY = {"process_group": ("0", ""), "collective_seq_id": 7, "profiling_name": "nccl:all_reduce"}


@pytest.fixture
def seconds() -> SimpleNamespace:
    """Time that a test moves."""
    return SimpleNamespace(now=1_000.0)


@pytest.fixture
def live(tmp_path: Path, seconds: SimpleNamespace) -> LiveRun:
    return LiveRun(tmp_path, lambda: seconds.now, lambda: 0.0)


def span(name, kind, step, start, end, *, id=1, parent=None, thread=7, counters=None):
    return ("span", name, kind, step, start * MS, end * MS, thread, id, parent, counters)


def stage_ns(live):
    """Return the time of each stage in all steps that are kept, without that of stages inside."""
    table = stages(live.spans)
    totals = zip(table.column("stage"), table.column("total"), strict=True)
    return {stage: total for stage, total in totals if stage != "untraced"}


def step_ns(live, rank=0):
    spans = live.spans
    rows = spans.rows(kind="step", rank=rank)
    return spans.duration_ns[rows].tolist()


def rank_writer(run: Path, rank: int = 0, world_size: int = 1) -> TraceWriter:
    return TraceWriter(run, replace(make_header(rank), world_size=world_size))


def one_step(step: int, *, slow: int = 0) -> list[tuple[object, ...]]:
    at = step * 1_000
    return [
        span("actor_generate", "stage", step, at, at + 60 + slow, id=2, parent=1),
        span("actor_update", "stage", step, at + 60 + slow, at + 90 + slow, id=3, parent=1),
        span("step", "step", step, at, at + 100 + slow),
    ]


def test_each_refresh_takes_what_was_appended(live, tmp_path):
    writer = rank_writer(tmp_path)
    live.refresh()
    assert live.ranks[0].last_step == 0
    for step in (1, 2, 3):
        writer.write(one_step(step))
        live.refresh()
        assert live.ranks[0].last_step == step
    (rank,) = live.ranks.values()
    assert (step_ns(live), rank.last_stage) == ([100 * MS] * 3, "actor_update")
    assert stage_ns(live) == {"actor_generate": 180 * MS, "actor_update": 90 * MS}
    assert not live.has_ended
    writer.write([("end", 9, "finished")])
    live.refresh()
    assert (rank.status, live.has_ended) == ("finished", True)


def test_a_file_is_read_from_where_the_last_refresh_ended(live, tmp_path, monkeypatch):
    writer = rank_writer(tmp_path)
    for step in range(1, 2_000):
        writer.write(one_step(step))
    live.refresh()
    read = []
    real = os.fdopen

    def counted(*given):
        file = real(*given)
        monkeypatch.setattr(os, "fdopen", real)

        class Counting:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def seek(self, place):
                return file.seek(place)

            def read(self, size):
                read.append(size)
                return file.read(size)

        return Counting()

    monkeypatch.setattr(os, "fdopen", counted)
    writer.write(one_step(2_000))
    live.refresh()
    assert live.ranks[0].last_step == 2_000
    assert 0 < sum(read) < 1_000


def test_half_a_line_waits_for_its_rest(live, tmp_path):
    path = rank_writer(tmp_path).path
    line = json.dumps(span("step", "step", 1, 0, 100)).encode() + b"\n"
    for part in (line[:20], line[20:40], line[40:]):
        with path.open("ab") as file:
            file.write(part)
        live.refresh()
        assert live.ranks[0].last_step == (part == line[40:])


def test_the_time_of_a_stage_inside_a_stage_counts_once(live, tmp_path):
    lines = [
        span("forward", "region", 1, 10, 30, id=4, parent=3),
        span("actor_image_embeds", "stage", 1, 12, 20, id=5, parent=4),
        span("compute_reward", "stage", 1, 30, 40, id=7, parent=3),
        span("actor_update", "stage", 1, 0, 90, id=3, parent=1),
        span("on_a_thread", "stage", 1, 0, 90, id=6, thread=8),
        span("step", "step", 1, 0, 100),
    ]
    rank_writer(tmp_path).write(lines)
    live.refresh()
    found = {"actor_image_embeds": 8, "actor_update": 72, "compute_reward": 10}
    assert stage_ns(live) == {name: ms * MS for name, ms in found.items()}


def test_without_stages_the_phases_of_lightning_are_shown(live, tmp_path):
    lines = [
        span("backward", "region", 1, 10, 30, id=4, parent=3),
        span("training_step", "region", 1, 0, 60, id=3, parent=1),
        span("on_train_batch_end", "region", 1, 60, 70, id=5, parent=1),
        span("step", "step", 1, 0, 100),
    ]
    rank_writer(tmp_path).write(lines)
    live.refresh()
    assert stage_ns(live) == {"backward": 20 * MS, "training_step": 40 * MS}
    assert live.ranks[0].last_stage == "training_step"


def test_a_phase_after_a_stage_is_not_the_last_stage(live, tmp_path):
    backward = span("backward", "region", 1, 90, 95, id=4, parent=1)
    rank_writer(tmp_path).write([*one_step(1)[:2], backward])
    live.refresh()
    assert live.ranks[0].last_stage == "actor_update"


def test_only_the_last_steps_count_and_memory_stays_bounded(live, tmp_path):
    writer = rank_writer(tmp_path)
    for step in range(1, 301):
        writer.write([span(f"stage {step}", "stage", step, 0, 1, id=9), *one_step(step)])
        writer.write([("note", 1, "warning", f"{step} " + "x" * 9_000)])
        if step % 50 == 0:
            live.refresh()
    (rank,) = live.ranks.values()
    spans = live.spans
    assert spans.step[spans.rows(kind="step")].tolist() == [*range(301 - LATELY, 301)]
    assert stage_ns(live)["actor_update"] == LATELY * 30 * MS
    assert len(spans) == len(rank.columns) == LATELY * 4
    assert max(len(note.text) for note in rank.notes) <= 400
    assert len(rank.notes) <= 16


def test_a_burst_that_is_too_long_is_skipped_but_for_its_end(live, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.loaders.live_run._MAX_BYTES", 1 << 18)
    monkeypatch.setattr("lightning_rlprof.loaders.live_run._MIN_BYTES_PER_RANK", 1 << 13)
    writer = rank_writer(tmp_path)
    live.refresh()
    for step in range(1, 3_001):
        writer.write(one_step(step))
    live.refresh()
    (rank,) = live.ranks.values()
    assert rank.last_step == 3_000
    assert len(step_ns(live)) == LATELY
    assert not rank.is_whole


@pytest.mark.parametrize("counter", ["capture", "interrupted"])
def test_unusual_steps_do_not_count_as_times(counter, live, tmp_path):
    lines = [*one_step(1), span("step", "step", 2, 0, 9_000, counters={counter: 1})]
    rank_writer(tmp_path).write(lines)
    live.refresh()
    assert live.ranks[0].last_step == 2
    assert stage_ns(live) == {"actor_generate": 60 * MS, "actor_update": 30 * MS}


def test_memory_metrics_and_notes_are_the_last_ones(live, tmp_path):
    first = {"host_rss_bytes": 5, "host_limit_bytes": 99, "device_total_bytes": 77}
    writer = rank_writer(tmp_path)
    writer.write([span("step", "step", 1, 0, 1, counters=first)])
    for step in range(2, 4_000):  # the first step is no longer in the last 256 KB
        writer.write(one_step(step))
    rates, values = {"host_cpu_percent": 40.0}, {"device_power_watts": 300}
    last = {"host_rss_bytes": 6, "device_reserved_bytes": -1, "tokens": 3}
    writer.write(
        [
            span("step", "step", 4_000, 0, 1, counters=last),
            ("metrics", 0, 1, 0, {"host_cpu_percent": 1.0}, {}),
            ("metrics", 1, 2, 0, rates, values),
            ("note", 1, "info", "not an alarm"),
            ("note", 1, "error", "lost"),
        ]
    )
    live.refresh()
    (rank,) = live.ranks.values()
    assert rank.memory == {"host_rss_bytes": 6, "host_limit_bytes": 99, "device_total_bytes": 77}
    assert rank.metrics == {"host_cpu_percent": 40.0, "device_power_watts": 300.0}
    assert [(note.level, note.text) for note in rank.notes] == [("error", "lost")]


def test_several_engines_of_a_rank_have_their_numbers(live, tmp_path):
    lines = [("metrics", 0, 1, at, {}, {"engine_waiting_requests": 5 + at}) for at in (0, 1)]
    rank_writer(tmp_path).write([*one_step(1), *lines])
    live.refresh()
    assert live.ranks[0].metrics == {
        "engine_waiting_requests_0": 5.0,
        "engine_waiting_requests_1": 6.0,
    }


def test_how_a_rank_ended_is_read_where_a_full_disk_lets_it_be_written(live, tmp_path):
    writer = rank_writer(tmp_path)
    writer.write(one_step(1))
    live.refresh()
    writer.write_reserved([("end", 9, "disk full")])
    os.utime(writer.path, ns=(1, 1))
    live.refresh()
    assert live.ranks[0].status == "disk full"


def test_a_rank_that_writes_nothing_is_known_by_the_clock(live, tmp_path, seconds):
    writer = rank_writer(tmp_path)
    os.utime(writer.path, (0, 0))
    live.refresh()
    seconds.now += 7
    assert live.quiet_s(live.ranks[0]) == 7
    writer.write(one_step(1))
    live.refresh()
    assert live.quiet_s(live.ranks[0]) == 0


def test_how_long_an_old_file_was_quiet_is_known_by_its_time(tmp_path):
    os.utime(rank_writer(tmp_path).path, (100, 100))
    live = LiveRun(tmp_path, lambda: 5.0, lambda: 160.0)
    live.refresh()
    assert live.quiet_s(live.ranks[0]) == 60


def test_ranks_that_come_later_are_found(live, tmp_path):
    rank_writer(tmp_path, 1, world_size=2)
    live.refresh()
    assert (sorted(live.ranks), live.world_size) == ([1], 2)
    rank_writer(tmp_path, 0, world_size=2)
    live.refresh()
    assert sorted(live.ranks) == [0, 1]


def test_the_last_report_of_a_hang_is_kept_without_its_stacks(live, tmp_path):
    rank_writer(tmp_path)
    folder = tmp_path / FOLDER
    folder.mkdir()
    report = HangReport(0, 1, "hang", 5, 61.5, 60.0, 3, True, "backward")
    frames = (Frame("train.py", 3, "fit"),)
    write_report(tmp_path, replace(report, threads=(ThreadStack("MainThread", frames),)))
    (folder / "rank-00000-02.json").write_text("[")
    live.refresh()
    assert live.hangs == {0: report}
    write_report(tmp_path, replace(report, number=2, cause="recovered"))
    live.refresh()
    assert live.hangs[0].cause == "recovered"


HOSTILE = [
    b"",
    b"\n\n",
    b"[" * 100_000,
    b'["span"]',
    b'["span","step","step",1,0,1]',
    b'["span","step","step",1e400,0,1,7,1,null,null]',
    b'["span","step","step",%d,0,1,7,1,null,null]' % 10**400,
    b'["span","step","step",1,0,%d,7,1,null,null]' % 10**400,
    b'["span","step","step",true,0,1,7,1,null,null]',
    b'["span",null,"step",1,0,1,7,1,null,null]',
    b'["span","a","stage",1,0,1,[],1,1,null]',
    b'["span","a","stage",1,0,1,7,1,1,{"host_rss_bytes":%d}]' % 10**400,
    b'["span","a","stage",1,0,1,7,1,1,{"host_rss_bytes":-5}]',
    b'["metrics",0,1,0,{"a":1e999},{"b":null}]',
    b'["metrics",0,1,0,[],7]',
    b'["note",0,"warning",7]',
    b'["end"]',
    b'["end",0,{"a":1}]',
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("raw", HOSTILE, ids=range(len(HOSTILE)))
def test_damaged_lines_are_left_out_and_the_others_are_read(raw, live, tmp_path):
    writer = rank_writer(tmp_path)
    with writer.path.open("ab") as file:
        file.write(raw + b"\n" + raw + b"\n")
    writer.write(one_step(1))
    live.refresh()
    (rank,) = live.ranks.values()
    assert rank.last_step == 1
    assert step_ns(live)[-1] == 100 * MS
    assert not rank.metrics.keys() - {"a"}


def test_parents_in_a_circle_end(live, tmp_path):
    lines = [
        span("a", "region", 1, 0, 1, id=2, parent=3),
        span("b", "region", 1, 0, 1, id=3, parent=2),
        span("c", "stage", 1, 0, 1, id=4, parent=2),
        span("step", "step", 1, 0, 100),
    ]
    rank_writer(tmp_path).write(lines)
    live.refresh()
    assert stage_ns(live) == {"c": MS}


def test_what_is_not_a_file_is_left_out(live, tmp_path):
    os.mkfifo(tmp_path / "rank-00001.jsonl")
    (tmp_path / "rank-00002.jsonl").mkdir()
    rank_writer(tmp_path)
    live.refresh()
    assert sorted(live.ranks) == [0]


def columns_of(spans):
    """Return all that a run holds, in a form that can be compared."""
    names = ("name", "kind", "rank", "step", "start_ns", "end_ns", "thread", "id", "parent")
    counters = {
        name: (counter.rows.tolist(), counter.values.dtype, counter.values.tolist())
        for name, counter in spans.counters.items()
    }
    columns = {name: getattr(spans, name).tolist() for name in names}
    return columns, counters, spans.names, spans.threads, spans.statuses, spans.unix_ns


@pytest.mark.parametrize("steps", [3, LATELY])
def test_a_run_that_fits_the_window_is_the_same_as_when_it_is_loaded(steps, live, tmp_path):
    writers = [rank_writer(tmp_path, rank, 2) for rank in (0, 1)]
    for step in range(1, steps + 1):
        for writer in writers:
            writer.write([("thread", 7, "Main"), *one_step(step)])
            writer.write([("count", 3, {"tokens": step, "loss": 0.5})])
        live.refresh()
    for writer in writers:
        writer.write([("end", 9, "finished")])
    live.refresh()
    assert columns_of(live.spans) == columns_of(load(tmp_path))


def optimizer_step(step, ms, rank=0):
    at = step * 10_000
    return span("step", "step", step, at, at + ms, id=step, thread=7 + rank)


@pytest.mark.parametrize("attach_at", [0, 40, 300])
def test_steps_of_an_optimizer_are_the_iterations_that_load_shows(attach_at, tmp_path):
    """A loop of Fabric: each sixth step has a rollout before it."""
    headers = [replace(make_header(rank, 2), step_unit=OPTIMIZER_STEP) for rank in (0, 1)]
    writers = [TraceWriter(tmp_path, header) for header in headers]
    live = LiveRun(tmp_path, lambda: 0.0, lambda: 0.0)
    for step in range(1, 303):
        for rank, writer in enumerate(writers):
            writer.write([optimizer_step(step, 900 if step % 6 == 1 else 10 + rank)])
        if step >= attach_at and step % 25 == 2:
            live.refresh()
            whole, own = load(tmp_path), live.spans
            expected = whole.rows(kind="step", rank=0)
            rows = own.rows(kind="step", rank=0)
            count = min(len(expected), LATELY)
            assert own.step[rows].tolist() == whole.step[expected][-count:].tolist()
            assert own.duration_ns[rows].tolist() == whole.duration_ns[expected][-count:].tolist()
    live.refresh()
    assert live.spans.step.max() == 51
    assert live_view(live).title.startswith("2 ranks · step 51 · ")


def test_a_file_that_is_no_rank_file_is_a_problem_and_the_others_are_read(live, tmp_path):
    rank_writer(tmp_path).write(one_step(1))
    (tmp_path / "rank-00001.jsonl").write_text("nothing\nof the kind\n")
    live.refresh()
    assert (sorted(live.ranks), list(live.problems)) == ([0], [1])


def test_a_header_that_is_being_written_is_no_problem(live, tmp_path):
    path = rank_writer(tmp_path).path
    whole = path.read_bytes()
    path.write_bytes(whole[:30])
    live.refresh()
    assert (live.ranks, live.problems, live.spans) == ({}, {}, None)
    path.write_bytes(whole)
    live.refresh()
    assert list(live.ranks) == [0]


def test_a_slow_step_in_the_middle_of_a_run_is_no_warm_up(live, tmp_path):
    writer = rank_writer(tmp_path)
    for step in range(1, 31):
        writer.write(one_step(step, slow=500 if step == 11 else 0))
    live.refresh()
    assert stage_ns(live)["actor_generate"] == (30 * 60 + 500) * MS


def written(run, rank=0, *lines, world=1, **header):
    writer = TraceWriter(run, replace(make_header(rank, world), **header))
    writer.write(lines)
    writer.close()
    (run / FOLDER).mkdir(exist_ok=True)
    return run


def test_a_rank_that_ended_has_its_status_and_the_time_of_its_last_line(tmp_path):
    run = written(tmp_path / "run", 0, ("note", 5, "info", "x"), ("end", 9, "finished"))
    (evidence,) = hang_evidence(run)
    assert (evidence.end, evidence.last_ns, evidence.process) == ("finished", 9, "")


def test_a_rank_that_has_no_file_is_known_by_the_size_of_the_world(tmp_path):
    run = written(tmp_path / "run", 1, world=3)
    found = hang_evidence(run)
    assert [(each.rank, each.header is None) for each in found] == [
        (0, True),
        (1, False),
        (2, True),
    ]


def test_in_an_open_world_no_rank_is_missing(tmp_path):
    run = written(tmp_path / "run", 1, world=3, open_world=True)
    assert [each.rank for each in hang_evidence(run)] == [1]


def test_the_state_of_a_process_of_this_host_is_asked(tmp_path):
    host, own = socket.gethostname(), os.getpid()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    run = written(tmp_path / "run", 0, host=host, pid=own, world=3)
    written(run, 1, host=host, pid=done.pid, world=3)
    written(run, 2, host="another", pid=own, world=3)
    states = [each.process for each in hang_evidence(run)]
    assert states[0] in ("R", "S")
    assert states[1:] == ["gone", ""]


def test_reports_and_signs_of_life_come_back_as_they_were_written(tmp_path):
    run = written(tmp_path / "run")
    beat = Heartbeat(7, 3, 1.5)
    write_beat(run, 0, beat)
    write_report(run, REPORT)
    write_report(run, replace(REPORT, number=2, cause="still"))
    (evidence,) = hang_evidence(run)
    assert evidence.beat == beat
    assert [report.cause for report in evidence.reports] == ["hang", "still"]
    modes = {path.stat().st_mode & 0o777 for path in (run / FOLDER).iterdir()}
    assert modes == {0o600}


def test_only_the_last_report_of_a_hang_is_read_with_its_stacks(tmp_path):
    run = written(tmp_path / "run")
    stack = ThreadStack("MainThread", (Frame("train.py", 3, "train"),), is_training=True)
    for number, cause in enumerate(("hang", "still", "recovered"), start=1):
        write_report(run, replace(REPORT, number=number, cause=cause, threads=(stack,)))
    reports = read_reports(run, 0)
    assert [(each.cause, len(each.threads)) for each in reports] == [
        ("hang", 0),
        ("still", 1),
        ("recovered", 0),
    ]


def test_a_hostile_range_of_ranks_is_cut():
    assert len(ranks_in(((0, 2**60, 0),))) == 1 << 17


@settings(max_examples=examples(300))
@given(st.lists(st.integers(0, 2000), unique=True).map(sorted))
def test_ranks_come_back_from_their_ranges(ranks):
    assert ranks_in(rank_ranges(ranks)) == ranks


def test_the_dump_of_torch_is_read_without_running_it(tmp_path):
    run = written(tmp_path / "run")
    dump_file(run, 0).write_bytes(pickle.dumps({"entries": [ENTRY, "x", {"a": 1}]}))
    (evidence,) = hang_evidence(run)
    assert [(each.name, each.seq) for each in evidence.dump] == [("nccl:all_reduce", 7)]


def test_a_dump_that_leads_out_of_the_run_is_not_read(tmp_path):
    run = written(tmp_path / "run")
    outside = tmp_path / "outside"
    outside.write_bytes(pickle.dumps({"entries": [ENTRY]}))
    dump_file(run, 0).symlink_to(outside)
    assert hang_evidence(run)[0].dump == ()


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 10_000, b"\xff\xfe", b'{"rank": "x"}', b"null"])
def test_what_cannot_be_read_is_left_out(tmp_path, data):
    run = written(tmp_path / "run")
    (run / FOLDER / "rank-00000-01.json").write_bytes(data)
    alive_file(run, 0).write_bytes(data)
    dump_file(run, 0).write_bytes(data)
    assert read_reports(run, 0) == ()
    assert read_beat(run, 0) is None
    assert hang_evidence(run)[0].dump == ()


def test_a_file_or_a_directory_of_runs_stands_for_a_run(tmp_path):
    old = written(tmp_path / "old", unix_ns=1)
    new = written(tmp_path / "new", unix_ns=2)
    assert run_directory(old / "rank-00000.jsonl") == old
    assert run_directory(old) == old
    assert run_directory(tmp_path) == new


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(TraceError, match="is not a run of rlprof"):
        run_directory(tmp_path)
    (tmp_path / "rank-00000.jsonl").write_text("no header\n")
    with pytest.raises(TraceError, match="not a rank file"):
        hang_evidence(tmp_path)


def test_the_last_steps_of_a_long_run_are_those_that_every_rank_has_whole(tmp_path: Path) -> None:
    whole = grpo_run(tmp_path, steps=300, ranks=2)
    found = last_steps(tmp_path, 50_000)
    assert found is not None
    assert not found.from_start
    steps = found.rows(kind="step")
    first = int(found.step[steps].min())
    assert 100 < first < 300
    kept = np.flatnonzero(whole.step >= first)
    assert [found.names[code] for code in found.name] == [
        whole.names[code] for code in whole.name[kept]
    ]
    for column in ("rank", "step", "id", "parent"):
        assert getattr(found, column).tolist() == getattr(whole, column)[kept].tolist()
    assert found.duration_ns.tolist() == whole.duration_ns[kept].tolist()


def test_the_last_steps_of_a_short_run_are_all_of_it(tmp_path: Path) -> None:
    whole = grpo_run(tmp_path, steps=5)
    found = last_steps(tmp_path, 2**20)
    assert found is not None
    assert found.from_start
    assert found.id.tolist() == whole.id.tolist()


def test_steps_of_an_optimizer_are_counted_from_the_first_one_on(tmp_path: Path) -> None:
    header = replace(make_header(), step_unit=OPTIMIZER_STEP)
    writer = TraceWriter(tmp_path, header)
    writer.write([span("step", "step", 1, 0, 9)])
    writer.close()
    assert last_steps(tmp_path, 2**20) is None
    assert last_steps(tmp_path / "none", 2**20) is None

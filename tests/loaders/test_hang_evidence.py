"""What a run directory tells of a hang, whatever is in it."""

import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.live_run import hang_evidence
from lightning_rlprof.loaders.load import run_directory
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
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header
from tests.effort import examples

REPORT = HangReport(0, 1, "hang", 5, 300.0, 300.0, 3, in_step=True)
ENTRY = {"process_group": ("0", ""), "collective_seq_id": 7, "profiling_name": "nccl:all_reduce"}


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

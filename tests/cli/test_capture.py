"""`rlprof capture`: a training that runs, and runs that cannot be captured."""

from pathlib import Path

import pytest

from lightning_rlprof.loaders.live_run import progress
from lightning_rlprof.records.capture_request import read_request, request_file
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import TraceWriter, note_line, read_trace
from lightning_rlprof.system.files import owners_of
from lightning_rlprof.testing import make_header
from tests.builders.live_training import live_training

TRAIN = """
import time, torch
from lightning_rlprof import start_session, stage
session, step = start_session(), 0
end = time.monotonic() + 60
while time.monotonic() < end and not __import__("os").path.exists("stop"):
    step += 1
    session.begin_step(step)
    with stage("actor_update"):
        torch.ones(64, 64) @ torch.ones(64, 64)
        time.sleep(0.02)
    session.end_step()
session.close()
"""


def writer(run: Path, rank: int = 0, steps: int = 3) -> TraceWriter:
    made = TraceWriter(run, make_header(rank))
    for step in range(1, steps + 1):
        start = step * 10_000_000
        line = ("span", "step", "step", step, start, start + 8_000_000, 7, step, None, None)
        made.write([line])
    return made


@pytest.mark.deep
def test_a_running_training_is_captured_without_a_restart(rlprof, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with live_training("-c", TRAIN):
        code, out, err = rlprof("capture", "--steps", 2)
    assert code == 0, err
    (run,) = tmp_path.glob("profiler_data/*")
    request = read_request(run, owners_of(run))
    assert f"rank 0: captured step-{request.first_step:06d}" in out, (out, err)
    steps = [span for span in read_trace(run / "rank-00000.jsonl").spans if span.kind == "step"]
    captured = [span.step for span in steps if (span.counters or {}).get("capture")]
    assert captured == [request.first_step, request.first_step + 1]
    assert [*run.glob("rank-00000/step-*/*.json.gz")]


@pytest.mark.deep
def test_ranks_that_do_not_answer_are_named(rlprof, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.cli.live_commands._PATIENCE_S", 0.1)
    for rank in (0, 1):
        writer(tmp_path, rank)
    code, out, _ = rlprof("capture", tmp_path, "--ranks", "all")
    assert code == 1
    # 1.2 s are 150 steps of 8 ms; ranks are two steps apart at most.
    assert "Requested step 155 on ranks 0, 1, in about 1 s." in out
    assert "rank 1 captured nothing: it didn't reach step 155 in time" in out
    request = read_request(tmp_path, owners_of(tmp_path))
    assert (request.first_step, request.steps, request.ranks) == (155, 1, None)


def test_what_a_rank_says_is_passed_on(rlprof, tmp_path, monkeypatch):
    made = writer(tmp_path)
    step = ("span", "step", "step", 200, 1, 2, 7, 9, None, None)
    text = "step 155 cannot be captured: another capture is open (rlprof capture)"
    monkeypatch.setattr(
        "lightning_rlprof.cli.live_commands.time.sleep",
        lambda _: made.write([note_line(5, Code.CAPTURE_REFUSED, text), step]),
    )
    code, out, _ = rlprof("capture", tmp_path)
    assert code == 1
    assert f"rank 0 captured nothing: {text}" in out.replace("\n", " ")


def test_a_capture_that_the_end_of_the_training_cut_short_says_where(rlprof, tmp_path, monkeypatch):
    made = writer(tmp_path)
    step = ("span", "step", "step", 157, 1, 2, 7, 9, None, None)
    taken = note_line(5, Code.CAPTURE_TAKEN, "captured step-000155", {"step": 155})
    monkeypatch.setattr(
        "lightning_rlprof.cli.live_commands.time.sleep",
        lambda _: made.write([step, taken, ("end", 9, "finished")]),
    )
    code, out, _ = rlprof("capture", tmp_path, "--steps", 100)
    assert code == 0
    text = "rank 0: the training ended at step 157, so steps 158 to 254 are not in the capture"
    assert text in out.replace("\n", " ")


BEGINS = (Code.CAPTURE_BEGINS, "capturing step 155", {"first_step": 155, "last_step": 155})


@pytest.mark.parametrize(
    ("notes", "reason"),
    [
        ([], "it didn't reach step 155 in time"),
        ([(Code.CAPTURE_TAKEN, "of another request", {"step": 4})], "it didn't reach step 155"),
        ([BEGINS, (Code.NOTHING_CAPTURED, "no profiler works", {})], "no profiler works"),
        ([BEGINS, (Code.RECORDER_FAILED, "X was disabled", {})], "X was disabled"),
        ([BEGINS, (Code.CLOCK_NOT_SYNCED, "rank 4 is gone", {})], "rank 4 is gone"),
        (
            [(Code.CAPTURE_EMPTY, "the training ended", {}), (Code.CLOCK_NOT_SYNCED, "x", {})],
            "the training ended",
        ),
    ],
)
def test_a_capture_that_did_not_happen_is_none(rlprof, tmp_path, monkeypatch, notes, reason):
    made = writer(tmp_path)
    lines = [note_line(5, *note) for note in notes]
    monkeypatch.setattr(
        "lightning_rlprof.cli.live_commands.time.sleep",
        lambda _: made.write([*lines, ("end", 9, "finished")]),
    )
    code, out, err = rlprof("capture", tmp_path)
    assert (code, "step 155 was not captured" in err) == (1, True)
    assert f"rank 0 captured nothing: {reason}" in out.replace("\n", " ")


def test_a_training_that_has_ended_cannot_be_captured(rlprof, tmp_path):
    writer(tmp_path).write([("end", 9, "finished")])
    code, _, err = rlprof("capture", tmp_path)
    assert code == 2
    assert "has ended; only a running one can be captured" in err
    assert not request_file(tmp_path).exists()


@pytest.mark.parametrize("ranks", ["2", "x", "-1", "0,7", ""])
def test_ranks_that_the_run_lacks_are_refused(ranks, rlprof, tmp_path):
    for rank in (0, 1):
        writer(tmp_path, rank)
    code, _, err = rlprof("capture", tmp_path, "--ranks", ranks)
    assert code == 2
    assert "is not a rank of this run" in err
    assert "Ranks of this run: 0 to 1" in err


def test_a_directory_without_a_run_is_refused(rlprof, tmp_path):
    code, _, err = rlprof("capture", tmp_path)
    assert code == 2
    assert "is not a run of rlprof" in err


def test_progress_reads_the_end_of_a_file_that_is_being_written(tmp_path):
    made = writer(tmp_path, steps=4000)
    with open(made.path, "ab") as file:
        file.write(b'["span","step","step",4001,1')
    (found,) = progress(tmp_path)
    assert (found.last_step, found.step_ns, found.status) == (4000, 8_000_000, None)

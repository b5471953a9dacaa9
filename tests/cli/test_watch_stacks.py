"""`rlprof watch --stacks`: a training that runs, and runs that do not answer."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_rlprof.loaders.live_run import progress
from lightning_rlprof.records.hang_reports import (
    StackAnswer,
    StackRequest,
    read_stack_request,
    stack_request_file,
    write_stack_answer,
)
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.system.files import owners_of
from lightning_rlprof.testing import make_header
from tests.builders.live_training import live_training

TRAIN = """
import os
from lightning_rlprof import start_session, stage

class Data:
    def decode(self):
        while not os.path.exists("stop"):
            pass

session = start_session(summary=False)
session.begin_step(1)
session.end_step()
session.begin_step(2)
with stage("data_fetch"):
    Data().decode()
session.end_step()
session.close()
"""
PLACE = "Data.decode train.py:27"


def writer(run: Path, rank: int = 0, **header: object) -> TraceWriter:
    made = TraceWriter(run, replace(make_header(rank), **header))
    stack_request_file(run).parent.mkdir(exist_ok=True)
    made.write([("span", "step", "step", 1, 0, 10, 7, 1, None, None)])
    return made


def answering(monkeypatch: pytest.MonkeyPatch, run: Path, *answers: StackAnswer | None) -> None:
    """Let ranks answer while the command sleeps: the first one is of rank 0."""

    def sleep(_: float) -> None:
        request = read_stack_request(run, owners_of(run))
        assert isinstance(request, StackRequest)
        for rank, answer in enumerate(answers):
            if answer is not None:
                write_stack_answer(run, rank, replace(answer, id=request.id))

    monkeypatch.setattr("lightning_rlprof.cli.live_commands.time.sleep", sleep)


@pytest.mark.deep
def test_a_training_that_spins_is_named_with_its_line(rlprof, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning_rlprof.cli.live_commands._STACK_PATIENCE_S", 120)
    Path("train.py").write_text(TRAIN)
    with live_training("train.py"):
        code, out, err = rlprof("watch", "--stacks", "--seconds", 1)
    assert code == 0, err
    assert "rank 0: " in out
    assert "in data_fetch: Data.decode train.py:" in out.replace("\n", " ")


def test_each_rank_has_its_line_by_stage(rlprof, tmp_path, monkeypatch):
    made = writer(tmp_path)
    writer(tmp_path, 1)
    # 3 samples in a stage that has ended meanwhile, one in the stage that is still open
    made_span = ("span", "data_fetch", "stage", 2, 100, 200, 7, 2, None, None)
    other = ("span", "reward", "stage", 2, 100, 200, 8, 3, None, None)
    places = [(120, PLACE), (130, PLACE), (199, PLACE), (250, "main train.py:40")]
    first = StackAnswer("", 7, tuple(places), (("actor_update", 240),))
    answering(monkeypatch, tmp_path, first, StackAnswer("", 7, ((5, "main train.py:9"),)))
    before = [progress(tmp_path), progress(tmp_path)]
    monkeypatch.setattr("lightning_rlprof.loaders.live_run.progress", lambda _: before.pop())
    made.write([made_span, other])
    code, out, _ = rlprof("watch", tmp_path, "--stacks")
    assert code == 0
    assert f"rank 0: 75% in data_fetch: {PLACE} (3 of 4 samples)" in out
    assert "rank 1: 100% outside of stages: main train.py:9 (1 of 1 samples)" in out
    _, out, _ = rlprof("watch", tmp_path, "--stacks", "--json")
    found = json.loads(out)
    assert [row[3] for row in found["tables"][0]["rows"]] == ["data_fetch", "actor_update", None]


def test_a_request_names_ranks_and_seconds(rlprof, tmp_path, monkeypatch):
    for rank in (0, 1):
        writer(tmp_path, rank)
    answering(monkeypatch, tmp_path, None, StackAnswer("", 7, ((5, PLACE),)))
    assert rlprof("watch", tmp_path, "--stacks", "--ranks", "1", "--seconds", 2)[0] == 0
    request = read_stack_request(tmp_path, owners_of(tmp_path))
    assert (request.seconds, request.ranks) == (2, (1,))


def test_a_rank_that_does_not_answer_is_named(rlprof, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.cli.live_commands._STACK_PATIENCE_S", -100)
    writer(tmp_path)
    code, out, err = rlprof("watch", tmp_path, "--stacks")
    assert code == 1
    assert "rank 0: no answer. Its process is stopped or gone" in out
    assert "no rank was sampled" in err


def test_a_process_that_is_gone_is_not_waited_for(rlprof, tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_rlprof.cli.live_commands.time.sleep", lambda _: None)
    monkeypatch.setattr("lightning_rlprof.cli.live_commands.process_state", lambda _: "gone")
    writer(tmp_path, host=socket.gethostname(), pid=5)
    code, out, _ = rlprof("watch", tmp_path, "--stacks")
    assert code == 1
    assert "rank 0: its process, PID 5, has ended" in out


def test_a_training_that_ends_before_it_answers_is_not_waited_for(rlprof, tmp_path, monkeypatch):
    made = writer(tmp_path)
    monkeypatch.setattr(
        "lightning_rlprof.cli.live_commands.time.sleep",
        lambda _: made.write([("end", 9, "finished")]),
    )
    code, out, _ = rlprof("watch", tmp_path, "--stacks")
    assert code == 1
    assert "rank 0: the training ended before it answered" in out


def test_a_thread_without_python_code_is_said(rlprof, tmp_path, monkeypatch):
    writer(tmp_path)
    answering(monkeypatch, tmp_path, StackAnswer("", 7))
    code, out, _ = rlprof("watch", tmp_path, "--stacks")
    assert (code, "runs no Python code" in out) == (1, True)


def test_a_run_that_cannot_be_written_names_who_may_ask(rlprof, tmp_path):
    writer(tmp_path)
    stack_request_file(tmp_path).parent.rmdir()
    code, _, err = rlprof("watch", tmp_path, "--stacks")
    assert code == 2
    assert "cannot be asked (No such file or directory)" in err
    assert "Only its user and root may ask it" in err


def test_a_training_that_has_ended_is_refused(rlprof, tmp_path):
    writer(tmp_path).write([("end", 9, "finished")])
    code, _, err = rlprof("watch", tmp_path, "--stacks")
    assert code == 2
    assert "has ended; only a running one can be sampled" in err
    assert not stack_request_file(tmp_path).exists()


def test_a_training_that_takes_no_samples_is_refused(rlprof, tmp_path):
    writer(tmp_path, config={"hang_timeout": None})
    code, _, err = rlprof("watch", tmp_path, "--stacks")
    assert code == 2
    assert "hang_timeout is null" in err
    assert not stack_request_file(tmp_path).exists()

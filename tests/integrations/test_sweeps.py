"""Several trainings of one process, each of which is a run: loops, Hugging Face, Fabric."""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.integrations.loop import start_session, step
from lightning_rlprof.recording.annotations import count, stage
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.run import Run, load
from tests.places import ROOT


@pytest.fixture(autouse=True)
def nothing_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RLPROF_JOB", raising=False)
    yield
    if (left := current()) is not None:
        left.close()


def started(folder: Path) -> Session:
    return start_session(profile_save_path=str(folder), summary=False)


def runs(folder: Path) -> list[Run]:
    """Return the runs in the order in which they began."""
    found = [load(path) for path in folder.iterdir() if path.name[0] != "."]
    return sorted(found, key=lambda run: run.headers[min(run.headers)].unix_ns)


def outcome(run: Run) -> tuple[int, str | None]:
    whole = [row for row in run if row.kind == "step" and "interrupted" not in (row.counters or {})]
    return len(whole), run.statuses[min(run.statuses)]


@pytest.mark.parametrize("own_calls", [False, True])
def test_trials_of_a_loop_are_runs_and_one_that_raises_says_so(
    own_calls: bool, tmp_path: Path
) -> None:
    for trial in range(3):
        session = started(tmp_path)
        try:
            for number in range(4):
                if own_calls and trial != 1:
                    session.begin_step(number + 1)
                    session.end_step()
                    continue
                with step(), stage("actor_update"):
                    if (trial, number) == (1, 2):
                        raise ValueError("diverged")
        except ValueError:
            pass
    session.close()
    said = [outcome(run) for run in runs(tmp_path)]
    assert said == [(4, "finished"), (2, "interrupted by ValueError"), (4, "finished")]


def test_a_loop_that_survives_an_error_in_a_step_is_finished(tmp_path: Path) -> None:
    with started(tmp_path):
        for number in range(4):
            try:
                with step():
                    if number == 2:
                        raise MemoryError
            except MemoryError:
                continue
    assert [outcome(run) for run in runs(tmp_path)] == [(3, "finished")]


def test_a_loop_in_a_second_thread_gets_a_session_that_does_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    first, second_done, found = threading.Event(), threading.Event(), []

    def trial() -> None:
        try:
            second()
        finally:
            second_done.set()

    def second() -> None:
        first.wait()
        with started(tmp_path / "other") as session:
            session.wrap(session)
            for number in range(3):
                with step(number + 1), stage("second"):
                    count(tokens=100)
                session.expect_step(4)
                session.begin_step(4)
                session.record(stage("second"), 1, 2)
                session.note("warning", "of the second")
                session.mark("second")
                session.flush()
                session.end_step()
                session.abandon_step(interrupted=True)
            found.append(
                (session.metrics(), session.has_steps, session.request_capture(1, 1, (), ""))
            )
        session.discard()

    def owner() -> None:
        with started(tmp_path / "own"):
            first.set()
            second_done.wait()
            for _ in range(2):
                with step(), stage("first"):
                    count(tokens=1)

    threads = [threading.Thread(target=each, name=each.__name__) for each in (trial, owner)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [({}, False, 0)]
    assert not (tmp_path / "other").exists()
    [run] = runs(tmp_path / "own")
    assert outcome(run) == (2, "finished")
    assert {row.name for row in run} == {"step", "first"}
    assert sum((row.counters or {}).get("tokens", 0) for row in run) == 2
    [note] = [each.text for each in run.notes if each.level == "warning"]
    assert note == "a training in another thread, trial, is not recorded: a process records one"


def test_a_loop_whose_thread_died_leaves_the_process_to_the_next(tmp_path: Path) -> None:
    def dies() -> None:
        started(tmp_path)
        with step():
            pass

    thread = threading.Thread(target=dies)
    thread.start()
    thread.join()
    with started(tmp_path), step():
        pass
    said = [outcome(run) for run in runs(tmp_path)]
    assert said == [(1, "interrupted by the end of its thread"), (1, "finished")]


@pytest.mark.parametrize("error", [MemoryError(), UnicodeEncodeError("ascii", "ö", 0, 1, "no")])
@pytest.mark.parametrize("place", ["begin_step", "end_step", "start_session", "close"])
def test_errors_of_any_kind_end_the_recording_and_not_the_loop(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    if place == "start_session":
        monkeypatch.setattr("lightning_rlprof.recording.start.make_header", fail)
    steps = 0
    with started(tmp_path) as session:
        for number in range(4):
            if number == 2:
                inner = {"begin_step": "_open_step", "end_step": "_is_quiet", "close": "_remarks"}
                if place in inner:
                    monkeypatch.setattr(Session, inner[place], fail)
            with step(), stage("actor_update"):
                steps += 1
    monkeypatch.undo()
    assert steps == 4
    assert current() is None
    [said] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert type(error).__name__ in said.getMessage()
    if place == "start_session":
        assert [*tmp_path.iterdir()] == []
        return
    [run] = runs(tmp_path)
    if place == "close":
        assert outcome(run)[0] == 4
    else:
        ended = 2 if place == "end_step" else 3  # a step begins where the one before it ends
        assert outcome(run) == (ended, f"stopped by an error in rlprof: {type(error).__name__}")
    assert session.status


HUGGING_FACE = """
import torch, warnings
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
warnings.filterwarnings("ignore")

class Rows(Dataset):
    def __len__(self): return 20
    def __getitem__(self, i): return {"x": torch.full((3,), float(i)), "labels": torch.tensor([1.])}

class Line(torch.nn.Module):
    def __init__(self, largest):
        super().__init__(); self.w = torch.nn.Linear(3, 1); self.largest = largest
    def forward(self, x, labels=None):
        if len(x) > self.largest: raise torch.cuda.OutOfMemoryError("CUDA out of memory. planted")
        out = self.w(x); return {"loss": (out - labels).pow(2).mean(), "logits": out}

class Stops(TrainerCallback):
    def __init__(self, at): self.at = at
    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at: raise ValueError("diverged")

def train(stops=0, largest=99, size=4, **more):
    args = TrainingArguments("out", per_device_train_batch_size=size, num_train_epochs=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **more)
    Trainer(Line(largest), args, train_dataset=Rows(), callbacks=[Stops(stops)]).train()

for stops in (0, 2, 0):
    try: train(stops)
    except ValueError: pass
train(largest=4, size=8, auto_find_batch_size=True)
"""

FABRIC = """
import torch
from lightning.fabric import Fabric

def train(raises=False, keep=[]):
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    model, optimizer = torch.nn.Linear(8, 1), None
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    for i in range(5):
        fabric.backward(model(torch.ones(4, 7 if raises and i == 2 else 8)).sum())
        optimizer.step()
        if i == 3:  # an evaluation with a Fabric of its own is a part of the training
            Fabric(accelerator="cpu", devices=1).setup_module(torch.nn.Linear(1, 1))

for raises in (False, True, False):
    try: train(raises)
    except RuntimeError: pass
"""

TWO_RANKS = """
import sys, torch
from lightning.fabric import Fabric

def player(): Fabric(accelerator="cpu", devices=1).setup_module(torch.nn.Linear(1, 1))

if sys.argv[2] == "before launch": player()
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
if sys.argv[2] == "before setup": player()
model = torch.nn.Linear(8, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
for _ in range(5):
    fabric.backward(model(torch.ones(4, 8)).sum())
    optimizer.step()
    if sys.argv[2] == "later": player()
"""


def ran(program: str, folder: Path, *words: str) -> list[Run]:
    """Run a program under ``rlprof run``; returns its runs."""
    (folder / "train.py").write_text(program)
    command = [sys.executable, "-m", "lightning_rlprof", "run", "summary=false", "--"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, sys.executable, str(folder / "train.py"), "", *words],
        env=environ, capture_output=True, text=True, timeout=300, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rlprof's door" not in done.stderr
    return runs(folder / "profiler_data")


@pytest.mark.deep
def test_trainings_and_attempts_of_hugging_face_are_runs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    said = [outcome(run) for run in ran(HUGGING_FACE, tmp_path)]
    assert said[:3] == [(5, "finished"), (2, "interrupted by ValueError"), (5, "finished")]
    assert {each[1] for each in said[3:-1]} == {"interrupted by OutOfMemoryError"}
    assert said[-1][1] == "finished"


@pytest.mark.deep
def test_trials_with_a_fabric_each_are_runs(tmp_path: Path) -> None:
    said = [outcome(run) for run in ran(FABRIC, tmp_path)]
    assert said == [(5, "finished"), (2, "interrupted by RuntimeError"), (5, "finished")]


@pytest.mark.deep
@pytest.mark.parametrize("when", ["never", "before launch", "before setup", "later"])
def test_a_fabric_of_one_device_leaves_two_ranks_in_one_run(when: str, tmp_path: Path) -> None:
    [run] = ran(TWO_RANKS, tmp_path, when)
    assert run.ranks == (0, 1)
    assert {header.world_size for header in run.headers.values()} == {2}
    assert [outcome(run)[0], run.statuses] == [10, {0: "finished", 1: "finished"}]

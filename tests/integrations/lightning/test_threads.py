"""Several Trainers in one process: in threads of a sweep, and one after another."""

import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import count, stage
from lightning_rlprof.records.run_directory import RankTrace, rank_files, read_trace
from tests.builders.models import Tiny, loader, make_trainer, steps_of


class Trial(Tiny):
    """A module whose rollout is marked, and counts its own calls."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with stage(f"rollout_{self.name}"):
            count(tokens=10)
            self.calls += 1
        return super().training_step(batch, batch_idx)


def runs(folder: Path) -> list[RankTrace]:
    found = [path for path in folder.iterdir() if path.name[0] != "."]
    return [read_trace(rank_files(path)[0]) for path in sorted(found)]


def names(trace: RankTrace, kind: str = "stage") -> list[str]:
    return [span.name for span in trace.spans if span.kind == kind]


@pytest.mark.parametrize("moment", ["checked", "started"])
def test_two_trainers_in_two_threads_train_and_one_is_recorded(
    moment: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both pass the check before either records, or the second one finds the first."""
    modules = {name: Trial(name) for name in "ab"}
    together, batches = threading.Barrier(2), threading.Barrier(2)
    first_trains, second_done = threading.Event(), threading.Event()
    raised: list[BaseException] = []

    def fit(name: str) -> None:
        trainer = make_trainer(ProfilerCallback(profile_save_path=str(tmp_path), summary=False))
        if moment == "checked":
            broadcast = trainer.strategy.broadcast
            trainer.strategy.broadcast = lambda *args, **kw: (
                together.wait(),
                broadcast(*args, **kw),
            )[1]
            modules[name].on_batch = lambda batch: batches.wait()  # Neither ends before the other.
        elif name == "a":
            modules["a"].on_batch = lambda batch: (first_trains.set(), second_done.wait())
        else:
            first_trains.wait()
        try:
            trainer.fit(modules[name], loader())
        except BaseException as error:
            raised.append(error)
        if name == "b":
            second_done.set()

    threads = [threading.Thread(target=fit, args=[name], name=f"trial {name}") for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert {module.calls for module in modules.values()} == {4}
    [trace] = runs(tmp_path)
    [own] = {name for name in names(trace) if name.startswith("rollout")}
    other = "b" if own == "rollout_a" else "a"
    assert names(trace).count(own) == len(steps_of(trace)) == 4
    assert names(trace, "region").count("optimizer_step") == 4
    tokens = [(span.counters or {}).get("tokens", 0) for span in trace.spans]
    assert sum(tokens) == 4 * 10 + 4 * 8  # of the rollouts, and of the updates
    said = f"a fit in another thread, trial {other}, is not recorded: a process records one"
    assert [note.text for note in trace.notes if note.level == "warning"] == [said]
    assert sum(said in text for text in caplog.messages) == 1
    assert trace.status == "finished"


def test_a_thread_whose_fit_was_not_recorded_is_recorded_at_its_next_one(tmp_path: Path) -> None:
    trains, refused, over = threading.Event(), threading.Event(), threading.Event()
    first = Trial("first")
    first.on_batch = lambda batch: (trains.set(), refused.wait())

    def fit(module: Trial) -> None:
        callback = ProfilerCallback(profile_save_path=str(tmp_path), summary=False)
        make_trainer(callback).fit(module, loader())

    def trials() -> None:
        trains.wait()
        fit(Trial("refused"))
        refused.set()
        over.wait()
        fit(Trial("next"))

    worker = threading.Thread(target=trials)
    worker.start()
    fit(first)
    over.set()
    worker.join()
    assert [{*names(trace)} - {"actor_update"} for trace in runs(tmp_path)] in (
        [{"rollout_first"}, {"rollout_next"}],
        [{"rollout_next"}, {"rollout_first"}],  # within one second names are in no order
    )


@pytest.mark.parametrize("when", ["training", "ending"])
def test_a_sweep_whose_second_trial_raises_is_three_runs(when: str, tmp_path: Path) -> None:
    """Also if the error hides the end from callbacks: one before ours raises when it is told."""

    class Hides(ProfilerCallback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if when == "ending":
                raise RuntimeError("hidden")
            super().on_exception(trainer, pl_module, exception)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if when != "ending" or not trainer.interrupted:
                super().teardown(trainer, pl_module, stage)

    def raise_at_2(batch: int) -> None:
        if batch == 2:
            raise ValueError("diverged")

    statuses = []
    callbacks = []
    for trial in range(3):
        module = Trial(str(trial))
        module.on_batch = raise_at_2 if trial == 1 else None
        callbacks.append(Hides(profile_save_path=str(tmp_path), summary=False))
        try:
            make_trainer(callbacks[-1]).fit(module, loader())
        except (ValueError, RuntimeError):
            statuses.append("raised")
    assert statuses == ["raised"]
    traces = [read_trace(rank_files(each.run)[0]) for each in callbacks if each.run]
    assert len(traces) == 3
    assert [len(steps_of(trace)) for trace in traces] == [4, 2, 4]
    assert [trace.status for trace in traces] == [
        "finished",
        "interrupted by ValueError"
        if when == "training"
        else "interrupted by an error that was not reported to callbacks",
        "finished",
    ]

"""`start_session` in any program: its place in the job, its ends, threads, wraps and steps."""

import logging
import os
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.integrations.loop import start_session, step
from lightning_rlprof.recording import annotations
from lightning_rlprof.recording.annotations import count, record, stage
from lightning_rlprof.recording.job import Place, find_place, shared_run
from lightning_rlprof.recording.session import Session, current
from lightning_rlprof.records.records import FIRST_ROLE_RANK
from lightning_rlprof.run import Run, load
from tests.builders.models import Tiny, loader, make_trainer
from tests.places import ROOT


@pytest.fixture(autouse=True)
def nothing_records(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "RLPROF_JOB", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    yield
    if (left := current()) is not None:
        left.close()


def started(folder: Path, **options: Any) -> Session:
    return start_session(profile_save_path=str(folder), summary=False, **options)


def runs(folder: Path) -> list[Run]:
    return [load(path) for path in sorted(folder.iterdir()) if path.name[0] != "."]


def names(run: Run, kind: str = "stage") -> list[str]:
    return [span.name for span in run if span.kind == kind]


def test_steps_follow_one_another_and_backward_and_optimizer_are_regions(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with started(tmp_path) as session:
        for _ in range(3):
            with step(), stage("actor_update", tokens=8):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        metrics = session.metrics()
    [run] = runs(tmp_path)
    assert run.steps().column("step") == [1, 2, 3]
    assert names(run, "region") == ["backward", "optimizer_step"] * 3
    assert names(run) == ["actor_update"] * 3
    assert metrics.keys() == {
        "rlprof/step_s",
        *(f"rlprof/actor_update_{each}" for each in ("s", "share", "tokens_per_s")),
    }
    assert torch.autograd.backward.__module__ == "torch.autograd"
    assert not hasattr(torch.autograd.backward, "__wrapped__")


def test_a_step_may_have_a_number_and_one_that_raises_is_interrupted(tmp_path: Path) -> None:
    with started(tmp_path):
        with step(7), stage("actor_update"):
            pass
        with pytest.raises(KeyError), step():
            raise KeyError
    [run] = runs(tmp_path)
    assert [
        (span.step, span.counters.get("interrupted")) for span in run if span.kind == "step"
    ] == [
        (7, None),
        (8, 1),
    ]


def test_without_a_session_steps_and_records_do_nothing() -> None:
    with step():
        record("actor_update", 0, 1)
    assert current() is None


def test_recorded_intervals_may_cross_and_belong_to_the_step_in_which_they_start(
    tmp_path: Path,
) -> None:
    clock = time.perf_counter_ns
    with started(tmp_path):
        with step():
            first = clock()
            time.sleep(0.002)
        with step():
            second = clock()
            time.sleep(0.002)
            record("train_wait", first, clock(), samples=3)
            time.sleep(0.001)
            record("weight_sync", second, clock())
            record("late", second, clock(), step=9)
    [run] = runs(tmp_path)
    found = {span.name: span for span in run if span.kind == "stage"}
    assert {name: span.step for name, span in found.items()} == {
        "train_wait": 1,
        "weight_sync": 2,
        "late": 9,
    }
    assert {span.parent for span in found.values()} == {None}
    assert found["train_wait"].counters == {"samples": 3}
    assert found["train_wait"].end_ns > found["weight_sync"].start_ns


def test_stages_of_the_thread_that_works_count_in_steps(tmp_path: Path) -> None:
    least = []  # of each step: what the stage has of it, by the time inside and that around
    with ThreadPoolExecutor(1) as pool, started(tmp_path) as session:

        def work() -> float:
            with stage("actor_update", tokens=4):
                start = time.perf_counter()
                time.sleep(0.004)
                return time.perf_counter() - start

        start = time.perf_counter()
        for _ in range(4):
            with step():
                inside, now = pool.submit(work).result(), time.perf_counter()
            least.append(inside / (time.perf_counter() - start))
            start = now  # the next step begins where this one ends
        assert least[-1] <= session.metrics()["rlprof/actor_update_share"] <= 1
    [run] = runs(tmp_path)
    table = run.stages()
    share = dict(zip(table.column("stage"), table.column("share"), strict=True))
    assert min(least) <= share["actor_update"] <= 1


def test_a_stage_may_end_on_another_thread(tmp_path: Path) -> None:
    with started(tmp_path), step():
        marker = stage("actor_generate", tokens=2)
        marker.__enter__()
        thread = threading.Thread(target=marker.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        with stage("actor_update"):
            count(tokens=5)
    [run] = runs(tmp_path)
    assert names(run) == ["actor_generate", "actor_update"]
    assert [span.parent for span in run if span.kind == "stage"] == [None, None]


class Policy:
    """What is wrapped by its import path."""

    def generate(self) -> int:
        return 5

    @staticmethod
    def score() -> int:
        return 6

    @classmethod
    def update(cls) -> str:
        return cls.__name__


def test_wrap_takes_import_paths_also_of_what_is_imported_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "later_door.py").write_text("def reward():\n    return 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    here = types.ModuleType("door_here")
    here.Policy = Policy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "door_here", here)
    rules = {
        "door_here:Policy.generate": "actor_generate",
        "door_here:Policy.score": "compute_reward",
        "door_here:Policy.update": "actor_update",
        "later_door:reward": "compute_advantage",
        "door_here:Policy.gone": "weight_sync",
        "never_imported:x": "weight_sync",
    }
    before = dict(vars(Policy))
    with started(tmp_path / "runs", wrap=rules), step():
        import later_door

        policy = Policy()
        found = policy.generate(), policy.score(), policy.update(), later_door.reward()
    assert found == (5, 6, "Policy", 7)
    assert dict(vars(Policy)) == before
    [run] = runs(tmp_path / "runs")
    assert names(run) == ["actor_generate", "compute_reward", "actor_update", "compute_advantage"]
    said = [note.text for note in run.notes if note.level == "warning"]
    assert [text.partition(" (")[0] for text in said] == [
        "wrap: 'door_here:Policy.gone' does not exist",
        "wrap: 'door_here:Policy.gone' was never called",
        "wrap: 'never_imported:x' was never called",
    ]


def test_wrap_takes_objects_and_says_if_it_got_none(tmp_path: Path) -> None:
    policy = Policy()
    with started(tmp_path / "a", wrap={"generate": "actor_generate"}) as session, step():
        session.wrap(policy)
        policy.generate()
    assert "generate" not in vars(policy)
    [run] = runs(tmp_path / "a")
    assert names(run) == ["actor_generate"]
    with started(tmp_path / "b", wrap={"generate": "actor_generate"}), step():
        policy.generate()
    [run] = runs(tmp_path / "b")
    assert "wrap: 'generate' needs its object: session.wrap(object)" in [
        note.text for note in run.notes
    ]
    with (
        started(tmp_path / "c", wrap={"nothing": "actor_update"}) as session,
        pytest.raises(ConfigError, match="Policy has no 'nothing'"),
    ):
        session.wrap(policy)


def test_a_second_session_ends_the_first_and_is_a_run_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = started(tmp_path)
    with step(), stage("a"):
        pass
    second = started(tmp_path)
    assert current() is second
    assert f"{first.run} ends here: another session starts in this process" in caplog.messages
    second.close()
    assert sorted(run.statuses[0] for run in runs(tmp_path)) == ["finished", "finished"]


def test_a_name_that_is_taken_is_another_run_and_a_line(tmp_path: Path) -> None:
    for _ in range(3):
        with started(tmp_path, name="mine"), step():
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-2", "mine-3"]
    [note] = [note for note in load(tmp_path / "mine-3").notes if note.level == "warning"]
    assert note.text == f"{tmp_path / 'mine'} has rank 0 already: this is another run"


def test_inside_a_lightning_training_its_session_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Inside(Tiny):
        def on_train_start(self) -> None:
            with started(tmp_path / "other") as session, step():
                assert session.run.parent == tmp_path
                session.end_step()

    trainer = make_trainer(ProfilerCallback(profile_save_path=str(tmp_path)))
    trainer.fit(Inside(), loader())
    [run] = runs(tmp_path)
    assert run.steps().column("step") == [1, 2, 3, 4]
    assert any("already being recorded" in text for text in caplog.messages)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (0, 1, None)),
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8, None)),
        ({"RANK": "8", "WORLD_SIZE": "8"}, (0, 1, None)),
        ({"RANK": "x", "WORLD_SIZE": ""}, (0, 1, None)),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, (0, 1, None)),  # a script without srun
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"}, (1, 4, None)),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "WG_PREFIX": "actor", "RLPROF_JOB": "j"},
            (None, None, 1),
        ),
        ({"RLPROF_JOB": "j"}, (None, None, 1)),
    ],
)
def test_the_place_comes_from_what_a_process_can_see(
    variables: dict[str, str], place: tuple[Any, ...]
) -> None:
    assert find_place(variables)[:3] == place


def test_a_worker_of_verl_takes_no_rank_of_its_groups_process_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 0,
        get_world_size=lambda: 2,
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert find_place({"RLPROF_JOB": "j"})[:2] == (0, 2)
    # Each of its groups has a rank 0, and so has the driver.
    assert find_place({"RLPROF_JOB": "j", "WG_PREFIX": "actor"})[:3] == (None, None, 1)


@pytest.mark.parametrize(
    ("variables", "role", "rank", "first"),
    [
        ({"RLPROF_JOB": "j"}, "tools", None, FIRST_ROLE_RANK),
        ({"RLPROF_JOB": "j"}, "controller", None, 0),
        ({"RLPROF_JOB": "j"}, None, None, 0),
        ({"RLPROF_JOB": "j", "RANK": "1", "WORLD_SIZE": "2"}, "tools", 1, 0),
        ({}, "tools", 0, 0),
    ],
)
def test_a_process_with_a_role_leaves_the_ranks_to_the_training(
    variables: dict[str, str], role: str | None, rank: int | None, first: int
) -> None:
    place = find_place(variables, role=role)
    assert (place.rank, place.first_rank) == (rank, first)


def test_a_server_that_a_training_starts_does_not_take_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = {"RLPROF_JOB": "j", "RANK": "1", "WORLD_SIZE": "2"}
    monkeypatch.setattr(annotations, "IS_CHILD", True)
    assert find_place(variables, role="tools").first_rank == FIRST_ROLE_RANK
    assert find_place(variables).rank == 1


def test_arguments_win_and_a_rank_outside_the_world_is_refused(tmp_path: Path) -> None:
    with started(tmp_path, rank=1, world_size=2) as session:
        assert (session.header.rank, session.header.world_size) == (1, 2)
    with pytest.raises(ConfigError, match="rank=2 of world_size=2"):
        started(tmp_path, rank=2, world_size=2)


def test_ranks_of_a_job_agree_on_its_runs_in_order(tmp_path: Path) -> None:
    def place(rank: int) -> Place:
        return Place(rank, 2, None, "torchrun x", is_unique=False)

    def write(name: str, rank: int) -> None:
        text = f"""
from pathlib import Path
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.testing import make_header
import dataclasses, os, socket
header = dataclasses.replace(
    make_header({rank}, 2), pid={os.getpid()}, host=socket.gethostname()
)
TraceWriter(Path({str(tmp_path / name)!r}), header).close()
"""
        subprocess.run([sys.executable, "-c", text], check=True, cwd=ROOT)

    first = shared_run(tmp_path, place(0))
    assert shared_run(tmp_path, place(1)) == first
    write(first, 0)
    assert shared_run(tmp_path, place(1)) == first
    second = shared_run(tmp_path, place(0))
    assert second != first
    write(first, 1)
    assert shared_run(tmp_path, place(1)) == second
    os.utime(next(tmp_path.glob(".jobs-*/*-1")), (0, 0))  # of a job with the same port, once
    assert shared_run(tmp_path, place(1)) not in (first, second)


PROGRAM = """
import sys, time
from lightning_rlprof import stage, start_session, step

session = start_session(profile_save_path=sys.argv[1], summary=False)
for _ in range(3):
    with step(), stage("actor_update"):
        time.sleep(0.002)
what = sys.argv[2] if len(sys.argv) > 2 else ""
if what == "raise":
    raise ValueError("wrong")
if what == "exit":
    sys.exit(3)
while len(list(session.run.glob("rank-*.jsonl"))) < int(what or 1):  # who has ended, is not joined
    time.sleep(0.01)
"""


def run_program(*words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*words], env={**os.environ, "PYTHONPATH": str(ROOT), **variables}, text=True,
        capture_output=True, check=False, timeout=300,
    )  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize(
    ("what", "status", "ended"),
    [("", 0, "finished"), ("raise", 1, "interrupted by ValueError"), ("exit", 3, "finished")],
)
def test_however_a_process_ends_its_file_says_so(
    what: str, status: int, ended: str, tmp_path: Path
) -> None:
    done = run_program(sys.executable, "-c", PROGRAM, str(tmp_path), *([what] if what else []))
    assert done.returncode == status
    assert ("ValueError: wrong" in done.stderr) == (what == "raise")
    [run] = runs(tmp_path)
    assert run.statuses == {0: ended}
    assert run.steps().column("step") == [1, 2, 3]


@pytest.mark.deep
def test_ranks_of_torchrun_land_in_one_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    script = str(tmp_path / "train.py")
    done = run_program(sys.executable, *words, script, str(tmp_path / "runs"), "3")
    assert done.returncode == 0, done.stderr
    [run] = runs(tmp_path / "runs")
    assert run.ranks == (0, 1, 2)
    assert {header.world_size for header in run.headers.values()} == {3}


@pytest.mark.deep
def test_processes_without_a_rank_take_free_ones_and_the_next_program_is_another_run(
    tmp_path: Path,
) -> None:
    job = {"RLPROF_JOB": "one"}
    with ThreadPoolExecutor(4) as pool:
        words = (sys.executable, "-c", PROGRAM, str(tmp_path), "4")
        done = [pool.submit(run_program, *words, **job) for _ in range(4)]
        assert [each.result().returncode for each in done] == [0] * 4
    [run] = runs(tmp_path)
    assert run.ranks == (0, 1, 2, 3)
    assert {header.world_size for header in run.headers.values()} == {4}
    assert not run.warnings
    run_program(sys.executable, "-c", PROGRAM, str(tmp_path), **job)
    assert [each.ranks for each in runs(tmp_path)] == [(0, 1, 2, 3), (0,)]


def test_a_warning_of_the_log_is_all_that_a_lost_place_costs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with started(tmp_path) as session:
        session.at_close(lambda: 1 / 0)
    assert session.status == "finished"
    assert any(
        "could not be removed: ZeroDivisionError: division by zero" in text
        for text in caplog.messages
    )


RAY_PROGRAM = """
import sys, time
import ray
from codetiming import Timer

@ray.remote(num_cpus=0.1)
class Worker:
    def update(self):
        with Timer(name="step_total", logger=None), Timer(name="step_train", logger=None):
            time.sleep(0.01)

@ray.remote(num_cpus=0.1, runtime_env={"env_vars": {"MINE": "1"}})
class Parent:
    def __init__(self):
        self.child = Worker.remote()

    def update(self):
        import os
        ray.get(self.child.update.remote())
        return os.environ["MINE"]

ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
workers = [Worker.remote(), Parent.remote()]
for _ in range(3):
    found = ray.get([worker.update.remote() for worker in workers])
assert found == [None, "1"]
ray.shutdown()
"""


# The example is so short that a rank may have ended before the next one begins.
BESIDE = """
import os, runpy, sys, time
from lightning_rlprof.recording.session import current

runpy.run_path(sys.argv[1])
while len(list(current().run.glob("rank-*.jsonl"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_of_a_plain_loop_is_recorded(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(BESIDE)
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    save = {"RLPROF__INTEGRATED__PROFILE_SAVE_PATH": str(tmp_path / "runs")}
    example = str(ROOT / "examples" / "loop" / "train.py")
    done = run_program(sys.executable, *words, str(tmp_path / "beside.py"), example, **save)
    assert done.returncode == 0, done.stderr
    [run] = runs(tmp_path / "runs")
    assert run.ranks == tuple(range(ranks))
    assert set(names(run)) == {"actor_generate", "compute_reward", "actor_update"}
    # The ranks do not wait for one another: rank 0 may be done before another one has begun.
    assert re.search(f"rlprof: 10 steps on [1-{ranks}] rank", done.stderr)


@pytest.mark.deep
def test_the_example_on_ray_is_one_run_of_two_roles(tmp_path: Path) -> None:
    save = {"RLPROF__INTEGRATED__PROFILE_SAVE_PATH": str(tmp_path)}
    words = ("-m", "lightning_rlprof", "run", "--", sys.executable)
    done = run_program(sys.executable, *words, str(ROOT / "examples" / "ray" / "train.py"), **save)
    assert done.returncode == 0, done.stderr
    [run] = runs(tmp_path)
    assert {header.role for header in run.headers.values()} == {"rollout", "actor"}
    assert sorted(set(names(run))) == ["actor_generate", "actor_update", "idle"]


@pytest.mark.deep
def test_ray_actors_nested_too_are_ranks_of_one_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RAY_PROGRAM)
    save = {"RLPROF__INTEGRATED__PROFILE_SAVE_PATH": str(tmp_path / "runs")}
    words = ("-m", "lightning_rlprof", "run", "--", sys.executable, str(tmp_path / "train.py"))
    done = run_program(sys.executable, *words, **save)
    assert done.returncode == 0, done.stderr
    [run] = runs(tmp_path / "runs")
    assert run.ranks == (0, 1)  # the parent has no timer of its own
    assert run.steps().column("step") == [1, 2, 3] * 2
    assert set(names(run)) == {"actor_update", "idle"}
    assert not run.warnings
    assert "rlprof: 3 steps on 2 ranks" in done.stderr


def test_record_functions_with_the_name_of_a_stage_are_stages(tmp_path: Path) -> None:
    from torch.profiler import record_function

    before = vars(record_function)["__enter__"]
    with started(tmp_path), step():
        with record_function("update_actor"), record_function("aten::mine"):
            pass
        with stage("actor_generate"), record_function("actor_generate"):
            pass
        with pytest.raises(KeyError), record_function("reward"):
            raise KeyError
    assert vars(record_function)["__enter__"] is before
    [run] = runs(tmp_path)
    assert names(run) == ["actor_update", "actor_generate", "compute_reward"]


def test_a_callback_wraps_import_paths_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = types.ModuleType("door_here")
    here.Policy = Policy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "door_here", here)

    class Generates(Tiny):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
            Policy().generate()
            return super().training_step(batch, batch_idx)

    rules = {"door_here:Policy.generate": "actor_generate", "never_here:x": "weight_sync"}
    callback = ProfilerCallback(profile_save_path=str(tmp_path), wrap=rules)
    make_trainer(callback).fit(Generates(), loader())
    [run] = runs(tmp_path)
    assert names(run).count("actor_generate") == 4
    assert [note.text for note in run.notes if note.level == "warning"] == [
        "wrap: 'never_here:x' was never called"
    ]


def test_a_configuration_may_name_ranks_that_come_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLPROF_JOB", "x")
    with started(tmp_path, ranks=[0, 5]) as session:
        assert (session.header.rank, session.header.open_world) == (0, True)

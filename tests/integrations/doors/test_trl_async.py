"""The rollout process of asynchronous GRPO, on a double of TRL's loop; `test_trl` has the real."""

import asyncio
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlprof.integrations.doors import trl_async
from lightning_rlprof.recording.session import current
from lightning_rlprof.run import Run, load


def make_loop() -> Any:
    """Return a new class of loops: two rollouts at a time, a group of two, a queue for one."""

    class Loop:
        def __init__(self) -> None:
            self.model_version = 3
            self.rollout_buffer: Any = queue.Queue(maxsize=1)

        def run(self) -> str:
            return asyncio.run(self.rollouts())

        async def rollouts(self) -> str:
            for group in (7, 8):
                await asyncio.gather(
                    *(self._generate_one("?", {}, [], group_id=group) for _ in range(2))
                )
                samples = await self._score_group(SimpleNamespace(group_id=group))
                for sample in samples:
                    self.give(sample)
            return "done"

        def give(self, sample: str) -> None:
            while True:
                try:
                    self.rollout_buffer.put_nowait(sample)
                    break
                except queue.Full:  # the trainer takes one
                    self.rollout_buffer.get()

        async def _generate_one(
            self, prompt: str, tool_dict: Any, tools: Any, group_id: int
        ) -> Any:
            await self._execute_tool_calls()
            if group_id == 8:
                self.model_version = 4
            return ["message"], [5, 6, 7], ["row"], 1, 0, None

        async def _execute_tool_calls(self) -> None:
            await asyncio.sleep(0)

        async def _score_group(self, group: Any) -> Any:
            return ["sample"] * 2

    return Loop


class Worker:
    def start(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLPROF__INTEGRATED__PROFILE_SAVE_PATH", str(tmp_path))
    return tmp_path


def ran(folder: Path, loop: Any) -> tuple[Any, Run]:
    done = loop.run()
    assert current() is None
    return done, load(next(each for each in folder.iterdir() if each.name[0] != "."))


def installed(loop: Any) -> None:
    module = SimpleNamespace(__name__="m", AsyncRolloutWorker=Worker, _AsyncRolloutLoop=loop)
    trl_async.install_worker(module)


def counted(run: Run, name: str) -> list[dict[str, float]]:
    """Return the counters of each span of a stage, without those of its memory and lengths."""
    rows = [row for row in run.rows(kind="stage") if run.names[run.name[row]] == name]
    known = {key: run.amounts(key) for key in ("version", "version_end", "sample", "samples")}
    known["tokens"] = run.amounts("tokens")
    return [
        {key: int(values[list(at).index(row)]) for key, (at, values) in known.items() if row in at}
        for row in rows
    ]


def test_a_rollout_has_its_group_its_tokens_and_the_versions_that_wrote_it(folder: Path) -> None:
    kind = make_loop()
    installed(kind)
    done, run = ran(folder, kind())
    assert done == "done"
    assert [header.role for header in run.headers.values()] == ["rollout"]
    of_7 = {"version": 3, "sample": 7, "samples": 1, "tokens": 3}
    of_8 = {**of_7, "sample": 8}
    found = counted(run, "actor_generate")
    assert found[:2] == [of_7, of_7]
    assert found[2:] == [{**of_8, "version_end": 4}, {**of_8, "version_end": 4}]
    assert counted(run, "compute_reward") == [{"sample": group, "samples": 2} for group in (7, 8)]
    assert len(counted(run, "tool_calls")) == 4
    assert run.step[run.rows(kind="step")].tolist() == [3]  # version 4 has not ended
    assert run.step[run.rows(name="actor_generate")].tolist() == [3] * 4
    assert run.statuses == {0: "finished"}


def test_a_full_queue_is_backpressure_once_until_there_is_room(folder: Path) -> None:
    kind = make_loop()
    installed(kind)
    _, run = ran(folder, kind())
    assert len(counted(run, "backpressure")) == 3  # four samples, and room for the first


@pytest.mark.parametrize("calls_ours", [True, False])
def test_a_loop_of_the_users_own_is_recorded_once(calls_ours: bool, folder: Path) -> None:
    kind = make_loop()
    installed(kind)

    class Own(kind):  # type: ignore[misc]
        async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
            if calls_ours:
                return await super()._generate_one(*args, **kwargs)
            return ["message"], [5], ["row"], 0, 0, None

    _, run = ran(folder, Own())
    assert len(counted(run, "actor_generate")) == 4


def test_an_exception_passes_and_the_run_says_so(folder: Path) -> None:
    kind = make_loop()
    installed(kind)

    def broken(group: Any) -> None:
        raise ValueError("the judge is gone")

    loop = kind()
    kind._score_group = lambda self, group: broken(group)
    with pytest.raises(ValueError, match="the judge is gone"):
        loop.run()
    [run] = [load(each) for each in folder.iterdir() if each.name[0] != "."]
    assert run.statuses == {0: "interrupted by ValueError"}


def test_another_version_of_the_loop_runs_as_before(folder: Path) -> None:
    class Loop:
        def run(self) -> str:
            return "done"

    installed(Loop)
    assert Loop().run() == "done"
    assert current() is None


def test_the_trainers_queue_waits_and_marks_each_group_once(folder: Path) -> None:
    trainer: Any = type("AsyncGRPOTrainer", (), {"_sync_weight": lambda self: None})

    class RolloutQueueDataset:
        def __init__(self, rollout_queue: Any) -> None:
            self.queue = rollout_queue

    module = SimpleNamespace(
        __name__="m", AsyncGRPOTrainer=trainer, RolloutQueueDataset=RolloutQueueDataset
    )
    trl_async.install_trainer(module)
    samples: Any = queue.Queue()
    for group in (7, 7, 8):
        samples.put(SimpleNamespace(group_id=group))
    session = trl_async.KIT.session()
    assert session is not None
    with session:
        session.begin_step(1)
        dataset = RolloutQueueDataset(samples)
        assert dataset.queue.qsize() == 3
        for _ in range(3):
            dataset.queue.get(timeout=1)
        with pytest.raises(queue.Empty):
            dataset.queue.get(timeout=0)
        for version, is_main in ((2, True), (0, False)):
            accelerator = SimpleNamespace(is_main_process=is_main)
            sync = SimpleNamespace(accelerator=accelerator, model_version=version)
            trainer._sync_weight(sync)
        session.end_step()
    run = load(session.run)
    assert len(counted(run, "wait_for_samples")) == 4
    assert counted(run, "weight_sync") == [{"version": 2}, {}]
    rows, groups = run.amounts("sample")
    assert groups.tolist() == [7, 8]
    assert {run.names[run.name[row]] for row in rows} == {"sample taken"}

"""The rollout process of asynchronous GRPO, on a double of TRL's loop; `test_trl` has the real."""

import asyncio
import itertools
import pickle
import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lightning_rlprof.analysis.samples.fates import samples
from lightning_rlprof.analysis.samples.sample_book import sample_book
from lightning_rlprof.integrations.doors import trl_async
from lightning_rlprof.recording.samples import sample
from lightning_rlprof.recording.session import current
from lightning_rlprof.run import Run, load


def make_loop() -> Any:
    """Return a new class of loops: two rollouts at a time, a group of two, a queue for one."""

    class Loop:
        def __init__(self) -> None:
            self.model_version = 3
            self.rollout_buffer: Any = queue.Queue(maxsize=1)
            self.given: list[Any] = []
            self.rows = itertools.cycle([1, 2])  # that a conversation becomes

        def run(self) -> str:
            return asyncio.run(self.rollouts())

        async def rollouts(self) -> str:
            for group in (7, 8):
                made = await asyncio.gather(
                    *(self._generate_one("?", {}, [], group_id=group) for _ in range(2))
                )
                sequences = [each[2] for each in made]
                scored = SimpleNamespace(group_id=group, completions_sequences=sequences)
                for row in await self._score_group(scored):
                    self.give(row)
            return "done"

        def give(self, row: Any) -> None:
            self.given.append(pickle.loads(pickle.dumps(row)))
            while True:
                try:
                    self.rollout_buffer.put_nowait(row)
                    break
                except queue.Full:  # the trainer takes one
                    self.rollout_buffer.get()

        async def _generate_one(
            self, prompt: str, tool_dict: Any, tools: Any, group_id: int
        ) -> Any:
            await self._execute_tool_calls()
            if group_id == 8:
                self.model_version = 4
            rows = ["row"] * next(self.rows)
            return ["message"], [5, 6, 7], rows, 1, 0, None

        async def _execute_tool_calls(self) -> None:
            await asyncio.sleep(0)

        async def _score_group(self, group: Any) -> Any:
            rows = sum(map(len, group.completions_sequences))
            return [SimpleNamespace(group_id=group.group_id) for _ in range(rows)]

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
    known = {key: run.amounts(key) for key in ("version", "version_end", "samples")}
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
    of_7 = {"version": 3, "samples": 1, "tokens": 3}
    of_8 = {**of_7, "version_end": 4}
    assert counted(run, "actor_generate") == [of_7, of_7, of_8, of_8]
    assert counted(run, "compute_reward") == [{"samples": 2}] * 2
    assert len(counted(run, "tool_calls")) == 4
    assert run.step[run.rows(kind="step")].tolist() == [3]  # version 4 has not ended
    assert run.step[run.rows(name="actor_generate")].tolist() == [3] * 4
    assert run.statuses == {0: "finished"}


def test_each_rollout_is_a_sample_whose_rows_take_it_along(folder: Path) -> None:
    kind = make_loop()
    installed(kind)
    loop = kind()
    _, run = ran(folder, loop)
    assert [int(row.group_id) for row in loop.given] == [7] * 3 + [8] * 3
    carried = [row.group_id.sample for row in loop.given]
    first, second, third, fourth = dict.fromkeys(each.id for each in carried)
    rows = [first, second, second, third, fourth, fourth]  # one has two
    assert [each.id for each in carried] == rows
    assert [each.prompt for each in carried] == ["prompt 7"] * 3 + ["prompt 8"] * 3
    book = sample_book(run)
    names = [[run.names[run.name[row]] for row in book.spans_of(at)] for at in range(len(book))]
    assert names == [["actor_generate", "compute_reward"]] * 4
    assert book.tokens.tolist() == [3] * 4


def test_what_ends_a_rollout_aborts_its_sample(folder: Path) -> None:
    kind = make_loop()

    async def cancelled(self: Any, *args: Any, **kwargs: Any) -> None:
        raise asyncio.CancelledError

    kind._generate_one = cancelled
    installed(kind)
    with pytest.raises(asyncio.CancelledError):
        kind().run()
    [run] = [load(each) for each in folder.iterdir() if each.name[0] != "."]
    assert dict(zip(*(samples(run).column(each) for each in ("fate", "samples")), strict=True)) == {
        "generated": 2, "aborted": 2, "trained": 0
    }  # fmt: skip


def test_a_full_queue_is_backpressure_once_until_there_is_room(folder: Path) -> None:
    kind = make_loop()
    installed(kind)
    _, run = ran(folder, kind())
    assert len(counted(run, "backpressure")) == 5  # six rows, and room for the first


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


def test_the_trainers_queue_waits_and_tells_the_fate_of_each_sample_once(folder: Path) -> None:
    trainer: Any = type("AsyncGRPOTrainer", (), {"_sync_weight": lambda self: None})

    class RolloutQueueDataset:
        max_staleness = 1

        def __init__(self, rollout_queue: Any, model_version_fn: Any) -> None:
            self.queue = rollout_queue
            self.model_version_fn = model_version_fn

    module = SimpleNamespace(
        __name__="m", AsyncGRPOTrainer=trainer, RolloutQueueDataset=RolloutQueueDataset
    )
    trl_async.install_trainer(module)
    session = trl_async.KIT.session()
    assert session is not None
    taken: Any = queue.Queue()
    first, second = sample("prompt 7", version=2), sample("prompt 7", version=2)
    for one, version, advantage in (
        (first, 2, 0.5), (first, 2, 0.5), (second, 2, 0.0), (None, 1, 1.0), (None, 2, 1.0),
    ):  # fmt: skip
        group: Any = 9
        if one is not None:
            group = trl_async._Group(7)
            group.sample = one
        mask = np.array([0, 1, 1])
        metrics = {"reward": 2.0, "reward_std": 0.1}
        row = SimpleNamespace(
            group_id=group, model_version=version, advantage=advantage, completion_mask=mask,
            metrics=metrics,
        )  # fmt: skip
        taken.put(row)
    with session:
        session.begin_step(1)
        dataset = RolloutQueueDataset(taken, lambda: 3)
        assert dataset.queue.qsize() == 5
        for _ in range(5):
            dataset.queue.get(timeout=1)
        with pytest.raises(queue.Empty):
            dataset.queue.get(timeout=0)
        for version, is_main in ((2, True), (0, False)):
            accelerator = SimpleNamespace(is_main_process=is_main)
            sync = SimpleNamespace(accelerator=accelerator, model_version=version)
            trainer._sync_weight(sync)
        session.end_step()
    run = load(session.run)
    assert len(counted(run, "wait_for_samples")) == 6
    assert counted(run, "weight_sync") == [{"version": 2}, {}]
    table = samples(run)
    told = [table.column(each) for each in ("fate", "samples", "tokens")]
    assert [*zip(*told, strict=True)] == [
        ("generated", 4, 8), ("stale", 1, 2), ("zero_advantage", 1, 2), ("trained", 2, 4)
    ]  # fmt: skip
    book = sample_book(run)
    assert {*book.reward.tolist()} == {2.0}
    assert run.amounts("trainer_version")[1].tolist() == [3.0] * 4
    assert "had one" not in table.note

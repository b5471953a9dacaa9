"""Lightning trainings heard by a real NVTX tool of our own: every call of every process.

The functions above the tests run in processes of their own: NVTX looks for a tool once, at the
first call of a process.
"""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import annotate, mark, stage
from lightning_rlprof.recording.recorders.nvtx import color
from tests.builders.models import Tiny, loader, make_trainer, only_run, steps_of
from tests.doubles.nvtx import listener
from tests.doubles.nvtx.listener import Call, left_open, shown

TWO_RANKS = {"devices": 2, "use_distributed_sampler": False}


class Marked(Tiny):
    """Marks of every sort in every step; in the second, one of them breaks where it is told to."""

    def __init__(self, breaks: str = "", error: Exception | None = None) -> None:
        super().__init__()
        self.breaks, self.error = breaks, error

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.batch = batch_idx
        with stage("actor_generate"):
            self._break_at("stage")
            asyncio.run(self._score())
        with annotate("rollout statistics"):
            mark("weights published")
            self._break_at("region")
        self._break_at("step")
        return super().training_step(batch, batch_idx)

    async def _score(self) -> None:
        with stage("compute_reward"):
            await asyncio.sleep(0)
            self._break_at("coroutine")

    def _break_at(self, where: str) -> None:
        if self.breaks == where and self.batch == 1:
            assert self.error is not None
            raise self.error


class Rows(Dataset[torch.Tensor]):
    """Items that a worker makes inside a stage."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        with stage("actor_generate"):
            return torch.ones(4)


def fit(module: Tiny | None = None, data: Any = None, ranks: Any = None, **options: Any) -> None:
    """Train four steps into ``runs``, the second and third of them captured."""
    callback = ProfilerCallback(
        profile_save_path="runs", tools=["nvtx"], steps=[2, 3], ranks=ranks, role="actor"
    )
    make_trainer(callback, **options).fit(module or Marked(), data or loader())


def fit_with_a_worker() -> None:
    """Train on what a forked worker makes."""
    fit(Tiny(), DataLoader(Rows(), num_workers=1, multiprocessing_context="fork"))


def fit_all_steps() -> None:
    """Train with every step captured, also the one after the last, which never comes."""
    callback = ProfilerCallback(profile_save_path="runs", tools=["nvtx"], steps="all")
    make_trainer(callback).fit(Tiny(), loader())


def fit_and_forget() -> None:
    """Train with a stage in every step that nobody ends."""
    module = Tiny()
    module.on_batch = lambda batch_idx: stage("weight_sync").__enter__()
    fit(module)


def fit_and_break() -> None:
    """Train four times; each time something breaks inside another sort of range."""
    for breaks in ("stage", "region", "step", "coroutine"):
        error = ValueError(breaks)
        with pytest.raises(ValueError, match=breaks) as caught:
            fit(Marked(breaks, error))
        assert caught.value is error
        mark("nobody records now")


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return listener.build(tmp_path_factory.mktemp("nvtx"))


def heard(call: str, folder: Path, tool: Path) -> list[Call]:
    """Return what is heard of one of the functions above, run in a process of its own."""
    name = call.partition("(")[0]
    script = f"from tests.integrations.lightning.test_nvtx_run import {name}\n{call}"
    return listener.heard(script, folder, tool, PYTHONWARNINGS="ignore")


def by_process(calls: list[Call]) -> list[list[str]]:
    """Return each process's ranges and marks as words, without the time that it says."""
    processes = dict.fromkeys(call.process for call in calls)
    timeless = [
        call._replace(payload=None) if call.message == "rlprof.clock" else call for call in calls
    ]
    return [shown(call for call in timeless if call.process == one) for one in processes]


def step_words(step: int) -> list[str]:
    """Return what one step of `Marked` says."""
    words = """
        push region data_fetch N | pop
        push region batch_transfer N | pop
        push region training_step N
          push stage actor_generate N
            start stage compute_reward N | end
          pop
          push region rollout statistics N
            mark mark weights published N
          pop
          push stage actor_update N | pop
        pop
        push stage actor_update N
          push region backward N | pop
          push region optimizer_step N | pop
        pop
    """
    lines = words.replace("|", "\n").splitlines()
    said = [line.strip().replace(" N", f" {step}") for line in lines if line.strip()]
    if step not in (2, 3):
        return said
    return [f"push step step {step}", *said, "pop"]


def run_words(rank: int = 0) -> list[str]:
    """Return what all four steps say, each of the two captures with its marks."""
    capture = [f"mark  rlprof.rank {rank}", "mark  rlprof.clock None"]
    one, two, three, four = (step_words(step) for step in (1, 2, 3, 4))
    return [*one, *capture, *two, *capture, *three, *four]


@pytest.fixture(scope="module")
def trained(tool: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Call], Path]:
    """What is heard of a training, and the folder that it ran in."""
    folder = tmp_path_factory.mktemp("trained")
    return heard("fit()", folder, tool), folder


@pytest.mark.deep
def test_every_range_and_mark_of_a_training_is_heard(trained: tuple[list[Call], Path]) -> None:
    calls, _ = trained
    assert by_process(calls) == [run_words()]
    assert left_open(calls) == []
    assert {call.domain for call in calls} == {"rlprof"}
    assert len({call.thread for call in calls}) == 1
    events = [call for call in calls if call.category]
    assert all(call.color == color(call.message, call.category) for call in events)
    named = Counter(call.message for call in calls if call.verb == "category")
    assert named == Counter(["region", "stage", "mark", "step"])
    assert [call.verb for call in calls].count("create") == 1


@pytest.mark.deep
def test_ranges_are_the_spans_of_the_run(trained: tuple[list[Call], Path]) -> None:
    calls, folder = trained
    (trace,) = only_run(folder / "runs")
    assert trace.status == "finished"
    # A collection is recorded afterwards, if it took a millisecond: on a busy machine.
    unheard = {"rlprof open capture", "rlprof close capture", "garbage_collection"}
    spans = Counter(
        (span.kind, span.name, span.step)
        for span in trace.spans
        if span.name not in unheard and span.kind in ("stage", "region", "mark")
    )
    # Ranges nest: that of the mark, and that of the update's rest.
    spans |= {("stage", "actor_update", step): 2 for step in (1, 2, 3, 4)}
    ranges = Counter(
        (call.category, call.message, call.payload)
        for call in calls
        if call.category and call.category != "step"
    )
    assert ranges == spans


@pytest.mark.deep
def test_each_forked_rank_says_which_it_is(tool: Path, tmp_path: Path) -> None:
    calls = heard(f"fit(strategy='ddp_fork', **{TWO_RANKS})", tmp_path, tool)
    assert sorted(by_process(calls)) == sorted([run_words(0), run_words(1)])
    assert left_open(calls) == []


@pytest.mark.deep
def test_a_rank_that_is_not_wanted_says_nothing(tool: Path, tmp_path: Path) -> None:
    calls = heard(f"fit(ranks=[1], strategy='ddp_fork', **{TWO_RANKS})", tmp_path, tool)
    assert by_process(calls) == [run_words(1)]


@pytest.mark.deep
def test_each_spawned_rank_says_which_it_is(tool: Path, tmp_path: Path) -> None:
    calls = heard(f"fit(strategy='ddp_spawn', **{TWO_RANKS})", tmp_path, tool)
    assert sorted(by_process(calls)) == sorted([run_words(0), run_words(1)])
    assert left_open(calls) == []
    assert [call.verb for call in calls].count("create") == 2


@pytest.mark.deep
def test_a_forked_data_worker_leaves_the_ranges_to_its_parent(tool: Path, tmp_path: Path) -> None:
    calls = heard("fit_with_a_worker()", tmp_path, tool)
    (words,) = by_process(calls)
    assert left_open(calls) == []
    assert [word for word in words if "actor_generate" in word] == []
    assert [word for word in words if "actor_update" in word] == [
        f"push stage actor_update {step}" for step in (1, 1, 2, 2, 3, 3, 4, 4)
    ]
    assert steps_of(only_run(tmp_path / "runs")[0]) == [1, 2, 3, 4]


@pytest.mark.deep
def test_an_exception_in_any_sort_of_range_closes_it_and_passes(tool: Path, tmp_path: Path) -> None:
    calls = heard("fit_and_break()", tmp_path, tool)
    assert left_open(calls) == []
    words = Counter(shown(calls))
    assert words["push step step 2"] == words["push region training_step 2"] == 4
    assert words["push stage actor_generate 2"] == 4
    assert words["start stage compute_reward 2"] == 3
    assert words["push region rollout statistics 2"] == 2
    assert words["push stage actor_update 2"] == 0
    assert not [word for word in words if "nobody records" in word]


@pytest.mark.deep
def test_the_step_that_never_comes_is_closed(tool: Path, tmp_path: Path) -> None:
    calls = heard("fit_all_steps()", tmp_path, tool)
    assert shown(calls).count("push step step 5") == 1
    assert left_open(calls) == []


@pytest.mark.deep
def test_a_stage_that_nobody_ends_is_closed_with_the_run(tool: Path, tmp_path: Path) -> None:
    calls = heard("fit_and_forget()", tmp_path, tool)
    assert shown(calls).count("push stage weight_sync 2") == 1
    assert left_open(calls) == []


@pytest.mark.cuda
def test_a_real_tool_sees_the_same_ranges_of_a_training_on_a_gpu(
    tool: Path, tmp_path: Path
) -> None:
    (tmp_path / "gpu").mkdir()
    (tmp_path / "cpu").mkdir()
    on_gpu = heard("fit(accelerator='gpu', devices=1)", tmp_path / "gpu", tool)
    on_cpu = heard("fit()", tmp_path / "cpu", tool)
    # torch's own ranges, where there are any, are in other domains than ours.
    ours = [call for call in on_gpu if call.domain == "rlprof"]
    stages = [word for word in by_process(ours)[0] if " stage " in word]
    assert stages
    assert stages == [word for word in by_process(on_cpu)[0] if " stage " in word]

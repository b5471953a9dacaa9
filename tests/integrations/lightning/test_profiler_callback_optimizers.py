"""Torch's global optimizer hooks are there during a fit and nowhere else."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import optimizer as hooks

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.torch_hooks import OptimizerSteps
from tests.builders.models import Tiny, loader, make_trainer, of, trace_of
from tests.builders.recording import times


def listeners() -> int:
    return len(hooks._global_optimizer_pre_hooks) + len(hooks._global_optimizer_post_hooks)


def test_the_hooks_go_with_the_fit(tmp_path: Path) -> None:
    before, module, seen = listeners(), Tiny(), []
    module.on_batch = lambda batch_idx: seen.append(listeners())
    make_trainer(ProfilerCallback(profile_save_path=str(tmp_path))).fit(module, loader())
    assert seen == [before + 2] * 4
    assert listeners() == before


@pytest.mark.parametrize("where", ["training_step", "setup"])
def test_the_hooks_go_with_an_exception(where: str, tmp_path: Path) -> None:
    class Raises(Tiny):
        def setup(self, stage: str) -> None:
            assert where != "setup"

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            raise AssertionError

    before = listeners()
    with pytest.raises(AssertionError):
        make_trainer(ProfilerCallback(profile_save_path=str(tmp_path))).fit(Raises(), loader())
    assert listeners() == before


def test_an_optimizer_outside_of_training_is_none_of_ours(tmp_path: Path) -> None:
    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Tiny(), loader())
    layer = torch.nn.Linear(1, 1)
    layer(torch.ones(1)).backward()
    torch.optim.SGD(layer.parameters(), lr=1.0).step()
    assert len(of(trace_of(callback), "optimizer_step")) == 4


def test_an_optimizer_that_asks_twice_for_its_closure_is_one_region(tmp_path: Path) -> None:
    class Closures(Tiny):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    callback = ProfilerCallback(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Closures(), loader())
    trace = trace_of(callback)
    assert len(of(trace, "backward")) > 4
    assert [span.step for span in of(trace, "optimizer_step")] == [1, 2, 3, 4]


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


class Around(torch.optim.Optimizer):
    """Works for 10 and 100 ns around what it does, such as another optimizer's step."""

    def __init__(self, clock: Any, inside: Any) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))], {})
        self.clock, self.inside = clock, inside

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.clock.advance(10)
        self.inside()
        self.clock.advance(100)


@pytest.fixture
def hooked(start: Any) -> Iterator[tuple[Any, OptimizerSteps]]:
    session = start()
    session.begin_step(1)
    steps = OptimizerSteps(session)
    yield session, steps
    steps.remove()


def test_an_optimizer_that_steps_another_has_a_region_around_it(hooked: Any, clock: Any) -> None:
    session, _ = hooked
    inner = Around(clock, lambda: clock.advance(1))
    Around(clock, inner.step).step()
    session.close()
    assert times(session, "optimizer_step") == [(1, 10, 121), (1, 0, 221)]


def test_a_step_that_raised_lengthens_no_other_and_leaves_nothing(hooked: Any, clock: Any) -> None:
    session, steps = hooked
    fails = Around(clock, lambda: 1 / 0)

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            fails.step()

    Around(clock, fail).step()
    assert not steps._running.steps
    for _ in range(1000):
        fail()
    assert len(steps._running.steps) < 100
    begun, fails.inside = clock(), int
    fails.step()
    session.close()
    assert times(session, "optimizer_step") == [(1, 0, 120), (1, begun, begun + 110)]


def test_a_step_in_another_thread_moves_no_start(hooked: Any, clock: Any) -> None:
    session, _ = hooked
    other = Around(clock, lambda: clock.advance(1))

    def elsewhere() -> None:
        thread = threading.Thread(target=other.step)
        thread.start()
        thread.join()

    Around(clock, elsewhere).step()
    session.close()
    assert times(session, "optimizer_step") == [(1, 10, 121), (1, 0, 221)]


def test_the_closure_is_cut_off_from_all_that_are_around_it(hooked: Any, clock: Any) -> None:
    session, steps = hooked
    inner = Around(clock, steps.closure_done)
    Around(clock, inner.step).step()
    session.close()
    assert times(session, "optimizer_step") == [(1, 20, 120), (1, 20, 220)]


def test_a_step_whose_begin_nobody_heard_is_no_region(hooked: Any, clock: Any) -> None:
    session, steps = hooked
    steps._after(sgd(), (), {})
    session.close()
    assert times(session, "optimizer_step") == []

"""Torch's global optimizer hooks are there during a fit and nowhere else."""

from pathlib import Path

import pytest
import torch
from torch.optim import optimizer as hooks

from lightning_rlprof.callbacks.profiler import ProfilerCallback
from tests.callbacks.models import Tiny, loader, make_trainer, of, trace_of


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

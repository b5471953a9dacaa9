"""`run_demo`: a real training, short; the same by seed, on one rank and on two."""

import logging
import warnings
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

from lightning_rlprof.cli.demo.options import DemoOptions
from lightning_rlprof.cli.demo.run import DemoResult, be_quiet, run_demo

SHORT = {"steps": 3, "warmup_steps": 3}


def without_time(result: DemoResult) -> dict[str, object]:
    return {**vars(result), "seconds": None, "run": None}


def test_a_short_run_reports_each_step_and_says_nothing(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[tuple[int, int, float]] = []
    options = DemoOptions(**SHORT, save_path=tmp_path)
    result = run_demo(options, progress=lambda *step: seen.append(step))
    assert capfd.readouterr() == ("", "")
    assert seen == [(step, 3, pytest.approx(result.rewards[step - 1])) for step in (1, 2, 3)]
    assert len(result.rewards) == 3
    assert result.parameters > 200_000
    assert result.seconds > 0
    assert 0 <= result.exact_before <= 1
    assert result.run is not None
    assert result.run.parent == tmp_path
    text = (result.run / "rank-00000.jsonl").read_text()
    assert all(name in text for name in ("weight_sync", "actor_generate", "actor_update"))


@pytest.mark.deep
def test_the_seed_decides_and_the_cache_changes_nothing_but_time(tmp_path: Path) -> None:
    first = run_demo(DemoOptions(**SHORT, save_path=tmp_path, seed=4))
    cached = run_demo(DemoOptions(**SHORT, save_path=tmp_path, seed=4, kv_cache=True))
    assert without_time(cached) == {
        **without_time(first),
        "rewards": pytest.approx(first.rewards),
    }
    assert run_demo(DemoOptions(**SHORT, save_path=tmp_path, seed=5)).rewards != first.rewards


def test_the_random_state_outside_is_left_alone(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    run_demo(DemoOptions(steps=1, warmup_steps=0, save_path=tmp_path))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.deep
def test_the_warm_start_has_the_length_that_was_asked_for(tmp_path: Path) -> None:
    options = {"steps": 1, "save_path": tmp_path}
    none = run_demo(DemoOptions(**options, warmup_steps=0))
    default = run_demo(DemoOptions(**options))
    assert none.exact_before < 0.02 < default.exact_before


class Gather(pl.Callback):
    """Writes each rank's weights, and what it learned from, to a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[int] = []

    def path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.pt"

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: list[int], batch_idx: int
    ) -> None:
        self.batches += batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        weights = torch.nn.utils.parameters_to_vector(pl_module.policy.parameters()).detach()
        torch.save((weights, self.batches, torch.get_num_threads()), self.path(trainer.global_rank))


@pytest.mark.deep
def test_two_ranks_learn_from_different_prompts_and_bring_back_their_mean(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[int] = []
    options = DemoOptions(**SHORT, ranks=2, save_path=tmp_path)
    gather = Gather(tmp_path)
    result = run_demo(options, [gather], progress=lambda step, _, __: seen.append(step))
    assert capfd.readouterr() == ("", "")
    assert seen == [1, 2, 3]
    assert result.run is not None
    assert sorted(path.name for path in result.run.glob("*.jsonl")) == [
        "rank-00000.jsonl",
        "rank-00001.jsonl",
    ]
    alone = run_demo(DemoOptions(**SHORT, save_path=tmp_path / "alone"))
    assert min(result.rewards) > 0
    assert result.exact_before == alone.exact_before
    assert result.rewards[0] != alone.rewards[0]
    (weights, batches, threads), (others, other_batches, _) = (
        torch.load(gather.path(rank)) for rank in (0, 1)
    )
    assert torch.equal(weights, others)  # the gradients were averaged
    assert len(batches) == len(other_batches) == 24
    assert batches != other_batches
    assert threads == 1


def test_a_demo_makes_lightning_quiet_and_torch_use_one_thread() -> None:
    torch.set_num_threads(2)
    be_quiet()
    assert torch.get_num_threads() == 1
    log = logging.getLogger("pytorch_lightning.somewhere")
    assert not log.isEnabledFor(logging.WARNING)
    assert log.isEnabledFor(logging.ERROR)
    warnings.warn("The dataloader does not have many workers", UserWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", UserWarning, stacklevel=1)

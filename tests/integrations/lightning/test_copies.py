"""Copies of a Trainer that trains are without us, and hooks of ours serve one fit at a time."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from lightning_rlprof.integrations.lightning.profiler_callback import Callback, ProfilerCallback
from lightning_rlprof.integrations.lightning.trainer_hooks import Cover
from tests.builders.models import (
    PACKAGES,
    Tiny,
    loader,
    make_trainer,
    module_of,
    of,
    recorded,
    steps_of,
    trace_of,
)


class Data(pytorch_lightning.LightningDataModule):
    """As its `collate` is a method, workers that are spawned get it, and with it the Trainer."""

    def collate(self, rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(rows)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(
            [*torch.ones(8, 4)],  # type: ignore[arg-type]
            batch_size=2,
            num_workers=1,
            multiprocessing_context="spawn",
            collate_fn=self.collate,
        )


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:.*persistent_workers:UserWarning")
@pytest.mark.filterwarnings("ignore:.*num_workers:UserWarning")
def test_workers_that_are_spawned_may_know_the_trainer(tmp_path: Path) -> None:
    assert steps_of(recorded(tmp_path, data=Data())) == [1, 2, 3, 4]


def pickled(each: Any) -> Any:
    return pickle.loads(pickle.dumps(each))


class Copies(Callback):
    """Copies the Trainer's profiler in the middle of a training."""

    def __init__(self, copied: Any) -> None:
        self.copied, self.profiler = copied, None

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.profiler = self.copied(trainer.profiler)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_of_what_is_covered_have_their_own_methods(
    package: Any, copied: Any, tmp_path: Path
) -> None:
    callback, copies = ProfilerCallback(profile_save_path=str(tmp_path)), Copies(copied)
    make_trainer(callback, copies, package=package).fit(module_of(package), loader(1))
    profiler: Any = copies.profiler
    for name in ("start", "stop", "profile"):
        assert getattr(profiler, name).__func__ is getattr(type(profiler), name)
    with profiler.profile("actor_generate"):
        pass
    assert of(trace_of(callback), "actor_generate") == []


class Owner:
    def act(self) -> str:
        return "own"


def test_a_copy_has_what_was_covered() -> None:
    plain, changed = Owner(), Owner()
    vars(changed)["act"] = len
    covers = [Cover(owner, "act", lambda *_: "ours") for owner in (plain, changed)]
    assert [plain.act(), changed.act()] == ["ours", "ours"]
    for copied in (copy.deepcopy, pickled):
        twin, other = copied([plain, changed])
        assert twin.act() == "own"
        assert twin.act.__self__ is twin
        assert vars(other)["act"] is len
    for cover in covers:
        cover.remove()
    assert "act" not in vars(plain)
    assert vars(changed)["act"] is len


class Derived(ProfilerCallback):
    """As Lightning's users derive callbacks: each hook calls that of the class above."""

    batches = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self.batches += 1


def test_a_derived_callback_may_call_the_hooks_above_it(tmp_path: Path) -> None:
    callback = Derived(profile_save_path=str(tmp_path))
    make_trainer(callback).fit(Tiny(), loader())
    assert callback.batches == 4
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]


def test_a_fit_of_the_same_callback_inside_its_fit_is_not_recorded(tmp_path: Path) -> None:
    callback, module = ProfilerCallback(profile_save_path=str(tmp_path)), Tiny()

    def train_another(batch: int) -> None:
        if batch == 1:
            make_trainer(callback).fit(Tiny(), loader(2))

    module.on_batch = train_another
    make_trainer(callback).fit(module, loader())
    trace = trace_of(callback)
    assert steps_of(trace) == [1, 2, 3, 4]
    assert (trace.status, len(of(trace, "epoch"))) == ("finished", 1)


class Raises(pytorch_lightning.Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        raise RuntimeError("of another callback")


def test_a_run_whose_end_another_callback_kept_from_us_ends_with_the_next_fit(
    tmp_path: Path,
) -> None:
    callback, broken = ProfilerCallback(profile_save_path=str(tmp_path)), Tiny()
    broken.on_batch = lambda batch: 1 // (1 - batch)
    with pytest.raises(RuntimeError, match="of another callback"):
        make_trainer(Raises(), callback).fit(broken, loader())
    first = trace_of(callback).path
    make_trainer(callback).fit(Tiny(), loader())
    assert steps_of(trace_of(callback)) == [1, 2, 3, 4]
    status = [line for line in first.read_text().splitlines() if line.startswith('["end"')]
    assert "interrupted by an error" in status[0]

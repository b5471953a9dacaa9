"""One tiny training for both Lightnings, and how to read what was recorded of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytorch_lightning
import torch
from torch.utils.data import DataLoader

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from lightning_rlprof.recording.annotations import stage
from lightning_rlprof.records.run_directory import RankTrace, rank_files, read_trace

PACKAGES = (pytorch_lightning, lightning.pytorch)
BATCHES = 4


class Body:
    """What a module of either Lightning does: four batches, one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer = torch.nn.Linear(4, 1)
        self.losses: list[float] = []
        self.on_batch: Callable[[int], object] | None = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        with stage("actor_update", tokens=8):
            loss = self.layer(batch).pow(2).mean()
            if self.on_batch is not None:
                self.on_batch(batch_idx)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Tiny(Body, pytorch_lightning.LightningModule):
    pass


class TinyToo(Body, lightning.pytorch.LightningModule):
    pass


class Validated(Tiny):
    """With the steps of the Trainer's other verbs."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch)

    test_step = predict_step = validation_step


class TwoOptimizers(Tiny):
    """Manual optimisation: two inner epochs of an actor and a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        for _ in range(2):
            for optimizer, layer in zip(self.optimizers(), (self.layer, self.critic), strict=True):
                optimizer.zero_grad()
                self.manual_backward(layer(batch).pow(2).mean())
                optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layer, self.critic)]


def module_of(package: Any) -> Any:
    return Tiny() if package is pytorch_lightning else TinyToo()


def loader(batches: int = BATCHES) -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(batches * 8.0).reshape(batches * 2, 4) / 100, batch_size=2)


def make_trainer(*callbacks: Any, package: Any = pytorch_lightning, **options: Any) -> Any:
    quiet = {
        "max_epochs": 1,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return package.Trainer(callbacks=list(callbacks), **{**quiet, **options})


def recorded(
    folder: Path, module: Any = None, *others: Any, data: Any = None, **options: Any
) -> RankTrace:
    """Train under a callback that writes into the folder, and read what rank 0 wrote."""
    callback = ProfilerCallback(profile_save_path=str(folder))
    make_trainer(callback, *others, **options).fit(
        module or Tiny(), loader() if data is None else data
    )
    return trace_of(callback)


def trace_of(callback: ProfilerCallback, rank: int = 0) -> RankTrace:
    assert callback.run is not None
    return read_trace(callback.run / f"rank-{rank:05d}.jsonl")


def only_run(folder: Path) -> list[RankTrace]:
    """Read every rank of the one run in a folder."""
    (run,) = folder.iterdir()
    return [read_trace(path) for path in rank_files(run)]


def steps_of(trace: RankTrace) -> list[int]:
    return [span.step for span in trace.spans if span.kind == "step" and not is_cut(span)]


def cut_steps(trace: RankTrace) -> list[int]:
    return [span.step for span in trace.spans if span.kind == "step" and is_cut(span)]


def is_cut(span: Any) -> bool:
    return bool((span.counters or {}).get("interrupted"))


def of(trace: RankTrace, name: str) -> list[Any]:
    return [span for span in trace.spans if span.name == name]

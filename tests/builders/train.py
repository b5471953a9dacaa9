"""A training in a process of its own, for what a test cannot do to itself; not a test.

Usage: ``python -m tests.builders.train PACKAGE FOLDER WHAT``; ``WHAT`` is in ``TRAININGS``.
"""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from tests.builders.models import PACKAGES, loader, make_trainer, module_of

BREAKS_AT = 2


def plain(package: Any, folder: Path) -> None:
    """Train without a callback in the code."""
    make_trainer(package=package).fit(module_of(package), loader())


def ddp(package: Any, folder: Path) -> None:
    """Train on two ranks that Lightning starts as scripts."""
    _on_two_ranks(package, folder, module_of(package))


def ddp_breaks(package: Any, folder: Path) -> None:
    """Fail on rank 1 alone, in the third step."""
    module = module_of(package)

    def act(batch_idx: int) -> None:
        if batch_idx == BREAKS_AT and module.global_rank == 1:
            raise ValueError("only here")

    module.on_batch = act
    _on_two_ranks(package, folder, module)


def _on_two_ranks(package: Any, folder: Path, module: Any) -> None:
    callback = ProfilerCallback(profile_save_path=str(folder), ranks=[1], steps=[2])
    make_trainer(
        callback, package=package, devices=2, strategy="ddp", use_distributed_sampler=False
    ).fit(module, loader())


TRAININGS = {one.__name__: one for one in (plain, ddp, ddp_breaks)}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    name, target, what = sys.argv[1:]
    (wanted,) = [one for one in PACKAGES if one.__name__ == name]
    TRAININGS[what](wanted, Path(target))

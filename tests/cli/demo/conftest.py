"""Tests of the demo need reasoning-gym, which only its extra brings."""

import logging
import os
from collections.abc import Iterator

import pytest

from lightning_rlprof.cli.demo.policy import SpellBackward, Task

pytest.importorskip("reasoning_gym")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Undo what a demo changes in its process, for the tests that follow."""
    names = ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric")
    levels = {name: logging.getLogger(name).level for name in names}
    variables = dict(os.environ)
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    for name in os.environ.keys() - variables.keys():  # such as the port of DDP
        del os.environ[name]


@pytest.fixture(scope="session")
def spelling() -> Task:
    return SpellBackward(0, 256)

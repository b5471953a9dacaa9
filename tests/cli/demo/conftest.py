"""Tests of the demo need reasoning-gym, which only its extra brings."""

import pytest

from lightning_rlprof.cli.demo.task import Task, make_task

pytest.importorskip("reasoning_gym")


@pytest.fixture(scope="session")
def spelling() -> Task:
    return make_task("spell_backward")


@pytest.fixture(scope="session")
def sorting() -> Task:
    return make_task("number_sorting")

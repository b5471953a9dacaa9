"""Where reports appear: as configured, or where Ray says; Ray itself takes no part."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlprof.config.blocks import NsightConfig
from lightning_rlprof.recording import nsys
from lightning_rlprof.recording.nsys import folder_of, latest_folder


class FakeRay(SimpleNamespace):
    """What is asked of Ray: whether it runs, and its public runtime context."""

    runs = True

    def is_initialized(self) -> bool:
        return self.runs

    def get_runtime_context(self) -> Any:
        return self.context


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    names = {"get_temp_dir": lambda: "/data/ray", "get_session_name": lambda: "session_7"}
    fake = FakeRay(context=SimpleNamespace(**names))
    monkeypatch.setitem(nsys.sys.modules, "ray", fake)
    return fake


def test_a_folder_that_is_configured_wins(ray: FakeRay) -> None:
    assert folder_of(NsightConfig(reports="/data/reports")) == Path("/data/reports")


def test_in_a_process_of_ray_it_is_the_sessions(ray: FakeRay) -> None:
    assert folder_of(NsightConfig()) == Path("/data/ray/session_7/logs/nsight")


def test_an_older_ray_means_its_last_session(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    del ray.context.get_session_name
    monkeypatch.setenv("RAY_TMPDIR", "/data")
    expected = Path("/data/ray/session_latest/logs/nsight")
    assert folder_of(NsightConfig()) == latest_folder() == expected


def test_where_ray_does_not_run_nobody_knows(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ray.runs = False
    assert folder_of(NsightConfig()) is None
    monkeypatch.delitem(nsys.sys.modules, "ray")
    assert folder_of(NsightConfig()) is None
    assert "ray" not in nsys.sys.modules

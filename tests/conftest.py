"""For every test: no RLPROF variables from outside, one torch thread, a fake clock."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.effort import DEEP
from tests.places import SHARED_DATA

# Before torch is imported, here and in every process that a test starts.
os.environ["OMP_NUM_THREADS"] = "1"
# Lightning would read a cluster's variables from the machine that runs the tests. Kept are those
# that say where tests find a tool.
_KEPT = {"RLPROF_MSPROF_ANALYZE", "RLPROF_NSYS", "RLPROF_PEERS", "RLPROF_TORCH_NPU"}
for _name in [name for name in os.environ if name.startswith(("RLPROF", "SLURM_", "PL_"))]:
    if _name not in _KEPT:
        del os.environ[_name]


# A busy machine may stop any example for a while, and a failure must come back at the next try.
settings.register_profile(
    "busy machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("busy machine")

DEEP_FOLDERS = ("ascend", "benchmarks", "fuzz", "peers")
"""All their tests are deep: each needs a process, a fuzzer, or many seeds."""


def pytest_report_header() -> str | None:
    """Say once why many tests are skipped in a clone alone."""
    if SHARED_DATA.is_dir():
        return None
    return "no folder ../shared/data: the tests on real traces of profilers are skipped"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in the folders of slow tests; tests/chaos is both, and tries more if deep."""
    names = (*DEEP_FOLDERS, "chaos") if DEEP else DEEP_FOLDERS
    folders = [Path(__file__).parent / name for name in names]
    for item in items:
        if any(folder in item.path.parents for folder in folders):
            item.add_marker(pytest.mark.deep)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs hardware that is not here."""
    if item.get_closest_marker("cuda"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")
    if item.get_closest_marker("npu") and not _has_npu():
        pytest.skip("needs an Ascend NPU with CANN and torch_npu")


def _has_npu() -> bool:
    """Tell whether torch_npu is installed beside torch and finds a device."""
    import torch

    return hasattr(torch, "npu") and bool(torch.npu.is_available())


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("RLPROF")]:
        if name not in _KEPT:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no run contain what another test's frameworks could not be recorded of."""
    from lightning_rlprof.recording.session import _Process

    monkeypatch.setattr(_Process, "notes", [])


@pytest.fixture(autouse=True)
def _no_background_metrics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sample no host in this process; the fixture `background_metrics` does it again."""
    from lightning_rlprof.recording.background import sampler

    if "background_metrics" not in request.fixturenames:
        monkeypatch.setattr(sampler, "start", lambda *_, **__: None)


@pytest.fixture
def background_metrics() -> None:
    """Sample the host and its device in sessions of this test, as outside of tests."""


@pytest.fixture(autouse=True)
def _clean_logger() -> Iterator[None]:
    """Undo what a test does to the package's logger, as examples in the pages do."""
    log = logging.getLogger("lightning_rlprof")
    level, handlers = log.level, [*log.handlers]
    yield
    log.setLevel(level)
    for handler in [each for each in log.handlers if each not in handlers]:
        log.removeHandler(handler)
        handler.close()


@pytest.fixture
def clock() -> Any:
    from lightning_rlprof.testing import FakeClock

    return FakeClock()


@pytest.fixture
def start(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Start a session on a fake clock; whatever a test leaves open is closed."""

    from lightning_rlprof.config.profiler_config import ProfilerConfig
    from lightning_rlprof.recording.background.sampler import CpuWait, HostMemory
    from lightning_rlprof.recording.session import Session, current
    from lightning_rlprof.testing import make_header

    for of_the_machine in (HostMemory, CpuWait):
        monkeypatch.setattr(of_the_machine, "counters", lambda self: {})

    def make(
        recorders: Any = (), rank: int = 0, loop: Any = None, helpers: Any = None, **options: Any
    ) -> Any:
        config, header = ProfilerConfig.build(None, **options), make_header(rank)
        return Session(config, tmp_path, header, recorders, clock, loop=loop, helpers=helpers)

    yield make
    if session := current():
        session.close("left open by the test")

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_rlprof.errors import RlprofError
from lightning_rlprof.store import ingest as ray_engine
from lightning_rlprof.store.ingest import ingest
from tests.builders.ingest_traces import cached_files, write_trace, write_traces
from tests.places import ROOT

needs_ray = [
    pytest.mark.deep,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs pip install lightning-rlprof[ray]"),
]

# Kills the worker that reads rank 1 the first time, the one that reads rank 2 every time.
DEADLY = """
import os, signal
if os.environ.get("RLPROF_TEST_MARKER"):
    import lightning_rlprof.loaders.chrome_events as source
    class Deadly(source.Source):
        def __init__(self, path, *rest):
            marker = os.environ["RLPROF_TEST_MARKER"]
            if "rank1" in str(path) and not os.path.exists(marker):
                open(marker, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if "rank2" in str(path):
                os.kill(os.getpid(), signal.SIGKILL)
            super().__init__(path, *rest)
    import lightning_rlprof.loaders.chrome_events as head
    source.Source = head.Source = Deadly
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], Path]]:
    """Ingest four ranks on a real Ray, of which two kill their workers."""
    out = tmp_path_factory.mktemp("ray")
    write_traces(out / "traces", 4)
    (out / "sitecustomize.py").write_text(DEADLY)
    temporary = tempfile.mkdtemp(prefix="rl")  # short: Ray puts sockets below it
    environment = {
        **os.environ,
        "RAY_TEMPORARY": temporary,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RLPROF_TEST_MARKER": str(out / "marker"),
        "PYTHONPATH": os.pathsep.join([str(out), str(ROOT)]),
    }
    driver = str(ROOT / "tests" / "builders" / "ray_ingest.py")
    command = [sys.executable, driver, str(out / "traces"), str(out / "no"), str(out / "told.json")]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield json.loads((out / "told.json").read_text()), out
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class TestOnRay:
    pytestmark = needs_ray

    def test_a_worker_that_dies_once_is_survived_and_one_that_dies_always_is_a_row(
        self, told: tuple[dict[str, Any], Path]
    ) -> None:
        rows = told[0]["table"]["rows"]
        assert (told[1] / "marker").exists()
        assert [row[1:3] for row in rows] == [
            ["0", "cached"],
            ["1", "cached"],
            ["2", "failed"],
            ["3", "cached"],
        ]
        assert "its Ray worker ended: WorkerCrashedError" in rows[2][3]

    def test_the_caches_are_those_of_the_local_engine_byte_for_byte(
        self, told: tuple[dict[str, Any], Path], tmp_path: Path
    ) -> None:
        write_traces(tmp_path / "traces", 4)
        table = ingest([tmp_path / "traces"], jobs=2)
        local, cluster = cached_files(tmp_path / "traces"), cached_files(told[1] / "traces")
        assert {name for name in local if not name.startswith("rank2")} == set(cluster)
        assert all(cluster[name] == local[name] for name in cluster)
        columns = [column.name for column in table.columns]
        alike = [columns.index(name) for name in ("ranks", "rows", "bytes read")]
        for row, other in zip(table.rows, told[0]["table"]["rows"], strict=True):
            if other[2] == "cached":
                assert [row[at] for at in alike] == [other[at] for at in alike]

    def test_a_file_that_the_worker_does_not_see_is_a_row(
        self, told: tuple[dict[str, Any], Path]
    ) -> None:
        assert told[0]["unseen"]["state"] == "failed"
        assert (
            "cannot see it: ingest needs files on storage that all hosts share"
            in told[0]["unseen"]["why"]
        )


def test_without_ray_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_traces(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RlprofError, match=r'pip install "lightning-rlprof\[ray\]"'):
        ingest([tmp_path], engine="ray")


class FakeRay(SimpleNamespace):
    """As much of Ray as it takes to join a cluster, and to run a task when it is waited for."""

    exceptions = SimpleNamespace(RayError=RuntimeError, RayTaskError=NotImplementedError)

    def __init__(self, *, inside: bool = False, cluster: bool = False, **more: Any) -> None:
        facts = {"cpus": 2.0, "free": 2.0, "slow": 0}
        super().__init__(inside=inside, cluster=cluster, calls=[], most=0, cancelled=[])
        vars(self).update(facts | more)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, "memory": 1e9} if self.cpus else {}

    def available_resources(self) -> dict[str, float]:
        return {"CPU": self.free}

    def remote(self, **_: Any) -> Any:
        return lambda function: SimpleNamespace(remote=lambda path: (function, path))

    def wait(self, running: list[Any], timeout: float | None) -> tuple[list[Any], list[Any]]:
        self.most = max(self.most, len(running))
        if timeout is not None and self.slow:
            self.slow -= 1
            return [], running
        return running[-1:], running[:-1]

    def get(self, task: Any) -> Any:
        return task[0](task[1])

    def cancel(self, task: Any, force: bool) -> None:
        self.cancelled.append(task[1])

    def shutdown(self) -> None:
        self.calls.append("shutdown")

    def is_initialized(self) -> bool:
        return bool(self.inside)

    def init(self, address: str | None = None, **_: Any) -> None:
        self.calls.append(address)
        if address is not None and not self.cluster:
            raise ConnectionError("no cluster\nand more")


def test_a_connection_that_is_there_is_used_and_left_open() -> None:
    fake = FakeRay(inside=True)
    assert ray_engine._join_cluster(fake) is False
    assert fake.calls == []


def test_a_cluster_is_joined_before_one_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    joined, alone = FakeRay(cluster=True), FakeRay()
    assert ray_engine._join_cluster(joined)
    assert ray_engine._join_cluster(alone)
    assert (joined.calls, alone.calls) == (["auto"], ["auto", None])


def test_a_cluster_that_is_named_is_not_replaced_by_one_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "far:6379")
    fake = FakeRay()
    with pytest.raises(RlprofError, match=r"^Ray cannot be reached or started: no cluster$"):
        ray_engine._join_cluster(fake)
    assert fake.calls == ["far:6379"]


def test_so_many_tasks_are_handed_over_and_what_is_left_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRay(cluster=True)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    paths = [str(path) for path in write_traces(tmp_path, 4)]
    whole = list(ray_engine.in_ray(paths, 2))
    assert [(at, outcome.state) for at, outcome in sorted(whole)] == [
        (at, "cached") for at in range(4)
    ]
    assert (fake.most, fake.calls) == (2, ["auto", "shutdown"])
    engine = ray_engine.in_ray([*paths, str(tmp_path / "no")], 3)
    next(engine)
    engine.close()
    assert fake.cancelled == paths[:2]
    assert next(ray_engine.in_ray([str(tmp_path / "no")]))[1].state == "failed"


def test_a_cluster_without_a_cpu_is_an_error_and_one_without_a_free_one_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(write_trace(tmp_path / "rank0.json"))
    fake = FakeRay(cluster=True, cpus=0)
    monkeypatch.setitem(sys.modules, "ray", fake)
    with pytest.raises(RlprofError, match="the Ray cluster has no CPU for tasks"):
        next(ray_engine.in_ray([path]))
    assert fake.calls[-1] == "shutdown"
    for free, said in ((2.0, 0), (0.5, 1)):
        caplog.clear()
        monkeypatch.setitem(sys.modules, "ray", FakeRay(cluster=True, free=free, slow=2))
        assert next(ray_engine.in_ray([path]))[1].state != "failed"
        assert caplog.messages == ["no CPU of the Ray cluster is free: ingest waits for one"] * said


def test_an_address_that_is_empty_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    fake = FakeRay()
    assert ray_engine._join_cluster(fake)
    assert fake.calls == ["auto", None]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (
            NotImplementedError,
            "its Ray worker cannot run ingest: ModuleNotFoundError: No module named "
            "'lightning_rlprof'; on every node: pip install \"lightning-rlprof[ray]\"",
        ),
        (RuntimeError, "its Ray worker ended: RuntimeError: \x1b[36mray::seen()\x1b[39m"),
    ],
)
def test_a_task_that_failed_says_why_and_a_worker_that_ended_says_how(
    kind: type[Exception], why: str
) -> None:
    told = "\x1b[36mray::seen()\x1b[39m\n  line\n\x1b[31mModuleNotFoundError: No module named "
    told += "'lightning_rlprof'\x1b[0m\n\n"

    def get(task: object) -> object:
        raise kind(told)

    fake = FakeRay()
    fake.get = get
    assert ray_engine._outcome(fake, None, "x").why == why

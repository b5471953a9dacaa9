"""What ``ray.init`` is given by a driver whose cluster runs already; on a double of it."""

import types
from typing import Any

import pytest

from lightning_rlprof.integrations.doors import ray


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    monkeypatch.setenv("RLPROF", "1")
    monkeypatch.setenv("RLPROF_JOB", "7")
    monkeypatch.setenv("PYTHONPATH", "/inject")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return []


def initialized(asked: list[dict[str, Any]], *args: Any, **kwargs: Any) -> Any:
    def init(address: Any = None, **given: Any) -> str:
        asked.append({"address": address, **given})
        return "a context"

    module = types.ModuleType("ray")
    module.init = init  # type: ignore[attr-defined]
    ray.install(module)
    return module.init(*args, **kwargs)


def test_workers_of_a_running_cluster_get_the_drivers_variables(
    asked: list[dict[str, Any]],
) -> None:
    mine = {"env_vars": {"MINE": "1", "RLPROF_JOB": "own"}, "pip": ["x"]}
    assert initialized(asked, "ray://head:10001", runtime_env=mine, namespace="n") == "a context"
    assert asked == [
        {
            "address": "ray://head:10001",
            "namespace": "n",
            "runtime_env": {
                "env_vars": {
                    "RLPROF": "1", "RLPROF_JOB": "own", "PYTHONPATH": "/inject", "MINE": "1",
                },
                "pip": ["x"],
            },
        }
    ]  # fmt: skip
    assert mine["env_vars"] == {"MINE": "1", "RLPROF_JOB": "own"}


@pytest.mark.parametrize("address", [None, "local"])
def test_a_cluster_of_ones_own_inherits_them(
    address: str | None, asked: list[dict[str, Any]]
) -> None:
    initialized(asked, address, num_cpus=2)
    assert asked == [{"address": address, "num_cpus": 2}]


def test_the_address_may_come_from_a_variable_and_a_failure_changes_nothing(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    initialized(asked)
    assert asked[0]["runtime_env"]["env_vars"]["RLPROF_JOB"] == "7"
    initialized(asked, runtime_env=5)
    assert asked[1]["runtime_env"] == 5
    assert "rlprof's door to Ray" in caplog.text

"""What Ray is told about nsys; Ray itself takes no part."""

import logging
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.integrations.ray import ray_runtime_env
from tests.places import ROOT

ON: dict[str, Any] = {"tools": ["nsight"], "steps": [2, 5]}
TRACE = {"trace": "cuda,nvtx,cublas,ucx", "cuda-memory-usage": "true", "cuda-graph-trace": "graph"}


def config(**options: Any) -> ProfilerConfig:
    return ProfilerConfig.build(None, **{**ON, **options})


def options_of(process: Any, **options: Any) -> dict[str, str]:
    return ray_runtime_env(config(**options), process)["nsight"]


def test_the_controller_gets_its_options() -> None:
    assert ray_runtime_env(config(), "controller") == {"nsight": TRACE}


def test_a_worker_gets_a_range_per_capture() -> None:
    assert options_of("worker") == {
        **TRACE,
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "repeat:2",
        "kill": "none",
    }


def test_joined_steps_are_one_range() -> None:
    joined = options_of("worker", steps=[2, 3, 7], profile_continuous_steps=True)
    assert joined["capture-range-end"] == "repeat:2"


def test_where_nobody_knows_how_many_captures_come_ranges_repeat() -> None:
    assert options_of("worker", steps="all")["capture-range-end"] == "repeat"


def test_what_the_user_gives_is_laid_over_and_null_leaves_out() -> None:
    worker = {"capture-range-end": "stop", "gpu-metrics-device": "all", "cuda-graph-trace": None}
    options = options_of("worker", nsight={"worker": worker})
    assert options["capture-range-end"] == "stop"
    assert options["gpu-metrics-device"] == "all"
    assert "cuda-graph-trace" not in options


@pytest.mark.parametrize(
    "off",
    [
        {"tools": ["nvtx"]},
        {"tools": None},
        {"steps": []},
        {"integrated": {"profile": False}},
        {"roles": {"actor": {"enable": False}}},
    ],
)
@pytest.mark.parametrize("process", ["controller", "worker"])
def test_it_is_empty_where_nsight_captures_nothing(off: dict[str, Any], process: Any) -> None:
    assert ray_runtime_env(config(**off), process) == {}


def test_the_role_is_that_of_the_actor() -> None:
    roles = {"actor": {"ranks": [0]}}
    assert ray_runtime_env(config(roles=roles, role="actor"), "worker") != {}
    assert ray_runtime_env(config(roles=roles, role="critic"), "worker") == {}
    assert ray_runtime_env(config(roles=roles), "controller") != {}


@pytest.mark.parametrize("process", ["workr", "", None])
def test_another_process_is_refused_with_what_is_allowed(process: Any) -> None:
    with pytest.raises(ConfigError, match=r"\(allowed: controller, worker\)") as caught:
        ray_runtime_env(config(), process)
    assert str(caught.value).endswith("; did you mean 'worker'?") == (process == "workr")


BAD = ["$(id)", "a;b", "a b", "'a'", '"a"', "a\nb", "a\n", "`id`", "a|b", "a&b", "a>b", "~", ""]


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("process", ["controller", "worker"])
def test_nothing_that_a_shell_reads_gets_to_ray(value: str, process: str) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            rf"nsight\.{process}\.trace=.* may contain only letters, digits and _.,:/@%[+]=-: a "
            rf"shell reads it"
        ),
    ):
        config(nsight={process: {"trace": value}})


@pytest.mark.parametrize("value", [*BAD[:-1], "reports", "/a b", "/$(id)"])
def test_a_folder_for_reports_is_absolute_and_plain(value: str) -> None:
    with pytest.raises(ConfigError, match=r"nsight\.reports=.* must be an absolute path with"):
        options_of("worker", nsight={"reports": value})


@pytest.mark.parametrize("process", ["controller", "worker"])
def test_reports_appear_in_the_folder_that_is_configured(process: Any) -> None:
    options = options_of(process, nsight={"reports": "/data/nsight/"})
    assert options["o"] == "/data/nsight/worker_process_%p"


@pytest.mark.parametrize("key", ["o", "output"])
def test_a_name_of_the_users_own_is_the_one_that_ray_knows(key: str) -> None:
    options = options_of("worker", nsight={"worker": {key: "/data/mine_%p"}, "reports": "/data"})
    assert (options["o"], "output" in options) == ("/data/mine_%p", False)


@pytest.mark.parametrize("options", [{}, {"steps": []}])
def test_the_controllers_host_and_pid_are_always_logged(
    options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ray_runtime_env(config(**options), "worker")
    text = f"the controller is on host {socket.gethostname()}, PID {os.getpid()}"
    assert caplog.messages == [text]


def test_it_needs_no_ray_and_loads_none() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from lightning_rlprof import ProfilerConfig, ray_runtime_env\n"
        "config = ProfilerConfig.build(None, tools=['nsight'], steps=[1])\n"
        "assert ray_runtime_env(config, 'worker')['nsight']\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")

"""Command lines of nsys out of configurations, checked against what the real nsys knows."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError
from lightning_rlprof.recording.nsys import (
    CaptureRange,
    Plan,
    Version,
    installed_version,
    plan,
    report_pattern,
    tools,
    variables,
)
from tests.doubles.nsys.on_path import FakeNsys
from tests.doubles.nsys.options import refusal

STAGES = ["actor_generate", "actor_update"]


def config(**options: Any) -> ProfilerConfig:
    return ProfilerConfig.build(None, **{"tools": ["nsight"], **options})


def planned(opens: CaptureRange = "nvtx", **options: Any) -> dict[str, str]:
    """Return the options of a command by name; a target takes no part in them."""
    argv = plan(config(**options), ["python"], "out", opens=opens).argv
    pairs = [word.removeprefix("--").partition("=") for word in argv[2:-1]]
    assert len({name for name, _, _ in pairs}) == len(pairs)
    return {name: value for name, _, value in pairs}


def remarks(**options: Any) -> list[str]:
    return plan(config(**options), ["python"], "out", opens="nvtx").remarks


# ---- the command line


def test_without_a_gpu_a_range_of_nvtx_opens_captures() -> None:
    one = config(steps=[2, 5])
    argv = plan(one, ["python", "train.py", "--lr=1"], "a/b", opens="nvtx").argv
    assert argv == [
        *("nsys", "profile"),
        *("--trace=cuda,nvtx,cublas,ucx", "--cuda-memory-usage=true", "--cuda-graph-trace=graph"),
        *("--kill=none", "--sample=none", "--cpuctxsw=none"),
        *("--capture-range=nvtx", "--nvtx-capture=rlprof.capture@rlprof"),
        *("--capture-range-end=repeat:2", "--output=a/b", "python", "train.py", "--lr=1"),
    ]


def test_with_a_gpu_the_profiler_api_opens_captures() -> None:
    options = planned("cudaProfilerApi", steps=[2])
    assert (options["capture-range"], options["capture-range-end"]) == ("cudaProfilerApi", "stop")
    assert "nvtx-capture" not in options


@pytest.mark.parametrize(
    ("off", "said"),
    [
        ({"profile": False}, "captures are off (integrated.profile is false"),
        ({"steps": []}, "captures are off (no steps are chosen), so nsys records the whole run"),
    ],
)
def test_without_captures_the_whole_run_is_recorded_and_it_is_said(
    off: dict[str, Any], said: str
) -> None:
    assert not {"capture-range", "capture-range-end", "nvtx-capture"} & planned(**off).keys()
    (remark,) = remarks(**off)
    assert remark.startswith(said)


def test_without_a_capture_range_the_whole_run_is_recorded() -> None:
    assert not {"capture-range", "capture-range-end", "nvtx-capture"} & planned("none").keys()
    done = plan(config(), ["python"], "out", opens="none")
    assert done.remarks == ["no capture range is set, so nsys records the whole run"]


def test_options_of_the_worker_win_and_null_leaves_out() -> None:
    worker = {"trace": "nvtx", "kill": None, "cuda-graph-trace": None, "stats": "true"}
    options = planned(nsight={"worker": worker})
    assert (options["trace"], options["stats"]) == ("nvtx", "true")
    assert not {"kill", "cuda-graph-trace"} & options.keys()


@pytest.mark.parametrize(
    ("worker", "sample", "cpuctxsw"),
    [
        ({}, "none", "none"),
        ({"sample": "process-tree"}, "process-tree", None),
        ({"sample": None}, None, None),
        ({"cpuctxsw": "process-tree"}, "none", "process-tree"),
        ({"cpuctxsw": None}, "none", None),
    ],
)
def test_sampling_is_off_unless_asked_for(
    worker: dict[str, str | None], sample: str | None, cpuctxsw: str | None
) -> None:
    options = planned(nsight={"worker": worker})
    assert (options.get("sample"), options.get("cpuctxsw")) == (sample, cpuctxsw)


def test_what_rlprof_settles_itself_is_not_given_twice() -> None:
    worker = {"output": "x", "force-overwrite": "false", "nvtx-capture": "a@b"}
    options = planned(nsight={"worker": worker})
    assert (options["output"], options["nvtx-capture"]) == ("out", "rlprof.capture@rlprof")
    assert "force-overwrite" not in options


def test_existing_reports_are_replaced_only_by_force() -> None:
    argv = plan(config(), ["x"], "out", opens="none", force=True).argv
    assert argv[-3:] == ["--force-overwrite=true", "--output=out", "x"]


def test_a_short_option_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"nsight\.worker\.t is a short option: use the long name"
    ):
        planned(nsight={"worker": {"t": "nvtx"}})


def test_following_forks_is_said_to_cost() -> None:
    worker = {"trace-fork-before-exec": "true"}
    assert planned(nsight={"worker": worker})["trace-fork-before-exec"] == "true"
    assert remarks(nsight={"worker": worker})[0].startswith(
        "trace-fork-before-exec needs about 20 s at the end and loses the last"
    )
    assert remarks() == []


def test_a_limit_on_captures_of_stages_is_said() -> None:
    (said,) = remarks(stage=STAGES, steps=[1, 2])
    assert said.startswith("at most 4 captures, one per stage and step; if a stage runs more often")
    assert remarks(discrete=True) == []
    assert remarks(steps=[1, 2]) == []


def test_a_new_nsys_takes_every_option_that_is_planned() -> None:
    worker = {"python-sampling": "true", "pytorch": "autograd-nvtx", "trace": "nvtx,nccl,osrt"}
    ranges: list[CaptureRange] = ["nvtx", "cudaProfilerApi", "none"]
    steps: list[Any] = [[1], [1, 5], "all", []]
    for opens, wanted, given in itertools.product(ranges, steps, ({}, worker)):
        options = planned(opens, steps=wanted, nsight={"worker": given})
        refused = [refusal(name, value, (2025, 3)) for name, value in options.items()]
        assert refused == [""] * len(options)


# ---- the installed one


@pytest.mark.parametrize(
    ("printed", "version"),
    [("2022.4.2.1-df9881f", (2022, 4)), ("2025.10.1", (2025, 10)), ("of tomorrow", None)],
)
def test_the_installed_version_is_asked_for(
    printed: str, version: Version | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeNsys(tmp_path, monkeypatch, version=printed)
    assert installed_version(str(fake.bin / "nsys")) == version
    assert [call["argv"] for call in fake.calls] == [["--version"]]


def test_a_program_that_prints_another_encoding_is_understood(tmp_path: Path) -> None:
    program = tmp_path / "nsys"
    program.write_bytes(b"#!/bin/sh\nprintf '\\377 version 2023.4'\n")
    program.chmod(0o755)
    assert installed_version(str(program)) == (2023, 4)


def test_a_program_that_cannot_run_has_no_version(tmp_path: Path) -> None:
    assert installed_version(str(tmp_path / "nsys")) is None


# ---- what the training is told


@pytest.mark.parametrize(
    ("given", "under"),
    [
        (None, ["nsight"]),
        (["memory"], ["nsight", "memory"]),
        (["torch_profiler", "nvtx"], ["nsight", "nvtx"]),
        (["nvtx", "nsight"], ["nvtx", "nsight"]),
        ([], ["nsight"]),
    ],
)
def test_the_training_gets_nsight_among_its_tools(
    given: list[str] | None, under: list[str]
) -> None:
    assert tools(config(tools=given)) == under


def test_memory_that_the_configuration_asks_for_stays_on() -> None:
    one = config(tools=None, memory={"level": "counters"})
    assert tools(one) == ["nsight", "memory"]
    assert ProfilerConfig.build(one, tools=tools(one)).captures


def test_variables_make_the_training_ask_for_nsight(monkeypatch: pytest.MonkeyPatch) -> None:
    added = variables(config(tools=None, steps=[3]), None)
    assert added == {"RLPROF__TOOLS": '["nsight"]'}
    assert variables(config(), None) == {}
    monkeypatch.setenv("RLPROF__TOOLS", added["RLPROF__TOOLS"])
    assert ProfilerConfig.build({"steps": [3]}).tools == ["nsight"]


def test_a_file_opens_the_door_for_every_lightning_training() -> None:
    assert variables(config(), "a.yaml") == {"RLPROF": "1", "RLPROF_CONFIG": "a.yaml"}


# ---- names of reports


@pytest.mark.parametrize(
    ("output", "folder", "matching", "others"),
    [
        ("a/x", "a", ["x.nsys-rep", "x.1.nsys-rep", "x.12.nsys-rep", "x.qdstrm"], ["x.sqlite"]),
        ("x", ".", ["x.nsys-rep"], ["y.nsys-rep", "xx.nsys-rep", "x.a.nsys-rep", "x-nsys-rep"]),
        ("x-%p.v%%", ".", ["x-12.v%.1.nsys-rep"], ["x-.v%.nsys-rep", "x-12.v%%.nsys-rep"]),
        (
            "%q{DIR}/r%q{RANK}-%h%n",
            "runs",
            ["r3-box7.nsys-rep", "r3-box%n.nsys-rep"],
            ["r-box7.nsys-rep"],
        ),
        ("x+(1)", ".", ["x+(1).nsys-rep"], ["xx1.nsys-rep"]),
    ],
)
def test_reports_are_known_by_their_names(
    output: str, folder: str, matching: list[str], others: list[str]
) -> None:
    found, pattern = report_pattern(output, {"RANK": "3", "DIR": "runs"}, "box")
    assert found == Path(folder)
    assert all(map(pattern.fullmatch, matching))
    assert not any(map(pattern.fullmatch, others))


def test_the_fake_names_reports_as_the_pattern_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket
    import subprocess

    FakeNsys(tmp_path, monkeypatch, ranges=2)
    monkeypatch.setenv("RANK", "3")
    output = f"{tmp_path}/r%q{{RANK}}-%p-%h"
    done: Plan = plan(config(steps=[1, 2]), ["true"], output, opens="nvtx")
    assert subprocess.run(done.argv, check=False).returncode == 0
    folder, pattern = report_pattern(output, os.environ, socket.gethostname())
    made = [path.name for path in folder.iterdir() if path.suffix == ".nsys-rep"]
    assert len(made) == 2
    assert all(map(pattern.fullmatch, made))

"""`rlprof nsys`: its options, what follows from the machine, and what is refused."""

import shlex
from pathlib import Path

import pytest

from lightning_rlprof.cli import record as nsys
from tests.builders.nsys_machine import TRAIN, Run, file, machine_without_gpu, options
from tests.doubles.nsys.on_path import FakeNsys


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNsys:
    return machine_without_gpu(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("device", "variable", "opens"),
    [
        (None, None, "nvtx"),
        ("nvidia0", None, "cudaProfilerApi"),
        ("nvidia3", "3", "cudaProfilerApi"),
        ("nvidiactl", None, "nvtx"),
        ("nvidia0", "", "nvtx"),
        ("nvidia0", "-1", "nvtx"),
    ],
)
def test_what_opens_captures_follows_from_whether_there_is_a_gpu(
    rlprof: Run,
    fake: FakeNsys,
    monkeypatch: pytest.MonkeyPatch,
    device: str | None,
    variable: str | None,
    opens: str,
) -> None:
    if device:
        (nsys._DEVICES / device).touch()
    if variable is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert f"--capture-range={opens} " in rlprof("nsys", "run", "--dry-run", *TRAIN)[1]
    other = "nvtx" if opens == "cudaProfilerApi" else "cudaProfilerApi"
    out = rlprof("nsys", "run", "--dry-run", "--capture-range", other, *TRAIN)[1]
    assert f"--capture-range={other} " in out


def test_without_a_file_only_the_code_may_know_how_many_captures_there_are(
    rlprof: Run, fake: FakeNsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("nsys", "run", "--dry-run")
    assert "--capture-range-end=repeat " in rlprof(*words, *TRAIN)[1]
    given = ("--option", "capture-range-end=stop")
    assert "--capture-range-end=stop " in rlprof(*words, *given, *TRAIN)[1]
    config = file("steps: [3]")
    assert "--capture-range-end=stop " in rlprof(*words, "--config", config, *TRAIN)[1]
    monkeypatch.setenv("RLPROF__STEPS", "[3, 5]")
    assert "--capture-range-end=repeat:2 " in rlprof(*words, *TRAIN)[1]


def test_options_of_nsys_are_laid_over_the_configurations(rlprof: Run, fake: FakeNsys) -> None:
    config = file("nsight: {worker: {trace: 'nvtx,osrt', stats: 'false'}}")
    words = ("--option", "trace=nvtx", "--option", "sample=process-tree")
    assert rlprof("nsys", "run", "-o", "x", "--config", config, *words, *TRAIN)[0] == 0
    given = options(fake)
    assert (given["trace"], given["stats"], given["sample"]) == ("nvtx", "false", "process-tree")
    assert "cpuctxsw" not in given


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("sample", "--option sample is not key=value; for example sample=process-tree"),
        ("=x", "--option =x is not key=value; for example sample=process-tree"),
        ("output=x", "--option output=x: use -o instead"),
        ("capture-range=nvtx", "--option capture-range=nvtx: use --capture-range instead"),
        (
            "trace=nvtx;reboot",
            "nsight.worker.trace='nvtx;reboot' may contain only letters, digits and "
            "_.,:/@%+=-: a shell reads it",
        ),
        ("t=nvtx", "nsight.worker.t is a short option: use the long name"),
    ],
)
def test_a_wrong_option_is_one_line_and_nothing_runs(
    rlprof: Run, fake: FakeNsys, option: str, said: str
) -> None:
    assert rlprof("nsys", "run", "--option", option, *TRAIN) == (2, "", f"rlprof: error: {said}\n")
    assert [call for call in fake.calls if call["argv"][0] == "profile"] == []


def test_a_dry_run_only_prints_and_needs_no_nsys(
    rlprof: Run, fake: FakeNsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (fake.bin / "nsys").unlink()
    monkeypatch.setenv("PATH", str(fake.bin))
    status, out, _ = rlprof("nsys", "run", "--dry-run", "--", "python", "train.py")
    assert status == 0
    assert shlex.split(out.splitlines()[0])[-2:] == ["python", "train.py"]
    assert list(Path().iterdir()) == []

    status, out, err = rlprof("nsys", "run", "--", "python", "train.py")
    assert (status, out, err.count("\n")) == (2, "", 2)
    assert err.startswith(
        "rlprof: error: nsys is not on PATH\n  hint: Install Nsight Systems (https://developer."
    )


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("force_overwrite=true", "--force"),
        ("--capture_range=none", "--capture-range"),
        ("nvtx-capture=a@b", "--capture-range nvtx"),
    ],
)
def test_what_is_set_here_is_refused_however_it_is_spelt(
    rlprof: Run, fake: FakeNsys, word: str, instead: str
) -> None:
    code, _, err = rlprof("nsys", "run", "--dry-run", "--option", word, *TRAIN)
    assert (code, f"use {instead} instead" in " ".join(err.split())) == (2, True)


def test_a_command_that_begins_with_a_dash_is_refused(rlprof: Run, fake: FakeNsys) -> None:
    code, _, err = rlprof("nsys", "run", "--dry-run", "--", "--trace=cuda", "python")
    assert (code, "'--trace=cuda' is an option, not a program\n" in err, fake.calls) == (
        2,
        True,
        [],
    )


def test_programs_may_print_what_is_no_text(rlprof: Run, fake: FakeNsys) -> None:
    (fake.bin / "nsys").write_bytes(b"#!/bin/sh\nprintf '\\377 version 2024.5'\n")
    (fake.bin / "nsys").chmod(0o755)
    assert rlprof("nsys", "run", "--dry-run", *TRAIN)[0] == 0


def test_a_name_that_is_too_long_is_refused(rlprof: Run, fake: FakeNsys) -> None:
    code, _, err = rlprof("nsys", "run", "-o", "a" * 300, *TRAIN)
    assert (code, err) == (2, f"rlprof: error: {'a' * 300}: File name too long\n")

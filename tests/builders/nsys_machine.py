"""A machine without a GPU that has a fake nsys on PATH, and an empty directory to be in."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.cli import record as nsys
from tests.doubles.nsys.on_path import FakeNsys

Run = Callable[..., tuple[int, str, str]]

TRAIN = ("--", sys.executable, "-c", "raise SystemExit(0)")


def machine_without_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNsys:
    """Put a fake nsys and nvidia-smi on PATH, and go to a directory of its own."""
    fake = FakeNsys(tmp_path / "fake", monkeypatch)
    (fake.bin / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (fake.bin / "nvidia-smi").chmod(0o755)
    (tmp_path / "dev").mkdir()
    monkeypatch.setattr(nsys, "_DEVICES", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return fake


def file(text: str) -> str:
    """Write a configuration and return its name."""
    Path("rl.yaml").write_text(text)
    return "rl.yaml"


def options(fake: FakeNsys) -> dict[str, str]:
    """Return the options that nsys was given, by name."""
    words = [word for word in fake.call()["argv"] if word.startswith("--")]
    return {name[2:]: value for name, _, value in (word.partition("=") for word in words)}

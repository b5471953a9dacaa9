"""Answers that an agent reads are short: of the runs in examples/, by bytes and tokens."""

import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.cli.mcp import tokens_of

Run = Callable[..., tuple[int, str, str]]
ARCHIVE = Path(__file__).parents[2] / "examples" / "runs.tar.gz"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("name", ["demo", "slow"])
def test_answers_about_the_example_runs_are_short(
    rlprof: Run, examples: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(examples)
    data = rlprof("summary", name, "--json")[1]
    assert len(data) < 8_000
    assert len(json.loads(data)["tables"]) == 1
    findings = rlprof("findings", name, "--format", "markdown")[1]
    assert 500 < len(findings) < 1_500
    summary = rlprof("summary", name, "--format", "markdown")[1]
    assert max(map(tokens_of, (findings, summary))) < 2_000

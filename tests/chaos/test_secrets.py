"""What is secret in the environment, on a command line or in a configuration is in no file."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rlprof.integrations.lightning.profiler_callback import ProfilerCallback
from tests.builders.models import Tiny, loader, make_trainer

Run = Callable[..., tuple[int, str, str]]
SECRET = "hunter2secret"
READS = [
    ["summary", "RUN", "--json"],
    ["findings", "RUN", "--json"],
    ["sql", "RUN", "select * from headers", "--json"],
    ["report", "RUN", "-o", "OUT/report.html"],
    ["export", "RUN", "-o", "OUT/trace.json"],
]


pytestmark = pytest.mark.deep


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Record a training that captures with torch.profiler, and has secrets everywhere."""
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("RLPROF__NSIGHT__WORKER__ENV_VAR", f"WANDB_API_KEY={SECRET}")
    monkeypatch.setattr(sys, "argv", ["train.py", "--token", SECRET, f"--key={SECRET}"])
    callback = ProfilerCallback(
        profile_save_path=str(tmp_path / "runs"),
        steps=[2],
        profile=True,
        summary=False,
    )
    make_trainer(callback).fit(Tiny(), loader())
    assert callback.run is not None
    return callback.run


def test_no_file_and_no_command_of_a_run_shows_a_secret(
    run: Path, rlprof: Run, tmp_path: Path
) -> None:
    assert list(run.glob("rank-00000/step-*/*"))  # of torch.profiler
    out = tmp_path / "out"
    out.mkdir()
    for words in READS:
        places = [word.replace("RUN", str(run)).replace("OUT", str(out)) for word in words]
        status, told, error = rlprof(*places)
        assert status == 0, (words, error)
        assert SECRET not in told + error
    files = [path for folder in (run, out) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []

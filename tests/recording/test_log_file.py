"""docs/troubleshooting.md: the log of a rank in a file, where rank 0 speaks."""

import re
from pathlib import Path

import pytest

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.recording.start import start_session
from tests.places import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")


def record(rank: int, folder: Path) -> list[str]:
    """Run the snippet of the page on a rank, record a session, and return the lines of its file."""
    snippet = re.search(r"## Log to a file\n.*?```python\n(.*?)```", PAGE, re.DOTALL)
    assert snippet
    exec(snippet[1], {})
    config = ProfilerConfig(integrated={"profile_save_path": str(folder)})  # type: ignore[arg-type]
    session = start_session(config, name="run", rank=rank, world_size=2)
    session.note("info", "a remark")
    session.note("warning", "a warning")
    session.close()
    return (folder / f"rlprof-rank{rank}.log").read_text().splitlines()


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_speaks_and_others_warn(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", str(rank))
    first, *lines = record(rank, tmp_path)
    assert re.fullmatch(
        rf"[-\d]+ [:,\d]+ INFO recording {tmp_path}/run on host \S+, PID \d+", first
    )
    said = [line.split(" ", 2)[2] for line in lines]
    assert ("INFO a remark" in said) == (rank == 0)
    assert "WARNING a warning" in said
    levels = {line.split()[0] for line in said}
    assert levels == ({"INFO", "WARNING"} if rank == 0 else {"WARNING"})

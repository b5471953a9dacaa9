"""The command about memory: its peaks per stage, and the files that say more."""

import re
from typing import TYPE_CHECKING, Any

from lightning_rlprof.cli.opened import Json, Run, count_doubts, opened
from lightning_rlprof.cli.output import next_command, put_json, say, show

if TYPE_CHECKING:
    from lightning_rlprof.spans import Spans

__all__ = ["memory"]

_VIEWER = "https://docs.pytorch.org/memory_viz"
# What the recorders of the recording half write; importing them would load torch.
_FILES = {
    "snapshot": re.compile(r"memory-snapshot_rank\d+_pid\d+\.pickle"),
    "timeline": re.compile(r"memory-timeline\.jsonl"),
}
_HOW = {
    "snapshot": f"Drop a snapshot on {_VIEWER} (it stays in your browser)",
    "timeline": "A timeline is one JSON array per sample; its first line names the columns",
}


def memory(run: Run, as_json: Json = False) -> None:
    """Show how much memory each stage took on each rank, and the files that say more."""
    from lightning_rlprof import analysis
    from lightning_rlprof.report.text import render

    spans = opened(run)
    table, files = analysis.memory(spans), _files(spans)
    if as_json:
        problems = [problem._asdict() for problem in spans.problems]
        tables = [table.to_dict()]
        put_json({"run": str(spans.path), "problems": problems, "tables": tables, "files": files})
        return
    say(f"{spans.path}: memory by stage and rank", "bold")
    show("", render(table), "")
    count_doubts(spans)
    for name in _FILES:
        found = [file for file in files if file["what"] == name]
        for file in found:
            say(f"{name}, rank {file['rank']}, {file['window']}: {file['path']}")
        if found:
            say(_HOW[name], "dim")
    next_command("rlprof", "report", run)


def _files(spans: "Spans") -> list[dict[str, Any]]:
    """Return the files about memory by rank and window, as the recorders name them."""
    from lightning_rlprof.tracefile import rank_directory

    run = spans.path if spans.path.is_dir() else spans.path.parent
    found = []
    for rank in spans.ranks:
        for path in sorted(rank_directory(run, rank).glob("*/memory-*")):
            for name, pattern in _FILES.items():
                if pattern.fullmatch(path.name):
                    at = {"what": name, "rank": rank, "window": path.parent.name}
                    found.append({**at, "path": str(path)})
    return found

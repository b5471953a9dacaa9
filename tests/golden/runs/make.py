"""Record the stored runs again: ``python -m tests.golden.runs.make``, a minute on two cores.

The contract is that runs of format 1 stay readable. So this is how they were made, and not a step
of any change: a reader that needs new files breaks the contract. The archive has

- ``demo``: ``rlprof demo --ranks 2 --steps 24``, on a busy machine;
- ``slow``: four scripted ranks, of which rank 2 takes 30% longer in every stage;
- ``async``: ``rlprof demo --async --steps 12``, one trainer and two rollout ranks on Ray.
"""

import runpy
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_rlprof.tables.spans import Spans
from tests.builders.runs import Row, write_rank
from tests.builders.scripted import Script, play
from tests.places import ROOT

ARCHIVE = Path(__file__).with_name("runs.tar.gz")
_DEMOS = {"demo": ("--ranks", "2", "--steps", "24"), "async": ("--async", "--steps", "12")}


def unpack(folder: Path) -> None:
    """Write the stored runs into a folder, one directory each."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")


def _demo(folder: Path, *options: str) -> Path:
    folder.mkdir()
    subprocess.run(["rlprof", "demo", "--quiet", *options], cwd=folder, check=True)
    (first,) = folder.glob("profiler_data/*/rank-00000.jsonl")
    return first.parent


def _write(run: Path, spans: Spans) -> Path:
    for rank in spans.ranks:
        own = [each for each in spans if each.rank == rank]
        rows = [
            Row(s.name, s.kind, s.step, s.start_ns, s.end_ns, s.thread, s.parent, s.counters, s.id)
            for s in own
        ]
        write_rank(run, spans.headers[rank], rows, threads={1: "Main"})
    return run


def main() -> None:
    """Record the runs and pack them, without the name of the machine."""
    pack = runpy.run_path(str(ROOT / "docs" / "generate_examples.py"))["pack"]
    with TemporaryDirectory() as folder:
        runs = {name: _demo(Path(folder, name), *options) for name, options in _DEMOS.items()}
        slow = play(Script(ranks=4, steps=30, slow={2: 0.3}, uneven=0.1), seed=1).spans
        pack(runs | {"slow": _write(Path(folder, "slow"), slow)}, ARCHIVE)


if __name__ == "__main__":
    main()

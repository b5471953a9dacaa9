"""What reading costs, beside HTA and gzip + orjson: ``python benchmarks/read.py --peers FOLDER``.

Five parts, each with its bounds and its A/A control:

- ``parse``: a Kineto trace into Parquet with all its tables. Each way of reading has a process of
  its own, the file is in the page cache, and the ways take turns; ratios are those of one round.
  The traces are generated; with real ones in a folder (``--real``) those are read, too.
- ``warm``: each analysis of the largest trace out of its cache, in a process of its own.
- ``tables``: the tables of stages of 64 ranks x 1,000 steps x 20 stages in memory.
- ``ranks``: what commands take of runs of our own of up to 64 ranks x 10,000 steps.
- ``columns``: ten million spans on disk: percentiles per name and rank, the busy time of each rank.

The peers come from PyPI into an environment in FOLDER, which is made at the first time; without
``--peers`` they are left out. Peaks of memory need Linux.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import _read_asked
import _read_parse
import _read_ranks
import _read_tables
from _measure import Report, quiet_enough, verdict
from _peers import environment, versions

__all__ = ["PARTS", "main", "parsed"]

_REAL = Path(__file__).parents[2] / "shared" / "data" / "kineto"
_TRIES = 3


def parsed(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="see that it runs, judge nothing")
    add("--markdown", action="store_true", help="print the tables of docs/internals/performance.md")
    add("--json", type=Path, metavar="FILE", help="also write each part as JSON, its name added")
    add("--peers", type=Path, metavar="FOLDER", help="environment of the peers, made if absent")
    add("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="unset, all")
    add("--megabytes", nargs="+", type=float, default=[100.0, 1000.0], help="of generated traces")
    add("--rounds", type=int, default=5)
    add("--folder", type=Path, help="keep what is generated here; unset, a temporary one")
    add("--real", type=Path, default=_REAL, metavar="FOLDER", help="with real traces (.json.gz)")
    chosen = parser.parse_args(words)
    if chosen.quick:
        chosen.megabytes, chosen.rounds = [1.0], 1
    return chosen


def _parse(chosen: argparse.Namespace, folder: Path) -> Report:
    python = environment(chosen.peers) if chosen.peers else None
    peers = versions(python) if python else {}
    found = _read_parse.traces(folder, chosen.megabytes)
    real = _read_parse.real(chosen.real, folder)
    facts = [f"{way}: {version}." for way, version in peers.items()]
    facts += [] if peers else ["The peers are left out: --peers FOLDER installs them there."]
    if real is None:
        facts.append(f"No real traces: {chosen.real} has no .json.gz.")
    found += [real] if real else []
    _read_parse.measure(found, peers, python, chosen.rounds)
    return _read_parse.report(found, facts)


def _warm(chosen: argparse.Namespace, folder: Path) -> Report:
    trace = _read_parse.traces(folder, [max(chosen.megabytes)])[0]
    return _read_asked.report(_read_asked.ask_trace(trace.paths[0], min(chosen.rounds, 3)))


def _tables(chosen: argparse.Namespace, folder: Path) -> Report:
    size = (4, 20, 20) if chosen.quick else (64, 1_000, 20)
    tries = 1 if chosen.quick else _TRIES
    costs = quiet_enough(
        lambda: _read_tables.measure(size, chosen.rounds), lambda costs: costs.quiet, tries
    )
    return _read_tables.report(costs)


def _ranks(chosen: argparse.Namespace, folder: Path) -> Report:
    sizes = [(2, 20)] if chosen.quick else [(8, 1_000), (64, 1_000), (8, 10_000), (64, 10_000)]
    return _read_ranks.report(_read_ranks.measure(folder, sizes))


def _columns(chosen: argparse.Namespace, folder: Path) -> Report:
    spans = 100_000 if chosen.quick else 10_000_000
    return _read_asked.report(_read_asked.ask_columns(folder, spans, chosen.rounds))


PARTS: dict[str, Callable[[argparse.Namespace, Path], Report]] = {
    "parse": _parse,
    "warm": _warm,
    "tables": _tables,
    "ranks": _ranks,
    "columns": _columns,
}
"""Each measures and lays out what it found."""


@contextlib.contextmanager
def _folder(chosen: argparse.Namespace) -> Iterator[Path]:
    if chosen.folder is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        own = chosen.folder / "rlprof-benchmark"  # whose caches may be thrown away
        own.mkdir(parents=True, exist_ok=True)
        yield own


def main(chosen: argparse.Namespace) -> int:
    """Measure part by part, print each, and return the worst exit status."""
    worst, file = 0, chosen.json
    with _folder(chosen) as folder:
        for part in chosen.parts:
            if file is not None:
                chosen.json = file.with_name(f"{file.stem}-{part}{file.suffix}")
            worst = max(worst, verdict(PARTS[part](chosen, folder), chosen))
            print(flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main(parsed()))

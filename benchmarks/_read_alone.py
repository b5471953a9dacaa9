"""One way of reading, in a process of its own: ``python _read_alone.py WAY PATH...`` prints JSON.

It also runs in the peers' environment, so nothing but the standard library is imported before a way
is chosen. Imports are outside of the time; the peak is told above the bare interpreter and above
what was there after the imports.
"""

import gzip
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["WAYS", "main"]

_Read = Callable[[Path], int]


def main(way: str, paths: list[Path]) -> None:
    """Read the files one after the other and print what it took."""
    bare = _memory("VmHWM")
    name, _, what = way.partition(":")
    read = WAYS[name](what)
    loaded = _memory("VmRSS")
    for path in paths:
        with path.open("rb") as file:  # into the page cache
            while file.read(1 << 22):
                pass
    start, cpu = time.perf_counter(), time.process_time()
    rows = sum(map(read, paths))
    took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    peak = _memory("VmHWM")
    print(json.dumps({**took, "rows": rows, "above": peak - bare, "grown": peak - loaded}))


def _memory(key: str) -> float:
    """Return megabytes of this process; its peak starts again with the program, unlike rusage's."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


def _ingested(_: str) -> _Read:
    """Make the cache with every table as Parquet."""
    import duckdb  # noqa: F401

    from lightning_rlprof.records.run_directory import CACHE_FOLDER
    from lightning_rlprof.store.ingest import ingest_one

    def read(path: Path) -> int:
        outcome = ingest_one(str(path))
        if outcome.state != "cached":
            raise SystemExit(f"{path}: {outcome.state}, {outcome.why}")
        return outcome.rows or 0

    for path in map(Path, sys.argv[2:]):
        shutil.rmtree(path.parent / CACHE_FOLDER, ignore_errors=True)
    return read


def _analysed(name: str) -> _Read:
    """Answer one analysis out of the cache, as the command does."""
    import duckdb  # noqa: F401

    from lightning_rlprof.analysis.catalog import ANALYSES
    from lightning_rlprof.store.open_run import open_run
    from lightning_rlprof.system.process import keep_freed

    keep_freed()
    analysis = ANALYSES[name].run
    return lambda path: len(analysis(open_run(path)).rows)


def _columns(what: str) -> _Read:
    from _read_columns import QUESTIONS

    return QUESTIONS[what]


def _orjson(_: str) -> _Read:
    import orjson  # type: ignore[import-not-found]

    return lambda path: len(orjson.loads(_whole(path))["traceEvents"])


def _json(_: str) -> _Read:
    return lambda path: len(json.loads(_whole(path))["traceEvents"])


def _whole(path: Path) -> bytes:
    data = path.read_bytes()
    return gzip.decompress(data) if path.suffix == ".gz" else data


def _hta(backend: str) -> _Read:
    """Read one trace into HTA's frame; it is parsed into columns, not yet aligned."""
    from hta.common.trace_parser import parse_trace_dataframe  # type: ignore[import-not-found]
    from hta.configs.parser_config import (  # type: ignore[import-not-found]
        ParserBackend,
        ParserConfig,
    )

    config = ParserConfig.get_default_cfg()
    config.set_parser_backend(ParserBackend(backend))

    def read(path: Path) -> int:
        frame: Any = parse_trace_dataframe(str(path), config)[1]
        return len(frame)

    return read


def _tracelens(_: str) -> _Read:
    from TraceLens.util import DataLoader  # type: ignore[import-not-found]

    return lambda path: len(DataLoader.load_data(str(path))["traceEvents"])


WAYS: dict[str, Callable[[str], _Read]] = {
    "analysis": _analysed,
    "columns": _columns,
    "gzip + json": _json,
    "gzip + orjson": _orjson,
    "HTA": _hta,
    "rlprof": _ingested,
    "TraceLens": _tracelens,
}
"""Ways by name; what stands behind a colon is told to them."""

if __name__ == "__main__":
    main(sys.argv[1], [Path(path) for path in sys.argv[2:]])

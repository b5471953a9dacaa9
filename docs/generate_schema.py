"""Write docs/reference/tables.md from the tables themselves; ``--check`` fails if it is stale."""

import json
import sys
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.store.duckdb_tables import sql_name
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table
from lightning_rlprof.testing import make_header

__all__ = ["main", "page"]

PAGE = Path(__file__).with_name("reference") / "tables.md"

_HEAD = """# Tables and columns

Generated from the code. Names of columns are the keys of `--format json` and of `table.column(name)` in Python.

| kind | a cell is |
|---|---|
| text | text |
| count | an integer |
| duration | integer nanoseconds; the terminal shows ms, µs or s |
| share | 0 to 1; the terminal shows percent |
| ratio | a factor; the terminal shows `1.25x` |
| number | a decimal number |

A cell without a value means "unknown". It is never zero.

## Analyses
"""
_SQL = """## SQL tables

`rlprof sql RUN QUERY` and `load(RUN).sql(query)` read these; [Tables and SQL](../sql.md) has examples. Times count from
the first event of the run. `headers.zero_unix_ns` is that moment on the wall clock. A column that ends in `_ns` holds
nanoseconds, one in `_bytes` bytes. Each counter of a span is one more column of `spans`.

### Every run
"""
_DEVICE = """### Captures and profiler traces

A table exists if the profiler recorded something for it. These are the columns of torch.profiler traces. Nsight
Systems adds `sync` (calls that wait for the device) and `gpu_metrics`. torch_npu adds `sync`, `communication`,
`step_trace` and sums of operators. Runs of several hosts have `clocks`. For their columns use
`rlprof sql RUN "describe sync"`.
"""

# One event of each category that has a table: a stage, an operator and its kernel, a copy, ...
_EVENTS = [
    ("user_annotation", "actor_update", 0, 90, {}),
    ("cpu_op", "aten::mm", 10, 20, {"Input Dims": [[2, 2], [2, 2]], "Input type": ["float"] * 2}),
    ("cuda_runtime", "cudaLaunchKernel", 15, 3, {"correlation": 7}),
    ("kernel", "gemm", 40, 12, {"device": 0, "stream": 7, "correlation": 7}),
    ("kernel", "ncclDevKernel_AllReduce", 60, 9, {"device": 0, "stream": 8, "correlation": 8}),
    ("gpu_memcpy", "Memcpy HtoD", 80, 5, {"device": 0, "stream": 7, "bytes": 64}),
]


def page() -> str:
    """Return the whole page."""
    with TemporaryDirectory() as folder:
        run, trace = load(_run(Path(folder, "run"))), load(_trace(Path(folder, "trace.json")))
        parts = [_HEAD]
        by_group = sorted(CATALOG, key=lambda each: each.group)
        for group, analyses in groupby(by_group, key=lambda each: each.group):
            parts.append(f"### {group}\n")
            for each in analyses:
                parts.append(f"#### `{each.name}`\n\n{each.answers}.\n")
                parts.append(_columns(each.run(run).columns))
        parts += [_SQL, *_tables(run, sorted(run.tables))]
        parts += [_DEVICE, *_tables(trace, sorted(set(trace.tables) - set(run.tables)))]
        return "\n".join(parts)


def _tables(spans: Spans, names: Iterable[str]) -> Iterable[str]:
    for name in names:
        table: Table = spans.table(name)
        yield f"#### `{name}`\n"
        yield _columns([Column(sql_name(each), each.kind, each.unit) for each in table.columns])


def _columns(columns: Iterable[Column]) -> str:
    rows = [f"| `{each.name}` | {each.kind} | {each.unit} |" for each in columns]
    return "\n".join(["| column | kind | unit |", "|---|---|---|", *rows]) + "\n"


def _run(path: Path) -> Path:
    """Write a run of one step in one stage, which no analysis has enough data of."""
    writer = TraceWriter(path, make_header(0))
    stage = ("span", "actor_update", "stage", 1, 0, 4_000, 1, 2, 1, None)
    step = ("span", "step", "step", 1, 0, 5_000, 1, 1, None, None)
    writer.write([stage, step, ("end", 5_000, "finished")])
    writer.close()
    return path


def _trace(path: Path) -> Path:
    """Write a Chrome trace with an event of each category, and samples of memory and a counter."""
    events: list[dict[str, object]] = [
        {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "args": arguments}
        | {"pid": 1, "tid": 7 if cat in ("kernel", "gpu_memcpy") else 1}
        for cat, name, start, length, arguments in _EVENTS
    ]
    memory = {"Device Type": 1, "Device Id": 0, "Total Allocated": 64, "Total Reserved": 128}
    events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": 20})
    events[-1] |= {"pid": 1, "tid": 1, "s": "t", "args": memory}
    events.append({"ph": "C", "name": "SM clock", "pid": 0, "ts": 30, "args": {"MHz": 1980}})
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def main(arguments: list[str]) -> int:
    """Write the page, or with ``--check`` compare it; returns the exit status."""
    new = page()
    if "--check" not in arguments:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(new, encoding="utf-8")
        print(f"Wrote {PAGE.name}")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == new:
        return 0
    print(f"{PAGE.name} is stale: python docs/generate_schema.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

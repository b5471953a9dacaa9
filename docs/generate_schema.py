"""Write docs/reference/tables.md and stage-names.md from the code.

``--check`` fails if one of them is stale.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.steps.time_categories import NAMES, Category
from lightning_rlprof.loaders.load import load
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.run_directory import TraceWriter
from lightning_rlprof.store.column_meanings import meaning
from lightning_rlprof.store.duckdb_tables import sql_columns
from lightning_rlprof.tables.spans import CORE, Spans
from lightning_rlprof.tables.table import Column, Table
from lightning_rlprof.testing import make_header

__all__ = ["main", "stage_names", "tables"]

FOLDER = Path(__file__).with_name("reference")

_HEAD = """# Tables and columns

Generated from the code. Names of columns are the keys of `--format json` and of
`table.column(name)` in Python.

| kind | a cell is |
|---|---|
| text | text |
| count | an integer |
| duration | integer nanoseconds; the terminal shows ms, µs or s |
| share | 0 to 1; the terminal shows percent |
| ratio | a factor; the terminal shows `1.25x` |
| number | a decimal number |

A cell without a value means "unknown" or "does not apply". It is never zero.

## Analyses
"""
_SQL = """## SQL tables

`rlprof sql RUN QUERY` and `load(RUN).sql(query)` read these; [Tables and SQL](../sql.md) has
examples. Times count from the first event of the run. `headers.zero_unix_ns` is that moment on
the wall clock. A column that ends in `_ns` holds nanoseconds, one in `_bytes` bytes. Each counter
of a span is one more column of `spans`. In Python, the columns of `load(RUN).table(name)` keep
the profiler's names, such as `kernel` and `start`.

### Every run
"""
_CODES = """### Codes of notes

`notes.code` says what a note means. `notes.facts` has the numbers and names after the colon.
Runs of older versions have neither.
"""
_DEVICE = """### Captures and profiler traces

A table exists if the profiler recorded something for it. These are the columns of torch.profiler
traces. Nsight Systems adds `sync` (calls that wait for the device) and `gpu_metrics`. torch_npu
adds `sync`, `communication`, `links`, `step_trace` and to `kernels` the
columns `op_type`, `input_shapes`, `block_dim`, `aicore_time_ns` and `vector_time_ns`. Runs of
several hosts have `clocks`. Runs with [background metrics](../background.md) have
`background_metrics`. `rlprof sql RUN --describe` lists the columns of any run.
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


_NAMES = """# Stage names and categories

Generated from the code. Use the stage names of the first table if they fit, so that runs of
different projects can be compared. Any other name works as well.

| stage | what happens |
|---|---|
| `actor_generate` | the policy writes responses |
| `actor_compute_log_prob` | log-probabilities under the policy that wrote them |
| `actor_image_embeds` | image embeddings of a multimodal policy |
| `actor_update` | forward, backward and optimizer step of the policy |
| `reference_compute_log_prob` | log-probabilities under the reference model |
| `critic_compute_values` | values |
| `critic_update` | the critic learns |
| `compute_reward` | responses are scored |
| `compute_advantage` | advantages from rewards and values |
| `weight_sync` | new weights reach the rollout engine |

## Names in the ledger

The [ledger](../ledger.md) maps names of stages and regions to categories, also those of verl,
slime, NeMo-RL and others. If several categories apply at one moment, the first row of this table
counts.

- Case and punctuation don't matter: `Engine.wake_up` and `wake-up` are `wake_up`.
- The innermost span with a known name decides. An unknown name takes the category of the span
  around it.
- Everything inside `weight sync`, `reward/tool/env` and `checkpoint/eval` belongs to it.

| category | names |
|---|---|
"""


def stage_names() -> str:
    """Return the page of stage names, and the names of each category."""
    rows = [
        f"| {each.text} | {'; '.join(f'`{name}`' for name in NAMES.get(each, '').split())} |"
        for each in Category
    ]
    return _NAMES + "\n".join(rows) + "\n"


def tables() -> str:
    """Return the page of all tables and their columns."""
    with TemporaryDirectory() as folder:
        run, trace = load(_run(Path(folder, "run"))), load(_trace(Path(folder, "trace.json")))
        parts = [_HEAD]
        by_group = sorted(CATALOG, key=lambda each: each.group)
        for group, analyses in groupby(by_group, key=lambda each: each.group):
            parts.append(f"### {group}\n")
            for each in analyses:
                parts.append(f"#### `{each.name}`\n\n{each.answers}.\n")
                parts.append(_columns(each.run(run).columns))
        parts += [_SQL, *_tables(run, CORE), _CODES, _codes()]
        parts += [_DEVICE, *_tables(trace, sorted(set(trace.tables) - {*CORE}))]
        return "\n".join(parts)


def _tables(spans: Spans, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        table: Table = spans.table(name)
        yield f"#### `{name}`\n"
        rows = [
            f"| `{each.name}` | {each.kind} | {each.unit} | {meaning(name, each.name).text} |"
            for each in sql_columns(table.columns)
        ]
        heads = "| column | kind | unit | meaning |\n|---|---|---|---|\n"
        yield heads + "\n".join(rows) + "\n"


def _codes() -> str:
    rows = [f"| `{code.value}` | {code.level} | {code.meaning} |" for code in Code]
    return "\n".join(["| code | level | meaning |", "|---|---|---|", *rows]) + "\n"


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
    """Write the pages, or with ``--check`` compare them; returns the exit status."""
    stale = 0
    for name, text in (("tables.md", tables()), ("stage-names.md", stage_names())):
        path = FOLDER / name
        if "--check" not in arguments:
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"Wrote {name}")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{name} is stale: python docs/generate_schema.py", file=sys.stderr)
            stale = 1
    return stale


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

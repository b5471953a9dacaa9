"""Columns as SQL has them: one name for one thing, no reserved word, each with a meaning."""

import re
from pathlib import Path

import duckdb
import pytest

from lightning_rlprof.loaders.ascend.reader import _READERS
from lightning_rlprof.loaders.clocks import CLOCK_COLUMNS
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import Run
from lightning_rlprof.store import column_meanings
from lightning_rlprof.store.duckdb_tables import sql_columns
from lightning_rlprof.store.run_store import Store
from tests.builders.chrome import ChromeTrace
from tests.builders.runs import grpo_run
from tests.builders.sampled import sampled_run
from tests.places import ROOT, SHARED_DATA

QUERIES = re.findall(r"\| `((?:select|from) [^`]+)` \|", (ROOT / "docs/sql.md").read_text())
REAL = sorted((SHARED_DATA / "kineto").glob("*.json.gz")) + sorted(
    (SHARED_DATA / "nsys").glob("*.sqlite")
)


def every_sort_of_event(folder: Path) -> Path:
    """Write a trace that has a table of each kind."""
    made = ChromeTrace()
    made.mark("ProfilerStep#1", 0, 900)
    made.mark("actor_update", 10, 800)
    for number in (1, 2):
        made.launched(number, 100 * number)
    sent = {"Collective name": "allreduce", "Process Group Name": "7", "Group size": 2}
    made.kernel(3, 400, 450, "ncclDevKernel_AllReduce", dtype="Float", **sent)
    made.event("gpu_memcpy", "Memcpy HtoD", 500, 510, 0, 7, device=0, stream=7, bytes=64)
    made.event("cpu_op", "aten::mm", 90, 95, 1, 1, **{"Input Dims": [[2, 2], [2, 2]]})
    memory = {"Device Type": 1, "Device Id": 0, "Total Allocated": 64, "Total Reserved": 128}
    made.event("cpu_instant_event", "[memory]", 20, 20, 1, 1, **memory)
    made.events[-1] |= {"ph": "i", "s": "t"}  # type: ignore[operator]
    return made.write(folder / "trace.json")


def columns_of(run: Run) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for table, column, _, _ in run.describe().rows:
        found.setdefault(str(table), []).append(str(column))
    return found


@pytest.mark.parametrize("query", QUERIES)
def test_the_ready_queries_are_right(query: str, tmp_path: Path) -> None:
    run = Run.of(load(every_sort_of_event(tmp_path)))
    if any(word in query for word in ("tokens", "'step'")):
        run = Run.of(grpo_run(tmp_path / "run"))
    assert len(run.sql(query).rows), "each has an answer"


@pytest.mark.deep
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_columns_of_real_traces_are_no_reserved_words_and_have_meanings(path: Path) -> None:
    check(columns_of(Run.of(load(path))))


def test_columns_of_all_tables_are_no_reserved_words_and_have_meanings(tmp_path: Path) -> None:
    found = columns_of(Run.of(load(every_sort_of_event(tmp_path))))
    assert found.keys() >= {"spans", "kernels", "memcpy", "collectives", "calls", "memory"}
    found |= {
        f"ascend {name}": [column.name for column in sql_columns(reader.columns)]
        for name, reader in _READERS.items()
    }
    found["clocks"] = [column.name for column in sql_columns(CLOCK_COLUMNS)]
    sampled = sampled_run([(0, None, {"host_cpu_percent": [5.0]})])
    found["background_metrics"] = columns_of(Run.of(sampled))["background_metrics"]
    check(found)


def check(columns: dict[str, list[str]]) -> None:
    query = "select keyword_name from duckdb_keywords() where keyword_category = 'reserved'"
    reserved = {word for (word,) in duckdb.sql(query).fetchall()}
    known = column_meanings._OF_COLUMN.keys() | {name for _, name in column_meanings._OF_TABLE}
    for table, own in columns.items():
        assert len(own) == len(set(own)), table
        assert not reserved & set(own), table
        assert not {"kernel", "operator", "metric"} & set(own), f"{table} has them as name"
        if table != "spans":
            assert not set(own) - known, f"{table} has columns without a meaning"


def test_what_has_a_duration_has_an_end_in_memory_in_caches_and_in_files(tmp_path: Path) -> None:
    path = every_sort_of_event(tmp_path)
    query = "select start_ns, duration_ns, end_ns from kernels order by start_ns"
    expected = [(110, 10, 120), (210, 10, 220), (400, 50, 450)]
    assert list(Run.of(load(path)).sql(query).rows) == expected
    store = Store(path, load)
    assert list(store.sql(query).rows) == expected
    store.write(query, tmp_path / "out.parquet")
    written = duckdb.read_parquet(str(tmp_path / "out.parquet")).fetchall()
    assert written == expected


def test_each_kernel_finds_the_call_that_launched_it(tmp_path: Path) -> None:
    (query,) = [each for each in QUERIES if "join calls" in each]
    found = Run.of(load(every_sort_of_event(tmp_path))).sql(query)
    assert [row[:2] for row in found.rows] == [("gemm", "cudaLaunchKernel")] * 2


@pytest.mark.deep
@pytest.mark.parametrize("name", ["h100_qwen1.5-0.5b.json.gz", "mi300_bert-small.json.gz"])
def test_each_kernel_of_a_real_trace_finds_one_call(name: str) -> None:
    path = SHARED_DATA / "kineto" / name
    if not path.is_file():
        pytest.skip("no real traces in ../shared/data/kineto")
    run = Run.of(load(path))
    (query,) = [each for each in QUERIES if "join calls" in each]
    copies = query.replace("kernels", "memcpy").replace("k.name", "k.kind")
    for table, asked in (("kernels", query), ("memcpy", copies)):
        launched = f"select count(*) from {table} where launch_ns is not null"
        assert len(run.sql(asked).rows) == run.sql(launched).rows[0][0] > 0


def test_describe_is_the_same_from_memory_and_from_a_cache(tmp_path: Path) -> None:
    path = every_sort_of_event(tmp_path)
    in_memory, cached = Run.of(load(path)).describe(), Store(path, load).describe()
    assert sorted(in_memory.rows) == sorted(cached.rows)  # type: ignore[type-var]
    rows = {(row[0], row[1]): row[2:] for row in cached.rows}
    assert rows["kernels", "end_ns"] == ("ns", "end, since the first event of the run")
    assert rows["memcpy", "bytes"] == ("bytes", "size of what was moved")


def test_a_counter_describes_itself(tmp_path: Path) -> None:
    rows = {row[1]: row[2:] for row in Run.of(grpo_run(tmp_path / "run")).describe().rows}
    assert rows["tokens"] == ("", "counter 'tokens' of the span")

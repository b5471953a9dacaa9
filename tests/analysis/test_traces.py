"""Every analysis of every trace, whole and with one part removed: an answer or a reason."""

import gzip
import json
import math
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_rlprof.analysis.catalog import CATALOG
from lightning_rlprof.analysis.ledger.ledger import accounts_of, ledger
from lightning_rlprof.errors import RlprofError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.report.summary import summary, summary_lines
from lightning_rlprof.tables.spans import Spans
from tests.builders.chrome import ChromeTrace
from tests.fuzz.originals import MADE, Original
from tests.places import SHARED_DATA

_PARTS_REMOVED = 8  # Of each made trace, chosen by its name; of each real one a quarter.
_ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
_GROUP = {"Collective name": "allreduce", "In msg nelems": 1_000, "Out msg nelems": 1_000}
_GROUP |= {"Group size": 8, "dtype": "Float", "Process Group Name": "0"}


def _ranks(folder: Path, *, named: bool) -> tuple[Path, Path]:
    """Write two of eight ranks, whose collectives name their group or do not."""
    group = _GROUP if named else {}
    for rank in range(2):
        job = {"rank": rank, "world_size": 8, "pg_config": [{"pg_name": "0", "pg_size": 8}]}
        trace = ChromeTrace({"schemaVersion": 1, "distributedInfo": job})
        for step in range(6):
            at, late = 1_000_000 * step, 10_000 * ((rank + step) % 3)
            trace.mark(f"ProfilerStep#{step + 1}", at, at + 1_000_000)
            for number, name, start, end, more in (
                (2 * step, "gemm", at + 50_000, at + 300_000 + late, {}),
                (2 * step + 1, _ALL_REDUCE, at + 310_000 + late, at + 600_000, group),
            ):
                trace.call(number, at + 100 * number)
                trace.kernel(number, start, end, name, **more)
        trace.write(folder / f"rank{rank}.pt.trace.json")
    return folder / "rank0.pt.trace.json", folder


def _merged(folder: Path) -> tuple[Path, Path]:
    """Write the traces of two processes into one file: their launches have equal numbers."""
    trace = ChromeTrace()
    for process in range(2):
        trace.mark("ProfilerStep#1", 0, 1_000_000, pid=9 + process)
        for number in range(8):
            trace.call(number, 1_000 * number + process, pid=9 + process)
            start = 50_000 + 100_000 * number
            trace.kernel(number, start, start + 90_000, device=process)
    path = trace.write(folder / "merged.json")
    return path, path


TRACES: dict[str, Original] = {
    **{name: MADE[name] for name in ("native", "chrome", "nsys", "ascend database")},
    "ascend folder": MADE["ascend communication"],
    "two of eight ranks": partial(_ranks, named=True),
    "two of eight ranks, no groups": partial(_ranks, named=False),
    "two processes in a file": _merged,
}
"""Each writes a trace into a folder, and returns its main file and what to load."""

REAL = [
    *sorted(SHARED_DATA.glob("kineto/*.json.gz")),
    *sorted(SHARED_DATA.glob("kineto/two_ranks")),
    *(path for path in sorted(SHARED_DATA.glob("ascend/*")) if path.is_dir()),
    *sorted(SHARED_DATA.glob("nsys/**/*.sqlite")),
]


def check(spans: Spans) -> None:
    """Run every analysis, and check what holds of each answer."""
    for each in CATALOG:
        table = each.run(spans)
        assert (table.abstained is None) or not table.rows, each.name
        for row in table.rows:
            wrong = [cell for cell in row if isinstance(cell, float) and not math.isfinite(cell)]
            assert not wrong, (each.name, row)
    summary_lines(summary(spans))
    accounts, table = accounts_of(spans), ledger(spans)
    assert int(accounts.job_ns.sum()) == accounts.total_ns
    if table.abstained is None:
        totals = [total for total in table.column("total") if isinstance(total, int)]
        assert sum(totals) == accounts.total_ns


Removal = tuple[str, Callable[[], None]]


def removals(root: Path) -> Iterator[Removal]:
    """Yield each part that a trace declares, with what removes it from the files in a folder."""
    for path in sorted(each for each in root.rglob("*") if each.is_file()):
        name = path.name
        if path.suffix in (".db", ".sqlite"):
            with closing(sqlite3.connect(path)) as database:
                tables = database.execute("SELECT name FROM sqlite_master WHERE type='table'")
                names = [table for (table,) in tables]
            for table in names:
                yield f"{name}: table {table}", partial(_drop, path, table)
        elif name.endswith((".json", ".json.gz")):
            yield from _removals_of_json(path)
        elif path.suffix == ".csv":
            head = path.read_text().partition("\n")[0].split(",")
            for at, column in enumerate(head):
                yield f"{name}: column {column}", partial(_cut_column, path, at)
        if path.parent != root:
            yield f"file {name}", path.unlink


def _removals_of_json(path: Path) -> Iterator[Removal]:
    data = _read(path)
    top = data if isinstance(data, dict) else {}
    for key in top:
        yield f"{path.name}: {key}", partial(_drop_key, path, key)
    events = top.get("traceEvents", data if isinstance(data, list) else [])
    if not events:
        return
    for field in ("cat", "ph"):
        for value in sorted({str(event.get(field)) for event in events}):
            remove = partial(_keep, path, partial(_differs, field, value))
            yield f"{path.name}: events of {field} {value}", remove
    arguments = {key for event in events for key in event.get("args") or ()}
    for key in sorted({*arguments, "dur", "tid", "pid", "name"}):
        yield f"{path.name}: argument {key}", partial(_keep, path, partial(_strip, key))


def _differs(field: str, value: str, event: dict[str, Any]) -> bool:
    return str(event.get(field)) != value


def _strip(key: str, event: dict[str, Any]) -> bool:
    for part in (event, event.get("args") or {}):
        part.pop(key, None)
    return True


def _keep(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    data = _read(path)
    events = data["traceEvents"] if isinstance(data, dict) else data
    events[:] = filter(wanted, events)
    _write(path, data)


def _drop_key(path: Path, key: str) -> None:
    _write(path, {name: value for name, value in _read(path).items() if name != key})


def _read(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def _write(path: Path, data: Any) -> None:
    text = json.dumps(data).encode()
    path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)


def _drop(path: Path, table: str) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute(f'DROP TABLE "{table}"')
        database.commit()


def _cut_column(path: Path, at: int) -> None:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("\n".join(",".join(row[:at] + row[at + 1 :]) for row in rows))


def check_without_parts(folder: Path, what: Path, most: int) -> None:
    """Check a trace in a folder without some of its parts; a loader may refuse with a reason."""
    whole = folder.with_name("whole")
    shutil.copytree(folder, whole)
    parts = [part for part, _ in removals(whole)]
    for part in random.Random(what.name).sample(parts, min(most, len(parts))):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        dict(removals(folder))[part]()
        try:
            spans = load(what)
        except RlprofError:
            continue
        try:
            check(spans)
        except Exception as error:
            error.add_note(f"without {part}")
            raise


@pytest.mark.deep
@pytest.mark.parametrize("name", TRACES)
def test_made_traces_are_answered_whole_and_without_a_part(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    folder.mkdir()
    _, what = TRACES[name](folder)
    check(load(what))
    check_without_parts(folder, what, _PARTS_REMOVED)


@pytest.mark.deep
@pytest.mark.skipif(not REAL, reason="no real traces in ../shared/data")
@pytest.mark.parametrize("real", REAL, ids=lambda path: path.name)
def test_real_traces_are_answered_whole_and_without_a_part(real: Path, tmp_path: Path) -> None:
    check(load(real))
    folder = tmp_path / "trace"
    folder.mkdir()
    (shutil.copytree if real.is_dir() else shutil.copyfile)(real, folder / real.name)
    check_without_parts(folder, folder / real.name, _PARTS_REMOVED // 4)

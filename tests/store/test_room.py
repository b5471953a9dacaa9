from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import Run
from lightning_rlprof.store import cache
from lightning_rlprof.store.run_store import Store
from tests.builders.reader import Reader
from tests.builders.runs import grpo_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    grpo_run(tmp_path / "run", steps=3, ranks=2)
    return tmp_path / "run"


def test_rare_counters_beyond_the_limit_are_told(run: Path) -> None:
    spans = load(run)
    one = next(iter(spans.counters.values()))
    many = {f"c{number}": one for number in range(300)}
    table = replace(spans, counters=many).table("spans")
    assert len(table.columns) == 11 + 256
    assert table.note == "44 rarer counters have no column"


def test_a_counter_beyond_64_bits_is_a_float(run: Path) -> None:
    spans = load(run)
    counter = replace(spans).counters["tokens"]
    huge = counter._replace(values=np.array([2**70] * len(counter.rows), dtype=object))
    found = Run.of(replace(spans, counters={"n": huge})).sql("select max(n), count(n) from spans")
    assert list(found.rows) == [(2.0**70, len(counter.rows))]


def test_a_table_asked_of_an_older_cache_reads_the_run_then(run: Path) -> None:
    Store(run, Reader())
    reader = Reader()
    store = Store(run, reader)
    assert reader.loads == 0
    assert len(store.sql("from kernels").rows) == 2
    assert (reader.loads, reader.kernels) == (1, 1)


def test_a_table_for_which_there_is_no_room_is_an_error(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = Store(run, Reader())
    monkeypatch.setattr(cache.Cache, "add", full)
    with pytest.raises(TraceError, match=r"no room for the tables of .*No space left.*TMPDIR"):
        store.sql("from kernels")
    monkeypatch.setenv("TMPDIR", str(run))
    with pytest.raises(TraceError, match=r"no room for the tables of .* set TMPDIR to another"):
        Store(run / "rank-00000.jsonl", Reader())
    assert list(run.glob("rlprof-*")) == []

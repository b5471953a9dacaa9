"""Real traces through their caches: every table the same, whatever the loader reads."""

import shutil
from pathlib import Path

import pytest

from lightning_rlprof.loaders.load import load
from lightning_rlprof.run import Run
from lightning_rlprof.store.ingest import ingest
from lightning_rlprof.store.open_run import open_run, open_store
from lightning_rlprof.tables.table import Table
from tests.builders.alike import assert_same_run
from tests.places import SHARED_DATA

DATA = SHARED_DATA / "kineto"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no real traces in ../shared/data/kineto")


def numbered(table: Table) -> list[tuple[object, ...]]:
    return [tuple(row) for row in table.rows]


@pytest.mark.deep
@pytest.mark.parametrize("name", ["alexnet", "h100_qwen1.5-0.5b", "mi300_bert-small", "nccl"])
def test_a_real_trace_out_of_its_cache_is_the_same(name: str, tmp_path: Path) -> None:
    path = Path(shutil.copy(DATA / f"{name}.json.gz", tmp_path))
    (row,) = ingest([path], jobs=1).rows
    assert row[2] == "cached"
    found, wanted = open_run(path), load(path)
    assert_same_run(found, wanted)
    for each in wanted.tables:
        mine, own = found.table(each), wanted.table(each)
        assert (mine.columns, mine.note, mine.abstained) == (own.columns, own.note, own.abstained)
        assert numbered(mine) == numbered(own)


def test_two_real_ranks_are_one_run_in_sql(tmp_path: Path) -> None:
    for path in (DATA / "two_ranks").iterdir():
        shutil.copy(path, tmp_path)
    assert ingest([tmp_path], jobs=1).column("state") == ["cached", "cached"]
    spans, store = load(tmp_path), open_store(tmp_path)
    for name in spans.tables.keys() - {"clocks"}:  # which has no start
        query = f"select rank, count(*) as n, min(start_ns) from {name} group by 1 order by 1"
        assert list(store.sql(query).rows) == list(Run.of(spans).sql(query).rows)

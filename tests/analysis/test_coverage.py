from pathlib import Path

from lightning_rlprof.analysis.coverage import coverage
from lightning_rlprof.loaders.load import load
from tests.runs import Row, header, write_rank


def test_every_rank_has_a_row_and_its_times_add_up(tmp_path: Path) -> None:
    rows = [
        Row("sanity", "region", 0, 10, 20),
        Row("step", "step", 1, 30, 50),
        Row("step", "step", 2, 50, 80),
        Row("validation", "region", 2, 80, 100),
    ]
    write_rank(tmp_path, header(0, 3), rows)
    write_rank(tmp_path, header(2, 3, host="node-b", device="npu"), [], status=None)

    assert coverage(load(tmp_path)).rows == [
        (0, "node-a", "cpu", 4, 2, 50, 40, "finished"),
        (2, "node-b", "npu", 0, 0, 0, 0, "file just stops"),
    ]

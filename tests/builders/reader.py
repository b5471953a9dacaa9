"""What the tests of the store read runs with."""

from dataclasses import replace
from pathlib import Path

from lightning_rlprof.loaders.load import load
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table


class Reader:
    """Loads for real, adds a table, and counts."""

    def __init__(self) -> None:
        self.loads = self.kernels = 0

    def __call__(self, path: Path) -> Spans:
        self.loads += 1
        return replace(load(path), tables={"kernels": self._kernels, "memcpy": self._abstained})

    def _kernels(self) -> Table:
        self.kernels += 1
        columns = (Column("kernel", "text"), Column("duration", "duration", "ns"))
        return Table("kernels", columns, [("gemm", 5), ("copy", None)], note="a note")

    def _abstained(self) -> Table:
        return Table("memcpy", (Column("bytes", "count"),), abstained="none was traced")

"""Traces of any size as torch.profiler writes them, step by step: none is ever in memory."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import Any

from _read_tile import FIRST_US, STEP_US, make_tile
from isal import igzip

__all__ = ["tiled_trace"]

_TILES = 7
_HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {"id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85051572224, "numSms": 108}
  ],
  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
  "record_shapes": 1,
  "baseTimeNanoseconds": 1759276800000000000,
  "traceEvents": [
"""
_TAIL = """  {
    "ph": "i", "name": "Record Window End", "pid": "", "tid": "", "ts": %d.000, "s": "g"
  }
  ],
  "traceName": "trace.json",
  "displayTimeUnit": "ms"
}
"""


def tiled_trace(path: Path, megabytes: float, seed: int = 0) -> int:
    """Write a trace of that many megabytes of JSON, ``.json`` or ``.json.gz``; return its bytes.

    The same arguments give the same file. It has whole steps, a third of a megabyte each, whose
    times and ids all differ; their durations repeat, so the files compress better than real ones.
    """
    size = 0
    with _opened(path) as file:
        for part in _parts(megabytes * 1e6, seed):
            data = part.encode()
            size += len(data)
            file.write(data)
    return size


def _opened(path: Path) -> AbstractContextManager[Any]:
    if path.suffix == ".gz":
        packed: AbstractContextManager[Any] = igzip.IGzipFile(  # type: ignore[no-untyped-call]
            path, "wb", compresslevel=1
        )
        return packed
    return path.open("wb")


def _parts(size: float, seed: int) -> Iterator[str]:
    tiles = [make_tile(f"{seed} {number}") for number in range(_TILES)]
    yield _HEAD
    size -= len(_HEAD) + len(_TAIL)
    for step in count():
        tile = tiles[step % _TILES]
        part = tile.text % tuple((tile.first + step * tile.each).tolist())
        part = part.replace("#STEP", f"#{step}", 1)
        yield part
        size -= len(part)
        if size <= 0:
            yield _TAIL % (FIRST_US + (step + 1) * STEP_US)
            return

"""A trace_view.json read as a stream, and who is who in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from lightning_rlprof.errors import TraceError
from lightning_rlprof.loaders.ascend_events import AscendColumns
from lightning_rlprof.loaders.ascend_kept import AscendEvent, Id
from lightning_rlprof.loaders.chrome_bytes import Source
from lightning_rlprof.loaders.chrome_stream import SIZE, ChromeStream
from lightning_rlprof.spans import Int64s

__all__ = ["TraceView", "read_trace_view"]


@dataclass(frozen=True, eq=False)
class TraceView:
    """What was asked for of a trace; times are nanoseconds since 1970.

    Attributes:
        names: Texts that the columns name, domains and types among them.
        lanes: (process, thread) of each lane.
        told: What the trace says of its processes and threads.
        tables: Columns by `Kept`, as `AscendColumns.rows` returns them.
        first_ns: Start of the first event of all, `UNKNOWN` without any.
        problems: What was lost, and how the file ended, where that was not its end.
        complete: Whether it was read to its end.
    """

    names: list[str]
    lanes: list[tuple[Id, Id]]
    told: Mapping[tuple[str, Id, Id], str]
    tables: Mapping[int, dict[str, Int64s]]
    first_ns: int
    problems: list[str]
    complete: bool

    def process(self, lane: int) -> str | None:
        """Return the name of a lane's process, None where the trace does not tell it."""
        return self.told.get(("process_name", self.lanes[lane][0], None))

    def thread(self, lane: int) -> str | None:
        """Return the name of a lane's thread, None where the trace does not tell it."""
        return self.told.get(("thread_name", *self.lanes[lane]))

    def label(self, lane: int) -> str:
        """Return what stands beside the process's name, such as "NPU 0"."""
        return self.told.get(("process_labels", self.lanes[lane][0], None), "")

    def lanes_of(self, *processes: str | None) -> Int64s:
        """Return the lanes of processes with one of these names; None is one without a name."""
        found = [lane for lane in range(len(self.lanes)) if self.process(lane) in processes]
        return np.array(found, np.int64)

    def threads(self) -> Int64s:
        """Return the system's number of each lane's thread, a number below 0 where it is none."""
        numbers = [
            tid if isinstance(tid, int) and 0 <= tid < 1 << 62 else -1 - lane
            for lane, (_, tid) in enumerate(self.lanes)
        ]
        return np.array([*numbers, -1], np.int64)[:-1]


def read_trace_view(path: Path, *wanted: int) -> TraceView:
    """Read what is wanted of a trace, complete or cut off; takes about 5 ms per MB.

    Memory is that of the columns, 24 to 44 bytes per row that is kept, whatever the file's size.
    What is wanted are members of `Kept`.

    Raises:
        TraceError: It cannot be read or is no such trace.
    """
    columns = AscendColumns(frozenset(wanted))
    with Source(path) as source:
        stream = ChromeStream(source, msgspec.json.Decoder(list[AscendEvent]), SIZE)
        if not stream.open():
            why = f" ({source.problem})" if source.problem else ""
            raise TraceError(f"{path}: is no trace: it has no array of events{why}")
        for batch in stream:
            columns.add(batch)
    texts = [
        (stream.lost, f"{stream.lost} events are left out: they cannot be read"),
        (columns.lost, f"{columns.lost} events are left out: their times cannot be true"),
    ]
    return TraceView(
        list(columns.names),
        list(columns.lanes),
        columns.told,
        {kind: columns.rows(kind) for kind in wanted},
        columns.first_ns,
        [*stream.problems, *(text for count, text in texts if count)],
        stream.complete,
    )

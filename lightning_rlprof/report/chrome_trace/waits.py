"""Waiting as slices inside stages, and arrows from the last rank that arrived to the others."""

from collections.abc import Iterator

import numpy as np

from lightning_rlprof.analysis.steps.waiting import find_waits
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.report.chrome_trace.encoding import micro
from lightning_rlprof.tables.spans import Spans

MOST_FLOWS = 50_000
"""Arrows of one kind in a trace; of more, the longest waits have one."""

_MARK = KINDS.index("mark")


class WaitSlices:
    """Waits of a run, and where their slices and those of the last ranks are drawn.

    Attributes:
        track: By row of the run, the number of its track in the process of its rank.
    """

    def __init__(self, spans: Spans) -> None:
        self._spans, self._waits = spans, find_waits(spans)
        self._own = np.zeros(len(self._waits.row), np.int64)  # track of each wait
        self._order = np.argsort(self._waits.row, kind="stable")
        self._rows = self._waits.row[self._order]
        self.track = np.zeros(len(spans), np.int64)

    def merged(self, lane: list[int], tid: int) -> tuple[list[int], list[int]]:
        """Return what a track shows in drawing order, and the waits that do not nest there.

        A wait is ``~index``. Perfetto drops a slice that begins inside another and ends after it.

        Args:
            lane: Rows of the track, in drawing order.
            tid: Its number.
        """
        spans, waits, rows = self._spans, self._waits, np.array(lane, np.int64)
        self.track[rows] = tid
        low, high = np.searchsorted(self._rows, [rows.min(), rows.max() + 1])
        mine = self._order[low:high][np.isin(self._rows[low:high], rows)]
        if not len(mine):
            return lane, []
        self._own[mine] = tid
        start = np.concatenate([spans.start_ns[rows], waits.start_ns[mine]])
        end = np.concatenate([spans.end_ns[rows], waits.end_ns[mine]])
        item = np.concatenate([rows, ~mine])
        order = np.lexsort((item < 0, -end, start))
        left_out: set[int] = set()
        stack: list[tuple[int, int]] = []
        columns = (column[order].tolist() for column in (start, end, item))
        for begins, ends, each in zip(*columns, strict=True):
            if each >= 0 and spans.kind[each] == _MARK:
                continue
            while stack and stack[-1][0] <= begins:
                stack.pop()
            while each >= 0 and stack and stack[-1][0] < ends:  # rows nest: it is a wait
                left_out.add(stack.pop()[1])
            if stack and stack[-1][0] < ends:
                left_out.add(each)
            else:
                stack.append((ends, each))
        drawn = [each for each in item[order].tolist() if each not in left_out]
        return drawn, sorted(left_out, reverse=True)

    def slice(self, item: int, pid: int, tid: int) -> str:
        """Return a wait as a slice, and note on which track it is."""
        spans, waits, at = self._spans, self._waits, ~item
        self._own[at] = tid
        start, length = int(waits.start_ns[at]), int(waits.end_ns[at] - waits.start_ns[at])
        step, last = int(spans.step[waits.row[at]]), int(spans.rank[waits.last[at]])
        return (
            f'{{"ph":"X","dur":{micro(length)},"pid":{pid},"tid":{tid},"ts":{micro(start)},'
            f'"name":"waiting","cat":"waiting","args":{{"step":{step},"last rank":{last}}}}}'
        )

    def flows(self) -> tuple[list[int], int]:
        """Return the waits that get an arrow, by index, and how many shorter ones get none.

        No arrow points backward in time, as clocks that are off would make it.
        """
        spans, waits = self._spans, self._waits
        forward = spans.rank[waits.last] != spans.rank[waits.row]
        forward &= spans.start_ns[waits.last] < spans.end_ns[waits.row]
        found = np.flatnonzero(forward)
        if len(found) > MOST_FLOWS:
            length = (waits.end_ns - waits.start_ns)[found]
            found = np.sort(found[np.argsort(-length, kind="stable")[:MOST_FLOWS]])
        return found.tolist(), int(forward.sum()) - len(found)

    def flow_events(self, found: list[int]) -> Iterator[str]:
        """Yield both ends of each arrow: in the last rank's slice, and at the end of the wait."""
        spans, waits = self._spans, self._waits
        for at in found:
            last, row = int(waits.last[at]), int(waits.row[at])
            arrives, lies = int(waits.end_ns[at]) - 1, self._own[at]  # within the slice
            leaves = int(spans.start_ns[last])
            if waits.whole_stage[at]:  # the last rank's own work ends the wait
                leaves = max(leaves, min(arrives, int(spans.end_ns[last]) - 1))
            if leaves > arrives:  # its arrival does, in the span around the wait
                arrives, lies = leaves, self.track[row]
            what = f'"cat":"waiting","name":"last arrival","id":{at + 1}'
            for phase, rank, tid, time in (
                ('"s"', spans.rank[last], self.track[last], leaves),
                ('"f","bp":"e"', spans.rank[row], lies, arrives),
            ):
                yield f'{{"ph":{phase},"pid":{rank + 1},"tid":{tid},"ts":{micro(time)},{what}}}'

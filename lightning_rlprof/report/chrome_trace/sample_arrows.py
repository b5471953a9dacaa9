"""Arrows of a Chrome trace: from the last phase of a sample to the update that it trained."""

from collections.abc import Iterator

import numpy as np

from lightning_rlprof.analysis.samples.sample_book import UNKNOWN, sample_book
from lightning_rlprof.analysis.samples.sample_path import updates_of
from lightning_rlprof.records.records import KINDS
from lightning_rlprof.report.chrome_trace.encoding import micro
from lightning_rlprof.report.chrome_trace.waits import MOST_FLOWS
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans

_FIRST = 1 << 40  # numbers of other arrows are below


def sample_arrows(spans: Spans, tracks: Int64s) -> Iterator[str]:
    """Yield both ends of the arrow of each trained sample; of many samples, of some evenly.

    Args:
        spans: The run.
        tracks: Track of each row.
    """
    book = sample_book(spans)
    phase = spans.kind[book.rows] != KINDS.index("mark")
    rows, owner = book.rows[phase], book.owner[phase]
    last = np.full(len(book), -1)
    last[owner] = rows  # the last one by start stays
    some = np.flatnonzero(book.fates("trained") & (last >= 0))
    if len(some) > MOST_FLOWS:
        some = some[np.linspace(0, len(some) - 1, MOST_FLOWS).astype(int)]
    updates = updates_of(spans, book.fate_row[some])
    for at, row, update in zip(some.tolist(), last[some].tolist(), updates.tolist(), strict=True):
        if update == UNKNOWN:
            continue
        leaves = max(int(spans.end_ns[row]) - 1, int(spans.start_ns[row]))
        arrives = max(int(spans.start_ns[update]), min(leaves, int(spans.end_ns[update]) - 1))
        if arrives < leaves:
            continue  # clocks that are off, or a phase that ends after its update
        what = f'"cat":"sample","name":"sample","id":{_FIRST + at}'
        for head, each, time in (('"s"', row, leaves), ('"f","bp":"e"', update, arrives)):
            place = f'"pid":{int(spans.rank[each]) + 1},"tid":{int(tracks[each])}'
            yield f'{{"ph":{head},{place},"ts":{micro(time)},{what}}}'

"""The tracks of the whole job, above its ranks: findings, and changes of the step time."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.comparison.changes import LEVEL, OUTLIER, changes
from lightning_rlprof.analysis.diagnosis.diagnosis import diagnose
from lightning_rlprof.report.chrome_trace.run_tracks import about, encoded, micro
from lightning_rlprof.report.terminal import duration
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import rows_of


class _Slice(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


def job_events(spans: Spans, pid: int) -> Iterator[str]:
    """Yield the process of the job: a track per finding, in their order, and one of the changes.

    A finding is at its first event; one that is about the whole run is as long as the run.
    """
    tracks = [(f"finding {n}", [each]) for n, each in enumerate(_findings(spans), start=1)]
    if found := _changes(spans):
        tracks.append(("changes", found))
    if not tracks:
        return
    yield about(pid, 0, "process_name", name="job: findings and changes")
    yield about(pid, 0, "process_sort_index", sort_index=-1)
    for tid, (title, slices) in enumerate(tracks, start=1):
        yield about(pid, tid, "thread_name", name=title)
        yield about(pid, tid, "thread_sort_index", sort_index=tid)
        for each in slices:
            yield (
                f'{{"ph":"X","pid":{pid},"tid":{tid},"ts":{micro(each.start_ns)},'
                f'"dur":{micro(each.end_ns - each.start_ns)},"name":{encoded(each.name)},'
                f'"cat":"job","args":{encoded(each.args)}}}'
            )


def _run(spans: Spans) -> tuple[int, int]:
    return int(spans.start_ns.min(initial=0)), int(spans.end_ns.max(initial=0))


def _findings(spans: Spans) -> Iterator[_Slice]:
    start, end = _run(spans)
    for each in diagnose(spans).found:
        args: dict[str, Any] = {
            "id": each.id,
            "kind": each.kind,
            "confidence": each.confidence,
            "evidence": each.evidence,
            "do": each.act,
            "look": each.look,
        }
        low, high = start, end
        if (place := each.place) is not None:
            args |= {"rank": place.rank} | ({} if place.step is None else {"step": place.step})
            low = start if place.from_ns is None else place.from_ns
            high = end if place.to_ns is None else place.to_ns
        if each.price is not None:
            args["price"] = f"{each.price.text}, {duration(each.price.ns)}"
        yield _Slice(each.heading, low, high, args)


def _changes(spans: Spans) -> list[_Slice]:
    """Return trends, then levels from their step to the next, then outlier steps: they nest."""
    rows = spans.rows(kind="step")
    if not len(rows):
        return []
    numbers, place = np.unique(spans.step[rows], return_inverse=True)
    begins = np.full(len(numbers), np.iinfo(np.int64).max)
    np.minimum.at(begins, place, spans.start_ns[rows])
    start, end = _run(spans)
    begin = dict(zip(numbers.tolist(), begins.tolist(), strict=True))
    following = dict(zip(numbers.tolist(), [*begins[1:].tolist(), end], strict=True))
    found = rows_of(changes(spans))
    levels = sorted(row["step"] for row in found if row["change"] == LEVEL)
    slices = []
    for row in found:
        step, name = row["step"], f"{row['change']} {row['ratio']:.2f}x"
        args = {key: row[key] for key in ("stage", "steps") if row[key] is not None}
        if row["change"] == LEVEL:
            until = next((begin[each] for each in levels if each > step), end)
            slices.append(_Slice(f"{name} from step {step}", begin[step], until, args))
        elif row["change"] == OUTLIER:
            slices.append(_Slice(f"{name} in step {step}", begin[step], following[step], args))
        else:
            slices.append(_Slice(f"{name} over the run", start, end, args))
    return sorted(slices, key=lambda each: (each.start_ns, -each.end_ns))

"""How far a run can be trusted: what is missing, cut off, hidden, unaligned, or our own doing."""

from collections.abc import Iterator

import numpy as np

from lightning_rlprof.analysis.clock_uncertainty import never_compared, uncertainty_ns
from lightning_rlprof.analysis.device.launches import unpaired
from lightning_rlprof.analysis.efficiency.throughput import throughput
from lightning_rlprof.analysis.step_selection import CLOSED, OPENED, counted, slowdown
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Column, Table

_COLUMNS = (Column("check", "text"), Column("state", "text"), Column("what", "text"))
_OK, _DOUBT, _UNKNOWN = "ok", "doubt", "unknown"
_DEAR = 0.01  # of the recorded time: what captures may take before it is a doubt
_HIDDEN = "hide their kernels"  # the note of a table in which replays of graphs are one row each
_REFUSED = "above 100 %"
_LONGER = 0.05  # than others: what captured steps may be before it is a doubt
_LOST = 0.01  # of the launches: how many may lack their kernel, as the last of a capture do
_FEW = 8
_ROUGH_NS = 1_000_000  # what times of two ranks may be off before it is a doubt

_Row = tuple[str, str, str]


def data_quality(spans: Spans) -> Table:
    """Return what must be known before a number of this run is believed, a row per check.

    ``state`` is "ok", "doubt", or "unknown" where the run cannot tell.
    """
    checks = (_ranks, _ends, _steps, _events, _kernels, _clocks, _graphs, _mfu, _cost)
    return Table("data_quality", _COLUMNS, [row for check in checks for row in check(spans)])


def _ranks(spans: Spans) -> Iterator[_Row]:
    world = max((header.world_size for header in spans.headers.values()), default=0)
    missing = sorted(set(range(world)) - set(spans.ranks))
    if missing:
        yield "ranks", _DOUBT, f"{len(missing)} of {world} are missing: {_few(missing)}"
    else:
        yield "ranks", _OK, f"all {world}"


def _ends(spans: Spans) -> Iterator[_Row]:
    cut = [rank for rank, status in spans.statuses.items() if status is None]
    broken = [rank for rank, status in spans.statuses.items() if status not in (None, "finished")]
    if cut:
        yield "ends", _DOUBT, f"the file just stops of rank {_few(cut)}"
    if broken:
        yield "ends", _DOUBT, f"ended early: rank {_few(broken)}"
    if not cut and not broken:
        yield "ends", _OK, "every file goes to its end"


def _steps(spans: Spans) -> Iterator[_Row]:
    rows = spans.rows(kind="step")
    if not len(rows):
        yield "steps", _UNKNOWN, "none goes to its end"
        return
    steps = np.unique(spans.step[rows])
    every = len(steps)
    pairs = np.unique(np.stack([spans.rank[rows], spans.step[rows]]), axis=1)
    own = {rank: int(np.count_nonzero(pairs[0] == rank)) for rank in spans.ranks}
    lack = [rank for rank, count in own.items() if count < every]
    note = counted(spans, rows).note
    text = f"some of {every} are missing on rank {_few(lack)}" if lack else f"all {every}"
    yield "steps", _DOUBT if lack else _OK, f"{text}. {note}".rstrip(". ")
    lost = int(steps[-1] - steps[0]) + 1 - every
    if lost and all(header.config.get("spans") for header in spans.headers.values()):
        first = _first_between(steps)
        yield "steps", _DOUBT, f"{lost} between others are in no file: {_few(first, lost)}"


def _first_between(steps: Int64s) -> list[int]:
    """Return the first numbers that lie between others and are not there, as many as are said."""
    edges = np.flatnonzero(np.diff(steps) > 1)[:_FEW]
    gaps = ((int(steps[at]) + 1, int(steps[at + 1])) for at in edges.tolist())
    return [step for low, high in gaps for step in range(low, min(high, low + _FEW))]


def _events(spans: Spans) -> Iterator[_Row]:
    warnings = [note for note in spans.notes if note.level != "info"]
    texts = [*(each.text for each in spans.warnings), *(note.text for note in warnings)]
    for name in ("kernels", "memcpy", "collectives"):
        table = spans.try_table(name, [])
        texts += [f"{name}: {text}" for text in table.losses()] if table else []
    if texts:
        first = f"{len(texts)} remarks, the first: " if len(texts) > 1 else ""
        yield "events", _DOUBT, f"{first}{texts[0]}"
    else:
        yield "events", _OK, "nothing is known to be lost"


def _kernels(spans: Spans) -> Iterator[_Row]:
    found = unpaired(spans)
    if found is None:
        yield (
            "kernels",
            _UNKNOWN,
            "no torch.profiler recorded launches and kernels, to compare them",
        )
    elif found.alone > _LOST * found.launches:
        text = f"{found.alone:,} of {found.launches:,} launches have no kernel: events were dropped"
        yield "kernels", _DOUBT, f"{text}, or a graph captured them"
    else:
        yield "kernels", _OK, f"{found.launches - found.alone:,} of {found.launches:,} launches"


def _clocks(spans: Spans) -> Iterator[_Row]:
    unsure = uncertainty_ns(spans)
    if unsure == 0:
        yield "clocks", _OK, "one host, one clock"
    elif unsure is not None:
        state = _OK if unsure <= _ROUGH_NS else _DOUBT
        yield "clocks", state, f"those of ranks were compared: within {unsure / 1e6:.3f} ms"
    else:
        text = f"{never_compared(spans)}: times of ranks may be off by milliseconds"
        yield "clocks", _DOUBT, text


def _graphs(spans: Spans) -> Iterator[_Row]:
    remarks: list[str] = []
    table = spans.try_table("kernels", remarks)
    if table is None:
        what = " ".join(remarks) or "no device tool recorded kernels"
        yield "graph replay", _DOUBT if remarks else _UNKNOWN, what
        return
    if not len(table.rows):
        yield "graph replay", _UNKNOWN, "no kernel was recorded"
        return
    replayed = int(np.count_nonzero(table.numbers("graph", -1) >= 0))
    if _HIDDEN in table.note:
        yield "graph replay", _DOUBT, "replays hide their kernels: idle is not known"
    elif replayed:
        text = f"{replayed:,} kernels ran in replays: whether the device idled inside is not known"
        yield "graph replay", _DOUBT, text
    else:
        yield "graph replay", _OK, "no kernel ran in one"


def _mfu(spans: Spans) -> Iterator[_Row]:
    table = throughput(spans)
    if _REFUSED in table.note:
        yield "MFU", _DOUBT, "above 100 %: FLOPs, tokens or peak are wrong"
    elif table.abstained or not any(share is not None for share in table.column("MFU")):
        yield "MFU", _UNKNOWN, "no FLOPs are stated, or the device is not known"
    else:
        yield "MFU", _OK, "below 100 %"


def _cost(spans: Spans) -> Iterator[_Row]:
    rows = np.concatenate([spans.rows(kind="region", name=name) for name in (OPENED, CLOSED)])
    took, whole = int(spans.duration_ns[rows].sum()), 0
    for rank in spans.ranks:
        own = spans.rows(rank=rank)
        whole += int(np.ptp(np.append(spans.start_ns[own], spans.end_ns[own]))) if len(own) else 0
    share, longer = took / whole if whole else 0.0, slowdown(spans)
    text = f"opening and closing captures took {share:.2%}"
    if longer is not None:
        text += f"; captured steps take {abs(longer):.1%} {'less' if longer < 0 else 'longer'}"
    dear = share > _DEAR or (longer or 0.0) > _LONGER
    yield "own cost", _DOUBT if dear else _OK, text


def _few(numbers: list[int], count: int | None = None) -> str:
    rest = (len(numbers) if count is None else count) - _FEW
    return ", ".join(map(str, numbers[:_FEW])) + (f" and {rest} more" if rest > 0 else "")

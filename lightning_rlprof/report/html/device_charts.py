"""What the HTML report draws of devices: bars that divide their time, kernels, communication.

Every bar is `device_time` summed up, so its segments are those of the tables.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.analysis.communication.collectives import CallTimes, LongCall, call_times
from lightning_rlprof.analysis.communication.links import End, LinkSpeed, link_speeds
from lightning_rlprof.analysis.device.breakdown import (
    COMPUTE_CLASSES,
    EDGE,
    IDLE,
    OVERLAPPED,
    PARTS,
    REPLAY,
    UNKNOWN,
    WORK,
    annotation_times,
    device_time,
)
from lightning_rlprof.analysis.device.gaps import CAUSES, UNKNOWN_TIME
from lightning_rlprof.analysis.diagnosis.data_quality import Check
from lightning_rlprof.analysis.diagnosis.problem import Undecided
from lightning_rlprof.analysis.efficiency.matmuls import kernel_peaks
from lightning_rlprof.analysis.kernels import kernels
from lightning_rlprof.report.terminal import duration, percent, size
from lightning_rlprof.tables.arrays import Int64s
from lightning_rlprof.tables.spans import Spans, world_size
from lightning_rlprof.tables.table import rows_of

_STYLES = {
    **{name: name.replace("data ", "") for name in COMPUTE_CLASSES},
    **dict(zip(WORK[len(COMPUTE_CLASSES) :], ("communication", "copies"), strict=True)),
    **dict(zip(OVERLAPPED, ("communication", "copies"), strict=True)),
    **dict(zip(IDLE, ("host", "latency", "wait", "unattributed"), strict=True)),
    **{REPLAY: "replay", UNKNOWN: "unknown"},
}
"""CSS class of each part."""

_SHOWN = [at for at, name in enumerate(PARTS) if name in _STYLES]
_PICKS = {"memcpy": "copy", UNKNOWN: CAUSES[UNKNOWN_TIME]}
"""What the timeline calls a part, where it has another name."""

_PROBLEMS = {
    "exposed communication": ("communication", "unmatched-collectives"),
    "exposed memcpy": ("memcpy",),
    "host-bound idle": ("long-gaps", "short-gaps"),
    "launch latency": ("launch-latency",),
    "collective wait": ("collective-wait",),
    "unattributed idle": ("unattributed-idle",),
}
"""Problems that each kind of lost time is about."""

_LEAST = 0.0005  # Share of the bar from which a part is in its legend.
_MAX_DEVICE_BARS = 8
_MAX_STAGES = 12
_MAX_KERNELS = 300
_MAX_CALLS = 6  # Longest calls of collectives.
_MAX_CALL_RANKS = 8  # Ranks of each of them.
_MAX_LINK_ENDS = 32
_MAX_DOUBTS = 3
_NOTHING_TO_EXCHANGE = "One rank: there is nothing to exchange."
_NO_COLLECTIVE = (
    "No collective was recorded. Capture a step in which ranks exchange data, on all ranks."
)
_NO_MEMORY = (
    "Not recorded. torch.profiler and torch_npu: profile_memory=True. "
    "nsys: --cuda-memory-usage=true."
)
_UNNAMED = "kernel without a name"
_PASSED = ("ranks", "kernel/launch match", "clocks", "steps")


class Segment(NamedTuple):
    """A part of a bar: its name, CSS class, share of the bar, and time."""

    name: str
    style: str
    share: float
    ns: int

    @property
    def pick(self) -> str:
        """The class of work or cause of idle time that a press on it picks out in all charts."""
        return _pick(self.name)


class Bar(NamedTuple):
    """A bar: what it is of, its parts, what is hidden behind them, and its length.

    Attributes:
        label: What the time is of.
        segments: Its parts, which add up to ``ns``.
        hidden: What ran at the same time, as shares of ``ns``.
        ns: The time it divides.
        busy: Share of it in which something ran.
        width: Its length beside the longest bar.
    """

    label: str
    segments: list[Segment]
    hidden: list[Segment]
    ns: int
    busy: float
    width: float = 1.0

    @property
    def legend(self) -> list[Segment]:
        """The parts that are large enough to be named."""
        return [part for part in self.segments if part.share >= _LEAST]


class KernelRow(NamedTuple):
    """All kernels of one short name; ``full`` are their names in the trace.

    ``of_peak`` is None unless the shapes that they multiply and the device's peak are known.
    """

    short: str
    full: str
    kind: str
    style: str
    share: float
    total: int
    calls: int
    p50: int
    p95: int
    of_peak: float | None


class CallRow(NamedTuple):
    """The calls of a collective, or one call, with a bar of transfer, wait and unknown time."""

    name: str
    detail: str
    segments: list[Segment]
    ns: int
    width: float
    row: Mapping[str, Any] = {}


class LongCallRow(NamedTuple):
    """A collective with a bar per rank, which end together; of one rank a text instead."""

    call: LongCall
    ns: int
    bars: list[CallRow]
    text: str


class LinkCell(NamedTuple):
    """A link: its bandwidth, as a part of the fastest one's too, and what it is made of."""

    gb_s: float
    part: float
    slow: bool
    title: str


class LinkMatrix(NamedTuple):
    """Links by source and destination: ends shown, and how many there are in all."""

    destinations: list[str]
    rows: list[tuple[str, list[LinkCell | None]]]
    shown: int
    ends: int


class DeviceCharts:
    """What the devices of a run did, as the report draws it.

    Args:
        spans: The run.
    """

    def __init__(self, spans: Spans) -> None:
        self.spans, self.time = spans, device_time(spans)
        self.staged = len(spans.rows(kind="stage")) > 0

    @cached_property
    def bar(self) -> Bar:
        """The time of all devices, without what was not profiled and the recording's edges."""
        return self._bar("", self.time.ns.sum(axis=(0, 1)), self.time.overlapped.sum(axis=(0, 1)))

    def _bar(self, label: str, ns: Int64s, hidden: Int64s, longest: int = 0) -> Bar:
        whole = int(ns[_SHOWN].sum())

        def parts(names: Iterable[str], times: Int64s) -> list[Segment]:
            return [
                Segment(name, _STYLES[name], own / max(whole, 1), own)
                for name, own in zip(names, times.tolist(), strict=True)
                if own
            ]

        segments = parts([PARTS[at] for at in _SHOWN], ns[_SHOWN])
        busy = float(ns[: len(WORK)].sum()) / max(whole, 1)
        width = whole / longest if longest else 1.0
        return Bar(label, segments, parts(OVERLAPPED, hidden), whole, busy, width)

    @property
    def at_edges(self) -> int:
        """Time at the edges of the recording, of all devices."""
        return int(self.time.ns[:, :, PARTS.index(EDGE)].sum())

    @property
    def per_device(self) -> int:
        """Mean time of a device that the bar divides."""
        return round(self.bar.ns / max(1, len(self.time.places)))

    @property
    def is_least(self) -> bool:
        """Whether devices may have been busier, because some of their time is unknown."""
        return any(
            part.name in (REPLAY, UNKNOWN) and part.share >= _LEAST for part in self.bar.segments
        )

    @property
    def captures(self) -> bool:
        """Whether the profiler recorded only a part of the run."""
        return len(self.spans.flagged("capture")) > 0

    @property
    def captured_steps(self) -> int:
        """How many steps the profiler recorded."""
        steps = self.spans.rows(kind="step")
        own = self.spans.step[steps]
        captured = np.isin(own, self.spans.step[self.spans.flagged("capture")])
        return len(np.unique(own[captured] if captured.any() else own))

    @property
    def work_text(self) -> str:
        """How much was recorded: ``1,465 kernels, 242 copies on 1 stream``."""
        time = self.time
        found = [_count(time.kernels, "kernel", "kernels"), _count(time.copies, "copy", "copies")]
        text = ", ".join(each for each in found if each)
        return f"{text} on {_count(time.streams, 'stream', 'streams')}"

    @property
    def largest_loss(self) -> Segment | None:
        """The part with most time that is not compute, if devices lost any."""
        lost = [
            part
            for part in self.bar.segments
            if part.name not in (*COMPUTE_CLASSES, REPLAY, UNKNOWN)
        ]
        return max(lost, key=lambda part: part.ns, default=None)

    def open_questions(self, undecided: Sequence[Undecided]) -> list[Undecided]:
        """Return which of the undecided problems are about the largest loss."""
        about = _PROBLEMS.get(self.largest_loss.name, ()) if self.largest_loss else ()
        return [each for each in undecided if each.id in about]

    @cached_property
    def columns(self) -> list[tuple[str, str, str]]:
        """Each kind of work over time: CSS class, name to pick out, and SVG path.

        Its height is 100 where every device is busy.
        """
        columns, length = self.time.columns, self.time.end_ns - self.time.start_ns
        capacity = max(1.0, length / max(1, len(columns)) * len(self.time.places))
        tops = 100 * (1 - np.cumsum(columns, axis=1).clip(max=capacity) / capacity)
        found = []
        for at, name in enumerate(WORK):
            low = tops[:, at - 1] if at else np.full(len(columns), 100.0)
            path = "".join(
                f"M{x} {low[x]:.1f}V{tops[x, at]:.1f}h1V{low[x]:.1f}z"
                for x in np.flatnonzero(low - tops[:, at] >= 0.05).tolist()
            )
            if path:
                found.append((_STYLES[name], _pick(name), path))
        return found

    @cached_property
    def devices(self) -> list[Bar]:
        """A bar per device of 2 to 8; of more the least busy, the median and the most busy."""
        of_rank = len({rank for rank, _ in self.time.places}) == len(self.time.places)
        bars = []
        for at, (rank, device) in enumerate(self.time.places):
            label = f"rank {rank}" if of_rank else f"rank {rank}, device {_known(device)}"
            own = self.time.ns[at].sum(axis=0), self.time.overlapped[at].sum(axis=0)
            bars.append(self._bar(label, *own))
        if len(bars) > _MAX_DEVICE_BARS:
            ranked = sorted(bars, key=lambda bar: bar.busy)
            chosen = {"least busy": 0, "median": len(bars) // 2, "most busy": len(bars) - 1}
            return [
                ranked[at]._replace(label=f"{name}: {ranked[at].label}")
                for name, at in chosen.items()
            ]
        return bars if len(bars) > 1 else []

    @cached_property
    def stages(self) -> list[Bar]:
        """The time of devices by stage of the run, or what each annotation launched."""
        if self.staged:
            ns, hidden = self.time.ns.sum(axis=0), self.time.overlapped.sum(axis=0)
            walls = ns[:, _SHOWN].sum(axis=1)
            order = [at for at in np.argsort(-walls, kind="stable").tolist() if walls[at]]
            order = [*(at for at in order if at), *(at for at in order if not at)]
            return [
                self._bar(self.time.stages[at], ns[at], hidden[at], int(walls.max()))
                for at in order
            ]
        found = annotation_times(self.spans)
        if not any(each.name for each in found):
            return []
        longest = int(found[0].ns.sum())
        rest = np.zeros(len(PARTS) - len(WORK), np.int64)
        none = np.zeros(len(OVERLAPPED), np.int64)
        bars = [
            self._bar(each.name or "no annotation", np.append(each.ns, rest), none, longest)
            for each in found[:_MAX_STAGES]
        ]
        # A kernel counts here for as long as it ran, so nothing is exposed or overlapped.
        return [
            bar._replace(
                segments=[
                    part._replace(name=part.name.removeprefix("exposed ")) for part in bar.segments
                ]
            )
            for bar in bars
        ]

    @cached_property
    def kernels(self) -> list[KernelRow]:
        """The rows of the table `kernels`, those first that take most of the devices' time."""
        found = kernels(self.spans, top=_MAX_KERNELS)
        if found.abstained is not None:
            return []
        peaks = kernel_peaks(self.spans)
        return [_kernel_row(row, peaks.get(row["short name"])) for row in rows_of(found)]

    @property
    def kernel_ns(self) -> int:
        """Time of all kernels and copies, each for as long as it ran."""
        return sum(row.total for row in self.kernels)

    @property
    def stages_bar(self) -> Bar:
        """All parts that the bars of `stages` have, for their legend."""
        found = {part.style: part for bar in self.stages for part in bar.legend}
        parts = [found[style] for style in dict.fromkeys(_STYLES.values()) if style in found]
        return Bar("", parts, [], 0, 0.0)

    @property
    def communication_lead(self) -> str:
        """How much of the time is exposed, and how much is known of transfer and wait."""
        ns = {part.name: part.ns for part in (*self.bar.segments, *self.bar.hidden)}
        shown, hidden = (ns.get(name, 0) for name in ("exposed communication", OVERLAPPED[0]))
        text = f"{percent(shown / max(1, self.bar.ns))} of device time is exposed"
        if shown + hidden:
            text += f"; compute hides {percent(hidden / (shown + hidden))} of communication"
        here, world = len(self.spans.ranks), world_size(self.spans)
        if here == 1:
            return f"{text}. Only one rank is here, so transfer and wait are unknown."
        if here < world:
            text += (
                f". {here} of {world} ranks are here: transfer is at most as shown, wait at least"
            )
        return f"{text}."

    @property
    def not_recorded(self) -> list[tuple[str, str]]:
        """What a trace of devices can show and this one lacks, with what records it."""
        found = []
        if self.bar.ns and self.calls is None:
            alone = world_size(self.spans) == 1
            found.append(("Communication", _NOTHING_TO_EXCHANGE if alone else _NO_COLLECTIVE))
        if self.bar.ns and "memory" not in self.spans.tables:
            found.append(("Memory", _NO_MEMORY))
        return found

    @cached_property
    def calls(self) -> CallTimes | None:
        """The calls of collectives, each divided; None if no profiler recorded any."""
        return call_times(self.spans)

    def collectives(self, rows: Sequence[Mapping[str, Any]]) -> list[CallRow]:
        """Return a bar of transfer, wait and unknown time for each row of `communication`."""
        if self.calls is None or not rows:
            return []
        names = ("operation", "group", "stage")
        places = {tuple(row[name] for name in names): at for at, row in enumerate(rows)}
        place = np.array([places[key] for key in self.calls.keys], np.int64)
        sums = [
            np.bincount(place, ns, len(rows)).astype(np.int64).tolist()
            for ns in (self.calls.took_ns, self.calls.transfer_ns, self.calls.wait_ns)
        ]
        most = max(sums[0])
        groups = len({row["group"] for row in rows}) > 1
        return [
            CallRow(
                row["operation"] or "other",
                ", ".join(str(row[key]) for key in ["stage", "group"][: 1 + groups] if row[key]),
                _call_segments(*own),
                own[0],
                own[0] / max(1, most),
                row,
            )
            for row, *own in zip(rows, *sums, strict=True)
        ]

    @cached_property
    def longest_calls(self) -> list[LongCallRow]:
        """The collectives that took longest, rank by rank."""
        found = [] if self.calls is None else self.calls.longest(_MAX_CALLS)
        return [_long_call_row(call, several=len(self.spans.ranks) > 1) for call in found]

    @cached_property
    def links(self) -> tuple[LinkMatrix | None, str]:
        """How fast each link is, by its ends, and what to know of it; None if no link is known."""
        found, note = link_speeds(self.spans)
        return _link_matrix(found) if found else None, note


def _kernel_row(row: Mapping[str, Any], of_peak: float | None) -> KernelRow:
    kind = row["class"] if row["kind"] == "compute" else row["kind"]
    return KernelRow(
        short=row["short name"] or _UNNAMED,
        full=row["kernel"] or _UNNAMED,
        kind=kind or "other",
        style={"copy": "copies"}.get(kind, (kind or "other").replace("data ", "")),
        share=row["share"] or 0,
        total=row["total"],
        calls=row["count"],
        p50=row["p50"],
        p95=row["p95"],
        of_peak=of_peak,
    )


def trust(checks: Sequence[Check], steps: int) -> list[tuple[str, str, str]]:
    """Return how far a trace can be trusted: state, check, and what was found; doubts first.

    Args:
        checks: Of the recording.
        steps: How many steps were recorded.
    """
    doubts = [(each.state, each.name, each.detail) for each in checks if each.state == "warn"]
    more = len(doubts) - _MAX_DOUBTS
    if more > 0:
        rest = f"{more} more doubt{'s' * (more > 1)}, see data quality"
        doubts = [*doubts[:_MAX_DOUBTS], ("warn", "and", rest)]
    passed = [
        (each.state, each.name, each.detail)
        for each in checks
        if each.state == "ok" and each.name in _PASSED
    ]
    few = [("", "steps", f"{steps}: no spread from step to step")] if 0 < steps < 3 else []
    return [*doubts, *(each for each in passed if not few or each[1] != "steps"), *few]


def _long_call_row(call: LongCall, *, several: bool) -> LongCallRow:
    """Return a call with a bar per rank, of very many ranks some from the first to the last."""
    longest = max(1, call.ranks[0][1])
    if len(call.ranks) == 1:
        why = ": no other rank has it" if several else " is here"
        return LongCallRow(call, longest, [], f"only rank {call.ranks[0][0]}{why}")
    chosen = np.linspace(0, len(call.ranks) - 1, min(len(call.ranks), _MAX_CALL_RANKS)).astype(int)
    transfer = call.transfer_ns or 0
    bars = []
    for rank, took in (call.ranks[at] for at in chosen.tolist()):
        parts = _call_segments(took, transfer, took - transfer)[::-1]  # A rank waits first.
        bars.append(CallRow(str(rank), "", parts, took, took / longest))
    more = len(call.ranks) - len(bars)
    return LongCallRow(call, longest, bars, f"{more} more ranks" if more else "")


def _link_matrix(found: Sequence[LinkSpeed]) -> LinkMatrix:
    """Return links, slowest first, by their ends; of very many ends those of the slowest links."""
    every = dict.fromkeys(end for link in found for end in (link.source, link.destination))
    shown = {*[*every][:_MAX_LINK_ENDS]}
    pairs: dict[tuple[End, End], list[LinkSpeed]] = {}
    for link in found:
        if link.source in shown and link.destination in shown:
            pairs.setdefault((link.source, link.destination), []).append(link)
    cells = {pair: _link_cell(own) for pair, own in pairs.items()}
    most = max(cell.gb_s for cell in cells.values())
    cells = {pair: cell._replace(part=cell.gb_s / most) for pair, cell in cells.items()}
    sources, destinations = (sorted({pair[at] for pair in cells}) for at in (0, 1))
    rows = [(each.name, [cells.get((each, to)) for to in destinations]) for each in sources]
    return LinkMatrix([each.name for each in destinations], rows, len(shown), len(every))


def _link_cell(own: Sequence[LinkSpeed]) -> LinkCell:
    """Return a link as one cell, its transports together."""
    moved, took = sum(link.size for link in own), sum(link.time for link in own)
    over = ", ".join(dict.fromkeys(link.transport for link in own if link.transport))
    title = f"{size(moved)} in {duration(took)}{' over ' if over else ''}{over}"
    for link in own:
        if link.ratio is not None:
            title += f"; {link.ratio:.2f}x the speed of comparable links: {link.verdict}"
    return LinkCell(moved / took, 1.0, any(link.verdict == "slow" for link in own), title)


def _call_segments(took: int, transfer: int, wait: int) -> list[Segment]:
    rest = took - transfer - wait
    parts = (
        ("transfer", "communication", transfer),
        ("wait", "wait", wait),
        ("unknown", "pale", rest),
    )
    return [Segment(name, style, ns / max(1, took), ns) for name, style, ns in parts if ns]


def _pick(part: str) -> str:
    name = part.removeprefix("exposed ").removeprefix("overlapped ")
    return _PICKS.get(name, name)


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}" if number else ""


def _known(device: int | None) -> str:
    return "?" if device is None else str(device)

"""A written Chrome trace as its tracks, read as strictly as Perfetto draws them."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from lightning_rlprof.report.chrome_trace import write_trace
from lightning_rlprof.report.device_tracks import DeviceTracks
from lightning_rlprof.tables.spans import Spans

Event = dict[str, Any]


class Slice(NamedTuple):
    """One slice; times in nanoseconds, depth from 0."""

    name: str
    category: str
    start: int
    end: int
    depth: int
    args: dict[str, Any]


class Tracks:
    """Slices by process and track, counters, and arrows of a trace that is written for it.

    Attributes:
        slices: By names of process and track, in order.
        counters: (time, value) by names of process and counter.
        flows: (slice that it leaves, slice that it reaches) of each arrow.
        other: The metadata.
    """

    def __init__(self, spans: Spans, path: Path, *, kernels: bool = False) -> None:
        write_trace(spans, path, devices=DeviceTracks(spans) if kernels else None)
        found = json.loads(path.read_text(), parse_float=str)
        events, self.other = found["traceEvents"], found["otherData"]
        meta = {(e["pid"], e["tid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
        processes = {pid: a["name"] for (pid, _, n), a in meta.items() if n == "process_name"}
        self._tracks = {
            (pid, tid): (processes[pid], args["name"])
            for (pid, tid, name), args in meta.items()
            if name == "thread_name"
        }
        assert len({*self._tracks.values()}) == len(self._tracks), "two tracks have one name"
        self.slices: dict[tuple[str, str], list[Slice]] = {k: [] for k in self._tracks.values()}
        open_ends: dict[tuple[int, int], list[int]] = {}
        order = [e for e in events if e["ph"] == "X"]
        for event in sorted(order, key=lambda e: _ns(e["ts"])):  # stable, as Perfetto sorts
            place = event["pid"], event["tid"]
            start = _ns(event["ts"])
            end, ends = start + _ns(event["dur"]), open_ends.setdefault(place, [])
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or end <= ends[-1], f"{event} does not nest: Perfetto drops it"
            own = Slice(event["name"], event["cat"], start, end, len(ends), event.get("args", {}))
            self.slices[self._tracks[place]].append(own)
            ends.append(end)
        self.counters: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for event in events:
            if event["ph"] == "C":
                points = self.counters.setdefault((processes[event["pid"]], event["name"]), [])
                points.append((_ns(event["ts"]), float(event["args"]["value"])))
                assert points == sorted(points, key=lambda point: point[0])
        begins = {event["id"]: event for event in events if event["ph"] == "s"}
        ends_of = [event for event in events if event["ph"] == "f"]
        assert len(begins) == len(ends_of)
        assert all(_ns(begins[each["id"]]["ts"]) <= _ns(each["ts"]) for each in ends_of)
        self.flows = [(self._at(begins[each["id"]]), self._at(each)) for each in ends_of]

    def _at(self, event: Event) -> tuple[str, Slice]:
        """Return process and innermost slice of one end of an arrow, which Perfetto drops else."""
        process, track = self._tracks[event["pid"], event["tid"]]
        time = _ns(event["ts"])
        around = [s for s in self.slices[process, track] if s.start <= time < s.end]
        assert around, f"{event} is in no slice"
        return process, max(around, key=lambda each: each.depth)


def _ns(micro: str) -> int:
    whole, _, part = str(micro).partition(".")
    return int(whole) * 1000 + int(f"{part:0<3}" or 0)

"""Events of torch.profiler's traces as columns: kernels, launches and annotations, no others."""

import decimal
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from lightning_rlprof.spans import Int64s

__all__ = [
    "ANNOTATION",
    "DEVICE_ANNOTATION",
    "KERNEL",
    "LARGEST_TIME",
    "LAUNCH",
    "MISSING",
    "MOST_LANES",
    "NO_TIME",
    "ChromeColumns",
    "Event",
    "nanoseconds",
]

KERNEL, LAUNCH, ANNOTATION, DEVICE_ANNOTATION = range(4)
"""What is kept: a device's work, calls of its driver, marked ranges, their shadow on the device."""

MISSING = -1
"""Stands for an id that an event does not have."""

LARGEST_TIME = 2**62
"""Times beyond it, in nanoseconds, are damage: the year 2116. Sums of two fit into 64 bits."""

NO_TIME = -(2**63)
"""Stands for what is no time, or beyond `LARGEST_TIME`."""

MOST_LANES = 4_096
"""Threads that are told apart; the largest hosts run a few hundred in one process."""

_DRIVERS = ("cuda", "hip", "xpu", "mtia", "musa", "privateuse1")
_LAUNCHING = [f"{driver}_{api}" for driver in _DRIVERS for api in ("runtime", "driver")]
_WANTED = {
    **dict.fromkeys(("kernel", "Kernel"), KERNEL),  # with capitals in torch 1.8
    **dict.fromkeys((*_LAUNCHING, "Runtime"), LAUNCH),
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": DEVICE_ANNOTATION,
}
_ALWAYS = ("start_ns", "lane", "name")
_KEPT = {
    KERNEL: (*_ALWAYS, "end_ns", "launch", "device", "stream"),
    LAUNCH: (*_ALWAYS, "launch"),
    ANNOTATION: (*_ALWAYS, "end_ns"),
    DEVICE_ANNOTATION: (*_ALWAYS, "end_ns"),
}
_NARROW = {"lane", "name"}  # codes; half the memory of a trace with millions of launches

_Id = int | float | str | None  # as found in real traces: 7, "stream 7", "PyTorch Profiler", null


class _Args(msgspec.Struct, gc=False):
    device: _Id = None
    stream: _Id = None
    correlation: _Id = None
    external: _Id = msgspec.field(default=None, name="External id")
    name: msgspec.Raw = msgspec.Raw()


_NO_ARGS = _Args()


class Event(msgspec.Struct, gc=False):
    """What is decoded of one event; times stay as they are written."""

    name: str | None = None
    ph: str = ""
    cat: str | None = None
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    pid: _Id = None
    tid: _Id = None
    args: _Args | None = None


class _Codes(dict[Any, int]):
    """Numbers for values in the order in which they come; the last one stands for all beyond."""

    def __init__(self, most: int = 2**31 - 1) -> None:
        self._most = most

    def __missing__(self, value: Any) -> int:
        code = len(self)
        if code >= self._most:
            return self._most - 1
        self[value] = code
        return code


class ChromeColumns:
    """Columns that grow with every batch of events; no event is kept.

    Attributes:
        names: Codes of names.
        lanes: Codes of (pid, tid).
        thread_names: What the trace calls its (pid, tid).
        lost: Events left out because their times cannot be true.
        unpaired: Events left out because they are only a beginning, as torch writes none.
    """

    def __init__(self) -> None:
        self.names = _Codes()
        self.lanes = _Codes(MOST_LANES)
        self.thread_names: dict[tuple[_Id, _Id], str] = {}
        self.lost = self.unpaired = 0
        self._parts: dict[int, dict[str, list[Any]]] = {
            kind: {column: [] for column in columns} for kind, columns in _KEPT.items()
        }

    @property
    def crowded(self) -> bool:
        """Tell whether threads had to be taken as one."""
        return len(self.lanes) >= MOST_LANES

    def add(self, events: Iterable[Event]) -> None:
        """Add what is wanted of a batch."""
        found: list[list[Event]] = [[] for _ in _KEPT]
        for event in events:
            kind = _WANTED.get(event.cat)  # type: ignore[arg-type]
            if kind is not None:
                if event.ph == "X":
                    found[kind].append(event)
                else:
                    self.unpaired += event.ph in ("B", "b")
            elif event.ph == "M" and event.name == "thread_name":
                self._name_thread(event)
        for kind, own in enumerate(found):
            if own:
                self._take(kind, own)

    def rows(self, kind: int) -> dict[str, Int64s]:
        """Return the columns of one kind, in the order of the file, and forget them.

        Columns: start_ns, end_ns, lane, name, launch (`KERNEL` and `LAUNCH`: equal where they
        belong together, `MISSING` if unknown), device and stream (`KERNEL`).
        """
        parts, joined = self._parts[kind], {}
        for column in _KEPT[kind]:
            arrays = parts.pop(column)
            joined[column] = np.concatenate([np.empty(0, np.int64), *arrays])
        return joined

    def _take(self, kind: int, events: list[Event]) -> None:
        lanes, names = self.lanes, self.names
        start = nanoseconds([event.ts for event in events])
        sound = start != NO_TIME
        found: dict[str, Any] = {
            "start_ns": start,
            "lane": [lanes[event.pid, event.tid] for event in events],
            "name": [names[event.name or ""] for event in events],
        }
        if kind != LAUNCH:
            length = nanoseconds([event.dur for event in events])
            found["end_ns"] = start + length
            sound &= (length >= 0) & (found["end_ns"] < LARGEST_TIME)
        if kind in (KERNEL, LAUNCH):
            args = [event.args or _NO_ARGS for event in events]
            found["launch"] = _launches(args)
        if kind == KERNEL:
            found["device"] = _integers([each.device for each in args])
            found["stream"] = _integers([each.stream for each in args])
        lost = int(np.count_nonzero(~sound))
        self.lost += lost
        for column, values in found.items():
            array = np.asarray(values, np.int32 if column in _NARROW else np.int64)
            self._parts[kind][column].append(array[sound] if lost else array)

    def _name_thread(self, event: Event) -> None:
        try:
            name = msgspec.json.decode(event.args.name if event.args else b"", type=str)
        except ValueError:
            return
        if len(self.thread_names) < MOST_LANES:
            self.thread_names[event.pid, event.tid] = name


def _launches(args: list[_Args]) -> Int64s:
    """Return what kernels and their launches have in common: correlation, else External id."""
    found = _integers([each.correlation for each in args])
    if np.all(found >= 0):
        return found
    external = _integers([each.external for each in args])
    # Below `MISSING`, so that the two kinds of number never meet.
    return np.where(found >= 0, found, np.where(external >= 0, -2 - external, MISSING))


def _integers(values: list[Any]) -> Int64s:
    if set(map(type, values)) != {int} or max(map(abs, values)) >= LARGEST_TIME:
        values = [_integer(value) for value in values]
    return np.array(values, np.int64)


def _integer(value: _Id) -> int:
    if isinstance(value, str):
        value = int(value) if value.isascii() and value.isdigit() and len(value) < 19 else None
    return MISSING if value is None or abs(value) >= LARGEST_TIME else int(value)


_FLOATS, _INTS = msgspec.json.Decoder(list[float]), msgspec.json.Decoder(list[int])
_EXACT = decimal.Context(prec=40, traps=[])


def nanoseconds(texts: list[msgspec.Raw]) -> Int64s:
    """Turn microseconds as they are written into nanoseconds, exactly; `NO_TIME` for other texts.

    Below 2**43 µs (101 days; torch counts from the beginning of a quarter) neighbouring doubles are
    less than 0.001 apart, so that the whole part is exact and the nearest thousandth of the rest is
    the one that was written. Multiplying first would not do: x * 1000 rounds wrongly near 2**42.

    Example::

        >>> nanoseconds([msgspec.Raw(b"4398046511104.001"), msgspec.Raw(b"null")]).tolist()[0]
        4398046511104001
    """
    joined = b"[" + b",".join(texts) + b"]"
    try:
        floats = np.array(_FLOATS.decode(joined), np.float64)
        if len(floats) == len(texts) and np.all(np.abs(floats) < 2**43):
            whole = np.floor(floats)
            return whole.astype(np.int64) * 1000 + np.rint((floats - whole) * 1000).astype(np.int64)
        integers = _INTS.decode(joined)
        if max(map(abs, integers)) < LARGEST_TIME // 1000:
            return np.array(integers, np.int64) * 1000
    except ValueError:
        pass
    return np.fromiter((_exactly(bytes(text)) for text in texts), np.int64, len(texts))


def _exactly(text: bytes) -> int:
    value = _EXACT.multiply(_EXACT.create_decimal(text.decode("latin-1")), 1000)
    if not value.is_finite() or abs(value) >= LARGEST_TIME:
        return NO_TIME
    return int(_EXACT.to_integral_value(value))

"""What a reader must know about a run beside its figures: size, end, set-up, what is missing."""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import numpy as np

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.report.terminal import duration
from lightning_rlprof.tables.spans import Spans
from lightning_rlprof.tables.table import Table


class Fact(NamedTuple):
    """A name and its value."""

    name: str
    value: str


class Remark(NamedTuple):
    """What one or more ranks have to say; ``who`` is empty for the whole run."""

    who: str
    text: str


def facts(spans: Spans) -> list[str]:
    """Return the run in a handful of words: ranks, device, steps, time, date."""
    headers = spans.headers.values()
    world = max((header.world_size for header in headers), default=0)
    steps = len(np.unique(spans.step[spans.rows(kind="step")]))
    length = int(spans.end_ns.max() - spans.start_ns.min()) if len(spans) else 0
    ranks = len(spans.ranks)
    of = f" of {world:,}" if world > ranks else ""
    devices = sorted({header.hardware for header in headers})
    found = [
        f"{ranks:,}{of} {'rank' if max(ranks, world) == 1 else 'ranks'}",
        ", ".join("CPU" if device == "cpu" else device for device in devices),
        f"{steps:,} {'step' if steps == 1 else 'steps'}",
        duration(length) if length else "",
        _date(spans.unix_ns) if spans.unix_ns else "",
    ]
    return [fact for fact in found if fact]


def environment(spans: Spans) -> list[Fact]:
    """Return where the run was recorded, and how it ended."""
    headers = spans.headers.values()
    ended = [status == "finished" for status in spans.statuses.values()]
    hosts = sorted({header.host for header in headers})
    numbers = np.unique(spans.step[spans.rows(kind="step")])
    found = [
        Fact("Host" if len(hosts) == 1 else f"{len(hosts)} hosts", _few(hosts)),
        Fact("Device", ", ".join(sorted({header.hardware for header in headers}))),
        Fact("Steps", f"{numbers[0]}–{numbers[-1]}" if len(numbers) else ""),
        Fact("Ended", "finished" if all(ended) else f"{sum(ended)} of {len(ended)} finished"),
        Fact("Recorded", f"{len(spans):,} spans"),
        Fact("Directory", str(spans.path)),
    ]
    return [fact for fact in found if fact.value]


class Check(NamedTuple):
    """One check of the data: ``ok``, ``warn``, or ``not checked``."""

    name: str
    state: str
    detail: str


def checks(table: Table | None, missing: Sequence[Remark]) -> list[Check]:
    """Return the checks of the data; without that table, whether anything is missing."""
    if table is not None and not table.abstained:
        return [Check(*map(str, row)) for row in table.rows]
    state = "warn" if missing else "ok"
    return [Check("files", state, "see below" if missing else "every line could be read")]


def changed_settings(config: Sequence[Fact]) -> list[tuple[str, str, str]]:
    """Return the settings that differ from the defaults: key, default and value."""
    default = dict(_flat(ProfilerConfig().dump()))
    return [
        (fact.name, default[fact.name], fact.value)
        for fact in config
        if fact.name in default and default[fact.name] != fact.value
    ]


def missing(spans: Spans) -> list[Remark]:
    """Return what is missing or doubtful, ranks with the same trouble together."""
    notes = ((note.rank, note.text) for note in spans.notes if note.level != "info")
    return _grouped([*((problem.rank, problem.text) for problem in spans.warnings), *notes])


def remarks(spans: Spans) -> list[Remark]:
    """Return what was noted for information only."""
    return _grouped((note.rank, note.text) for note in spans.notes if note.level == "info")


def configuration(spans: Spans) -> list[Fact]:
    """Return the configuration by dotted key; where ranks differ, each value and its ranks."""
    return _agreed({rank: header.config for rank, header in spans.headers.items()})


def versions(spans: Spans) -> list[Fact]:
    """Return the versions of what was running; where ranks differ, each value and its ranks."""
    return _agreed({rank: header.versions for rank, header in spans.headers.items()})


def _agreed(values: Mapping[int, Mapping[str, Any]]) -> list[Fact]:
    """Return facts by dotted key. Ranks that agree in all are looked at once."""
    alike: dict[str, list[int]] = {}
    for rank, own in values.items():
        alike.setdefault(json.dumps(own, default=str), []).append(rank)
    table: dict[str, dict[str, list[int]]] = {}
    for ranks in alike.values():
        for key, value in _flat(values[ranks[0]]):
            table.setdefault(key, {}).setdefault(value, []).extend(ranks)
    rows = []
    for key, found in table.items():
        agreed = len(found) == 1 and len(next(iter(found.values()))) == len(values)
        parts = [value if agreed else f"{value} ({_ranks(who)})" for value, who in found.items()]
        rows.append(Fact(key, "; ".join(parts)))
    return rows


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item if isinstance(item, str) else json.dumps(item, default=str)


def _grouped(items: Iterable[tuple[int | None, str]]) -> list[Remark]:
    groups: dict[tuple[bool, str], list[int]] = {}
    for rank, text in items:
        groups.setdefault((rank is None, text), []).extend([] if rank is None else [rank])
    return [Remark(_ranks(ranks), text) for (_, text), ranks in groups.items()]


def _ranks(ranks: Iterable[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0-7, 9``, and nothing for none."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    if not runs:
        return ""
    text = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"


def _date(unix_ns: int) -> str:
    # Unlike fromtimestamp, a sum is right on every platform for what a damaged header may say.
    moment = datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=unix_ns // 10**9)
    return f"{moment:%Y-%m-%d %H:%M} UTC"


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", … and {len(names) - 3} more" if len(names) > 3 else "")

"""The figures of a run that is being written as metrics, and in the text format of Prometheus."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_rlprof.loaders.live_run import LATELY, LiveRank, LiveRun
from lightning_rlprof.report.live_view import LiveView, RecentTimes, device_memory, resident
from lightning_rlprof.tables.table import rows_of

BACKGROUND = "rlprof_background_"
"""Start of the names of background metrics; the rest is the name that the run has."""

_NO_NAME = re.compile(r"[^a-zA-Z0-9_]")

GAUGES: Mapping[str, str] = {
    "rlprof_run_info": "1; the labels name the run and its device",
    "rlprof_world_size_ranks": "Ranks that the run has",
    "rlprof_ranks": "Ranks that have written",
    "rlprof_ended_ranks": "Ranks that have ended",
    "rlprof_alarms": "Alarms by level",
    "rlprof_step": "Last step that has ended",
    "rlprof_step_duration_seconds": "Time of the last step",
    "rlprof_step_duration_median_seconds": f"Median time of the last {LATELY} steps",
    "rlprof_stage_duration_seconds": f"Mean time of a stage per step, of the last {LATELY} steps",
    "rlprof_stage_tokens_per_second": f"Tokens per second in a stage, of the last {LATELY} steps",
    "rlprof_stage_mfu_ratio": f"MFU of a stage, of all ranks, of the last {LATELY} steps",
    "rlprof_resident_memory_bytes": "Resident memory on the host, with child processes",
    "rlprof_device_memory_bytes": "Memory that is in use on the device",
    "rlprof_quiet_seconds": "Time since the rank has written; absent when it has ended",
}
"""Names and meanings. All are gauges, as a run that is resumed begins again."""


class Sample(NamedTuple):
    """A value of a metric, with its labels."""

    name: str
    labels: Mapping[str, str]
    value: float


class Gauge(NamedTuple):
    """A metric: its name, its meaning, and its samples, of which there is at least one."""

    name: str
    meaning: str
    samples: list[Sample]


def gauges(run: LiveRun, view: LiveView) -> list[Gauge]:
    """Return all metrics; one that is not known is absent."""
    by_name: dict[str, list[Sample]] = {name: [] for name in GAUGES}
    for sample in _samples(run, view):
        by_name.setdefault(sample.name, []).append(sample)
    return [
        Gauge(name, GAUGES.get(name) or f"Background metric {name.removeprefix(BACKGROUND)}", found)
        for name, found in by_name.items()
        if found
    ]


def exposition(found: Iterable[Gauge]) -> str:
    """Return metrics as the text that Prometheus reads."""
    lines = []
    for name, meaning, samples in found:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(each.labels)} {each.value!r}" for each in samples]
    return "".join(f"{line}\n" for line in lines)


def _samples(run: LiveRun, view: LiveView) -> Iterator[Sample]:
    ranks = [run.ranks[number] for number in sorted(run.ranks)]
    headers = [each.header for each in ranks if each.header is not None]
    if headers:
        labels = {"run": run.run.resolve().name, "device": headers[0].hardware}
        yield Sample("rlprof_run_info", labels, 1)
        yield Sample("rlprof_world_size_ranks", {}, run.world_size)
    yield Sample("rlprof_ranks", {}, len(ranks))
    ended = sum(each.status is not None for each in ranks)
    yield Sample("rlprof_ended_ranks", {}, ended)
    levels = view.alarms.column("level")
    for level in ("warning", "error"):
        yield Sample("rlprof_alarms", {"level": level}, levels.count(level))
    for stage, mfu in zip(view.stages.column("stage"), view.stages.column("MFU"), strict=True):
        if isinstance(mfu, float):
            yield Sample("rlprof_stage_mfu_ratio", {"stage": str(stage)}, mfu)
    rates = [] if view.times.rates is None else rows_of(view.times.rates)
    for each in ranks:
        yield from _of_rank(run, each, view.times)
        labels = {"rank": str(each.rank), "role": each.role}
        for row in rates:
            per_s = row["tokens/s in stage"]
            if row["rank"] == each.rank and isinstance(per_s, float):
                of_stage = {**labels, "stage": row["stage"]}
                yield Sample("rlprof_stage_tokens_per_second", of_stage, per_s)


def _of_rank(run: LiveRun, rank: LiveRank, times: RecentTimes) -> Iterator[Sample]:
    labels = {"rank": str(rank.rank), "role": rank.role}
    own = times.steps.get(rank.rank)
    yield Sample("rlprof_step", labels, own.last if own is not None else rank.last_step)
    if own is not None:
        yield Sample("rlprof_step_duration_seconds", labels, float(own.ns[-1]) / 1e9)
        usual = times.median_ns(rank.rank) or 0
        yield Sample("rlprof_step_duration_median_seconds", labels, usual / 1e9)
    for stage, means in times.stage_ns.items():
        if rank.rank in means:
            of_stage = {**labels, "stage": stage}
            yield Sample("rlprof_stage_duration_seconds", of_stage, means[rank.rank] / 1e9)
    if (used := resident(rank)) is not None:
        yield Sample("rlprof_resident_memory_bytes", labels, used)
    if (used := device_memory(rank)) is not None:
        yield Sample("rlprof_device_memory_bytes", labels, used)
    if rank.status is None:
        yield Sample("rlprof_quiet_seconds", labels, run.quiet_s(rank))
    for name, value in rank.metrics.items():
        yield Sample(BACKGROUND + _NO_NAME.sub("_", name), labels, value)


def _labels(labels: Mapping[str, str]) -> str:
    pairs: Sequence[str] = [f'{name}="{_escaped(text)}"' for name, text in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _escaped(text: str) -> str:
    text = text.encode("utf-8", "replace").decode()
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

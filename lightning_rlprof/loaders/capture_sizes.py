"""Estimate how much a configuration will capture, from captures of earlier runs in its directory.

Sizes are those of the files on disk, per step and rank. An earlier run counts if it captured the
same stage with the same options, or with others whose effect on the size is known.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from lightning_rlprof.config.profiler_config import ProfilerConfig
from lightning_rlprof.errors import ConfigError, TraceError
from lightning_rlprof.loaders.ascend.capture_folder import OUTPUT
from lightning_rlprof.loaders.chrome.event_stream import Source
from lightning_rlprof.loaders.load import rank_ends
from lightning_rlprof.records.records import Header
from lightning_rlprof.records.run_directory import (
    capture_in_name,
    rank_directory,
    rank_file,
    rank_files,
    read_header,
)

_MOST_RUNS, _MOST_RANKS = 50, 4  # that are looked at
_PART = 1 << 24  # bytes of a trace whose events are counted
_EVENT = b'"ph":'
_REPORT = re.compile(r".*_step(\d[^.]*)\.nsys-rep")
_ENDINGS = {
    ".trace.json.gz": "torch_profiler",
    "_ascend_pt": "npu_profiler",
    ".nsys-rep": "nsight",
    ".pickle": "memory",
}

FILES_OF = frozenset(_ENDINGS.values())
"""Recorders that write files."""

Range = tuple[float, float]
"""The lowest and the highest value that are likely."""


class _Option(NamedTuple):
    """What an option multiplies a trace of torch.profiler by: its bytes, and its events."""

    name: str
    size: Range
    events: Range


# Of 24,000 to 68,000 events of an MLP and of a transformer, torch 2.13 on a CPU, compressed.
_STACKS = _Option("stacks", (1.5, 1.9), (1.4, 1.7))
_SHAPES = _Option("shapes", (1.7, 1.8), (1.0, 1.0))
_MEMORY = _Option("memory", (1.3, 1.5), (1.4, 1.5))
_DATABASE = 0.3  # of the text format, by MindSpeed-RL's documents


@dataclass
class _Captured:
    """What the captures of one stage hold; ``steps`` are pairs of a rank and one of its steps."""

    steps: set[tuple[int, int]] = field(default_factory=set)
    windows: int = 0
    raw: int = 0
    parsed: int = 0
    unpacked: float = 0.0
    events: float | None = 0.0


@dataclass(frozen=True)
class Estimate:
    """How much a configuration will capture per step and rank.

    Attributes:
        size: Bytes on disk.
        events: Number of events; None if the format of the captures doesn't tell.
        unpacked: Bytes of a trace without compression; None if it isn't compressed.
        raw: Bytes of Ascend captures before they are parsed; 0 if there are none.
        tools: What writes them.
        evidence: The run and the captures that the figures come from, for people.
        missing: Stages without an earlier capture, which the figures leave out.
        world_size: Number of ranks of that run.
    """

    size: Range
    events: Range | None
    unpacked: Range | None
    raw: float
    tools: tuple[str, ...]
    evidence: str
    missing: tuple[str, ...]
    world_size: int


class _Found(NamedTuple):
    header: Header
    captured: _Captured
    size: Range
    events: Range | None
    changes: tuple[str, ...]


def estimate(config: ProfilerConfig, tools_on: Callable[[str], Collection[str]]) -> Estimate | None:
    """Return how much a configuration will capture; None without an earlier capture to tell it.

    The newest run with equal options counts, else the newest one with others of known effect.

    Args:
        config: What will be captured.
        tools_on: Returns the names of the recorders on a kind of device.
    """
    wanted = _stages(config)
    found: dict[tuple[str, str], _Found] = {}
    device = ""
    for run, header, old in _earlier(Path(config.integrated.profile_save_path)):
        tools = FILES_OF & set(tools_on(header.device))
        alike = {tool for tool in tools if _fixed(tool, old) == _fixed(tool, config)}
        if wanted is None and not (old.per_stage and old.integrated.stage == "all"):
            continue  # some of its stages are not there
        captured = _of_run(run, old, alike) if device in ("", header.device) else {}
        for (tool, stage), part in captured.items():
            if wanted is not None and stage not in wanted:
                continue
            device = header.device
            one = _scaled(tool, header, old, config, part)
            before = found.get((tool, stage))
            if one and (before is None or (before.changes and not one.changes)):
                found[tool, stage] = one
        exact = [each for each in found.values() if not each.changes]
        if found and len(exact) >= len(tools) * len(wanted or [""]):
            break
    return _added(found, wanted) if found else None


def _stages(config: ProfilerConfig) -> Sequence[str] | None:
    """Return the stages that have captures of their own, ``""`` for whole steps, None for all."""
    if not config.per_stage:
        return [""]
    chosen = config.integrated.stage
    if chosen == "all":
        return None
    names = [chosen] if isinstance(chosen, str) else chosen
    return [name.replace("-", "_") for name in names]  # as in the names of captures


def _added(found: Mapping[tuple[str, str], _Found], wanted: Sequence[str] | None) -> Estimate:
    parts = [*found.values()]
    events = None
    known = [each.events for each in parts if each.events is not None]
    if known:
        events = (sum(low for low, _ in known), sum(high for _, high in known))
    packed = [each for each in parts if each.captured.unpacked]
    missing = [name for name in wanted or [] if name not in {stage for _, stage in found}]
    return Estimate(
        size=(sum(each.size[0] for each in parts), sum(each.size[1] for each in parts)),
        events=events,
        unpacked=_unpacked(packed) if packed else None,
        raw=sum(
            each.captured.raw / len(each.captured.steps)
            for (tool, _), each in found.items()
            if tool == "npu_profiler"
        ),
        tools=tuple(sorted({tool for tool, _ in found})),
        evidence="; ".join(dict.fromkeys(map(_evidence, parts))),
        missing=tuple(missing),
        world_size=max(each.header.world_size for each in parts),
    )


def _unpacked(parts: Sequence[_Found]) -> Range:
    """Return the bytes of unpacked traces, which grow as the packed ones do."""
    low, high = 0.0, 0.0
    for each in parts:
        part = each.captured
        per_byte = part.unpacked / max(part.raw + part.parsed, 1)
        low, high = low + each.size[0] * per_byte, high + each.size[1] * per_byte
    return low, high


def _evidence(found: _Found) -> str:
    windows = found.captured.windows
    text = f"{windows} capture{'s' * (windows > 1)} of {found.header.run_id}"
    return f"{text}, {' and '.join(found.changes)}" if found.changes else text


def _scaled(
    tool: str, header: Header, old: ProfilerConfig, new: ProfilerConfig, part: _Captured
) -> _Found | None:
    """Return the size per step of captures under other options; None if their effect is unknown."""
    steps = len(part.steps)
    size: Range = (part.raw / steps, part.raw / steps)
    events = None if part.events is None else (part.events / steps, part.events / steps)
    parsed = part.parsed / steps
    changes = []
    if tool == "torch_profiler":
        before, after = _details(old), _details(new)
        for option in sorted(before ^ after):
            added = option in after
            changes.append(f"{'with' if added else 'without'} {option.name} estimated")
            size = _times(size, option.size, added=added)
            events = None if events is None else _times(events, option.events, added=added)
    elif tool == "npu_profiler" and parsed and (format_of := _format(new)) != _format(old):
        if "both" in (format_of, _format(old)):
            return None
        parsed *= _DATABASE if format_of == "db" else 1 / _DATABASE
        changes.append(f"as {format_of} estimated")
    size = (size[0] + parsed, size[1] + parsed)
    return _Found(header, part, size, events, tuple(changes))


def _times(values: Range, factor: Range, *, added: bool) -> Range:
    low, high = factor if added else (1 / factor[1], 1 / factor[0])
    return values[0] * low, values[1] * high


def _details(config: ProfilerConfig) -> set[_Option]:
    """Return the options of torch.profiler whose effect on the size was measured."""
    block = config.integrated
    chosen = {
        _STACKS: config.torch_profiler.with_stack or block.profile_with_module,
        _SHAPES: block.profile_record_shapes,
        _MEMORY: block.profile_with_memory,
    }
    return {option for option, on in chosen.items() if on}


def _format(config: ProfilerConfig) -> str:
    types = config.npu.export_types or [config.integrated.profile_export_type]
    return types[0] if len(types) == 1 else "both"


def _fixed(tool: str, config: ProfilerConfig) -> Any:
    """Return the options that have to be equal, since their effect on the size is unknown."""
    block = config.integrated
    if tool == "memory":
        return config.memory
    if tool == "nsight":
        return config.nsight.worker, config.nsight.controller
    watched = block.profile_with_cpu, block.profile_with_npu, config.token_start, config.token_end
    if tool == "torch_profiler":
        return watched, config.torch_profiler.schedule
    details = block.profile_record_shapes, block.profile_with_memory, block.profile_with_module
    npu = config.npu.model_dump(exclude={"export_types", "analysis_timeout_s"})
    return watched, block.profile_level, block.mstx, details, npu


# ---- what earlier runs captured


def _earlier(folder: Path) -> Iterator[tuple[Path, Header, ProfilerConfig]]:
    """Yield the runs of a directory that this version can read, newest first."""
    if not folder.is_dir():
        return
    runs = [run for run in folder.iterdir() if run.is_dir()]
    runs.sort(key=lambda run: (run.stat().st_mtime, run.name), reverse=True)
    for run in runs[:_MOST_RUNS]:
        try:
            header = read_header(next(iter(rank_files(run))))
            # not `build`, which lays variables of this process over it
            config = ProfilerConfig.model_validate({**header.config, "model": None})
        except (StopIteration, TraceError, ConfigError, ValidationError):
            continue
        yield run, header, config


def _of_run(
    run: Path, config: ProfilerConfig, tools: Collection[str]
) -> dict[tuple[str, str], _Captured]:
    """Return what the ranks of a run captured with some tools, by tool and stage."""
    found: dict[tuple[str, str], _Captured] = {}
    ranks = [int(file.stem[5:]) for file in rank_files(run)]
    ranks = [rank for rank in ranks if rank_directory(run, rank).is_dir()]
    for rank in ranks[:_MOST_RANKS]:
        folder = rank_directory(run, rank)
        for path in sorted(folder.glob("*")) + sorted(folder.glob("*/*")):
            tool = next((name for end, name in _ENDINGS.items() if path.name.endswith(end)), "")
            report = _REPORT.fullmatch(path.name)  # of nsys, which has no folder of its own
            window = capture_in_name(f"step-{report[1]}" if report else path.parent.name)
            if tool not in tools or window is None or path.is_symlink():
                continue
            first, stage = window
            part = found.setdefault((tool, stage), _Captured())
            part.windows += 1
            part.steps |= {(rank, step) for step in _steps_from(first, run, rank, config)}
            _measure(path, tool, part)
    return found


def _steps_from(first: int, run: Path, rank: int, config: ProfilerConfig) -> list[int]:
    """Return the steps of a capture that begins at one."""
    steps = [first]
    last = (rank_ends(rank_file(run, rank)).last or 0) if config.joins_steps else 0
    while steps[-1] < last and config.wants_step(steps[-1] + 1):
        steps.append(steps[-1] + 1)
    return steps


def _measure(path: Path, tool: str, part: _Captured) -> None:
    """Add the size of one capture, and its events where a part of the file tells their number."""
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    parsed = [file for file in files if OUTPUT in file.parts]
    sizes = {file: file.stat().st_size for file in files}
    part.parsed += sum(sizes[file] for file in parsed)
    part.raw += sum(size for file, size in sizes.items() if file not in parsed)
    views = [file for file in parsed if file.name == "trace_view.json"]
    traces = [path] if tool == "torch_profiler" else views
    for trace in traces:
        try:
            events, unpacked = _count_events(trace)
        except TraceError:  # damaged, or in a format that isn't installed
            part.events = None
            continue
        part.unpacked += unpacked if tool == "torch_profiler" else 0
        part.events = None if part.events is None else part.events + events
    if not traces:
        part.events = None


def _count_events(trace: Path) -> tuple[float, float]:
    """Return the number of events of a trace and its bytes, from its first 16 MB."""
    with Source(trace) as source:
        part = memoryview(bytearray(_PART))
        read = 0
        while read < _PART and (count := source.readinto(part[read:])):
            read += count
        share = source.share_read(0) if read == _PART else 1.0
        if source.problem is not None:
            raise TraceError(f"{trace}: {source.problem}")
    return bytes(part[:read]).count(_EVENT) / share, read / share

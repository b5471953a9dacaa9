"""The first screen of a run as facts: how long a step takes, on what, what comes first, doubts.

The terminal, the end of a training, the HTML report and notebooks draw the same `Summary`, so they
cannot tell different numbers. `summary_lines` is its text.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lightning_rlprof.analysis.device.breakdown import breakdown, device_time
from lightning_rlprof.analysis.device.losses import DeviceLoss, loss_texts
from lightning_rlprof.analysis.device.timeline import (
    device_losses,
    idle,
)
from lightning_rlprof.analysis.device.work import device_work
from lightning_rlprof.analysis.diagnosis.data_quality import Quality
from lightning_rlprof.analysis.diagnosis.diagnosis import (
    Diagnosis,
    diagnose,
    no_problem,
    restored,
)
from lightning_rlprof.analysis.diagnosis.problem import Finding
from lightning_rlprof.analysis.efficiency.throughput import efficiency
from lightning_rlprof.analysis.kernels import kernels
from lightning_rlprof.analysis.sizing.speed import Speed
from lightning_rlprof.analysis.stages import StepTimes, roles, round_ns, stages, step_times
from lightning_rlprof.analysis.steps.step_selection import MIN_STEPS
from lightning_rlprof.records.notes import Code
from lightning_rlprof.records.records import OPTIMIZER_STEP, ROLLOUT_AND_UPDATES
from lightning_rlprof.report.terminal import bar, count_of, duration, percent, size
from lightning_rlprof.system.location import plain
from lightning_rlprof.tables.spans import OF_RANK_FILES, Spans, answer
from lightning_rlprof.tables.table import Table, figure

STAGE_TABLES = frozenset({"stages", "steps", "gaps"})
"""Tables that say nothing of a run without stages."""

UNITS = {
    "": "",
    OPTIMIZER_STEP: " of the optimizer",
    ROLLOUT_AND_UPDATES: ", each a rollout and its updates,",
}
"""What follows the word *steps*, by `Summary.step_unit`."""
_MAX_FIRST = 3
_BAR_WIDTH, _MAX_BARS, _MAX_LINE = 24, 5, 100
_MAX_KERNELS = 10


@dataclass(frozen=True)
class SummaryPart:
    """A part of the mean step: a stage, ``waiting`` in it, or ``untraced`` time.

    Attributes:
        name: The part.
        stage: The stage that gives its color.
        kind: ``stage``, ``waiting`` or ``untraced``.
        share: Of the mean step.
        mean_ns: Per step, the mean of its ranks.
    """

    name: str
    stage: str
    kind: str
    share: float
    mean_ns: int


@dataclass(frozen=True)
class Summary:
    """The first screen of a run. Times are of included steps, each the mean of its ranks.

    Attributes:
        run: Where it is.
        devices: Kinds of devices that it ran on.
        ranks: How many have recorded.
        steps: How many were recorded.
        step_unit: What each is, as of `Header`; empty where the program or its framework says.
        included: How many of them count.
        left_out: How many of the others there are, by state such as ``warm-up``.
        median_ns: Median step; it, quartiles and mean are None with fewer than three steps.
        quartiles_ns: Half of the steps take between these two.
        mean_ns: Mean step.
        tokens_per_s: Tokens of all ranks per second of step time.
        token_stage: The stage that counted them.
        parts: What the mean step consists of, most time first, untraced last.
        device: Share of each category of device time, of a run without stages.
        idle_cause: Most frequent cause of idle time in it.
        losses: What is known to be missing of the devices' work.
        first: At most three: problems in their order, then ideas.
        speed: How fast stages are, of what is attainable.
        undecided: Checks for problems that the run has no data for.
        captures_unread: Whether tables of profilers, which can take minutes, were left out.
        quality: Whether the recording is complete.
    """

    run: Path
    devices: tuple[str, ...]
    ranks: int
    steps: int
    step_unit: str
    included: int
    left_out: Mapping[str, int]
    median_ns: int | None
    quartiles_ns: tuple[int, int] | None
    mean_ns: int | None
    tokens_per_s: float | None
    token_stage: str | None
    parts: tuple[SummaryPart, ...]
    device: Mapping[str, float]
    idle_cause: str | None
    losses: tuple[DeviceLoss, ...]
    first: tuple[Finding, ...]
    speed: tuple[Speed, ...]
    undecided: int
    captures_unread: bool
    quality: Quality

    def __str__(self) -> str:
        """Return the lines that a terminal shows."""
        return "\n".join(summary_lines(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for JSON."""
        plain_facts = asdict(replace(self, first=(), quality=Quality(()), losses=()))
        return plain_facts | {
            "run": str(self.run),
            "losses": [each.to_dict() for each in self.losses],
            "first": [each.to_dict() for each in self.first],
            "quality": [each._asdict() for each in self.quality.checks],
        }


def summary(spans: Spans, *, captures: bool = False, diagnosis: Diagnosis | None = None) -> Summary:
    """Sum up a run; what comes first, second and third is `diagnose`'s.

    Args:
        spans: The run.
        captures: Whether to read what profilers captured, which can take minutes.
        diagnosis: What `diagnose` found some steps ago, of a running job; None to ask it now.
    """
    if diagnosis is not None:
        return _summary(spans, captures, diagnosis)
    has_captures = not spans.tables.keys() <= {*OF_RANK_FILES}
    name = "summary-of-captures" if captures and has_captures else "summary"
    found = answer(spans, name, Summary, partial(_summary, captures=captures))
    if found.run == spans.path:
        return found
    return replace(found, run=spans.path, first=restored(found.first, spans.path))


def _summary(spans: Spans, captures: bool, diagnosis: Diagnosis | None = None) -> Summary:
    own = spans if captures else without_captures(spans)
    times, diagnosis = step_times(spans), diagnose(own) if diagnosis is None else diagnosis
    walls = times.wall_ns[times.included]
    enough = len(walls) >= MIN_STEPS
    low, median, high = np.quantile(walls, (0.25, 0.5, 0.75)) if enough else (0.0, 0.0, 0.0)
    has_stages = len(spans.rows(kind="stage")) > 0
    time = None if has_stages else device_time(own)
    return Summary(
        run=spans.path,
        devices=tuple(sorted({header.hardware for header in spans.headers.values()})),
        ranks=len(spans.ranks),
        steps=len(times.numbers),
        step_unit=_step_unit(spans),
        included=len(walls),
        left_out=times.left_out,
        median_ns=round_ns(median) if enough else None,
        quartiles_ns=(round_ns(low), round_ns(high)) if enough else None,
        mean_ns=round_ns(walls.mean()) if enough else None,
        tokens_per_s=times.tokens_per_s if enough else None,
        token_stage=None if times.tokens is None else times.tokens[0],
        parts=_parts(times) if len(walls) else (),
        device={} if time is None else time.shares,
        idle_cause=None if time is None else time.idle_cause,
        losses=diagnosis.losses,
        first=(*diagnosis.problems, *diagnosis.ideas)[:_MAX_FIRST],
        speed=diagnosis.speed,
        undecided=len(diagnosis.undecided),
        captures_unread=own is not spans,
        quality=diagnosis.quality,
    )


def _step_unit(spans: Spans) -> str:
    if any(note.code == Code.STEPS_JOINED for note in spans.notes):
        return ROLLOUT_AND_UPDATES
    return spans.headers[min(spans.headers)].step_unit if spans.headers else ""


def _parts(times: StepTimes) -> tuple[SummaryPart, ...]:
    found = []
    for part in times.parts:
        own = times.statistics(part)
        if own.mean or part.kind == "untraced":
            found.append(SummaryPart(part.name, part.stage, part.kind, own.share or 0.0, own.mean))
    return tuple(found)


def without_captures(spans: Spans) -> Spans:
    """Return the run with the tables of its own files alone; itself if it has no others."""
    own = {name: read for name, read in spans.tables.items() if name in OF_RANK_FILES}
    return spans if len(own) == len(spans.tables) else replace(spans, tables=own)


def is_trace(spans: Spans) -> bool:
    """Return whether a run is a profiler's trace without rlprof and without stages."""
    ours = any(header.config for header in spans.headers.values())
    return not ours and not len(spans.rows(kind="stage"))


def is_device_trace(spans: Spans) -> bool:
    """Return whether a run is such a trace with device work, or with some that is known lost."""
    return is_trace(spans) and bool(device_work(spans).tables or device_losses(spans))


def lead_tables(spans: Spans) -> list[Table]:
    """Return the table of stages, that of roles if there are several, and that of efficiency.

    The last is `throughput` of the whole job, if MFU or the bandwidth of decoding is known. Of a
    device trace it is breakdown, largest kernels, and idle time.
    """
    if is_device_trace(spans):
        return [breakdown(spans), kernels(spans, top=_MAX_KERNELS), idle(spans)]
    return answer(spans, "lead-tables", list[Table], _lead_tables)


def _lead_tables(spans: Spans) -> list[Table]:
    several, rates = roles(spans), efficiency(spans)
    tables = [stages(spans)] if several.abstained is not None else [stages(spans), several]
    return tables if rates is None else [*tables, rates]


def summary_lines(found: Summary, *, ended: str = "", since: int | None = None) -> list[str]:
    """Return the lines that a training prints when it ends; no more than twelve.

    Args:
        found: The run.
        ended: How the training ended, unless it finished: ``stopped by ValueError``.
        since: First step that was read, if that is not the first one of the run.
    """
    lines = [f"rlprof: {run_line(found, since)}{f', {ended}' if ended else ''}"]
    lines += device_lines(found)
    if found.median_ns is not None:
        lines += _bars(found)
        lines += first_lines(found)
    path = shlex.quote(str(found.run))
    quality, *doubts = quality_lines(found)
    lines.append(f"{quality}, in {path} ({_bytes(found.run)})")
    if doubts:
        lines.append(f"{doubts[0]} (and {len(doubts) - 1} more)" if doubts[1:] else doubts[0])
    lines.append(f"See it:    rlprof report {path} --open")
    return [plain(line) for line in lines]


def speed_lines(found: Iterable[Speed]) -> list[str]:
    """Return in one line how fast stages are; nothing if none could be judged."""
    judged = [each for each in found if each.low is not None]
    texts = [each.line for each in judged if each.verdict != "normal"]
    if normal := len(judged) - len(texts):
        texts.append(f"{count_of(normal, 'stage')} normal")
    return [f"Speed: {', '.join(texts)}"] if texts else []


def run_line(found: Summary, since: int | None = None) -> str:
    """Return how many steps and ranks there are, how long a step takes, and tokens per second."""
    unit = UNITS.get(found.step_unit, "")
    what = count_of(found.steps, "step") + unit
    if since is not None:
        what = f"the last {what} (from step {since:,} on)"
    text = f"{what} on {count_of(found.ranks, 'rank')}"
    left_out = f" ({without(found)})" if found.left_out else ""
    if found.median_ns is None or found.mean_ns is None:
        return f"{text}{left_out}; {MIN_STEPS} are needed to show where time goes"
    text += f", median {duration(found.median_ns)}, mean {duration(found.mean_ns)}{left_out}"
    if found.tokens_per_s is not None:
        text += f", {figure(found.tokens_per_s)} tokens/s"
    return text


def device_lines(found: Summary) -> list[str]:
    """Return in one line what devices did in a run without stages, and what of any is unknown."""
    unknown = "; ".join(loss_texts(each for each in found.losses if each.hides_time))
    shares = []
    for name, share in found.device.items():
        if (text := f"{share:.0%}") != "0%":
            cause = f" (mostly {found.idle_cause})" if name == "idle" else ""
            shares.append(f"{name} {text}{cause}")
    if shares:
        return [f"Device time: {', '.join(shares)}.{f' {unknown}.' * bool(unknown)}"]
    return [f"Device time: {unknown}."] if unknown else []


def without(found: Summary) -> str:
    """Return which steps medians and means leave out: ``without 2 warm-up steps``."""
    if not found.left_out:
        return ""
    parts = [f"{steps:,} {state}" for state, steps in found.left_out.items()]
    word = "step" if sum(found.left_out.values()) == 1 else "steps"
    return f"without {' and '.join(parts)} {word}"


def quality_lines(found: Summary) -> list[str]:
    """Return one line if the data is complete; else how many doubts there are, and each in a line.

    Example::

        Recording: 2 doubts
          ranks  1 of 2 are missing: 1
          files  rank 0: recording ended early
    """
    doubts = found.quality.doubts
    width = max((len(doubt.name) for doubt in doubts), default=0)
    return [found.quality.line, *(f"  {each.name:{width}}  {each.detail}" for each in doubts)]


def first_lines(found: Summary) -> list[str]:
    """Return the first problem with its price and what to try, and the next in a line."""
    if not found.first:
        return [nothing_found(found)]
    top, lines = found.first[0], []
    label = "Improve first" if top.kind == "idea" else "Fix first"
    lines.append(f"{label}: {top.heading}{_price(top)}")
    if len(found.first) > 1:
        lines.append(f"Then: {found.first[1].heading}{_price(found.first[1])}")
    lines += speed_lines(found.speed)
    lines = [line if len(line) <= _MAX_LINE else f"{line[: _MAX_LINE - 1]}…" for line in lines]
    act = f"  {top.act}"
    # A long text is cut to its first sentence, which stays whole because it may contain a command.
    lines.insert(1, act if len(act) <= _MAX_LINE else act.partition(". ")[0])
    return lines


def finding_cost(found: Finding, device: str) -> str:
    """Return what a problem costs, and how sure that is; ``device`` is what the time is of."""
    sure = f"{found.confidence} confidence"
    if found.price is None:
        return sure
    return f"{found.price.text}, {duration(found.price.ns)} of {device} time; {sure}"


def finding_place(found: Finding) -> str:
    """Return where the evidence begins; a viewer of the exported trace counts from the same zero.

    Empty if that is not known.
    """
    place = found.place
    if place is None or place.from_ns is None or place.to_ns is None:
        return ""
    step = "" if place.step is None else f", step {place.step}"
    return f"rank {place.rank}{step}, {place.from_ns / 1e9:.6f} s to {place.to_ns / 1e9:.6f} s"


def finding_commands(found: Finding, run: str) -> list[str]:
    """Return the command that shows more, and the one that prints the events.

    Args:
        found: The problem.
        run: How the commands call the run, as a shell takes it.
    """
    query = found.query
    if not query:
        return [found.look]
    # Double quotes are used if that is safe, since SQL contains single ones.
    quoted = shlex.quote(query) if set(query) & set('"$`\\!') else f'"{query}"'
    return [found.look, f"rlprof sql {run} {quoted}"]


def nothing_found(found: Summary) -> str:
    """Return that no problem was found, and how much could not be decided."""
    if found.captures_unread:
        more = f"For captures: rlprof findings {shlex.quote(str(found.run))}"
        return f"No problem found in what was recorded outside captures. {more}"
    return no_problem(found.undecided, found.losses)


def _price(found: Finding) -> str:
    price = found.price
    # This is the cost of the job, with warm-up and time outside steps, unlike the shares above.
    return "" if price is None else f" ({price.amount})"


def _bars(found: Summary) -> list[str]:
    """Return the largest parts of the mean step with a bar each, and the others as one."""
    parts = sorted(found.parts, key=lambda part: -part.share)
    if all(part.kind == "untraced" for part in parts):
        return ['  No stage was marked. Mark one: with stage("actor_generate"): ...']
    shown, rest = parts[: _MAX_BARS - 1], parts[_MAX_BARS - 1 :]
    if len(rest) == 1:
        shown, rest = parts, []
    rows = [(part.name, part.share, part.mean_ns) for part in shown]
    if rest:
        share, ns = sum(part.share for part in rest), sum(part.mean_ns for part in rest)
        rows.append((f"{len(rest)} others", share, ns))
    width = max(len(name) for name, _, _ in rows)
    most = max(share for _, share, _ in rows) or 1.0
    return [
        f"  {name:{width}}  {percent(share):>5}  {bar(share / most, _BAR_WIDTH)}  {duration(ns)}"
        for name, share, ns in rows
    ]


def _bytes(path: Path) -> str:
    files = [path] if path.is_file() else path.rglob("*")
    return size(sum(file.stat().st_size for file in files if file.is_file()))

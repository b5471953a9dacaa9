"""A run in a dozen lines: step time, where it goes, what to fix first, and what to type next."""

import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_rlprof.analysis.advice.advice import advice
from lightning_rlprof.analysis.findings.data_quality import data_quality
from lightning_rlprof.analysis.findings.finding import rows_of
from lightning_rlprof.analysis.findings.findings import findings
from lightning_rlprof.analysis.steps.step_selection import FEWEST
from lightning_rlprof.report.advice_cards import advice_cards
from lightning_rlprof.report.overview import Headline, headlines, overview
from lightning_rlprof.report.step_series import StepSeries
from lightning_rlprof.report.terminal import duration, percent, size
from lightning_rlprof.system.plain_text import plain
from lightning_rlprof.tables.spans import OF_RANK_FILES, Spans
from lightning_rlprof.tables.table import figure

_BAR, _ROWS, _LINE = 24, 5, 100
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_NO_MARK = 'No stage was marked. Mark one: with stage("actor_generate"): ...'


def run_summary(spans: Spans, *, ended: str = "") -> list[str]:
    """Return the lines that a training prints when it ends; no more than twelve.

    Tables of profilers are left out, since reading them can take minutes.

    Args:
        spans: The run.
        ended: How the training ended, unless it finished: ``stopped by ValueError``.
    """
    whole, spans = spans, replace(spans, tables={})
    series, path = StepSeries(spans), shlex.quote(str(spans.path))
    lines = [f"rlprof: {run_line(series)}{_comma(ended)}"]
    if int(series.included.sum()) >= FEWEST:
        lines += _bars(series)
        lines += what_to_fix(whole)
    lines.append(f"Recording: {_quality(spans)}, in {path} ({_bytes(spans.path)})")
    lines.append(f"See it:    rlprof report {path} --open")
    return [plain(line) for line in lines]


def run_line(series: StepSeries) -> str:
    """Return how many steps and ranks there are, how long a step takes, and tokens per second."""
    steps, ranks = len(series.numbers), len(series.spans.ranks)
    text = f"{_count(steps, 'step')} on {_count(ranks, 'rank')}"
    some = series.included
    if int(some.sum()) < FEWEST:
        return f"{text}; {FEWEST} are needed to show where time goes"
    wall = series.wall_ns[some]
    text += f", median {duration(int(np.median(wall)))}, mean {duration(int(wall.mean()))}"
    if series.tokens is not None:
        rate = float(series.tokens[1][some].sum() / series.training_ns[some].sum() * 1e9)
        text += f", {figure(rate)} tokens/s"
    return text


def _comma(text: str) -> str:
    return f", {text}" if text else ""


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _bars(series: StepSeries) -> list[str]:
    """Return the largest parts of the mean step with a bar each, and the others as one."""
    found = overview(series)
    parts = [*found.segments, *found.small]
    if all(part.kind == "untraced" for part in parts):
        return [f"  {_NO_MARK}"]
    parts.sort(key=lambda part: -part.share)
    shown, rest = parts[: _ROWS - 1], parts[_ROWS - 1 :]
    if len(rest) == 1:
        shown, rest = parts, []
    rows = [(part.name, part.share, part.time) for part in shown]
    if rest:
        whole = float(series.wall_ns[series.included].mean())
        share = sum(part.share for part in rest)
        rows.append((f"{len(rest)} others", share, duration(int(share * whole))))
    width = max(len(name) for name, _, _ in rows)
    most = max(share for _, share, _ in rows)
    return [
        f"  {name:{width}}  {percent(share):>5}  {_bar(share / most):{_BAR}}  {time}"
        for name, share, time in rows
    ]


def _bar(part: float) -> str:
    eighths = round(8 * _BAR * part)
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def what_to_fix(spans: Spans, *, tables: bool = False) -> list[str]:
    """Return the first finding with its price and what to try, and the next in a line.

    Args:
        spans: The run.
        tables: Whether to read tables of profilers, too, which can take minutes.
    """
    own = _without_profilers(spans)
    first = headlines(rows_of(findings(spans if tables else own)))
    if not first:
        text = "No problem found"
        more = f" outside captures. For these: rlprof findings {shlex.quote(str(spans.path))}"
        return [
            f"{text}{more}" if len(own.tables) < len(spans.tables) and not tables else f"{text}."
        ]
    top, lines = first[0], []
    label = "Improve first" if top.word == "takes" else "Fix first"
    lines.append(f"{label}: {top.title}{_price(top)}")
    act = f"  {top.act}"
    if len(first) > 1:
        lines.append(f"Then: {first[1].title}{_price(first[1])}")
    lines = [line if len(line) <= _LINE else f"{line[: _LINE - 1]}…" for line in lines]
    # Of a long one the first sentence, whole: it may have a command.
    lines.insert(1, act if len(act) <= _LINE else act.partition(". ")[0])
    return lines


def _without_profilers(spans: Spans) -> Spans:
    """Return the run with the tables of its own files alone."""
    own = {name: read for name, read in spans.tables.items() if name in OF_RANK_FILES}
    return replace(spans, tables=own)


def what_to_set(spans: Spans, *, tables: bool = False) -> list[str]:
    """Return the first advice in one line with the command that lists all; nothing without any.

    Args:
        spans: The run.
        tables: Whether to read tables of profilers, too, which can take minutes.
    """
    cards = advice_cards(advice(spans if tables else _without_profilers(spans)))
    path = shlex.quote(str(spans.path))
    return [f"Set: {cards[0].title}. See: rlprof advise {path}"] if cards else []


def _price(one: Headline) -> str:
    if not one.share:
        return ""
    # Of the job: warm-up and what is outside steps included, unlike the shares above.
    return f" ({'' if one.word == 'takes' else 'costs '}{one.share} of the job)"


def _quality(spans: Spans) -> str:
    """Return ``complete``, or the first check of the data that failed."""
    failed = [row for row in rows_of(data_quality(spans)) if row["state"] == "warn"]
    return f"{failed[0]['check']}: {failed[0]['detail']}" if failed else "complete"


def _bytes(path: Path) -> str:
    files = [path] if path.is_file() else path.rglob("*")
    return size(sum(file.stat().st_size for file in files if file.is_file()))
